package gguf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/bits"
	"unicode/utf8"
)

const (
	headerBytes      = 24
	maxKVs           = 1 << 16
	maxTensors       = 1 << 18
	maxKeyBytes      = 1 << 16
	maxDims          = 4
	defaultAlignment = 32
)

// Value types of the format.
const (
	kindUint8 uint32 = iota
	kindInt8
	kindUint16
	kindInt16
	kindUint32
	kindInt32
	kindFloat32
	kindBool
	kindString
	kindArray
	kindUint64
	kindInt64
	kindFloat64
	kindCount
)

// kindBytes is the size of a fixed-width kind, and the least size of an item of the others.
var kindBytes = [kindCount]uint64{1, 1, 2, 2, 4, 4, 4, 1, 8, 12, 8, 8, 8}

// ErrMalformed is wrapped by every error about the bytes of a file.
var ErrMalformed = errors.New("malformed GGUF")

func malformed(format string, a ...any) error {
	return fmt.Errorf("%w: %s", ErrMalformed, fmt.Sprintf(format, a...))
}

// kv is one metadata entry: raw holds kind and value as written, for copying into another file.
type kv struct {
	key   string
	kind  uint32
	raw   []byte
	value any // string, bool, uint64, int64, float64, []string, []int64, []float64
}

// cursor reads little-endian fields with bounds checks; after the first error it stays failed.
type cursor struct {
	b   []byte
	off uint64
	err error
}

func (c *cursor) left() uint64 { return uint64(len(c.b)) - c.off }

func (c *cursor) take(n uint64, what string) []byte {
	if c.err != nil {
		return nil
	}
	if n > c.left() {
		c.err = malformed("%s at byte %d wants %d bytes, %d are left", what, c.off, n, c.left())
		return nil
	}
	out := c.b[c.off : c.off+n]
	c.off += n
	return out
}

func (c *cursor) u32(what string) uint32 {
	if b := c.take(4, what); b != nil {
		return binary.LittleEndian.Uint32(b)
	}
	return 0
}

func (c *cursor) u64(what string) uint64 {
	if b := c.take(8, what); b != nil {
		return binary.LittleEndian.Uint64(b)
	}
	return 0
}

func (c *cursor) str(what string) string {
	return string(c.take(c.u64(what+" length"), what))
}

// Parse reads the header, metadata and tensor table of a whole file in memory. Tensor data are views of b.
func Parse(b []byte) (*File, error) {
	c := &cursor{b: b}
	if magic := c.take(4, "magic"); c.err == nil && string(magic) != "GGUF" {
		return nil, malformed("starts with %q, want \"GGUF\"", magic)
	}
	version := c.u32("version")
	nTensors, nKVs := c.u64("tensor count"), c.u64("metadata count")
	switch {
	case c.err != nil:
		return nil, c.err
	case version == bits.ReverseBytes32(2) || version == bits.ReverseBytes32(3):
		return nil, malformed("file is big-endian, only little-endian files are read")
	case version != 2 && version != 3:
		return nil, malformed("version %d, only 2 and 3 are read", version)
	case nKVs > maxKVs || nKVs > c.left()/13:
		return nil, malformed("%d metadata entries are announced, at most %d are read and %d bytes are left", nKVs, maxKVs, c.left())
	case nTensors > maxTensors || nTensors > c.left()/32:
		return nil, malformed("%d tensors are announced, at most %d are read and %d bytes are left", nTensors, maxTensors, c.left())
	}
	f := &File{index: make(map[string]int, nKVs), tensorIdx: make(map[string]int, nTensors)}
	if err := f.parseKVs(c, int(nKVs)); err != nil {
		return nil, err
	}
	if err := f.parseTensors(c, int(nTensors)); err != nil {
		return nil, err
	}
	return f, nil
}

func (f *File) parseKVs(c *cursor, n int) error {
	f.kvs = make([]kv, 0, n)
	for i := range n {
		key := c.str("metadata key")
		if c.err == nil && (len(key) == 0 || len(key) > maxKeyBytes || !utf8.ValidString(key)) {
			return malformed("metadata key %d is empty, too long or no UTF-8", i)
		}
		start := c.off
		kind := c.u32("kind of " + key)
		value := c.value(kind, key)
		if c.err != nil {
			return c.err
		}
		if _, dup := f.index[key]; dup {
			return malformed("metadata key %q appears twice", key)
		}
		f.index[key] = len(f.kvs)
		f.kvs = append(f.kvs, kv{key: key, kind: kind, raw: append([]byte(nil), c.b[start:c.off]...), value: value})
	}
	return nil
}

// value reads one metadata value. Integers widen to 64 bits: callers ask for a number, not for a width.
func (c *cursor) value(kind uint32, key string) any {
	switch kind {
	case kindString:
		return c.str(key)
	case kindArray:
		return c.array(key)
	}
	if kind >= kindCount {
		if c.err == nil {
			c.err = malformed("%q has unknown kind %d", key, kind)
		}
		return nil
	}
	b := c.take(kindBytes[kind], key)
	if b == nil {
		return nil
	}
	switch kind {
	case kindBool:
		return b[0] != 0
	case kindFloat32, kindFloat64:
		return fixedFloat(kind, b)
	case kindUint8, kindUint16, kindUint32, kindUint64:
		return uint64(fixedInt(kind, b))
	}
	return fixedInt(kind, b)
}

func fixedFloat(kind uint32, b []byte) float64 {
	if kind == kindFloat32 {
		return float64(math.Float32frombits(binary.LittleEndian.Uint32(b)))
	}
	return math.Float64frombits(binary.LittleEndian.Uint64(b))
}

