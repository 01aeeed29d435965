package profile

import (
	"embed"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/headrace/headrace/scheduler/embedded"
)

//go:embed reference/*.json
var references embed.FS

// Reference is what others published of engines, for trying without hardware.
type Reference struct {
	Name    string   `json:"-"`
	About   string   `json:"about"`
	Sources []string `json:"sources"`
	Note    string   `json:"note"` // how their figures were made use of, and what is reckoned
	// TokenBytes is the KV cache of a token.
	TokenBytes float64           `json:"token_bytes"`
	Engines    []referenceEngine `json:"engines"`
}

// referenceEngine has measurements, or a formula.
type referenceEngine struct {
	Engine  Engine           `json:"engine"`
	Prefill []referencePoint `json:"prefill,omitempty"`
	Decode  []referencePoint `json:"decode,omitempty"`
	Formula *Fit             `json:"formula,omitempty"`
}

type referencePoint struct {
	Prompt  int     `json:"prompt,omitempty"`
	Streams int     `json:"streams,omitempty"`
	Context int     `json:"context,omitempty"`
	Ms      float64 `json:"ms"`
}

// References are their names.
func References() []string { return embedded.Names(references, "reference") }

// ReferenceNamed finds one.
func ReferenceNamed(name string) (*Reference, error) {
	b, err := references.ReadFile("reference/" + name + ".json")
	if err != nil {
		return nil, fmt.Errorf("there is no reference %q; there are %s", name, strings.Join(References(), ", "))
	}
	r := &Reference{Name: name}
	if err := json.Unmarshal(b, r); err != nil {
		return nil, fmt.Errorf("read reference %s: %w", name, err)
	}
	return r, nil
}

// Input is what Analyze takes.
func (r *Reference) Input(g Goals, channelBps float64) Input {
	in := Input{Name: r.Name, Note: fmt.Sprintf("%s. From %s. %s", r.About, strings.Join(r.Sources, "; "), r.Note), Goals: g, TokenBytes: r.TokenBytes, ChannelBps: channelBps}
	for _, e := range r.Engines {
		in.Engines = append(in.Engines, e.Engine)
		add := func(p Point) {
			p.Degree, p.Rounds, p.Low, p.High, p.Mean = e.Engine.Degree, 1, p.Ms, p.Ms, float64(p.Context)
			in.Points = append(in.Points, p)
		}
		if f := e.Formula; f != nil {
			e.Prefill, e.Decode = f.spread(&e.Engine)
		}
		for _, p := range e.Prefill {
			add(Point{Kind: Prefill, Prompt: p.Prompt, Ms: p.Ms})
		}
		for _, p := range e.Decode {
			add(Point{Kind: Decode, Streams: p.Streams, Context: p.Context, Ms: p.Ms})
		}
	}
	return in
}

// spread are points that a formula says, within what the engine takes.
func (f *Fit) spread(e *Engine) (prefill, decode []referencePoint) {
	for n := 64; n <= e.ContextTokens; n *= 2 {
		prefill = append(prefill, referencePoint{Prompt: n, Ms: f.ttft(n, 0)})
	}
	for context := 256; context <= e.ContextTokens; context *= 2 {
		for n := 1; n <= e.Streams && int64(n*context) <= e.KVTokens; n *= 2 {
			decode = append(decode, referencePoint{Streams: n, Context: context, Ms: f.itl(float64(n), float64(context))})
		}
	}
	return prefill, decode
}
