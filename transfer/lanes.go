package transfer

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// laneSet hands pieces of leases to a channel's lanes: in turns, a few pieces at a time, and a lane carries one lease at a
// time. Its mutex is a leaf: nothing is locked under it.
type laneSet struct {
	c       *channel
	n       int // lanes of the first choice there should be, where that does not say by itself
	downs   idSet
	up      atomic.Int32 // lanes of the channel's own link
	spareUp atomic.Int32 // of the spare one
	wg      sync.WaitGroup
	gate    sync.RWMutex // held for reading while a lane is added; taken before mu

	mu        sync.Mutex
	cond      sync.Cond
	own       Link // nil until start
	spare     Link // nil where there is none
	ready     turns
	spareOnly turns                // leases whose regions only the spare link can reach
	idle      []*feeder            // lanes that wait for work, the one that waits least long last
	carries   map[int]*sourceLease // by lane
	at        map[int]laneAt       // lanes that are up
	feeders   map[int]*feeder      // those of them that are fed
	rails     map[string]*railMeter
	next      int   // number of the next lane
	unused    []int // numbers that were reserved, of which the other end never heard
	watchers  int   // who waits for lanes to be through with a lease
	declined  bool  // a lane left a piece to another
	closed    bool
	barred    bool // a fence by force killed all one-sided lanes: none may take their place
}

// laneAt is where a lane belongs.
type laneAt struct {
	link  Link
	spare bool
	rail  string
}

// A lane takes this many pieces of one lease before it looks for another that waits.
const laneQuantum = 4

func newLaneSet(c *channel) *laneSet {
	s := &laneSet{
		c: c, ready: newTurns(), spareOnly: newTurns(), carries: make(map[int]*sourceLease), at: make(map[int]laneAt),
		feeders: make(map[int]*feeder), rails: make(map[string]*railMeter),
	}
	s.cond.L = &s.mu
	return s
}

func (s *laneSet) dead(lane int) bool { return lane < 0 || lane >= laneIDsMax || s.downs.has(lane) }

// isSpare says whether a lane is of the spare link.
func (s *laneSet) isSpare(lane int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.at[lane].spare
}

// turnsOf is the queue that a lease waits in.
func (s *laneSet) turnsOf(l *sourceLease) *turns {
	if l.spareOnly {
		return &s.spareOnly
	}
	return &s.ready
}

// workFor is the queue that a lane may take from now, nil if there is none. Lanes of the spare link take what is only
// theirs, and the rest while the channel's own link has no lane. s.mu is held.
func (s *laneSet) workFor(f *feeder) *turns {
	switch {
	case f.spare && !s.spareOnly.empty():
		return &s.spareOnly
	case s.ready.empty() || f.spare && (s.up.Load() > 0 || s.ready.front().hostless):
		return nil
	case !s.worth(f, s.ready.front()):
		s.declined = true
		return nil
	}
	return &s.ready
}

// carriesFor says whether a lane is one for this lease.
func (s *laneSet) carriesFor(f *feeder, l *sourceLease) bool {
	return f.spare == l.spareOnly || f.spare && s.up.Load() == 0 && !l.hostless
}

// push puts a lease into the ring, unless it is there.
func (s *laneSet) push(l *sourceLease) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed && s.turnsOf(l).push(l) {
		s.cond.Broadcast()
	}
}

// feeder is what feeds one lane: its goroutine, or for one piece a goroutine that has claimed it while it waits.
type feeder struct {
	link  Link
	lane  int
	spare bool
	rail  *railMeter
	near  func(*Region) float64 // nil: it is near to everything
	slots chan *Write           // those that are not posted
	// Guarded by laneSet.mu:
	meter   laneMeter
	claimed bool
	begun   *Write // a piece that was begun by who claimed the lane, and is to be ended by Post
}

