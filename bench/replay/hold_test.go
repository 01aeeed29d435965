package replay

import (
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/headrace/headrace/scheduler/planner"
	"github.com/headrace/headrace/scheduler/trace"
)

// load makes up requests at a rate by time.
func load(rng *rand.Rand, lasts time.Duration, rate func(at float64) float64) []trace.Request {
	var all []trace.Request
	for at := 0.0; at < lasts.Seconds(); at += rng.ExpFloat64() / rate(at) {
		all = append(all, trace.Request{At: time.Duration(at * 1e9), Prompt: 1 + int(rng.ExpFloat64()*1000), Output: 1 + int(rng.ExpFloat64()*120)})
	}
	return all
}

// TestPlannersHoldOnRandomLoads has loads jump, swing and stop: with no planner is the budget passed, or a change begun while another is in
// progress; and each request is answered.
func TestPlannersHoldOnRandomLoads(t *testing.T) {
	for seed := range uint64(2) {
		rng := rand.New(rand.NewPCG(seed, 77))
		level, period, jump := 1+3*rng.Float64(), 60+300*rng.Float64(), 1+2*rng.Float64()
		all := load(rng, 6*time.Minute, func(at float64) float64 {
			r := level * (1 + 0.8*math.Sin(at/period*2*math.Pi))
			if at > 120 && at < 200 {
				r *= jump
			}
			return r + 0.05
		})
		o := options(t, "predictive", "reactive:interval=5:grace=0", "queue:interval=5:window=0", "sla:interval=5")
		o.Open = func() (trace.Reader, io.Closer, error) {
			return &trace.Slice{Requests: all}, io.NopCloser(nil), nil
		}
		o.Sim.Limits.MaxGPUs = 5 + rng.IntN(12)
		most := o.Sim.Limits.MaxGPUs
		o.Watch = func(spec string, limits planner.Limits) (func(*planner.Observation, *planner.Decision, *planner.Act), func() error, error) {
			watch := func(obs *planner.Observation, _ *planner.Decision, act *planner.Act) {
				taken := 0
				for _, p := range []planner.Pool{obs.Prefill, obs.Decode} {
					taken += p.Ready + p.Starting + p.Draining
				}
				if act != nil {
					taken += max(0, act.Want.Prefill-act.Had.Prefill) + max(0, act.Want.Decode-act.Had.Decode)
				}
				if taken > most {
					t.Errorf("seed %d, %s: %d GPUs of %d at %s", seed, spec, taken, most, obs.At)
				}
				if act != nil && obs.Changing() {
					t.Errorf("seed %d, %s: %s to %s at %s, while a change is in progress", seed, spec, act.Had, act.Want, obs.At)
				}
			}
			return watch, func() error { return nil }, nil
		}
		r, err := Compare("t", o)
		if err != nil {
			t.Fatal(err)
		}
		for i := range r.Rows {
			if x := &r.Rows[i]; x.Done != x.Requests {
				t.Errorf("seed %d, %s: %d of %d requests", seed, x.Planner, x.Done, x.Requests)
			}
		}
	}
}

// TestPredictiveSettles gives the own planner loads that stay the same, of random height: when it has seen some of one, it changes little, and
// never goes back and forth.
func TestPredictiveSettles(t *testing.T) {
	for seed := range uint64(2) {
		rng := rand.New(rand.NewPCG(seed, 5))
		rate := 1.5 + 2*rng.Float64()
		all := load(rng, 10*time.Minute, func(float64) float64 { return rate })
		o := options(t, "predictive")
		o.Open = func() (trace.Reader, io.Closer, error) {
			return &trace.Slice{Requests: all}, io.NopCloser(nil), nil
		}
		var acts []planner.Act
		o.Watch = func(string, planner.Limits) (func(*planner.Observation, *planner.Decision, *planner.Act), func() error, error) {
			return func(obs *planner.Observation, _ *planner.Decision, act *planner.Act) {
				if act != nil && obs.At > 5*time.Minute && obs.At < 10*time.Minute {
					acts = append(acts, *act)
				}
			}, func() error { return nil }, nil
		}
		if _, err := Compare("t", o); err != nil {
			t.Fatal(err)
		}
		said := ""
		for _, a := range acts {
			said += fmt.Sprintf("\n%s: %s to %s: %s", a.At, a.Had, a.Want, a.Reason)
		}
		if len(acts) > 2 {
			t.Errorf("seed %d, %.1f requests/s: %d changes in five minutes:%s", seed, rate, len(acts), said)
		}
		t.Logf("seed %d, %.1f requests/s: %d changes%s", seed, rate, len(acts), said)
	}
}
