package reclaim

import (
	"fmt"
	"math/bits"
	"math/rand/v2"
	"testing"

	"github.com/headrace/headrace/scheduler/cluster"
)

func milli(n int) cluster.Milli { return cluster.Milli(n * 1000) }

// randomJobs makes a small cluster full of training, with one inference job that waits.
func randomJobs(r *rand.Rand) *cluster.Snapshot {
	s := &cluster.Snapshot{Queues: []cluster.Queue{{Name: "inf", Priority: 9}, {Name: "t1", Priority: 1}, {Name: "t2", Priority: 2}}}
	nodes := 1 + r.IntN(3)
	free := make([][2]int, nodes)
	for i := range nodes {
		free[i] = [2]int{4 + r.IntN(5), 4 + r.IntN(5)}
		s.Hosts = append(s.Hosts, cluster.Host{Name: fmt.Sprint("n", i), CPU: milli(free[i][0]), Cards: map[string]int64{"X": int64(free[i][1])}})
	}
	for i := range 1 + r.IntN(8) {
		j := cluster.Job{Name: fmt.Sprint("j", i), Queue: fmt.Sprint("t", 1+r.IntN(2)), Priority: r.IntN(3), Service: cluster.Training}
		for range 1 + r.IntN(2) {
			n, cpu, card := r.IntN(nodes), r.IntN(4), r.IntN(4)
			if free[n][0] < cpu || free[n][1] < card {
				continue
			}
			free[n][0] -= cpu
			free[n][1] -= card
			j.Tasks = append(j.Tasks, cluster.Task{Host: s.Hosts[n].Name, Request: request(cpu, card)})
		}
		if len(j.Tasks) > 1 && r.IntN(2) == 0 {
			j.MinAvailable = len(j.Tasks)
		}
		if r.IntN(6) == 0 {
			no := false
			j.Preemptable = &no
		}
		s.Jobs = append(s.Jobs, j)
	}
	want := cluster.Job{Name: "want", Queue: "inf", Service: cluster.Inference}
	for range 1 + r.IntN(3) {
		want.Tasks = append(want.Tasks, cluster.Task{Request: request(r.IntN(5), 1+r.IntN(4))})
	}
	want.MinAvailable = len(want.Tasks)
	s.Jobs = append(s.Jobs, want)
	s.Normalize()
	return s
}

func request(cpu, card int) cluster.Resources {
	return cluster.Resources{CPU: milli(cpu), Cards: map[string]cluster.Milli{"X": milli(card)}}
}

// brute is the least number of tasks that must fall, by trying every set of units; -1 where none does.
func brute(s *cluster.Snapshot) int {
	st := newState(s, nil)
	j := st.jobs[len(st.jobs)-1]
	units := st.victims(j)
	best := -1
	for set := range 1 << len(units) {
		fall := 0
		left := st.frees(true)
		for rest := uint(set); rest != 0; rest &= rest - 1 {
			for _, t := range units[bits.TrailingZeros(rest)].tasks {
				fall++
				left[t.node].add(t.req)
			}
		}
		if (best < 0 || fall < best) && everyWay(j.tasks, left) {
			best = fall
		}
	}
	return best
}

func everyWay(tasks []*task, left []vector) bool {
	if len(tasks) == 0 {
		return true
	}
	for n := range left {
		if left[n].covers(tasks[0].req) {
			left[n].sub(tasks[0].req)
			ok := everyWay(tasks[1:], left)
			left[n].add(tasks[0].req)
			if ok {
				return true
			}
		}
	}
	return false
}

