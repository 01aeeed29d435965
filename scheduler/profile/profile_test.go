package profile

import (
	"math"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/headrace/headrace/scheduler/planner"
	"github.com/headrace/headrace/scheduler/sim"
)

// measured are points of an engine of which the formula is known.
func measured(f *Fit, e *Engine, noise func() float64) []Point {
	var list []Point
	for _, n := range []int{64, 128, 256, 512, 1024, 2048, 4096, 8192} {
		for _, cached := range []int{0, n / 2} {
			ms := f.ttft(n, cached) * noise()
			list = append(list, Point{Degree: e.Degree, Kind: Prefill, Prompt: n, Cached: cached, Ms: ms, Low: ms, High: ms, Rounds: 1})
		}
	}
	for _, c := range []int{128, 512, 2048} {
		for _, n := range []int{1, 4, 16, min(64, int(e.KVTokens)/c)} {
			ms := f.itl(float64(n), float64(c)+7) * noise()
			list = append(list, Point{Degree: e.Degree, Kind: Decode, Streams: n, Context: c, Mean: float64(c) + 7, Ms: ms, Low: ms, High: ms, Rounds: 1})
		}
	}
	return list
}

func exact() float64 { return 1 }

var (
	goals = Goals{Prompt: 1000, Output: 200, TTFT: 200, ITL: 20}
	known = Fit{PrefillStepUs: 4000, PromptTokenUs: 50, PromptAttention: 900, ChunkTokens: 1024, DecodeStepUs: 5000, StreamUs: 150, KVTokenNs: 80}
)

func engine(degree int) Engine {
	return Engine{Degree: degree, GPUs: degree, Model: "m", KVTokens: 1 << 17, BlockTokens: 16, ContextTokens: 1 << 15, Streams: 128, StartMs: 3000}
}

func near(t *testing.T, what string, got, want, within float64) {
	t.Helper()
	if math.Abs(got-want) > within*math.Abs(want) {
		t.Errorf("%s is %g, want %g within %g %%", what, got, want, 100*within)
	}
}

func TestFitFindsWhatPointsWereMadeFrom(t *testing.T) {
	for seed := range uint64(50) {
		r := rand.New(rand.NewPCG(seed, 1))
		want := Fit{PrefillStepUs: 500 + 20000*r.Float64(), PromptTokenUs: 1 + 300*r.Float64(), PromptAttention: 5000 * r.Float64(), ChunkTokens: 64 << r.IntN(7),
			DecodeStepUs: 500 + 30000*r.Float64(), StreamUs: 500 * r.Float64(), KVTokenNs: 1 + 300*r.Float64()}
		e := engine(1)
		got, err := fit(measured(&want, &e, exact), 0)
		if err != nil {
			t.Fatal(err)
		}
		if got.ChunkTokens != want.ChunkTokens {
			t.Errorf("seed %d: chunk of %d tokens, want %d", seed, got.ChunkTokens, want.ChunkTokens)
		}
		near(t, "prefill_step_us", got.PrefillStepUs, want.PrefillStepUs, 1e-3)
		near(t, "prompt_token_us", got.PromptTokenUs, want.PromptTokenUs, 1e-3)
		near(t, "prompt_attention_ps", got.PromptAttention, want.PromptAttention, 1e-2)
		near(t, "decode_step_us", got.DecodeStepUs, want.DecodeStepUs, 1e-3)
		near(t, "stream_us", got.StreamUs, want.StreamUs, 1e-2)
		near(t, "kv_token_ns", got.KVTokenNs, want.KVTokenNs, 1e-3)
	}
}

