package planner

import (
	"strings"
	"testing"
	"time"
)

// restored makes a planner with whatever state it takes, and says whether it took it.
func restored(t testing.TB, name string, state []byte) (Planner, error) {
	p, err := New(name, Config{Limits: limits(9), TTFT: 2 * time.Second, ITL: 50 * time.Millisecond, Profile: profile()})
	if err != nil {
		t.Fatal(err)
	}
	return p, p.Restore(state)
}

// busy is an observation of pools with something to do.
func busy(o *Observation, second int) {
	o.At += time.Second
	o.Since = time.Second
	o.Arrived = append(o.Arrived[:0], Arrival{At: o.At, Prompt: 1000 + 100*(second%7), Cached: 16})
	o.Done = append(o.Done[:0], Done{Prompt: 1000, Output: 5 + second%50, TTFT: time.Second, ITL: 30 * time.Millisecond, Lasted: 3 * time.Second})
	o.Prefill = Pool{Ready: 2, Waiting: 1, Waits: []int{1, 0}, Usages: []float64{0.1, 0}}
	o.Decode = Pool{Ready: 3, Running: 9, Waits: []int{0, 0, 0}, Usages: []float64{0.6, 0.5, 0.4}}
	o.DecodeSteps = append(o.DecodeSteps[:0], Step{Streams: 3, KV: 3000, Took: 25 * time.Millisecond})
	o.PrefillSteps = append(o.PrefillSteps[:0], Step{Prompt: 1000, Took: 210 * time.Millisecond})
	o.Started = append(o.Started[:0], time.Minute)
}

// FuzzRestore gives planners states that nobody wrote: they are refused, or the planner goes on and its decisions keep to the limits.
func FuzzRestore(f *testing.F) {
	for i, name := range Names() {
		p, err := restored(f, name, []byte("{}"))
		if err != nil {
			f.Fatal(err)
		}
		o := &Observation{}
		for second := range 25 {
			busy(o, second)
			p.Step(o)
		}
		state, err := p.State()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(uint8(i), state)
		f.Add(uint8(i), []byte(strings.ReplaceAll(string(state), `"next":`, `"next":9`)))
	}
	f.Fuzz(func(t *testing.T, which uint8, state []byte) {
		name := Names()[int(which)%len(Names())]
		p, err := restored(t, name, state)
		if err != nil {
			return
		}
		l := Loop{Planner: p, Limits: limits(9)}
		o := &Observation{At: time.Hour}
		for second := range 12 { // one decision of each planner, two of most
			busy(o, second)
			if act, acts := l.Step(o); acts && (act.Want.Times(l.Limits.EngineGPUs) > l.Limits.MaxGPUs || act.Want.Prefill < 1 || act.Want.Decode < 1) {
				t.Fatalf("%s wants %s", name, act.Want)
			}
		}
		if again, err := p.State(); err == nil { // numbers beyond all sense may have become none
			if _, err := restored(t, name, again); err != nil {
				t.Fatalf("%s does not take what it wrote itself: %v", name, err)
			}
		}
	})
}

// TestDamagedStates: what would make a planner fail later is refused at once, and it goes on as one that knows nothing.
func TestDamagedStates(t *testing.T) {
	ratios := strings.Repeat("1,", ratiosMax) + "1"
	for name, damages := range map[string]map[string]string{
		"predictive": {
			`{"prefill":{"ratios":[` + ratios + `]}}`:  "129 ratios",
			`{"decode":{"next":128}}`:                  "the next of them is 128",
			`{"starts":{"ratios":[-1]}}`:               "the ratio -1",
			`{"lengths":{"next":-1}}`:                  "the next of them is -1",
			`{"lengths":{"done":[{"n":-4}]}}`:          "an answer had -4 tokens",
			`{"arrivals":[{"At":-5}]}`:                 "came at -5ns",
			`{"arrivals":[{"Prompt":9000000000}]}`:     "a request of 9000000000 tokens",
			`{"arrivals":[{"Prompt":10,"Cached":11}]}`: "11 of them cached",
			`{"prompts":{"seen":[1,-1]}}`:              "a demand of -1 engines",
			`{"answers":{"seen":[1e300]}}`:             "a demand of 1e+300 engines",
			`{"answers":{"n":-1}}`:                     "a demand has 0 values",
			`{"prompts":{"sum":-1}}`:                   "-1 of 0 since",
			`{"began_ns":-9223372036854775808}`:        "it began at",
			`{"less":-1}`:                              "below nothing",
			`{"prompts":7}`:                            "cannot unmarshal",
		},
		"sla": {
			`{"requests":{"n":-1}}`:                                    "has seen -1 values",
			`{"prompt":{"moving":{"width":0}}}`:                        "the mean of 0 values",
			`{"output":{"seasonal":{"period":0}}}`:                     "a season of 0",
			`{"requests":{"seasonal":{"period":9,"n":3}}}`:             "a season of 9 intervals has 0",
			`{"requests":{"seasonal":{"period":1000000000000,"n":0}}}`: "a season of 1000000000000",
			`{"requests":7}`:                                           "cannot unmarshal",
		},
	} {
		p, _ := restored(t, name, nil)
		whole, err := p.State()
		if err != nil {
			t.Fatal(err)
		}
		for change, want := range damages {
			q, err := restored(t, name, []byte(change))
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s, %.60s: %v, want %q", name, change, err, want)
			}
			if state, err := q.State(); err != nil || string(state) != string(whole) {
				t.Errorf("%s, %.60s has left something: %s, %v", name, change, state, err)
			}
		}
	}
}

// TestTimeUnseen: a planner that was away for long, or whose look failed, does not take that for a time without requests.
func TestTimeUnseen(t *testing.T) {
	p, _ := restored(t, "predictive", nil)
	q := p.(*predictive)
	o := &Observation{}
	for second := range 300 {
		busy(o, second)
		q.Step(o)
	}
	before := q.s.Prompts.mean
	o.At += 30 * 24 * time.Hour
	for second := range 20 {
		busy(o, second)
		q.Step(o)
	}
	if n, after := len(q.s.Prompts.Seen), q.s.Prompts.mean; n > 60 || !(before > 0.05) || after < 0.9*before {
		t.Errorf("%d intervals were counted, and prompts that ask for %.3f engines for %.3f then", n, before, after)
	}
}

// TestSizesBeyondSense: figures that nothing can mean want many engines, or none, and the budget holds.
func TestSizesBeyondSense(t *testing.T) {
	for _, state := range []string{`{"samples":-1,"prompts":9e18,"streams":1e300}`, `{"prompts":-1e300,"streams":1e300}`, `{"streams":9e18}`} {
		p, err := restored(t, "queue", []byte(state))
		if err != nil {
			t.Fatal(err)
		}
		l, o := Loop{Planner: p, Limits: limits(9)}, &Observation{At: time.Hour}
		busy(o, 0)
		if act, _ := l.Step(o); act.Want.Times(l.Limits.EngineGPUs) > 9 {
			t.Errorf("%s wants %s", state, act.Want)
		}
	}
	_, sized := SLASize(SLAInput{Interval: 1, Requests: 1e300, Prompt: 1e6, Output: 1, PrefillRate: 1, DecodeRate: 1, PrefillGPUs: 2, DecodeGPUs: 3, Budget: 40})
	if sized.Times(Pools{Prefill: 2, Decode: 3}) > 40 {
		t.Errorf("the formula comes to %s", sized)
	}
}
