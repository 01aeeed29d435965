package router

import (
	"bufio"
	"context"
	"errors"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/headrace/headrace/internal/openai"
	"github.com/headrace/headrace/router/body"
	"github.com/headrace/headrace/router/dialects"
)

const requestIDMax = 128

// handle is fasthttp's handler of the public listener.
func (r *Router) handle(ctx *fasthttp.RequestCtx) {
	start := time.Now()
	defer func() {
		if p := recover(); p != nil { // fasthttp does not
			r.log.Error("panic in a handler", "panic", p, "stack", stack())
			ctx.Response.Reset()
			ctx.Response.SetConnectionClose()
			setError(&ctx.Response, openai.Internal("The router broke on this request."), nil)
		}
	}()
	endpoint, generates := openai.EndpointOf(string(ctx.Path()))
	foreign := foreignPaths[string(ctx.Path())]
	label := "other"
	var e *openai.Error
	switch path := string(ctx.Path()); {
	case (foreign != "" || strings.HasPrefix(path, "/v1/")) && !r.keys.admits(ctx.Request.Header.Peek("Authorization")):
		e = openai.InvalidAPIKey()
		ctx.Response.Header.Set("WWW-Authenticate", "Bearer")
	case generates, foreign != "":
		if label = foreign; generates {
			label = endpoint.String()
		}
		if e = allow(ctx, http.MethodPost); e == nil {
			if e = r.generate(ctx, endpoint, foreign, start); e == nil {
				return // has its own books
			}
		}
	case path == "/v1/models" || strings.HasPrefix(path, "/v1/models/"):
		label = "models"
		if e = allow(ctx, http.MethodGet); e == nil {
			e = r.models(ctx, strings.TrimPrefix(strings.TrimPrefix(path, "/v1/models"), "/"))
		}
	case path == "/health":
		label = "health"
		if e = allow(ctx, http.MethodGet); e == nil {
			r.health(ctx)
		}
	case path == "/metrics":
		label = "metrics"
		if e = allow(ctx, http.MethodGet); e == nil {
			r.metricsHandler(ctx)
		}
	default:
		e = openai.NotFound(string(ctx.Method()), path)
	}
	outcome := "ok"
	if e != nil {
		outcome = "error"
		setError(&ctx.Response, e, nil)
	}
	if r.draining() {
		ctx.Response.SetConnectionClose()
	}
	r.metrics.request(label, ctx.Response.StatusCode(), outcome)
}

// allow checks the method. HEAD is GET's.
func allow(ctx *fasthttp.RequestCtx, method string) *openai.Error {
	got := string(ctx.Method())
	if got == method || got == http.MethodHead && method == http.MethodGet {
		return nil
	}
	ctx.Response.Header.Set("Allow", method)
	return openai.MethodNotAllowed(got, string(ctx.Path()))
}

// foreignPaths are what engines of other kinds offer and our own does not, by what metrics call them. Such a request goes to
// one engine and is not looked into, but for its model.
var foreignPaths = map[string]string{"/v1/embeddings": "embeddings", "/tokenize": "tokenize", "/detokenize": "detokenize",
	dialects.PathResponses: "responses", dialects.PathGenerate: "generate"}

// sharedPaths are those of foreignPaths that generate: two workers may share such a request, and its answer may be a stream.
var sharedPaths = map[string]bool{dialects.PathResponses: true, dialects.PathGenerate: true}

// generate checks a request and serves it; an error is one from before it was accepted.
func (r *Router) generate(ctx *fasthttp.RequestCtx, endpoint openai.Endpoint, foreign string, start time.Time) *openai.Error {
	b, refused := body.Parse(ctx.Request.Body())
	if refused != nil {
		return refused
	}
	if now, lately := r.fleet.hasModel(b.Model); !now {
		if lately || len(*r.fleet.order.Load()) == 0 {
			return openai.Unavailable("No worker serves model %q now.", b.Model)
		}
		return openai.ModelNotFound(b.Model)
	}
	if foreign != "" && !r.fleet.hasForeign(b.Model) {
		return openai.NotFound(string(ctx.Method()), string(ctx.Path()))
	}
	conn, ok := ctx.Conn().(*clientConn)
	if !ok {
		return openai.Internal("The connection is not the router's own.")
	}
	if !r.begin() {
		ctx.Response.SetConnectionClose()
		return openai.Unavailable("The router stops.")
	}
	q := r.newRequest(endpoint, string(ctx.Path()), requestID(ctx), b, start)
	if r.cfg.SessionHeader != "-" {
		q.session = r.sessions.id(ctx.Request.Header.Peek("Authorization"), []byte(b.Model), ctx.Request.Header.Peek(r.cfg.SessionHeader))
	}
	if foreign != "" {
		q.label, q.foreign = foreign, true
		if !sharedPaths[q.dreq.Path] {
			q.whole, q.dreq.Stream = true, false
		}
	}
	if q.dreq.Stream {
		// The answer is written by the hijacker, who also waits for what was pipelined before to be written.
		ctx.HijackSetNoResponse(true)
		ctx.Hijack(func(hijacked net.Conn) { r.stream(ctx, conn, hijacked, q) })
		return nil
	}
	defer r.finish()
	out := &wholeSink{resp: &ctx.Response, head: openai.Head{Endpoint: endpoint, ID: q.id, Created: q.dreq.Created, Model: b.Model}, parts: openai.Assembler{Endpoint: endpoint}}
	r.watched(conn, func(c context.Context) { q.serve(c, out) })
	ctx.Response.Header.Set("X-Request-Id", q.dreq.RequestID)
	if q.log.outcome == "cancelled" || r.draining() {
		ctx.SetConnectionClose()
	}
	return nil
}

