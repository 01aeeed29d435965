package transfer

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

// shardsOf divides the heads of a whole layout over n ranks as evenly as can be. With more ranks than heads, heads are
// held by several, as vLLM has it.
func shardsOf(whole Layout, n uint32) []Layout {
	out := make([]Layout, n)
	for rank := range n {
		first, end := rank*whole.Heads/n, (rank+1)*whole.Heads/n
		l := testLayout(whole.Layers, whole.Blocks, whole.BlockTokens, max(end-first, 1), whole.HeadBytes)
		l.HeadFirst, l.HeadsTotal, l.TPRank, l.TPSize = first, whole.Heads, rank, n
		out[rank] = l
	}
	return out
}

// randomShards is a random set of 1 to 8 ranks: heads divided evenly or not, or more ranks than heads.
func randomShards(r *rand.Rand, layers, blocks, blockTokens, heads uint32) []Layout {
	n := 1 + r.IntN(8)
	cuts := []uint32{0}
	for len(cuts) < min(n, int(heads)) {
		if c := uint32(r.IntN(int(heads))); !slices.Contains(cuts, c) {
			cuts = append(cuts, c)
		}
	}
	slices.Sort(cuts)
	cuts = append(cuts, heads)
	out := make([]Layout, n)
	for rank := range out {
		i := rank * (len(cuts) - 1) / n // each range once, unless there are more ranks than heads
		out[rank] = randomLayout(r, layers, blocks, blockTokens, cuts[i], cuts[i+1]-cuts[i], heads)
		out[rank].TPRank, out[rank].TPSize = uint32(rank), uint32(n)
	}
	r.Shuffle(n, func(i, j int) { // any rank may hold any heads
		a, b := out[i], out[j]
		a.TPRank, b.TPRank = b.TPRank, a.TPRank
		out[i], out[j] = b, a
	})
	return out
}

// side is one end of a random copy.
type shardSide struct {
	layouts []Layout
	ids     []uint32
	mems    [][]byte
}

func randomSide(t *testing.T, r *rand.Rand, layers, heads, tokens uint32) shardSide {
	t.Helper()
	bt := []uint32{1, 2, 3, 4, 8, 16, 64, 128}[r.IntN(8)]
	need := blocksOf(tokens, bt)
	s := shardSide{layouts: randomShards(r, layers, need+uint32(r.IntN(3)), bt, heads)}
	for _, v := range r.Perm(int(s.layouts[0].Blocks))[:need] {
		s.ids = append(s.ids, uint32(v))
	}
	for _, l := range s.layouts {
		if err := l.Validate(l.end()); err != nil {
			t.Fatalf("%+v: %v", l, err)
		}
		s.mems = append(s.mems, make([]byte, l.end()))
	}
	return s
}

// holder is any rank that holds a head.
func (s *shardSide) holder(head uint32) int {
	return slices.IndexFunc(s.layouts, func(l Layout) bool { return head >= l.HeadFirst && head < l.headEnd() })
}

// fill writes the same bytes for the same (layer, plane, token, head) whoever holds it.
func (s *shardSide) fill(tokens uint32, salt uint64) {
	for i, l := range s.layouts {
		s.each(i, 0, tokens, func(layer, plane, tok, head uint32, at uint64) {
			r := rand.New(rand.NewPCG(salt, uint64(layer)<<48|uint64(plane)<<40|uint64(head)<<24|uint64(tok)))
			for k := range uint64(l.HeadBytes) {
				s.mems[i][at+k] = byte(r.Uint32()) | 1
			}
		})
	}
}

// each visits every element of one shard: the definition of a layout, independent of plans.
func (s *shardSide) each(i int, firstToken, tokens uint32, f func(layer, plane, tok, head uint32, at uint64)) {
	l := s.layouts[i]
	for layer := range l.Layers {
		for plane := range l.Planes {
			for tok := firstToken; tok < tokens; tok++ {
				for h := l.HeadFirst; h < l.headEnd(); h++ {
					f(layer, plane, tok, h, l.element(layer, s.ids[tok/l.BlockTokens], plane, tok%l.BlockTokens, h))
				}
			}
		}
	}
}

