package transfer

import "testing"

func TestTooFar(t *testing.T) {
	gpu, host := &Region{id: 1}, &Region{id: 2}
	to := func(g, h float64) func(*Region) float64 {
		return func(r *Region) float64 {
			if r == gpu {
				return g
			}
			return h
		}
	}
	set := func() *laneSet {
		s := lanesOf(t, []float64{10, 10, 10}, []int64{0, 0, 0})
		s.feeders[0].near, s.feeders[1].near, s.feeders[2].near = to(1, 0.7), to(0.9, 0.7), to(0.2, 1)
		return s
	}
	lease := func(regions ...*Region) *sourceLease {
		l := &sourceLease{}
		l.regions = regions
		l.unqueued.Store(100 * PieceMax)
		return l
	}
	check := func(s *laneSet, l *sourceLease, want ...bool) {
		t.Helper()
		for i, w := range want {
			if got := s.worth(s.feeders[i], l); got != w {
				t.Errorf("lane %d of %v: %v", i, want, got)
			}
		}
	}
	s := set()
	check(s, lease(gpu), true, true, false)
	check(s, lease(host), true, true, true)      // host memory passes nearly as well between processors
	check(s, lease(gpu, host), true, true, true) // a lane that is near to one of them carries the lease
	check(s, lease(), true, true, true)
	s.downs.add(0)
	check(s, lease(gpu), true, true, false)
	s.downs.add(1)
	if !s.worth(s.feeders[2], lease(gpu)) {
		t.Error("the last lane that lives leaves the lease lying")
	}
	s = set()
	s.feeders[0].spare, s.feeders[1].spare = true, true
	if !s.worth(s.feeders[2], lease(gpu)) {
		t.Error("lanes of the spare transport are counted on")
	}
	// What the far lane would have done is not counted on at the end of a lease.
	s = set()
	s.feeders[1].meter.seconds = 0.1
	end := lease(gpu)
	end.unqueued.Store(2 * PieceMax)
	check(s, end, true, false, false)
}
