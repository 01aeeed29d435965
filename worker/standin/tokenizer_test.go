package standin

import (
	"testing"

	"github.com/headrace/headrace/internal/chat"
	"github.com/headrace/headrace/internal/openai"
	"github.com/headrace/headrace/router/tokenize"
	"github.com/headrace/headrace/worker/tokenizer"
)

// A router that loads what is written sees the tokens that the stand-in does.
func TestWrittenTokenizerIsTheStandIns(t *testing.T) {
	dir := t.TempDir()
	if err := WriteTokenizer(dir); err != nil {
		t.Fatal(err)
	}
	tok, err := tokenize.Load(dir, tokenize.Options{})
	if err != nil {
		t.Fatal(err)
	}
	x := text{bytesPerToken: 1}
	const words = "The mill race,  brings\n\twater: naïve Übermut, 漢字, \x7f 🙂 42"
	rendered, err := x.Render(chat.Input{Messages: []openai.Message{{Role: "system", Content: words}, {Role: "user", Content: "Go on."}}, AddGenerationPrompt: true})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ path, body, text string }{
		{tokenize.Completions, `{"prompt":"The mill race,  brings\n\twater: naïve Übermut, 漢字, \u007f 🙂 42"}`, words},
		{tokenize.ChatCompletions, `{"messages":[{"role":"system","content":"The mill race,  brings\n\twater: naïve Übermut, 漢字, \u007f 🙂 42"},{"role":"user","content":"Go on."}]}`, rendered},
	} {
		got, err := tok.AppendPrompt(nil, c.path, []byte(c.body))
		if err != nil {
			t.Fatal(err)
		}
		want, err := x.Encode(nil, c.text, tokenizer.EncodeOptions{})
		if err != nil || len(got) != len(want) {
			t.Fatalf("%s: %d tokens, want %d (%v)", c.path, len(got), len(want), err)
		}
		for i := range got {
			if got[i] != uint32(want[i]) {
				t.Fatalf("%s: token %d is %d, want %d", c.path, i, got[i], want[i])
			}
		}
	}
}
