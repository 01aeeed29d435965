package pairing

import (
	"math"
	"time"
)

// Speeds are how fast a worker is, learned from its answers. A zero field is not known.
type Speeds struct {
	PrefillRate float64 `json:"prefill_tokens_per_s,omitempty"` // of prompts' tokens that were in no cache
	// PrefillDoubt is by which part of it PrefillRate may be off by the chance of which prompts it was learned from: a standard error.
	PrefillDoubt float64 `json:"prefill_doubt,omitempty"`
	ITL          float64 `json:"itl_s,omitempty"`            // between a stream's tokens, with one stream
	ITLStream    float64 `json:"itl_s_per_stream,omitempty"` // more for each further one
}

// What is counted with where no worker of the model has shown better yet. They are of a model of 8 billion parameters on one
// accelerator of a few years ago, and good for comparing workers of which nothing is known with each other.
const (
	priorRate      = 8192
	priorITL       = 0.010
	priorITLStream = 0.0002
)

// learned is what is taken for workers of which something is not known: what the others have shown, on average.
func learned(v *View) Speeds {
	var sum Speeds
	var rates, itls float64
	for i := range v.Workers {
		s := &v.Workers[i].Speeds
		if s.PrefillRate > 0 {
			sum.PrefillRate += s.PrefillRate
			rates++
		}
		if s.ITL > 0 {
			sum.ITL, sum.ITLStream = sum.ITL+s.ITL, sum.ITLStream+s.ITLStream
			itls++
		}
	}
	out := Speeds{PrefillRate: priorRate, ITL: priorITL, ITLStream: priorITLStream}
	if rates > 0 {
		out.PrefillRate = sum.PrefillRate / rates
	}
	if itls > 0 {
		out.ITL, out.ITLStream = sum.ITL/itls, sum.ITLStream/itls
	}
	return out
}

// speeds are the candidate's own where they are known. A rate that is no further from the others' than chance brings it is taken
// for theirs mostly: of workers that are alike the one with the easier prompts behind it would get more than its share.
func (c *Candidate) speeds(others *Speeds) Speeds {
	s := c.Speeds
	if s.PrefillRate <= 0 {
		s.PrefillRate = others.PrefillRate
	} else if away := s.PrefillRate/others.PrefillRate - 1; s.PrefillDoubt > 0 {
		k := doubtWeight * s.PrefillDoubt
		s.PrefillRate = others.PrefillRate * (1 + away*away*away/(away*away+k*k))
	}
	if s.ITL <= 0 {
		s.ITL, s.ITLStream = others.ITL, others.ITLStream
	}
	return s
}

// Estimator learns a worker's speeds from its answers. The zero value knows nothing. It is not safe for concurrent use.
type Estimator struct {
	rate pace
	itl  line
}

const (
	// A prompt of few tokens tells how long a request takes to get there rather than how fast the worker is.
	sampleTokensMin = 256
	sampleTookMin   = time.Millisecond
	sampleITLMin    = 50 * time.Microsecond
)

// Prefilled takes that a prompt was done after a time, and how many tokens the worker had to compute in it: the prompt's
// and those that were queued before it.
func (e *Estimator) Prefilled(tokens int64, took time.Duration) {
	if tokens < sampleTokensMin || took < sampleTookMin {
		return
	}
	e.rate.add(float64(tokens), took.Seconds())
}

// Decoded takes the mean time between a stream's tokens and how many streams the worker had meanwhile, that one included.
func (e *Estimator) Decoded(streams float64, itl time.Duration) {
	if !(streams >= 1) || math.IsInf(streams, 0) || itl < sampleITLMin {
		return
	}
	e.itl.add(streams-1, itl.Seconds())
}

// Speeds is what was learned so far.
func (e *Estimator) Speeds() Speeds {
	var s Speeds
	s.PrefillRate, s.PrefillDoubt = e.rate.rate()
	s.ITL, s.ITLStream = e.itl.fit()
	return s
}

