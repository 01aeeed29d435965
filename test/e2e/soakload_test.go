package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// soakLoad is the clients of TestSoak, each of which asks again as soon as it has its answer.
type soakLoad struct {
	soak
	addr string
	ctx  context.Context
	stop context.CancelFunc
	done sync.WaitGroup

	// refused are those that ended with an error that says so: on a machine that starves the engines for seconds there are some.
	whole, refused, left, slow, tokens, bytes atomic.Int64

	mu     sync.Mutex
	failed []error // the first few
}

func newSoakLoad(s soak, url string) *soakLoad {
	l := &soakLoad{soak: s, addr: strings.TrimPrefix(url, "http://")}
	l.ctx, l.stop = context.WithCancel(context.Background())
	return l
}

func (l *soakLoad) start() {
	clients := l.streams * soakClients / 100
	for i := range clients {
		l.done.Go(func() {
			if !l.wait(l.ramp * time.Duration(i) / time.Duration(clients)) {
				return
			}
			c := &soakClient{load: l, number: i, rand: rand.New(rand.NewPCG(7, uint64(i)))}
			defer c.hangUp()
			for n := 0; l.ctx.Err() == nil; n++ {
				if err := c.ask(n); err != nil && l.ctx.Err() == nil {
					l.fail(fmt.Errorf("client %d, request %d: %w", i, n, err))
					c.hangUp()
					l.wait(time.Second)
				}
			}
		})
	}
}

// wait waits for d, unless the load ends before: then it is false.
func (l *soakLoad) wait(d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-l.ctx.Done():
		return false
	}
}

// end has all clients leave and waits until they have.
func (l *soakLoad) end() {
	l.stop()
	l.done.Wait()
}

func (l *soakLoad) fail(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.failed) < 5 {
		l.failed = append(l.failed, err)
	}
}

func (l *soakLoad) failures() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return errors.Join(l.failed...)
}

// soakClient is one client.
type soakClient struct {
	load   *soakLoad
	number int
	rand   *rand.Rand
	conn   net.Conn
	buf    [4096]byte
	tail   []byte // of the answer
}

const (
	soakClients = 115             // for each 100 streams: some of them wait, or read what the router has written long ago
	soakTail    = 2048            // bytes: usage and the end are within
	slowPause   = 2 * time.Second // between reads
	slowBytes   = 250             // to read for each token that has come since: events have half as much again
)

func (c *soakClient) hangUp() {
	if c.conn != nil {
		_ = c.conn.Close()
		c.conn = nil
	}
}

// ask sends the client's request number n. One of eight is left in the middle, one is read slowly, the others come to their end.
func (c *soakClient) ask(n int) error {
	l := c.load
	tokens := l.shortest + c.rand.IntN(l.longest-l.shortest)
	kind := c.rand.IntN(8)
	leave, slow := kind == 0, kind == 1
	if slow {
		c.hangUp() // for a small buffer from the start
		l.slow.Add(1)
	}
	if c.conn == nil {
		conn, err := (&net.Dialer{}).DialContext(l.ctx, "tcp", l.addr)
		if err != nil {
			return err
		}
		if slow {
			_ = conn.(*net.TCPConn).SetReadBuffer(4096)
		}
		c.conn = conn
	}
	conn := c.conn
	defer context.AfterFunc(l.ctx, func() { _ = conn.Close() })()
	body := fmt.Sprintf(`{"model":"stand-in","stream":true,"stream_options":{"include_usage":true},"ignore_eos":true,"max_tokens":%d,"messages":[{"role":"user","content":"client %d, question %d %s"}]}`,
		tokens, c.number, n, strings.Repeat("so to say ", c.rand.IntN(20)))
	if _, err := fmt.Fprintf(conn, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(body), body); err != nil {
		return err
	}
	until := time.Duration(-1)
	if leave {
		until = time.Duration(c.rand.Float64() * float64(tokens) / l.rate * float64(time.Second))
	}
	return c.read(tokens, slow, until)
}

// read reads an answer. It leaves after that time, unless it is negative.
func (c *soakClient) read(tokens int, slow bool, leave time.Duration) error {
	l := c.load
	at := time.Now()
	c.tail = c.tail[:0]
	for first := true; ; first = false {
		wait := 2 * time.Minute
		if leave >= 0 {
			wait = leave - time.Since(at)
		}
		_ = c.conn.SetReadDeadline(time.Now().Add(wait))
		room := c.buf[:]
		if slow {
			room = room[:min(len(room), int(slowBytes*l.rate*slowPause.Seconds()))]
		}
		n, err := c.conn.Read(room)
		l.bytes.Add(int64(n))
		if first && n > 0 && !bytes.HasPrefix(room[:n], []byte("HTTP/1.1 200 ")) {
			if !bytes.HasPrefix(room[:n], []byte("HTTP/1.1 50")) {
				return fmt.Errorf("got %.200q", room[:n])
			}
			l.refused.Add(1)
			c.hangUp()
			l.wait(time.Second)
			return nil
		}
		c.tail = append(c.tail, room[:n]...)
		if len(c.tail) > soakTail {
			c.tail = c.tail[:copy(c.tail, c.tail[len(c.tail)-soakTail:])]
		}
		if bytes.HasSuffix(c.tail, []byte("\r\n0\r\n\r\n")) {
			return c.ended(tokens)
		}
		if err != nil && bytes.Contains(c.tail, []byte(`data: {"error"`)) { // the connection ends with the stream
			l.refused.Add(1)
			c.hangUp()
			l.wait(time.Second)
			return nil
		}
		var timeout net.Error
		switch {
		case leave >= 0 && errors.As(err, &timeout) && timeout.Timeout():
			c.hangUp()
			l.left.Add(1)
			return nil
		case err == io.EOF:
			return fmt.Errorf("the connection ended behind %.300q", c.tail)
		case err != nil:
			return err
		case slow:
			l.wait(slowPause)
		}
	}
}

// ended checks a whole answer.
func (c *soakClient) ended(tokens int) error {
	if !bytes.Contains(c.tail, fmt.Appendf(nil, `"completion_tokens":%d`, tokens)) || !bytes.Contains(c.tail, []byte("data: [DONE]\n\n")) || bytes.Contains(c.tail, []byte(`"error"`)) {
		return fmt.Errorf("of %d tokens the end is %q", tokens, c.tail)
	}
	c.load.whole.Add(1)
	c.load.tokens.Add(int64(tokens))
	return nil
}
