package planner

import (
	"fmt"
	"time"
)

// reactive is Dynamo's load based planner: each interval it takes a step at most in each pool, by the mean prefill queue and the mean KV
// load of the interval.
type reactive struct {
	limits Limits
	p      reactiveParams
	s      reactiveState
}

type reactiveParams struct {
	interval            time.Duration
	queueUp, queueDown  float64
	loadUp, loadDown    float64
	waitingWeight       float64
	graceIntervals      int
	queueTrendIntervals float64
}

type reactiveState struct {
	Queue   []float64     `json:"queue,omitempty"` // samples of the interval
	Load    []float64     `json:"load,omitempty"`
	Decided time.Duration `json:"decided_ns"`
	Began   bool          `json:"began"`
	Grace   int           `json:"grace"` // intervals without scaling decode down
}

func newReactive(c Config, p *params) *reactive {
	return &reactive{limits: c.Limits, p: reactiveParams{
		interval:            time.Duration(p.get("interval", 30, 1, 3600) * float64(time.Second)),
		queueUp:             p.get("queue_up", 0.5, 0, 1e6),
		queueDown:           p.get("queue_down", 0.2, 0, 1e6),
		loadUp:              p.get("kv_up", 0.9, 0, 10),
		loadDown:            p.get("kv_down", 0.5, 0, 10),
		waitingWeight:       p.get("waiting", 0.02, 0, 1),
		graceIntervals:      int(p.get("grace", 3, 0, 100)),
		queueTrendIntervals: p.get("trend", 3, 0, 100),
	}}
}

func (r *reactive) Name() string { return "reactive" }

// decodePool is the one whose KV cache counts.
func (r *reactive) decodePool(o *Observation) *Pool {
	if r.limits.Undivided {
		return &o.Whole
	}
	return &o.Decode
}

// load is the mean of engines' KV usage, and of what waits there.
func (r *reactive) load(p *Pool) float64 {
	if len(p.Usages) == 0 {
		return 0
	}
	sum := 0.0
	for i, u := range p.Usages {
		sum += u + r.p.waitingWeight*float64(p.Waits[i])
	}
	return sum / float64(len(p.Usages))
}

func (r *reactive) Step(o *Observation) Decision {
	if o.Changing() {
		// Neither pulled nor adjusted: the interval begins anew when the change is complete.
		r.s.Queue, r.s.Load, r.s.Began = r.s.Queue[:0], r.s.Load[:0], false
		return Decision{}
	}
	if !r.s.Began {
		r.s.Began, r.s.Decided = true, o.At
	}
	r.s.Queue = append(r.s.Queue, float64(o.Prefill.Waiting))
	r.s.Load = append(r.s.Load, r.load(r.decodePool(o)))
	if o.At-r.s.Decided < r.p.interval {
		return Decision{}
	}
	r.s.Decided = o.At
	queue, load := mean(r.s.Queue), mean(r.s.Load)
	first, last := r.s.Queue[0], r.s.Queue[len(r.s.Queue)-1]
	r.s.Queue, r.s.Load = r.s.Queue[:0], r.s.Load[:0]
	d := Decision{Want: o.Now(), Figures: []Figure{{"queue", queue}, {"queue_last", last}, {"kv_load", load}}}
	r.decide(&d, queue, first, last, load)
	return d
}

// decide takes the four steps in Dynamo's order: prefill down, decode down, prefill up, decode up.
func (r *reactive) decide(d *Decision, queue, first, last, load float64) {
	each := r.limits.EngineGPUs
	had := d.Want
	decoders, size := &d.Want.Decode, each.Decode
	if r.limits.Undivided {
		decoders, size = &d.Want.Whole, each.Whole
	}
	if !r.limits.Undivided && queue < r.p.queueDown && d.Want.Prefill > 1 {
		d.Want.Prefill--
	}
	if load < r.p.loadDown && *decoders > 1 && r.s.Grace == 0 {
		*decoders--
	}
	r.s.Grace = max(0, r.s.Grace-1)
	expected := last + r.p.queueTrendIntervals*(last-first)
	if !r.limits.Undivided && queue > r.p.queueUp && expected > r.p.queueUp && d.Want.Times(each)+each.Prefill <= r.limits.MaxGPUs {
		d.Want.Prefill++
	}
	if load > r.p.loadUp && d.Want.Times(each)+size <= r.limits.MaxGPUs {
		*decoders++
		r.s.Grace = r.p.graceIntervals
	}
	d.Reason = fmt.Sprintf("prefill queue %.2f (%.2f expected) of %.2f to %.2f, KV load %.3f of %.2f to %.2f: %s to %s",
		queue, expected, r.p.queueDown, r.p.queueUp, load, r.p.loadDown, r.p.loadUp, had, d.Want)
}

func (r *reactive) State() ([]byte, error)     { return marshalState(&r.s) }
func (r *reactive) Restore(state []byte) error { return restoreState(state, &r.s) }

func mean(v []float64) float64 {
	if len(v) == 0 {
		return 0
	}
	sum := 0.0
	for _, x := range v {
		sum += x
	}
	return sum / float64(len(v))
}

var _ Planner = (*reactive)(nil)
