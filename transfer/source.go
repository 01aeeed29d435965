package transfer

import (
	"errors"
	"fmt"
	"math"
	"sync/atomic"
	"time"
)

// sourceLease is P's side: what was pushed, what is on its way, what landed.
type sourceLease struct {
	lease
	meta []byte
	addr string // of D's daemon

	// All below is guarded by lease.mu.
	blocks    declared
	target    LeaseID // D's id of the lease, since bound
	epoch     uint64  // of D's daemon
	dstBlocks []uint32
	keys      [][]byte // of the destination's regions, where the transport needs them
	hostless  bool     // a region is a device's memory: the spare link cannot read it; fixed since bound
	spareOnly bool     // a region is not known to the devices of the channel's transport; fixed since bound
	early     []*push  // pushed before the lease was bound
	queue     []work
	retry     []Piece // of lanes that failed
	flying    map[uint32]*flight
	pushes    int // not landed
	waiting   int // unit ranges not cut up yet
	nextPiece uint32
	posted    bitmap // pieces handed to a lane and done
	laneSent  map[int]uint64
	record    []byte
	moves     int // how often it was presented to a daemon that gave way
	handoff   handoffState
	handed    bool // the record was sent once

	unqueued atomic.Int64 // bytes that no lane has taken
}

type handoffState uint8

const (
	handoffNone handoffState = iota
	handoffGiven
	handoffSent
)

// push is one call of Push.
type push struct {
	by    *Client // who pushed, and hears of it
	seq   uint64
	units []Unit
	left  uint64 // bytes that have not landed
}

// work is the rest of one unit range of a push. Its pairs of regions are sent one after the other.
type work struct {
	Unit        // what is left of the pair at hand
	pair int    // the pair at hand
	part uint32 // the next of the first unit
	all  Unit   // as it was pushed, for the pairs to come
	push *push
}

// flight is a piece that was given to a lane.
type flight struct {
	piece   Piece
	lane    int
	push    *push
	done    bool // the lane reads its source no more
	bad     bool // it arrived altered before it was done
	altered int  // how often it arrived so
}

// pushNowMax is the most bytes that are sent by the goroutine that pushes them: more is better spread over lanes.
const pushNowMax = 128 << 10

// push queues units. The caller has checked that the lease lives. With now it may send them itself.
func (l *sourceLease) push(by *Client, units []Unit, seq uint64, now bool) error {
	limits := &l.e.cfg.Limits
	if len(units) == 0 || len(units) > limits.UnitsPerPush {
		return fmt.Errorf("%w: %d unit ranges in one push, need 1 to %d", ErrInvalid, len(units), limits.UnitsPerPush)
	}
	own, err := l.shardsOf(by)
	if err != nil {
		return err
	}
	l.mu.Lock()
	if !l.living() {
		l.mu.Unlock()
		return ErrLeaseEnded
	}
	ranges, err := l.checkUnits(units, own)
	if err == nil && (l.pushes >= limits.PushesPerLease || l.waiting+ranges > 4*limits.UnitsPerPush) {
		err = fmt.Errorf("%w: %d pushes with %d unit ranges of this lease wait", ErrLimit, l.pushes, l.waiting)
	}
	if err != nil {
		l.mu.Unlock()
		return err
	}
	l.waiting += ranges
	l.pushes++
	p := &push{by: by, seq: seq, units: l.expand(units, own, ranges)}
	ch := l.ch
	if l.state == LeaseOpen {
		l.early = append(l.early, p)
		l.mu.Unlock()
		return nil
	}
	more := l.enqueue(p)
	now = now && len(l.queue) == 1 && p.left <= pushNowMax
	l.mu.Unlock()
	switch {
	case more && now:
		ch.lanes.pushNow(l)
	case more:
		ch.lanes.push(l)
	}
	return nil
}

// enqueue turns a push into work, less what is not wanted, and reports whether there is any. l.mu is held, the lease bound.
func (l *sourceLease) enqueue(p *push) bool {
	g := &l.geom
	for _, u := range p.units {
		if end := u.First + u.Count; u.First < g.first {
			u.First = min(g.first, end)
			u.Count = end - u.First
		}
		pair := g.nextPair(0, u.Shard)
		if u.Count == 0 || pair == len(g.pairs) {
			l.waiting--
			continue
		}
		p.left += g.bytesFrom(0, u)
		l.queue = append(l.queue, work{Unit: u, pair: pair, all: u, push: p})
	}
	p.units = nil
	if p.left == 0 {
		l.landedPush(p)
		return false
	}
	l.ch.backlog.Add(int64(p.left))
	l.unqueued.Add(int64(p.left))
	return true
}

