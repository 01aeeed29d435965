package model

import (
	"encoding/binary"
	"fmt"
	"math"

	"github.com/headrace/headrace/internal/gguf"
)

// Config is the shape of a model.
type Config struct {
	Name                    string
	Layers, Heads, KVHeads  int
	HeadDim, Dim, FFN       int
	Vocab, Context          int
	RopeBase, Eps           float32
	Fingerprint             [32]byte // of everything that decides the bytes of a KV cache
	qDim, kvDim, groupHeads int
	attnScale               float32
}

// KVDim is the number of floats that a token's keys (or values) take in one layer.
func (c *Config) KVDim() int { return c.kvDim }

// Limits on what a file may ask for, far above any model this engine could run.
const (
	maxLayers  = 1024
	maxHeads   = 1024
	maxDim     = 1 << 17
	maxVocab   = 1 << 22
	maxContext = 1 << 22
)

// reader collects the first error while reading numbers from metadata.
type reader struct {
	f   *gguf.File
	err error
}

func (r *reader) number(key string, fallback, most int) int {
	v, ok := r.f.Uint(key)
	switch {
	case r.err != nil:
	case !ok && fallback > 0:
		return fallback
	case !ok:
		r.err = fmt.Errorf("metadata lacks %s", key)
	case v == 0 || v > uint64(most):
		r.err = fmt.Errorf("%s is %d, want 1 to %d", key, v, most)
	}
	return int(v)
}

func (r *reader) float(key string, fallback float64) float32 {
	v, ok := r.f.Float(key)
	if !ok {
		v = fallback
	}
	if r.err == nil && (!(v > 0) || math.IsInf(v, 0)) {
		r.err = fmt.Errorf("%s is %v, want a positive number", key, v)
	}
	return float32(v)
}

// readConfig reads and checks the shape. It refuses what this engine would compute wrongly.
func readConfig(f *gguf.File) (Config, error) {
	arch, ok := f.String("general.architecture")
	if !ok {
		return Config{}, fmt.Errorf("metadata lacks general.architecture")
	}
	if arch != "llama" {
		return Config{}, fmt.Errorf("architecture %q is not supported, only \"llama\" is", arch)
	}
	r := &reader{f: f}
	c := Config{
		Layers:  r.number("llama.block_count", 0, maxLayers),
		Heads:   r.number("llama.attention.head_count", 0, maxHeads),
		Dim:     r.number("llama.embedding_length", 0, maxDim),
		FFN:     r.number("llama.feed_forward_length", 0, maxDim),
		Context: r.number("llama.context_length", 0, maxContext),
		Eps:     r.float("llama.attention.layer_norm_rms_epsilon", 0),
	}
	c.RopeBase = r.float("llama.rope.freq_base", 10000)
	c.KVHeads = r.number("llama.attention.head_count_kv", max(c.Heads, 1), maxHeads)
	c.HeadDim = r.number("llama.attention.key_length", max(c.Dim/max(c.Heads, 1), 1), maxDim)
	if r.err != nil {
		return Config{}, r.err
	}
	c.Name, _ = f.String("general.name")
	c.qDim, c.kvDim, c.groupHeads = c.Heads*c.HeadDim, c.KVHeads*c.HeadDim, c.Heads/c.KVHeads
	c.attnScale = float32(1 / math.Sqrt(float64(c.HeadDim)))
	return c, c.check(f, r)
}

func (c *Config) check(f *gguf.File, r *reader) error {
	rope := r.number("llama.rope.dimension_count", c.HeadDim, maxDim)
	value := r.number("llama.attention.value_length", c.HeadDim, maxDim)
	scaling, scaled := f.String("llama.rope.scaling.type")
	experts, _ := f.Uint("llama.expert_count")
	switch {
	case r.err != nil:
		return r.err
	case c.Heads%c.KVHeads != 0:
		return fmt.Errorf("%d heads cannot share %d key heads evenly", c.Heads, c.KVHeads)
	case c.HeadDim%16 != 0 || c.Dim%32 != 0 || c.FFN%32 != 0 || c.qDim%32 != 0:
		return fmt.Errorf("head size %d, embedding length %d, feed forward length %d: kernels want multiples of 16, 32 and 32", c.HeadDim, c.Dim, c.FFN)
	case rope != c.HeadDim || value != c.HeadDim:
		return fmt.Errorf("rotary dimensions (%d) and value length (%d) other than the head size %d are not supported", rope, value, c.HeadDim)
	case scaled && scaling != "none":
		return fmt.Errorf("rope scaling %q is not supported", scaling)
	case experts > 0:
		return fmt.Errorf("mixture-of-experts models are not supported (%d experts)", experts)
	}
	return nil
}

// appendShape appends what, beside the weights, decides the bytes of a KV cache.
func (c *Config) appendShape(b []byte) []byte {
	for _, v := range []int{c.Layers, c.Heads, c.KVHeads, c.HeadDim, c.Dim, c.FFN} {
		b = binary.LittleEndian.AppendUint32(b, uint32(v))
	}
	b = binary.LittleEndian.AppendUint32(b, math.Float32bits(c.RopeBase))
	return binary.LittleEndian.AppendUint32(b, math.Float32bits(c.Eps))
}