// TestShardPlansEqualNaiveCopy: whatever the sets, the pieces of a lease write every wanted byte once, the right one, and
// no other byte.
func TestShardPlansEqualNaiveCopy(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	pairs, replicas := 0, 0
	for range 1500 {
		layers, heads, tokens := uint32(1+r.IntN(3)), uint32(1+r.IntN(8)), uint32(1+r.IntN(150))
		src, dst := randomSide(t, r, layers, heads, tokens), randomSide(t, r, layers, heads, tokens)
		src.fill(tokens, r.Uint64())
		firstToken := uint32(r.IntN(int(tokens) + 1))
		plan, err := PlanShards(src.layouts, dst.layouts)
		if err != nil {
			t.Fatal(err)
		}
		g, err := newGeometry(plan, tokens, firstToken, 1<<20)
		if err != nil {
			t.Fatal(err)
		}
		pairs += len(plan)
		if len(dst.layouts) > int(heads) {
			replicas++
		}
		copyPieces(t, &g, r, &src, &dst)
		for i := range dst.layouts {
			want := make([]byte, len(dst.mems[i]))
			dst.each(i, firstToken, tokens, func(layer, plane, tok, head uint32, at uint64) {
				k := src.holder(head)
				l := &src.layouts[k]
				from := l.element(layer, src.ids[tok/l.BlockTokens], plane, tok%l.BlockTokens, head)
				copy(want[at:at+uint64(l.HeadBytes)], src.mems[k][from:])
			})
			if !bytes.Equal(dst.mems[i], want) {
				t.Fatalf("shard %d differs from the naive copy\nsrc %+v\ndst %+v", i, src.layouts, dst.layouts)
			}
		}
	}
	t.Logf("1500 random sets, %d pairs of regions, %d destinations with replicated heads", pairs, replicas)
}

// copyPieces does what a lease does: every unit of every stripe, in pieces of a few units.
func copyPieces(t *testing.T, g *geometry, r *rand.Rand, src, dst *shardSide) {
	t.Helper()
	landed := newBitmap(g.bits)
	for stripe := range g.layers * uint32(len(g.pairs)) {
		for b := g.first; b < g.blocks; {
			p := Piece{Stripe: stripe, First: b, Count: min(g.blocks-b, uint32(1+r.IntN(4)))}
			n, err := g.bytesOf(&p)
			if err != nil {
				t.Fatal(err)
			}
			pair := g.pair(&p)
			var sum uint64
			for _, run := range g.appendRuns(nil, &p, src.ids, dst.ids) {
				to := dst.mems[pair.Dst][run.Dst : run.Dst+run.Len]
				if bytes.Count(to, []byte{0}) != len(to) {
					t.Fatalf("stripe %d writes a place twice", stripe)
				}
				copy(to, src.mems[pair.Src][run.Src:run.Src+run.Len])
				sum += run.Len
			}
			if sum != n {
				t.Fatalf("piece %+v has %d bytes in runs, %d by geometry", p, sum, n)
			}
			g.each(&p, func(bit uint64) {
				if !landed.set(bit) {
					t.Fatalf("piece %+v shares landing bit %d", p, bit)
				}
			})
			b += p.Count
		}
	}
	if landed.n != g.wanted {
		t.Fatalf("%d landing bits set, %d wanted", landed.n, g.wanted)
	}
}