// TestFewestVictims holds the search against every possibility: as few as can be, none where it is of no use, gangs whole.
func TestFewestVictims(t *testing.T) {
	reclaimed, hopeless, free := 0, 0, 0
	for seed := range uint64(600) {
		s := randomJobs(rand.New(rand.NewPCG(seed, 5)))
		want := brute(s)
		r := Decide(s, nil)
		admitted := 0
		for _, a := range r.Admissions {
			if a.Job == "want" {
				admitted++
			}
		}
		tasks := len(s.Jobs[len(s.Jobs)-1].Tasks)
		switch {
		case want < 0:
			hopeless++
			if len(r.Evictions) > 0 || admitted > 0 || len(r.Denied) == 0 {
				t.Fatalf("seed %d: nothing helps, and yet %+v", seed, r)
			}
		case admitted != tasks || len(r.Evictions) != want:
			t.Fatalf("seed %d: %d of %d tasks admitted for %d evictions, %d are enough: %+v", seed, admitted, tasks, len(r.Evictions), want, r)
		case want == 0:
			free++
		default:
			reclaimed++
		}
		for _, j := range s.Jobs {
			fell := 0
			for _, e := range r.Evictions {
				if e.Job == j.Name {
					fell++
				}
			}
			if fell > 0 && j.Preemptable != nil || j.MinAvailable > 1 && fell > 0 && fell != len(j.Tasks) {
				t.Fatalf("seed %d: %d tasks of %+v fell", seed, fell, j)
			}
		}
		roomHolds(t, seed, s, r)
	}
	if reclaimed < 40 || hopeless < 40 || free < 20 {
		t.Errorf("%d reclaimed, %d hopeless, %d free: the clusters are too easy or too hard", reclaimed, hopeless, free)
	}
}

// roomHolds counts anew that no node gives more than it has.
func roomHolds(t *testing.T, seed uint64, s *cluster.Snapshot, r Result) {
	t.Helper()
	for _, h := range s.Hosts {
		cpu, card := cluster.Milli(0), cluster.Milli(0)
		count := func(q cluster.Resources, sign cluster.Milli) {
			cpu += sign * q.CPU
			card += sign * q.Cards["X"]
		}
		gone := map[string]int{}
		for _, e := range r.Evictions {
			if e.Host == h.Name {
				gone[e.Job+"/"+e.Task]++
			}
		}
		for _, j := range s.Jobs {
			for i, task := range j.Tasks {
				if task.Host == h.Name && gone[j.Name+"/"+taskName(&task, 0, i)] == 0 {
					count(task.Request, 1)
				}
				for _, a := range r.Admissions {
					if a.Host == h.Name && a.Job == j.Name && a.Task == taskName(&task, 0, i) {
						count(task.Request, 1)
					}
				}
			}
		}
		if cpu > h.CPU || card > cluster.Milli(h.Cards["X"]*1000) {
			t.Fatalf("seed %d: node %s gives %s cores and %s cards of %s and %d", seed, h.Name, cpu, card, h.CPU, h.Cards["X"])
		}
	}
}

// TestTide: a pool that grows takes the room, and when it has shrunk what was evicted comes back.
func TestTide(t *testing.T) {
	s := &cluster.Snapshot{
		Hosts:  []cluster.Host{{Name: "n", CPU: milli(4)}},
		Queues: []cluster.Queue{{Name: "inf", Priority: 2}, {Name: "train", Priority: 1}},
		Jobs: []cluster.Job{
			{Name: "train", Queue: "train", Service: cluster.Training, MinAvailable: 2, Tasks: []cluster.Task{{Name: "a", Host: "n", Request: cluster.Resources{CPU: milli(2)}}, {Name: "b", Host: "n", Request: cluster.Resources{CPU: milli(2)}}}},
			{Name: "web", Queue: "inf", Service: cluster.Inference, Tasks: []cluster.Task{{Name: "w", Request: cluster.Resources{CPU: milli(1)}}}},
		},
	}
	s.Normalize()
	r := Decide(s, nil)
	if len(r.Evictions) != 2 || len(r.Admissions) != 1 || r.Admissions[0].Job != "web" {
		t.Fatalf("the flood: %+v", r)
	}
	for i := range s.Jobs[0].Tasks {
		s.Jobs[0].Tasks[i].State, s.Jobs[0].Tasks[i].Host = "evicted", ""
	}
	s.Jobs[1].Tasks[0].Host = "n"
	if r = Decide(s, nil); len(r.Admissions) != 0 || len(r.Evictions) != 0 || len(r.Denied) != 1 {
		t.Fatalf("high water: %+v", r)
	}
	s.Jobs = s.Jobs[:1]
	if r = Decide(s, nil); len(r.Admissions) != 2 || len(r.Evictions) != 0 {
		t.Fatalf("the ebb: %+v", r)
	}
}
