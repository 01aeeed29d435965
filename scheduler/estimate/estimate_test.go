package estimate

import (
	"bytes"
	"testing"

	"github.com/headrace/headrace/internal/gguf"
	"github.com/headrace/headrace/scheduler/cluster"
)

// model writes a file of two layers: 64 wide, 8 heads of which 2 hold keys and values, a vocabulary of 100.
func model(t *testing.T, without string) *gguf.File {
	t.Helper()
	w := &gguf.Writer{}
	w.SetString("general.architecture", "llama")
	for key, v := range map[string]uint32{"block_count": 2, "embedding_length": 64, "attention.head_count": 8, "attention.head_count_kv": 2, "context_length": 1000, "feed_forward_length": 128} {
		if key != without {
			w.SetUint32("llama."+key, v)
		}
	}
	add := func(name string, cols, rows uint64) {
		w.AddTensor(name, gguf.F32, []uint64{cols, rows}, make([]byte, cols*rows*4))
	}
	add("token_embd.weight", 64, 100)
	for _, l := range []string{"blk.0.", "blk.1."} {
		add(l+"attn_q.weight", 64, 64)
		add(l+"ffn_up.weight", 64, 128)
	}
	add("output.weight", 64, 100)
	var b bytes.Buffer
	if err := w.Write(&b); err != nil {
		t.Fatal(err)
	}
	f, err := gguf.Parse(b.Bytes())
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func TestClaimOfAFile(t *testing.T) {
	var c cluster.Claim
	if err := Fill(&c, model(t, "")); err != nil {
		t.Fatal(err)
	}
	want := cluster.Layers{
		Count: 2, Weight: 64 * (64 + 128) * 4, KV: 2 * 1000 * 2 * (8 + 8), Output: 64 * 100 * 4, Input: 64 * 100 * 4,
		Buffer: 4 * 512 * (4*64 + 128 + 100),
	}
	if *c.Layers != want || c.Heads != 8 || c.RAM != processBytes {
		t.Errorf("%+v, want %+v; %d heads, RAM %d", *c.Layers, want, c.Heads, c.RAM)
	}
	more := cluster.Claim{Context: 500, Parallel: 4, RAM: 7, Heads: 3}
	if err := Fill(&more, model(t, "")); err != nil {
		t.Fatal(err)
	}
	if more.Layers.KV != 2*want.KV || more.RAM != 7 || more.Heads != 3 {
		t.Errorf("4 sequences of 500: %+v", more)
	}
}

func TestFilesThatSayTooLittle(t *testing.T) {
	for _, key := range []string{"block_count", "embedding_length", "attention.head_count"} {
		var c cluster.Claim
		if err := Fill(&c, model(t, key)); err == nil || c.Layers != nil {
			t.Errorf("without %s: %+v, %v", key, c, err)
		}
	}
	if err := Fill(&cluster.Claim{Context: 1 << 30}, model(t, "")); err == nil {
		t.Error("a context of 2^30 tokens is taken")
	}
}