func TestShardSetsAreRefused(t *testing.T) {
	whole := testLayout(3, 7, 16, 4, 128)
	for _, c := range []struct {
		reason string
		ranks  uint32
		change func(ls []Layout) []Layout
	}{
		{"0 regions", 1, func([]Layout) []Layout { return nil }},
		{"65 regions", 1, func(ls []Layout) []Layout { return slices.Repeat(ls, 65) }},
		{"rank 0 has blocks 7, rank 1 has 8", 2, func(ls []Layout) []Layout { ls[1].Blocks++; return ls }},
		{"layers", 2, func(ls []Layout) []Layout { ls[1].Layers++; return ls }},
		{"tokens a block", 2, func(ls []Layout) []Layout { ls[1].BlockTokens++; return ls }},
		{"dtype", 2, func(ls []Layout) []Layout { ls[1].DType = F16; return ls }},
		{"ranks", 2, func(ls []Layout) []Layout { ls[1].TPSize++; return ls }},
		{"heads in total", 2, func(ls []Layout) []Layout { ls[1].HeadsTotal++; return ls }},
		{"fingerprints", 2, func(ls []Layout) []Layout { ls[1].Fingerprint[0]++; return ls }},
		{"rank 0 comes after rank 1", 2, func(ls []Layout) []Layout { slices.Reverse(ls); return ls }},
		{"rank 0 comes after rank 0", 2, func(ls []Layout) []Layout { return []Layout{ls[0], ls[0]} }},
		{"no region holds heads 0 to 1 of 4", 2, func(ls []Layout) []Layout { ls[0].HeadFirst = 2; ls[0].TPSize, ls[1].TPSize = 8, 8; return ls }},
		{"no region holds heads 2 to 3 of 4", 2, func(ls []Layout) []Layout { return ls[:1] }},
		{"no region holds heads 1 to 1 of 4", 4, func(ls []Layout) []Layout { return slices.Delete(ls, 1, 2) }},
		{"rank 1 holds heads 1 to 3, of which another rank holds the first", 2, func(ls []Layout) []Layout { ls[1].HeadFirst, ls[1].Heads = 1, 3; return ls }},
		{"both hold head 0", 2, func(ls []Layout) []Layout { ls[1].HeadFirst = 0; return ls }},
		{"both hold head 0", 8, func(ls []Layout) []Layout { ls[1].Heads = 2; return ls }},
	} {
		if _, err := PlanShards(c.change(shardsOf(whole, c.ranks)), []Layout{whole}); !errors.Is(err, ErrPlan) || !strings.Contains(err.Error(), "source: ") || !strings.Contains(err.Error(), c.reason) {
			t.Errorf("got %v, want a refusal of the source that says %q", err, c.reason)
		}
	}
	// A source may leave replicas out, a destination may not.
	few := shardsOf(whole, 8)
	few = []Layout{few[0], few[3], few[5], few[6]}
	if pairs, err := PlanShards(few, []Layout{whole}); err != nil || len(pairs) != 4 {
		t.Errorf("source with one holder of each head: %d pairs, %v", len(pairs), err)
	}
	if _, err := PlanShards([]Layout{whole}, few); !errors.Is(err, ErrPlan) || !strings.Contains(err.Error(), "destination: ") || !strings.Contains(err.Error(), "4 regions for 8") {
		t.Errorf("destination with replicas left out: %v", err)
	}
	other := whole
	other.HeadsTotal, other.Heads = 2, 2
	if _, err := PlanShards([]Layout{whole}, []Layout{other}); !errors.Is(err, ErrPlan) {
		t.Errorf("other heads in total: %v", err)
	}
	many := testLayout(1, 1, 1, 63, 8)
	if _, err := PlanShards(shardsOf(many, 63), slices.Repeat([]Layout{many}, 1)); err != nil {
		t.Error(err)
	}
	replicas := make([]Layout, 64)
	for i := range replicas {
		replicas[i] = many
		replicas[i].TPRank, replicas[i].TPSize = uint32(i), 64
	}
	if _, err := PlanShards(shardsOf(many, 63), replicas); !errors.Is(err, ErrLimit) {
		t.Errorf("4032 pairs: %v", err)
	}
}

