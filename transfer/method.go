package transfer

import (
	"fmt"
	"math/bits"
	"sync"
	"time"
)

// Mode is how a piece's runs get to the wire, or from it.
type Mode uint8

// The modes. Direct names every run to the system call; Staged copies the runs through a contiguous buffer, which is
// cheaper where they are small.
const (
	Direct Mode = iota
	Staged
	modes
)

func (m Mode) String() string { return [...]string{"direct", "staged"}[m] }

// Pieces are classed by the mean size of their runs: up to 64 bytes, up to 128, and so on; the last class is open.
const (
	runClassFirst = 6
	runClasses    = 15
)

func runClass(bytes uint64, runs int) int {
	mean := max(bytes/uint64(runs), 1)
	return min(max(bits.Len64(mean-1)-runClassFirst, 0), runClasses-1)
}

// runClassBytes is the upper end of a class.
func runClassBytes(class int) uint64 { return 1 << (class + runClassFirst) }

// Chooser decides between the modes by what they cost, for one direction of a channel: it keeps for each class of runs
// what a byte took in either mode, takes the cheaper one, and tries the other now and then.
type Chooser struct {
	direction string
	only      Mode // if forced
	forced    bool
	changed   func(MethodStatus) // told of each new preference, under the lock

	mu      sync.Mutex
	classes [runClasses]runStats
}

type runStats struct {
	cost      [modes]float64 // ns a byte, exponentially weighted
	measured  [modes]uint64  // pieces
	picked    uint64
	preferred Mode
	decided   bool
}

const (
	modeTrials  = 3    // of each mode before one is preferred
	modeSwitch  = 0.9  // the other must be this much cheaper to take over
	tryClose    = 64   // one piece in so many tries the other mode, where it costs less than twice as much
	tryFar      = 1024 // and where it costs more
	costWeight  = 0.125
	costOutlier = 8 // a measure counts for at most so many times what was known: the thread had lost its processor
)

func newChooser(direction string, changed func(MethodStatus)) *Chooser {
	c := &Chooser{direction: direction, changed: changed}
	for i := range c.classes {
		if runClassBytes(i) <= 1024 { // what is tried first, until something was measured
			c.classes[i].preferred = Staged
		}
	}
	return c
}

// Choice is one pick, to be given back with what it took.
type Choice struct {
	Mode  Mode
	class int8 // and one; 0: there was nothing to choose
}

// Measured says whether Took wants to know.
func (c Choice) Measured() bool { return c.class > 0 }

// Pick chooses the mode for a piece. A nil Chooser, or a piece in one run, goes direct.
func (c *Chooser) Pick(bytes uint64, runs int) Choice {
	if c == nil {
		return Choice{}
	}
	if c.forced {
		return Choice{Mode: c.only}
	}
	if runs <= 1 {
		return Choice{}
	}
	class := runClass(bytes, runs)
	c.mu.Lock()
	defer c.mu.Unlock()
	s := &c.classes[class]
	s.picked++
	mode, other := s.preferred, 1-s.preferred
	switch {
	case s.measured[mode] < modeTrials:
	case s.measured[other] < modeTrials:
		mode = other
	case s.picked%tryFar == 0, s.picked%tryClose == 0 && s.cost[other] < 2*s.cost[mode]:
		mode = other
	}
	return Choice{mode, int8(class + 1)}
}

// Took says what a picked piece took: the time in system calls and copies, without waiting.
func (c *Chooser) Took(ch Choice, d time.Duration, bytes uint64) {
	if ch.class <= 0 || bytes == 0 {
		return
	}
	cost := float64(d) / float64(bytes)
	c.mu.Lock()
	defer c.mu.Unlock()
	class := int(ch.class) - 1
	s := &c.classes[class]
	if n := s.measured[ch.Mode]; n == 0 {
		s.cost[ch.Mode] = cost
	} else {
		old := s.cost[ch.Mode]
		// The first few are averaged, so that a slow first piece, which faults pages in, is soon forgotten.
		s.cost[ch.Mode] += max(costWeight, 1/float64(n+1)) * (min(cost, costOutlier*old) - old)
	}
	s.measured[ch.Mode]++
	if min(s.measured[Direct], s.measured[Staged]) < modeTrials {
		return
	}
	was, other := s.preferred, 1-s.preferred
	if s.cost[other] < modeSwitch*s.cost[was] {
		s.preferred = other
	}
	news := !s.decided || s.preferred != was
	s.decided = true
	if news && c.changed != nil {
		c.changed(c.status(class))
	}
}

