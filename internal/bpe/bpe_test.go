package bpe

import (
	"encoding/json"
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
)

func TestHeapMergesAsScanDoes(t *testing.T) {
	eachFamily(t, func(t *testing.T, _ *family, tok *Tokenizer) {
		m := &tok.model
		rng := rand.New(rand.NewPCG(1, 2))
		letters := "aaaathelor the  ing"
		for range 300 {
			var b strings.Builder
			for range 2 + rng.IntN(150) {
				b.WriteByte(letters[rng.IntN(len(letters))])
			}
			w := &workspace{}
			loadInto := func() {
				w.ids = w.ids[:0]
				if m.characters {
					m.loadCharacters(w, b.String())
				} else {
					m.loadBytes(w, b.String())
				}
			}
			loadInto()
			scan := m.mergeScan(nil, w)
			loadInto()
			if heap := m.mergeHeap(nil, w); !slices.Equal(scan, heap) {
				t.Fatalf("%q: scan %v, heap %v", b.String(), scan, heap)
			}
		}
	})
}

// Text may be cut where EncodeCut says so, whatever is put behind it.
func TestCutsAreIndependent(t *testing.T) {
	eachFamily(t, func(t *testing.T, fam *family, tok *Tokenizer) {
		rng := rand.New(rand.NewPCG(3, 4))
		var added []string
		for _, a := range slices.Concat(tok.raw.tokens, tok.normalized.tokens) {
			added = append(added, a.Text)
		}
		tok.context = false // the one added token that looks around is not among those that are cut at
		for range 300 {
			head, tail := randomText(rng, added), randomText(rng, added)
			if rng.IntN(3) == 0 { // an added token that the cut goes through
				whole := added[rng.IntN(len(added))]
				at := rng.IntN(len(whole))
				head, tail = head+whole[:at], whole[at:]+tail
			}
			ids, cut := tok.EncodeCut(nil, head, Options{Marks: true})
			_, behind := tok.Marks()
			if len(behind) > 0 || cut.Text == 0 {
				continue
			}
			whole := tok.Encode(nil, head+tail, Options{Marks: true})
			parts := tok.Encode(ids[:cut.Tokens:cut.Tokens], head[cut.Text:]+tail, Options{Marks: true, Inside: true})
			if strings.Contains(head[cut.Text:]+tail, "word") {
				continue
			}
			if !slices.Equal(whole, parts) {
				t.Fatalf("%s: %q cut at %d, then %q:\nwhole %v\nparts %v", fam.Name, head, cut.Text, tail, whole, parts)
			}
		}
	})
}

// The pieces of every scanner are all of the text, in order, and none is empty.
func FuzzScanners(f *testing.F) {
	for _, s := range []string{"", "Hello the world 123", "a\r\n\n  b", "'s 'RE 'ſ", "\xff\xfe\xc3 \xe4\xb8", strings.Repeat("aaath", 40), "😀\u2028 \u00a0x", "你好ぁ1234/\r\n", "\x00\x01abc"} {
		f.Add(s)
	}
	all := map[string]scanner{"digit": scanDigit, "digits3": scanDigits3, "number": scanNumber, "isolated": scanIsolated("ab"), "previous": scanMergedWithPrevious(" "), "next": scanMergedWithNext("▁")}
	for expression, s := range patterns {
		all[expression] = s
	}
	f.Fuzz(func(t *testing.T, text string) {
		for name, next := range all {
			for rest := text; rest != ""; {
				n := next(rest)
				if n < 1 || n > len(rest) {
					t.Fatalf("%s: a piece of %d bytes of %q", name, n, rest)
				}
				rest = rest[n:]
			}
		}
	})
}

