package place

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/headrace/headrace/scheduler/cluster"
)

// Place finds the best place for an instance of a model and explains it; it books nothing. The second result says why
// there is none.
func (st *State) Place(m *cluster.Model, name string) (*cluster.Placement, *cluster.Denial) {
	hosts, filters := st.filter(m)
	stage, list, fit := st.fit(m, hosts)
	if len(list) == 0 {
		return nil, &cluster.Denial{What: "instance", Name: name, Reason: noneFits(hosts, filters, fit), Filters: filters, Fit: fit}
	}
	st.rank(m, list)
	best := list[0]
	why := fmt.Sprintf("%s: best of %d by %s", stage, len(list), st.strategy(m))
	if len(list) > 1 {
		why += fmt.Sprintf(" (%.6g, the next %.6g on %s)", best.Total, list[1].Total, list[1].Uses[0].Host)
	}
	return &cluster.Placement{Instance: name, Model: m.Name, Stage: stage, Candidate: best, Why: why, Filters: filters, Fit: fit, Candidates: list}, nil
}

// rank scores candidates and sorts them, the best first. Ties: with spread the one with more room left, then the
// snapshot's order.
func (st *State) rank(m *cluster.Model, list []cluster.Candidate) {
	zero := slices.ContainsFunc(list, func(c cluster.Candidate) bool {
		return st.hosts[st.byName[c.Uses[0].Host]].count[m.Name] == 0
	})
	for i := range list {
		st.score(m, &list[i], zero)
	}
	spread := st.strategy(m) == cluster.Spread
	slices.SortStableFunc(list, func(a, b cluster.Candidate) int {
		if a.Total != b.Total {
			return cmp.Compare(b.Total, a.Total)
		}
		if spread {
			return cmp.Compare(st.room(&b), st.room(&a))
		}
		return 0
	})
}

// room is what is free where a candidate goes: of its GPUs, or of RAM where it takes none.
func (st *State) room(c *cluster.Candidate) int64 {
	var sum int64
	for _, u := range c.Uses {
		h := &st.hosts[st.byName[u.Host]]
		if len(u.GPUs) == 0 {
			sum += h.freeRAM
		}
		for _, g := range u.GPUs {
			sum += h.gpu(g.Index).free
		}
	}
	return sum
}

// noneFits says in one line what stood in the way.
func noneFits(hosts []*host, filters, fit []cluster.Filter) string {
	if len(filters) > 0 && len(hosts) == 0 {
		for _, f := range filters {
			if f.Left == 0 {
				if len(f.Out) == 0 {
					return "there are no hosts"
				}
				return fmt.Sprintf("the filter %s takes out the last host: %s: %s", f.Name, f.Out[0].Host, f.Out[0].Why)
			}
		}
	}
	var tried []string // the first stage has the plainest figures, the last is what it came to
	for _, f := range fit {
		if len(f.Out) > 0 && f.Out[0].Host != "" {
			tried = append(tried, fmt.Sprintf("; %s: %s: %s", f.Name, f.Out[0].Host, f.Out[0].Why))
		}
	}
	switch len(tried) {
	case 0:
	case 1:
		return "no host has the room" + tried[0]
	default:
		return "no host has the room" + tried[0] + tried[len(tried)-1]
	}
	if len(fit) > 0 {
		return "no stage of the fit could be tried: " + fit[0].Out[0].Why
	}
	return "there are no hosts"
}
