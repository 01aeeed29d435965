package pairing

import (
	"context"
	"fmt"
	"slices"
	"strings"
)

// Names of the policies.
const (
	NameJoint       = "joint"
	NameLeastLoaded = "least-loaded"
	NamePrefixOnly  = "prefix-only"
	NameRandom      = "random"
	NamePowerOfTwo  = "power-of-two"
)

// Names has all policies there are.
var Names = []string{NameJoint, NameLeastLoaded, NamePrefixOnly, NameRandom, NamePowerOfTwo}

// New makes the policy of a name. seed decides between choices that are alike, and what a random policy draws.
func New(name string, seed uint64) (Policy, error) {
	switch name {
	case NameJoint:
		return &Joint{Seed: seed}, nil
	case NameLeastLoaded:
		return &LeastLoaded{}, nil
	case NamePrefixOnly:
		return &PrefixOnly{Seed: seed}, nil
	case NameRandom:
		return &Random{Seed: seed}, nil
	case NamePowerOfTwo:
		return &PowerOfTwo{Seed: seed}, nil
	}
	return nil, fmt.Errorf("policy %q: use %s or %s", name, strings.Join(Names[:len(Names)-1], ", "), Names[len(Names)-1])
}

// WantsPrefixes tells whether a policy looks at what workers have cached; for others it need not be found out.
func WantsPrefixes(p Policy) bool {
	return p.Name() == NameJoint || p.Name() == NamePrefixOnly
}

// prefixLeast is the part of a prompt that a worker must have to be taken for it alone. Else the beginning that all prompts
// have in common would bring everything to the first worker.
const prefixLeast = 0.3

// Random takes any pair that fits, or any worker where there is no pair. It is what others are compared with.
type Random struct{ Seed uint64 }

// PowerOfTwo draws two and takes the less loaded one.
type PowerOfTwo struct{ Seed uint64 }

// PrefixOnly takes who has most of the prompt cached, whatever its load. Where that is little it draws.
type PrefixOnly struct{ Seed uint64 }

var (
	_ Policy = (*Random)(nil)
	_ Policy = (*PowerOfTwo)(nil)
	_ Policy = (*PrefixOnly)(nil)
)

// Name is the policy's name in configuration and metrics.
func (*Random) Name() string { return NameRandom }

// Name is the policy's name in configuration and metrics.
func (*PowerOfTwo) Name() string { return NamePowerOfTwo }

// Name is the policy's name in configuration and metrics.
func (*PrefixOnly) Name() string { return NamePrefixOnly }

// Pick filters and draws.
func (p *Random) Pick(_ context.Context, r Request, v *View) (Decision, error) {
	return pickAny(&r, v, func(all []duo) (duo, string) {
		return all[int(draw(p.Seed+uint64(r.Attempt), r.ID)*float64(len(all)))], "drawn"
	})
}

// Pick filters, draws two and takes one.
func (p *PowerOfTwo) Pick(_ context.Context, r Request, v *View) (Decision, error) {
	return pickAny(&r, v, func(all []duo) (duo, string) {
		i := int(draw(p.Seed+uint64(r.Attempt), r.ID, "1") * float64(len(all)))
		if len(all) == 1 {
			return all[0], "the only one"
		}
		k := int(draw(p.Seed+uint64(r.Attempt), r.ID, "2") * float64(len(all)-1))
		if k >= i {
			k++
		}
		if rankDuo(&r, v, all[k]).before(rankDuo(&r, v, all[i])) {
			i, k = k, i
		}
		return all[i], "less load than " + all[k].String()
	})
}

// Pick filters and takes who knows most.
func (p *PrefixOnly) Pick(_ context.Context, r Request, v *View) (Decision, error) {
	return pickAny(&r, v, func(all []duo) (duo, string) {
		known := func(x duo) int64 {
			if x.d == nil {
				return r.cached(x.p)
			}
			return r.cached(x.p) + r.cached(x.d)
		}
		best, most := make([]duo, 0, len(all)), int64(-1)
		for _, x := range all {
			if n := known(x); n > most {
				best, most = append(best[:0], x), n
			} else if n == most {
				best = append(best, x)
			}
		}
		how := fmt.Sprintf("has %d tokens of the prompt, as %d others", most, len(best)-1)
		if float64(most) < prefixLeast*float64(r.PromptTokens) {
			best, how = all, "nobody has much of the prompt: drawn"
		}
		return best[int(draw(p.Seed+uint64(r.Attempt), r.ID)*float64(len(best)))], how
	})
}

// duo is a pair, or one worker alone: p.
type duo struct{ p, d *Candidate }

func (x duo) String() string {
	if x.d == nil {
		return x.p.ID
	}
	return x.p.ID + " and " + x.d.ID
}

func rankDuo(r *Request, v *View, x duo) rank {
	if x.d == nil {
		k := rank{score: wholeScore(x.p) - r.saves(x.p)}
		if x.p.strain() != "" {
			k.strained = 1
		}
		return k
	}
	way, _ := v.channel(x.p, x.d)
	k := rankOf(r, x.p, x.d)
	k.score += way.cost(r.PromptTokens)
	return k
}

// pickAny filters and lets choose from all pairs that fit, or from single workers if there is no pair: from those that
// decode, if any does.
func pickAny(r *Request, v *View, choose func(all []duo) (duo, string)) (Decision, error) {
	f := filter(r, v)
	if len(f.left) == 0 {
		return Decision{}, f.none(r)
	}
	var all []duo
	why := "this attempt asks for one worker"
	if !r.Whole {
		n := eachPair(r, v, f.left, 0, func(p, d *Candidate) { all = append(all, duo{p, d}) })
		why = n.why(f.left)
	}
	kind := "pair of %d: %s"
	if len(all) == 0 {
		kind = "whole: " + strings.ReplaceAll(why, "%", "%%") + "; of %d: %s"
		able := f.alone()
		if len(able) == 0 {
			return Decision{}, f.apart(why)
		}
		decodes := slices.ContainsFunc(able, func(c *Candidate) bool { return c.Role.Decodes() })
		for _, c := range able {
			if c.Role.Decodes() || !decodes {
				all = append(all, duo{p: c})
			}
		}
	}
	x, how := choose(all)
	d := Decision{Rejected: f.rejected, Weighed: len(all), CachedTokens: r.cached(x.p), Reason: f.note(fmt.Sprintf(kind, len(all), how))}
	if x.d == nil {
		d.Whole = x.p.Worker
		return d, nil
	}
	d.Prefill, d.Decode = x.p.Worker, x.d.Worker
	return d, nil
}
