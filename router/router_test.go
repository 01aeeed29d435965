package router

import (
	"fmt"
	"strings"
	"testing"

	"github.com/headrace/headrace/router/routertest"
)

// both runs f for a streamed and for a collected answer.
func both(t *testing.T, f func(t *testing.T, stream bool)) {
	for _, stream := range []bool{true, false} {
		t.Run(fmt.Sprintf("stream=%v", stream), func(t *testing.T) { f(t, stream) })
	}
}

func TestPair(t *testing.T) {
	h := start(t, nil, pair("p1", "d1")...)
	for _, path := range []string{"/v1/chat/completions", "/v1/completions"} {
		for _, n := range []int{1, 2, 3, 4, 5, 8, 23} { // 3 and 8 end in held-back text
			both(t, func(t *testing.T, stream bool) {
				q := ask{path: path, n: n, stream: stream, usage: stream && n%2 == 0}
				h.do(q).wantWhole(t, q)
			})
		}
	}
	decodes := 0
	for _, c := range h.workers[1].Last() {
		if c.Tokens > 1 {
			decodes++
		}
	}
	// Where token one ends the request (4 of them), decode's leg may be cancelled before the worker has seen it.
	if p, d := h.workers[0].Calls(), h.workers[1].Calls(); p != 28 || decodes != 24 || d > 28 {
		t.Errorf("%d requests to prefill, %d to decode, %d of them for several tokens; want 28, up to 28, 24", p, d, decodes)
	}
}

func TestWholeWhenAlone(t *testing.T) {
	for _, id := range []string{"p1", "d1"} {
		t.Run(id, func(t *testing.T) {
			h := start(t, nil, pair(id)...)
			both(t, func(t *testing.T, stream bool) {
				q := ask{n: 7, stream: stream}
				h.do(q).wantWhole(t, q)
			})
			for _, c := range h.workers[0].Last() {
				if c.KV.Role != "whole" || c.KV.Resume != nil {
					t.Errorf("got %+v", c.KV)
				}
			}
		})
	}
}

// TestConcurrent has many requests at once, over reused connections.
func TestConcurrent(t *testing.T) {
	h := start(t, unless(false), pair("p1", "p2", "d1", "d2")...)
	t.Run("group", func(t *testing.T) {
		for i := range 32 {
			t.Run(fmt.Sprint(i), func(t *testing.T) {
				t.Parallel()
				for j := range 4 {
					q := ask{n: 1 + i%9, stream: j%2 == 0, prompt: strings.Repeat(fmt.Sprint("word", i, " "), 1+j*300)}
					h.do(q).wantWhole(t, q)
				}
			})
		}
	})
}

type fault struct {
	who    string // role of the worker
	stage  string
	n      int
	action routertest.Action
}

func (f fault) String() string {
	return fmt.Sprintf("%s-%s-%d-%s", f.who, f.stage, f.n, [...]string{"go", "die", "stall", "fail", "busy", "bad", "wait"}[f.action])
}

func faults() (all []fault) {
	for _, action := range []routertest.Action{routertest.Die, routertest.Stall, routertest.Fail} {
		for _, who := range []string{"prefill", "decode"} {
			for _, stage := range []string{routertest.StageBegun, routertest.StageSettled, routertest.StageFinish} {
				if who == "prefill" && stage == routertest.StageFinish {
					continue
				}
				all = append(all, fault{who, stage, 0, action})
			}
		}
		all = append(all, fault{"prefill", routertest.StageAnnounced, 0, action}, fault{"prefill", routertest.StageToken, 0, action},
			fault{"prefill", routertest.StageHandoff, 0, action}, fault{"prefill", routertest.StageTransfer, 0, action}, fault{"decode", routertest.StageBound, 0, action})
		for n := 1; n < 9; n++ {
			all = append(all, fault{"decode", routertest.StageAnnounced, n, action}, fault{"decode", routertest.StageToken, n, action})
		}
	}
	for _, who := range []string{"prefill", "decode"} {
		for _, action := range []routertest.Action{routertest.Die, routertest.Stall, routertest.Busy} {
			all = append(all, fault{who, routertest.StageRequest, 0, action})
		}
	}
	return all
}

// once makes the first call that gets to the fault's point break.
func (f fault) once(ws []*routertest.Worker) *routertest.Once {
	o := &routertest.Once{}
	for _, w := range ws {
		w.Fault = func(c *routertest.Call, stage string, n int) routertest.Action {
			if c.KV.Role == f.who && stage == f.stage && (n == f.n || stage == routertest.StageFinish) && o.Take() {
				return f.action
			}
			return routertest.Go
		}
	}
	return o
}

// TestFaults breaks one worker at every point of an answer: the client gets exactly the undisturbed one.
func TestFaults(t *testing.T) {
	leakCheck(t)
	for _, ids := range [][]string{{"p1", "p2", "d1", "d2"}, {"p1", "d1"}} {
		t.Run(fmt.Sprint(len(ids), "workers"), func(t *testing.T) {
			for _, f := range faults() {
				for _, stream := range []bool{true, false} {
					t.Run(fmt.Sprintf("%s-stream=%v", f, stream), func(t *testing.T) {
						t.Parallel()
						ws := pair(ids...)
						once := f.once(ws)
						h := startParallel(t, unless(f.action == routertest.Stall), ws...) // many at once are slow
						q := ask{n: 9, stream: stream, usage: stream}
						h.do(q).wantWhole(t, q)
						if !once.Within(patience) {
							t.Error("the fault did not happen")
						}
					})
				}
			}
		})
	}
}

// TestFaultsInARow breaks every leg after one token until attempts run out.
func TestFaultsInARow(t *testing.T) {
	ws := pair("p1", "p2", "p3", "d1", "d2", "d3")
	for _, w := range ws {
		w.Fault = func(c *routertest.Call, stage string, n int) routertest.Action {
			if c.KV.Role != "prefill" && stage == routertest.StageToken && n >= 4 {
				return routertest.Die
			}
			return routertest.Go
		}
	}
	h := start(t, nil, ws...)
	a := h.do(ask{n: 30, stream: true})
	if a.failure == "" || a.dones != 0 || a.roles != 1 {
		t.Errorf("got %+v", a)
	}
	if want := routertest.Text("hello there", 7, 30); !strings.HasPrefix(want, a.text) || a.text == "" {
		t.Errorf("text %q is no beginning of %q", a.text, want)
	}
	if a := h.do(ask{n: 30}); a.status != 503 || a.header.Get("Retry-After") == "" || a.failure == "" {
		t.Errorf("got %+v", a)
	}
}
