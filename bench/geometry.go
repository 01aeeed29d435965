package bench

import (
	"fmt"

	"github.com/headrace/headrace/transfer"
)

// Geometry is the shape of a published model's KV cache, as its config.json says.
type Geometry struct {
	Name    string
	Source  string  // the repository on huggingface.co whose config.json it is
	Layers  int     // num_hidden_layers
	Planes  int     // 2, K and V; 1 where a latent vector stands for both
	Heads   int     // num_key_value_heads; 1 for a latent vector
	Head    int     // numbers a head: head_dim, or hidden_size/num_attention_heads; kv_lora_rank + qk_rope_head_dim
	Bytes   int     // a number: torch_dtype bfloat16 is 2
	ActiveB float64 // parameters used by a token, 10^9, from the model card
}

// Geometries are the models that bench model knows.
var Geometries = []Geometry{
	{"llama-3-8b", "meta-llama/Meta-Llama-3-8B", 32, 2, 8, 128, 2, 8.03},
	{"llama-3-70b", "meta-llama/Meta-Llama-3-70B", 80, 2, 8, 128, 2, 70.6},
	{"qwen2.5-7b", "Qwen/Qwen2.5-7B", 28, 2, 4, 128, 2, 7.61},
	{"qwen3-32b", "Qwen/Qwen3-32B", 64, 2, 8, 128, 2, 32.8},
	{"deepseek-v2-lite", "deepseek-ai/DeepSeek-V2-Lite", 27, 1, 1, 512 + 64, 2, 2.4},
	{"deepseek-v3", "deepseek-ai/DeepSeek-V3", 61, 1, 1, 512 + 64, 2, 37},
}

func geometry(name string) (Geometry, error) {
	var known []string
	for _, g := range Geometries {
		if g.Name == name {
			return g, nil
		}
		known = append(known, g.Name)
	}
	return Geometry{}, fmt.Errorf("model %q: choose of %v", name, known)
}

// modelBlockTokens is what engines commonly put into a block.
const modelBlockTokens = 16

// planeBytes is what K, or V, of one block takes in one layer: one run.
func (g Geometry) planeBytes() int64 { return int64(modelBlockTokens * g.Heads * g.Head * g.Bytes) }

// TokenBytes is what a token takes in all layers.
func (g Geometry) TokenBytes() int64 { return int64(g.Layers*g.Planes*g.Heads*g.Head) * int64(g.Bytes) }

// layout is vLLM's of one tensor a layer: [K and V][blocks][tokens][heads][head], or [blocks][tokens][latent].
func (g Geometry) layout(blocks int) transfer.Layout {
	plane := uint64(g.planeBytes())
	head := uint64(g.Head * g.Bytes)
	return transfer.Layout{DType: transfer.BF16, Layers: uint32(g.Layers), Blocks: uint32(blocks), BlockTokens: modelBlockTokens, Planes: uint32(g.Planes),
		Heads: uint32(g.Heads), HeadsTotal: uint32(g.Heads), HeadBytes: uint32(head), TPSize: 1,
		LayerStride: plane * uint64(blocks) * uint64(g.Planes), PlaneStride: plane * uint64(blocks), BlockStride: plane,
		TokenStride: head * uint64(g.Heads), HeadStride: head}
}
