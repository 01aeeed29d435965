package rdma

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/headrace/headrace/cgo"
)

// A memory window of type 2 is a right to a part of registered memory that belongs to one queue pair and that this queue
// pair's owner can take back: once the invalidation, a request of the send queue, has completed, a write that names the
// window ends in a remote access error and both queue pairs in the error state.

const (
	windowQueue = 64   // requests about windows in a send queue, beside what sendQueue bounds
	windowsKept = 4096 // of a rail, bound to nothing, to be used again
	windowsMax  = 1 << 16
)

// windowPool holds a rail's windows. Its mutex is a leaf.
type windowPool struct {
	mu     sync.Mutex
	free   []*cgo.Window // bound to nothing
	made   int
	probed bool
	why    error // they cannot be used; since probed
}

// take gives windows that are bound to nothing.
func (p *windowPool) take(pd *cgo.PD, n, limit int) ([]*cgo.Window, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	out := make([]*cgo.Window, 0, n)
	for len(out) < n {
		if k := len(p.free); k > 0 {
			out, p.free = append(out, p.free[k-1]), p.free[:k-1]
			continue
		}
		var w *cgo.Window
		err := fmt.Errorf("there are %d memory windows already", p.made)
		if p.made < limit {
			w, err = pd.NewWindow()
		}
		if err != nil {
			p.free = append(p.free, out...)
			return nil, err
		}
		p.made++
		out = append(out, w)
	}
	return out, nil
}

// give takes a window back that is bound to nothing.
func (p *windowPool) give(w *cgo.Window) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.free) < windowsKept {
		p.free = append(p.free, w)
		return nil
	}
	p.made--
	return w.Close()
}

// drop frees a window that may be bound, which takes the right back too.
func (p *windowPool) drop(w *cgo.Window) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.made--
	return w.Close()
}

// condemn has lanes that are set up from now on do without windows.
func (p *windowPool) condemn(why error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.probed, p.why = true, why
}

func (p *windowPool) close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	var errs []error
	for _, w := range p.free {
		errs = append(errs, w.Close())
	}
	p.made -= len(p.free)
	p.free = nil
	return errors.Join(errs...)
}

// regionAccess is what a region is registered for. Relaxed ordering is not in it, and package cgo has no name for it: a
// fence rests on completions that speak for every byte before them, and only ordered writes promise that for all memory that
// a region can be (docs/architecture.md).
func (r *rail) regionAccess(readOnly, pulls bool) (a cgo.Access) {
	if pulls {
		a = cgo.RemoteRead
	}
	if readOnly {
		return a
	}
	a |= cgo.LocalWrite | cgo.RemoteWrite
	if r.attr.MemoryWindows() {
		a |= cgo.BindWindow
	}
	return a
}

// window is one of a lane's, bound for a lease or about to be.
type window struct {
	*cgo.Window
	reg       *registration
	addr, len uint64
}

// work is what a lane is to do about the windows of one lease: bind them or invalidate them.
type work struct {
	windows []*window
	bind    bool
	// Guarded by lane.mu:
	next int    // how many of the requests were posted
	end  uint64 // the last of them
	// done is closed when it was done or, with ok false, when the lane ended before.
	done chan struct{}
	ok   bool
}

// submit hands work to the lane's send queue. Windows to be bound are the lane's from then on. A lane that is failing takes
// none: then the windows are not touched, and the work is done without being ok.
func (x *lane) submit(w *work) (taken bool) {
	w.done = make(chan struct{})
	x.mu.Lock()
	if x.failing {
		x.mu.Unlock()
		close(w.done)
		return false
	}
	for _, v := range w.windows {
		if w.bind {
			x.windows[v] = struct{}{}
		}
	}
	x.works = append(x.works, w)
	err := x.postWorks()
	x.mu.Unlock()
	if err != nil {
		x.fail(err)
	}
	return true
}

