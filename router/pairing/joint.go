package pairing

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
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
	w := weighing{r: &r, v: v, others: learned(v), best: math.Inf(1)}
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

// weighing is one decision on its way.
type weighing struct {
	r        *Request
	v        *View
	others   Speeds
	sides    []side
	choices  []choice
	best     float64
	bestPair float64
}

func (w *weighing) take(left []*Candidate) {
	w.sides = make([]side, len(left))
	w.choices = make([]choice, 0, 2*len(left))
	w.bestPair = math.Inf(1)
	for i, c := range left {
		w.sides[i] = newSide(w.r, c, &w.others)
	}
}

// wholes weighs the workers that could do everything. Those set aside for prefill do so only if nobody else decodes.
func (w *weighing) wholes() (why string) {
	decodes := slices.ContainsFunc(w.sides, func(x side) bool { return x.c.alone() && x.c.Role.Decodes() })
	for i := range w.sides {
		if x := &w.sides[i]; x.c.alone() && (x.c.Role.Decodes() || !decodes) {
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
	prefills, decodes := make([]*side, 0, len(w.sides)), make([]*side, 0, len(w.sides))
	for i := range w.sides {
		x := &w.sides[i]
		if x.c.sends() && !w.r.unpaired(x.c, &n) {
			prefills = append(prefills, x)
		}
		if x.c.takes() {
			decodes = append(decodes, x)
		}
	}
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
	chosen := *picked
	slices.SortStableFunc(w.choices, func(a, b choice) int { return cmp.Compare(a.total, b.total) })
	out := make([]Option, 0, min(len(w.choices), optionsKept))
	out = append(out, chosen.option())
	out[0].Chosen = true
	for i := range w.choices {
		if len(out) == cap(out) {
			break
		}
		if c := &w.choices[i]; c.p != chosen.p || c.d != chosen.d || c.whole != chosen.whole {
			out = append(out, c.option())
		}
	}
	*picked = chosen // sorting moved it
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
