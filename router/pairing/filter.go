package pairing

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// filtered is what the filters leave of a view.
type filtered struct {
	left       []*Candidate
	rejected   []Rejection
	modelKnown bool
	refused    string   // why a worker that could serve now does not fit the request
	notes      []string // what a reader of the decision must know besides

	held, cooling []*Candidate // that are taken when nobody else is there
}

func (f *filtered) note(reason string) string {
	if len(f.notes) == 0 {
		return reason
	}
	return strings.Join(append([]string{reason}, f.notes...), "; ")
}

func (f *filtered) none(r *Request) error {
	if !f.modelKnown {
		return &ErrNone{Reason: fmt.Sprintf("no worker has model %q", r.Model)}
	}
	if f.refused != "" {
		return &ErrNone{ModelKnown: true, Reason: f.refused}
	}
	return &ErrNone{ModelKnown: true, Reason: "every worker of the model failed, drains or cools down"}
}

// filter takes out who has another model, failed this request, drains, cools down or is to get less of the traffic. When only
// workers that cool down are left they are taken after all: a worker may be back, and trying is better than refusing.
func filter(r *Request, v *View) *filtered {
	f := &v.filtered
	*f = filtered{left: slices.Grow(f.left[:0], len(v.Workers))}
	for i := range v.Workers {
		c := &v.Workers[i]
		if !c.Serves(r.Model) {
			continue // not worth a line each in a fleet of many models
		}
		f.modelKnown = true
		f.sort(r, v, c)
	}
	if !r.keepsSession(f, v) {
		f.fill()
		if len(f.left) == 0 && len(f.cooling) > 0 {
			f.left = f.cooling
			f.notes = append(f.notes, "all that are left cool down")
		}
	}
	if r.Whole && len(f.alone()) == 0 {
		r.Whole = false // nobody could: the request may ask for it, the workers' kind decides
	}
	return f
}

// alone are those left that serve requests by themselves.
func (f *filtered) alone() []*Candidate {
	if !slices.ContainsFunc(f.left, func(c *Candidate) bool { return !c.Alone() }) {
		return f.left
	}
	return slices.DeleteFunc(slices.Clone(f.left), func(c *Candidate) bool { return !c.Alone() })
}

// apart is the error where there is no pair and nobody serves alone.
func (f *filtered) apart(why string) error {
	return &ErrNone{ModelKnown: true, Reason: why + ", and no worker there is serves alone"}
}

// sort puts a worker of the model where it belongs.
func (f *filtered) sort(r *Request, v *View, c *Candidate) {
	switch weight := c.weight(); {
	case slices.Contains(r.Exclude, c.ID):
		f.reject(c, "failed this request")
	case r.Refuse != nil && r.Refuse(c.Worker) != "":
		f.reject(c, r.Refuse(c.Worker))
		f.refused = r.Refuse(c.Worker)
	case weight == 0:
		f.reject(c, "drains: its weight is 0")
	case c.CoolUntil.After(v.Now):
		f.reject(c, "cools down: "+c.CoolReason)
		f.cooling = append(f.cooling, c)
	case weight < 1 && draw(weightSeed, r.ID, c.ID) >= weight:
		f.reject(c, fmt.Sprintf("its weight is %.3g, and this request is not for it", weight))
		f.held = append(f.held, c)
	default:
		f.left = append(f.left, c)
	}
}

// fill takes workers of little weight after all where nobody else has their role.
func (f *filtered) fill() {
	for _, has := range []func(Role) bool{Role.Prefills, Role.Decodes} {
		if slices.ContainsFunc(f.left, func(c *Candidate) bool { return has(c.Role) }) {
			continue
		}
		for _, c := range f.held {
			if has(c.Role) && !slices.Contains(f.left, c) {
				f.left = append(f.left, c)
				f.notes = append(f.notes, c.ID+" is taken for all its little weight: nobody else does that")
			}
		}
	}
}

// sessionPatience is how much longer than elsewhere a session may wait for the worker that has its KV cache.
const sessionPatience = 2 * time.Second

// keepsSession leaves only the session's workers, if all of them are there and none is overloaded.
func (r *Request) keepsSession(f *filtered, v *View) bool {
	if len(r.Session) == 0 {
		return false
	}
	pool := append(slices.Clone(f.left), f.held...) // who has a session already keeps it, whatever its weight
	known := learned(v)
	kept := make([]*Candidate, 0, len(r.Session))
	for _, id := range r.Session {
		i := slices.IndexFunc(pool, func(c *Candidate) bool { return c.ID == id })
		if i < 0 {
			f.notes = append(f.notes, fmt.Sprintf("the session was with %s, which cannot serve now", id))
			return false
		}
		kept = append(kept, pool[i])
	}
	for _, c := range kept {
		if why := c.strain(); why != "" {
			f.notes = append(f.notes, fmt.Sprintf("the session was with %s: %s", c.ID, why))
			return false
		}
		wait, least := c.queue(&known), c.queue(&known)
		for _, o := range f.left {
			if o.Role == c.Role {
				least = min(least, o.queue(&known))
			}
		}
		if longer := wait - least; longer > sessionPatience.Seconds() {
			f.notes = append(f.notes, fmt.Sprintf("the session was with %s, where it would wait %.1f s longer", c.ID, longer))
			return false
		}
	}
	f.left = kept
	f.notes = append(f.notes, "the session stays with "+strings.Join(r.Session, " and "))
	return true
}

// rejectionsMax bounds what one decision keeps.
const rejectionsMax = 16

func (f *filtered) reject(c *Candidate, reason string) {
	if len(f.rejected) < rejectionsMax {
		f.rejected = append(f.rejected, Rejection{c.ID, reason})
	}
}
