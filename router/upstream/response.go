package upstream

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"strconv"
	"sync"
	"time"

	"github.com/valyala/fasthttp"
)

const (
	bufferBytes    = 16 << 10
	bufferBytesMax = 256 << 10 // larger ones are left to the garbage collector
	retryAfterMax  = time.Minute
	interimMax     = 8 // 1xx responses before the one that counts
	trailersMax    = 32
)

var errMalformed = errors.New("malformed HTTP")

type buffer struct{ b []byte }

var buffers = sync.Pool{New: func() any { return &buffer{make([]byte, 0, bufferBytes)} }}

func newBuffer() *buffer {
	b := buffers.Get().(*buffer)
	b.b = b.b[:0]
	return b
}

func (b *buffer) free() {
	if cap(b.b) <= bufferBytesMax {
		buffers.Put(b)
	}
}

// response reads one HTTP/1.1 response. fasthttp parses the header; the body is read here, because it must be had
// as it comes and no further.
type response struct {
	br         *bufio.Reader
	status     int
	retryAfter time.Duration
	sse        bool
	keepAlive  bool
	// contentType of a body that is no event stream.
	contentType string

	chunked bool
	left    int64 // of the body or of the chunk; -1: until the connection ends
	begun   bool  // a chunk was begun, so that its line break is still to come
}

func (r *response) readHeader() error {
	h := fasthttp.AcquireResponse()
	defer fasthttp.ReleaseResponse(h)
	for interim := 0; ; interim++ {
		h.Reset()
		if err := h.Header.Read(r.br); err != nil {
			return headerError(err)
		}
		if s := h.StatusCode(); s >= 200 {
			break
		}
		if interim == interimMax {
			return fmt.Errorf("%w: too many interim responses", errMalformed)
		}
	}
	r.status = h.StatusCode()
	r.sse = r.status == fasthttp.StatusOK && bytes.HasPrefix(h.Header.ContentType(), []byte("text/event-stream"))
	if !r.sse {
		r.contentType = string(h.Header.ContentType())
	}
	r.keepAlive = !h.Header.ConnectionClose()
	if s, err := strconv.Atoi(string(h.Header.Peek("Retry-After"))); err == nil && s > 0 {
		r.retryAfter = min(time.Duration(s)*time.Second, retryAfterMax)
	}
	switch n := h.Header.ContentLength(); {
	case n >= 0:
		r.left = int64(n)
	case n == -1:
		r.chunked = true
	default:
		r.left, r.keepAlive = -1, false
	}
	return nil
}

// headerError keeps what the connection said apart from what was wrong with the bytes.
func headerError(err error) error {
	var timeout interface{ Timeout() bool }
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	if err == fasthttp.ErrTimeout || errors.As(err, &timeout) {
		return err
	}
	return fmt.Errorf("%w: %w", errMalformed, err)
}

// readMore appends what one read brings, and what is buffered behind it, to buf. io.EOF says that the body has ended.
func (r *response) readMore(buf *buffer) error {
	for first := true; first || r.ready(); first = false {
		if err := r.nextChunk(); err != nil {
			return err
		}
		if r.left == 0 {
			return io.EOF
		}
		if !first && r.br.Buffered() == 0 {
			return nil // the chunk's size was there, but none of its data
		}
		if len(buf.b) == cap(buf.b) {
			buf.b = append(buf.b, 0)[:len(buf.b)]
		}
		room := buf.b[len(buf.b):cap(buf.b)]
		if r.left > 0 && int64(len(room)) > r.left {
			room = room[:r.left]
		}
		n, err := r.br.Read(room)
		buf.b = buf.b[:len(buf.b)+n]
		if r.left > 0 {
			r.left -= int64(n)
		}
		switch {
		case err == io.EOF && r.left < 0:
			return io.EOF
		case err == io.EOF:
			return io.ErrUnexpectedEOF
		case err != nil:
			return err
		case !r.chunked && r.left == 0:
			return io.EOF
		}
	}
	return nil
}

// ready tells whether more of the body is to be had without waiting.
func (r *response) ready() bool {
	n := r.br.Buffered()
	if n == 0 || r.left != 0 {
		return n > 0
	}
	b, _ := r.br.Peek(n)
	if r.begun {
		b = b[min(2, n):] // the line break of the chunk before
	}
	return bytes.IndexByte(b, '\n') > 0 && !bytes.HasPrefix(b, []byte("0\r"))
}

// nextChunk reads up to the next chunk's data, if it is time to. Behind the last chunk left stays 0.
func (r *response) nextChunk() error {
	if !r.chunked || r.left > 0 {
		return nil
	}
	if r.begun {
		if line, err := r.line(); err != nil || len(line) != 0 {
			return orMalformed(err, "no line break behind a chunk")
		}
	}
	line, err := r.line()
	if err != nil {
		return err
	}
	if i := bytes.IndexByte(line, ';'); i >= 0 {
		line = line[:i]
	}
	n, err := strconv.ParseUint(string(bytes.TrimRight(line, " \t")), 16, 31)
	if err != nil {
		return fmt.Errorf("%w: chunk size %q", errMalformed, line)
	}
	r.left, r.begun = int64(n), true
	if n > 0 {
		return nil
	}
	for lines := 0; lines < trailersMax; lines++ {
		if line, err = r.line(); err != nil || len(line) == 0 {
			return err
		}
	}
	return fmt.Errorf("%w: too many trailers", errMalformed)
}

// line reads a line without its break. It is valid until the next read.
func (r *response) line() ([]byte, error) {
	line, err := r.br.ReadSlice('\n')
	switch {
	case err == io.EOF:
		return nil, io.ErrUnexpectedEOF
	case err == bufio.ErrBufferFull:
		return nil, fmt.Errorf("%w: a line without an end", errMalformed)
	case err != nil:
		return nil, err
	case len(line) < 2 || line[len(line)-2] != '\r':
		return nil, fmt.Errorf("%w: a bare line feed", errMalformed)
	}
	return line[:len(line)-2], nil
}

func orMalformed(err error, what string) error {
	if err != nil {
		return err
	}
	return fmt.Errorf("%w: %s", errMalformed, what)
}

// eventsEnd returns the index behind the last whole event in b.
func eventsEnd(b []byte) int {
	end := 0
	if i := bytes.LastIndex(b, []byte("\n\n")); i >= 0 {
		end = i + 2
	}
	if i := bytes.LastIndex(b[end:], []byte("\n\r\n")); i >= 0 {
		end += i + 3
	}
	return end
}
