package router

import (
	"bytes"
	"context"
	"errors"
	"net/http"
	"strings"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/headrace/headrace/internal/openai"
	"github.com/headrace/headrace/router/dialects"
)

const requestIDMax = 128

// handle serves a request of the public listener.
func (r *Router) handle(s *serving) {
	start := s.conn.clock()
	s.conn.lately = time.Time{}
	ctx, path := &s.ctx, s.path
	endpoint, generates := openai.EndpointOf(path)
	foreign := foreignPaths[path]
	label := "other"
	var e *openai.Error
	key, admitted := "", true
	if needsKey(path, foreign) {
		key, admitted = r.keys.ring.Load().admits(s.Peek("Authorization"))
	}
	switch {
	case !admitted:
		e = openai.InvalidAPIKey()
		ctx.Response.Header.Set("WWW-Authenticate", "Bearer")
	case generates, foreign != "":
		if label = foreign; generates {
			label = endpoint.String()
		}
		if e = s.allow(path, http.MethodPost); e == nil {
			if e = r.generate(s, path, endpoint, foreign, key, start); e == nil {
				return // has its own books
			}
		}
	case path == "/v1/models" || strings.HasPrefix(path, "/v1/models/"):
		label = "models"
		if e = s.allow(path, http.MethodGet); e == nil {
			e = r.models(ctx, strings.TrimPrefix(strings.TrimPrefix(path, "/v1/models"), "/"))
		}
	case path == "/health":
		label = "health"
		if e = s.allow(path, http.MethodGet); e == nil {
			r.health(ctx)
		}
	case path == "/metrics":
		label = "metrics"
		if e = s.allow(path, http.MethodGet); e == nil {
			r.metricsHandler(ctx)
		}
	default:
		e = openai.NotFound(s.method(), path)
	}
	outcome := "ok"
	if e != nil {
		outcome = "error"
		setError(&ctx.Response, e, nil)
	}
	if r.draining() {
		ctx.Response.SetConnectionClose()
	}
	id := s.requestID()
	if id == "" && e != nil && (generates || foreign != "") {
		id = openai.NewID(endpoint)
	}
	if id != "" {
		ctx.Response.Header.Set("X-Request-Id", id)
	}
	r.metrics.request(label, ctx.Response.StatusCode(), outcome)
	if label != "health" && label != "metrics" {
		r.access.refused(start, id, key, label, ctx.Response.StatusCode(), e)
	}
}

// needsKey tells whether a path is for those with a key alone, where there are keys.
func needsKey(path, foreign string) bool {
	return foreign != "" || strings.HasPrefix(path, "/v1/") || path == "/metrics"
}

func (s *serving) method() string {
	if s.plain {
		return http.MethodPost
	}
	return string(s.ctx.Method())
}

// allow checks the method. HEAD is GET's.
func (s *serving) allow(path, method string) *openai.Error {
	if s.plain && method == http.MethodPost {
		return nil
	}
	got := s.method()
	if got == method || got == http.MethodHead && method == http.MethodGet {
		return nil
	}
	s.ctx.Response.Header.Set("Allow", method)
	return openai.MethodNotAllowed(got, path)
}

// foreignPaths are what engines of other kinds offer and our own does not, by what metrics call them. Such a request goes to
// one engine and is not looked into, but for its model.
var foreignPaths = map[string]string{"/v1/embeddings": "embeddings", "/tokenize": "tokenize", "/detokenize": "detokenize",
	dialects.PathResponses: "responses", dialects.PathGenerate: "generate"}

// sharedPaths are those of foreignPaths that generate: two workers may share such a request, and its answer may be a stream.
var sharedPaths = map[string]bool{dialects.PathResponses: true, dialects.PathGenerate: true}

// generate checks a request and serves it; an error is one from before it was accepted.
func (r *Router) generate(s *serving, path string, endpoint openai.Endpoint, foreign, key string, start time.Time) *openai.Error {
	ctx := &s.ctx
	w := s.room()
	b := &w.body
	if refused := b.Parse(s.body); refused != nil {
		return refused
	}
	if now, lately := r.fleet.hasModel(b.Model); !now {
		if lately || len(*r.fleet.order.Load()) == 0 {
			return openai.Unavailable("No worker serves model %q now.", b.Model)
		}
		return openai.ModelNotFound(b.Model)
	}
	if foreign != "" && !r.fleet.hasForeign(b.Model) {
		return openai.NotFound(s.method(), path)
	}
	rank, refused := r.cfg.rank(s, b, key)
	if refused != nil {
		return refused
	}
	if !r.begin() {
		ctx.Response.SetConnectionClose()
		return openai.Unavailable("The router stops.")
	}
	q := r.newRequest(w, endpoint, path, s.requestID(), start, rank)
	q.key = key
	q.joinTrace(s.Peek("Traceparent"), s.Peek("Tracestate"))
	if r.cfg.SessionHeader != "-" {
		if name := s.Peek(r.cfg.SessionHeader); len(name) > 0 {
			q.session = r.sessions.id(s.Peek("Authorization"), []byte(b.Model), name)
		}
	}
	if foreign != "" {
		q.label, q.foreign = foreign, true
		if !sharedPaths[q.dreq.Path] {
			q.whole, q.dreq.Stream = true, false
		}
	}
	defer r.finish()
	if q.dreq.Stream {
		s.stream(w)
		return nil
	}
	out := &w.whole
	*out = wholeSink{s: s, id: q.dreq.RequestID, head: openai.Head{Endpoint: endpoint, ID: q.id, Created: q.dreq.Created, Model: b.Model}, parts: openai.Assembler{Endpoint: endpoint}}
	s.watched(w, out)
	if !s.streamed {
		ctx.Response.Header.Set("X-Request-Id", q.dreq.RequestID)
	}
	s.closes = s.closes || q.log.outcome == "cancelled" || r.draining()
	return nil
}

