package transfer

// Placed is a link that knows how near its lanes are to memory.
type Placed interface {
	// Place gives what says how near a lane is to a region: 1 is as near as can be, or not known; less is about the share of
	// the lane's rate that gets through from there. It must not wait.
	Place(lane int) func(*Region) float64
}

func place(link Link, lane int) func(*Region) float64 {
	if p, ok := link.(Placed); ok {
		return p.Place(lane)
	}
	return nil
}

// tooFarBy is how many times as near another lane must be for one not to carry a lease at all. Between memory of a GPU and a
// card behind another processor there is a fifth of the rate or less, and such a lane holds up the others' on its way.
// What is nearer than that is left to the spreading by measured time.
const tooFarBy = 2

// nearTo is how near a lane is to a lease's memory; of several regions the nearest counts.
func (f *feeder) nearTo(l *sourceLease) float64 {
	if f.near == nil || len(l.regions) == 0 {
		return 1
	}
	best := 0.0
	for _, r := range l.regions {
		best = max(best, f.near(r))
	}
	return best
}

// tooFar says that a lane is not for a lease because another one that lives is so much nearer to its memory. s.mu is held.
func (s *laneSet) tooFar(f *feeder, l *sourceLease) bool {
	own := f.nearTo(l)
	if own*tooFarBy > 1 {
		return false
	}
	for _, other := range s.feeders {
		if other != f && other.spare == f.spare && !s.dead(other.lane) && other.nearTo(l) >= own*tooFarBy {
			return true
		}
	}
	return false
}
