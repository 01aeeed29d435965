package operate

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/headrace/headrace/internal/leaktest"
	"github.com/headrace/headrace/internal/registry"
	"github.com/headrace/headrace/internal/routers"
	"github.com/headrace/headrace/scheduler/connector"
	"github.com/headrace/headrace/scheduler/planner"
)

func TestMain(m *testing.M) { leaktest.Main(m, []string{"scheduler/operate."}) }

// world is a cluster in memory: engines take their time to start and to end, and have what requests the test gives them.
type world struct {
	t       *testing.T
	mu      sync.Mutex // guards what follows
	slots   int
	engines []*engine
	startIn time.Duration
	endIn   time.Duration
	busy    map[string]int64 // requests, by engine
	most    int              // engines at once
	starts  []string         // every order that was new
	stopped []string
	deaf    bool // routers do not answer
}

type engine struct {
	connector.Engine
	served, gone time.Time
	drains       bool
}

func newWorld(t *testing.T, slots int) *world {
	w := &world{t: t, slots: slots, startIn: 3 * time.Second, endIn: time.Second, busy: map[string]int64{}}
	for i, role := range []string{connector.Prefill, connector.Decode} {
		w.engines = append(w.engines, &engine{Engine: connector.Engine{Name: role + "-0", ID: role + "-0", Role: role, GPUs: []string{fmt.Sprint(i)}}})
	}
	return w
}

func (w *world) Name() string { return "test" }

// settle lets time pass for engines.
func (w *world) settle() {
	w.engines = slices.DeleteFunc(w.engines, func(e *engine) bool { return e.Stopping && !time.Now().Before(e.gone) })
	held := map[string]string{}
	for _, e := range w.engines {
		for _, g := range e.GPUs {
			if other := held[g]; other != "" {
				w.t.Errorf("%s and %s have the GPU %s", e.Name, other, g)
			}
			held[g] = e.Name
		}
	}
	w.most = max(w.most, len(w.engines))
}

func (w *world) find(name string) *engine {
	for _, e := range w.engines {
		if e.Name == name {
			return e
		}
	}
	return nil
}

func (w *world) Cluster(context.Context) (*connector.Cluster, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.settle()
	c := &connector.Cluster{Host: "h"}
	for i := range w.slots {
		c.Slots = append(c.Slots, fmt.Sprint(i))
	}
	for _, e := range w.engines {
		c.Engines = append(c.Engines, e.Engine)
	}
	return c, nil
}

func (w *world) Start(_ context.Context, e connector.Engine) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.find(e.Name) != nil {
		return nil
	}
	e.ID = e.Name // which is its own to say, whatever who asks believes
	w.starts = append(w.starts, e.Name)
	w.engines = append(w.engines, &engine{Engine: e, served: time.Now().Add(w.startIn)})
	w.settle()
	return nil
}

func (w *world) Stop(_ context.Context, e connector.Engine) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	x := w.find(e.Name)
	if x == nil || x.Stopping {
		return nil
	}
	if n := w.busy[e.Name]; n > 0 && time.Now().After(x.served) && !x.served.IsZero() {
		w.t.Errorf("%s is stopped with %d requests", e.Name, n)
	}
	w.stopped = append(w.stopped, e.Name)
	x.Stopping, x.gone = true, time.Now().Add(w.endIn)
	return nil
}

func (w *world) drain(_ context.Context, r registry.Worker) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.find(r.ID).drains = true
	return nil
}

func (w *world) look(context.Context, time.Time) (*Seen, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.deaf {
		return nil, errors.New("no router answers")
	}
	w.settle()
	s := &Seen{Routers: []routers.Status{{Router: registry.Router{ID: "r"}}}}
	for _, e := range w.engines {
		if e.Stopping || time.Now().Before(e.served) {
			continue
		}
		x, y := registry.Worker{ID: e.ID, Role: e.Role, NodeData: "n"}, routers.Worker{ID: e.ID, Engine: &routers.Engine{}}
		if e.drains {
			x.Weight, y.Weight = new(float64), new(float64)
		}
		if e.Role == connector.Prefill {
			y.Prefills = w.busy[e.Name]
		} else {
			y.Decodes = w.busy[e.Name]
		}
		s.Workers, s.Routers[0].Workers = append(s.Workers, x), append(s.Routers[0].Workers, y)
	}
	return s, nil
}

// give shares requests out over the decode engines that take some.
func (w *world) give(n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	var ready []string
	for _, e := range w.engines {
		if e.Role == connector.Decode && !e.drains && !time.Now().Before(e.served) {
			ready = append(ready, e.Name)
		}
	}
	clear(w.busy)
	for i := range n {
		w.busy[ready[i%len(ready)]]++
	}
}

