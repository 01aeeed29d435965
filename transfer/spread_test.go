package transfer

import (
	"math"
	"testing"
	"time"
)

// lanesOf makes a set of lanes that take so many milliseconds for a piece of 1 MiB, with so many pieces under way.
func lanesOf(t *testing.T, ms []float64, flying []int64) *laneSet {
	t.Helper()
	s := newLaneSet(&channel{e: &Engine{rate: newBucket(0)}})
	for i := range ms {
		f := &feeder{lane: i}
		if ms[i] > 0 {
			f.meter.bytes, f.meter.seconds = PieceMax, ms[i]/1e3
		}
		f.meter.flying, f.meter.since = flying[i]*PieceMax, time.Now()
		s.feeders[i] = f
	}
	return s
}

func TestWorth(t *testing.T) {
	for _, c := range []struct {
		name   string
		ms     []float64
		flying []int64
		left   int64 // pieces
		want   []bool
	}{
		{"equal and idle, one piece", []float64{10, 10, 10}, []int64{0, 0, 0}, 1, []bool{true, true, true}},
		{"plenty to do", []float64{10, 100}, []int64{8, 8}, 1000, []bool{true, true}},
		{"the end of a lease", []float64{10, 100}, []int64{0, 0}, 5, []bool{true, false}},
		{"the fast one has enough to do", []float64{10, 100}, []int64{8, 0}, 5, []bool{true, true}},
		{"the slow one is busy", []float64{10, 100}, []int64{2, 1}, 4, []bool{true, false}},
		{"a single lane", []float64{100}, []int64{5}, 1, []bool{true}},
		{"nothing is known", []float64{0, 0}, []int64{3, 0}, 1, []bool{true, true}},
		{"one is not known", []float64{0, 100}, []int64{3, 3}, 1, []bool{true, true}},
	} {
		s := lanesOf(t, c.ms, c.flying)
		l := &sourceLease{}
		l.unqueued.Store(c.left * PieceMax)
		for i, want := range c.want {
			if got := s.worth(s.feeders[i], l); got != want {
				t.Errorf("%s: lane %d: %v", c.name, i, got)
			}
		}
	}
}

// However slow they are and whatever is under way, one lane takes the next piece.
func FuzzWorth(f *testing.F) {
	f.Add(10.0, 100.0, 1000.0, int64(0), int64(8), int64(2), int64(3))
	f.Fuzz(func(t *testing.T, a, b, c float64, x, y, z, left int64) {
		for _, v := range []float64{a, b, c} {
			if math.IsNaN(v) || v < 0.001 || v > 1e6 {
				return
			}
		}
		for _, v := range []int64{x, y, z, left} {
			if v < 0 || v > 1000 {
				return
			}
		}
		s := lanesOf(t, []float64{a, b, c}, []int64{x, y, z})
		l := &sourceLease{}
		l.unqueued.Store(left * PieceMax)
		for _, f := range s.feeders {
			if s.worth(f, l) {
				return
			}
		}
		t.Error("no lane takes it")
	})
}

// A lane that stands still is not counted on.
func TestWorthOfStandstill(t *testing.T) {
	s := lanesOf(t, []float64{1, 100}, []int64{1, 0})
	s.feeders[0].meter.since = time.Now().Add(-time.Minute)
	l := &sourceLease{}
	l.unqueued.Store(PieceMax)
	if !s.worth(s.feeders[1], l) {
		t.Error("the piece waits for a lane that has stood still for a minute")
	}
}

func TestLaneMeter(t *testing.T) {
	var m laneMeter
	now := time.Now()
	for range 100 { // two at a time, each through 1 ms after the one before
		m.post(now, 1000)
		m.post(now, 1000)
		m.done(now.Add(time.Millisecond), 1000, true)
		m.done(now.Add(2*time.Millisecond), 1000, true)
		now = now.Add(time.Second) // idle time does not count
	}
	if per := m.perByte(); math.Abs(per-1e-6) > 1e-9 || m.flying != 0 {
		t.Errorf("%g s a byte, %d flying", per, m.flying)
	}
	m.post(now, 1000)
	m.done(now.Add(time.Hour), 1000, false) // fenced: says nothing of the lane
	if per := m.perByte(); math.Abs(per-1e-6) > 1e-9 {
		t.Errorf("%g s a byte", per)
	}
}

func TestIDSet(t *testing.T) {
	var s idSet
	for _, id := range []int{0, 63, 64, laneIDsMax - 1} {
		if s.has(id) || !s.add(id) || s.add(id) || !s.has(id) {
			t.Errorf("id %d", id)
		}
	}
}
