package router

import (
	"errors"
	"net"
	"os"
	"sync"
	"time"

	"github.com/headrace/headrace/router/hangup"
	"github.com/headrace/headrace/router/socket"
)

const (
	// aheadBytesMax bounds what a client may send ahead while its request is served. Beyond, the socket is not read
	// any more, and a client that leaves is noticed at the next write.
	aheadBytesMax = 64 << 10
	lingerTimeout = 2 * time.Second
	lingerBytes   = 64 << 20
)

// clientConn is a client's connection. The router's watcher tells of a client that leaves. Where there is none, nobody else
// reads the connection while a request is served, so that a goroutine can watch it for its end; what that reads instead,
// pipelined requests, is kept for the next reader.
//
// A client that closes only its sending side counts as gone: HTTP clients do not do that while they wait.
type clientConn struct {
	net.Conn
	owner *Router

	mu     sync.Mutex // guards what follows
	ahead  []byte
	linger bool
	closed bool

	// Of connections whose end the router's watcher tells.
	watched bool
	unwatch func()
	left    bool // the client has

	leaves *lifetime // the request that is served, which ends when the client leaves

	// Of the goroutine that serves the connection.
	reads, writes armed
	wait          time.Duration // for the next request's first byte; 0 behind it
	begun         time.Time     // of the request that is being read
	limit         time.Duration // for what is being read of it
	long          bool          // the request's body is: whoever sends such ones does not let others go first
	asks          bool          // a deadline that has passed does no harm to it
	lately        time.Time     // what the clock said, if nothing was waited for since; else zero
}

// armed is a deadline that a connection has. It may come a little early, so that it need not be set each time: that costs more
// than a short read.
type armed struct{ at time.Time }

const earlyMax = time.Second

// set makes the deadline one in d from then, an eighth less at most.
func (a *armed) set(then time.Time, d time.Duration, set func(time.Time) error) error {
	until := then.Add(d)
	if early := until.Sub(a.at); early >= 0 && early <= min(d/8, earlyMax) {
		return nil
	}
	a.at = until
	return set(until)
}

// watchEnd has the watcher tell when the client has left, for as long as the connection lasts, so that serving a request
// takes no goroutine for it.
func (c *clientConn) watchEnd(w *hangup.Watcher) {
	if w == nil {
		return
	}
	unwatch, err := w.Add(c.Conn, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.left = true; c.leaves != nil {
			go c.leaves.end(errClientGone) // who is told may wait for a leg
			c.leaves = nil
		}
	})
	if err != nil { // not a socket: watch reads from it
		return
	}
	c.watched, c.unwatch = true, unwatch
}

// await has the next Read wait for a request as long as one may: the connection's first one for as long as a whole one.
func (c *clientConn) await(first bool) {
	if c.wait = c.owner.cfg.IdleTimeout; first {
		c.wait = c.owner.cfg.ReadTimeout
	}
}

// readingBody says that the header is here, and a body of so many bytes is still to come, -1 for nobody knows.
func (c *clientConn) readingBody(n int64) {
	c.limit, c.long = c.owner.cfg.ReadTimeout, n > yieldBytesMax
}

// yieldBytesMax is upstream's: a request that yields waits behind all others that are ready.
const yieldBytesMax = 64 << 10

// reading says that the next request has begun, in what was read with the one before.
func (c *clientConn) reading() {
	if c.wait > 0 {
		c.wait, c.begun, c.limit = 0, c.clock(), c.owner.cfg.HeaderTimeout
	}
}

// clock is the time.
func (c *clientConn) clock() time.Time {
	if c.lately.IsZero() {
		return time.Now()
	}
	return c.lately
}

func (c *clientConn) Read(p []byte) (int, error) {
	if n := c.takeAhead(p); n > 0 {
		return n, nil
	}
	then, d := c.begun, c.limit
	if c.wait > 0 {
		then, d = c.clock(), c.wait
	}
	if c.wait > 0 && !c.long {
		socket.Yield() // as upstream's connections do: there may be a request by then
	}
	n, err := c.readBy(p, then, d)
	c.reading()
	return n, err
}

