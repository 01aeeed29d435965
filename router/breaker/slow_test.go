package breaker

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"
)

// pool is workers of one sort with a clock.
type pool struct {
	t     *testing.T
	s     *Slow
	now   time.Time
	paces []*Pace
	rng   *rand.Rand
}

func newPool(t *testing.T, n int) *pool {
	t.Helper()
	cfg := &Config{}
	if err := cfg.Check(); err != nil {
		t.Fatal(err)
	}
	p := &pool{t: t, s: NewSlow(3), now: time.Unix(1000, 0), rng: rand.New(rand.NewPCG(1, 2))}
	for range n {
		p.paces = append(p.paces, NewPace(New(cfg)))
	}
	p.s.Follow(map[string][]*Pace{"sort": p.paces})
	return p
}

// round sends each worker a request of so many tokens, for which worker i takes times[i] as long as it should, a fifth more or less.
func (p *pool) round(tokens int64, times ...float64) (opened int) {
	for i, pace := range p.paces {
		p.now = p.now.Add(20 * time.Millisecond)
		opened += p.serve(i, tokens, times[min(i, len(times)-1)])
		_ = pace
	}
	return opened
}

func (p *pool) serve(i int, tokens int64, times float64) int {
	usual := 10*time.Millisecond + time.Duration(tokens)*50*time.Microsecond
	return p.s.Took(p.now, p.paces[i], tokens, time.Duration(times*(0.8+0.4*p.rng.Float64())*float64(usual)))
}

func (p *pool) state(i int) State { return p.paces[i].breaker.State(p.now) }

func TestSlow(t *testing.T) {
	p := newPool(t, 4)
	for range 100 {
		if p.round(1000, 1) != 0 {
			t.Fatal("one of four alike is slow")
		}
	}
	if r := p.s.Ratio(p.paces[0]); r < 0.8 || r > 1.2 {
		t.Errorf("ratio %g of one among its like", r)
	}
	opened := 0
	for n := 0; opened == 0; n++ {
		if n > 600 {
			t.Fatal("a worker that takes ten times as long is not found")
		}
		opened = p.round(1000, 1, 10, 1, 1)
	}
	s := p.state(1)
	if s.Phase != Open || !s.Slow || s.Lost || !strings.Contains(s.Reason, "slow: its first tokens took") || !strings.Contains(s.Reason, "of 4 workers") {
		t.Errorf("%+v", s)
	}
	for i := range p.paces {
		if (p.state(i).Phase != Closed) != (i == 1) {
			t.Errorf("worker %d: %+v", i, p.state(i))
		}
	}
	// Tried again, and still slow; then it is well.
	b := p.paces[1].breaker
	p.now = s.Until
	if trial, ok := b.Take(p.now); !trial || !ok || p.serve(1, 1000, 10) != 1 {
		t.Fatalf("%+v behind a slow trial", p.state(1))
	}
	if b.Served(p.now); p.state(1).Phase != Open || !strings.Contains(p.state(1).Reason, "tried again") || p.state(1).Until.Sub(p.now) != 2*time.Second {
		t.Errorf("%+v behind a slow trial that was served", p.state(1))
	}
	b.Done()
	p.now = p.state(1).Until
	if trial, _ := b.Take(p.now); !trial || p.serve(1, 1000, 1) != 0 {
		t.Fatal("a trial as quick as the others is slow")
	}
	if b.Served(p.now); p.state(1).Phase != Closed {
		t.Errorf("%+v behind a quick trial", p.state(1))
	}
	for range 100 {
		if p.round(1000, 1) != 0 {
			t.Fatal("what was is held against it")
		}
	}
}

