package rdma

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"syscall"
	"time"

	"github.com/headrace/headrace/cgo"
	"github.com/headrace/headrace/transfer"
)

const pollBatch = 64

// run owns the lane's completion queue until the lane is drained, and then ends the lane.
func (x *lane) run() {
	wcs := make([]cgo.WC, pollBatch)
	for !x.isDrained() {
		n, err := x.poll(wcs)
		if err != nil {
			x.fail(err)
			break // the queue pair's destruction flushes as well
		}
		for i := range wcs[:n] {
			if err := x.handle(&wcs[i]); err != nil {
				x.fail(err)
			}
		}
		if err := errors.Join(x.repost(), x.fetch(), x.giveBackSlots(), x.endWorks()); err != nil {
			x.fail(err)
		}
		x.reap()
		if err := x.last(); err != nil {
			x.fail(err)
			break
		}
	}
	x.bury()
}

// poll gives completions: those that are there, or else the next ones.
func (x *lane) poll(wcs []cgo.WC) (int, error) {
	var until time.Time
	for {
		n, err := x.cq.Poll(wcs)
		if n > 0 || err != nil {
			return n, err
		}
		spin := x.link.t.cfg.Spin
		if spin <= 0 {
			break
		}
		if until.IsZero() {
			until = time.Now().Add(spin)
		} else if time.Now().After(until) {
			break
		}
		runtime.Gosched()
	}
	// What completes between the last poll and arming makes no event: poll once more before parking.
	if err := x.cq.Arm(); err != nil {
		return 0, err
	}
	if n, err := x.cq.Poll(wcs); n > 0 || err != nil {
		return n, err
	}
	return 0, x.park()
}

// park waits for an event of the completion channel, or for fail.
func (x *lane) park() error {
	err := x.raw.Read(func(uintptr) bool {
		return x.events.Event() == 0 // arming makes at most one
	})
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return x.parked.SetReadDeadline(time.Time{}) // fail wakes once: all else makes events
	}
	return err
}

// isDrained says that the lane is failing and that everything posted to either queue was flushed.
func (x *lane) isDrained() bool { return x.flushed && x.receives == 0 }

// handle takes one completion. An error fails the lane.
func (x *lane) handle(wc *cgo.WC) error {
	switch {
	case wc.ID == idLastSend:
		x.flushed = true
		return nil
	case wc.ID >= idRecv:
		x.receives--
		if wc.Status != cgo.Success {
			return fmt.Errorf("receive on QP %d: %w", wc.QPN, wc.Status)
		}
		return x.receive(wc)
	}
	if wc.Status == cgo.Success { // else nothing that was flushed may pass for done before the lane is failing
		x.mu.Lock()
		x.completed = max(x.completed, wc.ID)
		x.moved = time.Now()
		x.mu.Unlock()
	}
	select {
	case x.room <- struct{}{}:
	default:
	}
	if wc.Status == cgo.BindFailed {
		x.rail.windows.condemn(fmt.Errorf("a bind on QP %d failed: %w (vendor %#x)", wc.QPN, wc.Status, wc.Vendor))
	}
	if wc.Status != cgo.Success {
		return fmt.Errorf("send on QP %d of %s: %w (vendor %#x)", wc.QPN, x.rail.name, wc.Status, wc.Vendor)
	}
	return nil
}

// receive takes one immediate. It speaks for this queue pair alone.
func (x *lane) receive(wc *cgo.WC) error {
	if wc.HasImm == 0 || wc.Op != cgo.WCRecvWrite {
		return fmt.Errorf("%w: a message without an immediate", transfer.ErrProtocol)
	}
	number := wc.Imm & 0xffff
	switch wc.Imm &^ 0xffff {
	case immSlots:
		for range number {
			select {
			case x.credits <- struct{}{}:
			default:
				return fmt.Errorf("%w: more slots came back than there are", transfer.ErrProtocol)
			}
		}
	case immDone:
		if err := x.read(number); err != nil {
			return err
		}
	case immPiece, immRuns:
		if uint64(number) != x.arrived%slotCount {
			return fmt.Errorf("%w: piece %d was announced in slot %d", transfer.ErrProtocol, x.arrived, number)
		}
		x.arrived++
		x.consumed++
		last := wc.Imm&^0xffff == immPiece
		var err error
		switch {
		case x.peer.pulls:
			err = x.offered(number, last)
		case last:
			err = x.land(x.slots[number*slotSize:][:announceSize])
		default:
			err = fmt.Errorf("%w: runs of a piece from an end that writes", transfer.ErrProtocol)
		}
		if err != nil {
			return err
		}
	default:
		return fmt.Errorf("%w: immediate %#x", transfer.ErrProtocol, wc.Imm)
	}
	x.used++
	return nil
}

