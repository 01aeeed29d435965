package transfer

import (
	"bufio"
	"fmt"
	"io"
	"time"
)

// What arrives on a channel's control connection, frame by frame.

// read takes control frames until the connection ends or the peer breaks the protocol.
func (c *channel) read() error {
	r := bufio.NewReaderSize(c.conn, 64<<10)
	var head [FrameHeaderSize]byte
	for {
		if _, err := io.ReadFull(r, head[:]); err != nil {
			return fmt.Errorf("read control frame: %w", err)
		}
		h, err := parseFrameHeader(&head)
		if err != nil {
			return err
		}
		payload := make([]byte, h.size)
		if _, err := io.ReadFull(r, payload); err != nil {
			return fmt.Errorf("read control frame: %w", err)
		}
		c.heard.Add(1)
		if err := c.handle(h, payload); err != nil {
			return err
		}
	}
}

// handle acts on one control frame. It must not wait: pings are answered from here. An error ends the channel.
func (c *channel) handle(h frameHeader, b []byte) error {
	switch h.kind {
	case framePing:
		stamp, err := parseStamp(b)
		if err == nil {
			c.out.send(stampFrame(framePong, stamp))
		}
		if !c.dialled {
			c.setReady() // the dialling end pings when its lanes are up
		}
		return err
	case framePong:
		stamp, err := parseStamp(b)
		if stamp == drainStamp {
			c.peerUnderstood()
		} else if err == nil {
			c.roundTrip(time.Since(c.since) - time.Duration(stamp))
		}
		return err
	case frameBye:
		reason, err := parseReason(b)
		if err == nil {
			err = fmt.Errorf("peer said good-bye: %s", reason)
		}
		return err
	case frameOpen, frameOpened, frameExchange:
		return c.handleSetup(h, b)
	case frameDrain:
		if len(b) != 0 {
			return malformed("drain", b)
		}
		c.leave()
		return nil
	case framePresent:
		m, err := parsePresent(b)
		if err != nil {
			return err
		}
		c.handlePresent(h.lease, &m)
		return nil
	case frameRevoke:
		return c.handleRevoke(h, b)
	}
	return c.handleLease(h, b)
}

func (c *channel) handleSetup(h frameHeader, b []byte) error {
	var full bool
	switch {
	case h.kind == frameOpen && !c.dialled:
		m, err := parseOpen(b)
		if err != nil {
			return err
		}
		full = !offer(c.setup.open, m)
	case h.kind == frameOpened && c.dialled:
		m, err := parseOpened(b)
		if err != nil {
			return err
		}
		full = !offer(c.setup.opened, m)
	case h.kind == frameExchange && len(b) <= ExchangeMax:
		return c.exchanged(b)
	default:
		return malformed("set-up", b)
	}
	if full {
		return fmt.Errorf("%w: set-up frame of type %d twice", ErrProtocol, h.kind)
	}
	return nil
}

func offer[T any](ch chan T, v T) bool {
	select {
	case ch <- v:
		return true
	default:
		return false
	}
}

// handleLease acts on the frames of one living lease; those of a lease that has ended are ignored.
func (c *channel) handleLease(h frameHeader, b []byte) error {
	c.mu.Lock()
	src, dst := c.sources[h.lease], c.targets[h.lease]
	c.mu.Unlock()
	switch h.kind {
	case frameBound:
		m, err := parseBound(b)
		if err != nil || src == nil {
			return err
		}
		if err := src.bound(&m); err != nil {
			c.e.wg.Go(func() { src.fail("bind: %v", err) })
		}
	case frameRefused:
		reason, err := parseReason(b)
		if err != nil || src == nil {
			return err
		}
		c.e.wg.Go(func() {
			src.finish(outcome{state: LeaseRevoked, kind: EventRefused, reason: reason, quiet: true})
		})
	case frameLanded:
		ids, err := parseLanded(b)
		if err != nil || src == nil {
			return err
		}
		src.landed(ids)
	case frameResend:
		m, err := parseResend(b)
		if err != nil || src == nil {
			return err
		}
		src.resend(m)
	case frameHandoff:
		m, err := parseHandoff(b)
		if err != nil || dst == nil {
			return err
		}
		return dst.handoff(&m)
	case frameSettled:
		if len(b) != 0 {
			return malformed("settled", b)
		}
		if src != nil {
			c.e.wg.Go(src.settled)
		}
	case frameAgain:
		if len(b) != 0 {
			return malformed("again", b)
		}
		c.leave()
		if src != nil {
			c.presentAgain(src)
		}
	case frameStopped:
		if len(b) != 0 {
			return malformed("stopped", b)
		}
		if dst != nil && h.role == roleSource {
			dst.peerStopped()
		}
	}
	return nil
}

// handleRevoke ends the lease on this side and says so when it is fenced. The fence may take a while.
func (c *channel) handleRevoke(h frameHeader, b []byte) error {
	state, reason, err := parseRevoke(b)
	if err != nil {
		return err
	}
	c.mu.Lock()
	src, dst := c.sources[h.lease], c.targets[h.lease]
	c.mu.Unlock()
	role := uint8(roleSource)
	var l *lease
	switch {
	case h.role == roleTarget && src != nil:
		l = &src.lease
	case h.role == roleSource && dst != nil:
		dst.peerStopped() // it posts nothing any more
		l = &dst.lease
	}
	if h.role == roleSource {
		role = roleTarget
	}
	stopped := finishFrame(newFrame(frameStopped, role, h.lease, 0))
	if l == nil {
		var opened chan struct{}
		if h.role == roleSource {
			opened = c.takeBack(h.lease)
		}
		if opened == nil {
			c.out.send(stopped)
			return nil
		}
		c.e.wg.Go(func() {
			<-opened
			_ = c.handleRevoke(h, b) // it parsed before
		})
		return nil
	}
	c.e.wg.Go(func() {
		l.finish(outcome{state: state, kind: EventEnded, reason: reason, quiet: true})
		<-l.done
		c.out.send(stopped)
	})
	return nil
}
