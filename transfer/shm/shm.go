// Package shm is the transport of a daemon with itself: a lane copies a piece from one engine's region to another's. The
// engine's lane goroutines are the copy workers, so a channel has as many as it has lanes. The package knows nothing of
// sockets or leases beyond the guards it is given.
package shm

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"sync"

	"github.com/headrace/headrace/transfer"
)

// step is how many bytes are copied under one hold of the guards: what a fence may have to wait for, about 50 us.
const step = 256 << 10

type transport struct {
	mu      sync.Mutex
	waiting map[[16]byte]*meeting
}

// meeting is where the two ends of a channel find each other.
type meeting struct {
	dialled, accepted *link
	both              chan struct{}
}

// New makes the transport. It has nothing to configure.
func New() transfer.Transport { return &transport{waiting: make(map[[16]byte]*meeting)} }

func (*transport) Name() string { return "shm" }
func (*transport) Local() bool  { return true }
func (*transport) Probe() error { return nil }
func (*transport) Close() error { return nil }

func (t *transport) Dial(ctx context.Context, s *transfer.Setup) (transfer.Link, error) {
	return t.meet(ctx, s, true)
}

func (t *transport) Accept(ctx context.Context, s *transfer.Setup) (transfer.Link, error) {
	return t.meet(ctx, s, false)
}

func (t *transport) meet(ctx context.Context, s *transfer.Setup, dialled bool) (transfer.Link, error) {
	l := &link{setup: s, landings: make([]transfer.Landing, s.Lanes), closed: make(chan struct{})}
	t.mu.Lock()
	m := t.waiting[s.Channel]
	if m == nil {
		m = &meeting{both: make(chan struct{})}
		t.waiting[s.Channel] = m
	}
	mine, other := &m.accepted, &m.dialled
	if dialled {
		mine, other = other, mine
	}
	*mine = l
	if *other != nil {
		l.peer, (*other).peer = *other, l
		delete(t.waiting, s.Channel)
		close(m.both)
	}
	t.mu.Unlock()
	select {
	case <-m.both:
		return l, nil
	case <-ctx.Done():
		t.mu.Lock()
		if t.waiting[s.Channel] == m {
			delete(t.waiting, s.Channel)
		}
		t.mu.Unlock()
		return nil, fmt.Errorf("wait for the other end of a local channel: %w", ctx.Err())
	}
}

type link struct {
	setup    *transfer.Setup
	peer     *link
	landings []transfer.Landing // one a lane: a lane has one piece at a time

	once   sync.Once
	closed chan struct{}
}

var errClosed = errors.New("local channel is closed")

func (*link) Depth() int     { return 1 }
func (*link) OneSided() bool { return false }

// Abort has nothing to do: a piece is under way only inside Post, and under the guards.
func (l *link) Abort(lane int, cause error) { l.setup.LaneDown(lane, cause) }

func (l *link) Close() error {
	l.once.Do(func() { close(l.closed) })
	return nil
}

func (l *link) gone() bool {
	select {
	case <-l.closed:
		return true
	case <-l.peer.closed:
		return true
	default:
		return false
	}
}

// Start is Post, which waits for nobody.
func (l *link) Start(lane int, w *transfer.Write) bool {
	l.Post(lane, w)
	return true
}

// Post copies one piece in the calling goroutine.
func (l *link) Post(lane int, w *transfer.Write) {
	if l.gone() {
		l.setup.LaneDown(lane, errClosed)
		w.Done(errClosed)
		return
	}
	x := &l.landings[lane]
	if err := l.peer.setup.Target.Begin(lane, w.Piece, x); err != nil {
		l.setup.LaneDown(lane, err)
		w.Done(err)
		return
	}
	if x.Discard() {
		x.End(false)
		w.Done(nil)
		return
	}
	l.setup.Pauses.Wait(transfer.PauseCopyPiece, either(w.Stop(), x.Stop()))
	sum, err := w.Sum(nil)
	if err == nil {
		err = copyPiece(w, x)
	}
	x.End(err == nil && x.Verify(sum))
	w.Done(err)
}

// copyPiece walks the source's and the destination's runs, which are cut differently where blocks touch on one side only.
func copyPiece(w *transfer.Write, x *transfer.Landing) error {
	var src, dst cursor
	src.runs, dst.runs = w.Runs, x.Runs
	for left := uint64(w.Piece.Bytes); left > 0; {
		n := min(left, step)
		if err := copyStep(w, x, &src, &dst, n); err != nil {
			return err
		}
		left -= n
	}
	return nil
}

// copyStep copies n bytes under both guards. A fault in the lent memory (see transfer.Region) ends this piece, not the
// daemon.
func copyStep(w *transfer.Write, x *transfer.Landing, src, dst *cursor, n uint64) (err error) {
	if !w.Enter() {
		return transfer.ErrFenced
	}
	defer w.Leave()
	if !x.Enter() {
		return transfer.ErrFenced
	}
	defer x.Leave()
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if fault := recover(); fault != nil {
			err = fmt.Errorf("copy piece: %w: %v", transfer.ErrMemory, fault)
		}
	}()
	from, to := w.Src.Bytes(), x.Dst.Bytes()
	for n > 0 {
		s, sn := src.at(func(r *transfer.Run) uint64 { return r.Src })
		d, dn := dst.at(func(r *transfer.Run) uint64 { return r.Dst })
		m := min(n, sn, dn)
		copy(to[d:d+m], from[s:s+m])
		src.advance(m)
		dst.advance(m)
		n -= m
	}
	return nil
}

// cursor is a place in a run list.
type cursor struct {
	runs []transfer.Run
	off  uint64 // in runs[0]
}

func (c *cursor) at(start func(*transfer.Run) uint64) (pos, left uint64) {
	r := &c.runs[0]
	return start(r) + c.off, r.Len - c.off
}

func (c *cursor) advance(n uint64) {
	if c.off += n; c.off == c.runs[0].Len {
		c.runs, c.off = c.runs[1:], 0
	}
}

// either gives a channel that ends a pause when either lease is fenced. It is only needed where a pause is armed, and
// both are of one ticket: whichever is fenced first takes the other along, so the source's will do.
func either(source, _ <-chan struct{}) <-chan struct{} { return source }
