package bpe

import (
	"sync"
	"unicode/utf8"
)

// alphabet is GPT-2's map from bytes to printable characters, in which vocabulary files write their tokens: printable
// bytes stand for themselves, the others for the characters from U+0100 on, in order.
var alphabet = sync.OnceValue(func() map[rune]byte {
	m := make(map[rune]byte, 256)
	next := rune(0x100)
	for b := range 256 {
		if (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE {
			m[rune(b)] = byte(b)
		} else {
			m[next] = byte(b)
			next++
		}
	}
	return m
})

// FromAlphabet returns the bytes that a token of a byte-level vocabulary file stands for. Characters outside of the
// alphabet stand for themselves, and pure is false: no text is ever encoded as such a token.
func FromAlphabet(text string) (out []byte, pure bool) {
	m := alphabet()
	out = make([]byte, 0, len(text))
	pure = true
	for i, r := range text {
		if b, ok := m[r]; ok {
			out = append(out, b)
			continue
		}
		pure = false
		n := 1
		if r != utf8.RuneError {
			n = utf8.RuneLen(r)
		} else if _, size := utf8.DecodeRuneInString(text[i:]); size > 1 {
			n = size
		}
		out = append(out, text[i:i+n]...)
	}
	return out, pure
}
