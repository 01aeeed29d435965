package operate

import (
	"context"
	"encoding/json"
	"math"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/headrace/headrace/internal/registry"
	"github.com/headrace/headrace/internal/routers"
	"github.com/headrace/headrace/scheduler/connector"
	"github.com/headrace/headrace/scheduler/planner"
)

// measuredOnce has a meter look at one engine before and after something, and at a channel.
func measuredOnce(role string, was, is routers.Engine) *planner.Observation {
	var m meter
	engines := []*Record{{Engine: connector.Engine{Name: "e", ID: "e", Role: role}, Phase: Ready}}
	obs := &planner.Observation{}
	for _, e := range []routers.Engine{was, is} {
		obs = &planner.Observation{}
		m.measure(&Seen{Routers: []routers.Status{{Router: registry.Router{ID: "r"}, Workers: []routers.Worker{{ID: "e", Engine: &e}}}}}, engines, obs)
	}
	return obs
}

// TestDecodeSteps: only what a number of streams can be said of is a step.
func TestDecodeSteps(t *testing.T) {
	at := time.Unix(1_800_000_000, 0)
	first := func() routers.Engine {
		return routers.Engine{ReadAt: at, Running: 4, KVUsage: 0.2, Blocks: 100, BlockTokens: 16, Timing: &routers.Timing{Gaps: 1000, GapSeconds: 50, Prefills: 3, PromptTokens: 300}}
	}
	second := func() routers.Engine { // 4 streams of 100 tokens for a second, 40 ms each token
		return routers.Engine{ReadAt: at.Add(time.Second), Running: 4, KVUsage: 0.3, Blocks: 100, BlockTokens: 16, Timing: &routers.Timing{Gaps: 1100, GapSeconds: 54, Prefills: 3, PromptTokens: 300}}
	}
	want := planner.Step{Streams: 4, KV: 400, Took: 40 * time.Millisecond}
	for _, role := range []string{connector.Decode, connector.Whole} {
		if got := measuredOnce(role, first(), second()).DecodeSteps; !slices.Equal(got, []planner.Step{want}) {
			t.Errorf("%s: %+v, want %+v", role, got, want)
		}
	}
	for what, change := range map[string]func(a, b *routers.Engine){
		"fewer streams for a while":   func(_, b *routers.Engine) { b.Timing.GapSeconds = 52.9 },
		"more than it says":           func(_, b *routers.Engine) { b.Timing.GapSeconds = 55 },
		"idle before":                 func(a, _ *routers.Engine) { a.Running = 0 },
		"idle behind":                 func(_, b *routers.Engine) { b.Running = 0 },
		"prompts in between":          func(_, b *routers.Engine) { b.Timing.PromptTokens += 26 },
		"few tokens":                  func(_, b *routers.Engine) { b.Timing.Gaps = 1007 },
		"a new process":               func(_, b *routers.Engine) { b.Timing.Gaps, b.Timing.GapSeconds = 100, 4 },
		"it counts otherwise":         func(_, b *routers.Engine) { b.Timing.Cached = true },
		"the same look":               func(_, b *routers.Engine) { b.ReadAt = at },
		"an older look":               func(_, b *routers.Engine) { b.ReadAt = at.Add(-time.Second) },
		"too long between":            func(_, b *routers.Engine) { b.ReadAt, b.Timing.GapSeconds = at.Add(6*time.Second), 74 },
		"no word of the cache":        func(_, b *routers.Engine) { b.KVUsage = -1 },
		"no word of the cache's size": func(_, b *routers.Engine) { b.Blocks = 0 },
		"stale":                       func(_, b *routers.Engine) { b.Stale = true },
		"no times":                    func(_, b *routers.Engine) { b.Timing = nil },
		"no times before":             func(a, _ *routers.Engine) { a.Timing = nil },
	} {
		a, b := first(), second()
		change(&a, &b)
		if got := measuredOnce(connector.Decode, a, b).DecodeSteps; len(got) != 0 {
			t.Errorf("%s: %+v", what, got)
		}
	}
	if got := measuredOnce(connector.Prefill, first(), second()).DecodeSteps; len(got) != 0 {
		t.Errorf("a prefill engine decodes: %+v", got)
	}
}

