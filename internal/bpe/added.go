package bpe

import (
	"strings"
	"unicode"
	"unicode/utf8"
)

// Added is a token that text is split at before anything else happens to it: a special token, mostly.
type Added struct {
	ID   uint32
	Text string
	// LeftStrip and RightStrip take the white space on that side with the token; SingleWord wants no word characters beside it.
	LeftStrip, RightStrip, SingleWord bool
	// Normalized says that the token is looked for in normalized text.
	Normalized bool
	// Special tokens are left out of decoded text.
	Special bool
}

// addedSet finds the leftmost added token of a text, of several at one place the longest.
type addedSet struct {
	tokens []Added
	firsts [256]bool
	only   byte // the one byte that all begin with
	single bool
	nodes  []addedNode // a trie; node 0 is the root
}

type addedNode struct {
	keys  string // next bytes
	next  []int32
	token int32 // -1: none ends here
}

func newAddedSet(tokens []Added) *addedSet {
	s := &addedSet{nodes: []addedNode{{token: -1}}}
	for _, t := range tokens {
		if t.Text == "" {
			continue
		}
		s.firsts[t.Text[0]] = true
		at := int32(0)
		for i := range len(t.Text) {
			k := strings.IndexByte(s.nodes[at].keys, t.Text[i])
			if k < 0 {
				s.nodes = append(s.nodes, addedNode{token: -1})
				s.nodes[at].keys += t.Text[i : i+1]
				s.nodes[at].next = append(s.nodes[at].next, int32(len(s.nodes)-1))
				k = len(s.nodes[at].keys) - 1
			}
			at = s.nodes[at].next[k]
		}
		s.nodes[at].token = int32(len(s.tokens))
		s.tokens = append(s.tokens, t)
	}
	if keys := s.nodes[0].keys; len(keys) == 1 { // nearly always '<'
		s.only, s.single = keys[0], true
	}
	return s
}

// find returns the first added token at or behind from, and where it ends; nil where there is none. open says that on the
// way a token could have begun that the text is too short for: with more text the answer might be another.
func (s *addedSet) find(text string, from int) (t *Added, start, end int, open bool) {
	if len(s.tokens) == 0 {
		return nil, 0, 0, false
	}
	for i := from; i < len(text); i++ {
		if s.single {
			n := strings.IndexByte(text[i:], s.only)
			if n < 0 {
				break
			}
			i += n
		} else if !s.firsts[text[i]] {
			continue
		}
		t, end, cut := s.match(text, i)
		open = open || cut
		if t != nil {
			return t, i, end, open
		}
	}
	return nil, 0, 0, open
}

// match returns the longest token at text[i:], and whether one that the text is too short for could begin there.
func (s *addedSet) match(text string, i int) (t *Added, end int, open bool) {
	at := int32(0)
	for {
		if i == len(text) {
			return t, end, s.nodes[at].keys != ""
		}
		k := strings.IndexByte(s.nodes[at].keys, text[i])
		if k < 0 {
			return t, end, false
		}
		at = s.nodes[at].next[k]
		i++
		if n := s.nodes[at].token; n >= 0 {
			t, end = &s.tokens[n], i
		}
	}
}

// finder goes through the added tokens of a text.
type finder struct {
	set    *addedSet
	text   string
	at     int // where the last token ended, its white space included
	search int // where it ended without
	open   bool
}

// next returns the next added token that is to be taken and the text between it and the one before; nil, and the rest of
// the text, where there is none. A token that takes the white space behind it does not hide one that begins there: both
// are taken, as by Hugging Face's.
func (f *finder) next() (t *Added, before string) {
	var start, end int
	for {
		var open bool
		t, start, end, open = f.set.find(f.text, f.search)
		f.open = f.open || open
		if t == nil {
			return nil, f.text[f.at:]
		}
		f.search = end
		if !t.SingleWord || !wordBefore(f.text[:start]) && !wordBehind(f.text[end:]) {
			break
		}
	}
	if t.LeftStrip {
		start = max(f.at, len(strings.TrimRightFunc(f.text[:start], unicode.IsSpace)))
	}
	if t.RightStrip {
		end = len(f.text) - len(strings.TrimLeftFunc(f.text[end:], unicode.IsSpace))
	}
	if start > f.at {
		before = f.text[f.at:start]
	}
	f.at = end
	return t, before
}

func wordBefore(s string) bool {
	r, _ := utf8.DecodeLastRuneInString(s)
	return s != "" && wordRune(r)
}

func wordBehind(s string) bool {
	r, _ := utf8.DecodeRuneInString(s)
	return s != "" && wordRune(r)
}

// wordRune is \w.
func wordRune(r rune) bool {
	return unicode.IsLetter(r) || unicode.IsMark(r) || unicode.Is(unicode.Nd, r) || unicode.Is(unicode.Nl, r) || unicode.Is(unicode.Pc, r) ||
		unicode.Is(unicode.Other_Alphabetic, r) || unicode.Is(unicode.Join_Control, r)
}
