package transfer

import (
	"bytes"
	"encoding/hex"
	"errors"
	"math"
	"math/rand/v2"
	"strings"
	"testing"
)

// testLayout is [layer][block][plane][token][head][dim], the reference engine's order.
func testLayout(layers, blocks, blockTokens, heads, headBytes uint32) Layout {
	l := Layout{
		DType: F32, Layers: layers, Blocks: blocks, BlockTokens: blockTokens, Planes: 2, Heads: heads, HeadsTotal: heads,
		HeadBytes: headBytes, TPSize: 1, Fingerprint: [32]byte{1, 2, 3},
	}
	l.HeadStride = uint64(headBytes)
	l.TokenStride = l.HeadStride * uint64(heads)
	l.PlaneStride = l.TokenStride * uint64(blockTokens)
	l.BlockStride = l.PlaneStride * 2
	l.LayerStride = l.BlockStride * uint64(blocks)
	return l
}

func layoutBytes(l Layout) uint64 { return l.LayerStride * uint64(l.Layers) }

func TestLayoutIsGolden(t *testing.T) {
	l := testLayout(3, 7, 16, 4, 128)
	l.Base, l.PlanesReversed, l.DType = 4096, true, BF16
	b, err := l.MarshalBinary()
	if err != nil {
		t.Fatal(err)
	}
	const want = "01030100" + "03000000" + "07000000" + "10000000" + "02000000" + "04000000" + "00000000" + "04000000" + "80000000" +
		"00000000" + "01000000" + "00000000" + "0010000000000000" + "00c0010000000000" + "0040000000000000" + "0020000000000000" +
		"0002000000000000" + "8000000000000000" + "0102030000000000000000000000000000000000000000000000000000000000"
	if got := hex.EncodeToString(b); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	back, err := UnmarshalLayout(b)
	if err != nil || back != l {
		t.Errorf("round trip: %+v, %v", back, err)
	}
}

func TestLayoutValidateRefuses(t *testing.T) {
	good := testLayout(3, 7, 16, 4, 128)
	size := layoutBytes(good)
	if err := good.Validate(size); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name, reason string
		change       func(*Layout)
	}{
		{"one byte short", "needs", func(l *Layout) { l.Base = 1 }},
		{"no layers", "layers", func(l *Layout) { l.Layers = 0 }},
		{"too many blocks", "blocks", func(l *Layout) { l.Blocks = math.MaxUint32 }},
		{"heads beyond the total", "heads 1 to 5", func(l *Layout) { l.HeadFirst = 1 }},
		{"heads wrap", "heads", func(l *Layout) { l.HeadFirst = math.MaxUint32 }},
		{"blocks overlap planes", "overlaps", func(l *Layout) { l.BlockStride-- }},
		{"all strides zero", "overlaps", func(l *Layout) { l.HeadStride, l.TokenStride, l.PlaneStride = 0, 0, 0 }},
		{"stride overflows", "overflows", func(l *Layout) { l.LayerStride = math.MaxUint64 }},
		{"base overflows", "needs", func(l *Layout) { l.Base = math.MaxUint64 - 10 }},
		{"unknown dtype", "dtype", func(l *Layout) { l.DType = 77 }},
		{"rank out of range", "rank", func(l *Layout) { l.TPRank = 1 }},
	} {
		l := good
		c.change(&l)
		if err := l.Validate(size); !errors.Is(err, ErrLayout) || !strings.Contains(err.Error(), c.reason) {
			t.Errorf("%s: got %v, want a refusal that says %q", c.name, err, c.reason)
		}
	}
}

func TestPlanRefuses(t *testing.T) {
	src := testLayout(3, 7, 16, 4, 128)
	for _, c := range []struct {
		reason string
		change func(*Layout)
	}{
		{"layers", func(l *Layout) { l.Layers = 4 }},
		{"planes", func(l *Layout) { l.Planes = 1 }},
		{"bytes a head", func(l *Layout) { l.HeadBytes = 64 }},
		{"holds F32, destination F16", func(l *Layout) { l.DType = F16 }},
		{"fingerprints differ", func(l *Layout) { l.Fingerprint[31] = 9 }},
		{"heads in total", func(l *Layout) { l.HeadsTotal = 8 }},
	} {
		dst := src
		c.change(&dst)
		if _, err := PlanCopy(src, dst); !errors.Is(err, ErrPlan) || !strings.Contains(err.Error(), c.reason) {
			t.Errorf("got %v, want a refusal that says %q", err, c.reason)
		}
	}
	a, b := src, src
	a.Heads, b.Heads, b.HeadFirst = 2, 2, 2
	if _, err := PlanCopy(a, b); !errors.Is(err, ErrPlan) {
		t.Errorf("disjoint heads: %v", err)
	}
}

