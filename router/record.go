package router

import (
	"cmp"
	"encoding/hex"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/headrace/headrace/internal/openai"
	"github.com/headrace/headrace/internal/trace"
	"github.com/headrace/headrace/router/dialects"
	"github.com/headrace/headrace/router/pairing"
)

// requestsKept is how many ended requests /debug/requests knows.
const requestsKept = 1024

// errorBytesMax is what is kept of the words of an error.
const errorBytesMax = 300

// times is when what happened to a request, as told by the goroutine that serves it. Durations count from the request's
// arrival; 0 is what did not happen.
type times struct {
	attempts    []attemptTimes
	inline      [1]attemptTimes // of attempts: most requests have one
	first, last time.Duration   // content handed to the client
}

// attemptTimes is one dispatch.
type attemptTimes struct {
	choice, dispatch       int
	prefill, decode, whole *pairing.Worker
	cached                 int64 // tokens of the prompt that the decision counted on
	began, ended           time.Duration
	phases                 [stateDone]time.Duration
	first                  time.Duration // content of this attempt
	ticket                 [16]byte      // the nonce; zero where none was minted
	result                 dialects.Result
	reason                 string
	moves                  []moveRecord
	// Of requests that are traced.
	span     [8]byte
	decision *decisionRecord
}

// begin notes a dispatch.
func (t *times) begin(q *request, d *pairing.Decision, now time.Time) {
	if t.attempts == nil {
		t.attempts = t.inline[:0]
	}
	t.attempts = append(t.attempts, attemptTimes{choice: q.dreq.Choice, dispatch: q.dispatches, prefill: d.Prefill, decode: d.Decode, whole: d.Whole,
		cached: d.CachedTokens, began: now.Sub(q.start)})
}

// end notes how the dispatch begun last ended.
func (t *times) end(q *request, a *dialects.Attempt, out *dialects.Outcome) {
	x := &t.attempts[len(t.attempts)-1]
	x.ended, x.ticket, x.result, x.reason = q.over.Sub(q.start), a.Ticket, out.Result, out.Reason
}

// moved notes a move of the stream under way.
func (t *times) moved(m moveRecord) {
	if n := len(t.attempts); n > 0 {
		t.attempts[n-1].moves = append(t.attempts[n-1].moves, m)
	}
}

// enter notes a phase of the dispatch under way.
func (t *times) enter(q *request, s state) {
	if n := len(t.attempts); n > 0 && s > statePairing && !s.terminal() {
		if x := &t.attempts[n-1]; x.ended == 0 && x.phases[s] == 0 {
			x.phases[s] = q.clock().Sub(q.start)
		}
	}
}

// text notes that content is handed on.
func (t *times) text(since time.Duration) {
	if t.first == 0 {
		t.first = since
	}
	t.last = since
	if n := len(t.attempts); n > 0 && t.attempts[n-1].first == 0 {
		t.attempts[n-1].first = since
	}
}

// add takes over what happened to another choice of the same request.
func (t *times) add(o *times) {
	t.attempts = append(t.attempts, o.attempts...)
	t.last = max(t.last, o.last)
}

// record is an ended request, as the access log, the ring behind /debug/requests and spans tell of it.
type record struct {
	start                time.Time
	id, requestID        string
	label, model, key    string
	traceID              string
	stream               bool
	choices, dispatches  int
	code                 int
	outcome, cause, last string // last: the phase that a cancelled request was in
	err                  error
	waited, took         time.Duration
	usage                usage
	tokens               int // handed to the client, as far as it was counted
	times                times
}

func (q *request) record(took time.Duration) record {
	r := record{start: q.start, id: q.id, requestID: q.dreq.RequestID, label: q.label, model: q.body.Model, key: q.key, stream: q.body.Stream,
		choices: q.body.N, dispatches: q.dispatches, code: q.log.code, outcome: q.log.outcome, cause: q.log.cause, last: q.log.last, err: q.log.err,
		waited: q.waited, took: took, usage: q.usage, traceID: q.traceID(), tokens: q.tokens + len(q.progress.Given), times: q.times}
	if len(q.times.attempts) == 1 {
		r.times.attempts = nil // they are inline, where the copy has them too
	}
	return r
}

