package replay

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"sort"
	"strconv"
	"strings"
	"time"

	"github.com/headrace/headrace/scheduler/planner"
	"github.com/headrace/headrace/scheduler/sim"
	"github.com/headrace/headrace/scheduler/trace"
)

// knob is a parameter and the values that are tried for it.
type knob struct {
	name   string
	values []float64
	// margin, where it is not 0, is by how much the best value must be better than one before it to be taken: what moves least comes first, and a difference that
	// another day would turn around is no reason to move.
	margin float64
}

// moveMargin is for knobs that decide whether anything is moved at all.
const moveMargin = 0.01

func turned(name string, values ...float64) knob { return knob{name: name, values: values} }

func upTo(n int) []float64 {
	var list []float64
	for k := 1; k <= n; k++ {
		list = append(list, float64(k))
	}
	return list
}

// knobs are what Fit turns, in this order.
func knobs(name string, limits *planner.Limits) []knob {
	switch name {
	case "static":
		if limits.Undivided {
			return []knob{turned("whole", upTo(limits.MaxGPUs/limits.EngineGPUs.Whole)...)}
		}
		return []knob{turned("decode", upTo(limits.MaxGPUs*2/3)...), turned("prefill", upTo(limits.MaxGPUs*2/3)...)}
	case "reactive":
		return []knob{turned("kv_up", 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9), turned("kv_down", 0.1, 0.2, 0.3, 0.4, 0.5),
			turned("queue_up", 0.5, 1, 2, 4), turned("queue_down", 0.05, 0.1, 0.2, 0.5), turned("interval", 10, 20, 30)}
	case "queue":
		return []knob{turned("prompts", 0.5, 0.75, 1, 1.5, 2, 3), turned("streams", 4, 6, 8, 10, 12, 14, 16, 20), turned("window", 30, 60, 120, 300), turned("interval", 10, 15, 30)}
	case "sla":
		return []knob{turned("interval", 15, 30, 60, 120, 180), turned("kalman", 0, 1)}
	case "predictive":
		stay := turned("stay", 0.2, 0.1, 0.05, 0.02, 0)
		stay.margin = moveMargin
		return []knob{turned("thrift", 0.3, 0.4, 0.5, 0.6, 0.7), turned("risk", 0.75, 1, 1.25, 1.5), turned("change", 0.05, 0.1, 0.2), stay}
	}
	return nil
}

// Fit chooses the parameters of planners that were given none, on what comes before the window that is counted: those with the highest product
// of good share and good requests per GPU-second. Each parameter is turned in its turn, twice. First it chooses the best pools that stay the same, each tried from its
// own beginning: with them every planner begins in what is compared after it, so that nothing is counted of how pools grew from others.
//
// Of what comes before, the first quarter is not counted. Planners are tried on the last two, and begin there with the pools that were best in the second: pools chosen on
// the very time that is counted would be better than any that can be chosen ahead, and no planner would learn to leave them.
func Fit(o *Options, progress func(spec string, r *sim.Report)) error {
	all, err := readAll(o)
	if err != nil {
		return err
	}
	n := sort.Search(len(all), func(i int) bool { return float64(all[i].At)/o.Rate >= float64(o.Sim.From) })
	first := *o
	first.Open = func() (trace.Reader, io.Closer, error) {
		return &trace.Slice{Requests: all[:n]}, io.NopCloser(nil), nil
	}
	first.Log, first.Watch = nil, nil
	first.Sim.Limits.EngineGPUs = o.Sim.Table.EngineGPUs()
	quarter := (o.Sim.From / 4).Truncate(time.Second)
	still := func(to time.Duration) (*fitting, error) {
		f := newFitting("static", &first)
		f.o.Sim.From, f.o.Sim.To = quarter, to
		return f, f.turn(progress)
	}
	early, err := still(2 * quarter)
	if err != nil {
		return err
	}
	first.Sim.First, first.Sim.From, first.Sim.To = early.pools(), 2*quarter, o.Sim.From
	whole, err := still(o.Sim.From)
	if err != nil {
		return err
	}
	o.Sim.First = whole.pools()
	for i, spec := range o.Planners {
		if strings.Contains(spec, ":") {
			continue
		}
		f := whole
		if spec != "static" {
			f = newFitting(spec, &first)
			if err := f.turn(progress); err != nil {
				return err
			}
		}
		o.Planners[i] = f.spec()
	}
	return nil
}

func readAll(o *Options) ([]trace.Request, error) {
	source, closer, err := o.Open()
	if err != nil {
		return nil, err
	}
	all, err := trace.ReadAll(source)
	return all, errors.Join(err, closer.Close())
}

const fitRounds = 2

// fitting is a planner whose parameters are turned.
type fitting struct {
	name  string
	o     Options
	knobs []knob
	set   []float64
	known map[string]float64
}

func newFitting(name string, o *Options) *fitting {
	f := &fitting{name: name, o: *o, knobs: knobs(name, &o.Sim.Limits), known: map[string]float64{}}
	for _, k := range f.knobs {
		f.set = append(f.set, k.values[len(k.values)/2])
	}
	return f
}

// turn leaves each parameter where the product is highest.
func (f *fitting) turn(progress func(string, *sim.Report)) error {
	_, err := f.try(progress)
	if err != nil {
		return err
	}
	for range fitRounds {
		before := slices.Clone(f.set)
		for i, k := range f.knobs {
			scores := make([]float64, len(k.values))
			for j, v := range k.values {
				f.set[i] = v
				if scores[j], err = f.try(progress); err != nil {
					return err
				}
			}
			f.set[i] = k.values[k.best(scores)]
		}
		if slices.Equal(before, f.set) {
			break
		}
	}
	return nil
}

// best is the first of the values whose score is not below the highest by more than the margin.
func (k *knob) best(scores []float64) int {
	top := slices.Max(scores)
	return slices.IndexFunc(scores, func(v float64) bool { return v >= top*(1-k.margin) })
}

// try is the product with the parameters as they are.
func (f *fitting) try(progress func(string, *sim.Report)) (float64, error) {
	spec := f.spec()
	if v, ok := f.known[spec]; ok {
		return v, nil
	}
	if f.name == "static" {
		f.o.Sim.First = f.pools()
	}
	r, err := one(spec, &f.o)
	if err != nil {
		return 0, err
	}
	if progress != nil {
		progress(spec, r)
	}
	f.known[spec] = r.GoodShare * r.GoodPerGPUSecond
	return f.known[spec], nil
}

// pools are those of a static planner, within the budget.
func (f *fitting) pools() planner.Pools {
	var p planner.Pools
	for i, k := range f.knobs {
		switch n := int(f.set[i]); k.name {
		case "prefill":
			p.Prefill = n
		case "decode":
			p.Decode = n
		case "whole":
			p.Whole = n
		}
	}
	return f.o.Sim.Limits.Cut(p)
}

func (f *fitting) spec() string {
	var b strings.Builder
	b.WriteString(f.name)
	for i, k := range f.knobs {
		fmt.Fprintf(&b, ":%s=%s", k.name, strconv.FormatFloat(f.set[i], 'g', -1, 64))
	}
	return b.String()
}
