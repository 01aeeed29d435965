package model

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/headrace/headrace/internal/gguf"
	"github.com/headrace/headrace/internal/leaktest"
	"github.com/headrace/headrace/worker/kernel"
	"github.com/headrace/headrace/worker/tinymodel"
)

func tinyFile(tb testing.TB, o tinymodel.Options) string {
	tb.Helper()
	path := filepath.Join(tb.TempDir(), "tiny.gguf")
	if err := tinymodel.Write(path, o); err != nil {
		tb.Fatal(err)
	}
	return path
}

func same(t *testing.T, what string, got, want []float32) {
	t.Helper()
	for i := range want {
		if math.Float32bits(got[i]) != math.Float32bits(want[i]) {
			t.Fatalf("%s: value %d is %v, want %v", what, i, got[i], want[i])
		}
	}
}

// text is one sequence of a test: its tokens and the logits after each, found token by token, alone, on one thread.
type text struct {
	tokens []int32
	logits [][]float32
	kv     []float32
}

// kvOf collects a sequence's keys and values in order of layer, plane, position and head, whatever the shards.
func kvOf(c *Cache, blocks []uint32, tokens int) []float32 {
	var out []float32
	for l := range c.Layers {
		for plane := range 2 {
			for pos := range tokens {
				for i := range c.Shards {
					s := &c.Shards[i]
					at := c.slot(s, blocks[pos/c.BlockTokens], pos%c.BlockTokens) + plane*c.planeFloats(s.HeadCount)
					out = append(out, c.layer(s, l)[at:at+s.HeadCount*c.HeadDim]...)
				}
			}
		}
	}
	return out
}

func tokenByToken(t *testing.T, m *Model, n int, seed uint64) *text {
	t.Helper()
	r := rand.New(rand.NewPCG(seed, 1))
	c := newCache(t, m, n/16+1, 16)
	out := &text{}
	for i := range n {
		out.tokens = append(out.tokens, int32(r.IntN(m.Vocab)))
		logits := make([]float32, m.Vocab)
		forward(t, m, c, &Seq{Tokens: out.tokens[i:], Pos: i, Blocks: inOrder(c.Blocks), Logits: true, Out: logits})
		out.logits = append(out.logits, logits)
	}
	out.kv = kvOf(c, inOrder(c.Blocks), n)
	return out
}

// shuffledRun feeds the texts through one cache: random chunks, random company in each batch, random blocks.
func shuffledRun(t *testing.T, m *Model, texts []*text, blockTokens, shards int, seed uint64) {
	t.Helper()
	r := rand.New(rand.NewPCG(seed, 2))
	need := 0
	for _, x := range texts {
		need += len(x.tokens)/blockTokens + 1
	}
	c, err := m.NewCache(need+3, blockTokens, shards)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range c.Shards {
		for i := range s.Mem {
			s.Mem[i] = float32(math.NaN()) // nothing unwritten may be read
		}
	}
	free := r.Perm(c.Blocks)
	tables := make([][]uint32, len(texts))
	for i, x := range texts {
		for range len(x.tokens)/blockTokens + 1 {
			tables[i] = append(tables[i], uint32(free[0]))
			free = free[1:]
		}
	}
	done := make([]int, len(texts))
	for left := true; left; {
		left = false
		var seqs []*Seq
		var ends []int
		for i, x := range texts {
			if done[i] == len(x.tokens) || r.IntN(3) == 0 {
				left = left || done[i] < len(x.tokens)
				continue
			}
			n := min(len(x.tokens)-done[i], 1+r.IntN([]int{1, 5, 40}[r.IntN(3)]))
			seqs = append(seqs, &Seq{Tokens: x.tokens[done[i] : done[i]+n], Pos: done[i], Blocks: tables[i], Logits: r.IntN(2) == 0, Out: make([]float32, m.Vocab)})
			done[i] += n
			ends = append(ends, i)
			left = true
		}
		forward(t, m, c, seqs...)
		for j, s := range seqs {
			if s.Logits {
				same(t, fmt.Sprintf("text %d, %d tokens at %d, batch of %d", ends[j], len(s.Tokens), s.Pos, len(seqs)), s.Out, texts[ends[j]].logits[s.Pos+len(s.Tokens)-1])
			}
		}
	}
	for i, x := range texts {
		same(t, fmt.Sprintf("cache of text %d", i), kvOf(c, tables[i], len(x.tokens)), x.kv)
	}
}

