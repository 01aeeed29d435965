package router

import (
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/headrace/headrace/router/dialects"
	"github.com/headrace/headrace/router/pairing"
	"github.com/headrace/headrace/router/routertest"
)

// firstHeld has the engine that computes the prompt of a request's first attempt do as first says at its beginning, and all others as rest says.
type firstHeld struct {
	id          atomic.Pointer[string]
	first, rest func() routertest.Action
}

func (f *firstHeld) decided(_ context.Context, _ string, dispatch int, d *pairing.Decision) {
	if w := d.Whole; dispatch == 1 {
		if w == nil {
			w = d.Prefill
		}
		f.id.Store(&w.ID)
	}
}

func (f *firstHeld) at(id, stage string) routertest.Action {
	if stage != routertest.StageRequest {
		return routertest.Go
	}
	do := f.rest
	if first := f.id.Load(); first != nil && *first == id {
		do = f.first
	}
	if do == nil {
		return routertest.Go
	}
	return do()
}

// start runs a router that hedges.
func (f *firstHeld) start(t *testing.T, change func(*Config), ws []*routertest.Worker, es []*routertest.Engine) *harness {
	t.Helper()
	leakCheck(t)
	for _, w := range ws {
		w.Fault = func(_ *routertest.Call, stage string, _ int) routertest.Action { return f.at(w.ID, stage) }
	}
	for _, e := range es {
		e.Lease = cancelLease // for which a prefill that has answered nobody keeps its blocks
		e.Fault = func(_ *routertest.EngineCall, stage string, _ int) routertest.Action { return f.at(e.ID, stage) }
	}
	return startMixed(t, func(c *Config) {
		c.HedgeAfter, c.Decided, c.NixlLease = time.Millisecond, f.decided, cancelLease
		c.Upstream.SilenceTimeout, c.RecoveryTimeout = patience, patience
		if change != nil {
			change(c)
		}
	}, ws, es)
}

// hedged are the counts.
func (h *harness) hedged() (begun, won, lost, denied, nobody float64) {
	x := h.r.hedges
	return value(x.begun), value(x.won), value(x.lost), value(x.denied), value(x.nobody)
}

// TestHedge: an attempt that answers nothing gets another one beside it, elsewhere, whose answer the client has as if it had been the only one; and
// nothing stays of the first, in any dialect.
func TestHedge(t *testing.T) {
	for dialect, fleet := range cancelFleets {
		for _, stream := range []bool{false, true} {
			t.Run(dialect+map[bool]string{true: "/stream"}[stream], func(t *testing.T) {
				goOn := make(chan struct{})
				f := &firstHeld{first: func() routertest.Action { <-goOn; return routertest.Go }}
				ws, es := fleet()
				h := f.start(t, nil, ws, es)
				q := ask{n: 6, stream: stream, usage: stream}
				h.do(q).wantWhole(t, q)
				close(goOn)
				h.quiet()
				if begun, won, lost, _, _ := h.hedged(); begun != 1 || won != 1 || lost != 0 {
					t.Errorf("%v begun, %v won, %v lost", begun, won, lost)
				}
				list := h.r.decisions.list("")
				slices.SortFunc(list, func(a, b decisionRecord) int { return b.Dispatch - a.Dispatch })
				if len(list) != 2 || !strings.HasPrefix(list[0].Reason, "a second attempt") || list[0].Dispatch != 2 || list[0].Result != "finished" || list[1].Result != "cancelled" {
					t.Errorf("decisions %+v", list)
				}
				kept := h.r.recent.list(1, func(*record) bool { return true })
				if len(kept) != 1 || len(kept[0].Attempts) != 2 || kept[0].Outcome != "ok" || kept[0].FirstMS == 0 || kept[0].Tokens != 6 {
					t.Errorf("it is remembered as %+v", kept)
				}
			})
		}
	}
}

// TestHedgeLoses: the first attempt answers after all, while the second fails, is refused by the budget, or finds nobody.
func TestHedgeLoses(t *testing.T) {
	for name, c := range map[string]struct {
		ids    []string
		rest   routertest.Action
		change func(*Config)
		seen   func(h *harness) bool // what the first attempt waits for
		want   [5]float64
	}{
		"it fails":      {ids: []string{"d1", "d2"}, rest: routertest.Err, seen: func(h *harness) bool { return value(h.r.hedges.begun) == 1 }, want: [5]float64{1, 0, 1, 0, 0}},
		"it dies":       {ids: []string{"d1", "d2"}, rest: routertest.Die, seen: func(h *harness) bool { return value(h.r.hedges.begun) == 1 }, want: [5]float64{1, 0, 1, 0, 0}},
		"it is refused": {ids: []string{"d1", "d2"}, rest: routertest.Bad, seen: func(h *harness) bool { return value(h.r.hedges.begun) == 1 }, want: [5]float64{1, 0, 1, 0, 0}},
		"no budget": {ids: []string{"d1", "d2"}, change: func(c *Config) { c.Breaking.RetryShare, c.Breaking.RetryRate = -1, -1 },
			seen: func(h *harness) bool { return value(h.r.hedges.denied) == 1 }, want: [5]float64{0, 0, 0, 1, 0}},
		"nobody": {ids: []string{"d1"}, seen: func(h *harness) bool { return value(h.r.hedges.nobody) == 1 }, want: [5]float64{0, 0, 0, 0, 1}},
	} {
		t.Run(name, func(t *testing.T) {
			var h *harness
			f := &firstHeld{rest: func() routertest.Action { return c.rest }}
			ready := make(chan struct{})
			f.first = func() routertest.Action {
				<-ready
				h.until("the second attempt", func() bool { return c.seen(h) })
				return routertest.Go
			}
			h = f.start(t, c.change, pair(c.ids...), nil)
			close(ready)
			for _, q := range []ask{{n: 5, stream: true}} {
				h.do(q).wantWhole(t, q)
			}
			h.quiet()
			begun, won, lost, denied, nobody := h.hedged()
			if got := [5]float64{begun, won, lost, denied, nobody}; got != c.want {
				t.Errorf("begun, won, lost, denied, nobody: %v, want %v", got, c.want)
			}
		})
	}
}