// randomLayout nests the five dimensions in a random order with random gaps.
func randomLayout(r *rand.Rand, layers, blocks, blockTokens, headFirst, heads, headsTotal uint32) Layout {
	l := Layout{
		DType: F16, Layers: layers, Blocks: blocks, BlockTokens: blockTokens, Planes: 2, Heads: heads, HeadFirst: headFirst,
		HeadsTotal: headsTotal, HeadBytes: 8, TPSize: 1, PlanesReversed: r.IntN(2) == 0, Base: uint64(r.IntN(3)) * 8,
	}
	dims := []struct {
		stride *uint64
		n      uint32
	}{{&l.LayerStride, layers}, {&l.BlockStride, blocks}, {&l.PlaneStride, 2}, {&l.TokenStride, blockTokens}, {&l.HeadStride, heads}}
	r.Shuffle(len(dims), func(i, j int) { dims[i], dims[j] = dims[j], dims[i] })
	extent := uint64(l.HeadBytes)
	for _, d := range dims {
		*d.stride = extent + uint64(r.IntN(2)*r.IntN(24))
		extent += uint64(d.n-1) * *d.stride
	}
	return l
}

func (l Layout) end() uint64 {
	return l.Base + uint64(l.Layers-1)*l.LayerStride + uint64(l.Blocks-1)*l.BlockStride + uint64(l.Planes-1)*l.PlaneStride +
		uint64(l.BlockTokens-1)*l.TokenStride + uint64(l.Heads-1)*l.HeadStride + uint64(l.HeadBytes)
}

// element is the definition of a layout, independent of plans.
func (l Layout) element(layer, block, plane, token, head uint32) uint64 {
	if l.PlanesReversed {
		plane = l.Planes - 1 - plane
	}
	return l.offset(layer, block, plane, token) + uint64(head-l.HeadFirst)*l.HeadStride
}

func TestPlanEqualsNaiveCopy(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 3000 {
		layers, total := uint32(1+r.IntN(3)), uint32(1+r.IntN(6))
		tokens := uint32(1 + r.IntN(40))
		pick := func() (Layout, []uint32, []byte) {
			first := uint32(r.IntN(int(total)))
			heads := uint32(1 + r.IntN(int(total-first)))
			bt := []uint32{1, 2, 3, 4, 8, 16}[r.IntN(6)]
			need := blocksOf(tokens, bt)
			l := randomLayout(r, layers, need+uint32(r.IntN(3)), bt, first, heads, total)
			if err := l.Validate(l.end()); err != nil {
				t.Fatalf("%+v: %v", l, err)
			}
			ids := make([]uint32, need)
			for i, v := range r.Perm(int(l.Blocks))[:need] {
				ids[i] = uint32(v)
			}
			return l, ids, make([]byte, l.end())
		}
		src, srcIDs, srcMem := pick()
		dst, dstIDs, got := pick()
		for i := range srcMem {
			srcMem[i] = byte(r.Uint32())
		}
		p, err := PlanCopy(src, dst)
		if err != nil {
			if src.HeadFirst+src.Heads > dst.HeadFirst && dst.HeadFirst+dst.Heads > src.HeadFirst {
				t.Fatal(err)
			}
			continue
		}
		firstToken := uint32(r.IntN(int(tokens) + 1))
		g, err := newGeometry([]ShardPair{{Plan: p}}, tokens, firstToken, 1<<20)
		if err != nil {
			t.Fatal(err)
		}
		want := make([]byte, len(got))
		var payload uint64
		for layer := range layers {
			for b := range blocksOf(tokens, src.BlockTokens) {
				var n uint64
				for _, run := range p.AppendRuns(nil, layer, b, tokens, srcIDs, dstIDs, firstToken) {
					copy(got[run.Dst:run.Dst+run.Len], srcMem[run.Src:run.Src+run.Len])
					n += run.Len
				}
				if n != g.unitBytes(&g.pairs[0], b) {
					t.Fatalf("unit %d has %d bytes in runs, %d by geometry", b, n, g.unitBytes(&g.pairs[0], b))
				}
				payload += n
			}
			naiveCopy(want, srcMem, src, dst, layer, firstToken, tokens, srcIDs, dstIDs)
		}
		if want := uint64(src.Layers) * uint64(tokens-firstToken) * p.tokenBytes; payload != want {
			t.Fatalf("payload %d, want %d", payload, want)
		}
		if !bytes.Equal(got, want) {
			t.Fatalf("plan differs from the naive copy\nsrc %+v\ndst %+v", src, dst)
		}
	}
}

