package reclaim

import (
	"cmp"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/headrace/headrace/scheduler/cluster"
)

// crowded makes nodes of cores and two cards, full of training in several queues (one not to be taken from), and inference in two queues
// with quotas.
func crowded(r *rand.Rand, reclaimers int) *cluster.Snapshot {
	no := false
	s := &cluster.Snapshot{Queues: []cluster.Queue{
		{Name: "inf0", Priority: 9}, {Name: "inf1", Priority: 8, Quota: cluster.Quota{Cards: map[string]cluster.Milli{"X": milli(3 + r.IntN(6)), "Y": milli(2)}}},
		{Name: "t0", Priority: r.IntN(3)}, {Name: "t1", Priority: r.IntN(3)}, {Name: "kept", Priority: 0, Reclaimable: &no},
	}}
	free := make([]cluster.Resources, 1+r.IntN(3))
	for i := range free {
		h := cluster.Host{Name: fmt.Sprint("n", i), CPU: milli(4 + r.IntN(5)), Cards: map[string]int64{"X": int64(2 + r.IntN(4)), "Y": int64(r.IntN(3))}}
		free[i] = cluster.Resources{CPU: h.CPU, Cards: map[string]cluster.Milli{"X": milli(int(h.Cards["X"])), "Y": milli(int(h.Cards["Y"]))}}
		s.Hosts = append(s.Hosts, h)
	}
	ask := func() cluster.Resources {
		return cluster.Resources{CPU: milli(r.IntN(4)), Cards: map[string]cluster.Milli{"X": milli(r.IntN(3)), "Y": milli(r.IntN(2))}}
	}
	for i := range 3 + r.IntN(7) {
		j := cluster.Job{Name: fmt.Sprint("j", i), Queue: s.Queues[2+r.IntN(3)].Name, Priority: r.IntN(4), Service: []string{cluster.Training, cluster.Training, cluster.Training, cluster.Inference, ""}[r.IntN(5)]}
		for range 1 + r.IntN(3) {
			n, q := r.IntN(len(free)), ask()
			if free[n].CPU < q.CPU || free[n].Cards["X"] < q.Cards["X"] || free[n].Cards["Y"] < q.Cards["Y"] {
				continue
			}
			free[n].CPU -= q.CPU
			free[n].Cards["X"] -= q.Cards["X"]
			free[n].Cards["Y"] -= q.Cards["Y"]
			j.Tasks = append(j.Tasks, cluster.Task{Name: fmt.Sprint("r", len(j.Tasks)), Host: s.Hosts[n].Name, Request: q})
		}
		if len(j.Tasks) > 1 && r.IntN(2) == 0 {
			j.MinAvailable = len(j.Tasks)
		}
		if len(j.Tasks) > 0 && reclaimers > 1 && r.IntN(3) == 0 { // a task that waits: a gang that falls must not bring it in
			j.Tasks = append(j.Tasks, cluster.Task{Name: "w", Request: ask()})
		}
		s.Jobs = append(s.Jobs, j)
	}
	for i := range reclaimers {
		j := cluster.Job{Name: fmt.Sprint("want", i), Queue: fmt.Sprint("inf", r.IntN(2)), Priority: r.IntN(2), Service: cluster.Inference}
		for k := range 1 + r.IntN(2)*min(reclaimers-1, 1) {
			q := ask()
			q.Cards["X"] += milli(1)
			j.Tasks = append(j.Tasks, cluster.Task{Name: fmt.Sprint("t", k), Request: q})
		}
		j.MinAvailable = r.IntN(len(j.Tasks) + 1)
		s.Jobs = append(s.Jobs, j)
	}
	s.Normalize()
	return s
}

// prices are the priorities of what falls, the dearest first.
func prices(jobs []*job) [][2]int {
	var out [][2]int
	for _, j := range jobs {
		out = append(out, [2]int{j.queue.Priority, j.Priority})
	}
	slices.SortFunc(out, func(a, b [2]int) int { return cmp.Or(cmp.Compare(b[0], a[0]), cmp.Compare(b[1], a[1])) })
	return out
}

// cheapest is, by trying every set of units, the least that must fall for one task, as prices; false where nothing helps.
func cheapest(s *cluster.Snapshot) ([][2]int, bool) {
	st := newState(s, nil)
	want := st.jobs[len(st.jobs)-1]
	units := st.victims(want)
	var best [][2]int
	found := false
	for set := range 1 << len(units) {
		left := st.frees(true)
		var jobs []*job
		for rest := uint(set); rest != 0; rest &= rest - 1 {
			for _, t := range units[bits.TrailingZeros(rest)].tasks {
				jobs = append(jobs, t.job)
				left[t.node].add(t.req)
			}
		}
		p := prices(jobs)
		if found && (len(p) > len(best) || len(p) == len(best) && slices.CompareFunc(p, best, func(a, b [2]int) int { return cmp.Or(cmp.Compare(a[0], b[0]), cmp.Compare(a[1], b[1])) }) >= 0) {
			continue
		}
		if everyWay(want.tasks, left) {
			best, found = p, true
		}
	}
	return best, found
}

