package pairing

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

func near(got, want, share float64) bool { return math.Abs(got-want) <= share*want }

func TestSpeedsAreLearned(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	var e Estimator
	if s := e.Speeds(); s != (Speeds{}) {
		t.Errorf("of nothing: %+v", s)
	}
	const rate, itl, stream = 20000.0, 0.008, 0.0003
	sample := func(k float64) {
		tokens := 500 + rng.IntN(20000)
		e.Prefilled(int64(tokens), time.Duration(k*float64(tokens)/rate*(0.8+0.4*rng.Float64())*float64(time.Second)))
		n := float64(1 + rng.IntN(40))
		e.Decoded(n, time.Duration(k*(itl+stream*(n-1))*(0.9+0.2*rng.Float64())*float64(time.Second)))
	}
	for i := range 200 {
		sample(1)
		if i%25 == 24 { // another request, a stopped machine
			e.Prefilled(20000, 40*time.Second)
			e.Decoded(3, 2*time.Second)
		}
	}
	s := e.Speeds()
	if !near(s.PrefillRate, rate, 0.1) || !near(s.ITL, itl, 0.2) || !near(s.ITLStream, stream, 0.2) {
		t.Errorf("learned %+v of a rate of %v and %v s + %v s a stream", s, rate, itl, stream)
	}
	// A worker that is five times slower from now on is believed after a few answers.
	for range 60 {
		sample(5)
	}
	if s := e.Speeds(); !near(s.PrefillRate, rate/5, 0.15) || !near(s.ITL+20*s.ITLStream, 5*(itl+20*stream), 0.2) {
		t.Errorf("of one that has become five times slower: %+v", s)
	}
}

func TestOddSamplesTeachNothing(t *testing.T) {
	var e Estimator
	e.Prefilled(10, time.Second)
	e.Prefilled(1000, 0)
	e.Prefilled(-5, -time.Second)
	e.Decoded(0, time.Second)
	e.Decoded(math.NaN(), time.Second)
	e.Decoded(1, 0)
	if s := e.Speeds(); s != (Speeds{}) {
		t.Errorf("%+v", s)
	}
	rng := rand.New(rand.NewPCG(3, 4))
	for range 2000 {
		e.Prefilled(int64(rng.IntN(1<<20)), time.Duration(rng.Int64N(1<<uint(20+rng.IntN(20)))))
		e.Decoded(rng.Float64()*100, time.Duration(rng.Int64N(1<<uint(20+rng.IntN(20)))))
		s := e.Speeds()
		if s.PrefillRate < 0 || s.ITL < 0 || s.ITLStream < 0 || math.IsNaN(s.PrefillRate+s.ITL+s.ITLStream) || math.IsInf(s.PrefillRate+s.ITL+s.ITLStream, 0) {
			t.Fatalf("%+v", s)
		}
	}
}

// All samples at one load say nothing of another.
func TestOneLoadTeachesNoSlope(t *testing.T) {
	var e Estimator
	for range 50 {
		e.Decoded(10, 20*time.Millisecond)
	}
	if s := e.Speeds(); s.ITLStream != 0 || !near(s.ITL, 0.02, 0.01) {
		t.Errorf("%+v", s)
	}
}

// What nobody knows of a worker is taken from those of whom it is known.
func TestUnknownWorkersAreTakenForTheOthers(t *testing.T) {
	v := &View{Workers: []Candidate{{Speeds: Speeds{PrefillRate: 1000}}, {Speeds: Speeds{PrefillRate: 3000, ITL: 0.1, ITLStream: 0.01}}, {}}}
	others := learned(v)
	if s := v.Workers[2].speeds(&others); s != (Speeds{PrefillRate: 2000, ITL: 0.1, ITLStream: 0.01}) {
		t.Errorf("%+v", s)
	}
	if s := v.Workers[0].speeds(&others); s != (Speeds{PrefillRate: 1000, ITL: 0.1, ITLStream: 0.01}) {
		t.Errorf("%+v", s)
	}
	empty := learned(&View{})
	if empty != (Speeds{PrefillRate: priorRate, ITL: priorITL, ITLStream: priorITLStream}) {
		t.Errorf("%+v", empty)
	}
}

// Workers that are alike are taken for alike, whatever prompts chance gave them; one that is slower is found out.
func TestChanceIsNoDifference(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 8))
	const rate = 100000.0
	v := &View{Workers: make([]Candidate, 8)}
	for i := range v.Workers {
		var e Estimator
		for range 60 {
			tokens := 300 * math.Exp(rng.Float64()*6)                     // most of them short
			took := 0.004 + tokens/rate*math.Exp(0.8*(rng.Float64()-0.5)) // short ones seem slow
			if i == 7 {
				took *= 3
			}
			e.Prefilled(int64(tokens), time.Duration(took*1e9))
		}
		v.Workers[i].Speeds = e.Speeds()
	}
	others := learned(v)
	least, most := math.Inf(1), 0.0
	raw := make([]float64, 0, 7)
	for i := range v.Workers[:7] {
		s := v.Workers[i].speeds(&others)
		least, most = min(least, s.PrefillRate), max(most, s.PrefillRate)
		raw = append(raw, v.Workers[i].Speeds.PrefillRate)
	}
	if got, was := most/least, slices.Max(raw)/slices.Min(raw); got > 1+0.8*(was-1) {
		t.Errorf("seven workers that are alike differ by a factor of %.3f, their samples by %.3f", got, was)
	}
	if s := v.Workers[7].speeds(&others); s.PrefillRate > 0.5*least {
		t.Errorf("a worker of a third of the others' speed is taken for one of %.0f tokens a second, the others are %.0f to %.0f", s.PrefillRate, least, most)
	}
}
