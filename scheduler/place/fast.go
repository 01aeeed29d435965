package place

import (
	"fmt"
	"maps"
	"math"
	"math/bits"
	"slices"
	"strings"

	"github.com/headrace/headrace/scheduler/cluster"
	"github.com/headrace/headrace/scheduler/fleet"
)

// Fast places many instances on many hosts: Place's answer, without its explanation, from an index instead of a look at
// every host. It serves what is placed by binpack on GPUs of one host; Compile says why when a model is not of that kind.
// It has its own account of what is free, taken from the State when it is made. It is for one goroutine at a time.
type Fast struct {
	st      *State
	index   *fleet.Index
	classes []int // a host of each class, by class
	mixed   []bool
	keys    []string // labels that any model selects by
}

// NewFast indexes what is free in st now.
func NewFast(st *State) (*Fast, error) {
	f := &Fast{st: st}
	selected := map[string]bool{}
	for _, m := range st.models {
		for k := range m.Selector {
			selected[k] = true
		}
	}
	f.keys = slices.Sorted(maps.Keys(selected))
	hosts := make([]fleet.Host, len(st.hosts))
	class := map[string]int{}
	for i := range st.hosts {
		h := &st.hosts[i]
		fingerprint, mixed := f.fingerprint(h)
		c, ok := class[fingerprint]
		if !ok {
			c = len(f.classes)
			class[fingerprint] = c
			f.classes = append(f.classes, i)
			f.mixed = append(f.mixed, mixed)
		}
		hosts[i] = fleet.Host{Class: c, RAM: h.freeRAM, CPU: h.freeCPU, GPUs: make([]int64, len(h.gpus)), NUMA: make([]int, len(h.gpus))}
		if h.Memory == 0 {
			hosts[i].RAM = fleet.Uncounted
		}
		if h.Host.CPU == 0 {
			hosts[i].CPU = fleet.Uncounted
		}
		for j := range h.gpus {
			hosts[i].GPUs[j], hosts[i].NUMA[j] = h.gpus[j].free, h.gpus[j].NUMA
		}
	}
	var err error
	f.index, err = fleet.New(hosts, fleet.Weights{RAM: st.set.RAMWeight, VRAM: st.set.VRAMWeight, Max: st.set.PlacementMax})
	return f, err
}

// fingerprint is what the filters look at of a host, and the kind of its GPUs; mixed where those are of several kinds.
func (f *Fast) fingerprint(h *host) (string, bool) {
	var b strings.Builder
	fmt.Fprintf(&b, "%q %q", h.Cluster, h.State)
	for _, k := range f.keys {
		v, ok := h.Labels[k]
		fmt.Fprintf(&b, " %v %q", ok, v)
	}
	mixed := false
	for i := range h.gpus {
		g := &h.gpus[i]
		if i == 0 {
			fmt.Fprintf(&b, " %q %q %d", g.GPU.Model, g.Vendor, g.Memory)
		} else if g.GPU.Model != h.gpus[0].GPU.Model || g.Vendor != h.gpus[0].Vendor || g.Memory != h.gpus[0].Memory {
			mixed = true
		}
	}
	return fmt.Sprintf("%s %v", b.String(), mixed), mixed
}

// Compiled is a model as the index sees it.
type Compiled struct {
	model   *cluster.Model
	classes []int
	asks    []fleet.Ask // by class
	local   []int       // hosts with its files, or its draft's
	score   []float64   // what these are worth there
}

// localMax is how many hosts with a model's files are looked at one by one.
const localMax = 256

// Compile prepares a model. An error says why the index cannot serve it; Place can.
func (f *Fast) Compile(m *cluster.Model) (*Compiled, error) {
	no := func(why string) (*Compiled, error) {
		return nil, fmt.Errorf("model %s: the index cannot serve it, for %s", m.Name, why)
	}
	n := f.st.needOf(m)
	gpus := max(n.each, 1)
	switch {
	case f.st.strategy(m) != cluster.Binpack:
		return no("its strategy is " + f.st.strategy(m))
	case len(m.GPUs) > 0:
		return no("it names GPUs")
	case m.Role != "" || m.Pair != "":
		return no("its role's channels are scored")
	case n.vram == 0 && n.share == 0 && n.each == 0:
		return no("it claims no GPU memory")
	case gpus > 1 && n.layers != nil && n.backend.Partial && n.share == 0:
		return no("its layers may be divided unevenly")
	case gpus == 1 && !n.backend.OneGPU || gpus > 1 && !n.backend.SeveralGPUs || gpus > fleet.GPUsMax:
		return no("its backend or number of GPUs")
	}
	c := &Compiled{model: m}
	for i, at := range f.classes {
		h := &f.st.hosts[at]
		if len(h.gpus) == 0 || f.out(m, h) || !usable(n.backend, m, h.gpus[0].Vendor) {
			continue
		}
		if f.mixed[i] {
			return no("host " + h.Name + " has GPUs of several kinds")
		}
		claim, enough := n.perRank(&h.gpus[0], gpus)
		if !enough {
			continue
		}
		c.classes = append(c.classes, i)
		c.asks = append(c.asks, fleet.Ask{GPUs: gpus, VRAM: claim, RAM: n.ram, CPU: n.cpu})
	}
	return c, f.locals(c)
}

