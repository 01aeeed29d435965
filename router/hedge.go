package router

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/headrace/headrace/internal/openai"
	"github.com/headrace/headrace/router/dialects"
	"github.com/headrace/headrace/router/pairing"
)

// errOutrun ends the attempt of two that was not the first to answer.
var errOutrun = errors.New("another attempt has answered first")

// Hedging is a second attempt beside a request's first one, elsewhere, when that has answered nothing for a while. Whose first event comes
// first serves the request to its end, with all that belongs to it; the other is cancelled, as if its client had left.
//
// The first attempt runs where it always does, in the goroutine that serves the request. The second is a request of its own, as the choices
// of one request are, in the goroutine of the timer: without one nothing runs beside.
type race struct {
	first, second         *request
	stopFirst, stopSecond context.CancelCauseFunc

	mu     sync.Mutex    // guards what follows
	won    *request      // whose answer the client gets; nil as long as it gets none
	over   bool          // no second attempt begins any more
	failed bool          // the first one has, and has handed nothing on: the second goes on alone
	lost   bool          // so has the second
	ended  chan struct{} // closed when the second has ended; nil when there was none
	err    error         // how it ended; behind ended
}

// hedges counts second attempts.
type hedges struct {
	begun, won, lost, denied, nobody prometheus.Counter
}

func newHedges(reg *prometheus.Registry) hedges {
	total := prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: "headrace", Subsystem: "router", Name: "hedges_total",
		Help: "Second attempts beside a first one that had answered nothing, by what came of them: begun, then won or lost; denied (as many retries are under way as may be), nobody (there is no other worker)."}, []string{"result"})
	reg.MustRegister(total)
	return hedges{total.WithLabelValues("begun"), total.WithLabelValues("won"), total.WithLabelValues("lost"), total.WithLabelValues("denied"), total.WithLabelValues("nobody")}
}

// mayHedge tells whether the next attempt may have another one beside it: the first one of a request for one answer, that nothing is known
// of but that it generates.
func (q *request) mayHedge() bool {
	return q.race == nil && q.dispatches == 0 && q.body.N == 1 && !q.foreign && q.faultAt.IsZero()
}

// hedged runs the first attempt, and the second when it is time. over tells that the request is served, or err says why not; else out is how the
// first attempt ended, and nothing runs beside it any more.
func (q *request) hedged(ctx context.Context, d pairing.Decision) (out dialects.Outcome, over bool, err error) {
	x := &race{first: q}
	first, stopFirst := context.WithCancelCause(ctx)
	second, stopSecond := context.WithCancelCause(ctx)
	x.stopFirst, x.stopSecond = stopFirst, stopSecond
	defer stopFirst(nil)
	defer stopSecond(nil)
	c := q.again(x, d)
	timer := time.AfterFunc(q.r.cfg.HedgeAfter, func() { x.begin(second, c) })
	defer timer.Stop()
	q.race = x
	out = q.attempt(first, d)
	q.race = nil
	if !x.firstEnded(out) {
		return out, false, nil
	}
	if x.failed {
		q.r.metrics.upstream.WithLabelValues(out.Reason).Inc()
		q.r.metrics.redispatches.WithLabelValues(out.Reason).Inc()
		q.blame(d, out)
	}
	<-x.ended
	q.over = time.Now()
	q.adopt(x)
	return out, x.failed || x.won == c, x.err
}

// again is the request for the second attempt. It is made before the first attempt writes into what they would share.
func (q *request) again(x *race, d pairing.Decision) *request {
	b := *q.body
	c := q.another(&b, q.out)
	c.dispatches, c.attempts, c.race = q.dispatches+1, q.attempts+1, x
	for _, w := range []*pairing.Worker{d.Prefill, d.Decode, d.Whole} {
		if w != nil {
			c.exclude = append(c.exclude, excluded{w, time.Now()})
		}
	}
	x.second = c
	return c
}

// begin runs the second attempt, if it is still wanted.
func (x *race) begin(ctx context.Context, c *request) {
	x.mu.Lock()
	if x.over || x.won != nil {
		x.mu.Unlock()
		return
	}
	x.ended = make(chan struct{})
	x.mu.Unlock()
	defer close(x.ended)
	h := &c.r.hedges
	if !c.r.budget.Retry(c.r.fleet.now()) {
		h.denied.Inc()
		x.drops()
		return
	}
	defer func() {
		if p := recover(); p != nil {
			c.r.log.Error("panic in a second attempt", "id", c.id, "panic", p, "stack", stack())
			x.err = openai.Internal("The router broke on this request.")
		}
		c.trail.Free()
	}()
	c.r.metrics.phases[c.state].Inc()
	defer func() { c.enter(stateDone) }()
	before := c.dispatches
	if x.err = c.dispatchAll(ctx); c.dispatches == before {
		h.nobody.Inc()
		x.drops()
	} else {
		h.begun.Inc()
	}
}

// claim tells whether q's answer is the client's. Whoever asks first has it, and the other attempt ends.
func (x *race) claim(q *request) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.won == nil {
		x.won = q
		if q == x.first {
			x.stopSecond(errOutrun)
		} else {
			x.stopFirst(errOutrun)
		}
	}
	return x.won == q
}

// firstEnded takes how the first attempt ended; true if the second must be waited for.
func (x *race) firstEnded(out dialects.Outcome) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.over = true
	if x.won == nil && out.Result == dialects.Finished { // an answer of nothing
		x.won = x.first
	}
	x.failed = x.ended != nil && !x.lost && x.won == nil && out.Result == dialects.Failed
	if !x.failed && x.won != x.second {
		x.stopSecond(errOutrun)
	}
	return x.ended != nil
}

// drops takes that the second attempt has come to nothing; false if the first one has, too, so that nobody but the second can go on.
func (x *race) drops() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.failed {
		return false
	}
	x.lost = true
	return true
}

// outrun tells whether the second attempt, which ended so, is of no use to anybody.
func (q *request) outrun(d pairing.Decision, out dialects.Outcome) bool {
	switch out.Result {
	case dialects.Finished:
		return !q.race.claim(q)
	case dialects.Failed, dialects.Refused: // what is wrong with the request the first one will hear, too
		if !q.race.drops() {
			return false
		}
		if out.Result == dialects.Failed {
			q.r.metrics.upstream.WithLabelValues(out.Reason).Inc()
			q.blame(d, out)
		}
		return true
	}
	return false
}

// adopt takes over what the second attempt came to, which has ended.
func (q *request) adopt(x *race) {
	c := x.second
	if c.dispatches == 1 {
		return // it came to none
	}
	q.dispatches, q.exclude = max(q.dispatches, c.dispatches), append(q.exclude, c.exclude...)
	q.times.add(&c.times)
	if x.won != c {
		q.r.hedges.lost.Inc()
		return
	}
	q.r.hedges.won.Inc()
	q.decision, q.sent, q.events, q.usage = c.decision, c.sent, c.events, c.usage
	q.times.first, q.times.last = c.times.first, c.times.last
	q.tokens += c.tokens + len(c.progress.Given)
}
