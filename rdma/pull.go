package rdma

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/headrace/headrace/cgo"
	"github.com/headrace/headrace/transfer"
)

// Pulling is the other way to send: the source says where its bytes are, the target reads them into its blocks and says
// that it has them. The announcement of a piece then carries the runs of the source, in one or more slots, in lists beside
// the slots: for each run its address (8) and length (4), little-endian. In the slot, behind header and trailer: number of
// runs in this slot's list (4), the key of their region (4). The last one is announced as a piece, those before as runs.
//
// The source's guard is held from the first announcement until the target says that it is through with the piece; the
// target's own from its first READ to the completion of its last one. So a fence at the target needs nobody, and at the
// source it needs the target's answer, or the lane in the error state, in which it serves no READ.

// The ways to send.
const (
	OpWrite = "write"
	OpRead  = "read"
)

const (
	immRuns = 3 << 16 // runs of a piece are announced in that slot, and more will follow
	immDone = 4 << 16 // so many pieces have been read

	listBytes   = 16 << 10 // of one slot
	listEntry   = 12
	listRuns    = listBytes / listEntry
	listsMax    = slotCount - giveBack // of one piece: so many slots come back whatever else happens
	pullTail    = 8
	pullMessage = announceSize + pullTail

	// Bytes under way, what a fence may have to wait for, and of one chain. It fills 400 Gb/s for 10 us, on each lane.
	readAhead = 512 << 10
	readChain = 128 << 10
	endless   = ^uint64(0) // of a pending piece that no completion ends
)

// lists are a lane's slots' lists: at one end those that arrive, at the other those that leave.
type lists struct {
	mem []byte
	mr  *cgo.MR
}

func (x *lane) newLists(access cgo.Access) (l *lists, err error) {
	l = &lists{}
	if l.mem, err = unix.Mmap(-1, 0, slotCount*listBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS); err != nil {
		return nil, fmt.Errorf("map lists of runs: %w", err)
	}
	if l.mr, err = x.rail.pd.Register(l.mem, access); err != nil {
		return nil, errors.Join(err, unix.Munmap(l.mem))
	}
	return l, nil
}

func (l *lists) close() error {
	if l == nil {
		return nil
	}
	return errors.Join(l.mr.Close(), unix.Munmap(l.mem))
}

func (l *lists) of(slot uint64) []byte { return l.mem[slot*listBytes:][:listBytes] }

// makeLists makes what the two ends' ways of sending ask for. The terms tell the other end of it.
func (x *lane) makeLists(own *terms) (err error) {
	if x.peer.pulls {
		if x.inLists, err = x.newLists(cgo.LocalWrite | cgo.RemoteWrite); err != nil {
			return err
		}
		own.listAddr, own.listKey = addressOf(x.inLists.mem), x.inLists.mr.RKey
	}
	if x.pulls() {
		x.outLists, err = x.newLists(0)
	}
	return err
}

// pulls says that the other end reads what this end sends.
func (x *lane) pulls() bool { return x.link.t.cfg.Op == OpRead }

// Pulls implements transfer.Puller: the other end has this one read.
func (l *link) Pulls() bool { return l.pulled.Load() }

// Offers implements transfer.Puller.
func (l *link) Offers() bool { return l.t.cfg.Op == OpRead }

// Fetching implements transfer.Puller.
func (l *link) Fetching(lease transfer.LeaseID) (lanes []int) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	for i, x := range l.lanes {
		x.mu.Lock()
		if x.fetching[lease] > 0 {
			lanes = append(lanes, i)
		}
		x.mu.Unlock()
	}
	return lanes
}

// sourceRun is a run as the source sees it.
type sourceRun struct {
	addr uint64
	len  uint32
}

// appendSource joins what is adjacent at the source.
func appendSource(runs []sourceRun, addr uint64, n uint32) []sourceRun {
	if k := len(runs); k > 0 && runs[k-1].addr+uint64(runs[k-1].len) == addr {
		runs[k-1].len += n
		return runs
	}
	return append(runs, sourceRun{addr, n})
}

