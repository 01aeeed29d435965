package router

import (
	"bufio"
	"io"
	"net/http"
	"strconv"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/headrace/headrace/internal/openai"
	"github.com/headrace/headrace/router/body"
	"github.com/headrace/headrace/router/pairing"
)

const (
	// pipelinedBytesMax bounds what is kept of answers while the next request is here already.
	pipelinedBytesMax = 64 << 10
	// keptBytesMax bounds the buffers that a connection keeps between requests.
	keptBytesMax = 256 << 10
	// aheadBytes is how much a connection reads at once whose requests are that long. More of its own memory for each connection
	// is not worth it: longer bodies lie in memory that all share.
	aheadBytes = 32 << 10
	// firstBytes is how much is read at first where a long body is likely to follow the header, so that it is read to where it is to lie.
	firstBytes = 1 << 10
)

// serving reads requests from a client's connection and answers them, one after the other. It is what fasthttp's server does,
// by fasthttp's own readers, but that a stream can be written as it comes and the connection goes on behind it: fasthttp would
// have it hijacked, which costs a goroutine and a look for what was read ahead.
type serving struct {
	r    *Router
	conn *clientConn
	in   *bufio.Reader
	ctx  fasthttp.RequestCtx
	uri  fasthttp.URI

	// The request.
	framing framing
	plain   bool // its header is framing.plain; else ctx.Request's
	http11  bool
	path    string
	body    []byte  // valid while it is served
	behind  int     // how much of in it takes, where it was not taken out
	kept    []byte  // room for its header
	large   *[]byte // and its body, where they are not in in; nil between requests
	apart   bool    // so it was with the last request, whose header had firstBytes at the most
	tight   bool    // the last request would have found room in an in of aheadBytes, and did not

	work     *work  // room for a request; nil while it is in use
	out      []byte // answers that wait to be written; they are before there is something to wait for
	chunk    []byte // room of streams
	failed   error  // of writing
	streamed bool   // the answer was written, lies in out or is not to be had: ctx.Response is none
	closes   bool   // the connection ends behind this answer
	held     held   // of the request's body

	date   [len(http.TimeFormat)]byte
	dateOf int64 // second since 1970
}

// work is what a request that is served takes of memory, so that the next one of the connection takes none.
type work struct {
	q        request
	life     lifetime
	body     body.Body
	first    attemptRoom
	whole    wholeSink
	stream   streamSink
	refuser  func(*pairing.Worker) string // q's refuse
	unpaired func(dialect string) string  // and apart
}

// room gives room for a request, which is handed back by keep.
func (s *serving) room() *work {
	w := s.work
	if s.work = nil; w == nil {
		w = &work{}
		w.refuser, w.unpaired = w.q.refuse, w.q.apart
	}
	return w
}

// keep takes room back of which nothing is in use. In doubt the collector has it: only requests that were served in the usual way count.
func (s *serving) keep(w *work) {
	if q := &w.q; q.log.outcome == "ok" && q.dispatches == 1 && q.body.N == 1 && q.prompt == nil && w.first.dialect.Free() {
		s.work = w
	}
}

// serveConn serves a connection's requests until its end.
func (r *Router) serveConn(c *clientConn) {
	s, _ := r.servings.Get().(*serving)
	if s == nil {
		s = &serving{r: r}
	}
	if s.in == nil {
		s.in = bufio.NewReaderSize(s, r.cfg.MaxHeaderBytes)
	}
	s.conn, s.failed, s.held.of = c, nil, r.bodies
	s.ctx.Init2(c, fasthttpLogger{r.log}, false)
	for first := true; s.next(first) && !s.closes; first = false {
	}
	_ = s.flush()
	_ = c.Close()
	if s.in.Reset(s); s.in.Size() > r.cfg.MaxHeaderBytes {
		s.in = nil
	}
	s.conn, s.closes, s.apart, s.out = nil, false, false, s.out[:0]
	s.ctx = fasthttp.RequestCtx{}
	r.servings.Put(s)
}

// Read is where the reader gets its bytes: before it waits for some, the client gets its answers.
func (s *serving) Read(p []byte) (int, error) {
	if err := s.flush(); err != nil {
		return 0, err
	}
	if s.apart && s.conn.wait > 0 {
		p = p[:min(len(p), firstBytes)]
	}
	return s.conn.Read(p)
}

// flush writes what waits.
func (s *serving) flush() error {
	if len(s.out) > 0 {
		_ = s.write(s.out)
		if s.out = s.out[:0]; cap(s.out) > keptBytesMax {
			s.out = nil
		}
	}
	return s.failed
}

// write writes to the client. Once that went wrong nothing is written any more.
func (s *serving) write(b []byte) error {
	if s.failed == nil {
		s.failed = s.conn.send(b, s.conn.clock(), s.r.cfg.WriteTimeout)
	}
	return s.failed
}

