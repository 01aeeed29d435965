package pairing

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"sync/atomic"
)

// decodeTokens is what one decode stream weighs beside tokens to prefill: a step serves all streams of a worker at
// once, so that a stream costs far less than the tokens it makes, yet much more than none.
const decodeTokens = 64

// LeastLoaded takes the pair with the least work queued at this router. Ties go round.
type LeastLoaded struct {
	turn atomic.Uint32
	last [64]atomic.Pointer[string] // reasons given, by load: mostly the next is one of them, and takes no memory
}

var _ Policy = (*LeastLoaded)(nil)

// Name is the policy's name in configuration and metrics.
func (*LeastLoaded) Name() string { return NameLeastLoaded }

// Pick filters, scores and picks.
func (p *LeastLoaded) Pick(_ context.Context, r Request, v *View) (Decision, error) {
	f := filter(&r, v)
	if len(f.left) == 0 {
		return Decision{}, f.none(&r)
	}
	d := Decision{Rejected: f.rejected}
	turn := int(p.turn.Add(1))
	why := "this attempt asks for one worker"
	if !r.Whole {
		var ok bool
		if ok, why = pickPair(r, &d, f.left, v, turn); ok {
			d.Reason = f.note(why)
			return d, nil
		}
	}
	able := f.alone()
	if len(able) == 0 {
		return d, f.apart(why)
	}
	best := -1
	for k := range able {
		i := (k + turn) % len(able)
		if best < 0 || wholeBefore(&r, able[i], able[best]) {
			best = i
		}
	}
	w := able[best]
	d.Whole = w.Worker
	room := append(append(make([]byte, 0, 128), "whole: "...), why...)
	room = strconv.AppendInt(append(room, "; least load of "...), int64(len(able)), 10)
	room = append(strconv.AppendInt(append(room, " ("...), wholeScore(w), 10), ')')
	d.Reason = f.note(p.reason(wholeScore(w), append(room, strained(w)...)))
	return d, nil
}

// reason is b as a string, for a worker of that load.
func (p *LeastLoaded) reason(score int64, b []byte) string {
	place := &p.last[uint64(score)*0x9e3779b97f4a7c15>>58]
	if last := place.Load(); last != nil && *last == string(b) {
		return *last
	}
	s := string(b)
	place.Store(&s)
	return s
}

func prefillScore(c *Candidate) int64 { return wholeScore(c) }
func decodeScore(c *Candidate) int64  { return wholeScore(c) }
func wholeScore(c *Candidate) int64 {
	return c.Load.PrefillTokens + (c.Load.Decodes+c.foreign())*decodeTokens
}

// wholeBefore prefers workers that decode anyway over those set aside for prefill, then the less loaded.
func wholeBefore(r *Request, a, b *Candidate) bool {
	if x, y := a.Role.Decodes(), b.Role.Decodes(); x != y {
		return x
	}
	if x, y := a.strain() != "", b.strain() != ""; x != y {
		return y
	}
	return wholeScore(a)-r.saves(a) < wholeScore(b)-r.saves(b)
}

// saves is what a worker that knows the prompt need not do.
func (r *Request) saves(c *Candidate) int64 {
	if slices.Contains(r.Warm, c.ID) {
		return r.PromptTokens
	}
	return 0
}

// pickPair takes the pair of least summed load, the transfer's among it. Strained workers go last. Equal block sizes and
// tensor-parallel degrees go first, as their copy plans are the cheapest.
func pickPair(r Request, d *Decision, left []*Candidate, v *View, turn int) (ok bool, why string) {
	var best struct {
		p, d  *Candidate
		rank  rank
		way   Channel
		known bool
	}
	n := eachPair(&r, v, left, turn, func(p, c *Candidate) {
		way, known := v.channel(p, c)
		x := rankOf(&r, p, c)
		x.score += way.cost(r.PromptTokens)
		if best.p == nil || x.before(best.rank) {
			best.p, best.d, best.rank, best.way, best.known = p, c, x, way, known
		}
	})
	if best.p == nil {
		return false, n.why(left)
	}
	d.Prefill, d.Decode = best.p.Worker, best.d.Worker
	why = fmt.Sprintf("pair: least load of %d (prefill %d tokens, decode %d streams)", n.pairs, best.p.Load.PrefillTokens, best.d.Load.Decodes)
	if best.known {
		why += "; " + best.way.words(r.PromptTokens)
	}
	return true, why + strained(best.p, best.d)
}

// rankOf ranks a pair by what the workers have to do.
func rankOf(r *Request, p, d *Candidate) rank {
	x := rank{score: prefillScore(p) + decodeScore(d) - r.saves(p) - r.saves(d), unequal: unequal(p, d)}
	for _, w := range [2]*Candidate{p, d} {
		if w.strain() != "" {
			x.strained++
		}
	}
	return x
}

func unequal(p, d *Candidate) bool {
	return p.BlockTokens != d.BlockTokens || p.TensorParallel != d.TensorParallel
}

// rank is what pairs are compared by, the first difference decides.
type rank struct {
	strained int  // of the two workers
	unequal  bool // in blocks or ranks
	score    int64
}

func (a rank) before(b rank) bool {
	if a.strained != b.strained {
		return a.strained < b.strained
	}
	if a.unequal != b.unequal {
		return b.unequal
	}
	return a.score < b.score
}
