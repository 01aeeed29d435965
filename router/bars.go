package router

import (
	"sync"
	"time"

	"github.com/headrace/headrace/router/pairing"
)

const (
	barFor  = 2 * time.Second // two workers that could not work together; twice as long each time that follows
	barMax  = 30 * time.Second
	barsMax = 1024
)

// bars remembers pairs of workers that could not work together: versions that do not match, a network between their
// nodes that is cut. It forgets a pair that has worked together since, or of which one has another life now.
type bars struct {
	mu    sync.Mutex
	pairs map[[2]string]barred
}

type barred struct {
	lives [2]life
	until time.Time
	last  time.Duration // how long it was kept apart
}

// life is what changes when a worker, or the daemon it stands on, starts anew somewhere else.
type life struct{ incarnation, node, data string }

func lifeOf(w *pairing.Worker) life { return life{w.Incarnation, w.NodeID, w.NodeData} }

func newBars() *bars { return &bars{pairs: map[[2]string]barred{}} }

func (b *bars) add(p, d *pairing.Worker, now time.Time) {
	key, lives := [2]string{p.ID, d.ID}, [2]life{lifeOf(p), lifeOf(d)}
	b.mu.Lock()
	defer b.mu.Unlock()
	for k, old := range b.pairs {
		if now.After(old.until.Add(barMax)) { // they had time to show that they can
			delete(b.pairs, k)
		}
	}
	bar, known := b.pairs[key]
	known = known && bar.lives == lives
	switch {
	case known && now.Before(bar.until): // the same fault, seen by another request
		return
	case !known && len(b.pairs) >= barsMax:
		return
	case known:
		bar.last = min(2*bar.last, barMax)
	default:
		bar = barred{lives: lives, last: barFor}
	}
	bar.until = now.Add(bar.last)
	b.pairs[key] = bar
}

// worked forgives a pair that has just served a request.
func (b *bars) worked(p, d *pairing.Worker) {
	if p == nil || d == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.pairs, [2]string{p.ID, d.ID})
}

func (b *bars) has(p, d *pairing.Worker, now time.Time) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	bar, ok := b.pairs[[2]string{p.ID, d.ID}]
	return ok && now.Before(bar.until) && bar.lives == [2]life{lifeOf(p), lifeOf(d)}
}
