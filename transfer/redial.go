package transfer

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"time"

	"github.com/headrace/headrace/transfer/handshake"
)

// Extender is a link to which lanes can be added while it carries pieces. A lane that failed is replaced by one with
// a number of its own: what was counted on the dead one stays its own.
type Extender interface {
	// Extend makes a byte stream a lane. It takes conn over, also when it fails.
	Extend(lane int, conn net.Conn) error
}

// Redialling backs off from the first to the last of these, and begins anew when a lane has lived for redialCalm, or
// when a rail came back.
const (
	redialFirst = 100 * time.Millisecond
	redialLast  = 10 * time.Second
	redialCalm  = 30 * time.Second
)

// sparesMax is how many lanes of another transport a channel keeps up beside its own.
const sparesMax = 2

// redialState is guarded by channel.mu, but for kick.
type redialState struct {
	running bool
	delay   time.Duration
	success time.Time
	kick    chan struct{} // try at once: something has changed
}

// redialSoon starts bringing lanes up that are wanted, on the dialling end, unless that is under way.
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

// redialNow is redialSoon without a wait.
func (c *channel) redialNow() {
	offer(c.redials.kick, struct{}{})
	c.redialSoon()
}

// redial dials lanes until the channel has all that it wants.
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
		case <-c.redials.kick:
			wait.Stop()
			c.mu.Lock()
			c.redials.delay = redialFirst
			c.mu.Unlock()
		case <-wait.C:
		}
		if err := c.redialAll(); err != nil {
			c.e.log.Info("lane could not be dialled again", "peer", c.peer.NodeID, "addr", c.addr, "next try after", min(2*delay, redialLast), "error", err)
		}
		c.mu.Lock()
		done := c.closed || !c.lanes.missing(false) && !c.lanes.missing(true)
		c.redials.running = !done
		c.mu.Unlock()
		if done {
			select {
			case <-c.redials.kick: // just now
				c.redialSoon()
			default:
			}
			return
		}
	}
}

// redialAll dials every lane that is missing, the spare ones first where there is no other. What fails is tried again
// later, and keeps the other kind from nothing.
func (c *channel) redialAll() error {
	var errs []error
	order := [...]bool{false, true}
	if c.lanes.up.Load() == 0 && c.lanes.spareUp.Load() == 0 {
		order = [...]bool{true, false}
	}
	for _, spare := range order {
		for range lanesMax {
			if c.isClosed() || !c.lanes.missing(spare) {
				break
			}
			if err := c.redialOne(spare); err != nil {
				errs = append(errs, err)
				break
			}
		}
	}
	return errors.Join(errs...)
}

func (c *channel) redialOne(spare bool) error {
	lane, ok := c.lanes.reserve(spare)
	if !ok {
		return nil
	}
	ctx, cancel := context.WithTimeout(c.e.ctx, c.e.cfg.DialTimeout)
	defer cancel()
	kind, transport := uint16(handshake.KindLane), c.transport
	if spare {
		kind, transport = handshake.KindSpare, c.spareName
	}
	conn, err := c.e.dialLane(ctx, c, kind, lane)
	if err != nil {
		if !errors.Is(err, handshake.ErrSuccessor) { // else the peer has heard of the number, perhaps
			c.lanes.unreserve(lane)
		}
		return err
	}
	if err := c.extend(lane, conn, spare); err != nil {
		return err
	}
	c.mu.Lock()
	first := spare && !c.spared
	c.spared = c.spared || spare
	c.redials.success = time.Now()
	c.mu.Unlock()
	if !spare {
		c.redialled.Add(1)
	}
	if !first {
		c.e.log.Info("lane is up again", "peer", c.peer.NodeID, "transport", transport, "lane", lane)
	}
	return nil
}

// extend adds a lane to the channel's link, or to its spare one, at either end.
func (c *channel) extend(lane int, conn net.Conn, spare bool) error {
	c.mu.Lock()
	from, name := c.link, c.transport
	if spare {
		from, name = c.spare, c.spareName
	}
	link, can := from.(Extender)
	closed := c.closed
	c.mu.Unlock()
	if closed || !can {
		conn.Close()
		return fmt.Errorf("add lane %d: %w", lane, c.cause())
	}
	c.lanes.gate.RLock()
	defer c.lanes.gate.RUnlock()
	if !c.lanes.grow(lane, laneAt{link: from, spare: spare}) {
		conn.Close()
		c.lanes.downs.add(lane)
		return fmt.Errorf("add lane %d: %w: no lane is missing", lane, ErrLimit)
	}
	if err := link.Extend(lane, conn); err != nil {
		c.lanes.down(lane)
		return errors.Join(fmt.Errorf("add lane %d", lane), err)
	}
	c.lanes.settle(lane, railOf(from, name, lane))
	c.noteCarrier()
	c.lanes.serve(lane)
	return nil
}

