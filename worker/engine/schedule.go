package engine

import (
	"cmp"
	"slices"

	"github.com/headrace/headrace/worker/api"
)

// schedule picks the next step's work: a token for everyone who decodes, then prompt chunks, requests whose blocks
// are already bound at D before others, and new requests while blocks and the token budget last.
func (e *Engine) schedule() []work {
	e.tryBind()
	batch := e.scheduleDecode()
	// decoding is never held back by the budget, prompts get at least an eighth of it
	budget := max(e.cfg.BatchTokens-len(batch), e.cfg.BatchTokens/8, 1)
	batch = e.schedulePrefill(batch, &budget)
	for budget > 0 && len(e.waiting) > 0 && len(e.active) < e.cfg.SeqsMax {
		s := e.waiting[0]
		if !e.start(s) {
			break
		}
		e.waiting = e.waiting[1:]
		n := s.chunk(budget)
		budget -= n
		batch = append(batch, work{seq: s, n: n})
	}
	return batch
}

func (e *Engine) scheduleDecode() []work {
	var batch []work
	for _, s := range slices.Clone(e.active) {
		if s.state == stRunning && s.decoding() && e.grow(s) {
			batch = append(batch, work{seq: s, n: 1})
		}
	}
	// growing may have taken the blocks of one that was already picked
	return slices.DeleteFunc(batch, func(w work) bool { return w.seq.state != stRunning })
}

func (e *Engine) schedulePrefill(batch []work, budget *int) []work {
	var fill []*seq
	for _, s := range e.active {
		if s.state == stRunning && !s.decoding() {
			fill = append(fill, s)
		}
	}
	slices.SortStableFunc(fill, func(a, b *seq) int {
		if a.bound() != b.bound() {
			if a.bound() {
				return -1
			}
			return 1
		}
		return cmp.Compare(a.order, b.order)
	})
	for _, s := range fill {
		n := s.chunk(*budget)
		if n == 0 {
			break
		}
		*budget -= n
		batch = append(batch, work{seq: s, n: n})
	}
	return batch
}

// scoringRows bounds how many positions of a prompt have their logits at once: each takes a vocabulary of floats.
const scoringRows = 32

// chunk is how many tokens of s a step computes.
func (s *seq) chunk(budget int) int {
	if s.scoring() {
		budget = min(budget, scoringRows)
	}
	return min(s.remaining(), budget)
}

// start gives a waiting request its blocks: what the prefix cache holds of its tokens, and free ones for the rest.
func (e *Engine) start(s *seq) bool {
	known := s.tokens[:len(s.tokens)-1] // the last token is always computed: it gives the logits
	if s.scoring() {
		known, s.scores = nil, s.scores[:0]
	}
	blocks, content := e.pool.Match(known)
	need := e.pool.BlocksFor(len(s.tokens)) - len(blocks)
	// leave a block for each that decodes, or the newcomer is preempted at once
	if e.pool.Free() < need+e.decoders() && (len(e.active) > 0 || e.pool.Free() < need) {
		e.pool.Release(blocks)
		e.dropUnbound()
		return false
	}
	more, err := e.pool.Alloc(need)
	if err != nil {
		e.pool.Release(blocks)
		return false
	}
	s.committed, s.content = len(blocks), content
	s.computed = len(blocks) * e.pool.BlockTokens()
	s.blocks = append(blocks, more...)
	e.count.prefixQueries += uint64(len(s.tokens))
	e.count.prefixHits += uint64(s.computed)
	if s.generated() == len(s.req.Resume) {
		s.cached = min(s.computed, s.prompt())
	}
	s.state = stRunning
	e.insertActive(s)
	s.phase(api.PhasePrefilling)
	if s.isPrefillLeg() {
		e.present(s, s.req.Peer)
	}
	return true
}

func (e *Engine) insertActive(s *seq) {
	i, _ := slices.BinarySearchFunc(e.active, s.order, func(a *seq, order uint64) int { return cmp.Compare(a.order, order) })
	e.active = slices.Insert(e.active, i, s)
}

func (e *Engine) decoders() int {
	n := 0
	for _, s := range e.active {
		if s.state == stRunning && !s.isPrefillLeg() {
			n++
		}
	}
	return n
}

// grow makes room for one more token.
func (e *Engine) grow(s *seq) bool { return e.room(s, s.computed+1) }

// room makes room for n tokens in all, at the cost of the youngest request that can be computed again.
func (e *Engine) room(s *seq, n int) bool {
	for e.pool.BlocksFor(n) > len(s.blocks) {
		b, err := e.pool.Alloc(1)
		if err == nil {
			s.blocks = append(s.blocks, b...)
			continue
		}
		victim := e.youngest()
		if victim == nil {
			e.keepOne()
			return false
		}
		e.preempt(victim)
		if victim == s {
			return false
		}
	}
	return true
}

// youngest is the last to arrive of those whose blocks no peer touches.
func (e *Engine) youngest() *seq {
	for i := len(e.active) - 1; i >= 0; i-- {
		if s := e.active[i]; s.state == stRunning && s.lease == nil && s.fences == 0 {
			return s
		}
	}
	return nil
}

// preempt takes a request's blocks and puts it back in front of the queue. Its tokens stay; computing them again
// gives the same KV, so the client sees a pause and nothing else.
func (e *Engine) preempt(s *seq) {
	e.count.preemptions++
	e.release(s)
	e.active = without(e.active, s)
	s.state = stWaiting
	e.waiting = slices.Insert(e.waiting, 0, s)
}

// dropUnbound gives up the oldest finished prompt that nobody has bound, when those take more than their share and a
// newcomer finds no blocks. Without this two engines could wait for each other's blocks.
func (e *Engine) dropUnbound() {
	held := 0
	var oldest *seq
	for _, s := range e.active {
		if s.state == stHandoff && !s.bound() {
			held += len(s.blocks)
			if oldest == nil {
				oldest = s
			}
		}
	}
	if oldest != nil && held*100 > e.cfg.UnboundPercent*e.pool.Total() {
		e.fail(oldest, "the decode side did not bind its blocks in time and the prefill cache is full")
	}
}
