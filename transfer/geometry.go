package transfer

import (
	"fmt"
	"math/bits"
)

// PieceMax is the most payload bytes one piece carries: what a fence may have to wait for in a local copy.
const PieceMax = 1 << 20

// geometry is what both ends of a bound lease count by: which units are wanted of which pairs of regions, how large they
// are, and into which parts of at most PieceMax bytes a unit falls. A unit larger than PieceMax is sent part by part,
// smaller ones together.
//
// What moves at once belongs to one layer and one pair. Pieces name both by a single number, the stripe: layer times the
// number of pairs, plus the pair.
type geometry struct {
	pairs       []pairGeometry
	layers      uint32
	blockTokens uint32 // of the source
	tokens      uint32
	firstToken  uint32
	first       uint32 // first block of the request that holds a wanted token
	blocks      uint32 // blocks of the request; [first, blocks) are wanted
	bits        uint64 // length of the landing bitmap
	wanted      uint64 // how many of its bits will be set in the end
}

type pairGeometry struct {
	ShardPair
	parts uint32 // of a whole unit
	base  uint64 // the pair's first landing bit
}

func newGeometry(pairs []ShardPair, tokens, firstToken uint32, piecesMax int) (geometry, error) {
	src := &pairs[0].Plan.src
	g := geometry{layers: src.Layers, blockTokens: src.BlockTokens, tokens: tokens, firstToken: firstToken, pairs: make([]pairGeometry, len(pairs))}
	g.blocks = blocksOf(tokens, g.blockTokens)
	g.first = firstToken / g.blockTokens
	if firstToken == tokens {
		g.first = g.blocks
	}
	if src.Opaque { // the last block goes whole too: nobody knows where a token's bytes lie in it
		hi, whole := bits.Mul32(g.blocks, g.blockTokens)
		if g.tokens = whole; hi != 0 {
			return g, fmt.Errorf("%w: %d blocks of %d tokens", ErrLimit, g.blocks, g.blockTokens)
		}
	}
	units := uint64(g.blocks-g.first) * uint64(g.layers)
	for i, p := range pairs {
		parts := (uint64(g.blockTokens)*p.Plan.tokenBytes + PieceMax - 1) / PieceMax
		g.pairs[i] = pairGeometry{p, uint32(parts), g.bits}
		hi, n := bits.Mul64(units, parts)
		if g.bits += n; hi != 0 || n > uint64(piecesMax) || g.bits > uint64(piecesMax) {
			return g, fmt.Errorf("%w: the lease has more than %d pieces to count", ErrLimit, piecesMax)
		}
		g.wanted += g.wantedOf(&g.pairs[i])
	}
	return g, nil
}

// blocksOf says how many blocks hold that many tokens, without overflow.
func blocksOf(tokens, blockTokens uint32) uint32 {
	n := tokens / blockTokens
	if tokens%blockTokens != 0 {
		n++
	}
	return n
}

// pair and layer take a piece's stripe apart.
func (g *geometry) pair(p *Piece) *pairGeometry { return &g.pairs[p.Stripe%uint32(len(g.pairs))] }
func (g *geometry) layer(p *Piece) uint32       { return p.Stripe / uint32(len(g.pairs)) }

func (g *geometry) stripe(layer uint32, pair int) uint32 {
	return layer*uint32(len(g.pairs)) + uint32(pair)
}

// bytesIn is what the units [first, first+count) of one layer take.
func (g *geometry) bytesIn(pair *pairGeometry, first, count uint32) uint64 {
	bt := uint64(g.blockTokens)
	start := max(uint64(first)*bt, uint64(g.firstToken))
	end := min((uint64(first)+uint64(count))*bt, uint64(g.tokens))
	if end <= start {
		return 0
	}
	return (end - start) * pair.Plan.tokenBytes
}

func (g *geometry) unitBytes(pair *pairGeometry, block uint32) uint64 {
	return g.bytesIn(pair, block, 1)
}

func (g *geometry) unitParts(pair *pairGeometry, block uint32) uint32 {
	return uint32((g.unitBytes(pair, block) + PieceMax - 1) / PieceMax)
}

