package transfer

import (
	"sync"
	"sync/atomic"
)

// laneSet hands pieces of leases to a channel's lanes: in turn, a few pieces at a time, and a lane carries one lease at a
// time. Its mutex is a leaf: nothing is locked under it.
type laneSet struct {
	c     *channel
	n     int // lanes there should be
	downs [laneIDsMax]atomic.Bool
	up    atomic.Int32
	wg    sync.WaitGroup

	mu      sync.Mutex
	cond    sync.Cond
	ready   []*sourceLease
	queued  map[*sourceLease]struct{}
	carries map[int]*sourceLease // by lane
	next    int                  // number of the next lane
	closed  bool
}

// A lane takes this many pieces of one lease before it looks for another that waits.
const laneQuantum = 4

func newLaneSet(c *channel) *laneSet {
	s := &laneSet{c: c, queued: make(map[*sourceLease]struct{}), carries: make(map[int]*sourceLease)}
	s.cond.L = &s.mu
	return s
}

func (s *laneSet) dead(lane int) bool { return lane < 0 || lane >= laneIDsMax || s.downs[lane].Load() }

// push puts a lease into the ring, unless it is there.
func (s *laneSet) push(l *sourceLease) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, in := s.queued[l]; !in && !s.closed {
		s.queued[l] = struct{}{}
		s.ready = append(s.ready, l)
		s.cond.Signal()
	}
}

// pop waits for a lease with work.
func (s *laneSet) pop(lane int) *sourceLease {
	s.mu.Lock()
	defer s.mu.Unlock()
	for len(s.ready) == 0 && !s.closed && !s.dead(lane) {
		s.cond.Wait()
	}
	if s.closed || s.dead(lane) {
		s.cond.Signal() // the wake-up may have been another lane's
		return nil
	}
	l := s.ready[0]
	s.ready[0] = nil
	s.ready = s.ready[1:]
	delete(s.queued, l)
	s.carries[lane] = l
	return l
}

func (s *laneSet) free(lane int) {
	s.mu.Lock()
	delete(s.carries, lane)
	s.mu.Unlock()
}

// carrying lists the lanes that carry a lease.
func (s *laneSet) carrying(l *sourceLease) (lanes []int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, other := range s.carries {
		if other == l {
			lanes = append(lanes, i)
		}
	}
	return lanes
}

// start runs the lanes of a link.
func (s *laneSet) start(link Link, n int) {
	s.mu.Lock()
	s.n, s.next = n, n
	s.up.Store(int32(n))
	s.mu.Unlock()
	for i := range n {
		s.serve(link, i)
	}
}

func (s *laneSet) close() {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.cond.Broadcast()
}

// run feeds one lane until it is dead or the channel closes.
func (s *laneSet) run(link Link, lane int) {
	depth := link.Depth()
	slots := make(chan *Write, depth)
	for range depth {
		slots <- &Write{}
	}
	drained := make([]*Write, depth)
	back := func(w *Write) { slots <- w }
	for {
		l := s.pop(lane)
		if l == nil {
			return
		}
		rest := s.feed(link, lane, l, slots, back)
		// The lane must be drained of this lease before it carries another.
		for i := range depth {
			drained[i] = <-slots
		}
		for i := range depth {
			slots <- drained[i]
		}
		s.free(lane)
		if rest {
			s.push(l)
		}
	}
}

// feed posts up to laneQuantum pieces, or as many as there are while nobody else waits.
func (s *laneSet) feed(link Link, lane int, l *sourceLease, slots chan *Write, back func(*Write)) (rest bool) {
	e := s.c.e
	for i := 0; ; i++ {
		if s.dead(lane) {
			return true
		}
		if i >= laneQuantum && s.waiting() {
			return true
		}
		w := <-slots
		ok, more := l.take(lane, w)
		if !ok {
			slots <- w
			return false
		}
		w.after = back
		if more {
			s.push(l) // another lane may help
		}
		if !e.rate.wait(w.Piece.Bytes, l.guard.stop, s.c.gone) {
			w.Done(ErrFenced)
			return false
		}
		e.cfg.Pauses.Wait(PauseWriteFrame, l.guard.stop)
		s.c.busy.enter()
		w.busy = &s.c.busy
		link.Post(lane, w)
	}
}

func (s *laneSet) waiting() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.ready) > 0
}

// down notes that a lane failed; it reports whether that is news, and how many are left.
func (s *laneSet) down(lane int) (news bool, left int) {
	if s.downs[lane].Swap(true) {
		return false, int(s.up.Load())
	}
	left = int(s.up.Add(-1))
	s.cond.Broadcast()
	return true, left
}
