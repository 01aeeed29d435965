package api

import "sync"

// queue stands between an engine and a client: the engine's events go in as fast as they come, the client takes them as
// fast as it reads. It is bounded by what a request can yield, which is bounded by max_tokens.
type queue struct {
	ready chan struct{} // holds one word when there is something to take

	mu     sync.Mutex
	events []TokenEvent
	closed bool
}

// newQueue makes a queue that says so on ready, which others may share, when it has something.
func newQueue(ready chan struct{}) *queue { return &queue{ready: ready} }

// pump moves events until the engine closes the channel.
func (q *queue) pump(ch <-chan TokenEvent) {
	for ev := range ch {
		q.mu.Lock()
		q.events = append(q.events, ev)
		q.mu.Unlock()
		q.wake()
	}
	q.mu.Lock()
	q.closed = true
	q.mu.Unlock()
	q.wake()
}

func (q *queue) wake() {
	select {
	case q.ready <- struct{}{}:
	default:
	}
}

// take swaps what has come for an empty buffer, and says whether nothing more will.
func (q *queue) take(spare []TokenEvent) (events []TokenEvent, closed bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	events, q.events = q.events, spare[:0]
	return events, q.closed
}
