package engine

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/ticket"
	"github.com/headrace/headrace/worker/api"
)

type nonce = [16]byte

type leaseState uint8

const (
	leaseIdle  leaseState = iota // the daemon has not heard of it from us
	leaseAsked                   // Present or Bind is under way or answered; the peer may touch nothing yet, or already
	leaseBound                   // both sides are bound: KV moves
	leaseEnded                   // the daemon said that the fence holds
)

// lease is this engine's end of one dispatch attempt.
type lease struct {
	conn   *conn
	ticket []byte
	nonce  nonce
	peer   string // whom it was presented for, where this side gives
	state  leaseState
	id     transfer.LeaseID
	first  int  // blocks before this one are at D already
	parked bool // idle because the daemon gives way: to be presented to its successor
	pushed int  // leading blocks that were submitted for every layer
	gives  bool // this side has the KV
	moves  bool // of a request that decodes here and is to go on elsewhere, see Move
	tokens int  // whose KV goes over, where this side gives it
	landed bool // what moves has arrived
}

// presentation is P's word that it has begun, held until the router's request for it arrives.
type presentation struct {
	conn *conn
	meta []byte
}

// presentationsMax bounds what peers can make us remember.
const presentationsMax = 4096

// admitLeg takes one half of a disaggregated request. What is wrong with it is the router's business, not the
// client's: it is answered with a failed leg.
func (e *Engine) admitLeg(s *seq) {
	tk, err := ticket.Decode(s.req.Ticket)
	if err != nil {
		e.fail(s, fmt.Sprintf("read the ticket: %v", err))
		return
	}
	c := e.link.conn
	if c == nil {
		e.fail(s, "this worker has no node daemon at the moment: it can serve whole requests only")
		return
	}
	if _, ok := e.byNonce[tk.Nonce]; ok {
		e.fail(s, "the ticket is in use already: mint one for each attempt")
		return
	}
	deadline := tk.Deadline
	if d := s.req.Deadline; !d.IsZero() && d.Before(deadline) {
		deadline = d
	}
	if p := e.presented[tk.Nonce]; p != nil {
		c = p.conn // the daemon that has the presentation binds it, though another may have taken its place since
	}
	l := &lease{conn: c, ticket: s.req.Ticket, nonce: tk.Nonce, gives: s.isPrefillLeg(), tokens: s.context}
	s.lease = l
	s.timer = time.AfterFunc(time.Until(deadline), func() { e.q.post(func() { e.expire(s, l) }) })
	e.byNonce[tk.Nonce] = s
	if s.isPrefillLeg() {
		e.waiting = append(e.waiting, s)
	} else {
		s.state = stAwaitKV
		e.insertActive(s)
	}
	s.phase(api.PhaseQueued)
}

// ---- prefill side

// present tells D's daemon that we have begun.
func (e *Engine) present(s *seq, peer string) {
	l := s.lease
	l.state, l.peer = leaseAsked, peer
	req := transfer.PresentReq{
		Ticket: l.ticket, Peer: peer, Regions: l.conn.regions,
		Tokens: uint32(l.tokens), Blocks: append([]uint32(nil), s.blocks[:e.pool.BlocksFor(l.tokens)]...),
		Meta: metaOf(s.tokens[:l.tokens]).encode(),
	}
	l.conn.do(func(d Daemon) {
		if _, err := d.Present(e.ctx, req); errors.Is(err, transfer.ErrDraining) {
			e.q.post(func() { e.presentAnew(s, l) })
		} else if err != nil {
			e.q.post(func() { e.leaseFailed(s, l, fmt.Sprintf("present the ticket: %v", err)) })
		}
	})
}

// presentAnew is for a ticket that a daemon did not take because it gives way: its successor will, as soon as it is there.
func (e *Engine) presentAnew(s *seq, l *lease) {
	if s.lease != l || l.state != leaseAsked {
		return
	}
	l.state = leaseIdle
	if c := e.link.conn; c != nil && c != l.conn {
		l.conn = c
		e.present(s, l.peer)
		return
	}
	l.parked = true
}

