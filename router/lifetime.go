package router

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/headrace/headrace/router/dialects"
)

// lifetime is the context of one request: it ends when the client leaves, when the deadline passes or when the router stops, and its
// Err is the cause. It is what contexts made of each other would be, but nothing runs and little is allocated until somebody
// waits for its end: who looks at Err from time to time pays a reading of the clock. Safe for concurrent use.
type lifetime struct {
	deadline time.Time
	over     atomic.Bool // cause stands

	mu    sync.Mutex // guards what follows
	cause error
	done  chan struct{}       // nil until somebody waits
	timer *time.Timer         // of the deadline; nil until somebody waits
	told  []dialects.Aborter  // when it ends
	room  [2]dialects.Aborter // of told
}

var _ dialects.Ending = (*lifetime)(nil)

// end ends it, the first cause counts. Whoever is to be told is told before it returns.
func (l *lifetime) end(cause error) {
	l.mu.Lock()
	if l.cause != nil {
		l.mu.Unlock()
		return
	}
	l.cause = cause
	l.over.Store(true)
	if l.done != nil {
		close(l.done)
	}
	if l.timer != nil {
		l.timer.Stop()
	}
	told := l.told
	l.told = nil
	l.mu.Unlock()
	for _, x := range told {
		x.Abort()
	}
}

// unshared tells whether it has not ended and nobody waits for its end.
func (l *lifetime) unshared() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.cause == nil && l.done == nil && l.timer == nil && len(l.told) == 0
}

// Deadline is the request's.
func (l *lifetime) Deadline() (time.Time, bool) { return l.deadline, true }

// Value has none.
func (l *lifetime) Value(any) any { return nil }

// Err is the cause, once there is one.
func (l *lifetime) Err() error {
	if !l.over.Load() {
		return l.Ended(time.Now())
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.cause
}

// Ended is Err for who knows the time.
func (l *lifetime) Ended(now time.Time) error {
	if !l.over.Load() {
		if now.Before(l.deadline) {
			return nil
		}
		l.end(errDeadline)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.cause
}

var closedChan = func() chan struct{} { ch := make(chan struct{}); close(ch); return ch }()

// Done is closed when it ends.
func (l *lifetime) Done() <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.done == nil {
		if l.cause != nil {
			return closedChan
		}
		l.done = make(chan struct{})
		l.watchDeadline()
	}
	return l.done
}

func (l *lifetime) watchDeadline() {
	if l.timer == nil {
		l.timer = time.AfterFunc(time.Until(l.deadline), func() { l.end(errDeadline) })
	}
}

// AfterFunc has f called when it ends: context knows contexts that have this method, and makes use of it where it makes others of
// them. stop is false when f was or is being called.
func (l *lifetime) AfterFunc(f func()) (stop func() bool) {
	l.mu.Lock()
	if l.cause == nil {
		l.watchDeadline()
	}
	l.mu.Unlock()
	x := &told{f}
	if !l.add(x) {
		go f() // who calls may hold what f needs
		return func() bool { return false }
	}
	return func() bool { return l.remove(x) }
}

// told is a function to be called.
type told struct{ f func() }

// Abort calls it.
func (t *told) Abort() { t.f() }

// AbortAtEnd has a aborted when it ends, for who looks at Ended from time to time, so that no timer need run for the deadline.
func (l *lifetime) AbortAtEnd(a dialects.Aborter) {
	if !l.add(a) {
		a.Abort()
	}
}

// Spare undoes AbortAtEnd. Where the end has come already, a may be being aborted.
func (l *lifetime) Spare(a dialects.Aborter) { l.remove(a) }

func (l *lifetime) add(a dialects.Aborter) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cause != nil {
		return false
	}
	if l.told == nil {
		l.told = l.room[:0]
	}
	l.told = append(l.told, a)
	return true
}

func (l *lifetime) remove(a dialects.Aborter) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	i := slices.Index(l.told, a)
	if i >= 0 {
		l.told = slices.Delete(l.told, i, i+1)
	}
	return i >= 0
}
