package transfer

import (
	"fmt"
	"math"
	"sync"
	"time"
)

// patience counts ticks of this process's own in which nothing changed. The clock is not asked: a process that did not run
// for a while, because the machine was busy or it was stopped, has heard nothing in that time and must not take its own
// absence for its peer's. A ticker gives it one tick for all that it missed.
type patience struct {
	limit int
	last  uint64
	n     int
}

// over takes one tick, and a number that changes whenever there is news. It says when there was none for too long.
func (p *patience) over(news uint64) bool {
	if news != p.last {
		p.last, p.n = news, 0
		return false
	}
	p.n++
	return p.n >= p.limit
}

// ticks is how many of this engine's ticks are at least so long.
func (e *Engine) ticks(d time.Duration) int {
	return int((d + e.cfg.PingInterval - 1) / e.cfg.PingInterval)
}

// systemTicks is Config.ticks of an engine that is not a test's.
func systemTicks(d time.Duration) (<-chan time.Time, func()) {
	t := time.NewTicker(d)
	return t.C, t.Stop
}

// tick pings the peer, notices its silence and measures rates, until the channel closes. A stopped process does not
// answer, though its kernel still acknowledges TCP segments: that is why silence is measured here.
func (c *channel) tick() {
	ticks, stop := c.e.cfg.ticks(c.e.cfg.PingInterval)
	defer stop()
	dead := c.e.ticks(c.e.cfg.DeadAfter)
	silent, stuck, bare := patience{limit: dead}, patience{limit: dead}, patience{limit: dead + c.e.ticks(c.e.cfg.DialTimeout)}
	var withLanes uint64
	last := time.Now()
	for {
		select {
		case <-c.gone:
			return
		case <-ticks:
		}
		now := time.Now()
		c.rates.step(now.Sub(last), c.busy.get(), c.sent.Load(), c.landed.Load())
		last = now
		var cause string
		switch {
		case silent.over(c.heard.Load()):
			cause = "no answer for"
		case stuck.over(c.out.progress()):
			cause = "the peer has read nothing for"
		}
		if cause != "" {
			c.closeSoon(fmt.Errorf("%w: %s %v", ErrChannel, cause, c.e.cfg.DeadAfter))
			return
		}
		if !c.usable() {
			continue
		}
		c.ping()
		c.lanes.look()
		if c.lanes.up.Load()+c.lanes.spareUp.Load() > 0 {
			withLanes++
		}
		if bare.over(withLanes) {
			c.closeSoon(fmt.Errorf("%w: no lane for %v", ErrChannel, c.e.cfg.DeadAfter+c.e.cfg.DialTimeout))
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
