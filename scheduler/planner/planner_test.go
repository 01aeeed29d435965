package planner

import (
	"encoding/json"
	"math"
	"math/rand/v2"
	"os"
	"strings"
	"testing"
	"time"
)

// TestSLACases are the formulas' worked cases.
func TestSLACases(t *testing.T) {
	data, err := os.ReadFile("testdata/sla.json")
	if err != nil {
		t.Fatal(err)
	}
	var cases []struct {
		Name    string
		In      SLAInput
		Formula Pools
		Sized   Pools
	}
	if err := json.Unmarshal(data, &cases); err != nil {
		t.Fatal(err)
	}
	for _, c := range cases {
		formula, sized := SLASize(c.In)
		if formula != c.Formula || sized != c.Sized {
			t.Errorf("%s: formula %v, sized %v; want %v and %v", c.Name, formula, sized, c.Formula, c.Sized)
		}
	}
}

// TestSLABudgetHolds cuts whatever the formula says.
func TestSLABudgetHolds(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 20000 {
		p, d := 1+rng.IntN(8), 1+rng.IntN(8)
		want := Pools{Prefill: 1 + rng.IntN(40), Decode: 1 + rng.IntN(40)}
		budget := p + d + rng.IntN(60)
		each := Pools{Prefill: p, Decode: d}
		_, sized := SLABudget(want, p, d, 1, budget)
		if sized.Times(each) > budget || sized.Prefill < 1 || sized.Decode < 1 {
			t.Fatalf("%v of %d and %d GPUs in %d: %v", want, p, d, budget, sized)
		}
	}
}

func limits(most int) Limits {
	return Limits{EngineGPUs: Pools{Prefill: 1, Decode: 1, Whole: 1}, MaxGPUs: most}
}

// seconds gives a planner an observation each second, and returns the last decision that is not empty.
func seconds(p Planner, n int, o *Observation, change func(i int, o *Observation)) (last Decision) {
	for i := range n {
		o.At += time.Second
		o.Since = time.Second
		if change != nil {
			change(i, o)
		}
		if d := p.Step(o); d.Want != (Pools{}) {
			last = d
		}
	}
	return last
}

// TestReactiveCases are those of the load based planner: a queue that falls from 3 to 1 holds, one that rises from 1 to 3 grows.
func TestReactiveCases(t *testing.T) {
	for _, c := range []struct {
		name     string
		from, to int
		kv       float64
		waiting  int
		had      Pools
		budget   int
		want     Pools
	}{
		{"queue falls", 3, 1, 0.7, 0, Pools{Prefill: 2, Decode: 2}, 8, Pools{Prefill: 2, Decode: 2}},
		{"queue rises", 1, 3, 0.7, 0, Pools{Prefill: 2, Decode: 2}, 8, Pools{Prefill: 3, Decode: 2}},
		{"queue rises, no GPU", 1, 3, 0.7, 0, Pools{Prefill: 2, Decode: 2}, 4, Pools{Prefill: 2, Decode: 2}},
		{"no queue", 0, 0, 0.7, 0, Pools{Prefill: 2, Decode: 2}, 8, Pools{Prefill: 1, Decode: 2}},
		{"no queue, the last one stays", 0, 0, 0.7, 0, Pools{Prefill: 1, Decode: 2}, 8, Pools{Prefill: 1, Decode: 2}},
		{"cache is full", 0, 0, 0.95, 0, Pools{Prefill: 1, Decode: 2}, 8, Pools{Prefill: 1, Decode: 3}},
		{"what waits counts .02", 0, 0, 0.85, 3, Pools{Prefill: 1, Decode: 2}, 8, Pools{Prefill: 1, Decode: 3}},
		{"cache is empty", 0, 0, 0.4, 0, Pools{Prefill: 1, Decode: 2}, 8, Pools{Prefill: 1, Decode: 1}},
		{"queue stays where it is, above the threshold", 2, 2, 0.7, 0, Pools{Prefill: 2, Decode: 2}, 8, Pools{Prefill: 3, Decode: 2}},
		{"queue falls to what is still much", 9, 8, 0.7, 0, Pools{Prefill: 2, Decode: 2}, 8, Pools{Prefill: 3, Decode: 2}},
		{"cache at the upper threshold", 0, 0, 0.9, 0, Pools{Prefill: 1, Decode: 2}, 8, Pools{Prefill: 1, Decode: 2}},
		{"cache at the lower threshold", 0, 0, 0.5, 0, Pools{Prefill: 1, Decode: 2}, 8, Pools{Prefill: 1, Decode: 2}},
		{"both grow within one budget, prefill first", 3, 3, 0.95, 0, Pools{Prefill: 2, Decode: 2}, 5, Pools{Prefill: 3, Decode: 2}},
		{"both grow", 3, 3, 0.95, 0, Pools{Prefill: 2, Decode: 2}, 6, Pools{Prefill: 3, Decode: 3}},
		{"one leaves, so that another may come", 0, 0, 0.95, 0, Pools{Prefill: 2, Decode: 2}, 4, Pools{Prefill: 1, Decode: 3}},
	} {
		p, err := New("reactive", Config{Limits: limits(c.budget)})
		if err != nil {
			t.Fatal(err)
		}
		o := &Observation{Prefill: Pool{Ready: c.had.Prefill}, Decode: Pool{Ready: c.had.Decode, Usages: []float64{c.kv, c.kv}, Waits: []int{c.waiting, c.waiting}}}
		d := seconds(p, 31, o, func(i int, o *Observation) {
			o.Prefill.Waiting = c.from + (c.to-c.from)*i/30
		})
		if d.Want != c.want {
			t.Errorf("%s: %v, want %v: %s", c.name, d.Want, c.want, d.Reason)
		}
	}
}

