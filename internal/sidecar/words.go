package sidecar

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
)

// templateBytesMax bounds a command line: what is longer was not typed by anybody.
const templateBytesMax = 64 << 10

// SplitWords reads a command line as a shell would that knows quotes and backslashes and nothing else: no variables, no
// patterns, no redirection.
func SplitWords(line string) ([]string, error) {
	if len(line) > templateBytesMax {
		return nil, fmt.Errorf("command line has %d bytes, at most %d", len(line), templateBytesMax)
	}
	if strings.ContainsRune(line, 0) {
		return nil, errors.New("command line has a zero byte")
	}
	var words []string
	var word strings.Builder
	inWord := false
	for i := 0; i < len(line); i++ {
		switch c := line[i]; c {
		case ' ', '\t', '\n', '\r':
			if inWord {
				words = append(words, word.String())
				word.Reset()
				inWord = false
			}
		case '\'', '"':
			n, err := quoted(&word, line[i:])
			if err != nil {
				return nil, err
			}
			i += n - 1
			inWord = true
		case '\\':
			if i+1 == len(line) {
				return nil, errors.New(`command line ends in a \ with nothing behind it`)
			}
			i++
			if line[i] != '\n' { // a line that goes on
				word.WriteByte(line[i])
				inWord = true
			}
		default:
			word.WriteByte(c)
			inWord = true
		}
	}
	if inWord {
		words = append(words, word.String())
	}
	return words, nil
}

// quoted appends what stands between the quote that s begins with and its fellow, and says how many bytes that took.
func quoted(word *strings.Builder, s string) (int, error) {
	q := s[0]
	for i := 1; i < len(s); i++ {
		switch c := s[i]; {
		case c == q:
			return i + 1, nil
		case c == '\\' && q == '"' && i+1 < len(s) && strings.IndexByte("\"\\$`\n", s[i+1]) >= 0:
			i++
			if s[i] != '\n' {
				word.WriteByte(s[i])
			}
		default:
			word.WriteByte(c)
		}
	}
	return 0, fmt.Errorf("command line has a %c without its fellow: %.40s", q, s)
}

// plain are the words that need no quotes.
var plain = regexp.MustCompile(`^[A-Za-z0-9_@%+=:,./{}-]+$`)

// JoinWords writes words so that a shell, and SplitWords, read them again as they are.
func JoinWords(words []string) string {
	out := make([]string, len(words))
	for i, w := range words {
		if out[i] = w; !plain.MatchString(w) {
			out[i] = "'" + strings.ReplaceAll(w, "'", `'\''`) + "'"
		}
	}
	return strings.Join(out, " ")
}

// assignment is a word that a shell would take as a variable for the command that follows.
var assignment = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*=`)

// placeholder is what is replaced in a template. Doubled braces are a chat template's, and left alone.
var placeholder = regexp.MustCompile(`\{+[a-z][a-z0-9-]*(:[a-z0-9-]+)?\}+`)

// expand replaces the placeholders in s by what value gives for them.
func expand(s string, value func(name string) (string, error)) (string, error) {
	var failed error
	out := placeholder.ReplaceAllStringFunc(s, func(m string) string {
		name := strings.Trim(m, "{}")
		opens, closes := strings.Count(m, "{"), strings.Count(m, "}")
		if opens > 1 {
			return m
		}
		v, err := value(name)
		if err != nil && failed == nil {
			failed = err
		}
		return v + strings.Repeat("}", closes-1) // those of a JSON document around it
	})
	return out, failed
}
