package transfer

import (
	"sync/atomic"
	"time"
)

// How traffic is spread over a channel's lanes: each takes pieces as it gets rid of them, so that a rail twice as fast
// carries twice as much. What that leaves is the end of a lease, where a slow lane would keep all others waiting with the
// last pieces: a lane leaves them to others where these would have them through sooner.

// laneMeter measures one lane. Guarded by laneSet.mu.
type laneMeter struct {
	flying  int64     // bytes posted and not completed
	since   time.Time // when the lane last completed a piece, or got one while it had none
	bytes   float64   // completed lately: each piece counts for less with every one that follows it
	seconds float64   // that it took to
}

// meterFade is how much of what was measured before a piece stays.
const meterFade = 0.9

func (m *laneMeter) post(now time.Time, bytes uint32) {
	if m.flying == 0 {
		m.since = now
	}
	m.flying += int64(bytes)
}

func (m *laneMeter) done(now time.Time, bytes uint32, whole bool) {
	m.flying -= int64(bytes)
	if whole {
		m.bytes = meterFade*m.bytes + float64(bytes)
		m.seconds = meterFade*m.seconds + now.Sub(m.since).Seconds()
	}
	m.since = now
}

// perByte is what a byte takes, in seconds; 0 if that is not known.
func (m *laneMeter) perByte() float64 {
	if m.bytes == 0 {
		return 0
	}
	return m.seconds / m.bytes
}

// eta is when the lane would be through with so many bytes more, in seconds from now. One that has stood still for longer
// than it should is taken to go on standing for as long again.
func (m *laneMeter) eta(now time.Time, bytes int64) float64 {
	eta := float64(m.flying+bytes) * m.perByte()
	if m.flying > 0 {
		eta = max(eta, now.Sub(m.since).Seconds())
	}
	return eta
}

// railMeter is what went over a rail, its dead lanes included. Guarded by laneSet.mu, but for landed.
type railMeter struct {
	transport string
	spare     bool
	bytes     uint64
	pieces    uint64
	seconds   float64 // from posting to completion, of all pieces together
	failed    uint64  // lanes
	landed    atomic.Uint64
}

// meterOf gives a rail's meter. s.mu is held.
func (s *laneSet) meterOf(at laneAt) *railMeter {
	m := s.rails[at.rail]
	if m == nil {
		m = &railMeter{transport: s.c.transport, spare: at.spare}
		if at.spare {
			m.transport = at.rail
		}
		s.rails[at.rail] = m
	}
	return m
}

// completed counts a piece that its lane is through with.
func (s *laneSet) completed(f *feeder, posted time.Time, bytes uint32, whole bool) {
	now := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	f.meter.done(now, bytes, whole)
	if whole {
		f.rail.bytes += uint64(bytes)
		f.rail.pieces++
		f.rail.seconds += now.Sub(posted).Seconds()
	}
}

// landedOn counts what landed over a lane.
func (s *laneSet) landedOn(lane int, bytes uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if at, up := s.at[lane]; up {
		s.meterOf(at).landed.Add(bytes)
	}
}

// worthNow is worth for a lane that feeds on a lease already. What it leaves must be found by the others.
func (s *laneSet) worthNow(f *feeder, l *sourceLease) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.worth(f, l) {
		return true
	}
	s.declined = true
	return false
}

// worth says whether a lane should take a piece of a lease: not where it is too far from the memory, nor where the others would have all that is left of the lease
// through before it has this one. The lane that would have a piece through first always takes one, so none is left
// lying. s.mu is held.
func (s *laneSet) worth(f *feeder, l *sourceLease) bool {
	if s.tooFar(f, l) {
		return false
	}
	e := s.c.e
	if len(s.feeders) < 2 || f.meter.bytes == 0 || e.rate.get() != 0 || e.cfg.Pauses.Armed() {
		return true
	}
	now, left := time.Now(), l.unqueued.Load()
	piece := min(left, PieceMax)
	first, rate, flying := 0.0, 0.0, int64(0)
	for _, other := range s.feeders {
		if other == f || other.spare != f.spare || s.dead(other.lane) || other.meter.bytes == 0 || other.meter.seconds == 0 || s.tooFar(other, l) {
			continue
		}
		if eta := other.meter.eta(now, piece); rate == 0 || eta < first {
			first = eta
		}
		rate += 1 / other.meter.perByte()
		flying += other.meter.flying
	}
	return rate == 0 || f.meter.eta(now, piece) <= max(first, float64(flying+left)/rate)
}

// idSet is a set of lane numbers. Numbers are only ever added.
type idSet [laneIDsMax / 64]atomic.Uint64

func (s *idSet) has(id int) bool { return s[id/64].Load()&(1<<(id%64)) != 0 }

// add reports whether the number is new.
func (s *idSet) add(id int) bool { return s[id/64].Or(1<<(id%64))&(1<<(id%64)) == 0 }

// measured fills in what the engine knows of rails.
func (s *laneSet) measured(rails []RailStatus) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all uint64
	for _, m := range s.rails {
		all += m.bytes
	}
	for i := range rails {
		r := &rails[i]
		for lane, at := range s.at {
			if at.rail != r.Key {
				continue
			}
			r.LanesUp++
			if f := s.feeders[lane]; f != nil && f.meter.perByte() > 0 {
				r.SpeedBps += 1 / f.meter.perByte()
			}
		}
		r.Transport = s.c.transport
		m := s.rails[r.Key]
		if m == nil {
			continue
		}
		r.Transport, r.LanesFailed, r.BytesSent, r.BytesLanded = m.transport, m.failed, m.bytes, m.landed.Load()
		if all > 0 {
			r.Share = float64(m.bytes) / float64(all)
		}
		if m.pieces > 0 {
			r.PieceMicros = m.seconds / float64(m.pieces) * 1e6
		}
	}
}

// look lets lanes that left work to others look at it again: those may have come to a standstill.
func (s *laneSet) look() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.declined {
		s.cond.Broadcast()
	}
}
