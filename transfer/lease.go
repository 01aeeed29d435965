package transfer

import (
	"fmt"
	"sync"
	"time"

	"github.com/headrace/headrace/transfer/ticket"
)

// lease is what both sides of a lease have in common: its life and its fence. Exactly one finish wins, and by the time
// the client hears of the end the fence holds.
type lease struct {
	e      *Engine
	id     LeaseID
	client *Client
	ticket ticket.Ticket
	raw    []byte // the ticket's bytes
	tokens uint32
	opened time.Time
	guard  *guard
	done   chan struct{} // closed when finish is through
	src    *sourceLease  // one of the two
	dst    *targetLease
	// The shard set. Of a target: set when bound; guarded by client.mu until the lease is bound, fixed afterwards.
	regions []*Region

	mu    sync.Mutex
	state LeaseState
	ch    *channel
	timer *time.Timer
	geom  geometry // since bound
	bytes uint64   // landed
	// What headrace trace tells.
	course course
}

func (l *lease) role() uint8 {
	if l.src != nil {
		return roleSource
	}
	return roleTarget
}

func (l *lease) side() string {
	if l.src != nil {
		return "source"
	}
	return "target"
}

// wireID is the id the lease has in control frames: the source's.
func (l *lease) wireID() LeaseID {
	if l.src != nil {
		return l.id
	}
	return l.dst.sourceID
}

func (l *lease) living() bool { return l.state == LeaseOpen || l.state == LeaseBound }

// startTimer lets the lease expire at its ticket's deadline.
func (l *lease) startTimer() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.living() {
		l.timer = time.AfterFunc(time.Until(l.ticket.Deadline), func() {
			l.finish(outcome{state: LeaseExpired, kind: EventEnded, reason: "the ticket's deadline passed"})
		})
	}
}

// outcome is how a lease ends.
type outcome struct {
	state  LeaseState
	kind   EventKind
	reason string
	quiet  bool // the peer knows
	record []byte
}

// finish ends the lease: the state first, so that nothing new begins, then the peer is told and the fence made, then the
// blocks are given back and the client is told. It reports whether this call ended it; another's end is
// waited for. What is on its way to the peer still, after a source's blocks were given back, done waits for. The caller
// holds no lock.
func (l *lease) finish(o outcome) bool {
	l.mu.Lock()
	if !l.living() {
		l.mu.Unlock()
		<-l.done
		return false
	}
	l.state = o.state
	ch, timer := l.ch, l.timer
	l.mu.Unlock()
	if timer != nil {
		timer.Stop()
	}
	// A target says so before its fence, because the writer's stopping may be what the fence waits for; a source when
	// nothing of it is on its way any more, because that is what its word means. Where the other end fetches, its own fence does
	// not need that word, and its stopping is what the source's waits for.
	told := l.dst != nil && o.state != LeaseSettled || l.src != nil && ch != nil && offers(ch.currentLink())
	if told {
		l.tellPeer(ch, &o)
	}
	began := time.Now()
	forced := l.fence(ch)
	if l.dst != nil {
		l.dst.endGrant()
		if o.state == LeaseSettled {
			l.tellPeer(ch, &o)
		}
	}
	l.remember(&o) // before it is off the list of the living, so that it is always found
	l.detach(ch)
	l.account(o, ch, forced, began)
	kind := o.kind
	if l.dst != nil && kind == EventRefused {
		kind = EventEnded
	}
	l.client.emit(Event{
		Kind: kind, State: o.state, Lease: l.id, Nonce: l.ticket.Nonce, Tokens: l.tokens, Reason: o.reason, Record: o.record,
	})
	if l.src == nil || told {
		close(l.done)
	} else {
		l.lastWord(ch, o)
	}
	return true
}

// lastWord tells the peer of a source that nothing of it is on its way any more, as soon as that is so.
func (l *lease) lastWord(ch *channel, o outcome) {
	say := func() {
		l.tellPeer(ch, &o)
		close(l.done)
	}
	if ch == nil || ch.lanes.gone(l.src) {
		say()
		return
	}
	if !l.e.spawn(func() {
		ch.lanes.awaitGone(l.src)
		say()
	}) {
		say() // an engine that closes takes its channels with it
	}
}

// tellPeer sends what the end of the lease means to the peer.
func (l *lease) tellPeer(ch *channel, o *outcome) {
	switch {
	case ch == nil || o.quiet:
	case o.state == LeaseSettled:
		ch.out.send(finishFrame(newFrame(frameSettled, roleTarget, l.wireID(), 0)))
	case o.kind == EventRefused:
		ch.out.send(reasonFrame(frameRefused, roleTarget, l.wireID(), o.reason))
	default:
		ch.out.send(revokeFrame(l.role(), l.wireID(), o.state, o.reason))
	}
}

// fence returns when no byte lands in the lease's blocks and none is read from them any more. Where every touch is guarded
// that takes as long as one system call or one copied piece. Where the network card touches memory by itself, the peer
// is given FenceGrace to stop by agreement; then the lanes are aborted.
func (l *lease) fence(ch *channel) (forced bool) {
	l.guard.shut()
	if !ch.oneSided() {
		<-l.guard.drained
		return false
	}
	select {
	case <-l.guard.drained: // whatever the timer says
		return false
	default:
	}
	t := time.NewTimer(l.e.cfg.FenceGrace)
	defer t.Stop()
	select {
	case <-l.guard.drained:
		return false
	case <-t.C:
	}
	ch.force(l)
	<-l.guard.drained
	return true
}

func (l *lease) detach(ch *channel) {
	if ch != nil {
		ch.drop(l)
	}
	if l.dst != nil {
		l.dst.giveBack()
	}
	l.client.drop(l)
	l.client.mu.Lock()
	regions := l.regions
	l.client.mu.Unlock()
	releaseAll(regions, l)
	l.e.leases.Add(-1)
}

func (l *lease) account(o outcome, ch *channel, forced bool, began time.Time) {
	t := &l.e.totals
	switch o.state {
	case LeaseSettled:
		t.settled.Add(1)
	case LeaseExpired:
		t.expired.Add(1)
	case LeaseMoved:
		t.moved.Add(1)
	default:
		t.revoked.Add(1)
	}
	if forced {
		t.forced.Add(1)
	}
	name := ""
	if ch != nil {
		name = ch.transport
	}
	l.mu.Lock()
	bytes := l.bytes
	l.mu.Unlock()
	if m := l.e.cfg.Metrics; m != nil {
		m.Fenced(l.side(), time.Since(began), forced)
		m.LeaseEnded(l.side(), o.state, name, bytes, time.Since(l.opened))
	}
	l.e.log.Debug("lease ended", "lease", l.id, "side", l.side(), "engine", l.client.id, "state", o.state.String(), "reason", o.reason, "bytes", bytes)
}

// fail ends a lease for a reason that is neither side's wish.
func (l *lease) fail(format string, args ...any) {
	l.finish(outcome{state: LeaseRevoked, kind: EventEnded, reason: fmt.Sprintf(format, args...)})
}
