package transfer

import (
	"encoding/binary"
	"fmt"
	"math/bits"
	"slices"
)

// DType is the type of one cached number. Plans copy bytes: equal types are all they need.
type DType uint8

// The known types.
const (
	F32 DType = iota + 1
	F16
	BF16
	I8
	F8E4M3
	F8E5M2
)

var dtypeNames = [...]string{F32: "F32", F16: "F16", BF16: "BF16", I8: "I8", F8E4M3: "F8_E4M3", F8E5M2: "F8_E5M2"}

func (d DType) String() string {
	if int(d) < len(dtypeNames) && dtypeNames[d] != "" {
		return dtypeNames[d]
	}
	return fmt.Sprintf("dtype(%d)", uint8(d))
}

// Layout says what the bytes of a region mean. Of block b, plane p (K, then V), token t in the block and head h (local
// index) of layer l, the HeadBytes bytes start at
//
//	Base + l*LayerStride + b*BlockStride + p*PlaneStride + t*TokenStride + h*HeadStride
//
// with p counted from the other end where PlanesReversed (V is stored before K).
//
// Of an Opaque layout nobody knows what lies where in a block: it is one plane of BlockTokens*Heads*HeadBytes bytes in one
// piece, and is copied whole, to a block of the very same form.
type Layout struct {
	Fingerprint                                 [32]byte // of the model and everything that changes KV bytes
	DType                                       DType
	PlanesReversed                              bool
	Opaque                                      bool
	Layers, Blocks, BlockTokens, Planes         uint32
	Heads, HeadFirst, HeadsTotal                uint32 // this rank holds heads [HeadFirst, HeadFirst+Heads) of HeadsTotal
	HeadBytes                                   uint32 // head size times the size of a number
	TPRank, TPSize                              uint32
	Base, LayerStride, BlockStride, PlaneStride uint64
	TokenStride, HeadStride                     uint64
}

// Limits of a layout's fields. They keep every product of this package within 64 bits.
const (
	LayersMax      = 1 << 12
	BlocksMax      = 1 << 28
	BlockTokensMax = 1 << 14
	PlanesMax      = 8
	HeadsMax       = 1 << 12
	HeadBytesMax   = 1 << 20
	TPSizeMax      = 1 << 12
)

// Validate says why l cannot describe a region of size bytes: a field out of its range, bytes beyond the end, or two
// elements in the same place. Strides of dimensions with one element are not looked at.
func (l Layout) Validate(size uint64) error {
	for _, f := range [...]struct {
		name     string
		n, limit uint32
	}{
		{"layers", l.Layers, LayersMax}, {"blocks", l.Blocks, BlocksMax}, {"block tokens", l.BlockTokens, BlockTokensMax},
		{"planes", l.Planes, PlanesMax}, {"heads", l.Heads, HeadsMax}, {"heads in total", l.HeadsTotal, HeadsMax},
		{"head bytes", l.HeadBytes, HeadBytesMax}, {"tensor-parallel ranks", l.TPSize, TPSizeMax},
	} {
		if f.n == 0 || f.n > f.limit {
			return fmt.Errorf("%w: %d %s, need 1 to %d", ErrLayout, f.n, f.name, f.limit)
		}
	}
	if l.DType == 0 || int(l.DType) >= len(dtypeNames) {
		return fmt.Errorf("%w: unknown %v", ErrLayout, l.DType)
	}
	if l.TPRank >= l.TPSize {
		return fmt.Errorf("%w: tensor-parallel rank %d of %d", ErrLayout, l.TPRank, l.TPSize)
	}
	if l.HeadFirst >= l.HeadsTotal || l.Heads > l.HeadsTotal-l.HeadFirst {
		return fmt.Errorf("%w: heads %d to %d of %d", ErrLayout, l.HeadFirst, uint64(l.HeadFirst)+uint64(l.Heads), l.HeadsTotal)
	}
	if l.Opaque {
		if err := l.validateOpaque(); err != nil {
			return err
		}
	}
	return l.validateStrides(size)
}

// validateOpaque wants a block's bytes in one piece.
func (l Layout) validateOpaque() error {
	token := uint64(l.Heads) * uint64(l.HeadBytes)
	switch {
	case l.Planes != 1:
		return fmt.Errorf("%w: opaque blocks with %d planes, need 1", ErrLayout, l.Planes)
	case l.Heads > 1 && l.HeadStride != uint64(l.HeadBytes):
		return fmt.Errorf("%w: opaque blocks with a head stride of %d, need the %d bytes of a head", ErrLayout, l.HeadStride, l.HeadBytes)
	case l.BlockTokens > 1 && l.TokenStride != token:
		return fmt.Errorf("%w: opaque blocks with a token stride of %d, need the %d bytes of %d heads", ErrLayout, l.TokenStride, token, l.Heads)
	}
	return nil
}

type dimension struct {
	name   string
	count  uint32
	stride uint64
}

