// Package operate runs a planner for engines that exist: it looks at the cluster at each interval, shows the planner what it saw, and carries
// out what the planner decides, one change at a time: engines start through a connector, and drain before they stop. What it is about to do it
// writes down first, so that whoever takes over knows what was begun.
//
// It must not know how many engines there should be, nor how one is started.
package operate

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/headrace/headrace/internal/registry"
	"github.com/headrace/headrace/internal/routers"
	"github.com/headrace/headrace/scheduler/connector"
	"github.com/headrace/headrace/scheduler/planner"
)

const (
	// quietFor is how long no router may have had a request at an engine before it is stopped: one may be on its way there.
	quietFor = 200 * time.Millisecond
	// A start that failed is tried again after holdMin, twice as long each time, up to holdMax.
	holdMin = 30 * time.Second
	holdMax = 10 * time.Minute
	// lookMax bounds a look at the cluster, actMax a word to the connector.
	lookMax, actMax = 5 * time.Second, 10 * time.Second
	// saveEvery is how often what a planner has learned is written down where nothing else is to be.
	saveEvery = 30 * time.Second
)

// Config says what is planned, and by whom.
type Config struct {
	Spec      string // of the planner
	Planner   planner.Planner
	Limits    planner.Limits
	Namespace string
	Model     string
	Connector connector.Connector
	Look      Look
	// Drain has all routers give a worker nothing more; Undrain takes that back.
	Drain    func(ctx context.Context, w registry.Worker) error
	DryRun   bool // decisions are told and not carried out
	Interval time.Duration
	// StartMax is how long an engine may take until it serves; DrainMax how long its requests may go on.
	StartMax, DrainMax time.Duration
	Logger             *slog.Logger
	Metrics            *Metrics // nil for none
	// History, where it is set, is asked whenever this operator begins to lead for who is told what is seen and done (planner.Loop's Watch), and for what is to be called
	// when it leads no longer. epoch is when the observations' time began. A history that cannot be kept keeps nobody from planning.
	History func(epoch time.Time) (watch Watch, end func() error, err error)
}

// Watch is a planner.Loop's.
type Watch = func(*planner.Observation, *planner.Decision, *planner.Act)

// Operator runs one planner. Lead is its one loop; Status may be asked for by others meanwhile.
type Operator struct {
	cfg Config
	log *slog.Logger
	now func() time.Time

	// Of the goroutine that leads.
	store    Store
	state    *State
	loop     planner.Loop
	observed time.Time
	started  []time.Duration // what starts took, since the last observation
	quiet    map[string]quiet
	asked    map[string]bool // drains that were put into the registry by this process
	meter    meter
	told     string // the last dry decision
	unsaved  bool   // the state could not be written: nothing is begun before it is

	mu     sync.Mutex // guards status
	status Status
}

// quiet is since when nobody has requests at an engine.
type quiet struct {
	looks int
	since time.Time
}

// New makes an operator that does not lead yet.
func New(cfg Config) (*Operator, error) {
	if err := cfg.Limits.Check(); err != nil {
		return nil, err
	}
	o := &Operator{cfg: cfg, log: cfg.Logger, now: time.Now}
	o.status = Status{Namespace: cfg.Namespace, Model: cfg.Model, Planner: cfg.Spec, Connector: cfg.Connector.Name(), DryRun: cfg.DryRun, Limits: cfg.Limits,
		IntervalS: cfg.Interval.Seconds(), Pools: []PoolStatus{}, Engines: []Record{}, Decisions: []Decided{}}
	return o, nil
}

// keepHistory begins the history of a time of leading; what it returns ends it.
func (o *Operator) keepHistory() (end func()) {
	if o.cfg.History == nil {
		return func() {}
	}
	failed := func(err error) {
		if err != nil {
			o.log.Warn("the history has a gap", "err", err)
		}
	}
	watch, done, err := o.cfg.History(o.state.Epoch)
	if err != nil {
		failed(err)
		return func() {}
	}
	o.loop.Watch = watch
	return func() { failed(done()) }
}

