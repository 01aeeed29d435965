package router

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/headrace/headrace/internal/openai"
	"github.com/headrace/headrace/router/dialects"
)

// streamSink writes server-sent events to a hijacked connection, one chunk and one write a flush.
type streamSink struct {
	conn         *clientConn
	head         []byte // the response's header, until it is sent
	chunked      bool   // HTTP/1.1
	includeUsage bool
	bare         bool // the stream's last event is the engine's own: no [DONE]
	timeout      time.Duration
	keepAlive    bool
	// fail answers with an error while nothing has been sent yet.
	fail func(e *openai.Error, raw []byte) error

	buf   []byte // room for the chunk's size, then its data
	ended bool   // by an answer of whatever kind
}

var _ sink = (*streamSink)(nil)

// sizeRoom is what a chunk's size takes at most: eight digits and a line break.
const sizeRoom = 10

var endOfChunks = []byte("0\r\n\r\n")

func (s *streamSink) begun() bool { return s.head == nil }

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
		s.buf = append(s.buf, make([]byte, sizeRoom)...)
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
	if s.head != nil {
		out = append(s.head, out...)
		s.head = nil
	}
	s.buf = s.buf[:0]
	if err := s.conn.SetWriteDeadline(time.Now().Add(s.timeout)); err != nil {
		return err
	}
	_, err := s.conn.Write(out)
	return err
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
		s.keepAlive = false
		return s.flush(nil)
	}
	return s.flush(endOfChunks)
}

func (s *streamSink) refuse(e *openai.Error, raw []byte) {
	if s.ended {
		return
	}
	var err error
	if !s.begun() {
		s.ended = true
		err = s.fail(e, raw)
	} else {
		if raw = errorBody(raw); raw != nil {
			s.append([]byte("data: "))
			s.append(raw)
			s.append([]byte("\n\n"))
		} else {
			s.append(e.AppendEvent(nil))
		}
		// Without its last chunk the stream is a broken one for clients that do not know the error event, too.
		s.ended, s.keepAlive = true, false
		err = s.flush(nil)
	}
	if err != nil {
		s.keepAlive = false
	}
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
	resp  *fasthttp.Response
	head  openai.Head
	parts openai.Assembler
	taken bool // the answer is a worker's own
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
	s.resp.SetStatusCode(http.StatusOK)
	s.resp.Header.SetContentType(contentType)
	s.resp.SetBody(body)
	s.taken = true
	return nil
}

func (s *wholeSink) finish() error {
	if s.taken {
		return nil
	}
	s.resp.SetStatusCode(http.StatusOK)
	s.resp.Header.SetContentType(contentJSON)
	s.resp.SetBodyRaw(s.head.AppendWhole(nil, &s.parts.Whole))
	return nil
}

func (s *wholeSink) refuse(e *openai.Error, raw []byte) { setError(s.resp, e, raw) }

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
