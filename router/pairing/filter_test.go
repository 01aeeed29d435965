package pairing

import (
	"context"
	"fmt"
	"strings"
	"testing"
)

func weighing10(c *Candidate) { x := 0.1; c.Weight = &x }

func TestWeights(t *testing.T) {
	drained := func(c *Candidate) { c.Weight = new(float64) }
	count := func(t *testing.T, workers ...Candidate) map[string]int {
		t.Helper()
		seen := map[string]int{}
		for i := range 3000 {
			d, err := (&Random{}).Pick(context.Background(), Request{ID: fmt.Sprint(i), Model: "m", Attempt: 1}, &View{Now: now, Workers: workers})
			if err != nil {
				seen[err.Error()]++
				continue
			}
			seen[d.Whole.ID]++
		}
		return seen
	}
	// A tenth of one worker's share: 1 of 21 or so, as it takes part in one of ten draws of three.
	if seen := count(t, worker("a", RoleDecode), worker("b", RoleDecode), with(worker("c", RoleDecode), weighing10)); seen["c"] < 60 || seen["c"] > 140 || seen["a"] < 1200 || seen["b"] < 1200 {
		t.Errorf("with a weight of 0.1: %v", seen)
	}
	if seen := count(t, worker("a", RoleDecode), with(worker("b", RoleDecode), drained)); seen["a"] != 3000 {
		t.Errorf("with a weight of 0: %v", seen)
	}
	if seen := count(t, with(worker("a", RoleDecode), weighing10)); seen["a"] != 3000 {
		t.Errorf("alone with a weight of 0.1: %v", seen)
	}
	if seen := count(t, with(worker("a", RoleDecode), drained)); len(seen) != 1 || seen["pick workers: every worker of the model failed, drains or cools down"] != 3000 {
		t.Errorf("alone with a weight of 0: %v", seen)
	}
	// A prefill worker does not take over for all the decode workers' little weight.
	for i := range 100 {
		d, err := (&Joint{}).Pick(context.Background(), Request{ID: fmt.Sprint(i), Model: "m", PromptTokens: 1 << 20, Attempt: 1}, &View{Now: now, Workers: []Candidate{worker("p", RolePrefill), with(worker("d", RoleDecode), func(c *Candidate) { weighing10(c); streams(c) })}})
		if err != nil || d.Decode == nil {
			t.Fatalf("%+v, %v", d, err)
		}
	}
}

func TestSessionsStay(t *testing.T) {
	far := func(c *Candidate) { c.Load = Load{PrefillTokens: 100 * priorRate, Prefills: 100} }
	busy := func(c *Candidate) { c.Load = Load{PrefillTokens: priorRate, Prefills: 2} }
	full := func(c *Candidate) { c.Engine = Engine{Known: true, KVUsage: 1} }
	for _, tt := range []struct {
		name   string
		change func(p, d *Candidate)
		gone   bool
		stays  bool
		reason string
	}{
		{name: "with who has it", stays: true, change: func(_, _ *Candidate) {}, reason: "the session stays with p2 and d2"},
		{name: "while others have less to do", stays: true, change: func(p, d *Candidate) { busy(p); d.Load.Decodes = 23 }, reason: "stays"},
		{name: "with a canary", stays: true, change: func(p, _ *Candidate) { weighing10(p) }, reason: "stays"},
		{name: "not in a long queue", change: func(p, _ *Candidate) { far(p) }, reason: "would wait 100.0 s longer"},
		{name: "not where there is no room", change: func(_, d *Candidate) { full(d) }, reason: "its KV cache is full"},
		{name: "not with one that drains", change: func(_, d *Candidate) { d.Weight = new(float64) }, reason: "d2, which cannot serve now"},
		{name: "not with one that is gone", change: func(_, _ *Candidate) {}, gone: true, reason: "d2, which cannot serve now"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p2, d2 := worker("p2", RolePrefill), with(worker("d2", RoleDecode), streams)
			tt.change(&p2, &d2)
			v := &View{Now: now, Workers: []Candidate{worker("p1", RolePrefill), with(worker("d1", RoleDecode), streams), p2, d2}}
			if tt.gone {
				v.Workers = v.Workers[:3]
			}
			for _, name := range Names {
				policy, err := New(name, 1)
				if err != nil {
					t.Fatal(err)
				}
				elsewhere := 0
				for i := range 20 {
					d, err := policy.Pick(context.Background(), Request{ID: fmt.Sprint(i), Model: "m", PromptTokens: 1 << 20, Attempt: 1, Session: []string{"p2", "d2"}}, v)
					if err != nil || d.Prefill == nil {
						t.Fatalf("%s: %+v, %v", name, d, err)
					}
					if d.Prefill.ID != "p2" || d.Decode.ID != "d2" {
						elsewhere++
					}
					if !strings.Contains(d.Reason, tt.reason) {
						t.Errorf("%s: %s", name, d.Reason)
					}
				}
				if tt.stays == (elsewhere > 0) {
					t.Errorf("%s: %d of 20 elsewhere", name, elsewhere)
				}
			}
		})
	}
}

func TestAdaptersAreModels(t *testing.T) {
	base := func(c *Candidate) { c.Model, c.LoRAs = "base", []string{"m"} }
	v := &View{Now: now, Workers: []Candidate{with(worker("a", RoleBoth), base), with(worker("b", RoleDecode), func(c *Candidate) { c.Model = "base" })}}
	for i := range 20 {
		d, err := (&Joint{}).Pick(context.Background(), Request{ID: fmt.Sprint(i), Model: "m", PromptTokens: 100}, v)
		if err != nil || d.Whole == nil || d.Whole.ID != "a" {
			t.Fatalf("%+v, %v", d, err)
		}
	}
}
