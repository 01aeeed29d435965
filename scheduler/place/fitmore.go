package place

import (
	"fmt"
	"slices"

	"github.com/headrace/headrace/scheduler/cluster"
)

// overHosts: for each host as the main one, the fewest others that make it enough. Every host gives equally many GPUs
// (tensor parallel inside a host, pipeline between them); among the others those on the main host's fabric come first.
func (st *State) overHosts(n *need, hosts []*host) (list []cluster.Candidate, out []cluster.Reject) {
	for _, h := range hosts {
		if c, why := st.overHostsFrom(n, h, hosts); c.Uses != nil {
			list = append(list, c)
		} else {
			out = append(out, cluster.Reject{Host: h.Name, Why: why})
		}
	}
	if len(list) > 0 { // fewer hosts are better than more: less crosses the network
		fewest := slices.MinFunc(list, func(a, b cluster.Candidate) int { return len(a.Uses) - len(b.Uses) })
		kept := list[:0:0]
		for _, c := range list {
			if len(c.Uses) == len(fewest.Uses) {
				kept = append(kept, c)
			} else {
				out = append(out, cluster.Reject{Host: c.Uses[0].Host, Why: fmt.Sprintf("as the main one it needs %d hosts, others %d", len(c.Uses), len(fewest.Uses))})
			}
		}
		list = kept
	}
	return list, out
}

// hostsMax bounds how many hosts one instance is divided over.
const hostsMax = 64

func (st *State) overHostsFrom(n *need, mainHost *host, hosts []*host) (cluster.Candidate, string) {
	mine := st.allowed(n.m, mainHost)
	if len(mine) == 0 {
		return cluster.Candidate{}, "no GPU that the model may take"
	}
	var best []cluster.Use
	for per := len(mine); per >= 1; per-- {
		if n.each > 0 && n.each%per != 0 || n.each == 0 && n.heads > 0 && n.heads%per != 0 {
			continue
		}
		lo, hi := 2, min(len(hosts), hostsMax)
		if n.each > 0 {
			lo, hi = n.each/per, min(n.each/per, hi)
		}
		if best != nil {
			hi = min(hi, len(best)-1)
		}
		if uses := st.divide(n, mainHost, hosts, per, max(lo, 2), hi); uses != nil {
			best = uses
		}
	}
	if best == nil {
		return cluster.Candidate{}, fmt.Sprintf("it and the other hosts together have too few GPUs that fit (VRAM %d in all)", n.vram)
	}
	return cluster.Candidate{Uses: best}, ""
}

// divide finds the least number of hosts between lo and hi that take the instance with per GPUs each.
func (st *State) divide(n *need, mainHost *host, hosts []*host, per, lo, hi int) []cluster.Use {
	for total := lo; total <= hi; total++ {
		ranks := per * total
		ram, cpu := ceil(n.ram, int64(total)), ceil(n.cpu, int64(total))
		use := func(h *host) *cluster.Use {
			if hostFits(h, ram, cpu) != "" {
				return nil
			}
			gpus := pickGPUs(n, st.allowed(n.m, h), per, ranks)
			if gpus == nil {
				return nil
			}
			return &cluster.Use{Host: h.Name, GPUs: gpus, RAM: cluster.Bytes(ram), CPU: cluster.Milli(cpu)}
		}
		first := use(mainHost)
		if first == nil {
			continue
		}
		uses := []cluster.Use{*first}
		for _, near := range []bool{true, false} {
			for _, h := range hosts {
				if len(uses) == total || h == mainHost || sameFabric(mainHost, h) != near {
					continue
				}
				if u := use(h); u != nil {
					uses = append(uses, *u)
				}
			}
		}
		if len(uses) == total {
			return uses
		}
	}
	return nil
}

// sameFabric says whether two hosts have ports that reach each other by name.
func sameFabric(a, b *host) bool {
	for _, x := range a.NICs {
		for _, y := range b.NICs {
			if x.Fabric != "" && x.Fabric == y.Fabric {
				return true
			}
		}
	}
	return false
}