// MethodStatus is what a channel does with runs of a size in one direction, and why.
type MethodStatus struct {
	Direction   string  `json:"direction"` // send or receive
	RunBytes    uint64  `json:"run_bytes"` // runs of a mean size up to this, and above half of it
	Mode        string  `json:"mode"`      // direct or staged
	Why         string  `json:"why"`
	DirectCost  float64 `json:"direct_ns_per_kib"` // 0: not measured
	StagedCost  float64 `json:"staged_ns_per_kib"`
	DirectCount uint64  `json:"direct_pieces"`
	StagedCount uint64  `json:"staged_pieces"`
}

// status describes a class. c.mu is held.
func (c *Chooser) status(class int) MethodStatus {
	s := &c.classes[class]
	m := MethodStatus{
		Direction: c.direction, RunBytes: runClassBytes(class), Mode: s.preferred.String(), DirectCost: 1024 * s.cost[Direct], StagedCost: 1024 * s.cost[Staged],
		DirectCount: s.measured[Direct], StagedCount: s.measured[Staged],
	}
	switch {
	case !s.decided:
		m.Why = "not measured yet: the usual better for this size"
	case s.cost[s.preferred] < s.cost[1-s.preferred]:
		m.Why = fmt.Sprintf("measured %.0f ns/KiB, %s %.0f", 1024*s.cost[s.preferred], 1-s.preferred, 1024*s.cost[1-s.preferred])
	default:
		m.Why = fmt.Sprintf("measured %.0f ns/KiB, %s %.0f: too close to change", 1024*s.cost[s.preferred], 1-s.preferred, 1024*s.cost[1-s.preferred])
	}
	return m
}

// Status lists the classes that were met.
func (c *Chooser) Status() (list []MethodStatus) {
	if c.forced {
		return []MethodStatus{{Direction: c.direction, Mode: c.only.String(), Why: "the configuration asks for it"}}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range c.classes {
		if c.classes[i].picked > 0 {
			list = append(list, c.status(i))
		}
	}
	return list
}

// newMethods makes a channel's choosers.
func (c *channel) newMethods() {
	changed := func(m MethodStatus) {
		c.e.log.Info("transfer method", "peer", c.peer.NodeID, "direction", m.Direction, "run_bytes", m.RunBytes, "mode", m.Mode, "why", m.Why)
	}
	c.sending, c.receiving = newChooser("send", changed), newChooser("receive", changed)
	for _, x := range []*Chooser{c.sending, c.receiving} {
		for m := range modes {
			if c.e.cfg.Method == m.String() {
				x.only, x.forced = m, true
			}
		}
	}
}

// busyMeter adds up the time in which at least one piece was under way: what a channel moves in it is its measured speed,
// whatever pauses there were between.
type busyMeter struct {
	mu    sync.Mutex
	n     int
	since time.Time
	total time.Duration
}

func (b *busyMeter) enter() {
	b.mu.Lock()
	if b.n++; b.n == 1 {
		b.since = time.Now()
	}
	b.mu.Unlock()
}

func (b *busyMeter) leave() {
	b.mu.Lock()
	if b.n--; b.n == 0 {
		b.total += time.Since(b.since)
	}
	b.mu.Unlock()
}

func (b *busyMeter) get() time.Duration {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.n > 0 {
		return b.total + time.Since(b.since)
	}
	return b.total
}
