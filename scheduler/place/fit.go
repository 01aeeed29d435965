package place

import (
	"fmt"
	"slices"

	"github.com/headrace/headrace/scheduler/cluster"
)

// need is what an instance of a model asks for, its draft model included.
type need struct {
	m       *cluster.Model
	backend cluster.Backend
	share   float64 // of each GPU's total memory; 0: what is needed
	vram    int64   // of the whole instance
	ram     int64
	cpu     int64
	ramCPU  int64 // on a host without any GPU part
	each    int   // GPUs an instance; 0: as few as fit
	heads   int
	layers  *cluster.Layers
}

// Stages of the fit, in order; the first that yields a candidate wins.
const (
	OneGPU      = "one_gpu"
	SeveralGPUs = "several_gpus"
	Hosts       = "hosts"
	Partial     = "partial"
	CPU         = "cpu"
)

// needOf puts a model's claim together.
func (st *State) needOf(m *cluster.Model) need {
	b := st.set.Backends[backendName(m)]
	c := m.Claim
	n := need{m: m, backend: b, share: b.GPUShare, vram: int64(c.VRAM), ram: int64(c.RAM), cpu: int64(c.CPU), ramCPU: int64(c.RAMCPU), each: c.GPUsEach, heads: c.Heads}
	if c.GPUShare != nil {
		n.share = *c.GPUShare
	}
	if c.Layers != nil {
		l := *c.Layers
		n.layers = &l
		if n.vram == 0 {
			n.vram = int64(l.Count)*int64(l.Weight+l.KV) + int64(l.Output) + int64(l.Buffer)
		}
		if n.ramCPU == 0 {
			n.ramCPU = n.ram + int64(l.Input) + n.vram
		}
		n.ram += int64(l.Input)
	}
	if n.ramCPU == 0 {
		n.ramCPU = n.ram + n.vram
	}
	if d := st.models[m.Draft]; d != nil {
		draft := st.needOf(&cluster.Model{Name: d.Name, Backend: d.Backend, Claim: d.Claim})
		n.vram += draft.vram
		n.ram += draft.ram
		n.ramCPU += draft.ramCPU
		if n.layers != nil {
			n.layers.Output += cluster.Bytes(draft.vram)
		}
	}
	return n
}

// onGPU is what an instance over k GPUs (ranks) claims of g; false where that is less than it needs.
func (n *need) onGPU(g *gpu, k int) (int64, bool) {
	per := ceil(n.vram, int64(k))
	if n.share > 0 {
		claim := int64(float64(g.Memory) * n.share)
		return claim, claim > 0 && claim >= per
	}
	return per, true
}

func ceil(a, b int64) int64 { return (a + b - 1) / b }

// hostFits checks what the host must have beside GPUs; a dimension that is not asked for, or that the host does not
// count, is not checked.
func hostFits(h *host, ram, cpu int64) string {
	if ram > 0 && h.Memory > 0 && h.freeRAM < ram {
		return fmt.Sprintf("RAM: %d needed, %d allocatable", ram, h.freeRAM)
	}
	if cpu > 0 && h.Host.CPU > 0 && h.freeCPU < cpu {
		return fmt.Sprintf("CPU: %s needed, %s allocatable", cluster.Milli(cpu), cluster.Milli(h.freeCPU))
	}
	return ""
}

