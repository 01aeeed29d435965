package router

import (
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/headrace/headrace/router/breaker"
	"github.com/headrace/headrace/router/routertest"
)

// erring makes a worker answer requests so, while it is asked to.
func erring(w *routertest.Worker, action routertest.Action) *atomic.Bool {
	on := new(atomic.Bool)
	on.Store(true)
	w.Fault = func(_ *routertest.Call, stage string, _ int) routertest.Action {
		if stage == routertest.StageRequest && on.Load() {
			return action
		}
		return routertest.Go
	}
	return on
}

// TestBreaker: a worker that errs is left alone while another serves, no client sees it, and it serves again when it is well.
func TestBreaker(t *testing.T) {
	ws := pair("d1", "d2")
	on := erring(ws[0], routertest.Err)
	h := start(t, func(c *Config) { c.Breaking.OpenMin = patience; c.Breaking.OpenMax = patience }, ws...)
	for range 40 {
		q := ask{n: 2}
		h.do(q).wantWhole(t, q)
	}
	if n := ws[0].Calls(); n != 5 {
		t.Errorf("the worker that errs was asked %d times", n)
	}
	w := h.r.Status().Workers[0]
	if !strings.Contains(w.Cooling, "error, 5 times in a row") || w.CoolingMS <= 0 {
		t.Errorf("status shows %+v", w)
	}
	if a := value(h.r.breakerMetrics.opened.WithLabelValues("errors")); a != 1 {
		t.Errorf("opened %v times", a)
	}
	on.Store(false)
	(*h.r.fleet.members.Load())["d1"].health.breaker.Served(time.Now().Add(2 * patience)) // as if a trial had been served
	for range 40 {
		q := ask{n: 2, stream: true}
		h.do(q).wantWhole(t, q)
	}
	if ws[0].Calls() < 10 || h.r.Status().Workers[0].Cooling != "" {
		t.Errorf("back, it was asked %d times: %+v", ws[0].Calls(), h.r.Status().Workers[0])
	}
}

// TestRefusalsOpenNothing: what is the request's fault or the worker's load is no reason to leave a worker alone.
func TestRefusalsOpenNothing(t *testing.T) {
	for name, action := range map[string]routertest.Action{"400": routertest.Bad, "503": routertest.Busy} {
		t.Run(name, func(t *testing.T) {
			ws := pair("d1")
			erring(ws[0], action)
			h := start(t, func(c *Config) { c.RecoveryTimeout = recoveryMargin + 20*time.Millisecond }, ws...) // there is nobody to wait for
			for range 12 {
				h.do(ask{n: 2})
			}
			if n := ws[0].Calls(); n != 12 {
				t.Errorf("the worker refused %d times", n)
			}
			m := (*h.r.fleet.members.Load())["d1"]
			if s := m.health.breaker.State(time.Now()); s.Phase != breaker.Closed {
				t.Errorf("%+v", s)
			}
		})
	}
}

// TestRetryBudget: without one errors go to the client, workers that were lost are replaced all the same.
func TestRetryBudget(t *testing.T) {
	for name, action := range map[string]routertest.Action{"errs": routertest.Err, "dies": routertest.Die} {
		t.Run(name, func(t *testing.T) {
			ws := pair("d1", "d2")
			erring(ws[0], action)
			h := start(t, func(c *Config) { c.Breaking.RetryShare, c.Breaking.RetryRate = -1, -1 }, ws...)
			failed := 0
			for range 6 {
				q := ask{n: 2}
				a := h.do(q)
				if a.status == 200 {
					a.wantWhole(t, q)
				} else if failed++; a.status != 503 || !strings.Contains(a.failure, "as may be") {
					t.Errorf("got %+v", a)
				}
			}
			if denied := int(value(h.r.breakerMetrics.denied)); denied != failed || (failed == 0) != (action == routertest.Die) {
				t.Errorf("%d failed, %d were denied another attempt", failed, denied)
			}
		})
	}
}

