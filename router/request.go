package router

import (
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/headrace/headrace/internal/openai"
	"github.com/headrace/headrace/internal/tracing"
	"github.com/headrace/headrace/router/body"
	"github.com/headrace/headrace/router/breaker"
	"github.com/headrace/headrace/router/dialects"
	"github.com/headrace/headrace/router/pairing"
)

// Why a request was cancelled.
var (
	errClientGone = errors.New("the client left")
	errClientSlow = errors.New("the client takes nothing")
	errDeadline   = errors.New("the deadline passed")
	errShutdown   = errors.New("the router stops")
	errBadChunk   = errors.New("a worker's chunk cannot be read")
)

const (
	// dispatchesMax bounds attempts together with those that found nobody listening, which cost nothing.
	dispatchesMax = 8
	// recoveryMargin is kept of the recovery timeout for telling the client.
	recoveryMargin = 250 * time.Millisecond
)

// sink is where a request's answer goes.
type sink interface {
	dialects.Sink
	// finish ends a whole answer.
	finish() error
	// refuse ends the answer with an error; raw, when not nil, is a worker's own words for it.
	refuse(e *openai.Error, raw []byte)
	// begun tells whether the client has been sent anything.
	begun() bool
}

// request is one client request of a generating endpoint, from admission to its end.
type request struct {
	r        *Router
	id       string
	endpoint openai.Endpoint
	label    string // of the endpoint, for metrics and logs
	foreign  bool   // only engines of other kinds than ours offer the endpoint
	body     *body.Body
	start    time.Time
	deadline time.Time
	rank     rank
	state    state
	log      requestLog
	key      string // the client's API key, as logs call it
	times    times
	usage    usage
	trace    tracing.Context // zero where nothing is traced

	dreq     dialects.Request
	own      dialects.Request // what the client asked for, where another engine is asked to go on
	trail    *dialects.Trail  // of a foreign engine's stream, nil where it is not remembered
	progress dialects.Progress
	charge   *charge
	room     *attemptRoom // of the attempt that comes; nil before the first: it takes its own
	refuser  func(*pairing.Worker) string
	unpaired func(dialect string) string
	out      sink
	decoding func(pairing.Decision) // is told when an attempt has come so far; nil for nobody
	decision pairing.Decision       // of this attempt
	race     *race                  // whose answer the client gets is not decided; nil: it is this one's
	picked   *pairing.Decision      // made ahead of the first attempt
	session  uint64                 // 0 for none
	prompt   *prompt                // nil when nobody asks about it
	warm     []string               // workers that have seen the prompt

	// Of the attempts so far.
	attempts   int // that cost something
	dispatches int
	exclude    []excluded // who failed it
	faultAt    time.Time  // of the fault being recovered from; zero when there is none
	events     int        // handed to the client by this attempt
	firstText  bool
	lastText   time.Time
	at         *dialects.Attempt  // that is under way, or was the last
	over       time.Time          // when the last attempt ended
	waited     time.Duration      // in the queue
	untimed    int                // tokens handed on since the last flush
	tokens     int                // of other choices, and of dialects that do not count them, for the log
	trials     []*breaker.Breaker // that the attempt decides about
	decided    int                // the number of this attempt's decision
	leaving    leaving
	replaced   bool // a worker that was lost has been replaced
	sent       bool // the client has been handed content
	whole      bool // by one worker, from now on
}

// requestLog is how the request ended.
type requestLog struct {
	code    int
	outcome string
	cause   string // why it was cancelled
	last    string // the phase it was in when it was cancelled
	err     error
}

// attemptRoom is what an attempt takes of memory.
type attemptRoom struct {
	attempt dialects.Attempt
	charge  charge
	dialect dialects.Room
}

// newRequest makes w's request.
func (r *Router) newRequest(w *work, endpoint openai.Endpoint, path string, requestID string, start time.Time, rank rank) *request {
	q := &w.q
	*q = request{r: r, id: openai.NewID(endpoint), endpoint: endpoint, label: endpoint.String(), body: &w.body, start: start, deadline: start.Add(rank.timeout), rank: rank, state: stateQueued,
		room: &w.first, refuser: w.refuser, unpaired: w.unpaired}
	if requestID == "" {
		requestID = q.id
	}
	q.dreq = dialects.Request{Path: path, ID: q.id, RequestID: requestID, Created: start.Unix(), Body: q.body, Seed: r.seed(), Deadline: q.deadline, Stream: q.body.Stream}
	r.metrics.phases[stateQueued].Inc()
	return q
}

