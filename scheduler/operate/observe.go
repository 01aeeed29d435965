package operate

import (
	"context"
	"time"

	"github.com/headrace/headrace/internal/registry"
	"github.com/headrace/headrace/internal/routers"
	"github.com/headrace/headrace/scheduler/connector"
	"github.com/headrace/headrace/scheduler/planner"
)

// Seen is one look at the cluster.
type Seen struct {
	Workers []registry.Worker
	Routers []routers.Status
	// Arrived and Done are requests since the look before.
	Arrived []planner.Arrival
	Done    []planner.Done
}

// Look sees the cluster; arrivals are in relation to epoch.
type Look func(ctx context.Context, epoch time.Time) (*Seen, error)

func (s *Seen) worker(id string) *registry.Worker {
	for i := range s.Workers {
		if s.Workers[i].ID == id {
			return &s.Workers[i]
		}
	}
	return nil
}

func drains(w *registry.Worker) bool { return w.Weight != nil && *w.Weight == 0 }

// serves tells whether requests reach the engine: it is listed, with its node daemon where it is of no use without, and every router that
// answers knows it.
func (s *Seen) serves(e *connector.Engine) bool {
	w := s.worker(e.ID)
	if w == nil || e.Role != connector.Whole && attaches(w) && w.NodeData == "" {
		return false
	}
	for i := range s.Routers {
		if r := &s.Routers[i]; r.Err == nil && r.Worker(e.ID) == nil {
			return false
		}
	}
	return true
}

// attaches tells whether a worker's KV cache goes through a node daemon.
func attaches(w *registry.Worker) bool {
	return w.Dialect == "" || w.Dialect == "native" || w.Dialect == "vllm"
}

// load is what all routers have at a worker, and what it says of itself.
type load struct {
	prefills, decodes, tokens int64
	waiting                   int64
	usage                     float64
}

func (s *Seen) load(id string) load {
	l := load{}
	for i := range s.Routers {
		w := s.Routers[i].Worker(id)
		if w == nil {
			continue
		}
		l.prefills, l.decodes, l.tokens = l.prefills+w.Prefills, l.decodes+w.Decodes, l.tokens+w.PrefillTokens
		if e := w.Engine; e != nil && !e.Stale {
			l.waiting, l.usage = max(l.waiting, e.Waiting), max(l.usage, e.KVUsage)
		}
	}
	return l
}

// observe puts a look into the planner's words.
func (o *Operator) observe(seen *Seen, now time.Time) *planner.Observation {
	obs := &planner.Observation{At: now.Sub(o.state.Epoch), Since: now.Sub(o.observed), Arrived: seen.Arrived, Done: seen.Done, Started: o.started}
	if o.observed.IsZero() {
		obs.Since = o.cfg.Interval
	}
	o.observed, o.started = now, nil
	o.meter.measure(seen, o.state.Engines, obs)
	for _, r := range o.state.Engines {
		pool := poolOf(obs, r.Role)
		l := seen.load(r.ID)
		switch r.Phase {
		case Starting:
			pool.Starting++
			continue
		case Draining, Stopping:
			pool.Draining++
		case Ready:
			if !seen.serves(&r.Engine) {
				pool.Starting++ // it died and is started again
				continue
			}
			pool.Ready++
			pool.Waits, pool.Usages = append(pool.Waits, int(l.waiting)), append(pool.Usages, l.usage)
			pool.KVUsage += l.usage
		}
		pool.Waiting += int(l.waiting)
		pool.Running += int(max(0, l.of(r.Role)-l.waiting))
		if r.Role != connector.Decode {
			pool.WaitingTokens += l.tokens
		}
	}
	for _, p := range []*planner.Pool{&obs.Prefill, &obs.Decode, &obs.Whole} {
		if p.Ready > 0 {
			p.KVUsage /= float64(p.Ready)
		}
	}
	return obs
}

// of is how many requests count for a role.
func (l *load) of(role string) int64 {
	switch role {
	case connector.Prefill:
		return l.prefills
	case connector.Decode:
		return l.decodes
	}
	return l.prefills + l.decodes
}

func poolOf(o *planner.Observation, role string) *planner.Pool {
	switch role {
	case connector.Prefill:
		return &o.Prefill
	case connector.Decode:
		return &o.Decode
	}
	return &o.Whole
}

// in is how many engines of a role there are in pools.
func in(p *planner.Pools, role string) *int {
	switch role {
	case connector.Prefill:
		return &p.Prefill
	case connector.Decode:
		return &p.Decode
	}
	return &p.Whole
}
