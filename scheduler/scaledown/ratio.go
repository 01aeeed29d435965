package scaledown

import (
	"math"
	"math/big"

	"github.com/headrace/headrace/scheduler/cluster"
)

// ratioRange is what a ratio and its bounds allow.
type ratioRange struct {
	least, most *big.Rat // most 0: none
	pLow, pHigh int64
	dLow, dHigh int64
}

// Repair brings prefill : decode between min and max, and both inside their bounds: the side that is too small is raised, and
// where its bound stops it, it stays there and the other is cut. Where whole numbers leave no pair beside the one that was to be
// kept, the next larger is taken. A side that is 0 alone becomes 1, as neither serves without the other; 0:0 stays. Arithmetic is exact.
func Repair(r *cluster.PDRatio) (prefill, decode int, why string) {
	q := ratioRange{least: r.Min.Rat(), most: r.Max.Rat()}
	q.pLow, q.pHigh = bounds(r.PrefillMin, r.PrefillMax)
	q.dLow, q.dHigh = bounds(r.DecodeMin, r.DecodeMax)
	p, d := within(int64(r.Prefill), q.pLow, q.pHigh), within(int64(r.Decode), q.dLow, q.dHigh)
	switch why = "the ratio holds"; {
	case p == 0 && d == 0:
		return 0, 0, "0:0 stays"
	case p != int64(r.Prefill) || d != int64(r.Decode):
		why = "brought inside the bounds"
	}
	if !r.Min.Set() && !r.Max.Set() {
		return int(p), int(d), why
	}
	if p == 0 || d == 0 {
		p, d, why = max(p, 1), max(d, 1), "one side alone serves nobody, the other becomes 1"
	}
	if low, high := q.prefills(d); p >= low && p <= high {
		return int(p), int(d), why
	}
	toP, toD, ok := q.nearest(p, d)
	if !ok {
		return int(p), int(d), "no whole numbers inside the bounds keep the ratio; widen min and max or the bounds"
	}
	return int(toP), int(toD), reason(p, d, toP, toD)
}

// bounds of one side; 0 for high is none.
func bounds(low, high int) (int64, int64) {
	if high == 0 {
		return int64(low), math.MaxInt32
	}
	return int64(low), int64(high)
}

func within(v, low, high int64) int64 { return max(low, min(v, high)) }

// prefills is how many prefill engines may go with d decode engines; none where low is above high.
func (q *ratioRange) prefills(d int64) (low, high int64) {
	low, high = max(q.pLow, ceilRat(times(q.least, d))), q.pHigh
	if q.most.Sign() > 0 {
		high = min(high, floorRat(times(q.most, d)))
	}
	return low, high
}

// ratioSteps bounds the search for whole numbers: a ratio of five decimals is met by then, if ever.
const ratioSteps = 100_000

// nearest goes from where the side that is too small would be raised to larger numbers of decode engines, then to smaller ones.
func (q *ratioRange) nearest(p, d int64) (int64, int64, bool) {
	bottom, top, start := max(q.dLow, 1), q.dHigh, d
	if q.least.Sign() > 0 {
		top = min(top, floorRat(over(q.pHigh, q.least)))
	}
	if q.most.Sign() > 0 {
		bottom = max(bottom, ceilRat(over(q.pLow, q.most)))
		if low, high := q.prefills(d); p >= low && p > high {
			start = ceilRat(over(p, q.most))
		}
	}
	if bottom > top {
		return 0, 0, false
	}
	start = within(start, bottom, top)
	for n := start; n <= min(top, start+ratioSteps); n++ {
		if low, high := q.prefills(n); low <= high {
			return within(p, low, high), n, true
		}
	}
	for n := start - 1; n >= max(bottom, start-ratioSteps); n-- {
		if low, high := q.prefills(n); low <= high {
			return within(p, low, high), n, true
		}
	}
	return 0, 0, false
}

func reason(p, d, toP, toD int64) string {
	switch {
	case toD < d:
		return "prefill is at its bound, decode is cut"
	case toP < p:
		return "decode is at its bound, prefill is cut"
	case toP > p && toD > d:
		return "both are raised: no smaller whole numbers keep the ratio"
	case toP > p:
		return "prefill is too small, it is raised"
	}
	return "decode is too small, it is raised"
}

func times(q *big.Rat, n int64) *big.Rat { return new(big.Rat).Mul(q, new(big.Rat).SetInt64(n)) }

func over(n int64, q *big.Rat) *big.Rat { return new(big.Rat).Quo(new(big.Rat).SetInt64(n), q) }

func ceilRat(r *big.Rat) int64 {
	q, m := new(big.Int).DivMod(r.Num(), r.Denom(), new(big.Int))
	if m.Sign() != 0 {
		q.Add(q, big.NewInt(1))
	}
	return clamp(q)
}

func floorRat(r *big.Rat) int64 { return clamp(new(big.Int).Div(r.Num(), r.Denom())) }

// clamp keeps what a tiny ratio makes inside an int.
func clamp(q *big.Int) int64 {
	if !q.IsInt64() || q.Int64() > math.MaxInt32 {
		return math.MaxInt32
	}
	return q.Int64()
}
