package scaledown

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/headrace/headrace/scheduler/cluster"
	"github.com/headrace/headrace/scheduler/place"
)

// survivor is an instance that stays, with the room in its cache.
type survivor struct {
	n    *cluster.Instance
	room int64
}

// removals drains the first of the list: which request moves to which survivor, and which stays until it is done.
func removals(st *place.State, s *cluster.Snapshot, m *cluster.Model, list []candidate, remove int) []cluster.Removal {
	var stay []survivor
	for _, c := range list[remove:] {
		if c.running && placedReady(s, c.n) {
			stay = append(stay, survivor{c.n, int64(c.n.Load.KVTotal - c.n.Load.KVUsed)})
		}
	}
	out := make([]cluster.Removal, 0, remove)
	for _, c := range list[:remove] {
		r := cluster.Removal{Instance: c.n.Name, Model: m.Name, Steps: []string{"drain", "stop"}, Moves: []cluster.Move{}, Freed: st.Uses(c.n.Name), Why: c.ranked.Why}
		if c.n.State == cluster.Failed {
			r.Steps = []string{"stop"} // nothing runs that could be waited for
			out = append(out, r)
			continue
		}
		r.Moves = moves(st, c.n, stay)
		if slices.ContainsFunc(r.Moves, func(m cluster.Move) bool { return m.To != "" }) {
			r.Steps = []string{"drain", "move", "stop"}
		}
		out = append(out, r)
	}
	return out
}

func placedReady(s *cluster.Snapshot, n *cluster.Instance) bool {
	return !slices.ContainsFunc(n.Parts, func(p cluster.Part) bool {
		return slices.ContainsFunc(s.Hosts, func(h cluster.Host) bool { return h.Name == p.Host && !h.Usable() })
	})
}

// tokenSeconds is what one more token is taken to cost, overheadSeconds a hand-over beside its bytes: they only decide whether a
// request that is nearly done is moved at all.
const (
	tokenSeconds    = .03
	overheadSeconds = .1
)

// moves gives each request of n its place, the largest first: the survivor with the fastest way that has the room, then
// the one with the most room. They are reported in the request's order.
func moves(st *place.State, n *cluster.Instance, stay []survivor) []cluster.Move {
	requests := n.Load.Requests
	by := make([]int, len(requests))
	for i := range by {
		by[i] = i
	}
	slices.SortStableFunc(by, func(a, b int) int { return cmp.Compare(requests[b].KV, requests[a].KV) })
	out := make([]cluster.Move, len(requests))
	for _, i := range by {
		out[i] = move(st, n, &requests[i], stay)
	}
	return out
}

func move(st *place.State, n *cluster.Instance, r *cluster.Request, stay []survivor) cluster.Move {
	best, bestGbps := -1, 0.
	for i := range stay {
		if stay[i].room < int64(r.KV) || len(stay[i].n.Parts) == 0 || len(n.Parts) == 0 {
			continue
		}
		gbps := st.Link(n.Parts[0].Host, stay[i].n.Parts[0].Host)
		if best < 0 || gbps > bestGbps || gbps == bestGbps && stay[i].room > stay[best].room {
			best, bestGbps = i, gbps
		}
	}
	out := cluster.Move{Request: r.ID, KV: r.KV}
	if best < 0 {
		out.Why = "no survivor has the room: it ends here"
		return out
	}
	if r.Left > 0 && bestGbps > 0 {
		wait, transfer := float64(r.Left)*tokenSeconds, float64(r.KV)*8/(bestGbps*1e9)+overheadSeconds
		if wait <= transfer {
			out.Why = fmt.Sprintf("%d tokens are left: it ends here sooner than it is moved", r.Left)
			return out
		}
	}
	stay[best].room -= int64(r.KV)
	out.To = stay[best].n.Name
	out.Why = fmt.Sprintf("%g Gbit/s, room for it", bestGbps)
	return out
}