// landedPush tells who pushed that all of it landed. l.mu is held, so that it comes before the lease's end.
func (l *sourceLease) landedPush(p *push) {
	l.pushes--
	p.by.emit(Event{Kind: EventPushed, State: l.state, Lease: l.id, Nonce: l.ticket.Nonce, Seq: p.seq})
}

// take gives the next piece for a lane, nil if there is none, and whether there is more after it.
func (l *sourceLease) take(lane int, w *Write) (ok, more bool) {
	l.mu.Lock()
	if l.state != LeaseBound {
		l.mu.Unlock()
		return false, false
	}
	f := &flight{lane: lane}
	switch {
	case len(l.retry) > 0:
		f.piece = l.retry[len(l.retry)-1]
		l.retry = l.retry[:len(l.retry)-1]
		failed := l.flying[f.piece.ID] // kept since the failed try, with the same piece id
		f.push, f.altered = failed.push, failed.altered
	case len(l.queue) > 0:
		f.piece, f.push = l.cut()
	default:
		l.mu.Unlock()
		return false, false
	}
	l.unqueued.Add(-int64(f.piece.Bytes))
	l.flying[f.piece.ID] = f
	l.laneSent[lane] += 0 // told at the hand-off even if it never gets a piece through
	more = len(l.queue)+len(l.retry) > 0
	check := f.altered > 0 || l.ch.checks()
	blocks := l.blocks.ids
	l.mu.Unlock()
	// What follows is fixed since the lease was bound.
	pair := l.geom.pair(&f.piece)
	*w = Write{Piece: f.piece, Src: l.regions[pair.Src], Runs: w.Runs[:0], lease: l, lane: lane, check: check}
	if len(l.keys) > 0 {
		w.Key = l.keys[pair.Dst]
	}
	w.Runs = l.geom.appendRuns(w.Runs, &w.Piece, blocks, l.dstBlocks)
	return true, more
}

// cut takes the next piece off the queue: as many neighbouring units as fit, or the next part of a large one.
func (l *sourceLease) cut() (Piece, *push) {
	g, w := &l.geom, &l.queue[0]
	pair := &g.pairs[w.pair]
	p := Piece{Lease: l.target, Epoch: l.epoch, ID: l.nextPiece, Stripe: g.stripe(w.Layer, w.pair), First: w.First, Count: 1, Part: w.part}
	l.nextPiece++
	size := g.unitBytes(pair, w.First)
	if pair.parts > 1 {
		off := uint64(w.part) * PieceMax
		p.Bytes = uint32(min(PieceMax, size-off))
		if w.part++; off+uint64(p.Bytes) < size {
			return p, w.push
		}
		w.part = 0
	} else {
		goal := uint64(l.e.pieceGoal())
		for p.Count < w.Count {
			next := g.unitBytes(pair, w.First+p.Count)
			if size+next > goal {
				break
			}
			size += next
			p.Count++
		}
		p.Bytes = uint32(size)
	}
	w.First += p.Count
	w.Count -= p.Count
	pushed := w.push
	if w.Count == 0 {
		l.nextWork()
	}
	return p, pushed
}

// nextWork goes on to the next pair of the front of the queue, or to the next unit range.
func (l *sourceLease) nextWork() {
	w := &l.queue[0]
	w.Unit, w.pair = w.all, l.geom.nextPair(w.pair+1, w.all.Shard)
	if w.pair < len(l.geom.pairs) {
		return
	}
	l.waiting--
	l.queue[0] = work{}
	if l.queue = l.queue[1:]; len(l.queue) == 0 {
		l.queue = nil
	}
}

