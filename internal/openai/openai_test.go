package openai

import (
	"encoding/json"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

// vocabulary: each byte, then some longer tokens, one of them special.
type vocabulary []string

func (v vocabulary) TokenBytes(id int32) []byte {
	switch {
	case id < 0:
		return nil
	case id < 256:
		return []byte{byte(id)}
	case int(id)-256 < len(v):
		return []byte(v[id-256])
	}
	return nil
}

func (v vocabulary) Special(id int32) bool { return id == 256 }

var words = vocabulary{"<special>", "ab", "aba", "\xf0\x9f", "\x98\x80", "é", "x\xc3", " stop", "now ", "😀"}

func TestDetok(t *testing.T) {
	bytesOf := func(s string) (ids []int32) {
		for _, b := range []byte(s) {
			ids = append(ids, int32(b))
		}
		return ids
	}
	for _, c := range []struct {
		name   string
		tokens []int32
		stop   []string
		want   []string // what each Push releases, then what Flush does
		match  string
	}{
		{"plain", bytesOf("ab"), nil, []string{"a", "b", ""}, ""},
		{"split character", bytesOf("é!"), nil, []string{"", "é", "!", ""}, ""},
		{"cut character", bytesOf("a\xf0\x9f\x98"), nil, []string{"a", "", "", "", "\uFFFD"}, ""},
		{"invalid", bytesOf("\xff\xc3\x28\xf0\x9fa"), nil, []string{"\uFFFD", "", "\uFFFD(", "", "", "\uFFFDa", ""}, ""},
		{"special and unknown", []int32{'a', 256, 9999, -1, 'b'}, nil, []string{"a", "", "", "", "b", ""}, ""},
		{"stop", bytesOf("aENDb"), []string{"END"}, []string{"a", "", "", "", "", ""}, "END"},
		{"almost", bytesOf("aENxEN"), []string{"END"}, []string{"a", "", "", "ENx", "", "", "EN"}, ""},
		{"overlap", bytesOf("aababc"), []string{"ababc"}, []string{"", "a", "", "", "", "", ""}, "ababc"},
		{"first to end wins", bytesOf("abcd"), []string{"abcd", "bc"}, []string{"", "", "a", "", ""}, "bc"},
		{"longest of one end", bytesOf("abc"), []string{"c", "abc", "bc"}, []string{"", "", "", ""}, "abc"},
		{"across long tokens", []int32{258, 257, 263, 'x'}, []string{"b stop"}, []string{"aba", "a", "", "", ""}, "b stop"},
		{"stop of two bytes", bytesOf("né!"), []string{"é"}, []string{"n", "", "", "", ""}, "é"},
		{"flush decides", bytesOf("é\xc3"), []string{"é\uFFFD"}, []string{"", "", "", ""}, "é\uFFFD"},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := NewDetok(words, DetokOptions{Stop: c.stop})
			var got []string
			for _, id := range c.tokens {
				text, _ := d.Push(id)
				got = append(got, string(text))
			}
			got = append(got, string(d.Flush()))
			match := d.stop
			if !slices.Equal(got, c.want) || match != c.match {
				t.Errorf("got %q, stopped by %q; want %q, %q", got, match, c.want, c.match)
			}
		})
	}
	d := NewDetok(words, DetokOptions{KeepSpecial: true})
	if text, _ := d.Push(256); string(text) != "<special>" {
		t.Errorf("KeepSpecial gave %q", text)
	}
}

// model is the text of a token list by the book: all of it at once.
func model(tokens []int32, stops []string) (text string, stopped bool) {
	var raw []byte
	for _, id := range tokens {
		if !words.Special(id) {
			raw = append(raw, words.TokenBytes(id)...)
		}
	}
	for b := raw; len(b) > 0; {
		n, ok, _ := sequencePart(b)
		if ok {
			text += string(b[:n])
		} else {
			text += "\uFFFD"
		}
		b = b[n:]
	}
	for end := range len(text) + 1 {
		best := ""
		for _, s := range stops {
			if s != "" && strings.HasSuffix(text[:end], s) && len(s) > len(best) {
				best = s
			}
		}
		if best != "" {
			return text[:end-len(best)], true
		}
	}
	return text, false
}

