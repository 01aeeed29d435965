package router

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/headrace/headrace/internal/openai"
	"github.com/headrace/headrace/router/dialects"
)

// streamSink writes server-sent events to a connection, one chunk and one write a flush.
type streamSink struct {
	s            *serving
	id           string // X-Request-Id
	headed       bool   // the header was sent
	chunked      bool   // HTTP/1.1
	includeUsage bool
	bare         bool // the stream's last event is the engine's own: no [DONE]
	closes       bool // the connection cannot be used behind the answer

	buf   []byte // room for the chunk's size, then its data
	ended bool   // by an answer of whatever kind
}

var _ sink = (*streamSink)(nil)

// sizeRoom is what a chunk's size takes at most: eight digits and a line break.
const sizeRoom = 10

const roomForSize = "          " // sizeRoom of them

var endOfChunks = []byte("0\r\n\r\n")

func (s *streamSink) begun() bool { return s.headed }

func (s *streamSink) Phase(dialects.Phase) {}

func (s *streamSink) Event(kind dialects.Kind, raw, _ []byte, _ int) error {
	if kind == dialects.KindUsage && !s.includeUsage {
		return nil
	}
	s.append(raw)
	return nil
}

func (s *streamSink) append(raw []byte) {
	if len(s.buf) == 0 {
		s.buf = append(s.buf, roomForSize...)
	}
	s.buf = append(s.buf, raw...)
}

var errNotStreamed = errors.New("an answer that is not streamed")

func (s *streamSink) Whole(string, []byte) error { return errNotStreamed }

func (s *streamSink) Flush() error { return s.flush(nil) }

// flush writes what is buffered, and end behind it.
func (s *streamSink) flush(end []byte) error {
	out := s.buf
	switch {
	case len(out) == 0 && end == nil:
		return nil
	case len(out) == 0:
		out = end
	case !s.chunked:
		out = out[sizeRoom:]
	default:
		var size [sizeRoom]byte
		line := append(strconv.AppendUint(size[:0], uint64(len(out)-sizeRoom), 16), "\r\n"...)
		from := sizeRoom - len(line)
		copy(out[from:], line)
		out = append(append(out, "\r\n"...), end...)
		s.buf = out
		out = out[from:]
	}
	if !s.headed {
		s.headed, s.s.streamed = true, true
		s.s.out = append(s.head(s.s.out), out...) // behind answers that wait
		s.buf = s.buf[:0]
		return s.s.flush()
	}
	s.buf = s.buf[:0]
	return s.s.write(out)
}

// head appends the answer's header.
func (s *streamSink) head(b []byte) []byte {
	closes := s.s.closes
	s.s.closes = closes || !s.chunked
	b = append(s.s.begin(b, contentSSE, s.id, time.Now()), "Cache-Control: no-cache\r\nX-Accel-Buffering: no\r\n"...)
	s.s.closes = closes
	if s.chunked {
		b = append(b, "Transfer-Encoding: chunked\r\n"...)
	}
	return append(b, "\r\n"...)
}

func (s *streamSink) finish() error {
	if !s.bare {
		s.append([]byte(openai.Done))
	}
	return s.close()
}

func (s *streamSink) close() error {
	s.ended = true
	if !s.chunked {
		s.closes = true
		return s.flush(nil)
	}
	return s.flush(endOfChunks)
}

func (s *streamSink) refuse(e *openai.Error, raw []byte) {
	if s.ended {
		return
	}
	s.ended = true
	if !s.begun() {
		s.buf = s.buf[:0]
		setError(&s.s.ctx.Response, e, raw)
		return
	}
	if raw = errorBody(raw); raw != nil {
		s.append([]byte("data: "))
		s.append(raw)
		s.append([]byte("\n\n"))
	} else {
		s.append(e.AppendEvent(nil))
	}
	// Without its last chunk the stream is a broken one for clients that do not know the error event, too.
	s.closes = true
	_ = s.flush(nil)
}

// errorBody returns a worker's error on one line, or nil when it is not in OpenAI's shape.
func errorBody(raw []byte) []byte {
	var shape struct {
		Error *struct {
			Message string `json:"message"`
		} `json:"error"`
	}
	if len(raw) == 0 || json.Unmarshal(raw, &shape) != nil || shape.Error == nil {
		return nil
	}
	var line bytes.Buffer
	if json.Compact(&line, raw) != nil {
		return nil
	}
	return line.Bytes()
}

// wholeSink collects a stream into one response.
type wholeSink struct {
	s     *serving
	id    string    // X-Request-Id
	now   time.Time // zero: not known
	head  openai.Head
	parts openai.Assembler
}

var _ sink = (*wholeSink)(nil)

func (s *wholeSink) begun() bool          { return false }
func (s *wholeSink) Phase(dialects.Phase) {}
func (s *wholeSink) Flush() error         { return nil }

func (s *wholeSink) Event(_ dialects.Kind, _, data []byte, _ int) error {
	if _, err := s.parts.Add(data); err != nil {
		return fmt.Errorf("%w: %w", errBadChunk, err)
	}
	return nil
}

// Whole takes a worker's own answer.
func (s *wholeSink) Whole(contentType string, body []byte) error {
	s.answer(contentType, body)
	return nil
}

func (s *wholeSink) finish() error {
	if !s.s.streamed {
		s.answer(contentJSON, s.head.AppendWhole(nil, &s.parts.Whole))
	}
	return nil
}

func (s *wholeSink) answer(contentType string, body []byte) {
	if s.now.IsZero() {
		s.now = time.Now()
	}
	s.s.whole(contentType, s.id, body, s.now)
}

func (s *wholeSink) refuse(e *openai.Error, raw []byte) { setError(&s.s.ctx.Response, e, raw) }

const (
	contentJSON = "application/json"
	contentSSE  = "text/event-stream; charset=utf-8"
)

// setError makes resp an error in OpenAI's shape; raw, if it has that shape, is a worker's own.
func setError(resp *fasthttp.Response, e *openai.Error, raw []byte) {
	resp.ResetBody()
	resp.SetStatusCode(e.Status)
	resp.Header.SetContentType(contentJSON)
	if e.RetryAfter > 0 {
		resp.Header.Set("Retry-After", strconv.Itoa(max(1, int((e.RetryAfter+time.Second-1)/time.Second))))
	}
	if raw = errorBody(raw); raw == nil {
		raw = e.AppendJSON(nil)
	}
	resp.SetBodyRaw(raw)
}
