package pairsim

import (
	"time"

	"github.com/headrace/headrace/router/pairing"
)

// Timing is how fast a simulated engine is. A step computes a token of each stream and a piece of the prompts that wait.
type Timing struct {
	PrefillRate float64       `json:"prefill_tokens_per_s"`
	Step        time.Duration `json:"step_ns"`        // of what takes no prefill and has no stream
	StepStream  time.Duration `json:"step_stream_ns"` // more for each stream
	ChunkTokens int           `json:"chunk_tokens"`   // of prompts, in one step
	Blocks      int           `json:"blocks"`         // of the KV cache, BlockTokens each
	Streams     int           `json:"streams"`        // at once
	ChannelBps  float64       `json:"channel_bytes_per_s"`
	TokenBytes  float64       `json:"token_bytes"` // of KV cache
}

// DefaultTiming is about that of a model of 8 billion parameters on an accelerator of 80 GB.
func DefaultTiming() Timing {
	return Timing{PrefillRate: 25000, Step: 8 * time.Millisecond, StepStream: 100 * time.Microsecond, ChunkTokens: 4096,
		Blocks: 800, Streams: 256, ChannelBps: 25e9, TokenBytes: 128 << 10}
}

// Faster is the timing with everything k times as fast.
func (t Timing) Faster(k float64) Timing {
	t.PrefillRate *= k
	t.ChannelBps *= k
	t.Step = time.Duration(float64(t.Step) / k)
	t.StepStream = time.Duration(float64(t.StepStream) / k)
	return t
}

// job is a request on its way.
type job struct {
	q       *Request
	n       int // in the trace
	prefill *engine
	decode  *engine // the same one for a whole request
	tokens  int     // of the prompt that the router thought were to be computed
	sentAt  time.Duration
	// What the policy took for the time to the first token, in seconds, if it did.
	estimate  float64
	estimated bool
	ahead     int64 // tokens that were queued before it, those of its own included
	left      int   // of the prompt to compute
	cached    int   // tokens that were in the cache when it began
	firstAt   time.Duration
	made      int // tokens of the answer
	streams0  int64
}

// engine is one worker.
type engine struct {
	t       Timing
	w       *pairing.Worker
	cache   *cache
	waiting []*job // to be prefilled, in order
	filling []*job // blocks were found for them
	arrived []*job // KV is on its way or there, to be decoded
	running []*job
	busy    bool
	ends    []time.Duration // of requests that were decoded here

	// What the router knows.
	load      pairing.Load
	headSince time.Duration
	learned   pairing.Estimator
	said      pairing.Engine
}

// blocksOf is how many blocks a request needs here.
func (e *engine) blocksOf(j *job) int {
	n := j.q.Input
	if j.decode == e {
		n += j.q.Output
	}
	return (n + BlockTokens - 1) / BlockTokens
}

// admit finds blocks for what waits, in order.
func (e *engine) admit() {
	for len(e.waiting) > 0 && len(e.running)+len(e.filling) < e.t.Streams {
		j := e.waiting[0]
		n, ok := e.reserve(j)
		if !ok {
			return
		}
		e.waiting = e.waiting[1:]
		j.cached = min(n*BlockTokens, j.q.Input-1)
		j.left = j.q.Input - j.cached
		e.filling = append(e.filling, j)
	}
}

// reserve takes the blocks of a job and tells how many of them were cached.
func (e *engine) reserve(j *job) (cached int, ok bool) {
	ids := j.q.whole()
	n := e.cache.cached(ids)
	more := e.blocksOf(j) - n
	if !e.cache.fits(ids[:n], more) && len(e.running)+len(e.filling) > 0 {
		return 0, false
	}
	e.cache.hold(ids[:n])
	e.cache.take(more)
	return n, true
}

// step computes one step that begins now, and tells how long it takes and what it will have done; nil if there is nothing to do.
func (e *engine) step() (time.Duration, func(now time.Duration, s *sim)) {
	e.admit()
	e.join()
	if len(e.filling) == 0 && len(e.running) == 0 {
		return 0, nil
	}
	budget := e.t.ChunkTokens
	var done []*job
	for len(e.filling) > 0 && budget > 0 {
		j := e.filling[0]
		n := min(budget, j.left)
		j.left -= n
		budget -= n
		if j.left > 0 {
			break
		}
		done = append(done, j)
		e.filling = e.filling[1:]
	}
	streams := len(e.running)
	took := e.t.Step + time.Duration(streams)*e.t.StepStream + time.Duration(float64(e.t.ChunkTokens-budget)/e.t.PrefillRate*float64(time.Second))
	return took, func(now time.Duration, s *sim) {
		e.decoded(now, s, streams)
		for _, j := range done {
			e.prefilled(now, s, j)
		}
	}
}

// join lets those decode whose KV cache has come.
func (e *engine) join() {
	kept := e.arrived[:0]
	for _, j := range e.arrived {
		if len(e.running) >= e.t.Streams {
			kept = append(kept, j)
			continue
		}
		e.running = append(e.running, j)
	}
	e.arrived = kept
}

func (e *engine) decoded(now time.Duration, s *sim, streams int) {
	kept := e.running[:0]
	for i, j := range e.running {
		if i < streams {
			j.made++
		}
		if j.made < j.q.Output {
			kept = append(kept, j)
			continue
		}
		e.free(j, true)
		s.finish(j, now)
	}
	e.running = kept
}

// free lets go of a job's blocks. Its prompt's full ones stay to be found.
func (e *engine) free(j *job, named bool) {
	ids := j.q.whole()
	if named {
		e.cache.release(ids)
	}
	e.cache.give(e.blocksOf(j) - len(ids))
}

// prefilled: the prompt is computed, and the first token made.
func (e *engine) prefilled(now time.Duration, s *sim, j *job) {
	ids := j.q.whole()
	e.cache.name(ids[j.cached0():])
	j.made = 1
	s.first(j, now)
	switch {
	case j.decode == e && j.q.Output > 1:
		e.running = append(e.running, j)
	case j.decode == e:
		e.free(j, true)
		s.finish(j, now)
	default:
		s.move(j, now)
	}
}

// cached0 is how many blocks were cached when the prompt was begun.
func (j *job) cached0() int { return min((j.cached+1)/BlockTokens, len(j.q.whole())) }