// adopt moves what no daemon has heard of to a new connection, and presents what the last one did not take.
func (e *Engine) adopt(c *conn) {
	for _, list := range [][]*seq{e.active, e.waiting} {
		for _, s := range list {
			l := s.lease
			if l == nil || l.state != leaseIdle || e.presented[l.nonce] != nil {
				continue
			}
			l.conn = c
			if l.parked {
				l.parked = false
				e.present(s, l.peer)
			}
		}
	}
}

// uses tells whether anything of ours is in the hands of a connection's daemon.
func (e *Engine) uses(c *conn) bool {
	for _, list := range [][]*seq{e.active, e.waiting} {
		for _, s := range list {
			if s.lease != nil && s.lease.conn == c {
				return true
			}
		}
	}
	for _, p := range e.presented {
		if p.conn == c {
			return true
		}
	}
	return false
}

// leaseFailed ends a leg whose daemon refused a call: then nothing was bound by it.
func (e *Engine) leaseFailed(s *seq, l *lease, reason string) {
	if s.lease != l {
		return
	}
	e.letDown(s, reason)
}

func (e *Engine) onBound(s *seq, ev transfer.Event) {
	l := s.lease
	if !l.gives || l.state != leaseAsked {
		return
	}
	l.state, l.id = leaseBound, ev.Lease
	l.first = int(ev.FirstToken) / e.pool.BlockTokens()
	if l.moves {
		e.moveOn(s)
		return
	}
	s.phase(api.PhaseBound)
	e.catchUp(s)
	if s.state == stHandoff {
		e.sendHandoff(s)
	}
}

// ready is the number of leading blocks that may be pushed when n tokens are computed: full ones, and the last
// partial one when nothing will be added to it.
func (e *Engine) ready(s *seq, n int) int {
	if n >= s.context {
		return e.pool.BlocksFor(s.context)
	}
	return n / e.pool.BlockTokens()
}

// catchUp submits what was computed, or found in the prefix cache, before D had bound its blocks.
func (e *Engine) catchUp(s *seq) {
	l := s.lease
	from, to := max(l.pushed, l.first), e.ready(s, s.computed)
	if to > l.pushed {
		l.pushed = to
	}
	if to <= from {
		return
	}
	e.push(s, e.units(from, to), 0)
}

// units are some blocks in every layer.
func (e *Engine) units(from, to int) []transfer.Unit {
	units := make([]transfer.Unit, e.cfg.Cache.Layers)
	for i := range units {
		units[i] = transfer.Unit{Layer: uint32(i), First: uint32(from), Count: uint32(to - from)}
	}
	return units
}

// push submits units; when they have landed that is told by seq, unless it is 0.
func (e *Engine) push(s *seq, units []transfer.Unit, seq uint64) {
	l := s.lease
	l.conn.do(func(d Daemon) {
		if err := d.Push(e.ctx, l.id, units, seq); err != nil {
			e.q.post(func() { e.leaseFailed(s, l, fmt.Sprintf("push KV: %v", err)) })
		}
	})
}

// layerPusher answers with the callback that pushes each layer's finished blocks while the next layer computes, or
// nil when no one in the batch has bound blocks.
func (e *Engine) layerPusher(batch []work) func(layer int) {
	var legs []work
	for _, w := range batch {
		if w.seq.bound() && !w.seq.lease.moves {
			e.catchUp(w.seq) // a prefix hit that this step does not compute
			legs = append(legs, w)
		}
	}
	if len(legs) == 0 {
		return nil
	}
	return func(layer int) {
		for _, w := range legs {
			s := w.seq
			from, to := max(s.lease.pushed, s.lease.first), e.ready(s, s.computed+w.n)
			if to > from {
				e.push(s, []transfer.Unit{{Layer: uint32(layer), First: uint32(from), Count: uint32(to - from)}}, 0)
			}
		}
	}
}

// pushed notes that layerPusher has submitted all layers of what a step completed.
func (e *Engine) pushed(s *seq) {
	if s.bound() && !s.lease.moves {
		s.lease.pushed = max(s.lease.pushed, e.ready(s, s.computed))
	}
}

// handoff ends P's computing: token one is out, D goes on when the lease has settled.
func (e *Engine) handoff(s *seq) {
	s.state = stHandoff
	if s.bound() {
		e.sendHandoff(s)
	}
}

