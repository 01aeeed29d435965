package planner

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"gonum.org/v1/gonum/interp"
)

// Profile is what measuring engines came to: the surfaces that planning by goals looks into.
type Profile struct {
	Prefill []PrefillPoint `json:"prefill"` // by rising Prompt, two at least
	// Decode is a full grid, by rising KVUsage and then rising Context: each KVUsage has the same Contexts.
	Decode []DecodePoint `json:"decode"`
	// KVTokens are what a decode engine's KV cache holds, Streams how many it decodes at most.
	KVTokens int64 `json:"kv_tokens"`
	Streams  int   `json:"streams"`
	// Start is how long an engine takes from the order until it is ready.
	Start time.Duration `json:"start_ns"`
	// ChunkTokens of prompts are computed in a step.
	ChunkTokens int `json:"chunk_tokens,omitempty"`
}

// PrefillPoint is an engine that computes one prompt of a length, with nothing cached.
type PrefillPoint struct {
	Prompt int     `json:"prompt"`
	TTFT   float64 `json:"ttft_ms"`
	PerGPU float64 `json:"tokens_per_gpu_s"`
	// Extrapolated: it lies outside of what was measured.
	Extrapolated bool `json:"extrapolated,omitempty"`
}

// DecodePoint is an engine that decodes as many streams of a context as take a share of its KV cache.
type DecodePoint struct {
	KVUsage float64 `json:"kv_usage"`
	Context int     `json:"context"`
	ITL     float64 `json:"itl_ms"`
	PerGPU  float64 `json:"tokens_per_gpu_s"`
	// Extrapolated: it lies outside of what was measured.
	Extrapolated bool `json:"extrapolated,omitempty"`
}

// Surfaces answers from a profile.
type Surfaces struct {
	Profile
	ttft, perGPU interp.NotAKnotCubic
	flat         bool // too few points for cubic pieces
	lines        [2]interp.PiecewiseLinear
	floor        [2]float64 // of cubic pieces, which may dip between points that lie far apart
	usages       []float64
	contexts     []float64
}

// NewSurfaces checks a profile.
func NewSurfaces(p Profile) (*Surfaces, error) {
	s := &Surfaces{Profile: p}
	n := len(p.Prefill)
	if n < 2 {
		return nil, errors.New("profile: prefill needs two points at least; measure more prompt lengths")
	}
	x, ttft, rate := make([]float64, n), make([]float64, n), make([]float64, n)
	for i, q := range p.Prefill {
		x[i], ttft[i], rate[i] = float64(q.Prompt), q.TTFT, q.PerGPU
		if q.TTFT <= 0 || q.PerGPU <= 0 || i > 0 && x[i] <= x[i-1] {
			return nil, fmt.Errorf("profile: prefill point %d: prompts must rise, and times and rates be above 0", i)
		}
	}
	s.floor = [2]float64{slices.Min(ttft) / 2, slices.Min(rate) / 2}
	var err error
	if s.flat = n < 4; s.flat {
		err = errors.Join(s.lines[0].Fit(x, ttft), s.lines[1].Fit(x, rate))
	} else {
		err = errors.Join(s.ttft.Fit(x, ttft), s.perGPU.Fit(x, rate))
	}
	if err != nil {
		return nil, fmt.Errorf("profile: prefill: %w", err)
	}
	return s, s.grid()
}

// grid checks the decode points.
func (s *Surfaces) grid() error {
	for _, q := range s.Decode {
		if !slices.Contains(s.usages, q.KVUsage) {
			s.usages = append(s.usages, q.KVUsage)
		}
		if !slices.Contains(s.contexts, float64(q.Context)) {
			s.contexts = append(s.contexts, float64(q.Context))
		}
	}
	if len(s.usages) < 1 || len(s.usages)*len(s.contexts) != len(s.Decode) || s.KVTokens < 1 {
		return errors.New("profile: decode must be a full grid of kv_usage and context, with kv_tokens of the cache")
	}
	for i, q := range s.Decode {
		u, c := s.usages[i/len(s.contexts)], s.contexts[i%len(s.contexts)]
		if q.KVUsage != u || float64(q.Context) != c || q.ITL <= 0 || q.PerGPU <= 0 || u <= 0 || c < 1 {
			return fmt.Errorf("profile: decode point %d: usages and contexts must rise, and times and rates be above 0", i)
		}
	}
	if !slices.IsSorted(s.usages) || !slices.IsSorted(s.contexts) {
		return errors.New("profile: decode points are not in order")
	}
	return nil
}

func (s *Surfaces) clampPrompt(prompt float64) float64 {
	return min(max(prompt, float64(s.Prefill[0].Prompt)), float64(s.Prefill[len(s.Prefill)-1].Prompt))
}

// TTFT is the time to the first token of a prompt that nobody is before, in milliseconds. Lengths are clamped to those measured.
func (s *Surfaces) TTFT(prompt float64) float64 {
	if s.flat {
		return s.lines[0].Predict(s.clampPrompt(prompt))
	}
	return max(s.ttft.Predict(s.clampPrompt(prompt)), s.floor[0])
}

// PrefillRate is the prompt tokens a second that a GPU computes.
func (s *Surfaces) PrefillRate(prompt float64) float64 {
	if s.flat {
		return s.lines[1].Predict(s.clampPrompt(prompt))
	}
	return max(s.perGPU.Predict(s.clampPrompt(prompt)), s.floor[1])
}

// Service is how long a prompt takes of which so many tokens are cached, in milliseconds.
func (s *Surfaces) Service(prompt, cached float64) float64 {
	if cached <= 0 {
		return s.beyond(prompt)
	}
	least := s.Prefill[0].TTFT
	return max(s.beyond(prompt)-s.beyond(cached)+min(s.TTFT(0), least), s.TTFT(max(prompt-cached, 0))*0.9)
}

