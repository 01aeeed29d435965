package routertest

import (
	"sync"
	"time"
)

// Once is a thing that happens once. The zero value has not happened.
type Once struct {
	mu    sync.Mutex
	taken bool
	news  chan struct{}
}

func (o *Once) happened() chan struct{} {
	if o.news == nil {
		o.news = make(chan struct{})
	}
	return o.news
}

// Take tells whether it happens now.
func (o *Once) Take() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.taken {
		return false
	}
	o.taken = true
	close(o.happened())
	return true
}

// Within waits for it to happen, at most for d. A worker that is not waited for any more, as prefill behind its
// hand-off, may get to its fault after the client has its answer.
func (o *Once) Within(d time.Duration) bool {
	o.mu.Lock()
	news := o.happened()
	o.mu.Unlock()
	select {
	case <-news:
		return true
	case <-time.After(d):
		return false
	}
}
