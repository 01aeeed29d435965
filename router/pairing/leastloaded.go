package pairing

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"
)

// decodeTokens is what one decode stream weighs beside tokens to prefill: a step serves all streams of a worker at
// once, so that a stream costs far less than the tokens it makes, yet much more than none.
const decodeTokens = 64

// LeastLoaded takes the pair with the least work queued at this router. Ties go round.
type LeastLoaded struct{ turn atomic.Uint32 }

var _ Policy = (*LeastLoaded)(nil)

// Name is the policy's name in configuration and metrics.
func (*LeastLoaded) Name() string { return "least-loaded" }

// Pick filters, scores and picks.
func (p *LeastLoaded) Pick(_ context.Context, r Request, v *View) (Decision, error) {
	f := filter(r, v)
	if len(f.left) == 0 {
		return Decision{}, f.none(r)
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
	best := -1
	for k := range f.left {
		i := (k + turn) % len(f.left)
		if best < 0 || wholeBefore(r, f.left[i], f.left[best]) {
			best = i
		}
	}
	w := f.left[best]
	d.Whole = w.Worker
	d.Reason = f.note(fmt.Sprintf("whole: %s; least load of %d (%d)", why, len(f.left), wholeScore(w)) + strained(w))
	return d, nil
}

func prefillScore(c *Candidate) int64 { return wholeScore(c) }
func decodeScore(c *Candidate) int64  { return wholeScore(c) }
func wholeScore(c *Candidate) int64 {
	return c.Load.PrefillTokens + (c.Load.Decodes+c.foreign())*decodeTokens
}

// wholeBefore prefers workers that decode anyway over those set aside for prefill, then the less loaded.
func wholeBefore(r Request, a, b *Candidate) bool {
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

// pickPair takes the pair of least summed load, the transfer's among it, of those that fit: one dialect, one model fingerprint,
// not one worker twice, and a daemon each where KV moves through daemons. Strained workers go last. Equal block sizes and
// tensor-parallel degrees go first, as their copy plans are the cheapest.
func pickPair(r Request, d *Decision, left []*Candidate, v *View, turn int) (ok bool, why string) {
	var best struct {
		p, d  *Candidate
		rank  rank
		way   Channel
		known bool
	}
	n := ends{unfit: "no two workers fit together"}
	for k := range left {
		p := left[(k+turn)%len(left)]
		if !p.sends() || r.unpaired(p, &n) {
			continue
		}
		n.prefills++
		for m := range left {
			c := left[(m+turn)%len(left)]
			if !c.takes() || c.ID == p.ID || v.PairBarred != nil && v.PairBarred(p.ID, c.ID) {
				continue
			}
			if why := misfit(p.Worker, c.Worker); why != "" {
				n.unfit = "no two workers fit together: " + why
				continue
			}
			n.pairs++
			way, known := v.channel(p, c)
			x := rank{score: prefillScore(p) + decodeScore(c) - r.saves(p) - r.saves(c) + way.cost(r.PromptTokens),
				unequal: p.BlockTokens != c.BlockTokens || p.TensorParallel != c.TensorParallel}
			for _, w := range [2]*Candidate{p, c} {
				if w.strain() != "" {
					x.strained++
				}
			}
			if best.p == nil || x.before(best.rank) {
				best.p, best.d, best.rank, best.way, best.known = p, c, x, way, known
			}
		}
	}
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

// ends counts what pairs could be made of, to say why there is none.
type ends struct {
	prefills, pairs int
	unpaired        string // why a dialect's workers cannot share the request
	unfit           string
}

func (r *Request) unpaired(c *Candidate, n *ends) bool {
	if r.Unpaired == nil {
		return false
	}
	why := r.Unpaired(c.Dialect)
	if why != "" {
		n.unpaired = why
	}
	return why != ""
}

func (n *ends) why(left []*Candidate) string {
	decodes, plain := 0, len(left) > 0
	for _, c := range left {
		plain = plain && c.Dialect == DialectPlain
		if c.takes() {
			decodes++
		}
	}
	switch {
	case plain:
		return "workers without a connector"
	case n.unpaired != "" && n.prefills == 0:
		return n.unpaired
	case n.prefills == 0:
		return "no prefill worker with a node daemon"
	case decodes == 0:
		return "no decode worker with a node daemon"
	}
	return n.unfit
}

type filtered struct {
	left       []*Candidate
	rejected   []Rejection
	modelKnown bool
	refused    string // why a worker that could serve now does not fit the request
	lastResort string
}

func (f *filtered) note(reason string) string {
	if f.lastResort != "" {
		return reason + "; " + f.lastResort
	}
	return reason
}

func (f *filtered) none(r Request) error {
	if !f.modelKnown {
		return &ErrNone{Reason: fmt.Sprintf("no worker has model %q", r.Model)}
	}
	if f.refused != "" {
		return &ErrNone{ModelKnown: true, Reason: f.refused}
	}
	return &ErrNone{ModelKnown: true, Reason: "every worker of the model failed or cools down"}
}

// filter takes out who has another model, failed this request or cools down. When only workers that cool down are
// left they are taken after all: a worker may be back, and trying is better than refusing.
func filter(r Request, v *View) *filtered {
	f := &filtered{left: make([]*Candidate, 0, len(v.Workers))}
	var cooling []*Candidate
	for i := range v.Workers {
		c := &v.Workers[i]
		switch {
		case c.Model != r.Model:
			continue // not worth a line each in a fleet of many models
		case slices.Contains(r.Exclude, c.ID):
			f.reject(c, "failed this request")
		case r.Refuse != nil && r.Refuse(c.Worker) != "":
			f.reject(c, r.Refuse(c.Worker))
			f.refused = r.Refuse(c.Worker)
		case c.CoolUntil.After(v.Now):
			f.reject(c, "cools down: "+c.CoolReason)
			cooling = append(cooling, c)
		default:
			f.left = append(f.left, c)
		}
		f.modelKnown = true
	}
	if len(f.left) == 0 && len(cooling) > 0 {
		f.left, f.lastResort = cooling, "all that are left cool down"
	}
	return f
}

// rejectionsMax bounds what one decision keeps.
const rejectionsMax = 16

func (f *filtered) reject(c *Candidate, reason string) {
	if len(f.rejected) < rejectionsMax {
		f.rejected = append(f.rejected, Rejection{c.ID, reason})
	}
}
