package transporttest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/headrace/headrace/transfer"
)

// Fault is what happens to one piece on its way.
type Fault uint8

// The faults. Drop, Truncate and Corrupt take the lane down.
const (
	None      Fault = iota
	Drop            // the lane fails in the middle of the piece
	Delay           // the piece is late
	Duplicate       // the piece arrives twice
	Reorder         // the piece arrives after the next one of its lane
	Truncate        // the piece ends early
	Corrupt         // the piece's header names something else
	Flip            // a byte changes on its way
	Stall           // the piece stays half written until its lane is aborted or its lease is fenced
)

// Faults says what happens to a piece, by the order of posting on the link: n counts from 0.
type Faults func(lane, n int, p transfer.Piece) Fault

// Fake is a transport in memory with lanes like a network card's: pieces are posted, move on their own and complete later,
// several at a time. Guarded, it asks the landing's guard before each step, as TCP does. OneSided, it writes into the
// destination without asking, as RDMA does, and can be stopped by the writer's agreement or by Abort only.
type Fake struct {
	OneSided bool
	Grants   bool // of a one-sided one: the right to write can be taken back from one lease alone
	Depth    int  // pieces under way on a lane; 0 means 4
	Faults   Faults
	Late     time.Duration // of Delay; 0 means 2 ms
	Stalled  func()        // called when a piece lies half written and waits; may be nil

	mu      sync.Mutex
	waiting map[[16]byte]*fakeMeeting
}

type fakeMeeting struct {
	ends [2]*fakeLink
	both chan struct{}
}

var (
	_ transfer.Transport = (*Fake)(nil)
	_ transfer.Registrar = (*Fake)(nil)
)

// Register implements transfer.Registrar.
func (f *Fake) Register(r *transfer.Region) ([]byte, error) { return fakeKey(r), nil }

// Unregister implements transfer.Registrar.
func (f *Fake) Unregister(*transfer.Region) error { return nil }

func fakeKey(r *transfer.Region) []byte { return fmt.Appendf(nil, "fake region %d", r.ID()) }

// Name implements transfer.Transport.
func (*Fake) Name() string { return "fake" }

// Local implements transfer.Transport.
func (*Fake) Local() bool { return false }

// Probe implements transfer.Transport.
func (*Fake) Probe() error { return nil }

// Close implements transfer.Transport.
func (*Fake) Close() error { return nil }

// Dial implements transfer.Transport.
func (f *Fake) Dial(ctx context.Context, s *transfer.Setup) (transfer.Link, error) {
	return f.meet(ctx, s, 0)
}

// Accept implements transfer.Transport.
func (f *Fake) Accept(ctx context.Context, s *transfer.Setup) (transfer.Link, error) {
	return f.meet(ctx, s, 1)
}