// legs gives the text that a client sees when the tokens are cut into legs, each by a Detok of its own.
func legs(tokens []int32, stops []string, cuts []int) string {
	var out strings.Builder
	at := 0
	for i, cut := range append(slices.Clone(cuts), len(tokens)) {
		d := NewDetok(words, DetokOptions{Stop: stops})
		if d.PushAll(tokens[:at]) {
			return out.String()
		}
		for _, id := range tokens[at:cut] {
			text, stopped := d.Push(id)
			out.Write(text)
			if stopped {
				return out.String()
			}
		}
		if i == len(cuts) {
			out.Write(d.Flush())
		}
		at = cut
	}
	return out.String()
}

func randomTokens(rng *rand.Rand, n int) []int32 {
	pool := []int32{'a', 'b', 'a', 'b', 'E', 'N', 'D', ' ', 0xC3, 0xA9, 0xF0, 0x9F, 0x98, 0x80, 0xFF, 0xE2, 0x80, 256, 257, 258, 259, 260, 261, 262, 263, 264, 265, 5000}
	out := make([]int32, rng.IntN(n))
	for i := range out {
		out[i] = pool[rng.IntN(len(pool))]
	}
	return out
}

func TestDetokIsAFunctionOfTheTokens(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	stopSets := [][]string{nil, {"END"}, {"ab"}, {"aba", "bab"}, {"é"}, {"\uFFFD"}, {"abab", "ba", "stop now "}, {" ", "END", "😀"}, {"aab", "aaab", "b\uFFFD"}}
	for i := range 20_000 {
		tokens, stops := randomTokens(rng, 24), stopSets[i%len(stopSets)]
		cuts := make([]int, rng.IntN(5))
		for j := range cuts {
			cuts[j] = rng.IntN(len(tokens) + 1)
		}
		slices.Sort(cuts)
		want, _ := model(tokens, stops)
		if got := legs(tokens, stops, cuts); got != want {
			t.Fatalf("tokens %v, stops %q, cuts %v: got %q, want %q", tokens, stops, cuts, got, want)
		}
	}
}

func FuzzDetok(f *testing.F) {
	f.Add([]byte("aENDb"), "END", "b", uint8(2))
	f.Add([]byte("\xf0\x9f\x98\x80é"), "é", "\xff", uint8(1))
	f.Fuzz(func(t *testing.T, b []byte, s1, s2 string, cut uint8) {
		tokens := make([]int32, len(b))
		for i, c := range b {
			tokens[i] = int32(c)
			if c >= 0xF8 {
				tokens[i] = 256 + int32(c-0xF8)
			}
		}
		stops := []string{strings.ToValidUTF8(s1, "?"), strings.ToValidUTF8(s2, "?")}
		want, _ := model(tokens, stops)
		got := legs(tokens, stops, []int{min(int(cut), len(tokens))})
		if got != want || !utf8.ValidString(got) {
			t.Fatalf("got %q, want %q", got, want)
		}
	})
}

func TestSequenceAgreesWithPython(t *testing.T) {
	// bytes.decode(errors="replace")
	for in, want := range map[string]string{
		"\xc0\xaf":         "\uFFFD\uFFFD",
		"\xe0\x80\x80":     "\uFFFD\uFFFD\uFFFD",
		"\xed\xa0\x80":     "\uFFFD\uFFFD\uFFFD",
		"\xf0\x80\x80\x80": "\uFFFD\uFFFD\uFFFD\uFFFD",
		"\xf4\x90\x80\x80": "\uFFFD\uFFFD\uFFFD\uFFFD",
		"\xe2\x82":         "\uFFFD",
		"\xe2\x82a":        "\uFFFDa",
		"\xf0\x9f\x98é":    "\uFFFDé",
		"\xf0\x9f\x98\x80": "😀",
	} {
		var got string
		if err := json.Unmarshal(AppendString(nil, in), &got); err != nil || got != want {
			t.Errorf("%q: %q %v, want %q", in, got, err, want)
		}
	}
}

func FuzzAppendString(f *testing.F) {
	f.Add("a\"b\\c\n\r\t\x00\x7f\u2028\u2029é😀\xff")
	f.Fuzz(func(t *testing.T, s string) {
		b := AppendString(nil, s)
		var got string
		if err := json.Unmarshal(b, &got); err != nil {
			t.Fatalf("%q: %v", b, err)
		}
		if utf8.ValidString(s) && got != s {
			t.Fatalf("%q came back as %q", s, got)
		}
		if string(AppendString(nil, []byte(s))) != string(b) {
			t.Fatal("bytes and string differ")
		}
	})
}
