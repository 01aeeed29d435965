package bpe

import "unicode/utf8"

// cuts says where text may be cut before it is merged without any change to the tokens: between two characters a and b
// where no merge joins a token that ends in a with one that begins with b. A token over such a place could only come of
// such a merge. SentencePiece's vocabularies have no pre-tokenizer: without cuts, all of a prompt is one word.
type cuts struct {
	m     *model
	ascii [utf8.RuneSelf][2]uint64 // bits: the pair merges
	other pairs                    // of characters, where either is not ASCII
}

// newCuts returns nil where text must be merged whole: neighbouring unknown characters are fused.
func newCuts(m *model, merges [][2]string) *cuts {
	if !m.fallback && m.unknown != noToken && m.fuse {
		return nil
	}
	c := &cuts{m: m, other: newPairs(len(merges))}
	for _, pair := range merges {
		a, na := utf8.DecodeLastRuneInString(pair[0])
		b, nb := utf8.DecodeRuneInString(pair[1])
		if a == utf8.RuneError && na < 2 || b == utf8.RuneError && nb < 2 {
			return nil
		}
		if a < utf8.RuneSelf && b < utf8.RuneSelf {
			c.ascii[a][b>>6] |= 1 << (b & 63)
		} else {
			c.other.set(pairKey(uint32(a), uint32(b)), 0)
		}
	}
	if m.fallback && c.joinsBytes(merges) {
		return nil
	}
	return c
}

// joinsBytes tells whether a merge has a token of byte fallback in it: its text is not what it stands for.
func (c *cuts) joinsBytes(merges [][2]string) bool {
	for _, pair := range merges {
		for _, text := range pair {
			if len(text) == 6 && text[:3] == "<0x" && text[5] == '>' {
				return true
			}
		}
	}
	return false
}

// next returns where the first part of s ends.
func (c *cuts) next(s string) int {
	a, n := utf8.DecodeRuneInString(s)
	i := n
	for i < len(s) {
		b, n := rune(s[i]), 1
		if b >= utf8.RuneSelf {
			b, n = utf8.DecodeRuneInString(s[i:])
		}
		if a < utf8.RuneSelf && b < utf8.RuneSelf {
			if c.ascii[a][b>>6]&(1<<(b&63)) == 0 {
				return i
			}
		} else if c.other.get(uint32(a), uint32(b)) == noMerge {
			return i
		}
		a = b
		i += n
	}
	return len(s)
}
