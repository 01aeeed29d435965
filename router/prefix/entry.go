package prefix

import "math/rand/v2"

// Three kinds of entries lie in the table.
//
//	content  by plane and hash: which of the plane's 64 sources have it. Planes of one block size have it side by side
//	         v: a bit a source; m: kind 2 | plane 10 | depth 20 | stamp 32
//	key      by source and the engine's key: what content that is, and in how many blocks
//	         v: hash;           m: kind 2 | source 16 | count 16 | depth 20 | 0
//	more     by source and hash: how many keys beside one stand for that content; hardly ever there
//	         v: count;          m: kind 2 | source 16 | 0
//	noted    by source and hash: what was routed to a worker that says nothing
//	         v: hash;           m: kind 2 | source 16 | 0 14 | stamp 32
//
// Each of them may go at any time when memory is short, and nothing turns wrong but into a miss: a key that goes takes its
// source's part in the content along; a content that goes is missed, and keys of it that stay remove nothing later.
const (
	kindContent = iota
	kindKey
	kindMore
	kindNoted

	planesMax  = 1 << 10
	sourcesMax = 1<<12 - 1
	depthMax   = 1<<20 - 1
	countMax   = 1<<16 - 1

	// groupPlanes are the planes that one block size may have: another is made when those before are full, and all sources fit.
	groupPlanes = (sourcesMax + 1) / 64
)

func kindOf(m uint64) int { return int(m >> 62) }

func contentMeta(plane int, depth, stamp uint32) uint64 {
	return kindContent<<62 | uint64(plane)<<52 | uint64(min(depth, depthMax))<<32 | uint64(stamp)
}

func contentPlane(m uint64) int    { return int(m >> 52 & (planesMax - 1)) }
func contentDepth(m uint64) uint32 { return uint32(m >> 32 & depthMax) }
func stampOf(m uint64) uint32      { return uint32(m) }

// inPlane tells whether an entry is a content of that plane.
func inPlane(m uint64, plane int) bool { return m>>52 == kindContent<<10|uint64(plane) }

func keyMeta(source uint16, count uint32, depth uint32) uint64 {
	return kindKey<<62 | uint64(source)<<46 | uint64(min(count, countMax))<<30 | uint64(min(depth, depthMax))<<10
}

func sourceOf(m uint64) uint16   { return uint16(m >> 46) }
func keyCount(m uint64) uint32   { return uint32(m >> 30 & countMax) }
func keyDepth(m uint64) uint32   { return uint32(m >> 10 & depthMax) }
func moreMeta(src uint16) uint64 { return kindMore<<62 | uint64(src)<<46 }

func notedMeta(source uint16, stamp uint32) uint64 {
	return kindNoted<<62 | uint64(source)<<46 | uint64(stamp)
}

// place is the table's key for x of one source or group of planes. A tag is drawn by chance, so that nobody can choose
// prompts whose blocks crowd in one segment; with one tag it is a bijection.
func place(tag, x uint64) uint64 {
	x = avalanche(x ^ tag)
	if x == 0 {
		return 1
	}
	return x
}

// spot is where the content of a hash lies: its keys in the planes of a group differ from spot, and from each other, in their
// lowest bits, which home does not look at. So one probe finds all of them, and a lookup costs a miss of the cache a block,
// not one for every 64 workers.
func spot(tag uint64, h Hash) uint64 {
	k := place(tag, uint64(h))
	if k < groupPlanes {
		return k | 1<<63 // no key is 0
	}
	return k
}

// place is the table's key for a content.
func (p *plane) place(h Hash) uint64 { return spot(p.tag, h) ^ uint64(p.index) }

// displace is place backwards.
func displace(tag, k uint64) uint64 {
	k ^= k >> 32
	k *= prime3Inverse
	k ^= k>>29 ^ k>>58
	k *= prime2Inverse
	return k ^ k>>33 ^ tag
}

// Inverses of odd numbers modulo 2^64.
var prime2Inverse, prime3Inverse = inverse(prime2), inverse(prime3)

// inverse is by Newton's iteration: each step doubles the bits that are right, of which a itself has three.
func inverse(a uint64) uint64 {
	x := a
	for range 5 {
		x *= 2 - a*x
	}
	return x
}

func newTag() uint64 { return rand.Uint64() }
