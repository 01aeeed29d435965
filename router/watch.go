package router

import (
	"errors"
	"net"
	"sync"
	"time"
)

const (
	// aheadBytesMax bounds what a client may send ahead while its request is served. Beyond, the socket is not read
	// any more, and a client that leaves is noticed at the next write.
	aheadBytesMax = 64 << 10
	lingerTimeout = 2 * time.Second
	lingerBytes   = 64 << 20
)

var errBufferedOnly = errors.New("read what is buffered: no more of it")

// clientConn is a client's connection. While a request is served nobody else reads the socket, so that a goroutine can
// watch it for the client's leaving; what it reads instead, pipelined requests, is kept for the next reader.
//
// A client that closes only its sending side counts as gone: HTTP clients do not do that while they wait.
type clientConn struct {
	net.Conn
	owner *Router

	mu    sync.Mutex // guards what follows
	ahead []byte
	// handBack, set for the moment in which fasthttp gives up a hijacked connection, makes the next Close begin to
	// serve the connection anew instead.
	handBack     bool
	bufferedOnly bool
	linger       bool
	closed       bool
}

func (c *clientConn) Read(p []byte) (int, error) {
	c.mu.Lock()
	if c.bufferedOnly {
		c.mu.Unlock()
		return 0, errBufferedOnly
	}
	if len(c.ahead) > 0 {
		n := copy(p, c.ahead)
		if c.ahead = c.ahead[n:]; len(c.ahead) == 0 {
			c.ahead = nil
		}
		c.mu.Unlock()
		return n, nil
	}
	c.mu.Unlock()
	return c.Conn.Read(p)
}

func (c *clientConn) Close() error {
	c.mu.Lock()
	if c.handBack {
		c.handBack = false
		c.mu.Unlock()
		c.owner.serveAgain(c)
		return nil
	}
	closed, linger := c.closed, c.linger
	c.closed = true
	c.mu.Unlock()
	if closed {
		return nil
	}
	c.owner.forget(c)
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

// watch calls gone, from another goroutine, when the client has left. stop ends it; gone is not called afterwards.
func (c *clientConn) watch(gone func()) (stop func()) {
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

// takeBack keeps what a reader on top of c has buffered, for c's next reader.
func (c *clientConn) takeBack(r interface{ Read([]byte) (int, error) }) bool {
	c.mu.Lock()
	c.bufferedOnly = true
	c.mu.Unlock()
	var front []byte
	var err error
	for buf := make([]byte, 512); err == nil; {
		var n int
		n, err = r.Read(buf)
		front = append(front, buf[:n]...)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.bufferedOnly = false
	c.ahead = append(front, c.ahead...)
	return errors.Is(err, errBufferedOnly)
}

// giveBack makes the Close that follows serve the connection's next request.
func (c *clientConn) giveBack() {
	c.mu.Lock()
	c.handBack = !c.closed
	c.mu.Unlock()
}