// clock is the time: of what the dialect tells, where it has read the clock for it.
func (q *request) clock() time.Time {
	if q.at != nil && !q.at.At.IsZero() {
		return q.at.At
	}
	return time.Now()
}

// serve answers the request into out. The end of ctx, of which the deadline is the request's, ends it.
func (q *request) serve(ctx context.Context, out sink) {
	q.out = out
	defer func() {
		if !q.state.terminal() { // a panic
			q.r.metrics.phases[q.state].Dec()
		}
	}()
	defer func() { q.prompt.done() }()
	defer func() { q.trail.Free() }()
	q.end(q.admitted(ctx))
	q.observe()
}

// admitted serves the request when it is its turn.
func (q *request) admitted(ctx context.Context) error {
	pass, err := q.admit(ctx)
	if err != nil {
		return err
	}
	defer func() { q.r.admission.Leave(pass, q.promptTokens()+int64(max(q.tokens-q.given(), 0))) }()
	if q.body.N > 1 {
		// Our own engine makes each choice by itself, others make all of them: who it will be decides how to go about it.
		d, err := q.pick(ctx)
		if err != nil {
			return err
		}
		q.picked = &d
		if dialectOf(d) == dialects.NativeName {
			return q.dispatchChoices(ctx)
		}
	}
	return q.dispatchAll(ctx)
}

// refuse says why a worker cannot take the request's next attempt; "" if it can.
func (q *request) refuse(w *pairing.Worker) string {
	native := w.Dialect == dialects.NativeName
	switch {
	case q.foreign && native:
		return "does not offer " + q.dreq.Path
	case q.dreq.Path == dialects.PathGenerate && w.Dialect != dialects.SGLangName && w.Dialect != dialects.PlainName:
		return "does not offer " + q.dreq.Path
	case q.sent && w.Dialect != dialectOf(q.decision):
		return "cannot go on with another kind's answer"
	case q.sent && !native && w.Fingerprint != fingerprintOf(q.decision):
		return "computes in another way than who began the answer"
	case q.body.N > 1 && (q.decision.Whole != nil || q.decision.Decode != nil) && native != (dialectOf(q.decision) == dialects.NativeName):
		return "makes several choices in another way"
	}
	return ""
}

// apart says why workers of a dialect cannot share the request; "" if they can.
func (q *request) apart(dialect string) string { return dialects.Unpaired(dialect, q.dreq.Body) }

// refused is a worker's answer that is the client's.
type refused struct {
	status int
	body   []byte
}

func (e *refused) Error() string { return http.StatusText(e.status) }

// brokenOff ends an answer that was begun and that nobody can go on with. worker is what the failing one said, if anything.
type brokenOff struct {
	error  *openai.Error
	worker []byte
}

func (e *brokenOff) Error() string { return e.error.Error() }

// dispatchAll runs attempts until one finishes or no more may help.
func (q *request) dispatchAll(ctx context.Context) error {
	for {
		d, err := q.pick(ctx)
		if err != nil {
			return err
		}
		var out dialects.Outcome
		if q.r.cfg.HedgeAfter > 0 && q.mayHedge() {
			var over bool
			if out, over, err = q.hedged(ctx, d); over {
				return err
			}
		} else if out = q.attempt(ctx, d); q.race != nil && q.outrun(d, out) {
			return errOutrun
		}
		switch out.Result {
		case dialects.Finished:
			q.r.fleet.served(&d, q.over)
			q.r.fleet.bars.worked(d.Prefill, d.Decode)
			q.moved()
			if err := q.out.finish(); err != nil {
				return clientError(err)
			}
			return nil
		case dialects.Refused:
			q.r.fleet.served(&d, q.over) // it answers
			if q.own.Body != nil {       // of a request that the router made: the client's fault it is not
				return q.broken(d, out, "failed", "the worker that was to go on refuses")
			}
			return &refused{out.Status, out.Body}
		case dialects.Cancelled:
			return out.Err
		case dialects.SinkFailed:
			return clientError(out.Err)
		}
		q.r.log.Warn("attempt failed", "id", q.id, "choice", q.dreq.Choice, "attempt", q.attempts, "reason", out.Reason, "tokens", q.given(), "err", out.Err)
		if err := q.judge(d, out); errors.Is(err, errEnded) {
			return q.finishMoved()
		} else if err != nil {
			return err
		}
	}
}

