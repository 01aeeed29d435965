package prefix

import (
	"encoding/binary"
	"errors"
	"math/bits"
	"unsafe"

	"github.com/cespare/xxhash/v2"
	"github.com/tinylib/msgp/msgp"
)

// Hash names a block's content: its tokens, everything before them, and what keeps tenants and adapters apart. Routers
// agree on it (snapshots hold it), so it depends on nothing of a process; hashVersion counts changes.
//
// The tokens of a block go through xxhash64, which is written in assembly and needs none of the block before, so that
// a processor works on several blocks at a time; only one multiplication and an avalanche depend on the parent. That
// step is a bijection of either input, so two blocks with one parent differ if their sums do.
type Hash uint64

const hashVersion = 1

// Primes are xxHash64's.
const (
	prime1 = 0x9E3779B185EBCA87
	prime2 = 0xC2B2AE3D27D4EB4F
	prime3 = 0x165667B19E3779F9
)

func avalanche(x uint64) uint64 {
	x ^= x >> 33
	x *= prime2
	x ^= x >> 29
	x *= prime3
	return x ^ x>>32
}

// Seed is what a prompt's blocks depend on beside its tokens. The model is no part of it: a worker has one.
type Seed struct {
	LoRA string // the adapter's name, as the engine says it
	Salt string // cache_salt of the request
}

// rootOf begins the chain of an adapter's blocks, or with "" of the model's own.
func rootOf(lora string) Hash {
	if lora == "" {
		return prime1
	}
	return Hash(avalanche(xxhash.Sum64String(lora) ^ prime3))
}

// rootOfNumber begins a chain of an adapter that is known by its number only. No request has it.
func rootOfNumber(lora int64) Hash { return Hash(avalanche(uint64(lora)*prime1 ^ prime2)) }

// extra is what the first block of a request with a salt has beside its tokens.
func (s *Seed) extra() uint64 {
	if s.Salt == "" {
		return 0
	}
	return list(element(kindString, xxhash.Sum64String(s.Salt)))
}

// sum is the part of a block's hash that needs no other block.
func sum(tokens []uint32) uint64 { return xxhash.Sum64(asBytes(tokens)) }

// chain is the hash of a block behind parent.
func chain(parent Hash, sum, extra uint64) Hash {
	x := bits.RotateLeft64(uint64(parent), 31)*prime1 ^ sum
	if extra != 0 {
		x = avalanche(x) ^ extra
	}
	return Hash(avalanche(x))
}

var littleEndian = binary.NativeEndian.Uint16([]byte{1, 0}) == 1

// asBytes is tokens as little-endian bytes, which they are already on most machines.
func asBytes(tokens []uint32) []byte {
	if len(tokens) == 0 {
		return nil
	}
	if littleEndian {
		return unsafe.Slice((*byte)(unsafe.Pointer(&tokens[0])), 4*len(tokens))
	}
	b := make([]byte, 0, 4*len(tokens))
	for _, t := range tokens {
		b = binary.LittleEndian.AppendUint32(b, t)
	}
	return b
}

// Extra keys come as msgpack, an array a block: an adapter's name, [identifier, offset] of pictures and the like, a salt, the
// digest of embeddings. vLLM's own hash takes each with a tag before it, which its events leave out so far: both are read.
// What counts is values, not how they are written.

type elementKind uint64

const (
	kindString elementKind = iota + 1
	kindBytes
	kindInt
	kindList
	kindOther
)

func element(k elementKind, v uint64) uint64 { return avalanche(v + uint64(k)*prime1) }

// list is the hash of a list of elements, never 0.
func list(elements ...uint64) uint64 {
	h := listBegin
	for _, e := range elements {
		h = listAdd(h, e)
	}
	return listEnd(h, len(elements))
}

const listBegin = uint64(prime2)

func listAdd(h, e uint64) uint64 { return avalanche(bits.RotateLeft64(h, 27)*prime1 ^ e) }

func listEnd(h uint64, n int) uint64 { return max(1, element(kindList, h+uint64(n))) }

