package transfer

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/headrace/headrace/transfer/handshake"
)

// A daemon that gives way to a successor drains: from one moment on, the cut, it takes no new ticket, neither from its
// engines (ErrDraining) nor from peers (AGAIN: present it to my successor). What was taken before ends here. So the two
// never have to agree on a ticket: the book of used ones, as it is at the cut, is all that the successor must know.

// ErrDraining says that the daemon gives way to its successor: present the ticket over a new connection.
var ErrDraining = errors.New("the node daemon is giving way to its successor")

// errLeaving is ErrDraining of a peer: its channel carries no new ticket.
var errLeaving = fmt.Errorf("%w: the peer's daemon is giving way to its successor", ErrChannel)

// Cut is what a successor must know: who is attached, and which tickets are used.
type Cut struct {
	Engines      []string     `json:"engines"`
	Tickets      []UsedTicket `json:"tickets"`
	RateLimitBps int64        `json:"rate_limit_bytes_per_s"`
}

// UsedTicket is an entry of the book.
type UsedTicket struct {
	Nonce      []byte `json:"nonce"`
	DeadlineMS int64  `json:"deadline_ms"`
	Word       string `json:"word,omitempty"` // why it was given up before it was presented, "" for one that was presented
}

// drainState is an engine's part in a hand-over. Both mutexes are leaves but for the ticket book under gate.
type drainState struct {
	gate     sync.RWMutex // held for reading while a ticket is taken
	draining bool

	mu       sync.Mutex // guards what follows
	accept   chan struct{}
	accepts  bool // accept is closed: connections may be accepted
	expected map[string]struct{}
	arrived  chan struct{} // closed when the predecessor's engines are here, or were waited for long enough
	here     bool          // arrived is closed
	wait     *time.Timer
}

func (d *drainState) init(successor bool) {
	d.accept, d.arrived = make(chan struct{}), make(chan struct{})
	if !successor {
		d.release()
	}
}

// release lets everything begin.
func (d *drainState) release() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.here {
		d.here = true
		close(d.arrived)
	}
	if !d.accepts {
		d.accepts = true
		close(d.accept)
	}
}

// arrive notes that an engine has attached.
func (d *drainState) arrive(engine string) {
	d.mu.Lock()
	_, awaited := d.expected[engine]
	delete(d.expected, engine)
	last := awaited && len(d.expected) == 0
	d.mu.Unlock()
	if last {
		d.release()
	}
}

// Draining tells whether the engine gives way.
func (e *Engine) Draining() bool {
	e.drain.gate.RLock()
	defer e.drain.gate.RUnlock()
	return e.drain.draining
}

// Leases counts the living ones.
func (e *Engine) Leases() int { return int(e.leases.Load()) }

// Drain makes the cut: when it returns no ticket is taken here any more and no connection accepted, until Resume.
func (e *Engine) Drain() Cut {
	e.drain.gate.Lock()
	e.drain.draining = true
	cut := Cut{Tickets: e.book.used(e.now()), RateLimitBps: e.rate.get()}
	e.drain.gate.Unlock()
	e.stopAccepting() // first: who is sent on dials at once, and a connection accepted here is refused
	e.sendParkedOn()
	e.mu.Lock()
	for id := range e.clients {
		cut.Engines = append(cut.Engines, id)
	}
	e.mu.Unlock()
	slices.Sort(cut.Engines)
	return cut
}

// stopAccepting leaves connections to the successor, or to Resume: they wait in the listener's queue.
func (e *Engine) stopAccepting() {
	e.drain.mu.Lock()
	if e.drain.accepts {
		e.drain.accepts = false
		e.drain.accept = make(chan struct{})
	}
	e.drain.mu.Unlock()
	if l, ok := e.listener.(deadliner); ok {
		_ = l.SetDeadline(time.Unix(1, 0))
	}
}

type deadliner interface{ SetDeadline(time.Time) error }

// Resume takes Drain back: there is no successor after all.
func (e *Engine) Resume() {
	e.drain.gate.Lock()
	e.drain.draining = false
	e.drain.gate.Unlock()
	if l, ok := e.listener.(deadliner); ok {
		_ = l.SetDeadline(time.Time{})
	}
	e.drain.release()
}