// Replicas are read in turn, so that no source rank serves all.
func TestReplicasShareTheReading(t *testing.T) {
	whole := testLayout(1, 4, 16, 2, 128)
	pairs, err := PlanShards(shardsOf(whole, 4), shardsOf(whole, 4))
	if err != nil {
		t.Fatal(err)
	}
	var from []int
	for _, p := range pairs {
		from = append(from, p.Src)
	}
	if want := []int{0, 1, 2, 3}; !slices.Equal(from, want) {
		t.Errorf("destinations read from %v, want %v", from, want)
	}
}

// kvFamily gives the layout of one rank of a kind of engine.
type kvFamily struct {
	name   string
	layout func(blocks, blockTokens, heads, headBytes uint32) Layout
}

var kvFamilies = []kvFamily{
	{"reference engine: [layer][block][K,V][token][head]", func(b, bt, h, hb uint32) Layout { return testLayout(2, b, bt, h, hb) }},
	{"vLLM FlashAttention, NHD: [layer][K,V][block][token][head]", func(b, bt, h, hb uint32) Layout {
		l := testLayout(2, b, bt, h, hb)
		l.BlockStride = l.TokenStride * uint64(bt)
		l.PlaneStride = l.BlockStride * uint64(b)
		return l
	}},
	{"vLLM FlashAttention, HND: [layer][K,V][block][head][token]", func(b, bt, h, hb uint32) Layout {
		l := testLayout(2, b, bt, h, hb)
		l.TokenStride = uint64(hb)
		l.HeadStride = l.TokenStride * uint64(bt)
		l.BlockStride = l.HeadStride * uint64(h)
		l.PlaneStride = l.BlockStride * uint64(b)
		return l
	}},
}

// TestDescriptorCounts states how many runs it takes to copy 64 tokens of one layer, 8 heads of 256 bytes, K and V:
// element by element, joined where the blocks lie scattered, and joined where they are neighbours at both ends. The table
// stands in docs/architecture.md.
func TestDescriptorCounts(t *testing.T) {
	const tokens, heads, headBytes = 64, 8, 256
	cases := []struct {
		name             string
		bt, tp, dbt, dtp uint32
		want             [3][2]int // a family: scattered, neighbours
	}{
		{"16 -> 16", 16, 1, 16, 1, [3][2]int{{4, 1}, {8, 2}, {8, 2}}},
		{"16 -> 64", 16, 1, 64, 1, [3][2]int{{8, 8}, {8, 2}, {64, 64}}},
		{"64 -> 16", 64, 1, 16, 1, [3][2]int{{8, 8}, {8, 2}, {64, 64}}},
		{"TP 1 -> 2", 16, 1, 16, 2, [3][2]int{{256, 256}, {256, 256}, {16, 16}}},
		{"TP 2 -> 1", 16, 2, 16, 1, [3][2]int{{256, 256}, {256, 256}, {16, 16}}},
		{"TP 1 -> 4", 16, 1, 16, 4, [3][2]int{{512, 512}, {512, 512}, {32, 32}}},
		{"TP 4 -> 1", 16, 4, 16, 1, [3][2]int{{512, 512}, {512, 512}, {32, 32}}},
		{"TP 2 -> 4", 16, 2, 16, 4, [3][2]int{{512, 512}, {512, 512}, {32, 32}}},
		{"TP 2 -> 2", 16, 2, 16, 2, [3][2]int{{8, 2}, {16, 4}, {16, 4}}},
		{"16 TP 1 -> 64 TP 2", 16, 1, 64, 2, [3][2]int{{256, 256}, {256, 256}, {64, 64}}},
	}
	table := &strings.Builder{}
	for i, f := range kvFamilies {
		fmt.Fprintf(table, "\n%s\n%-20s %9s %10s %11s %11s\n", f.name, "", "elements", "scattered", "neighbours", "bytes a run")
		for _, c := range cases {
			set := func(bt, tp uint32) []Layout {
				out := make([]Layout, tp)
				for rank := range tp {
					l := f.layout(64, bt, heads/tp, headBytes)
					l.HeadFirst, l.HeadsTotal, l.TPRank, l.TPSize = rank*heads/tp, heads, rank, tp
					out[rank] = l
				}
				return out
			}
			src, dst := set(c.bt, c.tp), set(c.dbt, c.dtp)
			elements, scattered := countRuns(t, src, dst, tokens, 3)
			_, neighbours := countRuns(t, src, dst, tokens, 1)
			if got := [2]int{scattered, neighbours}; got != c.want[i] {
				t.Errorf("%s, %s: %v runs, want %v", f.name, c.name, got, c.want[i])
			}
			fmt.Fprintf(table, "%-20s %9d %10d %11d %11d\n", c.name, elements, scattered, neighbours, 2*tokens*heads*headBytes/scattered)
		}
	}
	t.Log(table)
}

