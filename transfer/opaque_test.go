package transfer

import (
	"encoding/hex"
	"errors"
	"math"
	"strings"
	"testing"
)

// opaqueLayout has blocks of which nobody knows what lies where.
func opaqueLayout(layers, blocks, blockTokens, heads, headBytes uint32) Layout {
	l := testLayout(layers, blocks, blockTokens, heads, headBytes)
	l.Opaque, l.Planes = true, 1
	l.BlockStride = l.PlaneStride
	l.LayerStride = l.BlockStride * uint64(blocks)
	return l
}

func opaqueShards(whole Layout, n uint32) []Layout {
	out := shardsOf(whole, n)
	for i, l := range out {
		o := opaqueLayout(l.Layers, l.Blocks, l.BlockTokens, l.Heads, l.HeadBytes)
		o.HeadFirst, o.HeadsTotal, o.TPRank, o.TPSize = l.HeadFirst, l.HeadsTotal, l.TPRank, l.TPSize
		out[i] = o
	}
	return out
}

func TestOpaqueLayoutIsGolden(t *testing.T) {
	l := opaqueLayout(3, 7, 32, 4, 128)
	b, _ := l.MarshalBinary()
	if got := hex.EncodeToString(b[:8]); got != "0101020003000000" {
		t.Errorf("begins with %s", got)
	}
	if back, err := UnmarshalLayout(b); err != nil || back != l {
		t.Errorf("round trip: %+v, %v", back, err)
	}
	b[2] |= 4
	if _, err := UnmarshalLayout(b); !errors.Is(err, ErrLayout) {
		t.Errorf("an unknown flag passes: %v", err)
	}
}

func TestOpaqueLayoutValidateRefuses(t *testing.T) {
	good := opaqueLayout(3, 7, 32, 4, 128)
	if err := good.Validate(layoutBytes(good)); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		reason string
		change func(*Layout)
	}{
		{"opaque blocks with 2 planes", func(l *Layout) { l.Planes = 2 }},
		{"token stride of 520", func(l *Layout) { l.TokenStride += 8 }},
		{"head stride of 136", func(l *Layout) { l.HeadStride += 8 }},
		{"overlaps", func(l *Layout) { l.BlockStride-- }},
	} {
		l := good
		c.change(&l)
		if err := l.Validate(math.MaxInt64); !errors.Is(err, ErrLayout) || !strings.Contains(err.Error(), c.reason) {
			t.Errorf("got %v, want %q", err, c.reason)
		}
	}
}

func TestOpaqueBlocksFitTheirLikeAlone(t *testing.T) {
	whole := testLayout(3, 7, 32, 4, 128)
	src := opaqueShards(whole, 2)
	if pairs, err := PlanShards(src, opaqueShards(whole, 2)); err != nil || len(pairs) != 2 {
		t.Fatalf("equal sets: %d pairs, %v", len(pairs), err)
	}
	for _, c := range []struct {
		reason string
		dst    []Layout
	}{
		{"opaque blocks of 32 and 64 tokens", opaqueShards(testLayout(3, 7, 64, 4, 128), 2)},
		{"opaque blocks of 2 and 1 tensor-parallel ranks", opaqueShards(whole, 1)},
		{"opaque blocks of 2 and 4 tensor-parallel ranks", opaqueShards(whole, 4)},
		{"the blocks of one side are opaque", shardsOf(testLayout(3, 7, 32, 4, 128), 2)},
		{"rank 0 has opaque 1, rank 1 has 0", func() []Layout {
			ls := opaqueShards(whole, 2)
			ls[1].Opaque = false
			return ls
		}()},
		{"opaque blocks of 2 and 1 heads a rank", func() []Layout {
			ls := opaqueShards(whole, 2)
			ls[0], ls[1] = opaqueLayout(3, 7, 32, 1, 128), opaqueLayout(3, 7, 32, 3, 128)
			for i := range ls {
				ls[i].HeadFirst, ls[i].HeadsTotal, ls[i].TPRank, ls[i].TPSize = uint32(i), 4, uint32(i), 2
			}
			return ls
		}()},
	} {
		for i := range c.dst {
			if c.dst[i].Opaque == src[0].Opaque { // planes are looked at before
				continue
			}
			c.dst[i].Planes = 1
		}
		if _, err := PlanShards(src, c.dst); !errors.Is(err, ErrPlan) || !strings.Contains(err.Error(), c.reason) {
			t.Errorf("got %v, want %q", err, c.reason)
		}
	}
}

// The last block goes whole, whatever of it the request fills; so does the first that is wanted.
func TestOpaqueBlocksGoWhole(t *testing.T) {
	l := opaqueLayout(2, 9, 32, 2, 64)
	const block = 32 * 2 * 64
	pairs, err := PlanShards([]Layout{l}, []Layout{l})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ tokens, first, blocks uint32 }{{1, 0, 1}, {33, 0, 2}, {70, 32, 2}, {70, 64, 1}, {70, 70, 0}, {96, 96, 0}, {96, 0, 3}} {
		g, err := newGeometry(pairs, c.tokens, c.first, 1000)
		if err != nil {
			t.Fatal(err)
		}
		if g.wanted != uint64(2*c.blocks) {
			t.Errorf("%+v: %d pieces are wanted", c, g.wanted)
		}
		if c.blocks == 0 {
			continue
		}
		p := Piece{Stripe: 1, First: g.first, Count: c.blocks}
		n, err := g.bytesOf(&p)
		if err != nil || n != uint64(c.blocks)*block {
			t.Errorf("%+v: %d bytes, %v", c, n, err)
		}
		for i, r := range g.appendRuns(nil, &p, []uint32{5, 1, 7}, []uint32{2, 8, 4}) {
			if r.Len != block || (r.Src-l.LayerStride)%block != 0 {
				t.Errorf("%+v: run %d is %+v", c, i, r)
			}
		}
	}
	if _, err := newGeometry([]ShardPair{{0, 0, &Plan{src: Layout{Opaque: true, BlockTokens: 1 << 14, Layers: 1}}}}, math.MaxUint32, 0, 1<<30); !errors.Is(err, ErrLimit) {
		t.Errorf("tokens that overflow when rounded up: %v", err)
	}
}
