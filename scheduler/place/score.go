package place

import (
	"slices"

	"github.com/headrace/headrace/scheduler/cluster"
	"github.com/headrace/headrace/scheduler/fleet"
)

// binpack is the score of a claim on what is allocatable before it, at most top.
func (s *Settings) binpack(ram, ramAlloc, vram, vramAlloc int64, top float64) float64 {
	return fleet.Weights{RAM: s.RAMWeight, VRAM: s.VRAMWeight, Max: top}.Score(ram, ramAlloc, vram, vramAlloc)
}

// ratio of what is not there is 0: a dimension nobody counts says nothing.
func ratio(claim, alloc int64) float64 {
	if alloc <= 0 {
		return 0
	}
	return float64(claim) / float64(alloc)
}

// binpackUse is the score of the part on one host: the best of its GPUs counts. back is added to what is allocatable for
// an instance that is there already.
func (st *State) binpackUse(u cluster.Use, back int64, top float64) (float64, []cluster.Figure) {
	h := &st.hosts[st.byName[u.Host]]
	ramAlloc := h.freeRAM + back*int64(u.RAM)
	figures := []cluster.Figure{{Name: "ram", Value: float64(u.RAM)}, {Name: "ram_allocatable", Value: float64(ramAlloc)}}
	if len(u.GPUs) == 0 {
		return ratio(int64(u.RAM), ramAlloc) * top, figures
	}
	best, vram, vramAlloc := -1., int64(0), int64(0)
	for _, g := range u.GPUs {
		alloc := h.gpu(g.Index).free + back*int64(g.VRAM)
		if s := st.set.binpack(int64(u.RAM), ramAlloc, int64(g.VRAM), alloc, top); s > best {
			best, vram, vramAlloc = s, int64(g.VRAM), alloc
		}
	}
	return best, append(figures, cluster.Figure{Name: "vram", Value: float64(vram)}, cluster.Figure{Name: "vram_allocatable", Value: float64(vramAlloc)})
}

// binpackUses weighs the main host and the subordinates: a mean, so it never leaves 0..max.
func (st *State) binpackUses(uses []cluster.Use, back int64, top float64) (float64, []cluster.Figure) {
	if len(uses) == 0 {
		return 0, nil
	}
	sum, figures := st.binpackUse(uses[0], back, top)
	if len(uses) == 1 {
		return sum, figures
	}
	figures = append(figures, cluster.Figure{Name: "main", Value: sum})
	sum *= st.set.MainWeight
	for _, u := range uses[1:] {
		s, _ := st.binpackUse(u, back, top)
		figures = append(figures, cluster.Figure{Name: "sub:" + u.Host, Value: s})
		sum += s * st.set.SubWeight
	}
	all := st.set.MainWeight + st.set.SubWeight*float64(len(uses)-1)
	if all <= 0 {
		return 0, figures
	}
	return sum / all, figures
}

func inv(x int) float64 { return 1 / (1 + float64(x)) }

// spread is the score of a host and devices by how many instances are there. zero says that some host in question holds
// none of the model. An instance that is there already is counted with the rest.
func (st *State) spread(model string, uses []cluster.Use, zero bool, top float64) (float64, []cluster.Figure) {
	u := uses[0]
	h := &st.hosts[st.byName[u.Host]]
	cur := h.count[model]
	others := h.total - cur
	var worker float64
	switch {
	case zero && cur == 0:
		worker = .85 + .15*inv(others)
	case zero:
		worker = .45 + .35*inv(cur) + .20*inv(others)
	default:
		worker = .50 + .25*inv(cur) + .15*inv(others)
	}
	figures := []cluster.Figure{{Name: "current", Value: float64(cur)}, {Name: "others", Value: float64(others)}, {Name: "worker", Value: worker}}
	if len(u.GPUs) == 0 {
		return worker * top, figures
	}
	sum := 0.
	for _, g := range u.GPUs {
		d := h.gpu(g.Index)
		on := d.count[model]
		sum += 1 / (1 + float64(on) + st.set.OthersWeight*float64(d.total-on))
	}
	gpu := sum / float64(len(u.GPUs))
	return (worker*.85 + gpu*.15) * top, append(figures, cluster.Figure{Name: "gpu", Value: gpu})
}

// locality is the share of the candidate's hosts that hold the model's files, and its draft's where those are anywhere.
func (st *State) locality(m *cluster.Model, uses []cluster.Use) (float64, []cluster.Figure) {
	has := func(model string) float64 {
		n := 0
		for _, u := range uses {
			if st.files[model][st.byName[u.Host]] {
				n++
			}
		}
		return float64(n) / float64(len(uses))
	}
	mainRatio := has(m.Name)
	figures := []cluster.Figure{{Name: "main_ratio", Value: mainRatio}}
	if m.Draft == "" || len(st.files[m.Draft]) == 0 {
		return mainRatio * st.set.LocalityMax, figures
	}
	draft := has(m.Draft)
	w := st.set.DraftWeight
	return (mainRatio + w*draft) / (1 + w) * st.set.LocalityMax, append(figures, cluster.Figure{Name: "draft_ratio", Value: draft})
}