// pop waits for a lease with work, or for a piece that another goroutine has begun.
func (s *laneSet) pop(f *feeder) (*sourceLease, *Write) {
	s.mu.Lock()
	defer s.mu.Unlock()
	work := s.workFor(f)
	if work == nil {
		s.idle = append(s.idle, f)
		for (work == nil || f.claimed) && f.begun == nil && !s.over(f) {
			s.cond.Wait()
			work = s.workFor(f)
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
	l := work.pop()
	s.carries[f.lane] = l
	if s.declined && !s.ready.empty() { // what is at the front now may be worth its while
		s.declined = false
		s.cond.Broadcast()
	}
	return l, nil
}

// over says that a lane has nothing to do any more. s.mu is held.
func (s *laneSet) over(f *feeder) bool { return !f.claimed && (s.closed || s.dead(f.lane)) }

// free says that a lane carries its lease no more.
func (s *laneSet) free(f *feeder) {
	s.mu.Lock()
	defer s.mu.Unlock()
	l := s.carries[f.lane]
	s.turnsOf(l).done(l)
	delete(s.carries, f.lane)
	if f.claimed = false; !s.ready.empty() || !s.spareOnly.empty() || s.over(f) || s.watchers > 0 {
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
	s.charge(f, l, w)
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
	if s.closed || !s.turnsOf(l).empty() {
		return nil
	}
	for i := len(s.idle) - 1; i >= 0; i-- {
		f := s.idle[i]
		if s.tooFar(f, l) {
			continue
		}
		if _, can := f.link.(Starter); can && !f.claimed && f.begun == nil && !s.dead(f.lane) && s.carriesFor(f, l) {
			f.claimed = true
			s.carries[f.lane] = l
			s.turnsOf(l).carry(l)
			return f
		}
	}
	return nil
}

// charge counts a piece that is about to be posted, and has its completion counted too.
func (s *laneSet) charge(f *feeder, l *sourceLease, w *Write) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.turnsOf(l).charge(l.client, w.Piece.Bytes)
	w.feeder, w.posted = f, time.Now()
	f.meter.post(w.posted, w.Piece.Bytes)
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

// start runs the lanes of a channel's own link.
func (s *laneSet) start(link, spare Link, n int) {
	lanes, total := make([]int, n), n
	for i := range lanes {
		lanes[i] = i
	}
	if r, is := link.(Railed); is {
		lanes, total = r.Lanes(), lanesMax
	}
	s.mu.Lock()
	s.n, s.next, s.own, s.spare = len(lanes), total, link, spare
	lanes = slices.DeleteFunc(lanes, s.dead) // already
	for _, i := range lanes {
		s.at[i] = laneAt{link: link, rail: railOf(link, s.c.transport, i)}
	}
	s.up.Store(int32(len(lanes)))
	s.mu.Unlock()
	for _, i := range lanes {
		s.serve(i)
	}
}

// railOf names the rail that a lane goes over.
func railOf(link Link, transport string, lane int) string {
	if r, is := link.(Railed); is {
		return r.Rail(lane)
	}
	return transport
}

func (s *laneSet) close() {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.cond.Broadcast()
}

// run feeds one lane until it is dead or the channel closes.
func (s *laneSet) run(f *feeder) {
	link, lane := f.link, f.lane
	depth := link.Depth()
	f.slots = make(chan *Write, depth)
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
		if i >= laneQuantum && s.waiting(l) || !s.carriesFor(f, l) {
			return true
		}
		w := <-f.slots
		if !s.worthNow(f, l) {
			f.slots <- w
			return true
		}
		ok, more := l.take(f.lane, w)
		if !ok {
			f.slots <- w
			return false
		}
		w.after = back
		s.charge(f, l, w)
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

func (s *laneSet) isBarred() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.barred
}

// waiting says whether another lease waits for a lane like this one's.
func (s *laneSet) waiting(l *sourceLease) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return !s.turnsOf(l).empty()
}

// down notes that a lane failed; it reports whether that is news, and how many of the channel's own link are left.
func (s *laneSet) down(lane int) (news bool, left int) {
	if !s.downs.add(lane) {
		return false, int(s.up.Load())
	}
	s.mu.Lock()
	at, was := s.at[lane]
	delete(s.at, lane)
	delete(s.feeders, lane)
	switch {
	case !was: // one of the first, which failed before it was used
	case at.spare:
		s.spareUp.Add(-1)
	default:
		s.up.Add(-1)
	}
	if was {
		s.meterOf(at).failed++
	}
	s.mu.Unlock()
	s.cond.Broadcast()
	return true, int(s.up.Load())
}
