package upstream

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"
)

var endOfHeader = []byte("\r\n\r\n")

// readHeader reads up to the body. Where there is an error nothing was read but interim responses, so that it can be tried
// again.
func (r *response) readHeader() error {
	for ; ; r.interim++ {
		if r.interim > interimMax {
			return fmt.Errorf("%w: too many interim responses", errMalformed)
		}
		b, err := r.bufferHeader()
		if err != nil {
			return err
		}
		if err := r.parse(b[:len(b)-2]); err != nil {
			return err
		}
		if _, err := r.br.Discard(len(b)); err != nil {
			return err
		}
		if r.status >= http.StatusOK {
			return nil
		}
		r.status = 0
	}
}

// bufferHeader waits until all of a header is buffered and returns it, its empty line included. It is good until the next read.
func (r *response) bufferHeader() ([]byte, error) {
	for {
		b, _ := r.br.Peek(r.br.Buffered())
		if i := bytes.Index(b, endOfHeader); i >= 0 {
			return b[:i+len(endOfHeader)], nil
		}
		switch _, err := r.br.Peek(len(b) + 1); {
		case err == nil:
		case err == io.EOF:
			return nil, io.ErrUnexpectedEOF
		case len(b) == r.br.Size():
			return nil, fmt.Errorf("%w: a header of more than %d bytes", errMalformed, len(b))
		default:
			return nil, err
		}
	}
}

// parse takes a header, of which every line ends in a line break. What two readers might take for answers of different lengths
// is refused, for it would be the next request's answer on this connection.
func (r *response) parse(b []byte) error {
	line, b, _ := bytes.Cut(b, []byte("\r\n"))
	const version = "HTTP/1."
	if len(line) < len(version)+5 || string(line[:len(version)]) != version || line[len(version)]|1 != '1' || line[len(version)+1] != ' ' || len(line) > 12 && line[12] != ' ' ||
		bytes.IndexByte(line, '\n') >= 0 || bytes.IndexByte(line, '\r') >= 0 {
		return fmt.Errorf("%w: no status line but %.40q", errMalformed, line)
	}
	status, err := strconv.ParseUint(string(line[9:12]), 10, 16)
	if err != nil || status < http.StatusContinue {
		return fmt.Errorf("%w: status %q", errMalformed, line[9:12])
	}
	newer := line[len(version)] == '1'
	r.status, r.keepAlive, r.left = int(status), newer, -1
	r.sse, r.chunked, r.contentType, r.retryAfter = false, false, "", 0
	for len(b) > 0 {
		n := bytes.IndexByte(b, '\n')
		if n == 1 && b[0] == '\r' {
			break
		}
		if n < 1 || b[n-1] != '\r' {
			return fmt.Errorf("%w: no header line but %.40q", errMalformed, b)
		}
		line, b = b[:n-1], b[n+1:]
		colon := bytes.IndexByte(line, ':')
		if colon < 1 || line[0] <= ' ' || line[colon-1] <= ' ' || bytes.IndexByte(line, '\r') >= 0 {
			return fmt.Errorf("%w: no header line but %.40q", errMalformed, line)
		}
		if err := r.field(line[:colon], trim(line[colon+1:])); err != nil {
			return err
		}
	}
	switch {
	case r.status == http.StatusNoContent || r.status == http.StatusNotModified:
		r.chunked, r.left = false, 0
	case r.chunked:
		// HTTP/1.0 has no chunks: whoever says so of them may mean another end (RFC 9112, section 6.1).
		r.keepAlive, r.left = r.keepAlive && r.left < 0 && newer, 0
	case r.left < 0:
		r.keepAlive = false
	}
	return nil
}

