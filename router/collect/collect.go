// Package collect follows what engines say of themselves, our own and others alike: the metrics that each shows over
// HTTP, under vLLM's names, and the KV events that it publishes over ZeroMQ. It dials only the workers it is told to
// follow, decides nothing, and must not know requests, policies or the registry.
package collect

import (
	"context"
	"io"
	"log/slog"
	"maps"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Worker is an engine to follow.
type Worker struct {
	ID          string
	Incarnation string // changes with its process
	Addr        string // host:port of its HTTP server
	// Events and EventsReplay are host:port of its KV events' publisher and their replay, "" for none. Further
	// data-parallel ranks have the ports behind these.
	Events, EventsReplay string
}

// Config of a Collector. Zero values are defaults.
type Config struct {
	Interval time.Duration // 1 s between two looks at a worker's metrics, some more or less
	Timeout  time.Duration // 2 s for one look
	Stale    time.Duration // 5 s: figures older than that are not used
	// Own, when set, tells how many requests this router has at a worker, so that the others can be told from them.
	Own func(worker string) int64

	// Fetch gets a worker's metrics; HTTP.
	Fetch func(ctx context.Context, addr string) (io.ReadCloser, error)
	// Dial connects to a publisher; TCP.
	Dial func(ctx context.Context, addr string) (net.Conn, error)

	// Sink, when set, takes KV events beside the Collector itself, which keeps account of the blocks that each engine holds.
	Sink Sink

	Logger *slog.Logger
}

const (
	looksRateMax = 100 // a second, over all workers: larger fleets are looked at less often
	backOffMax   = 15  // intervals, after failures
)

func (c *Config) setDefaults() (closeIdle func()) {
	for _, d := range []struct {
		v   *time.Duration
		def time.Duration
	}{{&c.Interval, time.Second}, {&c.Timeout, 2 * time.Second}, {&c.Stale, 5 * time.Second}} {
		if *d.v <= 0 {
			*d.v = d.def
		}
	}
	if c.Own == nil {
		c.Own = func(string) int64 { return 0 }
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	if c.Dial == nil {
		c.Dial = overTCP
	}
	closeIdle = func() {}
	if c.Fetch == nil {
		c.Fetch, closeIdle = overHTTP()
	}
	return closeIdle
}

// Collector follows workers. Its methods are safe for concurrent use.
type Collector struct {
	cfg       Config
	ctx       context.Context
	stop      context.CancelFunc
	closeIdle func()
	followers atomic.Pointer[map[string]*follower] // by worker; replaced, never changed

	mu      sync.Mutex // guards what follows
	closed  bool
	running sync.WaitGroup
}

// New makes a Collector that follows nobody yet. Close must be called in the end.
func New(cfg Config) *Collector {
	c := &Collector{closeIdle: cfg.setDefaults(), cfg: cfg}
	c.cfg = cfg
	c.ctx, c.stop = context.WithCancel(context.Background())
	c.followers.Store(&map[string]*follower{})
	return c
}

// Close stops following and waits until nothing runs any more. It may be called again.
func (c *Collector) Close() {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	c.stop()
	c.running.Wait()
	c.closeIdle()
}

// Follow makes workers those that are followed. What is known of one that is a new process is forgotten.
func (c *Collector) Follow(workers []Worker) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return
	}
	old := *c.followers.Load()
	followers := make(map[string]*follower, len(workers))
	for _, w := range workers {
		before := old[w.ID]
		if before != nil && before.w == w {
			followers[w.ID] = before
			continue
		}
		f := &follower{c: c, w: w, before: before}
		f.ctx, f.stop = context.WithCancel(c.ctx)
		followers[w.ID] = f
	}
	c.followers.Store(&followers)
	for id, f := range old {
		if followers[id] != f {
			f.stop()
		}
	}
	for id, f := range followers {
		if old[id] != f {
			f.start(&c.running)
		}
	}
}

// interval is the time between two looks, which many workers share.
func (c *Collector) interval() time.Duration {
	return max(c.cfg.Interval, time.Duration(len(*c.followers.Load()))*time.Second/looksRateMax)
}

// Figures are what a worker last said of itself, if that is not too long ago.
func (c *Collector) Figures(worker string) (Figures, bool) {
	f := (*c.followers.Load())[worker]
	if f == nil {
		return Figures{}, false
	}
	fig := f.figures.Load()
	if fig == nil || time.Since(fig.At) > c.cfg.Stale {
		return Figures{}, false
	}
	return *fig, true
}

// each calls f with all followers, in order.
func (c *Collector) each(f func(*follower)) {
	followers := *c.followers.Load()
	for _, id := range slices.Sorted(maps.Keys(followers)) {
		f(followers[id])
	}
}

// follower follows one process of one worker.
type follower struct {
	c      *Collector
	w      Worker
	before *follower // the one that this takes the place of
	ctx    context.Context
	stop   context.CancelFunc
	done   chan struct{} // closed when nothing of it runs any more

	figures  atomic.Pointer[Figures] // the last that came
	looks    atomic.Uint64
	failures atomic.Uint64
	problem  atomic.Pointer[string] // of the last look, nil for none

	streams atomic.Pointer[[]*stream] // by rank
}

func (f *follower) start(running *sync.WaitGroup) {
	f.done = make(chan struct{})
	running.Go(func() {
		defer close(f.done)
		defer f.stop()
		if f.before != nil {
			<-f.before.done
			f.before = nil
		}
		var listening sync.WaitGroup
		defer listening.Wait()
		f.listen(1, &listening)
		f.scrape(func(x *Figures) { f.listen(x.Ranks, &listening) })
	})
}