// The promise that prefill here and decode there rest on: the same bits whatever the chunks, the company, the
// blocks, the threads and the processor.
func TestResultsDependOnTheTokensOnly(t *testing.T) {
	for _, typ := range gguf.Types {
		path := tinyFile(t, tinymodel.Options{Seed: 3, DType: typ, Layers: 2})
		m := load(t, path, Options{Threads: 1})
		texts := []*text{tokenByToken(t, m, 70, 1), tokenByToken(t, m, 1, 2), tokenByToken(t, m, 33, 3), tokenByToken(t, m, 90, 4)}
		for _, im := range kernel.Impls() {
			if im.Name == "go" { // slow, the more so under the race detector
				shuffledRun(t, load(t, path, Options{Threads: 2, Kernel: im}), texts[1:3], 8, 1, 3)
				continue
			}
			for _, threads := range []int{1, 2} {
				m := load(t, path, Options{Threads: threads, Kernel: im})
				for seed := range uint64(3) {
					shuffledRun(t, m, texts, []int{16, 4, 32}[seed], 1+int(seed)%2, seed)
				}
			}
		}
	}
}

func TestResultsDependOnTheTokensOnlyDefaultModel(t *testing.T) {
	path := modelPath(t)
	m := load(t, path, Options{Threads: 1})
	texts := []*text{tokenByToken(t, m, 50, 1), tokenByToken(t, m, 21, 2)}
	shuffledRun(t, load(t, path, Options{Threads: 2}), texts, 16, 1, 1)
	if all := kernel.Impls(); len(all) > 2 {
		shuffledRun(t, load(t, path, Options{Kernel: all[1]}), texts, 64, 3, 2)
	}
}

func TestDequantizedFileGivesTheSameLogits(t *testing.T) {
	for _, typ := range gguf.Types[1:] {
		t.Run(typ.String(), func(t *testing.T) { dequantizedGivesTheSameLogits(t, typ) })
	}
}

func dequantizedGivesTheSameLogits(t *testing.T, typ gguf.Type) {
	path := tinyFile(t, tinymodel.Options{Seed: 5, DType: typ})
	q := load(t, path, Options{})
	w, err := q.File().Dequantize()
	if err != nil {
		t.Fatal(err)
	}
	plain := filepath.Join(t.TempDir(), "f32.gguf")
	if err := w.WriteFile(plain); err != nil {
		t.Fatal(err)
	}
	f := load(t, plain, Options{})
	a, b := tokenByToken(t, q, 40, 9), tokenByToken(t, f, 40, 9)
	same(t, "cache", b.kv, a.kv)
	for i := range a.logits {
		same(t, "logits", b.logits[i], a.logits[i])
	}
	if q.Fingerprint == f.Fingerprint {
		t.Error("two files have one fingerprint")
	}
}

func TestFingerprint(t *testing.T) {
	fp := func(o tinymodel.Options, threads int) [32]byte {
		return load(t, tinyFile(t, o), Options{Threads: threads}).Fingerprint
	}
	base := fp(tinymodel.Options{Seed: 1}, 1)
	if base != fp(tinymodel.Options{Seed: 1}, 2) {
		t.Error("the same model has two fingerprints")
	}
	if base != fp(tinymodel.Options{Seed: 1, Context: 128}, 1) {
		t.Error("the length of the context, which changes no key or value, changes the fingerprint")
	}
	for _, o := range []tinymodel.Options{{Seed: 2}, {Seed: 1, Layers: 3}, {Seed: 1, DType: gguf.Q8_0}} {
		if fp(o, 1) == base {
			t.Errorf("%+v has the fingerprint of another model", o)
		}
	}
}

func TestOnLayerSeesItsLayerWritten(t *testing.T) {
	m := load(t, tinyFile(t, tinymodel.Options{Seed: 1}), Options{})
	c := newCache(t, m, 4, 16)
	p := prompt(50, m.Vocab)
	var seen []int
	err := m.Forward(c, []*Seq{{Tokens: p, Blocks: []uint32{2, 0, 3, 1}}}, func(l int) {
		seen = append(seen, l)
		for i := range m.Layers {
			s := &c.Shards[0]
			at := c.slot(s, 1, 1) // position 49
			if written := c.layer(s, i)[at] != 0; written != (i <= l) {
				t.Errorf("after layer %d, layer %d is written: %v", l, i, written)
			}
		}
	})
	if err != nil || fmt.Sprint(seen) != "[0 1 2 3]" {
		t.Errorf("layers %v, error %v", seen, err)
	}
}