// offer announces a piece for the other end to read. It is send for a lane that pulls.
func (x *lane) offer(w *transfer.Write) error {
	src := x.link.t.registered(w.Src)
	if src == nil || len(src.mrs) <= x.rail.index {
		return fmt.Errorf("%w: source region %d is not registered with %s", transfer.ErrRegion, w.Src.ID(), x.rail.name)
	}
	sum, err := w.Sum(nil)
	if err != nil {
		return err
	}
	var runs []sourceRun
	for _, r := range w.Runs {
		runs = appendSource(runs, src.base+r.Src, uint32(r.Len))
	}
	n := (len(runs) + listRuns - 1) / listRuns
	if n > listsMax {
		return fmt.Errorf("%w: a piece of %d runs cannot be offered, at most %d: use --rdma-op write", transfer.ErrRegion, len(runs), listsMax*listRuns)
	}
	if err := x.takeCredits(w, n); err != nil {
		return err
	}
	if !w.Enter() {
		x.giveCredits(n)
		return transfer.ErrFenced
	}
	if err := x.postOffer(w, runs, src.mrs[x.rail.index].RKey, sum); err != nil {
		w.Leave()
		return err
	}
	return nil
}

// takeCredits takes all slots that a piece needs, or none.
func (x *lane) takeCredits(w *transfer.Write, n int) error {
	for got := range n {
		select {
		case <-x.credits:
			continue
		case <-w.Stop():
			x.giveCredits(got)
			return transfer.ErrFenced
		case <-x.down:
			return errDown
		}
	}
	return nil
}

func (x *lane) giveCredits(n int) {
	for range n {
		x.credits <- struct{}{}
	}
}

// postOffer posts the announcements of a piece. An error means that the other end will not read it: the lane is failing.
// Else the piece is pending. The lease's end does not stop what was begun: the guard is held.
func (x *lane) postOffer(w *transfer.Write, runs []sourceRun, rkey uint32, sum uint64) error {
	for {
		now := runs[:min(len(runs), listRuns)]
		runs = runs[len(now):]
		last := len(runs) == 0
		pending, err := x.postSlot(w, now, rkey, sum, last)
		if err != nil {
			x.fail(fmt.Errorf("offer a piece: %w", err))
		}
		if pending {
			return nil // also on a lane that is failing: it ends what is pending
		}
		if err != nil || last {
			return errDown
		}
	}
}

// postSlot posts one announcement, the last one with the piece made pending before, as the answer may come at once.
func (x *lane) postSlot(w *transfer.Write, runs []sourceRun, rkey uint32, sum uint64, last bool) (isPending bool, err error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.failing {
		return false, errDown
	}
	wrs := x.offerOf(w, runs, rkey, sum, last)
	if last {
		x.pieces = append(x.pieces, pending{w: w, end: endless})
	}
	for rest := wrs[:]; len(rest) > 0; {
		if x.failing {
			return last, errDown
		}
		n := 0
		if x.space() >= len(rest) {
			if n, err = x.push(rest); err != nil {
				return last, err
			}
			rest = rest[n:]
		}
		if n == 0 {
			x.mu.Unlock()
			select {
			case <-x.room:
			case <-x.down:
			}
			x.mu.Lock()
		}
	}
	return last, nil
}

// offerOf fills the next slot and its list, and gives the requests that bring them over. mu is held.
func (x *lane) offerOf(w *transfer.Write, runs []sourceRun, rkey uint32, sum uint64, last bool) [2]cgo.WR {
	slot := x.announced % slotCount
	x.announced++
	le := binary.LittleEndian
	list := x.outLists.of(slot)
	for i, r := range runs {
		le.PutUint64(list[i*listEntry:], r.addr)
		le.PutUint32(list[i*listEntry+8:], r.len)
	}
	out := x.slots[(slotCount+slot)*slotSize:][:pullMessage]
	var header [transfer.DataHeaderSize]byte
	var trailer [transfer.DataTrailerSize]byte
	w.Piece.PutHeader(&header)
	transfer.PutTrailer(&trailer, true, sum)
	copy(out[copy(out, header[:]):], trailer[:])
	le.PutUint32(out[announceSize:], uint32(len(runs)))
	le.PutUint32(out[announceSize+4:], rkey)
	kind := uint32(immRuns)
	if last {
		kind = immPiece
	}
	return [2]cgo.WR{{
		Local: addressOf(list), Remote: x.peerLists.addr + slot*listBytes, Len: uint32(len(runs) * listEntry), LKey: x.outLists.mr.LKey, RKey: x.peerLists.rkey, Op: cgo.Write,
	}, {
		Local: addressOf(out), Remote: x.peer.slotAddr + slot*slotSize, Len: pullMessage, LKey: x.slotMR.LKey, RKey: x.peer.slotKey,
		Imm: kind | uint32(slot), Op: cgo.WriteImm,
	}}
}

