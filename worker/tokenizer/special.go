package tokenizer

import (
	"cmp"
	"slices"
	"strings"
)

// specials finds special tokens in text: the leftmost, of several at one place the longest.
type specials struct {
	firsts  string // the bytes they begin with
	byFirst [256][]special
	longest int
}

type special struct {
	text string
	id   int32
}

func newSpecials(ids []int32, pieces [][]byte) specials {
	var s specials
	for _, id := range ids {
		text := string(pieces[id])
		if text == "" {
			continue
		}
		first := text[0]
		if len(s.byFirst[first]) == 0 {
			s.firsts += string([]byte{first})
		}
		s.byFirst[first] = append(s.byFirst[first], special{text, id})
		s.longest = max(s.longest, len(text))
	}
	for _, list := range s.byFirst {
		slices.SortStableFunc(list, func(a, b special) int { return cmp.Compare(len(b.text), len(a.text)) })
	}
	return s
}

// find returns where the first special token of text begins and which it is, or -1.
func (s *specials) find(text string) (at int, id int32) {
	if len(s.firsts) == 1 { // nearly always '<'
		return s.findByte(text)
	}
	for i := range len(text) {
		for _, sp := range s.byFirst[text[i]] {
			if strings.HasPrefix(text[i:], sp.text) {
				return i, sp.id
			}
		}
	}
	return -1, -1
}

func (s *specials) findByte(text string) (at int, id int32) {
	for i := 0; i < len(text); i++ {
		j := strings.IndexByte(text[i:], s.firsts[0])
		if j < 0 {
			break
		}
		i += j
		for _, sp := range s.byFirst[s.firsts[0]] {
			if strings.HasPrefix(text[i:], sp.text) {
				return i, sp.id
			}
		}
	}
	return -1, -1
}