// out says whether a filter takes the host out.
func (f *Fast) out(m *cluster.Model, h *host) bool {
	for _, x := range filters {
		if x.out(f.st, m, h) != "" {
			return true
		}
	}
	return false
}

// locals lists the hosts where locality adds to the score.
func (f *Fast) locals(c *Compiled) error {
	if len(f.st.files[c.model.Name])+len(f.st.files[c.model.Draft]) > localMax {
		return fmt.Errorf("model %s: the index cannot serve it, for more than %d hosts have its files", c.model.Name, localMax)
	}
	for i := range f.st.hosts {
		if !f.st.files[c.model.Name][i] && (c.model.Draft == "" || !f.st.files[c.model.Draft][i]) {
			continue
		}
		s, _ := f.st.locality(c.model, []cluster.Use{{Host: f.st.hosts[i].Name}})
		c.local = append(c.local, i)
		c.score = append(c.score, s)
	}
	return nil
}

// Pick is where an instance goes, and what it takes there.
type Pick struct {
	fleet.Pick
	Ask fleet.Ask
	// Total is the score with locality.
	Total float64
}

// Place finds the best place among what is free; it books nothing and allocates nothing. False where no host has one or,
// of a model that leaves its number of GPUs open, no single GPU has: then Place of the State goes on.
func (f *Fast) Place(c *Compiled) (Pick, bool) {
	best, ok := Pick{Total: math.Inf(-1)}, false
	for i, class := range c.classes {
		p, fits := f.index.Best(class, &c.asks[i])
		if fits && (!ok || better(p, p.Score, best)) {
			best, ok = Pick{Pick: p, Ask: c.asks[i], Total: p.Score}, true
		}
	}
	for i, h := range c.local {
		class := f.index.Class(h)
		for k, of := range c.classes {
			if of != class {
				continue
			}
			p, fits := f.index.On(h, &c.asks[k])
			if total := p.Score + c.score[i]; fits && (!ok || better(p, total, best)) {
				best, ok = Pick{Pick: p, Ask: c.asks[k], Total: total}, true
			}
		}
	}
	return best, ok
}

func better(p fleet.Pick, total float64, q Pick) bool {
	if total != q.Total {
		return total > q.Total
	}
	if p.Host != q.Host {
		return p.Host < q.Host
	}
	return bits.TrailingZeros64(p.GPUs) < bits.TrailingZeros64(q.GPUs)
}

// Take books a pick; Give gives it back.
func (f *Fast) Take(p Pick) { f.index.Take(p.Pick, &p.Ask) }

// Give gives back what Take booked.
func (f *Fast) Give(p Pick) { f.index.Give(p.Pick, &p.Ask) }

// Host is the name of a pick's host.
func (f *Fast) Host(p Pick) string { return f.st.hosts[p.Host].Name }

// Devices are the indexes of a pick's GPUs.
func (f *Fast) Devices(p Pick) []int {
	var out []int
	for rest := p.GPUs; rest != 0; rest &= rest - 1 {
		out = append(out, *f.st.hosts[p.Host].gpus[bits.TrailingZeros64(rest)].Index)
	}
	return out
}

// Scan answers as Place does by a look at every host: what the index is held against.
func (f *Fast) Scan(c *Compiled) (Pick, bool) {
	best, ok := Pick{Total: math.Inf(-1)}, false
	for h := range f.index.Hosts() {
		class, added := f.index.Class(h), 0.
		for i, l := range c.local {
			if l == h {
				added = c.score[i]
			}
		}
		for k, of := range c.classes {
			if of != class {
				continue
			}
			p, fits := f.index.On(h, &c.asks[k])
			if total := p.Score + added; fits && (!ok || better(p, total, best)) {
				best, ok = Pick{Pick: p, Ask: c.asks[k], Total: total}, true
			}
		}
	}
	return best, ok
}