func TestFitOfWorseMeasurementsStaysNear(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 7))
	e := engine(1)
	got, err := fit(measured(&known, &e, func() float64 { return 0.97 + 0.06*r.Float64() }), known.ChunkTokens)
	if err != nil {
		t.Fatal(err)
	}
	near(t, "time to the first token", got.ttft(3000, 0), known.ttft(3000, 0), 0.03)
	near(t, "time between tokens", got.itl(30, 1000), known.itl(30, 1000), 0.03)
	if got.PrefillOff < 0.005 || got.PrefillOff > 0.03 || got.PrefillMost < got.PrefillOff {
		t.Errorf("off by %g, at most %g: noise was 0.03 either way", got.PrefillOff, got.PrefillMost)
	}
}

// No coefficient is below 0, whatever was measured, and a table of it is one.
func TestFitOfAnythingIsATable(t *testing.T) {
	for seed := range uint64(200) {
		r := rand.New(rand.NewPCG(seed, 2))
		e := engine(1)
		points := measured(&known, &e, func() float64 { return math.Exp(3 * r.NormFloat64()) })
		report, err := Analyze(Input{Name: "n", Engines: []Engine{e}, Points: points, Goals: goals, ChannelBps: 1})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := report.Table(); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
	}
}

func TestSurfaces(t *testing.T) {
	e := engine(2)
	report, err := Analyze(Input{Name: "n", Engines: []Engine{e}, Points: measured(&known, &e, exact), Goals: goals, ChannelBps: 1e9})
	if err != nil {
		t.Fatal(err)
	}
	table, err := report.Table()
	if err != nil {
		t.Fatal(err)
	}
	if p := table.Profile(false); p != table.Surfaces {
		t.Error("planners do not get what was measured")
	}
	s, err := planner.NewSurfaces(*table.Surfaces)
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range []int{64, 700, 3000, 8192, 16384} {
		near(t, "time to the first token", s.TTFT(float64(n)), known.ttft(n, 0), 0.03)
	}
	for _, c := range []float64{128, 512, 2048} {
		for _, usage := range []float64{0.05, 0.3, 0.7, 1} {
			n := math.Max(usage*float64(e.KVTokens)/c, 1)
			near(t, "time between tokens", s.ITL(n, c), known.itl(n, c), 0.01)
		}
	}
	for _, p := range s.Prefill {
		if p.Extrapolated != (p.Prompt > 8192) {
			t.Errorf("prompt of %d: extrapolated %t", p.Prompt, p.Extrapolated)
		}
	}
	for _, p := range s.Decode {
		if n := p.KVUsage * float64(e.KVTokens) / float64(p.Context); p.Extrapolated != (n > 64.0001) {
			t.Errorf("%g streams at %d: extrapolated %t", n, p.Context, p.Extrapolated)
		}
	}
}

// What is chosen is what a look at every degree and number of streams finds.
func TestChoice(t *testing.T) {
	slow := known
	slow.PromptTokenUs, slow.StreamUs = 90, 300
	// Two GPUs compute faster, but not twice as fast.
	points := func() (list []Point) {
		a, b := engine(1), engine(2)
		return append(measured(&slow, &a, exact), measured(&known, &b, exact)...)
	}()
	for _, c := range []struct {
		name            string
		ttft, itl       float64
		prefill, decode int
		met             bool
	}{
		{"both goals are easy: fewer GPUs do more each", 500, 40, 1, 1, true},
		{"one GPU is too slow for prompts", 80, 40, 2, 1, true},
		{"nothing is fast enough for prompts", 1, 40, 2, 1, false},
		{"nothing is fast enough for streams", 500, 0.1, 1, 2, false},
	} {
		g := goals
		g.TTFT, g.ITL = c.ttft, c.itl
		r, err := Analyze(Input{Engines: []Engine{engine(2), engine(1)}, Points: points, Goals: g, ChannelBps: 1})
		if err != nil {
			t.Fatal(err)
		}
		x := r.Choice
		if x.Prefill.Degree != c.prefill || x.Decode.Degree != c.decode || x.Met != c.met || (x.Why == "") != c.met {
			t.Errorf("%s: %+v", c.name, x)
		}
		if _, err := planner.New(x.Planner(), planner.Config{Limits: planner.Limits{MaxGPUs: 8, EngineGPUs: planner.Pools{Prefill: 1, Decode: 1, Whole: 1}}, TTFT: 1e9, ITL: 1e9}); err != nil {
			t.Errorf("%s: the planner does not take its bounds: %v", c.name, err)
		}
		if x.KVDown >= x.KVUp/2 || x.QueueDown >= x.QueueUp/2 {
			t.Errorf("%s: bounds %+v let one engine of two go and come back", c.name, x)
		}
		if x.Decode.Met && x.Decode.Ms > c.itl {
			t.Errorf("%s: tokens come %g ms apart", c.name, x.Decode.Ms)
		}
	}
}

