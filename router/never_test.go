package router

import (
	"strings"
	"testing"
)

// TestNever: what no worker of the model can ever do is the request's fault; what one could do is served by that one.
func TestNever(t *testing.T) {
	several := ask{n: 2, more: `,"n":2`}
	t.Run("nobody", func(t *testing.T) {
		h := startEngines(t, nil, engines("vllm-p2p-nccl", "p1", "d1")...)
		for what, q := range map[string]ask{
			"several choices": several,
			"several prompts": {path: "/v1/completions", n: 2, more: `,"prompt":["a","b"]`},
			"beam search":     {n: 2, more: `,"use_beam_search":true`},
		} {
			a := h.do(q)
			if a.status != 400 || !strings.Contains(a.failure, what) || a.code != "unsupported_parameter" {
				t.Errorf("%s: %d %s %q", what, a.status, a.code, a.failure)
			}
		}
		if n := h.engines[0].Calls() + h.engines[1].Calls(); n != 0 {
			t.Errorf("engines were asked %d times", n)
		}
		q := ask{n: 2}
		h.do(q).wantWhole(t, q)
	})
	t.Run("another", func(t *testing.T) {
		es := append(engines("vllm-p2p-nccl", "p1", "d1"), engines("openai", "e1")...)
		h := startEngines(t, nil, es...)
		for range 4 {
			if a := h.do(several); a.status != 200 {
				t.Errorf("%d %s", a.status, a.failure)
			}
		}
		if es[0].Calls()+es[1].Calls() != 0 || es[2].Calls() != 4 {
			t.Errorf("asked %d, %d and %d times", es[0].Calls(), es[1].Calls(), es[2].Calls())
		}
	})
	t.Run("not now", func(t *testing.T) { // the one that could drains
		es := append(engines("vllm-p2p-nccl", "p1", "d1"), engines("openai", "e1")...)
		es[2].Weight = new(float64)
		h := startEngines(t, nil, es...)
		if a := h.do(several); a.status != 503 {
			t.Errorf("%d %s", a.status, a.failure)
		}
	})
}
