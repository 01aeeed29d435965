package router

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

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

func TestAdmission(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAdmission(1, 2)
		ctx, cancel := context.WithCancelCause(context.Background())
		if err := a.enter(ctx, 1); err != nil {
			t.Fatal(err)
		}
		got := make(chan error, 2)
		for range 2 {
			go func() { got <- a.enter(ctx, 1) }()
			synctest.Wait()
		}
		if err := a.enter(ctx, 1); !errors.Is(err, errQueueFull) {
			t.Errorf("a fourth: %v", err)
		}
		a.leave(1) // the second's turn
		if err := <-got; err != nil {
			t.Error(err)
		}
		cancel(errClientGone)
		if err := <-got; !errors.Is(err, errClientGone) {
			t.Errorf("the third: %v", err)
		}
		a.leave(1)
		if running, waiting := a.counts(); running != 0 || waiting != 0 {
			t.Errorf("%d run, %d wait", running, waiting)
		}
	})
}

// newTestFleet is a fleet of these workers, with a clock that the test moves.
func newTestFleet(t *testing.T, workers ...pairing.Worker) (f *fleet, now *time.Time) {
	t.Helper()
	client := upstream.New(upstream.Config{})
	f = newFleet(&fleetSource{changed: make(chan struct{}), workers: workers}, client, func(string) bool { return true }, collect.Config{}, nil)
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
	for _, want := range []time.Duration{1, 2, 4, 8, 16, 30, 30} {
		f.failed("a", "lost")
		f.failed("a", "lost") // the same fault, seen by another request
		if got := cooling(); got != want*time.Second {
			t.Errorf("cools for %s, want %d s", got, want)
		}
		*now = now.Add(want * time.Second)
	}
	f.served(&a)
	f.failed("a", "lost")
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
