package scheduler

import (
	"fmt"
	"io"
	"strings"

	"github.com/headrace/headrace/scheduler/cluster"
)

// WriteText prints a decision for people: a line each, with what decided it below.
func WriteText(w io.Writer, d *cluster.Decision) error {
	p := &printer{w: w}
	for i := range d.Placements {
		p.placement(&d.Placements[i])
	}
	for _, g := range d.Gangs {
		p.line("gang %s: %s (%s)", g.Gang, yes(g.Placed, "whole", "not placed"), g.Why)
	}
	for _, r := range d.Rankings {
		p.line("ranking of %s by %s, the first goes first:", r.Model, r.Order)
		for _, i := range r.Instances {
			p.line("  %s %-20s %-12.8g %s", yes(i.Remove, "remove", "keep  "), i.Instance, i.Total, i.Why)
			p.scores("         ", i.Scores)
		}
	}
	for _, r := range d.Removals {
		p.line("remove %s: %s (%s)", r.Instance, strings.Join(r.Steps, ", then "), r.Why)
		for _, m := range r.Moves {
			p.line("  request %s (%d bytes of KV): %s: %s", m.Request, m.KV, yes(m.To != "", "to "+m.To, "stays"), m.Why)
		}
	}
	for _, e := range d.Evictions {
		p.line("evict %s/%s from %s for %s, then %s it: %s", e.Job, e.Task, e.Host, e.For, e.Action, e.Why)
	}
	for _, a := range d.Admissions {
		p.line("admit %s/%s to %s (%.8g): %s", a.Job, a.Task, a.Host, a.Score, a.Why)
	}
	for i := range d.Serving {
		p.serving(&d.Serving[i])
	}
	for _, f := range d.Partitions {
		p.line("function %s has %d hosts: %s", f.Function, len(f.Hosts), strings.Join(f.Hosts, " "))
	}
	if m := d.Moved; m != nil {
		p.line("%d hosts moved (%.1f %%): %s", len(m.Hosts), 100*m.Share, strings.Join(m.Hosts, " "))
	}
	for _, f := range d.Functions {
		p.line("function %s: %d of them, each at %.0f %%", f.Function, f.Count, 100*f.Load)
	}
	for _, n := range d.Denied {
		p.line("denied %s %s: %s", n.What, n.Name, n.Reason)
		p.filters(n.Filters)
		p.filters(n.Fit)
	}
	if p.lines == 0 {
		p.line("nothing to do")
	}
	return p.err
}

type printer struct {
	w     io.Writer
	lines int
	err   error
}

func (p *printer) line(format string, a ...any) {
	p.lines++
	if _, err := fmt.Fprintf(p.w, format+"\n", a...); err != nil && p.err == nil {
		p.err = fmt.Errorf("write the decision: %w", err)
	}
}

func yes(b bool, t, f string) string {
	if b {
		return t
	}
	return f
}

// shown is how many candidates are printed; --json has them all.
const shown = 5

func (p *printer) placement(x *cluster.Placement) {
	p.line("place %s on %s: %s", x.Instance, uses(x.Uses), x.Why)
	p.filters(x.Filters)
	p.filters(x.Fit)
	for i, c := range x.Candidates {
		if i == shown {
			p.line("  ... and %d more (--json has them)", len(x.Candidates)-shown)
			break
		}
		p.line("  %-12.8g %s", c.Total, uses(c.Uses))
		p.scores("    ", c.Scores)
	}
}

func uses(list []cluster.Use) string {
	var out []string
	for _, u := range list {
		text := u.Host
		for _, g := range u.GPUs {
			text += fmt.Sprintf(" gpu%d=%d", g.Index, g.VRAM)
		}
		out = append(out, text+fmt.Sprintf(" ram=%d", u.RAM))
	}
	return strings.Join(out, " + ")
}

func (p *printer) scores(indent string, scores []cluster.Score) {
	for _, s := range scores {
		var figures []string
		for _, f := range s.Figures {
			figures = append(figures, fmt.Sprintf("%s=%.10g", f.Name, f.Value))
		}
		p.line("%s%s %.10g of %g (%s)", indent, s.Scorer, s.Score, s.Max, strings.Join(figures, " "))
	}
}

func (p *printer) filters(list []cluster.Filter) {
	for _, f := range list {
		text := ""
		for i, o := range f.Out {
			if i == shown {
				text += fmt.Sprintf("; and %d more", len(f.Out)-shown)
				break
			}
			text += "; " + strings.TrimPrefix(o.Host+": "+o.Why, ": ")
		}
		p.line("  %s: %d left%s", f.Name, f.Left, text)
	}
}

func (p *printer) serving(s *cluster.ServingPlan) {
	p.line("serving %s: delete %v, create %v, remain %v; a gang of %d pods", s.Name, s.Delete, s.Create, s.Remain, s.MinMember)
	for _, g := range s.Order {
		p.line("  group %d: %s, cost %.6g%s", g.Ordinal, g.Status, g.Cost, yes(g.Guarded, ", below the partition", ""))
	}
	for _, r := range s.Roles {
		p.line("  group %d role %s: delete %v, create %v, remain %v; min task member %d%s", r.Group, r.Role, r.Delete, r.Create, r.Remain, r.MinTaskMember, yes(r.Held, ", held until the others are gone", ""))
	}
	if s.RatioTo != nil {
		p.line("  prefill:decode %d:%d -> %d:%d (%s)", s.RatioFrom[0], s.RatioFrom[1], s.RatioTo[0], s.RatioTo[1], s.RatioWhy)
	}
	p.line("  update PodGroups before pods: %s", strings.Join(s.PodGroups, " "))
}
