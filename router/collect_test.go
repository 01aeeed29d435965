package router

import (
	"strings"
	"testing"

	"github.com/headrace/headrace/router/routertest"
)

// What an engine says of itself reaches decisions, /status and /metrics.
func TestEnginesTellOfThemselves(t *testing.T) {
	es := engines("openai", "e1", "e2")
	full := "vllm:num_requests_running 7\nvllm:num_requests_waiting 1\nvllm:kv_cache_usage_perc 0.99\n"
	es[0].Metrics.Store(&full)
	h := startEngines(t, nil, es...)
	h.until("the engines' figures", func() bool {
		for _, w := range h.r.Status().Workers {
			if w.Engine == nil || w.Engine.Stale {
				return false
			}
		}
		return true
	})
	for _, w := range h.r.Status().Workers {
		if w.ID == "e1" && (w.Engine.Running != 7 || w.Engine.Waiting != 1 || w.Engine.KVUsage != 0.99 || w.Engine.Foreign != 8) {
			t.Errorf("%+v", w.Engine)
		}
	}
	for range 4 {
		q := ask{n: 1}
		h.do(q).wantWhole(t, q)
	}
	if a, b := es[0].Calls(), es[1].Calls(); a != 0 || b != 4 {
		t.Errorf("the full engine got %d requests, the other one %d", a, b)
	}
	families, err := h.r.cfg.Registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	found := false
	for _, f := range families {
		found = found || f.GetName() == "headrace_router_worker_kv_cache_usage" && len(f.Metric) == 2
	}
	if !found {
		t.Error("no headrace_router_worker_kv_cache_usage of both engines")
	}
}

// An engine without metrics serves all the same.
func TestEnginesWithoutMetrics(t *testing.T) {
	e := engines("openai", "e1")[0]
	none := "no metrics here"
	e.Metrics.Store(&none)
	h := startEngines(t, nil, []*routertest.Engine{e}...)
	h.until("a look", func() bool { s := h.r.Status().Workers[0].Engine; return s != nil && s.Failures > 0 })
	if s := h.r.Status().Workers[0].Engine; !s.Stale || !strings.Contains(s.Problem, "none of vLLM's") {
		t.Errorf("%+v", s)
	}
	q := ask{n: 1}
	h.do(q).wantWhole(t, q)
}
