// Package breaker keeps requests away from a worker that fails, and lets it back by one request at a time.
//
// A Breaker belongs to one worker's process. It is told how attempts there ended and answers whether the next may go there; it
// has no clock and no goroutine of its own, and knows nothing of requests.
package breaker

import (
	"cmp"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// trialMax is how long the others wait for a trial: an answer may take minutes, and a worker that is dead shows before.
	trialMax = 3 * time.Second
	// wellFor is how long a worker must have been well for its errors before to be forgotten.
	wellFor = 30 * time.Second
)

// Config of Breakers. Zero values are defaults.
type Config struct {
	Row      int           // 5: errors in a row that open it
	Share    float64       // 0.5: part of the attempts in Window that fail, which opens it
	ShareMin int           // 10: attempts in Window that say anything about the share
	Window   time.Duration // 10 s
	OpenMin  time.Duration // 1 s: open for so long, and twice as long each time that follows
	OpenMax  time.Duration // 10 s
}

// Check fills in defaults, and says what cannot be.
func (c *Config) Check() error {
	c.Row, c.ShareMin = cmp.Or(c.Row, 5), cmp.Or(c.ShareMin, 10)
	c.Share = cmp.Or(c.Share, 0.5)
	c.Window, c.OpenMin, c.OpenMax = cmp.Or(c.Window, 10*time.Second), cmp.Or(c.OpenMin, time.Second), cmp.Or(c.OpenMax, 10*time.Second)
	switch {
	case c.Row < 0 || c.ShareMin < 0 || c.Window < 0:
		return fmt.Errorf("configure breaker: a limit is negative")
	case !(c.Share > 0 && c.Share <= 1):
		return fmt.Errorf("configure breaker: the share of failures is %g, and must be over 0 and at most 1", c.Share)
	case c.OpenMin < 0 || c.OpenMax < c.OpenMin:
		return fmt.Errorf("configure breaker: open for %s at first and %s at most", c.OpenMin, c.OpenMax)
	}
	return nil
}

// Fault is what an attempt showed of the worker.
type Fault uint8

// Faults. What is the request's fault (4xx), the client's (it left) or the worker's load (429, 503) is none.
const (
	// Lost: it did not answer, or the connection broke. Once is enough.
	Lost Fault = iota
	// Erred: it answered, with an error of its own or too late.
	Erred
	// TooSlow: it served, in much more time than others of its sort. Slow says so.
	TooSlow
)

// Phase is what a Breaker lets through.
type Phase string

// Phases.
const (
	Closed   Phase = "closed"    // everything
	Open     Phase = "open"      // nothing
	HalfOpen Phase = "half-open" // one request, which decides
)

// State is a snapshot of a Breaker.
type State struct {
	Phase  Phase
	Until  time.Time // Open: when it lets one through
	Trying bool      // HalfOpen: one is under way
	Lost   bool      // it was opened by Lost
	Slow   bool      // it was opened by TooSlow
	Reason string
}

// Breaker of one worker. Its methods are safe for concurrent use.
type Breaker struct {
	cfg  *Config
	shut atomic.Bool // not closed: until is not zero

	mu     sync.Mutex // guards what follows
	until  time.Time  // zero: closed
	trying time.Time  // when the trial began; zero: there is none
	well   time.Time  // when it last closed, of errors
	fault  Fault      // that opened it
	reason string
	times  int // opened in a row
	row    int // failures in a row
	// counts of attempts, in the half window that began at since and in the one before.
	since  time.Time
	counts [2]struct{ served, failed int }
}

// New makes a closed Breaker. cfg has been checked, and is not changed.
func New(cfg *Config) *Breaker { return &Breaker{cfg: cfg} }

// State is what the breaker lets through now.
func (b *Breaker) State(now time.Time) State {
	if !b.shut.Load() {
		return State{Phase: Closed}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.until.IsZero():
		return State{Phase: Closed}
	case now.Before(b.until):
		return State{Phase: Open, Until: b.until, Lost: b.fault == Lost, Slow: b.fault == TooSlow, Reason: b.reason}
	}
	return State{Phase: HalfOpen, Trying: b.tries(now), Lost: b.fault == Lost, Slow: b.fault == TooSlow, Reason: b.reason}
}

// tries tells whether a trial is under way. One that says nothing for long makes room for another.
func (b *Breaker) tries(now time.Time) bool {
	return !b.trying.IsZero() && now.Sub(b.trying) < trialMax
}

// Take is called before an attempt. trial tells that it decides whether the breaker closes: Done must follow. ok is false when
// another such is under way.
func (b *Breaker) Take(now time.Time) (trial, ok bool) {
	if !b.shut.Load() {
		return false, true
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.until.IsZero() || now.Before(b.until): // open: nobody else was there to go to
		return false, true
	case b.tries(now):
		return false, false
	}
	b.trying = now
	return true, true
}

// Done ends a trial. Without Served or Failed it has shown nothing, and the next one tries.
func (b *Breaker) Done() {
	b.mu.Lock()
	b.trying = time.Time{}
	b.mu.Unlock()
}

// Served notes an attempt that the worker served.
func (b *Breaker) Served(now time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.turn(now)
	b.counts[0].served++
	b.row = 0
	switch {
	case b.until.IsZero():
	case b.fault == Lost: // it lives after all
		b.until, b.times = time.Time{}, 0
		b.shut.Store(false)
	case !now.Before(b.until): // others it serves while it is open say nothing of those that it fails
		b.until, b.well = time.Time{}, now
		b.shut.Store(false)
		b.counts = [2]struct{ served, failed int }{}
	}
}

// Failed notes an attempt that the worker failed; opened tells that this has opened the breaker.
func (b *Breaker) Failed(now time.Time, fault Fault, reason string) (opened bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if now.Before(b.until) {
		return false // one fault takes many requests down: it counts once
	}
	if b.turn(now); fault != TooSlow {
		b.counts[0].failed++
		b.row++
	}
	failed := b.counts[0].failed + b.counts[1].failed
	all := failed + b.counts[0].served + b.counts[1].served
	switch {
	case fault != Erred || !b.until.IsZero(): // or it was tried and has failed again
	case b.row >= b.cfg.Row:
		reason = fmt.Sprintf("%s, %d times in a row", reason, b.row)
	case all >= b.cfg.ShareMin && float64(failed) >= b.cfg.Share*float64(all):
		reason = fmt.Sprintf("%s, %d of %d attempts failed", reason, failed, all)
	default:
		return false
	}
	if b.until.IsZero() && now.Sub(b.well) > wellFor { // it was well for long
		b.times = 0
	}
	b.until = now.Add(min(b.cfg.OpenMin<<min(b.times, 20), b.cfg.OpenMax))
	b.shut.Store(true)
	b.fault, b.reason, b.trying = fault, reason, time.Time{}
	b.times++
	b.row = 0
	return true
}

// turn begins a new half window when it is time.
func (b *Breaker) turn(now time.Time) {
	half := b.cfg.Window / 2
	switch age := now.Sub(b.since); {
	case age < half:
	case age < b.cfg.Window:
		b.counts[1], b.counts[0] = b.counts[0], struct{ served, failed int }{}
		b.since = now
	default:
		b.counts = [2]struct{ served, failed int }{}
		b.since = now
	}
}
