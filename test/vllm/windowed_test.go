package vllm

import (
	"fmt"
	"testing"
	"time"

	"github.com/headrace/headrace/internal/registry"
	"github.com/headrace/headrace/test/vllm/stage"
)

// window is how many tokens three of the five layers of the model "windowed" look back (scripts/vllm-env.sh).
const window = 96

// scarce lets prompts be computed side by side where there is no room for all of them, so that vLLM preempts while
// leases are open. A prompt alone takes a whole step's tokens.
var scarce = []string{"--long-prefill-token-threshold", "64"}

// TestWindowed runs a model with layers of two kinds, which vLLM keeps in groups with blocks of their own and drops what
// has fallen out of the window.
func TestWindowed(t *testing.T) {
	s := setUp(t, stage.UpConfig{Engine: "vllm", Config: stage.Config{Model: "windowed", DType: "float32", BatchTokens: 256, Blocks: 128, Args: scarce}})
	t.Run("groups", func(t *testing.T) { grouped(t, s) })
	t.Run("one by one", func(t *testing.T) { oneByOne(t, s, aroundWindow(count(30, 14)), false) })
	t.Run("prefix hits", func(t *testing.T) { prefixes(t, s, count(9, 3)) })
	t.Run("prefill preempted", func(t *testing.T) { prefillPreempted(t, s, count(24, 8)) })
	t.Run("aborts", func(t *testing.T) { aborts(t, s, count(200, 20)) })
	t.Run("control", func(t *testing.T) { control(t, s) })
}

// TestPrefillPreempted is the same for layers of one kind.
func TestPrefillPreempted(t *testing.T) {
	environment(t)
	if !full {
		t.Skip("TestWindowed preempts prefill too: runs under HEADRACE_FULL=1 (make proof)")
	}
	s := setUp(t, stage.UpConfig{Engine: "vllm", Config: stage.Config{Model: "tiny", DType: "float32", BatchTokens: 256, Blocks: 80, Args: scarce}})
	prefillPreempted(t, s, 24)
}

// grouped demands that vLLM and the connector work with groups: with one table for all layers the rest would prove nothing.
func grouped(t *testing.T, s *scene) {
	text := fmt.Sprintf("3 groups: window of %d tokens, window of %d tokens, all tokens", window, window)
	if n, err := s.Logged(text); err != nil || n < 2 {
		t.Fatalf("%d engines said %q (%v), want both", n, text, err)
	}
}

// aroundWindow are prompts shorter than the window, and up to twenty times as long; the window's edge falls on every
// place of a block that matters: the last token's window begins with a block's last token at window-1 tokens and every
// block further.
func aroundWindow(n int) []stage.Request {
	lengths := []int{5, 33, 95, 96, 97, 127, 128, 129, 255, 256, 288, 607, 1024, 1900}
	var rs []stage.Request
	for i := range n {
		length := 90 + (i*631)%1790
		if i < len(lengths) {
			length = lengths[i]
		}
		rs = append(rs, stage.Request{Model: "windowed", Prompt: stage.Prompt(70000+i, length), MaxTokens: 40})
	}
	return rs
}

// prefillPreempted has prefill run out of blocks in the middle of prompts. Its preempted requests' blocks are other
// prompts' at once: a daemon that still read there would hand decode another prompt's KV.
func prefillPreempted(t *testing.T, s *scene, n int) {
	const preemptions, open = "vllm:num_preemptions_total", "vllm:headrace_failed_transfers_total{preempted}"
	prefill, err := s.Engine(registry.RolePrefill)
	if err != nil {
		t.Fatal(err)
	}
	before, err := prefill.Metrics(s.ctx)
	if err != nil {
		t.Fatal(err)
	}
	after := before
	// Which prompt has to give way is a matter of the moment: other ones are tried where none had its lease open.
	for round := 0; round < 4 && after[open] == before[open]; round++ {
		var rs []stage.Request
		for i := range n {
			rs = append(rs, stage.Request{Model: s.model, Prompt: stage.Prompt(80000+round*n+i, 1100+i%5*70), MaxTokens: 16})
		}
		wants := s.wants(t, rs)
		var got []*stage.Answer
		moved := s.disaggregated(t, func() { got = atOnce(s.ctx, s.URL(), 8, rs) })
		largest := compare(t, "8 at once, prefill out of blocks", got, wants)
		if largest > rounding {
			t.Errorf("logprobs differ by up to %.2g, want %.2g at most", largest, rounding)
		}
		s.idle(t, 2*time.Second, "after prefill was preempted")
		if after, err = prefill.Metrics(s.ctx); err != nil {
			t.Fatal(err)
		}
		t.Logf("prefill preempted %.0f times, %.0f times with an open lease; of %d prompts %d were disaggregated; where tokens are equal, logprobs differ by %.2g at most",
			after[preemptions]-before[preemptions], after[open]-before[open], n, moved, largest)
	}
	// vLLM's own count has only those that answered later: not those whose leg the router closed, as decode had computed the prompt itself.
	if after[open] == before[open] {
		t.Error("prefill never preempted a request whose lease was open, this proves nothing")
	}
	if late, err := s.Logged("did not stop reading the blocks of preempted requests"); err != nil || late > 0 {
		t.Errorf("%d preemptions went on without a fence (%v)", late, err)
	}
}
