package planner

import (
	"testing"
	"time"
)

// watched shows a planner 90 seconds of the same load, and says when it wanted others.
func watched(t *testing.T, spec string, perSecond int, change func(o *Observation)) (first time.Duration) {
	t.Helper()
	p, err := New(spec, Config{Limits: limits(20), TTFT: 2 * time.Second, ITL: 50 * time.Millisecond, Profile: profile()})
	if err != nil {
		t.Fatal(err)
	}
	o := &Observation{}
	for second := range 90 {
		busy(o, second)
		o.Arrived, o.Started = nil, nil
		for range perSecond {
			o.Arrived = append(o.Arrived, Arrival{At: o.At, Prompt: 1000})
		}
		change(o)
		if d := p.Step(o); d.Want != (Pools{}) && d.Want != o.Now() {
			return o.At
		}
	}
	return 0
}

// TestFewRequestsMoveNothing: what is foreseen from less than a minute changes no pools by itself, but requests that are late in fact do.
func TestFewRequestsMoveNothing(t *testing.T) {
	const many = 40 // far more than two prefill engines compute
	if at := watched(t, "predictive", many, func(*Observation) {}); at > 0 && at < 60*time.Second {
		t.Errorf("nothing waits, and pools change at %v", at)
	}
	if at := watched(t, "predictive", many, func(o *Observation) { o.Prefill.WaitingTokens = 1e6 }); at == 0 || at > 30*time.Second {
		t.Errorf("prompts wait for minutes, and pools change at %v", at)
	}
	if at := watched(t, "predictive", many, func(o *Observation) {
		for range 5 {
			o.Done = append(o.Done, Done{Prompt: 1000, Output: 20, TTFT: 5 * time.Second, ITL: 30 * time.Millisecond, Lasted: 6 * time.Second})
		}
	}); at == 0 || at > 30*time.Second {
		t.Errorf("most requests are late, and pools change at %v", at)
	}
}

// TestStay: pools of the beginning are left for what brings enough, and for nothing less.
func TestStay(t *testing.T) {
	idle := func(o *Observation) { o.Prefill.Ready, o.Decode.Ready = 6, 6 }
	for spec, leaves := range map[string]bool{"predictive": true, "predictive:stay=0.01": true, "predictive:stay=5": false} {
		if at := watched(t, spec, 1, idle); (at > 0) != leaves {
			t.Errorf("%s leaves pools that are far too large at %v", spec, at)
		}
	}
}
