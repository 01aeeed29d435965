package engine

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/ticket"
	"github.com/headrace/headrace/worker/api"
)

// A request that decodes here can go on at another engine. For that it plays the prefill side once more, at a later position:
// it is presented with the KV that it has, goes on making tokens until that has landed, and hands off between two steps.
// The tokens made meanwhile are in the record; the engine that goes on computes the KV of these few again, as one chunk.
// Until the hand-off nothing of the request changes, and behind it nothing is lost before the lease has settled: whatever goes
// wrong, it stays.

// moveSeq is the sequence number of a move's push, by which its landing is told.
const moveSeq = 1

var _ api.Mover = (*Engine)(nil)

// Move makes a request go on elsewhere.
func (e *Engine) Move(ctx context.Context, m api.Move) error {
	answer := make(chan error, 1)
	if !e.q.post(func() { answer <- e.move(m) }) {
		return api.ErrBusy
	}
	select {
	case err := <-answer:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-e.ctx.Done():
		return api.ErrBusy
	}
}

func (e *Engine) move(m api.Move) error {
	not := func(format string, args ...any) error {
		return &api.NotMovedError{Reason: fmt.Sprintf(format, args...)}
	}
	tk, err := ticket.Decode(m.Ticket)
	if err != nil {
		return not("read the ticket: %v", err)
	}
	s := e.movable(&m)
	c := e.link.conn
	switch _, used := e.byNonce[tk.Nonce]; {
	case s == nil:
		return not("no such request decodes here")
	case s.lease != nil || s.fences > 0:
		return not("it moves already")
	case m.Tokens < 1 || m.Tokens > s.generated():
		return not("%d tokens are to be moved of %d", m.Tokens, s.generated())
	case c == nil:
		return not("this worker has no node daemon at the moment")
	case used:
		return not("the ticket is in use already: mint one for each move")
	}
	l := &lease{conn: c, ticket: m.Ticket, nonce: tk.Nonce, gives: true, moves: true, tokens: s.prompt() + m.Tokens}
	if need := e.pool.BlocksFor(l.tokens) - len(s.blocks); need > 0 { // the last token's KV is computed by the next step
		more, err := e.pool.Alloc(need)
		if err != nil {
			return not("the cache is full")
		}
		s.blocks = append(s.blocks, more...)
	}
	s.lease = l
	e.byNonce[tk.Nonce] = s
	s.timer = time.AfterFunc(time.Until(tk.Deadline), func() { e.q.post(func() { e.expire(s, l) }) })
	e.present(s, m.Peer)
	return nil
}

// movable finds the request that a move is about: the latest one, where an attempt before has not quite ended.
func (e *Engine) movable(m *api.Move) *seq {
	for i := len(e.active) - 1; i >= 0; i-- {
		s := e.active[i]
		if s.req.ID == m.ID && s.req.Choice == m.Choice && s.req.Movable && !s.isPrefillLeg() && s.state == stRunning {
			return s
		}
	}
	return nil
}

// moveOn takes a request on its way as far as it goes now. It is called between steps only.
func (e *Engine) moveOn(s *seq) {
	l := s.lease
	if l == nil || !l.moves || l.state != leaseBound || s.state != stRunning || s.computed < l.tokens {
		return
	}
	if from, to := l.first, e.pool.BlocksFor(l.tokens); l.pushed < to {
		l.pushed = to
		if from < to {
			e.push(s, e.units(from, to), moveSeq)
			return
		}
		l.landed = true // the other side has all of it already
	}
	if !l.landed {
		return
	}
	s.emit(api.TokenEvent{Kind: api.EventHandoff})
	s.state = stHandoff
	e.sendHandoff(s)
}

// letDown is for a leg whose lease came to nothing: it ends, unless it is a request that can go on without.
func (e *Engine) letDown(s *seq, reason string) {
	l := s.lease
	if l == nil || !l.moves {
		e.fail(s, reason)
		return
	}
	s.timer.Stop()
	e.forgetLease(s)
	if s.state == stHandoff {
		s.state = stRunning
	}
	if l.state != leaseEnded { // what the peer reads does not change; the blocks may not be another's before the fence stands
		e.fence(s, l, reason)
	}
	s.emit(api.TokenEvent{Kind: api.EventStays, Reason: reason})
}

// keepOne gives up the youngest move that has not come to its hand-off, for somebody who needs a block: a request on its way cannot be
// preempted.
func (e *Engine) keepOne() {
	for i := len(e.active) - 1; i >= 0; i-- {
		if s := e.active[i]; s.state == stRunning && s.lease != nil && s.lease.moves {
			e.letDown(s, "the cache is full")
			return
		}
	}
}

// expire ends a wait for a peer. A request that decodes by itself is past it.
func (e *Engine) expire(s *seq, l *lease) {
	if s.lease == l {
		e.letDown(s, "the hand-off's deadline has passed")
	}
}

// fence revokes behind everything that was already asked of the daemon, and gives the blocks of a request that has ended back when it stands. If
// the daemon is gone, or does not answer, its process may still write: the blocks are quarantined until it has ended.
func (e *Engine) fence(s *seq, l *lease, reason string) {
	l.conn.fences++
	s.fences++
	blocks, quarantined := len(s.blocks), 0
	fenced := func() {
		e.q.post(func() {
			l.conn.fences--
			s.fences--
			e.quarantined -= quarantined
			if s.state == stFencing {
				e.letGo(s)
			}
		})
	}
	quarantine := func() {
		e.q.post(func() {
			if s.state == stFencing { // else they are in use, by the one who may use them
				quarantined = len(s.blocks)
				e.quarantined += quarantined
			}
		})
	}
	l.conn.behind(func(d Daemon) {
		for e.ctx.Err() == nil {
			err := d.RevokeTicket(e.ctx, l.nonce, reason)
			if err == nil || errors.Is(err, transfer.ErrUnknownLease) || errors.Is(err, transfer.ErrLeaseEnded) {
				fenced()
				return
			}
			select {
			case <-d.Done():
				e.log.Warn("quarantine leased blocks until the node daemon's process has ended", "blocks", blocks, "why", d.Err())
				quarantine()
				select {
				case <-l.conn.safe:
					fenced()
				case <-e.ctx.Done():
				}
				return
			default:
				e.log.Warn("revoke a lease; trying again", "err", err)
				pause(e.ctx, redialMin)
			}
		}
	})
}

// letGo gives the blocks of a request that has ended back, unless a fence is still awaited.
func (e *Engine) letGo(s *seq) {
	if s.fences > 0 {
		s.state = stFencing
		e.fencing[s] = struct{}{}
		return
	}
	delete(e.fencing, s)
	e.release(s)
	s.state = stDone
}

// tail finds room for the tokens of a record whose KV did not come along.
func (e *Engine) tail(s *seq) {
	if s.remaining() > 1 && !e.room(s, len(s.tokens)) && s.state == stRunning {
		e.preempt(s)
	}
}
