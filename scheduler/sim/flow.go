package sim

import (
	"math"
	"time"

	"github.com/headrace/headrace/scheduler/planner"
	"github.com/headrace/headrace/scheduler/trace"
)

// streamNs is what a stream of an undivided engine counts, beside prompts that wait there, when a request is given away.
const streamNs = 5e6

// dispatch gives a request to the engine that may have its first token soonest, by prompts that wait there and blocks cached.
func (s *sim) dispatch(id int32) {
	r := &s.reqs[id]
	kind := prefill
	if s.o.Limits.Undivided {
		kind = whole
	}
	best, least, cached := int32(-1), int64(math.MaxInt64), 0
	for i, e := range s.engines {
		if e.role != kind || e.state != ready {
			continue
		}
		have := s.cachedAt(e, r)
		cost := e.queued + e.guess(r.Prompt, have) + int64(streamNs*float64(e.streamsNow()))
		if cost < least {
			best, least, cached = int32(i), cost, have
		}
	}
	if best < 0 {
		s.nobody.push(id)
		return
	}
	e := s.engines[best]
	r.cached = cached
	r.all = e.guess(r.Prompt, cached)
	r.guess = r.all
	e.queued += r.all
	e.waiting.push(id)
	s.begin(best)
}

// cachedAt is how many tokens of a prompt an engine has; the last one is always computed.
func (s *sim) cachedAt(e *engine, r *request) int {
	return min(e.cache.has(r.blocks())*trace.BlockTokens, r.Prompt-1)
}

// begin computes the next step of an engine, if it has anything to do.
func (s *sim) begin(at int32) {
	e := s.engines[at]
	if e.busy || e.state == starting || e.state == gone {
		return
	}
	s.admit(e)
	s.reserve(at)
	for _, id := range e.landed {
		r := &s.reqs[id]
		have := int64(r.Prompt+r.Output) - r.left
		e.coming -= have
		e.live += have
		e.running.push(stream{end: e.steps + r.left, who: id})
	}
	e.landed = e.landed[:0]
	budget, pairs := e.t.ChunkTokens, 0.0
	for e.filling.len() > 0 && budget > 0 {
		id := e.filling.first()
		r := &s.reqs[id]
		n := min(budget, r.Prompt-r.done)
		pairs += float64(n) * (float64(r.done) + float64(n)/2)
		r.done += n
		budget -= n
		gone := r.guess
		if r.done < r.Prompt {
			gone = min(gone, int64(float64(r.all)*float64(n)/float64(r.Prompt-r.cached)))
		}
		r.guess -= gone
		e.queued -= gone
		if r.done < r.Prompt {
			break
		}
		e.finished = append(e.finished, id)
		e.filling.pop()
	}
	e.chunk, e.batch = e.t.ChunkTokens-budget, len(e.running)
	if e.chunk == 0 && e.batch == 0 {
		s.leave(e)
		return
	}
	e.busy = true
	e.took = max(int64(1e3*e.t.wallUs(e.chunk, pairs, e.batch, e.live)*s.jitter(1)), 1)
	s.events.push(s.now+e.took, stepEnds, at)
}

// admit finds room in the KV cache for prompts that wait, in order.
func (s *sim) admit(e *engine) {
	for e.waiting.len() > 0 && e.filling.len()+e.streamsNow() < e.t.Streams {
		r := &s.reqs[e.waiting.first()]
		need := int64(r.Prompt)
		if e.role == whole {
			need += int64(r.Output)
		}
		if e.kv+need > e.t.KVTokens {
			return
		}
		e.kv += need
		r.holds = need
		r.cached = s.cachedAt(e, r)
		r.done = r.cached
		e.filling.push(e.waiting.pop())
	}
}