// attempt runs one dispatch.
func (q *request) attempt(ctx context.Context, d pairing.Decision) dialects.Outcome {
	if q.race != nil && q.race.second == q {
		d.Reason = "a second attempt, for the first has not answered; " + d.Reason
	}
	q.dispatches++
	q.attempts++
	q.events = 0
	q.decision = d
	room := q.room
	q.charge = &room.charge // booked by pick
	began := q.charge.at
	defer q.charge.release()
	defer q.endTrials()
	if q.dispatches == 1 {
		q.r.budget.Request(began)
		q.r.metrics.overhead.Observe(seconds(began.Sub(q.start) - q.waited))
	}
	if q.prompt != nil {
		q.prompt.routed(d, q.body.Model)
	}
	if q.session != 0 && !q.foreign {
		q.r.sessions.stay(q.session, idsOf(d), began)
	}
	if q.r.cfg.Decided != nil {
		d := d // it may be kept
		q.r.cfg.Decided(ctx, q.dreq.RequestID, q.dispatches, &d)
	}
	q.remember(d)
	a := &room.attempt
	*a = dialects.Attempt{Request: &q.dreq, Number: q.dispatches, Decision: d, Progress: &q.progress, Trail: q.trail, Began: began, Room: &room.dialect}
	if !q.faultAt.IsZero() {
		a.EstablishBy = q.recoverBy()
	}
	if q.r.moves.max > 0 && dialectOf(d) == dialects.NativeName {
		a.Mover = q
	}
	rec := q.r.decisions.add(q, &q.decision, began)
	q.decided = rec
	q.times.begin(q, &q.decision, began)
	q.traceAttempt(rec)
	q.at = a
	out := q.r.dialect(d).Run(ctx, a, q)
	if q.timeUntimed(); q.race != nil && out.Result == dialects.SinkFailed { // the other has answered first
		out.Result = dialects.Cancelled
	}
	q.over = time.Now()
	a.At = time.Time{}
	q.times.end(q, a, &out)
	q.r.metrics.ended.of(attempted{dialectOf(d), out.Result}).Inc()
	q.r.decisions.end(rec, &out, q.over)
	return out
}

// judge decides whether to go on after a failed attempt; nil means yes.
func (q *request) judge(d pairing.Decision, out dialects.Outcome) error {
	q.r.metrics.upstream.WithLabelValues(out.Reason).Inc()
	if out.Undialled {
		q.attempts--
	}
	if q.events > 0 || q.faultAt.IsZero() || out.GotOn { // the request got on since the fault before
		q.faultAt = out.FaultAt
	}
	q.blame(d, out)
	failure := openai.Unavailable("The request could not be served: %s.", q.explain(out.Reason))
	if out.RetryAfter > 0 {
		failure.RetryAfter = out.RetryAfter
	}
	q.whole = q.whole || out.Whole
	over := q.attempts >= q.r.cfg.MaxAttempts || q.dispatches >= dispatchesMax || !time.Now().Before(q.recoverBy())
	if q.sent && dialectOf(d) != dialects.NativeName {
		return q.goOn(d, out, over)
	}
	if over {
		return failure
	}
	if !q.retries(out) {
		return openai.Unavailable("The request could not be served: %s, and as many requests are being tried again as may be.", q.explain(out.Reason))
	}
	q.r.metrics.redispatches.WithLabelValues(out.Reason).Inc()
	q.enter(statePairing)
	return nil
}

// explain is what a client may know of a failure.
func (q *request) explain(reason string) string {
	if q.dispatches > 1 {
		return "the last of several workers failed (" + reason + ")"
	}
	return "a worker failed (" + reason + ")"
}

func (q *request) recoverBy() time.Time {
	return q.faultAt.Add(q.r.cfg.RecoveryTimeout - recoveryMargin)
}

