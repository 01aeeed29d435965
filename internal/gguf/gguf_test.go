package gguf

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math"
	"math/rand/v2"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
)

func sample() *Writer {
	w := &Writer{}
	w.SetString("general.architecture", "llama")
	w.SetUint32("llama.block_count", 7)
	w.SetFloat32("llama.eps", 1e-5)
	w.SetBool("flag", true)
	w.SetStrings("words", []string{"a", "", "héllo"})
	w.SetInts("types", []int32{-1, 0, 5})
	v := make([]float32, 64)
	for i := range v {
		v[i] = float32(i) - 31.5
	}
	w.AddTensor("f", F32, []uint64{64}, Quantize(nil, F32, v))
	w.AddTensor("q8", Q8_0, []uint64{32, 2}, Quantize(nil, Q8_0, v))
	w.AddTensor("q4", Q4_1, []uint64{32, 2}, Quantize(nil, Q4_1, v))
	return w
}

func encode(t testing.TB, w *Writer) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := w.Write(&b); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func TestRoundTrip(t *testing.T) {
	path := filepath.Join(t.TempDir(), "m.gguf")
	if err := sample().WriteFile(path); err != nil {
		t.Fatal(err)
	}
	f, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	if s, ok := f.String("general.architecture"); !ok || s != "llama" {
		t.Errorf("architecture %q %v", s, ok)
	}
	if v, ok := f.Uint("llama.block_count"); !ok || v != 7 {
		t.Errorf("block count %d %v", v, ok)
	}
	if v, ok := f.Float("llama.eps"); !ok || float32(v) != 1e-5 {
		t.Errorf("eps %v %v", v, ok)
	}
	if v, ok := f.Bool("flag"); !ok || !v {
		t.Errorf("flag %v %v", v, ok)
	}
	if v, _ := f.Strings("words"); !reflect.DeepEqual(v, []string{"a", "", "héllo"}) {
		t.Errorf("words %q", v)
	}
	if v, _ := f.Ints("types"); !reflect.DeepEqual(v, []int64{-1, 0, 5}) {
		t.Errorf("types %v", v)
	}
	if _, ok := f.String("llama.block_count"); ok {
		t.Error("an integer came back as a string")
	}
	if len(f.Keys()) != 6 || len(f.Tensors()) != 3 {
		t.Errorf("%d keys, %d tensors", len(f.Keys()), len(f.Tensors()))
	}
	for _, name := range []string{"f", "q8", "q4"} {
		tn, ok := f.Tensor(name)
		if !ok {
			t.Fatalf("no tensor %s", name)
		}
		for i, v := range Dequantize(nil, tn.Type, tn.Data) {
			if want := float64(i) - 31.5; math.Abs(float64(v)-want) > 1.1 {
				t.Errorf("%s[%d] = %v, want about %v", name, i, v, want)
			}
		}
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal("second close:", err)
	}
}

func TestDequantizedFileHoldsTheSameValues(t *testing.T) {
	f, err := Parse(encode(t, sample()))
	if err != nil {
		t.Fatal(err)
	}
	w, err := f.Dequantize()
	if err != nil {
		t.Fatal(err)
	}
	g, err := Parse(encode(t, w))
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range f.Tensors() {
		b, _ := g.Tensor(a.Name)
		if b.Type != F32 || !reflect.DeepEqual(a.Dims, b.Dims) {
			t.Errorf("%s became %s %v", a.Name, b.Type, b.Dims)
		}
		if !reflect.DeepEqual(Dequantize(nil, a.Type, a.Data), Dequantize(nil, F32, b.Data)) {
			t.Errorf("%s changed its values", a.Name)
		}
	}
	if v, _ := g.Strings("words"); len(v) != 3 {
		t.Errorf("metadata was not copied: %q", v)
	}
}

// header builds a file head by hand, to say what Writer cannot.
func header(nTensors, nKVs uint64, body ...any) []byte {
	b := append([]byte("GGUF"), 3, 0, 0, 0)
	b = binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(b, nTensors), nKVs)
	for _, x := range body {
		if s, ok := x.(string); ok {
			b = appendString(b, s)
			continue
		}
		b, _ = binary.Append(b, binary.LittleEndian, x)
	}
	return b
}

