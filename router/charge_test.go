package router

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/headrace/headrace/router/pairing"
)

// meeting is where two wait for each other.
type meeting struct {
	came atomic.Int32
	met  chan struct{}
}

func (m *meeting) wait(ctx context.Context) {
	if m.came.Add(1) == 2 {
		close(m.met)
	}
	select {
	case <-m.met:
	case <-ctx.Done():
	}
}

// idlest takes the worker with the fewest requests, the first of several. Its first two decisions are made at the same time.
type idlest struct{ meeting }

func (*idlest) Name() string { return "idlest" }

func (p *idlest) Pick(ctx context.Context, _ pairing.Request, v *pairing.View) (pairing.Decision, error) {
	p.wait(ctx)
	best := &v.Workers[0]
	for i := range v.Workers {
		if c := &v.Workers[i]; c.Load.Decodes < best.Load.Decodes {
			best = c
		}
	}
	return pairing.Decision{Whole: best.Worker, Reason: "the idlest"}, nil
}

// Of two requests that are decided at the same time, the second one's worker is chosen with the first one's load.
func TestDecidedAtTheSameTime(t *testing.T) {
	decided := &meeting{met: make(chan struct{})}
	var mu sync.Mutex
	var used []string
	h := start(t, func(c *Config) {
		c.Policy = &idlest{meeting{met: make(chan struct{})}}
		c.Decided = func(ctx context.Context, _ string, _ int, d *pairing.Decision) {
			mu.Lock()
			used = append(used, d.Whole.ID)
			mu.Unlock()
			decided.wait(ctx) // nobody is served before
		}
	}, whole("d1", "d2")...)
	var both sync.WaitGroup
	for range 2 {
		both.Go(func() {
			q := ask{n: 1}
			h.do(q).wantWhole(t, q)
		})
	}
	both.Wait()
	if slices.Sort(used); !slices.Equal(used, []string{"d1", "d2"}) {
		t.Errorf("two requests and two idle workers: they went to %v", used)
	}
}

// What was decided by a view holds while nobody else was given work at one of the workers since.
func TestChargesByAView(t *testing.T) {
	p, d, other := pairing.Worker{ID: "p"}, pairing.Worker{ID: "d"}, pairing.Worker{ID: "o"}
	f, now := newTestFleet(t, p, d, other)
	of := func(v *pairing.View, i int) *pairing.Worker { return v.Workers[i].Worker }
	var first, second charge
	try := func(c *charge, d pairing.Decision, v *pairing.View) bool { return f.charge(c, &d, v, 100, 10, *now) }

	v := f.view()
	if !try(&first, pairing.Decision{Prefill: of(v, 0), Decode: of(v, 1)}, v) {
		t.Fatal("nobody else was given work")
	}
	for _, x := range []pairing.Decision{{Prefill: of(v, 0), Decode: of(v, 2)}, {Prefill: of(v, 2), Decode: of(v, 1)}, {Whole: of(v, 0)}, {Whole: of(v, 1)}} {
		if try(&second, x, v) {
			t.Errorf("%+v holds", x)
		}
	}
	w := f.view()
	if a, b, c := w.Workers[0].Load, w.Workers[1].Load, w.Workers[2].Load; a.PrefillTokens != 100 || a.Prefills != 1 || b.Decodes != 1 || b.HeldTokens != 10 || c.Decodes+c.Prefills != 0 {
		t.Errorf("what was not to be was booked: %+v, %+v, %+v", a, b, c)
	}
	if !try(&second, pairing.Decision{Whole: of(v, 2)}, v) {
		t.Error("others' load does not matter")
	}
	second.release()
	first.release()
	if !try(&first, pairing.Decision{Whole: of(w, 0)}, w) || !try(&second, pairing.Decision{Whole: of(w, 0)}, nil) {
		t.Error("less load than in the view, or no view, is no reason")
	}
	first.release()
	second.release()
}