// TestReactiveGrace has a new decode engine stay three intervals, and looks at nothing while engines start.
func TestReactiveGrace(t *testing.T) {
	p, _ := New("reactive", Config{Limits: limits(8)})
	o := &Observation{Prefill: Pool{Ready: 1}, Decode: Pool{Ready: 2, Usages: []float64{1, 1}, Waits: []int{0, 0}}}
	if d := seconds(p, 31, o, nil); d.Want.Decode != 3 {
		t.Fatalf("got %v", d.Want)
	}
	o.Decode.Starting = 1
	if d := seconds(p, 100, o, nil); d.Want != (Pools{}) {
		t.Fatalf("while one starts: %v", d.Want)
	}
	o.Decode = Pool{Ready: 3, Usages: []float64{0, 0, 0}, Waits: []int{0, 0, 0}}
	for interval, want := range []int{3, 3, 3, 2} {
		n := 30
		if interval == 0 {
			n = 31
		}
		if d := seconds(p, n, o, nil); d.Want.Decode != want {
			t.Errorf("interval %d: %v, want %d: %s", interval, d.Want, want, d.Reason)
		}
	}
}

func TestQueue(t *testing.T) {
	p, err := New("queue:prompts=2:streams=10:window=60:interval=15", Config{Limits: limits(64)})
	if err != nil {
		t.Fatal(err)
	}
	o := &Observation{Prefill: Pool{Ready: 2, Waiting: 3, Running: 4}, Decode: Pool{Ready: 2, Running: 21}}
	if d := seconds(p, 15, o, nil); d.Want != (Pools{Prefill: 4, Decode: 2}) { // 7/2 rounded up; 21 are within a tenth of 20
		t.Errorf("got %v: %s", d.Want, d.Reason)
	}
	o.Prefill, o.Decode = Pool{Ready: 4}, Pool{Ready: 2, Running: 20}
	if d := seconds(p, 15, o, nil); d.Want.Prefill != 4 {
		t.Errorf("less within the window: %v", d.Want)
	}
	if d := seconds(p, 75, o, nil); d.Want.Prefill != 1 {
		t.Errorf("less after the window: %v", d.Want)
	}
}

