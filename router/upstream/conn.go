package upstream

import (
	"bufio"
	"net"
	"syscall"
	"time"
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
}

func newConn(nc net.Conn, silence time.Duration) *conn {
	c := &conn{Conn: nc, silence: silence}
	c.br = bufio.NewReaderSize(c, readBufferBytes)
	return c
}

func (c *conn) Read(p []byte) (int, error) {
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
	sc, ok := c.Conn.(syscall.Conn)
	if !ok {
		return true
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return false
	}
	open := false
	var b [1]byte
	// Control, not Read: the deadline of the last read may have passed while the connection was idle.
	err = raw.Control(func(fd uintptr) {
		_, _, err := syscall.Recvfrom(int(fd), b[:], syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
		open = err == syscall.EAGAIN || err == syscall.EWOULDBLOCK
	})
	return err == nil && open
}