// meet joins the two ends, and uses Exchange as a network card's transport would.
func (f *Fake) meet(ctx context.Context, s *transfer.Setup, end int) (transfer.Link, error) {
	hello, err := s.Exchange(ctx, []byte(fmt.Sprintf("fake %d", end)))
	if err != nil {
		return nil, err
	}
	if want := fmt.Sprintf("fake %d", 1-end); string(hello) != want {
		return nil, fmt.Errorf("exchange brought %q, want %q", hello, want)
	}
	depth := f.Depth
	if depth == 0 {
		depth = 4
	}
	l := &fakeLink{f: f, setup: s, depth: depth, lanes: make(map[int]*fakeLane)}
	for i := range s.Lanes {
		l.add(i)
	}
	f.mu.Lock()
	if f.waiting == nil {
		f.waiting = make(map[[16]byte]*fakeMeeting)
	}
	m := f.waiting[s.Channel]
	if m == nil {
		m = &fakeMeeting{both: make(chan struct{})}
		f.waiting[s.Channel] = m
	}
	m.ends[end] = l
	if other := m.ends[1-end]; other != nil {
		l.peer, other.peer = other, l
		delete(f.waiting, s.Channel)
		close(m.both)
	}
	f.mu.Unlock()
	select {
	case <-m.both:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	for i := range s.Lanes {
		go l.lane(i).run()
	}
	if f.Grants {
		return grantingLink{l}, nil
	}
	return l, nil
}

type fakeLink struct {
	f     *Fake
	setup *transfer.Setup
	peer  *fakeLink
	depth int

	mu     sync.Mutex
	lanes  map[int]*fakeLane
	posted int
	grants map[transfer.LeaseID]*fakeGrant
}

// add makes a lane, whose run is still to be started.
func (l *fakeLink) add(i int) *fakeLane {
	x := &fakeLane{link: l, index: i, queue: make(chan *transfer.Write, l.depth), dead: make(chan struct{}), done: make(chan struct{})}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lanes[i] = x
	return x
}

// lane is nil where there is none, or not yet.
func (l *fakeLink) lane(i int) *fakeLane {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.lanes[i]
}

func (l *fakeLink) Depth() int     { return l.depth }
func (l *fakeLink) OneSided() bool { return l.f.OneSided }

var errFakeDead = errors.New("fake lane is in the error state")

func (l *fakeLink) Post(lane int, w *transfer.Write) {
	if l.f.OneSided && !w.Enter() { // held from posting to completion
		w.Done(transfer.ErrFenced)
		return
	}
	x := l.lane(lane)
	x.mu.Lock()
	down := x.down
	if !down {
		x.queue <- w // never blocks: at most depth are under way
	}
	x.mu.Unlock()
	if down {
		x.complete(w, errFakeDead)
	}
}

// Abort puts both ends of the lane into the error state, as a queue pair's error does, and waits until nothing moves.
func (l *fakeLink) Abort(lane int, cause error) {
	for _, x := range []*fakeLane{l.lane(lane), l.peer.lane(lane)} {
		if x != nil {
			x.fail(cause)
			<-x.done
		}
	}
}

func (l *fakeLink) Close() error {
	l.mu.Lock()
	lanes := slices.Collect(maps.Keys(l.lanes))
	l.mu.Unlock()
	for _, i := range lanes {
		l.Abort(i, errFakeDead)
	}
	return nil
}

// fakeLane moves pieces one way; the other way is the peer's lane of the same index.
type fakeLane struct {
	link  *fakeLink
	index int
	queue chan *transfer.Write
	mu    sync.Mutex
	down  bool
	dead  chan struct{} // closed in the error state
	done  chan struct{} // nothing moves any more
	late  *transfer.Write
}

// fail enters the error state. LaneDown is told by a goroutine of its own, as a completion queue's owner would.
func (x *fakeLane) fail(cause error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if !x.down {
		x.down = true
		close(x.dead)
		go x.link.setup.LaneDown(x.index, cause)
	}
}

// failBoth is what an error on the wire does.
func (x *fakeLane) failBoth(cause error) {
	x.fail(cause)
	if other := x.link.peer.lane(x.index); other != nil {
		other.fail(cause)
	}
}

func (x *fakeLane) run() {
	for {
		select {
		case <-x.dead:
			x.flush()
			return
		case w := <-x.queue:
			x.one(w)
		}
	}
}

// flush completes everything that was posted, in error.
func (x *fakeLane) flush() {
	if x.late != nil {
		x.complete(x.late, errFakeDead)
		x.late = nil
	}
	for {
		select {
		case w := <-x.queue:
			x.complete(w, errFakeDead)
		default:
			close(x.done)
			return
		}
	}
}

func (x *fakeLane) complete(w *transfer.Write, err error) {
	if x.link.f.OneSided {
		w.Leave()
	}
	w.Done(err)
}

func (x *fakeLane) fault(p transfer.Piece) Fault {
	f := x.link.f.Faults
	if f == nil {
		return None
	}
	x.link.mu.Lock()
	n := x.link.posted
	x.link.posted++
	x.link.mu.Unlock()
	return f(x.index, n, p)
}

func (x *fakeLane) one(w *transfer.Write) {
	fault := x.fault(w.Piece)
	if fault == Reorder && x.late == nil {
		x.late = w
		// Nothing may follow for a while: then it goes alone.
		select {
		case next := <-x.queue:
			x.one(next)
		case <-time.After(2 * time.Millisecond):
		case <-x.dead:
			return
		}
		if w = x.late; w == nil {
			return
		}
		x.late, fault = nil, None
	}
	if fault == Delay {
		late := x.link.f.Late
		if late == 0 {
			late = 2 * time.Millisecond
		}
		select {
		case <-time.After(late):
		case <-x.dead:
		}
	}
	err := x.move(w, fault)
	if fault == Duplicate && err == nil {
		err = x.move(w, None)
	}
	x.complete(w, err)
}

// move brings one piece to the other end, in small steps.
func (x *fakeLane) move(w *transfer.Write, fault Fault) error {
	p := w.Piece
	if fault == Corrupt {
		p.First += 1 << 20
	}
	var landing transfer.Landing
	if err := x.link.peer.setup.Target.Begin(x.index, p, &landing); err != nil {
		x.failBoth(err)
		return err
	}
	if landing.Discard() {
		landing.End(false)
		return nil
	}
	key := fakeKey(landing.Dst)
	grant := x.link.peer.grantOf(p.Lease)
	if grant != nil {
		key = grant.key(landing.Dst)
	}
	if !bytes.Equal(w.Key, key) {
		err := fmt.Errorf("piece for region %d came with the key %q", landing.Dst.ID(), w.Key)
		landing.End(false)
		x.failBoth(err)
		return err
	}
	x.pause(w, &landing)
	sum, err := w.Sum(nil)
	if err == nil {
		err = x.copy(w, &landing, grant, fault)
	}
	landing.End(err == nil && landing.Verify(sum))
	if err != nil && !errors.Is(err, transfer.ErrFenced) {
		x.failBoth(err)
	}
	return err
}

// pause passes the receiving end's pause point; the end of either lease or of the lane ends a pause.
func (x *fakeLane) pause(w *transfer.Write, landing *transfer.Landing) {
	stop, through := make(chan struct{}), make(chan struct{})
	defer close(through)
	source, target := w.Stop(), landing.Stop()
	go func() {
		select {
		case <-source:
		case <-target:
		case <-x.dead:
		case <-through:
		}
		close(stop)
	}()
	x.link.peer.setup.Pauses.Wait(transfer.PauseReadFrame, stop)
}

const fakeStep = 8 << 10

func (x *fakeLane) copy(w *transfer.Write, landing *transfer.Landing, grant *fakeGrant, fault Fault) error {
	moved, half := uint64(0), uint64(w.Piece.Bytes)/2
	runs := landing.Runs
	var at uint64 // in runs[0]
	for _, r := range w.Runs {
		for off := uint64(0); off < r.Len; {
			if moved >= half {
				switch fault {
				case Drop, Truncate:
					return fmt.Errorf("fake fault %d in the middle of a piece", fault)
				case Stall:
					if err := x.stall(w, landing); err != nil {
						return err
					}
				}
			}
			n := min(fakeStep, r.Len-off, runs[0].Len-at)
			if err := x.step(w, landing, grant, r.Src+off, runs[0].Dst+at, n); err != nil {
				return err
			}
			if fault == Flip && moved == 0 {
				x.flip(&landing.Dst.Bytes()[runs[0].Dst+at], landing)
			}
			off += n
			moved += n
			if at += n; at == runs[0].Len {
				runs, at = runs[1:], 0
			}
		}
	}
	return nil
}

// step copies a little, with the guards that this kind of transport has.
func (x *fakeLane) step(w *transfer.Write, landing *transfer.Landing, grant *fakeGrant, src, dst, n uint64) error {
	select {
	case <-x.dead:
		return errFakeDead
	default:
	}
	if !x.link.f.OneSided {
		if !w.Enter() {
			return transfer.ErrFenced
		}
		defer w.Leave()
		if !landing.Enter() {
			return transfer.ErrFenced
		}
		defer landing.Leave()
	}
	move := func() { copy(landing.Dst.Bytes()[dst:dst+n], w.Src.Bytes()[src:src+n]) }
	if grant != nil {
		return grant.allow(landing, dst, n, move)
	}
	move()
	return nil
}

// flip alters a byte that has arrived.
func (x *fakeLane) flip(b *byte, landing *transfer.Landing) {
	if x.link.f.OneSided || landing.Enter() {
		*b ^= 0x40
		if !x.link.f.OneSided {
			landing.Leave()
		}
	}
}

// stall waits for what ends a stalled piece.
func (x *fakeLane) stall(w *transfer.Write, landing *transfer.Landing) error {
	if x.link.f.Stalled != nil {
		x.link.f.Stalled()
	}
	if x.link.f.OneSided {
		<-x.dead
		return errFakeDead
	}
	select {
	case <-x.dead:
		return errFakeDead
	case <-w.Stop():
	case <-landing.Stop():
	}
	return transfer.ErrFenced
}
