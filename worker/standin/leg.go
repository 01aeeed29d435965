package standin

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"time"

	"github.com/headrace/headrace/worker/api"
)

// Two stand-ins that share a request speak with each other directly, in JSON, a line a word: prefill offers its KV under
// the ticket when it begins, decode answers when it has blocks for it, and prefill sends the record when a link of the
// table's speed would have carried what decode lacks. No byte of KV exists.

const (
	offersMax   = 4096
	lineBytes   = 8 << 20
	peerTimeout = 5 * time.Second // for a word to be written
)

// offerMsg is prefill's first word.
type offerMsg struct {
	Ticket []byte `json:"ticket"`
	Tokens int    `json:"tokens"` // of the context
	Draw   uint64 `json:"draw"`   // which must be decode's own
}

// boundMsg is decode's answer.
type boundMsg struct {
	Have    int    `json:"have"` // tokens that decode found in its own cache
	Refused string `json:"refused,omitempty"`
}

// recordMsg is the hand-off.
type recordMsg struct {
	Tokens []int32 `json:"tokens"` // of the answer so far
	Cached int     `json:"cached"`
}

// leg is what a half of a request has beside a whole one.
type leg struct {
	ticket string
	ctx    context.Context // ends with the leg
	cancel context.CancelFunc

	// Prefill.
	bound  bool
	have   int              // tokens that decode has
	booked int              // tokens whose transfer is on the link
	record chan timedRecord // holds one, when all is computed
}

type timedRecord struct {
	recordMsg
	at time.Time // when decode has all KV
}

// offer is a prefill engine's word here, at the decode side.
type offer struct {
	offerMsg
	conn net.Conn
	s    *seq // once it is bound
}

// admitLeg takes a half of a request; false when it has failed already.
func (e *Engine) admitLeg(s *seq) bool {
	ticket := string(s.req.Ticket)
	l := &leg{ticket: ticket, record: make(chan timedRecord, 1)}
	l.ctx, l.cancel = context.WithCancel(e.ctx)
	s.leg = l
	switch {
	case ticket == "":
		e.fail(s, "there is no ticket")
		return false
	case s.req.Role == api.RolePrefill:
	case e.cfg.Peers == nil:
		e.fail(s, "this worker takes no KV")
		return false
	case e.byTicket[ticket] != nil:
		e.fail(s, "the ticket is in use already: mint one for each attempt")
		return false
	default:
		e.byTicket[ticket] = s
		s.state = stAwaitKV
	}
	if d := s.req.Deadline; !d.IsZero() {
		s.expiry = time.AfterFunc(time.Until(d), func() { e.post(func() { e.expire(s) }) })
	}
	e.bindOffers()
	return true
}

func (e *Engine) expire(s *seq) {
	if s.state != stRunning || s.req.Role == api.RolePrefill {
		e.fail(s, "the hand-off's deadline has passed")
	}
}

// endLeg ends what a request has under way with another engine.
func (e *Engine) endLeg(s *seq) {
	if s.leg == nil {
		return
	}
	s.leg.cancel()
	if e.byTicket[s.leg.ticket] == s {
		delete(e.byTicket, s.leg.ticket)
	}
}

// ---- prefill side

// present offers the KV to decode's engine, and sees the offer through to its end.
func (e *Engine) present(s *seq) {
	msg := offerMsg{Ticket: s.req.Ticket, Tokens: len(s.tokens), Draw: s.draw}
	e.done.Go(func() {
		err := e.tell(s, msg)
		e.post(func() {
			switch {
			case s.ended:
			case err != nil:
				e.fail(s, fmt.Sprintf("hand over to %s: %v", s.req.Peer, err))
			default:
				s.emit(api.TokenEvent{Kind: api.EventSettled})
				e.endSeq(s)
			}
		})
	})
}

func (e *Engine) tell(s *seq, msg offerMsg) error {
	l := s.leg
	conn, err := e.cfg.Dial(l.ctx, s.req.Peer)
	if err != nil {
		return err
	}
	defer conn.Close()
	defer context.AfterFunc(l.ctx, func() { _ = conn.Close() })()
	in := bufio.NewReader(conn)
	if err := say(conn, msg); err != nil {
		return err
	}
	var bound boundMsg
	if err := hear(in, &bound); err != nil {
		return err
	}
	if bound.Refused != "" {
		return errors.New(bound.Refused)
	}
	e.post(func() {
		l.bound, l.have = true, bound.Have
		e.send(s)
	})
	var record timedRecord
	select {
	case record = <-l.record:
	case <-l.ctx.Done():
		return context.Cause(l.ctx)
	}
	timer := time.NewTimer(time.Until(record.at))
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-l.ctx.Done():
		return context.Cause(l.ctx)
	}
	if err := say(conn, record.recordMsg); err != nil {
		return err
	}
	return hear(in, &struct{}{})
}