var errExtra = errors.New("extra keys that cannot be read")

const extraDepthMax = 8

// extraOf is the hash of a block's extra keys, 0 for none. An adapter's name among them is left out: the chain's begin has it.
func extraOf(raw []byte, lora string) (uint64, error) {
	if len(raw) == 0 || msgp.IsNil(raw) {
		return 0, nil
	}
	n, rest, err := msgp.ReadArrayHeaderBytes(raw)
	if err != nil || int(n) > len(rest) {
		return 0, errExtra
	}
	h, count := listBegin, 0
	for i := range n {
		if lora != "" && i == 0 {
			if after, ok := skipName(rest, lora); ok {
				rest = after
				continue
			}
		}
		var e uint64
		if e, rest, err = value(rest, extraDepthMax); err != nil {
			return 0, err
		}
		h, count = listAdd(h, e), count+1
	}
	if count == 0 {
		return 0, nil
	}
	return listEnd(h, count), nil
}

// skipName steps over the adapter's name, with a tag or without.
func skipName(b []byte, lora string) ([]byte, bool) {
	if len(b) > 0 && msgp.NextType(b) == msgp.ArrayType {
		n, rest, err := msgp.ReadArrayHeaderBytes(b)
		if err != nil || n < 2 || int(n) > len(rest) || msgp.NextType(rest) != msgp.StrType {
			return nil, false
		}
		tag, rest, err := msgp.ReadStringZC(rest)
		if err != nil || string(tag) != "lora" {
			return nil, false
		}
		name, rest, err := msgp.ReadStringZC(rest)
		for range n - 2 { // its path, which events do not say elsewhere
			if err == nil {
				_, rest, err = value(rest, extraDepthMax)
			}
		}
		return rest, err == nil && string(name) == lora
	}
	if len(b) == 0 || msgp.NextType(b) != msgp.StrType {
		return nil, false
	}
	name, rest, err := msgp.ReadStringZC(b)
	return rest, err == nil && string(name) == lora
}

// value is the hash of one msgpack value.
func value(b []byte, left int) (uint64, []byte, error) {
	if len(b) == 0 {
		return 0, nil, errExtra
	}
	switch msgp.NextType(b) {
	case msgp.StrType:
		v, rest, err := msgp.ReadStringZC(b)
		return element(kindString, xxhash.Sum64(v)), rest, err
	case msgp.BinType:
		v, rest, err := msgp.ReadBytesZC(b)
		return element(kindBytes, xxhash.Sum64(v)), rest, err
	case msgp.IntType:
		v, rest, err := msgp.ReadInt64Bytes(b)
		return element(kindInt, uint64(v)), rest, err
	case msgp.UintType:
		v, rest, err := msgp.ReadUint64Bytes(b)
		return element(kindInt, v), rest, err
	case msgp.ArrayType:
		return values(b, left)
	}
	rest, err := msgp.Skip(b)
	if err != nil {
		return 0, nil, errExtra
	}
	return element(kindOther, xxhash.Sum64(b[:len(b)-len(rest)])), rest, nil
}

// values is the hash of an array. [tag, value] and ["mm", identifier, offset] are what they are without the tag.
func values(b []byte, left int) (uint64, []byte, error) {
	n, rest, err := msgp.ReadArrayHeaderBytes(b)
	if err != nil || left == 0 || int(n) > len(rest) {
		return 0, nil, errExtra
	}
	if n > 1 && len(rest) > 0 && msgp.NextType(rest) == msgp.StrType {
		tag, after, err := msgp.ReadStringZC(rest)
		if err != nil {
			return 0, nil, errExtra
		}
		switch string(tag) {
		case "cache_salt", "prompt_embeds":
			if n == 2 {
				return value(after, left-1)
			}
		case "mm":
			if n == 3 {
				rest, n = after, n-1
			}
		}
	}
	h := listBegin
	for range n {
		var e uint64
		if e, rest, err = value(rest, left-1); err != nil {
			return 0, nil, err
		}
		h = listAdd(h, e)
	}
	return listEnd(h, int(n)), rest, nil
}
