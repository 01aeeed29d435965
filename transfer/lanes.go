package transfer

import (
	"slices"
	"sync"
	"sync/atomic"
)

// laneSet hands pieces of leases to a channel's lanes: in turns, a few pieces at a time, and a lane carries one lease at a
// time. Its mutex is a leaf: nothing is locked under it.
type laneSet struct {
	c     *channel
	n     int // lanes there should be
	downs [laneIDsMax]atomic.Bool
	up    atomic.Int32
	wg    sync.WaitGroup
	gate  sync.RWMutex // held for reading while a lane is added; taken before mu

	mu      sync.Mutex
	cond    sync.Cond
	ready   turns
	idle    []*feeder            // lanes that wait for work, the one that waits least long last
	carries map[int]*sourceLease // by lane
	next    int                  // number of the next lane
	closed  bool
	barred  bool // a fence by force killed all lanes: none may take their place
}

// A lane takes this many pieces of one lease before it looks for another that waits.
const laneQuantum = 4

func newLaneSet(c *channel) *laneSet {
	s := &laneSet{c: c, ready: newTurns(), carries: make(map[int]*sourceLease)}
	s.cond.L = &s.mu
	return s
}

func (s *laneSet) dead(lane int) bool { return lane < 0 || lane >= laneIDsMax || s.downs[lane].Load() }

// push puts a lease into the ring, unless it is there.
func (s *laneSet) push(l *sourceLease) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed && s.ready.push(l) {
		s.cond.Broadcast()
	}
}

// feeder is what feeds one lane: its goroutine, or for one piece a goroutine that has claimed it while it waits.
type feeder struct {
	link  Link
	lane  int
	slots chan *Write // those that are not posted
	// Guarded by laneSet.mu:
	claimed bool
	begun   *Write // a piece that was begun by who claimed the lane, and is to be ended by Post
}

// pop waits for a lease with work, or for a piece that another goroutine has begun.
func (s *laneSet) pop(f *feeder) (*sourceLease, *Write) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ready.empty() {
		s.idle = append(s.idle, f)
		for (s.ready.empty() || f.claimed) && f.begun == nil && !s.over(f) {
			s.cond.Wait()
		}
		s.idle = slices.DeleteFunc(s.idle, func(other *feeder) bool { return other == f })
	}
	if w := f.begun; w != nil {
		f.begun, f.claimed = nil, false
		return s.carries[f.lane], w
	}
	if s.over(f) {
		s.cond.Broadcast() // the wake-up may have been another lane's
		return nil, nil
	}
	l := s.ready.pop()
	s.carries[f.lane] = l
	return l, nil
}

// over says that a lane has nothing to do any more. s.mu is held.
func (s *laneSet) over(f *feeder) bool { return !f.claimed && (s.closed || s.dead(f.lane)) }

// free says that a lane carries its lease no more.
func (s *laneSet) free(f *feeder) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ready.done(s.carries[f.lane])
	delete(s.carries, f.lane)
	if f.claimed = false; !s.ready.empty() || s.over(f) {
		s.cond.Broadcast()
	}
}

// Starter is a link that can begin a piece without ever waiting. Start reports whether it is through with it, Done called; if
// not, Post is called with the same Write, and ends it.
type Starter interface {
	Start(lane int, w *Write) (through bool)
}

// pushNow is push for a small push by a goroutine that may as well send it: where a lane waits and nothing is ahead, that
// saves the time until another goroutine runs.
func (s *laneSet) pushNow(l *sourceLease) {
	f := s.claim(l)
	if f == nil {
		s.push(l)
		return
	}
	w := <-f.slots
	ok, more := l.take(f.lane, w)
	if !ok {
		f.slots <- w
		s.free(f)
		return
	}
	w.after = func(w *Write) { f.slots <- w }
	s.charge(l, w)
	s.c.busy.enter()
	w.busy = &s.c.busy
	if !f.link.(Starter).Start(f.lane, w) {
		s.mu.Lock()
		f.begun = w
		s.cond.Broadcast()
		s.mu.Unlock()
		return // what more there is goes on with the lane
	}
	s.free(f)
	if more {
		s.push(l)
	}
}

// claim takes a lane that waits from its goroutine: the last one to be used, whose other end is most likely awake.
func (s *laneSet) claim(l *sourceLease) *feeder {
	if s.c.e.rate.get() != 0 || s.c.e.cfg.Pauses.Armed() {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || !s.ready.empty() {
		return nil
	}
	for i := len(s.idle) - 1; i >= 0; i-- {
		f := s.idle[i]
		if _, can := f.link.(Starter); can && !f.claimed && f.begun == nil && !s.dead(f.lane) {
			f.claimed = true
			s.carries[f.lane] = l
			s.ready.carry(l)
			return f
		}
	}
	return nil
}

func (s *laneSet) charge(l *sourceLease, w *Write) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ready.charge(l.client, w.Piece.Bytes)
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
	f := &feeder{link: link, lane: lane, slots: make(chan *Write, depth)}
	for range depth {
		f.slots <- &Write{}
	}
	drained := make([]*Write, depth)
	back := func(w *Write) { f.slots <- w }
	for {
		l, begun := s.pop(f)
		if l == nil {
			return
		}
		if begun != nil {
			link.Post(lane, begun)
		}
		rest := s.feed(f, l, back)
		// The lane must be drained of this lease before it carries another.
		for i := range depth {
			drained[i] = <-f.slots
		}
		for i := range depth {
			f.slots <- drained[i]
		}
		s.free(f)
		if rest {
			s.push(l)
		}
	}
}

// feed posts up to laneQuantum pieces, or as many as there are while nobody else waits.
func (s *laneSet) feed(f *feeder, l *sourceLease, back func(*Write)) (rest bool) {
	e := s.c.e
	for i := 0; ; i++ {
		if s.dead(f.lane) {
			return true
		}
		if i >= laneQuantum && s.waiting() {
			return true
		}
		w := <-f.slots
		ok, more := l.take(f.lane, w)
		if !ok {
			f.slots <- w
			return false
		}
		w.after = back
		s.charge(l, w)
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
		f.link.Post(f.lane, w)
	}
}

func (s *laneSet) waiting() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return !s.ready.empty()
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
