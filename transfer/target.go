package transfer

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/headrace/headrace/transfer/ticket"
)

// targetLease is D's side: which blocks, what landed.
type targetLease struct {
	lease
	sourceID   LeaseID  // P's id of the lease
	srcLayouts []Layout // P's shard set

	// All below is guarded by lease.mu.
	dstBlocks []uint32 // block ids in the request's order, all of them
	lent      []uint32 // those marked in the region
	landed    bitmap
	received  map[int]uint64 // pieces that came to their end, by lane
	counts    []laneCount    // pieces that were sent, once the hand-off came
	record    []byte
	handedOff bool
	settling  bool
	peerHolds bool  // a one-sided writer may write until it says that it stopped
	grant     Grant // the writer's right to write, where it has one for this lease alone
}

// bind gives the lease its blocks. The caller has found the regions for it.
func (l *targetLease) bind(regions []*Region, req *BindReq) (boundMsg, error) {
	var m boundMsg
	l.mu.Lock()
	ch := l.ch
	l.mu.Unlock()
	if ch == nil {
		return m, ErrNotPresented // it is just arriving
	}
	if !bytes.Equal(req.Ticket, l.raw) {
		return m, fmt.Errorf("%w: not the ticket that was presented", ErrWrongTicket)
	}
	for _, r := range regions {
		if r.readOnly {
			return m, fmt.Errorf("%w: region %d is read-only", ErrRegion, r.id)
		}
	}
	if err := allReachable(regions, ch.transport); err != nil && req.FirstToken != l.tokens { // else nothing is wanted
		return m, err
	}
	layouts := layoutsOf(regions)
	pairs, err := PlanShards(l.srcLayouts, layouts)
	if err != nil {
		return m, err
	}
	blocks, first, err := l.wantedBlocks(&layouts[0], req)
	if err != nil {
		return m, err
	}
	g, err := newGeometry(pairs, l.tokens, req.FirstToken, l.e.cfg.Limits.PiecesPerLease)
	if err != nil {
		return m, err
	}
	if err := lendAll(regions, l.id, blocks[first:]); err != nil {
		return m, err
	}
	grant, keys := ch.grant(l, regions, blocks[first:])
	if err := ch.bindTarget(l, g, grant, blocks, blocks[first:]); err != nil {
		if grant != nil {
			grant.Release() // nobody was told of it
		}
		giveBackAll(regions, blocks[first:])
		return m, err
	}
	return boundMsg{target: l.id, epoch: l.e.cfg.Epoch, layouts: layouts, firstToken: req.FirstToken, blocks: blocks, keys: keys}, nil
}

// wantedBlocks checks the blocks of a request to bind, and says from which on they are to be filled.
func (l *targetLease) wantedBlocks(lay *Layout, req *BindReq) (blocks []uint32, first uint32, err error) {
	if req.FirstToken > l.tokens || req.FirstToken != l.tokens && req.FirstToken%lay.BlockTokens != 0 {
		return nil, 0, fmt.Errorf("%w: first token %d of %d, need a multiple of %d", ErrInvalid, req.FirstToken, l.tokens, lay.BlockTokens)
	}
	need := blocksOf(l.tokens, lay.BlockTokens)
	if len(req.Blocks) > l.e.cfg.Limits.Blocks || uint64(len(req.Blocks)) < uint64(need) {
		return nil, 0, fmt.Errorf("%w: %d blocks of %d tokens for %d tokens, at most %d", ErrInvalid, len(req.Blocks), lay.BlockTokens, l.tokens, l.e.cfg.Limits.Blocks)
	}
	blocks = append(blocks, req.Blocks[:need]...)
	first = req.FirstToken / lay.BlockTokens
	if req.FirstToken == l.tokens {
		first = need
	}
	clear(blocks[:first]) // ignored: never looked at again, and no business of the peer
	for _, b := range blocks[first:] {
		if b >= lay.Blocks {
			return nil, 0, fmt.Errorf("%w: block %d, the region has %d", ErrInvalid, b, lay.Blocks)
		}
	}
	return blocks, first, nil
}

func (l *targetLease) giveBack() {
	l.mu.Lock()
	lent := l.lent
	l.lent = nil
	l.mu.Unlock()
	if lent != nil {
		giveBackAll(l.regions, lent)
	}
}

// handoff takes P's record and counts.
func (l *targetLease) handoff(m *handoffMsg) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.state == LeaseOpen {
		return fmt.Errorf("%w: hand-off of a lease that is not bound", ErrProtocol)
	}
	if l.state == LeaseBound {
		l.counts, l.record, l.handedOff = m.lanes, m.record, true
		l.check()
	}
	return nil
}

