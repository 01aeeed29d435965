package place

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/headrace/headrace/scheduler/cluster"
)

// randomSnapshot makes a small cluster with models of all kinds.
func randomSnapshot(r *rand.Rand) *cluster.Snapshot {
	s := &cluster.Snapshot{}
	for i := range 1 + r.IntN(6) {
		h := cluster.Host{Name: fmt.Sprintf("h%d", i), Memory: cluster.Bytes(r.IntN(400)), Labels: map[string]string{"zone": string(rune('a' + r.IntN(2)))}}
		if r.IntN(3) == 0 {
			h.CPU = cluster.Milli(1000 * r.IntN(8))
		}
		memory := cluster.Bytes(40 + 40*r.IntN(2))
		for j := range r.IntN(5) {
			h.GPUs = append(h.GPUs, cluster.GPU{Model: fmt.Sprint(memory), Memory: memory, Used: cluster.Bytes(r.IntN(30)), NUMA: j / 2})
		}
		h.NICs = []cluster.NIC{{Name: "r", Kind: "rdma", Gbps: 100, Fabric: string(rune('a' + r.IntN(2)))}}
		s.Hosts = append(s.Hosts, h)
	}
	backends := []string{"vllm", "gguf", "custom"}
	for i := range 4 {
		m := cluster.Model{Name: fmt.Sprintf("m%d", i), Backend: backends[r.IntN(3)], Claim: cluster.Claim{VRAM: cluster.Bytes(1 + r.IntN(90)), RAM: cluster.Bytes(r.IntN(50)), CPU: cluster.Milli(1000 * r.IntN(2))}}
		if r.IntN(3) == 0 {
			m.Selector = map[string]string{"zone": "a"}
		}
		if r.IntN(3) == 0 {
			m.Claim.GPUsEach = 1 + r.IntN(3)
		}
		if m.Backend == "gguf" && r.IntN(2) == 0 {
			m.Claim.VRAM = 0
			m.Claim.Layers = &cluster.Layers{Count: 1 + r.IntN(30), Weight: 3, KV: 1, Output: 2, Input: 2, Buffer: 1}
		}
		if r.IntN(4) == 0 && i > 0 {
			m.Draft = "m0"
		}
		if r.IntN(4) == 0 {
			m.Strategy = cluster.Spread
		}
		s.Models = append(s.Models, m)
		if r.IntN(2) == 0 {
			s.ModelFiles = append(s.ModelFiles, cluster.ModelFile{Model: m.Name, Host: s.Hosts[r.IntN(len(s.Hosts))].Name})
		}
	}
	s.Models[0].Draft = ""
	s.Normalize()
	return s
}

func newState(t *testing.T, s *cluster.Snapshot) *State {
	t.Helper()
	st, err := NewState(s)
	if err != nil {
		t.Fatal(err)
	}
	return st
}

// whole checks that no host and no device gave more than it has, counting anew from what is placed.
func whole(t *testing.T, s *cluster.Snapshot, placements []cluster.Placement) {
	t.Helper()
	ram, cpu, vram := map[string]cluster.Bytes{}, map[string]cluster.Milli{}, map[string]cluster.Bytes{}
	for _, p := range placements {
		for _, u := range p.Uses {
			ram[u.Host] += u.RAM
			cpu[u.Host] += u.CPU
			for _, g := range u.GPUs {
				vram[fmt.Sprint(u.Host, ":", g.Index)] += g.VRAM
			}
		}
	}
	for _, h := range s.Hosts {
		if h.Memory > 0 && ram[h.Name] > h.Memory-h.MemoryReserved-h.MemoryUsed || h.CPU > 0 && cpu[h.Name] > h.CPU-h.CPUUsed {
			t.Fatalf("host %s gave %d bytes and %s cores of %d and %s", h.Name, ram[h.Name], cpu[h.Name], h.Memory, h.CPU)
		}
		for _, g := range h.GPUs {
			if got := vram[fmt.Sprint(h.Name, ":", *g.Index)]; got > g.Memory-g.Used-g.Reserved {
				t.Fatalf("GPU %s:%d gave %d of %d", h.Name, *g.Index, got, g.Memory-g.Used)
			}
		}
	}
}

// TestCapacityIsNeverBroken places until nothing fits, and takes away; scores stay inside 0..max.
func TestCapacityIsNeverBroken(t *testing.T) {
	for seed := range uint64(100) {
		r := rand.New(rand.NewPCG(seed, 2))
		s := randomSnapshot(r)
		st := newState(t, s)
		var placed []cluster.Placement
		for i := range 40 {
			if len(placed) > 0 && r.IntN(4) == 0 {
				k := r.IntN(len(placed))
				if !st.Remove(placed[k].Instance) {
					t.Fatal("it was not there")
				}
				placed = append(placed[:k], placed[k+1:]...)
				continue
			}
			p, denied := st.Place(&s.Models[r.IntN(len(s.Models))], fmt.Sprint("i", i))
			if denied != nil {
				if denied.Reason == "" {
					t.Fatal("denied without a reason")
				}
				continue
			}
			for _, c := range p.Candidates {
				for _, x := range c.Scores {
					if x.Score < 0 || x.Score > x.Max*(1+1e-12) {
						t.Fatalf("seed %d: %s scores %v of %v", seed, x.Scorer, x.Score, x.Max)
					}
				}
			}
			st.Add(p)
			placed = append(placed, *p)
			whole(t, s, placed)
		}
	}
}

