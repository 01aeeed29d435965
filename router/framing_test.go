package router

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"
)

// answers sends raw and returns the statuses of all answers until the router closes the connection.
func (h *harness) answers(raw string) (statuses []int, last string) {
	h.t.Helper()
	c := h.dial()
	defer c.Close() // the router waits a while for who is still sending
	if _, err := io.WriteString(c, raw); err != nil {
		h.t.Fatal(err)
	}
	for br := bufio.NewReader(c); ; {
		if _, err := br.Peek(1); err == io.EOF {
			return statuses, last
		}
		resp, err := http.ReadResponse(br, nil)
		if err != nil {
			h.t.Fatalf("behind %v: %v", statuses, err)
		}
		b, err := io.ReadAll(resp.Body)
		if err != nil {
			h.t.Fatal(err)
		}
		statuses, last = append(statuses, resp.StatusCode), string(b)
	}
}

// TestSmuggling sends requests that readers have been known to take for requests of different lengths, with another one behind or
// within them: there is one answer, 400, and the connection ends.
func TestSmuggling(t *testing.T) {
	h := start(t, nil, pair("d1")...)
	within := "GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
	body := ask{n: 1}.body()
	head := func(lines ...string) string {
		return "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n" + strings.Join(lines, "\r\n") + "\r\n\r\n"
	}
	length := fmt.Sprintf("Content-Length: %d", len(body))
	chunks := fmt.Sprintf("%x\r\n%s\r\n0\r\n\r\n", len(body), body)
	const te = "Transfer-Encoding: chunked"
	for name, raw := range map[string]string{
		"CL and TE":                     head("Content-Length: 4", te) + chunks,
		"TE and CL":                     head(te, length) + body,
		"two lengths":                   head(length, "Content-Length: 0") + body,
		"equal lengths":                 head(length, length) + body,
		"list of lengths":               head("Content-Length: 5, 5") + body,
		"signed length":                 head("Content-Length: +5") + body,
		"negative length":               head("Content-Length: -1") + body,
		"hexadecimal length":            head("Content-Length: 0x5") + body,
		"empty length":                  head("Content-Length:") + body,
		"length beyond 64 bits":         head("Content-Length: 18446744073709551617") + "x",
		"length with a space in it":     head("Content-Length: 1 0") + body,
		"space before the colon":        head("Content-Length : 5") + body,
		"tab before the colon":          head("Transfer-Encoding\t: chunked") + chunks,
		"space in a name":               head("Content Length: 5", length) + body,
		"empty name":                    head(": x", length) + body,
		"line without a colon":          head("Content-Length", length) + body,
		"folded line":                   head("X: a", " b", length) + body,
		"folded with a tab":             head("Transfer-Encoding:", "\tchunked") + chunks,
		"space before the first header": "POST /v1/completions HTTP/1.1\r\n Host: x\r\nHost: x\r\n" + length + "\r\n\r\n" + body,
		"TE identity":                   head("Transfer-Encoding: identity", length) + body,
		"TE gzip":                       head("Transfer-Encoding: gzip, chunked") + chunks,
		"TE twice in a line":            head("Transfer-Encoding: chunked, chunked") + chunks,
		"TE twice":                      head(te, te) + chunks,
		"TE and identity":               head(te, "Transfer-Encoding: identity") + chunks,
		"TE in quotes":                  head(`Transfer-Encoding: "chunked"`) + chunks,
		"TE with a parameter":           head("Transfer-Encoding: chunked;a=b") + chunks,
		"TE with a vertical tab":        head("Transfer-Encoding: \x0bchunked") + chunks,
		"TE with a Kelvin sign":         head("Transfer-Encoding: chun\u212aed") + chunks,
		"TE in HTTP/1.0":                "POST /v1/completions HTTP/1.0\r\n" + te + "\r\n\r\n" + chunks,
		"bare LF behind a header":       "POST /v1/completions HTTP/1.1\r\nHost: x\r\nX: a\n" + length + "\r\n\r\n" + body,
		"bare LF in the first line":     "POST /v1/completions HTTP/1.1\nHost: x\r\n" + length + "\r\n\r\n" + body,
		"bare LFs":                      "POST /v1/completions HTTP/1.1\nHost: x\n" + length + "\n\n" + body,
		"LF LF within a header":         "POST /v1/completions HTTP/1.1\r\nHost: x\r\nX: a\n\n" + within,
		"bare CR in a value":            head("X: a\rContent-Length: 0", length) + body,
		"bare CR as a line's end":       head("X: a\r"+te, length) + body,
		"NUL in a value":                head("X: a\x00b", length) + body,
		"NUL in a name":                 head("X\x00: a", length) + body,
		"no host":                       "POST /v1/completions HTTP/1.1\r\n" + length + "\r\n\r\n" + body,
		"two hosts":                     head("Host: y", length) + body,
		"two spaces in the first line":  "POST  /v1/completions HTTP/1.1\r\nHost: x\r\n" + length + "\r\n\r\n" + body,
		"space in the target":           "POST /v1/completions x HTTP/1.1\r\nHost: x\r\n" + length + "\r\n\r\n" + body,
		"no version":                    "GET /health\r\nHost: x\r\n\r\n",
		"another version":               "GET /health HTTP/1.2\r\nHost: x\r\n\r\n",
		"HTTP/2's first words":          "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
		"a header of a header's kind":   "GET /health HTTP/1.1\r\nHost: x\r\nX: HTTP/1.1\r\n\nGET /x HTTP/1.1\r\n\r\n",
		"chunk extension":               head(te) + "1;a=b\r\n{\r\n0\r\n\r\n",
		"chunk extension with an LF":    head(te) + "1;a\n\r\n{\r\n0\r\n\r\n",
		"chunk size with a space":       head(te) + "1 \r\n{\r\n0\r\n\r\n",
		"chunk size with a sign":        head(te) + "+1\r\n{\r\n0\r\n\r\n",
		"chunk size with 0x":            head(te) + "0x1\r\n{\r\n0\r\n\r\n",
		"chunk size of many digits":     head(te) + "00000000000000001\r\n{\r\n0\r\n\r\n",
		"no chunk size":                 head(te) + "\r\n{\r\n0\r\n\r\n",
		"chunk size with a bare LF":     head(te) + "1\n{\r\n0\r\n\r\n",
		"chunk with a bare LF":          head(te) + "1\r\n{\n0\r\n\r\n",
		"chunk shorter than it says":    head(te) + "3\r\n{\r\n0\r\n\r\n",
		"chunk longer than it says":     head(te) + "1\r\n{}\r\n0\r\n\r\n",
		"last chunk with a bare LF":     head(te) + "1\r\n{\r\n0\n\n",
		"trailer":                       head(te, "Trailer: X-Request-Id") + "1\r\n{\r\n0\r\nX-Request-Id: a\r\n\r\n",
		"trailer that frames":           head(te) + "1\r\n{\r\n0\r\nContent-Length: 50\r\n\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			if got, last := h.answers(raw + within); len(got) != 1 || got[0] != 400 || !strings.Contains(last, `"invalid_request_error"`) {
				t.Errorf("%q was answered with %v, want one 400: %s", raw, got, last)
			}
		})
	}
	// What is served before the doubtful one is answered.
	if got, _ := h.answers("GET /health HTTP/1.1\r\nHost: x\r\n\r\n" + head("Content-Length: 4", te) + within); fmt.Sprint(got) != "[200 400]" {
		t.Errorf("behind a good request: %v", got)
	}
}

