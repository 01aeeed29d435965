package transfer

import "testing"

// The span of blocks holds all of their bytes and begins and ends with one of them, whatever the order of strides.
func TestSpanHoldsExactlyItsBlocks(t *testing.T) {
	layerFirst := Layout{Base: 64, Layers: 3, Blocks: 8, BlockTokens: 4, Planes: 2, Heads: 2, HeadBytes: 16, HeadStride: 16, TokenStride: 32, PlaneStride: 128, BlockStride: 256, LayerStride: 2048}
	blockFirst := layerFirst
	blockFirst.LayerStride, blockFirst.BlockStride = 256, 768
	planeFirst := layerFirst
	planeFirst.PlaneStride, planeFirst.LayerStride, planeFirst.BlockStride = 3072, 1024, 128
	planeFirst.PlanesReversed = true
	for name, l := range map[string]Layout{"layers outermost": layerFirst, "blocks outermost": blockFirst, "planes outermost": planeFirst} {
		for _, blocks := range [][]uint32{{3}, {7, 0}, {5, 2, 4}} {
			first, end := l.span(blocks)
			low, high := ^uint64(0), uint64(0)
			for layer := range l.Layers {
				for _, b := range blocks {
					for plane := range l.Planes {
						for token := range l.BlockTokens {
							for head := range l.Heads {
								at := l.offset(layer, b, plane, token) + uint64(head)*l.HeadStride
								low, high = min(low, at), max(high, at+uint64(l.HeadBytes))
							}
						}
					}
				}
			}
			if first != low || end != high {
				t.Errorf("%s, blocks %v: [%d, %d), want [%d, %d)", name, blocks, first, end, low, high)
			}
		}
		if first, end := l.span(nil); first != end {
			t.Errorf("%s: no blocks have bytes [%d, %d)", name, first, end)
		}
	}
}
