package transporttest

import (
	"slices"
	"time"
)

// wakesEvery is how often wakes looks at the time.
const wakesEvery = 2 * time.Millisecond

// wakes measures, until the returned function is called, how late this machine lets run who waits for a time, and gives the lateness that
// one in fifty exceeds: on a busy host, and in an emulated machine on it, that is no fault of what is tested.
func wakes() (stop func() time.Duration) {
	done, out := make(chan struct{}), make(chan time.Duration)
	go func() {
		var late []time.Duration
		for {
			began := time.Now()
			timer := time.NewTimer(wakesEvery)
			select {
			case <-done:
				timer.Stop()
				slices.Sort(late)
				if len(late) == 0 {
					late = append(late, 0)
				}
				out <- late[len(late)*49/50]
				return
			case <-timer.C:
				late = append(late, time.Since(began)-wakesEvery)
			}
		}
	}()
	return func() time.Duration {
		close(done)
		return <-out
	}
}
