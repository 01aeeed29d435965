package prefix

import "github.com/headrace/headrace/router/tokens"

// blocks goes along a prompt's blocks and tells their hashes. Those of a part that has been asked about before are remembered:
// a long conversation costs its new tokens.
type blocks struct {
	parts []tokens.Part
	kind  tokens.Kind
	h     Hash
	i     int // the next block

	at    int      // the part in which it ends, or one before
	start int      // token with which that begins
	known []uint64 // of blocks that end there, from first on
	first int
	fresh int // how many of news are to be remembered, behind known and what was remembered meanwhile
	had   int // of known and those
	news  [stripMax]uint64
	bytes []uint32 // of a block that lies in several parts
}

// begin goes to the first block of size tokens.
func (b *blocks) begin(parts []tokens.Part, size int, seed Seed) {
	root := rootOf(seed.LoRA)
	b.parts, b.kind, b.h, b.i = parts, tokens.Kind{Block: size, Root: uint64(root), Extra: seed.extra()}, root, 0
	b.at, b.start = 0, 0
	b.enter()
}

// enter begins with the part at hand.
func (b *blocks) enter() {
	b.known, b.fresh = nil, 0
	b.first = b.start / b.kind.Block
	if m := b.memo(); m != nil {
		b.known = m.Known(b.kind)
	}
	b.had = len(b.known)
}

// memo is that of the part at hand; nil where nothing is remembered.
func (b *blocks) memo() *tokens.Memo {
	if b.at >= len(b.parts) || b.kind.Block < tokens.MemoBlockMin {
		return nil
	}
	return b.parts[b.at].Memo
}

// next is the hash of the next block, which must be there.
func (b *blocks) next() Hash {
	size, i := b.kind.Block, b.i
	begin, end := i*size, (i+1)*size
	for end > b.start+len(b.parts[b.at].IDs) {
		b.learn()
		b.start += len(b.parts[b.at].IDs)
		b.at++
		b.enter()
	}
	b.i++
	if n := i - b.first; n < len(b.known) {
		b.h = Hash(b.known[n])
		return b.h
	}
	var s uint64
	if begin >= b.start {
		s = sum(b.parts[b.at].IDs[begin-b.start : end-b.start])
	} else {
		s = sum(b.gather(begin, end))
	}
	extra := uint64(0)
	if i == 0 {
		extra = b.kind.Extra
	}
	b.h = chain(b.h, s, extra)
	if b.memo() != nil {
		if b.fresh == len(b.news) {
			b.learn()
		}
		b.news[b.fresh] = uint64(b.h)
		b.fresh++
	}
	return b.h
}

// learn remembers what is new.
func (b *blocks) learn() {
	if b.fresh > 0 {
		b.memo().Learn(b.kind, b.had, b.news[:b.fresh])
		b.had += b.fresh
		b.fresh = 0
	}
}

// end remembers, and lets go of the prompt.
func (b *blocks) end() {
	b.learn()
	b.parts, b.known = nil, nil
}

// gather copies tokens that end in the part at hand and begin before it.
func (b *blocks) gather(begin, end int) []uint32 {
	b.bytes = b.bytes[:0]
	start := b.start
	at := b.at
	for begin < start {
		at--
		start -= len(b.parts[at].IDs)
	}
	for ; begin < end; at++ {
		ids := b.parts[at].IDs
		upto := min(end, start+len(ids))
		b.bytes = append(b.bytes, ids[begin-start:upto-start]...)
		begin, start = upto, start+len(ids)
	}
	return b.bytes
}
