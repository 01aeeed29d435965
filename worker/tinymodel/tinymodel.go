// Package tinymodel writes small Llama models from a seed, for tests that need many tokens fast and bytes that are
// the same everywhere. They say nothing sensible, but what they say depends strongly on every part of the context,
// so that one wrong KV block changes it.
package tinymodel

import (
	"fmt"
	"math"
	"math/rand/v2"

	"github.com/headrace/headrace/internal/gguf"
)

// Options of Write. The zero value is a model of seed 0 in F32.
type Options struct {
	Seed    uint64
	DType   gguf.Type // any of gguf.Types; norms are always F32
	Layers  int       // 0: 4
	Context int       // 0: 4096
	KVHeads int       // 0: 2; 1, 2 or 4
}

// The shape of a tiny model.
const (
	dim     = 64
	heads   = 4
	headDim = dim / heads
	ffn     = 192
)

// End of text, start and end of a chat message.
const (
	TokenEndOfText = 0
	TokenImStart   = 1
	TokenImEnd     = 2
)

const chatTemplate = "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}" +
	"{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"

// merges of the vocabulary beyond bytes, first merged first. "Ġ" is a space.
var merges = []string{
	"Ġ t", "Ġ a", "h e", "i n", "r e", "o n", "e r", "Ġt he", "Ġ s", "n d", "Ġ w", "a t", "o u", "i s", "e n", "i t",
	"o r", "a n", "e s", "Ġ o", "Ġ c", "Ġ b", "Ġ f", "Ġ p", "Ġ m", "e d", "a l", "Ġa nd", "in g", "Ġo f", "Ġt o", "l e",
	"a r", "Ġ in", "Ġ h", "Ġ d", "i on", "Ġ re", "l l", "a s", "Ġ n", "Ġ is", "s t", "Ġb e", "v er",
}

// Write writes the model to path. The same options give the same bytes.
func Write(path string, o Options) error {
	if !o.DType.Known() {
		return fmt.Errorf("write tiny model: type %s is not supported (%s are)", o.DType, gguf.TypeNames)
	}
	if o.Layers == 0 {
		o.Layers = 4
	}
	if o.Context == 0 {
		o.Context = 4096
	}
	if o.KVHeads == 0 {
		o.KVHeads = 2
	}
	if o.KVHeads < 1 || heads%o.KVHeads != 0 {
		return fmt.Errorf("write tiny model: %d heads cannot share %d key heads evenly; use 1, 2 or 4", heads, o.KVHeads)
	}
	if o.Layers < 1 || o.Layers > 64 || o.Context < 16 || o.Context > 1<<20 {
		return fmt.Errorf("write tiny model: %d layers and a context of %d are out of range", o.Layers, o.Context)
	}
	w := &gguf.Writer{}
	vocab := metadata(w, o)
	g := &generator{w: w, rng: rand.NewPCG(o.Seed, 0x68656164), typ: o.DType}
	g.matrix("token_embd.weight", vocab, dim, 1, nil)
	for l := range o.Layers {
		name := func(s string) string { return fmt.Sprintf("blk.%d.%s.weight", l, s) }
		g.ones(name("attn_norm"))
		// Scores with a deviation of about 3.5: a query picks out a few positions, wherever they are, instead of
		// averaging over all.
		g.matrix(name("attn_q"), dim, dim, 0.234, nil)
		g.matrix(name("attn_k"), o.KVHeads*headDim, dim, 0.234, nil)
		g.matrix(name("attn_v"), o.KVHeads*headDim, dim, 0.15, nil)
		g.matrix(name("attn_output"), dim, dim, 0.15, nil)
		g.ones(name("ffn_norm"))
		g.matrix(name("ffn_gate"), ffn, dim, 0.2, nil)
		g.matrix(name("ffn_up"), ffn, dim, 0.125, nil)
		g.matrix(name("ffn_down"), dim, ffn, 0.1, nil)
	}
	g.ones("output_norm.weight")
	// A head of its own: tied to the embeddings it would mostly repeat the last token. Special tokens get logit 0,
	// so that greedy answers do not end by accident.
	g.matrix("output.weight", vocab, dim, 0.35, func(row int) bool { return row <= TokenImEnd })
	return w.WriteFile(path)
}