func naiveCopy(want, mem []byte, src, dst Layout, layer, firstToken, tokens uint32, srcIDs, dstIDs []uint32) {
	for tok := firstToken; tok < tokens; tok++ {
		for plane := range src.Planes {
			for h := max(src.HeadFirst, dst.HeadFirst); h < min(src.HeadFirst+src.Heads, dst.HeadFirst+dst.Heads); h++ {
				s := src.element(layer, srcIDs[tok/src.BlockTokens], plane, tok%src.BlockTokens, h)
				d := dst.element(layer, dstIDs[tok/dst.BlockTokens], plane, tok%dst.BlockTokens, h)
				copy(want[d:d+8], mem[s:s+8])
			}
		}
	}
}

func TestPlanJoinsRuns(t *testing.T) {
	l := testLayout(2, 64, 16, 4, 128)
	runs := func(src, dst Layout, srcIDs, dstIDs []uint32, tokens uint32) (n int) {
		p, err := PlanCopy(src, dst)
		if err != nil {
			t.Fatal(err)
		}
		var out []Run
		for b := range blocksOf(tokens, src.BlockTokens) {
			out = p.AppendRuns(out, 0, b, tokens, srcIDs, dstIDs, 0)
		}
		return len(out)
	}
	big := testLayout(2, 16, 64, 4, 128)
	half := testLayout(2, 64, 16, 2, 128)
	half.HeadsTotal, half.HeadFirst = 4, 2
	for _, c := range []struct {
		name     string
		src, dst Layout
		s, d     []uint32
		tokens   uint32
		want     int
	}{
		{"one block, both planes touch", l, l, []uint32{5}, []uint32{9}, 16, 1},
		{"scattered blocks", l, l, []uint32{5, 2, 8}, []uint32{9, 1, 4}, 48, 3},
		{"neighbours at both ends", l, l, []uint32{5, 6, 7}, []uint32{1, 2, 3}, 48, 1},
		{"partial block: K and V apart", l, l, []uint32{5}, []uint32{9}, 7, 2},
		{"16 to 64 tokens a block", l, big, []uint32{5, 2, 8, 1}, []uint32{3}, 64, 8},
		{"64 to 16 tokens a block", big, l, []uint32{3}, []uint32{5, 2, 8, 1}, 64, 8},
		{"half of the heads", l, half, []uint32{5}, []uint32{9}, 16, 32},
	} {
		if got := runs(c.src, c.dst, c.s, c.d, c.tokens); got != c.want {
			t.Errorf("%s: %d runs, want %d", c.name, got, c.want)
		}
	}
}

func TestSliceRuns(t *testing.T) {
	base := []Run{{0, 100, 10}, {50, 200, 20}, {90, 300, 5}}
	flat := func(rs []Run) (out [][2]uint64) {
		for _, r := range rs {
			for i := range r.Len {
				out = append(out, [2]uint64{r.Src + i, r.Dst + i})
			}
		}
		return out
	}
	all := flat(base)
	for off := range len(all) + 1 {
		for n := range len(all) - off + 1 {
			got := flat(sliceRuns(append([]Run(nil), base...), uint64(off), uint64(n)))
			if len(got) != n {
				t.Fatalf("[%d,+%d): %d bytes", off, n, len(got))
			}
			for i := range got {
				if got[i] != all[off+i] {
					t.Fatalf("[%d,+%d): byte %d is %v, want %v", off, n, i, got[i], all[off+i])
				}
			}
		}
	}
}

func FuzzLayout(f *testing.F) {
	l := testLayout(3, 7, 16, 4, 128)
	b, _ := l.MarshalBinary()
	f.Add(b, uint64(1<<20))
	b, _ = opaqueLayout(3, 7, 32, 4, 128).MarshalBinary()
	f.Add(b, uint64(1<<20))
	f.Fuzz(func(t *testing.T, b []byte, size uint64) {
		l, err := UnmarshalLayout(b)
		if err != nil {
			return
		}
		if again, _ := l.MarshalBinary(); !bytes.Equal(again, b) {
			t.Fatal("decoding is not the inverse of encoding")
		}
		if l.Validate(size) != nil {
			return
		}
		if l.end() > size || l.end() < l.Base {
			t.Fatalf("validated layout ends at %d of %d", l.end(), size)
		}
		p, err := PlanCopy(l, l)
		if err != nil {
			t.Fatal(err)
		}
		if p.dims[0].count > 1 && uint64(l.Planes)*uint64(l.Heads)*uint64(l.BlockTokens) > 4096 {
			return
		}
		for _, r := range p.AppendRuns(nil, l.Layers-1, 0, l.BlockTokens, []uint32{l.Blocks - 1}, []uint32{0}, 0) {
			if r.Src+r.Len > size || r.Dst+r.Len > size || r.Src+r.Len < r.Src || r.Dst+r.Len < r.Dst {
				t.Fatalf("run %+v leaves a region of %d bytes", r, size)
			}
		}
	})
}