func TestAnalyzeOfTooLittle(t *testing.T) {
	e := engine(1)
	all := measured(&known, &e, exact)
	for _, c := range []struct {
		points []Point
		want   string
	}{{nil, "0 prefill points"}, {all[:1], "1 prefill points"}, {all[:8], "no decode point"}, {all[16:], "0 prefill points"}} {
		r, err := Analyze(Input{Engines: []Engine{e}, Points: c.points, Goals: goals, ChannelBps: 1})
		if err != nil {
			t.Fatal(err)
		}
		if !r.Partial || !strings.Contains(r.Measured[0].Reason, c.want) {
			t.Errorf("%d points: %q, want %q", len(c.points), r.Measured[0].Reason, c.want)
		}
		if _, err := r.Table(); err == nil {
			t.Error("there is a table of it")
		}
	}
	g := goals
	g.ITL = math.NaN()
	if _, err := Analyze(Input{Goals: g}); err == nil {
		t.Error("goals that are no numbers are taken")
	}
}

// What a simulated engine takes alone is what its fit says: both go by the same formula.
func TestFitIsTheSimulatorsFormula(t *testing.T) {
	x := sim.Timing{StepUs: known.PrefillStepUs, PromptTokenUs: known.PromptTokenUs, PromptAttention: known.PromptAttention, ChunkTokens: known.ChunkTokens}
	for _, n := range []int{1, 1024, 1025, 5000} {
		near(t, "prompt", known.ttft(n, n/3), x.Alone(n, n/3)/1e3, 1e-9)
	}
}

// What others published is read as it stands: it fits the formula, says where it is from, and makes a table.
func TestReferences(t *testing.T) {
	if len(References()) == 0 {
		t.Fatal("there are none")
	}
	for _, name := range References() {
		ref, err := ReferenceNamed(name)
		if err != nil {
			t.Fatal(err)
		}
		r, err := Analyze(ref.Input(Goals{Prompt: 512, Output: 128, TTFT: 400, ITL: 60}, 1e10))
		if err != nil {
			t.Fatal(err)
		}
		if len(ref.Sources) < 2 || !strings.HasPrefix(ref.Sources[0], "https://") || !strings.Contains(r.Note, ref.Sources[0]) {
			t.Errorf("%s: no source: %q", name, ref.Sources)
		}
		for _, m := range r.Measured {
			if m.Fit == nil {
				t.Fatalf("%s, degree %d: %s", name, m.Degree, m.Reason)
			}
			t.Logf("%s, degree %d: off by %.3f and %.3f", name, m.Degree, m.Fit.PrefillOff, m.Fit.DecodeOff)
			if m.Fit.PrefillOff > 0.2 || m.Fit.DecodeOff > 0.1 {
				t.Errorf("%s, degree %d: the formula is off by %g and %g", name, m.Degree, m.Fit.PrefillOff, m.Fit.DecodeOff)
			}
		}
		if !r.Choice.Met {
			t.Errorf("%s: %s", name, r.Choice.Why)
		}
		if _, err := r.Table(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := ReferenceNamed("none"); err == nil || !strings.Contains(err.Error(), "llama2-70b-h100") {
		t.Errorf("%v", err)
	}
}