// check starts settling when nothing is missing: the full bitmap, the record, and every lane that carried a piece of
// this lease drained or dead. l.mu is held.
func (l *targetLease) check() {
	if l.state != LeaseBound || l.settling || !l.handedOff || l.landed.n != l.geom.wanted {
		return
	}
	for _, c := range l.counts {
		dead := l.ch.lanes.dead(int(c.lane))
		if l.peerHolds && c.failed != 0 && !dead {
			return // it may have begun pieces that it does not count, and their packets may come late
		}
		if l.received[int(c.lane)] >= c.pieces {
			continue
		}
		// What was lost with a dead lane was sent again on another. A one-sided writer may still be at it, until it says
		// that it knows of the dead lane too.
		if !dead || l.peerHolds && c.failed == 0 {
			return
		}
	}
	l.settling = true
	if l.e.cfg.Pauses == nil {
		// In a goroutine of its own: this one reads a lane, or control frames.
		l.e.wg.Go(l.settle)
		return
	}
	l.e.wg.Go(func() {
		l.e.cfg.Pauses.Wait(PauseSettle, l.guard.stop)
		l.settle()
	})
}

func (l *targetLease) settle() {
	l.mu.Lock()
	record := l.record
	l.mu.Unlock()
	l.peerStopped() // a one-sided writer that handed off posts nothing any more: its completions were its leave to do so
	l.finish(outcome{state: LeaseSettled, kind: EventSettled, record: record})
}

// peerStopped takes back the hold that a one-sided writer has on the guard.
func (l *targetLease) peerStopped() {
	l.mu.Lock()
	held := l.peerHolds
	l.peerHolds = false
	l.mu.Unlock()
	if held {
		l.guard.leave()
	}
}

// Target is the receiving side of a link: where a transport announces what arrives.
type Target interface {
	// Begin says where a piece's payload goes and fills in into, which stays valid until its End. A piece that must not
	// land (its lease has ended, or it landed before) is to be discarded: see Landing.Discard. An error means that the
	// peer broke the protocol, and the lane must fail.
	Begin(lane int, p Piece, into *Landing) error
}

// Landing is one arriving piece.
type Landing struct {
	Piece   Piece
	Dst     *Region
	Runs    []Run // in payload order; Dst and Len matter
	lane    int
	lease   *targetLease // nil when it is unknown
	altered bool         // Verify found another checksum
}

// Discard says that the payload must be thrown away.
func (x *Landing) Discard() bool { return len(x.Runs) == 0 }

// Enter is asked before each touch of the blocks, one nonblocking system call or one copy of at most PieceMax bytes, and
// followed by Leave if it said yes. A no is final: the rest of the payload must be thrown away.
func (x *Landing) Enter() bool { return x.lease.guard.enter() }

// Leave ends a touch.
func (x *Landing) Leave() { x.lease.guard.leave() }

// Stop is closed when the lease is fenced; nil (never) when the piece is discarded.
func (x *Landing) Stop() <-chan struct{} {
	if x.lease == nil {
		return nil
	}
	return x.lease.guard.stop
}

// Fault says that the blocks could not be written: the lease fails, not the lane. The rest of the payload is to be thrown
// away, and End must follow.
func (x *Landing) Fault(err error) {
	if l := x.lease; l != nil {
		l.e.wg.Go(func() { l.fail("write destination blocks: %v", err) })
	}
}

// End says that the payload has come to its end: whole, every byte in its block, or not.
func (x *Landing) End(whole bool) {
	if l := x.lease; l != nil {
		x.lease = nil
		if c := l.arrived(x, whole && !x.Discard()); c != nil {
			c.landedHere(l.sourceID, x.Piece.ID)
		}
	} // else nobody's piece: Begin has counted it
	x.Runs = x.Runs[:0]
}

// arrived counts a piece. Where the source is in this process it gives the channel, for the caller to tell it when the
// lease's lock is free: the two ends' locks have no order.
func (l *targetLease) arrived(x *Landing, whole bool) (tell *channel) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.state != LeaseBound {
		l.e.totals.discarded.Add(1)
		return nil
	}
	l.received[x.lane]++
	duplicate := x.Discard()
	if x.altered {
		l.refuseAltered(x)
		l.check()
		return nil
	}
	if !whole && !duplicate {
		l.e.totals.discarded.Add(1)
		l.check()
		return nil
	}
	fresh := false
	l.geom.each(&x.Piece, func(bit uint64) { fresh = l.landed.set(bit) || fresh })
	if fresh {
		n := uint64(x.Piece.Bytes)
		l.bytes += n
		l.course.piece()
		l.ch.landed.Add(n)
		l.ch.lanes.landedOn(x.lane, n)
		l.e.totals.landed.Add(n)
	} else {
		l.e.totals.duplicate.Add(1)
		l.course.again++
	}
	if l.ch.local {
		tell = l.ch
	} else {
		l.ch.out.ack(l.sourceID, x.Piece.ID)
	}
	l.check()
	return tell
}