// TestPrefillSteps: prompts are timed that found an engine idle, and left it so.
func TestPrefillSteps(t *testing.T) {
	at := time.Unix(1_800_000_000, 0)
	first := func() routers.Engine {
		return routers.Engine{ReadAt: at, PrefixHits: 64, Timing: &routers.Timing{Prefills: 10, PrefillSeconds: 1, QueueSeconds: 0.5, PromptTokens: 5000}}
	}
	second := func() routers.Engine {
		return routers.Engine{ReadAt: at.Add(time.Second), PrefixHits: 64, Timing: &routers.Timing{Prefills: 12, PrefillSeconds: 1.3, QueueSeconds: 0.501, PromptTokens: 6000}}
	}
	got := measuredOnce(connector.Prefill, first(), second()).PrefillSteps
	if len(got) != 1 || got[0].Prompt != 500 || (got[0].Took-150*time.Millisecond).Abs() > time.Microsecond || got[0].Streams != 0 {
		t.Errorf("two prompts of 500 tokens in 150 ms each: %+v", got)
	}
	for what, change := range map[string]func(a, b *routers.Engine){
		"at work before":     func(a, _ *routers.Engine) { a.Running = 1 },
		"at work behind":     func(_, b *routers.Engine) { b.Running = 1 },
		"one waits":          func(_, b *routers.Engine) { b.Waiting = 1 },
		"one had waited":     func(_, b *routers.Engine) { b.Timing.QueueSeconds = 0.54 },
		"none was computed":  func(_, b *routers.Engine) { b.Timing.Prefills = 10 },
		"it took no time":    func(_, b *routers.Engine) { b.Timing.PrefillSeconds = 1 },
		"of no tokens":       func(_, b *routers.Engine) { b.Timing.PromptTokens = 5000 },
		"some were cached":   func(a, b *routers.Engine) { a.Timing.Cached, b.Timing.Cached, b.PrefixHits = true, true, 80 },
		"some came by a way": func(a, b *routers.Engine) { a.Timing.Cached, b.Timing.Cached, b.ExternalHits = true, true, 80 },
	} {
		a, b := first(), second()
		change(&a, &b)
		if got := measuredOnce(connector.Prefill, a, b).PrefillSteps; len(got) != 0 {
			t.Errorf("%s: %+v", what, got)
		}
	}
	b := second()
	b.PrefixHits = 400
	if got := measuredOnce(connector.Prefill, first(), b).PrefillSteps; len(got) != 1 {
		t.Errorf("what was computed is known, and what was cached does not matter: %+v", got)
	}
	if got := measuredOnce(connector.Whole, first(), second()).PrefillSteps; len(got) != 0 {
		t.Errorf("the second of two may have been computed in steps with the first's streams: %+v", got)
	}
	b = second()
	b.Timing.Prefills = 11
	if got := measuredOnce(connector.Whole, first(), b).PrefillSteps; len(got) != 1 || got[0].Prompt != 1000 {
		t.Errorf("one alone: %+v", got)
	}
}

// TestTransfers: what daemons sent from prefill to decode engines, at their channels' speed, once for all routers.
func TestTransfers(t *testing.T) {
	engines := []*Record{{Engine: connector.Engine{ID: "p", Role: connector.Prefill}}, {Engine: connector.Engine{ID: "q", Role: connector.Prefill}}, {Engine: connector.Engine{ID: "d", Role: connector.Decode}}}
	look := func(sent, speed float64) *Seen {
		s := routers.Status{Workers: []routers.Worker{{ID: "p", NodeID: "a", KVTokenBytes: 1000}, {ID: "q", NodeID: "a", KVTokenBytes: 3000}, {ID: "d", NodeID: "b", KVTokenBytes: 1000}},
			Channels: []routers.Channel{{From: "a", To: "b", SpeedBps: speed, SentBytes: uint64(sent)}, {From: "b", To: "a", SpeedBps: speed, SentBytes: uint64(2 * sent)},
				{From: "a", To: "elsewhere", SpeedBps: speed, SentBytes: uint64(3 * sent)}}}
		return &Seen{Routers: []routers.Status{s, s}}
	}
	var m meter
	measure := func(s *Seen) *planner.Observation {
		obs := &planner.Observation{}
		m.measure(s, engines, obs)
		return obs
	}
	if obs := measure(look(5e6, 1e9)); obs.TransferTokens != 0 {
		t.Errorf("what was sent before the first look: %+v", obs)
	}
	if obs := measure(look(9e6, 1e9)); obs.TransferTokens != 2000 || obs.TransferTime != 4*time.Millisecond {
		t.Errorf("4 MB of tokens of 2 KB on average at 1 GB/s: %d tokens in %s", obs.TransferTokens, obs.TransferTime)
	}
	for what, s := range map[string]*Seen{"nothing new": look(9e6, 1e9), "a speed that is not measured": look(10e6, 0), "a new channel": look(1e6, 1e9)} {
		if obs := measure(s); obs.TransferTokens != 0 || obs.TransferTime != 0 {
			t.Errorf("%s: %d tokens in %s", what, obs.TransferTokens, obs.TransferTime)
		}
		m.channels = map[[2]string]uint64{{"a", "b"}: 9e6}
	}
	if m.told.TransferTokens != 2000 || m.told.TransferUs != 2 {
		t.Errorf("told %+v", m.told)
	}
}