// posted notes that a lane is done with a piece: it was sent whole, or err says why not.
func (l *sourceLease) writeDone(p *Piece, lane int, err error) {
	l.mu.Lock()
	f := l.flying[p.ID]
	if l.state != LeaseBound || f == nil || f.lane != lane || f.done {
		l.mu.Unlock()
		return
	}
	ch := l.ch
	if errors.Is(err, ErrMemory) || errors.Is(err, ErrRegion) {
		l.mu.Unlock()
		l.e.wg.Go(func() { l.fail("send source blocks: %v", err) })
		return
	}
	if err != nil || ch.lanes.dead(lane) {
		l.again(f)
		l.mu.Unlock()
		ch.lanes.push(l)
		return
	}
	f.done = true
	l.laneSent[lane]++
	l.course.piece()
	if f.bad && f.push != nil {
		l.again(f)
		l.mu.Unlock()
		ch.lanes.push(l)
		return
	}
	l.geom.each(p, func(bit uint64) { l.posted.set(bit) })
	if f.push == nil { // its landing was told before the lane was through with it
		delete(l.flying, p.ID)
	}
	l.handOver()
	l.mu.Unlock()
	ch.sent.Add(uint64(p.Bytes))
	l.e.totals.sent.Add(uint64(p.Bytes))
}

// again queues a piece that a failed lane may have lost. l.mu is held.
func (l *sourceLease) again(f *flight) {
	if f.push == nil { // it landed all the same
		l.geom.each(&f.piece, func(bit uint64) { l.posted.set(bit) })
		delete(l.flying, f.piece.ID)
		l.handOver()
		return
	}
	f.done, f.bad, f.lane = false, false, -1
	l.course.again++
	l.geom.each(&f.piece, func(bit uint64) { l.posted.clear(bit) })
	l.retry = append(l.retry, f.piece)
	l.unqueued.Add(int64(f.piece.Bytes))
	if l.handoff == handoffSent {
		l.handoff = handoffGiven
	}
}

// laneDown requeues what a dead lane carried and nobody has seen land.
func (l *sourceLease) laneDown(lane int) {
	l.mu.Lock()
	if l.state != LeaseBound {
		l.mu.Unlock()
		return
	}
	for _, f := range l.flying {
		if f.lane == lane && f.done {
			l.again(f)
		}
	}
	if l.handoff == handoffSent { // the counts are to say that the lane failed
		l.handoff = handoffGiven
		l.handOver()
	}
	ch, more := l.ch, len(l.retry) > 0
	l.mu.Unlock()
	if more {
		ch.lanes.push(l)
	}
}

// landed counts pieces that the peer says have landed.
func (l *sourceLease) landed(ids []uint32) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.state != LeaseBound {
		return
	}
	for _, id := range ids {
		f := l.flying[id]
		if f == nil || f.push == nil {
			continue
		}
		n := uint64(f.piece.Bytes)
		l.ch.backlog.Add(-int64(n))
		l.bytes += n
		p := f.push
		f.push = nil
		if f.lane < 0 {
			l.forget(id)
		} else if f.done {
			delete(l.flying, id)
		}
		if p.left -= n; p.left == 0 {
			l.landedPush(p)
		}
	}
	l.handOver()
}

// forget takes a piece that landed after all off the retry list.
func (l *sourceLease) forget(id uint32) {
	for i := range l.retry {
		if l.retry[i].ID == id {
			l.geom.each(&l.retry[i], func(bit uint64) { l.posted.set(bit) })
			l.unqueued.Add(-int64(l.retry[i].Bytes))
			l.retry = append(l.retry[:i], l.retry[i+1:]...)
			break
		}
	}
	delete(l.flying, id)
}

// handOver sends the record when every wanted unit was sent. l.mu is held.
func (l *sourceLease) handOver() {
	if l.handoff != handoffGiven || l.state != LeaseBound || l.posted.n != l.geom.wanted || len(l.retry) > 0 {
		return
	}
	for _, f := range l.flying {
		if !f.done {
			return
		}
	}
	if len(l.laneSent) > laneCountsMax {
		l.e.wg.Go(func() { l.fail("%d lanes carried it, at most %d can be counted", len(l.laneSent), laneCountsMax) })
		return
	}
	l.handoff, l.handed = handoffSent, true
	m := handoffMsg{record: l.record}
	for lane, n := range l.laneSent {
		c := laneCount{lane: uint32(lane), pieces: n}
		if l.ch.lanes.dead(lane) {
			c.failed = 1
		}
		m.lanes = append(m.lanes, c)
	}
	l.ch.out.send(m.frame(l.id))
}

