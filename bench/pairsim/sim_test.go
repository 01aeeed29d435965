package pairsim

import (
	"bytes"
	"math/rand/v2"
	"os"
	"reflect"
	"strings"
	"testing"

	"github.com/headrace/headrace/router/pairing"
)

func TestReadTrace(t *testing.T) {
	const good = `{"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]}

{"timestamp": 3.5, "input_length": 512, "output_length": 1, "hash_ids": [0]}
`
	got, err := ReadTrace(strings.NewReader(good))
	if err != nil || len(got) != 2 || got[1].At != 3.5 || len(got[0].whole()) != 1 || len(got[1].whole()) != 1 {
		t.Errorf("%+v, %v", got, err)
	}
	for _, bad := range []string{"", "x", `{}`, `{"input_length": 700, "output_length": 5, "hash_ids": [0]}`, `{"input_length": 1, "output_length": 0, "hash_ids": [0]}`,
		`{"input_length": 512, "output_length": 1, "hash_ids": [0, 1]}`, `{"timestamp": -1, "input_length": 1, "output_length": 1, "hash_ids": [0]}`, strings.ReplaceAll(good, `"timestamp": 0`, `"timestamp": 9`)} {
		if got, err := ReadTrace(strings.NewReader(bad)); err == nil {
			t.Errorf("%q is read as %+v", bad, got)
		}
	}
}

func FuzzReadTrace(f *testing.F) {
	f.Add([]byte(`{"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		trace, err := ReadTrace(bytes.NewReader(b))
		if err == nil && len(trace) == 0 {
			t.Error("nothing, and no error")
		}
		for i := range trace {
			if n := len(trace[i].whole()); n*BlockTokens > trace[i].Input {
				t.Errorf("%d whole blocks in %d tokens", n, trace[i].Input)
			}
		}
	})
}

// The cache against a list that does the same slowly.
func TestCache(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	c := newCache(20)
	var lru []uint32 // the longest unused first
	for range 5000 {
		talk := uint32(rng.IntN(6)) * 100
		ids := make([]uint32, 1+rng.IntN(8))
		for i := range ids {
			ids[i] = talk + uint32(i)
		}
		want := 0
		for want < len(ids) && contains(lru, ids[want]) {
			want++
		}
		n := c.cached(ids)
		if n != want {
			t.Fatalf("cached %d of %v, want %d", n, ids, want)
		}
		if !c.fits(ids[:n], len(ids)-n) {
			t.Fatal("does not fit an idle cache")
		}
		c.hold(ids[:n])
		c.take(len(ids) - n)
		c.name(ids[n:])
		c.release(ids)
		for _, id := range ids {
			lru = without(lru, id)
		}
		for i := len(ids) - 1; i >= 0; i-- {
			lru = append(lru, ids[i])
		}
		lru = lru[max(len(lru)-20, 0):]
		if c.used != c.idles || c.used != len(c.blocks) || c.used > 20 {
			t.Fatalf("%d used, %d idle, %d found", c.used, c.idles, len(c.blocks))
		}
	}
}

func contains(list []uint32, id uint32) bool { return len(without(list, id)) < len(list) }

func without(list []uint32, id uint32) []uint32 {
	var out []uint32
	for _, x := range list {
		if x != id {
			out = append(out, x)
		}
	}
	return out
}

// Every request ends, whatever the policy, and nothing is left held.
func TestRunsLeaveNothing(t *testing.T) {
	trace := Generate(400, 40, 1)
	for _, o := range []Options{{Decode: 4}, {Prefill: 2, Decode: 2}} {
		o.Timing = DefaultTiming()
		o.Timing.Blocks = 120 // tight
		for _, name := range pairing.Names {
			policy, err := pairing.New(name, 1)
			if err != nil {
				t.Fatal(err)
			}
			s, err := run(trace, &o, o.Timing, policy, 1)
			ends := 0
			for _, e := range s.engines {
				ends += len(e.ends)
			}
			if err != nil || len(s.ttft) != len(trace) || ends != len(trace) {
				t.Fatalf("%s: %d first tokens and %d ends of %d, %v", name, len(s.ttft), ends, len(trace), err)
			}
			for _, e := range s.engines {
				if e.cache.used != e.cache.idles || e.load != (pairing.Load{}) {
					t.Errorf("%s: %s holds %d blocks and has the load %+v", name, e.w.ID, e.cache.used-e.cache.idles, e.load)
				}
			}
		}
	}
}

func TestComparisonIsDeterministic(t *testing.T) {
	trace := Generate(300, 50, 2)
	a, err := Compare(trace, Options{Speedup: 5, Seed: 9})
	if err != nil {
		t.Fatal(err)
	}
	b, err := Compare(trace, Options{Speedup: 5, Seed: 9})
	if err != nil || !reflect.DeepEqual(a, b) {
		t.Errorf("the same run differs: %+v, %+v, %v", a, b, err)
	}
}

// The shape that the full trace shows holds for a generated one too: see docs/bench.md for the figures.
func TestJointIsAheadOfTheOthers(t *testing.T) {
	trace := Generate(1000, 60, 3)
	for _, o := range []Options{{}, {Prefill: 4, Decode: 4}} {
		o.Speedup = 5
		r, err := Compare(trace, o)
		if err != nil {
			t.Fatal(err)
		}
		if testing.Verbose() {
			if err := Print(os.Stdout, r, false); err != nil {
				t.Fatal(err)
			}
		}
		if missed := r.Missed(); missed != "" {
			t.Errorf("%+v: %s", o, missed)
		}
	}
}
