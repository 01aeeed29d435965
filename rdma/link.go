package rdma

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"github.com/headrace/headrace/transfer"
)

// link is one end of a channel's lanes.
type link struct {
	t     *transport
	setup *transfer.Setup
	wg    sync.WaitGroup // the lanes' goroutines

	mu     sync.RWMutex
	lanes  map[int]*lane
	closed bool
}

var (
	_ transfer.Link     = (*link)(nil)
	_ transfer.Extender = (*link)(nil)
)

// setupTimeout bounds the set-up of a lane where the caller does not.
const setupTimeout = 3 * time.Second

// join makes all lanes of a channel at once, of the streams that next gives.
func (t *transport) join(ctx context.Context, s *transfer.Setup, next func(i int) (int, net.Conn, error)) (transfer.Link, error) {
	rails, err := t.open()
	if err != nil {
		return nil, err
	}
	l := &link{t: t, setup: s, lanes: make(map[int]*lane)}
	deadline, bounded := ctx.Deadline()
	if !bounded {
		deadline = time.Now().Add(setupTimeout)
	}
	var errs []error
	var wg sync.WaitGroup
	fail := func(err error) {
		l.mu.Lock()
		errs = append(errs, err)
		l.mu.Unlock()
	}
	taken := make(map[int]bool)
	for n := range s.Lanes {
		i, conn, err := next(n)
		if err == nil && (i < 0 || i >= s.Lanes || taken[i]) {
			conn.Close()
			err = fmt.Errorf("lane %d was not expected", i)
		}
		if err != nil {
			fail(err)
			break
		}
		taken[i] = true
		wg.Go(func() {
			x, err := newLane(l, i, conn, rails, deadline)
			if err != nil {
				fail(err)
				return
			}
			l.mu.Lock()
			l.lanes[i] = x
			l.mu.Unlock()
		})
	}
	wg.Wait()
	if len(errs) > 0 {
		for _, x := range l.lanes {
			errs = append(errs, x.free())
		}
		return nil, errors.Join(errs...)
	}
	for _, x := range l.lanes {
		l.start(x)
	}
	return l, nil
}

func (l *link) start(x *lane) {
	l.wg.Go(x.run)
	l.wg.Go(x.watch)
}

// Extend implements transfer.Extender.
func (l *link) Extend(index int, conn net.Conn) error {
	rails, err := l.t.open()
	if err != nil {
		conn.Close()
		return err
	}
	x, err := newLane(l, index, conn, rails, time.Now().Add(setupTimeout))
	if err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed || l.lanes[index] != nil {
		return errors.Join(fmt.Errorf("lane %d: %w", index, net.ErrClosed), x.free())
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
	x := l.lane(index)
	if x == nil {
		w.Done(net.ErrClosed) // it failed, and was replaced
		return
	}
	err := x.send(w)
	if err == nil {
		return
	}
	if errors.Is(err, errDown) {
		<-x.done // the engine knows by then, and gives the piece to another lane
	}
	w.Done(err)
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
	l.mu.Lock()
	l.closed = true
	lanes := l.lanes
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