// Succeed begins the life of an engine with Config.Successor: it knows the used tickets before it takes any, and waits
// for the predecessor's engines before peers may present to them, at most so long: one may have died in between.
func (e *Engine) Succeed(cut Cut, atMost time.Duration) {
	e.book.load(cut.Tickets, e.now())
	if cut.RateLimitBps > 0 {
		e.rate.set(cut.RateLimitBps)
	}
	e.mu.Lock()
	expected := make(map[string]struct{})
	for _, id := range cut.Engines {
		if e.clients[id] == nil {
			expected[id] = struct{}{}
		}
	}
	e.mu.Unlock()
	if len(expected) == 0 {
		e.drain.release()
		return
	}
	e.drain.mu.Lock()
	e.drain.expected = expected
	e.drain.wait = time.AfterFunc(atMost, e.drain.release)
	e.drain.mu.Unlock()
}

// GiveWay tells every peer to present nothing here any more, and returns when each has understood, or ctx ended: until
// then a ticket may be on its way on a channel, and the channel must not close.
func (e *Engine) GiveWay(ctx context.Context) {
	e.mu.Lock()
	channels := make([]*channel, 0, len(e.channels))
	for c := range e.channels {
		channels = append(channels, c)
	}
	e.mu.Unlock()
	for _, c := range channels {
		c.out.send(finishFrame(newFrame(frameDrain, roleNone, 0, 0)))
		c.out.send(stampFrame(framePing, drainStamp))
	}
	for _, c := range channels {
		select {
		case <-c.understood:
		case <-c.gone:
		case <-ctx.Done():
			return
		}
	}
}

// drainStamp marks the ping behind DRAIN: no clock reads it.
const drainStamp = math.MaxUint64

// mayAccept waits until connections may be accepted; false when the engine closes.
func (e *Engine) mayAccept() bool {
	e.drain.mu.Lock()
	ch := e.drain.accept
	e.drain.mu.Unlock()
	select {
	case <-ch:
		return true
	case <-e.ctx.Done():
		return false
	}
}

func (e *Engine) acceptPaused() bool {
	e.drain.mu.Lock()
	defer e.drain.mu.Unlock()
	return !e.drain.accepts
}

// awaitEngines waits until a predecessor's engines are attached here too.
func (e *Engine) awaitEngines(ctx context.Context) {
	select {
	case <-e.drain.arrived:
	case <-ctx.Done():
	}
}

// leave notes that the peer gives way.
func (c *channel) leave() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.leaving = true
}

// peerUnderstood is called by the reader alone.
func (c *channel) peerUnderstood() {
	select {
	case <-c.understood:
	default:
		close(c.understood)
	}
}

// presentable tells whether new tickets may be presented on the channel.
func (c *channel) presentable() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.ready && !c.closed && !c.leaving && !c.lanes.worn()
}

// againMax bounds how often one ticket is presented anew: each time stands for a daemon that was replaced just then.
const againMax = 16

// presentAgain takes a lease off this channel, whose other end did not take its ticket, and presents it to the successor.
func (c *channel) presentAgain(l *sourceLease) {
	c.mu.Lock()
	l.mu.Lock()
	unpresented := l.state == LeaseOpen && l.ch == c
	if unpresented {
		l.ch = nil
		delete(c.sources, l.id)
		l.moves++
	}
	tries := l.moves
	l.mu.Unlock()
	c.mu.Unlock()
	if !unpresented {
		return
	}
	c.e.totals.again.Add(1)
	c.e.wg.Go(func() { // the channel's reader keeps the group from being done
		if tries > againMax {
			l.fail("present ticket: %d daemons in a row gave way to their successors", tries)
			return
		}
		l.present()
	})
}

// moved gives a lease back to its engine: it was presented to nobody, and the successor will take it.
func (l *sourceLease) moved() {
	l.finish(outcome{state: LeaseMoved, kind: EventRefused, reason: ErrDraining.Error(), quiet: true})
}

// refuseControl answers whether a control connection comes too late: its caller is to dial again.
func (e *Engine) refuseControl(h *handshake.Hello) bool {
	return h.Kind == handshake.KindControl && e.Draining()
}

var _ deadliner = (*net.TCPListener)(nil)