// watched calls f with a context that ends when the client leaves or the router must stop.
func (r *Router) watched(conn *clientConn, f func(context.Context)) {
	c, cancel := context.WithCancelCause(r.base)
	defer cancel(nil)
	stop := conn.watch(func() { cancel(errClientGone) })
	defer stop()
	f(c)
}

// stream serves a streaming request on a connection that fasthttp has let go.
func (r *Router) stream(ctx *fasthttp.RequestCtx, conn *clientConn, hijacked net.Conn, q *request) {
	defer r.finish()
	s := &streamSink{
		conn: conn, head: streamHead(q, ctx), timeout: r.cfg.WriteTimeout, includeUsage: q.body.IncludeUsage, bare: q.dreq.Path == dialects.PathResponses,
		chunked:   ctx.Request.Header.IsHTTP11(),
		keepAlive: ctx.Request.Header.IsHTTP11() && !ctx.Request.Header.ConnectionClose(),
	}
	s.fail = func(e *openai.Error, raw []byte) error {
		ctx.Response.Reset()
		setError(&ctx.Response, e, raw)
		ctx.Response.Header.Set("X-Request-Id", q.dreq.RequestID)
		if !s.keepAlive {
			ctx.Response.SetConnectionClose()
		}
		if err := conn.SetWriteDeadline(time.Now().Add(s.timeout)); err != nil {
			return err
		}
		w := bufio.NewWriter(conn)
		if err := ctx.Response.Write(w); err != nil {
			return err
		}
		return w.Flush()
	}
	defer func() {
		if p := recover(); p != nil {
			r.log.Error("panic in a stream", "id", q.id, "panic", p, "stack", stack())
		}
	}()
	r.watched(conn, func(c context.Context) { q.serve(c, s) })
	if s.keepAlive && s.ended && !r.draining() && conn.takeBack(hijacked) {
		conn.giveBack()
	}
}

func streamHead(q *request, ctx *fasthttp.RequestCtx) []byte {
	b := []byte("HTTP/1.1 200 OK\r\nContent-Type: " + contentSSE + "\r\nCache-Control: no-cache\r\nX-Accel-Buffering: no\r\nX-Request-Id: " + q.dreq.RequestID + "\r\nDate: ")
	b = fasthttp.AppendHTTPDate(b, q.start)
	if !ctx.Request.Header.IsHTTP11() {
		return append(b, "\r\nConnection: close\r\n\r\n"...)
	}
	if ctx.Request.Header.ConnectionClose() {
		b = append(b, "\r\nConnection: close"...)
	}
	return append(b, "\r\nTransfer-Encoding: chunked\r\n\r\n"...)
}

// requestID is the client's own id for the request, if it is fit to be passed on.
func requestID(ctx *fasthttp.RequestCtx) string {
	id := ctx.Request.Header.Peek("X-Request-Id")
	if len(id) == 0 || len(id) > requestIDMax {
		return ""
	}
	for _, c := range id {
		if (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') && c != '-' && c != '_' && c != '.' && c != ':' {
			return ""
		}
	}
	return string(id)
}

// badRequest answers what fasthttp could not read as a request.
func (r *Router) badRequest(ctx *fasthttp.RequestCtx, err error) {
	var small *fasthttp.ErrSmallBuffer
	var timeout interface{ Timeout() bool }
	e := openai.BadRequest("", "", "The request is no HTTP that the router understands.")
	switch {
	case errors.Is(err, fasthttp.ErrBodyTooLarge):
		e = openai.TooLarge(int64(r.cfg.MaxBodyBytes))
	case errors.As(err, &small):
		e = &openai.Error{Status: http.StatusRequestHeaderFieldsTooLarge, Type: openai.TypeInvalidRequest, Message: "The request's header is too large."}
	case errors.As(err, &timeout) && timeout.Timeout():
		e = &openai.Error{Status: http.StatusRequestTimeout, Type: openai.TypeInvalidRequest, Message: "The request did not come whole in time."}
	}
	ctx.Response.Reset()
	setError(&ctx.Response, e, nil)
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
