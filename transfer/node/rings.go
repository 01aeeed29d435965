package node

import (
	"errors"
	"fmt"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/node/ring"
	"github.com/headrace/headrace/transfer/node/wire"
	"golang.org/x/sys/unix"
)

// engineRing is the daemon's end of an engine's ring. A goroutine of its own takes submissions; completions are put in by
// whoever brings them; a second goroutine rings the engine's doorbell, because that may block if the engine wishes so.
type engineRing struct {
	c    *conn
	mem  []byte
	sub  ring.Consumer // the taker's
	bell *ring.Listener
	spin ring.Spinner
	stop atomic.Bool
	done chan struct{} // closed when the taker has ended

	mu     sync.Mutex // a leaf, for completions
	comp   ring.Producer
	spare  uint32 // completions that are kept for refusals
	closed bool

	engineBell int
	wake       chan struct{}
	silent     chan struct{} // closed when the doorbell's goroutine has ended
}

// submissions counts how work came in. Doorbells are those rung at the engine, wakeups those that woke the daemon.
type submissions struct {
	ring, message, overflow, refused, doorbells, wakeups, spins atomic.Uint64
}

func (s *submissions) status() transfer.SubmissionStatus {
	return transfer.SubmissionStatus{
		RingPushes: s.ring.Load(), MessagePushes: s.message.Load(), RefusedPushes: s.refused.Load(), OverflowCompletions: s.overflow.Load(),
		Doorbells: s.doorbells.Load(), Wakeups: s.wakeups.Load(), Spins: s.spins.Load(),
	}
}

// setupRing takes over the descriptors, also when it fails.
func (c *conn) setupRing(fds []int, m wire.SetupRing) error {
	memory, bell, engineBell := fds[0], fds[1], fds[2]
	defer func() { _ = unix.Close(memory) }()
	refuse := func(err error) error {
		for _, fd := range []int{bell, engineBell} {
			if fd >= 0 {
				_ = unix.Close(fd)
			}
		}
		return err
	}
	if c.ring.Load() != nil {
		return refuse(wire.Errorf(wire.CodeState, "the ring is set up already: one a connection"))
	}
	for _, fd := range []int{bell, engineBell} {
		if err := ring.CheckBell(fd); err != nil {
			return refuse(wire.Errorf(wire.CodeDescriptor, "%v", err))
		}
	}
	mem, err := ring.Map(memory, m.Submissions, m.Completions)
	if err != nil {
		return refuse(wire.Errorf(wire.CodeRegion, "%v", err))
	}
	r := &engineRing{c: c, mem: mem, engineBell: engineBell, spare: m.Submissions, done: make(chan struct{}), wake: make(chan struct{}, 1), silent: make(chan struct{})}
	r.spin.Max = max(c.s.cfg.Spin, 0)
	if r.bell, err = ring.Listen(bell); err != nil {
		bell = -1
		return refuse(errors.Join(err, unix.Munmap(mem)))
	}
	r.sub, r.comp = ring.DaemonEnd(mem, m.Submissions, m.Completions)
	c.ring.Store(r)
	go r.run()
	go r.ringBell()
	return nil
}

func (r *engineRing) run() {
	defer close(r.done)
	if err := r.take(); err != nil {
		r.broken(err)
	}
}

func (r *engineRing) broken(err error) {
	r.c.end(wire.Errorf(wire.CodeFraming, "%v", err), false)
}

// take works submissions off until it is stopped.
func (r *engineRing) take() (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() { err = errors.Join(err, fault(recover())) }()
	var s ring.Submission
	for !r.stop.Load() {
		n, err := r.drain(&s)
		if err != nil {
			return err
		}
		if n > 0 {
			r.c.heard.Store(true)
			continue
		}
		if r.spin.Spin(func() bool { return !r.sub.Empty() }) {
			r.c.subs.spins.Add(1)
			continue
		}
		r.spin.Sleep()
		if r.bell.Wait(func() bool { return r.stop.Load() || !r.sub.Sleep() }) != nil {
			return nil // stopped
		}
		r.spin.Woke()
		r.c.subs.wakeups.Add(1)
		r.sub.Awake()
	}
	return nil
}

