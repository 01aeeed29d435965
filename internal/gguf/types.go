package gguf

import (
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"strings"
)

// Type is a tensor's element type, numbered as in the file.
type Type uint32

// The types that are read. Everything else has a name at most.
const (
	F32  Type = 0
	F16  Type = 1
	Q4_0 Type = 2
	Q4_1 Type = 3
	Q8_0 Type = 8
	BF16 Type = 30
)

// Types lists what is read and written, by number.
var Types = []Type{F32, F16, Q4_0, Q4_1, Q8_0, BF16}

// TypeNames is the names of Types, for messages.
const TypeNames = "F32, F16, BF16, Q8_0, Q4_0 and Q4_1"

// ParseType finds a known type by name, in either case.
func ParseType(name string) (Type, error) {
	for _, t := range Types {
		if strings.EqualFold(t.String(), name) {
			return t, nil
		}
	}
	return 0, fmt.Errorf("tensor type %q is not supported: use one of %s", name, TypeNames)
}

// BlockLen is the number of elements in a quantized block.
const BlockLen = 32

const (
	q40Bytes = 2 + BlockLen/2     // d, nibbles like Q4_1's, each less 8
	q41Bytes = 2 + 2 + BlockLen/2 // d, m, nibbles: element j in the low half of byte j, j+16 in the high half
	q80Bytes = 2 + BlockLen       // d, int8
)

var typeNames = map[Type]string{
	0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K",
	13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
	22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0",
}

func (t Type) String() string {
	if s, ok := typeNames[t]; ok {
		return s
	}
	return fmt.Sprintf("type %d", uint32(t))
}

// Known says whether this package can size and dequantize the type.
func (t Type) Known() bool { return slices.Contains(Types, t) }

// Block returns how many elements a block holds and its size in bytes, for a Known type.
func (t Type) Block() (elements, bytes int) {
	switch t {
	case F32:
		return 1, 4
	case F16, BF16:
		return 1, 2
	case Q4_0:
		return BlockLen, q40Bytes
	case Q4_1:
		return BlockLen, q41Bytes
	case Q8_0:
		return BlockLen, q80Bytes
	}
	panic("gguf: no block size for " + t.String())
}

// RowBytes is the size of a row of n elements.
func (t Type) RowBytes(n int) int {
	e, b := t.Block()
	return n / e * b
}

// Float16 converts IEEE half precision, exactly.
func Float16(h uint16) float32 {
	sign, exp, man := uint32(h>>15)<<31, uint32(h>>10)&31, uint32(h)&1023
	switch {
	case exp == 31:
		return math.Float32frombits(sign | 0x7f800000 | man<<13)
	case exp != 0:
		return math.Float32frombits(sign | (exp+112)<<23 | man<<13)
	}
	v := float32(man) * (1.0 / (1 << 24)) // subnormal: both factors and the product are exact
	return math.Float32frombits(sign | math.Float32bits(v))
}

// ToFloat16 rounds to half precision, to nearest, ties to even.
func ToFloat16(v float32) uint16 {
	b := math.Float32bits(v)
	sign := uint16(b >> 16 & 0x8000)
	a := b &^ (1 << 31)
	switch {
	case a > 0x7f800000:
		return sign | 0x7e00
	case a >= 0x477ff000: // 65520 and above round to infinity
		return sign | 0x7c00
	case a < 0x38800000: // subnormal half: let one float addition do the rounding
		r := math.Float32bits(math.Float32frombits(a) + 0.5)
		return sign | uint16(r-0x3f000000)
	}
	a += 0xfff + a>>13&1
	return sign | uint16(a>>13-112<<10)
}

// ToBFloat16 rounds to the upper half of a float32, to nearest, ties to even.
func ToBFloat16(v float32) uint16 {
	b := math.Float32bits(v)
	if b&^(1<<31) > 0x7f800000 {
		return uint16(b>>16) | 0x40 // stay a NaN
	}
	return uint16((b + 0x7fff + b>>16&1) >> 16)
}