// TestDrain: a worker that is to get nothing more ends what it has, all else goes elsewhere, and nothing is lost.
func TestDrain(t *testing.T) {
	ws := pair("d1", "d2")
	at, goOn := make(chan struct{}), make(chan struct{})
	var held atomic.Bool
	ws[0].Fault = func(_ *routertest.Call, stage string, n int) routertest.Action {
		if stage == routertest.StageToken && n == 3 && held.CompareAndSwap(false, true) {
			close(at)
			<-goOn
		}
		return routertest.Go
	}
	h := start(t, func(c *Config) { c.Upstream.SilenceTimeout, c.RecoveryTimeout = patience, patience }, ws...)
	h.source.set(ws[0]) // so that it gets the first
	h.until("it to be alone", func() bool { return len(h.r.Status().Workers) == 1 })
	long := ask{n: 20, stream: true}
	got := h.send(long)
	<-at
	ws[0].Weight = new(float64)
	h.source.set(ws...)
	h.until("the drain", func() bool { s := h.r.Status(); return len(s.Workers) == 2 && s.Workers[0].Weight != nil })
	calls := ws[0].Calls()
	t.Run("group", func(t *testing.T) {
		for range 24 {
			t.Run("", func(t *testing.T) {
				t.Parallel()
				q := ask{n: 4, stream: true}
				h.do(q).wantWhole(t, q)
			})
		}
	})
	if n := ws[0].Calls() - calls; n != 0 || h.r.Status().Workers[0].Decodes != 1 {
		t.Errorf("it was given %d more, and has %d", n, h.r.Status().Workers[0].Decodes)
	}
	close(goOn)
	(<-got).wantWhole(t, long)
	h.quiet()
	h.source.set(ws[1])
	q := ask{n: 2}
	h.do(q).wantWhole(t, q)
}

// TestSlowIsLeftAlone: a worker whose first tokens take much longer than its peers' gets nothing for a while, and status, decisions and
// metrics say why.
func TestSlowIsLeftAlone(t *testing.T) {
	h := start(t, func(c *Config) {
		c.Breaking.SlowFactor, c.Breaking.OpenMin, c.Breaking.OpenMax = 3, patience, patience
	}, pair("d1", "d2", "d3")...)
	f := h.r.fleet
	then := time.Now().Add(-5 * time.Second)
	for id, took := range map[string]time.Duration{"d1": time.Second, "d2": 100 * time.Millisecond, "d3": 110 * time.Millisecond} {
		for range 12 {
			if f.slow.Took(then, (*f.members.Load())[id].health.pace, 1000, took) != 0 {
				t.Fatal("it is found without a request")
			}
		}
	}
	for _, q := range []ask{{n: 2, stream: true}, {n: 2}} { // the first has the workers looked at
		h.do(q).wantWhole(t, q)
	}
	st := h.r.Status()
	if w := st.Workers[0]; !strings.Contains(w.Cooling, "slow: its first tokens took") || w.CoolingMS <= 0 || st.Workers[1].SlowTimes == 0 {
		t.Errorf("status shows %+v", st.Workers)
	}
	if m := h.r.breakerMetrics.opened.WithLabelValues("slow"); !h.counted(m, 1) {
		t.Errorf("%v are counted", value(m))
	}
	calls := h.workers[0].Calls()
	for range 12 {
		q := ask{n: 2, stream: true}
		h.do(q).wantWhole(t, q)
	}
	if n := h.workers[0].Calls() - calls; n != 0 {
		t.Errorf("it was asked %d times", n)
	}
	d := h.r.decisions.list("")[0]
	if len(d.Rejected) != 1 || !strings.Contains(d.Rejected[0].Reason, "cools down: slow") {
		t.Errorf("decision %+v", d)
	}
}

// TestSlowIsOff: nothing is measured where nobody asked for it.
func TestSlowIsOff(t *testing.T) {
	h := start(t, nil, pair("d1")...)
	q := ask{n: 2, stream: true}
	h.do(q).wantWhole(t, q)
	if h.r.fleet.slow != nil || (*h.r.fleet.members.Load())["d1"].health.pace != nil || h.r.Status().Workers[0].SlowTimes != 0 {
		t.Error("something is")
	}
	if c := (Config{MaxBodyBytes: 1, Breaking: Breaking{SlowFactor: 1.1}}); c.Validate() == nil {
		t.Error("a factor of 1.1 is taken")
	}
}
