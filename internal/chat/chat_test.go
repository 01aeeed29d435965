package chat

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/headrace/headrace/internal/gguf"
	"github.com/headrace/headrace/internal/openai"
)

type goldenFile struct {
	Templates map[string]string
	Rows      []struct {
		Template, Messages string
		Tools              *string
		Generate           bool
		Prompt             *string
		Error              string
	}
}

func readGolden(t *testing.T) goldenFile {
	t.Helper()
	b, err := os.ReadFile("testdata/golden.json")
	if err != nil {
		t.Fatal(err)
	}
	var g goldenFile
	if err := json.Unmarshal(b, &g); err != nil {
		t.Fatal(err)
	}
	return g
}

// parse goes the way of a request, so that the whole line is held against transformers.
func parse(t *testing.T, messages string, tools *string) Input {
	t.Helper()
	body := `{"messages":` + messages
	if tools != nil {
		body += `,"tools":` + *tools
	}
	r, e := openai.ParseRequest(openai.Chat, []byte(body+"}"), openai.Options{})
	if e != nil {
		t.Fatal(e)
	}
	return Input{Messages: r.Messages, Tools: r.Tools, AddGenerationPrompt: true}
}

func TestGolden(t *testing.T) {
	g := readGolden(t)
	compiled := map[string]*Template{}
	for name, source := range g.Templates {
		tpl, err := New(source, Options{BOS: "<s>", EOS: "</s>"})
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		compiled[name] = tpl
	}
	for _, row := range g.Rows {
		in := parse(t, row.Messages, row.Tools)
		in.AddGenerationPrompt = row.Generate
		got, err := compiled[row.Template].Render(in)
		switch {
		case row.Prompt == nil:
			if err == nil {
				t.Errorf("%s %s: rendered %q, transformers says %s", row.Template, row.Messages, got, row.Error)
			}
			var raised *RaisedError
			if errors.As(err, &raised) && raised.Message != row.Error {
				t.Errorf("%s: raised %q, want %q", row.Template, raised.Message, row.Error)
			}
		case err != nil:
			t.Errorf("%s %s: %v", row.Template, row.Messages, err)
		case got != *row.Prompt:
			t.Errorf("%s %s:\n got %q\nwant %q", row.Template, row.Messages, got, *row.Prompt)
		}
	}
}

func TestModelFileTemplate(t *testing.T) {
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Fatal(err)
	}
	f, err := gguf.Open(filepath.Join(cache, "headrace", "models", "SmolLM2-135M-Instruct.Q4_1.gguf"))
	if err != nil {
		t.Fatalf("%v (run 'make model')", err)
	}
	defer f.Close()
	source, _ := f.String("tokenizer.chat_template")
	if want := readGolden(t).Templates["smollm2"]; source != want {
		t.Errorf("the model file's template is\n%q, the golden values are of\n%q", source, want)
	}
}

func TestTemplatesStayInside(t *testing.T) {
	secret := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(secret, []byte("swordfish"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, source := range []string{
		`{% include "` + secret + `" %}`,
		`{% extends "` + secret + `" %}`,
		`{% import "` + secret + `" as x %}{{ x }}`,
		`{% from "` + secret + `" import x %}{{ x }}`,
		`{% set f = "` + secret + `" %}{% include f %}`,
		`{{ self.include("` + secret + `") }}`,
	} {
		tpl, err := New(source, Options{})
		if err != nil {
			continue
		}
		if got, err := tpl.Render(Input{}); err == nil && strings.Contains(got, "swordfish") {
			t.Errorf("%s read a file", source)
		}
	}
}

func TestRenderErrors(t *testing.T) {
	render := func(source string, in Input) (string, error) {
		tpl, err := New(source, Options{})
		if err != nil {
			t.Fatalf("%s: %v", source, err)
		}
		return tpl.Render(in)
	}
	var raised *RaisedError
	if _, err := render(`{{ raise_exception("no way") }}`, Input{}); !errors.As(err, &raised) || raised.Message != "no way" {
		t.Errorf("raise_exception gave %v", err)
	}
	if _, err := render(`{{ messages }}`, Input{Tools: []byte(`[{}]`)}); !errors.Is(err, ErrNoTools) {
		t.Errorf("tools without a use gave %v", err)
	}
	if _, err := render(`{% for a in range(90000) %}{{ "x" * 1000 }}{% endfor %}`, Input{}); !errors.Is(err, ErrTooLong) {
		t.Errorf("endless output gave %v", err)
	}
	for _, source := range []string{`{{ 1 % 0 }}`, `{{ range(1000000) }}`, `{{ none.x.y }}`, `{{ nothing() }}`, `{{ "a" * -1 }}`} {
		if got, err := render(source, Input{}); err == nil {
			t.Errorf("%s rendered %q", source, got)
		}
	}
	for _, source := range []string{`{% if %}`, `{% for x in %}`, `{{`, `{% generation 1 %}{% endgeneration %}`, strings.Repeat("x", TemplateBytesMax+1)} {
		if _, err := New(source, Options{}); err == nil {
			t.Errorf("%.40s compiled", source)
		}
	}
}

func TestVariables(t *testing.T) {
	tpl, err := New(`{{ a }} {{ b.c }} {{ strftime_now("%d %b %Y %H:%M 100%%") }} {{ bos_token }}{{ d.items() | list | tojson }}`, Options{BOS: "<s>"})
	if err != nil {
		t.Fatal(err)
	}
	got, err := tpl.Render(Input{Args: []byte(`{"a":9007199254740993,"b":{"c":"x"},"d":{"z":1,"y":[2.5]}}`), Now: time.Unix(1790000000, 0)})
	if err != nil {
		t.Fatal(err)
	}
	if want := `9007199254740993 x 21 Sep 2026 14:13 100% <s>[["z", 1], ["y", [2.5]]]`; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestContinueFinalMessage(t *testing.T) {
	tpl, err := New(readGolden(t).Templates["chatml"], Options{})
	if err != nil {
		t.Fatal(err)
	}
	in := parse(t, `[{"role":"user","content":"Count."},{"role":"assistant","content":"One, two,"}]`, nil)
	in.AddGenerationPrompt, in.ContinueFinalMessage = false, true
	got, err := tpl.Render(in)
	if want := "<|im_start|>user\nCount.<|im_end|>\n<|im_start|>assistant\nOne, two,"; err != nil || got != want {
		t.Errorf("got %q, %v", got, err)
	}
}

func FuzzTemplate(f *testing.F) {
	f.Add(`{% for m in messages %}{{ m.role }}{% endfor %}`, "hi")
	f.Add(`{{ messages[-1].content | tojson(indent=2) }}`, "\xff'\"")
	f.Add(`{% set x = namespace(a=1) %}{% set x.a = 2 %}{{ x.a }}`, "")
	f.Fuzz(func(t *testing.T, source, content string) {
		if strings.Count(source, "for") > 2 || strings.Contains(source, "*") || strings.Contains(source, "macro") {
			return // loops in loops may take as long as they like: a model file is the operator's choice
		}
		tpl, err := New(source, Options{})
		if err != nil {
			return
		}
		_, _ = tpl.Render(Input{Messages: []openai.Message{{Role: "user", Content: content}}})
	})
}
