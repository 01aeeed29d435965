package router

import (
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/headrace/headrace/router/breaker"
	"github.com/headrace/headrace/router/collect"
	"github.com/headrace/headrace/router/pairing"
	"github.com/headrace/headrace/router/upstream"
)

// TestStates walks all walks of four steps: what is allowed keeps the gauges right, what is not panics.
func TestStates(t *testing.T) {
	r := &Router{metrics: newMetrics(prometheus.NewRegistry())}
	sum := func() (n float64) {
		for i := state(0); i < stateDone; i++ {
			n += value(r.metrics.phases[i])
		}
		return n
	}
	walks := 0
	var walk func(q request, depth int)
	walk = func(q request, depth int) {
		if depth == 0 || q.state.terminal() {
			walks++
			return
		}
		for next := state(0); next < stateCount; next++ {
			q := q
			was := q.state
			var broke any
			func() {
				defer func() { broke = recover() }()
				q.enter(next)
			}()
			if ok := next == was || was.mayBecome(next); ok != (broke == nil) {
				t.Fatalf("%s to %s: %v", was, next, broke)
			}
			want := 1.0
			if q.state.terminal() {
				want = 0
			}
			if got := sum(); got != want {
				t.Fatalf("%s to %s: %v requests counted", was, next, got)
			}
			if broke == nil {
				walk(q, depth-1)
			}
			// Undo, for the next branch.
			if !q.state.terminal() {
				r.metrics.phases[q.state].Dec()
			}
			r.metrics.phases[was].Inc()
		}
	}
	r.metrics.phases[stateQueued].Inc()
	walk(request{r: r, state: stateQueued}, 4)
	if walks == 0 {
		t.Error("no walks")
	}
}

// newTestFleet is a fleet of these workers, with a clock that the test moves.
func newTestFleet(t *testing.T, workers ...pairing.Worker) (f *fleet, now *time.Time) {
	t.Helper()
	client := upstream.New(upstream.Config{})
	var breaking Breaking
	if err := breaking.check(); err != nil {
		t.Fatal(err)
	}
	f = newFleet(&fleetSource{changed: make(chan struct{}), workers: workers}, breaking, client, func(string) bool { return true }, collect.Config{}, nil)
	t.Cleanup(func() {
		f.close()
		client.Close()
	})
	now = new(time.Time)
	*now = time.Unix(1000, 0)
	f.now = func() time.Time { return *now }
	return f, now
}

func TestCoolDown(t *testing.T) {
	a := pairing.Worker{ID: "a", Model: "m", Addr: "a:1", Dialect: "native"}
	f, now := newTestFleet(t, a)
	cooling := func() time.Duration { return f.view().Workers[0].CoolUntil.Sub(*now) }
	for _, want := range []time.Duration{1, 2, 4, 8, 10, 10} {
		f.failed("a", breaker.Lost, "lost")
		f.failed("a", breaker.Lost, "lost") // the same fault, seen by another request
		if got := cooling(); got != want*time.Second {
			t.Errorf("cools for %s, want %d s", got, want)
		}
		*now = now.Add(want * time.Second)
	}
	f.served(&pairing.Decision{Whole: &a}, f.now())
	f.failed("a", breaker.Lost, "lost")
	if got := cooling(); got != time.Second {
		t.Errorf("cools for %s behind a success", got)
	}
	f.take([]pairing.Worker{{ID: "a", Model: "m", Addr: "a:1", Dialect: "native", Incarnation: "2"}})
	if got := cooling(); got > 0 {
		t.Errorf("a new process cools for %s", got)
	}
}

func TestBars(t *testing.T) {
	a := pairing.Worker{ID: "a", Model: "m", Addr: "a:1", Dialect: "native", NodeID: "n", NodeData: "n:1"}
	b := pairing.Worker{ID: "b", Model: "m", Addr: "b:1", Dialect: "native"}
	f, now := newTestFleet(t, a, b)
	for _, want := range []time.Duration{2, 4, 8, 16, 30, 30} {
		f.bars.add(&a, &b, *now)
		f.bars.add(&a, &b, *now) // the same fault, seen by another request
		if !f.barred("a", "b") || f.barred("b", "a") {
			t.Fatal("not barred, or the wrong way round")
		}
		if *now = now.Add(want*time.Second - 1); !f.barred("a", "b") {
			t.Errorf("barred for less than %d s", want)
		}
		if *now = now.Add(1); f.barred("a", "b") {
			t.Errorf("barred for more than %d s", want)
		}
	}
	f.bars.worked(&a, &b)
	f.bars.add(&a, &b, *now)
	if *now = now.Add(barFor); f.barred("a", "b") {
		t.Error("barred for longer behind a success")
	}
	f.bars.add(&a, &b, *now)
	a.NodeData = "n:2"
	if f.take([]pairing.Worker{a, b}); f.barred("a", "b") {
		t.Error("barred though the daemon of one is another now")
	}
}

// TestEjectShare: errors take at most half of a sort of workers out, whoever cannot be reached is out besides.
func TestEjectShare(t *testing.T) {
	var ws []pairing.Worker
	for _, id := range []string{"a", "b", "c", "d", "e"} {
		ws = append(ws, pairing.Worker{ID: id, Model: "m", Addr: id + ":1", Dialect: "native", Role: pairing.RoleDecode})
	}
	ws[4].Role = pairing.RolePrefill
	f, now := newTestFleet(t, ws...)
	out := func() (ids string) {
		v := f.view()
		defer f.viewed(v)
		for _, c := range v.Workers {
			if c.CoolUntil.After(v.Now) {
				ids += c.ID
			}
		}
		return ids
	}
	fail := func(id string) {
		for range 5 {
			f.failed(id, breaker.Erred, "error")
		}
		*now = now.Add(10 * time.Millisecond)
	}
	for _, step := range []struct{ id, want string }{{"a", "a"}, {"e", "ae"}, {"b", "abe"}, {"c", "bce"}, {"d", "cde"}} {
		if fail(step.id); out() != step.want {
			t.Errorf("%q are left alone behind the errors of %s, want %q", out(), step.id, step.want)
		}
	}
	*now = now.Add(time.Second)
	for _, id := range []string{"a", "b", "c"} {
		f.failed(id, breaker.Lost, "lost")
	}
	if got := out(); got != "abc" {
		t.Errorf("%q are left alone, of whom three cannot be reached", got)
	}
	trials, ok := f.claim(&pairing.Decision{Prefill: &ws[4], Decode: &ws[3]}, f.now())
	if len(trials) != 2 || !ok {
		t.Errorf("%d trials, %v", len(trials), ok)
	}
	if got := out(); got != "abcde" {
		t.Errorf("%q are left alone while two are tried", got)
	}
	if more, ok := f.claim(&pairing.Decision{Whole: &ws[3]}, f.now()); len(more) > 0 || ok {
		t.Error("two try one worker at once")
	}
	f.served(&pairing.Decision{Prefill: &ws[4], Decode: &ws[3]}, f.now())
	if got := out(); got != "abc" {
		t.Errorf("%q are left alone behind a trial", got)
	}
}
