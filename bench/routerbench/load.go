package routerbench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"
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
	rate  float64       // requests a second, arriving at random; 0: each connection asks again as soon as it is answered
	pace  time.Duration // between a stream's events; 0: they come at once
	talk  string        // each connection has a conversation of its own, of this kind; "" for a few prompts that all share
}

// sample is one run against one contestant.
type sample struct {
	seconds float64
	took    []time.Duration // in order
	first   []time.Duration // until the first event, in order
	stalls  []time.Duration // the longest wait for an event of each stream with a pace, in order
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
	pace := ""
	if s.pace > 0 {
		pace = `,"pace_ms":` + strconv.FormatInt(s.pace.Milliseconds(), 10)
	}
	var b strings.Builder
	b.WriteString(`{"model":"m","stream":` + strconv.FormatBool(s.kind == kindStream) + pace + `,"max_tokens":64,"messages":[{"role":"user","content":"`)
	for b.Len() < s.body-4 {
		b.WriteString(words[(b.Len()*31+i*7)%len(words)])
	}
	return b.String()[:s.body-4] + `"}]}`
}

// load asks one contestant for so long, after a fifth of that to warm up.
func load(ctx context.Context, addr string, s shape, lasting time.Duration) (_ *sample, err error) {
	clients := make([]*client, s.conns)
	var sent [][]byte
	if s.talk == "" {
		sent = requests(s, addr)
	}
	for i := range clients {
		clients[i] = &client{addr: addr, sent: sent, turn: i, stream: s.kind == kindStream, paced: s.pace > 0}
		if s.talk != "" {
			clients[i].converse(s, i)
		}
	}
	l, err := newLoop(clients, s.rate)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, l.close()) }()
	warm, err := run(ctx, l, clients, lasting/5)
	if err != nil {
		return nil, err
	}
	out, err := run(ctx, l, clients, lasting)
	if err == nil {
		out.asked += warm.asked
	}
	return out, err
}

func run(ctx context.Context, l *loop, clients []*client, span time.Duration) (*sample, error) {
	for _, c := range clients {
		c.took, c.first, c.stalls, c.errors, c.err = c.took[:0], c.first[:0], c.stalls[:0], 0, nil
	}
	began := time.Now()
	if err := l.run(ctx, began, began.Add(span)); err != nil {
		return nil, err
	}
	out := &sample{seconds: time.Since(began).Seconds()}
	for _, c := range clients {
		out.took, out.first, out.stalls = append(out.took, c.took...), append(out.first, c.first...), append(out.stalls, c.stalls...)
		if out.errors += c.errors; c.err != nil {
			out.err = c.err
		}
	}
	out.asked = len(out.took) + out.errors
	slices.Sort(out.took)
	slices.Sort(out.first)
	slices.Sort(out.stalls)
	if len(out.took) == 0 {
		return nil, fmt.Errorf("no request was answered: %w", errors.Join(out.err, io.ErrUnexpectedEOF))
	}
	return out, nil
}

// answer is what a client has read of one.
type answer struct {
	head
	b     []byte
	first time.Time // when the first of its body was there

	last  time.Time     // when more of it came, where that is asked
	stall time.Duration // the longest time between two such
}

func (a *answer) begin() { *a = answer{b: a.b[:0]} }

// heard notes that more of the body is here.
func (a *answer) heard(now time.Time) {
	if a.end == 0 {
		return
	}
	if !a.last.IsZero() {
		a.stall = max(a.stall, now.Sub(a.last))
	}
	a.last = now
}

// room is where the next bytes are read to.
func (a *answer) room() []byte {
	if a.b == nil {
		a.b = make([]byte, 0, 64<<10)
	}
	if len(a.b) == cap(a.b) {
		a.b = slices.Grow(a.b, len(a.b))
	}
	return a.b[len(a.b):cap(a.b)]
}

// read says that n bytes more are in room, and tells whether the answer is whole, and whether it is the right one.
func (a *answer) read(n int, stream bool) (done bool, err error) {
	a.b = a.b[:len(a.b)+n]
	if a.end == 0 {
		if err := a.head.read(a.b); err != nil {
			return false, err
		}
	}
	if a.first.IsZero() && a.end > 0 && len(a.b) > a.end {
		a.first = time.Now()
	}
	if done, err = a.done(a.b, stream); !done && err == nil && len(a.b) > answerMax {
		err = errors.New("an answer without an end")
	}
	return done, err
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
