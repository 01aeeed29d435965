package standin

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
)

// chatTemplate writes a conversation as Render does, without tools.
const chatTemplate = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"

// WriteTokenizer writes into a folder what a router needs to know a stand-in's tokens, in Hugging Face's form: a token a
// byte, which is what a table with bytes_per_token 1 says.
func WriteTokenizer(dir string) error {
	vocab := make(map[string]int, 256)
	for i, r := range byteRunes() {
		vocab[string(r)] = i
	}
	files := map[string]any{
		"tokenizer.json": map[string]any{
			"version": "1.0", "added_tokens": []any{}, "normalizer": nil, "post_processor": nil,
			"pre_tokenizer": map[string]any{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
			"decoder":       map[string]any{"type": "ByteLevel"},
			"model":         map[string]any{"type": "BPE", "vocab": vocab, "merges": []any{}},
		},
		"tokenizer_config.json": map[string]any{"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": chatTemplate},
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("write tokenizer: %w", err)
	}
	for name, doc := range files {
		b, err := json.MarshalIndent(doc, "", " ")
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(dir, name), append(b, '\n'), 0o644); err != nil {
			return fmt.Errorf("write tokenizer: %w", err)
		}
	}
	return nil
}

// byteRunes are the characters that stand for bytes in byte-level vocabularies: the byte's own where it can be seen, else
// one of those from U+0100 on.
func byteRunes() (runes [256]rune) {
	next := rune(256)
	for i := range runes {
		if i >= '!' && i <= '~' || i >= 0xa1 && i <= 0xac || i >= 0xae {
			runes[i] = rune(i)
			continue
		}
		runes[i] = next
		next++
	}
	return runes
}
