package collect

// Timing is what an engine has timed since it started, added up: what lies between two looks is what it did meanwhile.
type Timing struct {
	// Gaps between two tokens of an answer.
	Gaps       int64   `json:"gaps"`
	GapSeconds float64 `json:"gap_seconds"`
	// Prefills are prompts whose first token was made, from when their computing began; QueueSeconds what they had waited before.
	Prefills       int64   `json:"prefills"`
	PrefillSeconds float64 `json:"prefill_seconds"`
	QueueSeconds   float64 `json:"queue_seconds"`
	// PromptTokens that were computed. Where Cached is set, those that needed no computing may be among them.
	PromptTokens int64 `json:"prompt_tokens"`
	Cached       bool  `json:"cached_too,omitempty"`
}

// Spellings of sums and counts, as those of Figures.
var (
	namesGapSums      = []string{"vllm:inter_token_latency_seconds_sum", "vllm:time_per_output_token_seconds_sum", "sglang:inter_token_latency_seconds_sum"}
	namesGapCounts    = []string{"vllm:inter_token_latency_seconds_count", "vllm:time_per_output_token_seconds_count", "sglang:inter_token_latency_seconds_count"}
	namesPrefillSum   = []string{"vllm:request_prefill_time_seconds_sum"}
	namesPrefillCount = []string{"vllm:request_prefill_time_seconds_count"}
	namesQueueSum     = []string{"vllm:request_queue_time_seconds_sum"}
	namesPrompts      = []string{"vllm:prompt_tokens_total", "sglang:prompt_tokens_total"}
	namesBySource     = []string{"vllm:prompt_tokens_by_source_total"}
)

// computedHere is the source of prompt tokens that an engine has computed itself.
const computedHere = "local_compute"

func (fs families) timing() Timing {
	t := Timing{Gaps: fs.count(namesGapCounts), Prefills: fs.count(namesPrefillCount), PromptTokens: fs.count(namesPrompts), Cached: true}
	t.GapSeconds, _ = fs.sum(namesGapSums)
	t.PrefillSeconds, _ = fs.sum(namesPrefillSum)
	t.QueueSeconds, _ = fs.sum(namesQueueSum)
	here := families{}
	for _, s := range fs[namesBySource[0]] {
		if s.Labels["source"] == computedHere {
			here[s.Name] = append(here[s.Name], s)
		}
	}
	if _, n := here.sum(namesBySource); n > 0 {
		t.PromptTokens, t.Cached = here.count(namesBySource), false
	}
	if t == (Timing{Cached: true}) {
		return Timing{} // it says nothing of it
	}
	return t
}
