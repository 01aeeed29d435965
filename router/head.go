package router

import (
	"io"
	"slices"

	"github.com/valyala/fasthttp"
)

const (
	// fieldsMax is how many header lines a plain head may have.
	fieldsMax = 40
)

// plainHead is the header of a request as nearly all clients write it. fasthttp, which reads any, takes more time for that than the
// rest of what is done for a small request, so that here only what is asked for is looked up in the bytes as they are. It has no
// opinion of its own: what is unusual is left to fasthttp, framing alone decides what is refused.
type plainHead struct {
	b      []byte // the header; valid while the request is served
	path   string // "" where the header is not plain
	fields [fieldsMax]field
	n      int  // of fields
	odd    bool // it has something unusual
	closes bool
}

// field is a line of a header: from begin the name, from value on up to end the value, with blanks around it.
type field struct{ begin, value, end uint16 }

// plainPaths are those of a plain head: the ones that requests in great numbers are for.
var plainPaths = map[string]string{"/v1/chat/completions": "/v1/chat/completions", "/v1/completions": "/v1/completions"}

func (h *plainHead) begin(b []byte) {
	h.b, h.path, h.n, h.closes = b, "", 0, false
	h.odd = len(b) > 1<<16-1
}

func (h *plainHead) request(method, target []byte) {
	if string(method) == fasthttp.MethodPost {
		h.path = plainPaths[string(target)]
	}
	h.odd = h.odd || h.path == ""
}

// host is what a Host line says.
func (h *plainHead) host(value []byte) {
	for _, c := range value {
		if !tokenBytes[c] && c != ':' && c != '[' && c != ']' {
			h.odd = true
		}
	}
	h.odd = h.odd || len(value) == 0
}

// field takes a header line that begins at that index.
func (h *plainHead) field(line []byte, at, colon int) {
	if h.odd {
		return
	}
	if h.n == fieldsMax {
		h.odd = true
		return
	}
	name, value := line[:colon], line[colon+1:]
	for _, c := range value {
		if c < ' ' && c != '\t' || c >= 0x7f {
			h.odd = true
			return
		}
	}
	switch {
	case len(name) == len("connection") && equalFold(name, "connection"):
		switch value = trimBlanks(value); {
		case equalFold(value, "close"):
			h.closes = true
		case !equalFold(value, "keep-alive"):
			h.odd = true
		}
	case len(name) == len("expect") && equalFold(name, "expect"):
		h.odd = true
	}
	h.fields[h.n] = field{uint16(at), uint16(at + colon + 1), uint16(at + len(line))}
	h.n++
}

// peek is the value of the first line of a name, nil where there is none.
func (h *plainHead) peek(name string) []byte {
	for i := range h.fields[:h.n] {
		f := &h.fields[i]
		if int(f.value)-1-int(f.begin) == len(name) && sameName(h.b[f.begin:f.value-1], name) {
			return trimBlanks(h.b[f.value:f.end])
		}
	}
	return nil
}

// sameName tells whether two names of headers, of the same length, are the same.
func sameName(b []byte, name string) bool {
	for i, c := range b {
		d := name[i]
		if c != d && (c|0x20 != d|0x20 || c|0x20 < 'a' || c|0x20 > 'z') {
			return false
		}
	}
	return true
}

// Peek is the value of a header of the request, nil where there is none.
func (s *serving) Peek(name string) []byte {
	if s.plain {
		return s.framing.plain.peek(name)
	}
	return s.ctx.Request.Header.Peek(name)
}

// readPlain reads the body of a request whose header, of n bytes, is buffered, if fasthttp is not needed for it; else it reads
// nothing, and plain is false.
func (s *serving) readPlain(n int) (plain bool, err error) {
	f := &s.framing
	h := &f.plain
	if h.odd || !f.http11 || f.chunked || f.length <= 0 || f.length > keptBytesMax || f.length > int64(s.r.cfg.MaxBodyBytes) {
		return false, nil
	}
	s.path, s.plain, s.http11, s.closes = h.path, true, true, h.closes
	if f.length > keylessBytesMax && !s.r.knows(s) {
		s.plain = false
		return false, nil
	}
	if f.length > uncountedBytesMax {
		if err := s.held.grow(f.length); err != nil {
			return true, err
		}
	}
	s.conn.readingBody(f.length)
	length := int(f.length)
	s.apart = n <= firstBytes && n+length > max(s.in.Size(), aheadBytes)
	s.tight = s.in.Size() < n+length && n+length <= aheadBytes
	if s.in.Buffered() >= n+length { // it stays where it is
		b, _ := s.in.Peek(n + length)
		s.body, s.behind = b[n:], n+length
		return true, nil
	}
	s.kept = append(s.kept[:0], h.b...)
	h.b = s.kept
	if _, err := s.in.Discard(n); err != nil {
		return true, err
	}
	if s.large, _ = s.r.buffers.Get().(*[]byte); s.large == nil {
		s.large = new([]byte)
	}
	*s.large = slices.Grow((*s.large)[:0], length)
	s.body = (*s.large)[:length]
	if _, err := io.ReadFull(s.in, s.body); err != nil {
		return true, unexpected(err)
	}
	return true, nil
}
