package router

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"time"

	"github.com/tidwall/gjson"

	"github.com/headrace/headrace/internal/openai"
	"github.com/headrace/headrace/router/body"
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
	// bytesPerToken estimates a prompt's length for load figures.
	bytesPerToken = 4
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
	state    state
	log      requestLog

	dreq     dialects.Request
	progress dialects.Progress
	charge   *charge
	out      sink
	decoding func(pairing.Decision) // is told when an attempt has come so far; nil for nobody
	decision pairing.Decision       // of this attempt
	picked   *pairing.Decision      // made ahead of the first attempt
	session  uint64                 // 0 for none
	prompt   *prompt                // nil when nobody asks about it
	warm     []string               // workers that have seen the prompt

	// Of the attempts so far.
	attempts   int // that cost something
	dispatches int
	exclude    []*pairing.Worker // that failed it
	faultAt    time.Time         // of the fault being recovered from; zero when there is none
	events     int               // handed to the client by this attempt
	firstText  bool
	lastText   time.Time
	waited     time.Duration // in the queue
	tokens     int           // of other choices, and of dialects that do not count them, for the log
	sent       bool          // the client has been handed content
	whole      bool          // by one worker, from now on
}

// requestLog is how the request ended.
type requestLog struct {
	code    int
	outcome string
	err     error
}

func (r *Router) newRequest(endpoint openai.Endpoint, path string, requestID string, b *body.Body, start time.Time) *request {
	q := &request{r: r, id: openai.NewID(endpoint), endpoint: endpoint, label: endpoint.String(), body: b, start: start, deadline: start.Add(r.cfg.RequestTimeout), state: stateQueued}
	if requestID == "" {
		requestID = q.id
	}
	q.dreq = dialects.Request{Path: path, ID: q.id, RequestID: requestID, Created: start.Unix(), Body: b, Seed: r.seed(), Deadline: q.deadline, Stream: b.Stream}
	r.metrics.phases[stateQueued].Inc()
	return q
}

// serve answers the request into out. gone is closed over by the caller: cancelling ctx with a cause ends the request.
func (q *request) serve(ctx context.Context, out sink) {
	q.out = out
	ctx, cancel := context.WithDeadlineCause(ctx, q.deadline, errDeadline)
	defer cancel()
	defer func() {
		if !q.state.terminal() { // a panic
			q.r.metrics.phases[q.state].Dec()
		}
	}()
	defer func() { q.prompt.done() }()
	q.end(q.admitted(ctx))
	q.observe()
}

// admitted serves the request when it is its turn.
func (q *request) admitted(ctx context.Context) error {
	if err := q.admit(ctx); err != nil {
		return err
	}
	defer q.r.admission.leave(q.body.N)
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
	case q.sent && !native:
		return "cannot go on with an answer that was begun"
	case q.body.N > 1 && (q.decision.Whole != nil || q.decision.Decode != nil) && native != (dialectOf(q.decision) == dialects.NativeName):
		return "makes several choices in another way"
	}
	return ""
}

func (q *request) admit(ctx context.Context) error {
	began := time.Now()
	err := q.r.admission.enter(ctx, q.body.N)
	q.waited = time.Since(began)
	q.r.metrics.queued.Observe(seconds(q.waited))
	if errors.Is(err, errQueueFull) {
		return openai.TooManyRequests(time.Second, "The router serves and queues as many requests as it may. Please retry.")
	}
	return err
}

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
		out := q.attempt(ctx, d)
		switch out.Result {
		case dialects.Finished:
			q.r.fleet.served(d.Prefill)
			q.r.fleet.served(d.Decode)
			q.r.fleet.served(d.Whole)
			q.r.fleet.bars.worked(d.Prefill, d.Decode)
			if err := q.out.finish(); err != nil {
				return clientError(err)
			}
			return nil
		case dialects.Refused:
			return &refused{out.Status, out.Body}
		case dialects.Cancelled:
			return out.Err
		case dialects.SinkFailed:
			return clientError(out.Err)
		}
		q.r.log.Warn("attempt failed", "id", q.id, "choice", q.dreq.Choice, "attempt", q.attempts, "reason", out.Reason, "tokens", len(q.progress.Given), "err", out.Err)
		if err := q.judge(d, out); err != nil {
			return err
		}
	}
}

