package planner

import (
	"fmt"
	"math"
	"time"
)

// demand is what requests ask of engines of a kind, in engines that would be busy with it, as it was seen in equal intervals. It is taken for a level that
// wanders, seen through noise (the local level model: Muth, Optimal Properties of Exponentially Weighted Forecasts, 1960): how far levels lie apart grows with
// the time between them, noise does not. From that it learns how fast this level wanders, and so how much of the past tells what is now, and how far off what is
// to come may be. It is plain data: as JSON it is its state.
type demand struct {
	Seen []float64     `json:"seen,omitempty"`
	At   time.Duration `json:"at_ns"` // until when intervals are complete
	Sum  float64       `json:"sum"`   // in the interval since then
	N    int           `json:"n"`     // that the sum is of
	level
}

// level is what a demand's values say.
type level struct {
	mean  float64 // of the level now
	off   float64 // its standard error, as a part of the mean of all values
	drift float64 // variance that an interval adds, as a part of the mean's square
	noise float64 // variance of a value about the level, the same
}

// sampling is how a demand is looked at.
type sampling struct {
	every time.Duration // of its intervals
	// Values this many intervals apart are compared. Noise lasts as long as what is seen does, for answers that are being made for as long as these take:
	// near is so many that it has gone.
	near, far int
	// first is the standard deviation by which a level is thought to change in an interval before anything is known, which is as good as so many
	// independent pairs of values.
	first, doubt float64
}

const (
	demandKept  = 360 // values
	noiseFirst  = 0.1 // standard deviation of a value, before there are pairs of them
	pairsLeast  = 4
	noiseLeast  = 1e-6
	unseenParts = 6 // intervals in which nobody looked, behind which it begins anew
)

// add counts v at that time.
func (d *demand) add(v float64) {
	d.Sum += v
	d.N++
}

// until completes the intervals that end until then. each is what becomes of an interval's sum and of how many values that is of.
func (d *demand) until(at time.Duration, s *sampling, each func(sum float64, n int) float64) {
	if at-d.At > unseenParts*s.every { // that is no time without requests: nobody looked, or nobody planned
		d.At, d.Sum, d.N = at, 0, 0
		return
	}
	grew := false
	for ; at-d.At >= s.every; d.At += s.every {
		if len(d.Seen) == demandKept {
			d.Seen = d.Seen[:copy(d.Seen, d.Seen[1:])]
		}
		d.Seen = append(d.Seen, each(d.Sum, d.N))
		d.Sum, d.N = 0, 0
		grew = true
	}
	if grew {
		d.learn(s)
	}
}

// learn works out the level. It is a function of the values that are kept.
func (d *demand) learn(s *sampling) {
	d.level = level{}
	if len(d.Seen) == 0 {
		return
	}
	all := mean(d.Seen)
	if !(all > 0) {
		return
	}
	near, pairs := d.apart(s.near, all)
	if pairs < pairsLeast {
		near = 2*noiseFirst*noiseFirst + float64(s.near)*s.first*s.first
	}
	d.drift = s.first * s.first
	if far, n := d.apart(s.far, all); n > 0 {
		known := float64(n) / float64(s.far)
		grows := max((far-near)/float64(s.far-s.near), 0)
		d.drift = (known*grows + s.doubt*d.drift) / (known + s.doubt)
	}
	d.noise = max((near-float64(s.near)*d.drift)/2, noiseLeast)
	// Kalman's filter for a level: unsure is the variance of what is known of it.
	d.mean = d.Seen[0]
	unsure := d.noise
	for _, v := range d.Seen[1:] {
		unsure += d.drift
		gain := unsure / (unsure + d.noise)
		d.mean += gain * (v - d.mean)
		unsure *= 1 - gain
	}
	d.mean = max(d.mean, 0)
	d.off = math.Sqrt(unsure)
}

// apart is the mean square of how much values so many intervals apart differ, as parts of a mean, and of how many pairs that is.
func (d *demand) apart(intervals int, of float64) (square float64, pairs int) {
	for i := intervals; i < len(d.Seen); i++ {
		x := (d.Seen[i] - d.Seen[i-intervals]) / of
		square += x * x
		pairs++
	}
	return square / float64(max(pairs, 1)), pairs
}

// ahead is the standard error of the level as what is to come in so long, as a part of it.
func (l *level) ahead(lasts time.Duration, s *sampling) float64 {
	return math.Sqrt(l.off*l.off + l.drift*lasts.Seconds()/s.every.Seconds())
}

func (d *demand) check() error {
	if len(d.Seen) > demandKept || d.N < 0 || d.N > countMost || d.At < 0 || d.At > timeMost || !(d.Sum >= 0) || math.IsInf(d.Sum, 0) {
		return fmt.Errorf("a demand has %d values until %s, and %v of %d since", len(d.Seen), d.At, d.Sum, d.N)
	}
	for _, v := range d.Seen {
		if !(v >= 0) || v > countMost {
			return fmt.Errorf("a demand of %v engines", v)
		}
	}
	return nil
}
