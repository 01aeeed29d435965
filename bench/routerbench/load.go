package routerbench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Kinds of answers.
const (
	kindJSON   = "json"
	kindStream = "stream"
)

const (
	chunksWanted  = 64
	bodyLeast     = 900 // of an answer that is JSON
	answerMax     = 4 << 20
	prompts       = 8 // different ones, for policies that tell them apart
	answerTimeout = 30 * time.Second
)

// shape is what is asked for, how, and how often.
type shape struct {
	kind  string
	body  int // bytes of a request's
	conns int
	rate  float64 // requests a second, arriving at random; 0: each connection asks again as soon as it is answered
	talk  string  // each connection has a conversation of its own, of this kind; "" for a few prompts that all share
}

// sample is one run against one contestant.
type sample struct {
	seconds float64
	took    []time.Duration // in order
	first   []time.Duration // until the first event, in order
	errors  int
	err     error // one of them

	asked         int     // requests, those to warm up and those that failed included
	cpu, switches float64 // of the contestant, a request: seconds, and how often a thread of it waited
}

func (s *sample) rps() float64 { return float64(len(s.took)) / s.seconds }

func quantile(sorted []time.Duration, q float64) float64 {
	if len(sorted) == 0 {
		return 0
	}
	return float64(sorted[int(q*float64(len(sorted)-1))]) / 1e3
}

// requests are what connections send, headers and all.
func requests(s shape, addr string) [][]byte {
	list := make([][]byte, prompts)
	for i := range list {
		list[i] = post(addr, []byte(bodyOf(s, i)))
	}
	return list
}

// post is a request as it goes over the wire.
func post(addr string, body []byte) []byte {
	return append(fmt.Appendf(nil, "POST /v1/chat/completions HTTP/1.1\r\nHost: %s\r\nUser-Agent: headrace-bench\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n", addr, len(body)), body...)
}

func bodyOf(s shape, i int) string {
	words := []string{"alpha ", "bravo ", "charlie ", "delta ", "echo ", "foxtrot ", "golf ", "hotel "}
	var b strings.Builder
	b.WriteString(`{"model":"m","stream":` + strconv.FormatBool(s.kind == kindStream) + `,"max_tokens":64,"messages":[{"role":"user","content":"`)
	for b.Len() < s.body-4 {
		b.WriteString(words[(b.Len()*31+i*7)%len(words)])
	}
	return b.String()[:s.body-4] + `"}]}`
}

// load asks one contestant for so long, after a fifth of that to warm up.
func load(ctx context.Context, addr string, s shape, lasting time.Duration) (*sample, error) {
	clients := make([]*client, s.conns)
	defer func() {
		for _, c := range clients {
			c.close()
		}
	}()
	var sent [][]byte
	if s.talk == "" {
		sent = requests(s, addr)
	}
	for i := range clients {
		c := &client{addr: addr, sent: sent, turn: i, stream: s.kind == kindStream}
		if s.talk != "" {
			c.converse(s, i)
		}
		clients[i] = c
		if err := c.dial(ctx); err != nil {
			return nil, err
		}
	}
	warm, err := run(ctx, clients, s, lasting/5)
	if err != nil {
		return nil, err
	}
	out, err := run(ctx, clients, s, lasting)
	if err == nil {
		out.asked += warm.asked
	}
	return out, err
}

func run(ctx context.Context, clients []*client, s shape, span time.Duration) (*sample, error) {
	arrivals := make(chan time.Time, 1<<16)
	began := time.Now()
	until := began.Add(span)
	if s.rate > 0 {
		go arrive(arrivals, s.rate, began, until)
	}
	var asking sync.WaitGroup
	for _, c := range clients {
		c.took, c.first, c.errors, c.err = c.took[:0], c.first[:0], 0, nil
		asking.Go(func() {
			if s.rate > 0 {
				for at := range arrivals {
					if ctx.Err() == nil {
						c.ask(at)
					}
				}
				return
			}
			for now := time.Now(); ctx.Err() == nil; now = time.Now() {
				if c.ask(now); now.After(until) { // once at the least
					return
				}
			}
		})
	}
	asking.Wait()
	out := &sample{seconds: time.Since(began).Seconds()}
	for _, c := range clients {
		out.took, out.first = append(out.took, c.took...), append(out.first, c.first...)
		if out.errors += c.errors; c.err != nil {
			out.err = c.err
		}
	}
	out.asked = len(out.took) + out.errors
	slices.Sort(out.took)
	slices.Sort(out.first)
	if len(out.took) == 0 && ctx.Err() == nil {
		return nil, fmt.Errorf("no request was answered: %w", errors.Join(out.err, io.ErrUnexpectedEOF))
	}
	return out, ctx.Err()
}

