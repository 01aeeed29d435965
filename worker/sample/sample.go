// Package sample picks the next token from logits. A choice is a pure function of the logits, the parameters, the
// number of the choice, the position of the token and the tokens before it, so that any engine can take over at any
// token and go on with the same text. It must not keep state: what a Sampler holds between calls is scratch.
//
// The order is vLLM's: logit_bias, then the penalties (repetition, frequency, presence), then temperature, min_p, top_k
// and top_p. Whatever a step leaves, the most likely token stays. Repetition counts the prompt and what was generated,
// frequency and presence only the latter. Log probabilities are those of the model, before all of these.
//
// The arithmetic is the same on every processor: products are rounded before they are added, and exponentials are the
// package's own, since the standard library's differ between architectures in their last bit.
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
	MinP        float32 // keep tokens at least so likely in relation to the most likely one; 0 keeps all
	TopK        int     // keep so many of the most likely tokens; 0 or less keeps all
	Seed        uint64

	Repetition float32 // divides positive and multiplies negative logits of tokens in the context; 0 or 1: off
	Frequency  float32 // is subtracted for each time that the token was generated
	Presence   float32 // is subtracted once if the token was generated
	// Bias is added to logits by token id.
	Bias map[int32]float32
}

// Limits of the penalties and biases. A repetition penalty is over 0.
const (
	PenaltyMax    = 2
	RepetitionMax = 100
	BiasMax       = 100
)

// Check says what is wrong with the parameters.
func (p Params) Check() error {
	within := func(v, limit float32) bool { return v >= -limit && v <= limit }
	switch {
	case !(p.Temperature >= 0) || math.IsInf(float64(p.Temperature), 0):
		return fmt.Errorf("temperature is %v, want a number that is not negative", p.Temperature)
	case !(p.TopP >= 0 && p.TopP <= 1):
		return fmt.Errorf("top_p is %v, want 0 to 1", p.TopP)
	case !(p.MinP >= 0 && p.MinP <= 1):
		return fmt.Errorf("min_p is %v, want 0 to 1", p.MinP)
	case !(p.Repetition >= 0 && p.Repetition <= RepetitionMax):
		return fmt.Errorf("repetition_penalty is %v, want 0 to %d", p.Repetition, RepetitionMax)
	case !within(p.Frequency, PenaltyMax):
		return fmt.Errorf("frequency_penalty is %v, want -%d to %d", p.Frequency, PenaltyMax, PenaltyMax)
	case !within(p.Presence, PenaltyMax):
		return fmt.Errorf("presence_penalty is %v, want -%d to %d", p.Presence, PenaltyMax, PenaltyMax)
	}
	for id, b := range p.Bias {
		if !within(b, BiasMax) {
			return fmt.Errorf("logit_bias of token %d is %v, want -%d to %d", id, b, BiasMax, BiasMax)
		}
	}
	return nil
}

// Place is where a token is picked.
type Place struct {
	Choice   int // number of the answer
	Position int // of the token in the sequence, prompt included
	// The tokens before it, for the penalties.
	Prompt, Generated []int32
}

// Sampler picks tokens. It holds scratch space, so each goroutine has its own; the zero value is ready.
type Sampler struct {
	weights []float64 // a token
	buckets []uint16  // a token, for top_p
	sums    []float64 // a block of weights
	few     []candidate
	marks   []uint32 // a token: how often it was generated, and promptMark
	ids     []int32  // the marked ones
	undo    []change
}

// Sample picks a token without looking at those before it.
func Sample(logits []float32, p Params, choice, position int) int32 {
	return new(Sampler).Sample(logits, &p, Place{Choice: choice, Position: position})
}

