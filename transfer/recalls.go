package transfer

import (
	"context"
	"errors"
	"net"
	"time"

	"github.com/headrace/headrace/transfer/handshake"
	"github.com/headrace/headrace/transfer/recall"
	"github.com/headrace/headrace/transfer/ticket"
)

// A recall makes a ticket void before its deadline: who minted it has given the attempt up. Whoever holds the cluster key
// may recall what he could have minted.

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
			verdicts[i] = e.recall(raw, cleanReason(reason))
		}
		if e.Draining() {
			return // the successor is to remember them: the caller dials again, and gets there
		}
		conn.SetWriteDeadline(time.Now().Add(recallWrite))
		if _, err := conn.Write(recall.AppendAnswer(nil, verdicts)); err != nil {
			return
		}
	}
}

// recall makes one ticket void. When it returns this side of its lease is fenced.
func (e *Engine) recall(raw []byte, reason string) recall.Verdict {
	now := e.now()
	t, err := e.verify(raw)
	if err != nil || t.DNode != e.cfg.NodeID {
		return recall.Refused
	}
	e.totals.recalled.Add(1)
	known, err := e.book.void(t.Nonce, t.Deadline, now, reason)
	switch {
	case err != nil:
		return recall.Full
	case !known:
		if e.unpark(reason, func(p *parked) bool { return p.nonce == t.Nonce }) > 0 {
			return recall.Revoked
		}
		if client := e.client(t.DEngine); client != nil { // it may have been given the ticket, and wait for P
			client.emit(Event{Kind: EventEnded, State: LeaseRevoked, Nonce: t.Nonce, Reason: reason})
		}
		return recall.Remembered
	}
	if l := e.presentedHere(&t); l != nil {
		if l.finish(outcome{state: LeaseRevoked, kind: EventEnded, reason: reason}) {
			e.log.Info("ticket was recalled", "lease", l.id, "engine", t.DEngine, "reason", reason)
			return recall.Revoked
		}
	}
	return recall.Ended
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
