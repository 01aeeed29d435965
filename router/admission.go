package router

import (
	"context"
	"errors"
	"slices"
	"sync"
)

var errQueueFull = errors.New("the queue is full")

// admission lets a bounded number of requests be served and a bounded number wait, first come first served.
type admission struct {
	mu      sync.Mutex
	running int
	max     int
	waiting []chan struct{} // in order
	maxWait int
}

func newAdmission(running, waiting int) *admission {
	return &admission{max: running, maxWait: waiting}
}

// enter waits for its turn. When it returns nil, leave must follow.
func (a *admission) enter(ctx context.Context) error {
	a.mu.Lock()
	if a.running < a.max {
		a.running++
		a.mu.Unlock()
		return nil
	}
	if len(a.waiting) >= a.maxWait {
		a.mu.Unlock()
		return errQueueFull
	}
	turn := make(chan struct{})
	a.waiting = append(a.waiting, turn)
	a.mu.Unlock()
	select {
	case <-turn:
		return nil
	case <-ctx.Done():
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if i := slices.Index(a.waiting, turn); i >= 0 {
		a.waiting = slices.Delete(a.waiting, i, i+1)
	} else {
		a.pass() // the turn came meanwhile
	}
	return context.Cause(ctx)
}

func (a *admission) leave() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.pass()
}

// pass gives the place of one that leaves to the next in the queue.
func (a *admission) pass() {
	if len(a.waiting) == 0 {
		a.running--
		return
	}
	close(a.waiting[0])
	a.waiting = slices.Delete(a.waiting, 0, 1)
}

func (a *admission) counts() (running, waiting int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.running, len(a.waiting)
}
