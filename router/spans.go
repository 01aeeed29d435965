package router

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/http"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"

	"github.com/headrace/headrace/internal/openai"
	"github.com/headrace/headrace/internal/trace"
	"github.com/headrace/headrace/internal/tracing"
	"github.com/headrace/headrace/router/pairing"
)

// spansWaitingMax bounds the requests that wait for their spans to be exported; what is over it is not traced.
const spansWaitingMax = 1024

// spans exports the spans of sampled requests when they have ended, with what the daemons say of their transfers. One goroutine does it:
// no request waits.
type spans struct {
	tracer *tracing.Tracer
	source NodeSource // nil where daemons are not known
	client *http.Client
	lost   func()
	queue  chan tracedRequest
	done   chan struct{}

	mu     sync.Mutex // guards closed, and what is sent to queue
	closed bool
}

// tracedRequest is an ended request and its place in a trace.
type tracedRequest struct {
	record
	at tracing.Context
}

// newSpans returns nil where nothing is traced.
func newSpans(t *tracing.Tracer, source Source, lost func()) *spans {
	if t == nil {
		return nil
	}
	s := &spans{tracer: t, lost: lost, queue: make(chan tracedRequest, spansWaitingMax), done: make(chan struct{}), client: newAsker()}
	s.source, _ = source.(NodeSource)
	go func() {
		defer close(s.done)
		for r := range s.queue {
			s.export(&r)
		}
	}()
	return s
}

// add has a request's spans exported soon.
func (s *spans) add(r *record, at *tracing.Context) {
	if s == nil || !at.Sampled {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return
	}
	select {
	case s.queue <- tracedRequest{*r, *at}:
	default:
		s.lost()
	}
}

// close exports what waits.
func (s *spans) close() {
	if s == nil {
		return
	}
	s.mu.Lock()
	if !s.closed {
		s.closed = true
		close(s.queue)
	}
	s.mu.Unlock()
	<-s.done
	s.client.CloseIdleConnections()
}

// joinTrace takes the client's place in a trace; without a tracer what it sent is passed on as it is.
func (q *request) joinTrace(parent, state []byte) {
	switch {
	case q.r.spans != nil:
		q.trace = q.r.cfg.Tracer.Join(parent, state)
		q.dreq.Trace = q.trace.Headers(q.trace.Span)
	case len(parent) > 0 && tracing.Valid(parent):
		q.dreq.Trace = [][2]string{{"traceparent", string(parent)}}
		if len(state) > 0 {
			q.dreq.Trace = append(q.dreq.Trace, [2]string{"tracestate", string(state)})
		}
	}
}

// traceAttempt gives the attempt under way a span of its own, which the engines' are below.
func (q *request) traceAttempt(decision int) {
	if q.r.spans == nil || !q.trace.Sampled {
		return
	}
	x := &q.times.attempts[len(q.times.attempts)-1]
	x.span, x.decision = tracing.NewSpan(), q.r.decisions.of(decision)
	q.dreq.Trace = q.trace.Headers(x.span)
}

// traceID is the trace's in hex, "" where the request is in none that this router knows.
func (q *request) traceID() string {
	if q.r.spans == nil {
		return ""
	}
	return hex.EncodeToString(q.trace.Trace[:])
}

func (s *spans) export(r *tracedRequest) {
	at := func(d time.Duration) time.Time { return r.start.Add(d) }
	root := r.at.Span
	child := func(parent [8]byte, name string, from, to time.Duration, attrs ...attribute.KeyValue) tracing.Span {
		return tracing.Span{ID: tracing.NewSpan(), Parent: parent, Name: name, Start: at(from), End: at(max(from, to)), Attributes: attrs}
	}
	emit := func(x tracing.Span) { s.tracer.Emit(&r.at, &x) }
	emit(child(root, "admission", 0, r.waited))
	before := r.waited
	for i := range r.all() {
		a := &r.all()[i]
		if a.decision != nil {
			emit(child(root, "decision", min(before, a.began), a.began, a.decision.attributes()...))
		}
		before = a.ended
		x := child(root, "attempt", a.began, a.ended, a.attributes()...)
		x.ID = a.span
		if resultNames[a.result] == "failed" {
			x.Error = a.reason
		}
		if a.first > 0 {
			x.Events = []tracing.Event{{Name: "first token", At: at(a.first)}}
		}
		emit(x)
		phases := []state{stateReserving, statePrefilling, stateTransferring, stateDecoding}
		for j, p := range phases {
			if a.phases[p] == 0 {
				continue
			}
			to := a.ended
			for _, next := range phases[j+1:] {
				if a.phases[next] > 0 {
					to = a.phases[next]
					break
				}
			}
			emit(child(a.span, legNames[p], a.phases[p], to))
		}
		s.transfers(r, a)
	}
	x := child(r.at.Parent, r.label, 0, r.took, r.attributes()...)
	x.ID, x.Server = root, true
	if r.outcome == "error" {
		x.Error = r.message()
	}
	emit(x)
}

var legNames = map[state]string{stateReserving: "reserve", statePrefilling: "prefill", stateTransferring: "transfer", stateDecoding: "decode"}

