package transfer

import (
	"fmt"
	"math/bits"
)

// PieceMax is the most payload bytes one piece carries: what a fence may have to wait for in a local copy.
const PieceMax = 1 << 20

// geometry is what both ends of a bound lease count by: which units are wanted, how large they are, and into which parts
// of at most PieceMax bytes a unit falls. A unit larger than PieceMax is sent part by part, smaller ones together.
type geometry struct {
	plan       *Plan
	tokens     uint32
	firstToken uint32
	first      uint32 // first block of the request that holds a wanted token
	blocks     uint32 // blocks of the request; [first, blocks) are wanted
	parts      uint32 // of a whole unit
}

func newGeometry(p *Plan, tokens, firstToken uint32, piecesMax int) (geometry, error) {
	g := geometry{plan: p, tokens: tokens, firstToken: firstToken}
	bt := p.src.BlockTokens
	g.blocks = blocksOf(tokens, bt)
	g.first = firstToken / bt
	if firstToken == tokens {
		g.first = g.blocks
	}
	g.parts = uint32((uint64(bt)*p.tokenBytes + PieceMax - 1) / PieceMax)
	if hi, n := bits.Mul64(uint64(g.blocks-g.first)*uint64(p.src.Layers), uint64(g.parts)); hi != 0 || n > uint64(piecesMax) {
		return g, fmt.Errorf("%w: the lease has more than %d pieces to count", ErrLimit, piecesMax)
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

func (g *geometry) unitBytes(block uint32) uint64 {
	bt := uint64(g.plan.src.BlockTokens)
	start := max(uint64(block)*bt, uint64(g.firstToken))
	end := min((uint64(block)+1)*bt, uint64(g.tokens))
	if end <= start {
		return 0
	}
	return (end - start) * g.plan.tokenBytes
}

func (g *geometry) unitParts(block uint32) uint32 {
	return uint32((g.unitBytes(block) + PieceMax - 1) / PieceMax)
}

// bits is the length of the landing bitmap, and wanted how many of its bits will be set in the end.
func (g *geometry) bits() uint64 {
	return uint64(g.plan.src.Layers) * uint64(g.blocks-g.first) * uint64(g.parts)
}

func (g *geometry) wanted() uint64 {
	n := uint64(g.blocks - g.first)
	if n == 0 {
		return 0
	}
	parts := uint64(g.unitParts(g.first)) // only the first and the last unit may be partial
	if n > 1 {
		parts += (n-2)*uint64(g.parts) + uint64(g.unitParts(g.blocks-1))
	}
	return parts * uint64(g.plan.src.Layers)
}

func (g *geometry) bit(layer, block, part uint32) uint64 {
	return (uint64(layer)*uint64(g.blocks-g.first)+uint64(block-g.first))*uint64(g.parts) + uint64(part)
}

// bytesOf gives the payload of a piece, or what is wrong with it. Everything in p came from a peer.
func (g *geometry) bytesOf(p *Piece) (uint64, error) {
	if p.Layer >= g.plan.src.Layers || p.Count == 0 || p.First < g.first || p.First >= g.blocks || p.Count > g.blocks-p.First {
		return 0, fmt.Errorf("%w: units %d+%d of layer %d are outside the lease", ErrProtocol, p.First, p.Count, p.Layer)
	}
	if g.parts > 1 {
		size := g.unitBytes(p.First)
		if off := uint64(p.Part) * PieceMax; p.Count == 1 && off < size {
			return min(PieceMax, size-off), nil
		}
		return 0, fmt.Errorf("%w: part %d of %d units", ErrProtocol, p.Part, p.Count)
	}
	if p.Part != 0 {
		return 0, fmt.Errorf("%w: part %d of an undivided unit", ErrProtocol, p.Part)
	}
	// Only the first and the last unit may be partial.
	whole := uint64(g.plan.src.BlockTokens) * g.plan.tokenBytes
	n := g.unitBytes(p.First)
	if p.Count > 1 {
		n += uint64(p.Count-2)*whole + g.unitBytes(p.First+p.Count-1)
	}
	if n > PieceMax {
		return 0, fmt.Errorf("%w: piece of %d bytes, at most %d", ErrProtocol, n, PieceMax)
	}
	return n, nil
}

// appendRuns gives a piece's runs.
func (g *geometry) appendRuns(runs []Run, p *Piece, srcBlocks, dstBlocks []uint32) []Run {
	for b := p.First; b < p.First+p.Count; b++ {
		runs = g.plan.AppendRuns(runs, p.Layer, b, g.tokens, srcBlocks, dstBlocks, g.firstToken)
	}
	if g.parts > 1 {
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
