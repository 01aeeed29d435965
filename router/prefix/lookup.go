package prefix

import (
	"math/bits"
	"sync"
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
	alive   []uint64
	lengths [][64]uint32 // in blocks, by plane and bit
	planes  []*plane     // of lengths
}

var strips = sync.Pool{New: func() any { return &strip{} }}

// Lookup tells for each of workers what it has of a prompt; out, of that length at least, takes the answers, and is made
// when it is nil. It takes no lock and no more time for many workers than for a few.
func (x *Index) Lookup(tokens []uint32, seed Seed, workers []string, out []Match) []Match {
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
	for _, g := range sh.groups {
		x.walk(st, g, tokens, seed, stamp)
	}
	found := 0
	for i, w := range workers {
		out[i] = st.match(sh.workers[w])
		found = max(found, out[i].Tokens)
	}
	x.figures.looked.Add(uint64(len(tokens)))
	x.figures.found.Add(uint64(found))
	clear(st.planes)
	strips.Put(st)
	return out
}

// walk goes along the prompt's blocks for as long as any source of the group has all of them. A block that is there
// without one before it counts for nothing, as it does for the engine.
func (x *Index) walk(st *strip, g group, tokens []uint32, seed Seed, stamp uint32) {
	size := int(g.blockTokens)
	n := (len(tokens) - 1) / size
	first := len(st.planes)
	st.alive = st.alive[:0]
	left := 0
	for _, p := range g.planes {
		live := p.live.Load()
		st.planes, st.lengths, st.alive = append(st.planes, p), append(st.lengths, [64]uint32{}), append(st.alive, live)
		if live != 0 {
			left++
		}
	}
	h, extra := rootOf(seed.LoRA), seed.extra()
	width := stripFirst
	for base := 0; base < n && left > 0; {
		count := min(width, n-base)
		for i := range count {
			at := (base + i) * size
			h = chain(h, sum(tokens[at:at+size]), extra)
			st.hashes[i], extra = h, 0
		}
		for j, p := range g.planes {
			if st.alive[j] == 0 {
				continue
			}
			st.alive[j] = x.along(st, p, count, base, st.alive[j], &st.lengths[first+j], stamp)
			if st.alive[j] == 0 {
				left--
			}
		}
		base += count
		width = min(2*width, stripMax)
	}
	for j, alive := range st.alive {
		settle(&st.lengths[first+j], alive, max(0, n))
	}
}

// settle notes that a prefix ends for some sources.
func settle(lengths *[64]uint32, gone uint64, at int) {
	for ; gone != 0; gone &= gone - 1 {
		lengths[bits.TrailingZeros64(gone)] = uint32(at)
	}
}

// along looks up the blocks of one strip in one plane, and returns which sources have them all.
func (x *Index) along(st *strip, p *plane, count, base int, alive uint64, lengths *[64]uint32, stamp uint32) uint64 {
	// Each of these loads misses the cache, and none waits for another.
	var touch uint64
	for i := range count {
		k := place(p.tag, uint64(st.hashes[i]))
		st.places[i] = k
		touch += x.table.segment(k).slots[home(k)].k.Load()
	}
	st.touched += touch
	for i := range count {
		v, at, ok := x.table.read(st.places[i])
		if !ok {
			v, at = x.readLocked(st.places[i])
		}
		if gone := alive &^ v; gone != 0 {
			settle(lengths, gone, base+i)
			if alive &= v; alive == 0 {
				break
			}
		}
		if m := at.m.Load(); stampOf(m)+stampFresh <= stamp && kindOf(m) == kindContent {
			// Another entry may stand there by now: then it was as old as this one, and is spared for once.
			at.m.CompareAndSwap(m, m&^0xffffffff|uint64(stamp))
		}
	}
	return alive
}

// readLocked reads what a reader was kept from seeing for too long.
func (x *Index) readLocked(k uint64) (uint64, *slot) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if at := x.table.find(k); at != nil {
		return at.v.Load(), at
	}
	return 0, nil
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