// read ends pieces that the other end has read.
func (x *lane) read(n uint32) error {
	for range n {
		x.mu.Lock()
		if x.failing { // bury ends them
			x.mu.Unlock()
			return nil
		}
		if len(x.pieces) == 0 || x.pieces[0].end != endless {
			x.mu.Unlock()
			return fmt.Errorf("%w: more pieces were read than offered", transfer.ErrProtocol)
		}
		p := x.pieces[0]
		x.pieces = append(x.pieces[:0], x.pieces[1:]...)
		x.mu.Unlock()
		p.w.Leave()
		p.w.Done(nil)
	}
	return nil
}

// pull is a piece that this end reads. It belongs to the goroutine of the lane.
type pull struct {
	landing transfer.Landing
	sum     uint64
	whole   bool // the source says so
	runs    []sourceRun
	rkey    uint32
	lkey    uint32
	base    uint64 // of the destination region
	// The next byte to be read, by run and offset in it, on either side.
	src, dst struct {
		run int
		off uint64
	}
	entered bool
	posted  bool // everything that will be
	end     uint64
}

// offered takes an announcement of the other end's.
func (x *lane) offered(slot uint32, last bool) error {
	le := binary.LittleEndian
	b := x.slots[slot*slotSize:][:pullMessage]
	n, rkey := le.Uint32(b[announceSize:]), le.Uint32(b[announceSize+4:])
	if n > listRuns || len(x.offerRuns)+int(n) > listsMax*listRuns {
		return fmt.Errorf("%w: %d runs are offered at once", transfer.ErrProtocol, n)
	}
	list := x.inLists.of(uint64(slot))
	for i := range int(n) {
		x.offerRuns = append(x.offerRuns, sourceRun{le.Uint64(list[i*listEntry:]), le.Uint32(list[i*listEntry+8:])})
	}
	if !last {
		return nil
	}
	runs := x.offerRuns
	x.offerRuns = nil
	var header [transfer.DataHeaderSize]byte
	var trailer [transfer.DataTrailerSize]byte
	copy(header[:], b)
	copy(trailer[:], b[len(header):])
	p, err := transfer.ParseHeader(&header)
	if err != nil {
		return err
	}
	f := &pull{runs: runs, rkey: rkey}
	if f.whole, f.sum, err = transfer.ParseTrailer(&trailer); err != nil {
		return err
	}
	if len(x.fetches) >= depth {
		return fmt.Errorf("%w: more than %d pieces are offered at once", transfer.ErrProtocol, depth)
	}
	if err := x.link.setup.Target.Begin(x.index, p, &f.landing); err != nil {
		return err
	}
	if err := x.aim(f); err != nil {
		f.landing.End(false)
		return err
	}
	x.fetches = append(x.fetches, f)
	return nil
}

// aim finds the destination's keys, and checks that what is offered is what will be read.
func (x *lane) aim(f *pull) error {
	if f.landing.Discard() {
		return nil
	}
	dst := x.link.t.registered(f.landing.Dst)
	if dst == nil || len(dst.mrs) <= x.rail.index {
		f.landing.Fault(fmt.Errorf("%w: destination region %d is not registered with %s", transfer.ErrRegion, f.landing.Dst.ID(), x.rail.name))
		f.whole, f.posted = false, true
		return nil
	}
	f.base, f.lkey = dst.base, dst.mrs[x.rail.index].LKey
	var have, want uint64
	for _, r := range f.runs {
		have += uint64(r.len)
		if r.len == 0 {
			return fmt.Errorf("%w: an empty run is offered", transfer.ErrProtocol)
		}
	}
	for _, r := range f.landing.Runs {
		want += r.Len
	}
	if have != want {
		return fmt.Errorf("%w: %d bytes are offered for a piece of %d", transfer.ErrProtocol, have, want)
	}
	return nil
}

// fetch posts reads as far as there is room, and ends the pieces that are there. The lane's goroutine calls it.
func (x *lane) fetch() error {
	if x.inLists == nil {
		return nil
	}
	for _, f := range x.fetches {
		if !f.posted {
			if err := x.postReads(f); err != nil {
				return err
			}
		}
		if !f.posted {
			break
		}
	}
	for len(x.fetches) > 0 {
		f := x.fetches[0]
		x.mu.Lock()
		over := f.posted && f.end <= x.completed && !x.failing
		x.mu.Unlock()
		if !over {
			break
		}
		x.fetches[0] = nil
		x.fetches = x.fetches[1:]
		x.endFetch(f, f.whole)
		x.answers++
	}
	return x.reply()
}

