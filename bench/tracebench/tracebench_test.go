package tracebench

import (
	"context"
	"flag"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/headrace/headrace/bench/pairsim"
	"github.com/headrace/headrace/router/pairing"
	"github.com/headrace/headrace/worker/standin"
)

func TestMain(m *testing.M) {
	MaybeChild()
	flag.Parse()
	os.Exit(m.Run())
}

// A stand-in takes the time that the simulation's engines do.
func TestTableIsTheTiming(t *testing.T) {
	timing := pairsim.DefaultTiming().Faster(3)
	table := tableOf(timing)
	if err := table.Check(); err != nil {
		t.Fatal(err)
	}
	if table.BlockTokens != pairsim.BlockTokens || table.Blocks != timing.Blocks || table.StreamsMax != timing.Streams {
		t.Errorf("%+v", table)
	}
}

// Prompts are equal as far as the trace says, and as long.
func TestBodies(t *testing.T) {
	a := pairsim.Request{Input: 1200, Output: 3, Blocks: []uint32{7, 8, 9}}
	b := pairsim.Request{Input: 1100, Output: 3, Blocks: []uint32{7, 10, 9}}
	prompt := func(q *pairsim.Request) string {
		_, after, ok := strings.Cut(string(body(q)), `"prompt":"`)
		if !ok {
			t.Fatal("no prompt")
		}
		return strings.TrimSuffix(after, `"}`)
	}
	x, y := prompt(&a), prompt(&b)
	if len(x) != 1200 || len(y) != 1100 || x[:512] != y[:512] || x[512] == y[512] && x[513] == y[513] || strings.ContainsAny(x, `"\`) {
		t.Errorf("%q, %q", x, y)
	}
}

// The whole of it, small: every request is answered as the trace says by engines that the router follows exactly.
func TestReplay(t *testing.T) {
	o := pairsim.Options{Decode: 2, Policies: []string{pairing.NameJoint}, Seed: 1}
	trace := pairsim.Generate(24, 20, 4)
	for i := range trace {
		trace[i].Output = 1 + trace[i].Output%6
	}
	r, err := pairsim.Plan(trace, &o)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := standin.WriteTokenizer(dir); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	s := &session{trace: trace, bodies: bodies(trace), o: o, dir: dir, say: t.Logf}
	x, err := s.run(ctx, pairing.NameJoint, r.Timing, 1)
	if err != nil {
		t.Fatal(err)
	}
	got := row(pairing.NameJoint, x)
	if got.HitRate <= 0 || got.HitRate >= 1 || got.TTFTMean <= 0 || got.TTFTP99 < got.TTFTP50 || saturation(x) <= 0 {
		t.Errorf("%+v", got)
	}
}

func TestPrefillWorkersAreRefused(t *testing.T) {
	if _, err := Run(t.Context(), pairsim.Generate(3, 10, 1), pairsim.Options{Prefill: 1, Decode: 1}, nil); err == nil {
		t.Error("stand-ins of a trace have no pairs")
	}
}
