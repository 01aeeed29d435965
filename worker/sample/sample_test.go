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
		const draws = 10000
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
	for name, p := range map[string]Params{
		"all":              {Temperature: 0.8},
		"top_p":            {Temperature: 0.8, TopP: 0.9},
		"min_p":            {Temperature: 0.8, MinP: 0.05},
		"top_k and top_p":  {Temperature: 0.8, TopP: 0.9, TopK: 40},
		"greedy penalized": {Presence: 1, Frequency: 0.5, Repetition: 1.1},
	} {
		b.Run(name, func(b *testing.B) {
			var s Sampler
			context := make([]int32, 1000)
			for i := range context {
				context[i] = int32(i * 31)
			}
			for b.Loop() {
				s.Sample(logits, &p, Place{Position: 1, Prompt: context, Generated: context})
			}
		})
	}
	b.Run("logprobs 5", func(b *testing.B) {
		var s Sampler
		for b.Loop() {
			s.Logprobs(logits, 7, 5)
		}
	})
}

// byTheBook is what may be picked and how likely, computed the slow way.
func byTheBook(logits []float32, p Params, at Place) map[int32]float64 {
	l := make([]float64, len(logits))
	for i, x := range logits {
		x += p.Bias[int32(i)]
		n := 0
		for _, id := range at.Generated {
			if int(id) == i {
				n++
			}
		}
		if (n > 0 || slices.Contains(at.Prompt, int32(i))) && p.Repetition != 0 {
			if x > 0 {
				x /= p.Repetition
			} else {
				x *= p.Repetition
			}
		}
		x -= p.Frequency * float32(n)
		if n > 0 {
			x -= p.Presence
		}
		l[i] = float64(x)
	}
	order := make([]int32, len(l))
	for i := range order {
		order[i] = int32(i)
	}
	slices.SortStableFunc(order, func(a, b int32) int {
		switch {
		case l[a] > l[b]:
			return -1
		case l[a] < l[b]:
			return 1
		}
		return 0
	})
	if p.Temperature == 0 {
		return map[int32]float64{order[0]: 1}
	}
	w := make([]float64, len(l))
	for i := range l {
		w[i] = math.Exp((l[i] - l[order[0]]) / float64(p.Temperature))
	}
	keep := slices.DeleteFunc(slices.Clone(order), func(id int32) bool { return w[id] < float64(p.MinP) })
	if p.TopK > 0 && p.TopK < len(keep) {
		keep = keep[:p.TopK]
	}
	total := 0.0
	for _, id := range keep {
		total += w[id]
	}
	if p.TopP > 0 && p.TopP < 1 {
		have := 0.0
		for i, id := range keep {
			if have += w[id]; have >= float64(p.TopP)*total {
				keep, total = keep[:i+1], have
				break
			}
		}
	}
	out := map[int32]float64{}
	for _, id := range keep {
		out[id] = w[id] / total
	}
	return out
}

// anyParams are parameters with each feature on now and then.
func anyParams(r *rand.Rand) Params {
	p := Params{Seed: r.Uint64(), Temperature: float32(r.IntN(8)) / 4}
	on := func() bool { return r.IntN(2) == 0 }
	if on() {
		p.TopP = r.Float32()
	}
	if on() {
		p.TopK = r.IntN(60)
	}
	if on() {
		p.MinP = r.Float32() * r.Float32()
	}
	if on() {
		p.Presence, p.Frequency = 4*r.Float32()-2, 4*r.Float32()-2
	}
	if on() {
		p.Repetition = 0.5 + 2*r.Float32()
	}
	if on() {
		p.Bias = map[int32]float32{int32(r.IntN(50)): 200*r.Float32() - 100, int32(r.IntN(50)): 3, 5000: 1}
	}
	return p
}

