package rdma

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/headrace/headrace/transfer"
)

// link is one end of a channel's lanes, over all rails that reach the other end.
type link struct {
	t       *transport
	setup   *transfer.Setup
	dialled bool
	local   []*rail        // this end's
	wg      sync.WaitGroup // the lanes' goroutines

	over chan struct{} // closed when the link is closing

	mu     sync.RWMutex
	lanes  map[int]*lane
	closed bool
	rails  railBook
	pulled atomic.Bool // the other end offers its pieces: its daemon has one way for all lanes
	// Lanes that are being set up, and what leases were granted on those there are.
	joining map[*lane]struct{}
	grants  map[*grant]struct{}
}

var (
	_ transfer.Link    = (*link)(nil)
	_ transfer.Railed  = (*link)(nil)
	_ transfer.Starter = (*link)(nil)
)

// setupTimeout bounds the set-up of a lane where the caller does not.
const setupTimeout = 3 * time.Second

// Dial sets up all lanes at once.
func (t *transport) Dial(ctx context.Context, s *transfer.Setup) (transfer.Link, error) {
	return t.join(ctx, s, true, func(i int) (int, net.Conn, error) {
		conn, err := s.DialStream(ctx, i)
		return i, conn, err
	})
}

// Accept waits for all lanes.
func (t *transport) Accept(ctx context.Context, s *transfer.Setup) (transfer.Link, error) {
	return t.join(ctx, s, false, func(int) (int, net.Conn, error) { return s.AcceptStream(ctx) })
}

// join makes a channel's first lanes, of the streams that next gives: some on each pair of rails that is up at both ends.
// Those that fail are left to be dialled again, if not all do.
func (t *transport) join(ctx context.Context, s *transfer.Setup, dialled bool, next func(i int) (int, net.Conn, error)) (transfer.Link, error) {
	rails, err := t.open()
	if err != nil {
		return nil, err
	}
	l := &link{t: t, setup: s, dialled: dialled, local: rails, over: make(chan struct{}), lanes: make(map[int]*lane), joining: make(map[*lane]struct{}), grants: make(map[*grant]struct{})}
	own := infos(rails)
	theirs, err := s.Exchange(ctx, encodeRails(own))
	if err != nil {
		return nil, fmt.Errorf("exchange rails: %w", err)
	}
	if err := l.rails.open(l, own, theirs); err != nil {
		return nil, err
	}
	plan := l.rails.plan()
	if len(plan) == 0 && !(s.Spared && l.rails.mayChange()) {
		return nil, l.rails.noneErr()
	}
	deadline, bounded := ctx.Deadline()
	if !bounded {
		deadline = time.Now().Add(setupTimeout)
	} else if s.Spared { // time for the spare transport, if no packet gets through
		deadline = deadline.Add(-time.Until(deadline) / 2)
	}
	if err := l.first(plan, deadline, next); err != nil {
		return nil, err
	}
	t.linkMu.Lock()
	t.links[l] = struct{}{}
	t.linkMu.Unlock()
	if now := infos(rails); !slices.Equal(now, own) { // meanwhile
		s.Tell(encodeRails(now))
		l.rails.setOwn(l, now)
	}
	for _, x := range l.lanes {
		l.start(x)
	}
	l.wg.Go(l.watchStalls)
	return l, nil
}

// first makes the lanes of a plan. It fails when a stream cannot be had, or when none of the lanes can be made and nothing
// else carries meanwhile.
func (l *link) first(plan []pair, deadline time.Time, next func(i int) (int, net.Conn, error)) error {
	var streams, failed []error
	var wg sync.WaitGroup
	taken := make(map[int]bool)
	for n := range plan {
		i, conn, err := next(n)
		if err == nil && (i < 0 || i >= len(plan) || taken[i]) {
			conn.Close()
			err = fmt.Errorf("lane %d was not expected", i)
		}
		if err != nil {
			streams = append(streams, err)
			break
		}
		taken[i] = true
		wg.Go(func() {
			var p *pair
			if l.dialled {
				p = &plan[i]
			}
			x, err := newLane(l, i, conn, p, deadline)
			l.mu.Lock()
			defer l.mu.Unlock()
			if err == nil {
				l.lanes[i] = x
				return
			}
			failed = append(failed, err)
			if p != nil {
				l.rails.blame(l, p, err)
			}
		})
	}
	wg.Wait()
	if len(streams) == 0 && (len(l.lanes) > 0 || l.setup.Spared) {
		return nil
	}
	errs := append(streams, failed...)
	for _, x := range l.lanes {
		errs = append(errs, x.free())
	}
	l.rails.stop()
	return errors.Join(errs...)
}