func TestForwardRefusesWhatDoesNotFit(t *testing.T) {
	m := load(t, tinyFile(t, tinymodel.Options{Seed: 1, Context: 64}), Options{})
	c := newCache(t, m, 4, 16)
	out := make([]float32, m.Vocab)
	ok, mem := inOrder(4), c.Shards[0].Mem
	for _, x := range []struct {
		want string
		c    *Cache
		s    Seq
	}{
		{"0 tokens", c, Seq{Blocks: ok}},
		{"position -1", c, Seq{Tokens: []int32{1}, Pos: -1, Blocks: ok}},
		{"context of 64", c, Seq{Tokens: []int32{1}, Pos: 64, Blocks: inOrder(5)}},
		{"do not reach", c, Seq{Tokens: []int32{1}, Pos: 16, Blocks: ok[:1]}},
		{"block 4 of a cache of 4", c, Seq{Tokens: []int32{1}, Blocks: []uint32{4}}},
		{"outside the vocabulary", c, Seq{Tokens: []int32{int32(m.Vocab)}, Blocks: ok}},
		{"outside the vocabulary", c, Seq{Tokens: []int32{-1}, Blocks: ok}},
		{"room for", c, Seq{Tokens: []int32{1}, Blocks: ok, Logits: true, Out: out[1:]}},
		{"use cache", &Cache{Shards: c.Shards, Layers: 4, Blocks: 4, BlockTokens: 16, KVHeads: 1, HeadDim: 16}, Seq{Tokens: []int32{1}, Blocks: ok}},
		{"use cache", &Cache{Shards: []Shard{{mem[1:], 0, 2}}, Layers: 4, Blocks: 4, BlockTokens: 16, KVHeads: 2, HeadDim: 16}, Seq{Tokens: []int32{1}, Blocks: ok}},
		{"use cache", &Cache{Shards: []Shard{{mem, 1, 1}, {mem, 0, 1}}, Layers: 4, Blocks: 4, BlockTokens: 16, KVHeads: 2, HeadDim: 16}, Seq{Tokens: []int32{1}, Blocks: ok}},
		{"0 shards", &Cache{Layers: 4, Blocks: 4, BlockTokens: 16, KVHeads: 2, HeadDim: 16}, Seq{Tokens: []int32{1}, Blocks: ok}},
	} {
		if err := m.Forward(x.c, []*Seq{&x.s}, nil); err == nil || !strings.Contains(err.Error(), x.want) {
			t.Errorf("got %v, want an error about %q", err, x.want)
		}
	}
	if err := m.Forward(c, nil, nil); err != nil {
		t.Errorf("an empty batch: %v", err)
	}
}

func TestCacheRefusesWhatDoesNotFit(t *testing.T) {
	m := load(t, tinyFile(t, tinymodel.Options{Seed: 1}), Options{})
	for _, x := range []struct {
		want                        string
		blocks, blockTokens, shards int
	}{
		{"2 key heads do not divide evenly among 3 shards", 4, 16, 3},
		{"among 4 shards", 4, 16, 4},
		{"among 0 shards", 4, 16, 0},
		{"at least one", 0, 16, 1},
		{"at least one", 4, 0, 1},
	} {
		if _, err := m.NewCache(x.blocks, x.blockTokens, x.shards); err == nil || !strings.Contains(err.Error(), x.want) {
			t.Errorf("got %v, want an error about %q", err, x.want)
		}
	}
	n, err := m.ShardFloats(4, 16, 2)
	if err != nil || n != 4*4*2*16*16 {
		t.Errorf("a shard takes %d floats, error %v", n, err)
	}
	if _, err := m.CacheOver(4, 16, [][]float32{make([]float32, n), make([]float32, n-1)}); err == nil || !strings.Contains(err.Error(), "shard 1") {
		t.Errorf("short memory: %v", err)
	}
}

// A cache in shards, and blocks of any size, hold the same keys and values and give the same logits.
func TestShardsAndBlockSizesChangeNothing(t *testing.T) {
	path := tinyFile(t, tinymodel.Options{Seed: 4, Layers: 2, KVHeads: 4})
	m := load(t, path, Options{Threads: 1})
	texts := []*text{tokenByToken(t, m, 150, 1), tokenByToken(t, m, 29, 2)}
	two := load(t, path, Options{Threads: 2})
	for i, shards := range []int{1, 2, 4} {
		for j, blockTokens := range []int{8, 16, 24, 64, 128} {
			shuffledRun(t, two, texts, blockTokens, shards, uint64(10*i+j))
		}
	}
}

// decodeAfter reads a prompt and generates with the tokens given, in a batch with others that have little behind them;
// it returns all logits, one sequence after the other.
func decodeAfter(t *testing.T, m *Model, past, others, shards int) []float32 {
	t.Helper()
	const steps = 3
	c, err := m.NewCache((others+1)*(past/24+2), 24, shards)
	if err != nil {
		t.Fatal(err)
	}
	tokens := prompt(past+steps, m.Vocab)
	var out []float32
	var seqs []*Seq
	per := c.Blocks / (others + 1)
	for i := range others + 1 {
		n := past
		if i > 0 {
			n = 5 * i
		}
		s := &Seq{Tokens: tokens[:n], Blocks: inOrder(c.Blocks)[i*per : (i+1)*per]}
		forward(t, m, c, s)
		seqs = append(seqs, &Seq{Pos: n, Blocks: s.Blocks, Logits: true, Out: make([]float32, m.Vocab)})
	}
	for step := range steps {
		for _, s := range seqs {
			s.Tokens = tokens[s.Pos : s.Pos+1]
		}
		forward(t, m, c, seqs...)
		for _, s := range seqs {
			s.Pos++
			if step == steps-1 {
				out = append(out, s.Out...)
			}
		}
	}
	return out
}