func (l *sourceLease) giveHandoff(record []byte) error {
	if len(record) > l.e.cfg.Limits.RecordBytes {
		return fmt.Errorf("%w: record of %d bytes, at most %d", ErrLimit, len(record), l.e.cfg.Limits.RecordBytes)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.living() {
		return ErrLeaseEnded
	}
	if l.handoff != handoffNone {
		return fmt.Errorf("%w: the lease has its record already", ErrInvalid)
	}
	if !l.blocks.complete() {
		return fmt.Errorf("%w: the request has %d of its %d blocks: extend it before the hand-off", ErrInvalid, len(l.blocks.ids), l.blocks.need)
	}
	l.record = append([]byte(nil), record...)
	l.handoff = handoffGiven
	l.handOver()
	return nil
}

// bound takes D's answer. An error means that D's daemon speaks nonsense, or cannot be copied to.
func (l *sourceLease) bound(m *boundMsg) error {
	for _, lay := range m.layouts {
		if err := lay.Validate(math.MaxInt64); err != nil {
			return err
		}
	}
	pairs, err := PlanShards(layoutsOf(l.regions), m.layouts)
	if err != nil {
		return err
	}
	lay := &m.layouts[0] // in what follows all are alike
	if m.firstToken > l.tokens || m.target == 0 {
		return fmt.Errorf("%w: first token %d of %d", ErrProtocol, m.firstToken, l.tokens)
	}
	if uint64(len(m.blocks)) < uint64(blocksOf(l.tokens, lay.BlockTokens)) {
		return fmt.Errorf("%w: %d blocks of %d tokens for %d tokens", ErrProtocol, len(m.blocks), lay.BlockTokens, l.tokens)
	}
	for _, b := range m.blocks[m.firstToken/lay.BlockTokens:] {
		if b >= lay.Blocks {
			return fmt.Errorf("%w: block %d of %d", ErrProtocol, b, lay.Blocks)
		}
	}
	g, err := newGeometry(pairs, l.tokens, m.firstToken, l.e.cfg.Limits.PiecesPerLease)
	if err != nil {
		return err
	}
	l.mu.Lock()
	if err := l.canLeave(m.keys); err != nil && l.state == LeaseOpen && m.firstToken != l.tokens {
		l.mu.Unlock()
		return err
	}
	if l.state != LeaseOpen {
		again := l.state == LeaseBound
		l.mu.Unlock()
		if again {
			return fmt.Errorf("%w: bound twice", ErrProtocol)
		}
		return nil
	}
	l.state = LeaseBound
	l.course.bound = time.Now()
	l.geom, l.target, l.epoch, l.dstBlocks, l.keys = g, m.target, m.epoch, m.blocks, m.keys
	l.spareOnly, l.hostless = l.ch.needsSpare(l.regions, m.keys), hostless(l.regions)
	l.posted = newBitmap(g.bits)
	l.client.emit(Event{Kind: EventBound, State: LeaseBound, Lease: l.id, Nonce: l.ticket.Nonce, Tokens: l.tokens, FirstToken: m.firstToken, Layouts: m.layouts})
	more := false
	for _, p := range l.early {
		more = l.enqueue(p) || more
	}
	l.early = nil
	l.handOver()
	ch := l.ch
	l.mu.Unlock()
	if more {
		ch.lanes.push(l)
	}
	return nil
}

// settled takes D's word that everything arrived.
func (l *sourceLease) settled() {
	l.mu.Lock()
	// Not the latest record must have come: the one before counts too, if what was sent again landed before its lane said so.
	sent := l.state == LeaseBound && l.handed
	if sent {
		for id, f := range l.flying { // acknowledgements that are still on their way say nothing new
			if f.push != nil {
				n := uint64(f.piece.Bytes)
				l.ch.backlog.Add(-int64(n))
				l.bytes += n
				if f.push.left -= n; f.push.left == 0 {
					l.landedPush(f.push)
				}
			}
			delete(l.flying, id)
		}
	}
	l.mu.Unlock()
	if sent {
		l.finish(outcome{state: LeaseSettled, kind: EventSettled, quiet: true})
	}
}

// unsent is what the lease adds to its channel's backlog. l.mu is held.
func (l *sourceLease) unsent() (n uint64) {
	for _, f := range l.flying {
		if f.push != nil {
			n += uint64(f.piece.Bytes)
		}
	}
	for i, w := range l.queue {
		n += l.geom.bytesIn(&l.geom.pairs[w.pair], w.First, w.Count) + l.geom.bytesFrom(w.pair+1, w.all)
		if i == 0 {
			n -= uint64(w.part) * PieceMax
		}
	}
	return n
}
