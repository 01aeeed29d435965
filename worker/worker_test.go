package worker

import "testing"

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
