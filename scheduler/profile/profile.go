// Package profile makes of measured engines what planning needs: timing tables, surfaces of the time to the first token and of the time
// between tokens, and which engines to use for prefill and for decode. It is pure: what measures is bench/profiler.
package profile

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/headrace/headrace/scheduler/planner"
)

// Kinds of points.
const (
	Prefill = "prefill"
	Decode  = "decode"
)

// Engine is one degree of parallelism, as what was started or found said of itself.
type Engine struct {
	Degree        int     `json:"degree"`
	GPUs          int     `json:"gpus"`
	Model         string  `json:"model"`
	KVTokens      int64   `json:"kv_tokens"` // that its cache holds
	BlockTokens   int     `json:"block_tokens"`
	ContextTokens int     `json:"context_tokens"` // of one request
	Streams       int     `json:"streams"`        // at once, at most
	StartMs       float64 `json:"start_ms"`       // 0: not started by us
	Failed        string  `json:"failed,omitempty"`
}

// Point is one measurement, the median of its rounds.
type Point struct {
	Degree int    `json:"degree"`
	Kind   string `json:"kind"`
	// Of prefill: the prompt's tokens, of which so many were cached.
	Prompt int `json:"prompt,omitempty"`
	Cached int `json:"cached,omitempty"`
	// Of decode: streams with a context each. Mean is the context that they had on average while they were timed.
	Streams int     `json:"streams,omitempty"`
	Context int     `json:"context,omitempty"`
	Mean    float64 `json:"mean_context,omitempty"`
	// Ms is the time to the first token, or between tokens; Low and High are the rounds' least and most.
	Ms     float64 `json:"ms"`
	Low    float64 `json:"low_ms,omitempty"`
	High   float64 `json:"high_ms,omitempty"`
	Rounds int     `json:"rounds"`
	Tokens int     `json:"tokens,omitempty"` // of each stream, that were timed
	Why    string  `json:"why,omitempty"`    // it could not be measured
}

// Key names a point within a profile.
func (p *Point) Key() string {
	if p.Kind == Prefill {
		return fmt.Sprintf("%d prefill %d-%d", p.Degree, p.Prompt, p.Cached)
	}
	return fmt.Sprintf("%d decode %dx%d", p.Degree, p.Streams, p.Context)
}

func (p *Point) String() string {
	if p.Kind == Prefill {
		if p.Cached > 0 {
			return fmt.Sprintf("prefill of %d tokens, %d of them cached", p.Prompt, p.Cached)
		}
		return fmt.Sprintf("prefill of %d tokens", p.Prompt)
	}
	return fmt.Sprintf("decode of %d streams at %d tokens", p.Streams, p.Context)
}

// Goals are what engines are chosen by.
type Goals struct {
	Prompt int     `json:"isl"`
	Output int     `json:"osl"`
	TTFT   float64 `json:"ttft_ms"`
	ITL    float64 `json:"itl_ms"`
}

// Check says what is wrong.
func (g *Goals) Check() error {
	switch {
	case !(g.TTFT > 0) || !(g.ITL > 0):
		return errors.New("the goals --ttft and --itl must be above 0")
	case g.TTFT > float64(time.Hour.Milliseconds()) || g.ITL > float64(time.Hour.Milliseconds()):
		return errors.New("the goals --ttft and --itl must be at most an hour")
	case g.ITL > g.TTFT*1000:
		return errors.New("--itl is over a thousand times --ttft: are they in the wrong order?")
	case g.Prompt < 1 || g.Output < 1 || g.Prompt > 1<<26 || g.Output > 1<<26:
		return errors.New("--isl and --osl must be 1 to 67108864 tokens")
	}
	return nil
}

// context is that of streams half way through their answers.
func (g *Goals) context() float64 { return float64(g.Prompt) + float64(g.Output)/2 }

// Input is what Analyze takes.
type Input struct {
	Name    string
	Note    string
	Engines []Engine
	Points  []Point
	Goals   Goals
	// Chunk are the prompt tokens of a step; 0: those that fit what was measured.
	Chunk int
	// Of the channel between prefill and decode, which is not measured here.
	TokenBytes float64
	ChannelBps float64
	// More says that the sweep is not complete.
	More bool
}

// Measured is one degree.
type Measured struct {
	Engine
	Fit      *Fit             `json:"fit,omitempty"`
	Surfaces *planner.Profile `json:"surfaces,omitempty"`
	// Reason says why there is no fit.
	Reason string `json:"reason,omitempty"`
}

// Report is what a sweep came to.
type Report struct {
	Name      string     `json:"name"`
	Note      string     `json:"note,omitempty"`
	Partial   bool       `json:"partial"`
	Goals     Goals      `json:"goals"`
	Measured  []Measured `json:"engines"`
	Points    []Point    `json:"points"`
	Choice    Choice     `json:"choice"`
	TableNote string     `json:"table_note,omitempty"` // why there is no table
	in        Input
}

// Analyze fits what was measured and chooses. Degrees of which too little was measured are in the report with the reason.
func Analyze(in Input) (*Report, error) {
	if err := in.Goals.Check(); err != nil {
		return nil, err
	}
	r := &Report{Name: in.Name, Note: in.Note, Partial: in.More, Goals: in.Goals, Points: sorted(in.Points), in: in}
	engines := slices.Clone(in.Engines)
	slices.SortFunc(engines, func(a, b Engine) int { return cmp.Compare(a.Degree, b.Degree) })
	for _, e := range engines {
		m := Measured{Engine: e}
		points := of(r.Points, e.Degree)
		var err error
		if m.Fit, err = fit(points, in.Chunk); err == nil {
			m.Surfaces, err = surfaces(&e, m.Fit, points)
		}
		if err != nil {
			m.Fit, m.Reason = nil, err.Error()
		}
		r.Partial = r.Partial || e.Failed != "" || err != nil
		r.Measured = append(r.Measured, m)
	}
	r.Choice = choose(r.Measured, &r.Goals)
	return r, nil
}

func sorted(points []Point) []Point {
	list := slices.Clone(points)
	slices.SortFunc(list, func(a, b Point) int {
		return cmp.Or(cmp.Compare(a.Degree, b.Degree), -cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Context, b.Context), cmp.Compare(a.Streams, b.Streams), cmp.Compare(a.Prompt, b.Prompt), cmp.Compare(a.Cached, b.Cached))
	})
	return list
}

// of are the points of a degree that were measured.
func of(points []Point, degree int) []Point {
	var list []Point
	for _, p := range points {
		if p.Degree == degree && p.Why == "" {
			list = append(list, p)
		}
	}
	return list
}
