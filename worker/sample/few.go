package sample

import (
	"cmp"
	"math"
	"slices"
)

// candidate is a token that may be picked and its unnormalized probability.
type candidate struct {
	id     int32
	logit  float32
	weight float64
}

// better orders candidates: by logit, then the lower id.
func better(a, b candidate) bool { return a.logit > b.logit || a.logit == b.logit && a.id < b.id }

func sortBest(c []candidate) {
	slices.SortFunc(c, func(a, b candidate) int {
		if d := cmp.Compare(b.logit, a.logit); d != 0 {
			return d
		}
		return cmp.Compare(a.id, b.id)
	})
}

// best returns the k best tokens in order, fewer if there are not so many. They are kept in a heap whose root is the
// worst, which nearly every token of a vocabulary is compared with and no more.
func (s *Sampler) best(logits []float32, k int) []candidate {
	h := s.few[:0]
	i := 0
	for ; i < len(logits) && len(h) < k; i++ {
		if x := logits[i]; x == x {
			h = append(h, candidate{id: int32(i), logit: x})
		}
	}
	s.few = h
	if len(h) == k && k > 0 {
		for at := k/2 - 1; at >= 0; at-- {
			sink(h, at)
		}
		worst := h[0].logit
		for ; i < len(logits); i++ {
			if x := logits[i]; x > worst { // of equals the lower id came first
				h[0] = candidate{id: int32(i), logit: x}
				sink(h, 0)
				worst = h[0].logit
			}
		}
	}
	sortBest(h)
	return h
}

// sink restores the heap below i.
func sink(h []candidate, i int) {
	for {
		child := 2*i + 1
		if child >= len(h) {
			return
		}
		if child+1 < len(h) && better(h[child], h[child+1]) {
			child++
		}
		if !better(h[i], h[child]) {
			return
		}
		h[i], h[child] = h[child], h[i]
		i = child
	}
}

// Logprob is the natural logarithm of a token's probability.
type Logprob struct {
	Token   int32
	Logprob float32
}

// Logprobs are what the model thought of a token, whatever the sampling parameters made of it.
type Logprobs struct {
	Logprob
	Top []Logprob // the most likely tokens, in order
}

// Logprobs takes them from a position's logits: token's, and the n most likely ones'.
func (s *Sampler) Logprobs(logits []float32, token int32, n int) Logprobs {
	peak := logits[argmax(logits)]
	s.weigh(logits, peak, expSteps*math.Log2E, leastWeight)
	norm := float64(peak) + math.Log(s.sum())
	of := func(id int32) Logprob { return Logprob{id, float32(float64(logits[id]) - norm)} }
	out := Logprobs{Logprob: of(token)}
	if n > 0 {
		c := s.best(logits, n)
		out.Top = make([]Logprob, len(c))
		for i := range c {
			out.Top[i] = of(c[i].id)
		}
	}
	return out
}
