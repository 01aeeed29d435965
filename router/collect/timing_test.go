package collect

import (
	"context"
	"io"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// timed is what vLLM 0.32 says of two data-parallel ranks.
const timed = `vllm:num_requests_running{engine="0"} 1
vllm:inter_token_latency_seconds_bucket{engine="0",le="0.001"} 5
vllm:inter_token_latency_seconds_sum{engine="0"} 1.5
vllm:inter_token_latency_seconds_sum{engine="1"} 0.5
vllm:inter_token_latency_seconds_count{engine="0"} 30
vllm:inter_token_latency_seconds_count{engine="1"} 10
vllm:request_prefill_time_seconds_sum{engine="0"} 0.25
vllm:request_prefill_time_seconds_count{engine="0"} 4
vllm:request_queue_time_seconds_sum{engine="0"} 0.125
vllm:prompt_tokens_total{engine="0"} 900
vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 500
vllm:prompt_tokens_by_source_total{engine="1",source="local_compute"} 100
vllm:prompt_tokens_by_source_total{engine="0",source="local_cache_hit"} 300
`

func TestTiming(t *testing.T) {
	for name, tt := range map[string]struct {
		text string
		want Timing
	}{
		"vLLM": {timed, Timing{Gaps: 40, GapSeconds: 2, Prefills: 4, PrefillSeconds: 0.25, QueueSeconds: 0.125, PromptTokens: 600}},
		"one that does not tell sources": {strings.ReplaceAll(timed, "_by_source", "_by_anything"),
			Timing{Gaps: 40, GapSeconds: 2, Prefills: 4, PrefillSeconds: 0.25, QueueSeconds: 0.125, PromptTokens: 900, Cached: true}},
		"an older vLLM":           {strings.ReplaceAll(timed, "inter_token_latency", "time_per_output_token"), Timing{Gaps: 40, GapSeconds: 2, Prefills: 4, PrefillSeconds: 0.25, QueueSeconds: 0.125, PromptTokens: 600}},
		"SGLang":                  {"sglang:num_running_reqs 1\nsglang:inter_token_latency_seconds_sum 3\nsglang:inter_token_latency_seconds_count 20\n", Timing{Gaps: 20, GapSeconds: 3, Cached: true}},
		"one that times nothing":  {"vllm:num_requests_running 1\n", Timing{}},
		"one that has no numbers": {"vllm:num_requests_running 1\nvllm:inter_token_latency_seconds_sum NaN\nvllm:inter_token_latency_seconds_count -1\n", Timing{}},
	} {
		f, err := readFigures(strings.NewReader(tt.text))
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if f.Timing != tt.want {
			t.Errorf("%s: %+v, want %+v", name, f.Timing, tt.want)
		}
	}
}

// TestTimingIsShown: with the moment at which it was read, so that who asks twice knows what lies between.
func TestTimingIsShown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		text := timed
		c := New(Config{Fetch: func(context.Context, string) (io.ReadCloser, error) {
			return io.NopCloser(strings.NewReader(text)), nil
		}})
		defer c.Close()
		c.Follow([]Worker{{ID: "a", Addr: "a:1"}})
		time.Sleep(3 * time.Second)
		synctest.Wait()
		s := c.Status("a")
		if s.Timing == nil || s.Timing.Gaps != 40 || time.Since(s.ReadAt) > 2*time.Second || time.Since(s.ReadAt) < 0 {
			t.Errorf("%+v", s)
		}
		text = "vllm:num_requests_running 1\n"
		c.Follow([]Worker{{ID: "a", Addr: "a:1", Incarnation: "2"}})
		time.Sleep(3 * time.Second)
		synctest.Wait()
		if s := c.Status("a"); s.Timing != nil {
			t.Errorf("one that has timed nothing yet: %+v", s.Timing)
		}
	})
}
