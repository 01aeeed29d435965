package transfer

import (
	"context"
	"fmt"
	"net"
	"time"

	"github.com/headrace/headrace/transfer/handshake"
)

// An examination is a connection of which the core knows no more than that both ends hold the cluster key: what is said
// over it is its ends' affair (`headrace doctor --peer`). It is no channel and carries no KV.

// The limits of examinations at one daemon.
const (
	examsMax    = 2
	examTimeout = 2 * time.Minute
)

// Versions are those of the protocol between daemons that this build speaks.
func Versions() (low, high uint16) { return handshake.Versions() }

// DialExam asks for an examination over a connection to a daemon and gives the daemon's node id and what it can use. The
// connection must have a deadline.
func DialExam(conn net.Conn, key []byte, nodeID string) (peer string, transports []string, err error) {
	id, err := handshake.Dial(conn, key, handshake.Identity{NodeID: nodeID}, handshake.KindExam, 0, [16]byte{})
	return id.NodeID, id.Transports, err
}

// AcceptExam is the other end of DialExam where no daemon runs. It gives who asks.
func AcceptExam(conn net.Conn, key []byte, nodeID string, transports []string) (caller string, err error) {
	h, err := handshake.Accept(conn, key, handshake.Identity{NodeID: nodeID, Transports: transports}, false, func(h *handshake.Hello) uint16 {
		if h.Kind != handshake.KindExam {
			return handshake.StatusNotExpected
		}
		return handshake.StatusOK
	})
	if err != nil {
		return "", err
	}
	return h.From.NodeID, nil
}

// admit takes one of the places for connections that are no channel's.
func (e *Engine) admit(h *handshake.Hello) (place chan struct{}, status uint16) {
	if place = e.recalls; h.Kind == handshake.KindExam {
		if place = e.exams; e.cfg.Examiner == nil {
			return nil, handshake.StatusNotExpected
		}
	}
	if !offer(place, struct{}{}) {
		return nil, handshake.StatusFull
	}
	return place, handshake.StatusOK
}

// examine hands an authenticated connection over.
func (e *Engine) examine(conn net.Conn, h *handshake.Hello) {
	defer func() { <-e.exams }()
	defer conn.Close()
	ctx, cancel := context.WithTimeout(e.ctx, examTimeout)
	defer cancel()
	defer context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })()
	e.log.Info("being examined", "by", h.From.NodeID, "from", conn.RemoteAddr().String())
	if err := e.cfg.Examiner(ctx, conn); err != nil {
		e.log.Warn("examination ended early", "by", h.From.NodeID, "error", fmt.Errorf("examine: %w", err))
	}
}