// TestFramingTakes sends what is unusual and clear.
func TestFramingTakes(t *testing.T) {
	h := start(t, nil, pair("d1")...)
	body := ask{n: 2}.body()
	end := "GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
	chunked := "POST /v1/chat/completions HTTP/1.1\r\nhOST: x\r\ntransfer-ENCODING:\tChunked \r\n\r\n"
	for name, raw := range map[string]string{
		"chunks":                fmt.Sprintf("%s%X\r\n%s\r\n%x\r\n%s\r\n000\r\n\r\n", chunked, 10, body[:10], len(body)-10, body[10:]),
		"length":                fmt.Sprintf("POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: \t00%d \r\n\r\n%s", len(body), body),
		"line break before it":  "\r\n" + post(body),
		"absolute form":         "POST http://10.0.0.1/v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: " + fmt.Sprint(len(body)) + "\r\n\r\n" + body,
		"body of a GET":         "GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nGET /",
		"bytes beyond ASCII":    post(body, "X: \xff\xe9"),
		"100-continue, unasked": post(body, "Expect: something"),
	} {
		t.Run(name, func(t *testing.T) {
			if got, last := h.answers(raw + end); fmt.Sprint(got) != "[200 200]" {
				t.Errorf("%q was answered with %v: %s", raw, got, last)
			}
		})
	}
}