// quality of the connection of two hosts, 0 to 1: 1 inside a host; else its rate over the fastest of the snapshot, as
// measured, or by their ports: RDMA ports of one fabric at their rate, anything else at half.
func (st *State) quality(a, b int) (float64, float64) {
	if a == b {
		return 1, st.gbpsMax
	}
	if st.gbpsMax <= 0 {
		return 0, 0
	}
	if gbps, ok := st.channels[pairKey(a, b)]; ok {
		return gbps / st.gbpsMax, gbps
	}
	x, y, gbps := &st.hosts[a], &st.hosts[b], 0.
	for _, p := range x.NICs {
		for _, q := range y.NICs {
			rate := min(p.Gbps, q.Gbps)
			if p.Kind != "rdma" || q.Kind != "rdma" || p.Fabric != q.Fabric {
				rate /= 2
			}
			gbps = max(gbps, rate)
		}
	}
	return gbps / st.gbpsMax, gbps
}

// channel is what a candidate's way to the instances of the other role is worth: the mean over them.
func (st *State) channel(m *cluster.Model, uses []cluster.Use) (float64, []cluster.Figure) {
	at, n, sum, slowest := st.byName[uses[0].Host], 0, 0., 0.
	for _, name := range st.onModel[m.Pair] {
		partner := st.parts[name].uses
		if len(partner) == 0 {
			continue
		}
		q, gbps := st.quality(at, st.byName[partner[0].Host])
		if n == 0 || gbps < slowest {
			slowest = gbps
		}
		sum += q
		n++
	}
	if n == 0 { // nobody to talk to yet: a host with a fast port is as good as one can say
		q := 0.
		if st.gbpsMax > 0 {
			q = max(st.hosts[at].rdmaBest, st.hosts[at].nicBest/2) / st.gbpsMax
		}
		return q * st.set.ChannelMax, []cluster.Figure{{Name: "partners", Value: 0}}
	}
	return sum / float64(n) * st.set.ChannelMax, []cluster.Figure{{Name: "partners", Value: float64(n)}, {Name: "slowest_gbps", Value: slowest}}
}

// nic is the share of the candidate's GPUs that have an RDMA port beside them: named by the GPU, or of its NUMA node.
func (st *State) nic(uses []cluster.Use) (float64, []cluster.Figure) {
	near, all := 0, 0
	for _, u := range uses {
		h := &st.hosts[st.byName[u.Host]]
		for _, g := range u.GPUs {
			all++
			d := h.gpu(g.Index)
			for _, p := range h.NICs {
				if p.Kind == "rdma" && (slices.Contains(d.NICs, p.Name) || len(d.NICs) == 0 && p.NUMA == d.NUMA) {
					near++
					break
				}
			}
		}
	}
	if all == 0 {
		return 0, []cluster.Figure{{Name: "near", Value: 0}}
	}
	return float64(near) / float64(all) * st.set.NICMax, []cluster.Figure{{Name: "near", Value: float64(near)}, {Name: "gpus", Value: float64(all)}}
}

// score fills in a candidate's scores. zero as for spread.
func (st *State) score(m *cluster.Model, c *cluster.Candidate, zero bool) {
	var s float64
	var figures []cluster.Figure
	if st.strategy(m) == cluster.Spread {
		s, figures = st.spread(m.Name, c.Uses, zero, st.set.PlacementMax)
	} else {
		s, figures = st.binpackUses(c.Uses, 0, st.set.PlacementMax)
	}
	c.Scores = append(c.Scores, cluster.Score{Scorer: st.strategy(m), Score: s, Max: st.set.PlacementMax, Figures: figures})
	s, figures = st.locality(m, c.Uses)
	c.Scores = append(c.Scores, cluster.Score{Scorer: "locality", Score: s, Max: st.set.LocalityMax, Figures: figures})
	if m.Pair != "" {
		s, figures = st.channel(m, c.Uses)
		c.Scores = append(c.Scores, cluster.Score{Scorer: "channel", Score: s, Max: st.set.ChannelMax, Figures: figures})
	}
	if m.Role != "" || m.Pair != "" {
		s, figures = st.nic(c.Uses)
		c.Scores = append(c.Scores, cluster.Score{Scorer: "nic", Score: s, Max: st.set.NICMax, Figures: figures})
	}
	for _, x := range c.Scores {
		c.Total += x.Score
	}
}
