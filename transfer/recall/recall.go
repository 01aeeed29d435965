// Package recall makes tickets void at the daemon of the node that decodes, over its data address: whoever minted a ticket and
// gave the attempt up need not wait for its deadline, and who fears that nobody will present it any more need not let decode
// wait for that. It is for routers: it knows tickets and the handshake, and nothing of what moves.
package recall

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/headrace/headrace/transfer/handshake"
	"github.com/headrace/headrace/transfer/ticket"
)

// ErrClosed is what calls of a closed Caller give.
var ErrClosed = errors.New("recall: the caller is closed")

const (
	timeoutDefault = 3 * time.Second
	idlePerDaemon  = 4
	// A daemon closes a connection on which nothing was said for twice as long.
	idleLife = 30 * time.Second
	// IdleMax is how long a daemon keeps such a connection.
	IdleMax = 2 * idleLife
)

// Config configures a Caller. ClusterKey and Name are needed.
type Config struct {
	ClusterKey []byte
	Name       string                                                   // of the caller, for the daemons' logs: 1 to ticket.IDMax bytes
	Dial       func(ctx context.Context, addr string) (net.Conn, error) // nil: TCP
	Timeout    time.Duration                                            // of one Recall whose context has no nearer end; 0: 3 s
}

// Caller recalls tickets. It keeps connections for the next time.
type Caller struct {
	cfg Config

	mu     sync.Mutex
	closed bool
	idle   map[string][]idleConn
}

type idleConn struct {
	net.Conn
	since time.Time
}

// New makes a Caller, which runs nothing by itself.
func New(cfg Config) (*Caller, error) {
	if cfg.Name == "" || len(cfg.Name) > ticket.IDMax || !utf8.ValidString(cfg.Name) {
		return nil, fmt.Errorf("recall: name of %d bytes, need 1 to %d of UTF-8", len(cfg.Name), ticket.IDMax)
	}
	if len(cfg.ClusterKey) < 16 {
		return nil, fmt.Errorf("recall: cluster key of %d bytes, need at least 16", len(cfg.ClusterKey))
	}
	if cfg.Dial == nil {
		var d net.Dialer
		cfg.Dial = func(ctx context.Context, addr string) (net.Conn, error) { return d.DialContext(ctx, "tcp", addr) }
	}
	if cfg.Timeout <= 0 {
		cfg.Timeout = timeoutDefault
	}
	return &Caller{cfg: cfg, idle: make(map[string][]idleConn)}, nil
}

// Recall makes tickets void at the daemon of the node they name for decoding, which is at addr, and says what became of
// each. When it returns without an error the leases of those that were presented have ended, and nothing lands for them any
// more. It may be repeated.
func (c *Caller) Recall(ctx context.Context, addr, reason string, tickets ...[]byte) ([]Verdict, error) {
	return c.Ask(ctx, addr, KindVoid, reason, tickets...)
}

// Ask says what became, or becomes by this, of each ticket at the daemon at addr: D's, or with KindLook P's. Verdicts come in
// the order of the tickets; with an error there may be some of the first. It may be repeated.
func (c *Caller) Ask(ctx context.Context, addr string, kind Kind, reason string, tickets ...[]byte) ([]Verdict, error) {
	for _, t := range tickets {
		if len(t) != ticket.Size {
			return nil, fmt.Errorf("recall: a ticket of %d bytes, want %d", len(t), ticket.Size)
		}
	}
	reason = cut(reason)
	ctx, cancel := context.WithTimeout(ctx, c.cfg.Timeout)
	defer cancel()
	verdicts := make([]Verdict, 0, len(tickets))
	for len(tickets) > 0 {
		n := min(len(tickets), TicketsMax)
		some, err := c.ask(ctx, addr, &Request{Kind: kind, Tickets: tickets[:n], Reason: reason})
		if err != nil {
			return verdicts, fmt.Errorf("%s %d tickets at %s: %w", kind, len(tickets), addr, err)
		}
		verdicts, tickets = append(verdicts, some...), tickets[n:]
	}
	return verdicts, nil
}

// cut makes a reason fit.
func cut(s string) string {
	if len(s) > ReasonMax {
		s = s[:ReasonMax]
	}
	for !utf8.ValidString(s) && len(s) > 0 {
		s = s[:len(s)-1]
	}
	return s
}

// ask makes one request. A connection that was kept may be of a daemon that has ended: then another one is dialled.
func (c *Caller) ask(ctx context.Context, addr string, r *Request) ([]Verdict, error) {
	for {
		conn, kept, err := c.take(ctx, addr)
		if err != nil {
			return nil, err
		}
		verdicts, err := exchange(ctx, conn, r)
		if err == nil {
			c.keep(addr, conn)
			return verdicts, nil
		}
		_ = conn.Close()
		if !kept || ctx.Err() != nil {
			return nil, err
		}
	}
}

func exchange(ctx context.Context, conn net.Conn, r *Request) (verdicts []Verdict, err error) {
	err = during(ctx, conn, func() error {
		if _, err := conn.Write(r.Append(nil)); err != nil {
			return err
		}
		verdicts, err = readAnswer(conn, len(r.Tickets))
		return err
	})
	return verdicts, err
}

// during runs f, which ctx's end breaks off.
func during(ctx context.Context, conn net.Conn, f func() error) error {
	if err := conn.SetDeadline(time.Time{}); err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	err := f()
	if !stop() {
		return errors.Join(ctx.Err(), err) // the deadline may be set a moment from now: the connection is of no use
	}
	return err
}

// take gives a connection, and whether it was kept from before.
func (c *Caller) take(ctx context.Context, addr string) (conn net.Conn, kept bool, err error) {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return nil, false, ErrClosed
	}
	var stale []idleConn
	for list := c.idle[addr]; len(list) > 0; {
		last := list[len(list)-1]
		list = list[:len(list)-1]
		c.idle[addr] = list
		if time.Since(last.since) < idleLife {
			conn = last.Conn
			break
		}
		stale = append(stale, last)
	}
	if len(c.idle[addr]) == 0 {
		delete(c.idle, addr)
	}
	c.mu.Unlock()
	for _, s := range stale {
		_ = s.Close()
	}
	if conn != nil {
		return conn, true, nil
	}
	if conn, err = c.cfg.Dial(ctx, addr); err != nil {
		return nil, false, err
	}
	err = during(ctx, conn, func() error {
		_, err := handshake.Dial(conn, c.cfg.ClusterKey, handshake.Identity{NodeID: c.cfg.Name}, handshake.KindRecall, 0, [16]byte{})
		return err
	})
	if err != nil {
		_ = conn.Close()
		return nil, false, err
	}
	return conn, false, nil
}

func (c *Caller) keep(addr string, conn net.Conn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed || len(c.idle[addr]) >= idlePerDaemon {
		_ = conn.Close()
		return
	}
	c.idle[addr] = append(c.idle[addr], idleConn{conn, time.Now()})
}

// Close closes what is kept. Calls under way end by themselves.
func (c *Caller) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	var errs []error
	for _, list := range c.idle {
		for _, conn := range list {
			errs = append(errs, conn.Close())
		}
	}
	clear(c.idle)
	return errors.Join(errs...)
}
