package rdma

import (
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/headrace/headrace/cgo"
	"github.com/headrace/headrace/transfer"
)

// send posts a piece. An error means that nothing of it is under way, errDown that the lane is failing; else w.Done is
// called when nothing is under way any more.
func (x *lane) send(w *transfer.Write) error {
	c, err := x.cursor(w)
	if errors.Is(err, errNoWindow) {
		return x.awaitNews(w, err)
	}
	if err != nil {
		return err
	}
	sum, err := w.Sum(nil)
	if err != nil {
		return err
	}
	select {
	case <-x.credits:
	case <-w.Stop():
		return transfer.ErrFenced
	case <-x.down:
		return errDown
	}
	if !w.Enter() {
		x.credits <- struct{}{}
		return transfer.ErrFenced
	}
	begun, err := x.postPiece(w, &c, sum)
	if !begun {
		w.Leave()
		if err == nil {
			err = errDown
		}
		return err
	}
	return nil
}

// start is send for a piece of a single chain by somebody who must not wait. Unless it has begun the piece, nothing was done.
func (x *lane) start(w *transfer.Write) (begun bool) {
	if x.pulls() || len(w.Runs) >= chainMax {
		return false
	}
	c, err := x.cursor(w)
	if err != nil {
		return false // send finds it too
	}
	select {
	case <-x.credits:
	default:
		return false
	}
	sum, err := w.Sum(nil)
	x.mu.Lock()
	// Room only grows from here on: nobody else sends pieces on this lane meanwhile.
	fits := err == nil && !x.failing && x.space() > len(w.Runs)
	x.mu.Unlock()
	if !fits || !w.Enter() {
		x.credits <- struct{}{}
		return false
	}
	w.Begun = true // before: w may be done, and another piece's, as soon as it was posted
	if begun, _ = x.postPiece(w, &c, sum); !begun {
		w.Begun = false
		w.Leave()
	}
	return begun
}

// postPiece posts a piece chain by chain, as far as its lease and the lane live. begun says that something was posted:
// then the piece is pending, whatever came of it.
func (x *lane) postPiece(w *transfer.Write, c *cursor, sum uint64) (begun bool, err error) {
	x.mu.Lock()
	for told := false; err == nil && !told; {
		if x.failing {
			err = errDown
			break
		}
		k := min(x.space(), chainMax)
		if k <= 0 {
			x.mu.Unlock()
			err = x.awaitRoom(w)
			x.mu.Lock()
			continue
		}
		wrs := c.next(x.chain[:k])
		runs := len(wrs)
		if c.end() && runs < k { // one call for the last runs and the announcement: each rings the device's bell
			wrs = x.chain[:runs+1]
			wrs[runs] = x.announcement(w, sum)
		}
		var n int
		n, err = x.push(wrs)
		begun = begun || n > 0
		if told = n > runs; told {
			x.announced++
		}
		c.back(runs - min(n, runs))
		if err == nil && n < len(wrs) { // the device had less room than it had promised
			x.mu.Unlock()
			err = x.awaitRoom(w)
			x.mu.Lock()
		}
	}
	if err != nil && !x.failing {
		x.credits <- struct{}{} // it was not used
	}
	stuck := begun && x.posted > x.signalled // the device took a part that never says that it is done
	if begun = begun && !x.buried; begun {
		x.pieces = append(x.pieces, pending{w: w, end: x.posted, err: err})
	}
	x.mu.Unlock()
	if err != nil && !errors.Is(err, transfer.ErrFenced) && !errors.Is(err, errDown) || stuck {
		x.fail(fmt.Errorf("post piece: %w", errors.Join(err, errDown)))
	}
	if begun {
		x.reap()
	}
	return begun, err
}

// space is how many work requests of a piece the send queue takes. mu is held.
func (x *lane) space() int { return sendQueue - sendReserve - int(x.posted-x.completed) }

// awaitRoom waits for completions.
func (x *lane) awaitRoom(w *transfer.Write) error {
	select {
	case <-x.room:
		return nil
	case <-w.Stop():
		return transfer.ErrFenced
	case <-x.down:
		return errDown
	}
}

// push posts work requests, numbers them and signals the last. What the device has no room for is left:
// n says how many it took. mu is held.
func (x *lane) push(wrs []cgo.WR) (n int, err error) {
	for i := range wrs {
		wrs[i].ID = x.posted + uint64(i) + 1
	}
	wrs[len(wrs)-1].Flags |= cgo.Signaled
	if x.posted == x.completed {
		x.moved = time.Now()
	}
	n, errno := x.qp.PostSend(wrs)
	if x.posted += uint64(n); n == len(wrs) {
		x.signalled = x.posted
	}
	switch errno {
	case 0:
		return n, nil
	case syscall.ENOMEM, syscall.EAGAIN:
		if x.signalled > x.completed {
			return n, nil // a completion will come, and room with it
		}
	}
	return n, fmt.Errorf("post to QP %d: %w", x.qp.Num, errno)
}

