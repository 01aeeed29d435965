// Package sim replays traces of requests on simulated engines whose number a planner changes. Time is virtual: the same trace, options
// and seed give the same events on any run. It does no I/O; it knows planners by their interface and traces by their reader.
package sim

import (
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/headrace/headrace/scheduler/embedded"
	"github.com/headrace/headrace/scheduler/planner"
)

// Timing is how fast one engine is. A step computes a token of each stream and a chunk of prompts, and takes
//
//	step + prompt_token*T + prompt_attention*T*C + stream*N + kv_token*K
//
// for T tokens of prompts behind C tokens of the same prompts (on average), N streams and K tokens in the streams' KV cache.
type Timing struct {
	GPUs            int     `json:"gpus"`
	StepUs          float64 `json:"step_us"`
	PromptTokenUs   float64 `json:"prompt_token_us"`
	PromptAttention float64 `json:"prompt_attention_ps"` // for each pair of a computed token and one before it
	StreamUs        float64 `json:"stream_us"`
	KVTokenNs       float64 `json:"kv_token_ns"`
	ChunkTokens     int     `json:"chunk_tokens"` // of prompts, in one step
	KVTokens        int64   `json:"kv_tokens"`    // that the cache holds
	Streams         int     `json:"streams"`      // at once
	StartMs         float64 `json:"start_ms"`     // from the order to readiness
}

// Table is the timing of one model on one kind of GPU.
type Table struct {
	Name string `json:"name"`
	Note string `json:"note"`
	// What engines of each kind are like.
	Prefill Timing `json:"prefill"`
	Decode  Timing `json:"decode"`
	Whole   Timing `json:"whole"`
	// KV cache goes from prefill to decode: all but Overlap of it behind the computing, at ChannelBps of each engine, after ChannelUs.
	TokenBytes float64 `json:"kv_bytes_per_token"`
	ChannelBps float64 `json:"channel_bytes_per_s"`
	ChannelUs  float64 `json:"channel_setup_us"`
	Overlap    float64 `json:"channel_overlap"`
	// Jitter is how much steps (uniformly) and starts differ: 0.05 is by 5 % either way. Starts differ five times as much.
	Jitter float64 `json:"jitter"`
	// Surfaces are what measuring came to, of divided engines and of undivided ones; without them planners get the formula's.
	Surfaces      *planner.Profile `json:"surfaces,omitempty"`
	SurfacesWhole *planner.Profile `json:"surfaces_whole,omitempty"`
}

//go:embed tables/*.json
var tables embed.FS

// Tables are the names of those that come with the program.
func Tables() []string { return embedded.Names(tables, "tables") }

// TableNamed returns a table that comes with the program.
func TableNamed(name string) (*Table, error) {
	data, err := tables.ReadFile("tables/" + name + ".json")
	if err != nil {
		return nil, fmt.Errorf("unknown timing table %q; use %s, or a file", name, strings.Join(Tables(), ", "))
	}
	return ParseTable(data)
}

// ParseTable reads a table from JSON.
func ParseTable(data []byte) (*Table, error) {
	t := new(Table)
	d := json.NewDecoder(strings.NewReader(string(data)))
	d.DisallowUnknownFields()
	if err := d.Decode(t); err != nil {
		return nil, fmt.Errorf("read timing table: %w", err)
	}
	if err := t.Check(); err != nil {
		return nil, fmt.Errorf("read timing table: %w", err)
	}
	return t, nil
}

// Check says what is wrong with a table.
func (t *Table) Check() error {
	if t.TokenBytes < 0 || t.ChannelBps <= 0 || t.ChannelUs < 0 || t.Overlap < 0 || t.Overlap > 1 || t.Jitter < 0 || t.Jitter > 0.15 {
		return errors.New("the channel needs a rate, an overlap of 0 to 1, and a jitter of 0 to 0.15")
	}
	for name, e := range map[string]*Timing{"prefill": &t.Prefill, "decode": &t.Decode, "whole": &t.Whole} {
		if e.GPUs < 1 || e.StepUs <= 0 || e.PromptTokenUs < 0 || e.PromptAttention < 0 || e.StreamUs < 0 || e.KVTokenNs < 0 || e.ChunkTokens < 1 || e.KVTokens < 1 || e.Streams < 1 || e.StartMs < 0 {
			return fmt.Errorf("%s: all of gpus, step_us, chunk_tokens, kv_tokens and streams must be above 0, the rest not below", name)
		}
	}
	for _, p := range []*planner.Profile{t.Surfaces, t.SurfacesWhole} {
		if p == nil {
			continue
		}
		if _, err := planner.NewSurfaces(*p); err != nil {
			return fmt.Errorf("surfaces: %w", err)
		}
	}
	return nil
}

// wallUs is how long a step takes.
func (t *Timing) wallUs(prompt int, pairs float64, streams int, kv int64) float64 {
	return t.StepUs + t.PromptTokenUs*float64(prompt) + t.PromptAttention*1e-6*pairs + t.StreamUs*float64(streams) + t.KVTokenNs*1e-3*float64(kv)
}

// Alone is how long a prompt takes to compute, in microseconds, when nothing else is there.
func (t *Timing) Alone(prompt, cached int) float64 {
	us := 0.0
	for at := cached; at < prompt; {
		n := min(t.ChunkTokens, prompt-at)
		us += t.wallUs(n, float64(n)*(float64(at)+float64(n)/2), 0, 0)
		at += n
	}
	return us
}

// EngineGPUs is what engines of each kind take.
func (t *Table) EngineGPUs() planner.Pools {
	return planner.Pools{Prefill: t.Prefill.GPUs, Decode: t.Decode.GPUs, Whole: t.Whole.GPUs}
}
