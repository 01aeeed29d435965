package breaker

import (
	"sync"
	"time"
)

// budgetWindow is what a Budget looks back on, at least half of it.
const budgetWindow = 10 * time.Second

// Budget bounds retries to a share of the requests of the last 5 to 10 s and a number a second besides, so that a pool that fails is not
// asked several times as much as one that is well. Its methods are safe for concurrent use.
type Budget struct {
	share, perSecond float64

	mu    sync.Mutex // guards what follows
	since time.Time  // when the present half began
	halfs [2]struct{ requests, retries int }
}

// NewBudget makes a Budget of share retries a request, and perSecond a second.
func NewBudget(share, perSecond float64) *Budget { return &Budget{share: share, perSecond: perSecond} }

// Request notes a request's first attempt.
func (b *Budget) Request(now time.Time) {
	b.mu.Lock()
	b.turn(now)
	b.halfs[0].requests++
	b.mu.Unlock()
}

// Retry asks for a retry; true takes it.
func (b *Budget) Retry(now time.Time) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.turn(now)
	may := b.share*float64(b.halfs[0].requests+b.halfs[1].requests) + b.perSecond*budgetWindow.Seconds()
	if float64(b.halfs[0].retries+b.halfs[1].retries+1) > may {
		return false
	}
	b.halfs[0].retries++
	return true
}

func (b *Budget) turn(now time.Time) {
	age := now.Sub(b.since)
	if age < budgetWindow/2 {
		return
	}
	if b.halfs[1] = b.halfs[0]; age >= budgetWindow {
		b.halfs[1] = struct{ requests, retries int }{}
	}
	b.halfs[0] = struct{ requests, retries int }{}
	b.since = now
}