// TestLoopHolds gives the loop planners that want anything: what it lets through is within the budget, with the GPUs of engines that still
// drain, and nothing while a change is in progress.
func TestLoopHolds(t *testing.T) {
	rng := rand.New(rand.NewPCG(4, 5))
	for range 20000 {
		each := Pools{Prefill: 1 + rng.IntN(4), Decode: 1 + rng.IntN(4)}
		l := Loop{Planner: &static{want: Pools{Prefill: rng.IntN(30), Decode: rng.IntN(30)}}, Limits: Limits{EngineGPUs: each, MaxGPUs: each.Prefill + each.Decode + rng.IntN(40)}}
		o := &Observation{}
		o.Prefill.Ready, o.Decode.Ready = 1, 1
		for o.gpus(each) < l.Limits.MaxGPUs-8 && rng.IntN(10) > 0 {
			o.Prefill.Ready += rng.IntN(2)
			o.Decode.Ready += rng.IntN(2)
		}
		if rng.IntN(4) == 0 {
			o.Decode.Draining = 1
		}
		act, acts := l.Step(o)
		if !acts {
			continue
		}
		if o.Changing() {
			t.Fatalf("acts while %+v", o)
		}
		peak := o.gpus(each) + started(act.Had, act.Want).Times(each)
		if act.Want.Times(each) > l.Limits.MaxGPUs || grows(act.Had, act.Want) && peak > l.Limits.MaxGPUs {
			t.Fatalf("from %v to %v of %v: %d GPUs, %d meanwhile, of %d", act.Had, act.Want, each, act.Want.Times(each), peak, l.Limits.MaxGPUs)
		}
		if act.Want.Prefill < 1 || act.Want.Decode < 1 {
			t.Fatalf("nobody is left of %v", act.Want)
		}
	}
}

// TestLoopKeepsTheLeast has fewer GPUs than there must be: engines are added whatever the planner wants, and none is traded for another kind's.
func TestLoopKeepsTheLeast(t *testing.T) {
	for _, tt := range []struct {
		had, wants, want Pools
		each             Pools
		least, most      int
	}{
		{had: Pools{Prefill: 1, Decode: 1}, wants: Pools{}, want: Pools{Prefill: 3, Decode: 3}, least: 6, most: 8},
		{had: Pools{Prefill: 1, Decode: 1}, wants: Pools{Prefill: 1, Decode: 2}, want: Pools{Prefill: 3, Decode: 3}, least: 6, most: 8},
		{had: Pools{Prefill: 1, Decode: 1}, wants: Pools{Prefill: 1, Decode: 6}, want: Pools{Prefill: 1, Decode: 6}, least: 6, most: 8},
		{had: Pools{Prefill: 2, Decode: 4}, wants: Pools{Prefill: 2, Decode: 3}, want: Pools{}, least: 6, most: 8},
		{had: Pools{Prefill: 2, Decode: 4}, wants: Pools{Prefill: 1, Decode: 4}, want: Pools{}, least: 6, most: 8},
		{had: Pools{Prefill: 2, Decode: 5}, wants: Pools{Prefill: 1, Decode: 4}, want: Pools{Prefill: 2, Decode: 4}, least: 6, most: 8},
		{had: Pools{Prefill: 2, Decode: 4}, wants: Pools{Prefill: 1, Decode: 1}, want: Pools{Prefill: 1, Decode: 1}, least: 0, most: 8},
		{had: Pools{Prefill: 1, Decode: 1}, wants: Pools{}, want: Pools{Prefill: 2, Decode: 1}, each: Pools{Prefill: 2, Decode: 4}, least: 8, most: 9},
	} {
		if tt.each == (Pools{}) {
			tt.each = Pools{Prefill: 1, Decode: 1}
		}
		l := Loop{Planner: &static{want: tt.wants}, Limits: Limits{EngineGPUs: tt.each, MinGPUs: tt.least, MaxGPUs: tt.most}}
		o := &Observation{Prefill: Pool{Ready: tt.had.Prefill}, Decode: Pool{Ready: tt.had.Decode}}
		act, acts := l.Step(o)
		if acts != (tt.want != Pools{}) || act.Want != tt.want {
			t.Errorf("%+v: %+v", tt, act)
		}
		for step := 0; acts && step < 10; step++ { // it comes to rest
			o.Prefill.Ready, o.Decode.Ready = act.Want.Prefill, act.Want.Decode
			if act, acts = l.Step(o); acts && step == 9 {
				t.Errorf("%+v goes on: %+v", tt, act)
			}
		}
	}
	l := Loop{Planner: &static{}, Limits: Limits{EngineGPUs: Pools{Whole: 2}, MinGPUs: 5, MaxGPUs: 7, Undivided: true}}
	if act, acts := l.Step(&Observation{Whole: Pool{Ready: 1}}); !acts || act.Want != (Pools{Whole: 3}) {
		t.Errorf("undivided: %+v", act)
	}
}