// send puts what was computed, and decode lacks, on the link. Behind the last of it goes the record.
func (e *Engine) send(s *seq) {
	l := s.leg
	if l == nil || !l.bound || s.ended || s.req.Role != api.RolePrefill {
		return
	}
	if n := s.computed - max(l.booked, l.have); n > 0 {
		if now := time.Now(); e.linkFree.Before(now) {
			e.linkFree = now
		}
		e.linkFree = e.linkFree.Add(duration(float64(n) * e.table.KVBytesPerToken / e.table.TransferBytesPerSecond))
	}
	l.booked = max(l.booked, s.computed)
	if s.state == stHanding {
		at := e.linkFree.Add(duration(e.table.TransferSetupSeconds))
		select {
		case l.record <- timedRecord{recordMsg{slices.Clone(s.tokens[len(s.req.Prompt):]), s.cached}, at}:
		default: // it is on its way
		}
	}
}

// handOff ends prefill's part, its first token sampled.
func (e *Engine) handOff(s *seq) {
	s.state = stHanding
	s.emit(api.TokenEvent{Kind: api.EventHandoff})
	s.phase(api.PhaseTransferring)
	e.send(s)
}

// ---- decode side

func (e *Engine) accept() {
	for {
		conn, err := e.cfg.Peers.Accept()
		switch {
		case err == nil:
			e.done.Go(func() { e.hearOffer(conn) })
		case e.ctx.Err() != nil || errors.Is(err, net.ErrClosed) || errors.Is(err, io.EOF):
			return
		default: // out of descriptors, most likely
			e.cfg.Logger.Warn("accept a prefill engine", "err", err)
			select {
			case <-time.After(50 * time.Millisecond):
			case <-e.ctx.Done():
			}
		}
	}
}

// hearOffer serves one transfer.
func (e *Engine) hearOffer(conn net.Conn) {
	defer conn.Close()
	defer context.AfterFunc(e.ctx, func() { _ = conn.Close() })()
	in := bufio.NewReader(conn)
	o := &offer{conn: conn}
	if err := hear(in, &o.offerMsg); err != nil {
		e.cfg.Logger.Debug("hear an offer", "err", err)
		return
	}
	if !e.post(func() { e.offered(o) }) {
		return
	}
	var record recordMsg
	err := hear(in, &record)
	settled := make(chan bool, 1)
	if !e.post(func() { settled <- e.landed(o, record, err) }) {
		return
	}
	if <-settled {
		_ = say(conn, struct{}{})
	}
}

func (e *Engine) offered(o *offer) {
	if len(e.offers) >= offersMax {
		e.answer(o, boundMsg{Refused: "too many offers wait here"})
		return
	}
	e.offers = append(e.offers, o)
	e.bindOffers()
}

// answer says a word to prefill. The loop does not wait for it.
func (e *Engine) answer(o *offer, m boundMsg) { e.done.Go(func() { _ = say(o.conn, m) }) }

// bindOffers gives the requests whose KV is offered their blocks, as far as there are any.
func (e *Engine) bindOffers() {
	e.offers = slices.DeleteFunc(e.offers, func(o *offer) bool {
		s := e.byTicket[string(o.Ticket)]
		if s == nil || s.state != stAwaitKV || s.blocks != nil {
			return false
		}
		if o.Tokens != len(s.tokens) || o.Draw != s.draw {
			e.answer(o, boundMsg{Refused: "the prompts are not the same"})
			return true
		}
		if !e.allocate(s) {
			return false
		}
		e.count.ExternalQueries += uint64(len(s.tokens) - s.computed)
		o.s = s
		e.activate(s)
		s.phase(api.PhaseBound)
		e.answer(o, boundMsg{Have: s.computed})
		return true
	})
}

// landed takes the hand-off; false when nobody waits for it.
func (e *Engine) landed(o *offer, r recordMsg, err error) bool {
	s := o.s
	if s == nil {
		e.offers = slices.DeleteFunc(e.offers, func(x *offer) bool { return x == o })
		return false
	}
	resumed := len(s.req.Resume)
	switch {
	case s.ended:
		return false
	case err == nil && (len(r.Tokens) <= resumed || !slices.Equal(r.Tokens[:resumed], s.req.Resume)):
		err = errors.New("its record does not go on from what the client has")
		fallthrough
	case err != nil:
		e.fail(s, fmt.Sprintf("take over from prefill: %v", err))
		return false
	}
	e.count.ExternalHits += uint64(len(s.tokens) - s.computed)
	s.computed = len(s.tokens)
	e.commit(s)
	s.tokens = append(s.tokens, r.Tokens[resumed:]...)
	s.cached = min(r.Cached, len(s.req.Prompt))
	s.state = stRunning
	s.phase(api.PhaseSettled)
	s.emit(api.TokenEvent{Kind: api.EventPrior, Prior: r.Tokens})
	s.phase(api.PhaseDecoding)
	return true
}

// ---- words

func say(conn net.Conn, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if err := conn.SetWriteDeadline(time.Now().Add(peerTimeout)); err != nil {
		return err
	}
	_, err = conn.Write(append(b, '\n'))
	return err
}

// hear reads a line. There is no deadline: whoever waits closes the connection when it is enough.
func hear(in *bufio.Reader, v any) error {
	var line []byte
	for {
		part, err := in.ReadSlice('\n')
		line = append(line, part...)
		switch {
		case err == nil:
			return json.Unmarshal(line, v)
		case err != bufio.ErrBufferFull:
			return err
		case len(line) > lineBytes:
			return errors.New("a word without an end")
		}
	}
}