func TestMalformedFilesAreRefused(t *testing.T) {
	tail := make([]byte, 64)
	tensor := func(name string, dim uint64, typ uint32, offset uint64) []any {
		return []any{name, uint32(1), dim, typ, offset}
	}
	for _, c := range []struct {
		name, want string
		file       []byte
	}{
		{"empty", "magic", nil},
		{"magic", "starts with", []byte("GGML\x03\x00\x00\x00................")},
		{"version", "version 9", append([]byte("GGUF\x09\x00\x00\x00"), make([]byte, 16)...)},
		{"big endian", "big-endian", append([]byte("GGUF\x00\x00\x00\x03"), make([]byte, 16)...)},
		{"tensor count", "tensors are announced", header(1<<60, 0)},
		{"metadata count", "metadata entries are announced", header(0, 1<<60)},
		{"key length", "metadata key", header(0, 1, uint64(1<<62), tail)},
		{"kind", "unknown kind 77", header(0, 1, "k", uint32(77), tail)},
		{"array length", "announces", header(0, 1, "k", uint32(9), uint32(4), uint64(1<<61), tail)},
		{"string array length", "announces", header(0, 1, "k", uint32(9), uint32(8), uint64(1<<61), tail)},
		{"nested array", "array of arrays", header(0, 1, "k", uint32(9), uint32(9), uint64(1), tail)},
		{"twice", "appears twice", header(0, 2, "k", uint32(0), uint8(1), "k", uint32(0), uint8(1), tail)},
		{"alignment", "general.alignment", header(0, 1, "general.alignment", uint32(4), uint32(24), tail)},
		{"no dimensions", "0 dimensions", header(1, 0, "t", uint32(0), tail)},
		{"zero dimension", "empty or too many", header(1, 0, append(tensor("t", 0, 0, 0), tail)...)},
		{"overflow", "empty or too many", header(1, 0, "t", uint32(2), uint64(1<<40), uint64(1<<40), uint32(0), uint64(0), tail)},
		{"past end", "needs", header(1, 0, append(tensor("t", 1000, 0, 0), tail)...)},
		{"offset", "past the end", header(1, 0, append(tensor("t", 1, 0, 1<<40), tail)...)},
		{"unaligned", "no multiple of 32", header(1, 0, append(tensor("t", 1, 0, 4), tail)...)},
		{"half a block", "block of 32", header(1, 0, append(tensor("t", 33, 8, 0), tail)...)},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := Parse(c.file)
			if !errors.Is(err, ErrMalformed) || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want an error about %q", err, c.want)
			}
		})
	}
}

func TestOpenRefusesWhatIsNoModelFile(t *testing.T) {
	if _, err := Open(t.TempDir()); err == nil {
		t.Error("a folder was opened")
	}
	if _, err := Open(filepath.Join(t.TempDir(), "absent")); err == nil {
		t.Error("an absent file was opened")
	}
}

func TestUnknownTensorTypeIsListedWithoutData(t *testing.T) {
	f, err := Parse(header(1, 0, "t", uint32(1), uint64(256), uint32(14), uint64(0), make([]byte, 64)))
	if err != nil {
		t.Fatal(err)
	}
	if tn, _ := f.Tensor("t"); tn.Data != nil || tn.Type.String() != "Q6_K" {
		t.Errorf("got %s with %d bytes", tn.Type, len(tn.Data))
	}
}

func TestFloat16(t *testing.T) {
	for h := range 1 << 16 {
		v := Float16(uint16(h))
		if math.IsNaN(float64(v)) {
			continue
		}
		if back := ToFloat16(v); back != uint16(h) {
			t.Fatalf("%#04x -> %v -> %#04x", h, v, back)
		}
	}
	r := rand.New(rand.NewPCG(1, 2))
	for range 200000 {
		v := math.Float32frombits(r.Uint32())
		if math.Abs(float64(v)) > 65504 || v != v {
			continue
		}
		h := ToFloat16(v)
		got := math.Abs(float64(Float16(h)) - float64(v))
		for _, n := range []uint16{h - 1, h + 1} {
			if o := float64(Float16(n)); n&0x7fff <= 0x7c00 && math.Abs(o-float64(v)) < got && n>>15 == h>>15 {
				t.Fatalf("%v -> %#04x, but %#04x is nearer", v, h, n)
			}
		}
	}
}

func TestBFloat16(t *testing.T) {
	for v, want := range map[float32]uint16{
		1: 0x3f80, -2: 0xc000, 0: 0, math.Float32frombits(0x3f808000): 0x3f80, math.Float32frombits(0x3f818000): 0x3f82,
		math.Float32frombits(0x3f808001): 0x3f81, math.MaxFloat32: 0x7f80, float32(math.Inf(-1)): 0xff80,
	} {
		if got := ToBFloat16(v); got != want {
			t.Errorf("%v -> %#04x, want %#04x", v, got, want)
		}
	}
	if got := ToBFloat16(math.Float32frombits(0x7f800001)); got&0x7f80 != 0x7f80 || got&0x7f == 0 {
		t.Errorf("a NaN became %#04x", got)
	}
}

