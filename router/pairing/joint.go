package pairing

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"sync"
)

// Joint takes the choice of least estimated time for the request and those it delays, of all pairs that fit and of all
// workers that could do everything: so it also decides whether to disaggregate at all. What costs the same is spread.
// It is as pure as a function: the same request, view and seed have the same answer.
type Joint struct{ Seed uint64 }

var _ Policy = (*Joint)(nil)

// Name is the policy's name in configuration and metrics.
func (*Joint) Name() string { return NameJoint }

const (
	// Choices as good as the best within these are drawn from: estimates are not exact to a thousandth.
	tieShare   = 0.001
	tieSeconds = 50e-6
	// optionsKept bounds what one decision shows.
	optionsKept = 16
)

// choice is a pair, or one worker, with its cost.
type choice struct {
	p, d, whole *side
	cost        Cost
	total       float64
}

// Pick filters, scores and picks.
func (j *Joint) Pick(_ context.Context, r Request, v *View) (Decision, error) {
	f := filter(&r, v)
	if len(f.left) == 0 {
		return Decision{}, f.none(&r)
	}
	w := weighings.Get().(*weighing)
	defer w.done()
	w.r, w.v, w.others, w.best = &r, v, learned(v), math.Inf(1)
	w.take(f.left)
	why := w.wholes()
	if !r.Whole {
		n := w.pairs()
		why = n.why(f.left)
		if n.pairs > 0 {
			why = fmt.Sprintf("better than the best of %d pairs", n.pairs)
			if math.IsInf(w.bestPair, 1) {
				why = fmt.Sprintf("better than any of %d pairs could be", n.pairs)
			}
		}
	}
	if len(w.choices) == 0 {
		return Decision{}, f.apart(why)
	}
	picked := w.pick(j.Seed)
	d := Decision{Rejected: f.rejected, Weighed: len(w.choices)}
	d.Options = w.show(picked)
	at := picked.whole
	if at != nil {
		d.Whole = at.c.Worker
		d.Reason = f.note("whole: "+why+": "+picked.cost.words()) + strained(at.c)
	} else {
		at = picked.p
		d.Prefill, d.Decode = at.c.Worker, picked.d.c.Worker
		d.Reason = f.note(fmt.Sprintf("pair: best of %d choices: ", len(w.choices))+picked.cost.words()) + strained(at.c, picked.d.c)
		if way, known := v.channel(at.c, picked.d.c); known {
			d.Reason += "; " + way.words(r.PromptTokens-picked.d.cached)
		}
	}
	d.CachedTokens = at.cached
	return d, nil
}

// weighings keeps their memory: 100 KB for 256 workers, of which a decision takes nothing along.
var weighings = sync.Pool{New: func() any { return new(weighing) }}

// weighing is one decision on its way.
type weighing struct {
	r        *Request
	v        *View
	others   Speeds
	sides    []side
	choices  []choice
	p, d     []*side // that could be either end of a pair
	best     float64
	bestPair float64
}

// done gives the memory to the next decision, and keeps nothing of the request alive.
func (w *weighing) done() {
	w.r, w.v = nil, nil
	weighings.Put(w)
}

func (w *weighing) take(left []*Candidate) {
	w.sides, w.choices = slices.Grow(w.sides[:0], len(left)), w.choices[:0]
	w.bestPair = math.Inf(1)
	for _, c := range left {
		w.sides = append(w.sides, newSide(w.r, c, &w.others))
	}
}

// wholes weighs the workers that could do everything. Those set aside for prefill do so only if nobody else decodes.
func (w *weighing) wholes() (why string) {
	decodes := slices.ContainsFunc(w.sides, func(x side) bool { return x.c.Alone() && x.c.Role.Decodes() })
	for i := range w.sides {
		if x := &w.sides[i]; x.c.Alone() && (x.c.Role.Decodes() || !decodes) {
			w.add(choice{whole: x, cost: x.whole()})
		}
	}
	return "this attempt asks for one worker"
}

func (w *weighing) add(c choice) {
	c.total = c.cost.Total()
	w.best = min(w.best, c.total)
	if c.whole == nil {
		w.bestPair = min(w.bestPair, c.total)
	}
	w.choices = append(w.choices, c)
}

// pairs weighs the pairs that fit. What one worker costs is a lower bound for all pairs it is in, as a transfer takes no
// time at best, so that in a large fleet most pairs need not be looked at.
func (w *weighing) pairs() ends {
	n := ends{unfit: "no two workers fit together"}
	prefills, decodes := w.p[:0], w.d[:0]
	for i := range w.sides {
		x := &w.sides[i]
		if x.c.sends() && !w.r.unpaired(x.c, &n) {
			prefills = append(prefills, x)
		}
		if x.c.takes() {
			decodes = append(decodes, x)
		}
	}
	w.p, w.d = prefills, decodes
	n.prefills = len(prefills)
	slices.SortStableFunc(prefills, func(a, b *side) int { return cmp.Compare(a.prefillTotal, b.prefillTotal) })
	slices.SortStableFunc(decodes, func(a, b *side) int { return cmp.Compare(a.decodeTotal, b.decodeTotal) })
	for _, p := range prefills {
		for _, d := range decodes {
			if p.prefillTotal+d.decodeTotal > w.limit() && n.pairs > 0 {
				break
			}
			if n.fits(w.v, p.c, d.c) {
				n.pairs++
				w.add(choice{p: p, d: d, cost: p.pair(w.r, w.v, d)})
			}
		}
	}
	return n
}

// limit is what a choice may cost at most to be drawn from.
func (w *weighing) limit() float64 { return w.best*(1+tieShare) + tieSeconds }

// pick draws one of the best.
func (w *weighing) pick(seed uint64) *choice {
	var picked *choice
	var lot uint64
	limit := w.limit()
	for i := range w.choices {
		c := &w.choices[i]
		if c.total > limit {
			continue
		}
		if x := c.lot(seed, w.r); picked == nil || x < lot {
			picked, lot = c, x
		}
	}
	return picked
}

// lot is a random number that belongs to this choice for this request.
func (c *choice) lot(seed uint64, r *Request) uint64 {
	seed += uint64(r.Attempt)
	if c.whole != nil {
		return mix(seed, r.ID, c.whole.c.ID)
	}
	return mix(seed, r.ID, c.p.c.ID, c.d.c.ID)
}

// show is what was weighed, the picked one first and then by cost.
func (w *weighing) show(picked *choice) []Option {
	var room [optionsKept]*choice
	best := room[:0]
	for i := range w.choices {
		c := &w.choices[i]
		if c == picked || len(best) == cap(best) && c.total >= best[len(best)-1].total {
			continue
		}
		if len(best) == cap(best) {
			best = best[:len(best)-1]
		}
		k := len(best)
		for k > 0 && best[k-1].total > c.total {
			k--
		}
		best = slices.Insert(best, k, c)
	}
	out := make([]Option, 0, min(len(w.choices), optionsKept))
	out = append(out, picked.option())
	out[0].Chosen = true
	for _, c := range best {
		if len(out) < cap(out) {
			out = append(out, c.option())
		}
	}
	return out
}

func (c *choice) option() Option {
	o := Option{Cost: c.cost, Sum: c.total}
	if c.whole != nil {
		o.Whole, o.CachedPrefill, o.CachedDecode = c.whole.c.ID, c.whole.cached, c.whole.cached
		return o
	}
	o.Prefill, o.Decode = c.p.c.ID, c.d.c.ID
	o.CachedPrefill, o.CachedDecode = c.p.cached, c.d.cached
	return o
}