// TestFewestAndCheapest has one task that reclaims among several queues and cards: of all the smallest sets the one falls whose dearest task is
// the cheapest, and of those the one whose next is.
func TestFewestAndCheapest(t *testing.T) {
	taken, ties := 0, 0
	for seed := range uint64(800) {
		s := crowded(rand.New(rand.NewPCG(seed, 6)), 1)
		s.Queues[1].Quota = cluster.Quota{}
		want, ok := cheapest(s)
		r := Decide(s, nil)
		st := newState(s, nil)
		byName := map[string]*job{}
		for _, j := range st.jobs {
			byName[j.Name] = j
		}
		var fell []*job
		for _, e := range r.Evictions {
			fell = append(fell, byName[e.Job])
		}
		if got := prices(fell); !slices.Equal(got, want) {
			t.Fatalf("seed %d: falls %v, the least is %v (%v): %+v", seed, got, want, ok, r)
		}
		if len(want) > 0 {
			taken++
		}
		if len(want) > 1 {
			ties++
		}
	}
	if taken < 60 || ties < 20 {
		t.Errorf("%d reclaimed, %d of them more than one: too easy", taken, ties)
	}
}

// TestSeveralReclaimers has jobs of several queues reclaim one after the other, gangs among them: nothing falls that may not or for nothing, gangs
// fall whole and stay down, quotas and nodes hold, and every task that waits is admitted or denied with a reason.
func TestSeveralReclaimers(t *testing.T) {
	evicted, denied, down := 0, 0, 0
	for seed := range uint64(500) {
		s := crowded(rand.New(rand.NewPCG(seed, 7)), 3)
		r := Decide(s, nil)
		evicted += len(r.Evictions)
		denied += len(r.Denied)
		in, out := map[string]int{}, map[string]int{}
		for _, a := range r.Admissions {
			in[a.Job]++
		}
		for _, e := range r.Evictions {
			out[e.Job]++
			if in[e.For] == 0 || e.Why == "" {
				t.Fatalf("seed %d: %+v falls for nothing", seed, e)
			}
		}
		no := map[string]int{}
		for _, d := range r.Denied {
			name := d.Name
			for i := range s.Jobs {
				if d.What == "task" && len(name) > len(s.Jobs[i].Name) && name[:len(s.Jobs[i].Name)+1] == s.Jobs[i].Name+"/" {
					name = s.Jobs[i].Name
				}
			}
			if no[name]++; d.Reason == "" {
				t.Fatalf("seed %d: %+v", seed, d)
			}
		}
		held := map[string]map[string]cluster.Milli{"inf0": {}, "inf1": {}, "t0": {}, "t1": {}, "kept": {}}
		for i := range s.Jobs {
			down += check(t, seed, &s.Jobs[i], in, out, no)
			for _, a := range r.Admissions {
				for _, task := range s.Jobs[i].Tasks {
					if a.Job == s.Jobs[i].Name && a.Task == task.Name {
						for c, n := range task.Request.Cards {
							held[s.Jobs[i].Queue][c] += n
						}
					}
				}
			}
		}
		for _, q := range s.Queues[:2] {
			for c, most := range q.Quota.Cards {
				if held[q.Name][c] > most {
					t.Fatalf("seed %d: queue %s has %s of %s, its quota is %s", seed, q.Name, held[q.Name][c], c, most)
				}
			}
		}
		roomHolds(t, seed, s, r)
	}
	if evicted < 200 || denied < 200 || down < 5 {
		t.Errorf("%d evicted, %d denied, %d gangs stayed down: too easy", evicted, denied, down)
	}
}

// check looks at one job; it counts gangs that fell with a task waiting.
func check(t *testing.T, seed uint64, j *cluster.Job, in, out, no map[string]int) (down int) {
	t.Helper()
	running, waits := 0, 0
	for _, task := range j.Tasks {
		if task.Host != "" {
			running++
		} else {
			waits++
		}
	}
	gang := j.MinAvailable > 1
	switch {
	case out[j.Name] > 0 && (j.Service != cluster.Training || j.Queue == "kept"):
		t.Fatalf("seed %d: %s of %q in %s falls", seed, j.Name, j.Service, j.Queue)
	case out[j.Name] > 0 && gang && out[j.Name] != running:
		t.Fatalf("seed %d: %d of %d tasks of gang %s fall", seed, out[j.Name], running, j.Name)
	case out[j.Name] > 0 && gang && in[j.Name] > 0:
		t.Fatalf("seed %d: gang %s falls and comes", seed, j.Name)
	case in[j.Name] < waits && no[j.Name] == 0:
		t.Fatalf("seed %d: %d of %d tasks of %s come, and nobody says why not the rest", seed, in[j.Name], waits, j.Name)
	case running == 0 && in[j.Name] > 0 && in[j.Name] < j.MinAvailable:
		t.Fatalf("seed %d: %d of a gang of %d come", seed, in[j.Name], j.MinAvailable)
	}
	if out[j.Name] > 0 && gang && waits > 0 {
		down++
	}
	return down
}