// repost replaces the receives that were used. A failing lane gets none: what is posted in the error state is flushed by
// some devices when the next packet comes, which is never.
func (x *lane) repost() error {
	if x.used == 0 {
		return nil
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.failing {
		return nil
	}
	n, errno := x.qp.PostRecv(blankReceives[:x.used])
	x.receives += n
	if x.used -= n; x.used > 0 {
		return fmt.Errorf("post %d receives: %w", x.used, errno)
	}
	return nil
}

// blankReceives are receives without memory: immediates need none.
var blankReceives = slices.Repeat([]cgo.Recv{{ID: idRecv}}, recvQueue)

// land counts a piece whose bytes are in place already.
func (x *lane) land(slot []byte) error {
	var header [transfer.DataHeaderSize]byte
	var trailer [transfer.DataTrailerSize]byte
	copy(header[:], slot)
	copy(trailer[:], slot[len(header):])
	p, err := transfer.ParseHeader(&header)
	if err != nil {
		return err
	}
	whole, sum, err := transfer.ParseTrailer(&trailer)
	if err != nil {
		return err
	}
	if err := x.link.setup.Target.Begin(x.index, p, &x.landing); err != nil {
		return err
	}
	x.landing.End(whole && x.landing.Verify(sum))
	return nil
}

// last posts the last request to the send queue of a failing lane: what was posted before has been flushed when it is.
func (x *lane) last() error {
	x.mu.Lock()
	defer x.mu.Unlock()
	if !x.failing || x.lastSend {
		return nil
	}
	n, errno := x.qp.PostSend([]cgo.WR{{ID: idLastSend, Op: cgo.Send, Flags: cgo.Signaled}})
	if x.lastSend = n == 1; x.lastSend || errno == syscall.ENOMEM || errno == syscall.EAGAIN {
		return nil // a full queue has room when something was flushed
	}
	return fmt.Errorf("post the last send to QP %d: %w", x.qp.Num, errno)
}

// bury ends a lane that is drained: the other end first, which may hold packets of this one's, then the pieces.
func (x *lane) bury() {
	x.mu.Lock()
	var err error
	undrained := !x.isDrained()
	x.mu.Unlock()
	if undrained { // it could not be: without a queue pair there is nothing under way either
		err = x.dropWindows()
		x.mu.Lock()
		err = errors.Join(err, x.qp.Close())
		x.mu.Unlock()
	}
	close(x.drained)
	x.dropFetches()
	err = errors.Join(err, x.dropWindows())
	x.leaveEarly()
	x.conn.SetWriteDeadline(time.Now().Add(peerPatience))
	if _, werr := x.conn.Write([]byte{byteDrained}); werr == nil {
		t := time.NewTimer(peerPatience)
		select {
		case <-x.peerDone:
		case <-t.C:
			err = errors.Join(err, fmt.Errorf("the other end of lane %d did not answer within %v", x.index, peerPatience))
		}
		t.Stop()
	}
	x.mu.Lock()
	pieces, cause, quiet := x.pieces, errors.Join(x.cause, err), x.quiet
	x.pieces, x.buried = nil, true
	x.mu.Unlock()
	if err := x.free(); err != nil {
		cause = errors.Join(cause, err)
	}
	if !quiet {
		x.link.setup.LaneDown(x.index, cause)
	}
	for _, p := range pieces {
		if !p.left {
			p.w.Leave()
		}
		if p.err == nil {
			p.err = fmt.Errorf("%w: %w", errDown, cause)
		}
		p.w.Done(p.err)
	}
	close(x.done)
}

// leaveEarly lets go of the sources of a drained lane's pieces: nothing reads them any more. What is still on its way to the
// other end is refused there when the lease ends, where the lease has a window; and where the other end reads, this one serves it no more. Else the guard is what the
// other end relies on, and is held until that end is drained too.
func (x *lane) leaveEarly() {
	x.mu.Lock()
	defer x.mu.Unlock()
	for i := range x.pieces {
		if p := &x.pieces[i]; isWindowsKey(p.w.Key) || p.end == endless {
			p.w.Leave()
			p.left = true
		}
	}
}
