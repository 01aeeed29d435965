// Package upstream is the router's HTTP client towards engines: a small pool of connections a worker, requests written
// in pieces, and responses read in batches of whole server-sent events with a deadline on every read.
//
// Closing a leg closes its connection, which is how a worker learns that a request is cancelled. The package knows no
// dialect and no policy: what the events mean, and whom to dial, is its caller's business.
package upstream

import (
	"context"
	"net"
	"sync"
	"time"

	"github.com/headrace/headrace/router/socket"
)

// SilenceTimeout is the default of the Config's.
const SilenceTimeout = 3 * time.Second

// Config has useful zero values.
type Config struct {
	DialTimeout    time.Duration // 1 s
	SilenceTimeout time.Duration // 3 s: a worker that says nothing for so long is dead or stopped
	WriteTimeout   time.Duration // 10 s for each write
	// FinishTimeout bounds how long a leg that Finish was called on may take to end by itself. 1 s
	FinishTimeout time.Duration
	IdleTimeout   time.Duration // 30 s
	IdlePerWorker int           // 64
	EventBytesMax int           // 8 MiB, as openai.EventBytesMax: the longest event, and the longest body of an error
	// Dial connects to a worker. TCP
	Dial func(ctx context.Context, addr string) (net.Conn, error)
}

func (c *Config) setDefaults() {
	def := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	def(&c.DialTimeout, time.Second)
	def(&c.SilenceTimeout, SilenceTimeout)
	def(&c.WriteTimeout, 10*time.Second)
	def(&c.FinishTimeout, time.Second)
	def(&c.IdleTimeout, 30*time.Second)
	if c.IdlePerWorker == 0 {
		c.IdlePerWorker = 64
	}
	if c.EventBytesMax == 0 {
		c.EventBytesMax = 8 << 20
	}
	if c.Dial == nil {
		d := net.Dialer{Timeout: c.DialTimeout}
		c.Dial = func(ctx context.Context, addr string) (net.Conn, error) { return d.DialContext(ctx, "tcp", addr) }
	}
}

// Target is a worker to dial.
type Target struct{ ID, Addr string }

// Client holds the idle connections and knows every leg. Safe for concurrent use.
type Client struct {
	cfg Config
	wg  sync.WaitGroup // legs' goroutines

	mu     sync.Mutex
	idle   map[string][]*conn // by address, the most recently used last
	legs   *Leg               // the newest of those in flight
	count  int                // of them
	closed bool
}

// New makes a Client.
func New(cfg Config) *Client {
	cfg.setDefaults()
	return &Client{cfg: cfg, idle: map[string][]*conn{}}
}

// Open sends r to t. The answer, or the reason why there is none, comes on the leg's channel.
func (c *Client) Open(t Target, r Request) *Leg {
	ctx, cancel := context.WithCancel(context.Background())
	l := &Leg{Target: t, C: make(chan Batch, batchesAhead), client: c, request: r, ctx: ctx, cancel: cancel, done: make(chan struct{}), written: make(chan struct{})}
	l.heard.Store(time.Now().UnixNano())
	if !c.add(l) {
		cancel()
	}
	go l.run()
	return l
}

// add takes a leg into the books; false when the client is closed.
func (c *Client) add(l *Leg) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if l.older = c.legs; l.older != nil {
		l.older.newer = l
	}
	c.legs = l
	c.count++
	c.wg.Add(1)
	return !c.closed
}

// remove undoes add.
func (c *Client) remove(l *Leg) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if l.older != nil {
		l.older.newer = l.newer
	}
	if l.newer != nil {
		l.newer.older = l.older
	} else {
		c.legs = l.older
	}
	l.older, l.newer = nil, nil
	c.count--
}

// FinishTimeout is how long legs that finish or linger may take.
func (c *Client) FinishTimeout() time.Duration { return c.cfg.FinishTimeout }

// Keep closes the idle connections to all addresses but those for which keep says yes.
func (c *Client) Keep(keep func(addr string) bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for addr, conns := range c.idle {
		if keep(addr) {
			continue
		}
		for _, cn := range conns {
			cn.Close()
		}
		delete(c.idle, addr)
	}
}

// CloseIdle closes connections that were idle for longer than the timeout.
func (c *Client) CloseIdle(now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for addr, conns := range c.idle {
		n := 0 // the oldest come first
		for n < len(conns) && now.Sub(conns[n].idleSince) > c.cfg.IdleTimeout {
			conns[n].Close()
			n++
		}
		if n == len(conns) {
			delete(c.idle, addr)
		} else if n > 0 {
			c.idle[addr] = append(conns[:0:0], conns[n:]...)
		}
	}
}

// Close cancels all legs, closes all connections and waits for the legs' goroutines.
func (c *Client) Close() {
	c.mu.Lock()
	c.closed = true
	legs := make([]*Leg, 0, c.count)
	for l := c.legs; l != nil; l = l.older {
		legs = append(legs, l)
	}
	c.mu.Unlock()
	for _, l := range legs {
		l.abort()
	}
	c.wg.Wait()
	c.Keep(func(string) bool { return false })
}

// Counts returns the number of legs in flight and of idle connections.
func (c *Client) Counts() (legs, idle int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, conns := range c.idle {
		idle += len(conns)
	}
	return c.count, idle
}

// freshFor is how long a connection counts as alive without a look, which costs a system call.
const freshFor = 20 * time.Millisecond

// take returns an idle connection that the worker has not closed meanwhile, or nil.
func (c *Client) take(addr string, now time.Time) *conn {
	for {
		c.mu.Lock()
		conns := c.idle[addr]
		if len(conns) == 0 {
			c.mu.Unlock()
			return nil
		}
		cn := conns[len(conns)-1]
		conns[len(conns)-1] = nil
		c.idle[addr] = conns[:len(conns)-1]
		c.mu.Unlock()
		idle := now.Sub(cn.idleSince)
		if idle <= cn.idleMax && (idle < freshFor && cn.br.Buffered() == 0 || cn.alive()) {
			return cn
		}
		cn.Close()
	}
}

func (c *Client) put(addr string, cn *conn, now time.Time) {
	cn.idleSince = now
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed || len(c.idle[addr]) >= c.cfg.IdlePerWorker {
		cn.Close()
		return
	}
	c.idle[addr] = append(c.idle[addr], cn)
}

func (c *Client) dial(ctx context.Context, addr string) (*conn, error) {
	nc, err := c.cfg.Dial(ctx, addr) // Go sets TCP_NODELAY on every TCP connection
	if err != nil {
		return nil, err
	}
	return newConn(socket.New(nc), c.cfg.SilenceTimeout), nil
}
