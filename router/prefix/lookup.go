package prefix

import (
	"math/bits"
	"sync"

	"github.com/headrace/headrace/router/tokens"
)

// Match is what a worker has of a prompt.
type Match struct {
	// Tokens is the length of the longest prefix whose blocks are all there, as far as a request can use it: an engine
	// computes the prompt's last token in any case.
	Tokens int
	// Rank is the data-parallel rank that has it, the first of several; -1 when that is not known.
	Rank int
	// Approximate: by what was routed there, not by what the engine says.
	Approximate bool
}

const (
	stripFirst = 8 // blocks hashed and looked up at a time, to begin with: most prompts are new
	stripMax   = 64
	// stampFresh is how old a stamp, in seconds, is not renewed: a reader then writes nothing.
	stampFresh = 4
)

// strip is what a lookup works in.
type strip struct {
	hashes  [stripMax]Hash
	places  [stripMax]uint64
	touched uint64 // so that the loads that fill the cache are not left out
	found   aside
	first   int          // of planes and lengths: the first of the group at hand
	alive   []uint64     // of that group
	left    uint64       // indices of its planes in which any is
	lengths [][64]uint32 // in blocks, by plane and bit
	planes  []*plane     // of lengths
	blocks  blocks
}

var strips = sync.Pool{New: func() any { return &strip{} }}

// Lookup is LookupParts of a prompt that comes in one.
func (x *Index) Lookup(prompt []uint32, seed Seed, workers []string, out []Match) []Match {
	return x.LookupParts([]tokens.Part{{IDs: prompt}}, seed, workers, out)
}

// LookupParts tells for each of workers what it has of a prompt; out, of that length at least, takes the answers, and is made
// when it is nil. It takes no lock but a Memo's, and no more time for many workers than for a few.
func (x *Index) LookupParts(prompt []tokens.Part, seed Seed, workers []string, out []Match) []Match {
	if out == nil {
		out = make([]Match, len(workers))
	}
	out = out[:len(workers)]
	x.figures.lookups.Add(1)
	stamp := x.stamp()
	x.tidy(stamp)
	sh := x.shape.Load()
	st := strips.Get().(*strip)
	st.planes, st.lengths = st.planes[:0], st.lengths[:0]
	n := lengthOf(prompt)
	for _, g := range sh.groups {
		x.walk(st, g, prompt, n, seed, stamp)
	}
	found := 0
	for i, w := range workers {
		out[i] = st.match(sh.workers[w])
		found = max(found, out[i].Tokens)
	}
	x.figures.looked.Add(uint64(n))
	x.figures.found.Add(uint64(found))
	clear(st.planes)
	strips.Put(st)
	return out
}

func lengthOf(prompt []tokens.Part) (n int) {
	for i := range prompt {
		n += len(prompt[i].IDs)
	}
	return n
}

// walk goes along the prompt's blocks for as long as any source of the group has all of them. A block that is there
// without one before it counts for nothing, as it does for the engine.
func (x *Index) walk(st *strip, g group, prompt []tokens.Part, length int, seed Seed, stamp uint32) {
	size := int(g.blockTokens)
	n := (length - 1) / size
	st.first, st.alive, st.left = len(st.planes), st.alive[:0], 0
	for _, p := range g.planes {
		live := p.live.Load()
		st.planes, st.lengths, st.alive = append(st.planes, p), append(st.lengths, [64]uint32{}), append(st.alive, live)
		if live != 0 {
			st.left |= 1 << p.index
		}
	}
	b := &st.blocks
	b.begin(prompt, size, seed)
	width := stripFirst
	for base := 0; base < n && st.left != 0; {
		count := min(width, n-base)
		for i := range count {
			st.hashes[i] = b.next()
		}
		x.along(st, &g, count, base, stamp)
		base += count
		width = min(2*width, stripMax)
	}
	b.end()
	for j, alive := range st.alive {
		settle(&st.lengths[st.first+j], alive, max(0, n))
	}
}

// settle notes that a prefix ends for some sources.
func settle(lengths *[64]uint32, gone uint64, at int) {
	for ; gone != 0; gone &= gone - 1 {
		lengths[bits.TrailingZeros64(gone)] = uint32(at)
	}
}

// along looks up the blocks of one strip in all planes of a group.
func (x *Index) along(st *strip, g *group, count, base int, stamp uint32) {
	// Each of these loads misses the cache, and none waits for another.
	var touch uint64
	for i := range count {
		k := spot(g.tag, st.hashes[i])
		st.places[i] = k
		touch += x.table.segment(k).slots[home(k)].k.Load()
	}
	st.touched += touch
	for i := 0; i < count && st.left != 0; i++ {
		s := x.table.read(st.places[i], st.left, &st.found)
		if s == nil {
			s = x.readLocked(st.places[i], st.left, &st.found)
		}
		for j, p := range g.planes {
			if st.alive[j] != 0 {
				st.take(s, p, j, base+i, stamp)
			}
		}
	}
}

// take is for what was read of a block in one plane.
func (st *strip) take(s *segment, p *plane, j, block int, stamp uint32) {
	v, m := uint64(0), st.found.m[p.index]
	if st.found.seen>>p.index&1 != 0 && inPlane(m, p.id) {
		v = st.found.v[p.index]
	}
	if gone := st.alive[j] &^ v; gone != 0 {
		settle(&st.lengths[st.first+j], gone, block)
		if st.alive[j] &= v; st.alive[j] == 0 {
			st.left &^= 1 << p.index
			return
		}
	}
	if stampOf(m)+stampFresh <= stamp {
		// Another entry may stand there by now: then it was as old as this one, and is spared for once.
		s.slots[st.found.at[p.index]].m.CompareAndSwap(m, m&^0xffffffff|uint64(stamp))
	}
}

// readLocked is the table's read of what a reader was kept from seeing for too long.
func (x *Index) readLocked(k, want uint64, out *aside) *segment {
	x.mu.Lock()
	defer x.mu.Unlock()
	s := x.table.segment(k)
	s.probe(k, want, out)
	return s
}

// match is the best of what a worker's sources have: what they say themselves, or else what was noted.
func (st *strip) match(sources []*source) Match {
	best := Match{Rank: -1}
	told := false
	for _, s := range sources {
		told = told || s.heard.Load() && !s.noted
	}
	best.Approximate = !told
	for _, s := range sources {
		at := s.seat.Load()
		if at == nil || s.noted == told {
			continue
		}
		for j, p := range st.planes {
			if p != at.plane {
				continue
			}
			n := int(st.lengths[j][bits.TrailingZeros64(at.bit)]) * int(p.blockTokens)
			if n > best.Tokens || n == best.Tokens && !s.noted && (best.Rank < 0 || s.name.Rank < best.Rank) {
				best.Tokens = n
				if !s.noted {
					best.Rank = s.name.Rank
				}
			}
			break
		}
	}
	return best
}