// Dequantize appends the values of whole blocks to dst. d*q is exact in float32 for all types, so a value is
// rounded at most once (Q4_1's addition) and every implementation of the format agrees on it.
func Dequantize(dst []float32, t Type, data []byte) []float32 {
	switch t {
	case F32:
		for ; len(data) >= 4; data = data[4:] {
			dst = append(dst, math.Float32frombits(binary.LittleEndian.Uint32(data)))
		}
	case F16:
		for ; len(data) >= 2; data = data[2:] {
			dst = append(dst, Float16(binary.LittleEndian.Uint16(data)))
		}
	case BF16:
		for ; len(data) >= 2; data = data[2:] {
			dst = append(dst, math.Float32frombits(uint32(binary.LittleEndian.Uint16(data))<<16))
		}
	case Q4_0:
		for ; len(data) >= q40Bytes; data = data[q40Bytes:] {
			d := Float16(binary.LittleEndian.Uint16(data))
			for _, q := range data[2:q40Bytes] {
				dst = append(dst, d*float32(int(q&15)-8))
			}
			for _, q := range data[2:q40Bytes] {
				dst = append(dst, d*float32(int(q>>4)-8))
			}
		}
	case Q8_0:
		for ; len(data) >= q80Bytes; data = data[q80Bytes:] {
			d := Float16(binary.LittleEndian.Uint16(data))
			for _, q := range data[2:q80Bytes] {
				dst = append(dst, d*float32(int8(q)))
			}
		}
	case Q4_1:
		for ; len(data) >= q41Bytes; data = data[q41Bytes:] {
			d, m := Float16(binary.LittleEndian.Uint16(data)), Float16(binary.LittleEndian.Uint16(data[2:]))
			for _, q := range data[4:q41Bytes] {
				dst = append(dst, float32(d*float32(q&15))+m)
			}
			for _, q := range data[4:q41Bytes] {
				dst = append(dst, float32(d*float32(q>>4))+m)
			}
		}
	default:
		panic("gguf: no dequantization of " + t.String())
	}
	return dst
}

// Quantize appends v in type t to dst. len(v) must be whole blocks.
func Quantize(dst []byte, t Type, v []float32) []byte {
	switch t {
	case F32:
		for _, x := range v {
			dst = binary.LittleEndian.AppendUint32(dst, math.Float32bits(x))
		}
	case F16:
		for _, x := range v {
			dst = binary.LittleEndian.AppendUint16(dst, ToFloat16(x))
		}
	case BF16:
		for _, x := range v {
			dst = binary.LittleEndian.AppendUint16(dst, ToBFloat16(x))
		}
	case Q4_0:
		for ; len(v) >= BlockLen; v = v[BlockLen:] {
			dst = quantizeQ40(dst, v[:BlockLen])
		}
	case Q8_0:
		for ; len(v) >= BlockLen; v = v[BlockLen:] {
			dst = quantizeQ80(dst, v[:BlockLen])
		}
	case Q4_1:
		for ; len(v) >= BlockLen; v = v[BlockLen:] {
			dst = quantizeQ41(dst, v[:BlockLen])
		}
	default:
		panic("gguf: no quantization to " + t.String())
	}
	return dst
}

func quantizeQ80(dst []byte, v []float32) []byte {
	peak := float32(0)
	for _, x := range v {
		peak = max(peak, float32(math.Abs(float64(x))))
	}
	d := peak / 127
	dst = binary.LittleEndian.AppendUint16(dst, ToFloat16(d))
	for _, x := range v {
		q := 0.0
		if d != 0 {
			q = math.RoundToEven(float64(x / d))
		}
		dst = append(dst, byte(int8(max(-127, min(127, q)))))
	}
	return dst
}

// quantizeQ40 gives the value farthest from zero level 0, so that its own sign decides which side has 8 levels.
func quantizeQ40(dst []byte, v []float32) []byte {
	far := v[0]
	for _, x := range v {
		if math.Abs(float64(x)) > math.Abs(float64(far)) {
			far = x
		}
	}
	d := far / -8
	dst = binary.LittleEndian.AppendUint16(dst, ToFloat16(d))
	level := func(x float32) byte {
		if d == 0 {
			return 8
		}
		return byte(max(0, min(15, math.RoundToEven(float64(x/d))+8)))
	}
	for j := range BlockLen / 2 {
		dst = append(dst, level(v[j])|level(v[j+BlockLen/2])<<4)
	}
	return dst
}

func quantizeQ41(dst []byte, v []float32) []byte {
	lo, hi := v[0], v[0]
	for _, x := range v {
		lo, hi = min(lo, x), max(hi, x)
	}
	d := (hi - lo) / 15
	dst = binary.LittleEndian.AppendUint16(dst, ToFloat16(d))
	dst = binary.LittleEndian.AppendUint16(dst, ToFloat16(lo))
	level := func(x float32) byte {
		if d == 0 {
			return 0
		}
		return byte(max(0, min(15, math.RoundToEven(float64((x-lo)/d)))))
	}
	for j := range BlockLen / 2 {
		dst = append(dst, level(v[j])|level(v[j+BlockLen/2])<<4)
	}
	return dst
}
