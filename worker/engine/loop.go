package engine

import (
	"context"
	"fmt"
	"log/slog"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/headrace/headrace/worker/api"
	"github.com/headrace/headrace/worker/kv"
	"github.com/headrace/headrace/worker/model"
	"github.com/headrace/headrace/worker/sample"
)

// Forwarder is what the loop needs of a model.
type Forwarder interface {
	Forward(c *model.Cache, seqs []*model.Seq, onLayer func(layer int)) error
}

// Config sizes an engine. Zero values take the defaults named beside each field.
type Config struct {
	Model          Forwarder
	Info           api.ModelInfo
	Role           string       // what the worker is meant for, for status
	Context        int          // tokens a request may have in all, at most the cache's size (the model's)
	Vocab          int          // ids of prompts must be below it (the model's)
	Cache          *model.Cache // over lent memory
	BatchTokens    int          // tokens computed in one step (128)
	SeqsMax        int          // requests that hold blocks at once (64)
	WaitingMax     int          // requests that wait (1024)
	UnboundPercent int          // share of the cache that reserved-but-empty or finished-but-unbound blocks may take (50)
	// Events, when set, is told of the cache's contents, and flushed once a step.
	Events interface {
		kv.Watcher
		Flush()
	}
	Logger *slog.Logger
}

