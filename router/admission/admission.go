// Package admission decides who is served next when more is asked for than may be served at once.
//
// A Queue gives out places. Who finds none waits, in an order that is made of three things: classes of priority, whose
// lower ones rise with age; within a class, shares of the tenants by the tokens they ask for; within a tenant's share the
// order of coming. It knows neither HTTP nor workers.
package admission

import (
	"cmp"
	"context"
	"sync"
	"time"
)

// PriorityMax bounds priorities: what is beyond counts as ±PriorityMax. So there are few classes, whatever clients send.
const PriorityMax = 100

const (
	defaultAging = 10 * time.Second
	// retryMin and retryMax bound what a refused request is told to wait.
	retryMin = time.Second
	retryMax = time.Minute
	// rateWindow is how long the rate is measured over at least, in two halves, and rateStale after what time it is begun anew.
	rateWindow = 5 * time.Second
	rateStale  = 30 * time.Second
	// rateSoon is too short to tell a rate.
	rateSoon = time.Second
)

// Config of a Queue. Places, Waiting and WaitingBytes must be over 0.
type Config struct {
	Places       int   // given out at once
	Waiting      int   // requests that may wait
	WaitingBytes int64 // of the bodies of those
	// Aging is how much longer a request must have waited than one whose priority number is lower by one, to come before it.
	// 0: 10 s. Below 0: it never does.
	Aging time.Duration
	// Patience is how long a request may wait; 0: as long as its context lasts.
	Patience time.Duration
	// Weights are tenants' parts of the places under contention, in relation to each other; 1 for who is not there.
	Weights map[string]float64
	Now     func() time.Time // time.Now
}

// Request is what asks for places.
type Request struct {
	Places   int   // what asks for more than there are gets all
	Bytes    int64 // of its body
	Tokens   int64 // that it will cost, estimated
	Priority int   // the lower, the sooner
	Tenant   string
}

// Pass is the right to places. It is given back by Leave.
type Pass struct {
	places int
	share  *share // nil for who did not wait
	tokens int64  // that it was charged with
}

// Why a request is refused.
type Why string

// Reasons.
const (
	Full      Why = "full"      // no room to wait
	Displaced Why = "displaced" // its room went to one of more right to it
	Late      Why = "late"      // Config.Patience passed
)

// Refusal is the error of a request that gets no place.
type Refusal struct {
	Why        Why
	RetryAfter time.Duration // whole seconds, 1 to 60, by the rate at which places became free lately
	Waited     time.Duration
}

func (e *Refusal) Error() string { return "admit request: " + string(e.Why) }

// Counts is a snapshot of a Queue.
type Counts struct {
	Running int   `json:"running"` // places given out
	Waiting int   `json:"waiting"`
	Bytes   int64 `json:"bytes"` // of bodies that wait
	Tenants int   `json:"tenants"`
	// OldestMS is how long the one that waits longest has waited.
	OldestMS int64 `json:"oldest_ms,omitempty"`
}

// Queue gives out places. Its methods are safe for concurrent use. It has no goroutine and nothing to close.
type Queue struct {
	cfg Config

	mu      sync.Mutex // guards what follows
	running int
	waiting int
	places  int // that those who wait ask for
	bytes   int64
	left    uint64   // places given back since the start
	classes []*class // that have waiters, by priority
	// marks are two looks at left, for the rate.
	marks [2]mark
}

type mark struct {
	at   time.Time
	left uint64
}

// waiter is a request that waits. The queue's mutex guards it.
type waiter struct {
	Request
	at    time.Time
	turn  chan error // gets one value: nil for the turn, or a Refusal
	share *share
	links [2]links // in its class, in its share
	state waiterState
}

type waiterState uint8

const (
	waits waiterState = iota
	granted
	refused
)

// New makes a Queue.
func New(cfg Config) *Queue {
	cfg.Aging = cmp.Or(cfg.Aging, defaultAging)
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	return &Queue{cfg: cfg}
}

// TryEnter takes places if they are free and nobody waits: the usual case, which needs to know nothing else of the request.
func (q *Queue) TryEnter(places int) (Pass, bool) {
	places = min(places, q.cfg.Places)
	q.mu.Lock()
	if q.waiting > 0 || q.running+places > q.cfg.Places {
		q.mu.Unlock()
		return Pass{}, false
	}
	q.running += places
	q.mu.Unlock()
	return Pass{places: places}, true
}