// fit tries the stages and answers the candidates of the first that has any.
func (st *State) fit(m *cluster.Model, hosts []*host) (string, []cluster.Candidate, []cluster.Filter) {
	n := st.needOf(m)
	named := len(m.GPUs) > 0
	noGPUs := n.vram == 0 && n.share == 0 && n.each == 0 && !named // a claim of RAM alone needs no device
	var report []cluster.Filter
	for _, s := range []struct {
		name string
		can  bool
		why  string
		run  func(*need, []*host) ([]cluster.Candidate, []cluster.Reject)
	}{
		{OneGPU, n.backend.OneGPU && n.each <= 1 && !noGPUs, skipped(n.backend.OneGPU, noGPUs, "asks for several GPUs"), st.oneGPU},
		{SeveralGPUs, n.backend.SeveralGPUs && n.each != 1 && !noGPUs, skipped(n.backend.SeveralGPUs, noGPUs, "asks for one GPU"), st.severalGPUs},
		{Hosts, n.backend.Hosts && n.each != 1 && !noGPUs, skipped(n.backend.Hosts, noGPUs, "asks for one GPU"), st.overHosts},
		{Partial, n.backend.Partial && n.layers != nil && !noGPUs, skipped(n.backend.Partial, noGPUs, "claim has no layers, so nobody knows what a part of it takes"), st.partial},
		{CPU, n.backend.CPU && !named, skipped(n.backend.CPU, false, "names GPUs"), st.onCPU},
	} {
		r := cluster.Filter{Name: s.name}
		if !s.can {
			r.Out = []cluster.Reject{{Why: "not tried: the model " + s.why}}
			report = append(report, r)
			continue
		}
		candidates, out := s.run(&n, hosts)
		r.Left, r.Out = len(candidates), out
		report = append(report, r)
		if len(candidates) > 0 {
			return s.name, candidates, report
		}
	}
	return "", nil, report
}

func skipped(backend, noGPUs bool, otherwise string) string {
	switch {
	case !backend:
		return "has a backend that cannot"
	case noGPUs:
		return "claims no GPU memory"
	}
	return otherwise
}

// oneGPU: every GPU that takes the whole instance is a candidate.
func (st *State) oneGPU(n *need, hosts []*host) (list []cluster.Candidate, out []cluster.Reject) {
	for _, h := range hosts {
		why := hostFits(h, n.ram, n.cpu)
		if why == "" {
			why = "no GPU that the model may take"
			for _, g := range st.allowed(n.m, h) {
				var c cluster.Candidate
				if c, why = oneOn(n, h, g, why); c.Uses != nil {
					list = append(list, c)
				}
			}
			if len(list) > 0 && list[len(list)-1].Uses[0].Host == h.Name {
				continue
			}
		}
		out = append(out, cluster.Reject{Host: h.Name, Why: why})
	}
	return list, out
}

func oneOn(n *need, h *host, g *gpu, why string) (cluster.Candidate, string) {
	claim, enough := n.onGPU(g, 1)
	switch {
	case !enough:
		return cluster.Candidate{}, fmt.Sprintf("GPU %d: %d needed, its share of %v is %d", *g.Index, n.vram, n.share, claim)
	case g.free < claim:
		return cluster.Candidate{}, fmt.Sprintf("GPU %d: VRAM %d needed, %d allocatable", *g.Index, claim, g.free)
	}
	use := cluster.GPUUse{Index: *g.Index, VRAM: cluster.Bytes(claim)}
	c := cluster.Candidate{Uses: []cluster.Use{{Host: h.Name, GPUs: []cluster.GPUUse{use}, RAM: cluster.Bytes(n.ram), CPU: cluster.Milli(n.cpu)}}}
	if n.layers != nil {
		c.LayersTotal, c.LayersOffloaded = n.layers.Count, n.layers.Count
		c.Uses[0].GPUs[0].Layers = n.layers.Count
	}
	return c, why
}

// severalGPUs: a candidate a host, of as few GPUs as fit or of the number asked for.
func (st *State) severalGPUs(n *need, hosts []*host) (list []cluster.Candidate, out []cluster.Reject) {
	for _, h := range hosts {
		why := hostFits(h, n.ram, n.cpu)
		if why == "" {
			var c cluster.Candidate
			if c, why = st.severalOn(n, h); c.Uses != nil {
				list = append(list, c)
				continue
			}
		}
		out = append(out, cluster.Reject{Host: h.Name, Why: why})
	}
	return list, out
}

