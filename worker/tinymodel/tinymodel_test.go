package tinymodel

import (
	"crypto/sha256"
	"encoding/hex"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/headrace/headrace/internal/gguf"
	"github.com/headrace/headrace/worker/model"
	"github.com/headrace/headrace/worker/sample"
)

func write(tb testing.TB, o Options) string {
	tb.Helper()
	path := filepath.Join(tb.TempDir(), "tiny.gguf")
	if err := Write(path, o); err != nil {
		tb.Fatal(err)
	}
	return path
}

func load(tb testing.TB, o Options) *model.Model {
	tb.Helper()
	m, err := model.Load(write(tb, o), model.Options{})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { m.Close() })
	return m
}

func newCache(tb testing.TB, m *model.Model, blocks, blockTokens int) *model.Cache {
	tb.Helper()
	c, err := m.NewCache(blocks, blockTokens, 1)
	if err != nil {
		tb.Fatal(err)
	}
	return c
}

func TestBytesAreFixed(t *testing.T) {
	for typ, want := range map[gguf.Type]string{gguf.F32: "38498b20d3386b4e", gguf.Q8_0: "f7d57f0c1a2ea882", gguf.Q4_1: "33da4082927b86c2", gguf.F16: "e02f682938108451", gguf.BF16: "ef500c280ae4ebc0", gguf.Q4_0: "f5527bb4e6bc97f1"} {
		b, err := os.ReadFile(write(t, Options{Seed: 7, DType: typ}))
		if err != nil {
			t.Fatal(err)
		}
		if sum := sha256.Sum256(b); hex.EncodeToString(sum[:8]) != want {
			t.Errorf("%s: %s", typ, hex.EncodeToString(sum[:8]))
		}
	}
}

func TestBadOptions(t *testing.T) {
	for _, o := range []Options{{DType: 14}, {Layers: -1}, {KVHeads: 3}, {KVHeads: 8}, {KVHeads: -1}, {Context: 1 << 30}} {
		if Write(filepath.Join(t.TempDir(), "x"), o) == nil {
			t.Errorf("%+v was written", o)
		}
	}
}

func text(r *rand.Rand, n, vocab int) []int32 {
	out := make([]int32, n)
	for i := range out {
		out[i] = int32(3 + r.IntN(vocab-3))
	}
	return out
}

// greedy continues a sequence whose KV is in the cache; next is its first token still to be run.
func greedy(tb testing.TB, m *model.Model, c *model.Cache, blocks []uint32, pos int, next int32, n int) []int32 {
	tb.Helper()
	out := []int32{}
	logits := make([]float32, m.Vocab)
	for range n {
		if err := m.Forward(c, []*model.Seq{{Tokens: []int32{next}, Pos: pos, Blocks: blocks, Logits: true, Out: logits}}, nil); err != nil {
			tb.Fatal(err)
		}
		next, pos = sample.Sample(logits, sample.Params{}, 0, pos+1), pos+1
		out = append(out, next)
	}
	return out
}

func table(n int) []uint32 {
	out := make([]uint32, n)
	for i := range out {
		out[i] = uint32(i)
	}
	return out
}

func TestGreedyTextIsNoLoop(t *testing.T) {
	m := load(t, Options{Seed: 1})
	c := newCache(t, m, 32, 16)
	for seed := range uint64(5) {
		p := text(rand.New(rand.NewPCG(seed, 1)), 40, m.Vocab)
		if err := m.Forward(c, []*model.Seq{{Tokens: p[:39], Blocks: table(32)}}, nil); err != nil {
			t.Fatal(err)
		}
		out := greedy(t, m, c, table(32), 39, p[39], 200)
		distinct := map[int32]bool{}
		for _, id := range out {
			distinct[id] = true
		}
		if len(distinct) < 60 {
			t.Errorf("prompt %d: 200 tokens, %d different", seed, len(distinct))
		}
		if slices.Contains(out, TokenImEnd) || slices.Contains(out, TokenEndOfText) {
			t.Errorf("prompt %d: ended by itself", seed)
		}
	}
}

// A block that is stale, zero or another's must show in the text, wherever in the context it is.
func TestOneWrongBlockChangesTheText(t *testing.T) {
	const tokens, per, want = 1600, 16, 24
	m := load(t, Options{Seed: 1, DType: gguf.Q8_0})
	blocks := tokens/per + 4
	c := newCache(t, m, blocks+1, per)
	p := text(rand.New(rand.NewPCG(1, 2)), tokens, m.Vocab)
	for at := 0; at < tokens-1; at += 400 {
		if err := m.Forward(c, []*model.Seq{{Tokens: p[at:min(at+400, tokens-1)], Pos: at, Blocks: table(blocks)}}, nil); err != nil {
			t.Fatal(err)
		}
	}
	right := greedy(t, m, c, table(blocks), tokens-1, p[tokens-1], want)
	missed := 0
	for b := range tokens/per - 1 {
		wrong := table(blocks)
		wrong[b] = uint32(blocks) // all zeros
		if slices.Equal(greedy(t, m, c, wrong, tokens-1, p[tokens-1], want), right) {
			missed++
		}
	}
	t.Logf("%d of %d missed", missed, tokens/per-1)
	if missed > 2 {
		t.Errorf("%d of %d wrong blocks did not show within %d tokens", missed, tokens/per-1, want)
	}
}

func BenchmarkPrefill2000(b *testing.B) {
	m := load(b, Options{Seed: 1, DType: gguf.Q4_1})
	c := newCache(b, m, 130, 16)
	p := text(rand.New(rand.NewPCG(1, 3)), 2000, m.Vocab)
	for b.Loop() {
		if err := m.Forward(c, []*model.Seq{{Tokens: p, Blocks: table(130)}}, nil); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(len(p)*b.N)/b.Elapsed().Seconds(), "tok/s")
}
