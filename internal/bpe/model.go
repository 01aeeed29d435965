package bpe

import (
	"fmt"
	"unicode/utf8"
)

// model is the vocabulary and its merges: what turns a piece of text, a word mostly, into tokens.
type model struct {
	pairs pairs
	words words
	cache wordCache
	// whole holds what is taken as it is wherever it is a piece, nil where every piece is merged (ignore_merges).
	whole map[string]uint32

	// characters says that the first symbols are characters rather than bytes.
	characters bool
	bytes      [256]uint32 // single bytes, or the tokens of byte fallback; noToken where there is none
	ascii      [utf8.RuneSelf]uint32
	runes      map[rune]uint32
	fallback   bool // characters without a token become bytes
	unknown    uint32
	fuse       bool // neighbouring unknown characters are one unknown token
	cuts       *cuts
}

// encode appends the tokens of a piece of normalized text.
func (m *model) encode(dst []uint32, piece string, w *workspace) []uint32 {
	if !m.characters || m.cuts == nil {
		return m.encodeWord(dst, piece, w)
	}
	for piece != "" {
		n := m.cuts.next(piece)
		dst = m.encodeWord(dst, piece[:n], w)
		piece = piece[n:]
	}
	return dst
}

func (m *model) encodeWord(dst []uint32, word string, w *workspace) []uint32 {
	var lo, hi uint64
	if len(word) <= shortMax {
		lo, hi = shortKey(word)
		if id := m.words.get(lo, hi); id != noToken {
			return append(dst, id)
		}
	}
	if len(word) > cachedWordMax {
		return m.encodeLong(dst, word, w)
	}
	hash := m.cache.hash(word, lo, hi)
	if ids := m.cache.get(hash, word); ids != nil {
		return append(dst, ids...)
	}
	start := len(dst)
	dst = m.encodeLong(dst, word, w)
	if len(dst) > start {
		m.cache.put(hash, word, dst[start:])
	}
	return dst
}

// encodeLong is encodeWord without the tables of what is known already.
func (m *model) encodeLong(dst []uint32, word string, w *workspace) []uint32 {
	if m.whole != nil {
		if id, ok := m.whole[word]; ok {
			return append(dst, id)
		}
	}
	w.ids = w.ids[:0]
	if m.characters {
		m.loadCharacters(w, word)
	} else {
		m.loadBytes(w, word)
	}
	return m.merge(dst, w)
}

// loadBytes makes a symbol of each byte. One that the vocabulary has no token for is dropped, as Hugging Face's BPE does
// without an unknown token.
func (m *model) loadBytes(w *workspace, word string) {
	fused := false
	for i := range len(word) {
		id := m.bytes[word[i]]
		if id != noToken {
			w.ids = append(w.ids, id)
			fused = false
			continue
		}
		if m.unknown == noToken || m.fuse && fused {
			continue
		}
		w.ids = append(w.ids, m.unknown)
		fused = true
	}
}

// loadCharacters makes a symbol of each character; of its bytes where it has no token and there is byte fallback; else
// of the unknown token.
func (m *model) loadCharacters(w *workspace, word string) {
	fused := false
	for i := 0; i < len(word); {
		id, n := m.character(word, i)
		if id != noToken {
			w.ids = append(w.ids, id)
			fused = false
		} else if m.fallback {
			for _, b := range []byte(word[i : i+n]) {
				w.ids = append(w.ids, m.bytes[b])
			}
			fused = false
		} else if m.unknown != noToken && !(m.fuse && fused) {
			w.ids = append(w.ids, m.unknown)
			fused = true
		}
		i += n
	}
}

// character returns the token and the length of the character at s[i].
func (m *model) character(s string, i int) (id uint32, n int) {
	if c := s[i]; c < utf8.RuneSelf {
		return m.ascii[c], 1
	}
	r, n := utf8.DecodeRuneInString(s[i:])
	if r == utf8.RuneError && n == 1 {
		return noToken, 1
	}
	if id, ok := m.runes[r]; ok {
		return id, n
	}
	return noToken, n
}

// finish builds what is derived from the vocabulary: which tokens are whole words, and where text may be cut.
func (m *model) finish(vocab map[string]uint32, merges [][2]string) {
	m.cache = newWordCache()
	if m.characters {
		m.cuts = newCuts(m, merges)
	}
	m.words = newWords(len(vocab))
	w := new(workspace)
	var ids []uint32
	for word, id := range vocab {
		if word == "" || len(word) > shortMax {
			continue
		}
		if m.whole == nil {
			if m.characters && m.cuts != nil && m.cuts.next(word) < len(word) {
				continue
			}
			if ids = m.encodeLong(ids[:0], word, w); len(ids) != 1 || ids[0] != id {
				continue // its merges lead elsewhere
			}
		}
		m.words.set(word, id)
	}
}

// setBytes fills in the tokens of single bytes of a byte-level vocabulary.
func (m *model) setBytes(vocab map[string]uint32) {
	for b := range m.bytes {
		m.bytes[b] = noToken
		if id, ok := vocab[string([]byte{byte(b)})]; ok {
			m.bytes[b] = id
		}
	}
}

// setCharacters fills in the tokens of single characters, and of bytes where fallback is wanted.
func (m *model) setCharacters(vocab map[string]uint32, fallback bool) error {
	m.characters = true
	m.runes = map[rune]uint32{}
	for c := range m.ascii {
		m.ascii[c] = noToken
	}
	for text, id := range vocab {
		r, n := utf8.DecodeRuneInString(text)
		if n == 0 || n != len(text) || r == utf8.RuneError && n == 1 {
			continue
		}
		if r < utf8.RuneSelf {
			m.ascii[r] = id
		} else {
			m.runes[r] = id
		}
	}
	if !fallback {
		return nil
	}
	m.fallback = true
	for b := range m.bytes {
		id, ok := vocab[fmt.Sprintf("<0x%02X>", b)]
		if !ok {
			return fmt.Errorf("%w: byte_fallback without a token <0x%02X>", ErrUnsupported, b)
		}
		m.bytes[b] = id
	}
	return nil
}