// start lets a lane live. If its rail changed while it was made it dies at once.
func (l *link) start(x *lane) {
	delete(l.joining, x)
	l.wg.Go(x.run)
	l.wg.Go(x.watch)
	if now := x.rail.now(); !now.same(&x.at) {
		x.fail(x.rail.changed(&x.at, &now))
	}
}

// Extend implements transfer.Extender: the dialling end chooses the rails.
func (l *link) Extend(index int, conn net.Conn) error {
	var p *pair
	if l.dialled {
		if p = l.choose(); p == nil {
			conn.Close()
			return errors.New("no rail wants a lane any more")
		}
	}
	x, err := newLane(l, index, conn, p, time.Now().Add(setupTimeout))
	l.mu.Lock()
	defer l.mu.Unlock()
	if err != nil {
		if p != nil {
			l.rails.blame(l, p, err)
		}
		return err
	}
	if l.closed || l.lanes[index] != nil {
		delete(l.joining, x)
		return errors.Join(fmt.Errorf("lane %d: %w", index, net.ErrClosed), x.free())
	}
	if p != nil {
		l.rails.praise(p)
	}
	for i, old := range l.lanes {
		select {
		case <-old.done:
			delete(l.lanes, i) // nothing is posted to it any more
		default:
		}
	}
	l.lanes[index] = x
	l.start(x)
	return nil
}

func (l *link) lane(index int) *lane {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.lanes[index]
}

func (*link) Depth() int     { return depth }
func (*link) OneSided() bool { return true }

// Post posts a piece's chains, and waits where the send queue or the other end's slots are full.
func (l *link) Post(index int, w *transfer.Write) {
	if w.Begun { // by Start
		return
	}
	x := l.lane(index)
	if x == nil {
		w.Done(net.ErrClosed) // it failed, and was replaced
		return
	}
	send := x.send
	if x.pulls() {
		send = x.offer
	}
	err := send(w)
	if err == nil {
		return
	}
	if errors.Is(err, errDown) {
		<-x.done // the engine knows by then, and gives the piece to another lane
	}
	w.Done(err)
}

// Start implements transfer.Starter: it posts a piece of one chain where there is room for it.
func (l *link) Start(index int, w *transfer.Write) (through bool) {
	if x := l.lane(index); x != nil {
		x.start(w)
	}
	return false // it is done with its completion: Post, which the lane's feeder calls, has nothing left to do then
}

// Abort moves a lane to the error state and returns when it is drained.
func (l *link) Abort(index int, cause error) {
	if x := l.lane(index); x != nil {
		x.fail(cause)
		<-x.drained
	}
}

// Close implements transfer.Link.
func (l *link) Close() error {
	l.t.linkMu.Lock()
	delete(l.t.links, l)
	l.t.linkMu.Unlock()
	l.mu.Lock()
	if !l.closed {
		close(l.over)
	}
	l.closed = true
	lanes := l.lanes
	l.rails.stop()
	l.mu.Unlock()
	for _, x := range lanes {
		x.hush()
	}
	l.wg.Wait()
	return nil
}

func readFull(conn net.Conn, b []byte) (int, error) { return io.ReadFull(conn, b) }

// randomPSN draws a lane's first packet sequence number, so that a packet of an earlier life of the same queue pair number
// fits nowhere.
func randomPSN() uint32 {
	var b [4]byte
	rand.Read(b[:]) // never fails
	return binary.LittleEndian.Uint32(b[:]) & 0xffffff
}
