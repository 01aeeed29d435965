package bpe

import "strings"

// A scanner returns the length of the first piece of s, which is not empty. Scanners are written by hand from the
// regular expressions beside them: those need a look-ahead that Go's regexp lacks, and they see every byte of every
// prompt. What an expression does not match is a piece up to the next match.
type scanner func(s string) int

// scanGPT2 is 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
func scanGPT2(s string) int {
	if s[0] == '\'' {
		if n := contraction(s, false); n > 0 {
			return n
		}
	}
	c, n := classAt(s, 0)
	if c&space == 0 {
		return runGPT2(s, n, c)
	}
	if s[0] == ' ' && len(s) > 1 {
		if c, n := classAt(s, 1); c&space == 0 {
			return runGPT2(s, 1+n, c)
		}
	}
	return spaces(s)
}

// runGPT2 goes on from i with the characters of first's kind.
func runGPT2(s string, i int, first uint8) int {
	if kind := first & (letter | number); kind != 0 {
		return run(s, i, kind)
	}
	return runNot(s, i, letter|number|space)
}

// spaces is \s+(?!\S)|\s+ at white space: all of it at the end of the text, else all but its last character, which
// belongs to what follows, unless it is the only one.
func spaces(s string) int {
	last, end := 0, 0
	for end < len(s) {
		c, n := classAt(s, end)
		if c&space == 0 {
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

// scanDigit isolates every number; \p{N} and the pre-tokenizer Digits with individual_digits.
func scanDigit(s string) int {
	if c, n := classAt(s, 0); c&number != 0 {
		return n
	}
	return runNot(s, 0, number)
}

// scanDigits3 isolates \p{N}{1,3}.
func scanDigits3(s string) int {
	if n := digits(s, 3); n > 0 {
		return n
	}
	return runNot(s, 0, number)
}

// scanNumber isolates runs of numbers.
func scanNumber(s string) int {
	if n := run(s, 0, number); n > 0 {
		return n
	}
	return runNot(s, 0, number)
}

// digits is \p{N}{1,limit}.
func digits(s string, limit int) int {
	end := 0
	for ; limit > 0 && end < len(s); limit-- {
		c, n := classAt(s, end)
		if c&number == 0 {
			break
		}
		end += n
	}
	return end
}

// scanLlama is Llama 3's expression, and that of Qwen 2 and 3 with one digit at a time:
// (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+
// Qwen 3.5 counts marks to the letters of a word.
func scanLlama(numbers int, word uint8) scanner {
	return func(s string) int {
		if s[0] == '\'' {
			if n := contraction(s, true); n > 0 {
				return n
			}
		}
		c, n := classAt(s, 0)
		if c&word != 0 {
			return run(s, n, word)
		}
		if c&number != 0 {
			return digits(s, numbers)
		}
		if n < len(s) && c&lineEnd == 0 {
			if k, m := classAt(s, n); k&word != 0 {
				return run(s, n+m, word)
			}
		}
		return rest(s, c, n, word|number|space, false)
	}
}

// rest is the common end of the expressions since GPT-4's, at a character of class c and length n:
// ` ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`; with slash the line ends may be slashes too.
func rest(s string, c uint8, n int, not uint8, slash bool) int {
	if c&not == 0 {
		return lineEnds(s, runNot(s, n, not), slash)
	}
	if s[0] == ' ' && len(s) > 1 {
		if k, m := classAt(s, 1); k&not == 0 {
			return lineEnds(s, runNot(s, 1+m, not), slash)
		}
	}
	if n := throughLineEnd(s); n > 0 {
		return n
	}
	return spaces(s)
}

func lineEnds(s string, i int, slash bool) int {
	for i < len(s) && (s[i] == '\r' || s[i] == '\n' || slash && s[i] == '/') {
		i++
	}
	return i
}

// throughLineEnd is \s*[\r\n]+: white space up to its last line end, 0 when it has none.
func throughLineEnd(s string) int {
	end := 0
	for i := 0; i < len(s); {
		c, n := classAt(s, i)
		if c&space == 0 {
			break
		}
		i += n
		if c&lineEnd != 0 {
			end = i
		}
	}
	return end
}

// scanO200k is the expression of GPT-4o, gpt-oss and Llama 4, which cuts words where a capital begins a new one, and with
// other numbers and without contractions that of Mistral's Tekken:
// [^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|
// [^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|
// \p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+
func scanO200k(numbers int, contractions bool) scanner {
	return func(s string) int {
		c, n := classAt(s, 0)
		if end := cased(s, c, n); end > 0 {
			if contractions && end < len(s) && s[end] == '\'' {
				end += contraction(s[end:], true)
			}
			return end
		}
		if c&number != 0 {
			return digits(s, numbers)
		}
		return rest(s, c, n, letter|number|space, true)
	}
}

// cased is the first two alternatives of scanO200k, without the contraction, at a character of class c and length n: 0
// where neither matches.
func cased(s string, c uint8, n int) int {
	prefix := c&(lineEnd|letter|number) == 0
	if prefix && c&mark == 0 && n < len(s) { // the common case: what follows decides
		if k, _ := classAt(s, n); k&(upper|lower) == 0 {
			return 0
		}
	}
	if prefix {
		if end := downward(s, n); end > 0 {
			return end
		}
	}
	if end := downward(s, 0); end > 0 {
		return end
	}
	if prefix {
		if end := run(s, n, upper); end > n {
			return run(s, end, lower)
		}
	}
	if end := run(s, 0, upper); end > 0 {
		return run(s, end, lower)
	}
	return 0
}

// downward is [\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+ from i on, with the backtracking that gives the
// second class the last character it can have; 0 where it does not match.
func downward(s string, i int) int {
	both, u := 0, i
	for u < len(s) {
		c, n := classAt(s, u)
		if c&upper == 0 {
			break
		}
		u += n
		if c&lower != 0 {
			both = u
		}
	}
	if end := run(s, u, lower); end > u {
		return end
	}
	return both
}

// scanDeepSeek is the last of DeepSeek V3's three expressions:
// [!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|
// \s*[\r\n]+|\s+(?!\S)|\s+
// It matches no digits and no control characters.
func scanDeepSeek(s string) int {
	if n := matchDeepSeek(s); n > 0 {
		return n
	}
	_, gap := classAt(s, 0)
	for gap < len(s) && matchDeepSeek(s[gap:]) == 0 {
		_, n := classAt(s, gap)
		gap += n
	}
	return gap
}

func matchDeepSeek(s string) int {
	c, n := classAt(s, 0)
	if c&graphic != 0 && n == 1 {
		end := 1
		for end < len(s) && (s[end]|0x20) >= 'a' && (s[end]|0x20) <= 'z' {
			end++
		}
		if end > 1 {
			return end
		}
	}
	if c&(letter|mark) != 0 {
		return run(s, n, letter|mark)
	}
	if c&(lineEnd|graphic) == 0 {
		if end := run(s, n, letter|mark); end > n {
			return end
		}
	}
	if c&graphic != 0 {
		return lineEnds(s, run(s, n, graphic), false)
	}
	if c&space == 0 {
		return 0
	}
	if s[0] == ' ' {
		if end := run(s, 1, graphic); end > 1 {
			return lineEnds(s, end, false)
		}
	}
	if n := throughLineEnd(s); n > 0 {
		return n
	}
	return spaces(s)
}

// scanCJK isolates [一-龥぀-ゟ゠-ヿ]+.
func scanCJK(s string) int {
	first := cjk(s, 0)
	if first > 0 {
		end := first
		for {
			n := cjk(s, end)
			if n == 0 {
				return end
			}
			end += n
		}
	}
	end := 0
	for end < len(s) && cjk(s, end) == 0 {
		end++
	}
	return end
}

// cjk returns 3, the length of the character at s[i], when it is one of scanCJK's, else 0.
func cjk(s string, i int) int {
	if i+2 >= len(s) || s[i] < 0xE3 || s[i] > 0xE9 || s[i+1]&0xC0 != 0x80 || s[i+2]&0xC0 != 0x80 {
		return 0
	}
	r := rune(s[i]&0xF)<<12 | rune(s[i+1]&0x3F)<<6 | rune(s[i+2]&0x3F)
	if r >= 0x4E00 && r <= 0x9FA5 || r >= 0x3040 && r <= 0x30FF {
		return 3
	}
	return 0
}

// The ways in which the pre-tokenizer Split treats what its pattern matches.
func scanIsolated(pattern string) scanner {
	return func(s string) int {
		switch i := strings.Index(s, pattern); {
		case i == 0:
			return len(pattern)
		case i > 0:
			return i
		}
		return len(s)
	}
}

func scanMergedWithPrevious(pattern string) scanner {
	return func(s string) int {
		if i := strings.Index(s, pattern); i >= 0 {
			return i + len(pattern)
		}
		return len(s)
	}
}

func scanMergedWithNext(pattern string) scanner {
	return func(s string) int {
		from := 0
		if strings.HasPrefix(s, pattern) {
			from = len(pattern)
		}
		if i := strings.Index(s[from:], pattern); i >= 0 {
			return from + i
		}
		return len(s)
	}
}
