package reclaim

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/headrace/headrace/scheduler/cluster"
)

// Result is what jobs get and lose.
type Result struct {
	Admissions []cluster.Admission
	Evictions  []cluster.Eviction
	Denied     []cluster.Denial
}

// Decide admits waiting tasks, in order of service (inference first), queue priority and job priority, and lets
// inference reclaim from training what it lacks. held is what instances placed in the same decision take.
func Decide(s *cluster.Snapshot, held []cluster.Use) Result {
	st := newState(s, held)
	var r Result
	var waiting []*job
	for _, j := range st.jobs {
		if slices.ContainsFunc(j.tasks, (*task).waits) {
			waiting = append(waiting, j)
		}
	}
	slices.SortStableFunc(waiting, func(a, b *job) int {
		if x, y := a.service == cluster.Inference, b.service == cluster.Inference; x != y {
			if x {
				return -1
			}
			return 1
		}
		if a.queue.Priority != b.queue.Priority {
			return cmp.Compare(b.queue.Priority, a.queue.Priority)
		}
		return cmp.Compare(b.Priority, a.Priority)
	})
	for _, j := range waiting {
		st.job(j, &r)
	}
	return r
}

// waits says whether a task wants a host. An aborted one does not come back by itself.
func (t *task) waits() bool {
	return t.state == "pending" || t.state == "inqueue" || t.state == "evicted"
}

// job admits what it can of a job: first as many tasks as its gang needs, together or not at all, then each of the rest.
func (st *state) job(j *job, r *Result) {
	if j.fellFor != "" {
		r.deny(j, "it falls whole for %s in this decision; what of it is to run again is admitted when that is done and there is room", j.fellFor)
		return
	}
	if !j.queue.open() {
		r.deny(j, "queue %s is %s: it takes nothing and may not reclaim", j.queue.Name, j.queue.State)
		return
	}
	var wait []*task
	running := 0
	for _, t := range j.tasks {
		if t.waits() {
			wait = append(wait, t)
		} else if t.state == cluster.Running {
			running++
		}
	}
	first := max(j.MinAvailable-running, 0)
	if first > len(wait) {
		r.deny(j, "its gang needs %d more tasks and %d wait", first, len(wait))
		return
	}
	if why := st.enqueue(j, wait, first); why != "" {
		r.deny(j, "%s", why)
		return
	}
	if first > 0 {
		if why := st.together(j, wait[:first], r); why != "" {
			r.deny(j, "%s", why)
			return
		}
	}
	for _, t := range wait[first:] {
		if why := st.together(j, []*task{t}, r); why != "" {
			r.Denied = append(r.Denied, cluster.Denial{What: "task", Name: j.Name + "/" + t.name, Reason: why})
		}
	}
}

func (r *Result) deny(j *job, format string, a ...any) {
	r.Denied = append(r.Denied, cluster.Denial{What: "job", Name: j.Name, Reason: fmt.Sprintf(format, a...)})
}

// enqueue lets a job stand in queue: what the queue's jobs hold and wait for, with the least that this one needs, may be the
// quota times the overcommit factor. What stands in queue already was let in before.
func (st *state) enqueue(j *job, wait []*task, first int) string {
	need := make(vector, len(st.dims.names))
	for i, t := range wait {
		if t.state != "inqueue" && (i < max(first, 1)) {
			need.add(t.quota)
		}
	}
	if why := st.room(j.queue, j.queue.allocated, need, max(st.over, 1)); why != "" {
		return fmt.Sprintf("queue %s: over its quota, so it may not reclaim either: %s", j.queue.Name, why)
	}
	held := slices.Clone(j.queue.allocated)
	held.add(j.queue.inqueue)
	if why := st.room(j.queue, held, need, st.over); why != "" {
		return fmt.Sprintf("queue %s: no place in queue (quota times %g): %s", j.queue.Name, st.over, why)
	}
	for i, t := range wait {
		if t.state != "inqueue" && (i < max(first, 1)) {
			t.state = "inqueue"
			j.queue.inqueue.add(t.quota)
		}
	}
	return ""
}

