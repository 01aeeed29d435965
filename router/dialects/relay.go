package dialects

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/headrace/headrace/router/upstream"
)

const (
	// wholeBytesMax bounds an answer that is not streamed: a batch of embeddings is the largest there is.
	wholeBytesMax = 256 << 20
	// refusalGrace is how long decode may take to refuse, too, what prefill found wrong with a request.
	refusalGrace = time.Second
)

// relay is an attempt whose answer goes to the client as one worker gives it, byte for byte. Another worker may prefill
// for it; what that one answers stays here.
//
// Engines of this sort say nothing while they work. That they live is found out by asking.
//
// The goroutine that runs the attempt reads the answer itself. Where prefill is asked at the same time, an attendant reads what
// that one says.
type relay struct {
	*Attempt
	client *upstream.Client
	probes *Prober
	sink   Sink

	prefill *leg // nil for none
	answer  *leg // nil as long as prefill must come first
	// prefilled, when set, is called with the body of prefill's answer.
	prefilled func(body []byte) *Outcome
	// sameBody: prefill gets what decode gets, so that its answer may be a stream and what it refuses is the client's fault.
	sameBody bool
	tongue   tongue
	errands  *Errands // of deaf engines, which know the request as rid
	rid      string
	// merge, when set, needs prefill's answer before anything of decode's goes to the client: held is what has come.
	merge   *logprobs
	held    []upstream.Batch
	handed  bool // prefill's answer is here
	recall  func()
	through func(prefill *leg) bool // sees a prefill through that nobody wants any more
	closes  bool                    // an event was the last one of an answer that ends without [DONE]
	// until, when set, is when the answer must have begun.
	until time.Time
	late  func() *Outcome
	// miss, when set, is when missed is called unless the answer has begun.
	miss   time.Time
	missed func()

	beside   *attendant // of prefill, while the answer is read; nil where nobody else reads
	reported bool       // what it said was taken
	begun    bool       // the client was handed content
	refused  *Outcome
	grace    time.Time // when refused is the outcome, unless the answer has begun; zero for never

	mu      sync.Mutex
	reading *leg // is interrupted when the request ends
}

// relay is a fresh one of the attempt's.
func (a *Attempt) relay() *relay {
	if a.Room == nil {
		return &relay{Attempt: a}
	}
	a.Room.relay = relay{Attempt: a}
	return &a.Room.relay
}

// paired is a dialect whose attempts are relayed.
type paired interface {
	// pair opens the legs of a pair, the first one at least. Where it cannot, it says how the attempt ends.
	pair(ctx context.Context, r *relay) *Outcome
}

// serve runs the attempt, by a pair as p does or by one worker. All legs are closed when it returns.
func (r *relay) serve(ctx context.Context, p paired) (out Outcome) {
	defer func() { r.close(out.Result == Finished) }()
	if r.Decision.Whole != nil {
		r.whole()
	} else if out := p.pair(ctx, r); out != nil {
		return *out
	}
	return r.run(ctx)
}

// whole sends the client's own request to the one worker.
func (r *relay) whole() {
	body := r.Request.Body.Whole()
	switch {
	case r.rid != "":
		body = sglangBody(r.Request, ridMember(nil, r.rid))
	case r.Request.Path == PathGenerate:
		body = r.Request.Body.Without(notGenerates, nil)
	}
	r.answer = r.open(r.Decision.Whole, roleWhole, body)
}

// run serves until the answer is with the client, or will not be.
func (r *relay) run(ctx context.Context) Outcome {
	if r.Decision.Whole == nil { // else nothing was waited for
		r.At = time.Now()
	}
	r.sink.Phase(Prefilling)
	if r.prefill != nil && r.answer != nil {
		r.attend()
	}
	ending, ok := ctx.(Ending)
	if ok {
		ending.AbortAtEnd(r)
		defer ending.Spare(r)
	} else {
		ending = otherContext{ctx}
		defer context.AfterFunc(ctx, r.Abort)()
	}
	every := max(r.probes.every/3, time.Millisecond)
	look := r.At.Add(every)
	for {
		l := r.turn()
		b, ok := r.next(ctx, l, r.wake(ctx, look))
		now := l.HeardAt()
		if !ok {
			now = time.Now()
		}
		r.At = now
		// What ends the request interrupts the leg, so that there is nothing to look for while the answer comes.
		if (!ok || b.Err != nil || !now.Before(look)) && ending.Ended(now) != nil {
			l.took(b)
			b.Release()
			return Outcome{Result: Cancelled, Err: context.Cause(ctx)}
		}
		var out *Outcome
		if ok {
			out = r.take(l, b)
		}
		if out == nil {
			out = r.heard()
		}
		if out == nil {
			out = r.due(now)
		}
		if out == nil && !now.Before(look) {
			look = now.Add(every)
			out = r.look()
		}
		if out != nil {
			return *out
		}
	}
}