// FuzzEncode gives every family any bytes at all.
func FuzzEncode(f *testing.F) {
	for _, s := range []string{"", "Hello <|im_end|> <left> x", "\xff\xfe<right>\n\n\n\n", strings.Repeat("ab ", 100), "你好\xe4\xb8", "▁▁a"} {
		f.Add(s)
	}
	var toks []*Tokenizer
	eachFamily(f, func(_ *testing.T, _ *family, tok *Tokenizer) { toks = append(toks, tok) })
	f.Fuzz(func(t *testing.T, text string) {
		for _, tok := range toks {
			ids, cut := tok.EncodeCut(nil, text, Options{Marks: true})
			if cut.Text > len(text) || cut.Tokens > len(ids) {
				t.Fatalf("%q: cut %+v of %d tokens", text, cut, len(ids))
			}
			if again := tok.Encode(nil, text, Options{Marks: true}); !slices.Equal(ids, again) {
				t.Fatalf("%q: %v, then %v", text, ids, again)
			}
		}
	})
}

func FuzzFromJSON(f *testing.F) {
	list, err := families()
	if err != nil {
		f.Fatal(err)
	}
	for i := range list {
		f.Add([]byte(list[i].Tokenizer), "the text <|im_end|>")
	}
	f.Add([]byte(`{"model":{"type":"BPE","vocab":{"a":0,"b":1,"ab":4294967295},"merges":["a b"]},"added_tokens":[{"id":7,"content":"x"}]}`), "ab x")
	f.Fuzz(func(_ *testing.T, file []byte, text string) {
		if tok, err := FromJSON(file); err == nil {
			tok.Encode(nil, text, Options{Marks: true})
		}
	})
}

func TestFromJSONRefuses(t *testing.T) {
	list, err := families()
	if err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(m map[string]any){
		"model":      func(m map[string]any) { m["model"].(map[string]any)["type"] = "Unigram" },
		"suffix":     func(m map[string]any) { m["model"].(map[string]any)["end_of_word_suffix"] = "</w>" },
		"dropout":    func(m map[string]any) { m["model"].(map[string]any)["dropout"] = 0.1 },
		"normalizer": func(m map[string]any) { m["normalizer"] = map[string]any{"type": "Lowercase"} },
		"replace": func(m map[string]any) {
			m["normalizer"] = map[string]any{"type": "Replace", "pattern": map[string]any{"Regex": "a"}}
		},
		"pre-tokenizer": func(m map[string]any) { m["pre_tokenizer"] = map[string]any{"type": "BertPreTokenizer"} },
		"expression": func(m map[string]any) {
			m["pre_tokenizer"] = map[string]any{"type": "Split", "behavior": "Isolated", "pattern": map[string]any{"Regex": `\w+`}}
		},
		"invert": func(m map[string]any) {
			m["pre_tokenizer"] = map[string]any{"type": "Split", "behavior": "Isolated", "invert": true, "pattern": map[string]any{"Regex": `\p{N}`}}
		},
		"behavior": func(m map[string]any) {
			m["pre_tokenizer"] = map[string]any{"type": "Split", "behavior": "Removed", "pattern": map[string]any{"String": " "}}
		},
		"post": func(m map[string]any) { m["post_processor"] = map[string]any{"type": "Other"} },
	} {
		var m map[string]any
		if err := json.Unmarshal(list[0].Tokenizer, &m); err != nil {
			t.Fatal(err)
		}
		change(m)
		b, err := json.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := FromJSON(b); !errors.Is(err, ErrUnsupported) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A Tokenizer is used by many at once, and text that was met before allocates nothing.
func TestManyAtOnce(t *testing.T) {
	eachFamily(t, func(t *testing.T, fam *family, tok *Tokenizer) {
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				for _, row := range fam.Rows {
					if got := tok.Encode(nil, row.Text, Options{Marks: true}); !slices.Equal(got, row.IDs) {
						t.Errorf("%q: got %v", row.Text, got)
						return
					}
				}
			})
		}
		wg.Wait()
	})
}

func TestKnownTextAllocatesNothing(t *testing.T) {
	eachFamily(t, func(t *testing.T, fam *family, tok *Tokenizer) {
		text := strings.Repeat("It's the quick, brown fox: 42 lazy dogs! ", 3)
		var dst []uint32
		if n := testing.AllocsPerRun(100, func() { dst = tok.Encode(dst[:0], text, Options{Marks: true}) }); n > 0.5 && !raceEnabled {
			t.Errorf("%s: %v allocations a text", fam.Name, n)
		}
	})
}