const (
	gain       = 0.1 // of the newest sample, once there are 1/gain of them
	outlierDev = 4   // mean deviations away
	// outlierLeast is how far away a sample must be at least to count as one: by a factor of two.
	outlierLeast = math.Ln2
	// outlierRun of them on one side are no outliers: the worker is another one now.
	outlierRun = 4
)

// smooth is a moving mean that single odd samples do not move.
type smooth struct {
	mean, dev float64
	n         int
	odd       int // outliers in a row, negative below the mean
}

func (s *smooth) add(x float64) {
	if math.IsNaN(x) || math.IsInf(x, 0) {
		return
	}
	if s.n == 0 {
		s.mean, s.n = x, 1
		return
	}
	away := x - s.mean
	if s.n >= outlierRun && math.Abs(away) > max(outlierDev*s.dev, outlierLeast) {
		if away < 0 == (s.odd < 0) {
			s.odd += int(math.Copysign(1, away))
		} else {
			s.odd = int(math.Copysign(1, away))
		}
		if s.odd < outlierRun && s.odd > -outlierRun {
			return
		}
		*s = smooth{mean: x, n: 1}
		return
	}
	s.odd = 0
	s.n++
	g := max(gain, 1/float64(s.n))
	s.mean += g * away
	s.dev += g * (math.Abs(away) - s.dev)
}

const (
	// keepPace is what is left of a sample's weight with each that follows: about the last 50 count.
	keepPace = 0.98
	// doubtWeight is how many standard errors a worker's own rate must be away from the others' to be believed half.
	doubtWeight = 2
)

// pace is how many tokens a worker does in a second, of its last prompts, each of which counts by its length: how long short ones
// take says little of that.
type pace struct {
	level           smooth // of the logarithm, to tell outliers
	tokens, seconds float64
	squares         float64 // of tokens, each with the square of its weight
}

func (p *pace) add(tokens, seconds float64) {
	before := p.level.n
	p.level.add(math.Log(tokens / seconds))
	switch {
	case p.level.odd != 0: // kept out
		return
	case before > 1 && p.level.n == 1: // begun anew
		p.tokens, p.seconds, p.squares = 0, 0, 0
	}
	p.tokens = p.tokens*keepPace + tokens
	p.seconds = p.seconds*keepPace + seconds
	p.squares = p.squares*keepPace*keepPace + tokens*tokens
}

func (p *pace) rate() (rate, doubt float64) {
	if p.seconds == 0 {
		return 0, 0
	}
	return p.tokens / p.seconds, p.level.dev * math.Sqrt(p.squares) / p.tokens
}

const (
	// keepLine is what is left of a sample's weight with each that follows: about the last 100 count.
	keepLine = 0.99
	// floorShare of the mean time is what one stream alone takes at least, whatever a line through samples says that were all
	// taken under load.
	floorShare = 0.1
)

// line fits y = a + b*x to samples, the newest ones most.
type line struct {
	level              smooth // of the logarithm of y, to tell outliers
	w, x, y, xx, xy    float64
	accepted, rejected int
}

func (l *line) add(x, y float64) {
	before := l.level
	l.level.add(math.Log(y))
	switch {
	case l.level.odd != 0: // kept out
		l.rejected++
		return
	case before.n > 1 && l.level.n == 1: // begun anew
		*l = line{level: l.level, rejected: l.rejected}
	}
	l.accepted++
	l.w = l.w*keepLine + 1
	l.x = l.x*keepLine + x
	l.y = l.y*keepLine + y
	l.xx = l.xx*keepLine + x*x
	l.xy = l.xy*keepLine + x*y
}

// fit gives a and b, neither of them negative.
func (l *line) fit() (a, b float64) {
	if l.w == 0 {
		return 0, 0
	}
	mx, my := l.x/l.w, l.y/l.w
	if spread := l.xx/l.w - mx*mx; spread > 0.25 { // a line through samples at one load has any slope
		b = max((l.xy/l.w-mx*my)/spread, 0)
	}
	if a = my - b*mx; a < floorShare*my {
		a = floorShare * my
		if mx > 0 {
			b = (my - a) / mx
		}
	}
	return a, b
}
