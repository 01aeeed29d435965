package upstream

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"testing"
)

// pieces reads b in random pieces.
type pieces struct {
	b   []byte
	rnd *rand.Rand
}

func (p *pieces) Read(dst []byte) (int, error) {
	if len(p.b) == 0 {
		return 0, io.EOF
	}
	n := copy(dst, p.b[:1+p.rnd.IntN(len(p.b))])
	p.b = p.b[n:]
	return n, nil
}

// readAll reads a response as pump does, but for the batches.
func readAll(raw []byte, seed uint64) (r *response, body []byte, err error) {
	r = &response{br: bufio.NewReaderSize(&pieces{raw, rand.New(rand.NewPCG(seed, 1))}, 4096)}
	if err := r.readHeader(); err != nil {
		return r, nil, err
	}
	buf := &buffer{}
	for len(buf.b) < 1<<20 {
		if err := r.readMore(buf); err != nil {
			return r, buf.b, err
		}
	}
	return r, nil, errors.New("endless")
}

func TestResponse(t *testing.T) {
	for _, tt := range []struct {
		name, raw, body string
		err             error
		status          int
		keep, sse       bool
	}{
		{name: "length", raw: "HTTP/1.1 400 Bad\r\nContent-Length: 5\r\n\r\nhello", body: "hello", err: io.EOF, status: 400, keep: true},
		{name: "nothing", raw: "HTTP/1.1 503 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", err: io.EOF, status: 503},
		{name: "chunks", raw: "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\nT: 1\r\n\r\n", body: "abcde", err: io.EOF, status: 200, keep: true, sse: true},
		{name: "to the end", raw: "HTTP/1.0 200 OK\r\nConnection: close\r\n\r\nabc", body: "abc", err: io.EOF, status: 200},
		{name: "interim", raw: "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\na", body: "a", err: io.EOF, status: 200, keep: true},
		{name: "interims without end", raw: strings.Repeat("HTTP/1.1 100 Continue\r\n\r\n", 20), err: errMalformed},
		{name: "cut chunk", raw: "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabc", body: "abc", err: io.ErrUnexpectedEOF, status: 200, keep: true},
		{name: "no last chunk", raw: "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n", body: "abc", err: io.ErrUnexpectedEOF, status: 200, keep: true},
		{name: "cut length", raw: "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc", body: "abc", err: io.ErrUnexpectedEOF, status: 200, keep: true},
		{name: "chunk size is no number", raw: "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-3\r\nabc\r\n", err: errMalformed, status: 200, keep: true},
		{name: "chunk size overflows", raw: "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff1\r\n", err: errMalformed, status: 200, keep: true},
		{name: "junk behind a chunk", raw: "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabcdef\r\n0\r\n\r\n", body: "abc", err: errMalformed, status: 200, keep: true},
		{name: "bare line feed", raw: "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\nabc\r\n0\r\n\r\n", err: errMalformed, status: 200, keep: true},
		{name: "no HTTP", raw: "hello\r\n\r\n", err: errMalformed},
		{name: "empty", raw: "", err: io.ErrUnexpectedEOF},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for seed := range uint64(20) {
				r, body, err := readAll([]byte(tt.raw), seed)
				if !errors.Is(err, tt.err) || string(body) != tt.body || r.status != tt.status || r.keepAlive != tt.keep || r.sse != tt.sse {
					t.Fatalf("got %d %q keep %v sse %v, %v", r.status, body, r.keepAlive, r.sse, err)
				}
			}
		})
	}
}

// TestReadyDoesNotWait holds that readMore returns with what is there.
func TestReadyDoesNotWait(t *testing.T) {
	whole := "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n3\r\ndef\r\n0\r\n\r\n"
	for cut := strings.Index(whole, "abc") + 3; cut < len(whole); cut++ {
		pr, pw := io.Pipe()
		go func() { _, _ = io.WriteString(pw, whole[:cut]) }()
		r := &response{br: bufio.NewReader(pr)}
		if err := r.readHeader(); err != nil {
			t.Fatal(err)
		}
		buf := &buffer{}
		if err := r.readMore(buf); err != nil || !strings.HasPrefix(string(buf.b), "abc") {
			t.Errorf("cut at %d: got %q, %v", cut, buf.b, err)
		}
		pr.Close()
	}
}

