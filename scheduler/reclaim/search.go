package reclaim

import (
	"cmp"
	"slices"

	"github.com/headrace/headrace/scheduler/cluster"
)

// unit is what falls together: a gang's running tasks, or one task.
type unit struct {
	tasks []*task
	whole bool
	gang  bool // its job falls whole or not at all
	job   *job
	order int
}

// victims lists what inference job j may take, the first to go first: running tasks of training jobs in other, reclaimable
// queues, in order of queue priority, job priority, and what started last (the end of the snapshot's list).
func (st *state) victims(j *job) []*unit {
	var units []*unit
	for i, v := range st.jobs {
		if v.service != cluster.Training || v.queue == j.queue || !v.queue.reclaimable() {
			continue
		}
		var running []*task
		fixed := false
		for _, t := range v.tasks {
			if t.state == cluster.Running {
				running = append(running, t)
				fixed = fixed || !t.preemptable()
			}
		}
		gang := v.MinAvailable > 1 || v.OnEvict != ""
		switch {
		case len(running) == 0 || gang && fixed:
		case gang:
			units = append(units, &unit{tasks: running, whole: len(running) > 1, gang: true, job: v, order: i})
		default:
			for _, t := range running {
				if t.preemptable() {
					units = append(units, &unit{tasks: []*task{t}, job: v, order: i})
				}
			}
		}
	}
	slices.SortStableFunc(units, func(a, b *unit) int {
		return cmp.Or(cmp.Compare(a.job.queue.Priority, b.job.queue.Priority), cmp.Compare(a.job.Priority, b.job.Priority), cmp.Compare(b.order, a.order))
	})
	return units
}

// searchSteps bounds the search for the fewest victims, in tries of a set.
const searchSteps = 200_000

// assignSteps bounds one try to find hosts for tasks.
const assignSteps = 2_000

// assign gives each task a host that has what it asks for, all of them or none; the best by node score first. The second
// answer says whether that is certain.
func (st *state) assign(tasks []*task, free []vector) ([]int, bool) {
	at := make([]int, len(tasks))
	left := make([]vector, len(free))
	for i := range free {
		left[i] = slices.Clone(free[i])
	}
	by := make([]int, len(tasks))
	for i := range by {
		by[i] = i
	}
	slices.SortStableFunc(by, func(a, b int) int { return compareSize(tasks[b].req, tasks[a].req) })
	steps := assignSteps
	var try func(k int) bool
	try = func(k int) bool {
		if k == len(by) {
			return true
		}
		t := tasks[by[k]]
		var fit []int
		for n := range left {
			if st.nodes[n].h.Usable() && left[n].covers(t.req) {
				fit = append(fit, n)
			}
		}
		slices.SortStableFunc(fit, func(a, b int) int {
			return cmp.Compare(st.packed(t, b, left[b]), st.packed(t, a, left[a]))
		})
		for i, n := range fit {
			if i > 0 && slices.Equal(left[n], left[fit[i-1]]) && k+1 < len(by) {
				continue // the same as the one that did not do
			}
			if steps--; steps < 0 {
				return false
			}
			left[n].sub(t.req)
			at[by[k]] = n
			if try(k + 1) {
				return true
			}
			left[n].add(t.req)
		}
		return false
	}
	if try(0) {
		return at, true
	}
	return nil, steps >= 0
}

// compareSize orders requests: more cards first, then memory, then cores.
func compareSize(a, b vector) int {
	for i := len(a) - 1; i >= 0; i-- {
		if a[i] != b[i] {
			return cmp.Compare(a[i], b[i])
		}
	}
	return 0
}

// fewest finds the fewest tasks whose end makes room for all of tasks, and where these go then. Of equally few it takes those of
// the lowest priorities. exact is false where the search ended at its bound: then the answer may not be the fewest, or
// there may be one where none is given.
func (st *state) fewest(tasks []*task, units []*unit, free []vector) (chosen []*unit, at []int, exact bool) {
	st.steps = searchSteps
	units = st.useful(units, tasks)
	if len(tasks) == 1 {
		return st.fewestFor(tasks[0], units, free)
	}
	total := 0
	for _, u := range units {
		total += len(u.tasks)
	}
	all := st.with(free, units)
	if at, sure := st.assign(tasks, all); at == nil {
		return nil, nil, sure
	}
	for n := 1; n <= total && st.steps > 0; n++ {
		if set, where := st.choose(tasks, units, free, n); where != nil {
			return st.lowest(tasks, units, free, n, set, where)
		}
	}
	if st.steps > 0 {
		return nil, nil, true
	}
	st.steps = searchSteps
	chosen, at = st.oneByOne(tasks, units, free)
	return chosen, at, false
}

// useful leaves out units that hold nothing of what is asked for.
func (st *state) useful(units []*unit, tasks []*task) []*unit {
	asked := make(vector, len(st.dims.names))
	for _, t := range tasks {
		asked.add(t.req)
	}
	return slices.DeleteFunc(slices.Clone(units), func(u *unit) bool {
		for _, t := range u.tasks {
			for i := range asked {
				if asked[i] > 0 && t.req[i] > 0 && st.nodes[t.node].h.Usable() {
					return false
				}
			}
		}
		return true
	})
}