// TestRefusedBeforeTheBody announces bodies that never come.
func TestRefusedBeforeTheBody(t *testing.T) {
	h := start(t, func(c *Config) { c.APIKeys = []string{"key"}; c.MaxBodyBytes = 1 << 20; c.MaxHeaderBytes = 4096 }, pair("d1")...)
	head := func(length int, lines string) string {
		return fmt.Sprintf("POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n%s\r\n", length, lines)
	}
	const key = "Authorization: Bearer key\r\n"
	for name, tt := range map[string]struct {
		raw    string
		status int
	}{
		"too large":               {head(2<<20, key), 413},
		"too large for an int":    {head(1<<59, key), 413},
		"too large and chunked":   {"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n" + key + "\r\n100001\r\n", 413},
		"without a key":           {head(1<<20, ""), 401},
		"with a wrong key":        {head(1<<20, "Authorization: Bearer no\r\n"), 401},
		"chunked without a key":   {"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n10001\r\n", 401},
		"waiting, without a key":  {head(1<<20, "Expect: 100-continue\r\n"), 401},
		"waiting, too large":      {head(2<<20, key+"Expect: 100-continue\r\n"), 413},
		"header without an end":   {"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX: " + strings.Repeat("x", 5000), 431},
		"many headers, no end":    {"POST /v1/completions HTTP/1.1\r\n" + strings.Repeat("X: y\r\n", 1000), 431},
		"first line without end":  {"POST /" + strings.Repeat("x", 5000), 431},
		"header of 4 KiB and one": {"GET /health HTTP/1.1\r\nHost: x\r\nX: " + strings.Repeat("x", 4096-len("GET /health HTTP/1.1\r\nHost: x\r\nX: \r\n\r\n")+1) + "\r\n\r\n", 431},
	} {
		t.Run(name, func(t *testing.T) {
			if got, last := h.answers(tt.raw); len(got) != 1 || got[0] != tt.status {
				t.Errorf("answered with %v, want %d: %s", got, tt.status, last)
			}
		})
	}
}

// TestSlowClients has clients stop within a header and within a body: they are told, and cut off.
func TestSlowClients(t *testing.T) {
	h := start(t, func(c *Config) { c.HeaderTimeout, c.ReadTimeout = 50*time.Millisecond, 100*time.Millisecond }, pair("d1")...)
	for name, raw := range map[string]string{
		"header": "POST /v1/completions HTTP/1.1\r\nHost",
		"body":   "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{",
		"large":  "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 30000000\r\n\r\n{",
		"chunks": "POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{",
		"none":   "",
	} {
		t.Run(name, func(t *testing.T) {
			if got, last := h.answers(raw); len(got) != 1 || got[0] != 408 {
				t.Errorf("answered with %v, want one 408: %s", got, last)
			}
		})
	}
	h.until("the connections to be gone", func() bool { return h.r.Status().Conns == 0 })
}

// TestBodyTakesWhatHasCome announces much and sends little.
func TestBodyTakesWhatHasCome(t *testing.T) {
	b, err := readGrowing(bufio.NewReader(strings.NewReader("little")), nil, 1<<40, &held{})
	if err != io.ErrUnexpectedEOF || string(b) != "little" || cap(b) > bodyAtOnceMax {
		t.Errorf("readGrowing = %q with room for %d, %v", b, cap(b), err)
	}
	many := bytes.Repeat([]byte("much "), 1<<20)
	if b, err = readGrowing(bufio.NewReader(bytes.NewReader(many)), nil, len(many), &held{}); err != nil || !bytes.Equal(b, many) {
		t.Errorf("readGrowing: %d bytes, %v", len(b), err)
	}
}

