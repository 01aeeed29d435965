package ring

import (
	"runtime"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// Spinner decides how long a consumer goes on looking before it sleeps. Being woken costs more than a short wait, and a
// long wait more than being woken: as with a hypervisor's halt polling, it looks as long as Max where the last sleep turned
// out to be shorter than that, and not at all where it was longer. So only traffic that comes at least every Max makes it
// spin, and an idle daemon costs nothing.
type Spinner struct {
	Max   time.Duration // 0: never spin
	on    bool
	began time.Time // of the sleep
}

// SpinDefault is Max where nothing else is said: what a piece of 64 KiB takes over TCP and back.
const SpinDefault = 100 * time.Microsecond

// spinners bounds who spins at a time in this process: one processor is left to those who do the work, without which the
// runtime would not look at the network either.
var spinners atomic.Int32

// Spin looks until ready says yes, for as long as pays; it reports whether ready did.
func (s *Spinner) Spin(ready func() bool) bool {
	if !s.on || s.Max <= 0 {
		return false
	}
	if int(spinners.Add(1)) >= runtime.GOMAXPROCS(0) {
		spinners.Add(-1)
		return false
	}
	defer spinners.Add(-1)
	for start := time.Now(); ; {
		if ready() {
			return true
		}
		gone := time.Since(start)
		if gone >= s.Max {
			return false
		}
		yield(gone > alone)
	}
}

// alone is how long the processor is not offered to other processes, which take it for longer than a local copy of a block
// needs: offering it at each look doubled the time of 64 KiB, from 10 to 20 us. Never to offer it doubled the time over TCP,
// where three processes work in turns.
const alone = 10 * time.Microsecond

// Sleep notes that the consumer goes to sleep.
func (s *Spinner) Sleep() { s.began = time.Now() }

// Woke notes how long the sleep was.
func (s *Spinner) Woke() { s.on = time.Since(s.began) < s.Max }

// yield lets other goroutines run, and other processes if they are to be asked too.
func yield(processes bool) {
	runtime.Gosched()
	if processes {
		_, _, _ = unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
	}
}
