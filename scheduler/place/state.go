// Package place puts instances on hosts: filters, staged fit, scorers. A State is the free capacity of a snapshot,
// changed by what is placed and removed. It is pure: no clock, no randomness, no I/O, and every tie is decided by the
// snapshot's order. A State is for one goroutine at a time.
//
// Rules and formulas are GPUStack's (specs: docs/scheduling.md); where they differ the page says so.
package place

import (
	"fmt"

	"github.com/headrace/headrace/scheduler/cluster"
)

// gpu is a device and what is left of it.
type gpu struct {
	*cluster.GPU
	free  int64
	count map[string]int // instances by model
	total int
}

// host is a machine and what is left of it.
type host struct {
	*cluster.Host
	at       int // place in the snapshot
	freeCPU  int64
	freeRAM  int64
	gpus     []gpu
	count    map[string]int
	total    int
	nicBest  float64 // Gbps of its best port
	rdmaBest float64
}

// State is the free capacity of a snapshot's hosts.
type State struct {
	set      Settings
	snap     *cluster.Snapshot
	hosts    []host
	byName   map[string]int
	models   map[string]*cluster.Model
	files    map[string]map[int]bool // hosts with a model's ready files
	channels map[[2]int]float64      // measured Gbps, lower host first
	gbpsMax  float64
	parts    map[string]placed // what instances hold, to give back
	onModel  map[string][]string
}

type placed struct {
	model string
	uses  []cluster.Use
}

// NewState counts what is free in s. It keeps s and does not change it.
func NewState(s *cluster.Snapshot) (*State, error) {
	st := &State{
		set: ResolveSettings(&s.Settings), snap: s, hosts: make([]host, len(s.Hosts)), byName: map[string]int{},
		models: map[string]*cluster.Model{}, files: map[string]map[int]bool{}, channels: map[[2]int]float64{},
		parts: map[string]placed{}, onModel: map[string][]string{},
	}
	for i := range s.Hosts {
		st.addHost(i, &s.Hosts[i])
	}
	for i := range s.Models {
		m := &s.Models[i]
		st.models[m.Name] = m
		if _, ok := st.set.Backends[backendName(m)]; !ok {
			return nil, fmt.Errorf("model %s: no backend %q; use %s, or describe it under settings.backends", m.Name, m.Backend, backendNames(st.set.Backends))
		}
	}
	for _, f := range s.ModelFiles {
		if f.State == "" || f.State == cluster.Ready {
			if st.files[f.Model] == nil {
				st.files[f.Model] = map[int]bool{}
			}
			st.files[f.Model][st.byName[f.Host]] = true
		}
	}
	for _, c := range s.Channels {
		st.channels[pairKey(st.byName[c.From], st.byName[c.To])] = c.Gbps
		st.gbpsMax = max(st.gbpsMax, c.Gbps)
	}
	for i := range s.Instances {
		st.addInstance(&s.Instances[i])
	}
	return st, nil
}

func (st *State) addHost(i int, h *cluster.Host) {
	st.byName[h.Name] = i
	at := host{
		Host: h, at: i, freeCPU: int64(h.CPU - h.CPUUsed), freeRAM: int64(h.Memory - h.MemoryReserved - h.MemoryUsed),
		gpus: make([]gpu, len(h.GPUs)), count: map[string]int{},
	}
	for j := range h.GPUs {
		g := &h.GPUs[j]
		at.gpus[j] = gpu{GPU: g, free: int64(g.Memory - g.Reserved - g.Used), count: map[string]int{}}
	}
	for _, n := range h.NICs {
		at.nicBest = max(at.nicBest, n.Gbps)
		if n.Kind == "rdma" {
			at.rdmaBest = max(at.rdmaBest, n.Gbps)
		}
	}
	st.gbpsMax = max(st.gbpsMax, at.nicBest)
	st.hosts[i] = at
}

// addInstance takes what an existing instance holds, even where that is more than there is.
func (st *State) addInstance(n *cluster.Instance) {
	uses := make([]cluster.Use, len(n.Parts))
	for i, p := range n.Parts {
		uses[i] = cluster.Use{Host: p.Host, RAM: p.RAM, CPU: p.CPU}
		for _, g := range p.GPUs {
			uses[i].GPUs = append(uses[i].GPUs, cluster.GPUUse{Index: g, VRAM: p.VRAM})
		}
	}
	st.apply(n.Name, n.Model, uses)
}

// apply books uses under a name.
func (st *State) apply(name, model string, uses []cluster.Use) {
	st.parts[name] = placed{model, uses}
	st.onModel[model] = append(st.onModel[model], name)
	st.book(model, uses, 1)
}

// book takes (sign 1) or gives back (sign -1).
func (st *State) book(model string, uses []cluster.Use, sign int) {
	for _, u := range uses {
		h := &st.hosts[st.byName[u.Host]]
		h.freeCPU -= int64(sign) * int64(u.CPU)
		h.freeRAM -= int64(sign) * int64(u.RAM)
		bump(h.count, model, sign)
		h.total += sign
		for _, g := range u.GPUs {
			d := h.gpu(g.Index)
			d.free -= int64(sign) * int64(g.VRAM)
			bump(d.count, model, sign)
			d.total += sign
		}
	}
}

// bump counts, and forgets what came to nothing.
func bump(count map[string]int, model string, by int) {
	if count[model] += by; count[model] == 0 {
		delete(count, model)
	}
}

func (h *host) gpu(index int) *gpu {
	for i := range h.gpus {
		if *h.gpus[i].Index == index {
			return &h.gpus[i]
		}
	}
	panic(fmt.Sprintf("place: host %s has no GPU %d", h.Name, index))
}

// Add books a placement that Place found.
func (st *State) Add(p *cluster.Placement) { st.apply(p.Instance, p.Model, p.Uses) }

// Remove gives back what an instance holds; it says whether there was one.
func (st *State) Remove(instance string) bool {
	p, ok := st.parts[instance]
	if !ok {
		return false
	}
	st.book(p.model, p.uses, -1)
	delete(st.parts, instance)
	list := st.onModel[p.model]
	for i, n := range list {
		if n == instance {
			st.onModel[p.model] = append(list[:i:i], list[i+1:]...)
		}
	}
	return true
}

// Uses is what an instance holds.
func (st *State) Uses(instance string) []cluster.Use { return st.parts[instance].uses }

func pairKey(a, b int) [2]int {
	if a > b {
		a, b = b, a
	}
	return [2]int{a, b}
}
