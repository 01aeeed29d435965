package tokenize

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// BenchmarkConversation is a conversation of 220 KB with a new last message of 1 KB every time: warm, with all that came
// before in the cache, and cold, without a cache. HEADRACE_MODEL names a model's folder or file to use in place of the
// small tokenizer of the tests.
//
//	HEADRACE_MODEL=DIR go test ./router/tokenize -run '^$' -bench Conversation -cpu 1
func BenchmarkConversation(b *testing.B) {
	for _, template := range []string{"chatml", "thinking"} {
		for name, limit := range map[string]int64{"warm": 0, "cold": -1} {
			b.Run(template+"/"+name, func(b *testing.B) { benchmarkConversation(b, template, limit) })
		}
	}
}

func benchmarkConversation(b *testing.B, template string, limit int64) {
	model := os.Getenv("HEADRACE_MODEL")
	if model == "" {
		model = folder(b, "llama3", "")
	}
	tok, err := Load(model, Options{Template: templateText(b, template), CacheBytes: limit})
	if err != nil {
		b.Fatal(err)
	}
	body := conversation(b, 220_000)
	before := body[:bytes.LastIndexByte(body[:len(body)-2000], '{')-1] // without the last message and its comma
	if _, err := tok.AppendPrompt(nil, ChatCompletions, append(bytes.Clone(before), "]}"...)); err != nil {
		b.Fatal(err)
	}
	count := bytes.LastIndex(body, []byte("00000000"))
	var dst []uint32
	b.SetBytes(int64(len(body)))
	b.ReportAllocs()
	i := 0
	for b.Loop() {
		i++
		copy(body[count:], fmt.Sprintf("%08d", i))
		if dst, err = tok.AppendPrompt(dst[:0], ChatCompletions, body); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(len(dst)), "tokens")
}

// conversation is a chat request of about so many bytes of this repository's pages: messages of 4 KB, the last of 1 KB
// with a number in it.
func conversation(b *testing.B, size int) []byte {
	b.Helper()
	pages, err := filepath.Glob("../../docs/*.md")
	if err != nil || len(pages) == 0 {
		b.Fatal("no pages")
	}
	var text strings.Builder
	for _, page := range pages {
		t, err := os.ReadFile(page)
		if err != nil {
			b.Fatal(err)
		}
		text.Write(t)
	}
	words := strings.ToValidUTF8(text.String(), "")
	for len(words) < size {
		words += words
	}
	out := []byte(`{"model":"m","messages":[{"role":"system","content":"Be brief."}`)
	for i := 0; len(out) < size-1500; i++ {
		part := strings.ToValidUTF8(words[:min(4000, size-500-len(out))], "")
		words = words[4000:]
		role := [2]string{"user", "assistant"}[i%2]
		out = fmt.Appendf(out, `,{"role":%q,"content":`, role)
		out = append(appendQuoted(out, part), '}')
	}
	role := "user"
	if bytes.Contains(out[len(out)-4500:], []byte(`"role":"user"`)) {
		out = append(out, `,{"role":"assistant","content":"Yes."}`...)
	}
	out = fmt.Appendf(out, `,{"role":%q,"content":`, role)
	out = append(appendQuoted(out, "00000000 "+strings.ReplaceAll(words[:1000], "{", "(")), '}')
	return append(out, "]}"...)
}

func appendQuoted(dst []byte, s string) []byte {
	dst = append(dst, '"')
	for _, r := range s {
		switch {
		case r == '"' || r == '\\':
			dst = append(dst, '\\', byte(r))
		case r == '\n':
			dst = append(dst, '\\', 'n')
		case r >= 0x20:
			dst = append(dst, string(r)...)
		}
	}
	return append(dst, '"')
}
