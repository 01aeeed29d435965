// Package replay compares planners on a trace of requests: it runs the simulator for each of them, and prints and draws what came
// of it. Nothing is measured here but what the simulator counts.
package replay

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"runtime"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/headrace/headrace/scheduler/planner"
	"github.com/headrace/headrace/scheduler/sim"
	"github.com/headrace/headrace/scheduler/trace"
)

// Options of a comparison.
type Options struct {
	// Open gives the trace from its beginning.
	Open func() (trace.Reader, io.Closer, error)
	// Planners as planner.New takes them.
	Planners []string
	// Rate is how many times as fast requests come.
	Rate float64
	Sim  sim.Options
	// Runs is how many times each planner is run, each with the seed after that of the run before; 0 is once. Figures are of all runs together; logged, watched
	// and drawn is the first.
	Runs int
	// Hindsight, when above 0, adds what Hindsight finds, with stretches of that length.
	Hindsight time.Duration
	// Progress is told of each run of Hindsight; nil is nobody.
	Progress func(spec string, r *sim.Report)
	// Log gets a JSON object a line for each change that a planner makes; nil is nobody.
	Log io.Writer
	// Watch is asked for somebody who watches a planner's run, and for what to call when it is over; nil is nobody.
	Watch func(spec string, limits planner.Limits) (watch func(*planner.Observation, *planner.Decision, *planner.Act), over func() error, err error)
}

// Report is what Compare found.
type Report struct {
	Trace     string        `json:"trace"`
	Table     string        `json:"table"`
	Rate      float64       `json:"rate"`
	TTFT      float64       `json:"ttft_ms"`
	ITL       float64       `json:"itl_ms"`
	GPUs      int           `json:"gpus_max"`
	From      float64       `json:"from_s"`
	To        float64       `json:"to_s,omitempty"`
	Seed      uint64        `json:"seed"`
	Runs      int           `json:"runs"`
	First     planner.Pools `json:"first"` // that each planner begins with
	Rows      []sim.Report  `json:"rows"`
	Hindsight []Stretch     `json:"hindsight,omitempty"` // the plan of the row hindsight:changing
}

// Compare replays the trace with each planner.
func Compare(name string, o Options) (*Report, error) {
	r := &Report{Trace: name, Table: o.Sim.Table.Name, Rate: o.Rate, TTFT: ms(o.Sim.TTFT), ITL: ms(o.Sim.ITL), GPUs: o.Sim.Limits.MaxGPUs,
		From: o.Sim.From.Seconds(), To: o.Sim.To.Seconds(), Seed: o.Sim.Seed, Runs: max(o.Runs, 1), First: o.Sim.First}
	for _, spec := range o.Planners {
		row, err := one(spec, &o)
		if err != nil {
			return nil, err
		}
		r.Rows = append(r.Rows, *row)
	}
	if o.Hindsight > 0 {
		still, changing, plan, err := Hindsight(&o, o.Hindsight, o.Progress)
		if err != nil {
			return nil, err
		}
		still.Planner, changing.Planner = "hindsight:still", "hindsight:changing"
		r.Rows, r.Hindsight = append(r.Rows, *still, *changing), plan
	}
	return r, nil
}

func ms(d time.Duration) float64 { return d.Seconds() * 1e3 }

func one(spec string, o *Options) (*sim.Report, error) {
	return many(spec, o, func(l planner.Limits) (planner.Planner, error) {
		return planner.New(spec, planner.Config{Limits: l, TTFT: o.Sim.TTFT, ITL: o.Sim.ITL, Profile: o.Sim.Table.Profile(l.Undivided)})
	})
}

// many runs a planner with each seed.
func many(spec string, o *Options, fresh func(planner.Limits) (planner.Planner, error)) (*sim.Report, error) {
	runs := make([]*sim.Report, max(o.Runs, 1))
	errs := make([]error, len(runs))
	var wait sync.WaitGroup
	turns := make(chan struct{}, runtime.GOMAXPROCS(0))
	for i := range runs {
		once := *o
		once.Sim.Seed += uint64(i)
		if i > 0 {
			once.Log, once.Watch = nil, nil
		}
		turns <- struct{}{}
		wait.Go(func() {
			runs[i], errs[i] = run(spec, &once, fresh)
			<-turns
		})
	}
	wait.Wait()
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return sim.Merge(runs), nil
}

func run(spec string, o *Options, fresh func(planner.Limits) (planner.Planner, error)) (*sim.Report, error) {
	source, closer, err := o.Open()
	if err != nil {
		return nil, err
	}
	defer closer.Close()
	options := o.Sim
	options.Limits.EngineGPUs = options.Table.EngineGPUs()
	p, err := fresh(options.Limits)
	if err != nil {
		return nil, err
	}
	var logged error
	if o.Log != nil {
		lines := json.NewEncoder(o.Log)
		options.OnAct = func(a planner.Act) {
			if err := lines.Encode(logLine{Spec: spec, Act: a}); err != nil && logged == nil {
				logged = fmt.Errorf("write decision log: %w", err)
			}
		}
	}
	over := func() error { return nil }
	if o.Watch != nil {
		if options.Watch, over, err = o.Watch(spec, options.Limits); err != nil {
			return nil, err
		}
	}
	row, err := sim.Run(&trace.Faster{Reader: source, Rate: o.Rate}, p, options)
	if err := errors.Join(err, over()); err != nil {
		return nil, fmt.Errorf("%s: %w", spec, err)
	}
	row.Planner = spec
	return row, logged
}

// logLine is a line of the decision log.
type logLine struct {
	Spec string `json:"spec"`
	planner.Act
}

// Print writes a table, or the report as JSON.
func Print(w io.Writer, r *Report, asJSON bool) error {
	if asJSON {
		e := json.NewEncoder(w)
		e.SetIndent("", "  ")
		return e.Encode(r)
	}
	fmt.Fprintf(w, "%s at %gx its pace, engines %q, goal: TTFT %g ms, ITL %g ms; at most %d GPUs, %s in the beginning\n", r.Trace, r.Rate, r.Table, r.TTFT, r.ITL, r.GPUs, r.First)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	runs := float64(max(r.Runs, 1))
	fmt.Fprintln(t, "planner\tgood/GPU-s\tgood %\tGPUs\tmost\tGPU-h\tTTFT p50\tp90\tp99 ms\tITL p50\tp90\tp99 ms\tcached %\tchanges\tmoved\t")
	for i := range r.Rows {
		x := &r.Rows[i]
		fmt.Fprintf(t, "%s\t%.4f\t%.2f\t%.2f\t%d\t%.2f\t%.0f\t%.0f\t%.0f\t%.1f\t%.1f\t%.1f\t%.1f\t%.4g\t%.4g\t\n", x.Planner, x.GoodPerGPUSecond, 100*x.GoodShare, x.GPUsMean, x.GPUsMost, x.GPUHours/runs,
			x.TTFT.P50, x.TTFT.P90, x.TTFT.P99, x.ITL.P50, x.ITL.P90, x.ITL.P99, 100*x.HitShare, float64(x.Acts)/runs, float64(x.Moved)/runs)
	}
	return t.Flush()
}
