// Package scaledown decides which instances and serving groups go when there are too many, and where their requests go
// meanwhile. It sees a snapshot and the free capacity, decides and books nothing.
//
// Scores are GPUStack's, the order of groups and roles Kthena's; the cost that Kthena reads from annotations is computed
// here from work in flight, prefix KV that would be lost, capacity freed and gangs, and an annotation overrides it.
package scaledown

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/headrace/headrace/scheduler/cluster"
	"github.com/headrace/headrace/scheduler/place"
)

// Prices of a removal, in points.
type Prices struct{ Request, HotGiB, OnlyGiB, FreedGPU, Gang float64 }

// PricesOf fills in what the settings leave out.
func PricesOf(c cluster.Cost) Prices {
	or := func(p *float64, d float64) float64 {
		if p == nil {
			return d
		}
		return *p
	}
	return Prices{or(c.Request, 10), or(c.HotGiB, 1), or(c.OnlyGiB, 20), or(c.FreedGPU, 10), or(c.Gang, 1e6)}
}

// load is what the work of an instance or pod is worth. HotOnly is a part of HotPrefix.
func (p Prices) load(l *cluster.Load) (float64, []cluster.Figure) {
	inFlight := float64(max(l.InFlight, 0) + len(l.Requests))
	only := float64(l.HotOnly) / (1 << 30)
	shared := max(float64(l.HotPrefix)/(1<<30)-only, 0)
	return p.Request*inFlight + p.HotGiB*shared + p.OnlyGiB*only, []cluster.Figure{
		{Name: "in_flight", Value: inFlight}, {Name: "hot_shared_gib", Value: shared}, {Name: "hot_only_gib", Value: only},
	}
}

// Leaving says whether an instance is on its way out: no survivor, and not to be chosen again.
func Leaving(state string) bool { return state == cluster.Draining || state == cluster.Deleting }

// Ordinals gives each of a model's instances its number: its own, or its place among them.
func Ordinals(list []*cluster.Instance) []int {
	out := make([]int, len(list))
	for i, n := range list {
		out[i] = i
		if n.Ordinal != nil {
			out[i] = *n.Ordinal
		}
	}
	return out
}

// candidate is an instance with what decides its turn.
type candidate struct {
	n       *cluster.Instance
	ordinal int
	guarded bool // below the partition
	gang    bool // its removal breaks a gang
	running bool
	ranked  cluster.Ranked
}

// Model ranks the instances of a model and removes those above its replicas. Without replicas it only ranks.
func Model(st *place.State, s *cluster.Snapshot, m *cluster.Model) (cluster.Ranking, []cluster.Removal) {
	var mine []*cluster.Instance
	for i := range s.Instances {
		if s.Instances[i].Model == m.Name {
			mine = append(mine, &s.Instances[i])
		}
	}
	ordinals := Ordinals(mine)
	prices := PricesOf(s.Settings.Cost)
	order := m.ScaleDown.Order
	if order == "" {
		order = "score"
	}
	var list []candidate
	for i, n := range mine {
		if Leaving(n.State) {
			continue
		}
		c := candidate{n: n, ordinal: ordinals[i], running: n.State == "" || n.State == cluster.Running, gang: breaksGang(s, n)}
		c.ranked = cluster.Ranked{Instance: n.Name}
		if order == "score" {
			scored(st, m, &c)
		} else {
			costed(st, prices, &c)
		}
		list = append(list, c)
	}
	guard(list, m.ScaleDown.Partition)
	slices.SortStableFunc(list, func(a, b candidate) int { return before(order, &a, &b) })
	ranking := cluster.Ranking{Model: m.Name, Order: order}
	remove := 0
	if m.Replicas != nil {
		remove = max(len(list)-*m.Replicas, 0)
	}
	for i := range list {
		list[i].ranked.Remove = i < remove
		list[i].ranked.Why = why(order, &list[i])
		ranking.Instances = append(ranking.Instances, list[i].ranked)
	}
	return ranking, removals(st, s, m, list, remove)
}

// scored adds GPUStack's scores.
func scored(st *place.State, m *cluster.Model, c *candidate) {
	c.ranked.Scores = st.KeepScores(c.n)
	for _, s := range c.ranked.Scores {
		c.ranked.Total += s.Score
	}
	if top := float64(m.ScaleDown.MaxTotal); top > 0 && st.KeepMax() > 0 {
		c.ranked.Total *= top / st.KeepMax()
	}
}

// costed adds the computed cost, or the one that was annotated.
func costed(st *place.State, p Prices, c *candidate) {
	if c.n.DeletionCost != nil {
		c.ranked.Total = *c.n.DeletionCost
		c.ranked.Scores = []cluster.Score{{Scorer: "annotation", Score: c.ranked.Total}}
		return
	}
	work, figures := p.load(&c.n.Load)
	share := st.FreedShare(c.n.Name)
	c.ranked.Scores = []cluster.Score{{Scorer: "load", Score: work, Figures: figures},
		{Scorer: "freed", Score: -p.FreedGPU * share, Figures: []cluster.Figure{{Name: "share", Value: share}}}}
	if c.gang {
		c.ranked.Scores = append(c.ranked.Scores, cluster.Score{Scorer: "gang", Score: p.Gang})
	}
	for _, s := range c.ranked.Scores {
		c.ranked.Total += s.Score
	}
}

// guard marks the first n by ordinal.
func guard(list []candidate, n int) {
	by := make([]int, len(list))
	for i := range by {
		by[i] = i
	}
	slices.SortStableFunc(by, func(a, b int) int { return cmp.Compare(list[a].ordinal, list[b].ordinal) })
	for _, i := range by[:min(n, len(by))] {
		list[i].guarded = true
	}
}

// before is the order of removal.
func before(order string, a, b *candidate) int {
	if a.guarded != b.guarded {
		return later(a.guarded)
	}
	switch order {
	case "ordinal":
	case "cost":
		if a.running != b.running {
			return later(a.running)
		}
		if a.ranked.Total != b.ranked.Total {
			return cmp.Compare(a.ranked.Total, b.ranked.Total)
		}
	default:
		if a.gang != b.gang {
			return later(a.gang)
		}
		if a.ranked.Total != b.ranked.Total {
			return cmp.Compare(a.ranked.Total, b.ranked.Total)
		}
	}
	return cmp.Compare(b.ordinal, a.ordinal)
}

func later(x bool) int {
	if x {
		return 1
	}
	return -1
}

func why(order string, c *candidate) string {
	text := fmt.Sprintf("%s %.6g, ordinal %d", order, c.ranked.Total, c.ordinal)
	if order == "ordinal" {
		text = fmt.Sprintf("ordinal %d", c.ordinal)
	}
	if order == "cost" && !c.running {
		text += ", not running: goes first"
	}
	if c.guarded {
		text += ", below the partition: goes last"
	}
	if c.gang {
		text += ", its gang " + c.n.Gang + " would fall below its minimum"
	}
	return text
}

// breaksGang says whether without n its gang has fewer members than it needs.
func breaksGang(s *cluster.Snapshot, n *cluster.Instance) bool {
	if n.Gang == "" {
		return false
	}
	left := 0
	for i := range s.Instances {
		o := &s.Instances[i]
		if o.Gang == n.Gang && o != n && !Leaving(o.State) && o.State != cluster.Failed {
			left++
		}
	}
	least := left + 1 // a gang that nobody describes is whole as it is
	for _, g := range s.Gangs {
		if g.Name == n.Gang {
			least = g.Min
			if least == 0 {
				for _, m := range g.Members {
					least += m.Count
				}
			}
		}
	}
	return left < least
}
