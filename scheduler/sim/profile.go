package sim

import (
	"math"
	"time"

	"github.com/headrace/headrace/scheduler/planner"
)

// Profile is what measuring the table's engines came to, where the table has that, and what it would come to otherwise, one prompt or
// one number of streams at a time.
func (t *Table) Profile(undivided bool) *planner.Profile {
	measured := t.Surfaces
	if undivided {
		measured = t.SurfacesWhole
	}
	if measured != nil {
		return measured
	}
	pre, dec := &t.Prefill, &t.Decode
	if undivided {
		pre, dec = &t.Whole, &t.Whole
	}
	p := &planner.Profile{KVTokens: dec.KVTokens, Streams: dec.Streams, ChunkTokens: pre.ChunkTokens, Start: time.Duration(max(t.Prefill.StartMs, t.Decode.StartMs) * 1e6)}
	if undivided {
		p.Start = time.Duration(t.Whole.StartMs * 1e6)
	}
	for n := 64; int64(n) <= min(pre.KVTokens, 1<<17); n = n * 3 / 2 {
		us := pre.Alone(n, 0)
		p.Prefill = append(p.Prefill, planner.PrefillPoint{Prompt: n, TTFT: us / 1e3, PerGPU: float64(n) / us * 1e6 / float64(pre.GPUs)})
	}
	for k := 1; k <= 40; k++ {
		usage := float64(k) / 40
		for context := 64; int64(context) <= min(dec.KVTokens, 1<<17); context *= 2 {
			streams := math.Max(usage*float64(dec.KVTokens)/float64(context), 1)
			itl := dec.StepUs + dec.StreamUs*streams + dec.KVTokenNs*1e-3*streams*float64(context)
			p.Decode = append(p.Decode, planner.DecodePoint{KVUsage: usage, Context: context, ITL: itl / 1e3, PerGPU: streams / itl * 1e6 / float64(dec.GPUs)})
		}
	}
	return p
}
