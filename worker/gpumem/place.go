package gpumem

import (
	"errors"
	"fmt"
	"math"

	"github.com/headrace/headrace/cgo"
)

// Place is where the blocks of a KV cache lie: at Base + layer*LayerStride + plane*PlaneStride + block*BlockStride there are
// Bytes of one layer, plane and block. For staging memory Base is an offset into it.
type Place struct {
	Base                                  uint64
	LayerStride, PlaneStride, BlockStride uint64
	Bytes                                 uint64
	Layers, Planes, Blocks                uint32
}

// ErrPlace is what is wrong with places that do not go together, or with blocks that are not there.
var ErrPlace = errors.New("the places of blocks do not fit")

// limits keep the arithmetic below from overflowing.
const (
	strideMax = 1 << 48
	countMax  = 1 << 20
)

// Size is how many bytes lie from Base to the end of the last block.
func (p *Place) Size() (uint64, error) {
	if p.Layers == 0 || p.Planes == 0 || p.Blocks == 0 || p.Layers > countMax || p.Planes > countMax || p.Blocks > countMax || p.Bytes == 0 ||
		p.LayerStride > strideMax || p.PlaneStride > strideMax || p.BlockStride > strideMax || p.Bytes > strideMax {
		return 0, fmt.Errorf("%w: %+v", ErrPlace, *p)
	}
	var end uint64
	for _, d := range [...]struct {
		n      uint32
		stride uint64
	}{{p.Layers, p.LayerStride}, {p.Planes, p.PlaneStride}, {p.Blocks, p.BlockStride}} {
		if step := uint64(d.n-1) * d.stride; d.stride != 0 && step/d.stride != uint64(d.n-1) || end+step < end {
			return 0, fmt.Errorf("%w: %+v", ErrPlace, *p)
		} else {
			end += step
		}
	}
	if end > math.MaxInt64-p.Bytes || p.Base > math.MaxInt64-end-p.Bytes {
		return 0, fmt.Errorf("%w: %+v", ErrPlace, *p)
	}
	return end + p.Bytes, nil
}

// Copies lists what is to be copied for blocks of layers first to first+count-1, from one place to another: joined where it
// lies together at both ends.
func Copies(to, from *Place, toBlocks, fromBlocks []uint32, first, count uint32) ([]cgo.Copy, error) {
	for _, p := range [...]*Place{to, from} {
		if _, err := p.Size(); err != nil {
			return nil, err
		}
	}
	switch {
	case to.Bytes != from.Bytes || to.Layers != from.Layers || to.Planes != from.Planes:
		return nil, fmt.Errorf("%w: %+v and %+v", ErrPlace, *to, *from)
	case len(toBlocks) != len(fromBlocks):
		return nil, fmt.Errorf("%w: %d blocks from %d", ErrPlace, len(toBlocks), len(fromBlocks))
	case first > from.Layers || count > from.Layers-first:
		return nil, fmt.Errorf("%w: layers %d+%d of %d", ErrPlace, first, count, from.Layers)
	}
	for i := range toBlocks {
		if toBlocks[i] >= to.Blocks || fromBlocks[i] >= from.Blocks {
			return nil, fmt.Errorf("%w: block %d of %d from block %d of %d", ErrPlace, toBlocks[i], to.Blocks, fromBlocks[i], from.Blocks)
		}
	}
	var out []cgo.Copy
	for layer := uint64(first); layer < uint64(first)+uint64(count); layer++ {
		for plane := range uint64(from.Planes) {
			dst, src := to.Base+layer*to.LayerStride+plane*to.PlaneStride, from.Base+layer*from.LayerStride+plane*from.PlaneStride
			for i := range toBlocks {
				c := cgo.Copy{Dst: dst + uint64(toBlocks[i])*to.BlockStride, Src: src + uint64(fromBlocks[i])*from.BlockStride, Len: from.Bytes}
				if n := len(out); n > 0 && out[n-1].Dst+out[n-1].Len == c.Dst && out[n-1].Src+out[n-1].Len == c.Src {
					out[n-1].Len += c.Len
				} else {
					out = append(out, c)
				}
			}
		}
	}
	return out, nil
}
