// Package estimate turns a GGUF model file's header into the claim of an instance: what a layer weighs, what its KV cache
// takes, what always stays in RAM. It reads no tensor data and knows no host.
package estimate

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/headrace/headrace/internal/gguf"
	"github.com/headrace/headrace/scheduler/cluster"
)

const (
	// contextMax is the context that is counted where a claim names none: models say what they were trained for, often more than
	// anybody has the memory for.
	contextMax = 8192
	// batchTokens is how many tokens a step computes at most; it decides the compute buffer.
	batchTokens = 512
	kvBytes     = 2 // an element of the KV cache, F16
	actBytes    = 4 // an activation, F32
	// processBytes is what the process itself takes in RAM.
	processBytes = 256 << 20
)

// Fill completes a claim from a model file's header: Layers, and RAM, VRAM and Heads where they are left out.
//
// A layer's weight is the mean over layers (they are equal but for rounding), KV is 2 x context x sequences x the K and V
// widths / 2 at 2 bytes. The buffer is one step's activations: batch x (4 x embedding + feed-forward + vocabulary) floats.
func Fill(c *cluster.Claim, f *gguf.File) error {
	arch, ok := f.String("general.architecture")
	if !ok {
		return fmt.Errorf("the file does not name its architecture (general.architecture); write the claim's layers by hand")
	}
	get := func(key string) uint64 {
		v, _ := f.Uint(arch + "." + key)
		return v
	}
	layers, embed, heads := get("block_count"), get("embedding_length"), get("attention.head_count")
	if layers == 0 || embed == 0 || heads == 0 || layers > 10000 || embed > 1<<24 || heads > 1<<16 {
		return fmt.Errorf("the file's %s.block_count (%d), embedding_length (%d) or attention.head_count (%d) cannot be used; write the claim's layers by hand", arch, layers, embed, heads)
	}
	kvHeads := get("attention.head_count_kv")
	if kvHeads == 0 || kvHeads > heads {
		kvHeads = heads
	}
	keyLen, valueLen := get("attention.key_length"), get("attention.value_length")
	if keyLen == 0 || keyLen > 1<<16 {
		keyLen = embed / heads
	}
	if valueLen == 0 || valueLen > 1<<16 {
		valueLen = keyLen
	}
	context := uint64(c.Context)
	if context == 0 {
		context = min(get("context_length"), contextMax)
	}
	sequences := uint64(max(c.Parallel, 1))
	if context > 1<<28 || sequences > 1<<16 {
		return fmt.Errorf("a context of %d tokens for %d sequences is more than anybody has; write less", context, sequences)
	}
	w := weigh(f)
	l := &cluster.Layers{Count: int(layers), Weight: cluster.Bytes(ceil(w.blocks, layers)), Output: cluster.Bytes(w.output), Input: cluster.Bytes(w.input)}
	l.KV = cluster.Bytes(kvBytes * context * sequences * kvHeads * (keyLen + valueLen))
	vocabulary := w.vocabulary
	l.Buffer = cluster.Bytes(actBytes * batchTokens * (4*embed + get("feed_forward_length")%(1<<24) + vocabulary))
	if w.output == 0 { // output shares the embedding's weights: the GPU needs its own copy
		l.Output = l.Input
	}
	c.Layers = l
	if c.RAM == 0 {
		c.RAM = processBytes
	}
	if c.Heads == 0 {
		c.Heads = int(heads)
	}
	return nil
}

func ceil(a, b uint64) uint64 { return (a + b - 1) / b }

// weights are the bytes of a file's tensors by what they are for.
type weights struct {
	blocks, output, input uint64
	vocabulary            uint64
}

func weigh(f *gguf.File) weights {
	var w weights
	for _, t := range f.Tensors() {
		n := tensorBytes(t)
		switch {
		case strings.HasPrefix(t.Name, "blk."):
			if _, err := strconv.Atoi(strings.SplitN(t.Name[4:], ".", 2)[0]); err == nil {
				w.blocks += n
			}
		case strings.HasPrefix(t.Name, "token_embd"):
			w.input += n
			if len(t.Dims) > 1 {
				w.vocabulary = min(t.Dims[1], 1<<24)
			}
		default: // the output, its norm, and what else belongs to no layer
			w.output += n
		}
	}
	return w
}

// tensorBytes is a tensor's size; of a type that gguf does not know, a byte an element is taken.
func tensorBytes(t gguf.Tensor) uint64 {
	if t.Data != nil {
		return uint64(len(t.Data))
	}
	n := uint64(1)
	for _, d := range t.Dims {
		if d != 0 && n > 1<<50/d {
			return 1 << 50
		}
		n *= d
	}
	return n
}
