package bpe

import (
	"math/rand/v2"
	"strings"
	"unicode"
)

// randomText draws from the classes of characters that the pre-tokenizers tell apart, from all of Unicode, and from the
// texts of added tokens.
func randomText(rng *rand.Rand, added []string) string {
	var b strings.Builder
	for range 1 + rng.IntN(30) {
		for range 1 + rng.IntN(5) {
			b.WriteString(pools[rng.IntN(len(pools))](rng))
		}
		if len(added) > 0 && rng.IntN(12) == 0 {
			b.WriteString(added[rng.IntN(len(added))])
		}
	}
	return b.String()
}

func of(s string) func(*rand.Rand) string {
	runes := []rune(s)
	return func(rng *rand.Rand) string { return string(runes[rng.IntN(len(runes))]) }
}

func oneOf(list ...string) func(*rand.Rand) string {
	return func(rng *rand.Rand) string { return list[rng.IntN(len(list))] }
}

var pools = []func(*rand.Rand) string{
	of("abcdefghijklmnopqrstuvwxyz"), of("etaoinshr"), of("ABCXYZ"), of("0123456789"), of("     \t\n\r"), of(".,;:!?'\"()-_/<>|{}[]=+*"),
	oneOf("'s", "'T", "'re", "'LL", "'ſ", "'d"), oneOf(" the", " and", "ing", "tion", "Hello", " world", "你好", "世界", "ing "),
	of("éßüñçàøåΣςЖщא"), of("一二三你好世界龥龦㐀ぁんァヶー漢字"), of("١٢½Ⅷ²①"), of("\u00a0\u3000\u2028\u0085\u2003\u200b\u00ad"),
	of("😀👍\u200d\ufe0f\u0301\u0300\u093f\u0902ǅǲᾈʰˈªº"), of("\x00\x01\x1b\x1c\x7f\ufeff\ufffd"), of("e\u0301n\u0303가각ᄀ\u1161Å\u2126"),
	func(rng *rand.Rand) string {
		for {
			r := rune(rng.IntN(0x30000))
			if (r < 0xD800 || r > 0xDFFF) && unicode.In(r, unicode.L, unicode.M, unicode.N, unicode.P, unicode.S, unicode.Z) {
				return string(r)
			}
		}
	},
}