// with is what is free when units have fallen.
func (st *state) with(free []vector, units []*unit) []vector {
	out := make([]vector, len(free))
	for i := range free {
		out[i] = slices.Clone(free[i])
	}
	for _, u := range units {
		for _, t := range u.tasks {
			out[t.node].add(t.req)
		}
	}
	return out
}

// choose looks for a set of units with n tasks together whose end makes room, in the order of the units.
func (st *state) choose(tasks []*task, units []*unit, free []vector, n int) ([]*unit, []int) {
	var set []*unit
	var where []int
	left := st.with(free, nil)
	rest := suffixGains(st, units)
	var try func(i, n int) bool
	try = func(i, n int) bool {
		if n == 0 {
			st.steps -= 1 + len(st.nodes)/64
			if !st.mayFit(tasks, left) {
				return false
			}
			where, _ = st.assign(tasks, left)
			return where != nil
		}
		for k := i; k < len(units) && st.steps > 0; k++ {
			u := units[k]
			if len(u.tasks) > n || k > i && sameUnit(u, units[k-1]) {
				continue // an equal one before it was tried in this place
			}
			if !st.enough(tasks, left, rest[k], n) {
				return false
			}
			for _, t := range u.tasks {
				left[t.node].add(t.req)
			}
			set = append(set, u)
			if try(k+1, n-len(u.tasks)) {
				return true
			}
			set = set[:len(set)-1]
			for _, t := range u.tasks {
				left[t.node].sub(t.req)
			}
		}
		return false
	}
	if try(0, n) {
		return slices.Clone(set), where
	}
	return nil, nil
}

// gains is, for the units from one on, the most that one task of them gives back of each dimension.
func suffixGains(st *state, units []*unit) []vector {
	out := make([]vector, len(units)+1)
	out[len(units)] = make(vector, len(st.dims.names))
	for i := len(units) - 1; i >= 0; i-- {
		out[i] = slices.Clone(out[i+1])
		for _, t := range units[i].tasks {
			for d := range t.req {
				out[i][d] = max(out[i][d], t.req[d])
			}
		}
	}
	return out
}

// enough is a bound: with n more tasks, each giving the most there is, is the sum over usable nodes what is asked for?
func (st *state) enough(tasks []*task, left []vector, gain vector, n int) bool {
	for d := range gain {
		var asked, have int64
		for _, t := range tasks {
			asked += t.req[d]
		}
		if asked == 0 {
			continue
		}
		for i := range left {
			if st.nodes[i].h.Usable() {
				have += max(left[i][d], 0)
			}
		}
		if have+int64(n)*gain[d] < asked {
			return false
		}
	}
	return true
}

// mayFit is a quick no: some task alone has no host.
func (st *state) mayFit(tasks []*task, left []vector) bool {
	for _, t := range tasks {
		if !slices.ContainsFunc(st.indexes(), func(i int) bool { return st.nodes[i].h.Usable() && left[i].covers(t.req) }) {
			return false
		}
	}
	return true
}

func (st *state) indexes() []int {
	out := make([]int, len(st.nodes))
	for i := range out {
		out[i] = i
	}
	return out
}

// sameUnit says whether two units give the same back in the same place at the same priority.
func sameUnit(a, b *unit) bool {
	return len(a.tasks) == 1 && len(b.tasks) == 1 && a.tasks[0].node == b.tasks[0].node &&
		a.job.queue.Priority == b.job.queue.Priority && a.job.Priority == b.job.Priority && slices.Equal(a.tasks[0].req, b.tasks[0].req)
}

// lowest goes on from a set of n tasks to one of the lowest priorities: the fewest units from the front that still hold a
// set of n.
func (st *state) lowest(tasks []*task, units []*unit, free []vector, n int, set []*unit, at []int) ([]*unit, []int, bool) {
	lo, hi := 0, 0 // hi units from the front are enough
	for i, u := range units {
		if slices.Contains(set, u) {
			hi = i + 1
		}
	}
	for lo < hi-1 && st.steps > 0 {
		mid := (lo + hi) / 2
		if s, w := st.choose(tasks, units[:mid], free, n); w != nil {
			set, at, hi = s, w, mid
		} else {
			lo = mid
		}
	}
	return set, at, true
}

// oneByOne is the answer where the search is too large: room for one task after the other, each with the fewest more, then
// without each unit that is not needed.
func (st *state) oneByOne(tasks []*task, units []*unit, free []vector) ([]*unit, []int) {
	var set []*unit
	left := st.with(free, nil)
	for _, t := range tasks {
		rest := slices.DeleteFunc(slices.Clone(units), func(u *unit) bool { return slices.Contains(set, u) })
		more, at, _ := st.fewestFor(t, rest, left)
		if at == nil {
			set = units // together they would make room: all of them, less what is not needed
			break
		}
		set = append(set, more...)
		left = st.with(left, more)
		left[at[0]].sub(t.req)
	}
	for i := len(set) - 1; i >= 0 && len(set) <= pruneMax; i-- {
		without := slices.Delete(slices.Clone(set), i, i+1)
		if at, _ := st.assign(tasks, st.with(free, without)); at != nil {
			set = without
		}
	}
	at, _ := st.assign(tasks, st.with(free, set))
	return set, at
}

// pruneMax bounds how many units are tried to be spared one by one.
const pruneMax = 2_000
