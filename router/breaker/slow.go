package breaker

import (
	"fmt"
	"math"
	"math/bits"
	"slices"
	"sync"
	"time"
)

const (
	// slowFactorMin: what is less apart is load, not illness.
	slowFactorMin = 1.5
	// slowScore is the modified z-score, 0.6745 (x - median) / MAD, over which a value is an outlier: Iglewicz and Hoaglin, How to Detect and
	// Handle Outliers (1993). Unlike mean and standard deviation, which Envoy's outlier detection goes by, median and MAD are not moved by
	// the outlier itself, so that three workers are enough.
	slowScore = 3.5
	madScale  = 0.6745
	slowPeers = 3 // workers of one sort that have enough requests, the slow one among them
	// slowSamples is how many requests of the window tell how fast a worker is, slowClass how many of one class of prompts.
	slowSamples = 10
	slowClass   = 3
	slowWindow  = 30 * time.Second
	slowEvery   = time.Second // between two looks at a sort
	// tokensFixed is what the time for a prompt of no tokens compares with.
	tokensFixed = 256
	classes     = 7 // of prompts by their length: below 64 tokens, 256, 1,024, ... and from 65,536 on
)

// CheckSlow says what cannot be of a factor; 0 is off.
func CheckSlow(factor float64) error {
	if factor == 0 || factor >= slowFactorMin && factor <= 1000 {
		return nil
	}
	return fmt.Errorf("configure breaker: a worker that takes %g times as long as others cannot be told to be slow: use %g to 1000, or 0 for off", factor, slowFactorMin)
}

// Slow opens the breakers of workers that take much longer to prefill than others of their sort do: by factor at least, and by more than
// the others differ among themselves.
//
// Times are compared between prompts of like length alone, per token of what the worker had to compute. So who gets the long prompts, or the
// longest queue, is not slow for that. Its methods are safe for concurrent use.
type Slow struct {
	least float64 // logarithm of the factor

	mu    sync.Mutex // guards what follows, and Paces
	sorts map[string]*kin
}

// kin are the workers of a sort.
type kin struct {
	paces []*Pace
	at    time.Time        // of the last look
	usual [classes]float64 // median of the workers' means, of the logarithm
	known [classes]bool    // else too few of them had such prompts
}

// Pace is how fast one worker's process is.
type Pace struct {
	breaker *Breaker
	sort    *kin
	since   time.Time // of the half window that is being filled
	halves  [2][classes]mean
	ratio   float64 // to the median of its sort, at the last look; 0: not known
}

type mean struct {
	n   int
	sum float64
}

// NewSlow makes a Slow. factor has been checked, and is not 0.
func NewSlow(factor float64) *Slow {
	return &Slow{least: math.Log(factor), sorts: map[string]*kin{}}
}

// NewPace is for a worker with that breaker.
func NewPace(b *Breaker) *Pace { return &Pace{breaker: b} }

// Follow says which workers there are, by their sorts.
func (s *Slow) Follow(sorts map[string][]*Pace) {
	s.mu.Lock()
	defer s.mu.Unlock()
	old := s.sorts
	s.sorts = make(map[string]*kin, len(sorts))
	for name, paces := range sorts {
		k := old[name]
		if k == nil {
			k = &kin{}
		}
		k.paces = paces
		for _, p := range paces {
			p.sort = k
		}
		s.sorts[name] = k
	}
}

// Ratio is how long the worker takes in relation to the median of its sort; 0: too little is known.
func (s *Slow) Ratio(p *Pace) float64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return p.ratio
}

// Took notes that a worker took that long for what it had to compute up to a prompt's end. opened is how many breakers that has opened.
func (s *Slow) Took(now time.Time, p *Pace, tokens int64, took time.Duration) (opened int) {
	state := p.breaker.State(now)
	if state.Phase == Open || took <= 0 {
		return 0 // it is from before
	}
	class, x := sample(tokens, took)
	s.mu.Lock()
	defer s.mu.Unlock()
	k := p.sort
	if k == nil { // it is new, or has gone
		return 0
	}
	if state.Phase == HalfOpen {
		if away := x - k.usual[class]; state.Slow && k.known[class] && away > s.least {
			return s.open(now, p, fmt.Sprintf("slow: tried again, its first token took %.3g times as long as with the others", math.Exp(away)))
		}
		return 0
	}
	p.turn(now)
	p.halves[0][class].n++
	p.halves[0][class].sum += x
	if now.Sub(k.at) < slowEvery {
		return 0
	}
	k.at = now
	return s.look(now, k)
}

// sample is a prompt's class and the logarithm of the time a token, as far as it can be told.
func sample(tokens int64, took time.Duration) (class int, x float64) {
	tokens = max(tokens, 0)
	return min((bits.Len64(uint64(tokens)>>6)+1)/2, classes-1), math.Log(took.Seconds() / float64(tokens+tokensFixed))
}

// open opens a worker's breaker. What comes when it closes again is a new beginning.
func (s *Slow) open(now time.Time, p *Pace, reason string) int {
	p.halves, p.ratio = [2][classes]mean{}, 0
	if p.breaker.Failed(now, TooSlow, reason) {
		return 1
	}
	return 0
}

// look judges the workers of a sort.
func (s *Slow) look(now time.Time, k *kin) (opened int) {
	k.usually(now)
	var rated []*Pace
	var scores []float64
	for _, p := range k.paces {
		score, n := p.score(k)
		if p.ratio = 0; n >= slowSamples {
			rated, scores = append(rated, p), append(scores, score)
		}
	}
	if len(rated) < slowPeers {
		return 0
	}
	mid := median(slices.Clone(scores))
	off := make([]float64, len(scores))
	for i, x := range scores {
		off[i] = math.Abs(x - mid)
	}
	limit := max(s.least, slowScore/madScale*median(off))
	for i, p := range rated {
		away := scores[i] - mid
		p.ratio = math.Exp(away)
		if away > limit && p.breaker.State(now).Phase == Closed {
			opened += s.open(now, p, fmt.Sprintf("slow: its first tokens took %.3g times as long as the median of %d workers", math.Exp(away), len(rated)))
		}
	}
	return opened
}

// usually finds out what is usual.
func (k *kin) usually(now time.Time) {
	means := make([]float64, 0, len(k.paces))
	for class := range classes {
		means = means[:0]
		for _, p := range k.paces {
			p.turn(now)
			if m := p.class(class); m.n >= slowClass {
				means = append(means, m.sum/float64(m.n))
			}
		}
		if len(means) >= slowPeers {
			k.usual[class], k.known[class] = median(means), true
		}
	}
}

// score is how far a worker is from what is usual, in logarithms, and of how many requests that is known.
func (p *Pace) score(k *kin) (score float64, n int) {
	for class := range classes {
		if m := p.class(class); k.known[class] {
			score += m.sum - float64(m.n)*k.usual[class]
			n += m.n
		}
	}
	return score / float64(max(n, 1)), n
}

func (p *Pace) class(class int) mean {
	a, b := p.halves[0][class], p.halves[1][class]
	return mean{a.n + b.n, a.sum + b.sum}
}

// turn begins a new half window when it is time.
func (p *Pace) turn(now time.Time) {
	age := now.Sub(p.since)
	if age < slowWindow/2 {
		return
	}
	if p.halves[1] = p.halves[0]; age >= slowWindow {
		p.halves[1] = [classes]mean{}
	}
	p.halves[0] = [classes]mean{}
	p.since = now
}

// median sorts list, which is not empty.
func median(list []float64) float64 {
	slices.Sort(list)
	n := len(list)
	return (list[(n-1)/2] + list[n/2]) / 2
}