// set changes the world while a planner looks at it.
func (w *world) set(f func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	f()
}

const testSpec = "queue:interval=1:window=2:streams=10:prompts=1000"

// operator makes one for the world.
func (w *world) operator(spec string, change func(c *Config)) *Operator {
	w.t.Helper()
	c := Config{Spec: spec, Limits: planner.Limits{EngineGPUs: planner.Pools{Prefill: 1, Decode: 1}, MaxGPUs: w.slots}, Model: "m", Connector: w, Look: w.look, Drain: w.drain,
		Interval: 100 * time.Millisecond, StartMax: time.Minute, DrainMax: 10 * time.Minute, Logger: slog.New(slog.DiscardHandler)}
	if change != nil {
		change(&c)
	}
	var err error
	if c.Planner, err = planner.New(spec, planner.Config{Limits: c.Limits}); err != nil {
		w.t.Fatal(err)
	}
	o, err := New(c)
	if err != nil {
		w.t.Fatal(err)
	}
	return o
}

// memory is a store; the state goes through its written form.
type memory struct {
	data []byte

	mu  sync.Mutex // guards err
	err error
}

func (m *memory) fail(err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.err = err
}

func (m *memory) Load(context.Context) (*State, error) {
	if m.data == nil {
		return nil, nil
	}
	return decodeState(m.data, "in memory")
}

func (m *memory) Save(_ context.Context, s *State) (err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.err == nil {
		m.data, err = json.Marshal(s)
	}
	return errors.Join(err, m.err)
}

func (m *memory) Clear(context.Context) error { m.data = nil; return nil }

// during leads until what was asked for is over.
func during(t *testing.T, o *Operator, s Store, f func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- o.Lead(ctx, s) }()
	f()
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func (w *world) names() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.settle()
	var list []string
	for _, e := range w.engines {
		list = append(list, e.Name)
	}
	slices.Sort(list)
	return strings.Join(list, " ")
}

func (w *world) want(names string) {
	w.t.Helper()
	if got := w.names(); got != names {
		w.t.Errorf("engines are %s, want %s", got, names)
	}
}

func TestGrowsAndShrinksWithinItsBudget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 4)
		o := w.operator(testSpec, nil)
		during(t, o, &memory{}, func() {
			w.give(100) // wants 10
			time.Sleep(10 * time.Second)
			w.want("decode-0 decode-1 decode-2 prefill-0")
			w.give(30)
			time.Sleep(2 * time.Second)
			w.set(func() { w.busy = map[string]int64{"decode-0": 5, "decode-1": 0, "decode-2": 3} })
			time.Sleep(5 * time.Second)
			w.want("decode-0 decode-2 prefill-0") // decode-1 had nothing to lose, decode-2 is not drained yet
			s := o.Status()
			if s.Decisions[0].Result != inProgress || len(s.Decisions[0].Stop) != 2 || !strings.Contains(fmt.Sprint(s.Engines), "decode-2") {
				t.Errorf("status is %+v", s)
			}
			w.set(func() { w.busy["decode-2"] = 0 })
			time.Sleep(5 * time.Second)
			w.want("decode-0 prefill-0")
		})
		s := o.Status()
		if len(s.Decisions) != 2 || s.Decisions[0].Result != "done" || s.Decisions[1].Result != "done" || s.Leader || s.GPUs != 2 {
			t.Errorf("status is %+v", s)
		}
		if w.most != 4 {
			t.Errorf("%d engines at once", w.most)
		}
	})
}

// TestHistory has who keeps the history told of all that is seen and done, each time that somebody leads, from the same beginning on.
func TestHistory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, store, began := newWorld(t, 4), &memory{}, time.Now()
		var said []string
		var last time.Duration
		change := func(c *Config) {
			c.History = func(epoch time.Time) (Watch, func() error, error) {
				if !epoch.Equal(began) {
					t.Errorf("began at %s, want %s", epoch, began)
				}
				said = append(said, "begun")
				return func(obs *planner.Observation, _ *planner.Decision, act *planner.Act) {
					if obs.At < last {
						t.Errorf("%s behind %s", obs.At, last)
					}
					if last = obs.At; act != nil {
						said = append(said, fmt.Sprint(act.Want.Prefill+act.Want.Decode))
					}
				}, func() error { said = append(said, "ended"); return errors.New("the disk is full") }, nil
			}
		}
		during(t, w.operator(testSpec, change), store, func() { w.give(100); time.Sleep(10 * time.Second) })
		during(t, w.operator(testSpec, change), store, func() { w.give(0); time.Sleep(10 * time.Second) })
		if got := strings.Join(said, " "); got != "begun 4 ended begun 2 ended" {
			t.Errorf("%s", got)
		}
		o := w.operator(testSpec, func(c *Config) {
			c.History = func(time.Time) (Watch, func() error, error) { return nil, nil, errors.New("no such folder") }
		})
		during(t, o, store, func() { w.give(100); time.Sleep(10 * time.Second) })
		if w.most != 4 {
			t.Error("a history that cannot be kept keeps from planning")
		}
	})
}

