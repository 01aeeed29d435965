package planner

import (
	"encoding/json"
	"math"
	"math/rand/v2"
	"reflect"
	"testing"
	"time"
)

var looked = sampling{every: 5 * time.Second, near: 3, far: 15, first: 0.03, doubt: 5}

// shown is a demand that was as f says, an interval after the other.
func shown(n int, f func(i int) float64) *demand {
	d := &demand{}
	for i := range n {
		d.add(f(i))
		d.until(time.Duration(i+1)*looked.every, &looked, func(sum float64, _ int) float64 { return sum })
	}
	return d
}

// TestDemandLearns draws levels that wander, seen through noise, and wants both learned as they were drawn, and the level known better than by its last value and by the
// mean of all.
func TestDemandLearns(t *testing.T) {
	for _, c := range []struct{ drift, noise float64 }{{0, 0.3}, {0.02, 0.1}, {0.03, 0.02}, {0.05, 0.05}} {
		var drift, noise, off, said float64
		var last, all float64 // how far these are off
		const times = 60
		for seed := range uint64(times) {
			rng := rand.New(rand.NewPCG(seed, 3))
			level := 10.0
			d := shown(demandKept, func(int) float64 {
				level = max(level+10*c.drift*rng.NormFloat64(), 1)
				return max(level+10*c.noise*rng.NormFloat64(), 0)
			})
			m := mean(d.Seen)
			scale := m / 10 // parts are of the mean, which has wandered
			drift, noise = drift+math.Sqrt(d.drift)*scale/times, noise+math.Sqrt(d.noise)*scale/times
			off, said = off+(d.mean-level)*(d.mean-level)/times, said+d.off*d.off*m*m/times
			x := d.Seen[len(d.Seen)-1] - level
			last, all = last+x*x/times, all+(m-level)*(m-level)/times
		}
		if math.Abs(drift-c.drift) > 0.012+0.04*c.noise || math.Abs(noise-c.noise) > 0.02 {
			t.Errorf("drift %.3f is taken for %.3f, noise %.3f for %.3f", c.drift, drift, c.noise, noise)
		}
		if off > 1.1*last || c.drift > 0 && off > all || c.drift == 0 && off > 0.2*last {
			t.Errorf("drift %v, noise %v: the level is off by %.3f, its last value by %.3f, the mean by %.3f", c.drift, c.noise, math.Sqrt(off), math.Sqrt(last), math.Sqrt(all))
		}
		if r := math.Sqrt(off / said); r < 0.6 || r > 1.6 {
			t.Errorf("drift %v, noise %v: it is off by %.2f times what it says", c.drift, c.noise, r)
		}
	}
}

// TestDemandAhead: what is to come is less sure the longer it is ahead, and how much less was drawn.
func TestDemandAhead(t *testing.T) {
	var off float64
	const times, ahead = 300, 12
	var said float64
	for seed := range uint64(times) {
		rng := rand.New(rand.NewPCG(seed, 4))
		level := 100.0
		next := func(int) float64 { level += 2 * rng.NormFloat64(); return level + 5*rng.NormFloat64() }
		d := shown(200, next)
		now := d.mean
		said += d.ahead(ahead*looked.every, &looked) * mean(d.Seen) / times
		for range ahead {
			next(0)
		}
		off += (level - now) * (level - now) / times
	}
	if r := math.Sqrt(off) / said; r < 0.75 || r > 1.3 {
		t.Errorf("levels a minute ahead are off by %.2f, which is said to be %.2f", math.Sqrt(off), said)
	}
}

// TestDemandEdges: nothing, silence, one value, a jump, and a time in which nobody looked.
func TestDemandEdges(t *testing.T) {
	if d := shown(0, nil); d.mean != 0 || d.ahead(time.Minute, &looked) != 0 {
		t.Errorf("of nothing it says %v", d.level)
	}
	if o := (&demand{}).outlook(7, time.Minute, &looked); o.mean != 7 || o.unsure < 0.1 || o.unsure > 0.3 {
		t.Errorf("with nothing seen it has an outlook of %v on 7", o)
	}
	if d := shown(50, func(int) float64 { return 0 }); d.mean != 0 || math.IsNaN(d.off+d.drift+d.noise) {
		t.Errorf("of silence it says %v", d.level)
	}
	if d := shown(1, func(int) float64 { return 3 }); d.mean != 3 {
		t.Errorf("of 3 it says %v", d.level)
	}
	jump := shown(130, func(i int) float64 {
		if i < 120 {
			return 4 + 0.1*float64(i%3)
		}
		return 8 + 0.1*float64(i%3)
	})
	if jump.mean < 7 {
		t.Errorf("50 s after it doubled it is taken for %.2f", jump.mean)
	}
	d := shown(40, func(int) float64 { return 5 })
	d.add(1000)
	d.until(d.At+time.Hour, &looked, func(sum float64, _ int) float64 { return sum })
	if len(d.Seen) != 40 || d.Sum != 0 || d.mean != 5 {
		t.Errorf("an hour in which nobody looked makes it %d values and %v", len(d.Seen), d.level)
	}
}

// TestDemandKept: its state is its values, of which no more are kept than there may be.
func TestDemandKept(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	d := shown(3*demandKept, func(int) float64 { return 5 * rng.Float64() })
	if len(d.Seen) != demandKept {
		t.Errorf("%d values are kept", len(d.Seen))
	}
	state, err := json.Marshal(d)
	if err != nil {
		t.Fatal(err)
	}
	var again demand
	if err := json.Unmarshal(state, &again); err != nil {
		t.Fatal(err)
	}
	again.learn(&looked)
	if err := again.check(); err != nil || !reflect.DeepEqual(*d, again) {
		t.Errorf("%v; %v came back as %v", err, d.level, again.level)
	}
}