// countRuns counts the copies of one layer, element by element and joined, with blocks that far apart.
func countRuns(t *testing.T, src, dst []Layout, tokens, step uint32) (elements, runs int) {
	t.Helper()
	ids := func(l Layout) (out []uint32) {
		for i := range blocksOf(tokens, l.BlockTokens) {
			out = append(out, 1+i*step)
		}
		return out
	}
	pairs, err := PlanShards(src, dst)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range pairs {
		rs := p.Plan.appendUnits(nil, 0, 0, blocksOf(tokens, src[0].BlockTokens), tokens, ids(src[0]), ids(dst[0]), 0)
		runs += len(rs)
		for _, r := range rs {
			elements += int(r.Len) / int(src[0].HeadBytes)
		}
	}
	return elements, runs
}

// FuzzShards: whatever a peer says its shard set is, planning neither panics nor leaves a region.
func FuzzShards(f *testing.F) {
	whole := testLayout(3, 7, 16, 4, 128)
	f.Add(appendLayouts(nil, shardsOf(whole, 2)), appendLayouts(nil, shardsOf(whole, 4)))
	f.Add(appendLayouts(nil, shardsOf(whole, 8)), appendLayouts(nil, []Layout{whole}))
	f.Add(appendLayouts(nil, opaqueShards(whole, 2)), appendLayouts(nil, opaqueShards(whole, 2)))
	f.Fuzz(func(t *testing.T, a, b []byte) {
		const size = 1 << 24
		var sets [2][]Layout
		for i, raw := range [][]byte{a, b} {
			ls, err := parseLayouts(raw)
			if err != nil || slices.ContainsFunc(ls, func(l Layout) bool { return l.Validate(size) != nil }) {
				return
			}
			sets[i] = ls
		}
		pairs, err := PlanShards(sets[0], sets[1])
		if err != nil {
			if !errors.Is(err, ErrPlan) && !errors.Is(err, ErrLimit) {
				t.Errorf("untyped error %v", err)
			}
			return
		}
		filled := make([]uint32, len(sets[1]))
		for _, p := range pairs {
			filled[p.Dst] += p.Plan.heads
			l := &sets[0][p.Src]
			if uint64(l.Planes)*uint64(l.Heads)*uint64(l.BlockTokens) > 4096 {
				continue
			}
			for _, r := range p.Plan.AppendRuns(nil, 0, 0, min(l.BlockTokens, sets[1][p.Dst].BlockTokens), []uint32{l.Blocks - 1}, []uint32{sets[1][p.Dst].Blocks - 1}, 0) {
				if r.Src+r.Len > size || r.Dst+r.Len > size {
					t.Fatalf("run %+v leaves a region of %d bytes", r, size)
				}
			}
		}
		for i, n := range filled {
			if n != sets[1][i].Heads {
				t.Fatalf("%d of the %d heads of destination %d are filled", n, sets[1][i].Heads, i)
			}
		}
	})
}
