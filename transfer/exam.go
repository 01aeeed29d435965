package transfer

import (
	"context"
	"fmt"
	"net"
	"time"
)

// An examination is a connection of which the core knows no more than that both ends hold the cluster key: what is said
// over it is its ends' affair (`headrace doctor --peer`). It is no channel and carries no KV.

// The limits of examinations at one daemon.
const (
	examsMax    = 2
	examTimeout = 2 * time.Minute
)

// Versions are those of the protocol between daemons that this build speaks.
func Versions() (low, high uint16) { return versionMin, versionMax }

// DialExam asks for an examination over a connection to a daemon and gives the daemon's node id and what it can use. The
// connection must have a deadline.
func DialExam(conn net.Conn, key []byte, nodeID string) (peer string, transports []string, err error) {
	id, err := dialHandshake(conn, key, identity{nodeID: nodeID}, kindExam, 0, [16]byte{})
	return id.nodeID, id.transports, err
}

// AcceptExam is the other end of DialExam where no daemon runs. It gives who asks.
func AcceptExam(conn net.Conn, key []byte, nodeID string, transports []string) (caller string, err error) {
	h, err := acceptHandshake(conn, key, identity{nodeID: nodeID, transports: transports}, false, func(h *hello) uint16 {
		if h.kind != kindExam {
			return statusNotExpected
		}
		return statusOK
	})
	if err != nil {
		return "", err
	}
	return h.from.nodeID, nil
}

// admitExam takes one of the places for examinations.
func (e *Engine) admitExam() (status uint16) {
	switch {
	case e.cfg.Examiner == nil:
		return statusNotExpected
	case !offer(e.exams, struct{}{}):
		return statusFull
	}
	return statusOK
}

// examine hands an authenticated connection over.
func (e *Engine) examine(conn net.Conn, h *hello) {
	defer func() { <-e.exams }()
	defer conn.Close()
	ctx, cancel := context.WithTimeout(e.ctx, examTimeout)
	defer cancel()
	defer context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })()
	e.log.Info("being examined", "by", h.from.nodeID, "from", conn.RemoteAddr().String())
	if err := e.cfg.Examiner(ctx, conn); err != nil {
		e.log.Warn("examination ended early", "by", h.from.nodeID, "error", fmt.Errorf("examine: %w", err))
	}
}
