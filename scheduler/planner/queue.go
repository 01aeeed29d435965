package planner

import (
	"fmt"
	"math"
	"slices"
	"time"
)

// queue is how KEDA and the horizontal pod autoscaler size a pool: so many engines that each has at most a target of what is there, with
// a tolerance, and the highest of the last while when there would be fewer.
type queue struct {
	limits Limits
	p      queueParams
	s      queueState
}

type queueParams struct {
	interval, window         time.Duration
	prompts, streams, engine float64 // targets of a prefill, decode, undivided engine
	tolerance                float64
}

type queueState struct {
	Decided time.Duration `json:"decided_ns"`
	Samples int           `json:"samples"`
	Prompts float64       `json:"prompts"` // sums of the interval
	Streams float64       `json:"streams"`
	Wanted  []queueWant   `json:"wanted,omitempty"`
}

type queueWant struct {
	At   time.Duration `json:"at_ns"`
	Want Pools         `json:"want"`
}

func newQueue(c Config, p *params) *queue {
	second := float64(time.Second)
	return &queue{limits: c.Limits, p: queueParams{
		interval:  time.Duration(p.get("interval", 15, 1, 3600) * second),
		window:    time.Duration(p.get("window", 300, 0, 86400) * second),
		prompts:   p.get("prompts", 1, 1e-3, 1e6),
		streams:   p.get("streams", 16, 1e-3, 1e6),
		engine:    p.get("requests", 16, 1e-3, 1e6),
		tolerance: p.get("tolerance", 0.1, 0, 1),
	}}
}

func (q *queue) Name() string { return "queue" }

func (q *queue) Step(o *Observation) Decision {
	prefill, streams := &o.Prefill, &o.Decode
	if q.limits.Undivided {
		streams = &o.Whole
	}
	q.s.Samples++
	q.s.Prompts += float64(prefill.Waiting + prefill.Running)
	q.s.Streams += float64(streams.Waiting + streams.Running)
	if o.At-q.s.Decided < q.p.interval {
		return Decision{}
	}
	n := float64(q.s.Samples)
	prompts, running := q.s.Prompts/n, q.s.Streams/n
	q.s.Decided, q.s.Samples, q.s.Prompts, q.s.Streams = o.At, 0, 0, 0
	now := o.Now()
	want := Pools{Prefill: q.size(now.Prefill, prompts, q.p.prompts), Decode: q.size(now.Decode, running, q.p.streams)}
	if q.limits.Undivided {
		want = Pools{Whole: q.size(now.Whole, running, q.p.engine)}
	}
	q.s.Wanted = slices.DeleteFunc(q.s.Wanted, func(w queueWant) bool { return o.At-w.At > q.p.window })
	q.s.Wanted = append(q.s.Wanted, queueWant{o.At, want})
	highest := want
	for _, w := range q.s.Wanted {
		highest = Pools{Prefill: max(highest.Prefill, w.Want.Prefill), Decode: max(highest.Decode, w.Want.Decode), Whole: max(highest.Whole, w.Want.Whole)}
	}
	down := func(now, want, highest int) int {
		if want >= now {
			return want
		}
		return min(now, highest)
	}
	d := Decision{Want: Pools{Prefill: down(now.Prefill, want.Prefill, highest.Prefill), Decode: down(now.Decode, want.Decode, highest.Decode), Whole: down(now.Whole, want.Whole, highest.Whole)}}
	d.Figures = []Figure{{"prompts", prompts}, {"streams", running}}
	d.Reason = fmt.Sprintf("%.2f prompts and %.2f streams want %s, %s the most of the last %s", prompts, running, want, highest, q.p.window)
	return d
}

// size is how many engines have the target each, or what there is when that is near.
func (q *queue) size(now int, load, target float64) int {
	if now > 0 && math.Abs(load/float64(now)/target-1) <= q.p.tolerance {
		return now
	}
	return engines(load/target, 1)
}

func (q *queue) State() ([]byte, error)     { return marshalState(&q.s) }
func (q *queue) Restore(state []byte) error { return restoreState(state, &q.s) }

var _ Planner = (*queue)(nil)