// A connection whose requests are a little longer than its room makes room for such ones, and takes no longer a header for it. However
// requests come, in pieces or several at once, nothing of the next one is lost.
func TestRoomForLongerRequests(t *testing.T) {
	const most = 4096
	header := func(n int) string {
		const first = "GET /health HTTP/1.1\r\nHost: x\r\nX: "
		return first + strings.Repeat("x", n-len(first)-4) + "\r\n\r\n"
	}
	var bodies []string
	var alone [][]byte
	for i, n := range []int{6000, 6000, 20_000, 40_000, 20_000, 100, 32_000, aheadBytes, 90_000, 6000, 6000} {
		bodies = append(bodies, strings.Repeat(fmt.Sprint(i), n)[:n])
		alone = append(alone, []byte(post(bodies[i])))
	}
	alone = append(alone, []byte(header(most)), []byte(header(most+1)))
	for _, piece := range []int{0, 1 << 20, 20_100, aheadBytes, most, 999, 7} {
		t.Run(fmt.Sprint(piece), func(t *testing.T) {
			writes := slices.Values(alone)
			if piece > 0 {
				writes = slices.Chunk(slices.Concat(alone...), piece)
			}
			near, far := net.Pipe()
			defer near.Close()
			go func() {
				defer far.Close()
				for p := range writes {
					if _, err := far.Write(p); err != nil {
						return
					}
				}
			}()
			s := reader(nil, most)
			s.r.cfg.MaxBodyBytes, s.r.cfg.WriteTimeout = 1<<20, patience
			s.r.cfg.IdleTimeout, s.r.cfg.HeaderTimeout, s.r.cfg.ReadTimeout = patience, patience, patience
			s.conn.Conn = near
			s.in = bufio.NewReaderSize(s, most)
			next := func() error {
				s.conn.await(false)
				if _, err := s.in.Peek(1); err != nil {
					return err
				}
				s.conn.reading()
				return s.read()
			}
			for i, want := range bodies {
				if err := next(); err != nil || string(s.body) != want {
					t.Fatalf("request %d: %d bytes of %d, %v", i, len(s.body), len(want), err)
				}
				s.done()
			}
			if piece == 0 && s.in.Size() != aheadBytes { // else there mostly was something in it
				t.Errorf("room for %d bytes", s.in.Size())
			}
			if err := next(); err != nil || s.path != "/health" {
				t.Errorf("a header of %d bytes: %v", most, err)
			}
			s.done()
			if err := next(); err != errHeaderTooLarge {
				t.Errorf("a header of %d bytes: %v", most+1, err)
			}
		})
	}
}

// reader is a serving that reads b, with that much room.
func reader(b []byte, room int) *serving {
	r := &Router{cfg: Config{MaxBodyBytes: 1 << 16, MaxHeaderBytes: 4096}, keys: &keys{}}
	r.keys.ring.Store(&keyring{})
	s := &serving{r: r, in: bufio.NewReaderSize(bytes.NewReader(b), room), conn: &clientConn{owner: r}}
	return s
}

// FuzzFraming holds what is taken for a request beside what net/http takes it for: if both take it, they agree on where it ends.
func FuzzFraming(f *testing.F) {
	for _, raw := range []string{
		post(`{"model":"m"}`), "GET / HTTP/1.0\r\n\r\nGET", "\r\nPOST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\nrest",
		"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "GET / HTTP/1.1\nHost: x\n\n",
	} {
		f.Add([]byte(raw))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		s, roomy := reader(raw, 4096), reader(raw, aheadBytes)
		err, same := s.read(), roomy.read()
		if fmt.Sprint(err) != fmt.Sprint(same) || !bytes.Equal(s.body, roomy.body) {
			t.Errorf("%q: %v and a body of %d bytes, with more room %v and %d", raw, err, len(s.body), same, len(roomy.body))
		}
		if err != nil {
			var u unclear
			if errors.As(err, &u) && u == "" {
				t.Errorf("no reason for the refusal of %q", raw)
			}
			return
		}
		got := bytes.Clone(s.body)
		_, _ = s.in.Discard(s.behind)
		rest, _ := io.ReadAll(s.in)
		theirs := bufio.NewReader(bytes.NewReader(raw))
		if b, _ := theirs.Peek(2); string(b) == "\r\n" {
			_, _ = theirs.Discard(2)
		}
		req, err := http.ReadRequest(theirs)
		if err != nil {
			return // of targets and hosts they take less
		}
		body, err := io.ReadAll(req.Body)
		if err != nil {
			t.Fatalf("%q: taken, and net/http says of the body %v", raw, err)
		}
		left, _ := io.ReadAll(theirs)
		if string(got) != string(body) || string(rest) != string(left) || s.method() != req.Method {
			t.Errorf("%q: body %q and rest %q, net/http has %q and %q", raw, got, rest, body, left)
		}
		for name := range req.Header {
			if s.plain && name != "Content-Length" && string(s.Peek(name)) != req.Header.Get(name) {
				t.Errorf("%q: %s is %q, net/http has %q", raw, name, s.Peek(name), req.Header.Get(name))
			}
		}
	})
}
