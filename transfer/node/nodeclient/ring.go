package nodeclient

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/headrace/headrace/internal/memfd"
	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/node/ring"
	"github.com/headrace/headrace/transfer/node/wire"
	"golang.org/x/sys/unix"
)

// What the client's ring holds. A push that finds the queue full goes as a message.
const (
	ringSubmissions = 256
	ringCompletions = 1024
)

// ringEnd is the client's end of its ring.
type ringEnd struct {
	mem  *memfd.Memory
	bell *ring.Listener // rung by the daemon
	spin ring.Spinner
	stop atomic.Bool

	mu         sync.Mutex // a leaf, for submissions
	sub        ring.Producer
	daemonBell int
	closed     bool

	takeMu sync.Mutex // orders completions with events; events.mu is locked under it
	comp   ring.Consumer
	events uint32 // read from the socket
}

func newRingEnd(spin time.Duration) (r *ringEnd, err error) {
	mem, err := memfd.Create("headrace-ring", ring.Size(ringSubmissions, ringCompletions))
	if err != nil {
		return nil, err
	}
	r = &ringEnd{mem: mem, daemonBell: -1, spin: ring.Spinner{Max: spin}}
	if err = ring.Init(mem.Bytes(), ringSubmissions, ringCompletions); err == nil {
		r.sub, r.comp = ring.EngineEnd(mem.Bytes(), ringSubmissions, ringCompletions)
		r.daemonBell, err = ring.NewBell()
	}
	own := -1
	if err == nil {
		own, err = ring.NewBell()
	}
	if err == nil {
		r.bell, err = ring.Listen(own)
	}
	if err != nil {
		r.close()
		return nil, err
	}
	return r, nil
}

// close is called when nobody takes completions any more.
func (r *ringEnd) close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return
	}
	r.closed = true
	if r.daemonBell >= 0 {
		_ = unix.Close(r.daemonBell)
	}
	if r.bell != nil {
		_ = r.bell.Close()
	}
	_ = r.mem.Close()
}

// setupRing offers the daemon a ring. One that does not know rings, or takes none, gets messages: that is no error.
func (c *Client) setupRing(ctx context.Context) error {
	r, err := newRingEnd(c.opts.Spin)
	if err != nil {
		c.log.Warn("cannot make a ring: pushes go as messages", "err", err)
		return nil
	}
	var bell int
	if err = r.bell.Control(func(fd int) (err error) { bell, err = dup(fd); return err }); err == nil {
		// The reader must know the ring before the daemon may use it.
		c.ring.Store(r)
		_, err = c.value(ctx, "set up ring", wire.SetupRing{Submissions: ringSubmissions, Completions: ringCompletions}, r.mem.FD(), r.daemonBell, bell)
		_ = unix.Close(bell)
	}
	if err != nil {
		var refused *Refused
		if !errors.As(err, &refused) {
			return err
		}
		c.log.Info("the node daemon takes no ring: pushes go as messages", "err", err)
		return nil
	}
	c.pushes.Store(r)
	c.wg.Go(func() { c.complete(r) })
	return nil
}

// Submission says how small pushes go: ring or message.
func (c *Client) Submission() string {
	if c.pushes.Load() != nil {
		return "ring"
	}
	return "message"
}

// submit puts a push into the ring; false means that it must go as a message.
func (r *ringEnd) submit(id transfer.LeaseID, units []transfer.Unit, seq uint64) (bool, error) {
	if len(units) == 0 || len(units) > ring.UnitsMax {
		return false, nil
	}
	var u [ring.UnitsMax]ring.Unit
	for i := range units {
		u[i] = ring.Unit(units[i])
	}
	s := ring.Submission{Lease: uint64(id), Seq: seq, Units: u[:len(units)]}
	var e [ring.EntrySize]byte
	s.Put(&e)
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return false, nil
	}
	ok, err := r.sub.Put(&e)
	if ok && r.sub.Wanted() {
		err = ring.Ring(r.daemonBell)
	}
	return ok, err
}