func TestLoopAsksWhatCanBePlaced(t *testing.T) {
	l := Loop{Planner: &static{want: Pools{Prefill: 4, Decode: 4}}, Limits: limits(20), Fits: func(want Pools) (Pools, string) {
		return Pools{Prefill: want.Prefill, Decode: 3}, "no GPU with 40 GB is free"
	}}
	o := &Observation{Prefill: Pool{Ready: 2}, Decode: Pool{Ready: 2}}
	act, acts := l.Step(o)
	if !acts || act.Want != (Pools{Prefill: 4, Decode: 3}) || !strings.Contains(act.Reason, "40 GB") {
		t.Errorf("got %+v", act)
	}
}

// series feeds a predictor.
func series(p Predictor, n int, f func(i int) float64) {
	for i := range n {
		p.Add(f(i))
	}
}

func TestPredictors(t *testing.T) {
	for _, name := range predictors {
		p := predictor(t, name)
		if got := p.Predict(3); got != 0 {
			t.Errorf("%s knows %v of nothing", name, got)
		}
		series(p, 100, func(int) float64 { return 7 })
		if got := p.Predict(5); math.Abs(got-7) > 1e-3 {
			t.Errorf("%s: %v after sevens", name, got)
		}
		// After a fall to nothing no forecast is below it.
		series(p, 10, func(i int) float64 { return max(0, 7-float64(i)) })
		if got := p.Predict(20); got < 0 || math.IsNaN(got) {
			t.Errorf("%s: %v", name, got)
		}
	}
}

// TestPredictorsLearn holds each against what it is there for, and against the last value.
func TestPredictorsLearn(t *testing.T) {
	rng := rand.New(rand.NewPCG(8, 9))
	noise := make([]float64, 4000)
	wander := make([]float64, 4000)
	for i := range noise {
		noise[i] = rng.NormFloat64()
		if i > 1 {
			wander[i] = 0.9*wander[i-1] - 0.5*wander[i-2] + noise[i]
		}
	}
	for _, c := range []struct {
		name  string
		ahead int
		part  float64 // of the constant predictor's error
		f     func(i int) float64
	}{
		{"moving", 1, 0.8, func(i int) float64 { return 20 + noise[i] }},
		{"kalman", 1, 0.85, func(i int) float64 { return 20 + noise[i] }},
		{"kalman", 6, 0.9, func(i int) float64 { return 20 + 0.5*float64(i) + noise[i] }},
		{"seasonal", 6, 0.4, func(i int) float64 { return 20 + 10*math.Sin(float64(i)/24*2*math.Pi) + noise[i]/2 }},
		{"arima", 1, 0.9, func(i int) float64 { return 20 + wander[i] }},
		{"best", 6, 0.5, func(i int) float64 { return 20 + 10*math.Sin(float64(i)/24*2*math.Pi) + noise[i]/2 }},
	} {
		wrong := func(name string) float64 {
			p := predictor(t, name)
			sum := 0.0
			for i := range 900 {
				p.Add(c.f(i))
				if i > 300 {
					off := p.Predict(c.ahead) - c.f(i+c.ahead)
					sum += off * off
				}
			}
			return math.Sqrt(sum)
		}
		if got, last := wrong(c.name), wrong("constant"); got > c.part*last {
			t.Errorf("%s, %d ahead: wrong by %.3f of what the last value is, want %.3f", c.name, c.ahead, got/last, c.part)
		}
	}
}