// unevenly divides all layers of a model over the fewest GPUs of a host, to each as many as it has room for: devices need not be equal for
// an engine that takes layers one by one. Nil where that is not so, or where they do not go on.
func unevenly(n *need, gpus []*gpu) []cluster.GPUUse {
	if n.layers == nil || !n.backend.Partial || n.share > 0 {
		return nil
	}
	l := n.layers
	each := int64(l.Weight + l.KV)
	if each <= 0 || l.Count <= 0 {
		return nil
	}
	by := slices.Clone(gpus)
	slices.SortStableFunc(by, func(a, b *gpu) int { return cmpInt(b.free, a.free) })
	lo, hi := 2, len(by)
	if n.each > 0 {
		lo, hi = n.each, min(n.each, len(by))
	}
	for k := lo; k <= hi; k++ {
		for last := range k { // the one that takes what goes with the last layer
			if uses := fill(by[:k], last, l, each); uses != nil {
				return uses
			}
		}
	}
	return nil
}

// fill gives each GPU layers in turn, one at least, and the output to the one at last.
func fill(gpus []*gpu, last int, l *cluster.Layers, each int64) []cluster.GPUUse {
	left := l.Count
	uses := make([]cluster.GPUUse, len(gpus))
	for i, g := range gpus {
		beside := int64(l.Buffer)
		if i == last {
			beside += int64(l.Output)
		}
		layers := min((g.free-beside)/each, int64(left-(len(gpus)-1-i)))
		if g.free < beside+each || layers < 1 {
			return nil
		}
		left -= int(layers)
		uses[i] = cluster.GPUUse{Index: *g.Index, VRAM: cluster.Bytes(layers*each + beside), Layers: int(layers)}
	}
	if left > 0 {
		return nil
	}
	slices.SortFunc(uses, func(a, b cluster.GPUUse) int { return a.Index - b.Index })
	return uses
}

// partial: as many layers on GPUs as fit, the rest in RAM. Only the candidates with the most layers stay.
func (st *State) partial(n *need, hosts []*host) (list []cluster.Candidate, out []cluster.Reject) {
	most := 0
	for _, h := range hosts {
		c, why := st.partialOn(n, h)
		if c.Uses == nil {
			out = append(out, cluster.Reject{Host: h.Name, Why: why})
			continue
		}
		most = max(most, c.LayersOffloaded)
		list = append(list, c)
	}
	kept := list[:0:0]
	for _, c := range list {
		if c.LayersOffloaded == most {
			kept = append(kept, c)
		} else {
			out = append(out, cluster.Reject{Host: c.Uses[0].Host, Why: fmt.Sprintf("it takes %d layers, another host %d", c.LayersOffloaded, most)})
		}
	}
	return kept, out
}

func (st *State) partialOn(n *need, h *host) (cluster.Candidate, string) {
	l := n.layers
	each := int64(l.Weight + l.KV)
	if each <= 0 || l.Count <= 0 {
		return cluster.Candidate{}, "a layer takes nothing: the claim's layers are not known"
	}
	gpus := st.allowed(n.m, h)
	slices.SortStableFunc(gpus, func(a, b *gpu) int { return cmpInt(b.free, a.free) })
	if n.each > 0 && len(gpus) > n.each {
		gpus = gpus[:n.each]
	}
	var uses []cluster.GPUUse
	left := l.Count - 1 // with the last one it would be no part
	for _, g := range gpus {
		layers := min(int64(left), (g.free-int64(l.Buffer))/each)
		if layers <= 0 {
			continue
		}
		left -= int(layers)
		uses = append(uses, cluster.GPUUse{Index: *g.Index, VRAM: cluster.Bytes(layers*each) + l.Buffer, Layers: int(layers)})
	}
	offloaded := l.Count - 1 - left
	if offloaded == 0 {
		return cluster.Candidate{}, fmt.Sprintf("no GPU has room for a layer (%d and a buffer of %d)", each, l.Buffer)
	}
	ram := n.ram + int64(l.Count-offloaded)*each + int64(l.Output)
	if why := hostFits(h, ram, n.cpu); why != "" {
		return cluster.Candidate{}, why
	}
	slices.SortFunc(uses, func(a, b cluster.GPUUse) int { return a.Index - b.Index })
	return cluster.Candidate{
		Uses:            []cluster.Use{{Host: h.Name, GPUs: uses, RAM: cluster.Bytes(ram), CPU: cluster.Milli(n.cpu)}},
		LayersOffloaded: offloaded, LayersTotal: l.Count,
	}, ""
}