// Attention over much that one sequence has behind it is spread over threads; whole heads on one thread give the same.
func TestSpreadAttentionHasTheSameBits(t *testing.T) {
	tiny := tinyFile(t, tinymodel.Options{Seed: 6, Layers: 2, KVHeads: 2, DType: gguf.Q8_0})
	for _, path := range []string{tiny, modelPath(t)} {
		one := load(t, path, Options{Threads: 1})
		for _, im := range others(t) {
			two := load(t, path, Options{Threads: 2, Kernel: im})
			if two.Threads() < 2 {
				t.Skip("one processor")
			}
			for _, x := range []struct{ past, others, shards int }{{300, 0, 1}, {515, 1, one.KVHeads}} {
				if path != tiny && x.past != 300 {
					continue // slow under the race detector
				}
				same(t, fmt.Sprintf("%s, %s, %+v", filepath.Base(path), im.Name, x), decodeAfter(t, two, x.past, x.others, x.shards), decodeAfter(t, one, x.past, x.others, 1))
			}
		}
	}
}

// others are the kernels that are fast enough for long sequences.
func others(t *testing.T) []*kernel.Impl {
	all := kernel.Impls()
	if len(all) > 1 {
		return all[:len(all)-1]
	}
	t.Skip("this machine runs plain Go only")
	return nil
}

// tweak writes a tiny model with one thing changed.
func tweak(t *testing.T, change func(w *gguf.Writer)) string {
	t.Helper()
	f, err := gguf.Open(tinyFile(t, tinymodel.Options{Seed: 1}))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	w, err := f.Dequantize()
	if err != nil {
		t.Fatal(err)
	}
	change(w)
	path := filepath.Join(t.TempDir(), "tweaked.gguf")
	if err := w.WriteFile(path); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestLoadRefusesOtherModels(t *testing.T) {
	leaktest.Check(t)
	for _, x := range []struct {
		want   string
		change func(w *gguf.Writer)
	}{
		{`architecture "gemma"`, func(w *gguf.Writer) { w.SetString("general.architecture", "gemma") }},
		{"block_count", func(w *gguf.Writer) { w.SetString("llama.block_count", "four") }},
		{"file lacks tensor blk.4", func(w *gguf.Writer) { w.SetUint32("llama.block_count", 5) }},
		{"tensor blk.3", func(w *gguf.Writer) { w.SetUint32("llama.block_count", 3) }},
		{"heads cannot share", func(w *gguf.Writer) { w.SetUint32("llama.attention.head_count_kv", 3) }},
		{"kernels want", func(w *gguf.Writer) { w.SetUint32("llama.attention.head_count", 8) }},
		{"rotary dimensions", func(w *gguf.Writer) { w.SetUint32("llama.rope.dimension_count", 8) }},
		{"rope scaling", func(w *gguf.Writer) { w.SetString("llama.rope.scaling.type", "yarn") }},
		{"mixture", func(w *gguf.Writer) { w.SetUint32("llama.expert_count", 8) }},
		{"layer_norm_rms_epsilon", func(w *gguf.Writer) { w.SetFloat32("llama.attention.layer_norm_rms_epsilon", float32(math.NaN())) }},
		{"has dimensions", func(w *gguf.Writer) { w.SetUint32("llama.feed_forward_length", 96) }},
		{"no part of a plain Llama model", func(w *gguf.Writer) { w.AddTensor("blk.0.attn_q.bias", gguf.F32, []uint64{64}, make([]byte, 256)) }},
	} {
		m, err := Load(tweak(t, x.change), Options{})
		if err == nil {
			m.Close()
		}
		if err == nil || !strings.Contains(err.Error(), x.want) {
			t.Errorf("got %v, want an error about %q", err, x.want)
		}
	}
	if _, err := Load(filepath.Join(t.TempDir(), "absent.gguf"), Options{}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("an absent file: %v", err)
	}
}

func TestCloseEndsTheThreads(t *testing.T) {
	leaktest.Check(t)
	m, err := Load(tinyFile(t, tinymodel.Options{}), Options{})
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := m.Close(); err != nil {
			t.Fatal(err)
		}
	}
}
