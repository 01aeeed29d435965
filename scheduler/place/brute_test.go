package place

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"testing"

	"github.com/headrace/headrace/scheduler/cluster"
)

// TestBestIsBest holds the pick of the first stage against the formula and a look at every GPU: it is one that has the room, none scores higher, and the score is
// the formula's. Where none has the room the stage is another.
func TestBestIsBest(t *testing.T) {
	picked := 0
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 6))
		s := randomSnapshot(r)
		for i := range s.Models {
			m := &s.Models[i]
			m.Backend, m.Strategy, m.Draft, m.Claim.Layers, m.Claim.GPUsEach, m.Selector = "custom", "", "", nil, 0, nil
			m.Claim.VRAM = cluster.Bytes(1 + r.IntN(60))
			for j := range s.Hosts {
				for k := range s.Hosts[j].GPUs {
					if r.IntN(6) == 0 {
						m.GPUs = append(m.GPUs, s.Hosts[j].Name+":"+strconv.Itoa(k))
					}
				}
			}
		}
		st := newState(t, s)
		for i := range 12 {
			m := &s.Models[r.IntN(len(s.Models))]
			best := math.Inf(-1)
			for j := range st.hosts {
				h := &st.hosts[j]
				if hostFits(h, int64(m.Claim.RAM), int64(m.Claim.CPU)) != "" {
					continue
				}
				for k := range h.gpus {
					if h.gpus[k].free < int64(m.Claim.VRAM) || len(m.GPUs) > 0 && !slices.Contains(m.GPUs, h.Name+":"+strconv.Itoa(k)) {
						continue
					}
					score := 2 * float64(m.Claim.VRAM) / float64(h.gpus[k].free)
					if h.freeRAM > 0 {
						score += float64(m.Claim.RAM) / float64(h.freeRAM)
					}
					if st.files[m.Name][j] {
						score += .15 // 5 of 100, of three parts
					}
					best = max(best, score/3*100)
				}
			}
			p, denied := st.Place(m, fmt.Sprint("i", i))
			if math.IsInf(best, -1) {
				if denied == nil && p.Stage == OneGPU {
					t.Fatalf("seed %d: %s goes on %+v, which has no room", seed, m.Name, p.Uses)
				}
				continue
			}
			if denied != nil || p.Stage != OneGPU || math.Abs(p.Total-best) > 1e-9 {
				t.Fatalf("seed %d: %s scores %+v (%v), the best is %v", seed, m.Name, p, denied, best)
			}
			if u := p.Uses[0]; len(m.GPUs) > 0 && !slices.Contains(m.GPUs, u.Host+":"+strconv.Itoa(u.GPUs[0].Index)) {
				t.Fatalf("seed %d: %+v is none of %v", seed, u, m.GPUs)
			}
			picked++
			st.Add(p)
		}
	}
	if picked < 500 {
		t.Errorf("only %d were placed on one GPU", picked)
	}
}

// wholeGPUs makes a cluster and models of which each instance takes whole GPUs, so that brute force knows every way.
func wholeGPUs(r *rand.Rand) *cluster.Snapshot {
	s := &cluster.Snapshot{}
	for i := range 1 + r.IntN(4) {
		h := cluster.Host{Name: fmt.Sprintf("h%d", i), Labels: map[string]string{"zone": string(rune('a' + r.IntN(2)))}, CPU: cluster.Milli(1000 * r.IntN(7))}
		for range r.IntN(5) {
			h.GPUs = append(h.GPUs, cluster.GPU{Memory: 100, Used: cluster.Bytes(20 * r.IntN(2) * r.IntN(2))})
		}
		s.Hosts = append(s.Hosts, h)
	}
	all := 1.
	for i := range 3 {
		m := cluster.Model{Name: fmt.Sprintf("m%d", i), Backend: "gguf", Claim: cluster.Claim{GPUShare: &all, GPUsEach: 1 + r.IntN(3), CPU: cluster.Milli(1000 * r.IntN(3))}}
		if r.IntN(3) == 0 {
			m.Selector = map[string]string{"zone": "a"}
		}
		for j := range s.Hosts {
			for k := range s.Hosts[j].GPUs {
				if i == 2 && r.IntN(2) == 0 {
					m.GPUs = append(m.GPUs, s.Hosts[j].Name+":"+strconv.Itoa(k))
				}
			}
		}
		s.Models = append(s.Models, m)
	}
	s.Normalize()
	return s
}

// anyWay tries every host and every set of its GPUs for every member.
func anyWay(st *State, todo []*cluster.Model) bool {
	if len(todo) == 0 {
		return true
	}
	m := todo[0]
	for i := range st.hosts {
		h := &st.hosts[i]
		if len(m.Selector) > 0 && h.Labels["zone"] != m.Selector["zone"] || hostFits(h, 0, int64(m.Claim.CPU)) != "" {
			continue
		}
		for set := range 1 << len(h.gpus) {
			u := cluster.Use{Host: h.Name, CPU: m.Claim.CPU}
			fits := true
			for k := range h.gpus {
				if set>>k&1 == 1 {
					fits = fits && h.gpus[k].free >= 100 && (len(m.GPUs) == 0 || slices.Contains(m.GPUs, h.Name+":"+strconv.Itoa(k)))
					u.GPUs = append(u.GPUs, cluster.GPUUse{Index: k, VRAM: 100})
				}
			}
			if !fits || len(u.GPUs) != m.Claim.GPUsEach {
				continue
			}
			st.book(m.Name, []cluster.Use{u}, 1)
			ok := anyWay(st, todo[1:])
			st.book(m.Name, []cluster.Use{u}, -1)
			if ok {
				return true
			}
		}
	}
	return false
}