func (st *State) severalOn(n *need, h *host) (cluster.Candidate, string) {
	gpus := st.allowed(n.m, h)
	lo, hi := 2, len(gpus)
	if n.each > 0 {
		lo, hi = n.each, min(n.each, len(gpus))
	}
	for k := lo; k <= hi; k++ {
		if n.each == 0 && n.heads > 0 && n.heads%k != 0 {
			continue
		}
		if picked := pickGPUs(n, gpus, k, k); picked != nil {
			c := cluster.Candidate{Uses: []cluster.Use{{Host: h.Name, GPUs: picked, RAM: cluster.Bytes(n.ram), CPU: cluster.Milli(n.cpu)}}}
			if n.layers != nil {
				c.LayersTotal, c.LayersOffloaded = n.layers.Count, n.layers.Count
				spreadLayers(picked, n.layers.Count)
			}
			return c, ""
		}
	}
	if uses := unevenly(n, gpus); uses != nil {
		return cluster.Candidate{
			Uses:            []cluster.Use{{Host: h.Name, GPUs: uses, RAM: cluster.Bytes(n.ram), CPU: cluster.Milli(n.cpu)}},
			LayersOffloaded: n.layers.Count, LayersTotal: n.layers.Count,
		}, ""
	}
	return cluster.Candidate{}, fmt.Sprintf("no %s of its %d GPUs take it together (VRAM %d in all, share %v)", count(n.each), len(gpus), n.vram, n.share)
}

func count(each int) string {
	if each == 0 {
		return "number"
	}
	return fmt.Sprintf("%d", each)
}

func spreadLayers(gpus []cluster.GPUUse, layers int) {
	for i := range gpus {
		gpus[i].Layers = layers*(i+1)/len(gpus) - layers*i/len(gpus)
	}
}

// pickGPUs takes k devices of one kind for an instance of ranks GPUs: those with the least room that is enough, of one NUMA
// node where one has k of them. Nil where there are not that many.
func pickGPUs(n *need, gpus []*gpu, k, ranks int) []cluster.GPUUse {
	var fit []*gpu
	for _, g := range gpus {
		if claim, enough := n.perRank(g, ranks); enough && g.free >= claim {
			fit = append(fit, g)
		}
	}
	slices.SortStableFunc(fit, func(a, b *gpu) int { // the list is in the snapshot's order: ties stay in it
		return cmpInt(a.free, b.free)
	})
	same := func(by func(a, b *gpu) bool) []*gpu {
		for _, first := range fit {
			var group []*gpu
			for _, g := range fit {
				if by(first, g) {
					group = append(group, g)
				}
			}
			if len(group) >= k {
				return group[:k]
			}
		}
		return nil
	}
	kind := func(a, b *gpu) bool { return a.GPU.Model == b.GPU.Model && a.Memory == b.Memory }
	picked := same(func(a, b *gpu) bool { return kind(a, b) && a.NUMA == b.NUMA })
	if picked == nil {
		picked = same(kind)
	}
	if picked == nil {
		return nil
	}
	slices.SortFunc(picked, func(a, b *gpu) int { return cmpInt(int64(*a.Index), int64(*b.Index)) })
	uses := make([]cluster.GPUUse, k)
	for i, g := range picked {
		claim, _ := n.perRank(g, ranks)
		uses[i] = cluster.GPUUse{Index: *g.Index, VRAM: cluster.Bytes(claim)}
	}
	return uses
}

// perRank is onGPU for one of ranks GPUs; with layers each also needs a buffer.
func (n *need) perRank(g *gpu, ranks int) (int64, bool) {
	claim, enough := n.onGPU(g, ranks)
	if n.layers != nil && n.share == 0 && ranks > 1 {
		l := n.layers
		claim = ceil(int64(l.Count), int64(ranks))*int64(l.Weight+l.KV) + int64(l.Output) + int64(l.Buffer)
	}
	return claim, enough
}

func cmpInt(a, b int64) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

// onCPU: a host with the RAM for everything.
func (st *State) onCPU(n *need, hosts []*host) (list []cluster.Candidate, out []cluster.Reject) {
	for _, h := range hosts {
		why := hostFits(h, n.ramCPU, n.cpu)
		if h.Memory == 0 {
			why = "its memory is not known"
		}
		if why != "" {
			out = append(out, cluster.Reject{Host: h.Name, Why: why})
			continue
		}
		c := cluster.Candidate{Uses: []cluster.Use{{Host: h.Name, RAM: cluster.Bytes(n.ramCPU), CPU: cluster.Milli(n.cpu)}}}
		if n.layers != nil {
			c.LayersTotal = n.layers.Count
		}
		list = append(list, c)
	}
	return list, out
}