func (g *geometry) wantedOf(pair *pairGeometry) uint64 {
	n := uint64(g.blocks - g.first)
	if n == 0 {
		return 0
	}
	parts := uint64(g.unitParts(pair, g.first)) // only the first and the last unit may be partial
	if n > 1 {
		parts += (n-2)*uint64(pair.parts) + uint64(g.unitParts(pair, g.blocks-1))
	}
	return parts * uint64(g.layers)
}

// nextPair gives the first pair from number i on that reads a source region: any of them when shard is 0, else the
// shard-th. It gives the number of pairs when there is none.
func (g *geometry) nextPair(i int, shard uint32) int {
	for i < len(g.pairs) && shard != 0 && g.pairs[i].Src != int(shard)-1 {
		i++
	}
	return i
}

// bytesFrom is what a range of units takes in the pairs from number i on.
func (g *geometry) bytesFrom(i int, u Unit) (n uint64) {
	for i = g.nextPair(i, u.Shard); i < len(g.pairs); i = g.nextPair(i+1, u.Shard) {
		n += g.bytesIn(&g.pairs[i], u.First, u.Count)
	}
	return n
}

// bytesOf gives the payload of a piece, or what is wrong with it. Everything in p came from a peer.
func (g *geometry) bytesOf(p *Piece) (uint64, error) {
	if g.layer(p) >= g.layers || p.Count == 0 || p.First < g.first || p.First >= g.blocks || p.Count > g.blocks-p.First {
		return 0, fmt.Errorf("%w: units %d+%d of stripe %d are outside the lease", ErrProtocol, p.First, p.Count, p.Stripe)
	}
	pair := g.pair(p)
	if pair.parts > 1 {
		size := g.unitBytes(pair, p.First)
		if off := uint64(p.Part) * PieceMax; p.Count == 1 && off < size {
			return min(PieceMax, size-off), nil
		}
		return 0, fmt.Errorf("%w: part %d of %d units", ErrProtocol, p.Part, p.Count)
	}
	if p.Part != 0 {
		return 0, fmt.Errorf("%w: part %d of an undivided unit", ErrProtocol, p.Part)
	}
	n := g.bytesIn(pair, p.First, p.Count)
	if n > PieceMax {
		return 0, fmt.Errorf("%w: piece of %d bytes, at most %d", ErrProtocol, n, PieceMax)
	}
	return n, nil
}

// each calls f with the landing bit of everything a piece carries.
func (g *geometry) each(p *Piece, f func(bit uint64)) {
	pair := g.pair(p)
	at := pair.base + uint64(g.layer(p))*uint64(g.blocks-g.first)*uint64(pair.parts) + uint64(p.Part)
	for b := p.First; b < p.First+p.Count; b++ {
		f(at + uint64(b-g.first)*uint64(pair.parts))
	}
}

// appendRuns gives a piece's runs.
func (g *geometry) appendRuns(runs []Run, p *Piece, srcBlocks, dstBlocks []uint32) []Run {
	pair, layer := g.pair(p), g.layer(p)
	runs = pair.Plan.appendUnits(runs, layer, p.First, p.Count, g.tokens, srcBlocks, dstBlocks, g.firstToken)
	if pair.parts > 1 {
		runs = sliceRuns(runs, uint64(p.Part)*PieceMax, uint64(p.Bytes))
	}
	return runs
}

// bitmap counts landings once.
type bitmap struct {
	words []uint64
	n     uint64 // bits set
}

func newBitmap(bits uint64) bitmap { return bitmap{words: make([]uint64, (bits+63)/64)} }

func (b *bitmap) has(i uint64) bool { return b.words[i/64]&(1<<(i%64)) != 0 }

// set reports whether the bit was clear.
func (b *bitmap) set(i uint64) bool {
	if b.has(i) {
		return false
	}
	b.words[i/64] |= 1 << (i % 64)
	b.n++
	return true
}

func (b *bitmap) clear(i uint64) {
	if b.has(i) {
		b.words[i/64] &^= 1 << (i % 64)
		b.n--
	}
}