// take handles what the leg that is read brought.
func (r *relay) take(l *leg, b upstream.Batch) *Outcome {
	if l == r.answer {
		return r.fromAnswer(b)
	}
	defer b.Release()
	l.took(b)
	return r.fromPrefill(b)
}

// turn is the leg that is read next.
func (r *relay) turn() *leg {
	l := r.answer
	if l == nil {
		l = r.prefill
	}
	if r.reading != l {
		r.mu.Lock()
		r.reading = l
		r.mu.Unlock()
	}
	return l
}

// Abort has the relay look why the request has ended.
func (r *relay) Abort() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.reading != nil {
		r.reading.Interrupt(true)
	}
}

// next waits for what a leg brings. Where all is held of the answer, or as much as may be, it is prefill that must say something first.
func (r *relay) next(ctx context.Context, l *leg, until time.Time) (upstream.Batch, bool) {
	if !l.ended && len(r.held) < batchesQueuedMax {
		return l.Next(until)
	}
	var said chan struct{} // nothing more is said behind a report
	if r.beside != nil && !r.reported {
		said = r.beside.done
	}
	timer := time.NewTimer(time.Until(until))
	defer timer.Stop()
	select {
	case <-said:
	case <-timer.C:
	case <-ctx.Done():
	}
	return upstream.Batch{}, false
}

// wake is when something must be looked after, at the latest.
func (r *relay) wake(ctx context.Context, look time.Time) time.Time {
	if last, limited := ctx.Deadline(); limited && last.Before(look) {
		look = last
	}
	if r.begun {
		return look
	}
	for _, t := range [...]time.Time{r.until, r.miss, r.grace} {
		if !t.IsZero() && t.Before(look) {
			look = t
		}
	}
	return look
}

// due does what it is time for.
func (r *relay) due(now time.Time) *Outcome {
	over := func(t time.Time) bool { return !t.IsZero() && !now.Before(t) }
	switch {
	case r.begun:
	case over(r.until):
		r.tongue.leased = false // it may not read any more
		return r.late()
	case over(r.grace):
		return r.refused
	case over(r.miss):
		r.missed()
	}
	return nil
}

// otherContext makes an Ending of any context whose end somebody else sees to.
type otherContext struct{ context.Context }

func (otherContext) AbortAtEnd(Aborter)      {}
func (otherContext) Spare(Aborter)           {}
func (c otherContext) Ended(time.Time) error { return c.Err() }

// look asks after workers that were silent for long.
func (r *relay) look() *Outcome {
	for _, l := range []*leg{r.prefill, r.answer} {
		if l == nil || l.ended && !r.awaited(l) || time.Since(l.LastHeard()) < r.probes.every || l == r.prefill && r.begun {
			continue
		}
		p := l.probe
		if p == nil {
			l.probe = r.probes.ask(l.Target)
			continue
		}
		if !p.over() {
			continue
		}
		l.probe = nil
		if p.began.Before(l.alive) { // it is about a life before this request
			continue
		}
		if p.err != nil {
			return r.fail(l, string(upstream.KindSilent), fmt.Errorf("%w: %w", errProbe, p.err))
		}
		l.alive = p.began
	}
	return nil
}

// awaited tells whether a leg that has ended well is of an engine that the other one may still wait for: it sends, or is read from, behind
// its answer, and nobody tells decode when it dies.
func (r *relay) awaited(l *leg) bool {
	return l == r.prefill && l.whole && r.answer != nil && !r.begun && r.tongue.leased && !r.tongue.stored
}
