package kernel

import (
	"runtime"
	"sync"
	"sync/atomic"
)

// Pool runs numbered tasks on a fixed set of threads: the caller's own and n-1 helpers. Helpers spin for a moment
// after a run, because the next one of a forward pass follows within microseconds, and then park.
// Runs do not overlap: a Pool has one caller at a time.
type Pool struct {
	threads int
	fn      func(thread, task int)
	tasks   int64
	next    atomic.Int64
	// state is epoch<<32 | open | waiting | helpers inside the run. Helpers enter only while open is set, so the
	// caller never waits for one that the system has not scheduled.
	state  atomic.Uint64
	parked atomic.Int64
	wake   chan struct{}
	done   chan struct{}
	closed atomic.Bool
	wg     sync.WaitGroup
}

const (
	poolOpen    = 1 << 31
	poolWaiting = 1 << 30
	poolCount   = poolWaiting - 1
	// spinTurns of PAUSE are about 20 us on current processors.
	spinTurns = 600
	// lateTurns are for a helper that was just woken.
	lateTurns = 30
	// pausesPerTurn keeps a turn long enough that the spinner hardly disturbs the line it watches.
	pausesPerTurn = 1
)

// NewPool starts threads-1 helpers; threads < 1 means one for every processor Go may use, and more than those are
// never started: a spinning helper without a processor would only be in the way.
func NewPool(threads int) *Pool {
	if most := runtime.GOMAXPROCS(0); threads < 1 || threads > most {
		threads = most
	}
	p := &Pool{threads: threads, wake: make(chan struct{}, threads), done: make(chan struct{}, 1)}
	for i := 1; i < threads; i++ {
		p.wg.Add(1)
		go p.help(i)
	}
	return p
}

// Threads is the number of threads; tasks see thread numbers below it.
func (p *Pool) Threads() int { return p.threads }

// Close ends the helpers and waits for them. No Run may be going on or follow.
func (p *Pool) Close() {
	if !p.closed.Swap(true) {
		close(p.wake)
	}
	p.wg.Wait()
}

// Run calls fn(thread, task) for every task below tasks and returns when all are done.
func (p *Pool) Run(tasks int, fn func(thread, task int)) {
	if p.threads == 1 || tasks <= 1 {
		for i := range tasks {
			fn(0, i)
		}
		return
	}
	p.fn = fn
	atomic.StoreInt64(&p.tasks, int64(tasks))
	p.next.Store(0)
	p.state.Store((p.state.Load()>>32+1)<<32 | poolOpen)
	p.wakeParked(min(p.threads, tasks) - 1)
	p.work(0)
	p.finish()
	p.fn = nil
}

func (p *Pool) wakeParked(most int) {
	for range most {
		n := p.parked.Load()
		if n <= 0 {
			return
		}
		if p.parked.CompareAndSwap(n, n-1) {
			p.wake <- struct{}{}
		}
	}
}

func (p *Pool) work(thread int) {
	for {
		i := p.next.Add(1) - 1
		if i >= p.tasks {
			return
		}
		p.fn(thread, int(i))
	}
}

// finish closes the run to latecomers and waits for the helpers inside.
func (p *Pool) finish() {
	for {
		s := p.state.Load()
		if p.state.CompareAndSwap(s, s&^poolOpen) {
			break
		}
	}
	for range spinTurns {
		if p.state.Load()&poolCount == 0 {
			return
		}
		pause(pausesPerTurn)
	}
	for {
		s := p.state.Load()
		if s&poolCount == 0 {
			return
		}
		if p.state.CompareAndSwap(s, s|poolWaiting) {
			<-p.done
			return
		}
	}
}

// enter joins the open run, if there is one.
func (p *Pool) enter() bool {
	for {
		s := p.state.Load()
		if s&poolOpen == 0 {
			return false
		}
		if p.state.CompareAndSwap(s, s+1) {
			return true
		}
	}
}

func (p *Pool) leave() {
	if s := p.state.Add(^uint64(0)); s&poolWaiting != 0 && s&poolCount == 0 {
		p.done <- struct{}{}
	}
}

// seen says whether a run is open that has tasks left.
func (p *Pool) seen() bool {
	return p.state.Load()&poolOpen != 0 && p.next.Load() < atomic.LoadInt64(&p.tasks)
}

func (p *Pool) help(thread int) {
	defer p.wg.Done()
	turns := spinTurns
	for !p.closed.Load() {
		if p.spin(turns) && p.enter() {
			p.work(thread)
			p.leave()
			turns = spinTurns
			continue
		}
		// Whoever is woken too late for the run, because others want the processor, must not burn it as well.
		turns = lateTurns
		p.park()
	}
}

// spin waits a moment for a run.
func (p *Pool) spin(turns int) bool {
	for range turns {
		if p.seen() {
			return true
		}
		pause(pausesPerTurn)
	}
	return false
}

// park sleeps until a run wakes it. A run that opened in between either sees parked and sends a token, or is seen
// here; then the own entry is taken back, unless a run has already done so and its token is on the way.
func (p *Pool) park() {
	p.parked.Add(1)
	if p.seen() {
		for {
			n := p.parked.Load()
			if n <= 0 {
				break
			}
			if p.parked.CompareAndSwap(n, n-1) {
				return
			}
		}
	}
	<-p.wake
}
