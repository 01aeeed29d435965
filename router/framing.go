package router

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"math"

	"github.com/valyala/fasthttp"

	"github.com/headrace/headrace/internal/openai"
)

// A request that two readers take for requests of different lengths lets a client put requests of its own into other clients'
// connections, where something in front of the router shares connections among them. fasthttp, which parses headers here, takes
// more than RFC 9112 allows: line feeds alone, folded lines, names with spaces in them, lengths beside Transfer-Encoding,
// extensions of chunks. So headers and chunks are checked here before it sees them, and what is not beyond doubt is refused
// and the connection closed.

const (
	// keylessBytesMax is the largest body that is read from somebody who has shown no key.
	keylessBytesMax = 64 << 10
	// bodyAtOnceMax is how much room a body gets before it has come.
	bodyAtOnceMax = 1 << 20
	chunkLineMax  = 18 // digits of a chunk's size and the line's end
)

// unclear says what of a request could be read in two ways.
type unclear string

func (u unclear) Error() string { return string(u) }

var errHeaderTooLarge = errors.New("the header is too large")

// framing is how long a request's body is.
type framing struct {
	length  int64 // -1: not said
	chunked bool
	hosts   int
	http11  bool
	plain   plainHead
}

// frame waits until all of a request's header is buffered, leaves it there, and says what follows it. n is how long it is, its empty
// line included.
func (s *serving) frame(f *framing) (n int, err error) {
	if b, _ := s.in.Peek(2); string(b) == "\r\n" { // old clients send one behind a body
		_, _ = s.in.Discard(2)
	}
	most := s.r.cfg.MaxHeaderBytes // s.in may have room for more
	for seen := 0; ; {
		b, _ := s.in.Peek(s.in.Buffered())
		from := max(0, seen-3)
		if i := bytes.Index(b[from:], []byte("\r\n\r\n")); i >= 0 && from+i+4 <= most {
			return from + i + 4, f.parse(b[:from+i+2])
		}
		if bareLineFeed(b[:min(len(b), most)], seen) { // that end would never come
			return 0, unclear("a line ends without a carriage return")
		}
		if seen = len(b); seen >= most {
			return 0, errHeaderTooLarge
		}
		if _, err := s.in.Peek(seen + 1); err == io.EOF && seen > 0 {
			return 0, io.ErrUnexpectedEOF
		} else if err != nil {
			return 0, err
		}
	}
}

// bareLineFeed looks for a line feed from an index on that has no carriage return before it.
func bareLineFeed(b []byte, from int) bool {
	for {
		i := bytes.IndexByte(b[from:], '\n')
		if i < 0 {
			return false
		}
		if from += i; from == 0 || b[from-1] != '\r' {
			return true
		}
		from++
	}
}

// parse takes a header without its empty line.
func (f *framing) parse(b []byte) error {
	f.length, f.chunked, f.hosts, f.http11 = -1, false, 0, false
	f.plain.begin(b)
	line, rest, ok := cutLine(b)
	if !ok {
		return unclear("a line ends without a carriage return and a line feed")
	}
	if err := f.request(line); err != nil {
		return err
	}
	for len(rest) > 0 {
		at := len(b) - len(rest)
		if line, rest, ok = cutLine(rest); !ok {
			return unclear("a line ends without a carriage return and a line feed")
		}
		if err := f.field(line, at); err != nil {
			return err
		}
	}
	switch {
	case f.chunked && f.length >= 0:
		return unclear("it has a Content-Length and a Transfer-Encoding")
	case f.chunked && !f.http11:
		return unclear("HTTP/1.0 has no Transfer-Encoding")
	case f.http11 && f.hosts != 1:
		return unclear("it needs one Host")
	}
	return nil
}

// cutLine cuts the first line off, which ends in CR LF and has no other of either.
func cutLine(b []byte) (line, rest []byte, ok bool) {
	i := bytes.IndexByte(b, '\n')
	if i < 1 || bytes.IndexByte(b[:i], '\r') != i-1 {
		return nil, nil, false
	}
	return b[:i-1], b[i+1:], true
}