// complete takes completions and delivers them, until the client ends.
func (c *Client) complete(r *ringEnd) {
	stop := make(chan struct{})
	defer close(stop)
	go func() {
		select {
		case <-c.done:
			r.stop.Store(true)
			r.bell.Stop()
		case <-stop:
		}
	}()
	for !r.stop.Load() {
		n, err := c.drain(r)
		if err != nil {
			c.fail(fmt.Errorf("read from node daemon: %w", err))
			return
		}
		if n > 0 {
			c.events.flush(c.deliver) // here and now: a goroutine less to wake
			continue
		}
		if r.spin.Spin(r.ready) {
			continue
		}
		r.spin.Sleep()
		if r.bell.Wait(func() bool { return r.stop.Load() || !r.asleep() }) != nil {
			return
		}
		r.spin.Woke()
		r.awake()
	}
}

// ready says whether a completion can be delivered. Those that follow an event which has not been read yet wait for it:
// the reader takes them then.
func (r *ringEnd) ready() bool {
	r.takeMu.Lock()
	defer r.takeMu.Unlock()
	return r.due()
}

func (r *ringEnd) due() bool {
	var e [ring.EntrySize]byte
	var done ring.Completion
	ok, err := r.comp.Peek(&e)
	return err != nil || ok && (done.Parse(&e) != nil || int32(done.After-r.events) <= 0)
}

func (r *ringEnd) asleep() bool {
	r.takeMu.Lock()
	defer r.takeMu.Unlock()
	return r.comp.Sleep() || !r.due()
}

func (r *ringEnd) awake() { r.comp.Awake() }

// drain moves what the ring holds to the events' queue.
func (c *Client) drain(r *ringEnd) (n int, err error) {
	r.takeMu.Lock()
	defer r.takeMu.Unlock()
	return c.drainLocked(r)
}

func (c *Client) drainLocked(r *ringEnd) (n int, err error) {
	var e [ring.EntrySize]byte
	var done ring.Completion
	for {
		ok, err := r.comp.Peek(&e)
		if err == nil && ok {
			err = done.Parse(&e)
		}
		if err != nil || !ok || int32(done.After-r.events) > 0 {
			return n, err
		}
		r.comp.Pop()
		n++
		if done.Status != 0 {
			c.refusedPush(&done)
			continue
		}
		if err := c.events.push(transfer.Event{Kind: transfer.EventPushed, State: transfer.LeaseBound, Lease: transfer.LeaseID(done.Lease), Nonce: done.Nonce, Seq: done.Seq}); err != nil {
			return n, err
		}
	}
}

// event queues an event, between the completions that belong before it and those that belong after it.
func (c *Client) event(ev transfer.Event) error {
	r := c.ring.Load()
	if r == nil {
		return c.events.push(ev)
	}
	r.takeMu.Lock()
	defer r.takeMu.Unlock()
	if _, err := c.drainLocked(r); err != nil {
		return err
	}
	if err := c.events.push(ev); err != nil {
		return err
	}
	r.events++
	_, err := c.drainLocked(r)
	return err
}

// refusedPush is told of a push that Push could not refuse. Where the lease has ended its end is the news; otherwise the
// lease cannot come to its end any more, and is revoked with the reason.
func (c *Client) refusedPush(done *ring.Completion) {
	code, id := wire.Code(done.Status), done.Lease
	if code == wire.CodeLeaseEnded || code == wire.CodeUnknownLease || code == wire.CodeShutdown {
		return
	}
	c.log.Warn("the node daemon refused a push", "lease", id, "seq", done.Seq, "code", code)
	c.wg.Go(func() {
		ctx, cancel := context.WithTimeout(context.Background(), dialTimeout)
		defer cancel()
		if err := c.Revoke(ctx, transfer.LeaseID(id), fmt.Sprintf("push %d was refused: %s", done.Seq, code)); err != nil {
			c.log.Info("revoke the lease of a refused push", "lease", id, "err", err)
		}
	})
}