func (e *Engine) sendHandoff(s *seq) {
	l := s.lease
	s.phase(api.PhaseTransferring)
	rec := record{position: uint32(l.tokens), cached: uint32(s.cached), tokens: s.tokens[s.prompt():]}.encode()
	l.conn.do(func(d Daemon) {
		if err := d.Handoff(e.ctx, l.id, rec); err != nil {
			e.q.post(func() { e.leaseFailed(s, l, fmt.Sprintf("hand off: %v", err)) })
		}
	})
}

// ---- decode side

func (e *Engine) onPresented(c *conn, ev transfer.Event) {
	refuse := func(reason string) { c.do(func(d Daemon) { _ = d.RevokeTicket(e.ctx, ev.Nonce, reason) }) }
	if _, ok := e.closed[ev.Nonce]; ok {
		refuse("the request has ended at the decode side")
		return
	}
	if len(e.presented) >= presentationsMax {
		refuse("too many presented tickets wait for their request at the decode side")
		return
	}
	e.presented[ev.Nonce] = &presentation{conn: c, meta: ev.Meta}
	if s := e.byNonce[ev.Nonce]; s != nil && s.lease != nil && s.lease.state == leaseIdle {
		s.lease.conn = c
	}
}

// tryBind binds, in order of arrival, the requests that P has begun and that blocks can be found for.
func (e *Engine) tryBind() {
	for _, s := range append([]*seq(nil), e.active...) {
		if s.state != stAwaitKV || s.lease.state != leaseIdle {
			continue
		}
		p := e.presented[s.lease.nonce]
		if p == nil || !p.conn.live {
			continue
		}
		if err := e.checkPresented(s, p); err != nil {
			e.fail(s, err.Error())
			continue
		}
		if !e.reserve(s) {
			return // first come, first served: a smaller one behind must not starve it
		}
		delete(e.presented, s.lease.nonce)
		e.bind(s)
	}
}

func (e *Engine) checkPresented(s *seq, p *presentation) error {
	m, err := decodeMeta(p.meta)
	if err != nil {
		return err
	}
	if want := metaOf(s.tokens); m != want {
		return fmt.Errorf("the prefill side presents %d tokens (hash %x) where this side has %d (hash %x): do both serve the same model file?", m.tokens, m.hash, want.tokens, want.hash)
	}
	return nil
}

// reserve takes the blocks of a whole context. Blocks that wait for bytes stay under a share of the cache, unless
// they are the only ones.
func (e *Engine) reserve(s *seq) bool {
	total := e.pool.BlocksFor(len(s.tokens))
	if e.reserved > 0 && (e.reserved+total)*100 > e.cfg.UnboundPercent*e.pool.Total() {
		return false
	}
	blocks, content := e.pool.Match(s.tokens[:len(s.tokens)-1])
	more, err := e.pool.Alloc(total - len(blocks))
	if err != nil {
		e.pool.Release(blocks)
		return false
	}
	e.count.prefixQueries += uint64(len(s.tokens))
	e.count.prefixHits += uint64(len(blocks) * e.pool.BlockTokens())
	s.committed, s.content = len(blocks), content
	e.count.externalQueries += uint64(len(s.tokens) - len(blocks)*e.pool.BlockTokens())
	s.blocks = append(blocks, more...)
	e.reserved += len(s.blocks)
	return true
}

func (e *Engine) bind(s *seq) {
	l := s.lease
	l.state = leaseAsked
	req := transfer.BindReq{
		Ticket: l.ticket, Regions: l.conn.regions,
		FirstToken: uint32(s.committed * e.pool.BlockTokens()),
		Blocks:     append([]uint32(nil), s.blocks...),
	}
	l.conn.do(func(d Daemon) {
		id, err := d.Bind(e.ctx, req)
		e.q.post(func() {
			switch {
			case s.lease != l:
			case err != nil:
				e.leaseFailed(s, l, fmt.Sprintf("bind the ticket: %v", err))
			case l.state == leaseAsked:
				l.state, l.id = leaseBound, id
				s.phase(api.PhaseBound)
			}
		})
	})
}

// ---- both

