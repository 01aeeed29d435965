package worker

import (
	"errors"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/headrace/headrace/worker/model"
	"github.com/headrace/headrace/worker/tinymodel"
)

func TestModelName(t *testing.T) {
	for path, want := range map[string]string{
		"/m/SmolLM2-135M-Instruct.Q4_1.gguf": "SmolLM2-135M-Instruct",
		"llama-3-8b-Q4_K_M.gguf":             "llama-3-8b",
		"tiny-f32.gguf":                      "tiny",
		"tiny.gguf":                          "tiny",
		"Qwen2-7B":                           "Qwen2-7B",
		"q8_0.gguf":                          "q8_0",
	} {
		if got := modelName(path); got != want {
			t.Errorf("model name of %s is %q, want %q", path, got, want)
		}
	}
}

// A KV cache in huge pages is of the same size as any, in memory that is a multiple of a page; or the start says what it takes.
func TestHugePages(t *testing.T) {
	path := filepath.Join(t.TempDir(), "tiny.gguf")
	if err := tinymodel.Write(path, tinymodel.Options{Seed: 1}); err != nil {
		t.Fatal(err)
	}
	m, err := model.Load(path, model.Options{Threads: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	w := &worker{cfg: Config{TensorParallel: 1, BlockTokens: 16, KVBytes: 3 << 20, HugePages: true}, model: m}
	switch err := w.allocate(); {
	case err == nil:
		if n := w.memory[0].Size(); n%(2<<20) != 0 || n < uint64(len(w.cache.Shards[0].Mem))*4 {
			t.Errorf("%d bytes of memory, %d floats of cache", n, len(w.cache.Shards[0].Mem))
		}
		for _, m := range w.memory {
			if err := m.Close(); err != nil {
				t.Error(err)
			}
		}
	case errors.Is(err, syscall.ENOMEM) && !strings.Contains(err.Error(), "sysctl vm.nr_hugepages"):
		t.Errorf("no remedy in %v", err)
	default:
		t.Skipf("no huge pages here: %v", err)
	}
}
