package tokenizer

import (
	"fmt"
	"unicode"
	"unicode/utf8"
)

// A splitter cuts text into the pieces within which BPE merges. They are written by hand from the regular expressions
// beside them, because those need a look-ahead that Go's regexp lacks, and because they see every byte of every prompt.
type splitter func(text string, emit func(piece string))

// splitterFor returns the splitter a model file names, and whether a piece that is a token stays whole.
func splitterFor(pre string) (s splitter, whole bool, err error) {
	switch pre {
	case "smollm":
		return splitSmolLM, false, nil
	case "", "default", "gpt-2", "gpt2":
		return splitGPT2, false, nil
	case "llama-bpe", "llama3", "llama-v3":
		return func(t string, emit func(string)) { splitLlama(t, 3, emit) }, true, nil
	case "qwen2":
		return func(t string, emit func(string)) { splitLlama(t, 1, emit) }, false, nil
	}
	return nil, false, fmt.Errorf("tokenizer.ggml.pre is %q, known are smollm, gpt-2, default, llama-bpe and qwen2", pre)
}

// class is what the expressions ask of a character.
type class uint8

const (
	other  class = iota // [^\s\p{L}\p{N}], and bytes that are not UTF-8
	letter              // \p{L}
	number              // \p{N}
	space               // \s
)

var asciiClass = func() (t [utf8.RuneSelf]class) {
	for c := range t {
		t[c] = classOfRune(rune(c))
	}
	return t
}()

func classOfRune(r rune) class {
	switch {
	case unicode.IsLetter(r):
		return letter
	case unicode.IsNumber(r):
		return number
	case unicode.IsSpace(r):
		return space
	}
	return other
}

// classAt returns the class and the length of the character at s[i].
func classAt(s string, i int) (class, int) {
	if c := s[i]; c < utf8.RuneSelf {
		return asciiClass[c], 1
	}
	r, n := utf8.DecodeRuneInString(s[i:])
	if r == utf8.RuneError {
		return other, n
	}
	return classOfRune(r), n
}

// run returns the end of the characters of class c from i on.
func run(s string, i int, c class) int {
	for i < len(s) {
		k, n := classAt(s, i)
		if k != c {
			break
		}
		i += n
	}
	return i
}

// splitSmolLM isolates every digit, then splits what lies between as GPT-2 does, each stretch on its own.
func splitSmolLM(s string, emit func(string)) {
	start := 0
	for i := 0; i < len(s); {
		c, n := classAt(s, i)
		if c == number {
			splitGPT2(s[start:i], emit)
			emit(s[i : i+n])
			start = i + n
		}
		i += n
	}
	splitGPT2(s[start:], emit)
}

// splitGPT2 is 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
func splitGPT2(s string, emit func(string)) {
	for s != "" {
		n := nextGPT2(s)
		emit(s[:n])
		s = s[n:]
	}
}

func nextGPT2(s string) int {
	if s[0] == '\'' {
		if n := contraction(s, false); n > 0 {
			return n
		}
	}
	c, n := classAt(s, 0)
	if c != space {
		return run(s, n, c)
	}
	if s[0] == ' ' && len(s) > 1 {
		if c, n := classAt(s, 1); c != space {
			return run(s, 1+n, c)
		}
	}
	return spaces(s)
}

// spaces is \s+(?!\S)|\s+ at white space: all of it at the end of the text, else all but its last character, which
// belongs to what follows, unless it is the only one.
func spaces(s string) int {
	last, end := 0, 0
	for end < len(s) {
		c, n := classAt(s, end)
		if c != space {
			if last > 0 {
				return last
			}
			return end
		}
		last = end
		end += n
	}
	return end
}

// contraction is 's|'t|'re|'ve|'m|'ll|'d, with fold in any case.
func contraction(s string, fold bool) int {
	at := func(i int) byte {
		if i >= len(s) {
			return 0
		}
		c := s[i]
		if fold && c >= 'A' && c <= 'Z' {
			c += 'a' - 'A'
		}
		return c
	}
	switch a, b := at(1), at(2); {
	case a == 's' || a == 't' || a == 'm' || a == 'd':
		return 2
	case a == 'r' && b == 'e', a == 'v' && b == 'e', a == 'l' && b == 'l':
		return 3
	case fold && len(s) > 2 && s[1:3] == "ſ": // U+017F folds to s
		return 3
	}
	return 0
}

// splitLlama is Llama 3's expression, and Qwen 2's, which differs in the number of digits that stay together:
// (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+
func splitLlama(s string, digits int, emit func(string)) {
	for s != "" {
		n := nextLlama(s, digits)
		emit(s[:n])
		s = s[n:]
	}
}

func nextLlama(s string, digits int) int {
	if s[0] == '\'' {
		if n := contraction(s, true); n > 0 {
			return n
		}
	}
	c, n := classAt(s, 0)
	switch c {
	case letter:
		return run(s, n, letter)
	case number:
		for i := 1; i < digits && n < len(s); i++ {
			k, m := classAt(s, n)
			if k != number {
				break
			}
			n += m
		}
		return n
	}
	if n < len(s) && s[0] != '\r' && s[0] != '\n' {
		if k, m := classAt(s, n); k == letter {
			return run(s, n+m, letter)
		}
	}
	if c == other {
		return lineEnds(s, run(s, n, other))
	}
	if s[0] == ' ' && len(s) > 1 {
		if k, m := classAt(s, 1); k == other {
			return lineEnds(s, run(s, 1+m, other))
		}
	}
	if n := throughLineEnd(s); n > 0 {
		return n
	}
	return spaces(s)
}

func lineEnds(s string, i int) int {
	for i < len(s) && (s[i] == '\r' || s[i] == '\n') {
		i++
	}
	return i
}

// throughLineEnd is \s*[\r\n]+: white space up to its last line end, 0 when it has none.
func throughLineEnd(s string) int {
	end := 0
	for i := 0; i < len(s); {
		c, n := classAt(s, i)
		if c != space {
			break
		}
		if s[i] == '\r' || s[i] == '\n' {
			end = i + 1
		}
		i += n
	}
	return end
}
