package router

import (
	"time"

	"github.com/headrace/headrace/router/pairing"
)

// charge books the work of one attempt, and learns from it how fast its workers are.
type charge struct {
	prefill, decode *booked
	heir            *booked   // who is to go on with the stream
	parts           [2]booked // which these are
	tokens          int64     // to prefill
	held            int64     // of KV cache
	ahead           int64     // to prefill before the attempt's prompt is done, its own included
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

// charge books an attempt's work into c, now. Where v is not nil and work was added since to one of the workers that were chosen by
// it, charge books nothing and is false: whoever decides at the same time would take the same worker for the least loaded.
func (f *fleet) charge(c *charge, d *pairing.Decision, v *pairing.View, tokens, held int64, now time.Time) bool {
	members := *f.members.Load()
	f.booking.Lock()
	defer f.booking.Unlock()
	if v != nil && surpassed(v, d, members) {
		return false
	}
	*c = charge{tokens: tokens, held: held, at: now}
	find := func(i int, w *pairing.Worker) *booked {
		if m := members[w.ID]; m != nil {
			c.parts[i] = booked{m.charges, m.health}
		} else {
			c.parts[i].charges = &charges{} // left the fleet since the decision
		}
		return &c.parts[i]
	}
	if d.Whole != nil {
		c.prefill = find(0, d.Whole)
		c.decode = c.prefill
	} else {
		c.prefill, c.decode = find(0, d.Prefill), find(1, d.Decode)
	}
	p := c.prefill
	before := p.prefills.Add(1) - 1
	c.ahead = p.prefillTokens.Add(tokens)
	if before <= 0 {
		p.headSince.Store(c.at.UnixNano())
	} else {
		c.ahead -= p.worked(c.at, (c.ahead-tokens)/before)
	}
	c.decode.decodes.Add(1)
	c.decode.heldTokens.Add(held)
	p.given.Add(1) // when all is booked: see viewAt
	if c.decode != p {
		c.decode.given.Add(1)
	}
	return true
}

// surpassed tells whether one of the workers of a decision has been given work since the view by which it was made.
func surpassed(v *pairing.View, d *pairing.Decision, members map[string]*member) bool {
	for i := range v.Workers {
		switch c := &v.Workers[i]; c.Worker {
		case d.Prefill, d.Decode, d.Whole:
			if m := members[c.ID]; m != nil && m.charges.given.Load() != c.Given {
				return true
			}
		}
	}
	return false
}

// worked is how many tokens of the prompt at work have been computed by now, which is taken to have as many as the mean:
// they are not ahead of who comes now, and taken for it they would make the worker seem faster than it is.
func (b *booked) worked(now time.Time, mean int64) int64 {
	if b.health == nil {
		return 0
	}
	b.health.mu.Lock()
	rate := b.health.learned.Speeds().PrefillRate
	b.health.mu.Unlock()
	seconds := float64(now.UnixNano()-b.headSince.Load()) / 1e9
	return min(max(int64(seconds*rate), 0), max(mean, 0))
}

// prefilled says that the prompt's work is done. Idempotent.
func (c *charge) prefilled(now time.Time) {
	p := c.prefill
	if p == nil {
		return
	}
	if p.health != nil {
		p.health.mu.Lock()
		p.health.learned.Prefilled(c.ahead, now.Sub(c.at))
		p.health.unread = true
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
	c.keep()
	c.drop()
	c.leave()
}

// leave gives the stream back to the worker that has it.
func (c *charge) leave() {
	d := c.decode
	if d == nil {
		return
	}
	c.decode = nil
	if c.made >= itlTokensMin && d.health != nil {
		streams := float64(c.streams+d.decodes.Load()) / 2
		d.health.mu.Lock()
		d.health.learned.Decoded(streams, c.last.Sub(c.first)/time.Duration(c.made))
		d.health.unread = true
		d.health.mu.Unlock()
	}
	d.decodes.Add(-1)
	d.heldTokens.Add(-c.held)
}

// entrust books the stream at the worker, too, that is to go on with it.
func (f *fleet) entrust(c *charge, w *pairing.Worker) {
	c.heir = &booked{charges: &charges{}}
	if m := (*f.members.Load())[w.ID]; m != nil {
		c.heir = &booked{m.charges, m.health}
	}
	c.heir.decodes.Add(1)
	c.heir.heldTokens.Add(c.held)
}

// keep takes that back. Idempotent.
func (c *charge) keep() {
	if h := c.heir; h != nil {
		c.heir = nil
		h.decodes.Add(-1)
		h.heldTokens.Add(-c.held)
	}
}

// passOn says that the other worker has the stream. What was learned of the one before is kept apart.
func (c *charge) passOn() {
	c.drop()
	c.leave()
	c.decode, c.heir = c.heir, nil
	c.first, c.made, c.streams = time.Time{}, 0, 0
}