func TestSampleIsByTheBook(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	var s Sampler // one for all: it must not remember
	for i := range 1500 {
		n := []int{50, 300, 1500}[i%3]
		logits := random(r.Uint64(), n)
		for range 20 { // ties
			logits[r.IntN(n)] = logits[r.IntN(n)]
		}
		before := slices.Clone(logits)
		at := Place{Choice: r.IntN(3), Position: i, Prompt: []int32{1, 2, 2, int32(r.IntN(n))}, Generated: []int32{2, 7, 7, int32(r.IntN(n))}}
		p := anyParams(r)
		if err := p.Check(); err != nil {
			t.Fatal(err)
		}
		id := s.Sample(logits, &p, at)
		if want := byTheBook(logits, p, at); want[id] == 0 {
			t.Fatalf("%+v at %+v: picked %d, not among %d", p, at, id, len(want))
		}
		if again := new(Sampler).Sample(logits, &p, at); again != id {
			t.Fatalf("%+v: picked %d, then %d", p, id, again)
		}
		if !slices.Equal(logits, before) {
			t.Fatal("the logits were changed")
		}
	}
}

func TestFrequenciesOfAllFilters(t *testing.T) {
	logits := random(8, 600)
	at := Place{Prompt: []int32{3, 9}, Generated: []int32{4, 4, 9}}
	var s Sampler
	for _, p := range []Params{
		{Temperature: 1, TopP: 0.6, Seed: 1}, {Temperature: 1.5, MinP: 0.02, Seed: 2}, {Temperature: 0.9, TopP: 0.8, TopK: 30, MinP: 0.01, Seed: 3},
		{Temperature: 1, Seed: 4, Repetition: 1.3, Presence: 1, Frequency: -1, Bias: map[int32]float32{4: 8, 9: 7}},
	} {
		const draws = 10000
		hits := map[int32]float64{}
		for i := range draws {
			at.Position = i
			hits[s.Sample(logits, &p, at)]++
		}
		for id, q := range byTheBook(logits, p, at) {
			if d := math.Abs(hits[id]/draws - q); d > 5*math.Sqrt(q*(1-q)/draws)+3e-4 {
				t.Errorf("%+v: token %d came %.4f of the time, want %.4f", p, id, hits[id]/draws, q)
			}
		}
	}
}

func TestBiasBansAndForces(t *testing.T) {
	logits := random(3, 500)
	for seed := range uint64(100) {
		p := Params{Temperature: 1, Seed: seed, Bias: map[int32]float32{17: 100}}
		if id := new(Sampler).Sample(logits, &p, Place{}); id != 17 {
			t.Fatalf("picked %d", id)
		}
		p.Bias = map[int32]float32{int32(argmax(logits)): -100}
		if id := new(Sampler).Sample(logits, &p, Place{}); int(id) == argmax(logits) {
			t.Fatal("picked what was banned")
		}
	}
}

func TestPower(t *testing.T) {
	for i := range 100_000 {
		y := -float64(i) * 60 * expSteps / 100_000
		got, want := power(y), math.Exp2(y/expSteps)
		if math.Abs(got-want) > 1e-12*want {
			t.Fatalf("2^(%v/256) is %v, want %v", y, got, want)
		}
	}
	if power(0) != 1 || power(-1e9) != 0 || power(math.Inf(-1)) != 0 || power(math.NaN()) != 0 {
		t.Error("ends")
	}
}

func TestLogprobs(t *testing.T) {
	var s Sampler
	for seed := range uint64(20) {
		logits := random(seed, 700)
		sum := 0.0
		for _, x := range logits {
			sum += math.Exp(float64(x))
		}
		got := s.Logprobs(logits, 5, 9)
		if d := float64(got.Logprob.Logprob) - (float64(logits[5]) - math.Log(sum)); math.Abs(d) > 1e-5 || len(got.Top) != 9 || got.Token != 5 {
			t.Fatalf("%+v, off by %v", got, d)
		}
		for i, c := range got.Top {
			if rank(logits, c.Token) != i || c.Logprob != s.Logprobs(logits, c.Token, 0).Logprob.Logprob {
				t.Fatalf("top %d is %+v", i, c)
			}
		}
	}
	if got := s.Logprobs([]float32{1, float32(math.Inf(-1)), 2}, 1, 5); !math.IsInf(float64(got.Logprob.Logprob), -1) || len(got.Top) != 3 {
		t.Errorf("%+v", got)
	}
}