// arrive sends the times of arrivals as they come. Its thread sleeps by itself: Go's timers are a millisecond late on an
// idle machine.
func arrive(arrivals chan<- time.Time, rate float64, began, until time.Time) {
	defer close(arrivals)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	r := rand.New(rand.NewPCG(1, uint64(rate)))
	for at := began; !at.After(until); at = at.Add(time.Duration(r.ExpFloat64() / rate * float64(time.Second))) {
		if wait := time.Until(at); wait > 0 {
			ts := unix.NsecToTimespec(int64(wait))
			_ = unix.Nanosleep(&ts, nil) // woken early, it sends early by as much
		}
		arrivals <- at
	}
}

// client is one connection and what it measured.
type client struct {
	addr   string
	sent   [][]byte
	turn   int
	marks  int // where in the one request that is sent its number stands, which makes it another one; 0: nowhere
	stream bool
	conn   net.Conn
	buf    []byte

	took, first []time.Duration
	errors      int
	err         error
}

func (c *client) dial(ctx context.Context) error {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", c.addr)
	c.conn = conn
	return err
}

func (c *client) close() {
	if c != nil && c.conn != nil {
		_ = c.conn.Close()
		c.conn = nil
	}
}

// ask makes one request, whose clock has run since at.
func (c *client) ask(at time.Time) {
	first, err := c.exchange()
	now := time.Now()
	if err != nil {
		c.errors, c.err = c.errors+1, err
		c.close()
		if err := c.dial(context.Background()); err != nil {
			c.err = err
			time.Sleep(10 * time.Millisecond)
		}
		return
	}
	c.took = append(c.took, now.Sub(at))
	c.first = append(c.first, first.Sub(at))
}

func (c *client) exchange() (first time.Time, err error) {
	if c.conn == nil {
		return first, net.ErrClosed
	}
	c.turn++
	c.mark()
	if err := c.conn.SetDeadline(time.Now().Add(answerTimeout)); err != nil {
		return first, err
	}
	if _, err := c.conn.Write(c.sent[c.turn%len(c.sent)]); err != nil {
		return first, err
	}
	if c.buf == nil {
		c.buf = make([]byte, 0, 64<<10)
	}
	b := c.buf[:0]
	var h head
	for {
		if len(b) == cap(b) {
			b = slices.Grow(b, len(b))
		}
		n, err := c.conn.Read(b[len(b):cap(b)])
		if n > 0 {
			b = b[:len(b)+n]
			c.buf = b
		}
		if err != nil {
			return first, err
		}
		if h.length == 0 && !h.chunked {
			if err := h.read(b); err != nil {
				return first, err
			}
		}
		if first.IsZero() && h.end > 0 && len(b) > h.end {
			first = time.Now()
		}
		if done, err := h.done(b, c.stream); done || err != nil {
			return first, err
		}
		if len(b) > answerMax {
			return first, errors.New("an answer without an end")
		}
	}
}

// head is what matters of an answer's header.
type head struct {
	end     int // where the body begins; 0 as long as the header is not whole
	length  int
	chunked bool
}

var (
	endOfHead   = []byte("\r\n\r\n")
	endOfChunks = []byte("\r\n0\r\n\r\n")
)

func (h *head) read(b []byte) error {
	i := bytes.Index(b, endOfHead)
	if i < 0 {
		return nil
	}
	if !bytes.HasPrefix(b, []byte("HTTP/1.1 200")) {
		return fmt.Errorf("answered %.300q", b)
	}
	for line := range bytes.SplitSeq(b[:i], []byte("\r\n")) {
		name, value, _ := bytes.Cut(line, []byte(":"))
		switch {
		case bytes.EqualFold(name, []byte("Content-Length")):
			n, err := strconv.Atoi(string(bytes.TrimSpace(value)))
			if err != nil || n <= 0 {
				return fmt.Errorf("answered with %q", line)
			}
			h.length = n
		case bytes.EqualFold(name, []byte("Transfer-Encoding")):
			h.chunked = true
		}
	}
	if h.end = i + len(endOfHead); h.length == 0 && !h.chunked {
		return fmt.Errorf("an answer without a length: %.300q", b)
	}
	return nil
}

// done tells whether the answer is whole, and whether it is the right one.
func (h *head) done(b []byte, stream bool) (bool, error) {
	switch {
	case h.end == 0:
		return false, nil
	case h.chunked && !bytes.HasSuffix(b, endOfChunks), !h.chunked && len(b) < h.end+h.length:
		return false, nil
	case stream && bytes.Count(b[h.end:], []byte("data: {")) != chunksWanted:
		return true, fmt.Errorf("a stream of %d events", bytes.Count(b[h.end:], []byte("data: {")))
	case !stream && len(b)-h.end < bodyLeast:
		return true, fmt.Errorf("answered %.300q", b)
	}
	return true, nil
}