func profile() *Profile {
	p := &Profile{KVTokens: 40000, Streams: 256, Start: 30 * time.Second, ChunkTokens: 4096}
	for n := 64; n < 100000; n = n * 3 / 2 {
		ttft := 10 + 0.2*float64(n)
		p.Prefill = append(p.Prefill, PrefillPoint{Prompt: n, TTFT: ttft, PerGPU: float64(n) / ttft * 1e3})
	}
	for k := 1; k <= 20; k++ {
		for c := 64; c <= 40000; c *= 2 {
			streams := max(1, float64(k)/20*40000/float64(c))
			itl := 20 + 1.5*streams
			p.Decode = append(p.Decode, DecodePoint{KVUsage: float64(k) / 20, Context: c, ITL: itl, PerGPU: streams / itl * 1e3})
		}
	}
	return p
}

func TestSurfaces(t *testing.T) {
	s, err := NewSurfaces(*profile())
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range []float64{64, 100, 1234, 50000} { // a line is exact for cubic pieces
		if got := s.TTFT(n); math.Abs(got-(10+0.2*n)) > 1e-6*got {
			t.Errorf("TTFT(%v) = %v", n, got)
		}
	}
	if s.TTFT(1) != s.TTFT(64) || s.TTFT(1e9) != s.TTFT(float64(s.Prefill[len(s.Prefill)-1].Prompt)) {
		t.Error("lengths are not clamped")
	}
	if got := s.ITL(10, 1024); math.Abs(got-35) > 0.2 {
		t.Errorf("ITL of 10 streams of 1024 is %v", got)
	}
	if got := s.BestRate(35, 1024); math.Abs(got-10/35.0*1e3) > 6 {
		t.Errorf("at 35 ms %v tokens/s, want %v", got, 10/35.0*1e3)
	}
	if got, least := s.BestRate(1, 1024), s.at(0, 1024, func(p *DecodePoint) float64 { return p.PerGPU }); got != least {
		t.Errorf("where nothing is fast enough: %v, want %v", got, least)
	}
}

// TestBestRateScansDown has times that fall again at a high usage: the scan must find that.
func TestBestRateScansDown(t *testing.T) {
	p := profile()
	p.Decode = nil
	for i, itl := range []float64{20, 60, 45, 80} {
		p.Decode = append(p.Decode, DecodePoint{KVUsage: 0.25 * float64(i+1), Context: 1000, ITL: itl, PerGPU: 100 * float64(i+1)})
	}
	s, err := NewSurfaces(*p)
	if err != nil {
		t.Fatal(err)
	}
	if got := s.BestRate(50, 1000); got < 300 || got > 320 {
		t.Errorf("got %v, want what there is at a usage of 0.75 and little more", got)
	}
}

func TestProfilesRefused(t *testing.T) {
	for name, spoil := range map[string]func(*Profile){
		"few":      func(p *Profile) { p.Prefill = p.Prefill[:1] },
		"falling":  func(p *Profile) { p.Prefill[1].Prompt = 1 },
		"zero":     func(p *Profile) { p.Prefill[2].TTFT = 0 },
		"hole":     func(p *Profile) { p.Decode = p.Decode[1:] },
		"negative": func(p *Profile) { p.Decode[4].ITL = -1 },
		"nothing":  func(p *Profile) { p.Decode = nil },
	} {
		p := profile()
		spoil(p)
		if _, err := NewSurfaces(*p); err == nil {
			t.Errorf("%s: taken", name)
		}
	}
}

// TestCorrector learns a factor and lets no outlier in.
func TestCorrector(t *testing.T) {
	rng := rand.New(rand.NewPCG(6, 6))
	var c corrector
	c.add(5, 1)
	if c.factor() != 1 {
		t.Error("one sample is enough")
	}
	c = corrector{}
	for i := range 300 {
		if i%9 == 0 {
			c.add(40, 1)
			c.add(0, 0)
			c.add(math.NaN(), 1)
			continue
		}
		c.add(1.3+0.05*rng.NormFloat64(), 1)
	}
	if got := c.factor(); math.Abs(got-1.3) > 0.02 {
		t.Errorf("learned %v, want 1.3", got)
	}
}

