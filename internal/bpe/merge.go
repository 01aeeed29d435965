package bpe

import (
	"fmt"
	"math"
	"sync"
)

// noMerge is the value of a pair that does not merge: behind every rank.
const noMerge = math.MaxUint64

// noToken is an id that no vocabulary has.
const noToken = math.MaxUint32

// A merge's value is its rank in the upper half and the id of what it makes in the lower: the least value is the merge
// to do next.
func mergeValue(rank, id uint32) uint64 { return uint64(rank)<<32 | uint64(id) }

func pairKey(left, right uint32) uint64 { return uint64(left)<<32 | uint64(right) }

// pairs maps pairs of ids to the values of their merges: open addressing, at most half full.
type pairs struct {
	slots []pairSlot
	shift uint
}

type pairSlot struct{ key, value uint64 }

// noKey marks an empty slot: no id is as large.
const noKey = math.MaxUint64

// spread is 2^64 divided by the golden ratio; the upper bits of its products are well spread.
const spread = 0x9E3779B97F4A7C15

func newPairs(n int) pairs {
	size, shift := 16, uint(60)
	for size < 2*n {
		size *= 2
		shift--
	}
	p := pairs{slots: make([]pairSlot, size), shift: shift}
	for i := range p.slots {
		p.slots[i].key = noKey
	}
	return p
}

func (p *pairs) home(key uint64) uint64 { return (key * spread) >> p.shift }

func (p *pairs) set(key, value uint64) {
	for i := p.home(key); ; i = (i + 1) & uint64(len(p.slots)-1) {
		if s := &p.slots[i]; s.key == key || s.key == noKey {
			*s = pairSlot{key, value}
			return
		}
	}
}

func (p *pairs) get(left, right uint32) uint64 {
	key := pairKey(left, right)
	for i := p.home(key); ; i = (i + 1) & uint64(len(p.slots)-1) {
		switch s := &p.slots[i]; s.key {
		case key:
			return s.value
		case noKey:
			return noMerge
		}
	}
}

// scanMax is the number of symbols up to which looking through all pairs for the best one beats keeping a heap of them.
// Nearly every piece of real text is shorter; the heap keeps hostile ones at O(n log n).
const scanMax = 64

// symbol is a token of the piece being merged, in a list linked by index. A dead symbol has the id noToken.
type symbol struct {
	id         uint32
	prev, next int32
}

// candidate is a merge that was possible when it was pushed: order is its rank, then its place. It is stale when either
// side has changed since.
type candidate struct {
	order           uint64
	left, right, id uint32
}

// workspace is what merging one piece needs beside the tables. They are pooled.
type workspace struct {
	ids     []uint32
	values  []uint64
	symbols []symbol
	heap    []candidate
	text    []byte // normalized text
	spare   []byte
}

// workspaceBytesMax is what a pooled workspace may keep: one hostile prompt shall not hold its memory for ever.
const workspaceBytesMax = 4 << 20

var workspaces = sync.Pool{New: func() any { return new(workspace) }}

func (w *workspace) release() {
	if cap(w.symbols)*12+cap(w.heap)*24+cap(w.text)+cap(w.spare) <= workspaceBytesMax {
		workspaces.Put(w)
	}
}

// merge appends what the symbols in w.ids merge to.
func (m *model) merge(dst []uint32, w *workspace) []uint32 {
	switch {
	case len(w.ids) < 2:
		return append(dst, w.ids...)
	case len(w.ids) <= scanMax:
		return m.mergeScan(dst, w)
	}
	return m.mergeHeap(dst, w)
}

// mergeScan merges the leftmost pair of lowest rank until none is left.
func (m *model) mergeScan(dst []uint32, w *workspace) []uint32 {
	ids, values := w.ids, w.values[:0]
	for i := range len(ids) - 1 {
		values = append(values, m.pairs.get(ids[i], ids[i+1]))
	}
	w.values = values
	for {
		best, at := uint64(noMerge), -1
		for i, v := range values {
			if v < best {
				best, at = v, i
			}
		}
		if at < 0 {
			return append(dst, ids...)
		}
		ids[at] = uint32(best)
		ids = append(ids[:at+1], ids[at+2:]...)
		values = append(values[:at], values[at+1:]...)
		if at < len(values) {
			values[at] = m.pairs.get(ids[at], ids[at+1])
		}
		if at > 0 {
			values[at-1] = m.pairs.get(ids[at-1], ids[at])
		}
	}
}

// mergeHeap gives what mergeScan gives, in O(n log n).
func (m *model) mergeHeap(dst []uint32, w *workspace) []uint32 {
	n := len(w.ids)
	w.symbols, w.heap = w.symbols[:0], w.heap[:0]
	for i, id := range w.ids {
		w.symbols = append(w.symbols, symbol{id: id, prev: int32(i) - 1, next: int32(i) + 1})
	}
	w.symbols[n-1].next = -1
	for i := range n - 1 {
		m.push(w, int32(i))
	}
	for len(w.heap) > 0 {
		c := w.pop()
		at := int32(uint32(c.order))
		left := &w.symbols[at]
		if left.id != c.left || left.next < 0 || w.symbols[left.next].id != c.right {
			continue
		}
		right := &w.symbols[left.next]
		left.id, right.id = c.id, noToken
		left.next = right.next
		if left.next >= 0 {
			w.symbols[left.next].prev = at
			m.push(w, at)
		}
		if left.prev >= 0 {
			m.push(w, left.prev)
		}
	}
	for i := int32(0); i >= 0; i = w.symbols[i].next {
		dst = append(dst, w.symbols[i].id)
	}
	return dst
}

// push adds the pair that begins at symbol at, when it merges.
func (m *model) push(w *workspace, at int32) {
	left, right := w.symbols[at].id, w.symbols[w.symbols[at].next].id
	value := m.pairs.get(left, right)
	if value == noMerge {
		return
	}
	w.heap = append(w.heap, candidate{order: value&^math.MaxUint32 | uint64(at), left: left, right: right, id: uint32(value)})
	h := w.heap
	for i := len(h) - 1; i > 0; {
		up := (i - 1) / 2
		if h[i].order >= h[up].order {
			break
		}
		h[i], h[up] = h[up], h[i]
		i = up
	}
}

func (w *workspace) pop() candidate {
	h := w.heap
	top := h[0]
	last := len(h) - 1
	h[0] = h[last]
	h = h[:last]
	w.heap = h
	for i := 0; ; {
		down := 2*i + 1
		if down >= last {
			return top
		}
		if down+1 < last && h[down+1].order < h[down].order {
			down++
		}
		if h[down].order >= h[i].order {
			return top
		}
		h[i], h[down] = h[down], h[i]
		i = down
	}
}

// addMerges fills the table of pairs. Of a pair that is listed twice the later rank counts, as in Hugging Face's.
func (m *model) addMerges(list [][2]string, id func(text string) (uint32, bool)) error {
	m.pairs = newPairs(len(list))
	for rank, pair := range list {
		left, okLeft := id(pair[0])
		right, okRight := id(pair[1])
		both, okBoth := id(pair[0] + pair[1])
		if !okLeft || !okRight || !okBoth {
			return fmt.Errorf("merge %d %.40q names a token that the vocabulary lacks", rank, pair)
		}
		m.pairs.set(pairKey(left, right), mergeValue(uint32(rank), both))
	}
	return nil
}
