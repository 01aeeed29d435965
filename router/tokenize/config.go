package tokenize

import (
	"encoding/json"
	"fmt"
	"regexp"
)

// tokenizerConfig is what is used of tokenizer_config.json.
type tokenizerConfig struct {
	BOS          tokenText     `json:"bos_token"`
	EOS          tokenText     `json:"eos_token"`
	ChatTemplate templateTexts `json:"chat_template"`
}

// tokenText is a token: a string, null, or an object with its content.
type tokenText struct{ Content string }

// UnmarshalJSON implements json.Unmarshaler.
func (t *tokenText) UnmarshalJSON(b []byte) error {
	if len(b) > 0 && b[0] == '{' {
		type plain tokenText
		return json.Unmarshal(b, (*plain)(t))
	}
	return json.Unmarshal(b, &t.Content)
}

// templateTexts are a model's templates: one string, or a list of named ones.
type templateTexts struct{ Default, ToolUse string }

// UnmarshalJSON implements json.Unmarshaler.
func (t *templateTexts) UnmarshalJSON(b []byte) error {
	if len(b) == 0 || b[0] != '[' {
		return json.Unmarshal(b, &t.Default)
	}
	var list []struct{ Name, Template string }
	if err := json.Unmarshal(b, &list); err != nil {
		return err
	}
	for _, e := range list {
		switch e.Name {
		case "default":
			t.Default = e.Template
		case "tool_use":
			t.ToolUse = e.Template
		}
	}
	return nil
}

func readConfig(dir string) (c tokenizerConfig, err error) {
	b, err := readFile(dir, "tokenizer_config.json")
	if err != nil || b == nil {
		return c, err
	}
	if err := json.Unmarshal(b, &c); err != nil {
		return c, fmt.Errorf("read tokenizer_config.json: %w", err)
	}
	return c, nil
}

var (
	partsLoop    = regexp.MustCompile(`\{%-?\s*for\s+\w+\s+in\s+\w+(?:\.content|\[\s*['"]content['"]\s*\])`)
	contentAlias = regexp.MustCompile(`\{%-?\s*set\s+(\w+)\s*=\s*\w+(?:\.content|\[\s*['"]content['"]\s*\])\s*-?%\}`)
)

// wantsParts tells whether a template goes through the parts of a message's content, in which case vLLM gives it a list
// rather than a string (its content format "openai").
func wantsParts(source string) bool {
	if partsLoop.MatchString(source) {
		return true
	}
	for _, alias := range contentAlias.FindAllStringSubmatch(source, -1) {
		if regexp.MustCompile(`\{%-?\s*for\s+\w+\s+in\s+` + alias[1] + `\b\s*-?%\}`).MatchString(source) {
			return true
		}
	}
	return false
}
