package transfer

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/headrace/headrace/transfer/handshake"
)

// channel is one end of the connection of two daemons, or of a daemon with itself: a control connection, and the lanes
// of one transport; beside those of a transport over rails also some of a spare one, which carry where it has none. Three
// goroutines serve the control connection (reader, writer, ticker) and one each lane.
type channel struct {
	e          *Engine
	id         [16]byte
	conn       net.Conn
	peer       handshake.Identity
	addr       string
	dialled    bool
	local      bool // both ends are in this process
	transport  string
	why        string
	spareName  string // of the spare link's transport
	since      time.Time
	out        *outbox
	lanes      *laneSet
	gone       chan struct{} // closed when the channel is closing
	understood chan struct{} // closed when the peer has answered the ping behind DRAIN; by the reader alone
	finished   chan struct{} // closed when it is closed
	setup      setupState

	heard     atomic.Uint64 // frames of the peer
	backlog   atomic.Int64
	sent      atomic.Uint64
	landed    atomic.Uint64
	errs      atomic.Uint64
	altered   atomic.Uint64 // pieces that arrived so
	checked   atomic.Uint64 // pieces asked whether they carry a checksum
	suspect   atomic.Int64  // nanoseconds after since: until then every piece does
	redialled atomic.Uint64
	fallbacks atomic.Uint64 // times that the spare link had to carry
	rttNS     atomic.Int64
	rates     rates
	busy      busyMeter
	gauge     Gauge

	sending, receiving *Chooser

	otherEnd atomic.Pointer[channel] // of a local channel, once it was asked for

	mu      sync.Mutex
	link    Link
	ready   bool // both ends' lanes are up: tickets may be presented on it
	closed  bool
	leaving bool // the peer gives way to its successor: nothing new is presented on it
	reason  error
	spare   Link   // nil where there is none; its lanes have numbers of the same series
	spared  bool   // a lane of it was up once
	carried string // the transport that carried when that was last looked at
	lastErr error  // of the last lane that failed
	redials redialState
	sources map[LeaseID]*sourceLease
	targets map[LeaseID]*targetLease // by the source's id
	bound   map[LeaseID]*targetLease // by the target's id: what pieces name
}

// setupState is what the two ends tell each other until the lanes are up.
type setupState struct {
	open     chan openMsg
	opened   chan openedMsg
	exchange chan []byte
	streams  chan laneStream
	seen     idSet    // lanes that the other end has dialled; added to under channel.mu
	first    bool     // an EXCHANGE came; the reader's own
	news     [][]byte // for the link, before there was one; guarded by channel.mu
}

// newsMax bounds what is kept of the other end's news until there is a link to hear them.
const newsMax = 16

type laneStream struct {
	lane int
	conn net.Conn
}

// ErrChannel says that the connection to a peer is no more.
var ErrChannel = errors.New("channel died")

// ErrMemory is what a transport answers for a piece whose lent memory could not be read: the lease fails, not the lane.
// ErrRegion does the same for a region that its devices do not know.
var ErrMemory = errors.New("memory fault in a lent region")

// ErrFenced is what a transport answers for a piece whose lease was fenced before or while it was sent.
var ErrFenced = errors.New("lease is fenced")

func (e *Engine) newChannel(conn net.Conn, id [16]byte, peer handshake.Identity, addr string, dialled, local bool) *channel {
	c := &channel{
		e: e, id: id, conn: conn, peer: peer, addr: addr, dialled: dialled, local: local, since: time.Now(),
		gone: make(chan struct{}), understood: make(chan struct{}), finished: make(chan struct{}),
		sources: make(map[LeaseID]*sourceLease), targets: make(map[LeaseID]*targetLease), bound: make(map[LeaseID]*targetLease),
		setup: setupState{
			open: make(chan openMsg, 1), opened: make(chan openedMsg, 1), exchange: make(chan []byte, 1), streams: make(chan laneStream, lanesMax),
		},
		redials: redialState{kick: make(chan struct{}, 1)},
	}
	c.gauge = e.newGauge()
	c.lanes = newLaneSet(c)
	c.newMethods()
	c.out = newOutbox(e.cfg.Limits.ControlQueue, func() {
		c.closeSoon(fmt.Errorf("%w: the peer does not read control frames as fast as they come", ErrChannel))
	})
	c.out.direct = atOnce(conn)
	return c
}