func (r *record) attributes() []attribute.KeyValue {
	list := []attribute.KeyValue{
		attribute.String("headrace.request_id", r.requestID), attribute.String("gen_ai.response.id", r.id), attribute.String("gen_ai.request.model", r.model), attribute.Int("http.response.status_code", r.code),
		attribute.String("headrace.outcome", r.outcome), attribute.Int("headrace.attempts", r.dispatches), attribute.Bool("headrace.stream", r.stream), attribute.Int("headrace.choices", r.choices),
	}
	if r.key != "" {
		list = append(list, attribute.String("headrace.key", r.key))
	}
	if r.cause != "" {
		list = append(list, attribute.String("headrace.cancel.cause", r.cause), attribute.String("headrace.cancel.phase", r.last))
	}
	if r.usage.known {
		return append(list, attribute.Int("gen_ai.usage.input_tokens", r.usage.Prompt), attribute.Int("headrace.cached_tokens", r.usage.Cached), attribute.Int("gen_ai.usage.output_tokens", r.usage.Completion))
	}
	return append(list, attribute.Int("gen_ai.usage.output_tokens", r.tokens))
}

func (a *attemptTimes) attributes() []attribute.KeyValue {
	list := []attribute.KeyValue{attribute.Int("headrace.dispatch", a.dispatch), attribute.Int("headrace.choice", a.choice), attribute.String("headrace.result", resultNames[a.result])}
	for _, w := range []struct {
		role string
		w    *pairing.Worker
	}{{openai.RolePrefill, a.prefill}, {openai.RoleDecode, a.decode}, {openai.RoleWhole, a.whole}} {
		if w.w != nil {
			list = append(list, attribute.String("headrace.worker."+w.role, w.w.ID), attribute.String("headrace.dialect", w.w.Dialect))
		}
	}
	return list
}

// attributes are the numbers that the decision was made by; the best options as they stand in /debug/decisions.
func (d *decisionRecord) attributes() []attribute.KeyValue {
	list := []attribute.KeyValue{
		attribute.String("headrace.policy", d.Policy), attribute.String("headrace.reason", d.Reason), attribute.Int64("headrace.prompt_tokens", d.PromptTokens), attribute.Bool("headrace.prompt_tokens_exact", d.Exact),
		attribute.Int64("headrace.cached_tokens_expected", d.Cached), attribute.Int("headrace.weighed", d.Weighed),
	}
	for i, o := range d.Options {
		if b, err := json.Marshal(o); err == nil {
			list = append(list, attribute.String(fmt.Sprintf("headrace.option.%d", i+1), string(b)))
		}
	}
	return list
}

// transfers emits what the daemons of an attempt say of its leases. Where many requests wait they are not asked.
func (s *spans) transfers(r *tracedRequest, a *attemptTimes) {
	if s.source == nil || a.ticket == [16]byte{} || a.prefill == nil || a.decode == nil || len(s.queue) > spansWaitingMax/2 {
		return
	}
	asked := map[string]bool{}
	for _, w := range []*pairing.Worker{a.prefill, a.decode} {
		if asked[w.NodeID] {
			continue
		}
		asked[w.NodeID] = true
		for _, n := range s.source.Nodes() {
			if n.ID != w.NodeID || n.Admin == "" {
				continue
			}
			for _, c := range s.ask(n.Admin, hex.EncodeToString(a.ticket[:])) {
				s.lease(r, a, n.ID, &c)
			}
		}
	}
}

// lease emits one lease. Its times are by the daemon's clock.
func (s *spans) lease(r *tracedRequest, a *attemptTimes, node string, c *trace.Lease) {
	x := tracing.Span{ID: tracing.NewSpan(), Parent: a.span, Name: "lease " + c.Side, Start: c.Presented, End: r.start.Add(a.ended), Attributes: []attribute.KeyValue{
		attribute.String("headrace.node", node), attribute.String("headrace.transport", c.Transport), attribute.String("headrace.state", c.State), attribute.Int64("headrace.bytes", int64(c.Bytes)),
		attribute.Int64("headrace.pieces", int64(c.Pieces)), attribute.Int64("headrace.pieces_again", int64(c.Again)), attribute.Int("headrace.lanes", c.Lanes),
	}}
	for _, e := range []struct {
		name string
		at   *time.Time
	}{{"bound", c.Bound}, {"first piece", c.First}, {"last piece", c.Last}} {
		if e.at != nil {
			x.Events = append(x.Events, tracing.Event{Name: e.name, At: *e.at})
		}
	}
	if c.Ended != nil {
		x.End = *c.Ended
	}
	if c.State != "settled" {
		x.Error = c.Reason
	}
	s.tracer.Emit(&r.at, &x)
}

// ask asks a daemon for a ticket's leases; nothing where it does not answer.
func (s *spans) ask(admin, ticket string) []trace.Lease {
	ctx, cancel := context.WithTimeout(context.Background(), askTimeout)
	defer cancel()
	list, err := trace.Leases(ctx, s.client, admin, ticket)
	if err != nil {
		return nil
	}
	return list
}
