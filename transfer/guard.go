package transfer

import (
	"sync"
	"sync/atomic"
)

// guard is a lease's fence. Whoever touches the lease's blocks enters before and leaves after each nonblocking system
// call (TCP), each copied piece (local copy) or each posted write (RDMA: from posting to completion). Once it is shut
// nobody enters any more, and drained is closed when the last one inside has left.
type guard struct {
	state   atomic.Int64  // how many are inside; guardShut is added when it is shut
	stop    chan struct{} // closed when it is shut
	drained chan struct{} // closed when it is shut and empty
	once    sync.Once
}

const guardShut = 1 << 40

func newGuard() *guard {
	return &guard{stop: make(chan struct{}), drained: make(chan struct{})}
}

func (g *guard) enter() bool {
	if g.state.Add(1) < guardShut {
		return true
	}
	g.leave() // somebody else's last leave may have seen us inside: ours closes drained then
	return false
}

func (g *guard) leave() {
	if g.state.Add(-1) == guardShut {
		g.once.Do(func() { close(g.drained) })
	}
}

// shut closes the fence to newcomers. It must be called once.
func (g *guard) shut() {
	close(g.stop)
	if g.state.Add(guardShut) == guardShut {
		g.once.Do(func() { close(g.drained) })
	}
}
