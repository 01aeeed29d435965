package pairing

// eachPair calls f with all pairs of those left that fit together: one dialect, one model fingerprint, not one worker twice, and a
// daemon each where KV moves through daemons. It begins at another place each turn.
func eachPair(r *Request, v *View, left []*Candidate, turn int, f func(p, d *Candidate)) ends {
	n := ends{unfit: "no two workers fit together"}
	for k := range left {
		p := left[(k+turn)%len(left)]
		if !p.sends() || r.unpaired(p, &n) {
			continue
		}
		n.prefills++
		for m := range left {
			if c := left[(m+turn)%len(left)]; n.fits(v, p, c) {
				n.pairs++
				f(p, c)
			}
		}
	}
	return n
}

// fits tells whether KV cache can go from p to d now, and remembers why not.
func (n *ends) fits(v *View, p, d *Candidate) bool {
	if !d.takes() || d.ID == p.ID || v.PairBarred != nil && v.PairBarred(p.ID, d.ID) {
		return false
	}
	if why := misfit(p.Worker, d.Worker); why != "" {
		n.unfit = "no two workers fit together: " + why
		return false
	}
	return true
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
