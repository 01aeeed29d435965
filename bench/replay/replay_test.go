package replay

import (
	"bytes"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/headrace/headrace/scheduler/planner"
	"github.com/headrace/headrace/scheduler/sim"
	"github.com/headrace/headrace/scheduler/trace"
)

// options replay ten minutes whose requests come faster in the middle.
func options(t *testing.T, planners ...string) Options {
	t.Helper()
	table, err := sim.TableNamed("large")
	if err != nil {
		t.Fatal(err)
	}
	var all []trace.Request
	for at := time.Duration(0); at < 10*time.Minute; {
		gap := 400 * time.Millisecond
		if at > 3*time.Minute && at < 7*time.Minute {
			gap = 150 * time.Millisecond
		}
		all = append(all, trace.Request{At: at, Prompt: 200 + len(all)*37%1500, Output: 20 + len(all)*13%150})
		at += gap
	}
	return Options{
		Open: func() (trace.Reader, io.Closer, error) {
			return &trace.Slice{Requests: all}, io.NopCloser(nil), nil
		},
		Planners: planners, Rate: 1,
		Sim: sim.Options{Table: table, Limits: planner.Limits{MaxGPUs: 16}, First: planner.Pools{Prefill: 2, Decode: 2}, TTFT: 2 * time.Second, ITL: 50 * time.Millisecond, Seed: 1},
	}
}

// TestPlannersHold runs all of them: the same bytes twice, never past the budget, every request answered.
func TestPlannersHold(t *testing.T) {
	compare := func() (*Report, string) {
		var log bytes.Buffer
		o := options(t, planner.Names()...)
		o.Log = &log
		r, err := Compare("t", o)
		if err != nil {
			t.Fatal(err)
		}
		if err := Print(&log, r, true); err != nil {
			t.Fatal(err)
		}
		return r, log.String()
	}
	r, one := compare()
	if _, two := compare(); one != two {
		t.Error("two runs differ")
	}
	for i := range r.Rows {
		x := &r.Rows[i]
		if x.Requests != x.Done || x.GPUsMost > 16 {
			t.Errorf("%s: %d of %d requests, %d GPUs", x.Planner, x.Done, x.Requests, x.GPUsMost)
		}
	}
	// Twice and a half as many requests come at once, and engines take half a minute to start: some are late with any planner.
	own := &r.Rows[0]
	if own.Planner != "predictive" || own.GoodShare < 0.75 || own.Acts < 2 || own.Acts > 20 {
		t.Errorf("predictive: %.3f good with %d changes", own.GoodShare, own.Acts)
	}
	for i := range r.Rows {
		x := &r.Rows[i]
		t.Logf("%s: %.3f good, %.4f a GPU-second", x.Planner, x.GoodShare, x.GoodPerGPUSecond)
	}
	var svg bytes.Buffer
	if err := SVG(&svg, r); err != nil || !strings.HasSuffix(strings.TrimSpace(svg.String()), "</svg>") {
		t.Errorf("plot: %v", err)
	}
}

// TestUndivided sizes engines that do both.
func TestUndivided(t *testing.T) {
	o := options(t, "predictive", "reactive", "queue")
	o.Sim.Limits.Undivided = true
	o.Sim.First = planner.Pools{Whole: 3}
	r, err := Compare("t", o)
	if err != nil {
		t.Fatal(err)
	}
	for i := range r.Rows {
		if x := &r.Rows[i]; x.Requests != x.Done || x.GPUsMost > 16 {
			t.Errorf("%s: %d of %d requests, %d GPUs", x.Planner, x.Done, x.Requests, x.GPUsMost)
		}
	}
	// It reckons with prompts and streams in the same steps: a pool for either alone is far too small.
	if own := &r.Rows[0]; own.GoodShare < 0.75 || own.GPUsMean > 10 {
		t.Errorf("predictive: %.3f good with %.1f GPUs", own.GoodShare, own.GPUsMean)
	}
}

// TestFit turns parameters on what comes before the window alone.
func TestFit(t *testing.T) {
	o := options(t, "queue", "static:prefill=2:decode=3")
	o.Sim.From, o.Sim.First = 3*time.Minute, planner.Pools{Prefill: 9, Decode: 7}
	tried := 0
	if err := Fit(&o, func(string, *sim.Report) { tried++ }); err != nil {
		t.Fatal(err)
	}
	if tried < 10 || !strings.HasPrefix(o.Planners[0], "queue:prompts=") || o.Planners[1] != "static:prefill=2:decode=3" {
		t.Errorf("%d tried, %q", tried, o.Planners)
	}
	// What comes before the window is little: a pool that was grown for more would not be the best one.
	if p := o.Sim.First; p.Prefill > 3 || p.Decode > 5 || p.Prefill < 1 || p.Decode < 1 {
		t.Errorf("all begin with %s", p)
	}
	undivided := options(t, "static")
	undivided.Sim.From, undivided.Sim.Limits.Undivided = 3*time.Minute, true
	if err := Fit(&undivided, nil); err != nil || undivided.Sim.First.Whole < 1 || undivided.Planners[0] != fmt.Sprintf("static:whole=%d", undivided.Sim.First.Whole) {
		t.Errorf("undivided: %v, %q from %s", err, undivided.Planners, undivided.Sim.First)
	}
}

// TestRuns holds several runs taken together against each alone.
func TestRuns(t *testing.T) {
	o := options(t, "static:prefill=2:decode=2")
	good, taken := 0, 0.0
	for seed := range uint64(3) {
		o.Sim.Seed = 7 + seed
		r, err := Compare("t", o)
		if err != nil {
			t.Fatal(err)
		}
		good += r.Rows[0].Good
		taken += r.Rows[0].GPUSeconds
	}
	o.Sim.Seed, o.Runs = 7, 3
	r, err := Compare("t", o)
	if err != nil {
		t.Fatal(err)
	}
	if x := &r.Rows[0]; x.Runs != 3 || x.Good != good || math.Abs(x.GPUSeconds-taken) > 1e-6*taken || math.Abs(x.GoodPerGPUSecond-float64(good)/taken) > 1e-9 {
		t.Errorf("together %d good in %.1f GPU-seconds, want %d in %.1f", x.Good, x.GPUSeconds, good, taken)
	}
}

// TestHindsight looks for the best pools of a load that is high in its second half: those that may change are better than the best that stay, and
// these than where the search begins.
func TestHindsight(t *testing.T) {
	rng := rand.New(rand.NewPCG(2, 3))
	all := load(rng, 4*time.Minute, func(at float64) float64 {
		if at < 120 {
			return 1
		}
		return 5
	})
	o := options(t, "static:prefill=2:decode=2")
	o.Open = func() (trace.Reader, io.Closer, error) {
		return &trace.Slice{Requests: all}, io.NopCloser(nil), nil
	}
	o.Sim.From, o.Hindsight = 20*time.Second, 2*time.Minute
	r, err := Compare("t", o)
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Rows) != 3 || len(r.Hindsight) < 2 {
		t.Fatalf("%d rows, plan %v", len(r.Rows), r.Hindsight)
	}
	score := func(i int) float64 { return r.Rows[i].GoodShare * r.Rows[i].GoodPerGPUSecond }
	if score(1) < score(0) || score(2) <= score(1) {
		t.Errorf("%.4f, in hindsight %.4f, changing %.4f by %v", score(0), score(1), score(2), r.Hindsight)
	}
	again, err := Compare("t", o)
	if err != nil || again.Rows[2].Good != r.Rows[2].Good || !slices.Equal(again.Hindsight, r.Hindsight) {
		t.Errorf("a second search differs: %v", err)
	}
}