// announcement puts a piece's header and trailer into the next slot, and gives the request that brings them over. mu is held.
func (x *lane) announcement(w *transfer.Write, sum uint64) cgo.WR {
	slot := x.announced % slotCount
	var header [transfer.DataHeaderSize]byte
	var trailer [transfer.DataTrailerSize]byte
	w.Piece.PutHeader(&header)
	transfer.PutTrailer(&trailer, true, sum)
	out := x.slots[(slotCount+slot)*slotSize:][:announceSize]
	copy(out, header[:])
	copy(out[len(header):], trailer[:])
	return cgo.WR{
		Local: addressOf(out), Remote: x.peer.slotAddr + slot*slotSize, Len: announceSize, LKey: x.slotMR.LKey, RKey: x.peer.slotKey,
		Imm: immPiece | uint32(slot), Op: cgo.WriteImm, Flags: x.inline,
	}
}

// giveBackSlots gives slots back to the other end that were read, when there are enough of them and there is room to say so.
func (x *lane) giveBackSlots() error {
	if x.consumed < giveBack {
		return nil
	}
	told, err := x.tell(immSlots | uint32(x.consumed))
	if told {
		x.consumed = 0
	}
	return err
}

// tell posts an immediate that brings nothing along, when there is room for it: else it is to be tried again later, with
// a completion.
func (x *lane) tell(imm uint32) (told bool, err error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.failing || sendQueue-1 <= int(x.posted-x.completed) {
		return false, nil
	}
	n, err := x.push([]cgo.WR{{Remote: x.peer.slotAddr, RKey: x.peer.slotKey, Imm: imm, Op: cgo.WriteImm}})
	return n == 1, err
}

// reap ends the pieces of which everything is completed.
func (x *lane) reap() {
	for {
		x.mu.Lock()
		if len(x.pieces) == 0 || x.pieces[0].end > x.completed || x.failing {
			x.mu.Unlock()
			return // those of a failing lane wait for the other end: see bury
		}
		p := x.pieces[0]
		x.pieces = append(x.pieces[:0], x.pieces[1:]...)
		x.mu.Unlock()
		p.w.Leave()
		p.w.Done(p.err)
	}
}

// cursor walks over the runs of a piece and makes work requests of them, chain by chain.
type cursor struct {
	runs       []transfer.Run
	at         int
	src, dst   uint64 // addresses of the regions
	srcSize    uint64
	lkey, rkey uint32
	inline     uint64 // runs up to this size travel in the request: the device need not fetch them
}

func (x *lane) cursor(w *transfer.Write) (c cursor, err error) {
	src := x.link.t.registered(w.Src)
	if src == nil || len(src.mrs) <= x.rail.index {
		return c, fmt.Errorf("%w: source region %d is not registered with %s", transfer.ErrRegion, w.Src.ID(), x.rail.name)
	}
	c = cursor{runs: w.Runs, src: src.base, srcSize: w.Src.Size(), lkey: src.mrs[x.rail.index].LKey}
	if !w.Src.Hostless() {
		c.inline = uint64(x.qp.Caps.InlineBytes)
	}
	c.dst, c.rkey, err = x.destination(w)
	return c, err
}

func (c *cursor) end() bool { return c.at == len(c.runs) }

// back takes the last n requests back.
func (c *cursor) back(n int) { c.at -= n }

// next fills in the next requests, as many as there is room for. The plan has joined what is adjacent at both ends.
func (c *cursor) next(wrs []cgo.WR) []cgo.WR {
	n := min(len(wrs), len(c.runs)-c.at)
	for i, r := range c.runs[c.at : c.at+n] {
		if r.Src > c.srcSize || r.Len > c.srcSize-r.Src {
			panic("rdma: a run goes beyond its region") // the plan keeps to the layout, and the layout to the region
		}
		wrs[i] = cgo.WR{Local: c.src + r.Src, Remote: c.dst + r.Dst, Len: uint32(r.Len), LKey: c.lkey, RKey: c.rkey}
		if r.Len <= c.inline {
			wrs[i].Flags = cgo.Inline
		}
	}
	c.at += n
	return wrs[:n]
}