func (c *Config) defaults() {
	if c.BatchTokens == 0 {
		c.BatchTokens = 128
	}
	if c.SeqsMax == 0 {
		c.SeqsMax = 64
	}
	if c.WaitingMax == 0 {
		c.WaitingMax = 1024
	}
	if c.UnboundPercent == 0 {
		c.UnboundPercent = 50
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	if c.Context == 0 {
		c.Context = c.Info.Context
	}
	if c.Vocab == 0 {
		c.Vocab = c.Info.Vocab
	}
	if size := c.Cache.Blocks * c.Cache.BlockTokens; c.Context > size {
		c.Context = size
	}
}

// Engine runs requests. Its methods are safe for concurrent use; everything behind them happens in one goroutine.
type Engine struct {
	cfg  Config
	pool *kv.Pool
	log  *slog.Logger
	q    *queue
	link *Link

	waiting []*seq
	active  []*seq // running, awaiting KV, handing off: in order of arrival
	fencing map[*seq]struct{}
	order   uint64

	byNonce   map[nonce]*seq
	presented map[nonce]*presentation
	closed    map[nonce]time.Time // attempts that ended here before P presented them
	reserved  int                 // blocks of D's requests that no byte has settled in yet

	quarantined int
	count       counters
	stats       atomic.Pointer[Status]
	seqs        []*model.Seq // of one step, reused
	logits      [][]float32
	samplers    []sample.Sampler // a core

	ctx       context.Context // ends with the engine
	cancelAll context.CancelFunc
	quit      chan struct{}
	done      sync.WaitGroup
}

type counters struct {
	prefixQueries, prefixHits, externalQueries, externalHits, preemptions, prefilled, generation uint64
}

// New starts an engine. Close ends it.
func New(cfg Config) (*Engine, error) {
	cfg.defaults()
	pool, err := kv.NewPool(cfg.Cache.Blocks, cfg.Cache.BlockTokens)
	if err != nil {
		return nil, err
	}
	e := &Engine{
		cfg: cfg, pool: pool, log: cfg.Logger, q: newQueue(),
		fencing:   map[*seq]struct{}{},
		byNonce:   map[nonce]*seq{},
		presented: map[nonce]*presentation{},
		closed:    map[nonce]time.Time{},
		quit:      make(chan struct{}),
		samplers:  make([]sample.Sampler, max(1, runtime.GOMAXPROCS(0))),
	}
	if cfg.Events != nil {
		pool.Watch(cfg.Events)
	}
	e.ctx, e.cancelAll = context.WithCancel(context.Background())
	e.link = newLink(e)
	e.publish()
	e.done.Go(e.loop)
	return e, nil
}

// Link is the engine's connection to its node daemon.
func (e *Engine) Link() *Link { return e.link }

// Close fails what is in flight and waits for the loop to end. The cache's memory may be unmapped after it.
func (e *Engine) Close() {
	e.q.post(func() {
		for _, s := range append(append([]*seq(nil), e.active...), e.waiting...) {
			e.fail(s, "the worker is shutting down")
		}
		close(e.quit)
	})
	<-e.quit
	e.cancelAll()
	e.done.Wait()
	e.q.close()
}

// Submit takes a request. The channel delivers what api.TokenEvent promises. The engine never waits for its reader. Cancelling ctx ends the request early.
func (e *Engine) Submit(ctx context.Context, r *api.Request) (<-chan api.TokenEvent, error) {
	n := len(r.Prompt) + len(r.Resume)
	if n == 0 || n >= e.cfg.Context {
		return nil, &api.TooLongError{Limit: e.cfg.Context - 1, Tokens: n}
	}
	for _, t := range r.Prompt {
		if t < 0 || int(t) >= e.cfg.Vocab {
			return nil, fmt.Errorf("token id %d is not in the model's vocabulary (0..%d)", t, e.cfg.Vocab-1)
		}
	}
	if err := sample.Params(r.Sampling).Check(); err != nil {
		return nil, err
	}
	if room := e.cfg.Context - len(r.Prompt); r.MaxTokens > room {
		short := *r
		short.MaxTokens = room
		r = &short
	}
	s := newSeq(ctx, r)
	answer := make(chan error, 1)
	if !e.q.post(func() { answer <- e.admit(s) }) {
		return nil, api.ErrBusy
	}
	select {
	case err := <-answer:
		if err != nil {
			return nil, err
		}
		return s.out, nil
	case <-e.ctx.Done():
		return nil, api.ErrBusy
	}
}

func (e *Engine) admit(s *seq) error {
	if len(e.waiting) >= e.cfg.WaitingMax {
		return api.ErrBusy
	}
	// Watched from here and not earlier: a context that has ended already would otherwise cancel a request that the loop
	// has not seen yet.
	s.watch(func() { e.q.post(func() { e.cancel(s) }) })
	e.order++
	s.order = e.order
	if s.req.Role == api.RoleWhole {
		e.waiting = append(e.waiting, s)
		s.phase("queued")
		return nil
	}
	e.admitLeg(s)
	return nil
}

func (e *Engine) loop() {
	for {
		for _, f := range e.q.take() {
			f()
		}
		select {
		case <-e.quit:
			return
		default:
		}
		batch := e.schedule()
		e.link.retire()
		e.publish()
		if e.cfg.Events != nil {
			e.cfg.Events.Flush()
		}
		if len(batch) > 0 {
			e.step(batch)
			continue
		}
		select {
		case <-e.q.wake:
		case <-e.quit:
			return
		}
	}
}

// work is a sequence's share of a step.
type work struct {
	seq         *seq
	n           int // tokens to compute
	first, last int // of the model's sequences
}

func (e *Engine) step(batch []work) {
	e.compose(batch)
	push := e.layerPusher(batch)
	if err := e.cfg.Model.Forward(e.cfg.Cache, e.seqs, push); err != nil {
		for _, w := range batch {
			e.fail(w.seq, fmt.Sprintf("compute a step: %v", err))
		}
		return
	}
	next := e.draw(batch)
	for i, w := range batch {
		e.count.prefilled += uint64(max(0, min(w.n, w.seq.context-w.seq.computed)))
		w.seq.computed += w.n
		e.commit(w.seq, w.seq.computed)
		e.pushed(w.seq)
		if e.seqs[w.last].Logits && w.seq.remaining() == 0 {
			e.sampled(w.seq, next[i])
		}
		e.moveOn(w.seq)
	}
}

// compose makes the model's view of a batch.
func (e *Engine) compose(batch []work) {
	e.seqs = e.seqs[:0]
	rows := 0
	add := func(s *seq, from, n int, logits bool) {
		m := &model.Seq{Tokens: s.tokens[from : from+n], Pos: from, Blocks: s.blocks, Logits: logits}
		if logits {
			m.Out = e.logitsOf(rows)
			rows++
		}
		e.seqs = append(e.seqs, m)
	}
	for i := range batch {
		w := &batch[i]
		w.first = len(e.seqs)
		if s := w.seq; s.scoring() {
			// A row a token: the keys and values of a whole batch are stored before anybody looks at them.
			for k := range w.n {
				add(s, s.computed+k, 1, true)
			}
		} else {
			add(s, s.computed, w.n, s.computed+w.n == len(s.tokens))
		}
		w.last = len(e.seqs) - 1
	}
}

// logitsOf is room for the i-th logits of a step, reused by the next.
func (e *Engine) logitsOf(i int) []float32 {
	for len(e.logits) <= i {
		e.logits = append(e.logits, make([]float32, e.cfg.Vocab))
	}
	return e.logits[i]
}

// commit makes the full blocks among the first n tokens findable.
func (e *Engine) commit(s *seq, n int) {
	bt := e.pool.BlockTokens()
	for s.committed < n/bt {
		at := s.committed * bt
		s.content = e.pool.Commit(s.blocks[s.committed], s.content, s.tokens[at:at+bt])
		s.committed++
	}
}

func (e *Engine) isEnd(r *api.Request, token int32) bool {
	return !r.IgnoreEOS && slices.Contains(e.cfg.Info.EndTokens, token) || slices.Contains(r.StopTokens, token)
}

// end takes a request out: the client's channel closes at once, blocks go back when no peer can touch them.
func (e *Engine) end(s *seq, reason string) {
	if s.state == stDone || s.state == stFencing {
		return
	}
	s.finishOut(e)
	e.remove(s)
	e.dropLease(s, reason)
}

// fail says that this worker cannot go on, which is not the client's fault: a router dispatches the request again.
func (e *Engine) fail(s *seq, reason string) {
	s.emit(api.TokenEvent{Kind: api.EventFailed, Reason: reason})
	e.end(s, reason)
}

func (e *Engine) cancel(s *seq) { e.end(s, "the client has gone") }

func (e *Engine) remove(s *seq) {
	e.active = without(e.active, s)
	e.waiting = without(e.waiting, s)
}

func (e *Engine) release(s *seq) {
	e.pool.Release(s.blocks)
	s.blocks, s.computed, s.committed, s.content = nil, 0, 0, kv.Root
}

func without(list []*seq, s *seq) []*seq {
	for i, x := range list {
		if x == s {
			return append(list[:i], list[i+1:]...)
		}
	}
	return list
}