// TestStateSurvives stops each planner in the middle, restores another one from its state, and compares what both say from then on.
func TestStateSurvives(t *testing.T) {
	for _, name := range append(Names(), "sla:kalman=1", "sla:best=1", "sla:seasonal=7") {
		c := Config{Limits: limits(30), TTFT: 2 * time.Second, ITL: 50 * time.Millisecond, Profile: profile()}
		make := func() Planner {
			p, err := New(name, c)
			if err != nil {
				t.Fatal(err)
			}
			return p
		}
		a := make()
		rng := rand.New(rand.NewPCG(1, 1))
		o := &Observation{}
		step := func(i int, o *Observation) {
			o.Arrived, o.Done = o.Arrived[:0], o.Done[:0]
			for range 1 + rng.IntN(3+i/20) {
				o.Arrived = append(o.Arrived, Arrival{At: o.At, Prompt: 100 + rng.IntN(3000)})
				o.Done = append(o.Done, Done{Prompt: 1000, Output: 1 + rng.IntN(300), TTFT: time.Second, ITL: 30 * time.Millisecond, Lasted: 10 * time.Second})
			}
			o.Prefill = Pool{Ready: 3, Waiting: rng.IntN(5), Waits: []int{1, 0, 0}, Usages: []float64{0.1, 0, 0}}
			o.Decode = Pool{Ready: 4, Running: rng.IntN(50), Waits: []int{0, 0, 0, 0}, Usages: []float64{0.6, 0.5, 0.4, 0.3}}
			o.DecodeSteps = append(o.DecodeSteps[:0], Step{Streams: 10, KV: 10000, Took: 36 * time.Millisecond})
		}
		seconds(a, 97, o, step)
		state, err := a.State()
		if err != nil {
			t.Fatal(err)
		}
		b := make()
		if err := b.Restore(state); err != nil {
			t.Fatal(err)
		}
		for i := range 200 {
			o.At += time.Second
			step(i, o)
			x, y := a.Step(o), b.Step(o)
			if x.Want != y.Want || x.Reason != y.Reason {
				t.Fatalf("%s, second %d: %v and %v\n%s\n%s", name, i, x.Want, y.Want, x.Reason, y.Reason)
			}
		}
		if name != "static" {
			if err := make().Restore([]byte("{")); err == nil {
				t.Errorf("%s: half a state is taken", name)
			}
		}
	}
}

func TestSpecsRefused(t *testing.T) {
	c := Config{Limits: limits(30), TTFT: time.Second, ITL: time.Second}
	for spec, says := range map[string]string{
		"":                        "unknown planner",
		"static:prefill":          "KEY=NUMBER",
		"static:size=3":           "unknown parameter",
		"static:prefill=0":        "must be",
		"queue:window=5:window=6": "twice",
		"sla":                     "profile",
		"predictive":              "profile",
		"sla:kalman=1:best=1":     "2 predictors are chosen",
		"sla:holt=1":              "unknown parameter",
	} {
		if _, err := New(spec, c); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%q: %v, want something about %q", spec, err, says)
		}
	}
}

// TestSurfacesNeverDipBelowNothing has points so far apart that a cubic between them goes below 0, where a rate would ask for no engine at all.
func TestSurfacesNeverDipBelowNothing(t *testing.T) {
	p := profile()
	p.Prefill = nil
	for i, prompt := range []int{64, 128, 16000, 32000, 64000} {
		p.Prefill = append(p.Prefill, PrefillPoint{Prompt: prompt, TTFT: []float64{10, 900, 1000, 1100, 9000}[i], PerGPU: []float64{9000, 100, 90, 80, 70}[i]})
	}
	s, err := NewSurfaces(*p)
	if err != nil {
		t.Fatal(err)
	}
	dips := 0
	for n := 64.0; n <= 64000; n += 16 {
		if s.TTFT(n) <= 0 || s.PrefillRate(n) <= 0 {
			t.Fatalf("%v tokens: %v ms, %v tokens/s", n, s.TTFT(n), s.PrefillRate(n))
		}
		if s.PrefillRate(n) == s.floor[1] {
			dips++
		}
	}
	if dips == 0 {
		t.Error("the points do not make the cubic dip: the test shows nothing")
	}
}
