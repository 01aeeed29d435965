package transfer

import (
	"context"
	"errors"
	"net"
	"slices"
	"time"

	"github.com/headrace/headrace/transfer/handshake"
	"github.com/headrace/headrace/transfer/recall"
	"github.com/headrace/headrace/transfer/ticket"
)

// A recall makes a ticket void before its deadline: who minted it has given the attempt up, or fears that nobody is left who
// would present it. Whoever holds the cluster key may recall what he could have minted.

const (
	recallsMax  = 64               // connections of one daemon
	recallWrite = 10 * time.Second // for a caller to take its answer
)

// serveRecalls answers one caller until it leaves.
func (e *Engine) serveRecalls(conn net.Conn, h *handshake.Hello) {
	defer func() { <-e.recalls }()
	defer conn.Close()
	stop := context.AfterFunc(e.ctx, func() { conn.Close() })
	defer stop()
	for {
		conn.SetReadDeadline(time.Now().Add(recall.IdleMax))
		r, err := recall.ReadRequest(conn)
		if err != nil {
			if errors.Is(err, ErrProtocol) {
				e.log.Warn("recalls ended early", "by", h.From.NodeID, "error", err)
			}
			return
		}
		reason := "recalled by " + h.From.NodeID
		if r.Reason != "" {
			reason += ": " + r.Reason
		}
		verdicts := make([]recall.Verdict, len(r.Tickets))
		for i, raw := range r.Tickets {
			verdicts[i] = e.recall(r.Kind, raw, cleanReason(reason))
		}
		if e.Draining() && slices.ContainsFunc(verdicts, func(v recall.Verdict) bool { return v != recall.Living }) {
			return // the successor is to remember them: the caller dials again, and gets there
		}
		conn.SetWriteDeadline(time.Now().Add(recallWrite))
		if _, err := conn.Write(recall.AppendAnswer(nil, verdicts)); err != nil {
			return
		}
	}
}

// recall answers for one ticket, and makes it void where that is asked. When it returns this side of a lease that it ended is
// fenced.
func (e *Engine) recall(kind recall.Kind, raw []byte, reason string) recall.Verdict {
	t, err := e.verify(raw)
	switch {
	case err != nil, kind == recall.KindLook && t.PNode != e.cfg.NodeID, kind != recall.KindLook && t.DNode != e.cfg.NodeID:
		return recall.Refused
	case kind == recall.KindLook:
		return e.look(&t)
	case kind == recall.KindIdle && e.parking.has(t.Nonce):
		return recall.Living
	}
	known, err := e.book.void(t.Nonce, t.Deadline, e.now(), reason)
	if kind == recall.KindVoid || err == nil && !known {
		e.totals.recalled.Add(1)
	}
	switch {
	case err != nil:
		return recall.Full
	case !known:
		if e.unpark(reason, func(p *parked) bool { return p.nonce == t.Nonce }) > 0 {
			return recall.Revoked
		}
		e.tellVoid(&t, reason)
		return recall.Remembered
	}
	l := e.presentedHere(&t)
	switch {
	case l != nil && kind == recall.KindIdle:
		return recall.Living
	case l != nil && l.finish(outcome{state: LeaseRevoked, kind: EventEnded, reason: reason}):
		e.log.Info("ticket was recalled", "lease", l.id, "engine", t.DEngine, "reason", reason)
		return recall.Revoked
	case l == nil && kind == recall.KindIdle && !e.cfg.Successor: // else it may live at the predecessor
		e.tellVoid(&t, reason) // its engine's connection may have ended before the word of it was read
	}
	return recall.Ended
}

// tellVoid tells D's engine that nobody will present a ticket: it may have been given it, and wait for P.
func (e *Engine) tellVoid(t *ticket.Ticket, reason string) {
	if client := e.client(t.DEngine); client != nil {
		client.emit(Event{Kind: EventEnded, State: LeaseRevoked, Nonce: t.Nonce, Reason: reason})
	}
}

// look tells whether P's lease of a ticket lives here.
func (e *Engine) look(t *ticket.Ticket) recall.Verdict {
	if client := e.client(t.PEngine); client != nil && client.hasSource(t.Nonce) {
		return recall.Living
	}
	return recall.Absent
}

// presentedHere finds the living lease of a ticket that the book knows.
func (e *Engine) presentedHere(t *ticket.Ticket) *targetLease {
	for wait := true; ; wait = false {
		if client := e.client(t.DEngine); client != nil {
			if l := client.target(t.Nonce); l != nil {
				return l
			}
		}
		if !wait {
			return nil
		}
		// It may be between the book and its engine: who takes a ticket holds the gate.
		e.drain.gate.Lock()
		e.drain.gate.Unlock() //nolint:staticcheck // a barrier: nothing is guarded
	}
}