// flat is a profile of engines that take a millisecond a prompt token, and 10 ms a step whatever they decode.
func flat() *planner.Profile {
	p := &planner.Profile{KVTokens: 1600, Streams: 64, Start: 3 * time.Second, ChunkTokens: 2048}
	for _, n := range []int{64, 1024, 2048} {
		p.Prefill = append(p.Prefill, planner.PrefillPoint{Prompt: n, TTFT: float64(n), PerGPU: 1000})
	}
	for _, u := range []float64{0.1, 1} {
		for _, c := range []int{64, 1024} {
			p.Decode = append(p.Decode, planner.DecodePoint{KVUsage: u, Context: c, ITL: 10, PerGPU: 100})
		}
	}
	return p
}

// TestCorrectsByWhatEnginesDo: the predictive planner learns from engines that exist how far its surfaces are off, and how long transfers take; a stall now and then counts for
// nothing. What it has learned is told, and survives a restart.
func TestCorrectsByWhatEnginesDo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, store := newWorld(t, 4), &memory{}
		clock := map[string]*routers.Timing{"prefill-0": {}, "decode-0": {}}
		sent, looks := 0, 0
		look := func(s *Seen) {
			looks++
			r := &s.Routers[0]
			for i := range r.Workers {
				x := &r.Workers[i]
				x.NodeID, x.KVTokenBytes = "n", 1000
				c := clock[x.ID]
				if c == nil {
					continue
				}
				slow := 1.0
				if looks%7 == 0 {
					slow = 9
				}
				if x.ID == "prefill-0" { // 500 tokens in 650 ms, 1.3 times what the surface says
					c.Prefills, c.PrefillSeconds, c.PromptTokens = c.Prefills+1, c.PrefillSeconds+0.65*slow, c.PromptTokens+500
				} else { // two streams, a token each 15 ms, 1.5 times as long
					c.Gaps, c.GapSeconds = c.Gaps+int64(2/0.015/slow), c.GapSeconds+2
					x.Engine.Running, x.Engine.KVUsage, x.Engine.Blocks, x.Engine.BlockTokens = 2, 0.5, 100, 16
				}
				timing := *c
				x.Engine.ReadAt, x.Engine.Timing = time.Now(), &timing
			}
			sent += 1e6
			r.Channels = []routers.Channel{{From: "n", To: "n", SpeedBps: 1e8, SentBytes: uint64(sent)}}
		}
		operator := func() *Operator {
			o := w.operator("static:prefill=1:decode=1", func(c *Config) {
				c.Interval = time.Second
				c.Spec = "predictive"
				c.Look = func(ctx context.Context, epoch time.Time) (*Seen, error) {
					s, err := w.look(ctx, epoch)
					if err == nil {
						look(s)
					}
					return s, err
				}
			})
			var err error
			if o.cfg.Planner, err = planner.New("predictive", planner.Config{Limits: o.cfg.Limits, TTFT: time.Second, ITL: 50 * time.Millisecond, Profile: flat()}); err != nil {
				t.Fatal(err)
			}
			return o
		}
		o := operator()
		during(t, o, store, func() { time.Sleep(100 * time.Second) })
		told := o.Status().Measured
		if told.PrefillSteps < 50 || told.DecodeSteps < 50 || told.TransferTokens < 50*1000 || math.Abs(told.TransferUs-10) > 0.1 {
			t.Errorf("the planner was told of %+v", told)
		}
		learned := func(o *Operator) (s struct {
			Prefill  struct{ Ratios []float64 } `json:"prefill"`
			Decode   struct{ Ratios []float64 } `json:"decode"`
			Transfer float64                    `json:"transfer_ms_per_token"`
		}) {
			data, err := o.cfg.Planner.State()
			if err == nil {
				err = json.Unmarshal(data, &s)
			}
			if err != nil {
				t.Fatal(err)
			}
			return s
		}
		s := learned(o)
		middle := func(v []float64) float64 { slices.Sort(v); return v[len(v)/2] }
		if p, d := middle(s.Prefill.Ratios), middle(s.Decode.Ratios); math.Abs(p-1.3) > 0.01 || math.Abs(d-1.5) > 0.02 || math.Abs(s.Transfer-0.01) > 1e-4 {
			t.Errorf("learned %.3f and %.3f, want 1.3 and 1.5; %.4f ms a token", p, d, s.Transfer)
		}
		// What was learned is kept though nothing changed meanwhile.
		again := operator()
		during(t, again, store, func() { time.Sleep(1500 * time.Millisecond) })
		if n := len(learned(again).Decode.Ratios); n < 60 {
			t.Errorf("%d ratios have survived", n)
		}
	})
}
