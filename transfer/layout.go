package transfer

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

// Layout says what the bytes of a region mean. Of block b, plane p (K, then V), token t in the block and head h (local
// index) of layer l, the HeadBytes bytes start at
//
//	Base + l*LayerStride + b*BlockStride + p*PlaneStride + t*TokenStride + h*HeadStride
//
// with p counted from the other end where PlanesReversed (V is stored before K).
type Layout struct {
	Fingerprint                                 [32]byte // of the model and everything that changes KV bytes
	DType                                       DType
	PlanesReversed                              bool
	Layers, Blocks, BlockTokens, Planes         uint32
	Heads, HeadFirst, HeadsTotal                uint32 // this rank holds heads [HeadFirst, HeadFirst+Heads) of HeadsTotal
	HeadBytes                                   uint32 // head size times the size of a number
	TPRank, TPSize                              uint32
	Base, LayerStride, BlockStride, PlaneStride uint64
	TokenStride, HeadStride                     uint64
}

// Run is one copy: Len bytes from offset Src of the source region to offset Dst of the destination region.
type Run struct{ Src, Dst, Len uint64 }