// The block of a type says what its values may be off by: half a step of its scale, or of its last place.
func TestQuantizedValuesAreNear(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 1))
	v := make([]float32, 64*BlockLen)
	for i := range v {
		v[i] = float32(r.NormFloat64())
	}
	for typ, most := range map[Type]float64{F32: 0, F16: 0.001, BF16: 0.01, Q8_0: 0.02, Q4_0: 0.3, Q4_1: 0.2} {
		data := Quantize(nil, typ, v)
		if len(data) != typ.RowBytes(len(v)) {
			t.Errorf("%s: %d bytes, want %d", typ, len(data), typ.RowBytes(len(v)))
		}
		worst := 0.0
		for i, got := range Dequantize(nil, typ, data) {
			worst = max(worst, math.Abs(float64(got-v[i])))
		}
		if worst > most {
			t.Errorf("%s is off by %v", typ, worst)
		}
	}
}

// Bytes written by hand, as llama.cpp's quantize_row_q4_0_ref and the format's description have them.
func TestQ40Block(t *testing.T) {
	v := make([]float32, BlockLen)
	v[0], v[1], v[16], v[31] = -4, 3.5, 1, -0.5
	block := Quantize(nil, Q4_0, v)
	if block[0] != 0 || block[1] != 0x38 || block[2] != 0xa0 || block[3] != 0x8f || block[17] != 0x78 || block[4] != 0x88 {
		t.Errorf("block is %x", block)
	}
	if got := Dequantize(nil, Q4_0, block); !slices.Equal(got, v) {
		t.Errorf("values are %v", got)
	}
	v[1] = 5 // positive and the farthest from zero: its level is 0, the scale negative
	if got := Dequantize(nil, Q4_0, Quantize(nil, Q4_0, v)); got[1] != 5 {
		t.Errorf("5 became %v", got[1])
	}
	if got := Dequantize(nil, Q4_0, Quantize(nil, Q4_0, make([]float32, BlockLen))); !slices.Equal(got, make([]float32, BlockLen)) {
		t.Errorf("zeros became %v", got)
	}
}

func TestParseType(t *testing.T) {
	for _, typ := range Types {
		if got, err := ParseType(strings.ToLower(typ.String())); err != nil || got != typ {
			t.Errorf("%s: %v, %v", typ, got, err)
		}
		if !strings.Contains(TypeNames, typ.String()) {
			t.Errorf("TypeNames lacks %s", typ)
		}
	}
	if _, err := ParseType("Q6_K"); err == nil {
		t.Error("Q6_K is taken")
	}
}

func TestConvertKeepsVectorsF32(t *testing.T) {
	w := &Writer{}
	w.SetString("general.architecture", "llama")
	w.AddTensor("norm", F32, []uint64{32}, Quantize(nil, F32, make([]float32, 32)))
	w.AddTensor("matrix", F32, []uint64{32, 2}, Quantize(nil, F32, make([]float32, 64)))
	f, err := Parse(encode(t, w))
	if err != nil {
		t.Fatal(err)
	}
	for _, typ := range Types {
		c, err := f.Convert(typ)
		if err != nil {
			t.Fatal(err)
		}
		g, err := Parse(encode(t, c))
		if err != nil {
			t.Fatal(err)
		}
		norm, _ := g.Tensor("norm")
		matrix, _ := g.Tensor("matrix")
		fileType, _ := g.Uint("general.file_type")
		if norm.Type != F32 || matrix.Type != typ || fileType != uint64(typ.FileType()) {
			t.Errorf("to %s: norm is %s, matrix %s, file type %d", typ, norm.Type, matrix.Type, fileType)
		}
	}
	if _, err := f.Convert(14); err == nil {
		t.Error("converted to Q6_K")
	}
}

func TestWriterHoldsDataToItsSize(t *testing.T) {
	w := &Writer{}
	w.AddTensor("t", F32, []uint64{4}, make([]byte, 12))
	if err := w.Write(&bytes.Buffer{}); err == nil {
		t.Error("12 bytes were written for 4 floats")
	}
}

func FuzzParse(f *testing.F) {
	f.Add(encode(f, sample()))
	f.Add(header(0, 1, "k", uint32(9), uint32(8), uint64(2), "a", "b"))
	f.Add(header(1, 0, "t", uint32(1), uint64(32), uint32(8), uint64(0), make([]byte, 64)))
	f.Fuzz(func(t *testing.T, b []byte) {
		g, err := Parse(b)
		if err != nil {
			if !errors.Is(err, ErrMalformed) {
				t.Fatalf("untyped error %v", err)
			}
			return
		}
		for _, tn := range g.Tensors() {
			if tn.Type.Known() && tn.Rows()*tn.Type.RowBytes(tn.Cols()) != len(tn.Data) {
				t.Fatalf("%s %v has %d bytes", tn.Type, tn.Dims, len(tn.Data))
			}
		}
		if w, err := g.Dequantize(); err == nil {
			var out bytes.Buffer
			if err := w.Write(&out); err != nil {
				t.Fatal(err)
			}
			if _, err := Parse(out.Bytes()); err != nil {
				t.Fatal(err)
			}
		}
	})
}