// field takes a header line. Others than these do not matter here.
func (r *response) field(name, value []byte) error {
	switch {
	case is(name, "content-length"):
		n, err := strconv.ParseUint(string(value), 10, 62)
		if err != nil || r.left >= 0 && r.left != int64(n) || value[0] == '+' {
			return fmt.Errorf("%w: content length %.40q", errMalformed, value)
		}
		r.left = int64(n)
	case is(name, "transfer-encoding"):
		if r.chunked || !is(value, "chunked") {
			return fmt.Errorf("%w: transfer encoding %.40q", errMalformed, value)
		}
		r.chunked = true
	case is(name, "content-type"):
		if r.status == http.StatusOK && bytes.HasPrefix(value, []byte("text/event-stream")) {
			r.sse = true
		} else if r.contentType = contentJSON; string(value) != contentJSON {
			r.contentType = string(value)
		}
	case is(name, "connection"):
		for token := range bytes.SplitSeq(value, []byte{','}) {
			switch token = bytes.TrimSpace(token); {
			case is(token, "close"):
				r.keepAlive = false
			case is(token, "keep-alive"): // what HTTP/1.0 says for it
				r.keepAlive = true
			}
		}
	case is(name, "retry-after"):
		if s, err := strconv.Atoi(string(value)); err == nil && s > 0 {
			r.retryAfter = min(time.Duration(s)*time.Second, retryAfterMax)
		}
	}
	return nil
}

// trim is bytes.Trim of spaces and tabs.
func trim(b []byte) []byte {
	for len(b) > 0 && (b[0] == ' ' || b[0] == '\t') {
		b = b[1:]
	}
	for len(b) > 0 && (b[len(b)-1] == ' ' || b[len(b)-1] == '\t') {
		b = b[:len(b)-1]
	}
	return b
}

// is tells whether b is a word, which is given in lower case.
func is(b []byte, word string) bool {
	if len(b) != len(word) {
		return false
	}
	for i := range b {
		if c := b[i]; c != word[i] && (c < 'A' || c > 'Z' || c|0x20 != word[i]) {
			return false
		}
	}
	return true
}

const contentJSON = "application/json"

// appendHeader appends the header of a request with a body of n bytes. Breaks of lines within values become spaces.
func (r *Request) appendHeader(b []byte, addr string, n int) []byte {
	return r.appendRest(r.appendFirst(b, addr), n)
}

// appendFirst appends what requests to the same place have in common.
func (r *Request) appendFirst(b []byte, addr string) []byte {
	b = append(b, "POST "...)
	if r.Get {
		b = append(b[:len(b)-len("POST ")], "GET "...)
	}
	b = appendValue(b, r.Path)
	b = append(b, " HTTP/1.1"...)
	line := func(name, value string) {
		b = append(b, "\r\n"...)
		b = appendValue(b, name)
		b = append(b, ": "...)
		b = appendValue(b, value)
	}
	line("Host", addr)
	line("User-Agent", "headrace-router")
	if accept := r.Accept; accept != "" {
		line("Accept", accept)
	} else {
		line("Accept", "text/event-stream")
	}
	if !r.Get {
		line("Content-Type", contentJSON)
	}
	return b
}

// appendRest appends what differs between requests to the same place.
func (r *Request) appendRest(b []byte, n int) []byte {
	for _, x := range r.Headers {
		b = append(appendValue(append(b, "\r\n"...), x[0]), ": "...)
		b = appendValue(b, x[1])
	}
	if !r.Get {
		b = appendValue(append(b, "\r\nX-Request-Id: "...), r.RequestID)
		b = append(b, "\r\nContent-Length: "...)
		b = strconv.AppendInt(b, int64(n), 10)
	}
	return append(b, "\r\n\r\n"...)
}

// appendHeader is Request.appendHeader into the connection's own room. What the last request has in common with this one is there
// still.
func (c *conn) appendHeader(r *Request, addr string, n int) []byte {
	if c.same == 0 || c.path != r.Path || c.accept != r.Accept || r.Get {
		b := r.appendFirst(c.head[:0], addr)
		c.head, c.same, c.path, c.accept = b, len(b), r.Path, r.Accept
		if r.Get {
			c.same = 0
		}
		return r.appendRest(b, n)
	}
	return r.appendRest(c.head[:c.same], n)
}

func appendValue(b []byte, s string) []byte {
	from := len(b)
	b = append(b, s...)
	if strings.IndexByte(s, '\n') < 0 && strings.IndexByte(s, '\r') < 0 {
		return b
	}
	for i := from; i < len(b); i++ {
		if b[i] == '\r' || b[i] == '\n' {
			b[i] = ' '
		}
	}
	return b
}
