package router

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/headrace/headrace/router/breaker"
	"github.com/headrace/headrace/router/collect"
	"github.com/headrace/headrace/router/dialects"
	"github.com/headrace/headrace/router/pairing"
	"github.com/headrace/headrace/router/upstream"
)

const (
	// rememberModel is how long a model whose last worker is gone is answered with "not now" rather than "not known".
	rememberModel  = 10 * time.Minute
	rememberedMax  = 1024
	closeIdleEvery = 10 * time.Second
)

// member is a worker with what this router knows of it besides.
type member struct {
	w       *pairing.Worker
	charges *charges
	health  *health
}

// health outlives changes of the registration, but not the worker's process.
type health struct {
	breaker *breaker.Breaker
	pace    *breaker.Pace // nil where nobody is told from others by it

	mu      sync.Mutex // guards what follows
	learned pairing.Estimator
	speeds  pairing.Speeds // by what was learned, unless unread
	unread  bool
}

// charges count the work given to a worker. They outlive its registration.
type charges struct {
	prefillTokens, prefills, decodes, heldTokens atomic.Int64
	headSince                                    atomic.Int64  // nanoseconds since 1970: see pairing.Load.HeadFor
	given                                        atomic.Uint64 // how often something was added
}

func (c *charges) load(now time.Time) pairing.Load {
	return pairing.Load{PrefillTokens: c.prefillTokens.Load(), Prefills: c.prefills.Load(), Decodes: c.decodes.Load(), HeldTokens: c.heldTokens.Load(),
		HeadFor: time.Duration(now.UnixNano() - c.headSince.Load())}
}

// fleet follows the source of workers and keeps their loads and health.
type fleet struct {
	source   Source
	breaking Breaking // has been checked
	client   *upstream.Client
	now      func() time.Time
	speaks   func(dialect string) bool
	taken    func(order []*member) // is told each change; nil for nobody

	members atomic.Pointer[map[string]*member]
	order   atomic.Pointer[[]*member]

	booking sync.Mutex // held while an attempt is charged

	mu     sync.Mutex           // guards what follows
	models map[string]time.Time // last seen

	ways    *channels
	engines *collect.Collector
	bars    *bars
	slow    *breaker.Slow                 // nil: the time that workers take is no reason to leave them alone
	views   sync.Pool                     // of *pairing.View
	changed atomic.Pointer[chan struct{}] // closed when a change was taken in
	stop    chan struct{}
	done    chan struct{}
}

func newFleet(source Source, breaking Breaking, client *upstream.Client, speaks func(dialect string) bool, collecting collect.Config, taken func(order []*member)) *fleet {
	f := &fleet{source: source, breaking: breaking, taken: taken, client: client, now: time.Now, speaks: speaks, ways: newChannels(source), bars: newBars(), models: map[string]time.Time{}, stop: make(chan struct{}), done: make(chan struct{})}
	if breaking.SlowFactor > 0 {
		f.slow = breaker.NewSlow(breaking.SlowFactor)
	}
	f.members.Store(&map[string]*member{})
	collecting.Own = f.own
	f.engines = collect.New(collecting)
	ch := make(chan struct{})
	f.changed.Store(&ch)
	next := source.Changed()
	f.take(source.Workers())
	go f.follow(next)
	return f
}

func (f *fleet) follow(next <-chan struct{}) {
	defer close(f.done)
	tick := time.NewTicker(closeIdleEvery)
	defer tick.Stop()
	for {
		select {
		case <-f.stop:
			return
		case <-tick.C:
			f.client.CloseIdle(f.now())
		case <-next:
			next = f.source.Changed()
			f.take(f.source.Workers())
		}
	}
}

func (f *fleet) close() {
	close(f.stop)
	<-f.done
	f.engines.Close()
	f.ways.close()
}