func (e *Engine) onEvent(c *conn, ev transfer.Event) {
	if ev.Kind == transfer.EventPresented {
		e.onPresented(c, ev)
		return
	}
	s := e.byNonce[ev.Nonce]
	if s == nil || s.lease == nil || s.lease.conn != c {
		if ev.Kind == transfer.EventEnded {
			delete(e.presented, ev.Nonce)
		}
		return
	}
	switch ev.Kind {
	case transfer.EventBound:
		e.onBound(s, ev)
	case transfer.EventPushed:
		if l := s.lease; l.moves && ev.Seq == moveSeq {
			l.landed = true
			e.moveOn(s)
		}
	case transfer.EventSettled:
		e.onSettled(s, ev)
	case transfer.EventRefused, transfer.EventEnded:
		if ev.State == transfer.LeaseMoved {
			e.presentAnew(s, s.lease)
			return
		}
		s.lease.state = leaseEnded
		delete(e.presented, ev.Nonce)
		e.letDown(s, ev.Reason)
	}
}

// onSettled: every byte has landed and no lane can write any more. P lets go, D takes over.
func (e *Engine) onSettled(s *seq, ev transfer.Event) {
	l := s.lease
	l.state = leaseEnded
	if l.gives {
		s.emit(api.TokenEvent{Kind: api.EventSettled})
		e.end(s, "settled")
		return
	}
	rec, err := decodeRecord(ev.Record)
	n := len(s.req.Resume)
	if err == nil && (int(rec.position) != s.context || len(rec.tokens) <= n || len(rec.tokens) > n+1 && len(rec.tokens) >= s.req.MaxTokens || !slices.Equal(rec.tokens[:n], s.req.Resume)) {
		err = fmt.Errorf("%w: record for position %d with %d tokens does not fit a context of %d with %d resumed", errHandoff, rec.position, len(rec.tokens), s.context, n)
	}
	if err != nil {
		e.fail(s, err.Error())
		return
	}
	e.reserved -= len(s.blocks)
	e.forgetLease(s)
	s.timer.Stop()
	e.count.externalHits += uint64(s.context - s.committed*e.pool.BlockTokens())
	s.computed = s.context
	e.commit(s, s.computed)
	s.tokens = append(s.tokens, rec.tokens[n:]...)
	s.cached = int(rec.cached)
	s.state = stRunning
	e.tail(s)

	s.emit(api.TokenEvent{Kind: api.EventPrior, Prior: rec.tokens, CachedTokens: s.cached})
	s.phase(api.PhaseDecoding)
}

func (e *Engine) forgetLease(s *seq) {
	delete(e.byNonce, s.lease.nonce)
	e.closed[s.lease.nonce] = time.Now()
	if len(e.closed) > 2*presentationsMax {
		for n, t := range e.closed {
			if time.Since(t) > time.Minute {
				delete(e.closed, n)
			}
		}
	}
	s.lease = nil
}

// dropLease gives a request's blocks back: at once where no peer can touch them, else behind the fence.
func (e *Engine) dropLease(s *seq, reason string) {
	l := s.lease
	if l == nil {
		e.letGo(s)
		return
	}
	if s.req.Role == api.RoleDecode && s.state == stAwaitKV && l.state != leaseIdle {
		e.reserved -= len(s.blocks)
	}
	e.forgetLease(s)
	switch l.state {
	case leaseEnded:
		e.letGo(s)
	case leaseIdle:
		if p := e.presented[l.nonce]; p != nil {
			delete(e.presented, l.nonce)
			p.conn.do(func(d Daemon) { _ = d.Refuse(e.ctx, l.ticket, reason) })
		}
		e.letGo(s)
	default:
		e.fence(s, l, reason)
		e.letGo(s)
	}
}

// onDown fails every leg whose daemon is gone. Requests that decode by themselves do not notice.
func (e *Engine) onDown(c *conn, reason error) {
	for n, p := range e.presented {
		if p.conn == c {
			delete(e.presented, n)
		}
	}
	for _, list := range [][]*seq{append([]*seq(nil), e.active...), append([]*seq(nil), e.waiting...)} {
		for _, s := range list {
			if s.lease != nil && s.lease.conn == c {
				e.letDown(s, fmt.Sprintf("the node daemon of this worker is gone: %v", reason))
			}
		}
	}
}
