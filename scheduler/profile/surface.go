package profile

import (
	"cmp"
	"errors"
	"math"
	"slices"
	"time"

	"github.com/headrace/headrace/scheduler/planner"
	"github.com/headrace/headrace/scheduler/sim"
)

// A decode surface has so many levels of KV usage at equal distances, and one for engines with little to do.
const (
	gridSteps = 20
	gridLeast = 0.01
)

// surfaces has measured prompts as they are, and goes on to the longest that the engine takes by the fit. The decode grid is interpolated
// between the numbers of streams that were measured at each context. What lies outside of what was measured is marked.
func surfaces(e *Engine, f *Fit, points []Point) (*planner.Profile, error) {
	if e.KVTokens < 1 || e.GPUs < 1 {
		return nil, errors.New("it is not known how many tokens the KV cache holds (--kv-tokens)")
	}
	s := &planner.Profile{KVTokens: e.KVTokens, Streams: e.Streams, Start: time.Duration(e.StartMs * 1e6), ChunkTokens: f.ChunkTokens}
	perGPU := func(tokens, ms float64) float64 { return tokens / ms * 1e3 / float64(e.GPUs) }
	last := 0
	for _, p := range points {
		if p.Kind == Prefill && p.Cached == 0 {
			s.Prefill = append(s.Prefill, planner.PrefillPoint{Prompt: p.Prompt, TTFT: p.Ms, PerGPU: perGPU(float64(p.Prompt), p.Ms)})
			last = p.Prompt
		}
	}
	if len(s.Prefill) == 0 {
		return nil, errors.New("no prompt was measured with nothing cached")
	}
	// The measured end moves the fit beyond it: no jump between the two.
	scale := s.Prefill[len(s.Prefill)-1].TTFT / f.ttft(last, 0)
	limit := int(min(int64(cmp.Or(e.ContextTokens, math.MaxInt32)), e.KVTokens))
	for n := last; n < limit && last > 0; {
		n = min(2*n, limit)
		ms := f.ttft(n, 0) * scale
		s.Prefill = append(s.Prefill, planner.PrefillPoint{Prompt: n, TTFT: ms, PerGPU: perGPU(float64(n), ms), Extrapolated: true})
	}
	lines := decodeLines(f, points)
	for k := 0; k <= gridSteps; k++ {
		usage := math.Max(float64(k)/gridSteps, gridLeast)
		for i := range lines {
			l := &lines[i]
			streams := math.Max(usage*float64(e.KVTokens)/float64(l.context), 1)
			ms, outside := l.at(f, streams)
			outside = outside || e.Streams > 0 && streams > float64(e.Streams)
			s.Decode = append(s.Decode, planner.DecodePoint{KVUsage: usage, Context: l.context, ITL: ms, PerGPU: perGPU(streams, ms), Extrapolated: outside})
		}
	}
	_, err := planner.NewSurfaces(*s)
	return s, err
}

// decodeLine are the points of a context, by rising streams.
type decodeLine struct {
	context int
	points  []Point
}

func decodeLines(f *Fit, points []Point) []decodeLine {
	var lines []decodeLine
	for _, p := range points {
		if p.Kind != Decode {
			continue
		}
		// Streams grow while they are timed: what they were beside the context that is meant goes by the fit.
		p.Ms += f.itl(float64(p.Streams), float64(p.Context)) - f.itl(float64(p.Streams), p.Mean)
		i := slices.IndexFunc(lines, func(l decodeLine) bool { return l.context == p.Context })
		if i < 0 {
			i = len(lines)
			lines = append(lines, decodeLine{context: p.Context})
		}
		lines[i].points = append(lines[i].points, p)
	}
	return lines
}

// at interpolates linearly, and goes on beyond both ends by the fit's slope.
func (l *decodeLine) at(f *Fit, streams float64) (ms float64, outside bool) {
	first, last := &l.points[0], &l.points[len(l.points)-1]
	end := first
	switch {
	case streams >= float64(first.Streams) && streams <= float64(last.Streams):
		for i := 1; i < len(l.points); i++ {
			a, b := &l.points[i-1], &l.points[i]
			if streams <= float64(b.Streams) {
				t := (streams - float64(a.Streams)) / float64(b.Streams-a.Streams)
				return a.Ms*(1-t) + b.Ms*t, false
			}
		}
		return first.Ms, false
	case streams > float64(last.Streams):
		end = last
	}
	context := float64(l.context)
	return math.Max(end.Ms+f.itl(streams, context)-f.itl(float64(end.Streams), context), 1e-3), true
}

// Table is what `headrace plan replay --table` reads: the chosen engines for prefill and decode, and the one that decodes best for engines
// that do both.
func (r *Report) Table() (*sim.Table, error) {
	pre, dec := r.engine(r.Choice.Prefill.Degree), r.engine(r.Choice.Decode.Degree)
	if pre == nil || dec == nil {
		return nil, errors.New("no timing table: " + cmp.Or(r.Choice.Why, "nothing was measured as a whole"))
	}
	t := &sim.Table{Name: r.Name, Note: r.Note, Prefill: pre.timing(true), Decode: dec.timing(false), Whole: dec.timing(false),
		TokenBytes: r.in.TokenBytes, ChannelBps: r.in.ChannelBps, Jitter: math.Min(math.Max(pre.Fit.Jitter, dec.Fit.Jitter), 0.15)}
	t.Surfaces = &planner.Profile{Prefill: pre.Surfaces.Prefill, Decode: dec.Surfaces.Decode, KVTokens: dec.KVTokens, Streams: dec.Streams,
		Start: max(pre.Surfaces.Start, dec.Surfaces.Start), ChunkTokens: pre.Fit.ChunkTokens}
	t.SurfacesWhole = dec.Surfaces
	return t, t.Check()
}

func (r *Report) engine(degree int) *Measured {
	for i := range r.Measured {
		if m := &r.Measured[i]; m.Degree == degree && m.Fit != nil {
			return m
		}
	}
	return nil
}

// timing has the step of prefill where prompts are all there is.
func (m *Measured) timing(prefill bool) sim.Timing {
	f := m.Fit
	t := sim.Timing{GPUs: m.GPUs, StepUs: f.DecodeStepUs, PromptTokenUs: f.PromptTokenUs, PromptAttention: f.PromptAttention, StreamUs: f.StreamUs, KVTokenNs: f.KVTokenNs,
		ChunkTokens: f.ChunkTokens, KVTokens: m.KVTokens, Streams: max(m.Streams, 1), StartMs: m.StartMs}
	if prefill {
		t.StepUs = f.PrefillStepUs
	}
	return t
}