// end completes an engine's step.
func (s *sim) end(at int32) {
	e := s.engines[at]
	e.busy = false
	step := planner.Step{Prompt: e.chunk, Streams: e.batch, KV: e.live, Took: time.Duration(e.took)}
	if e.chunk > 0 {
		e.lastPrompt = step
	} else {
		e.lastDecode = step
	}
	if e.batch > 0 {
		e.steps++
		e.live += int64(e.batch)
		s.report.gaps(s, e.took, e.batch)
		for len(e.running) > 0 && e.running[0].end <= e.steps {
			id := e.running.pop().who
			r := &s.reqs[id]
			e.live -= int64(r.Prompt + r.Output)
			e.kv -= r.holds
			s.finish(id)
		}
	}
	for _, id := range e.finished {
		s.prefilled(at, id)
	}
	e.finished = e.finished[:0]
	if e.state == draining && !s.o.StayDrained {
		s.giveAway(at)
	}
	s.begin(at)
}

// prefilled has the first token of a request.
func (s *sim) prefilled(at, id int32) {
	e, r := s.engines[at], &s.reqs[id]
	e.cache.use(r.blocks(), int((e.t.KVTokens-e.kv+int64(r.Prompt))/trace.BlockTokens))
	r.first = s.now
	r.left = int64(r.Output - 1)
	switch {
	case r.left == 0:
		e.kv -= r.holds
		s.finish(id)
	case e.role == whole:
		e.live += int64(r.Prompt + 1)
		e.running.push(stream{end: e.steps + r.left, who: id})
	default:
		r.from = at
		e.held++
		s.toDecode(id, s.pickDecode(r, decode, -1))
	}
}

// pickDecode is the engine whose steps would be shortest, among those with room if there are any; -1 is none but not.
func (s *sim) pickDecode(r *request, kind role, not int32) int32 {
	best, least := int32(-1), math.Inf(1)
	for i, e := range s.engines {
		if e.role != kind || e.state != ready || int32(i) == not {
			continue
		}
		cost := e.t.wallUs(0, 0, e.streamsNow()+e.pending.len(), e.live+e.coming+e.owed)
		if s.room(e, r) < 0 {
			cost += 1e9
		}
		if cost < least {
			best, least = int32(i), cost
		}
	}
	return best
}

// room is what is left of an engine's KV cache with a request and all that wait before it.
func (s *sim) room(e *engine, r *request) int64 {
	if e.streamsNow()+e.pending.len() >= e.t.Streams {
		return -1
	}
	return e.t.KVTokens - e.kv - e.owed - int64(r.Prompt+r.Output)
}

// toDecode lets a request wait for room in a decode engine.
func (s *sim) toDecode(id, to int32) {
	if to < 0 {
		panic("sim: no engine decodes") // the last one never drains
	}
	r := &s.reqs[id]
	r.to = to
	e := s.engines[to]
	e.owed += int64(r.Prompt+r.Output) - r.left
	e.pending.push(id)
	s.reserve(to)
}

// reserve has KV cache sent to an engine, to requests that wait there, as far as there is room.
func (s *sim) reserve(at int32) {
	e := s.engines[at]
	for e.pending.len() > 0 && e.streamsNow() < e.t.Streams {
		id := e.pending.first()
		r := &s.reqs[id]
		need := int64(r.Prompt + r.Output)
		if e.kv+need > e.t.KVTokens {
			return
		}
		e.pending.pop()
		e.kv += need
		have := need - r.left
		e.owed -= have
		e.coming += have
		e.inbound++
		from, t := s.engines[r.from], s.o.Table
		took := float64(have) * t.TokenBytes / t.ChannelBps * 1e9
		if !r.moving {
			took *= 1 - t.Overlap
		}
		took += t.ChannelUs * 1e3
		from.nic = max(from.nic, s.now) + int64(took)
		s.seen.TransferTokens += have
		s.seen.TransferTime += time.Duration(took)
		s.events.push(from.nic, kvLanded, id)
	}
}

// land has a request's KV cache where it is decoded.
func (s *sim) land(id int32) {
	r := &s.reqs[id]
	at := r.from
	from, to := s.engines[at], s.engines[r.to]
	from.held--
	from.kv -= r.holds
	r.holds = int64(r.Prompt + r.Output)
	r.from, r.moving = -1, false
	to.inbound--
	to.landed = append(to.landed, id)
	s.begin(r.to)
	s.begin(at)
	s.leave(from)
}
