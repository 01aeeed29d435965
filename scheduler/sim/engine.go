package sim

import (
	"github.com/headrace/headrace/scheduler/planner"
	"github.com/headrace/headrace/scheduler/trace"
)

type role uint8

const (
	prefill role = iota
	decode
	whole
	roles
)

type state uint8

const (
	starting state = iota
	ready
	draining
	gone
)

// request is one on its way. Its place is used again when it has ended.
type request struct {
	trace.Request
	at      int64
	counted bool // in the report
	cached  int  // tokens of the prompt that need no computing
	done    int  // tokens of the prompt that are computed or cached
	first   int64
	left    int64 // tokens of the answer to make, once the first is made
	guess   int64 // ns that its prompt is thought to take, what is left of them
	all     int64 // ns, all of them
	holds   int64 // tokens of KV cache reserved where it is now
	from    int32 // engine whose KV cache is to move, and that holds it until it has
	to      int32
	moving  bool // a stream that its engine gave away
}

// blocks are those of the prompt that are full, and can be cached.
func (r *request) blocks() []uint64 { return r.Blocks[:min(r.Prompt/trace.BlockTokens, len(r.Blocks))] }

// engine is one that is simulated.
type engine struct {
	role    role
	state   state
	t       *Timing
	ordered int64
	busy    bool

	waiting fifo // to be prefilled
	filling fifo // begun
	pending fifo // to be decoded, without room in the KV cache yet
	landed  []int32
	running streams
	inbound int   // requests whose KV cache has room here and is on its way
	held    int   // requests whose KV cache is here and is to leave
	kv      int64 // tokens reserved
	live    int64 // tokens in the running streams' KV cache
	coming  int64 // tokens in that of inbound and landed ones
	owed    int64 // tokens in that of pending ones
	queued  int64 // ns of prompts that wait or are computed
	nic     int64 // when what it sends has gone
	steps   int64
	cache   *cache

	// The step that is computed now.
	took     int64
	chunk    int
	batch    int
	finished []int32 // prompts that it completes

	lastPrompt planner.Step
	lastDecode planner.Step
}

// streamsNow counts all that have room here to be decoded.
func (e *engine) streamsNow() int { return len(e.running) + len(e.landed) + e.inbound }

// empty tells whether nothing is left that an engine must stay for.
func (e *engine) empty() bool {
	return !e.busy && e.waiting.len()+e.filling.len()+e.pending.len()+e.streamsNow()+e.held == 0
}

// usage is the share of the KV cache in use, as an engine tells it.
func (e *engine) usage() float64 {
	if e.role == decode {
		return float64(e.live+e.coming) / float64(e.t.KVTokens)
	}
	return float64(e.kv) / float64(e.t.KVTokens)
}

func (e *engine) reset(r role, t *Timing, now int64) {
	c := e.cache
	if c == nil {
		c = newCache()
	}
	c.clear()
	*e = engine{role: r, t: t, ordered: now, cache: c, waiting: e.waiting, filling: e.filling, pending: e.pending, landed: e.landed[:0], running: e.running[:0], finished: e.finished[:0]}
	e.waiting.clear()
	e.filling.clear()
	e.pending.clear()
}

// guess is how long a prompt may take, in nanoseconds, with so many tokens cached.
func (e *engine) guess(prompt, cached int) int64 {
	p, c := float64(prompt), float64(cached)
	return int64(1e3 * (e.t.StepUs + e.t.PromptTokenUs*(p-c) + e.t.PromptAttention*1e-6*(p*p-c*c)/2))
}