// expects says whether an accepted channel waits for this lane: one of the first, or in place of one that failed. c.mu
// is held.
func (c *channel) expects(lane int, spare bool) bool {
	if c.closed || c.setup.seen.has(lane) {
		return false
	}
	if c.link == nil {
		return lane < lanesMax && !spare
	}
	link := c.link
	if spare {
		link = c.spare
	}
	_, can := link.(Extender)
	return can && c.lanes.mayGrow(spare)
}

// missing says whether fewer lanes are up than there should be, and another can be numbered.
func (s *laneSet) missing(spare bool) bool {
	want := s.wanting()
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.lacks(spare, want) && (s.next < laneIDsMax || len(s.unused) > 0)
}

// wanting asks a link over rails how many lanes more it has use for. No lock is held.
func (s *laneSet) wanting() int {
	s.mu.Lock()
	own := s.own
	s.mu.Unlock()
	if r, is := own.(Railed); is && s.c.dialled {
		return r.Wanting()
	}
	return 0
}

// lacks says whether fewer lanes are up than there should be, and one more may be. s.mu is held.
func (s *laneSet) lacks(spare bool, want int) bool {
	if s.closed || s.barred && !spare {
		return false
	}
	if spare {
		return s.spare != nil && int(s.spareUp.Load()) < min(sparesMax, s.c.e.cfg.Lanes)
	}
	if _, is := s.own.(Railed); is {
		return s.up.Load() < lanesMax && want > 0
	}
	return int(s.up.Load()) < s.n
}

// mayGrow says whether the other end may add a lane.
func (s *laneSet) mayGrow(spare bool) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.fits(spare)
}

// fits is lacks for an end that does not know how many the other wants. s.mu is held.
func (s *laneSet) fits(spare bool) bool {
	if _, is := s.own.(Railed); is && !spare {
		return !s.closed && !s.barred && s.up.Load() < lanesMax
	}
	if spare {
		return !s.closed && s.spareUp.Load() < lanesMax
	}
	return s.lacks(false, 0)
}

// bar lets no one-sided lane be added any more, waits for one that is just being added, and lists those there are. Those
// that are down were drained when that was told.
func (s *laneSet) bar() (lanes []int) {
	s.mu.Lock()
	s.barred = true
	s.mu.Unlock()
	s.gate.Lock()
	defer s.gate.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	for lane, at := range s.at {
		if at.link.OneSided() {
			lanes = append(lanes, lane)
		}
	}
	return lanes
}

// reserve gives the number of a lane to be dialled.
func (s *laneSet) reserve(spare bool) (lane int, ok bool) {
	want := s.wanting()
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.lacks(spare, want) {
		return 0, false
	}
	if n := len(s.unused); n > 0 {
		lane, s.unused = s.unused[n-1], s.unused[:n-1]
		return lane, true
	}
	if s.next >= laneIDsMax {
		return 0, false
	}
	lane = s.next
	s.next++
	return lane, true
}

// unreserve takes a number back of which the other end has not heard.
func (s *laneSet) unreserve(lane int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.unused = append(s.unused, lane)
}

// worn says that no lane can be numbered any more: who opens a lease had better open a channel for it.
func (s *laneSet) worn() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.next >= laneIDsMax && len(s.unused) == 0
}

// grow counts a lane as up before it can fail.
func (s *laneSet) grow(lane int, at laneAt) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.fits(at.spare) {
		return false
	}
	s.next = max(s.next, lane+1)
	s.at[lane] = at
	if at.spare {
		s.spareUp.Add(1)
	} else {
		s.up.Add(1)
	}
	return true
}

// settle notes which rail a new lane goes over.
func (s *laneSet) settle(lane int, rail string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if at, up := s.at[lane]; up {
		at.rail = rail
		s.at[lane] = at
	}
}

// serve starts feeding a lane, unless the channel is closing or the lane has failed already.
func (s *laneSet) serve(lane int) {
	s.mu.Lock()
	at, up := s.at[lane]
	s.mu.Unlock()
	if !up {
		return
	}
	near := place(at.link, lane) // takes the link's own locks
	s.mu.Lock()
	defer s.mu.Unlock()
	if at, up = s.at[lane]; s.closed || !up {
		return
	}
	f := &feeder{link: at.link, lane: lane, spare: at.spare, rail: s.meterOf(at), near: near}
	s.feeders[lane] = f
	s.wg.Go(func() { s.run(f) })
}