// TestSlowIsFair: what is no outlier opens nothing.
func TestSlowIsFair(t *testing.T) {
	for name, c := range map[string]struct {
		n      int
		tokens func(i int) int64
		times  func(i int) float64
	}{
		"long prompts for one":  {4, func(i int) int64 { return []int64{40000, 100, 100, 100}[i] }, nil},
		"two kinds of machines": {6, nil, func(i int) float64 { return []float64{1, 1, 1, 6, 6, 6}[i] }},
		"twice as slow":         {4, nil, func(i int) float64 { return []float64{2, 1, 1, 1}[i] }},
		"a spread":              {7, nil, func(i int) float64 { return []float64{1, 1.5, 2, 3, 4.5, 7, 10}[i] }},
		"two workers":           {2, nil, func(i int) float64 { return []float64{1, 20}[i] }},
		"quick ones":            {4, nil, func(i int) float64 { return []float64{0.1, 1, 1, 1}[i] }},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPool(t, c.n)
			for range 300 {
				for i := range p.paces {
					tokens, times := int64(1000), 1.0
					if c.tokens != nil {
						tokens = c.tokens(i)
					}
					if c.times != nil {
						times = c.times(i)
					}
					p.now = p.now.Add(10 * time.Millisecond)
					if p.serve(i, tokens, times) != 0 {
						t.Fatalf("worker %d: %+v", i, p.state(i))
					}
				}
			}
		})
	}
}

// TestSlowFew: a few requests tell nothing.
func TestSlowFew(t *testing.T) {
	p := newPool(t, 4)
	for range slowSamples - 1 {
		p.now = p.now.Add(2 * time.Second)
		if p.round(1000, 1, 50, 1, 1) != 0 {
			t.Fatal("less than ten requests opened it")
		}
	}
}

// TestSlowFollows: who has gone is judged no more, who comes has peers.
func TestSlowFollows(t *testing.T) {
	p := newPool(t, 4)
	gone := p.paces[3]
	p.s.Follow(map[string][]*Pace{"sort": p.paces[:3]})
	p.paces = p.paces[:3]
	for range 200 {
		p.now = p.now.Add(10 * time.Millisecond)
		p.s.Took(p.now, gone, 1000, time.Hour)
		p.round(1000, 1, 1, 10)
	}
	if gone.breaker.State(p.now).Phase != Closed || p.state(2).Phase != Open {
		t.Errorf("%+v, %+v", gone.breaker.State(p.now), p.state(2))
	}
	if stranger := NewPace(New(p.paces[0].breaker.cfg)); p.s.Took(p.now, stranger, 1, time.Hour) != 0 || p.s.Ratio(stranger) != 0 {
		t.Error("one that nobody follows is judged")
	}
}

// TestSlowHalf: however it goes, less than half of a sort is open for being slow when its workers are looked at together.
func TestSlowHalf(t *testing.T) {
	for seed := range uint64(100) {
		n := 3 + int(seed%6)
		p := newPool(t, n)
		p.rng = rand.New(rand.NewPCG(seed, 3))
		times := make([]float64, n)
		for i := range times {
			times[i] = []float64{1, 1, 1, 5, 30}[p.rng.IntN(5)]
		}
		for range 120 {
			for i := range p.paces {
				p.now = p.now.Add(5 * time.Millisecond)
				if p.serve(i, int64(p.rng.IntN(3000)), times[i]) > n/2 {
					t.Fatalf("seed %d: %v", seed, times)
				}
			}
		}
	}
}

func TestCheckSlow(t *testing.T) {
	for f, ok := range map[float64]bool{0: true, 1.5: true, 3: true, 1: false, -1: false, 1e9: false} {
		if (CheckSlow(f) == nil) != ok {
			t.Errorf("%g: %v", f, CheckSlow(f))
		}
	}
}

func TestSample(t *testing.T) {
	got := ""
	for _, tokens := range []int64{-5, 0, 63, 64, 255, 256, 1023, 1024, 4096, 16384, 65535, 65536, 1 << 40} {
		class, _ := sample(tokens, time.Second)
		got += fmt.Sprint(class)
	}
	if got != "0001122345566" {
		t.Errorf("classes %s", got)
	}
}