// together gives all of the tasks a host, or none: from what is free, else by reclaiming.
func (st *state) together(j *job, tasks []*task, r *Result) string {
	sum := make(vector, len(st.dims.names))
	for _, t := range tasks {
		sum.add(t.quota)
	}
	if why := st.room(j.queue, j.queue.allocated, sum, 1); why != "" {
		return fmt.Sprintf("queue %s: over its quota, so it may not reclaim either: %s", j.queue.Name, why)
	}
	free := st.frees(false)
	if at, _ := st.assign(tasks, free); at != nil {
		st.admit(tasks, at, "free", r)
		return ""
	}
	soon := st.frees(true)
	if at, _ := st.assign(tasks, soon); at != nil {
		st.admit(tasks, at, "free when the tasks that are ending there have ended", r)
		return ""
	}
	if j.service != cluster.Inference {
		kind := j.service
		if kind == "" {
			kind = "a job of unknown type"
		}
		return fmt.Sprintf("no host has the room (%s), and %s may not reclaim", st.nearest(tasks, soon), kind)
	}
	units := st.victims(j)
	chosen, at, exact := st.fewest(tasks, units, soon)
	if at == nil {
		why := fmt.Sprintf("no host has the room (%s), and evicting all that may fall (%d) would not make it", st.nearest(tasks, soon), len(units))
		if !exact {
			why = fmt.Sprintf("no host has the room (%s), and the search for victims ended after %d steps", st.nearest(tasks, soon), searchSteps)
		}
		return why
	}
	st.evict(j, chosen, exact, r)
	st.admit(tasks, at, "reclaimed", r)
	return ""
}

// frees is what is free on each node, with what is ending if soon.
func (st *state) frees(soon bool) []vector {
	out := make([]vector, len(st.nodes))
	for i := range st.nodes {
		out[i] = slices.Clone(st.nodes[i].free)
		if soon {
			out[i].add(st.nodes[i].going)
		}
	}
	return out
}

func (st *state) nearest(tasks []*task, free []vector) string {
	for i := range st.nodes {
		if st.nodes[i].h.Usable() {
			if short := st.dims.short(free[i], tasks[0].req); short != "" {
				return st.nodes[i].h.Name + ": " + short
			}
		}
	}
	return "the tasks do not fit together"
}

func (st *state) admit(tasks []*task, at []int, why string, r *Result) {
	for i, t := range tasks {
		n := &st.nodes[at[i]]
		score, scores := st.nodeScore(t, at[i])
		r.Admissions = append(r.Admissions, cluster.Admission{Job: t.job.Name, Task: t.name, Host: n.h.Name, Score: score, Scores: scores, Nodes: st.nodeScores(t), Why: why})
		n.free.sub(t.req)
		if t.state == "inqueue" {
			t.job.queue.inqueue.sub(t.quota)
		}
		t.job.queue.allocated.add(t.quota)
		t.state, t.node = "admitted", at[i]
	}
}

func (st *state) evict(j *job, units []*unit, exact bool, r *Result) {
	total, nth := 0, 0
	for _, u := range units {
		total += len(u.tasks)
	}
	for _, u := range units {
		if u.gang {
			u.job.fellFor = j.Name
		}
		for _, t := range u.tasks {
			nth++
			n := &st.nodes[t.node]
			action := t.job.OnEvict
			if action == "" {
				action = "restart"
			}
			why := fmt.Sprintf("%d of the fewest, %d, that make room; queue priority %d, job priority %d", nth, total, t.job.queue.Priority, t.job.Priority)
			if !exact {
				why = fmt.Sprintf("one of %d that make room (not proven to be the fewest); queue priority %d, job priority %d", total, t.job.queue.Priority, t.job.Priority)
			}
			if u.whole {
				why += "; its gang falls whole"
			}
			r.Evictions = append(r.Evictions, cluster.Eviction{Job: t.job.Name, Task: t.name, Host: n.h.Name, Queue: t.job.queue.Name, For: j.Name, Action: action, Why: why})
			n.free.add(t.req)
			t.job.queue.allocated.sub(t.quota)
			t.state = "falling"
		}
	}
}