// TestKilledAnywhere ends the loop after any number of steps, mid-change too, and lets another go on: nothing is started twice, nothing is
// left behind, and the budget holds.
func TestKilledAnywhere(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	for range 30 {
		cuts := []time.Duration{}
		for range 12 {
			cuts = append(cuts, time.Duration(rng.IntN(2500))*time.Millisecond)
		}
		synctest.Test(t, func(t *testing.T) {
			w, store := newWorld(t, 5), &memory{}
			for i, cut := range cuts {
				if i%4 == 0 { // the load changes, and what streams there are end
					w.give([]int{60, 5}[i/4%2])
				}
				if i%4 == 2 {
					for name := range w.busy {
						if e := w.find(name); e != nil && e.drains {
							w.busy[name] = 0
						}
					}
				}
				during(t, w.operator(testSpec, nil), store, func() { time.Sleep(cut) })
			}
			clear(w.busy)
			o := w.operator(testSpec, nil)
			during(t, o, store, func() { time.Sleep(30 * time.Second) })
			w.want("decode-0 prefill-0")
			if w.most > 5 {
				t.Errorf("%d engines at once", w.most)
			}
			if n := len(o.Status().Engines); n != 2 {
				t.Errorf("%d engines are known", n)
			}
			if n := len(w.starts) - len(w.stopped); n != 0 {
				t.Errorf("started %v, stopped %v", w.starts, w.stopped)
			}
		})
	}
}

func TestStartsAgainWhatRanBeforeAll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, store := newWorld(t, 4), &memory{}
		during(t, w.operator(testSpec, nil), store, func() { w.give(100); time.Sleep(10 * time.Second) })
		w.engines = newWorld(t, 4).engines // as headrace up begins anew
		w.starts = nil
		during(t, w.operator(testSpec, nil), store, func() { w.give(30); time.Sleep(200 * time.Millisecond) })
		if got := fmt.Sprint(w.starts); got != "[decode-1 decode-2]" {
			t.Errorf("started %s", got)
		}
		w.engines, w.starts = newWorld(t, 4).engines, nil
		during(t, w.operator(testSpec, func(c *Config) { c.Limits.MaxGPUs = 3 }), store, func() { time.Sleep(200 * time.Millisecond) })
		if got := fmt.Sprint(w.starts); got != "[decode-1]" {
			t.Errorf("started %s with a smaller budget", got)
		}
	})
}

func TestGivesUpWhatDoesNotStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 3)
		w.startIn = time.Hour
		o := w.operator(testSpec, nil)
		during(t, o, &memory{}, func() {
			w.give(100)
			time.Sleep(70 * time.Second)
			w.want("decode-0 prefill-0")
			if d := o.Status().Decisions[0]; !strings.HasPrefix(d.Result, "failed: decode-1 did not serve within 1m0s") {
				t.Errorf("the decision's result is %q", d.Result)
			}
			time.Sleep(15 * time.Second)
			w.set(func() {
				if len(w.starts) != 1 {
					t.Errorf("started %v", w.starts)
				}
			})
			w.set(func() { w.startIn = time.Second })
			time.Sleep(30 * time.Second)
			w.want("decode-0 decode-1 prefill-0")
		})
	})
}

// TestDoesNothingUnseen: without a look nothing is decided, and without a written state nothing is begun.
func TestDoesNothingUnseen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, store := newWorld(t, 4), &memory{}
		o := w.operator(testSpec, nil)
		during(t, o, store, func() {
			w.give(100)
			w.set(func() { w.deaf = true })
			time.Sleep(5 * time.Second)
			if p := o.Status().Problem; p != "no router answers" {
				t.Errorf("the problem is %q", p)
			}
			w.set(func() { w.deaf = false })
			store.fail(errors.New("the disk is full"))
			time.Sleep(5 * time.Second)
			w.want("decode-0 prefill-0")
			if p := o.Status().Problem; p != "the disk is full" {
				t.Errorf("the problem is %q", p)
			}
			store.fail(nil)
			time.Sleep(5 * time.Second)
			w.want("decode-0 decode-1 decode-2 prefill-0")
		})
	})
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 4)
		w.give(100)
		if err := w.operator(testSpec, nil).Lead(t.Context(), &memory{err: registry.ErrNotLeading}); !errors.Is(err, registry.ErrNotLeading) {
			t.Errorf("who does not lead: %v", err)
		}
		w.want("decode-0 prefill-0")
	})
}

func TestDryRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 6)
		o := w.operator(testSpec, func(c *Config) { c.DryRun, c.Connector = true, &connector.Dry{List: w.Cluster} })
		during(t, o, &memory{}, func() {
			w.give(30)
			time.Sleep(10 * time.Second)
		})
		s := o.Status()
		if len(w.starts) != 0 || len(s.Decisions) != 1 || s.Decisions[0].Result != "dry run" || fmt.Sprint(s.Decisions[0].Start) != "[decode-1 decode-2]" || s.Connector != "dry-run" {
			t.Errorf("started %v, status %+v", w.starts, s)
		}
	})
}

// TestPersonsDrain: who is drained by a person is not counted, and keeps its GPU.
func TestPersonsDrain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 4)
		o := w.operator(testSpec, nil)
		during(t, o, &memory{}, func() {
			w.give(20)
			time.Sleep(10 * time.Second)
			w.want("decode-0 decode-1 prefill-0")
			w.set(func() { w.find("decode-1").drains = true })
			time.Sleep(10 * time.Second)
			w.want("decode-0 decode-1 decode-2 prefill-0")
			w.set(func() {
				if len(w.stopped) > 0 {
					t.Errorf("stopped %v", w.stopped)
				}
			})
		})
	})
}

func TestPlacementIsChecked(t *testing.T) {
	w := newWorld(t, 6)
	o := w.operator(testSpec, nil)
	if err := o.take(t.Context(), &memory{}); err != nil {
		t.Fatal(err)
	}
	seen, _ := w.look(t.Context(), time.Time{})
	c, _ := w.Cluster(t.Context())
	o.adopt(c, seen)
	had := planner.Pools{Prefill: 1, Decode: 1}
	if got, why := o.fits(c, seen, had, planner.Pools{Prefill: 2, Decode: 4}); got != (planner.Pools{Prefill: 2, Decode: 4}) || why != "" {
		t.Errorf("what has a place: %v, %s", got, why)
	}
	if got, why := o.fits(c, seen, had, planner.Pools{Prefill: 2, Decode: 6}); got != (planner.Pools{Prefill: 2, Decode: 4}) || !strings.Contains(why, "no host has the room") {
		t.Errorf("too many for the GPUs: %v, %s", got, why)
	}
	c.FreeRAM, c.EngineRAM = 5<<30, 2<<30
	if got, why := o.fits(c, seen, had, planner.Pools{Prefill: 1, Decode: 5}); got != (planner.Pools{Prefill: 1, Decode: 3}) || !strings.Contains(why, "RAM") {
		t.Errorf("too many for the memory: %v, %s", got, why)
	}
	if got, _ := o.fits(c, seen, had, planner.Pools{Prefill: 1, Decode: 1}); got != had {
		t.Errorf("what there is: %v", got)
	}
}

func TestFile(t *testing.T) {
	f := &File{Path: filepath.Join(t.TempDir(), "planner.json")}
	if s, err := f.Load(t.Context()); s != nil || err != nil {
		t.Errorf("no file: %v, %v", s, err)
	}
	want := &State{Version: stateVersion, Model: "m", Engines: []*Record{{Engine: connector.Engine{Name: "decode-1", Role: connector.Decode, GPUs: []string{"4"}}, Phase: Draining}}}
	if err := f.Save(t.Context(), want); err != nil {
		t.Fatal(err)
	}
	if s, err := f.Load(t.Context()); err != nil || s.Engines[0].Name != "decode-1" || s.Engines[0].Phase != Draining || s.Engines[0].GPUs[0] != "4" {
		t.Errorf("read %+v, %v", s, err)
	}
	if err := errors.Join(f.Clear(t.Context()), f.Clear(t.Context())); err != nil {
		t.Error(err)
	}
	for _, bad := range []string{"", "{", `{"version":2}`, `{"version":1,"engines":[null]}`} {
		if _, err := decodeState([]byte(bad), "there"); !errors.Is(err, errUnreadable) {
			t.Errorf("%s: %v", bad, err)
		}
	}
}
