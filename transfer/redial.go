package transfer

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"time"
)

// Extender is a link to which lanes can be added while it carries pieces. A lane that failed is replaced by one with
// a number of its own: what was counted on the dead one stays its own.
type Extender interface {
	// Extend makes a byte stream a lane. It takes conn over, also when it fails.
	Extend(lane int, conn net.Conn) error
}

// Redialling backs off from the first to the last of these, and begins anew when a lane has lived for redialCalm.
const (
	redialFirst = 100 * time.Millisecond
	redialLast  = 10 * time.Second
	redialCalm  = 30 * time.Second
)

// redialState is guarded by channel.mu.
type redialState struct {
	running bool
	delay   time.Duration
	success time.Time
}

// redialSoon starts bringing failed lanes back, on the dialling end, unless that is under way.
func (c *channel) redialSoon() {
	c.mu.Lock()
	r := &c.redials
	_, can := c.link.(Extender)
	start := can && c.dialled && !c.closed && !r.running
	if start {
		r.running = true
		if r.delay == 0 || !r.success.IsZero() && time.Since(r.success) > redialCalm {
			r.delay = redialFirst
		}
	}
	c.mu.Unlock()
	if start {
		c.e.spawn(c.redial) // not under c.mu; and if the engine is closing, nothing needs to be brought back
	}
}

// redial dials lanes until the channel has all of its own.
func (c *channel) redial() {
	for {
		c.mu.Lock()
		delay := c.redials.delay
		c.redials.delay = min(2*delay, redialLast)
		c.mu.Unlock()
		wait := time.NewTimer(delay/2 + rand.N(delay)) // two ends of a broken network need not knock at once
		select {
		case <-c.gone:
			wait.Stop()
			return
		case <-wait.C:
		}
		if err := c.redialOne(); err != nil {
			c.e.log.Info("lane could not be dialled again", "peer", c.peer.nodeID, "addr", c.addr, "next try after", min(2*delay, redialLast), "error", err)
		}
		c.mu.Lock()
		done := c.closed || !c.lanes.missing()
		c.redials.running = !done
		c.mu.Unlock()
		if done {
			return
		}
	}
}

func (c *channel) redialOne() error {
	lane, ok := c.lanes.reserve()
	if !ok {
		return nil
	}
	ctx, cancel := context.WithTimeout(c.e.ctx, c.e.cfg.DialTimeout)
	defer cancel()
	conn, err := c.e.dialLane(ctx, c, lane)
	if err == nil {
		err = c.extend(lane, conn)
	}
	if err != nil {
		return err
	}
	c.mu.Lock()
	c.redials.success = time.Now()
	c.mu.Unlock()
	c.redialled.Add(1)
	c.e.log.Info("lane is up again", "peer", c.peer.nodeID, "transport", c.transport, "lane", lane)
	return nil
}

// extend adds a lane to the channel's link, at either end.
func (c *channel) extend(lane int, conn net.Conn) error {
	c.mu.Lock()
	link, can := c.link.(Extender)
	closed := c.closed
	c.mu.Unlock()
	if closed || !can {
		conn.Close()
		return fmt.Errorf("add lane %d: %w", lane, c.cause())
	}
	c.lanes.gate.RLock()
	defer c.lanes.gate.RUnlock()
	if !c.lanes.grow(lane) {
		conn.Close()
		return fmt.Errorf("add lane %d: %w: no lane is missing", lane, ErrLimit)
	}
	if err := link.Extend(lane, conn); err != nil {
		c.lanes.down(lane)
		return errors.Join(fmt.Errorf("add lane %d", lane), err)
	}
	c.lanes.serve(c.currentLink(), lane)
	return nil
}

// expects says whether an accepted channel waits for this lane: one of the first, or in place of one that failed. c.mu
// is held.
func (c *channel) expects(lane int) bool {
	if c.closed || c.setup.seen[lane] {
		return false
	}
	if c.link == nil {
		return lane < lanesMax
	}
	_, can := c.link.(Extender)
	return can && c.lanes.missing()
}

// missing says whether fewer lanes are up than there should be, and another can be numbered.
func (s *laneSet) missing() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.lacks() && s.next < laneIDsMax
}

// lacks says whether fewer lanes are up than there should be, and one more may be. s.mu is held.
func (s *laneSet) lacks() bool { return int(s.up.Load()) < s.n && !s.closed && !s.barred }

// bar lets no lane be added any more, waits for one that is just being added, and says how many there ever were.
func (s *laneSet) bar() int {
	s.mu.Lock()
	s.barred = true
	s.mu.Unlock()
	s.gate.Lock()
	defer s.gate.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.next
}

// reserve gives the number of a lane to be dialled in place of one that failed.
func (s *laneSet) reserve() (lane int, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.lacks() || s.next >= laneIDsMax {
		return 0, false
	}
	lane = s.next
	s.next++
	return lane, true
}

// grow counts a lane as up before it can fail.
func (s *laneSet) grow(lane int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.lacks() {
		return false
	}
	s.next = max(s.next, lane+1)
	s.up.Add(1)
	return true
}

// serve starts feeding a lane, unless the channel is closing.
func (s *laneSet) serve(link Link, lane int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed {
		s.wg.Go(func() { s.run(link, lane) })
	}
}
