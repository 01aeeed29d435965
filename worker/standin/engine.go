package standin

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/headrace/headrace/worker/api"
	"github.com/headrace/headrace/worker/kv"
)

// Config of an Engine. Zero values take the defaults named beside the fields.
type Config struct {
	Model string // as clients name it ("stand-in")
	Role  string // for status
	Table Table  // DefaultTable
	// Seed is what answers depend on beside the request. Engines that share requests need the same.
	Seed uint64
	// Events, when set, is told of the cache's contents, and flushed once a step.
	Events interface {
		kv.Watcher
		Flush()
	}
	// Peers is where prefill engines announce KV to this one (nil: it takes none). Close closes it.
	Peers net.Listener
	// Dial connects to another engine's Peers. TCP
	Dial   func(ctx context.Context, addr string) (net.Conn, error)
	Logger *slog.Logger
}

// latenessMax is how far the steps of a busy engine may lag behind their times before it lets them slip: timers come
// late on a machine with other work, and steps that follow each other make it up.
const latenessMax = time.Second

// Engine is an api.Engine. Everything behind its methods happens in one goroutine.
type Engine struct {
	cfg   Config
	table *Table
	info  api.ModelInfo
	pool  *kv.Pool
	stats atomic.Pointer[Status]

	// Of the loop.
	waiting  []*seq // in order; those that were preempted first
	active   []*seq // that hold blocks, in order of arrival
	byTicket map[string]*seq
	offers   []*offer // that wait for their decode leg, or for blocks
	closing  bool
	batch    []work // of the step under way
	order    uint64
	count    api.Stats
	linkFree time.Time // when the last byte of all transfers so far is out

	mu     sync.Mutex // guards what follows
	posted []func()
	closed bool
	wake   chan struct{} // holds one word when something was posted

	ctx    context.Context // ends with the engine
	cancel context.CancelFunc
	done   sync.WaitGroup
}

// Status is a snapshot as of the last step.
type Status struct {
	Role         string    `json:"role,omitempty"`
	Kind         string    `json:"kind"`
	Running      int       `json:"running"`
	Waiting      int       `json:"waiting"`
	BlocksTotal  int       `json:"blocks_total"`
	BlocksFree   int       `json:"blocks_free"` // held by nobody; includes the cached ones
	BlocksCached int       `json:"blocks_cached"`
	Counters     api.Stats `json:"counters"`
}

// work is a sequence's part of a step.
type work struct {
	s *seq
	n int // tokens
}

