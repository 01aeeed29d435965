package router

import (
	"maps"
	"sync"
	"sync/atomic"
)

// labelled remembers a vector's metrics by what their labels are made of: to find one by its labels takes as long as a policy's
// decision. Metrics of a vector are never taken away, and labels have few values. Safe for concurrent use.
type labelled[K comparable, M any] struct {
	make func(K) M

	last  atomic.Pointer[labelOf[K, M]] // asked for; mostly it is the same
	known atomic.Pointer[map[K]*labelOf[K, M]]
	mu    sync.Mutex // of who adds one
}

// labelOf is one of a labelled's.
type labelOf[K comparable, M any] struct {
	k K
	m M
}

func newLabelled[K comparable, M any](of func(K) M) *labelled[K, M] {
	l := &labelled[K, M]{make: of}
	l.known.Store(&map[K]*labelOf[K, M]{})
	return l
}

// of is the metric of a key.
func (l *labelled[K, M]) of(k K) M {
	if x := l.last.Load(); x != nil && x.k == k {
		return x.m
	}
	if x, ok := (*l.known.Load())[k]; ok {
		l.last.Store(x)
		return x.m
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	more := maps.Clone(*l.known.Load())
	x, ok := more[k]
	if !ok {
		x = &labelOf[K, M]{k, l.make(k)}
		more[k] = x
		l.known.Store(&more)
	}
	return x.m
}