// Sample picks a token. Of equal logits the lowest id is the more likely one. Logits that are NaN are never picked.
// The logits are changed meanwhile and are as before when it returns.
func (s *Sampler) Sample(logits []float32, p *Params, at Place) int32 {
	if len(logits) == 0 {
		panic("sample: no logits")
	}
	s.adjust(logits, p, at)
	defer s.restore(logits)
	best := argmax(logits)
	if p.Temperature == 0 || p.TopK == 1 || p.MinP == 1 || math.IsInf(float64(logits[best]), 0) || logits[best] != logits[best] {
		return int32(best)
	}
	u := uniform(p.Seed, at.Choice, at.Position)
	if p.TopK > 0 && p.TopK < len(logits) {
		return s.ofFew(logits, logits[best], p, u)
	}
	return s.ofAll(logits, logits[best], p, u)
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

// leastWeight drops what no draw of 53 bits would reach beside a token of weight 1.
const leastWeight = 0x1p-60

// ofFew draws from the TopK best.
func (s *Sampler) ofFew(logits []float32, peak float32, p *Params, u float64) int32 {
	c := s.best(logits, p.TopK)
	least := max(leastWeight, float64(p.MinP))
	scale := expSteps * math.Log2E / float64(p.Temperature)
	total := 0.0
	for i := range c {
		w := power((float64(c[i].logit) - float64(peak)) * scale)
		if w < least {
			c = c[:i]
			break
		}
		c[i].weight = w
		total += w
	}
	if need := float64(p.TopP) * total; p.TopP > 0 && p.TopP < 1 {
		have := 0.0
		for i := range c {
			if have += c[i].weight; have >= need {
				c, total = c[:i+1], have
				break
			}
		}
	}
	at, have := u*total, 0.0
	for i := range c {
		if have += c[i].weight; have > at {
			return c[i].id
		}
	}
	return c[len(c)-1].id
}

// ofAll draws from the whole vocabulary: one pass of exponentials, and no sorting but of the few tokens at the border
// of TopP.
func (s *Sampler) ofAll(logits []float32, peak float32, p *Params, u float64) int32 {
	least := max(leastWeight, float64(p.MinP))
	s.weigh(logits, peak, expSteps*math.Log2E/float64(p.Temperature), least)
	if p.TopP > 0 && p.TopP < 1 {
		s.cut(logits, float64(p.TopP))
	}
	total := s.sum()
	at, have := u*total, 0.0
	block := 0
	for ; block < len(s.sums)-1 && have+s.sums[block] <= at; block++ {
		have += s.sums[block]
	}
	// The sum of a block is rounded otherwise than this walk is, so it may end in the next block.
	last := int32(0)
	for i := block * sumBlock; i < len(s.weights); i++ {
		if s.weights[i] == 0 {
			continue
		}
		last = int32(i)
		if have += s.weights[i]; have > at {
			return last
		}
	}
	if s.weights[last] == 0 { // the walk began behind the last token of any weight
		return int32(argmax(logits))
	}
	return last
}

// bucketSteps is the width of a bucket of weights: an eighth of an octave.
const (
	bucketSteps = expSteps / 8
	bucketMax   = 60*8 + 1
)

// cut sets the weights outside of the most likely tokens that reach the share to zero.
func (s *Sampler) cut(logits []float32, share float64) {
	var sums [bucketMax + 1]float64
	for i, w := range s.weights {
		sums[s.buckets[i]] += w
	}
	total := 0.0
	for _, v := range sums {
		total += v
	}
	need, have := share*total, 0.0
	border := 0
	for border < bucketMax && have+sums[border] < need {
		have += sums[border]
		border++
	}
	edge := s.few[:0]
	for i, b := range s.buckets[:len(s.weights)] {
		switch {
		case int(b) < border || s.weights[i] == 0:
		case int(b) == border:
			edge = append(edge, candidate{int32(i), logits[i], s.weights[i]})
		default:
			s.weights[i] = 0
		}
	}
	s.few = edge
	sortBest(edge)
	for i := range edge {
		if have >= need {
			s.weights[edge[i].id] = 0
		}
		have += edge[i].weight
	}
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