// TestHedgeAlone: the first attempt fails while the second is under way: that one is the retry.
func TestHedgeAlone(t *testing.T) {
	var h *harness
	ready, there := make(chan struct{}), make(chan struct{})
	f := &firstHeld{
		first: func() routertest.Action { <-there; return routertest.Err },
		rest: func() routertest.Action {
			close(there)
			<-ready
			h.until("the first to fail", func() bool { return value(h.r.metrics.upstream.WithLabelValues("whole_error")) == 1 })
			return routertest.Go
		},
	}
	h = f.start(t, nil, pair("d1", "d2"), nil)
	close(ready)
	q := ask{n: 5, stream: true}
	h.do(q).wantWhole(t, q)
	h.quiet()
	if begun, won, _, _, _ := h.hedged(); begun != 1 || won != 1 || h.workers[0].Calls()+h.workers[1].Calls() != 2 {
		t.Errorf("%v begun, %v won, %d and %d calls", begun, won, h.workers[0].Calls(), h.workers[1].Calls())
	}
}

// TestHedgeBothFail: the client gets an error, or a third worker's answer.
func TestHedgeBothFail(t *testing.T) {
	f := &firstHeld{first: func() routertest.Action { return routertest.Err }, rest: func() routertest.Action { return routertest.Err }}
	h := f.start(t, func(c *Config) { c.RecoveryTimeout = 2 * recoveryMargin }, pair("d1", "d2"), nil)
	for range 3 {
		if a := h.do(ask{n: 5, stream: true}); a.status != 503 || a.failure == "" {
			t.Errorf("%+v", a)
		}
	}
}

// TestHedgeNotBehindToken: once something of an answer was handed on, no second attempt begins.
func TestHedgeNotBehindToken(t *testing.T) {
	x := &race{stopFirst: func(error) {}, stopSecond: func(error) {}}
	x.first, x.second = &request{race: x}, &request{race: x}
	if first, again := x.claim(x.first), x.claim(x.first); !first || !again || x.claim(x.second) {
		t.Fatal("the answer is not the first one's")
	}
	x.begin(t.Context(), x.second) // would panic: it has no router
	if x.firstEnded(dialects.Outcome{Result: dialects.Finished}) {
		t.Error("a second attempt has begun")
	}
	x = &race{stopFirst: func(error) {}, stopSecond: func(error) {}}
	x.first, x.second = &request{race: x}, &request{race: x}
	x.firstEnded(dialects.Outcome{Result: dialects.Failed})
	x.begin(t.Context(), x.second)
	if x.ended != nil {
		t.Error("it begins behind the first one's end")
	}
}

// TestHedgeOnly: requests of several answers, and those that no attempt may be made of twice, have one attempt at a time.
func TestHedgeOnly(t *testing.T) {
	h := startEngines(t, func(c *Config) { c.HedgeAfter = time.Nanosecond }, engines("openai", "e1", "e2")...)
	for range 5 {
		if status, got := raw(t, h.client, h.addr, "/v1/responses", `{"model":"fake","input":"x","max_output_tokens":2}`); status != 200 {
			t.Fatalf("%d %s", status, got)
		}
		q := ask{n: 2, more: `,"n":2`}
		if a := h.do(q); a.status != 200 {
			t.Fatalf("%+v", a)
		}
	}
	if begun, _, _, denied, nobody := h.hedged(); begun+denied+nobody != 0 {
		t.Errorf("%v begun", begun)
	}
	if err := (Config{MaxBodyBytes: 1, HedgeAfter: -1}).Validate(); err == nil || errors.Is(err, errOutrun) {
		t.Errorf("%v", err)
	}
}

// TestHedgeCancelled: clients leave while two attempts are under way, or at any other moment: nothing stays, in any dialect.
func TestHedgeCancelled(t *testing.T) {
	const requests = 30
	for dialect, fleet := range cancelFleets {
		if (strings.HasPrefix(dialect, "vllm-nixl") || dialect == "vllm-mooncake") && os.Getenv("HEADRACE_FULL") == "" {
			continue // leases that nobody fetches take their time
		}
		t.Run(dialect, func(t *testing.T) {
			leakCheck(t)
			ws, es := fleet()
			l := &leavers{seed: 9, left: map[int]*leaver{}}
			l.watch(ws, es)
			h := startMixed(t, func(c *Config) {
				c.NixlLease, c.HedgeAfter, c.Breaking.RetryRate = cancelLease, 300*time.Microsecond, 1000
			}, ws, es)
			l.run(h, 0, requests, 8)
			h.until("the router to be done with them", func() bool { return h.r.Status().Active == 0 })
			h.quiet()
			begun, won, lost, _, _ := h.hedged()
			if begun == 0 || won+lost != begun {
				t.Errorf("%v begun, %v won, %v lost: too little is shown", begun, won, lost)
			}
		})
	}
}