// readBy reads until d from then. The next request's first byte is waited for longer than the rest of it, so that each of them would set
// the deadline anew: that of a wait before, if it comes earlier, is left to pass in place.
func (c *clientConn) readBy(p []byte, then time.Time, d time.Duration) (int, error) {
	for {
		earlier := c.asks && !c.reads.at.IsZero() && c.reads.at.Before(then.Add(d))
		if !earlier {
			if err := c.reads.set(then, d, c.Conn.SetReadDeadline); err != nil {
				return 0, err
			}
		}
		n, err := c.Conn.Read(p)
		c.lately = time.Now()
		if err == nil || !earlier || n > 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
			return n, err
		}
		c.reads = armed{}
	}
}

// takeAhead takes what was read while a request was served.
func (c *clientConn) takeAhead(p []byte) int {
	if c.watched {
		return 0
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	n := copy(p, c.ahead)
	if c.ahead = c.ahead[n:]; len(c.ahead) == 0 {
		c.ahead = nil
	}
	return n
}

// send writes b, within that time from now.
func (c *clientConn) send(b []byte, now time.Time, within time.Duration) error {
	if err := c.writes.set(now, within, c.Conn.SetWriteDeadline); err != nil {
		return err
	}
	_, err := c.Conn.Write(b)
	return err
}

func (c *clientConn) Close() error {
	c.mu.Lock()
	closed, linger := c.closed, c.linger
	c.closed = true
	c.mu.Unlock()
	if closed {
		return nil
	}
	c.owner.forget(c)
	if c.unwatch != nil {
		c.unwatch()
	}
	if linger {
		c.drain()
	}
	return c.Conn.Close()
}

// drain reads on for a while what the client is still sending. A socket closed with unread bytes resets the
// connection, and the reset may overtake the error that says why.
func (c *clientConn) drain() {
	if w, ok := c.Conn.(interface{ CloseWrite() error }); ok && w.CloseWrite() != nil {
		return
	}
	if c.Conn.SetReadDeadline(time.Now().Add(lingerTimeout)) != nil {
		return
	}
	buf := make([]byte, 32<<10)
	for total := 0; total < lingerBytes; {
		n, err := c.Conn.Read(buf)
		if err != nil {
			return
		}
		total += n
	}
}

// lingerOnClose makes Close wait for what the client is still sending.
func (c *clientConn) lingerOnClose() {
	c.mu.Lock()
	c.linger = true
	c.mu.Unlock()
}

// watch ends l when the client has left, until leave is called; behind that stop is called, unless it is nil.
func (c *clientConn) watch(l *lifetime) (stop func()) {
	c.mu.Lock()
	c.leaves = l
	left := c.left
	c.mu.Unlock()
	if left {
		l.end(errClientGone)
	}
	if c.watched {
		return nil
	}
	return c.watchByReading(func() { l.end(errClientGone) })
}

// leave ends watch. left says that the client has, so that the lifetime may still be being ended.
func (c *clientConn) leave() (left bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.leaves = nil
	return c.left || !c.watched
}

// watchByReading is watch where there is nothing but reading to learn it by.
func (c *clientConn) watchByReading(gone func()) (stop func()) {
	c.reads = armed{}
	if c.Conn.SetReadDeadline(time.Time{}) != nil {
		gone()
		return func() {}
	}
	done := make(chan struct{})
	stopping := make(chan struct{})
	go func() {
		defer close(done)
		var buf [512]byte
		for {
			n, err := c.Conn.Read(buf[:])
			if n > 0 {
				c.mu.Lock()
				c.ahead = append(c.ahead, buf[:n]...)
				full := len(c.ahead) >= aheadBytesMax
				c.mu.Unlock()
				if full {
					return
				}
			}
			if err != nil {
				select {
				case <-stopping:
				default:
					gone()
				}
				return
			}
		}
	}()
	return func() {
		close(stopping)
		_ = c.Conn.SetReadDeadline(time.Unix(1, 0))
		<-done
		_ = c.Conn.SetReadDeadline(time.Time{})
	}
}
