package tokenize

import (
	"compress/gzip"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/headrace/headrace/internal/bpe"
)

func readZipped(t testing.TB, file string, into any) {
	t.Helper()
	if err := unzip(file, into); err != nil {
		t.Fatal(err)
	}
}

func unzip(file string, into any) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		return err
	}
	return json.NewDecoder(z).Decode(into)
}

// families are the tokenizers of internal/bpe's golden file, by name.
var families = sync.OnceValues(func() (map[string]json.RawMessage, error) {
	var g struct {
		Families []struct {
			Name      string
			Tokenizer json.RawMessage
		}
	}
	err := unzip("../../internal/bpe/testdata/golden.json.gz", &g)
	out := map[string]json.RawMessage{}
	for _, f := range g.Families {
		out[f.Name] = f.Tokenizer
	}
	return out, err
})

// folder makes a model's folder of a tokenizer of internal/bpe's golden file and a template.
func folder(t testing.TB, family, template string) string {
	t.Helper()
	known, err := families()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for name, b := range map[string][]byte{
		"tokenizer.json": known[family], "chat_template.jinja": []byte(template),
		"tokenizer_config.json": []byte(`{"bos_token":{"content":"<|bos|>"},"eos_token":"<|im_end|>"}`),
	} {
		if err := os.WriteFile(filepath.Join(dir, name), b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// templates are the names of the templates beside golden.py.
var templates = []string{"chatml", "gemma", "llama3", "mistral", "qwen", "smollm2", "state", "thinking"}

func templateText(t testing.TB, name string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", "templates", name+".jinja"))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func load(t testing.TB, family, template string, o Options) *Tokenizer {
	t.Helper()
	o.Now = func() time.Time { return time.Unix(1790000000, 0).UTC() }
	tok, err := Load(folder(t, family, templateText(t, template)), o)
	if err != nil {
		t.Fatal(err)
	}
	return tok
}

// TestPromptsOfVLLM holds the prompts against those that vLLM makes.
func TestPromptsOfVLLM(t *testing.T) {
	var rows []struct {
		Template, Body, Text, Refused string
		Parts                         bool
		IDs                           []uint32
	}
	readZipped(t, "testdata/golden.json.gz", &rows)
	toks := map[string]*Tokenizer{}
	for _, name := range templates {
		toks[name] = load(t, "llama3", name, Options{})
	}
	for _, row := range rows {
		tok := toks[row.Template]
		if tok.parts != row.Parts {
			t.Fatalf("%s: content in parts: %v, want %v", row.Template, tok.parts, row.Parts)
		}
		for range 2 {
			got, err := tok.AppendPrompt([]uint32{7}, ChatCompletions, []byte(row.Body))
			switch {
			case row.Refused != "":
				if !errors.Is(err, ErrUnsupported) || len(got) != 1 {
					t.Errorf("%s %s:\n got %d tokens, %v, but vLLM refuses it: %s", row.Template, row.Body, len(got), err, row.Refused)
				}
			case err != nil:
				t.Errorf("%s %s: %v", row.Template, row.Body, err)
			case !slices.Equal(got[1:], row.IDs):
				t.Errorf("%s %s:\n got %v\nwant %v of %q", row.Template, row.Body, got[1:], row.IDs, row.Text)
			}
		}
	}
	if len(rows) < 8*20 || len(toks) != 8 {
		t.Errorf("only %d rows of %d templates", len(rows), len(toks))
	}
}

func TestCompletions(t *testing.T) {
	tok := load(t, "llama3", "chatml", Options{})
	plain := tok.bpe.Encode(nil, "Hi the\u00e9", bpe.Options{})
	for body, want := range map[string][]uint32{
		`{"prompt":"Hi the\u00e9"}`:                       append([]uint32{0}, plain...),
		`{"prompt":["Hi theé"]}`:                          append([]uint32{0}, plain...),
		`{"prompt":"Hi theé","add_special_tokens":false}`: plain,
		`{"prompt": [ 5, 70000 ,3 ]}`:                     {5, 70000, 3},
		`{"prompt":[[5,6]]}`:                              {5, 6},
	} {
		got, err := tok.AppendPrompt(nil, Completions, []byte(body))
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("%s: got %v, %v, want %v", body, got, err, want)
		}
	}
}

func TestUnsupported(t *testing.T) {
	tok := load(t, "llama3", "chatml", Options{})
	hi := `"messages":[{"role":"user","content":"hi"}]`
	for _, c := range [][2]string{
		{Completions, `{}`}, {Completions, `{"prompt":["a","b"]}`}, {Completions, `{"prompt":[-1]}`}, {Completions, `{"prompt":[1,"a"]}`},
		{Completions, `{"prompt":5}`}, {Completions, `{"prompt":"a","truncate_prompt_tokens":5}`}, {Completions, `{"prompt":[]}`}, {Completions, `{"prompt":"a","suffix":"b"}`},
		{Completions, `{"prompt":[[[1]]]}`}, {"/v1/embeddings", `{"input":"a"}`}, {Completions, `[]`}, {Completions, ``}, {Completions, `{"prompt":"a`},
		{ChatCompletions, `{}`}, {ChatCompletions, `{"messages":[]}`}, {ChatCompletions, `{"messages":["a"]}`}, {ChatCompletions, `{"messages":[{"content":"a"}]}`},
		{ChatCompletions, `{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:x"}}]}]}`},
		{ChatCompletions, `{"messages":[{"role":"user","content":5}]}`}, {ChatCompletions, `{` + hi + `,"chat_template":"x"}`},
		{ChatCompletions, `{` + hi + `,"documents":[]}`}, {ChatCompletions, `{` + hi + `,"add_generation_prompt":1}`},
		{ChatCompletions, `{` + hi + `,"continue_final_message":true}`}, {ChatCompletions, `{` + hi + `,"chat_template_kwargs":{"tools":[]}}`},
		{ChatCompletions, `{` + hi + `,"tools":[{"type":"mcp"}]}`}, {ChatCompletions, `{"messages":[{"role":"developer","content":"a"}]}`},
		{ChatCompletions, `{"messages":[{"role":"assistant","content":"a","tool_calls":[5]}]}`},
	} {
		if got, err := tok.AppendPrompt([]uint32{1}, c[0], []byte(c[1])); !errors.Is(err, ErrUnsupported) || len(got) != 1 {
			t.Errorf("%s %s gave %v, %v", c[0], c[1], got, err)
		}
	}
}

func TestLoadErrors(t *testing.T) {
	if _, err := Load(t.TempDir(), Options{}); !errors.Is(err, ErrUnsupported) {
		t.Errorf("an empty folder gave %v", err)
	}
	if _, err := Load(filepath.Join(t.TempDir(), "none"), Options{}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a missing folder gave %v", err)
	}
	dir := folder(t, "gpt2", "{% for %}")
	tok, err := Load(dir, Options{})
	if err != nil || !errors.Is(tok.ChatError(), ErrUnsupported) {
		t.Fatalf("a broken template gave %v", err)
	}
	if _, err := tok.AppendPrompt(nil, Completions, []byte(`{"prompt":"a"}`)); err != nil {
		t.Errorf("completions of a model with a broken template: %v", err)
	}
	for _, broken := range []string{`{`, `{"model":{"type":"BPE","vocab":{},"merges":[]}}`, `{"model":{"type":"Unigram","vocab":[["a",0]]}}`} {
		if err := os.WriteFile(filepath.Join(dir, "tokenizer.json"), []byte(broken), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := Load(dir, Options{}); err == nil || strings.Contains(broken, "Unigram") && !errors.Is(err, ErrUnsupported) {
			t.Errorf("%s gave %v", broken, err)
		}
	}
	dir = folder(t, "gpt2", "")
	if tok, err = Load(dir, Options{}); err != nil {
		t.Fatal(err)
	}
	if _, err := tok.AppendPrompt(nil, ChatCompletions, []byte(`{"messages":[{"role":"user","content":"hi"}]}`)); !errors.Is(err, ErrUnsupported) {
		t.Errorf("a model without a template gave %v", err)
	}
}
