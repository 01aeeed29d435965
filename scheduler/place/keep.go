package place

import (
	"slices"

	"github.com/headrace/headrace/scheduler/cluster"
)

// KeepScores are GPUStack's scores of an instance that exists: status, offload and placement, each telling to keep it. The
// placement counts every co-tenant, whatever its model, and adds the instance's own claim back to what is allocatable.
func (st *State) KeepScores(n *cluster.Instance) []cluster.Score {
	status := cluster.Score{Scorer: "status", Max: st.set.StatusMax}
	switch {
	case len(n.Parts) == 0 || n.State == cluster.Failed || st.partsNotReady(n):
	case (n.State == "" || n.State == cluster.Running) && st.partsReady(n):
		status.Score = st.set.StatusMax
	default:
		status.Score = st.set.StatusMax / 2
	}
	offload := cluster.Score{Scorer: "offload", Max: st.set.OffloadMax}
	if n.LayersTotal != nil && n.LayersOffloaded != nil && *n.LayersTotal > 0 {
		share := min(float64(*n.LayersOffloaded)/float64(*n.LayersTotal), 1)
		offload.Score = share * st.set.OffloadMax
		offload.Figures = []cluster.Figure{{Name: "offloaded", Value: float64(*n.LayersOffloaded)}, {Name: "total", Value: float64(*n.LayersTotal)}}
	}
	placement := cluster.Score{Scorer: "placement", Max: st.set.KeepMax}
	if uses := st.parts[n.Name].uses; len(uses) > 0 {
		if m := st.models[n.Model]; m != nil && st.strategy(m) == cluster.Spread {
			placement.Score, placement.Figures = st.spread(n.Model, uses, st.someHoldNone(n.Model), st.set.KeepMax)
		} else {
			placement.Score, placement.Figures = st.binpackUses(uses, 1, st.set.KeepMax)
		}
	}
	return []cluster.Score{status, offload, placement}
}

func (st *State) partsNotReady(n *cluster.Instance) bool {
	return slices.ContainsFunc(n.Parts, func(p cluster.Part) bool { return st.hosts[st.byName[p.Host]].State == cluster.NotReady })
}

func (st *State) partsReady(n *cluster.Instance) bool {
	return !slices.ContainsFunc(n.Parts, func(p cluster.Part) bool { return !st.hosts[st.byName[p.Host]].Usable() })
}

func (st *State) someHoldNone(model string) bool {
	return slices.ContainsFunc(st.hosts, func(h host) bool { return h.count[model] == 0 })
}

// KeepMax is the sum that KeepScores can reach.
func (st *State) KeepMax() float64 { return st.set.StatusMax + st.set.OffloadMax + st.set.KeepMax }

// FreedShare is the share of the GPUs of an instance's hosts that nobody would hold without it; of a host without GPUs the
// share of memory that would be free.
func (st *State) FreedShare(instance string) float64 {
	uses := st.parts[instance].uses
	if len(uses) == 0 {
		return 0
	}
	sum := 0.
	for _, u := range uses {
		h := &st.hosts[st.byName[u.Host]]
		if len(h.gpus) == 0 {
			sum += ratio(h.freeRAM+int64(u.RAM), int64(h.Memory))
			continue
		}
		free := 0
		for i := range h.gpus {
			d := &h.gpus[i]
			others := d.total
			if slices.ContainsFunc(u.GPUs, func(g cluster.GPUUse) bool { return g.Index == *d.Index }) {
				others--
			}
			if others <= 0 {
				free++
			}
		}
		sum += float64(free) / float64(len(h.gpus))
	}
	return sum / float64(len(uses))
}

// Link is the connection of two hosts: Gbps, 0 where nothing is known.
func (st *State) Link(a, b string) float64 {
	x, ok := st.byName[a]
	y, ok2 := st.byName[b]
	if !ok || !ok2 {
		return 0
	}
	_, gbps := st.quality(x, y)
	return gbps
}