// postWorks posts what there is room for. mu is held.
func (x *lane) postWorks() error {
	for _, w := range x.works {
		for ; w.next < len(w.windows); w.next++ {
			if x.failing || int(x.posted-x.completed) >= sendQueue+windowQueue {
				return nil
			}
			err := x.postWork(w.windows[w.next], w.bind, x.posted+1)
			if (errors.Is(err, syscall.ENOMEM) || errors.Is(err, syscall.EAGAIN)) && x.signalled > x.completed {
				return nil // a completion will come, and room with it
			}
			if err != nil {
				return err
			}
			x.posted++
			x.signalled, w.end = x.posted, x.posted
		}
	}
	return nil
}

func (x *lane) postWork(v *window, bind bool, id uint64) error {
	if bind {
		return x.qp.PostBind(v.Window, v.reg.mrs[x.rail.index], v.addr, v.len, cgo.RemoteWrite, id)
	}
	if n, errno := x.qp.PostSend([]cgo.WR{{ID: id, RKey: v.RKey, Op: cgo.LocalInv, Flags: cgo.Signaled}}); n != 1 {
		return fmt.Errorf("invalidate a memory window on QP %d: %w", x.qp.Num, errno)
	}
	return nil
}

// endWorks ends the work whose last request has completed, and posts what waited for room.
func (x *lane) endWorks() error {
	x.mu.Lock()
	if len(x.works) == 0 || x.failing {
		x.mu.Unlock()
		return nil
	}
	var ended []*work
	for len(x.works) > 0 && x.works[0].next == len(x.works[0].windows) && x.works[0].end <= x.completed {
		w := x.works[0]
		x.works = x.works[1:]
		w.ok = true
		for _, v := range w.windows {
			if !w.bind {
				delete(x.windows, v)
			}
		}
		ended = append(ended, w)
	}
	errs := []error{x.postWorks()}
	x.mu.Unlock()
	for _, w := range ended {
		for _, v := range w.windows {
			if !w.bind {
				errs = append(errs, x.rail.windows.give(v.Window))
				v.reg.windows.Done()
			}
		}
		close(w.done)
	}
	return errors.Join(errs...)
}

// dropWindows frees the windows of a lane that is drained, before its queue pair is, and ends the work about them.
func (x *lane) dropWindows() error {
	x.mu.Lock()
	windows, works := x.windows, x.works
	x.windows, x.works = nil, nil
	x.mu.Unlock()
	var errs []error
	for v := range windows {
		errs = append(errs, x.rail.windows.drop(v.Window))
		v.reg.windows.Done()
	}
	for _, w := range works {
		close(w.done)
	}
	return errors.Join(errs...)
}

// isSoft says that a device is a driver's own software, soft RoCE or soft iWARP.
func isSoft(device string) bool {
	path, err := filepath.EvalSymlinks(filepath.Join("/sys/class/infiniband", device))
	return err == nil && strings.Contains(path, "/virtual/")
}

// Commands of membarrier(2).
const (
	membarrierQuery  = 0
	membarrierGlobal = 1
)

// settleSoft waits until no processor is within the copy of a packet that it had begun before. A network card has placed
// what it let through when an invalidation completes. Soft RoCE (rxe_resp.c: check_rkey, then write_data_in) looks at the
// window and copies the packet, at most one MTU, without a lock between: an invalidation may complete on one processor
// while another one is within that copy. Both run where the kernel does not preempt, so that copy is over after a grace
// period of RCU, which is what this command waits for.
func settleSoft() error {
	if _, _, errno := unix.Syscall(unix.SYS_MEMBARRIER, membarrierGlobal, 0, 0); errno != 0 {
		return fmt.Errorf("wait for the processors: membarrier: %w", errno)
	}
	return nil
}

func canSettleSoft() error {
	n, _, errno := unix.Syscall(unix.SYS_MEMBARRIER, membarrierQuery, 0, 0)
	if errno != 0 || n&membarrierGlobal == 0 {
		return errors.New("this kernel has no membarrier, which a software device needs for it")
	}
	return nil
}
