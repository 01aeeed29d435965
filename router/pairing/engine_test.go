package pairing

import (
	"context"
	"strings"
	"testing"
)

// chosen names the workers of a decision.
func chosen(d Decision) string {
	if d.Whole != nil {
		return d.Whole.ID
	}
	return d.Prefill.ID + ">" + d.Decode.ID
}

func TestEnginesThatAreStrainedGoLast(t *testing.T) {
	full := func(c *Candidate) { c.Engine = Engine{Known: true, KVUsage: 0.99} }
	queue := func(c *Candidate) { c.Engine = Engine{Known: true, Waiting: 40, KVUsage: -1} }
	calm := func(c *Candidate) { c.Engine = Engine{Known: true, Running: 3, KVUsage: 0.5} }
	unheard := func(c *Candidate) { c.Engine = Engine{KVUsage: 1, Waiting: 99, Foreign: 99} }
	busy := func(c *Candidate) { calm(c); c.Load = Load{Decodes: 50} }
	foreign := func(c *Candidate) { calm(c); c.Engine.Foreign = 5 }
	for _, tt := range []struct {
		name    string
		workers []Candidate
		whole   bool
		want    string
		reason  string
	}{
		{name: "a full cache", workers: []Candidate{worker("p", RolePrefill), with(worker("d1", RoleDecode), full), with(worker("d2", RoleDecode), busy)}, want: "p>d2"},
		{name: "a long queue", workers: []Candidate{worker("p", RolePrefill), with(worker("d1", RoleDecode), queue), with(worker("d2", RoleDecode), busy)}, want: "p>d2"},
		{name: "before unequal blocks", workers: []Candidate{worker("p", RolePrefill), with(worker("d1", RoleDecode), full), with(worker("d2", RoleDecode), func(c *Candidate) { calm(c); c.BlockTokens = 32 })}, want: "p>d2"},
		{name: "one strained rather than two", workers: []Candidate{with(worker("p1", RolePrefill), full), with(worker("p2", RolePrefill), busy), with(worker("d", RoleDecode), full)}, want: "p2>d", reason: "d all the same: its KV cache is full (99 %"},
		{name: "strained rather than nobody", workers: []Candidate{with(worker("p", RolePrefill), queue), with(worker("d", RoleDecode), full)}, want: "p>d", reason: "p all the same: its queue is long (0 %, 40 waiting)"},
		{name: "nothing heard lately", workers: []Candidate{worker("p", RolePrefill), with(worker("d1", RoleDecode), unheard), with(worker("d2", RoleDecode), busy)}, want: "p>d1"},
		{name: "others' requests weigh like own", workers: []Candidate{worker("p", RolePrefill), with(worker("d1", RoleDecode), foreign), with(worker("d2", RoleDecode), func(c *Candidate) { c.Load.Decodes = 4 })}, want: "p>d2"},
		{name: "whole", whole: true, workers: []Candidate{with(worker("d1", RoleDecode), full), with(worker("d2", RoleDecode), busy)}, want: "d2"},
		{name: "whole, and no other decodes", whole: true, workers: []Candidate{with(worker("d", RoleDecode), full), worker("p", RolePrefill)}, want: "d", reason: "d all the same"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var policy LeastLoaded
			for range 2 * len(tt.workers) { // whatever turn it is
				d, err := policy.Pick(context.Background(), Request{Model: "m", PromptTokens: 100, Whole: tt.whole}, &View{Now: now, Workers: tt.workers})
				if err != nil {
					t.Fatal(err)
				}
				if got := chosen(d); got != tt.want || !strings.Contains(d.Reason, tt.reason) {
					t.Fatalf("%s: %s, want %s: %s", got, d.Reason, tt.want, tt.reason)
				}
				if tt.reason == "" && strings.Contains(d.Reason, "all the same") {
					t.Errorf("%s", d.Reason)
				}
			}
		})
	}
}
