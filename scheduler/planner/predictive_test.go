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

// straight is a profile of decode engines whose steps take 10 ms, 1 ms more for each stream and 1 ms for each 1,000 tokens in the KV cache of 100,000.
func straight() *Profile {
	p := &Profile{Prefill: profile().Prefill, KVTokens: 100_000, Start: 30 * time.Second}
	for _, usage := range []float64{0.05, 0.3, 0.6, 1} {
		for _, context := range []int{100, 1000, 10_000} {
			streams := usage * float64(p.KVTokens) / float64(context)
			itl := 10 + streams + usage*100
			p.Decode = append(p.Decode, DecodePoint{KVUsage: usage, Context: context, ITL: itl, PerGPU: streams / itl * 1e3})
		}
	}
	return p
}

// TestDecodingIsSeen shows four engines with eight streams each, of 1,000 tokens: steps take 26 ms, of which 16 go into streams, so that 2.5 engines would be busy with nothing
// else. Three engines' steps would take 56 ms then, and two would never be done.
func TestDecodingIsSeen(t *testing.T) {
	made, err := New("predictive", Config{Limits: limits(20), TTFT: 2 * time.Second, ITL: 50 * time.Millisecond, Profile: straight()})
	if err != nil {
		t.Fatal(err)
	}
	q := made.(*predictive)
	if bare := q.surfaces.Bare(); bare < 9.5 || bare > 10.5 {
		t.Errorf("a step of no streams is taken for %.2f ms", bare)
	}
	o := &Observation{}
	for second := range 400 {
		busy(o, second)
		o.DecodeSteps = o.DecodeSteps[:0]
		o.Decode = Pool{Ready: 4, Running: 32, KVUsage: 0.08}
		q.Step(o)
	}
	if w := q.s.Answers.mean; w < 2.3 || w > 2.6 {
		t.Errorf("streams are taken for what keeps %.2f engines busy", w)
	}
	for n, want := range map[int][2]float64{2: {0, 0.01}, 3: {0, 0.4}, 4: {0.98, 1}, 8: {0.99, 1}} {
		if share := q.scratch.tokensSteady(n); share < want[0] || share > want[1] {
			t.Errorf("%d engines are thought to make %.3f of answers in time", n, share)
		}
	}
	// A KV cache that takes half a second to come, for answers of 5 to 54 tokens: the short ones have more than 24 ms of it a token, on top of 26.
	q.s.Transfer = 0.4
	q.scratch.load(q, o)
	if share := q.scratch.tokensSteady(4); share > 0.8 || share < 0.4 {
		t.Errorf("with transfers that make short answers late, %.3f are thought to come in time", share)
	}
}

// TestRiskIsRoom: the less sure demands are, the more engines it takes.
func TestRiskIsRoom(t *testing.T) {
	before := 0
	for _, risk := range []string{"0", "1", "3"} {
		made, err := New("predictive:risk="+risk, Config{Limits: limits(40), TTFT: 2 * time.Second, ITL: 50 * time.Millisecond, Profile: straight()})
		if err != nil {
			t.Fatal(err)
		}
		q, o := made.(*predictive), &Observation{}
		for second := range 300 {
			busy(o, second)
			o.Decode = Pool{Ready: 8, Running: 128 + 40*(second/45%2), KVUsage: 0.16}
			q.Step(o)
		}
		n := 1
		for q.scratch.tokensSteady(n) < 0.9 {
			n++
		}
		if n < before || risk == "3" && n < 9 {
			t.Errorf("with a risk of %s it takes %d engines, with less %d", risk, n, before)
		}
		before = n
	}
}

// TestEnginesThatAreGone: where there is none of a kind there must be one, whatever was seen.
func TestEnginesThatAreGone(t *testing.T) {
	made, err := New("predictive", Config{Limits: limits(20), TTFT: 2 * time.Second, ITL: 50 * time.Millisecond, Profile: straight()})
	if err != nil {
		t.Fatal(err)
	}
	o := &Observation{}
	var d Decision
	for second := range 120 {
		busy(o, second)
		o.Decode = Pool{}
		if d = made.Step(o); d.Want != (Pools{}) {
			break
		}
	}
	if want := (Pools{Prefill: 2, Decode: 1}); d.Want != want {
		t.Errorf("without a decode engine it wants %s: %s", d.Want, d.Reason)
	}
}

// TestEnginesThatDoNotSay: of engines that do not say how full their KV cache is, it is taken from prompts.
func TestEnginesThatDoNotSay(t *testing.T) {
	made, err := New("predictive", Config{Limits: limits(20), TTFT: 2 * time.Second, ITL: 50 * time.Millisecond, Profile: straight()})
	if err != nil {
		t.Fatal(err)
	}
	q, o := made.(*predictive), &Observation{}
	for second := range 200 {
		busy(o, second)
		o.DecodeSteps = o.DecodeSteps[:0]
		o.Decode = Pool{Ready: 4, Running: 32}
		q.Step(o)
	}
	// Prompts of 1,300 tokens: steps of 28.4 ms, of which 18.4 go into streams.
	if w := q.s.Answers.mean; w < 2.4 || w > 2.8 {
		t.Errorf("streams are taken for what keeps %.2f engines busy", w)
	}
}