// run starts the control connection's goroutines.
func (c *channel) run() {
	c.e.wg.Go(func() {
		if err := c.out.run(c.conn); err != nil {
			c.close(fmt.Errorf("%w: write control frames: %w", ErrChannel, err))
		}
	})
	c.e.wg.Go(func() {
		err := c.read()
		if errors.Is(err, ErrProtocol) {
			c.e.log.Warn("peer broke the protocol", "peer", c.peer.NodeID, "error", err)
			c.out.send(reasonFrame(frameBye, roleNone, 0, err.Error()))
		}
		c.close(fmt.Errorf("%w: %w", ErrChannel, err))
	})
	c.e.wg.Go(c.tick)
}

// use makes the lanes of a link carry pieces, and of a spare one if it is not nil. It fails when the channel closed
// meanwhile; the links are closed then.
func (c *channel) use(link, spare Link, spareName string, lanes int) error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		link.Close()
		if spare != nil {
			spare.Close()
		}
		return c.cause()
	}
	c.link, c.spare, c.spareName = link, spare, spareName
	c.lanes.start(link, spare, lanes)
	news := c.setup.news
	c.setup.news = nil
	c.mu.Unlock()
	for _, b := range news {
		if err := c.hear(b); err != nil {
			return err
		}
	}
	return nil
}

func (c *channel) setReady() {
	c.mu.Lock()
	c.ready = true
	c.mu.Unlock()
}

func (c *channel) usable() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.ready && !c.closed
}

func (c *channel) currentLink() Link {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.link
}

// oneSided says whether pieces may arrive that no guard is asked for.
func (c *channel) oneSided() bool {
	if c == nil {
		return false
	}
	link := c.currentLink()
	return link != nil && link.OneSided()
}

func (c *channel) cause() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.reason == nil {
		return ErrChannel
	}
	return c.reason
}

// addSource presents a lease on this channel. It fails when the channel closed; it does nothing when the lease ended.
func (c *channel) addSource(l *sourceLease, m *presentMsg) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.closed:
		return c.reason
	case c.leaving:
		return errLeaving
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.state == LeaseOpen {
		l.ch = c
		c.sources[l.id] = l
		c.out.send(m.frame(l.id))
	}
	return nil
}

// drop forgets a lease.
func (c *channel) drop(l *lease) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if l.src != nil {
		l.mu.Lock()
		if l.geom.pairs != nil {
			c.backlog.Add(-int64(l.src.unsent()))
		}
		l.mu.Unlock()
		delete(c.sources, l.id)
		return
	}
	delete(c.targets, l.dst.sourceID)
	delete(c.bound, l.id)
}

// force makes one-sided lanes stop touching a lease's memory: those that carry it are aborted. Lanes that are not
// one-sided ask the lease's guard, which is shut.
func (c *channel) force(l *lease) {
	cause := fmt.Errorf("fence lease %d: the other end did not stop within %v", l.id, c.e.cfg.FenceGrace)
	link := c.currentLink()
	if l.src != nil {
		for _, lane := range c.lanes.carrying(l.src) {
			link.Abort(lane, cause)
		}
		return
	}
	c.forceTarget(l.dst, link, cause)
}

// landedHere tells the source of a local channel that a piece landed, without the control connection: four goroutines less
// have to run until its engine knows. No lock is held.
func (c *channel) landedHere(lease LeaseID, piece uint32) {
	other := c.otherEnd.Load()
	if other == nil {
		if other = c.e.otherEndOf(c); other == nil {
			return // it is closing
		}
		c.otherEnd.Store(other)
	}
	other.mu.Lock()
	src := other.sources[lease]
	other.mu.Unlock()
	if src != nil {
		src.landed([]uint32{piece})
	}
}