// begin is Target.Begin for one lease.
func (l *targetLease) begin(lane int, p Piece, into *Landing) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.state != LeaseBound {
		l.e.totals.discarded.Add(1)
		return nil
	}
	if p.Epoch != l.e.cfg.Epoch {
		return fmt.Errorf("%w: piece of epoch %#x, this daemon's is %#x", ErrProtocol, p.Epoch, l.e.cfg.Epoch)
	}
	n, err := l.geom.bytesOf(&p)
	if err != nil {
		return err
	}
	if n != uint64(p.Bytes) {
		return fmt.Errorf("%w: units %d+%d of stripe %d have %d bytes, the piece says %d", ErrProtocol, p.First, p.Count, p.Stripe, n, p.Bytes)
	}
	into.lease, into.Dst = l, l.regions[l.geom.pair(&p).Dst]
	known := true
	l.geom.each(&p, func(bit uint64) { known = known && l.landed.has(bit) })
	if known {
		return nil // never written twice; counted as received by End
	}
	into.Runs = l.geom.appendRuns(into.Runs, &p, nil, l.dstBlocks)
	return nil
}

// Write is one piece to be sent.
type Write struct {
	Piece Piece
	Src   *Region
	Runs  []Run  // in payload order: source and destination
	Key   []byte // the destination region's, from the other end's Registrar
	Begun bool   // a Starter's own: Start has begun the piece, and Post has nothing left to do but to end it
	lease *sourceLease
	lane  int
	check bool       // it is to carry a checksum
	busy  *busyMeter // entered when it was posted
	// Of the lane's feeder, which measures it: when the piece was posted.
	feeder *feeder
	posted time.Time
	after  func(*Write)
}

// Enter is asked before each touch of the source: see Landing.Enter. After a no, what is left of a piece that was begun
// is filled up with anything but the source, and marked so that it never counts.
func (w *Write) Enter() bool { return w.lease.guard.enter() }

// Leave ends a touch.
func (w *Write) Leave() { w.lease.guard.leave() }

// Stop is closed when the lease is fenced.
func (w *Write) Stop() <-chan struct{} { return w.lease.guard.stop }

// Done says that the lane is through with the piece: it was sent whole, or err says why not. The transport must not
// touch w afterwards.
func (w *Write) Done(err error) {
	if w.busy != nil {
		w.busy.leave()
		w.busy = nil
	}
	if w.feeder != nil {
		w.lease.ch.lanes.completed(w.feeder, w.posted, w.Piece.Bytes, err == nil)
		w.feeder = nil
	}
	w.lease.writeDone(&w.Piece, w.lane, err)
	w.after(w)
}

// handlePresent takes a presented ticket, lets it wait for its engine, or refuses it with the reason.
func (c *channel) handlePresent(id LeaseID, m *presentMsg) {
	if err := c.openTarget(id, m); errors.Is(err, ErrDraining) {
		c.out.send(finishFrame(newFrame(frameAgain, roleTarget, id, 0)))
	} else if err != nil {
		c.e.totals.refused.Add(1)
		c.e.log.Info("refused a ticket", "peer", c.peer.NodeID, "error", err)
		c.out.send(reasonFrame(frameRefused, roleTarget, id, err.Error()))
	}
}

func (c *channel) openTarget(id LeaseID, m *presentMsg) error {
	e := c.e
	t, err := e.verify(m.ticket)
	if err != nil {
		return err
	}
	if t.DNode != e.cfg.NodeID {
		return fmt.Errorf("%w: decode node %q, this is %q", ErrWrongTicket, t.DNode, e.cfg.NodeID)
	}
	if t.PNode != c.peer.NodeID {
		return fmt.Errorf("%w: prefill node %q, presented by %q", ErrWrongTicket, t.PNode, c.peer.NodeID)
	}
	for i := range m.layouts {
		if err := m.layouts[i].Validate(math.MaxInt64); err != nil {
			return err
		}
	}
	if err := checkShards(m.layouts, false); err != nil {
		return err
	}
	lay := &m.layouts[0] // in what follows all are alike
	if lay.Fingerprint != t.Fingerprint {
		return fmt.Errorf("%w: the ticket is for model %x, the source region holds %x", ErrWrongTicket, t.Fingerprint[:6], lay.Fingerprint[:6])
	}
	if m.tokens == 0 || uint64(m.tokens) > uint64(lay.Blocks)*uint64(lay.BlockTokens) || blocksOf(m.tokens, lay.BlockTokens) > uint32(e.cfg.Limits.Blocks) {
		return fmt.Errorf("%w: %d tokens in a region of %d blocks of %d", ErrInvalid, m.tokens, lay.Blocks, lay.BlockTokens)
	}
	if len(m.meta) > e.cfg.Limits.MetaBytes {
		return fmt.Errorf("%w: %d bytes of meta, at most %d", ErrLimit, len(m.meta), e.cfg.Limits.MetaBytes)
	}
	e.drain.gate.RLock() // until its engine has heard of it: what comes after the cut is the successor's
	defer e.drain.gate.RUnlock()
	if e.drain.draining {
		return ErrDraining
	}
	client := e.client(t.DEngine)
	if client == nil {
		return c.park(id, m, &t)
	}
	if of := client.MemberOf(); of != "" {
		return fmt.Errorf("%w: decode engine %q is a member of %q", ErrWrongTicket, t.DEngine, of)
	}
	if err := e.book.claim(t.Nonce, t.Deadline, e.now()); err != nil {
		return err
	}
	l := &targetLease{sourceID: id, srcLayouts: m.layouts, received: make(map[int]uint64)}
	if err := e.initLease(&l.lease, client, t, m.ticket, m.tokens); err != nil {
		return err
	}
	l.dst = l
	return c.addTarget(l, m.meta)
}

