// Package scheduler makes a decision of a snapshot: what is placed, what is removed, what gives way. It puts together
// place, scaledown, reclaim and partition, and is as pure as they are: no I/O, no clock, no randomness, and the same
// snapshot gives the same decision to the byte.
package scheduler

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strconv"

	"github.com/headrace/headrace/scheduler/cluster"
	"github.com/headrace/headrace/scheduler/partition"
	"github.com/headrace/headrace/scheduler/place"
	"github.com/headrace/headrace/scheduler/reclaim"
	"github.com/headrace/headrace/scheduler/scaledown"
)

// Decide answers a normalized snapshot. Gangs are placed first, then models in their order; nothing counts on room that a
// removal of the same decision will free, for that has to drain first.
func Decide(s *cluster.Snapshot) (*cluster.Decision, error) {
	st, err := place.NewState(s)
	if err != nil {
		return nil, err
	}
	d := &cluster.Decision{Placements: []cluster.Placement{}, Removals: []cluster.Removal{}, Evictions: []cluster.Eviction{}, Admissions: []cluster.Admission{}, Denied: []cluster.Denial{}}
	for i := range s.Models {
		m := &s.Models[i]
		ranking, removals := scaledown.Model(st, s, m)
		if len(ranking.Instances) > 0 && m.Replicas != nil {
			d.Rankings = append(d.Rankings, ranking)
		}
		d.Removals = append(d.Removals, removals...)
	}
	n := newNamer(s)
	for _, g := range s.Gangs {
		gang(d, st, s, &g, n)
	}
	for i := range s.Models {
		grow(d, st, &s.Models[i], n)
	}
	var held []cluster.Use
	for _, p := range d.Placements {
		held = append(held, p.Uses...)
	}
	if len(s.Jobs) > 0 {
		r := reclaim.Decide(s, held)
		d.Admissions = append(d.Admissions, r.Admissions...)
		d.Evictions = append(d.Evictions, r.Evictions...)
		d.Denied = append(d.Denied, r.Denied...)
	}
	for i := range s.Serving {
		d.Serving = append(d.Serving, scaledown.Serving(s, &s.Serving[i]))
	}
	control(d, s)
	return d, nil
}

// gang places what a gang lacks.
func gang(d *cluster.Decision, st *place.State, s *cluster.Snapshot, g *cluster.Gang, n *namer) {
	all, there, missing := 0, 0, []cluster.Member{}
	for _, m := range g.Members {
		have := 0
		for i := range s.Instances {
			if o := &s.Instances[i]; o.Gang == g.Name && o.Model == m.Model && !scaledown.Leaving(o.State) && o.State != cluster.Failed {
				have++
			}
		}
		all += m.Count
		there += min(have, m.Count)
		if have < m.Count {
			missing = append(missing, cluster.Member{Model: m.Model, Count: m.Count - have})
		}
	}
	least := g.Min
	if least == 0 {
		least = all
	}
	plan := cluster.GangPlan{Gang: g.Name, MinMember: least, Placed: true, Why: fmt.Sprintf("all %d members are there", all)}
	defer func() { d.Gangs = append(d.Gangs, plan) }()
	if len(missing) == 0 {
		return
	}
	r := st.Gang(g.Name, missing, n.next)
	for all := all - there; !r.Placed && all > max(least-there, 0) && len(missing) > 0; all-- { // the minimum is enough: without the last ones, one by one
		last := &missing[len(missing)-1]
		if last.Count--; last.Count == 0 {
			missing = missing[:len(missing)-1]
		}
		n.back()
		if len(missing) > 0 {
			r = st.Gang(g.Name, missing, n.next)
		}
	}
	plan.Placed, plan.Why = r.Placed, r.Why
	if !r.Placed {
		n.back()
		if there >= least {
			plan.Placed = true
			plan.Why = fmt.Sprintf("%d members are there and %d are enough; no more have a place: %s", there, least, r.Why)
			return
		}
		denied := cluster.Denial{What: "gang", Name: g.Name, Reason: "no member is placed: " + r.Why}
		if r.Denied != nil {
			denied.Filters, denied.Fit = r.Denied.Filters, r.Denied.Fit
		}
		d.Denied = append(d.Denied, denied)
		return
	}
	for i := range r.Placements {
		st.Add(&r.Placements[i])
	}
	n.keep()
	d.Placements = append(d.Placements, r.Placements...)
}

