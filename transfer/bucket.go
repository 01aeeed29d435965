package transfer

import (
	"sync"
	"time"
)

// bucket limits bytes a second. It lets a piece go when it owes nothing and may then owe: pieces of any size pass, and the
// mean holds. One tenth of a second may be saved up.
type bucket struct {
	mu      sync.Mutex
	rate    int64 // bytes a second, 0: no limit
	level   float64
	at      time.Time
	changed chan struct{} // closed and replaced by set
}

func newBucket(rate int64) *bucket {
	return &bucket{rate: max(rate, 0), at: time.Now(), changed: make(chan struct{})}
}

func (b *bucket) set(rate int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.rate, b.level, b.at = max(rate, 0), 0, time.Now()
	close(b.changed)
	b.changed = make(chan struct{})
}

func (b *bucket) get() int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.rate
}

// try takes n bytes, or says how long to wait before trying again and what would end the wait early.
func (b *bucket) try(n uint32) (time.Duration, <-chan struct{}) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.rate == 0 {
		return 0, nil
	}
	now := time.Now()
	rate := float64(b.rate)
	b.level = min(b.level+now.Sub(b.at).Seconds()*rate, rate/10)
	b.at = now
	if b.level < 0 {
		return max(time.Duration(-b.level/rate*float64(time.Second)), time.Microsecond), b.changed
	}
	b.level -= float64(n)
	return 0, nil
}

// wait takes n bytes. It gives up, with false, when one of the channels is closed.
func (b *bucket) wait(n uint32, stop, stop2 <-chan struct{}) bool {
	for {
		d, changed := b.try(n)
		if d == 0 {
			return true
		}
		t := time.NewTimer(d)
		select {
		case <-t.C:
		case <-changed:
		case <-stop:
			t.Stop()
			return false
		case <-stop2:
			t.Stop()
			return false
		}
		t.Stop()
	}
}
