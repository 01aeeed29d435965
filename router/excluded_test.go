package router

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/headrace/headrace/router/routertest"
)

// TestNobodyElseIsLeft has the first of two workers fail a request before its answer begins, and the second die in the middle: the first
// one, which is well again, goes on. A request that has nothing to lose does not ask it again.
func TestNobodyElseIsLeft(t *testing.T) {
	for _, dialect := range []string{"openai", "vllm"} {
		for _, begun := range []bool{true, false} {
			t.Run(dialect, func(t *testing.T) {
				es := movers[dialect]()
				es = es[len(es)-2:] // that serve alone
				var calls atomic.Int64
				for _, e := range es {
					e.Fault = func(_ *routertest.EngineCall, stage string, n int) routertest.Action {
						switch {
						case stage == routertest.StageRequest && (calls.Add(1) == 1 || !begun && calls.Load() == 2):
							return routertest.Fail
						case begun && stage == routertest.StageToken && n == 5 && calls.Load() == 2:
							return routertest.Die
						}
						return routertest.Go
					}
				}
				h := startEngines(t, func(c *Config) { c.RecoveryTimeout = againAfter + recoveryMargin + 500*time.Millisecond }, es...)
				q := ask{n: 12, stream: true, usage: true, more: `,"temperature":0`}
				status, got := raw(t, h.client, h.addr, "/v1/chat/completions", q.body())
				if !begun {
					if status != 503 || calls.Load() != 2 {
						t.Errorf("%d from %d calls: %s", status, calls.Load(), got)
					}
					return
				}
				if _, want := raw(t, h.client, loner(t).Addr, "/v1/chat/completions", q.body()); status != 200 || plain(got) != plain(want) || calls.Load() != 3 {
					t.Errorf("got %d from %d calls\n%s\nwant\n%s", status, calls.Load(), got, want)
				}
			})
		}
	}
}