func (q *request) blame(d pairing.Decision, out dialects.Outcome) {
	pair := 0
	for _, b := range out.Blame {
		if b.Pair {
			pair++
			continue
		}
		if fault, counts := faultOf(b); counts && q.r.fleet.failed(b.Worker, fault, b.Reason) {
			q.r.breakerMetrics.opened.WithLabelValues(faultNames[fault]).Inc()
		}
		for _, w := range []*pairing.Worker{d.Prefill, d.Decode, d.Whole, q.decision.Decode, q.decision.Whole} { // it may have moved
			if w != nil && w.ID == b.Worker {
				q.exclude = append(q.exclude, excluded{w, q.over})
				break
			}
		}
	}
	if pair == 2 && d.Prefill != nil && d.Decode != nil {
		q.r.fleet.bars.add(d.Prefill, d.Decode, q.r.fleet.now())
	}
}

// clientError says why the client could not be written to.
func clientError(err error) error {
	if errors.Is(err, errBadChunk) {
		return err
	}
	var timeout interface{ Timeout() bool }
	if errors.As(err, &timeout) && timeout.Timeout() {
		return errClientSlow
	}
	return errClientGone
}

// end answers what is still to be answered and closes the books.
func (q *request) end(err error) {
	if q.log.err = err; err == nil {
		q.log.code, q.log.outcome = http.StatusOK, "ok"
		q.enter(stateDone)
		return
	}
	var e *openai.Error
	var worker *refused
	var broken *brokenOff
	last := q.state
	cancelled := func(cause string, code int) {
		q.r.metrics.cancels.WithLabelValues(last.String(), cause).Inc()
		q.log.code, q.log.outcome, q.log.cause, q.log.last = code, "cancelled", cause, last.String()
		q.enter(stateCancelled)
	}
	answer := func(e *openai.Error, raw []byte) {
		q.log.code = e.Status
		if q.out.begun() {
			q.log.code = http.StatusOK
		}
		q.out.refuse(e, raw)
	}
	switch {
	case errors.Is(err, errClientGone):
		cancelled("client_gone", statusClientGone)
	case errors.Is(err, errClientSlow):
		cancelled("client_slow", statusClientGone)
	case errors.Is(err, errQueueDeadline):
		answer(openai.Timeout("The request's time of %s passed while it waited for its turn. No engine has seen it.", q.deadline.Sub(q.start)), nil)
		cancelled("deadline", q.log.code)
	case errors.Is(err, errDeadline):
		answer(openai.Timeout("The request took longer than %s.", q.deadline.Sub(q.start)), nil)
		cancelled("deadline", q.log.code)
	case errors.Is(err, errShutdown):
		answer(openai.Unavailable("The router stops."), nil)
		cancelled("shutdown", q.log.code)
	case errors.As(err, &worker):
		answer(&openai.Error{Status: worker.status, Type: openai.TypeInvalidRequest, Message: http.StatusText(worker.status)}, worker.body)
		q.log.outcome = "error"
		q.enter(stateDone)
	case errors.As(err, &broken):
		answer(broken.error, broken.worker)
		q.log.outcome = "error"
		q.enter(stateDone)
	default:
		if !errors.As(err, &e) {
			e = openai.Internal("The router could not serve the request: %s.", err)
		}
		answer(e, nil)
		q.log.outcome = "error"
		q.enter(stateDone)
	}
}

// statusClientGone is nginx's code for a client that left. It goes into logs and metrics only.
const statusClientGone = 499

func (q *request) observe() {
	now := q.over
	if q.log.err != nil || q.dreq.Stream || q.body.N > 1 { // it was not the last thing that took time
		now = time.Now()
	}
	took := now.Sub(q.start)
	m := q.r.metrics
	m.request(q.label, q.log.code, q.log.outcome)
	m.whole.of(q.label).Observe(seconds(took))
	if q.usage.known {
		m.prompt.Add(float64(q.usage.Prompt))
		m.cached.Add(float64(q.usage.Cached))
	}
	rec := q.record(took)
	q.r.recent.add(&rec)
	q.r.access.request(&rec)
	q.r.spans.add(&rec, &q.trace)
}