// beyond goes on in a straight line where prompts are longer than those measured: a queue must not be thought shorter than it is.
func (s *Surfaces) beyond(prompt float64) float64 {
	last := s.Prefill[len(s.Prefill)-1]
	if prompt <= float64(last.Prompt) {
		return s.TTFT(prompt)
	}
	before := s.Prefill[len(s.Prefill)-2]
	slope := (last.TTFT - before.TTFT) / float64(last.Prompt-before.Prompt)
	return last.TTFT + slope*(prompt-float64(last.Prompt))
}

// at interpolates linearly in both directions, clamped to the grid.
func (s *Surfaces) at(usage, context float64, value func(*DecodePoint) float64) float64 {
	i, a := cell(s.usages, usage)
	k, b := cell(s.contexts, context)
	n := len(s.contexts)
	i2, k2 := min(i+1, len(s.usages)-1), min(k+1, n-1)
	low := value(&s.Decode[i*n+k])*(1-b) + value(&s.Decode[i*n+k2])*b
	high := value(&s.Decode[i2*n+k])*(1-b) + value(&s.Decode[i2*n+k2])*b
	return low*(1-a) + high*a
}

// cell is the last place that is not above v, and how far v is to the next.
func cell(axis []float64, v float64) (int, float64) {
	last := len(axis) - 1
	switch {
	case v <= axis[0]:
		return 0, 0
	case v >= axis[last]:
		return last, 0
	}
	i := 0
	for axis[i+1] <= v {
		i++
	}
	return i, (v - axis[i]) / (axis[i+1] - axis[i])
}

// ITL is the time between tokens in milliseconds, of so many streams with a context each on one engine.
func (s *Surfaces) ITL(streams, context float64) float64 {
	return s.step(streams*context/float64(s.KVTokens), context)
}

// Bare is how long a step would take that makes no token, in milliseconds: on the line through a tenth and a half of the KV cache, at a context in the middle of those
// measured. With less in it, a step of one stream is what was measured.
func (s *Surfaces) Bare() float64 {
	const low, high = 0.1, 0.5
	context := s.contexts[len(s.contexts)/2]
	first := s.step(low, context)
	return max(first-(s.step(high, context)-first)*low/(high-low), first/4)
}

// Full is how long a step takes when streams with such a context fill the KV cache, in milliseconds.
func (s *Surfaces) Full(context float64) float64 { return s.step(1, context) }

func (s *Surfaces) step(usage, context float64) float64 {
	return s.at(usage, context, func(p *DecodePoint) float64 { return p.ITL })
}

// BestRate is the most tokens a second a GPU decodes with a time between tokens of at most itl milliseconds: usages are tried from the highest
// down, as times do not always rise with them. Where none is fast enough, it is the rate at the lowest.
func (s *Surfaces) BestRate(itl, context float64) float64 {
	const steps = 200
	low, high := s.usages[0], s.usages[len(s.usages)-1]
	for i := steps; i > 0; i-- {
		u := low + (high-low)*float64(i)/steps
		if s.step(u, context) <= itl {
			return s.at(u, context, func(p *DecodePoint) float64 { return p.PerGPU })
		}
	}
	return s.at(low, context, func(p *DecodePoint) float64 { return p.PerGPU })
}

// corrector learns by how much a surface is off, from ratios of what was observed to what it says. What lies far from the others counts for
// nothing.
type corrector struct {
	Ratios []float64 `json:"ratios,omitempty"`
	Next   int       `json:"next,omitempty"`
	Value  float64   `json:"value,omitempty"`
}

const (
	ratiosMax = 128
	// A ratio is an outlier when it is farther from the median than so many times the median distance, and than a tenth.
	outlierTimes = 4.5
	outlierLeast = 0.1
	// The correction stays within these.
	correctionLow, correctionHigh = 0.5, 3
)

func (c *corrector) add(observed, said float64) {
	r := observed / said
	if !(r > 0) || math.IsInf(r, 0) {
		return
	}
	if len(c.Ratios) < ratiosMax {
		c.Ratios = append(c.Ratios, r)
	} else {
		c.Ratios[c.Next] = r
	}
	c.Next = (c.Next + 1) % ratiosMax
	c.Value = 0
}

// factor is what to multiply the surface with: 1 until enough was seen.
func (c *corrector) factor() float64 {
	if len(c.Ratios) < 8 {
		return 1
	}
	if c.Value > 0 {
		return c.Value
	}
	sorted := slices.Clone(c.Ratios)
	slices.Sort(sorted)
	middle := sorted[len(sorted)/2]
	away := make([]float64, len(sorted))
	for i, r := range sorted {
		away[i] = math.Abs(r - middle)
	}
	slices.Sort(away)
	bound := max(outlierTimes*away[len(away)/2], outlierLeast*middle)
	sum, n := 0.0, 0
	for _, r := range sorted {
		if math.Abs(r-middle) <= bound {
			sum += r
			n++
		}
	}
	c.Value = min(max(sum/float64(n), correctionLow), correctionHigh)
	return c.Value
}

func (c *corrector) check() error {
	if len(c.Ratios) > ratiosMax || c.Next < 0 || c.Next >= ratiosMax {
		return fmt.Errorf("a correction has %d ratios, the next of them is %d", len(c.Ratios), c.Next)
	}
	for _, r := range c.Ratios {
		if !(r > 0) || math.IsInf(r, 0) {
			return fmt.Errorf("a correction knows the ratio %v", r)
		}
	}
	c.Value = 0 // it is worked out anew
	return nil
}