func fixedInt(kind uint32, b []byte) int64 {
	switch kind {
	case kindUint8, kindBool:
		return int64(b[0])
	case kindInt8:
		return int64(int8(b[0]))
	case kindUint16:
		return int64(binary.LittleEndian.Uint16(b))
	case kindInt16:
		return int64(int16(binary.LittleEndian.Uint16(b)))
	case kindUint32:
		return int64(binary.LittleEndian.Uint32(b))
	case kindInt32:
		return int64(int32(binary.LittleEndian.Uint32(b)))
	}
	return int64(binary.LittleEndian.Uint64(b))
}

// array reads an array. Its length is checked against the bytes left before anything is allocated, and arrays of
// arrays are refused: no model file needs them, and nested lengths would let a small file ask for any memory.
func (c *cursor) array(key string) any {
	kind, n := c.u32("item kind of "+key), c.u64("length of "+key)
	if c.err != nil {
		return nil
	}
	switch {
	case kind >= kindCount:
		c.err = malformed("%q is an array of unknown kind %d", key, kind)
	case kind == kindArray:
		c.err = malformed("%q is an array of arrays, which is not read", key)
	case n > c.left()/kindBytes[kind]:
		c.err = malformed("%q announces %d items, %d bytes are left", key, n, c.left())
	}
	if c.err != nil {
		return nil
	}
	if kind == kindString {
		return c.stringArray(key, int(n))
	}
	w := kindBytes[kind]
	b := c.take(n*w, key)
	if kind == kindFloat32 || kind == kindFloat64 {
		out := make([]float64, n)
		for i := range out {
			out[i] = fixedFloat(kind, b[uint64(i)*w:])
		}
		return out
	}
	out := make([]int64, n)
	for i := range out {
		out[i] = fixedInt(kind, b[uint64(i)*w:])
	}
	return out
}

// stringArray cuts all items out of one copied string: a vocabulary is 100,000 of them.
func (c *cursor) stringArray(key string, n int) []string {
	start := c.off
	ends := make([]uint64, 0, n)
	for range n {
		c.take(c.u64("item length of "+key), "item of "+key)
		if c.err != nil {
			return nil
		}
		ends = append(ends, c.off-start)
	}
	all := string(c.b[start:c.off])
	out := make([]string, n)
	at := uint64(0)
	for i, end := range ends {
		out[i] = all[at+8 : end]
		at = end
	}
	return out
}

func (f *File) parseTensors(c *cursor, n int) error {
	align := uint64(defaultAlignment)
	if i, ok := f.index["general.alignment"]; ok {
		v, isUint := f.kvs[i].value.(uint64)
		if !isUint || v < 8 || v > 1<<20 || v&(v-1) != 0 {
			return malformed("general.alignment is %v, want a power of two from 8 to %d", f.kvs[i].value, 1<<20)
		}
		align = v
	}
	f.tensors = make([]Tensor, 0, n)
	offsets := make([]uint64, n)
	for i := range n {
		t := Tensor{Name: c.str("tensor name")}
		dims := c.u32("dimensions of " + t.Name)
		if c.err == nil && (dims == 0 || dims > maxDims) {
			return malformed("tensor %q has %d dimensions, want 1 to %d", t.Name, dims, maxDims)
		}
		for range dims {
			t.Dims = append(t.Dims, c.u64("dimensions of "+t.Name))
		}
		t.Type = Type(c.u32("type of " + t.Name))
		offsets[i] = c.u64("offset of " + t.Name)
		if c.err != nil {
			return c.err
		}
		if _, dup := f.tensorIdx[t.Name]; dup {
			return malformed("tensor %q appears twice", t.Name)
		}
		f.tensorIdx[t.Name] = i
		f.tensors = append(f.tensors, t)
	}
	f.dataStart = (c.off + align - 1) &^ (align - 1)
	for i := range f.tensors {
		if err := f.place(&f.tensors[i], c.b, offsets[i], align); err != nil {
			return err
		}
	}
	return nil
}

// place checks that the tensor lies inside the file and makes Data a view of it.
func (f *File) place(t *Tensor, b []byte, offset, align uint64) error {
	if offset%align != 0 {
		return malformed("tensor %q starts at %d, no multiple of %d", t.Name, offset, align)
	}
	size := uint64(len(b))
	if f.dataStart > size || offset > size-f.dataStart {
		return malformed("tensor %q starts at %d of the data, past the end of the file", t.Name, offset)
	}
	t.Offset = f.dataStart + offset
	elements := uint64(1)
	for _, d := range t.Dims {
		hi, lo := bits.Mul64(elements, d)
		if d == 0 || hi != 0 || lo > 1<<48 {
			return malformed("tensor %q has dimensions %v: empty or too many elements", t.Name, t.Dims)
		}
		elements = lo
	}
	if !t.Type.Known() {
		return nil
	}
	blockLen, blockBytes := t.Type.Block()
	if t.Dims[0]%uint64(blockLen) != 0 {
		return malformed("tensor %q has rows of %d, no multiple of %s's block of %d", t.Name, t.Dims[0], t.Type, blockLen)
	}
	want := elements / uint64(blockLen) * uint64(blockBytes)
	if want > size-t.Offset {
		return malformed("tensor %q needs %d bytes at %d, the file has %d", t.Name, want, t.Offset, size)
	}
	t.Data = b[t.Offset : t.Offset+want : t.Offset+want]
	return nil
}
