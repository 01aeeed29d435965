package bpe

import (
	"hash/maphash"
	"math/bits"
	"strings"
	"sync/atomic"
)

// shortMax is the length in bytes of the longest word that is its own key.
const shortMax = 15

// shortKey packs a word of at most shortMax bytes, and its length, into two numbers.
func shortKey(s string) (lo, hi uint64) {
	n := len(s)
	switch {
	case n >= 8:
		lo = load64(s, 0)
		hi = load64(s, n-8) >> (8 * (16 - uint(n)))
	case n >= 4:
		lo = load32(s, 0) | load32(s, n-4)<<(8*uint(n-4))
	case n > 0:
		lo = uint64(s[0]) | uint64(s[n>>1])<<(8*uint(n>>1)) | uint64(s[n-1])<<(8*uint(n-1))
	}
	return lo, hi | uint64(n)<<56
}

func load64(s string, i int) uint64 {
	s = s[i : i+8]
	return uint64(s[0]) | uint64(s[1])<<8 | uint64(s[2])<<16 | uint64(s[3])<<24 |
		uint64(s[4])<<32 | uint64(s[5])<<40 | uint64(s[6])<<48 | uint64(s[7])<<56
}

func load32(s string, i int) uint64 {
	s = s[i : i+4]
	return uint64(s[0]) | uint64(s[1])<<8 | uint64(s[2])<<16 | uint64(s[3])<<24
}

func mix(lo, hi uint64) uint64 {
	a, b := bits.Mul64(lo^0xA0761D6478BD642F, hi^0xE7037ED1A0B428DB)
	return a ^ b
}

// words maps the short words that are a token to it: open addressing, at most half full, keys inside.
type words struct {
	slots []wordSlot
	mask  uint64
}

type wordSlot struct {
	lo, hi uint64
	id     uint32
}

func newWords(n int) words {
	size := 16
	for size < 2*n {
		size *= 2
	}
	w := words{slots: make([]wordSlot, size), mask: uint64(size - 1)}
	for i := range w.slots {
		w.slots[i].id = noToken
	}
	return w
}

func (w *words) set(word string, id uint32) {
	lo, hi := shortKey(word)
	for i := mix(lo, hi) & w.mask; ; i = (i + 1) & w.mask {
		if s := &w.slots[i]; s.id == noToken {
			*s = wordSlot{lo, hi, id}
			return
		}
	}
}

// get returns noToken where the word is no token.
func (w *words) get(lo, hi uint64) uint32 {
	for i := mix(lo, hi) & w.mask; ; i = (i + 1) & w.mask {
		s := &w.slots[i]
		if s.id == noToken || s.lo == lo && s.hi == hi {
			return s.id
		}
	}
}

// The cache of words that are several tokens.
const (
	cachedWordMax = 48      // bytes
	cacheSlots    = 1 << 15 // at most 8 MB with words of English, 16 MB at the worst
)

// wordCache keeps the tokens of words that were met: one slot a hash, the last word wins. Readers and writers take no
// lock; what a slot points to does not change.
type wordCache struct {
	slots []atomic.Pointer[cachedWord]
	seed  maphash.Seed
}

type cachedWord struct {
	word string
	ids  []uint32
}

func newWordCache() wordCache {
	return wordCache{slots: make([]atomic.Pointer[cachedWord], cacheSlots), seed: maphash.MakeSeed()}
}

// hash takes the key of a short word, which the caller has already.
func (c *wordCache) hash(word string, lo, hi uint64) uint64 {
	if hi != 0 {
		return mix(lo, hi)
	}
	return maphash.String(c.seed, word)
}

func (c *wordCache) get(hash uint64, word string) []uint32 {
	if e := c.slots[hash%cacheSlots].Load(); e != nil && e.word == word {
		return e.ids
	}
	return nil
}

func (c *wordCache) put(hash uint64, word string, ids []uint32) {
	c.slots[hash%cacheSlots].Store(&cachedWord{strings.Clone(word), append([]uint32(nil), ids...)})
}