// request checks the first line.
func (f *framing) request(line []byte) error {
	method, rest, _ := bytes.Cut(line, []byte{' '})
	target, version, ok := bytes.Cut(rest, []byte{' '})
	if !ok || !isToken(method) || len(target) == 0 {
		return unclear("its first line is not METHOD TARGET HTTP/1.1")
	}
	for _, c := range target {
		if c <= ' ' || c >= 0x7f {
			return unclear("its target has bytes that have no place in one")
		}
	}
	switch string(version) {
	case "HTTP/1.1":
		f.http11 = true
	case "HTTP/1.0":
	default:
		return unclear("its first line does not end in HTTP/1.1")
	}
	f.plain.request(method, target)
	return nil
}

// field checks a header line, which begins at that index of the header.
func (f *framing) field(line []byte, at int) error {
	colon := bytes.IndexByte(line, ':')
	if colon < 1 || !isToken(line[:colon]) {
		return unclear("a header line has no name, or a name with other bytes than names have: spaces and folded lines are not taken")
	}
	name, value := line[:colon], trimBlanks(line[colon+1:])
	switch {
	case len(name) == len("host") && equalFold(name, "host"):
		f.hosts++
		f.plain.host(value)
	case len(name) == len("content-length") && equalFold(name, "content-length"):
		n, ok := parseLength(value)
		if !ok || f.length >= 0 {
			return unclear("its Content-Length is no number, or there are several")
		}
		f.length = n
	case len(name) == len("transfer-encoding") && equalFold(name, "transfer-encoding"):
		if f.chunked || !equalFold(value, "chunked") {
			return unclear("its Transfer-Encoding is not chunked, or there are several")
		}
		f.chunked = true
	default:
		f.plain.field(line, at, colon)
	}
	return nil
}

// trimBlanks is bytes.Trim of spaces and tabs.
func trimBlanks(b []byte) []byte {
	for len(b) > 0 && (b[0] == ' ' || b[0] == '\t') {
		b = b[1:]
	}
	for len(b) > 0 && (b[len(b)-1] == ' ' || b[len(b)-1] == '\t') {
		b = b[:len(b)-1]
	}
	return b
}

// parseLength takes digits and nothing else.
func parseLength(b []byte) (n int64, ok bool) {
	if len(b) == 0 || len(b) > 18 {
		return 0, false
	}
	for _, c := range b {
		if c < '0' || c > '9' {
			return 0, false
		}
		n = n*10 + int64(c-'0')
	}
	return n, true
}

// equalFold tells whether b is a word, which is given in lower case. Other than bytes.EqualFold it knows ASCII alone: no Kelvin
// sign is a k.
func equalFold(b []byte, word string) bool {
	if len(b) != len(word) {
		return false
	}
	for i, c := range b {
		if 'A' <= c && c <= 'Z' {
			c |= 0x20
		}
		if c != word[i] {
			return false
		}
	}
	return true
}

// isToken tells whether b is one, as names of headers and methods are (RFC 9110, 5.6.2).
func isToken(b []byte) bool {
	for _, c := range b {
		if !tokenBytes[c] {
			return false
		}
	}
	return len(b) > 0
}

var tokenBytes = func() (t [256]bool) {
	for c := range t {
		t[c] = 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || bytes.IndexByte([]byte("!#$%&'*+-.^_`|~"), byte(c)) >= 0
	}
	return t
}()

// readBody reads the request's body, whose header is read.
func (s *serving) readBody(f *framing) error {
	req, most := &s.ctx.Request, s.r.cfg.MaxBodyBytes
	if !f.chunked && f.length <= 0 {
		return nil
	}
	if f.length > int64(most) {
		return fasthttp.ErrBodyTooLarge
	}
	s.conn.readingBody(f.length)
	if f.chunked || f.length > keylessBytesMax {
		if !s.r.knows(s) {
			if most = min(most, keylessBytesMax); !f.chunked {
				return errNoKey
			}
		}
	}
	if !f.chunked && uncountedBytesMax < f.length && f.length <= bodyAtOnceMax {
		if err := s.held.grow(f.length); err != nil {
			return err
		}
	}
	if req.MayContinue() {
		s.out = append(s.out, "HTTP/1.1 100 Continue\r\n\r\n"...)
	}
	if !f.chunked && f.length <= bodyAtOnceMax {
		err := req.ContinueReadBody(s.in, most, false)
		s.body = req.Body()
		return err
	}
	var b []byte
	var err error
	if f.chunked {
		b, err = readChunks(s.in, most, &s.held)
	} else {
		b, err = readGrowing(s.in, nil, int(f.length), &s.held)
	}
	if err == fasthttp.ErrBodyTooLarge && most < s.r.cfg.MaxBodyBytes {
		return errNoKey
	}
	s.body = b
	return err
}

