package transfer

import (
	"cmp"
	"fmt"
	"slices"
)

// A shard set is the KV cache of one inference engine in several regions, one a tensor-parallel rank. Its layouts agree
// in everything but rank, head range and strides, so that one list of block ids names the same tokens in all of them.
// A lease goes from one shard set to another: see PlanShards.

// ShardsMax is the most regions of a shard set, and shardPairsMax the most pairs of regions that a lease copies between.
const (
	ShardsMax     = 64
	shardPairsMax = 1024
)

// ShardPair is a source region and a destination region, as indexes into their sets, that hold heads in common.
type ShardPair struct {
	Src, Dst int
	Plan     *Plan
}

// PlanShards plans the copies that fill every head of every region of dst from src, or says why that cannot be. The
// layouts must be valid. Both ends of a lease compute the pairs and their order for themselves: for each destination
// region, for each range of heads of the source in the order of heads, one pair where they overlap. Where several
// source regions hold the same heads, destination region number i reads from number i modulo how many there are, in order
// of rank.
func PlanShards(src, dst []Layout) ([]ShardPair, error) {
	if err := checkShards(src, false); err != nil {
		return nil, fmt.Errorf("source: %w", err)
	}
	if err := checkShards(dst, true); err != nil {
		return nil, fmt.Errorf("destination: %w", err)
	}
	if a, b := src[0].HeadsTotal, dst[0].HeadsTotal; a != b { // said here, as overlaps mean nothing then
		return nil, fmt.Errorf("%w: source has %d heads in total, destination %d", ErrPlan, a, b)
	}
	var pairs []ShardPair
	groups := holders(src)
	for j := range dst {
		for _, g := range groups {
			i := g[j%len(g)]
			if !src[i].sharesHeads(&dst[j]) {
				continue
			}
			p, err := PlanCopy(src[i], dst[j])
			if err != nil {
				return nil, err
			}
			if pairs = append(pairs, ShardPair{i, j, p}); len(pairs) > shardPairsMax {
				return nil, fmt.Errorf("%w: more than %d pairs of regions to copy between", ErrLimit, shardPairsMax)
			}
		}
	}
	return pairs, nil
}

func (l *Layout) headEnd() uint32 { return l.HeadFirst + l.Heads }

func (l *Layout) sharesHeads(m *Layout) bool {
	return l.HeadFirst < m.headEnd() && m.HeadFirst < l.headEnd()
}

// holders groups the regions of a checked set by the heads they hold, in order of heads and then of rank.
func holders(ls []Layout) (groups [][]int) {
	order := make([]int, len(ls))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(ls[a].HeadFirst, ls[b].HeadFirst) })
	for _, i := range order {
		if n := len(groups); n > 0 && ls[groups[n-1][0]].HeadFirst == ls[i].HeadFirst {
			groups[n-1] = append(groups[n-1], i)
		} else {
			groups = append(groups, []int{i})
		}
	}
	return groups
}

// checkShards says why valid layouts are no shard set. A source may leave out ranks whose heads others hold as well; a
// destination must name all, as all are to be filled.
func checkShards(ls []Layout, all bool) error {
	if len(ls) == 0 || len(ls) > ShardsMax {
		return fmt.Errorf("%w: a shard set of %d regions, need 1 to %d", ErrPlan, len(ls), ShardsMax)
	}
	first := &ls[0]
	for i := range ls {
		l := &ls[i]
		for _, f := range [...]struct {
			name string
			a, b uint32
		}{
			{"layers", first.Layers, l.Layers}, {"blocks", first.Blocks, l.Blocks}, {"tokens a block", first.BlockTokens, l.BlockTokens},
			{"planes", first.Planes, l.Planes}, {"heads in total", first.HeadsTotal, l.HeadsTotal}, {"bytes a head", first.HeadBytes, l.HeadBytes},
			{"ranks", first.TPSize, l.TPSize}, {"dtype", uint32(first.DType), uint32(l.DType)},
			{"opaque", number(first.Opaque), number(l.Opaque)},
		} {
			if f.a != f.b {
				return fmt.Errorf("%w: the regions of a shard set differ: rank %d has %s %d, rank %d has %d", ErrPlan, first.TPRank, f.name, f.a, l.TPRank, f.b)
			}
		}
		if first.Fingerprint != l.Fingerprint {
			return fmt.Errorf("%w: the regions of a shard set differ: ranks %d and %d have other fingerprints (%x and %x)", ErrPlan, first.TPRank, l.TPRank, first.Fingerprint[:6], l.Fingerprint[:6])
		}
		if i > 0 && l.TPRank <= ls[i-1].TPRank {
			return fmt.Errorf("%w: rank %d comes after rank %d: list a shard set's regions in order of rank, each once", ErrPlan, l.TPRank, ls[i-1].TPRank)
		}
	}
	if all && len(ls) != int(first.TPSize) {
		return fmt.Errorf("%w: %d regions for %d tensor-parallel ranks: every rank's is to be filled", ErrPlan, len(ls), first.TPSize)
	}
	return checkHeads(ls)
}

func number(b bool) uint32 {
	if b {
		return 1
	}
	return 0
}

// checkHeads wants each head held exactly once, or by regions that hold the very same heads where there are more ranks
// than heads.
func checkHeads(ls []Layout) error {
	next := uint32(0)
	for _, g := range holders(ls) {
		l := &ls[g[0]]
		if l.HeadFirst > next {
			return fmt.Errorf("%w: no region holds heads %d to %d of %d", ErrPlan, next, l.HeadFirst-1, l.HeadsTotal)
		}
		if l.HeadFirst < next {
			return fmt.Errorf("%w: rank %d holds heads %d to %d, of which another rank holds the first", ErrPlan, l.TPRank, l.HeadFirst, l.headEnd()-1)
		}
		for _, i := range g[1:] {
			if m := &ls[i]; m.Heads != l.Heads || m.TPSize <= m.HeadsTotal {
				return fmt.Errorf("%w: ranks %d and %d both hold head %d: only whole ranges may be held twice, and only by more ranks (%d) than heads (%d)", ErrPlan,
					l.TPRank, m.TPRank, m.HeadFirst, m.TPSize, m.HeadsTotal)
			}
		}
		next = l.headEnd()
	}
	if total := ls[0].HeadsTotal; next < total {
		return fmt.Errorf("%w: no region holds heads %d to %d of %d", ErrPlan, next, total-1, total)
	}
	return nil
}

func layoutsOf(rs []*Region) []Layout {
	ls := make([]Layout, len(rs))
	for i, r := range rs {
		ls[i] = r.layout
	}
	return ls
}

// lendAll marks blocks as a lease's own in every region of a set, or in none.
func lendAll(rs []*Region, id LeaseID, blocks []uint32) error {
	for i, r := range rs {
		if err := r.lend(id, blocks); err != nil {
			giveBackAll(rs[:i], blocks)
			return err
		}
	}
	return nil
}

func giveBackAll(rs []*Region, blocks []uint32) {
	for _, r := range rs {
		r.giveBack(blocks)
	}
}