// validateStrides accepts nested dimensions only: ordered by stride, each must step over everything inside it. That is
// stricter than "no two elements overlap", and every cache layout in use is nested.
func (l Layout) validateStrides(size uint64) error {
	dims := []dimension{
		{"layer", l.Layers, l.LayerStride}, {"block", l.Blocks, l.BlockStride}, {"plane", l.Planes, l.PlaneStride},
		{"token", l.BlockTokens, l.TokenStride}, {"head", l.Heads, l.HeadStride},
	}
	dims = slices.DeleteFunc(dims, func(d dimension) bool { return d.count == 1 })
	slices.SortFunc(dims, func(a, b dimension) int {
		switch {
		case a.stride < b.stride:
			return -1
		case a.stride > b.stride:
			return 1
		}
		return 0
	})
	extent := uint64(l.HeadBytes)
	for _, d := range dims {
		if d.stride < extent {
			return fmt.Errorf("%w: %s stride %d overlaps: what it steps over is %d bytes", ErrLayout, d.name, d.stride, extent)
		}
		hi, lo := bits.Mul64(uint64(d.count-1), d.stride)
		sum, carry := bits.Add64(extent, lo, 0)
		if hi != 0 || carry != 0 {
			return fmt.Errorf("%w: %d times %s stride %d overflows", ErrLayout, d.count, d.name, d.stride)
		}
		extent = sum
	}
	end, carry := bits.Add64(l.Base, extent, 0)
	if carry != 0 || end > size {
		return fmt.Errorf("%w: needs %d bytes from base %d on, the region has %d", ErrLayout, extent, l.Base, size)
	}
	return nil
}

// offset gives the place of the first head's bytes. The indexes must be in range.
func (l *Layout) offset(layer, block, plane, token uint32) uint64 {
	return l.Base + uint64(layer)*l.LayerStride + uint64(block)*l.BlockStride + uint64(plane)*l.PlaneStride + uint64(token)*l.TokenStride
}

// LayoutSize is the length of a marshalled layout:
//
//	offset size field
//	     0    1 version, 1
//	     1    1 dtype: 1 F32, 2 F16, 3 BF16, 4 I8, 5 F8_E4M3, 6 F8_E5M2
//	     2    2 flags: bit 0 planes reversed, bit 1 opaque, others 0
//	     4    4 layers
//	     8    4 blocks
//	    12    4 tokens a block
//	    16    4 planes
//	    20    4 heads
//	    24    4 first head
//	    28    4 heads in total
//	    32    4 bytes a head
//	    36    4 tensor-parallel rank
//	    40    4 tensor-parallel size
//	    44    4 reserved, 0
//	    48    8 base
//	    56    8 layer stride
//	    64    8 block stride
//	    72    8 plane stride
//	    80    8 token stride
//	    88    8 head stride
//	    96   32 fingerprint
//	   128
const LayoutSize = 128

const (
	layoutVersion      = 1
	layoutFlagReversed = 1
	layoutFlagOpaque   = 2
)

// MarshalBinary encodes l in LayoutSize bytes. It never fails.
func (l Layout) MarshalBinary() ([]byte, error) { return l.AppendBinary(nil) }

// AppendBinary appends the encoding of l to b. It never fails.
func (l Layout) AppendBinary(b []byte) ([]byte, error) {
	le := binary.LittleEndian
	var flags uint16
	if l.PlanesReversed {
		flags |= layoutFlagReversed
	}
	if l.Opaque {
		flags |= layoutFlagOpaque
	}
	b = append(b, layoutVersion, byte(l.DType))
	b = le.AppendUint16(b, flags)
	for _, v := range [...]uint32{l.Layers, l.Blocks, l.BlockTokens, l.Planes, l.Heads, l.HeadFirst, l.HeadsTotal, l.HeadBytes, l.TPRank, l.TPSize, 0} {
		b = le.AppendUint32(b, v)
	}
	for _, v := range [...]uint64{l.Base, l.LayerStride, l.BlockStride, l.PlaneStride, l.TokenStride, l.HeadStride} {
		b = le.AppendUint64(b, v)
	}
	return append(b, l.Fingerprint[:]...), nil
}

// UnmarshalLayout decodes exactly LayoutSize bytes. It checks the form only: Validate checks the sense.
func UnmarshalLayout(b []byte) (Layout, error) {
	var l Layout
	if len(b) != LayoutSize {
		return l, fmt.Errorf("%w: %d bytes, want %d", ErrLayout, len(b), LayoutSize)
	}
	if b[0] != layoutVersion {
		return l, fmt.Errorf("%w: version %d, this build reads version %d", ErrLayout, b[0], layoutVersion)
	}
	le := binary.LittleEndian
	flags := le.Uint16(b[2:])
	if flags&^(layoutFlagReversed|layoutFlagOpaque) != 0 || le.Uint32(b[44:]) != 0 {
		return l, fmt.Errorf("%w: unknown flags %#x", ErrLayout, flags)
	}
	l.DType = DType(b[1])
	l.PlanesReversed = flags&layoutFlagReversed != 0
	l.Opaque = flags&layoutFlagOpaque != 0
	for i, p := range [...]*uint32{&l.Layers, &l.Blocks, &l.BlockTokens, &l.Planes, &l.Heads, &l.HeadFirst, &l.HeadsTotal, &l.HeadBytes, &l.TPRank, &l.TPSize} {
		*p = le.Uint32(b[4+4*i:])
	}
	for i, p := range [...]*uint64{&l.Base, &l.LayerStride, &l.BlockStride, &l.PlaneStride, &l.TokenStride, &l.HeadStride} {
		*p = le.Uint64(b[48+8*i:])
	}
	copy(l.Fingerprint[:], b[96:])
	return l, nil
}