// postReads posts what there is room for of one piece. When the lease is fenced no more of it is begun.
func (x *lane) postReads(f *pull) error {
	if f.landing.Discard() {
		f.posted = true
		return nil
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if !f.entered {
		if x.failing || !f.landing.Enter() {
			f.posted, f.whole = true, false
			return nil
		}
		f.entered = true
		x.fetching[f.landing.Piece.Lease]++
	}
	for f.dst.run < len(f.landing.Runs) {
		if isClosed(f.landing.Stop()) {
			f.whole = false
			break
		}
		k := min(x.space(), chainMax)
		if x.failing || k <= 0 || x.reading() >= readAhead {
			return nil
		}
		mark := f.mark()
		wrs := f.next(x.chain[:k], readChain)
		n, err := x.push(wrs)
		f.end = x.posted
		x.reads = append(x.reads, readsPosted{x.posted, bytesOf(wrs[:n])})
		if n < len(wrs) {
			f.rewind(mark, wrs[:n])
		}
		if err != nil {
			return err
		}
		if n < len(wrs) {
			return nil
		}
	}
	f.posted = true
	return nil
}

// readsPosted is a chain of reads by its last request, which says when it is completed.
type readsPosted struct{ end, bytes uint64 }

func bytesOf(wrs []cgo.WR) (n uint64) {
	for i := range wrs {
		n += uint64(wrs[i].Len)
	}
	return n
}

// reading says how many bytes are being read. mu is held.
func (x *lane) reading() (n uint64) {
	x.reads = slices.DeleteFunc(x.reads, func(r readsPosted) bool { return r.end <= x.completed })
	for _, r := range x.reads {
		n += r.bytes
	}
	return n
}

// next fills in the next requests: as long as bytes are adjacent at both ends, up to so many bytes.
func (f *pull) next(wrs []cgo.WR, most uint64) []cgo.WR {
	n := 0
	for ; n < len(wrs) && f.dst.run < len(f.landing.Runs) && most > 0; n++ {
		s, d := &f.runs[f.src.run], &f.landing.Runs[f.dst.run]
		size := min(uint64(s.len)-f.src.off, d.Len-f.dst.off, most)
		most -= size
		wrs[n] = cgo.WR{Local: f.base + d.Dst + f.dst.off, Remote: s.addr + f.src.off, Len: uint32(size), LKey: f.lkey, RKey: f.rkey, Op: cgo.Read}
		f.advance(size)
	}
	return wrs[:n]
}

func (f *pull) advance(n uint64) {
	if f.src.off += n; f.src.off == uint64(f.runs[f.src.run].len) {
		f.src.run, f.src.off = f.src.run+1, 0
	}
	if f.dst.off += n; f.dst.off == f.landing.Runs[f.dst.run].Len {
		f.dst.run, f.dst.off = f.dst.run+1, 0
	}
}

func (f *pull) mark() pull { return pull{src: f.src, dst: f.dst} }

// rewind goes back to a mark, and from there over the requests that were posted.
func (f *pull) rewind(mark pull, posted []cgo.WR) {
	f.src, f.dst = mark.src, mark.dst
	for i := range posted {
		f.advance(uint64(posted[i].Len))
	}
}

// endFetch lets go of the blocks and counts the piece.
func (x *lane) endFetch(f *pull, whole bool) {
	if whole {
		whole = f.landing.Discard() || f.landing.Verify(f.sum)
	}
	if f.entered {
		lease := f.landing.Piece.Lease
		x.mu.Lock()
		if x.fetching[lease]--; x.fetching[lease] <= 0 {
			delete(x.fetching, lease)
		}
		x.mu.Unlock()
		f.landing.Leave()
	}
	f.landing.End(whole)
}

// dropFetches ends what a drained lane was reading: nothing of it is on its way into a block any more.
func (x *lane) dropFetches() {
	for _, f := range x.fetches {
		x.endFetch(f, false)
	}
	x.fetches = nil
}

// reply tells the other end how many pieces have been read, when there is room.
func (x *lane) reply() error {
	if x.answers == 0 {
		return nil
	}
	told, err := x.tell(immDone | x.answers)
	if told {
		x.answers = 0
	}
	return err
}
