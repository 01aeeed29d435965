package tokenizer

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/headrace/headrace/internal/gguf"
)

type golden struct {
	Rows []struct {
		Text    string
		IDs     []int32
		Decoded string
		Splits  map[string][]int
	}
	Loose []struct {
		IDs     []int32
		Decoded string
	}
}

func readGolden(t testing.TB) golden {
	t.Helper()
	b, err := os.ReadFile("testdata/golden.json")
	if err != nil {
		t.Fatal(err)
	}
	var g golden
	if err := json.Unmarshal(b, &g); err != nil {
		t.Fatal(err)
	}
	return g
}

// smolLM returns the tokenizer of the real model. Where the model is missing the test fails, so that nobody takes a
// skipped test for a passed one.
var smolLM = sync.OnceValues(func() (*Tokenizer, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return nil, err
	}
	f, err := gguf.Open(filepath.Join(cache, "headrace", "models", "SmolLM2-135M-Instruct.Q4_1.gguf"))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return New(f)
})

func realModel(t testing.TB) *Tokenizer {
	t.Helper()
	tok, err := smolLM()
	if err != nil {
		t.Fatalf("%v (run 'make model')", err)
	}
	return tok
}

func TestSmolLMGolden(t *testing.T) {
	tok := realModel(t)
	g := readGolden(t)
	for _, row := range g.Rows {
		ids, err := tok.Encode(nil, row.Text, EncodeOptions{ParseSpecial: true})
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(ids, row.IDs) {
			t.Errorf("Encode(%q) = %v, want %v", row.Text, ids, row.IDs)
		}
		if got := string(tok.Decode(nil, ids, false)); got != row.Decoded {
			t.Errorf("Decode of %q = %q, want %q", row.Text, got, row.Decoded)
		}
	}
	for _, row := range g.Loose {
		if got := strings.ToValidUTF8(string(tok.Decode(nil, row.IDs, false)), ""); got != strings.ReplaceAll(row.Decoded, "\uFFFD", "") {
			t.Errorf("Decode(%v) = %q, want %q", row.IDs, got, row.Decoded)
		}
	}
}
