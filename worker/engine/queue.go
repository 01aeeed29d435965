package engine

import "sync"

// queue hands functions to a single consumer in order, without ever blocking the one who posts. What posts is
// bounded elsewhere: requests by admission, lease events by the number of leases.
type queue struct {
	mu     sync.Mutex
	items  []func()
	closed bool
	wake   chan struct{}
}

func newQueue() *queue { return &queue{wake: make(chan struct{}, 1)} }

// post reports whether f was taken; after close nothing is.
func (q *queue) post(f func()) bool {
	q.mu.Lock()
	if q.closed {
		q.mu.Unlock()
		return false
	}
	q.items = append(q.items, f)
	q.mu.Unlock()
	select {
	case q.wake <- struct{}{}:
	default:
	}
	return true
}

// take returns all that was posted since the last take.
func (q *queue) take() []func() {
	q.mu.Lock()
	defer q.mu.Unlock()
	items := q.items
	q.items = nil
	return items
}

// takeAndCloseIfEmpty is take, and close when there is nothing left: no post can slip in between.
func (q *queue) takeAndCloseIfEmpty() []func() {
	q.mu.Lock()
	defer q.mu.Unlock()
	items := q.items
	q.items = nil
	q.closed = len(items) == 0
	return items
}

// close drops what is left and refuses more.
func (q *queue) close() {
	q.mu.Lock()
	q.closed, q.items = true, nil
	q.mu.Unlock()
}
