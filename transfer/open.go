package transfer

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"slices"
	"time"

	"github.com/headrace/headrace/transfer/handshake"
)

// dialCall is one attempt to open a channel, shared by all who want it.
type dialCall struct {
	done chan struct{}
	ch   *channel
	err  error
}

// openTries is how often a channel is dialled when its peer is replaced meanwhile: its control connection may reach the
// old daemon and its lanes the new one.
const openTries = 3

// channelTo gives a usable channel to a node, opening one if there is none.
func (e *Engine) channelTo(ctx context.Context, node, addr string) (*channel, error) {
	e.mu.Lock()
	if e.closed {
		e.mu.Unlock()
		return nil, ErrClosed
	}
	for c := range e.channels {
		if c.peer.NodeID == node && c.presentable() {
			e.mu.Unlock()
			return c, nil
		}
	}
	if s := e.skewed[node]; s != nil && time.Now().Before(s.until) {
		e.mu.Unlock()
		return nil, s.err
	}
	call := e.dials[node]
	if call == nil {
		call = &dialCall{done: make(chan struct{})}
		e.dials[node] = call
		e.wg.Go(func() {
			for range openTries {
				if call.ch, call.err = e.open(node, addr); !errors.Is(call.err, handshake.ErrSuccessor) {
					break
				}
			}
			e.mu.Lock()
			e.noteSkew(node, call.err)
			e.noteFault(node, addr, call.err)
			delete(e.dials, node)
			e.mu.Unlock()
			close(call.done)
		})
	}
	e.mu.Unlock()
	select {
	case <-call.done:
		return call.ch, call.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// skewPause is how long a peer that speaks no version of ours is not dialled again: it will not change by itself.
const skewPause = 10 * time.Second

// skewedMax bounds how many such peers are remembered.
const skewedMax = 1024

type skewedPeer struct {
	err          error
	since, until time.Time
}

// noteSkew remembers a peer with which there is no common version, or forgets it. The caller holds e.mu.
func (e *Engine) noteSkew(node string, err error) {
	old := e.skewed[node]
	if !errors.Is(err, ErrVersion) {
		delete(e.skewed, node)
		return
	}
	e.totals.skews.Add(1)
	now := time.Now()
	if old == nil {
		if len(e.skewed) >= skewedMax {
			return
		}
		old = &skewedPeer{since: now}
		e.log.Error("peer cannot be used", "peer", node, "error", err)
	}
	e.skewed[node] = &skewedPeer{err: err, since: old.since, until: now.Add(skewPause)}
}

// open dials a node over the transports that both ends can use, in the order of preference.
func (e *Engine) open(node, addr string) (*channel, error) {
	ctx, cancel := context.WithTimeout(e.ctx, e.cfg.DialTimeout)
	defer cancel()
	self := node == e.cfg.NodeID
	var tried []error
	for _, t := range e.usable {
		if t.Local() && !self {
			continue
		}
		why := fmt.Sprintf("first usable of %v at both ends", e.names)
		if t.Local() {
			why = "both engines are attached to this daemon"
		} else if self && addr == "" {
			addr = e.DataAddr()
		}
		if len(tried) > 0 {
			why += fmt.Sprintf("; before it: %v", errors.Join(tried...))
		}
		c, err := e.openOver(ctx, t, node, addr, why)
		if err == nil {
			return c, nil
		}
		tried = append(tried, fmt.Errorf("open %s channel to %s at %s: %w", t.Name(), node, addr, err))
		if ctx.Err() != nil {
			break
		}
	}
	if len(tried) == 0 {
		return nil, fmt.Errorf("open channel to %s: %w: none of this daemon reaches it: %s", node, errNoTransport, e.transportWords())
	}
	return nil, errors.Join(tried...)
}

func (e *Engine) openOver(ctx context.Context, t Transport, node, addr, why string) (*channel, error) {
	var id [16]byte
	rand.Read(id[:])
	conn, err := e.dialControl(ctx, t.Local(), addr)
	if err != nil {
		return nil, err
	}
	var peer handshake.Identity
	err = withDeadline(ctx, conn, e.cfg.DialTimeout, func() (err error) {
		peer, err = handshake.Dial(conn, e.cfg.ClusterKey, e.identity(), handshake.KindControl, 0, id)
		return err
	})
	if err == nil && peer.NodeID != node {
		err = fmt.Errorf("%w: node %q answers there", ErrWrongTicket, peer.NodeID)
	}
	if err == nil && !slices.Contains(peer.Transports, t.Name()) {
		err = fmt.Errorf("%w: %w: the peer can use %v only", ErrHandshake, errNoTransport, peer.Transports)
	}
	if err != nil {
		conn.Close()
		return nil, err
	}
	c := e.newChannel(conn, id, peer, addr, true, t.Local())
	c.transport, c.why = t.Name(), why
	if err := e.remember(c); err != nil {
		conn.Close()
		return nil, err
	}
	c.run()
	if err := c.openLanes(ctx, t, e.cfg.Lanes); err != nil {
		c.close(err)
		return nil, err
	}
	c.setReady()
	c.ping()
	c.noteCarrier()
	c.redialNow() // lanes that could not be had at once, and the spare ones
	e.totals.opened.Add(1)
	e.log.Info("channel is open", "peer", node, "addr", addr, "transport", t.Name(), "why", why, "lanes", c.lanes.up.Load())
	return c, nil
}

// openLanes is the dialling end's set-up.
func (c *channel) openLanes(ctx context.Context, t Transport, lanes int) error {
	c.out.send(openMsg{transport: t.Name(), lanes: uint32(lanes)}.frame())
	link, err := t.Dial(ctx, c.setupFor(lanes))
	if err != nil {
		return fmt.Errorf("set up lanes: %w", err)
	}
	m, err := await(ctx, c, c.setup.opened)
	if err == nil && m.lanes != uint32(lanes) {
		err = fmt.Errorf("%w: the peer refused: %s", ErrHandshake, m.reason)
	}
	if err != nil {
		link.Close()
		return err
	}
	spare, name, err := c.openSpare(ctx, link)
	if err != nil {
		return err
	}
	return c.use(link, spare, name, lanes)
}

// dialControl connects to a peer, or makes a pipe to this daemon itself.
func (e *Engine) dialControl(ctx context.Context, local bool, addr string) (net.Conn, error) {
	if local {
		near, far := net.Pipe()
		e.wg.Go(func() { e.serve(far, true) })
		return near, nil
	}
	if addr == "" {
		return nil, errors.New("the peer's address is not known")
	}
	return e.cfg.Dial(ctx, addr)
}

// dialLane opens one authenticated byte stream of a channel.
func (e *Engine) dialLane(ctx context.Context, c *channel, kind uint16, lane int) (net.Conn, error) {
	conn, err := e.dialControl(ctx, c.local, c.addr)
	if err != nil {
		return nil, err
	}
	err = withDeadline(ctx, conn, e.cfg.DialTimeout, func() error {
		peer, err := handshake.Dial(conn, e.cfg.ClusterKey, e.identity(), kind, uint16(lane), c.id)
		if err == nil && (peer.NodeID != c.peer.NodeID || peer.Epoch != c.peer.Epoch) {
			err = fmt.Errorf("%w: %w", ErrHandshake, handshake.ErrSuccessor)
		}
		return err
	})
	if err != nil {
		conn.Close()
		return nil, fmt.Errorf("dial lane %d: %w", lane, err)
	}
	return conn, nil
}

// accept serves the listener.
func (e *Engine) accept(l net.Listener) {
	var said time.Time
	for e.mayAccept() {
		conn, err := l.Accept()
		if err != nil {
			if e.ctx.Err() != nil {
				return
			}
			if e.acceptPaused() {
				continue
			}
			if ne := net.Error(nil); (!errors.As(err, &ne) || !ne.Timeout()) && time.Since(said) > 10*time.Second {
				said = time.Now()
				e.log.Error("cannot accept peers; if that is for lack of open files, raise their limit (ulimit -n)", "error", err)
			}
			select { // out of descriptors, perhaps: some will be closed
			case <-time.After(50 * time.Millisecond):
				continue
			case <-e.ctx.Done():
				return
			}
		}
		e.wg.Go(func() { e.serve(conn, false) })
	}
}

// serve takes an incoming connection through the handshake and makes it a channel, or a lane of one.
func (e *Engine) serve(conn net.Conn, local bool) {
	full := !offer(e.handshakes, struct{}{})
	var c *channel
	var h *handshake.Hello
	var place chan struct{} // of a connection that is no channel's: to be given back
	err := withDeadline(e.ctx, conn, e.cfg.DialTimeout, func() (err error) {
		h, err = handshake.Accept(conn, e.cfg.ClusterKey, e.identity(), full, func(h *handshake.Hello) (status uint16) {
			if h.Kind == handshake.KindExam || h.Kind == handshake.KindRecall {
				place, status = e.admit(h)
				return status
			}
			if h.Kind != handshake.KindControl {
				c, status = e.expectLane(h)
				return status
			}
			if e.refuseControl(h) {
				return handshake.StatusNotExpected
			}
			c = e.newChannel(conn, h.Channel, h.From, conn.RemoteAddr().String(), false, local)
			if e.remember(c) != nil {
				c = nil
				return handshake.StatusFull
			}
			return handshake.StatusOK
		})
		return err
	})
	if !full {
		<-e.handshakes
	}
	if err != nil {
		if place != nil {
			<-place
		}
		e.turnAway(conn, err)
		if c != nil && h == nil && c.conn == conn {
			c.close(err)
		}
		return
	}
	switch h.Kind {
	case handshake.KindExam:
		e.examine(conn, h)
		return
	case handshake.KindRecall:
		e.serveRecalls(conn, h)
		return
	}
	if h.Kind != handshake.KindControl && c.currentLink() != nil {
		if err := c.extend(int(h.Lane), conn, h.Kind == handshake.KindSpare); err != nil {
			e.log.Info("lane was not added", "peer", c.peer.NodeID, "error", err)
		}
		return
	}
	if h.Kind == handshake.KindLane {
		if !offer(c.setup.streams, laneStream{int(h.Lane), conn}) {
			conn.Close()
		} else if c.isClosed() { // it may have emptied the queue before
			c.drainStreams()
		}
		return
	}
	c.run()
	ctx, cancel := context.WithTimeout(e.ctx, e.cfg.DialTimeout)
	defer cancel()
	if err := c.acceptLanes(ctx); err != nil {
		c.out.send(openedMsg{reason: err.Error()}.frame())
		c.close(err)
	}
}

// turnAway drops a connection that did not get through the handshake.
func (e *Engine) turnAway(conn net.Conn, err error) {
	conn.Close()
	e.totals.handshakes.Add(1)
	if errors.Is(err, ErrVersion) {
		e.totals.skews.Add(1)
	}
	e.log.Warn("refused a data connection", "from", conn.RemoteAddr().String(), "error", err)
}

// expectLane finds the channel of an incoming lane. Each lane comes once.
func (e *Engine) expectLane(h *handshake.Hello) (*channel, uint16) {
	e.mu.Lock()
	c := e.accepted[h.Channel]
	e.mu.Unlock()
	if c == nil || h.From.NodeID != c.peer.NodeID || h.From.Epoch != c.peer.Epoch {
		return nil, handshake.StatusNotExpected
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.expects(int(h.Lane), h.Kind == handshake.KindSpare) {
		return nil, handshake.StatusNotExpected
	}
	c.setup.seen.add(int(h.Lane))
	return c, handshake.StatusOK
}

// acceptLanes is the accepting end's set-up.
func (c *channel) acceptLanes(ctx context.Context) error {
	m, err := await(ctx, c, c.setup.open)
	if err != nil {
		return err
	}
	i := slices.IndexFunc(c.e.usable, func(t Transport) bool { return t.Name() == m.transport })
	if i < 0 || c.e.usable[i].Local() != c.local {
		return fmt.Errorf("%w: transport %q is not usable here", ErrHandshake, m.transport)
	}
	c.mu.Lock()
	c.transport, c.why = m.transport, "chosen by the dialling end"
	c.mu.Unlock()
	link, err := c.e.usable[i].Accept(ctx, c.setupFor(int(m.lanes)))
	if err != nil {
		return fmt.Errorf("set up lanes: %w", err)
	}
	spare, name, err := c.openSpare(ctx, link)
	if err != nil {
		return err
	}
	if err := c.use(link, spare, name, int(m.lanes)); err != nil {
		return err
	}
	c.noteCarrier()
	c.out.send(openedMsg{lanes: m.lanes}.frame())
	return nil
}

func (c *channel) isClosed() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.closed
}

// withDeadline runs f while c has ctx's deadline, or timeout's if that is sooner, and lets ctx's end break f off.
func withDeadline(ctx context.Context, c net.Conn, timeout time.Duration, f func() error) error {
	deadline := time.Now().Add(timeout)
	if d, ok := ctx.Deadline(); ok && d.Before(deadline) {
		deadline = d
	}
	c.SetDeadline(deadline)
	stop := context.AfterFunc(ctx, func() { c.SetDeadline(time.Unix(1, 0)) })
	err := f()
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err == nil {
		err = c.SetDeadline(time.Time{})
	}
	return err
}
