package engine

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/cespare/xxhash/v2"
)

// Both forms below are opaque to the daemons that carry them. Little-endian, fixed width:
//
//	meta    version u8=1 | 3 bytes 0 | tokens u32 | hash u64        what P says it will compute
//	record  version u8=1 | 3 bytes 0 | position u32 | cached u32 | count u32 | count x token i32
const (
	handoffVersion  = 1
	metaLen         = 16
	recordHeaderLen = 16
	recordTokensMax = 1 << 20
)

var errHandoff = errors.New("read hand-off")

// promptMeta is how D makes sure that P computes the very context it expects.
type promptMeta struct {
	tokens uint32
	hash   uint64
}

func metaOf(context []int32) promptMeta {
	b := make([]byte, 0, 4*len(context))
	for _, t := range context {
		b = binary.LittleEndian.AppendUint32(b, uint32(t))
	}
	return promptMeta{tokens: uint32(len(context)), hash: xxhash.Sum64(b)}
}

func (m promptMeta) encode() []byte {
	b := make([]byte, 4, metaLen)
	b[0] = handoffVersion
	b = binary.LittleEndian.AppendUint32(b, m.tokens)
	return binary.LittleEndian.AppendUint64(b, m.hash)
}

func decodeMeta(b []byte) (promptMeta, error) {
	if len(b) != metaLen || b[0] != handoffVersion {
		return promptMeta{}, fmt.Errorf("%w: meta of %d bytes is not version %d", errHandoff, len(b), handoffVersion)
	}
	return promptMeta{
		tokens: binary.LittleEndian.Uint32(b[4:]),
		hash:   binary.LittleEndian.Uint64(b[8:]),
	}, nil
}

// record is what D needs beside KV to go on: the number of context tokens whose KV was moved, the tokens sampled or
// resumed so far (the last one's KV is not computed yet) and how much of the prompt P found in its prefix cache.
type record struct {
	position uint32
	cached   uint32
	tokens   []int32
}

func (r record) encode() []byte {
	b := make([]byte, 4, recordHeaderLen+4*len(r.tokens))
	b[0] = handoffVersion
	b = binary.LittleEndian.AppendUint32(b, r.position)
	b = binary.LittleEndian.AppendUint32(b, r.cached)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(r.tokens)))
	for _, t := range r.tokens {
		b = binary.LittleEndian.AppendUint32(b, uint32(t))
	}
	return b
}

func decodeRecord(b []byte) (record, error) {
	if len(b) < recordHeaderLen || b[0] != handoffVersion {
		return record{}, fmt.Errorf("%w: record of %d bytes is not version %d", errHandoff, len(b), handoffVersion)
	}
	n := binary.LittleEndian.Uint32(b[12:])
	if n == 0 || n > recordTokensMax || len(b) != recordHeaderLen+4*int(n) {
		return record{}, fmt.Errorf("%w: record of %d bytes says it holds %d tokens", errHandoff, len(b), n)
	}
	r := record{
		position: binary.LittleEndian.Uint32(b[4:]),
		cached:   binary.LittleEndian.Uint32(b[8:]),
		tokens:   make([]int32, n),
	}
	for i := range r.tokens {
		r.tokens[i] = int32(binary.LittleEndian.Uint32(b[recordHeaderLen+4*i:]))
	}
	return r, nil
}
