package transfer

import (
	"fmt"
	"math"
	"sync"
	"time"
)

// tick pings the peer, notices its silence and measures rates, until the channel closes. A stopped process does not
// answer, though its kernel still acknowledges TCP segments: that is why silence is measured here.
func (c *channel) tick() {
	t := time.NewTicker(c.e.cfg.PingInterval)
	defer t.Stop()
	last := time.Now()
	var bare time.Time // since when no lane is up
	for {
		select {
		case <-c.gone:
			return
		case <-t.C:
		}
		now := time.Now()
		c.rates.step(now.Sub(last), c.busy.get(), c.sent.Load(), c.landed.Load())
		last = now
		silent := time.Since(c.since) - time.Duration(c.heard.Load())
		if silent > c.e.cfg.DeadAfter {
			c.closeSoon(fmt.Errorf("%w: no answer for %v", ErrChannel, silent.Round(time.Millisecond)))
			return
		}
		if !c.usable() {
			continue
		}
		c.ping()
		c.lanes.look()
		switch {
		case c.lanes.up.Load()+c.lanes.spareUp.Load() > 0:
			bare = time.Time{}
		case bare.IsZero():
			bare = now
		case now.Sub(bare) > c.e.cfg.DeadAfter+c.e.cfg.DialTimeout:
			c.closeSoon(fmt.Errorf("%w: no lane for %v", ErrChannel, now.Sub(bare).Round(time.Millisecond)))
			return
		}
	}
}

func (c *channel) ping() { c.out.send(stampFrame(framePing, uint64(time.Since(c.since)))) }

func (c *channel) roundTrip(d time.Duration) {
	if d <= 0 {
		return // a peer's invention
	}
	old := c.rttNS.Load()
	if old == 0 {
		old = int64(d)
	}
	c.rttNS.Store(old + (int64(d)-old)/8)
}

// Less work than this, in seconds, says little about a channel's speed.
const minWork = 0.0002

// rates are exponentially weighted over about two seconds.
type rates struct {
	mu             sync.Mutex
	sent, landed   uint64
	sentR, landedR float64
	busy           time.Duration
	speed          float64
}

func (r *rates) step(d, busy time.Duration, sent, landed uint64) {
	s := d.Seconds()
	if s <= 0 {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	weight := 1 - math.Exp(-s/2)
	r.sentR += weight * (float64(sent-r.sent)/s - r.sentR)
	r.landedR += weight * (float64(landed-r.landed)/s - r.landedR)
	if worked := (busy - r.busy).Seconds(); worked > minWork && sent > r.sent {
		speed := float64(sent-r.sent) / worked
		if r.speed == 0 {
			r.speed = speed
		}
		r.speed += (1 - math.Exp(-worked)) * (speed - r.speed)
	}
	r.busy, r.sent, r.landed = busy, sent, landed
}

func (r *rates) get() (sent, landed, speed float64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.sentR, r.landedR, r.speed
}
