package upstream

import (
	"bufio"
	"net"
	"syscall"
	"time"

	"github.com/headrace/headrace/router/socket"
)

const readBufferBytes = 16 << 10

// conn is a connection to a worker. Every read has a deadline of its own.
type conn struct {
	net.Conn
	br        *bufio.Reader
	silence   time.Duration // longest wait for bytes; 0: none
	idleSince time.Time
	idleMax   time.Duration // for how long it may be kept for another request
	heard     func()        // called behind every read that brought bytes
	// byCaller: who reads has set the deadline.
	byCaller bool
	yields   bool   // others go first before a read by the caller
	reads    armed  // by the caller
	writes   armed  // by the caller
	head     []byte // room for a request's header
	// Of the last request by this connection, whose header head begins with up to same.
	same         int
	path, accept string
}

// armed is the deadline that a connection has, for a caller who can do with one that comes a little early and then asks again.
// To set a deadline costs more than a short read.
type armed struct{ at time.Time } // zero: not known

// early is by how much.
const early = 500 * time.Millisecond

// holds tells whether it will do for until.
func (a *armed) holds(until time.Time) bool {
	return !a.at.IsZero() && !a.at.After(until) && until.Sub(a.at) < early
}

func (a *armed) set(until time.Time, set func(time.Time) error) error {
	if a.holds(until) {
		return nil
	}
	a.at = until
	return set(until)
}

func newConn(nc net.Conn, silence time.Duration) *conn {
	c := &conn{Conn: nc, silence: silence}
	c.br = bufio.NewReaderSize(c, readBufferBytes)
	return c
}

func (c *conn) Read(p []byte) (int, error) {
	if c.byCaller {
		// A read that finds nothing costs a system call and a sleep. While others have something to do, the worker may answer,
		// and what comes in pieces comes in fewer: a seventh of the processor's time for 1 KB at 32 connections. Who yields waits
		// behind all that is ready, though, and now and then behind sixty of them.
		if c.yields {
			socket.Yield()
		}
		return c.Conn.Read(p)
	}
	c.reads = armed{}
	var deadline time.Time
	if c.silence > 0 {
		deadline = time.Now().Add(c.silence)
	}
	if err := c.SetReadDeadline(deadline); err != nil {
		return 0, err
	}
	n, err := c.Conn.Read(p)
	if n > 0 && c.heard != nil {
		c.heard()
	}
	return n, err
}

// alive looks, without waiting, whether an idle connection was closed by the worker or has bytes nobody asked for.
func (c *conn) alive() bool {
	if c.br.Buffered() > 0 {
		return false
	}
	_, err, ok := c.peek()
	return !ok || err == syscall.EAGAIN || err == syscall.EWOULDBLOCK
}

// readable looks, without waiting, whether there are bytes to read.
func (c *conn) readable() bool {
	n, err, ok := c.peek()
	return ok && err == nil && n > 0
}

// peek looks for a byte; ok is false where one cannot look.
func (c *conn) peek() (n int, err error, ok bool) {
	sc, ok := c.Conn.(syscall.Conn)
	if !ok {
		return 0, nil, false
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return 0, err, true
	}
	var b [1]byte
	// Control, not Read: the deadline of the last read may have passed while the connection was idle.
	if broken := raw.Control(func(fd uintptr) { n, _, err = syscall.Recvfrom(int(fd), b[:], syscall.MSG_PEEK|syscall.MSG_DONTWAIT) }); broken != nil {
		return 0, broken, true
	}
	return n, err, true
}
