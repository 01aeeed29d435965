package transfer

import (
	"sync"
	"sync/atomic"
)

// The named pause points.
const (
	PausePresent    = "present"     // before a ticket is presented to the peer
	PauseBind       = "bind"        // before a binding is told to the peer
	PauseWriteFrame = "write.frame" // before each piece is sent
	PauseReadFrame  = "read.frame"  // before each piece is read into blocks
	PauseCopyPiece  = "copy.piece"  // before each piece is copied locally
	PauseSettle     = "settle"      // before a complete lease settles
)

// PausePoints lists all pause points.
func PausePoints() []string {
	return []string{PausePresent, PauseBind, PauseWriteFrame, PauseReadFrame, PauseCopyPiece, PauseSettle}
}

// Pauses lets a test hold a transfer at a named point. A nil Pauses pauses nothing. Fencing never waits for a pause.
type Pauses struct {
	armed atomic.Int32 // points set: the fast path reads nothing else
	mu    sync.Mutex
	set   map[string]*pause
}

type pause struct {
	after   int           // passages still let through
	waiting int           // goroutines held
	open    chan struct{} // closed by Release
	changed chan struct{} // closed and replaced when waiting changes
}

// NewPauses returns a Pauses with no point set.
func NewPauses() *Pauses { return &Pauses{set: make(map[string]*pause)} }

// Set arms a point: the first after passages go through, all later ones are held until Release. Setting a point that is
// set first releases who waits there.
func (p *Pauses) Set(name string, after int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.release(name)
	p.set[name] = &pause{after: after, open: make(chan struct{}), changed: make(chan struct{})}
	p.armed.Add(1)
}

// Release disarms a point and lets everyone held there go on.
func (p *Pauses) Release(name string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.release(name)
}

// ReleaseAll releases every point.
func (p *Pauses) ReleaseAll() {
	for _, name := range PausePoints() {
		p.Release(name)
	}
}

func (p *Pauses) release(name string) {
	if w := p.set[name]; w != nil {
		close(w.open)
		close(w.changed)
		delete(p.set, name)
		p.armed.Add(-1)
	}
}

// Armed says whether any point is set.
func (p *Pauses) Armed() bool { return p != nil && p.armed.Load() > 0 }

// Waiting says how many goroutines are held at a point, and gives a channel that is closed when that changes.
func (p *Pauses) Waiting(name string) (int, <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	w := p.set[name]
	if w == nil {
		closed := make(chan struct{})
		close(closed)
		return 0, closed
	}
	return w.waiting, w.changed
}

// Snapshot gives the armed points and how many goroutines each holds.
func (p *Pauses) Snapshot() map[string]int {
	out := make(map[string]int)
	if p == nil {
		return out
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for name, w := range p.set {
		out[name] = w.waiting
	}
	return out
}

// Wait holds the caller if the point is armed, until it is released or stop is closed. Transports call it before each piece.
func (p *Pauses) Wait(name string, stop <-chan struct{}) {
	if p == nil || p.armed.Load() == 0 {
		return
	}
	p.mu.Lock()
	w := p.set[name]
	if w == nil {
		p.mu.Unlock()
		return
	}
	if w.after > 0 {
		w.after--
		p.mu.Unlock()
		return
	}
	w.count(+1)
	p.mu.Unlock()
	select {
	case <-w.open:
		return
	case <-stop:
	}
	p.mu.Lock()
	if p.set[name] == w {
		w.count(-1)
	}
	p.mu.Unlock()
}

func (w *pause) count(n int) {
	w.waiting += n
	close(w.changed)
	w.changed = make(chan struct{})
}
