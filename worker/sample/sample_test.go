package sample

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

func TestGreedyTakesTheLowestOfTheBest(t *testing.T) {
	for _, c := range []struct {
		logits []float32
		want   int32
	}{
		{[]float32{1, 3, 3, 2}, 1},
		{[]float32{-5}, 0},
		{[]float32{float32(math.NaN()), -1, float32(math.Inf(-1))}, 1},
		{[]float32{0, float32(math.Inf(1)), 0}, 1},
	} {
		if got := Sample(c.logits, Params{}, 0, 0); got != c.want {
			t.Errorf("%v: picked %d, want %d", c.logits, got, c.want)
		}
	}
}

func random(seed uint64, n int) []float32 {
	r := rand.New(rand.NewPCG(seed, 0))
	v := make([]float32, n)
	for i := range v {
		v[i] = float32(r.NormFloat64() * 3)
	}
	return v
}

// rank is how many logits are better than id's.
func rank(logits []float32, id int32) int {
	n := 0
	for i, x := range logits {
		if x > logits[id] || x == logits[id] && int32(i) < id {
			n++
		}
	}
	return n
}

func TestTopKAndTopPBoundTheChoice(t *testing.T) {
	for seed := range uint64(200) {
		logits := random(seed, 100)
		k := int(seed%9) + 1
		p := Params{Temperature: 2, TopK: k, Seed: seed}
		if got := rank(logits, Sample(logits, p, 0, 7)); got >= k {
			t.Errorf("top_k %d picked rank %d", k, got)
		}
		p = Params{Temperature: 1, TopP: 0.5, Seed: seed}
		id := Sample(logits, p, 1, int(seed))
		better, total := 0.0, 0.0
		for i, x := range logits {
			w := math.Exp(float64(x))
			total += w
			if rank(logits, int32(i)) < rank(logits, id) {
				better += w
			}
		}
		if better/total >= 0.5+1e-9 {
			t.Errorf("top_p 0.5 picked a token with %v before it", better/total)
		}
	}
}

func TestTinyTopPIsGreedy(t *testing.T) {
	for seed := range uint64(50) {
		logits := random(seed, 60)
		if got := Sample(logits, Params{Temperature: 1.5, TopP: 1e-6, Seed: seed}, 0, 3); rank(logits, got) != 0 {
			t.Errorf("picked rank %d", rank(logits, got))
		}
	}
}

func TestFrequenciesFollowTheProbabilities(t *testing.T) {
	logits := []float32{1, 0, 2, -1}
	for _, p := range []Params{{Temperature: 1, Seed: 3}, {Temperature: 0.5, Seed: 9, TopP: 1}, {Temperature: 1, Seed: 4, TopK: 3}} {
		const draws = 40000
		var hits [4]float64
		for i := range draws {
			hits[Sample(logits, p, i%4, i/4)]++
		}
		total := 0.0
		want := make([]float64, 4)
		for i, x := range logits {
			if p.TopK == 0 || rank(logits, int32(i)) < p.TopK {
				want[i] = math.Exp(float64(x / p.Temperature))
				total += want[i]
			}
		}
		for i := range want {
			q := want[i] / total
			if d := math.Abs(hits[i]/draws - q); d > 5*math.Sqrt(q*(1-q)/draws)+1e-9 {
				t.Errorf("%+v: token %d came %.4f of the time, want %.4f", p, i, hits[i]/draws, q)
			}
		}
	}
}

func TestEveryArgumentMatters(t *testing.T) {
	logits := make([]float32, 5000)
	p := Params{Temperature: 1, Seed: 42}
	at := func(seed uint64, choice, position int) int32 {
		p.Seed = seed
		return Sample(logits, p, choice, position)
	}
	base := at(42, 0, 10)
	if base != at(42, 0, 10) {
		t.Error("the same arguments gave two tokens")
	}
	seen := map[int32]bool{base: true}
	for i := 1; i <= 20; i++ {
		for _, id := range []int32{at(42+uint64(i), 0, 10), at(42, i, 10), at(42, 0, 10+i), at(42^1<<(43+i), 0, 10)} {
			seen[id] = true
		}
	}
	if len(seen) < 75 {
		t.Errorf("81 draws from 5000 gave only %d tokens", len(seen))
	}
}

func TestUniformIsUniform(t *testing.T) {
	const bins, draws = 64, 1 << 17
	for _, what := range []string{"position", "choice", "seed"} {
		var hits [bins]float64
		for i := range draws {
			var u float64
			switch what {
			case "position":
				u = uniform(7, 0, i)
			case "choice":
				u = uniform(7, i, 5)
			case "seed":
				u = uniform(uint64(i), 0, 5)
			}
			hits[int(u*bins)]++
		}
		chi := 0.0
		for _, h := range hits {
			chi += (h - draws/bins) * (h - draws/bins) / (draws / bins)
		}
		if chi > 63+5*math.Sqrt(2*63) {
			t.Errorf("%s: chi squared %.1f over 63 degrees of freedom", what, chi)
		}
	}
}

// Golden values: sampling must not change between releases, or a request could not move from one to the next.
func TestGoldenValues(t *testing.T) {
	logits := random(1, 300)
	var got []int32
	for i := range 12 {
		got = append(got, Sample(logits, Params{Temperature: 0.8, TopP: 0.9, TopK: 40, Seed: 1234}, i%2, i*17))
	}
	for i := range 6 {
		got = append(got, Sample(logits, Params{Temperature: 1.3, Seed: math.MaxUint64}, 0, i))
	}
	want := []int32{129, 129, 222, 58, 125, 129, 125, 129, 129, 58, 188, 221, 125, 208, 261, 207, 85, 98}
	if !slices.Equal(got, want) {
		t.Errorf("got %v", got)
	}
	if s := fmt.Sprintf("%.17g %.17g", uniform(0, 0, 0), uniform(1, 2, 3)); s != "0.30834798564930388 0.9555422952190773" {
		t.Error(s)
	}
}

func TestParamsCheck(t *testing.T) {
	nan := float32(math.NaN())
	for _, p := range []Params{{Temperature: -1}, {Temperature: nan}, {TopP: 1.1}, {TopP: -0.1}, {TopP: nan}, {Temperature: float32(math.Inf(1))}} {
		if p.Check() == nil {
			t.Errorf("%+v passed", p)
		}
	}
	if err := (Params{Temperature: 2, TopP: 1, TopK: -1}).Check(); err != nil {
		t.Error(err)
	}
}

func FuzzSample(f *testing.F) {
	f.Add(uint64(1), float32(1), float32(0.5), 3, 0, 9)
	f.Fuzz(func(t *testing.T, seed uint64, temperature, topP float32, topK, choice, position int) {
		p := Params{Temperature: temperature, TopP: topP, TopK: topK, Seed: seed}
		if p.Check() != nil {
			return
		}
		logits := random(seed, 50)
		id := Sample(logits, p, choice, position)
		if id < 0 || int(id) >= len(logits) || topK > 0 && rank(logits, id) >= topK {
			t.Fatalf("%+v picked %d", p, id)
		}
	})
}

func BenchmarkSample(b *testing.B) {
	logits := random(1, 49152)
	p := Params{Temperature: 0.8, TopP: 0.9, TopK: 40}
	for b.Loop() {
		Sample(logits, p, 0, 1)
	}
}
