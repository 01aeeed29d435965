package model

import (
	"os"
	"path/filepath"
	"testing"
)

// modelPath is where `make model` puts the default model.
func modelPath(tb testing.TB) string {
	tb.Helper()
	path := os.Getenv("HEADRACE_MODEL")
	if path == "" {
		dir, err := os.UserCacheDir()
		if err != nil {
			tb.Fatal(err)
		}
		path = filepath.Join(dir, "headrace", "models", "SmolLM2-135M-Instruct.Q4_1.gguf")
	}
	if _, err := os.Stat(path); err != nil {
		tb.Fatalf("%v: run `make model`, or set HEADRACE_MODEL to the file", err)
	}
	return path
}

func load(tb testing.TB, path string, o Options) *Model {
	tb.Helper()
	m, err := Load(path, o)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := m.Close(); err != nil {
			tb.Error(err)
		}
	})
	return m
}

func newCache(tb testing.TB, m *Model, blocks, blockTokens int) *Cache {
	tb.Helper()
	c, err := m.NewCache(blocks, blockTokens, 1)
	if err != nil {
		tb.Fatal(err)
	}
	return c
}

// inOrder is the block table 0, 1, 2...
func inOrder(n int) []uint32 {
	out := make([]uint32, n)
	for i := range out {
		out[i] = uint32(i)
	}
	return out
}

// prompt is n tokens that are not all alike.
func prompt(n, vocab int) []int32 {
	out := make([]int32, n)
	for i := range out {
		out[i] = int32((i*7919 + 13) % vocab)
	}
	return out
}

func forward(tb testing.TB, m *Model, c *Cache, seqs ...*Seq) {
	tb.Helper()
	if err := m.Forward(c, seqs, nil); err != nil {
		tb.Fatal(err)
	}
}

// The benchmarks report tokens a second on the default model: go test ./worker/model -run xxx -bench . -cpu 2

func BenchmarkPrefill1000(b *testing.B) {
	m := load(b, modelPath(b), Options{})
	c := newCache(b, m, 64, 16)
	out := make([]float32, m.Vocab)
	p := prompt(1000, m.Vocab)
	for b.Loop() {
		for at := 0; at < len(p); at += 250 {
			forward(b, m, c, &Seq{Tokens: p[at : at+250], Pos: at, Blocks: inOrder(64), Logits: at == 750, Out: out})
		}
	}
	b.ReportMetric(float64(len(p)*b.N)/b.Elapsed().Seconds(), "tok/s")
}

func benchmarkDecode(b *testing.B, context, batch int) {
	m := load(b, modelPath(b), Options{})
	blocks := context/16 + 8
	c := newCache(b, m, blocks*batch, 16)
	for i := range c.Shards[0].Mem { // as good as a past that was computed
		c.Shards[0].Mem[i] = float32(i%251)/251 - 0.5
	}
	p := prompt(context, m.Vocab)
	var seqs []*Seq
	for i := range batch {
		table := inOrder(blocks * batch)[i*blocks : (i+1)*blocks]
		seqs = append(seqs, &Seq{Tokens: p[:1], Pos: context, Blocks: table, Logits: true, Out: make([]float32, m.Vocab)})
	}
	for b.Loop() {
		forward(b, m, c, seqs...)
	}
	b.ReportMetric(float64(batch*b.N)/b.Elapsed().Seconds(), "tok/s")
}

func BenchmarkDecodeAt16(b *testing.B)          { benchmarkDecode(b, 16, 1) }
func BenchmarkDecodeAt1000(b *testing.B)        { benchmarkDecode(b, 1000, 1) }
func BenchmarkDecodeAt1000Batch8(b *testing.B)  { benchmarkDecode(b, 1000, 8) }
func BenchmarkDecodeAt1000Batch16(b *testing.B) { benchmarkDecode(b, 1000, 16) }
