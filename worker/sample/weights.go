package sample

import "math"

// The exponential: 2^(y/256) is 2^k times a table's entry times a short series in what is left, right to about 1e-13.
// That is plenty for weights, and several times faster than math.Exp over a vocabulary.
const (
	expSteps = 256
	magic    = 0x1.8p52 // added to a small number it leaves the nearest integer in the low bits
	stepLn   = math.Ln2 / expSteps
	yLeast   = -61 * expSteps // below what leastWeight lets through
)

// powers are the bits of 2^(j/256).
var powers = makePowers()

// makePowers uses square roots and products only, which are rounded alike everywhere.
func makePowers() (t [expSteps]uint64) {
	for j := range t {
		v, root := 1.0, 2.0
		for bit := expSteps / 2; bit > 0; bit /= 2 {
			root = math.Sqrt(root)
			if j&bit != 0 {
				v = float64(v * root)
			}
		}
		t[j] = math.Float64bits(v)
	}
	return t
}

// power is 2^(y/256) for y of at most 0, and 0 for what is far below.
func power(y float64) float64 {
	if !(y >= yLeast) {
		return 0
	}
	z := y + magic
	k := int32(math.Float64bits(z))
	f := float64((y - (z - magic)) * stepLn)
	series := float64(f*(1+float64(f*(0.5+float64(f*(1.0/6)))))) + 1
	return float64(math.Float64frombits(powers[k&(expSteps-1)]+uint64(int64(k>>8))<<52) * series)
}

// weigh fills in weights and buckets: the most likely token weighs 1, what weighs less than least nothing.
func (s *Sampler) weigh(logits []float32, peak float32, scale, least float64) {
	n := len(logits)
	if cap(s.weights) < n {
		s.weights, s.buckets = make([]float64, n), make([]uint16, n)
	}
	s.weights, s.buckets = s.weights[:n], s.buckets[:n]
	w, b := s.weights, s.buckets
	top := float64(peak)
	for i, x := range logits { // power, by hand: the compiler does not inline it
		y := float64((float64(x) - top) * scale)
		if !(y >= yLeast) {
			w[i], b[i] = 0, bucketMax
			continue
		}
		z := y + magic
		k := int32(math.Float64bits(z))
		f := float64((y - (z - magic)) * stepLn)
		series := float64(f*(1+float64(f*(0.5+float64(f*(1.0/6)))))) + 1
		v := float64(math.Float64frombits(powers[k&(expSteps-1)]+uint64(int64(k>>8))<<52) * series)
		if v < least {
			v = 0
		}
		w[i], b[i] = v, uint16(min(-k/bucketSteps, bucketMax))
	}
}

const sumBlock = 512

// sum adds the weights up in a fixed order, four at a time, and keeps the sums of blocks.
func (s *Sampler) sum() float64 {
	s.sums = s.sums[:0]
	total := 0.0
	for w := s.weights; len(w) > 0; {
		n := min(sumBlock, len(w))
		var a, b, c, d float64
		v := w[:n]
		for ; len(v) >= 4; v = v[4:] {
			a += v[0]
			b += v[1]
			c += v[2]
			d += v[3]
		}
		for _, x := range v {
			a += x
		}
		block := (a + b) + (c + d)
		s.sums = append(s.sums, block)
		total += block
		w = w[n:]
	}
	return total
}
