package sim

import "time"

// add orders an engine and returns its place.
func (s *sim) add(r role) int32 {
	t := []*Timing{&s.o.Table.Prefill, &s.o.Table.Decode, &s.o.Table.Whole}[r]
	at := int32(-1)
	for i, e := range s.engines {
		if e.state == gone {
			at = int32(i)
			break
		}
	}
	if at < 0 {
		at = int32(len(s.engines))
		s.engines = append(s.engines, &engine{})
	}
	s.engines[at].reset(r, t, s.now)
	s.account(t.GPUs)
	return at
}

// change starts or drains so many engines of a kind.
func (s *sim) change(r role, by int) {
	for ; by > 0; by-- {
		at := s.add(r)
		s.events.push(s.now+int64(s.engines[at].t.StartMs*1e6*s.jitter(5)), gotReady, at)
	}
	for ; by < 0; by++ {
		s.drain(r)
	}
}

// ready has an engine take requests.
func (s *sim) ready(at int32) {
	e := s.engines[at]
	e.state = ready
	s.seen.Started = append(s.seen.Started, time.Duration(s.now-e.ordered))
	for n := s.nobody.len(); n > 0; n-- {
		s.dispatch(s.nobody.pop())
	}
}

// drain takes the engine of a kind with the least to do out, and gives away what it has not begun.
func (s *sim) drain(r role) {
	best, count := int32(-1), 0
	for i, e := range s.engines {
		if e.role != r || e.state != ready {
			continue
		}
		count++
		if best < 0 || s.work(e) <= s.work(s.engines[best]) {
			best = int32(i)
		}
	}
	if count < 2 {
		return // the last one stays
	}
	e := s.engines[best]
	e.state = draining
	for n := e.waiting.len(); n > 0; n-- {
		id := e.waiting.pop()
		e.queued -= s.reqs[id].guess
		s.dispatch(id)
	}
	for n := e.pending.len(); n > 0; n-- {
		id := e.pending.pop()
		q := &s.reqs[id]
		e.owed -= int64(q.Prompt+q.Output) - q.left
		s.toDecode(id, s.pickDecode(q, e.role, best))
	}
	s.leave(e)
}

// work is what an engine has to do, and what would be lost with it: microseconds, roughly.
func (s *sim) work(e *engine) float64 {
	return float64(e.queued)/1e3 + e.t.wallUs(0, 0, e.streamsNow(), e.live+e.coming) + float64(len(e.cache.at))
}

// giveAway moves the streams of an engine that drains to others with room. Those that find none go on where they are.
func (s *sim) giveAway(at int32) {
	e := s.engines[at]
	kept := e.running[:0]
	for _, st := range e.running {
		r := &s.reqs[st.who]
		left := st.end - e.steps
		to := s.pickDecode(r, e.role, at)
		if to < 0 || s.room(s.engines[to], r) < 0 || s.engines[to].pending.len() > 0 {
			kept = append(kept, st)
			continue
		}
		r.left = left
		e.live -= int64(r.Prompt+r.Output) - left
		r.from, r.moving = at, true
		e.held++
		s.report.Moved++
		s.toDecode(st.who, to)
	}
	e.running = e.running[:0]
	for _, st := range kept {
		e.running.push(st)
	}
}

// leave ends an engine that has drained.
func (s *sim) leave(e *engine) {
	if e.state == draining && e.empty() {
		e.state = gone
		s.account(-e.t.GPUs)
	}
}
