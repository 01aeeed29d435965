package tokenizer

import "sync"

// merge is what a pair of tokens becomes, and when: lower ranks first.
type merge struct{ rank, id int32 }

func pair(left, right int32) uint64 { return uint64(uint32(left))<<32 | uint64(uint32(right)) }

// scanMax is the length in bytes up to which looking through all pairs for the best one beats keeping a heap of them.
// Nearly every piece of real text is shorter; the heap keeps hostile ones at O(n log n).
const scanMax = 48

// symbol is a token of the piece being merged, in a list linked by index. A dead symbol has id -1.
type symbol struct{ id, prev, next int32 }

// candidate is a merge that was possible when it was pushed. It is stale when either side has changed since.
type candidate struct{ rank, at, left, right, id int32 }

type workspace struct {
	ids     []int32
	ranks   []merge
	symbols []symbol
	heap    []candidate
}

var workspaces = sync.Pool{New: func() any { return new(workspace) }}

const noRank = int32(1<<31 - 1)

func (t *Tokenizer) encodePiece(dst []int32, piece string, w *workspace) []int32 {
	if t.whole {
		if id, ok := t.byText[piece]; ok {
			return append(dst, id)
		}
	}
	w.ids = w.ids[:0]
	for i := range len(piece) {
		// A byte that the vocabulary has no token for is dropped, as Hugging Face's BPE does without an unknown token.
		if id := t.bytes[piece[i]]; id >= 0 {
			w.ids = append(w.ids, id)
		}
	}
	if len(w.ids) < 2 {
		return append(dst, w.ids...)
	}
	if len(w.ids) <= scanMax {
		return t.mergeScan(dst, w)
	}
	return t.mergeHeap(dst, w)
}

// mergeScan merges the leftmost pair of lowest rank until none is left.
func (t *Tokenizer) mergeScan(dst []int32, w *workspace) []int32 {
	ids, ranks := w.ids, w.ranks[:0]
	for i := range len(ids) - 1 {
		ranks = append(ranks, t.lookup(ids[i], ids[i+1]))
	}
	w.ranks = ranks
	for {
		best, at := noRank, -1
		for i := range ranks {
			if ranks[i].rank < best {
				best, at = ranks[i].rank, i
			}
		}
		if at < 0 {
			return append(dst, ids...)
		}
		ids[at] = ranks[at].id
		ids = append(ids[:at+1], ids[at+2:]...)
		ranks = append(ranks[:at], ranks[at+1:]...)
		if at < len(ranks) {
			ranks[at] = t.lookup(ids[at], ids[at+1])
		}
		if at > 0 {
			ranks[at-1] = t.lookup(ids[at-1], ids[at])
		}
	}
}

func (t *Tokenizer) lookup(left, right int32) merge {
	if m, ok := t.merges[pair(left, right)]; ok {
		return m
	}
	return merge{rank: noRank}
}

// mergeHeap gives what mergeScan gives, in O(n log n).
func (t *Tokenizer) mergeHeap(dst []int32, w *workspace) []int32 {
	n := len(w.ids)
	w.symbols, w.heap = w.symbols[:0], w.heap[:0]
	for i, id := range w.ids {
		w.symbols = append(w.symbols, symbol{id: id, prev: int32(i) - 1, next: int32(i) + 1})
	}
	w.symbols[n-1].next = -1
	for i := range n - 1 {
		t.push(w, int32(i))
	}
	for len(w.heap) > 0 {
		c := w.pop()
		left := &w.symbols[c.at]
		if left.id != c.left || left.next < 0 || w.symbols[left.next].id != c.right {
			continue
		}
		right := &w.symbols[left.next]
		left.id, right.id = c.id, -1
		left.next = right.next
		if left.next >= 0 {
			w.symbols[left.next].prev = c.at
			t.push(w, c.at)
		}
		if left.prev >= 0 {
			t.push(w, left.prev)
		}
	}
	for i := int32(0); i >= 0; i = w.symbols[i].next {
		dst = append(dst, w.symbols[i].id)
	}
	return dst
}

// push adds the pair that begins at symbol at, when it merges.
func (t *Tokenizer) push(w *workspace, at int32) {
	left, right := w.symbols[at].id, w.symbols[w.symbols[at].next].id
	m, ok := t.merges[pair(left, right)]
	if !ok {
		return
	}
	w.heap = append(w.heap, candidate{rank: m.rank, at: at, left: left, right: right, id: m.id})
	h := w.heap
	for i := len(h) - 1; i > 0; {
		up := (i - 1) / 2
		if !h[i].before(&h[up]) {
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
		if down+1 < last && h[down+1].before(&h[down]) {
			down++
		}
		if !h[down].before(&h[i]) {
			return top
		}
		h[i], h[down] = h[down], h[i]
		i = down
	}
}

func (c *candidate) before(o *candidate) bool {
	return c.rank < o.rank || (c.rank == o.rank && c.at < o.at)
}