// grow places the instances that a model lacks, gangs' members counted. What does not fit is said once.
func grow(d *cluster.Decision, st *place.State, m *cluster.Model, n *namer) {
	if m.Replicas == nil {
		return
	}
	have := n.alive[m.Name]
	for _, p := range d.Placements {
		if p.Model == m.Name {
			have++
		}
	}
	for missing := *m.Replicas - have; missing > 0; missing-- {
		p, denied := st.Place(m, n.next(m.Name))
		if denied != nil {
			if missing > 1 {
				denied.Reason += fmt.Sprintf(" (and %d more of the model)", missing-1)
			}
			d.Denied = append(d.Denied, *denied)
			n.back()
			return
		}
		n.keep()
		st.Add(p)
		d.Placements = append(d.Placements, *p)
	}
}

// namer names new instances: model-N, N the lowest number that is free.
type namer struct {
	taken map[string]bool
	used  map[string][]int
	alive map[string]int
	given []string
	last  map[string]int // where to go on looking: everything below is taken
}

func newNamer(s *cluster.Snapshot) *namer {
	n := &namer{taken: map[string]bool{}, used: map[string][]int{}, alive: map[string]int{}, last: map[string]int{}}
	byModel := map[string][]*cluster.Instance{}
	for i := range s.Instances {
		o := &s.Instances[i]
		n.taken[o.Name] = true
		byModel[o.Model] = append(byModel[o.Model], o)
		if !scaledown.Leaving(o.State) {
			n.alive[o.Model]++
		}
	}
	for model, list := range byModel {
		n.used[model] = scaledown.Ordinals(list)
		slices.Sort(n.used[model])
	}
	return n
}

func (n *namer) next(model string) string {
	for o := n.last[model]; ; o++ {
		name := model + "-" + strconv.Itoa(o)
		if _, used := slices.BinarySearch(n.used[model], o); !used && !n.taken[name] {
			n.taken[name] = true
			n.given = append(n.given, name)
			n.last[model] = o
			return name
		}
	}
}

// back takes back the names given since keep.
func (n *namer) back() {
	for _, name := range n.given {
		delete(n.taken, name)
	}
	n.given = n.given[:0]
	clear(n.last)
}

func (n *namer) keep() { n.given = n.given[:0] }

// control answers what the snapshot asks about control functions.
func control(d *cluster.Decision, s *cluster.Snapshot) {
	if p := s.Partition; p != nil {
		hosts := make([]string, len(s.Hosts))
		for i := range s.Hosts {
			hosts[i] = s.Hosts[i].Name
		}
		d.Partitions, d.Moved = partition.Plan(hosts, p.Functions, p.Previous)
	}
	if c := s.ControlPlane; c != nil {
		names := make([]string, 0, len(c.MaxPerFunction))
		for name := range c.MaxPerFunction {
			names = append(names, name)
		}
		slices.Sort(names)
		for _, name := range names {
			most := c.MaxPerFunction[name]
			count := partition.Count(c.RequestsPerSecond, most)
			f := cluster.FunctionCount{Function: name, Count: count}
			if most > 0 {
				f.Load = c.RequestsPerSecond / float64(count) / most
			}
			d.Functions = append(d.Functions, f)
		}
	}
}

// WriteJSON prints a decision as one indented JSON document.
func WriteJSON(w io.Writer, d *cluster.Decision) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(d)
}
