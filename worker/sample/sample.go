// Package sample picks the next token from logits. A choice is a pure function of the logits, the parameters, the
// number of the choice and the position of the token, so that any engine can take over at any token and go on with
// the same text. It must not keep state.
package sample

import (
	"fmt"
	"math"
	"math/bits"
)

// Params say how to sample. The zero value is greedy.
type Params struct {
	Temperature float32 // 0 takes the most likely token
	TopP        float32 // keep the most likely tokens that together reach this probability; 0 or 1 keeps all
	TopK        int     // keep so many of the most likely tokens; 0 or less keeps all
	Seed        uint64
}

// Check says what is wrong with the parameters.
func (p Params) Check() error {
	switch {
	case !(p.Temperature >= 0) || math.IsInf(float64(p.Temperature), 0):
		return fmt.Errorf("temperature is %v, want a number that is not negative", p.Temperature)
	case !(p.TopP >= 0 && p.TopP <= 1):
		return fmt.Errorf("top_p is %v, want 0 to 1", p.TopP)
	}
	return nil
}

// Sample picks a token for a position of the sequence (prompt included) of the choice-th answer. Ties go to the
// lowest id. Logits that are NaN are never picked.
func Sample(logits []float32, p Params, choice, position int) int32 {
	if len(logits) == 0 {
		panic("sample: no logits")
	}
	best := argmax(logits)
	if p.Temperature == 0 || p.TopK == 1 || math.IsInf(float64(logits[best]), 0) {
		return int32(best)
	}
	c := weigh(logits, logits[best], float64(p.Temperature))
	if k, top := p.TopK > 0 && p.TopK < len(c), p.TopP > 0 && p.TopP < 1; k || top {
		c = c.best(p, k, top)
	}
	return c.pick(uniform(p.Seed, choice, position))
}

func argmax(v []float32) int {
	best := 0
	for i, x := range v {
		if x > v[best] || v[best] != v[best] {
			best = i
		}
	}
	return best
}

// candidate is a token that may be picked and its unnormalized probability.
type candidate struct {
	id     int32
	logit  float32
	weight float64
}

type candidates []candidate

// leastWeight drops what no draw of 53 bits would reach beside a token of weight 1.
const leastWeight = 0x1p-60

// weigh lists the tokens by id; the best has weight 1.
func weigh(logits []float32, peak float32, temperature float64) candidates {
	c := make(candidates, 0, 1024)
	for i, x := range logits {
		if w := math.Exp((float64(x) - float64(peak)) / temperature); w >= leastWeight {
			c = append(c, candidate{int32(i), x, w})
		}
	}
	return c
}

func (c candidates) sum() float64 {
	s := 0.0
	for i := range c {
		s += c[i].weight
	}
	return s
}

// better orders candidates: by logit, then the lower id.
func (c candidates) better(i, j int) bool {
	return c[i].logit > c[j].logit || c[i].logit == c[j].logit && c[i].id < c[j].id
}

// sink restores the heap of the first n candidates below i: the best of all is at 0.
func (c candidates) sink(i, n int) {
	for {
		child := 2*i + 1
		if child >= n {
			return
		}
		if child+1 < n && c.better(child+1, child) {
			child++
		}
		if !c.better(child, i) {
			return
		}
		c[i], c[child] = c[child], c[i]
		i = child
	}
}

// best takes the most likely candidates off a heap until TopK and TopP are content: a handful out of a whole
// vocabulary, which would cost milliseconds to sort. TopP counts the share of what TopK left.
func (c candidates) best(p Params, byCount, byShare bool) candidates {
	need := math.Inf(1)
	if byShare && !byCount {
		need = float64(p.TopP) * c.sum()
	}
	for i := len(c)/2 - 1; i >= 0; i-- {
		c.sink(i, len(c))
	}
	var out candidates
	have := 0.0
	for n := len(c); n > 0 && have < need && !(byCount && len(out) == p.TopK); n-- {
		out = append(out, c[0])
		have += c[0].weight
		c[0] = c[n-1]
		c.sink(0, n-1)
	}
	if byCount && byShare {
		need, have = float64(p.TopP)*have, 0
		for i := range out {
			if have += out[i].weight; have >= need {
				return out[:i+1]
			}
		}
	}
	return out
}

// pick walks along the weights until it has passed the share u of their sum.
func (c candidates) pick(u float64) int32 {
	at, have := u*c.sum(), 0.0
	for i := range c {
		if have += c[i].weight; have > at {
			return c[i].id
		}
	}
	return c[len(c)-1].id
}

// uniform is a number in [0,1) that depends on all bits of its arguments: a hash in counter mode, not a generator
// with a state that would have to move along with the request.
func uniform(seed uint64, choice, position int) float64 {
	h := mix(seed ^ 0x9e3779b97f4a7c15)
	h = mix(h ^ uint64(int64(choice))*0xd1342543de82ef95)
	h = mix(h ^ uint64(int64(position))*0xaf251af3b0f025b5)
	return float64(h>>11) * 0x1p-53
}

// mix is a full-width multiply folded twice, after wyhash: each output bit depends on every input bit.
func mix(x uint64) uint64 {
	for _, k := range [...]uint64{0xa0761d6478bd642f, 0xe7037ed1a0b428db} {
		hi, lo := bits.Mul64(x^k, 0x8ebc6af09c88c6e3)
		x = hi ^ lo
		x ^= x >> 29
	}
	return x
}