// all are the record's dispatches.
func (r *record) all() []attemptTimes {
	if r.times.attempts == nil && r.dispatches > 0 {
		return r.times.inline[:]
	}
	return r.times.attempts
}

// message is what went wrong, in a few words.
func (r *record) message() string {
	if r.err == nil || r.outcome == "ok" {
		return ""
	}
	s := r.err.Error()
	if len(s) > errorBytesMax {
		s = strings.ToValidUTF8(s[:errorBytesMax], "") + "..."
	}
	return s
}

// recent keeps the requests that ended last.
type recent struct {
	mu   sync.Mutex
	ring []record // grows up to requestsKept
	next int
}

func (r *recent) add(x *record) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.ring) < requestsKept {
		r.ring = append(r.ring, *x)
		return
	}
	r.ring[r.next] = *x
	r.next = (r.next + 1) % requestsKept
}

// list returns those that keep says yes to, the latest first, n at most.
func (r *recent) list(n int, keep func(*record) bool) []trace.Request {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := []trace.Request{}
	for i := len(r.ring) - 1; i >= 0 && len(out) < n; i-- {
		if x := &r.ring[(r.next+i)%len(r.ring)]; keep(x) {
			out = append(out, x.show())
		}
	}
	return out
}

// slowest returns the n that took the longest.
func (r *recent) slowest(n int) []trace.Request {
	out := r.list(requestsKept, func(*record) bool { return true })
	slices.SortStableFunc(out, func(a, b trace.Request) int { return cmp.Compare(b.TotalMS, a.TotalMS) })
	return out[:min(n, len(out))]
}

func millis(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

func (r *record) show() trace.Request {
	s := trace.Request{Time: r.start, ID: r.id, RequestID: r.requestID, TraceID: r.traceID, Endpoint: r.label, Model: r.model, Key: r.key, Stream: r.stream, Choices: r.choices,
		Code: r.code, Outcome: r.outcome, Cause: r.cause, Phase: r.last, Error: r.message(), QueuedMS: millis(r.waited), FirstMS: millis(r.times.first), LastMS: millis(r.times.last),
		TotalMS: millis(r.took), Tokens: r.tokens, Attempts: []trace.Attempt{}}
	if r.usage.known {
		u := r.usage
		s.PromptTokens, s.CachedTokens, s.Tokens = &u.Prompt, &u.Cached, u.Completion
	}
	for i := range r.all() {
		s.Attempts = append(s.Attempts, r.all()[i].show())
	}
	return s
}

func (a *attemptTimes) show() trace.Attempt {
	x := trace.Attempt{Choice: a.choice, Dispatch: a.dispatch, Cached: a.cached, BeganMS: millis(a.began), ReservingMS: millis(a.phases[stateReserving]),
		PrefillingMS: millis(a.phases[statePrefilling]), TransferMS: millis(a.phases[stateTransferring]), DecodingMS: millis(a.phases[stateDecoding]),
		FirstMS: millis(a.first), EndedMS: millis(a.ended), Result: resultNames[a.result], Reason: a.reason}
	for _, m := range a.moves {
		x.Moves = append(x.Moves, trace.Move{From: m.From, To: m.To, BeganMS: m.BeganMS, TookMS: m.Milliseconds, PauseMS: m.PauseMS, Tokens: m.Tokens, Result: m.Result, Failure: m.Failure, Ticket: m.Ticket})
	}
	if a.ticket != [16]byte{} {
		x.Ticket = hex.EncodeToString(a.ticket[:])
	}
	for _, w := range []struct {
		role string
		w    *pairing.Worker
		id   *string
	}{{openai.RolePrefill, a.prefill, &x.Prefill}, {openai.RoleDecode, a.decode, &x.Decode}, {openai.RoleWhole, a.whole, &x.Whole}} {
		if w.w != nil {
			*w.id, x.Dialect = w.w.ID, w.w.Dialect
			x.Places = append(x.Places, trace.Place{Worker: w.w.ID, Role: w.role, Node: w.w.NodeID})
		}
	}
	return x
}
