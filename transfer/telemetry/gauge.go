package telemetry

import (
	"sync"

	"github.com/headrace/headrace/transfer"
)

// counts are what a source knows of a lane.
type counts struct {
	sentBytes, receivedBytes, sentPackets, receivedPackets, againBytes, againPackets uint64
	rttMicros                                                                        float64
}

func (c *counts) add(o counts) {
	c.sentBytes += o.sentBytes
	c.receivedBytes += o.receivedBytes
	c.sentPackets += o.sentPackets
	c.receivedPackets += o.receivedPackets
	c.againBytes += o.againBytes
	c.againPackets += o.againPackets
}

// since takes away what was there before; a device that was made anew begins anew.
func (c counts) since(base counts) counts {
	if c.sentPackets < base.sentPackets || c.receivedPackets < base.receivedPackets {
		return c
	}
	c.sentBytes -= min(base.sentBytes, c.sentBytes)
	c.receivedBytes -= min(base.receivedBytes, c.receivedBytes)
	c.sentPackets -= base.sentPackets
	c.receivedPackets -= base.receivedPackets
	c.againBytes -= min(base.againBytes, c.againBytes)
	c.againPackets -= min(base.againPackets, c.againPackets)
	return c
}

// meter reads one lane's counts. last does so for the last time, and forgets the lane.
type meter interface {
	read() (counts, error)
	last() (counts, error)
}

// lane is a lane being measured.
type lane struct {
	meter  meter
	source string
	why    string
	rail   *rail  // whose counters are read in place of the lane's, nil for a lane with its own
	qpn    uint32 // whose posts are timed, else 0
	latest counts // what was read last, where it cannot be read any more
}

// gauge is one channel's measurements. Its mutex is held while sources are read: they do not wait.
type gauge struct {
	t *Telemetry

	mu     sync.Mutex
	lanes  map[*lane]struct{}
	ended  counts           // of lanes that are gone
	rails  map[*rail]counts // that lanes without counts of their own use or used, as they were at first
	source string           // of the last lane
	why    string
	closed bool
}

// Lane implements transfer.Gauge.
func (g *gauge) Lane(f transfer.Flow) (end func()) {
	l := g.t.newLane(f)
	if l == nil {
		return func() {}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		l.close(g.t)
		return func() {}
	}
	g.lanes[l] = struct{}{}
	if l.rail != nil {
		if _, there := g.rails[l.rail]; !there {
			g.rails[l.rail], _ = l.rail.counts() // without them: from the device's beginning
		}
	}
	return func() { g.end(l) }
}

func (g *gauge) end(l *lane) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if _, there := g.lanes[l]; !there {
		return
	}
	delete(g.lanes, l)
	g.source, g.why = l.source, l.why
	g.ended.add(l.close(g.t))
}

// close takes the last readings.
func (l *lane) close(t *Telemetry) counts {
	if l.qpn != 0 {
		t.posts.forget(l.qpn)
	}
	if l.meter == nil {
		return counts{}
	}
	if c, err := l.meter.last(); err == nil {
		l.latest = c
	}
	return l.latest
}

// Close implements transfer.Gauge.
func (g *gauge) Close() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.closed = true
	for l := range g.lanes {
		g.ended.add(l.close(g.t))
	}
	clear(g.lanes)
}

// Wire implements transfer.Gauge.
func (g *gauge) Wire() transfer.Wire {
	g.mu.Lock()
	defer g.mu.Unlock()
	sum := g.ended
	w := transfer.Wire{Source: g.source, Why: g.why}
	first, withRTT := true, 0
	for l := range g.lanes {
		if l.meter != nil {
			if c, err := l.meter.read(); err == nil {
				l.latest = c
			}
			sum.add(l.latest)
			if l.latest.rttMicros > 0 {
				sum.rttMicros += l.latest.rttMicros
				withRTT++
			}
		}
		switch {
		case first:
			w.Source, w.Why, first = l.source, l.why, false
		case w.Source != l.source:
			w.Source, w.Why = sourceMixed, "some lanes by eBPF, others by what the kernel counts"
		}
	}
	for r, base := range g.rails {
		if c, err := r.counts(); err == nil {
			sum.add(c.since(base))
			w.Rails = true
		}
	}
	if w.Source == "" {
		w.Source, w.Why = sourceNone, "no lane can be measured"
	}
	if withRTT > 0 {
		w.RTTMicros = sum.rttMicros / float64(withRTT)
	}
	w.SentBytes, w.ReceivedBytes, w.SentPackets, w.ReceivedPackets = sum.sentBytes, sum.receivedBytes, sum.sentPackets, sum.receivedPackets
	w.RetransmittedBytes, w.RetransmittedPackets = sum.againBytes, sum.againPackets
	return w
}

// newLane finds the best source for a lane; nil when there is none.
func (t *Telemetry) newLane(f transfer.Flow) *lane {
	switch {
	case f.Socket != nil:
		if t.sockets != nil {
			m, err := t.sockets.meter(f.Socket)
			if err == nil {
				return &lane{meter: m, source: sourceEBPF, why: t.why["sockets"]}
			}
			t.log.Warn("a lane is not measured by eBPF", "peer", f.Peer, "error", err)
			return &lane{meter: tcpInfo{f.Socket}, source: sourceKernel, why: err.Error()}
		}
		return &lane{meter: tcpInfo{f.Socket}, source: sourceKernel, why: "TCP_INFO: " + t.why["sockets"]}
	case f.Queue != nil:
		return t.newQueueLane(f)
	}
	return nil
}
