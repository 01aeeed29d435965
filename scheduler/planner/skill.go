package planner

import "math"

// skill learns what part of a forecast change comes true: the slope of the line, through nothing, of what a rate was beyond its mean of the
// last while against what had been forecast beyond that.
type skill struct {
	Said [bestAhead + bestSpan/2]float64 `json:"said"` // beyond the mean then, a ring
	Mean [bestAhead + bestSpan/2]float64 `json:"mean"`
	Last [bestSpan]float64               `json:"last"`
	N    int                             `json:"n"`
	XX   float64                         `json:"xx"`
	XY   float64                         `json:"xy"`
	YY   float64                         `json:"yy"`
	W    float64                         `json:"w"`
}

const (
	skillForget = 0.97
	// It begins with so many intervals in which that part came true. In their first half hour, rates of two published traces are best
	// foretold by the last minute.
	skillDoubt = 12
	skillFirst = 0.7
)

// add takes the rate of an interval, what is forecast after it, and the mean of the last while.
func (s *skill) add(rate, said, mean float64) {
	s.Last[s.N%bestSpan] = rate
	slot := s.N % len(s.Said)
	if s.N >= len(s.Said)+skillDoubt { // in the beginning nothing is known of what is usual
		now := 0.0
		for _, v := range s.Last {
			now += v / bestSpan
		}
		// The ring's oldest forecast was for the middle of what Last holds.
		x, y := s.Said[slot], now-s.Mean[slot]
		s.XX, s.XY = skillForget*s.XX+x*x, skillForget*s.XY+x*y
		s.YY, s.W = skillForget*s.YY+y*y, skillForget*s.W+1
	}
	s.Said[slot], s.Mean[slot] = said-mean, mean
	s.N++
}

// part is how much of a forecast change to believe, 0 to 1.
func (s *skill) part() float64 {
	if s.W < 1 || s.XX <= 0 {
		return skillFirst
	}
	doubt := skillDoubt / s.W
	return min(max((s.XY/s.XX+skillFirst*doubt)/(1+doubt), 0), 1)
}

// off is the usual error of the forecast that is believed so far, and how many intervals that is known from.
func (s *skill) off() (usual, known float64) {
	if s.W < 1 {
		return 0, 0
	}
	p := s.part()
	return math.Sqrt(max(s.YY-2*p*s.XY+p*p*s.XX, 0) / s.W), s.W
}