// addTarget makes the lease known to its engine and to the channel. From the first on it may be revoked by its ticket.
func (c *channel) addTarget(l *targetLease, meta []byte) error {
	if err := l.client.add(&l.lease, nil); err != nil {
		l.e.leases.Add(-1)
		return err
	}
	c.mu.Lock()
	l.mu.Lock()
	var err error
	switch {
	case l.state != LeaseOpen:
		err = fmt.Errorf("%w: revoked before it was presented", ErrLeaseEnded)
	case c.closed || c.targets[l.sourceID] != nil:
		err = fmt.Errorf("%w: lease %d is presented twice, or the channel is closing", ErrProtocol, l.sourceID)
		l.state = LeaseRevoked // without a word: its engine has not heard of it
		l.guard.shut()
		close(l.done)
		l.client.drop(&l.lease)
		l.e.leases.Add(-1)
	default:
		l.ch = c
		c.targets[l.sourceID] = l
		l.client.emit(Event{
			Kind: EventPresented, State: LeaseOpen, Lease: l.id, Nonce: l.ticket.Nonce, Tokens: l.tokens, Meta: meta, Layouts: l.srcLayouts, PEngine: l.ticket.PEngine,
		})
	}
	l.mu.Unlock()
	c.mu.Unlock()
	if err == nil {
		l.startTimer()
		l.e.totals.presented.Add(1)
	}
	return err
}

// bindTarget makes a bound lease's pieces known to the lanes.
func (c *channel) bindTarget(l *targetLease, g geometry, grant Grant, blocks, lent []uint32) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return ErrLeaseEnded
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	switch l.state {
	case LeaseOpen:
	case LeaseBound:
		return fmt.Errorf("%w: it is bound", ErrTicketUsed)
	default:
		return ErrLeaseEnded
	}
	if c.link != nil && c.link.OneSided() && !pulls(c.link) { // the spare one is not: the engine would not have it
		if !l.guard.enter() {
			return ErrLeaseEnded
		}
		l.peerHolds = true
	}
	l.state, l.geom, l.grant, l.dstBlocks, l.lent = LeaseBound, g, grant, blocks, lent
	l.landed = newBitmap(g.bits)
	l.course.bound = time.Now()
	c.bound[l.id] = l
	return nil
}

// Begin implements Target.
func (c *channel) Begin(lane int, p Piece, into *Landing) error {
	*into = Landing{Piece: p, Runs: into.Runs[:0], lane: lane}
	c.mu.Lock()
	l := c.bound[p.Lease]
	c.mu.Unlock()
	if l == nil {
		c.e.totals.discarded.Add(1)
		return nil
	}
	// The writer cannot know what lies at this end; and one that sends what nobody wants must not have it written.
	if hostless(l.regions) && (c.lanes.isSpare(lane) || allReachable(l.regions, c.transport) != nil) {
		c.e.totals.discarded.Add(1)
		c.e.wg.Go(func() { l.fail("write destination blocks: %v", errHostless) })
		return nil
	}
	return l.begin(lane, p, into)
}

// verify checks a ticket's authenticity and that it does not outlive what this engine is ready to remember.
func (e *Engine) verify(b []byte) (ticket.Ticket, error) {
	now := e.now()
	t, err := ticket.Verify(e.cfg.ClusterKey, b, now)
	if err == nil && t.Deadline.Sub(now) > e.cfg.Limits.TicketLife {
		err = fmt.Errorf("%w: the ticket's deadline is %v away, at most %v", ErrLimit, t.Deadline.Sub(now).Round(1e9), e.cfg.Limits.TicketLife)
	}
	return t, err
}
