package tokenizer

import (
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

// metadata is a tokenizer's metadata held in maps.
type metadata struct {
	strs  map[string]string
	lists map[string][]string
	ints  map[string][]int64
	uints map[string]uint64
	bools map[string]bool
}

func (m metadata) Floats(string) ([]float64, bool) { return nil, false }

func (m metadata) String(k string) (string, bool)    { v, ok := m.strs[k]; return v, ok }
func (m metadata) Strings(k string) ([]string, bool) { v, ok := m.lists[k]; return v, ok }
func (m metadata) Ints(k string) ([]int64, bool)     { v, ok := m.ints[k]; return v, ok }
func (m metadata) Uint(k string) (uint64, bool)      { v, ok := m.uints[k]; return v, ok }
func (m metadata) Bool(k string) (bool, bool)        { v, ok := m.bools[k]; return v, ok }

// small is a vocabulary of all bytes, a few merges, and special tokens.
func small(pre string) metadata {
	m := metadata{
		strs:  map[string]string{"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre},
		lists: map[string][]string{},
		ints:  map[string][]int64{},
		uints: map[string]uint64{"tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.eot_token_id": 1},
		bools: map[string]bool{},
	}
	tokens, types := []string{"<s>", "</s>", "<sep>"}, []int64{3, 3, 4}
	written := make([]string, 256)
	next := rune(0x100) // GPT-2's alphabet
	for b := range 256 {
		written[b] = string(rune(b))
		if b <= ' ' || b >= 0x7F && b <= 0xA0 || b == 0xAD {
			written[b] = string(next)
			next++
		}
	}
	tokens = append(tokens, written...)
	merges := []string{"a a", "aa aa", "t h", "th e", "Ġ the", "aaaa a", "l o", "lo l", "o l", "Ġ Ġ", "ĠĠ ĠĠ", "e r", "h e"}
	for _, s := range merges {
		a, b, _ := strings.Cut(s, " ")
		tokens = append(tokens, a+b)
	}
	for len(types) < len(tokens) {
		types = append(types, 1)
	}
	m.lists["tokenizer.ggml.tokens"], m.lists["tokenizer.ggml.merges"] = tokens, merges
	m.ints["tokenizer.ggml.token_type"] = types
	return m
}

func newSmall(t testing.TB, pre string) *Tokenizer {
	t.Helper()
	tok, err := New(small(pre))
	if err != nil {
		t.Fatal(err)
	}
	return tok
}

func TestMarks(t *testing.T) {
	m := small("default")
	m.bools["tokenizer.ggml.add_bos_token"] = true
	m.bools["tokenizer.ggml.add_eos_token"] = true
	tok, err := New(m)
	if err != nil {
		t.Fatal(err)
	}
	encode := func(text string, o EncodeOptions) []int32 {
		ids, err := tok.Encode(nil, text, o)
		if err != nil {
			t.Fatal(err)
		}
		return ids
	}
	id := func(text string) int32 {
		ids := encode(text, EncodeOptions{})
		if len(ids) != 1 {
			t.Fatalf("Encode(%q) = %v", text, ids)
		}
		return ids[0]
	}
	a := id("a")
	for _, c := range []struct {
		text string
		o    EncodeOptions
		want []int32
	}{
		{"a", EncodeOptions{}, []int32{a}},
		{"a", EncodeOptions{AddMarks: true}, []int32{0, a, 1}},
		{"", EncodeOptions{AddMarks: true}, []int32{0, 1}},
		{"<s>a<sep></s>", EncodeOptions{ParseSpecial: true}, []int32{0, a, 2, 1}},
		{"a<s", EncodeOptions{ParseSpecial: true}, []int32{a, id("<"), id("s")}},
	} {
		if got := encode(c.text, c.o); !slices.Equal(got, c.want) {
			t.Errorf("Encode(%q, %+v) = %v, want %v", c.text, c.o, got, c.want)
		}
	}
	if got := encode("<s>", EncodeOptions{}); slices.Contains(got, 0) {
		t.Errorf("Encode without ParseSpecial made a special token: %v", got)
	}
	if got := string(tok.Decode(nil, []int32{0, a, 2, 1, -1, 1 << 30}, false)); got != "a<sep>" {
		t.Errorf("Decode = %q: control tokens are left out, user-defined ones stay", got)
	}
	if got := tok.EndTokens(); !slices.Equal(got, []int32{1}) {
		t.Errorf("EndTokens = %v", got)
	}
	if _, err := tok.Encode(nil, strings.Repeat("a", TextBytesMax+1), EncodeOptions{}); err == nil {
		t.Error("text over the limit was encoded")
	}
}

func TestNewRefuses(t *testing.T) {
	for name, breakIt := range map[string]func(m metadata){
		"model":  func(m metadata) { m.strs["tokenizer.ggml.model"] = "llama" },
		"pre":    func(m metadata) { m.strs["tokenizer.ggml.pre"] = "klingon" },
		"tokens": func(m metadata) { delete(m.lists, "tokenizer.ggml.tokens") },
		"types":  func(m metadata) { m.ints["tokenizer.ggml.token_type"] = []int64{1} },
		"merge":  func(m metadata) { m.lists["tokenizer.ggml.merges"] = []string{"aa"} },
		"pair":   func(m metadata) { m.lists["tokenizer.ggml.merges"] = []string{"q q"} },
		"eos":    func(m metadata) { m.uints["tokenizer.ggml.eos_token_id"] = 1 << 40 },
	} {
		t.Run(name, func(t *testing.T) {
			m := small("gpt-2")
			breakIt(m)
			if tok, err := New(m); err == nil {
				t.Fatalf("New made %v", tok)
			}
		})
	}
}

func FuzzRoundTrip(f *testing.F) {
	toks := map[string]*Tokenizer{}
	for _, pre := range []string{"gpt-2", "smollm", "llama-bpe", "qwen2"} {
		toks[pre] = newSmall(f, pre)
	}
	for _, s := range []string{"", "Hello the world 123", "a\r\n\n  b", "'s 'RE 'ſ", "<s>the</s>", "\xff\xfe\xc3", strings.Repeat("aaath", 40), "😀\u2028 \u00a0x"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		for pre, tok := range toks {
			for _, o := range []EncodeOptions{{}, {ParseSpecial: true}} {
				ids, err := tok.Encode(nil, text, o)
				if err != nil {
					t.Fatal(err)
				}
				if got := string(tok.Decode(nil, ids, true)); got != text {
					t.Fatalf("%s: Decode(Encode(%q)) = %q (UTF-8: %v)", pre, text, got, utf8.ValidString(text))
				}
			}
		}
	})
}

// FuzzNew gives New what a hostile model file may hold.
func FuzzNew(f *testing.F) {
	f.Add("a\nb\nab\n<s>", "a b", uint8(3), uint64(3), "ab <s> \xff")
	f.Add("Ġ\nt\nĠt", "Ġ t\nx", uint8(0), uint64(1<<40), " t")
	f.Fuzz(func(t *testing.T, tokens, merges string, special uint8, eos uint64, text string) {
		m := small("smollm")
		list := strings.Split(tokens, "\n")
		types := make([]int64, len(list))
		for i := range types {
			types[i] = 1
		}
		if int(special) < len(types) {
			types[special] = 3 + int64(special)%2
		}
		m.lists["tokenizer.ggml.tokens"], m.ints["tokenizer.ggml.token_type"] = list, types
		m.lists["tokenizer.ggml.merges"] = strings.FieldsFunc(merges, func(r rune) bool { return r == '\n' })
		m.uints = map[string]uint64{"tokenizer.ggml.eos_token_id": eos}
		tok, err := New(m)
		if err != nil {
			return
		}
		ids, err := tok.Encode(nil, text, EncodeOptions{AddMarks: true, ParseSpecial: true})
		if err != nil {
			t.Fatal(err)
		}
		for _, id := range ids {
			if id < 0 || int(id) >= tok.Size() {
				t.Fatalf("token %d of %d", id, tok.Size())
			}
		}
		tok.Decode(nil, ids, true)
	})
}

// SmolLM2's vocabulary has no token for some control characters and for bytes that no text contains; they are dropped,
// as Hugging Face drops them. All other text comes back as it was.
func TestSmolLMRoundTrip(t *testing.T) {
	tok := realModel(t)
	known := func(text string) string {
		var b strings.Builder
		for _, c := range []byte(text) {
			if ids, _ := tok.Encode(nil, string([]byte{c}), EncodeOptions{}); len(ids) > 0 {
				b.WriteByte(c)
			}
		}
		return b.String()
	}
	for _, row := range readGolden(t).Rows {
		ids, err := tok.Encode(nil, row.Text, EncodeOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if got := string(tok.Decode(nil, ids, false)); got != known(row.Text) {
			t.Errorf("Decode(Encode(%q)) = %q", row.Text, got)
		}
	}
}

func BenchmarkEncode(b *testing.B) {
	tok := realModel(b)
	text := strings.Repeat("The quick brown fox jumps over the lazy dog, 42 times a day. It's what foxes do!\n", 100)
	for name, s := range map[string]string{"prose": text, "hostile": strings.Repeat("ab", len(text)/2)} {
		b.Run(name, func(b *testing.B) {
			b.SetBytes(int64(len(s)))
			b.ReportAllocs()
			var ids []int32
			for b.Loop() {
				ids, _ = tok.Encode(ids[:0], s, EncodeOptions{ParseSpecial: true})
			}
		})
	}
}

// Llama 3 takes a piece that is a token as it is, whether or not its merges lead there.
func TestWholePieces(t *testing.T) {
	m := small("llama-bpe")
	m.lists["tokenizer.ggml.tokens"] = append(m.lists["tokenizer.ggml.tokens"], "xyz")
	m.ints["tokenizer.ggml.token_type"] = append(m.ints["tokenizer.ggml.token_type"], 1)
	tok, err := New(m)
	if err != nil {
		t.Fatal(err)
	}
	ids, err := tok.Encode(nil, "xyz", EncodeOptions{AddMarks: true})
	if want := []int32{0, int32(tok.Size() - 1)}; err != nil || !slices.Equal(ids, want) {
		t.Errorf("got %v, %v, want %v: Llama 3 files ask for the beginning token unless they say otherwise", ids, err, want)
	}
}