// laneDown is told by the transport. What the lane carried goes to the others. Without any of its own the channel is dead,
// unless there is a spare link to go on with.
func (c *channel) laneDown(lane int, err error) {
	if lane < 0 || lane >= laneIDsMax {
		return
	}
	news, left := c.lanes.down(lane)
	if !news {
		return
	}
	c.mu.Lock()
	c.lastErr = err
	closing, leaving, spared := c.closed, c.leaving, c.spare != nil && !c.lanes.isBarred()
	var sources []*sourceLease
	var targets []*targetLease
	for _, l := range c.sources {
		sources = append(sources, l)
	}
	for _, l := range c.bound {
		targets = append(targets, l)
	}
	c.mu.Unlock()
	if closing {
		return
	}
	if !leaving { // else that is how its end begins
		c.errs.Add(1)
		c.e.log.Warn("lane failed", "peer", c.peer.NodeID, "transport", c.transport, "lane", lane, "left", left, "error", err)
	}
	if left <= 0 && !spared {
		c.closeSoon(fmt.Errorf("%w: its last lane failed: %w", ErrChannel, err))
		return
	}
	c.noteCarrier()
	if left <= 0 {
		c.redialNow()
	} else {
		c.redialSoon()
	}
	for _, l := range sources {
		l.laneDown(lane)
	}
	for _, l := range targets {
		l.mu.Lock()
		l.check()
		l.mu.Unlock()
	}
}

// closeSoon is close for who must not wait. The channel's own goroutines keep the engine's group from being done.
func (c *channel) closeSoon(cause error) { c.e.wg.Go(func() { c.close(cause) }) }

// close ends the channel and its leases, and waits for its lanes. The first cause counts.
func (c *channel) close(cause error) {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		<-c.finished
		return
	}
	c.closed, c.reason = true, cause
	link, spare, ready, leaving := c.link, c.spare, c.ready, c.leaving
	var leases []*lease
	for _, l := range c.sources {
		leases = append(leases, &l.lease)
	}
	for _, l := range c.targets {
		leases = append(leases, &l.lease)
	}
	c.mu.Unlock()
	close(c.gone)
	c.leaveParked()
	if ready && !leaving && !errors.Is(cause, ErrClosed) {
		c.errs.Add(1)
		c.e.totals.died.Add(1)
		c.e.log.Warn("channel died", "peer", c.peer.NodeID, "addr", c.addr, "error", cause, "leases", len(leases))
	}
	c.lanes.close()
	var fences sync.WaitGroup
	for _, l := range leases {
		fences.Go(func() { l.fail("channel to %s: %v", c.peer.NodeID, cause) })
	}
	fences.Wait()
	c.out.close()
	select { // let the writer say good-bye, if the peer listens
	case <-c.out.done:
	case <-time.After(100 * time.Millisecond):
	}
	c.conn.Close()
	for _, l := range [...]Link{link, spare} {
		if l != nil {
			l.Close()
		}
	}
	c.lanes.wg.Wait()
	c.gauge.Close()
	c.e.forget(c)
	c.drainStreams()
	close(c.finished)
}

// drainStreams closes lanes that were dialled and never taken.
func (c *channel) drainStreams() {
	for {
		select {
		case s := <-c.setup.streams:
			s.conn.Close()
		default:
			return
		}
	}
}

// setupFor is what the transport gets.
func (c *channel) setupFor(lanes int) *Setup {
	return &Setup{
		Channel: c.id, Lanes: lanes, Target: c, Pauses: c.e.cfg.Pauses, LaneDown: c.laneDown, Sending: c.sending, Receiving: c.receiving,
		Observe: c.gauge.Lane,
		Exchange: func(ctx context.Context, local []byte) ([]byte, error) {
			if len(local) > ExchangeMax {
				return nil, fmt.Errorf("%w: exchange of %d bytes, at most %d", ErrLimit, len(local), ExchangeMax)
			}
			c.out.send(finishFrame(append(newFrame(frameExchange, roleNone, 0, len(local)), local...)))
			return await(ctx, c, c.setup.exchange)
		},
		Spared: c.spareFor() != nil, RailsChanged: c.redialNow,
		Tell: func(news []byte) {
			c.out.send(finishFrame(append(newFrame(frameExchange, roleNone, 0, len(news)), news...)))
		},
		DialStream: func(ctx context.Context, lane int) (net.Conn, error) {
			return c.e.dialLane(ctx, c, handshake.KindLane, lane)
		},
		AcceptStream: func(ctx context.Context) (int, net.Conn, error) {
			s, err := await(ctx, c, c.setup.streams)
			return s.lane, s.conn, err
		},
	}
}

// await receives from ch until ctx or the channel ends.
func await[T any](ctx context.Context, c *channel, ch chan T) (v T, err error) {
	select {
	case v = <-ch:
	case <-ctx.Done():
		err = ctx.Err()
	case <-c.gone:
		err = c.cause()
	}
	return v, err
}