// fault turns a fault in shared memory (see transfer.Region) into an error; anything else stays a panic.
func fault(recovered any) error {
	if recovered == nil {
		return nil
	}
	if f, is := recovered.(interface {
		error
		Addr() uintptr
	}); is {
		return fmt.Errorf("touch the ring: %w", f)
	}
	panic(recovered)
}

// batch bounds what is taken before the taker looks whether it is to stop.
const batch = 64

func (r *engineRing) drain(s *ring.Submission) (n int, err error) {
	var e [ring.EntrySize]byte
	var units [ring.UnitsMax]transfer.Unit
	for ; n < batch; n++ {
		ok, err := r.sub.Get(&e)
		if !ok {
			return n, err
		}
		if err := s.Parse(&e); err != nil {
			return n, err
		}
		for i, u := range s.Units {
			units[i] = transfer.Unit(u)
		}
		r.c.subs.ring.Add(1)
		push := r.c.client.Push
		if r.sub.Empty() { // else there is work for several lanes
			push = r.c.client.PushNow
		}
		if err := push(transfer.LeaseID(s.Lease), units[:len(s.Units)], s.Seq); err != nil {
			r.c.subs.refused.Add(1)
			if !r.complete(ring.Completion{Status: uint16(refusal(err).Code), Lease: s.Lease, Seq: s.Seq}, 0) {
				return n, fmt.Errorf("%w: no room for a refusal: take completions", ring.ErrBroken)
			}
		}
	}
	return n, nil
}

// pushed reports a push that landed; false means that it must go as a message. It does not block.
func (r *engineRing) pushed(ev *transfer.Event) bool {
	if r.complete(ring.Completion{Lease: uint64(ev.Lease), Seq: ev.Seq, Nonce: ev.Nonce}, r.spare) {
		return true
	}
	r.c.subs.overflow.Add(1)
	return false
}

// complete puts a completion in, where more than spare entries are free.
func (r *engineRing) complete(c ring.Completion, spare uint32) bool {
	var e [ring.EntrySize]byte
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return true // nobody is there to hear of it
	}
	c.After = r.c.events.Load()
	c.Put(&e)
	ok, wanted, err := r.put(&e, spare)
	if err != nil {
		r.broken(err)
		return true
	}
	if wanted {
		select {
		case r.wake <- struct{}{}:
		default:
		}
	}
	return ok
}

func (r *engineRing) put(e *[ring.EntrySize]byte, spare uint32) (ok, wanted bool, err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() { err = errors.Join(err, fault(recover())) }()
	if spare > 0 && r.comp.Room() <= spare {
		return false, false, nil
	}
	if ok, err = r.comp.Put(e); ok {
		wanted = r.comp.Wanted()
	}
	return ok, wanted, err
}

func (r *engineRing) ringBell() {
	defer close(r.silent)
	for range r.wake {
		if err := ring.Ring(r.engineBell); err != nil {
			r.broken(err)
			return
		}
		r.c.subs.doorbells.Add(1)
	}
}

// close is called when the engine is fenced.
func (r *engineRing) close() {
	r.stop.Store(true)
	r.bell.Stop()
	<-r.done
	r.mu.Lock()
	r.closed = true
	close(r.wake)
	r.mu.Unlock()
	if !r.silence() {
		r.c.s.log.Error("an engine keeps a thread blocked in its doorbell", "engine", r.c.id, "pid", r.c.cred.Pid)
	}
	_ = unix.Munmap(r.mem)
	_ = r.bell.Close()
}

// silence ends the doorbell's goroutine, which a hostile engine may have made block, and reports whether it did.
func (r *engineRing) silence() bool {
	t := time.NewTicker(time.Millisecond)
	defer t.Stop()
	for range 1000 {
		select {
		case <-r.silent:
			_ = unix.Close(r.engineBell)
			return true
		case <-t.C:
			ring.Silence(r.engineBell)
		}
	}
	return false
}
