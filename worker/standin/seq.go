package standin

import (
	"context"
	"slices"
	"time"

	"github.com/headrace/headrace/internal/openai"
	"github.com/headrace/headrace/worker/api"
	"github.com/headrace/headrace/worker/kv"
)

type state uint8

const (
	stWaiting state = iota // for blocks
	stAwaitKV              // decode leg: for prefill's KV
	stRunning
	stHanding // prefill leg: its part is computed, the KV is under way
)

// seq is one request. The loop owns it.
type seq struct {
	req   *api.Request
	ctx   context.Context
	out   chan api.TokenEvent
	order uint64
	draw  uint64
	end   int // how many tokens the answer has, its end token included; 0: it has no end of its own

	state     state
	ended     bool
	unwatch   func() bool
	expiry    *time.Timer
	tokens    []int32 // the context, and the token sampled last
	computed  int     // of these
	blocks    []uint32
	committed int // blocks that can be found
	content   kv.ContentID
	cached    int

	leg *leg // nil for a whole request
}

// eventsAhead is how many events a request's reader may lag behind. It never waits for its client.
const eventsAhead = 64

func (e *Engine) newSeq(ctx context.Context, r *api.Request) *seq {
	s := &seq{req: r, ctx: ctx, out: make(chan api.TokenEvent, eventsAhead), content: kv.Root, tokens: slices.Concat(r.Prompt, r.Resume)}
	sampling := uint64(0)
	if r.Sampling.Temperature > 0 {
		sampling = r.Sampling.Seed + 1
	}
	s.draw = drawn(e.cfg.Seed, r.Prompt, sampling, r.Choice)
	if n := uint64(e.table.AnswerTokens); n > 0 && !r.IgnoreEOS {
		s.end = int(n/2 + mix(s.draw, 1<<32)%(n+1))
	}
	if room := e.info.Context - len(r.Prompt); r.MaxTokens > room {
		short := *r
		short.MaxTokens = room
		s.req = &short
	}
	return s
}

func (s *seq) given() int { return len(s.tokens) - len(s.req.Prompt) }

// decoding tells that all but the token sampled last is computed.
func (s *seq) decoding() bool {
	return s.computed == len(s.tokens)-1 && s.given() > len(s.req.Resume)
}

func (s *seq) emit(ev api.TokenEvent) {
	ev.CachedTokens = s.cached
	select {
	case s.out <- ev:
	case <-s.ctx.Done():
	}
}

func (s *seq) phase(name string) { s.emit(api.TokenEvent{Kind: api.EventPhase, Phase: name}) }

// admit takes a request, or says why not.
func (e *Engine) admit(s *seq) error {
	if e.closing || len(e.waiting) >= e.table.WaitingMax {
		return api.ErrBusy
	}
	s.unwatch = context.AfterFunc(s.ctx, func() { e.post(func() { e.endSeq(s) }) })
	e.order++
	s.order = e.order
	if s.req.Role != api.RoleWhole && !e.admitLeg(s) {
		return nil
	}
	if s.state == stWaiting {
		e.waiting = append(e.waiting, s)
	}
	s.phase(api.PhaseQueued)
	return nil
}

// start gives a request its blocks; false when there are too few.
func (e *Engine) start(s *seq) bool {
	if !e.allocate(s) {
		return false
	}
	e.count.PrefixQueries += uint64(len(s.tokens))
	e.count.PrefixHits += uint64(s.computed)
	if s.given() == len(s.req.Resume) {
		s.cached = min(s.computed, len(s.req.Prompt))
	}
	s.state = stRunning
	e.activate(s)
	s.phase(api.PhasePrefilling)
	if s.leg != nil && s.req.Role == api.RolePrefill {
		e.present(s)
	}
	return true
}

// allocate takes what the prefix cache has of the tokens, and free blocks for the rest.
func (e *Engine) allocate(s *seq) bool {
	blocks, content := e.pool.Match(s.tokens[:len(s.tokens)-1]) // the last one is always computed: it gives the answer
	need := e.pool.BlocksFor(len(s.tokens)) - len(blocks)
	// Each that decodes is left a block, or the newcomer is preempted at once.
	if spare := e.pool.Free() - need; spare < 0 || spare < e.decoders() && len(e.active) > 0 {
		e.pool.Release(blocks)
		return false
	}
	more, err := e.pool.Alloc(need)
	if err != nil { // what matched was among the free ones
		e.pool.Release(blocks)
		return false
	}
	s.committed, s.content = len(blocks), content
	s.computed = len(blocks) * e.pool.BlockTokens()
	s.blocks = append(blocks, more...)
	return true
}