// TestFastEqualsPlace holds the index against the chain of filters, stages and scorers.
func TestFastEqualsPlace(t *testing.T) {
	compared := 0
	for seed := range uint64(150) {
		r := rand.New(rand.NewPCG(seed, 3))
		s := randomSnapshot(r)
		st := newState(t, s)
		f, err := NewFast(st)
		if err != nil {
			t.Fatal(err)
		}
		for i := range 30 {
			m := &s.Models[r.IntN(len(s.Models))]
			c, err := f.Compile(m)
			if err != nil {
				continue
			}
			got, ok := f.Place(c)
			want, _ := st.Place(m, fmt.Sprint("i", i))
			stage := OneGPU
			if m.Claim.GPUsEach > 1 {
				stage = SeveralGPUs
			}
			if wanted := want != nil && want.Stage == stage; ok != wanted {
				t.Fatalf("seed %d: %s: index %v, place %+v", seed, m.Name, ok, want)
			}
			if !ok {
				continue
			}
			compared++
			var devices []int
			for _, g := range want.Uses[0].GPUs {
				devices = append(devices, g.Index)
			}
			if f.Host(got) != want.Uses[0].Host || fmt.Sprint(f.Devices(got)) != fmt.Sprint(devices) || got.Total != want.Total {
				t.Fatalf("seed %d: %s: index %s %v %v, place %s %v %v", seed, m.Name, f.Host(got), f.Devices(got), got.Total, want.Uses[0].Host, devices, want.Total)
			}
			st.Add(want)
			f.Take(got)
		}
	}
	if compared < 200 {
		t.Errorf("only %d placements were compared", compared)
	}
}

// TestGangsAreWhole: all members or none, and none only where brute force finds no way either.
func TestGangsAreWhole(t *testing.T) {
	placed, denied := 0, 0
	for seed := range uint64(100) {
		r := rand.New(rand.NewPCG(seed, 4))
		s := randomSnapshot(r)
		for i := range s.Models { // one GPU each, so that brute force knows all ways
			s.Models[i].Backend, s.Models[i].Draft, s.Models[i].Claim.GPUsEach, s.Models[i].Claim.Layers = "vllm", "", 1, nil
			share := float64(1+r.IntN(9)) / 10
			s.Models[i].Claim.GPUShare, s.Models[i].Claim.VRAM = &share, 0
		}
		st := newState(t, s)
		members := []cluster.Member{{Model: "m1", Count: 1 + r.IntN(2)}, {Model: "m2", Count: 1 + r.IntN(2)}}
		before := fmt.Sprint(st.hosts)
		g := st.Gang("g", members, nil)
		if after := fmt.Sprint(st.hosts); after != before {
			t.Fatal("asking for a gang changed the state")
		}
		if g.Exhausted {
			continue
		}
		want := brute(st, s, append(repeat(st, "m1", members[0].Count), repeat(st, "m2", members[1].Count)...))
		if g.Placed != want {
			t.Fatalf("seed %d: placed %v, brute force %v: %s", seed, g.Placed, want, g.Why)
		}
		if g.Placed {
			placed++
			if len(g.Placements) != members[0].Count+members[1].Count {
				t.Fatalf("%d of the gang", len(g.Placements))
			}
			whole(t, s, g.Placements)
		} else if denied++; len(g.Placements) != 0 || g.Why == "" {
			t.Fatalf("%+v", g)
		}
	}
	if placed < 10 || denied < 10 {
		t.Errorf("%d placed, %d denied: the clusters are too easy or too hard", placed, denied)
	}
}

func repeat(st *State, model string, n int) (list []*cluster.Model) {
	for range n {
		list = append(list, st.models[model])
	}
	return list
}

// brute tries every GPU for every member.
func brute(st *State, s *cluster.Snapshot, todo []*cluster.Model) bool {
	if len(todo) == 0 {
		return true
	}
	m := todo[0]
	for i := range s.Hosts {
		h := &st.hosts[i]
		if len(m.Selector) > 0 && h.Labels["zone"] != m.Selector["zone"] || hostFits(h, int64(m.Claim.RAM), int64(m.Claim.CPU)) != "" {
			continue
		}
		for j := range h.gpus {
			claim := int64(float64(h.gpus[j].Memory) * *m.Claim.GPUShare)
			if claim == 0 || h.gpus[j].free < claim {
				continue
			}
			u := []cluster.Use{{Host: h.Name, RAM: m.Claim.RAM, CPU: m.Claim.CPU, GPUs: []cluster.GPUUse{{Index: j, VRAM: cluster.Bytes(claim)}}}}
			st.book(m.Name, u, 1)
			ok := brute(st, s, todo[1:])
			st.book(m.Name, u, -1)
			if ok {
				return true
			}
		}
	}
	return false
}
