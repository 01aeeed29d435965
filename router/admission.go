package router

import (
	"context"
	"errors"
	"slices"
	"sync"
)

var errQueueFull = errors.New("the queue is full")

// admission lets a bounded number of answers be made and a bounded number of requests wait, first come first served. A
// request for n answers takes n places.
type admission struct {
	mu      sync.Mutex
	running int
	max     int
	waiting []*waiter // in order
	maxWait int
}

type waiter struct {
	turn chan struct{}
	n    int
}

func newAdmission(running, waiting int) *admission {
	return &admission{max: running, maxWait: waiting}
}

// enter waits for its turn. When it returns nil, leave must follow. What asks for more places than there are gets all.
func (a *admission) enter(ctx context.Context, n int) error {
	n = min(n, a.max)
	a.mu.Lock()
	if len(a.waiting) == 0 && a.running+n <= a.max {
		a.running += n
		a.mu.Unlock()
		return nil
	}
	if len(a.waiting) >= a.maxWait {
		a.mu.Unlock()
		return errQueueFull
	}
	w := &waiter{make(chan struct{}), n}
	a.waiting = append(a.waiting, w)
	a.mu.Unlock()
	select {
	case <-w.turn:
		return nil
	case <-ctx.Done():
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if i := slices.Index(a.waiting, w); i >= 0 {
		a.waiting = slices.Delete(a.waiting, i, i+1)
		a.pass(0) // the next may be smaller
	} else {
		a.pass(n) // the turn came meanwhile
	}
	return context.Cause(ctx)
}

func (a *admission) leave(n int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.pass(min(n, a.max))
}

// pass gives back places, and the free ones to the head of the queue.
func (a *admission) pass(n int) {
	a.running -= n
	for len(a.waiting) > 0 && a.running+a.waiting[0].n <= a.max {
		w := a.waiting[0]
		a.running += w.n
		close(w.turn)
		a.waiting = slices.Delete(a.waiting, 0, 1)
	}
}

func (a *admission) counts() (running, waiting int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.running, len(a.waiting)
}
