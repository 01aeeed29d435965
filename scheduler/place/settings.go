package place

import (
	"maps"
	"slices"
	"strings"

	"github.com/headrace/headrace/scheduler/cluster"
)

// Settings are a snapshot's settings with every default filled in.
type Settings struct {
	Strategy                                      string
	PlacementMax, LocalityMax, ChannelMax, NICMax float64
	RAMWeight, VRAMWeight, MainWeight, SubWeight  float64
	DraftWeight, OthersWeight                     float64
	StatusMax, OffloadMax, KeepMax                float64
	Backends                                      map[string]cluster.Backend
}

// share is what vLLM and its like take of a GPU unless told otherwise.
const share = 0.9

// backends is the matrix: which engine may be divided over GPUs and hosts, or run on the CPU.
var backends = map[string]cluster.Backend{
	"vllm":     {OneGPU: true, SeveralGPUs: true, Hosts: true, GPUShare: share},
	"sglang":   {OneGPU: true, SeveralGPUs: true, Hosts: true, GPUShare: share},
	"mindie":   {OneGPU: true, SeveralGPUs: true, Hosts: true, GPUShare: share, Vendors: []string{"cann"}},
	"gguf":     {OneGPU: true, SeveralGPUs: true, Partial: true, CPU: true},
	"custom":   {OneGPU: true, SeveralGPUs: true, CPU: true},
	"voxbox":   {OneGPU: true, SeveralGPUs: true, CPU: true},
	"headrace": {CPU: true},
}

// ResolveSettings fills in what is left out.
func ResolveSettings(s *cluster.Settings) Settings {
	or := func(p *float64, d float64) float64 {
		if p == nil {
			return d
		}
		return *p
	}
	r := Settings{
		Strategy: s.Strategy, PlacementMax: or(s.PlacementMax, 100), LocalityMax: or(s.LocalityMax, 5), ChannelMax: or(s.ChannelMax, 5),
		NICMax: or(s.NICMax, 1), RAMWeight: or(s.RAMWeight, 1), VRAMWeight: or(s.VRAMWeight, 2), MainWeight: or(s.MainWeight, 5),
		SubWeight: or(s.SubWeight, 1), DraftWeight: or(s.DraftWeight, .5), OthersWeight: or(s.OthersWeight, .2),
		StatusMax: or(s.StatusMax, 100), OffloadMax: or(s.OffloadMax, 10), KeepMax: or(s.KeepMax, 1), Backends: map[string]cluster.Backend{},
	}
	if r.Strategy == "" {
		r.Strategy = cluster.Binpack
	}
	for name, b := range backends {
		r.Backends[name] = b
	}
	for name, b := range s.Backends {
		r.Backends[strings.ToLower(name)] = b
	}
	return r
}

// backendName is the row of the matrix; spellings differ between the systems.
func backendName(m *cluster.Model) string {
	switch name := strings.ToLower(m.Backend); name {
	case "":
		return "vllm"
	case "llama-box", "llamabox", "llama.cpp":
		return "gguf"
	case "vox-box":
		return "voxbox"
	default:
		return name
	}
}

func backendNames(m map[string]cluster.Backend) string {
	return strings.Join(slices.Sorted(maps.Keys(m)), ", ")
}

// strategy of a model.
func (st *State) strategy(m *cluster.Model) string {
	if m.Strategy != "" {
		return m.Strategy
	}
	return st.set.Strategy
}