// watched serves a request whose context ends when the client leaves, the deadline passes or the router must stop.
func (s *serving) watched(w *work, out sink) {
	q, l := &w.q, &w.life
	*l = lifetime{deadline: q.deadline}
	done := false
	stop := s.conn.watch(l)
	defer func() {
		left := s.conn.leave()
		if stop != nil {
			stop()
		}
		if done && !left && l.unshared() {
			s.keep(w)
		} else {
			l.end(context.Canceled)
		}
	}()
	if s.r.base.Err() != nil {
		l.end(errShutdown)
	}
	q.serve(l, out)
	if q.at != nil && q.log.err == nil && !q.dreq.Stream {
		s.conn.lately = q.over
	}
	if q.log.code == statusClientGone {
		s.streamed = true // there is nobody to answer
	}
	done = true
}

// stream serves a streaming request.
func (s *serving) stream(w *work) {
	ctx, q, out := &s.ctx, &w.q, &w.stream
	*out = streamSink{
		s: s, id: q.dreq.RequestID, includeUsage: q.body.IncludeUsage, bare: q.dreq.Path == dialects.PathResponses,
		chunked: s.http11, buf: s.chunk[:0],
	}
	defer func() {
		if s.chunk = out.buf[:0]; cap(s.chunk) > keptBytesMax {
			s.chunk = nil
		}
	}()
	s.watched(w, out)
	if !out.begun() {
		ctx.Response.Header.Set("X-Request-Id", q.dreq.RequestID)
	}
	s.closes = s.closes || out.closes || !out.ended || s.r.draining()
}

// requestID is the client's own id for the request, if it is fit to be passed on.
func (s *serving) requestID() string {
	id := s.Peek("X-Request-Id")
	// vLLM's P2P-NCCL connector finds the addresses it connects to in the id, between such marks.
	if len(id) == 0 || len(id) > requestIDMax || bytes.Contains(id, []byte("___")) {
		return ""
	}
	for _, c := range id {
		if (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') && c != '-' && c != '_' && c != '.' && c != ':' {
			return ""
		}
	}
	return string(id)
}

// badRequest answers what could not be read as a request.
func (r *Router) badRequest(ctx *fasthttp.RequestCtx, err error) {
	var twoWays unclear
	var timeout interface{ Timeout() bool }
	e := openai.BadRequest("", "", "The request is no HTTP that the router understands.")
	switch {
	case errors.As(err, &twoWays):
		e = unclearError(twoWays)
	case errors.Is(err, errNoKey):
		e = openai.InvalidAPIKey()
	case errors.Is(err, errNoRoom):
		e = noRoom()
	case errors.Is(err, fasthttp.ErrBodyTooLarge):
		e = openai.TooLarge(int64(r.cfg.MaxBodyBytes))
	case errors.Is(err, errHeaderTooLarge):
		e = &openai.Error{Status: http.StatusRequestHeaderFieldsTooLarge, Type: openai.TypeInvalidRequest, Message: "The request's header is too large."}
	case errors.As(err, &timeout) && timeout.Timeout():
		e = &openai.Error{Status: http.StatusRequestTimeout, Type: openai.TypeInvalidRequest, Message: "The request did not come whole in time."}
	}
	ctx.Response.Reset()
	setError(&ctx.Response, e, nil)
	if errors.Is(err, errNoKey) {
		ctx.Response.Header.Set("WWW-Authenticate", "Bearer")
	}
	if c, ok := ctx.Conn().(*clientConn); ok {
		c.lingerOnClose()
	}
	r.metrics.request("other", e.Status, "error")
}

// models lists the models, or shows one.
func (r *Router) models(ctx *fasthttp.RequestCtx, id string) *openai.Error {
	var models []openai.Model
	at := map[string]int{}
	for _, m := range *r.fleet.order.Load() {
		for _, name := range append([]string{m.w.Model}, m.w.LoRAs...) {
			i, ok := at[name]
			if !ok {
				i = len(models)
				at[name] = i
				models = append(models, openai.Model{ID: name, Created: r.started.Unix(), ContextLen: int(m.w.ContextTokens)})
			}
			// What every worker of the model can take, of those that say it.
			if n := int(m.w.ContextTokens); n > 0 && (models[i].ContextLen == 0 || n < models[i].ContextLen) {
				models[i].ContextLen = n
			}
		}
	}
	ctx.Response.Header.SetContentType(contentJSON)
	if id == "" {
		ctx.Response.SetBodyRaw(openai.AppendModels(nil, models))
		return nil
	}
	i, ok := at[id]
	if !ok {
		return openai.ModelNotFound(id)
	}
	ctx.Response.SetBodyRaw(openai.AppendModel(nil, models[i]))
	return nil
}

// health says whether requests can be served.
func (r *Router) health(ctx *fasthttp.RequestCtx) {
	ctx.Response.Header.SetContentType(contentJSON)
	switch {
	case r.draining():
		ctx.Response.SetStatusCode(http.StatusServiceUnavailable)
		ctx.Response.SetBodyString(`{"status":"stopping"}`)
	case len(*r.fleet.order.Load()) == 0:
		ctx.Response.SetStatusCode(http.StatusServiceUnavailable)
		ctx.Response.SetBodyString(`{"status":"no workers"}`)
	default:
		ctx.Response.SetBodyString(`{"status":"ok"}`)
	}
}
