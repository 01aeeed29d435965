package reclaim

import (
	"math"
	"math/big"
	"slices"
	"strconv"

	"github.com/headrace/headrace/scheduler/cluster"
)

// node is a host with what is free on it.
type node struct {
	h     *cluster.Host
	alloc vector // what there is for jobs and instances together
	free  vector
	going vector // held by tasks that are ending: to be had, but not at once
}

// queue is a queue with what its jobs hold.
type queue struct {
	*cluster.Queue
	limit     vector // -1: none
	allocated vector
	inqueue   vector
}

// task is one pod.
type task struct {
	job   *job
	spec  *cluster.Task
	name  string
	state string
	node  int // of running and releasing ones, else -1
	req   vector
	quota vector // what counts for the queue
}

// job is a job with its tasks written out.
type job struct {
	*cluster.Job
	queue   *queue
	service string
	tasks   []*task
	fellFor string // the job that this one falls whole for, in this decision
}

// state is a snapshot as jobs see it.
type state struct {
	snap   *cluster.Snapshot
	dims   *dims
	nodes  []node
	byName map[string]int
	queues map[string]*queue
	jobs   []*job
	over   float64
	ignore map[string]bool
	steps  int
}

// unlimited marks a dimension of a quota that has no limit.
const unlimited = -1

func newState(s *cluster.Snapshot, held []cluster.Use) *state {
	st := &state{snap: s, dims: newDims(s), byName: map[string]int{}, queues: map[string]*queue{}, over: 1, ignore: map[string]bool{}}
	if f := s.Settings.OverCommitFactor; f != nil {
		st.over = *f
	}
	for _, name := range s.Settings.IgnoredScalars {
		st.ignore[name] = true
	}
	for i := range s.Hosts {
		st.addNode(i, &s.Hosts[i])
	}
	for i := range s.Instances {
		for _, p := range s.Instances[i].Parts {
			u := cluster.Use{Host: p.Host, CPU: p.CPU, RAM: p.RAM}
			for _, g := range p.GPUs {
				u.GPUs = append(u.GPUs, cluster.GPUUse{Index: g})
			}
			held = append(held, u)
		}
	}
	st.hold(held)
	for i := range s.Queues {
		st.addQueue(&s.Queues[i])
	}
	for i := range s.Jobs {
		st.addJob(&s.Jobs[i])
	}
	return st
}

func (st *state) addNode(i int, h *cluster.Host) {
	n := node{h: h, alloc: make(vector, len(st.dims.names)), going: make(vector, len(st.dims.names))}
	n.alloc[cpuDim], n.alloc[memDim] = int64(h.CPU), int64(h.Memory-h.MemoryReserved)
	for _, g := range h.GPUs {
		if g.Card != "" {
			n.alloc[st.dims.at[g.Card]] += 1000
		}
	}
	for c, k := range h.Cards {
		n.alloc[st.dims.at[c]] += k * 1000
	}
	n.free = slices.Clone(n.alloc)
	n.free[cpuDim] -= int64(h.CPUUsed)
	n.free[memDim] -= int64(h.MemoryUsed)
	for _, g := range h.GPUs {
		if g.Card != "" && g.Used > 0 {
			n.free[st.dims.at[g.Card]] -= 1000 // somebody is on it whom the snapshot does not list
		}
	}
	st.byName[h.Name] = i
	st.nodes = append(st.nodes, n)
}

// hold takes what instances have: memory, cores, and each GPU as a whole card, once.
func (st *state) hold(uses []cluster.Use) {
	taken := map[string]map[int]bool{}
	for _, u := range uses {
		n := &st.nodes[st.byName[u.Host]]
		n.free[cpuDim] -= int64(u.CPU)
		n.free[memDim] -= int64(u.RAM)
		if taken[u.Host] == nil {
			taken[u.Host] = map[int]bool{}
		}
		for _, g := range u.GPUs {
			for i := range n.h.GPUs {
				d := &n.h.GPUs[i]
				if *d.Index == g.Index && d.Card != "" && d.Used == 0 && !taken[u.Host][g.Index] {
					n.free[st.dims.at[d.Card]] -= 1000
					taken[u.Host][g.Index] = true
				}
			}
		}
	}
}

