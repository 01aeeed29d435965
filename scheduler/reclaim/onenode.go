package reclaim

import (
	"cmp"
	"slices"
)

// fewestFor is fewest for one task: it goes to one node, so each node is searched for itself, and only units with a task there
// are of use.
func (st *state) fewestFor(t *task, units []*unit, free []vector) (chosen []*unit, at []int, exact bool) {
	here := make([][]*unit, len(st.nodes))
	most := 0
	for _, u := range units {
		most = max(most, len(u.tasks))
		for i, v := range u.tasks {
			if i == 0 || v.node != u.tasks[i-1].node && !slices.Contains(here[v.node], u) {
				here[v.node] = append(here[v.node], u)
			}
		}
	}
	limit := 0
	for n := range here {
		sum := 0
		for _, u := range here[n] {
			sum += len(u.tasks)
		}
		limit = max(limit, sum)
		if st.nodes[n].h.Usable() && free[n].covers(t.req) {
			return nil, []int{n}, true
		}
	}
	for n := 1; n <= limit && st.steps > 0; n++ {
		best := -1
		for node := range here {
			if !st.nodes[node].h.Usable() {
				continue
			}
			s := oneNode{t: t, node: node, units: here[node], left: slices.Clone(free[node]), steps: &st.steps}
			if set := s.lowest(n); set != nil && (best < 0 || comparePriority(set, chosen) < 0) {
				chosen, best = set, node
			}
		}
		if best >= 0 {
			return chosen, []int{best}, true
		}
	}
	return nil, nil, st.steps > 0
}

// comparePriority orders sets of equally many tasks by what they cost, task by task from the dearest on: the cheaper set falls, and of
// equal ones that of fewer jobs.
func comparePriority(a, b []*unit) int {
	dearest := func(set []*unit) (jobs []*job) {
		for _, u := range set {
			for range u.tasks {
				jobs = append(jobs, u.job)
			}
		}
		slices.SortStableFunc(jobs, func(x, y *job) int { return compareJobs(y, x) })
		return jobs
	}
	x, y := dearest(a), dearest(b)
	for i := range min(len(x), len(y)) {
		if c := compareJobs(x[i], y[i]); c != 0 {
			return c
		}
	}
	return cmp.Compare(len(a), len(b))
}

func compareJobs(a, b *job) int {
	return cmp.Or(cmp.Compare(a.queue.Priority, b.queue.Priority), cmp.Compare(a.Priority, b.Priority))
}

// oneNode is the search for a task's room on a node.
type oneNode struct {
	t     *task
	node  int
	units []*unit // by rising priority
	left  vector
	set   []*unit
	steps *int
	level []int // by unit: its priority's place among all
	most  []int // by level: how many tasks of it may fall
}

// lowest finds the cheapest set of n tasks that makes room: of the highest priority as few as can be, then of the next.
func (s *oneNode) lowest(n int) []*unit {
	s.level = make([]int, len(s.units))
	for i := 1; i < len(s.units); i++ {
		s.level[i] = s.level[i-1]
		if compareJobs(s.units[i-1].job, s.units[i].job) != 0 {
			s.level[i]++
		}
	}
	s.most = slices.Repeat([]int{n}, len(s.units))
	found := s.choose(n)
	if found == nil {
		return nil
	}
	for l := slices.Max(s.level); l >= 0; l-- {
		used := s.used(found, l)
		for s.most[l] = 0; s.most[l] < used; s.most[l]++ {
			if set := s.choose(n); set != nil {
				found = set
				break
			}
		}
	}
	return found
}

// used is how many tasks of a level a set has.
func (s *oneNode) used(set []*unit, level int) int {
	n := 0
	for _, u := range set {
		if s.level[slices.Index(s.units, u)] == level {
			n += len(u.tasks)
		}
	}
	return n
}

func (s *oneNode) choose(n int) []*unit {
	s.set = s.set[:0]
	gain := make([]vector, len(s.units)+1) // the most that one task of the units from here on gives back
	gain[len(s.units)] = make(vector, len(s.left))
	for i := len(s.units) - 1; i >= 0; i-- {
		gain[i] = slices.Clone(gain[i+1])
		for _, t := range s.units[i].tasks {
			for d := range t.req {
				gain[i][d] = max(gain[i][d], t.req[d])
			}
		}
	}
	if s.try(0, n, gain) {
		found := slices.Clone(s.set)
		for _, u := range found {
			s.give(u, -1)
		}
		return found
	}
	return nil
}

func (s *oneNode) give(u *unit, sign int64) {
	for _, t := range u.tasks {
		if t.node == s.node {
			for d := range t.req {
				s.left[d] += sign * t.req[d]
			}
		}
	}
}

func (s *oneNode) try(i, n int, gain []vector) bool {
	if n == 0 {
		return s.left.covers(s.t.req)
	}
	for k := i; k < len(s.units) && *s.steps > 0; k++ {
		u := s.units[k]
		l := s.level[k]
		if len(u.tasks) > min(n, s.most[l]) || k > i && sameUnit(u, s.units[k-1]) {
			continue // an equal one before it was tried in this place
		}
		for d := range s.t.req {
			if s.t.req[d] > 0 && s.left[d]+int64(n)*gain[k][d] < s.t.req[d] {
				return false
			}
		}
		*s.steps--
		s.give(u, 1)
		s.set = append(s.set, u)
		s.most[l] -= len(u.tasks)
		ok := s.try(k+1, n-len(u.tasks), gain)
		s.most[l] += len(u.tasks)
		if ok {
			return true
		}
		s.set = s.set[:len(s.set)-1]
		s.give(u, -1)
	}
	return false
}
