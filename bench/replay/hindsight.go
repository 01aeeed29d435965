package replay

import (
	"errors"
	"fmt"
	"io"
	"math"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/headrace/headrace/scheduler/planner"
	"github.com/headrace/headrace/scheduler/sim"
	"github.com/headrace/headrace/scheduler/trace"
)

// known is a planner that was told beforehand which pools there are to be, in each stretch of time.
type known struct {
	every time.Duration
	ahead time.Duration // that engines are ordered before they are wanted
	plan  []planner.Pools
}

func (k *known) Name() string                     { return "known" }
func (k *known) State() ([]byte, error)           { return []byte("{}"), nil }
func (k *known) Restore([]byte) error             { return nil }
func (k *known) at(t time.Duration) planner.Pools { return k.plan[min(int(t/k.every), len(k.plan)-1)] }

func (k *known) Step(o *planner.Observation) planner.Decision {
	now, then := k.at(o.At), k.at(o.At+k.ahead)
	return planner.Decision{Want: planner.Pools{Prefill: max(now.Prefill, then.Prefill), Decode: max(now.Decode, then.Decode), Whole: max(now.Whole, then.Whole)}, Reason: "known beforehand"}
}

// Stretch is a while of a plan made in hindsight.
type Stretch struct {
	From  time.Duration `json:"from_ns"`
	Pools planner.Pools `json:"pools"`
}

// climb looks for a plan.
type climb struct {
	o        *Options
	every    time.Duration
	from     int // the stretch in which counting begins: before, pools are those of that one
	progress func(string, *sim.Report)
	plan     []planner.Pools
	report   *sim.Report
	score    float64
	left     int // runs
}

// hindsightRuns bounds the search.
const hindsightRuns = 4000

// Hindsight looks for what a planner could have come to that had known the trace, by Fit's measure: first for the pools that were best had they stayed the same,
// then for pools of each stretch of time of the length every, as long as another engine, one less or one for another in some while makes it better. It climbs: what it
// finds can be had, and something better may be. It returns what came of both, and the second plan.
func Hindsight(o *Options, every time.Duration, progress func(string, *sim.Report)) (still, changing *sim.Report, plan []Stretch, err error) {
	all, err := readAll(o)
	if err != nil {
		return nil, nil, nil, err
	}
	part := *o
	part.Open = func() (trace.Reader, io.Closer, error) { return &trace.Slice{Requests: all}, io.NopCloser(nil), nil }
	part.Log, part.Watch = nil, nil
	part.Sim.Limits.EngineGPUs = o.Sim.Table.EngineGPUs()
	end := time.Duration(float64(all[len(all)-1].At) / o.Rate)
	if o.Sim.To > 0 {
		end = min(end, o.Sim.To)
	}
	c := &climb{o: &part, every: every, from: int(o.Sim.From / every), progress: progress, score: math.Inf(-1), left: hindsightRuns}
	first := make([]planner.Pools, max(int((end+every-1)/every), c.from+1))
	for i := range first {
		first[i] = o.Sim.First
	}
	if err := c.take([][]planner.Pools{first}); err != nil {
		return nil, nil, nil, err
	}
	if err := c.pass(len(first)); err != nil {
		return nil, nil, nil, err
	}
	r := *c.report
	for size := (len(first) - c.from + 1) / 2; size >= 1; size /= 2 {
		if err := c.pass(size); err != nil {
			return nil, nil, nil, err
		}
	}
	for i, p := range c.plan[c.from:] {
		if i == 0 || p != c.plan[c.from+i-1] {
			plan = append(plan, Stretch{From: time.Duration(c.from+i) * every, Pools: p})
		}
	}
	return &r, c.report, plan, nil
}

// moves are what is tried in a while.
var moves = []planner.Pools{{Prefill: 1}, {Decode: 1}, {Prefill: -1}, {Decode: -1}, {Prefill: 1, Decode: -1}, {Prefill: -1, Decode: 1}}

// pass changes whiles of so many stretches, each beginning half of one after the one before, until no change makes it better.
func (c *climb) pass(size int) error {
	for better := true; better; {
		before := c.score
		for at := c.from; at < len(c.plan); at += max(1, size/2) {
			to := min(at+size, len(c.plan))
			if err := c.take(c.around(at, to)); err != nil {
				return err
			}
			if to == len(c.plan) {
				break
			}
		}
		better = c.score > before+1e-5 && c.left > 0
	}
	return nil
}

// around are the plans that differ by a move between two stretches. What comes before counting begins is as its first stretch is.
func (c *climb) around(from, to int) [][]planner.Pools {
	limits := &c.o.Sim.Limits
	var plans [][]planner.Pools
	for _, m := range moves {
		if limits.Undivided {
			if m.Decode != 0 {
				continue
			}
			m = planner.Pools{Whole: m.Prefill}
		}
		plan := slices.Clone(c.plan)
		fits := true
		for i := from; i < to; i++ {
			p := planner.Pools{Prefill: plan[i].Prefill + m.Prefill, Decode: plan[i].Decode + m.Decode, Whole: plan[i].Whole + m.Whole}
			plan[i], fits = p, fits && limits.Cut(p) == p
		}
		for i := range c.from {
			plan[i] = plan[c.from]
		}
		if fits {
			plans = append(plans, plan)
		}
	}
	return plans
}

// take runs plans, and keeps the best one if it is better than what there is.
func (c *climb) take(plans [][]planner.Pools) error {
	if c.left < len(plans) {
		return nil
	}
	c.left -= len(plans)
	reports, errs := make([]*sim.Report, len(plans)), make([]error, len(plans))
	var wait sync.WaitGroup
	turns := make(chan struct{}, runtime.GOMAXPROCS(0))
	for i, plan := range plans {
		turns <- struct{}{}
		wait.Go(func() {
			o := *c.o
			o.Sim.First = plan[0]
			reports[i], errs[i] = many("hindsight", &o, func(planner.Limits) (planner.Planner, error) {
				return &known{every: c.every, ahead: time.Duration(o.Sim.Table.Prefill.StartMs * 1e6), plan: plan}, nil
			})
			<-turns
		})
	}
	wait.Wait()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	for i, r := range reports {
		if score := r.GoodShare * r.GoodPerGPUSecond; score > c.score {
			c.plan, c.report, c.score = plans[i], r, score
			if c.progress != nil {
				c.progress(fmt.Sprintf("hindsight, %d runs left", c.left), r)
			}
		}
	}
	return nil
}

var _ planner.Planner = (*known)(nil)