func (st *state) addQueue(q *cluster.Queue) {
	out := &queue{Queue: q, limit: make(vector, len(st.dims.names)), allocated: make(vector, len(st.dims.names)), inqueue: make(vector, len(st.dims.names))}
	for i := range out.limit {
		out.limit[i] = unlimited
		if i > memDim && len(q.Quota.Cards) > 0 {
			out.limit[i] = 0 // a quota that names cards is for those alone
		}
	}
	if q.Quota.CPU != nil {
		out.limit[cpuDim] = int64(*q.Quota.CPU)
	}
	if q.Quota.Memory != nil {
		out.limit[memDim] = int64(*q.Quota.Memory)
	}
	for c, n := range q.Quota.Cards {
		out.limit[st.dims.at[c]] = int64(n)
	}
	st.queues[q.Name] = out
}

func (st *state) addJob(spec *cluster.Job) {
	j := &job{Job: spec, queue: st.queues[spec.Queue], service: service(st.snap, spec)}
	for i := range spec.Tasks {
		t := &spec.Tasks[i]
		for k := range max(t.Count, 1) {
			st.addTask(j, t, k, i)
		}
	}
	st.jobs = append(st.jobs, j)
}

func (st *state) addTask(j *job, spec *cluster.Task, k, at int) {
	t := &task{job: j, spec: spec, name: taskName(spec, k, at), state: spec.State, node: -1, req: st.dims.request(&spec.Request)}
	if t.state == "" {
		t.state = "pending"
		if spec.Host != "" {
			t.state = cluster.Running
		}
	}
	t.quota = slices.Clone(t.req)
	if st.snap.Settings.CardUnlimitedCPUMemory && t.req.cardsIn() {
		t.quota[cpuDim], t.quota[memDim] = 0, 0
	}
	for name := range st.ignore {
		if i, ok := st.dims.at[name]; ok {
			t.quota[i] = 0
		}
	}
	j.tasks = append(j.tasks, t)
	switch t.state {
	case cluster.Running, "releasing":
		t.node = st.byName[spec.Host]
		st.nodes[t.node].free.sub(t.req)
		if t.state == "releasing" {
			st.nodes[t.node].going.add(t.req)
			return
		}
		j.queue.allocated.add(t.quota)
	case "inqueue":
		j.queue.inqueue.add(t.quota)
	}
}

func taskName(spec *cluster.Task, k, at int) string {
	name := spec.Name
	if name == "" {
		name = "task" + cluster.Milli(at*1000).String()
	}
	if spec.Count > 1 {
		name += "-" + cluster.Milli(k*1000).String()
	}
	return name
}

// Annotations that Volcano's workloads carry; a field of the job that says the same is stronger.
const (
	serviceAnnotation     = "volcano.sh/service.type"
	preemptableAnnotation = "volcano.sh/preemptable"
)

// service is a job's type: said, else by its owner's kind, else unknown ("").
func service(s *cluster.Snapshot, j *cluster.Job) string {
	if j.Service != "" {
		return j.Service
	}
	if v := j.Annotations[serviceAnnotation]; v != "" {
		return v
	}
	return s.Settings.OwnerKinds[j.Owner]
}

// preemptable says whether a task may be evicted; without a word it may.
func (t *task) preemptable() bool {
	switch {
	case t.spec.Preemptable != nil:
		return *t.spec.Preemptable
	case t.job.Preemptable != nil:
		return *t.job.Preemptable
	}
	return t.job.Annotations[preemptableAnnotation] != "false"
}

func (q *queue) open() bool { return q.State == "" || q.State == "open" }

func (q *queue) reclaimable() bool { return q.Reclaimable == nil || *q.Reclaimable }

// room says in what a queue would pass its quota with more; "" where it does not. Only what more asks for is looked at. factor
// multiplies the quota.
func (st *state) room(q *queue, held, more vector, factor float64) string {
	for i, n := range more {
		if n <= 0 || q.limit[i] == unlimited {
			continue
		}
		limit := times(q.limit[i], factor)
		if held[i]+n > limit {
			return st.dims.names[i] + ": " + st.dims.text(i, n) + " requested, the total would be " + st.dims.text(i, held[i]+n) + " of " + st.dims.text(i, limit)
		}
	}
	return ""
}

// times is a quota times the overcommit factor, exact for the decimal number that was written: 3 cards times 2.3 are 6.9 and not a little less.
func times(limit int64, factor float64) int64 {
	if factor == 1 {
		return limit
	}
	r, ok := new(big.Rat).SetString(strconv.FormatFloat(factor, 'g', -1, 64))
	if !ok {
		return limit // no number: the reader of a snapshot lets none through
	}
	r.Mul(r, new(big.Rat).SetInt64(limit))
	n := new(big.Int).Quo(r.Num(), r.Denom())
	if !n.IsInt64() {
		return math.MaxInt64
	}
	return n.Int64()
}
