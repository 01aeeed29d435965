package operate

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/headrace/headrace/scheduler/connector"
)

// advance brings each engine a step further, by what is seen and not by what was asked for before: asking again does no harm.
func (o *Operator) advance(ctx context.Context, c *connector.Cluster, seen *Seen) error {
	if o.cfg.DryRun {
		return nil
	}
	changed := false
	var gone []string
	for _, r := range slices.Clone(o.state.Engines) {
		before := r.Phase
		switch r.Phase {
		case Starting:
			o.starting(ctx, c, seen, r)
		case Ready:
			o.serving(c, seen, r)
		case Draining:
			o.draining(ctx, c, seen, r)
		case Stopping:
			if o.stopping(ctx, c, r) {
				gone = append(gone, r.Name)
			}
		}
		changed = changed || r.Phase != before
	}
	o.state.Engines = slices.DeleteFunc(o.state.Engines, func(r *Record) bool { return slices.Contains(gone, r.Name) })
	if o.settle() || changed || len(gone) > 0 {
		return o.save(ctx)
	}
	return nil
}

// into is a record's next phase.
func (o *Operator) into(r *Record, phase string) { r.Phase, r.Since = phase, o.now() }

func (o *Operator) starting(ctx context.Context, c *connector.Cluster, seen *Seen, r *Record) {
	took := o.now().Sub(r.Since)
	switch e := listed(c, r.Name); {
	case e == nil:
		err := o.act(ctx, func(ctx context.Context) error { return o.cfg.Connector.Start(ctx, r.Engine) })
		if err != nil {
			o.log.Warn("start an engine", "engine", r.Name, "err", err)
			r.Says = err.Error()
		}
	case seen.serves(&r.Engine):
		o.into(r, Ready)
		o.started = append(o.started, took)
		o.cfg.Metrics.started(r.Role, took)
		o.state.HoldUntil, o.state.HoldTimes = time.Time{}, 0
		o.log.Info("engine serves", "engine", r.Name, "after", took.Round(time.Millisecond))
		return
	}
	if took > o.cfg.StartMax {
		o.giveUp(r, fmt.Sprintf("%s did not serve within %s: %s", r.Name, o.cfg.StartMax, r.Says))
	}
}

// giveUp ends an engine that never served.
func (o *Operator) giveUp(r *Record, why string) {
	o.log.Error("an engine does not start", "engine", r.Name, "err", why)
	r.Failed = why
	o.into(r, Stopping)
	hold := min(holdMin<<min(o.state.HoldTimes, 10), holdMax)
	o.state.HoldTimes++
	o.state.HoldUntil = o.now().Add(hold)
	o.cfg.Metrics.gaveUp(r.Role)
}

// serving looks after an engine that should serve.
func (o *Operator) serving(c *connector.Cluster, seen *Seen, r *Record) {
	switch {
	case listed(c, r.Name) == nil:
		o.log.Warn("an engine is gone that nobody stopped", "engine", r.Name)
		o.into(r, Stopping)
	case !seen.serves(&r.Engine):
		o.log.Warn("an engine does not serve any more; it is being started again", "engine", r.Name, "says", r.Says)
		o.into(r, Starting)
	}
}

func (o *Operator) draining(ctx context.Context, c *connector.Cluster, seen *Seen, r *Record) {
	w := seen.worker(r.ID)
	took := o.now().Sub(r.Since)
	why := ""
	switch {
	case listed(c, r.Name) == nil, w == nil: // it died; whoever had a request there has begun anew
	case !drains(w) || !o.asked[r.Name]:
		// Also where it drains already: what was begun before this process may not have reached the registry.
		why = "routers have not heard of it"
		if err := o.act(ctx, func(ctx context.Context) error { return o.cfg.Drain(ctx, *w) }); err != nil {
			o.log.Warn("drain an engine", "engine", r.Name, "err", err)
			break
		}
		o.asked[r.Name] = true
	default:
		why = o.undrained(r, seen)
	}
	r.Says = why
	switch {
	case why == "":
		o.log.Info("engine has drained", "engine", r.Name, "after", took.Round(time.Millisecond))
		o.cfg.Metrics.drained(r.Role, took)
	case took > o.cfg.DrainMax:
		o.log.Warn("engine does not drain; stopping it all the same: routers have its requests computed elsewhere", "engine", r.Name, "after", took, "why", why)
	default:
		return
	}
	o.into(r, Stopping)
	o.stopping(ctx, c, r)
}

// stopping tells whether an engine is gone.
func (o *Operator) stopping(ctx context.Context, c *connector.Cluster, r *Record) bool {
	delete(o.quiet, r.Name)
	e := listed(c, r.Name)
	if e == nil {
		delete(o.asked, r.Name)
		return true
	}
	if !e.Stopping {
		if err := o.act(ctx, func(ctx context.Context) error { return o.cfg.Connector.Stop(ctx, r.Engine) }); err != nil {
			o.log.Warn("stop an engine", "engine", r.Name, "err", err)
		}
	}
	return false
}

func (o *Operator) act(ctx context.Context, f func(ctx context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, actMax)
	defer cancel()
	return f(ctx)
}

// settle ends the change under way when nothing of it is left to do; it tells whether it did.
func (o *Operator) settle() bool {
	n := len(o.state.Decisions)
	if n == 0 || o.state.Decisions[n-1].Result != inProgress {
		return false
	}
	d := o.state.Decisions[n-1]
	for _, r := range o.state.Engines {
		if r.Phase == Stopping && r.Failed != "" && slices.Contains(d.Start, r.Name) {
			d.Result = "failed: " + r.Failed
			break
		}
		if r.Phase != Ready && (slices.Contains(d.Start, r.Name) || slices.Contains(d.Stop, r.Name)) {
			return false
		}
	}
	if d.Result == inProgress {
		d.Result = "done"
	}
	took := o.now().Sub(d.Time)
	d.TookS = took.Seconds()
	o.log.Info("change ended", "had", d.Had.String(), "want", d.Want.String(), "result", d.Result, "after", took.Round(time.Millisecond))
	o.cfg.Metrics.changed(d)
	return true
}
