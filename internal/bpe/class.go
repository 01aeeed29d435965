package bpe

import (
	"sync"
	"unicode"
	"unicode/utf8"
)

// Classes of characters as the split expressions ask for them, one bit each. 0 is every other character, and a byte
// that is not UTF-8.
const (
	letter  uint8 = 1 << iota // \p{L}
	number                    // \p{N}
	space                     // \s
	mark                      // \p{M}
	graphic                   // \p{P} and \p{S}
	upper                     // \p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}: what may begin a word
	lower                     // \p{Ll}\p{Lm}\p{Lo}\p{M}: what may go on with it
	lineEnd                   // \r and \n
)

// classes holds the class of every character: 1.1 MB, of which a language touches a few kilobytes. The binary search
// of package unicode costs more than the rest of a scanner.
var classes = sync.OnceValue(func() []uint8 {
	t := make([]uint8, unicode.MaxRune+1)
	fill := func(bits uint8, tables ...*unicode.RangeTable) {
		for _, table := range tables {
			for _, r := range table.R16 {
				for c := rune(r.Lo); c <= rune(r.Hi); c += rune(r.Stride) {
					t[c] |= bits
				}
			}
			for _, r := range table.R32 {
				for c := rune(r.Lo); c <= rune(r.Hi); c += rune(r.Stride) {
					t[c] |= bits
				}
			}
		}
	}
	fill(letter, unicode.L)
	fill(number, unicode.N)
	fill(space, unicode.White_Space)
	fill(mark, unicode.M)
	fill(graphic, unicode.P, unicode.S)
	fill(upper, unicode.Lu, unicode.Lt, unicode.Lm, unicode.Lo, unicode.M)
	fill(lower, unicode.Ll, unicode.Lm, unicode.Lo, unicode.M)
	t['\r'] |= lineEnd
	t['\n'] |= lineEnd
	t[utf8.RuneError] &^= letter | number // it also stands for bytes that are no characters
	return t
})

// asciiClass is the beginning of classes, where the processor's cache keeps it.
var asciiClass = func() (t [utf8.RuneSelf]uint8) {
	copy(t[:], classes())
	return t
}()

// classAt returns the class and the length of the character at s[i].
func classAt(s string, i int) (class uint8, n int) {
	if c := s[i]; c < utf8.RuneSelf {
		return asciiClass[c], 1
	}
	r, n := utf8.DecodeRuneInString(s[i:])
	if r == utf8.RuneError && n == 1 {
		return 0, 1
	}
	return classes()[r], n
}

// run returns the end of the characters from i on that have one of the classes.
func run(s string, i int, of uint8) int {
	for i < len(s) {
		if c := s[i]; c < utf8.RuneSelf {
			if asciiClass[c]&of == 0 {
				return i
			}
			i++
			continue
		}
		c, n := classAt(s, i)
		if c&of == 0 {
			return i
		}
		i += n
	}
	return i
}

// runNot returns the end of the characters from i on that have none of the classes.
func runNot(s string, i int, of uint8) int {
	for i < len(s) {
		if c := s[i]; c < utf8.RuneSelf {
			if asciiClass[c]&of != 0 {
				return i
			}
			i++
			continue
		}
		c, n := classAt(s, i)
		if c&of != 0 {
			return i
		}
		i += n
	}
	return i
}
