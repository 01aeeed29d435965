package reclaim

import (
	"github.com/headrace/headrace/scheduler/cluster"
)

// weights of Volcano's binpack node score; without any every dimension weighs 1.
func (st *state) weights() (float64, factors) {
	w := make(factors, len(st.dims.names))
	b := st.snap.Settings.NodeBinpack
	if b == nil {
		for i := range w {
			w[i] = 1
		}
		return 1, w
	}
	w[cpuDim], w[memDim] = b.CPU, b.Memory
	for i, name := range st.dims.names {
		if i > memDim {
			w[i] = b.GPU
			if own, ok := b.Cards[name]; ok {
				w[i] = own
			}
		}
	}
	return b.Weight, w
}

// factors is a weight for each dimension.
type factors []float64

// nodeScore is 100*W*sum(w*(req+used)/alloc)/sum(w) over what the task asks for and a weight is for. A dimension that the node
// does not have adds nothing and keeps its weight; one that would not fit makes it 0.
func (st *state) nodeScore(t *task, at int) (float64, []cluster.Score) {
	return st.score(t, at, st.nodes[at].free)
}

func (st *state) score(t *task, at int, free vector) (float64, []cluster.Score) {
	weight, w := st.weights()
	n := &st.nodes[at]
	sum, all := 0., 0.
	s := cluster.Score{Scorer: "node_binpack", Max: 100 * weight}
	for i, req := range t.req {
		if req <= 0 || w[i] <= 0 {
			continue
		}
		all += w[i]
		if n.alloc[i] <= 0 {
			continue
		}
		used := n.alloc[i] - free[i]
		if used+req > n.alloc[i] {
			return 0, []cluster.Score{{Scorer: s.Scorer, Max: s.Max, Figures: []cluster.Figure{{Name: "overflow:" + st.dims.names[i], Value: float64(used + req)}}}}
		}
		part := float64(used+req) / float64(n.alloc[i])
		s.Figures = append(s.Figures, cluster.Figure{Name: st.dims.names[i], Value: part})
		sum += w[i] * part
	}
	if all > 0 {
		s.Score = 100 * weight * sum / all
	}
	return s.Score, []cluster.Score{s}
}

// packed is the score with what is left while a gang is being placed.
func (st *state) packed(t *task, at int, left vector) float64 {
	s, _ := st.score(t, at, left)
	return s
}

// nodesShown is how many hosts' scores an admission tells.
const nodesShown = 64

// nodeScores is every host's score for a task as things stand.
func (st *state) nodeScores(t *task) []cluster.NodeScore {
	out := make([]cluster.NodeScore, 0, min(len(st.nodes), nodesShown))
	for i := range st.nodes[:cap(out)] {
		n := &st.nodes[i]
		s, _ := st.nodeScore(t, i)
		out = append(out, cluster.NodeScore{Host: n.h.Name, Score: s, Fits: n.h.Usable() && n.free.covers(t.req)})
	}
	return out
}