// Lead plans until ctx ends, with the state that store has. It answers nil at ctx's end, after which Retire may follow.
func (o *Operator) Lead(ctx context.Context, store Store) error {
	if err := o.take(ctx, store); err != nil {
		return err
	}
	o.tell(func(s *Status) { s.Leader = true })
	defer o.tell(func(s *Status) { s.Leader = false })
	defer o.keepHistory()()
	ticker := time.NewTicker(o.cfg.Interval)
	defer ticker.Stop()
	said := ""
	for {
		switch err := o.tick(ctx); {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, registry.ErrNotLeading):
			return err
		case err != nil:
			o.cfg.Metrics.failed()
			if err.Error() != said {
				o.log.Warn("nothing is decided", "err", err)
			}
			said = err.Error()
		default:
			said = ""
		}
		o.tell(func(s *Status) { s.Problem = said })
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// Retire removes what was kept for a restart: the end is an orderly one.
func (o *Operator) Retire(ctx context.Context) error { return o.store.Clear(ctx) }

// take reads what was kept, and begins anew where there is nothing of use.
func (o *Operator) take(ctx context.Context, store Store) error {
	s, err := store.Load(ctx)
	if errors.Is(err, errUnreadable) {
		o.log.Warn("beginning anew, with the engines that run", "err", err)
	} else if err != nil {
		return err
	}
	now := o.now()
	if s != nil && s.mend(now) {
		o.log.Warn("the state that was kept is of a time that cannot be; the planner begins anew, with the engines that run", "saved", s.Saved)
	}
	switch {
	case s == nil:
	case s.Namespace != o.cfg.Namespace || s.Model != o.cfg.Model:
		o.log.Warn("the state that was kept is of others; beginning anew", "namespace", s.Namespace, "model", s.Model)
		s = nil
	case s.Spec != o.cfg.Spec || s.Planner == nil:
		s.Planner = nil
	default:
		if err := o.cfg.Planner.Restore(s.Planner); err != nil {
			o.log.Warn("the planner cannot read its own state; it begins anew", "err", err)
		}
	}
	if s == nil {
		s = &State{Version: stateVersion, Namespace: o.cfg.Namespace, Model: o.cfg.Model, Epoch: now}
	} else {
		o.log.Info("going on where the planner before ended", "saved", s.Saved, "engines", len(s.Engines), "in_progress", o.unfinished(s))
	}
	s.Spec = o.cfg.Spec
	o.store, o.state = store, s
	o.loop = planner.Loop{Planner: o.cfg.Planner, Limits: o.cfg.Limits}
	o.observed, o.quiet, o.asked, o.meter = time.Time{}, map[string]quiet{}, map[string]bool{}, meter{}
	if o.cfg.DryRun {
		s.Engines = nil
		return nil
	}
	octx, cancel := context.WithTimeout(ctx, actMax)
	defer cancel()
	c, err := o.cfg.Connector.Cluster(octx)
	if err != nil {
		return err
	}
	o.recover(c)
	return nil
}

// recover compares what was kept with what runs: what does not run any more is started again, as far as it still may be.
func (o *Operator) recover(c *connector.Cluster) {
	roles, gpus := o.roles(), 0
	var taken []string
	for _, e := range c.Engines {
		gpus += o.each(e.Role)
		taken = append(taken, e.GPUs...)
	}
	o.state.Engines = slices.DeleteFunc(o.state.Engines, func(r *Record) bool {
		if listed(c, r.Name) != nil {
			return false
		}
		held := c.Slots != nil && len(r.GPUs) != o.each(r.Role) || slices.ContainsFunc(r.GPUs, func(g string) bool {
			return !slices.Contains(c.Slots, g) || slices.Contains(taken, g)
		})
		again := (r.Phase == Starting || r.Phase == Ready) && r.Failed == "" && slices.Contains(roles, r.Role) && !held && gpus+o.each(r.Role) <= o.cfg.Limits.MaxGPUs
		if !again {
			o.log.Info("an engine of before is gone", "engine", r.Name, "phase", r.Phase)
			return true
		}
		o.log.Info("an engine of before does not run any more; starting it again", "engine", r.Name)
		gpus += o.each(r.Role)
		taken = append(taken, r.GPUs...)
		r.Phase, r.Since = Starting, o.now()
		return false
	})
}

func (o *Operator) unfinished(s *State) string {
	if n := len(s.Decisions); n > 0 && s.Decisions[n-1].Result == inProgress {
		return s.Decisions[n-1].Reason
	}
	return ""
}

func listed(c *connector.Cluster, name string) *connector.Engine {
	for i := range c.Engines {
		if c.Engines[i].Name == name {
			return &c.Engines[i]
		}
	}
	return nil
}

func (o *Operator) record(name string) *Record {
	for _, r := range o.state.Engines {
		if r.Name == name {
			return r
		}
	}
	return nil
}

// each is how many GPUs an engine of a role takes.
func (o *Operator) each(role string) int { return *in(&o.cfg.Limits.EngineGPUs, role) }

// tick is one interval.
func (o *Operator) tick(ctx context.Context) error {
	if o.unsaved {
		if err := o.save(ctx); err != nil {
			return err
		}
	}
	lctx, cancel := context.WithTimeout(ctx, lookMax)
	defer cancel()
	c, err := o.cfg.Connector.Cluster(lctx)
	if err != nil {
		return err
	}
	seen, err := o.cfg.Look(lctx, o.state.Epoch)
	if err != nil {
		return err
	}
	o.adopt(c, seen)
	if err := o.advance(ctx, c, seen); err != nil {
		return err
	}
	now := o.now()
	obs := o.observe(seen, now)
	o.loop.Limits.MaxGPUs = o.cfg.Limits.MaxGPUs - o.aside(c)
	o.loop.Fits = func(want planner.Pools) (planner.Pools, string) { return o.fits(c, seen, obs.Now(), want) }
	act, ok := o.loop.Step(obs)
	o.show(obs, c)
	if !ok {
		return o.keep(ctx)
	}
	d := &Decided{Time: now, Planner: act.Planner, Had: act.Had, Want: act.Want, Reason: act.Reason, Figures: act.Figures, Result: inProgress}
	if o.cfg.DryRun {
		o.wouldDo(c, seen, d)
		return nil
	}
	if err := o.begin(ctx, c, seen, d); err != nil {
		return err
	}
	o.show(obs, c)
	return nil
}

// aside are the GPUs of engines that are nobody's business here: a person drains them, or they belong to another pool.
func (o *Operator) aside(c *connector.Cluster) int {
	n := 0
	for i := range c.Engines {
		if o.record(c.Engines[i].Name) == nil {
			n += o.each(c.Engines[i].Role)
		}
	}
	return n
}

// adopt takes in what the connector has and nobody noted, as the engines of the beginning, and leaves out what a person drains.
func (o *Operator) adopt(c *connector.Cluster, seen *Seen) {
	if o.cfg.DryRun {
		o.state.Engines = nil
	}
	for _, e := range c.Engines {
		if o.record(e.Name) != nil || e.Stopping || !slices.Contains(o.roles(), e.Role) {
			continue
		}
		if w := seen.worker(e.ID); w == nil || drains(w) {
			continue // not there yet, or on its way out
		}
		o.state.Engines = append(o.state.Engines, &Record{Engine: e, Phase: Ready, Since: o.now()})
	}
	for _, r := range o.state.Engines {
		e := listed(c, r.Name)
		if e == nil {
			continue
		}
		r.ID, r.Role, r.GPUs, r.Stopping, r.Says = e.ID, e.Role, e.GPUs, e.Stopping, e.Says // what was noted may be of other flags
	}
	o.state.Engines = slices.DeleteFunc(o.state.Engines, func(r *Record) bool {
		w := seen.worker(r.ID)
		if r.Phase == Ready && w != nil && drains(w) {
			o.log.Info("an engine is being drained by somebody else; it does not count here meanwhile", "engine", r.Name)
			return true
		}
		return false
	})
}

// save writes the state down. What has been begun stands in it.
func (o *Operator) save(ctx context.Context) error {
	data, err := o.cfg.Planner.State()
	if err != nil { // engines matter more than what it has learned
		o.log.Warn("write down what the planner has learned", "err", err)
		data = nil
	}
	o.state.Planner, o.state.Saved = data, o.now()
	err = o.store.Save(ctx, o.state)
	o.unsaved = err != nil
	return err
}

// keep writes down now and then what the planner has learned. Where nothing is begun nobody needs to know it.
func (o *Operator) keep(ctx context.Context) error {
	if o.cfg.DryRun || o.now().Sub(o.state.Saved) < saveEvery {
		return nil
	}
	return o.save(ctx)
}

// begin writes a change down and begins it.
func (o *Operator) begin(ctx context.Context, c *connector.Cluster, seen *Seen, d *Decided) error {
	before := slices.Clone(o.state.Engines)
	if err := o.order(c, d); err != nil {
		o.state.Engines = before
		return err
	}
	d.Stop, d.Chosen = o.leave(c, seen, d.Want)
	for _, name := range d.Stop {
		if r := o.record(name); r != nil {
			o.into(r, Draining)
		}
	}
	if len(d.Start)+len(d.Stop) == 0 {
		return nil
	}
	o.remember(d)
	if err := o.save(ctx); err != nil {
		return err // it is begun when it can be written down
	}
	o.log.Info("plan", "planner", d.Planner, "had", d.Had.String(), "want", d.Want.String(), "start", strings.Join(d.Start, " "), "stop", strings.Join(d.Stop, " "),
		"why", d.Reason, "chosen", strings.Join(d.Chosen, "; "))
	o.cfg.Metrics.decided()
	return o.advance(ctx, c, seen)
}

// remember keeps a decision as the latest, and forgets the oldest beyond those that are kept.
func (o *Operator) remember(d *Decided) {
	o.state.Decisions = append(o.state.Decisions, d)
	if n := len(o.state.Decisions) - decisionsKept; n > 0 {
		o.state.Decisions = slices.Delete(o.state.Decisions, 0, n)
	}
}

// order notes the engines that are to start, each with its GPUs.
func (o *Operator) order(c *connector.Cluster, d *Decided) error {
	used := o.aside(c)
	var held [][]string
	for _, r := range o.state.Engines {
		used += o.each(r.Role)
		held = append(held, r.GPUs)
	}
	for _, e := range c.Engines {
		held = append(held, e.GPUs)
	}
	for _, role := range o.roles() {
		for _, name := range o.vacant(c, role, *in(&d.Want, role)-*in(&d.Had, role)) {
			r := &Record{Engine: connector.Engine{Name: name, ID: name, Role: role}, Phase: Starting, Since: o.now()}
			if used += o.each(role); used > o.cfg.Limits.MaxGPUs {
				return fmt.Errorf("start %s: %d GPUs would be in use, of a budget of %d", name, used, o.cfg.Limits.MaxGPUs)
			}
			if c.Slots != nil {
				var err error
				if r.GPUs, err = connector.Allocate(c.Slots, held, o.each(role)); err != nil {
					return fmt.Errorf("start %s: %w", name, err)
				}
				held = append(held, r.GPUs)
			}
			o.state.Engines = append(o.state.Engines, r)
			d.Start = append(d.Start, name)
		}
	}
	return nil
}

// wouldDo tells of a decision that is not carried out, once.
func (o *Operator) wouldDo(c *connector.Cluster, seen *Seen, d *Decided) {
	d.Result = "dry run"
	d.Stop, d.Chosen = o.leave(c, seen, d.Want)
	for _, role := range o.roles() {
		d.Start = append(d.Start, o.vacant(c, role, *in(&d.Want, role)-*in(&d.Had, role))...)
	}
	if told := fmt.Sprint(d.Had, d.Want); told != o.told {
		o.told = told
		o.log.Info("would do", "planner", d.Planner, "had", d.Had.String(), "want", d.Want.String(), "start", strings.Join(d.Start, " "), "stop", strings.Join(d.Stop, " "), "why", d.Reason)
		o.remember(d)
		o.cfg.Metrics.decided()
	}
	o.tell(func(s *Status) { s.Decisions = o.decisions() })
}

// undrained says why an engine may still have requests, "" when it has had none for long enough.
func (o *Operator) undrained(r *Record, seen *Seen) string {
	if why := routers.Undrained(seen.Routers, r.ID); why != "" {
		delete(o.quiet, r.Name)
		return why
	}
	q := o.quiet[r.Name]
	if q.looks == 0 {
		q.since = o.now()
	}
	q.looks++
	o.quiet[r.Name] = q
	if q.looks < routers.Quiet || o.now().Sub(q.since) < quietFor {
		return "its last request may be on its way"
	}
	return ""
}