func (e *Engine) activate(s *seq) {
	i, _ := slices.BinarySearchFunc(e.active, s.order, func(a *seq, order uint64) int { return int(a.order) - int(order) })
	e.active = slices.Insert(e.active, i, s)
}

func (e *Engine) decoders() int {
	n := 0
	for _, s := range e.active {
		if s.state == stRunning && s.decoding() {
			n++
		}
	}
	return n
}

// grow makes room for one more token, at the cost of the youngest that can be computed again. False when that is s itself.
func (e *Engine) grow(s *seq) bool {
	if s.state != stRunning || e.pool.BlocksFor(s.computed+1) <= len(s.blocks) {
		return s.state == stRunning
	}
	for {
		b, err := e.pool.Alloc(1)
		if err == nil {
			s.blocks = append(s.blocks, b...)
			return true
		}
		victim := s
		for _, o := range e.active {
			if o.state == stRunning && (o.leg == nil || o.req.Role == api.RoleDecode) {
				victim = o // the last in order
			}
		}
		e.preempt(victim)
		if victim == s {
			return false
		}
	}
}

// preempt takes a request's blocks. It is computed anew, as soon as there are some.
func (e *Engine) preempt(s *seq) {
	e.count.Preemptions++
	e.free(s)
	s.state, s.computed, s.committed, s.content = stWaiting, 0, 0, kv.Root
	e.waiting = slices.Insert(e.waiting, 0, s)
}

// free gives the blocks back.
func (e *Engine) free(s *seq) {
	e.pool.Release(s.blocks)
	s.blocks = nil
	if i := slices.Index(e.active, s); i >= 0 {
		e.active = slices.Delete(e.active, i, i+1)
	}
}

// commit makes full blocks findable.
func (e *Engine) commit(s *seq) {
	bt := e.pool.BlockTokens()
	for (s.committed+1)*bt <= s.computed {
		at := s.committed * bt
		s.content = e.pool.Commit(s.blocks[s.committed], s.content, s.tokens[at:at+bt])
		s.committed++
	}
}

// sample gives a request its next token.
func (e *Engine) sample(s *seq) {
	if s.req.MaxTokens == 0 { // the prompt alone was asked for
		s.emit(api.TokenEvent{Kind: api.EventFinish, Finish: openai.FinishLength})
		e.endSeq(s)
		return
	}
	ev := api.TokenEvent{Kind: api.EventToken, Token: wordFirst + int32(mix(s.draw, uint64(s.given()))%words)}
	n := s.given() + 1
	if n == 1 && s.req.PromptLogprobs {
		s.emit(api.TokenEvent{Kind: api.EventPrompt, Prompt: promptLogprobs(s.req.Prompt)})
	}
	switch {
	case s.end > 0 && n >= s.end:
		ev.Token, ev.Finish = endToken, openai.FinishStop
	case slices.Contains(s.req.StopTokens, ev.Token):
		ev.Finish = openai.FinishStop
	case n >= s.req.MaxTokens:
		ev.Finish = openai.FinishLength
	}
	if s.req.Logprobs {
		ev.Logprob = &openai.Logprob{TokenLogprob: openai.TokenLogprob{Token: ev.Token}}
	}
	s.tokens = append(s.tokens, ev.Token)
	e.count.GenerationTokens++
	s.emit(ev)
	switch {
	case ev.Finish != "":
		e.endSeq(s)
	case s.req.Role == api.RolePrefill:
		e.handOff(s)
	}
}

// endSeq ends a request, whatever it is at.
func (e *Engine) endSeq(s *seq) {
	if s.ended {
		return
	}
	s.ended = true
	s.unwatch()
	if s.expiry != nil {
		s.expiry.Stop()
	}
	e.free(s)
	if i := slices.Index(e.waiting, s); i >= 0 {
		e.waiting = slices.Delete(e.waiting, i, i+1)
	}
	e.endLeg(s)
	close(s.out)
}

// fail ends a request that another worker may serve.
func (e *Engine) fail(s *seq, reason string) {
	if !s.ended {
		s.emit(api.TokenEvent{Kind: api.EventFailed, Reason: reason})
		e.endSeq(s)
	}
}

// promptLogprobs are what there is to say of a prompt: that all of it was certain.
func promptLogprobs(prompt []int32) []openai.Logprob {
	list := make([]openai.Logprob, len(prompt))
	for i, id := range prompt {
		list[i].Token, list[i].Unknown = id, i == 0
	}
	return list
}