// attempt runs one dispatch.
func (q *request) attempt(ctx context.Context, d pairing.Decision) dialects.Outcome {
	q.dispatches++
	q.attempts++
	q.events = 0
	q.decision = d
	q.charge = q.r.fleet.charge(d, q.tokensToPrefill(d), q.promptTokens())
	defer q.charge.release()
	if q.prompt != nil {
		q.prompt.routed(d, q.body.Model)
	}
	if q.session != 0 && !q.foreign {
		q.r.sessions.stay(q.session, idsOf(d), time.Now())
	}
	if q.r.cfg.Decided != nil {
		q.r.cfg.Decided(ctx, q.dreq.RequestID, q.dispatches, &d)
	}
	a := &dialects.Attempt{Request: &q.dreq, Number: q.dispatches, Decision: d, Progress: &q.progress}
	if !q.faultAt.IsZero() {
		a.EstablishBy = q.recoverBy()
	}
	if q.dispatches == 1 {
		q.r.metrics.overhead.Observe(seconds(time.Since(q.start) - q.waited))
	}
	rec := q.r.decisions.add(q, d)
	out := q.r.dialect(d).Run(ctx, a, q)
	q.r.metrics.attempts.WithLabelValues(dialectOf(d), resultNames[out.Result]).Inc()
	q.r.decisions.end(rec, out)
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
	if q.sent && dialectOf(d) != dialects.NativeName { // nobody could go on where this worker stopped
		failure = openai.Unavailable("The answer broke off, and no other worker can go on with it: %s. Please ask again.", q.explain(out.Reason))
		return &brokenOff{failure, out.Body}
	}
	q.whole = q.whole || out.Whole
	if q.attempts >= q.r.cfg.MaxAttempts || q.dispatches >= dispatchesMax || !time.Now().Before(q.recoverBy()) {
		return failure
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
		switch {
		case b.Pair:
			pair++
			continue
		case b.Hard:
			q.r.fleet.failed(b.Worker, b.Reason)
		}
		for _, w := range []*pairing.Worker{d.Prefill, d.Decode, d.Whole} {
			if w != nil && w.ID == b.Worker {
				q.exclude = append(q.exclude, w)
			}
		}
	}
	if pair == 2 && d.Prefill != nil && d.Decode != nil {
		q.r.fleet.bars.add(d.Prefill, d.Decode, q.r.fleet.now())
	}
}

// pick chooses workers. After a fault it waits, as long as recovery may take, for one to come back.
func (q *request) pick(ctx context.Context) (pairing.Decision, error) {
	q.enter(statePairing)
	if d := q.picked; d != nil {
		q.picked = nil
		return *d, nil
	}
	if q.r.prompts != nil && q.prompt == nil && !q.foreign {
		q.prompt = q.r.prompts.of(q.dreq.Path, q.body.Model, q.body)
	}
	for {
		changed := *q.r.fleet.changed.Load()
		if err := ctx.Err(); err != nil {
			return pairing.Decision{}, context.Cause(ctx)
		}
		v := q.r.fleet.view()
		if q.prompt != nil {
			q.prompt.fill(v, q.body.Model)
		}
		d, err := q.r.cfg.Policy.Pick(ctx, pairing.Request{
			ID: q.id, Model: q.body.Model, PromptTokens: q.promptTokens(), Attempt: q.dispatches + 1, Exclude: q.r.fleet.same(q.exclude),
			// The last attempt takes what is least likely to fail.
			Whole: q.whole || q.attempts > 0 && q.attempts == q.r.cfg.MaxAttempts-1,
			Warm:  q.warm, Refuse: q.refuse,
			Session:  q.r.sessions.workers(q.session, v.Now),
			Unpaired: func(dialect string) string { return dialects.Unpaired(dialect, q.body) },
		}, v)
		if err == nil {
			return d, nil
		}
		var none *pairing.ErrNone
		if !errors.As(err, &none) {
			return d, openai.Internal("No worker could be chosen: %s.", err)
		}
		if q.faultAt.IsZero() || !q.await(ctx, changed) {
			return d, openai.Unavailable("No worker can serve model %q now: %s.", q.body.Model, none.Reason)
		}
	}
}

// await waits for a change of the fleet; false when there is no more time to.
func (q *request) await(ctx context.Context, changed <-chan struct{}) bool {
	timer := time.NewTimer(time.Until(q.recoverBy()))
	defer timer.Stop()
	select {
	case <-changed:
		return true
	case <-timer.C:
		return false
	case <-ctx.Done():
		return true // pick sees it
	}
}

