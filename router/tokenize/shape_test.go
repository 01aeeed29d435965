package tokenize

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/headrace/headrace/internal/chat"
	"github.com/headrace/headrace/router/tokens"
)

// Which strings of a template count as looked for.
func TestLiterals(t *testing.T) {
	for _, test := range []struct {
		source           string
		ok               bool
		contained, equal []string
	}{
		{"plain 'text' {{ bos_token }}", true, nil, nil},
		{"{{- '<|im_start|>' + message['role'] + '\\n' + message.content ~ '<|im_end|>\\n' -}}", true, nil, nil},
		{"{% if message['role'] == 'user' or 'x' != y %}", true, nil, []string{"user", "x"}},
		{"{% if role in ['a', 'b', \"c\"] %}", true, nil, []string{"a", "b", "c"}},
		{"{% if '</think>' in content %}{{ content.split('</think>')[-1].lstrip('\\n') }}", true, []string{"</think>", "</think>"}, nil},
		{"{% set mark = '[x]' %}{# 'nothing' #}", true, []string{"[x]"}, nil},
		{"{{ 'a' if content.startswith('b\\'c') else 'd' }}", true, []string{"b'c", "d"}, nil},
		{"{{ '<t>' in content }}", true, []string{"<t>"}, nil},
		{"{{ ('a' + content) in b }}", true, []string{"a"}, nil},
		{"{{ content.replace('\\n', ' ') }}", false, nil, nil},
		{"{% set n = ' ' %}", false, nil, nil},
		{"{{ 'open", true, nil, nil},
		{"{% set x = '' %}{{ content.lstrip('\n').strip() }}", true, nil, nil},
	} {
		l := readLiterals(test.source)
		if l.ok != test.ok || !slices.Equal(l.contained, test.contained) || !slices.Equal(l.equal, test.equal) {
			t.Errorf("%s: %+v", test.source, l)
		}
	}
}

// What is filled in is what the template writes, of all templates, with texts that they look into too.
func TestShapes(t *testing.T) {
	words := []string{"one", " two", "\nthree", "<b>", "</think>", "<think>", "42", "  ", "<|im_end|>", "é", "\n\n", "[INST]", "user", "\"", "\\", "\t", "漢", "content", "system", "model", "<tool_response>"}
	filled := map[string]int{}
	for _, name := range templates {
		family := "llama3"
		if name == "mistral" {
			family = "llama2"
		}
		whole := load(t, family, name, Options{CacheBytes: -1})
		cached := load(t, family, name, Options{})
		rng := rand.New(rand.NewPCG(5, 6))
		var messages []map[string]any
		text := func() string {
			if rng.IntN(8) == 0 {
				return []string{"user", "assistant", "system", "x"}[rng.IntN(4)]
			}
			var b strings.Builder
			for range 1 + rng.IntN(6) {
				b.WriteString(words[rng.IntN(len(words))])
			}
			return b.String()
		}
		for i := range 24 {
			if i%8 == 0 {
				messages = []map[string]any{{"role": "user", "content": fmt.Sprint("c", i)}}
				if i%16 == 0 && name != "gemma" && name != "mistral" {
					messages = slices.Insert(messages, 0, map[string]any{"role": "system", "content": "s"})
				}
			} else {
				messages = append(messages, map[string]any{"role": "assistant", "content": text()}, map[string]any{"role": "user", "content": text()})
			}
			body, err := json.Marshal(map[string]any{"messages": messages, "add_generation_prompt": rng.IntN(5) > 0})
			if err != nil {
				t.Fatal(err)
			}
			want, errWhole := whole.AppendPrompt(nil, ChatCompletions, body)
			var p tokens.Prompt
			if err := cached.Prompt(&p, ChatCompletions, body); (err == nil) != (errWhole == nil) || !slices.Equal(p.AppendTo(nil), want) {
				t.Fatalf("%s: %s: %v, %v: %d tokens, want %d", name, body, err, errWhole, p.Len(), len(want))
			}
		}
		if cached.cache.wrong.Load() > 0 {
			t.Errorf("%s: a check found the cache wrong", name)
		}
		for _, f := range cached.shapes.of {
			if f.around != nil {
				filled[name]++
			}
		}
	}
	t.Log(filled)
	for _, name := range []string{"chatml", "gemma", "llama3", "smollm2", "qwen", "thinking"} {
		if filled[name] == 0 {
			t.Errorf("%s has no shapes", name)
		}
	}
}

// A template that does more to a text than to write it has no shape.
func TestNoShapes(t *testing.T) {
	const frame = "{%% for message in messages %%}{{ '<' + message['role'] + '>' }}{{ %s }}{{ '|' }}{%% endfor %%}{%% if add_generation_prompt %%}{{ '<a>' }}{%% endif %%}"
	tok := load(t, "llama3", "chatml", Options{CacheBytes: -1})
	told := func(content string) shape {
		tok.setTemplate(fmt.Sprintf(frame, content), chat.Options{})
		if tok.stubs.texts = nil; !tok.literals.ok {
			t.Errorf("%s: not looked into", content)
		}
		user := kind{role: "user", content: contentText}
		return tok.tellShape(chat.Input{}, "", []kind{user}, []kind{{role: "assistant", content: contentText}, user}, true)
	}
	for _, content := range []string{"message['content'] | upper", "message['content'] | tojson", "message['content'] | length", "message['content'][:5]", "message['content'] + message['content']",
		"message['content'] | escape", "message['content'].title()", "'x'"} {
		if f := told(content); f.around != nil {
			t.Errorf("%s: %q", content, f.around)
		}
	}
	if f := told("message['content'] | trim"); !slices.Equal(f.around, []string{"<assistant>", "|<user>", "|<a>"}) {
		t.Errorf("a text that is trimmed: %q", f.around)
	}
}
