package router

import (
	"time"

	"github.com/headrace/headrace/router/pairing"
)

// charge books the work of one attempt, and learns from it how fast its workers are.
type charge struct {
	now             func() time.Time
	prefill, decode *booked
	tokens          int64 // to prefill
	held            int64 // of KV cache
	ahead           int64 // to prefill before the attempt's prompt is done, its own included
	at              time.Time

	// Of the answer.
	first, last time.Time
	made        int // tokens behind the first ones
	streams     int64
}

// booked is a worker's part of a charge.
type booked struct {
	*charges
	health *health // nil when it left the fleet
}

func (f *fleet) charge(d pairing.Decision, tokens, held int64) *charge {
	members := *f.members.Load()
	find := func(w *pairing.Worker) *booked {
		if m := members[w.ID]; m != nil {
			return &booked{m.charges, m.health}
		}
		return &booked{charges: &charges{}} // left the fleet since the decision
	}
	c := &charge{now: f.now, tokens: tokens, held: held, at: f.now()}
	if d.Whole != nil {
		c.prefill = find(d.Whole)
		c.decode = c.prefill
	} else {
		c.prefill, c.decode = find(d.Prefill), find(d.Decode)
	}
	p := c.prefill
	if p.prefills.Add(1) == 1 {
		p.headSince.Store(c.at.UnixNano())
	}
	c.ahead = p.prefillTokens.Add(tokens)
	c.decode.decodes.Add(1)
	c.decode.heldTokens.Add(held)
	return c
}

// prefilled says that the prompt's work is done. Idempotent.
func (c *charge) prefilled() {
	p := c.prefill
	if p == nil {
		return
	}
	now := c.now()
	if p.health != nil {
		p.health.mu.Lock()
		p.health.learned.Prefilled(c.ahead, now.Sub(c.at))
		p.health.mu.Unlock()
	}
	p.headSince.Store(now.UnixNano())
	c.drop()
}

// drop gives back what the prompt was charged with.
func (c *charge) drop() {
	if c.prefill != nil {
		c.prefill.prefillTokens.Add(-c.tokens)
		c.prefill.prefills.Add(-1)
		c.prefill = nil
	}
}

// text notes that n tokens of the answer came.
func (c *charge) text(n int, now time.Time) {
	if c.first.IsZero() {
		c.first = now
		if c.decode != nil {
			c.streams = c.decode.decodes.Load()
		}
	} else {
		c.made += n
	}
	c.last = now
}

// itlTokensMin is how many tokens an answer needs to tell how fast tokens come.
const itlTokensMin = 8

// release gives back everything. Idempotent.
func (c *charge) release() {
	c.drop()
	d := c.decode
	if d == nil {
		return
	}
	c.decode = nil
	if c.made >= itlTokensMin && d.health != nil {
		streams := float64(c.streams+d.decodes.Load()) / 2
		d.health.mu.Lock()
		d.health.learned.Decoded(streams, c.last.Sub(c.first)/time.Duration(c.made))
		d.health.mu.Unlock()
	}
	d.decodes.Add(-1)
	d.heldTokens.Add(-c.held)
}