// FuzzResponse holds that what is taken for a whole response is what net/http takes it for.
func FuzzResponse(f *testing.F) {
	f.Add([]byte("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\nT: 1\r\n\r\n"), uint64(1))
	f.Add([]byte("HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc"), uint64(2))
	f.Fuzz(func(t *testing.T, raw []byte, seed uint64) {
		_, body, err := readAll(raw, seed)
		_, again, err2 := readAll(raw, seed+1)
		if (err == io.EOF) != (err2 == io.EOF) || err == io.EOF && !bytes.Equal(body, again) {
			t.Fatalf("%q: %q, %v in some pieces, %q, %v in others", raw, body, err, again, err2)
		}
	})
}

// FuzzChunks cuts a body into chunks and reads: batches must be whole events and make up the body's whole events.
func FuzzChunks(f *testing.F) {
	f.Add([]byte(": hb\n\ndata: {}\n\ndata: cut"), uint64(3))
	f.Fuzz(func(t *testing.T, body []byte, seed uint64) {
		rnd := rand.New(rand.NewPCG(seed, 2))
		raw := []byte("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
		for rest := body; len(rest) > 0; {
			n := 1 + rnd.IntN(len(rest))
			raw = fmt.Appendf(raw, "%x\r\n%s\r\n", n, rest[:n])
			rest = rest[n:]
		}
		raw = append(raw, "0\r\n\r\n"...)
		std, err := http.ReadResponse(bufio.NewReader(bytes.NewReader(raw)), nil)
		if err != nil {
			t.Fatal(err)
		}
		want, _ := io.ReadAll(std.Body)
		_, got, err := readAll(raw, seed)
		if err != io.EOF || !bytes.Equal(got, want) {
			t.Fatalf("got %q, %v, want %q", got, err, want)
		}
		end := eventsEnd(got)
		if end > 0 && !bytes.HasSuffix(got[:end], []byte("\n\n")) && !bytes.HasSuffix(got[:end], []byte("\n\r\n")) {
			t.Fatalf("events end in %q", got[:end])
		}
		if bytes.Contains(got[end:], []byte("\n\n")) {
			t.Fatalf("an event is left in %q", got[end:])
		}
	})
}

// FuzzUsualChunk holds that what usualChunk takes is what chunkSize makes of it.
func FuzzUsualChunk(f *testing.F) {
	for _, s := range []string{"5\r\nhello", "\r\n1f\r\n", "0\r\n\r\n", "000\r\n", "00a\r\n", "1;x\r\n", "1 \r\n", "12345678\r\n", "1234567\r\n", "aF\r", "a\n", "\r\n", "", "x\r\n"} {
		f.Add([]byte(s), true)
		f.Add([]byte(s), false)
	}
	f.Fuzz(func(t *testing.T, b []byte, begun bool) {
		at := func() *response {
			r := &response{br: bufio.NewReaderSize(bytes.NewReader(b), 4096), chunked: true, begun: begun}
			_, _ = r.br.Peek(1) // has it buffered
			return r
		}
		usual, slow := at(), at()
		if !usual.usualChunk() {
			if n := usual.br.Buffered(); n != min(len(b), 4096) || usual.left != 0 {
				t.Errorf("%q: not taken, but %d bytes are left", b, n)
			}
			return
		}
		if err := slow.chunkSize(); err != nil || slow.left != usual.left || slow.begun != usual.begun || slow.br.Buffered() != usual.br.Buffered() {
			t.Errorf("%q: %d bytes in a chunk, by chunkSize %d, %v", b, usual.left, slow.left, err)
		}
	})
}