// Enter waits for places. When it returns nil, Leave must follow. The error is a *Refusal, or the cause of ctx's end.
func (q *Queue) Enter(ctx context.Context, r Request) (Pass, error) {
	if p, ok := q.TryEnter(r.Places); ok {
		return p, nil
	}
	r.Places = min(r.Places, q.cfg.Places)
	r.Priority = min(max(r.Priority, -PriorityMax), PriorityMax)
	r.Tokens = max(r.Tokens, 1)
	w := &waiter{Request: r, at: q.cfg.Now(), turn: make(chan error, 1)}
	q.mu.Lock()
	q.note(w.at)
	if q.full(r.Bytes) && !q.makeRoom(&r) {
		e := &Refusal{Why: Full, RetryAfter: q.retryAfter(w.at, r.Places)}
		q.mu.Unlock()
		return Pass{}, e
	}
	q.add(w)
	q.serve() // it may come before one that finds too few places
	q.mu.Unlock()
	return q.wait(ctx, w)
}

func (q *Queue) wait(ctx context.Context, w *waiter) (Pass, error) {
	var late <-chan time.Time
	if q.cfg.Patience > 0 {
		t := time.NewTimer(q.cfg.Patience)
		defer t.Stop()
		late = t.C
	}
	var err error
	select {
	case err = <-w.turn:
		if err != nil {
			return Pass{}, err
		}
		return Pass{w.Places, w.share, w.Tokens}, nil
	case <-ctx.Done():
		err = context.Cause(ctx)
	case <-late:
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if err == nil {
		now := q.cfg.Now()
		err = &Refusal{Why: Late, RetryAfter: q.retryAfter(now, w.Places), Waited: now.Sub(w.at)}
	}
	switch w.state {
	case granted: // the turn came meanwhile
		q.running -= w.Places
		q.refund(w.share, w.Tokens)
	case waits:
		w.state = refused
		q.remove(w)
	}
	q.serve() // the next may be smaller
	return Pass{}, err
}

// Leave gives places back. tokens is what the request cost after all, by which its tenant's share is set right; below 0 when
// that is not known.
func (q *Queue) Leave(p Pass, tokens int64) {
	q.mu.Lock()
	q.running -= p.places
	q.left += uint64(p.places)
	if p.share != nil && tokens >= 0 {
		q.refund(p.share, p.tokens-tokens)
	}
	if q.waiting > 0 {
		q.serve()
	}
	q.mu.Unlock()
}

// Counts is a snapshot.
func (q *Queue) Counts() Counts {
	now := q.cfg.Now()
	q.mu.Lock()
	defer q.mu.Unlock()
	c := Counts{Running: q.running, Waiting: q.waiting, Bytes: q.bytes}
	tenants := map[string]bool{}
	for _, x := range q.classes {
		c.OldestMS = max(c.OldestMS, now.Sub(x.line.head.at).Milliseconds())
		for _, s := range x.turns.items {
			tenants[s.tenant] = true
		}
	}
	c.Tenants = len(tenants)
	return c
}

// serve gives free places to those whose turn it is.
func (q *Queue) serve() {
	for q.waiting > 0 {
		c := q.nextClass()
		w := c.turns.items[0].line.head
		if q.running+w.Places > q.cfg.Places {
			return
		}
		q.running += w.Places
		c.charge(w.share, w.Tokens)
		q.remove(w)
		w.state = granted
		w.turn <- nil
	}
}

// nextClass is the class whose turn it is: the one with the least of (when its oldest came) + priority * Aging.
func (q *Queue) nextClass() *class {
	best := q.classes[0]
	if q.cfg.Aging < 0 {
		return best
	}
	for _, c := range q.classes[1:] {
		later := c.line.head.at.Sub(best.line.head.at)
		if later+time.Duration(c.priority-best.priority)*q.cfg.Aging < 0 {
			best = c
		}
	}
	return best
}

// note looks at the rate now and then.
func (q *Queue) note(now time.Time) {
	here := mark{now, q.left}
	switch age := now.Sub(q.marks[1].at); {
	case q.waiting == 0 && age > rateStale:
		q.marks = [2]mark{here, here}
	case age >= rateWindow:
		q.marks = [2]mark{q.marks[1], here}
	}
}

// retryAfter is when a request for so many places may find room: in the time in which as many places become free as are waited
// for now.
func (q *Queue) retryAfter(now time.Time, places int) time.Duration {
	took := now.Sub(q.marks[0].at)
	if took < rateSoon {
		return retryMin
	}
	freed := float64(q.left-q.marks[0].left) + 1
	wait := time.Duration(min(float64(q.places+places)/freed*float64(took), float64(retryMax)))
	wait = (wait + time.Second - 1).Truncate(time.Second)
	return min(max(wait, retryMin), retryMax)
}
