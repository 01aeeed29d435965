package bench

import (
	"context"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"strings"
)

// contestant is one that can be measured, ours or another.
type contestant struct {
	name string
	what string
	run  func(context.Context) (Measure, error)
}

// race runs everybody once a round, in an order that is reversed every other round, so that what happens on the machine
// falls on all alike. A contestant other than the first that fails is left out and noted; when the first fails, or ctx
// ends, the whole rounds so far are what there is.
func race(ctx context.Context, rounds int, list []contestant, progress io.Writer, what string) (runs map[string][]Measure, notes []string, err error) {
	runs = make(map[string][]Measure, len(list))
	list = slices.Clone(list)
	for round := range rounds {
		order := slices.Clone(list)
		if round%2 == 1 {
			slices.Reverse(order)
		}
		got := make(map[string]Measure, len(order))
		for _, c := range order {
			m, err := c.run(ctx)
			if err == nil && ctx.Err() == nil {
				got[c.name] = m
				continue
			}
			if ctx.Err() != nil {
				return runs, notes, context.Cause(ctx)
			}
			if c.name == list[0].name {
				return runs, notes, fmt.Errorf("%s: %w", what, err)
			}
			notes = append(notes, fmt.Sprintf("%s, %s: not measured, %v", c.name, what, err))
			list = slices.DeleteFunc(list, func(x contestant) bool { return x.name == c.name })
			delete(runs, c.name)
		}
		line := fmt.Sprintf("%s, round %d of %d:", what, round+1, rounds)
		for _, c := range list {
			runs[c.name] = append(runs[c.name], got[c.name])
			line += fmt.Sprintf(" %s %s", c.name, f2(got[c.name].GBps()))
		}
		fmt.Fprintln(progress, line, "GB/s")
	}
	return runs, notes, nil
}

// fill turns a race's runs into a row's figures.
func (r *Row) fill(list []contestant, runs map[string][]Measure) {
	r.Ours = series(runs[list[0].name])
	for _, c := range list[1:] {
		theirs := runs[c.name]
		if len(theirs) == 0 {
			continue
		}
		n := min(len(theirs), len(r.Ours.Runs))
		ratios, cpu := make([]float64, n), make([]float64, n)
		for i := range n {
			ratios[i] = r.Ours.Runs[i].GBps() / theirs[i].GBps()
			cpu[i] = over(r.Ours.Runs[i].cpuPerGB(), theirs[i].cpuPerGB())
		}
		r.Others = append(r.Others, Other{Name: c.name, Series: series(theirs), Ratio: median(ratios), RatioMin: slices.Min(ratios), RatioMax: slices.Max(ratios), CPURatio: median(cpu)})
	}
}

func series(runs []Measure) Series {
	s := Series{Runs: runs}
	if len(runs) == 0 {
		return s
	}
	rates, cpu := make([]float64, len(runs)), make([]float64, len(runs))
	for i, m := range runs {
		rates[i], cpu[i] = m.GBps(), m.cpuPerGB()
	}
	s.GBps, s.GBpsMin, s.GBpsMax, s.CPUPerGB = median(rates), slices.Min(rates), slices.Max(rates), median(cpu)
	return s
}

func median(v []float64) float64 {
	if len(v) == 0 {
		return math.NaN()
	}
	v = slices.Sorted(slices.Values(v))
	if n := len(v); n%2 == 0 {
		return (v[n/2-1] + v[n/2]) / 2
	}
	return v[len(v)/2]
}

// quantile is the smallest of the values that at least q of them do not exceed.
func quantile(v []float64, q float64) float64 {
	v = slices.Sorted(slices.Values(v))
	return v[min(max(int(math.Ceil(q*float64(len(v))))-1, 0), len(v)-1)]
}

// jain is Jain's index of fairness and the smallest share over the greatest.
func jain(v []float64) (index, minOverMax float64) {
	var sum, squares float64
	for _, x := range v {
		sum += x
		squares += x * x
	}
	if squares == 0 {
		return 0, 0
	}
	return sum * sum / (float64(len(v)) * squares), slices.Min(v) / slices.Max(v)
}

// busyCPU is the CPU time of the whole machine that was not idle, in seconds.
func busyCPU() float64 {
	b, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0
	}
	line, _, _ := strings.Cut(string(b), "\n")
	var v [8]float64
	_, _ = fmt.Sscanf(line, "cpu %g %g %g %g %g %g %g %g", &v[0], &v[1], &v[2], &v[3], &v[4], &v[5], &v[6], &v[7])
	return (v[0] + v[1] + v[2] + v[5] + v[6] + v[7]) / 100 // all but idle and waiting for a disk; stolen time is foreign
}
