package transfer

import (
	"fmt"
	"sync"
	"time"

	"github.com/headrace/headrace/transfer/ticket"
)

// A ticket may be presented before its decode engine is attached: it was just restarted, or connects when it has work and
// has not heard of this request yet. Such a presentation waits, until its engine comes, P's daemon takes it back, it is recalled, or its
// ticket's deadline passes. It is in no book and has no lease here until then.

// parkedMax bounds what waits at one daemon.
const parkedMax = 1024

type parked struct {
	parkedKey
	m      *presentMsg
	nonce  [16]byte
	engine string
	timer  *time.Timer
	taken  bool          // its engine has come: it is being opened
	opened chan struct{} // closed when it was opened, or refused
}

type parkedKey struct {
	c  *channel
	id LeaseID // P's
}

type parkingLot struct {
	mu   sync.Mutex // a leaf
	lots map[parkedKey]*parked
}

// park lets a presentation wait. A nil error means that it does.
func (c *channel) park(id LeaseID, m *presentMsg, t *ticket.Ticket) error {
	e, lot := c.e, &c.e.parking
	if err := e.book.check(t.Nonce, e.now()); err != nil {
		return err
	}
	p := &parked{parkedKey: parkedKey{c, id}, m: m, nonce: t.Nonce, engine: t.DEngine, opened: make(chan struct{})}
	lot.mu.Lock()
	if len(lot.lots) >= parkedMax {
		lot.mu.Unlock()
		return fmt.Errorf("%w: decode engine %q is not attached to %q, and %d tickets wait for their engines already", ErrLimit, t.DEngine, e.cfg.NodeID, parkedMax)
	}
	if lot.lots == nil {
		lot.lots = make(map[parkedKey]*parked)
	}
	lot.lots[p.parkedKey] = p
	p.timer = time.AfterFunc(time.Until(t.Deadline), func() {
		e.unpark(fmt.Sprintf("decode engine %q did not attach to %q before the ticket's deadline", p.engine, e.cfg.NodeID), func(q *parked) bool { return q == p })
	})
	lot.mu.Unlock()
	e.log.Info("a ticket waits for its decode engine to attach", "engine", t.DEngine, "peer", c.peer.NodeID)
	// What happened just before it could be seen to wait:
	switch err := e.book.check(t.Nonce, e.now()); {
	case err != nil:
		e.unpark(err.Error(), func(q *parked) bool { return q == p })
	case c.isClosed():
		c.leaveParked()
	case e.client(t.DEngine) != nil:
		e.openParked(t.DEngine)
	}
	return nil
}

// remove takes out those that wait and that f chooses.
func (lot *parkingLot) remove(f func(*parked) bool) (out []*parked) {
	lot.mu.Lock()
	defer lot.mu.Unlock()
	for key, p := range lot.lots {
		if !p.taken && f(p) {
			p.timer.Stop()
			delete(lot.lots, key)
			out = append(out, p)
		}
	}
	return out
}

// unpark refuses those that f chooses, and says how many.
func (e *Engine) unpark(reason string, f func(*parked) bool) int {
	out := e.parking.remove(f)
	for _, p := range out {
		e.totals.refused.Add(1)
		p.c.out.send(reasonFrame(frameRefused, roleTarget, p.id, reason))
	}
	return len(out)
}

// openParked presents to an engine that has come what waited for it.
func (e *Engine) openParked(engine string) {
	var come []*parked
	e.parking.mu.Lock()
	for _, p := range e.parking.lots {
		if p.engine == engine && !p.taken {
			p.timer.Stop()
			p.taken = true
			come = append(come, p)
		}
	}
	e.parking.mu.Unlock()
	for _, p := range come {
		open := func() {
			p.c.handlePresent(p.id, p.m)
			e.parking.mu.Lock()
			if e.parking.lots[p.parkedKey] == p { // else it waits anew
				delete(e.parking.lots, p.parkedKey)
			}
			e.parking.mu.Unlock()
			close(p.opened)
		}
		if !e.spawn(open) {
			close(p.opened)
		}
	}
}

// takeBack is P's word that it presents no more. Where the presentation is being opened just now, it gives what to wait
// for before the lease is looked for.
func (c *channel) takeBack(id LeaseID) (opened chan struct{}) {
	lot := &c.e.parking
	lot.mu.Lock()
	defer lot.mu.Unlock()
	p := lot.lots[parkedKey{c, id}]
	if p == nil {
		return nil
	}
	if p.taken {
		return p.opened
	}
	p.timer.Stop()
	delete(lot.lots, p.parkedKey)
	return nil
}

// leaveParked forgets what waits on a channel that closes.
func (c *channel) leaveParked() {
	c.e.parking.remove(func(p *parked) bool { return p.c == c })
}

// sendParkedOn gives back what waits when the daemon gives way: the successor is to let it wait.
func (e *Engine) sendParkedOn() {
	for _, p := range e.parking.remove(func(*parked) bool { return true }) {
		p.c.out.send(finishFrame(newFrame(frameAgain, roleTarget, p.id, 0)))
	}
}

// has tells whether a ticket waits for its engine.
func (lot *parkingLot) has(nonce [16]byte) bool {
	lot.mu.Lock()
	defer lot.mu.Unlock()
	for _, p := range lot.lots {
		if p.nonce == nonce {
			return true
		}
	}
	return false
}

func (lot *parkingLot) len() int {
	lot.mu.Lock()
	defer lot.mu.Unlock()
	return len(lot.lots)
}