// TestGangsOfSeveralGPUs has members that take several GPUs, cores, hosts with a label, and some that name their GPUs: the gang is placed where brute force finds a way,
// whole and inside what there is, and nowhere else.
func TestGangsOfSeveralGPUs(t *testing.T) {
	placed, denied, missed := 0, 0, 0
	for seed := range uint64(400) {
		r := rand.New(rand.NewPCG(seed, 7))
		s := wholeGPUs(r)
		st := newState(t, s)
		var members []cluster.Member
		var todo []*cluster.Model
		for i := range s.Models {
			if n := r.IntN(3); n > 0 {
				members = append(members, cluster.Member{Model: s.Models[i].Name, Count: n})
				todo = append(todo, repeat(st, s.Models[i].Name, n)...)
			}
		}
		g := st.Gang("g", members, nil)
		want := anyWay(st, todo)
		named := slices.ContainsFunc(todo, func(m *cluster.Model) bool { return len(m.GPUs) > 0 })
		switch {
		case g.Exhausted:
		case g.Placed && !want:
			t.Fatalf("seed %d: placed where there is no way: %+v", seed, g.Placements)
		case g.Placed:
			placed++
			if len(g.Placements) != len(todo) {
				t.Fatalf("seed %d: %d of %d", seed, len(g.Placements), len(todo))
			}
			whole(t, s, g.Placements)
			for _, p := range g.Placements {
				m := st.models[p.Model]
				for _, u := range p.Uses[0].GPUs {
					if len(m.GPUs) > 0 && !slices.Contains(m.GPUs, p.Uses[0].Host+":"+strconv.Itoa(u.Index)) {
						t.Fatalf("seed %d: %s on GPU %d of %s, which it does not name", seed, p.Instance, u.Index, p.Uses[0].Host)
					}
				}
			}
		case want && named: // which GPUs of a host an unnamed member takes is not searched
			missed++
		case want:
			t.Fatalf("seed %d: there is a way, and %s", seed, g.Why)
		default:
			if denied++; len(g.Placements) != 0 || g.Denied == nil || len(g.Denied.Filters) == 0 {
				t.Fatalf("seed %d: %+v", seed, g)
			}
		}
	}
	if placed < 60 || denied < 60 || missed > 20 {
		t.Errorf("%d placed, %d denied, %d missed", placed, denied, missed)
	}
}

// TestGangsOverHosts lets members go over hosts: what is placed is whole and inside what there is, and each host gives equally many GPUs.
func TestGangsOverHosts(t *testing.T) {
	over := 0
	for seed := range uint64(800) {
		r := rand.New(rand.NewPCG(seed, 8))
		s := wholeGPUs(r)
		for i := range s.Models {
			s.Models[i].Backend, s.Models[i].Claim.GPUsEach, s.Models[i].Selector = "vllm", 2+r.IntN(5), nil
			s.Models[i].Claim.CPU, s.Models[i].GPUs = 0, nil
		}
		st := newState(t, s)
		members := []cluster.Member{{Model: "m0", Count: 1}, {Model: "m1", Count: r.IntN(2)}, {Model: "m2", Count: r.IntN(2)}}
		g := st.Gang("g", members, nil)
		if !g.Placed {
			if g.Why == "" || len(g.Placements) > 0 {
				t.Fatalf("seed %d: %+v", seed, g)
			}
			continue
		}
		whole(t, s, g.Placements)
		for _, p := range g.Placements {
			gpus := 0
			for _, u := range p.Uses {
				gpus += len(u.GPUs)
				if len(u.GPUs) != len(p.Uses[0].GPUs) {
					t.Fatalf("seed %d: unequal hosts: %+v", seed, p.Uses)
				}
			}
			if gpus != st.models[p.Model].Claim.GPUsEach {
				t.Fatalf("seed %d: %d GPUs of %d", seed, gpus, st.models[p.Model].Claim.GPUsEach)
			}
			if len(p.Uses) > 1 {
				over++
			}
		}
	}
	if over < 20 {
		t.Errorf("only %d went over hosts", over)
	}
}

// TestLargeGangEnds: a gang that is larger than a cluster of equal hosts is denied after as many looks as there is room for members, not after every order of them.
func TestLargeGangEnds(t *testing.T) {
	s := &cluster.Snapshot{Models: []cluster.Model{{Name: "p", Backend: "vllm"}, {Name: "d", Backend: "vllm"}}}
	for i := range 32 {
		s.Hosts = append(s.Hosts, cluster.Host{Name: fmt.Sprint("h", i), GPUs: []cluster.GPU{{Memory: 80, Count: 4}}})
	}
	s.Normalize()
	g := newState(t, s).Gang("g", []cluster.Member{{Model: "p", Count: 65}, {Model: "d", Count: 65}}, nil)
	if g.Placed || g.Exhausted || g.Denied == nil {
		t.Errorf("%+v", g)
	}
	g = newState(t, s).Gang("g", []cluster.Member{{Model: "p", Count: 64}, {Model: "d", Count: 64}}, nil)
	if !g.Placed || len(g.Placements) != 128 {
		t.Errorf("128 of 128 GPUs: %s", g.Why)
	}
}