func metadata(w *gguf.Writer, o Options) int {
	w.SetString("general.architecture", "llama")
	w.SetString("general.name", fmt.Sprintf("headrace-tiny-%d", o.Seed))
	w.SetUint32("llama.block_count", uint32(o.Layers))
	w.SetUint32("llama.context_length", uint32(o.Context))
	w.SetUint32("llama.embedding_length", dim)
	w.SetUint32("llama.feed_forward_length", ffn)
	w.SetUint32("llama.attention.head_count", heads)
	w.SetUint32("llama.attention.head_count_kv", uint32(o.KVHeads))
	w.SetFloat32("llama.rope.freq_base", 10000)
	w.SetFloat32("llama.attention.layer_norm_rms_epsilon", 1e-5)
	w.SetUint32("general.file_type", o.DType.FileType())
	tokens, types := vocabulary()
	w.SetUint32("llama.vocab_size", uint32(len(tokens)))
	w.SetUint32("llama.rope.dimension_count", headDim)
	w.SetBool("tokenizer.ggml.add_space_prefix", false)
	w.SetBool("tokenizer.ggml.add_bos_token", false)
	w.SetString("tokenizer.ggml.model", "gpt2")
	w.SetString("tokenizer.ggml.pre", "smollm")
	w.SetStrings("tokenizer.ggml.tokens", tokens)
	w.SetInts("tokenizer.ggml.token_type", types)
	w.SetStrings("tokenizer.ggml.merges", merges)
	w.SetUint32("tokenizer.ggml.bos_token_id", TokenImStart)
	w.SetUint32("tokenizer.ggml.eos_token_id", TokenImEnd)
	w.SetUint32("tokenizer.ggml.unknown_token_id", TokenEndOfText)
	w.SetUint32("tokenizer.ggml.padding_token_id", TokenImEnd)
	w.SetString("tokenizer.chat_template", chatTemplate)
	return len(tokens)
}

// vocabulary is the special tokens, every byte in GPT-2's spelling, and what the merges make.
func vocabulary() (tokens []string, types []int32) {
	const normal, control = 1, 3
	tokens = []string{"<|endoftext|>", "<|im_start|>", "<|im_end|>"}
	types = []int32{control, control, control}
	spare := rune(256)
	for b := range rune(256) {
		r := b
		if printable := b >= '!' && b <= '~' || b >= 0xa1 && b <= 0xac || b >= 0xae; !printable {
			r, spare = spare, spare+1
		}
		tokens, types = append(tokens, string(r)), append(types, normal)
	}
	for _, m := range merges {
		var a, b string
		if _, err := fmt.Sscanf(m, "%s %s", &a, &b); err != nil {
			panic("tinymodel: bad merge " + m)
		}
		tokens, types = append(tokens, a+b), append(types, normal)
	}
	return tokens, types
}

// generator draws tensors in the order of the calls.
type generator struct {
	w   *gguf.Writer
	rng *rand.PCG
	typ gguf.Type
}

// next is uniform with mean 0 and deviation 1, from integer steps: nothing in it depends on a platform's math.
func (g *generator) next() float32 {
	return float32(int64(g.rng.Uint64()>>40)-1<<23) * (math.Sqrt2 * 1.22474487139 / (1 << 23))
}

func (g *generator) matrix(name string, rows, cols int, deviation float32, zero func(row int) bool) {
	v := make([]float32, 0, rows*cols)
	for r := range rows {
		for range cols {
			x := g.next() * deviation
			if zero != nil && zero(r) {
				x = 0
			}
			v = append(v, x)
		}
	}
	g.w.AddTensor(name, g.typ, []uint64{uint64(cols), uint64(rows)}, gguf.Quantize(nil, g.typ, v))
}

func (g *generator) ones(name string) {
	v := make([]float32, dim)
	for i := range v {
		v[i] = 1
	}
	g.w.AddTensor(name, gguf.F32, []uint64{dim}, gguf.Quantize(nil, gguf.F32, v))
}