var errNoKey = errors.New("a large body without a key")

// knows tells whether the request, of which there is the header, may have its body read.
func (r *Router) knows(s *serving) bool {
	if !needsKey(s.path, foreignPaths[s.path]) {
		return true
	}
	_, ok := r.keys.ring.Load().admits(s.Peek("Authorization"))
	return ok
}

// readGrowing appends n bytes to b. What it takes of memory grows with what has come, not with what was announced.
func readGrowing(in *bufio.Reader, b []byte, n int, room *held) ([]byte, error) {
	for n > 0 {
		if len(b) == cap(b) {
			more := min(n, max(len(b), bodyAtOnceMax))
			if err := room.grow(int64(len(b) + more - cap(b))); err != nil {
				return b, err
			}
			b = append(make([]byte, 0, len(b)+more), b...)
		}
		got, err := in.Read(b[len(b):min(cap(b), len(b)+n)])
		b, n = b[:len(b)+got], n-got
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		if err != nil && n > 0 {
			return b, err
		}
	}
	return b, nil
}

// readChunks reads a chunked body of most bytes at most. Extensions of chunks and trailers are refused: no client of an API like
// this one sends any, and readers disagree about where they end.
func readChunks(in *bufio.Reader, most int, room *held) (b []byte, err error) {
	for {
		n, err := chunkSize(in)
		if err != nil {
			return b, err
		}
		if n > int64(most-len(b)) {
			return b, fasthttp.ErrBodyTooLarge
		}
		if more := len(b); cap(b)-len(b) < int(n) && more > 0 { // many small chunks must not copy what is there each
			if err := room.grow(int64(len(b) + more - cap(b))); err != nil {
				return b, err
			}
			b = append(make([]byte, 0, len(b)+more), b...)
		}
		if b, err = readGrowing(in, b, int(n), room); err != nil {
			return b, err
		}
		if err := lineEnd(in, n == 0); err != nil || n == 0 {
			return b, err
		}
	}
}

// chunkSize reads the line before a chunk.
func chunkSize(in *bufio.Reader) (n int64, err error) {
	for digits := 0; ; digits++ {
		c, err := in.ReadByte()
		if err != nil {
			return 0, unexpected(err)
		}
		digit, ok := hexDigit(c)
		switch {
		case ok && digits < chunkLineMax-2 && n <= math.MaxInt64>>4:
			n = n<<4 | digit
		case !ok && c == '\r' && digits > 0:
			if c, err = in.ReadByte(); err == nil && c == '\n' {
				return n, nil
			}
			return 0, orUnclear(err, "a chunk's size does not end in CR LF")
		default:
			return 0, unclear("a chunk's size is no number, or something follows it")
		}
	}
}

// lineEnd reads what is behind a chunk, or in place of trailers.
func lineEnd(in *bufio.Reader, last bool) error {
	for _, want := range []byte("\r\n") {
		c, err := in.ReadByte()
		switch {
		case err != nil:
			return unexpected(err)
		case c != want && last:
			return unclear("it has trailers")
		case c != want:
			return unclear("a chunk is longer or shorter than it says")
		}
	}
	return nil
}

func hexDigit(c byte) (int64, bool) {
	switch {
	case '0' <= c && c <= '9':
		return int64(c - '0'), true
	case 'a' <= c|0x20 && c|0x20 <= 'f':
		return int64(c|0x20-'a') + 10, true
	}
	return 0, false
}

func unexpected(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}

func orUnclear(err error, what string) error {
	if err != nil {
		return unexpected(err)
	}
	return unclear(what)
}

// unclearError is what the client is told.
func unclearError(u unclear) *openai.Error {
	return openai.BadRequest("", "", "The request is refused because it can be read in more than one way: %s.", u)
}
