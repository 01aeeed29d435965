package transfer

import (
	"fmt"
	"slices"
)

// Run is one copy: Len bytes from offset Src of the source region to offset Dst of the destination region.
type Run struct{ Src, Dst, Len uint64 }

// Plan says which bytes of a source region go where in a destination region. It is fixed by the two layouts and both
// ends of a lease compute it for themselves: the order of a unit's bytes on the wire is the order of its runs.
//
// A unit is (layer, block of the request in source blocks). Its bytes are ordered by token ranges that share a
// destination block, and within a range by plane, token and head, the one with the greatest source stride outermost.
// Where the source's planes are further apart than its blocks, several units go plane by plane, so that what lies side
// by side in a plane is one run.
type Plan struct {
	src, dst    Layout
	headFirst   uint32 // of all heads
	heads       uint32
	tokenBytes  uint64 // of one token in one layer: planes * heads * head bytes
	dims        [3]planDim
	planesFirst bool
}

// planDim is one loop of a range's copy, outermost first. The token loop's count is set range by range.
type planDim struct {
	kind     uint8
	count    uint32
	src, dst uint64 // strides
}

const (
	dimPlane = iota
	dimToken
	dimHead
)

// PlanCopy plans copies from src to dst, or says why there can be none. Both layouts must be valid. It covers the heads
// that both hold: PlanShards finds the plans that fill all of dst's.
func PlanCopy(src, dst Layout) (*Plan, error) {
	for _, f := range [...]struct {
		name string
		a, b uint32
	}{
		{"layers", src.Layers, dst.Layers}, {"planes", src.Planes, dst.Planes}, {"heads in total", src.HeadsTotal, dst.HeadsTotal},
		{"bytes a head", src.HeadBytes, dst.HeadBytes},
	} {
		if f.a != f.b {
			return nil, fmt.Errorf("%w: source has %d %s, destination %d", ErrPlan, f.a, f.name, f.b)
		}
	}
	if src.DType != dst.DType {
		return nil, fmt.Errorf("%w: source holds %v, destination %v", ErrPlan, src.DType, dst.DType)
	}
	if src.Fingerprint != dst.Fingerprint {
		return nil, fmt.Errorf("%w: fingerprints differ (%x and %x): another model or other cache settings", ErrPlan, src.Fingerprint[:6], dst.Fingerprint[:6])
	}
	if err := checkOpaque(&src, &dst); err != nil {
		return nil, err
	}
	first := max(src.HeadFirst, dst.HeadFirst)
	end := min(src.HeadFirst+src.Heads, dst.HeadFirst+dst.Heads)
	if end <= first {
		return nil, fmt.Errorf("%w: source rank %d of %d holds none of the heads of destination rank %d of %d", ErrPlan, src.TPRank, src.TPSize, dst.TPRank, dst.TPSize)
	}
	p := &Plan{src: src, dst: dst, headFirst: first, heads: end - first}
	p.tokenBytes = uint64(src.Planes) * uint64(p.heads) * uint64(src.HeadBytes)
	p.dims = [3]planDim{
		{dimPlane, src.Planes, src.PlaneStride, dst.PlaneStride},
		{dimToken, 0, src.TokenStride, dst.TokenStride},
		{dimHead, p.heads, src.HeadStride, dst.HeadStride},
	}
	if src.PlanesReversed != dst.PlanesReversed {
		// Walk the source's planes upwards and the destination's downwards: two's complement makes the stride negative.
		p.dims[0].dst = -dst.PlaneStride
	}
	// The sort is stable and looks at the source alone, so both ends get the same order.
	slices.SortStableFunc(p.dims[:], func(a, b planDim) int {
		switch {
		case a.src > b.src:
			return -1
		case a.src < b.src:
			return 1
		}
		return 0
	})
	p.planesFirst = src.Planes > 1 && p.dims[0].kind == dimPlane && src.PlaneStride > src.BlockStride
	return p, nil
}

// checkOpaque says why opaque blocks cannot be copied: they are to be of the same form at both ends.
func checkOpaque(src, dst *Layout) error {
	if !src.Opaque && !dst.Opaque {
		return nil
	}
	if src.Opaque != dst.Opaque {
		return fmt.Errorf("%w: the blocks of one side are opaque, those of the other are not: run both engines on the same processors and attention backend", ErrPlan)
	}
	for _, f := range [...]struct {
		what string
		a, b uint32
	}{
		{"tokens", src.BlockTokens, dst.BlockTokens}, {"tensor-parallel ranks", src.TPSize, dst.TPSize}, {"heads a rank", src.Heads, dst.Heads},
	} {
		if f.a != f.b {
			return fmt.Errorf("%w: opaque blocks of %d and %d %s: only equal ones can be copied", ErrPlan, f.a, f.b, f.what)
		}
	}
	if src.HeadFirst != dst.HeadFirst {
		return fmt.Errorf("%w: opaque blocks of heads from %d and from %d on: only equal ones can be copied", ErrPlan, src.HeadFirst, dst.HeadFirst)
	}
	return nil
}