// New starts an engine. Close ends it.
func New(cfg Config) (*Engine, error) {
	if cfg.Model == "" {
		cfg.Model = "stand-in"
	}
	if cfg.Table.Blocks == 0 {
		cfg.Table = DefaultTable()
	}
	if err := cfg.Table.Check(); err != nil {
		return nil, err
	}
	if cfg.Dial == nil {
		d := net.Dialer{Timeout: time.Second}
		cfg.Dial = func(ctx context.Context, addr string) (net.Conn, error) { return d.DialContext(ctx, "tcp", addr) }
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	pool, err := kv.NewPool(cfg.Table.Blocks, cfg.Table.BlockTokens)
	if err != nil {
		return nil, err
	}
	e := &Engine{cfg: cfg, pool: pool, byTicket: map[string]*seq{}, wake: make(chan struct{}, 1)}
	e.table = &e.cfg.Table
	if cfg.Events != nil {
		pool.Watch(cfg.Events)
	}
	e.info = api.ModelInfo{
		ID: cfg.Model, Created: time.Now(), Context: min(e.table.Context, e.table.Blocks*e.table.BlockTokens), Vocab: Vocab,
		EndTokens: []int32{endToken}, BlockTokens: e.table.BlockTokens, Blocks: e.table.Blocks,
	}
	e.ctx, e.cancel = context.WithCancel(context.Background())
	e.publish()
	e.done.Go(e.loop)
	if cfg.Peers != nil {
		e.done.Go(e.accept)
	}
	return e, nil
}

// Close fails what is in flight and waits for everything that was started.
func (e *Engine) Close() error {
	e.post(func() {
		e.closing = true
		for _, s := range slices.Concat(e.active, e.waiting, slices.Collect(maps.Values(e.byTicket))) {
			e.fail(s, "the worker is shutting down")
		}
		e.mu.Lock()
		e.closed = true
		e.mu.Unlock()
	})
	e.cancel()
	var err error
	if e.cfg.Peers != nil {
		if err = e.cfg.Peers.Close(); errors.Is(err, net.ErrClosed) {
			err = nil
		}
	}
	e.done.Wait()
	return err
}

// Model, Stats and Status make it an api.Engine.
func (e *Engine) Model() api.ModelInfo { return e.info }

// Stats answers a scrape.
func (e *Engine) Stats() api.Stats { return e.stats.Load().Counters }

// Status is a *Status.
func (e *Engine) Status() any { return e.stats.Load() }

// Submit takes a request.
func (e *Engine) Submit(ctx context.Context, r *api.Request) (<-chan api.TokenEvent, error) {
	if n := len(r.Prompt) + len(r.Resume); n == 0 || n >= e.info.Context {
		return nil, &api.TooLongError{Limit: e.info.Context - 1, Tokens: n}
	}
	s := e.newSeq(ctx, r)
	answer := make(chan error, 1)
	if !e.post(func() { answer <- e.admit(s) }) {
		return nil, api.ErrBusy
	}
	if err := <-answer; err != nil {
		return nil, err
	}
	return s.out, nil
}

// post has the loop call f; false when it has ended.
func (e *Engine) post(f func()) bool {
	e.mu.Lock()
	if e.closed {
		e.mu.Unlock()
		return false
	}
	e.posted = append(e.posted, f)
	e.mu.Unlock()
	select {
	case e.wake <- struct{}{}:
	default:
	}
	return true
}

// takePosted calls what was posted; false when the engine is closed.
func (e *Engine) takePosted() bool {
	for {
		e.mu.Lock()
		list, closed := e.posted, e.closed
		e.posted = nil
		e.mu.Unlock()
		if len(list) == 0 {
			return !closed
		}
		for _, f := range list {
			f()
		}
	}
}

// loop runs one step after the other as long as there is work.
func (e *Engine) loop() {
	timer := time.NewTimer(time.Hour)
	timer.Stop()
	defer timer.Stop()
	var ends time.Time // of the step under way, or of the last one
	for {
		if !e.takePosted() {
			return
		}
		now := time.Now()
		if len(e.batch) > 0 {
			if now.Before(ends) {
				timer.Reset(ends.Sub(now))
				select {
				case <-timer.C:
				case <-e.wake:
				}
				continue
			}
			e.finish()
			e.batch = e.batch[:0]
		}
		took, more := e.plan()
		if e.cfg.Events != nil {
			e.cfg.Events.Flush()
		}
		e.publish()
		if !more {
			ends = time.Time{}
			<-e.wake
			continue
		}
		if now.Sub(ends) > latenessMax { // also behind a rest
			ends = now
		}
		ends = ends.Add(took)
	}
}

// plan fills the batch of the next step and says how long it takes; false when there is nothing to do.
func (e *Engine) plan() (time.Duration, bool) {
	e.bindOffers()
	streams, contexts := 0, 0
	for _, s := range slices.Clone(e.active) {
		if s.state == stRunning && s.decoding() && e.grow(s) {
			e.batch = append(e.batch, work{s, 1})
		}
	}
	e.batch = slices.DeleteFunc(e.batch, func(w work) bool { return w.s.state != stRunning }) // preempted by another's growth
	for _, w := range e.batch {
		streams++
		contexts += w.s.computed
	}
	budget := max(e.table.BatchTokens-streams, e.table.BatchTokens/8, 1) // decoding is never held back, nor are prompts starved
	tokens, pairs := 0, 0.0
	chunk := func(s *seq) {
		n := min(len(s.tokens)-s.computed, budget-tokens)
		e.batch = append(e.batch, work{s, n})
		tokens += n
		pairs += float64(n) * (float64(s.computed) + float64(n)/2)
	}
	for _, s := range e.active {
		if s.state == stRunning && !s.decoding() && tokens < budget {
			chunk(s)
		}
	}
	for tokens < budget && len(e.waiting) > 0 && len(e.active) < e.table.StreamsMax {
		s := e.waiting[0]
		if !e.start(s) {
			break
		}
		e.waiting = e.waiting[1:]
		chunk(s)
	}
	if len(e.batch) == 0 {
		return 0, false
	}
	p, d := e.table.prefillSeconds(tokens, pairs), e.table.decodeSeconds(streams, float64(contexts)/float64(max(streams, 1)))
	if tokens > 0 && streams > 0 { // the weights are read once
		p -= min(p, d, e.table.prefillSeconds(1, 0))
	}
	return duration(p + d), true
}

// finish gives what the step has computed.
func (e *Engine) finish() {
	for _, w := range e.batch {
		s := w.s
		if s.state != stRunning || s.ended {
			continue
		}
		if !s.decoding() {
			e.count.PromptTokens += uint64(w.n)
		}
		s.computed += w.n
		e.commit(s)
		e.send(s)
		if s.computed == len(s.tokens) {
			e.sample(s)
		}
	}
}

func (e *Engine) publish() {
	st := &Status{Role: e.cfg.Role, Kind: "stand-in", Running: len(e.active), Waiting: len(e.waiting),
		BlocksTotal: e.pool.Total(), BlocksFree: e.pool.Free(), BlocksCached: e.pool.Cached(), Counters: e.count}
	st.Counters.Running, st.Counters.Waiting = st.Running, st.Waiting
	st.Counters.KVUsage = float64(st.BlocksTotal-st.BlocksFree) / float64(st.BlocksTotal)
	e.stats.Store(st)
}
