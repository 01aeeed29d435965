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

// response reads one HTTP/1.1 response, its body as it comes and no further.
type response struct {
	br         *bufio.Reader
	interim    int // responses before the one that counts
	status     int
	retryAfter time.Duration
	sse        bool
	keepAlive  bool
	// contentType of a body that is no event stream.
	contentType string

	chunked bool
	left    int64 // of the body or of the chunk; -1: until the connection ends
	begun   bool  // a chunk was begun, so that its line break is still to come
	// Behind the last chunk.
	trailing bool
	trailers int // lines of them
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

// here tells whether all that is still to come of the body is buffered, as far as that is easily seen.
func (r *response) here() bool {
	n := r.br.Buffered()
	if !r.chunked {
		return r.left >= 0 && int64(n) >= r.left
	}
	b, _ := r.br.Peek(n)
	return bytes.HasSuffix(b, endOfChunks)
}

var endOfChunks = []byte("0\r\n\r\n")

// nextChunk reads up to the next chunk's data, if it is time to. Behind the last chunk left stays 0.
func (r *response) nextChunk() error {
	if !r.chunked || r.left > 0 {
		return nil
	}
	if !r.trailing {
		if r.usualChunk() {
			return nil
		}
		if err := r.chunkSize(); err != nil || r.left > 0 {
			return err
		}
		r.trailing = true
	}
	for ; r.trailers < trailersMax; r.trailers++ {
		if line, err := r.line(); err != nil || len(line) == 0 {
			return err
		}
	}
	return fmt.Errorf("%w: too many trailers", errMalformed)
}

// chunkDigitsMax is how many digits a chunk's size has that usualChunk reads. Longer ones, with zeros before them, are left to chunkSize.
const chunkDigitsMax = 7

// usualChunk is chunkSize of a line that is here, with digits and nothing else, of a chunk that is not the last; else it reads nothing.
// It is what nearly all chunks begin with, and streams have one for each token.
func (r *response) usualChunk() bool {
	b, _ := r.br.Peek(r.br.Buffered())
	i := 0
	if r.begun {
		if len(b) < 2 || b[0] != '\r' || b[1] != '\n' {
			return false
		}
		i = 2
	}
	n, from := int64(0), i
	for ; i < len(b) && i-from < chunkDigitsMax; i++ {
		digit := hexDigits[b[i]]
		if digit < 0 {
			break
		}
		n = n<<4 | int64(digit)
	}
	if n == 0 || i+1 >= len(b) || b[i] != '\r' || b[i+1] != '\n' {
		return false
	}
	_, _ = r.br.Discard(i + 2) // it is buffered
	r.left, r.begun = n, true
	return true
}

// hexDigits has the value of each byte that is a digit, -1 for others.
var hexDigits = func() (t [256]int8) {
	for c := range t {
		switch {
		case '0' <= c && c <= '9':
			t[c] = int8(c - '0')
		case 'a' <= c|0x20 && c|0x20 <= 'f':
			t[c] = int8(c | 0x20 - 'a' + 10)
		default:
			t[c] = -1
		}
	}
	return t
}()

func (r *response) chunkSize() error {
	if r.begun {
		if line, err := r.line(); err != nil || len(line) != 0 {
			return orMalformed(err, "no line break behind a chunk")
		}
		r.begun = false
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
	return nil
}

// line reads a line without its break. It is valid until the next read. Where there is an error nothing was read, so that it
// can be tried again.
func (r *response) line() ([]byte, error) {
	for {
		b, _ := r.br.Peek(r.br.Buffered())
		if bytes.IndexByte(b, '\n') >= 0 {
			break
		}
		if _, err := r.br.Peek(len(b) + 1); err == io.EOF {
			return nil, io.ErrUnexpectedEOF
		} else if err == bufio.ErrBufferFull {
			return nil, fmt.Errorf("%w: a line without an end", errMalformed)
		} else if err != nil {
			return nil, err
		}
	}
	line, err := r.br.ReadSlice('\n')
	switch {
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