// TokenBytes is what one token of one layer takes on the wire.
func (p *Plan) TokenBytes() uint64 { return p.tokenBytes }

// AppendRuns appends the runs of unit (layer, blockIndex) of a request of that many tokens, less what lies before
// firstToken. srcBlocks and dstBlocks are the request's blocks at either end, in the request's order, in their own block
// sizes; ids must be valid for the layouts. A nil list stands for the identity: an end that has no use for the other
// end's offsets need not know its blocks. Runs that touch at both ends are joined, also with the last one of dst.
func (p *Plan) AppendRuns(dst []Run, layer, blockIndex, tokens uint32, srcBlocks, dstBlocks []uint32, firstToken uint32) []Run {
	return p.appendUnit(dst, 0, p.src.Planes, layer, blockIndex, tokens, srcBlocks, dstBlocks, firstToken)
}

// appendUnits is AppendRuns for the units [first, first+count), in the order that several units have together.
func (p *Plan) appendUnits(runs []Run, layer, first, count, tokens uint32, srcBlocks, dstBlocks []uint32, firstToken uint32) []Run {
	step := p.src.Planes
	if p.planesFirst {
		step = 1
	}
	for plane := uint32(0); plane < p.src.Planes; plane += step {
		for b := first; b < first+count; b++ {
			runs = p.appendUnit(runs, plane, step, layer, b, tokens, srcBlocks, dstBlocks, firstToken)
		}
	}
	return runs
}

// appendUnit appends some planes of a unit.
func (p *Plan) appendUnit(dst []Run, plane, planes, layer, blockIndex, tokens uint32, srcBlocks, dstBlocks []uint32, firstToken uint32) []Run {
	srcTokens, dstTokens := uint64(p.src.BlockTokens), uint64(p.dst.BlockTokens)
	start := uint64(blockIndex) * srcTokens
	t := max(start, uint64(firstToken))
	end := min(start+srcTokens, uint64(tokens))
	for t < end {
		dstIndex := t / dstTokens
		stop := min(end, (dstIndex+1)*dstTokens)
		srcBlock, dstBlock := blockIndex, uint32(dstIndex)
		if srcBlocks != nil {
			srcBlock = srcBlocks[blockIndex]
		}
		if dstBlocks != nil {
			dstBlock = dstBlocks[dstIndex]
		}
		dst = p.appendRange(dst, plane, planes, layer, srcBlock, dstBlock, uint32(t-start), uint32(t-dstIndex*dstTokens), uint32(stop-t))
		t = stop
	}
	return dst
}

// appendRange appends the runs of some planes of n tokens that lie in one block at both ends.
func (p *Plan) appendRange(runs []Run, plane, planes, layer, srcBlock, dstBlock, srcToken, dstToken, n uint32) []Run {
	dstPlane := plane
	if p.src.PlanesReversed != p.dst.PlanesReversed {
		dstPlane = p.dst.Planes - 1 - plane
	}
	src := p.src.offset(layer, srcBlock, plane, srcToken) + uint64(p.headFirst-p.src.HeadFirst)*p.src.HeadStride
	dst := p.dst.offset(layer, dstBlock, dstPlane, dstToken) + uint64(p.headFirst-p.dst.HeadFirst)*p.dst.HeadStride
	// Fold inner loops that are contiguous at both ends into the length of a run.
	var loops [3]planDim
	depth := 0
	for _, d := range p.dims {
		switch d.kind {
		case dimToken:
			d.count = n
		case dimPlane:
			d.count = planes
		}
		if d.count > 1 {
			loops[depth] = d
			depth++
		}
	}
	length := uint64(p.src.HeadBytes)
	for depth > 0 && loops[depth-1].src == length && loops[depth-1].dst == length {
		depth--
		length *= uint64(loops[depth].count)
	}
	for i := depth; i < len(loops); i++ {
		loops[i] = planDim{count: 1}
	}
	a, b, c := loops[0], loops[1], loops[2]
	for i := range uint64(a.count) {
		for j := range uint64(b.count) {
			s, d := src+i*a.src+j*b.src, dst+i*a.dst+j*b.dst
			for k := range uint64(c.count) {
				runs = appendRun(runs, Run{s + k*c.src, d + k*c.dst, length})
			}
		}
	}
	return runs
}

func appendRun(runs []Run, r Run) []Run {
	if n := len(runs); n > 0 {
		if last := &runs[n-1]; last.Src+last.Len == r.Src && last.Dst+last.Len == r.Dst {
			last.Len += r.Len
			return runs
		}
	}
	return append(runs, r)
}

// sliceRuns cuts bytes [off, off+n) out of a run list, in place.
func sliceRuns(runs []Run, off, n uint64) []Run {
	out := runs[:0]
	for _, r := range runs {
		if off >= r.Len {
			off -= r.Len
			continue
		}
		r.Src, r.Dst, r.Len = r.Src+off, r.Dst+off, r.Len-off
		off = 0
		if r.Len > n {
			r.Len = n
		}
		if r.Len == 0 {
			break
		}
		n -= r.Len
		out = append(out, r)
	}
	return out
}