func (q *request) promptTokens() int64 {
	n := q.body.Len() / bytesPerToken
	if q.prompt != nil {
		n = len(q.prompt.ids)
	}
	return int64(n + len(q.progress.Given))
}

// idsOf are the workers of a decision.
func idsOf(d pairing.Decision) []string {
	if d.Whole != nil {
		return []string{d.Whole.ID}
	}
	return []string{d.Prefill.ID, d.Decode.ID}
}

// warmTokens is what remains of a prompt that the worker knows: the end of it, that fills no block.
const warmTokens = 16

func (q *request) tokensToPrefill(d pairing.Decision) int64 {
	n := q.promptTokens()
	n -= min(d.CachedTokens, n-1)
	for _, w := range []*pairing.Worker{d.Prefill, d.Whole} {
		if w != nil && slices.Contains(q.warm, w.ID) {
			n = min(n, warmTokens)
		}
	}
	return n
}

// Event, Flush and Phase stand between the dialect and the client's sink.

// Event counts what the client gets.
func (q *request) Event(kind dialects.Kind, raw, data []byte, n int) error {
	switch {
	case kind == dialects.KindComment:
		return q.out.Event(kind, raw, data, n)
	case kind == dialects.KindRaw && !openai.IsUsage(data): // an event has a token, mostly
		q.tokens++
		q.timeText(1)
	case n > 0 || kind == dialects.KindText:
		q.timeText(max(n, 1))
	}
	q.events++
	q.sent = true
	return q.out.Event(kind, raw, data, n)
}

// Whole passes on.
func (q *request) Whole(contentType string, body []byte) error {
	q.sent = true
	if n := int(gjson.GetBytes(body, "usage.completion_tokens").Int()); n > 0 {
		q.tokens += n
		q.timeText(n)
	}
	return q.out.Whole(contentType, body)
}

func (q *request) timeText(n int) {
	now := time.Now()
	q.r.metrics.tokens.Add(float64(n))
	q.charge.text(n, now)
	if !q.firstText {
		q.firstText = true
		q.r.metrics.ttft.WithLabelValues(q.label).Observe(seconds(now.Sub(q.start)))
	} else if !q.lastText.IsZero() { // as it is in another choice than the first
		q.r.metrics.itl.Observe(seconds(now.Sub(q.lastText)) / float64(n))
	}
	q.lastText = now
}

// Flush passes on.
func (q *request) Flush() error { return q.out.Flush() }

// Phase moves the state machine.
func (q *request) Phase(p dialects.Phase) {
	switch p {
	case dialects.Reserving:
		q.enter(stateReserving)
	case dialects.Prefilling:
		q.enter(statePrefilling)
	case dialects.Transferring:
		q.charge.prefilled()
		q.enter(stateTransferring)
	case dialects.Decoding:
		q.charge.prefilled()
		q.enter(stateDecoding)
		if q.decoding != nil {
			q.decoding(q.decision)
		}
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
	q.log.err = err
	var e *openai.Error
	var worker *refused
	var broken *brokenOff
	last := q.state
	cancelled := func(cause string, code int) {
		q.r.metrics.cancels.WithLabelValues(last.String(), cause).Inc()
		q.log.code, q.log.outcome = code, "cancelled"
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
	case err == nil:
		q.log.code, q.log.outcome = http.StatusOK, "ok"
		q.enter(stateDone)
	case errors.Is(err, errClientGone):
		cancelled("client_gone", statusClientGone)
	case errors.Is(err, errClientSlow):
		cancelled("client_slow", statusClientGone)
	case errors.Is(err, errDeadline):
		answer(openai.Timeout("The request took longer than %s.", q.r.cfg.RequestTimeout), nil)
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
	took := time.Since(q.start)
	m := q.r.metrics
	m.request(q.label, q.log.code, q.log.outcome)
	m.e2e.WithLabelValues(q.label).Observe(seconds(took))
	q.r.log.Info("request", "id", q.id, "request_id", q.dreq.RequestID, "endpoint", q.label, "model", q.body.Model, "stream", q.body.Stream,
		"code", q.log.code, "outcome", q.log.outcome, "choices", q.body.N, "tokens", q.tokens+len(q.progress.Given), "dispatches", q.dispatches, "ms", took.Milliseconds(), "err", q.log.err)
}