// appender appends what is written to out.
type appender struct{ s *serving }

func (a appender) Write(p []byte) (int, error) {
	a.s.out = append(a.s.out, p...)
	return len(p), nil
}

// next serves one request; false when there is none.
func (s *serving) next(first bool) bool {
	s.conn.await(first)
	if _, err := s.in.Peek(1); err != nil {
		if !first || err == io.EOF || s.failed != nil {
			return false
		}
		s.refuse(err)
		return false
	}
	s.conn.reading()
	defer s.held.release()
	if err := s.read(); err != nil {
		if err != io.EOF && s.failed == nil {
			s.refuse(err)
		}
		s.done()
		return false
	}
	s.streamed = false
	before := len(s.out)
	if !s.handle() {
		s.out = s.out[:min(before, len(s.out))]
		s.streamed = false
	}
	if !s.streamed {
		s.render()
	}
	s.done()
	if len(s.out) > pipelinedBytesMax {
		_ = s.flush()
	}
	return s.failed == nil
}

// done lets go of the request.
func (s *serving) done() {
	if s.behind > 0 {
		_, _ = s.in.Discard(s.behind) // it is buffered
		s.behind = 0
	}
	if s.tight && s.in.Buffered() == 0 {
		s.in = bufio.NewReaderSize(s, aheadBytes)
	}
	s.tight = false
	if !s.plain || !s.streamed { // else it was not used
		s.ctx.Request.Reset()
		s.ctx.Response.Reset()
		s.ctx.ResetUserValues()
	}
	if s.large != nil {
		s.r.buffers.Put(s.large)
	}
	s.plain, s.body, s.large = false, nil, nil
}

// read reads a request, whose first byte is here.
func (s *serving) read() error {
	req, f := &s.ctx.Request, &s.framing
	n, err := s.frame(f)
	if err != nil {
		return err
	}
	if plain, err := s.readPlain(n); plain || err != nil {
		return err
	}
	if err := req.Header.Read(s.in); err != nil {
		return err
	}
	if err := s.uri.Parse(req.Header.Host(), req.Header.RequestURI()); err != nil {
		return err
	}
	s.path, s.http11, s.closes = string(s.uri.Path()), req.Header.IsHTTP11(), req.Header.ConnectionClose()
	return s.readBody(f)
}

// refuse answers what is no request.
func (s *serving) refuse(err error) {
	s.r.badRequest(&s.ctx, err)
	s.closes = true
	s.render()
	s.ctx.Response.Reset()
}

// render appends ctx.Response to out.
func (s *serving) render() {
	resp := &s.ctx.Response
	if s.closes = s.closes || resp.ConnectionClose(); s.closes {
		resp.SetConnectionClose()
	} else if !s.http11 {
		resp.Header.Set("Connection", "keep-alive")
	}
	resp.Header.SetServer("headrace")
	resp.SkipBody = s.ctx.IsHead()
	if _, err := resp.WriteTo(appender{s}); err != nil {
		s.failed = err
	}
}

// handle serves the request that was read; false when it panicked, which leaves an answer in ctx.Response.
func (s *serving) handle() (ok bool) {
	defer func() {
		if p := recover(); p != nil {
			s.r.log.Error("panic in a handler", "panic", p, "stack", stack())
			s.closes = true
			if ok = s.streamed; ok { // the client has a part of the answer
				return
			}
			s.ctx.Response.Reset()
			setError(&s.ctx.Response, openai.Internal("The router broke on this request."), nil)
		}
	}()
	s.r.handle(s)
	return true
}

// begin appends the header of an answer up to where its own fields begin.
func (s *serving) begin(b []byte, contentType, requestID string, now time.Time) []byte {
	b = append(b, "HTTP/1.1 200 OK\r\nServer: headrace\r\nDate: "...)
	if at := now.Unix(); at != s.dateOf {
		now.UTC().AppendFormat(s.date[:0], http.TimeFormat)
		s.dateOf = at
	}
	b = append(append(b, s.date[:]...), "\r\nContent-Type: "...)
	b = append(append(b, contentType...), "\r\nX-Request-Id: "...)
	b = append(append(b, requestID...), "\r\n"...)
	if s.closes {
		return append(b, "Connection: close\r\n"...)
	} else if !s.http11 {
		return append(b, "Connection: keep-alive\r\n"...)
	}
	return b
}

// whole makes body the answer.
func (s *serving) whole(contentType, requestID string, body []byte, now time.Time) {
	s.closes = s.closes || s.r.draining()
	b := append(s.begin(s.out, contentType, requestID, now), "Content-Length: "...)
	b = append(strconv.AppendInt(b, int64(len(body)), 10), "\r\n\r\n"...)
	s.out, s.streamed = append(b, body...), true
}
