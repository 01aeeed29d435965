package fleet

import (
	"math/bits"
	"math/rand/v2"
	"testing"
)

func randomFleet(r *rand.Rand, hosts, classes int) []Host {
	list := make([]Host, hosts)
	for i := range list {
		h := Host{Class: r.IntN(classes), RAM: int64(r.IntN(200)), CPU: int64(r.IntN(64)), GPUs: make([]int64, r.IntN(9)), NUMA: make([]int, 8)}
		if r.IntN(4) == 0 {
			h.RAM = Uncounted
		}
		for j := range h.GPUs {
			h.GPUs[j] = int64(r.IntN(12)) * 8
			h.NUMA[j] = j / 4
		}
		h.NUMA = h.NUMA[:len(h.GPUs)]
		list[i] = h
	}
	return list
}

// TestIndexEqualsScan takes and gives back at random, and asks both ways each time.
func TestIndexEqualsScan(t *testing.T) {
	for seed := range uint64(40) {
		r := rand.New(rand.NewPCG(seed, 1))
		list := randomFleet(r, 1+r.IntN(60), 3)
		x, err := New(list, Weights{RAM: 1, VRAM: 2, Max: 100})
		if err != nil {
			t.Fatal(err)
		}
		type held struct {
			p Pick
			a Ask
		}
		var booked []held
		for range 300 {
			if len(booked) > 0 && r.IntN(3) == 0 {
				i := r.IntN(len(booked))
				x.Give(booked[i].p, &booked[i].a)
				booked[i] = booked[len(booked)-1]
				booked = booked[:len(booked)-1]
				continue
			}
			a := Ask{GPUs: 1 + r.IntN(3)*r.IntN(3), VRAM: int64(r.IntN(60)), RAM: int64(r.IntN(20)), CPU: int64(r.IntN(4))}
			class := r.IntN(3)
			got, ok := x.Best(class, &a)
			want, wantOK := x.Scan(class, &a)
			if got != want || ok != wantOK {
				t.Fatalf("seed %d: %+v in class %d: index %+v %v, scan %+v %v", seed, a, class, got, ok, want, wantOK)
			}
			if ok {
				if bits.OnesCount64(got.GPUs) != a.GPUs {
					t.Fatalf("%+v got %b", a, got.GPUs)
				}
				x.Take(got, &a)
				booked = append(booked, held{got, a})
			}
			for h := range list {
				for g := range list[h].GPUs {
					if v, ram, cpu := x.Free(h, g); v < 0 || ram < 0 || cpu < 0 {
						t.Fatalf("host %d GPU %d: %d %d %d left", h, g, v, ram, cpu)
					}
				}
			}
		}
		for _, b := range booked {
			x.Give(b.p, &b.a)
		}
		for h := range list {
			for g, want := range list[h].GPUs {
				if v, ram, _ := x.Free(h, g); v != want || ram != list[h].RAM {
					t.Fatalf("after all is given back host %d GPU %d has %d of %d", h, g, v, want)
				}
			}
		}
	}
}

func TestNothingIsAllocated(t *testing.T) {
	list := make([]Host, 500)
	for i := range list {
		list[i] = Host{RAM: 1 << 40, CPU: Uncounted, GPUs: []int64{80, 80, 80, 80, 80, 80, 80, 80}}
	}
	x, err := New(list, Weights{RAM: 1, VRAM: 2, Max: 100})
	if err != nil {
		t.Fatal(err)
	}
	a := Ask{GPUs: 2, VRAM: 30, RAM: 1 << 30}
	if n := testing.AllocsPerRun(200, func() {
		p, ok := x.Best(0, &a)
		if !ok {
			t.Fatal("no room")
		}
		x.Take(p, &a)
	}); n != 0 {
		t.Errorf("%v allocations a placement", n)
	}
}

func TestHostsThatCannotBe(t *testing.T) {
	if _, err := New([]Host{{GPUs: make([]int64, 65)}}, Weights{}); err == nil {
		t.Error("65 GPUs were taken")
	}
	x, err := New([]Host{{}}, Weights{RAM: 1, VRAM: 2, Max: 100})
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range []Ask{{GPUs: 0}, {GPUs: 1}, {GPUs: 2}} {
		if p, ok := x.Best(0, &a); ok {
			t.Errorf("%+v on a host without GPUs: %+v", a, p)
		}
	}
	if _, ok := x.Best(7, &Ask{GPUs: 1}); ok {
		t.Error("a class that is not there has room")
	}
}