// take makes workers the fleet.
func (f *fleet) take(workers []pairing.Worker) {
	old := *f.members.Load()
	members := make(map[string]*member, len(workers))
	order := make([]*member, 0, len(workers))
	addrs := make(map[string]bool, len(workers))
	now := f.now()
	for i := range workers {
		w := &workers[i]
		if !f.speaks(w.Dialect) {
			continue // nothing here speaks with it
		}
		m := &member{w: w, charges: &charges{}, health: newHealth(&f.breaking)}
		if o := old[w.ID]; o != nil {
			m.charges = o.charges
			if sameProcess(o.w, w) {
				m.health = o.health
			}
		}
		members[w.ID] = m
		order = append(order, m)
		addrs[w.Addr] = true
	}
	f.mu.Lock()
	for _, m := range order {
		for _, name := range append([]string{m.w.Model}, m.w.LoRAs...) {
			if len(f.models) < rememberedMax || !f.models[name].IsZero() {
				f.models[name] = now
			}
		}
	}
	f.mu.Unlock()
	if f.slow != nil {
		f.slow.Follow(sorts(order))
	}
	f.members.Store(&members)
	f.order.Store(&order)
	if f.taken != nil {
		f.taken(order)
	}
	f.engines.Follow(followed(order))
	f.client.Keep(func(addr string) bool { return addrs[addr] })
	ch := make(chan struct{})
	close(*f.changed.Swap(&ch))
}

// followed are the members as the collector is to know them.
func followed(order []*member) []collect.Worker {
	workers := make([]collect.Worker, len(order))
	for i, m := range order {
		workers[i] = collect.Worker{ID: m.w.ID, Incarnation: m.w.Incarnation, Addr: m.w.Addr, Events: m.w.Events, EventsReplay: m.w.EventsReplay}
	}
	return workers
}

// own is how many requests of this router are at a worker.
func (f *fleet) own(worker string) int64 {
	m := (*f.members.Load())[worker]
	if m == nil {
		return 0
	}
	return m.charges.prefills.Load() + m.charges.decodes.Load()
}

// engine is what a worker said of itself lately.
func (f *fleet) engine(worker string) pairing.Engine {
	x, ok := f.engines.Figures(worker)
	if !ok {
		return pairing.Engine{}
	}
	return pairing.Engine{Known: true, Running: x.Running, Waiting: x.Waiting, Foreign: x.Foreign(), KVUsage: x.KVUsage}
}

func sameProcess(a, b *pairing.Worker) bool {
	return a.Addr == b.Addr && a.Incarnation == b.Incarnation
}

// barred tells whether two of the fleet could not work together lately.
func (f *fleet) barred(p, d string) bool {
	members := *f.members.Load()
	pm, dm := members[p], members[d]
	return pm != nil && dm != nil && f.bars.has(pm.w, dm.w, f.now())
}

// view is the snapshot for a decision, good until viewed is called with it.
func (f *fleet) view() *pairing.View { return f.viewAt(f.now()) }

// viewAt is view at that time.
func (f *fleet) viewAt(now time.Time) *pairing.View {
	order := *f.order.Load()
	v, _ := f.views.Get().(*pairing.View)
	if v == nil {
		v = &pairing.View{PairBarred: f.barred, Channel: f.ways.between}
	}
	v.Now = now
	if v.Workers = v.Workers[:0]; cap(v.Workers) < len(order) {
		v.Workers = make([]pairing.Candidate, 0, len(order))
	}
	var out []*pairing.Candidate
	for _, m := range order {
		c := pairing.Candidate{Worker: m.w, Given: m.charges.given.Load(), Engine: f.engine(m.w.ID)}
		c.Load = m.charges.load(v.Now) // behind Given, for what comes between
		h := m.health
		h.mu.Lock()
		if h.unread {
			h.speeds, h.unread = h.learned.Speeds(), false
		}
		c.Speeds = h.speeds
		h.mu.Unlock()
		erring := f.shut(&c, h.breaker.State(v.Now), v.Now)
		if v.Workers = append(v.Workers, c); erring {
			out = append(out, &v.Workers[len(v.Workers)-1])
		}
	}
	if len(out) > 0 {
		f.spare(v, out)
	}
	return v
}

// viewed takes a snapshot back that nobody looks at any more.
func (f *fleet) viewed(v *pairing.View) {
	clear(v.Workers)
	f.views.Put(v)
}

// hasModel tells whether a worker has the model; lately, whether one had it not long ago.
func (f *fleet) hasModel(model string) (now, lately bool) {
	for _, m := range *f.order.Load() {
		if m.w.Serves(model) {
			return true, true
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	seen, ok := f.models[model]
	return false, ok && f.now().Sub(seen) < rememberModel
}

// hasForeign tells whether an engine that is not our own has the model.
func (f *fleet) hasForeign(model string) bool {
	for _, m := range *f.order.Load() {
		if m.w.Serves(model) && m.w.Dialect != dialects.NativeName {
			return true
		}
	}
	return false
}
