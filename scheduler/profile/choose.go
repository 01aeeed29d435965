package profile

import (
	"fmt"
	"math"
	"strings"

	"github.com/headrace/headrace/scheduler/planner"
)

// Choice is the best throughput of a GPU within the goals, and bounds for the load based planner.
type Choice struct {
	// Met says that both goals are met. Where one is not, its engine is the one that is nearest to it, and Why says so.
	Met     bool         `json:"met"`
	Why     string       `json:"why,omitempty"`
	Prefill EngineChoice `json:"prefill"`
	Decode  EngineChoice `json:"decode"`
	// Queue: prompts that may wait for a prefill engine, until there are more engines and until there are fewer.
	QueueUp   float64 `json:"queue_up"`
	QueueDown float64 `json:"queue_down"`
	// KV: the part of decode engines' caches in use, alike.
	KVUp   float64 `json:"kv_up"`
	KVDown float64 `json:"kv_down"`
}

// EngineChoice is one engine at the goals' lengths. Degree 0: there is none.
type EngineChoice struct {
	Degree       int     `json:"degree"`
	GPUs         int     `json:"gpus"`
	Ms           float64 `json:"ms"`               // time to the first token, or between tokens
	PerGPU       float64 `json:"tokens_per_gpu_s"` // of prompts, or of answers
	Streams      int     `json:"streams,omitempty"`
	KVUsage      float64 `json:"kv_usage,omitempty"`
	Met          bool    `json:"met"`
	Extrapolated bool    `json:"extrapolated,omitempty"`
}

// Planner is the choice as `headrace plan replay --planner` takes it.
func (c *Choice) Planner() string {
	return fmt.Sprintf("reactive:kv_up=%.3g:kv_down=%.3g:queue_up=%.3g:queue_down=%.3g", c.KVUp, c.KVDown, c.QueueUp, c.QueueDown)
}

const (
	queueLeast = 0.1
	// fewer is below half of the bound for more: where one engine of two leaves, the other's load doubles, and must not be above that bound.
	fewer = 0.45
	// kvMost: where times allow for more, new requests must still find room.
	kvMost = 0.9
)

func choose(list []Measured, g *Goals) Choice {
	var c Choice
	for i := range list {
		m := &list[i]
		if m.Surfaces == nil {
			continue
		}
		s, err := planner.NewSurfaces(*m.Surfaces)
		if err != nil {
			continue // it was checked when it was made
		}
		c.Prefill = better(c.Prefill, prefillAt(m, s, g))
		c.Decode = better(c.Decode, decodeAt(m, s, g))
	}
	if c.Prefill.Degree == 0 {
		c.Why = "no degree was measured as a whole"
		return c
	}
	var why []string
	if !c.Prefill.Met {
		why = append(why, fmt.Sprintf("no engine computes %d tokens in %.4g ms: the fastest takes %.4g ms", g.Prompt, g.TTFT, c.Prefill.Ms))
	}
	if !c.Decode.Met {
		why = append(why, fmt.Sprintf("no engine has tokens %.4g ms apart at %.0f tokens of context: the fastest takes %.4g ms for one stream", g.ITL, g.context(), c.Decode.Ms))
	}
	c.Met, c.Why = len(why) == 0, strings.Join(why, "; ")
	// A prompt behind q others takes 1+q times as long.
	c.QueueUp = math.Max(queueLeast, g.TTFT/c.Prefill.Ms-1)
	c.QueueDown = fewer * c.QueueUp
	c.KVUp = math.Min(math.Max(c.Decode.KVUsage, 1e-3), kvMost)
	c.KVDown = fewer * c.KVUp
	return c
}

// better takes what meets the goal with the higher rate, and where neither does, what is faster.
func better(a, b EngineChoice) EngineChoice {
	switch {
	case a.Degree == 0:
		return b
	case a.Met != b.Met:
		if a.Met {
			return a
		}
		return b
	case a.Met && b.PerGPU > a.PerGPU, !a.Met && b.Ms < a.Ms:
		return b
	}
	return a
}

func prefillAt(m *Measured, s *planner.Surfaces, g *Goals) EngineChoice {
	c := EngineChoice{Degree: m.Degree, GPUs: m.GPUs, Ms: s.TTFT(float64(g.Prompt)), PerGPU: s.PrefillRate(float64(g.Prompt))}
	low, high, measured := s.Prefill[0].Prompt, s.Prefill[len(s.Prefill)-1].Prompt, 0
	for _, p := range s.Prefill {
		if !p.Extrapolated {
			measured = p.Prompt
		}
	}
	c.Extrapolated = g.Prompt < low || g.Prompt > measured
	c.Met = c.Ms <= g.TTFT && g.Prompt <= high
	if g.Prompt > high { // surfaces end there; the formula does not
		c.Ms = m.Fit.ttft(g.Prompt, 0)
		c.PerGPU = float64(g.Prompt) / c.Ms * 1e3 / float64(m.GPUs)
	}
	return c
}

// decodeAt takes the most streams whose tokens are near enough: from the most down, as times do not always rise with streams.
func decodeAt(m *Measured, s *planner.Surfaces, g *Goals) EngineChoice {
	context := g.context()
	most := max(int(float64(m.KVTokens)/context), 1)
	if m.Streams > 0 {
		most = min(most, m.Streams)
	}
	for n := most; ; n-- {
		ms := s.ITL(float64(n), context)
		if ms > g.ITL && n > 1 {
			continue
		}
		usage := math.Min(float64(n)*context/float64(m.KVTokens), 1)
		return EngineChoice{Degree: m.Degree, GPUs: m.GPUs, Ms: ms, PerGPU: float64(n) / ms * 1e3 / float64(m.GPUs), Streams: n, KVUsage: usage,
			Met: ms <= g.ITL && context <= float64(m.KVTokens), Extrapolated: extrapolated(s, usage, context)}
	}
}

// extrapolated says that one of the grid's points around was not measured.
func extrapolated(s *planner.Surfaces, usage, context float64) bool {
	n := 1
	for n < len(s.Decode) && s.Decode[n].KVUsage == s.Decode[0].KVUsage {
		n++
	}
	if context < float64(s.Decode[0].Context) || context > float64(s.Decode[n-1].Context) {
		return true
	}
	k := 0
	for k+1 < n && float64(s.Decode[k+1].Context) <= context {
		k++
	}
	row := 0
	for (row+1)*n < len(s.Decode) && s.Decode[row*n].KVUsage < usage {
		row++
	}
	return s.Decode[row*n+k].Extrapolated || s.Decode[row*n+min(k+1, n-1)].Extrapolated && float64(s.Decode[k].Context) < context
}
