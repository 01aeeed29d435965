package gguf

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
)

// Writer collects metadata and tensors of a new file. The bytes written depend on nothing but the calls made.
type Writer struct {
	kvs     []kv
	tensors []pending
}

type pending struct {
	name string
	typ  Type
	dims []uint64
	data func(io.Writer) error
}

func (w *Writer) set(key string, kind uint32, value []byte) {
	raw := append(binary.LittleEndian.AppendUint32(nil, kind), value...)
	for i := range w.kvs {
		if w.kvs[i].key == key {
			w.kvs[i].kind, w.kvs[i].raw = kind, raw
			return
		}
	}
	w.kvs = append(w.kvs, kv{key: key, kind: kind, raw: raw})
}

func appendString(b []byte, s string) []byte {
	return append(binary.LittleEndian.AppendUint64(b, uint64(len(s))), s...)
}

// SetString sets a string. Every Set replaces an earlier value of the key in its place.
func (w *Writer) SetString(key, v string) { w.set(key, kindString, appendString(nil, v)) }

// SetUint32 sets an unsigned integer.
func (w *Writer) SetUint32(key string, v uint32) {
	w.set(key, kindUint32, binary.LittleEndian.AppendUint32(nil, v))
}

// SetFloat32 sets a float.
func (w *Writer) SetFloat32(key string, v float32) {
	w.set(key, kindFloat32, binary.LittleEndian.AppendUint32(nil, math.Float32bits(v)))
}

// SetBool sets a bool.
func (w *Writer) SetBool(key string, v bool) {
	b := byte(0)
	if v {
		b = 1
	}
	w.set(key, kindBool, []byte{b})
}

func arrayHeader(kind uint32, n int) []byte {
	return binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint32(nil, kind), uint64(n))
}

// SetStrings sets an array of strings.
func (w *Writer) SetStrings(key string, v []string) {
	b := arrayHeader(kindString, len(v))
	for _, s := range v {
		b = appendString(b, s)
	}
	w.set(key, kindArray, b)
}

// SetInts sets an array of 32-bit signed integers.
func (w *Writer) SetInts(key string, v []int32) {
	b := arrayHeader(kindInt32, len(v))
	for _, x := range v {
		b = binary.LittleEndian.AppendUint32(b, uint32(x))
	}
	w.set(key, kindArray, b)
}

// AddTensor adds a tensor of already encoded data.
func (w *Writer) AddTensor(name string, t Type, dims []uint64, data []byte) {
	w.addTensor(name, t, dims, func(out io.Writer) error {
		_, err := out.Write(data)
		return err
	})
}

func (w *Writer) addTensor(name string, t Type, dims []uint64, data func(io.Writer) error) {
	w.tensors = append(w.tensors, pending{name, t, dims, data})
}

func (p *pending) bytes() (uint64, error) {
	if !p.typ.Known() || len(p.dims) == 0 || len(p.dims) > maxDims {
		return 0, fmt.Errorf("write tensor %q: type %s with %d dimensions is not written", p.name, p.typ, len(p.dims))
	}
	e, b := p.typ.Block()
	if p.dims[0]%uint64(e) != 0 {
		return 0, fmt.Errorf("write tensor %q: rows of %d are no multiple of %s's block of %d", p.name, p.dims[0], p.typ, e)
	}
	n := uint64(b)
	for i, d := range p.dims {
		if i == 0 {
			d /= uint64(e)
		}
		n *= d
	}
	return n, nil
}

func pad(n uint64) uint64 { return (n + defaultAlignment - 1) &^ (defaultAlignment - 1) }

func (w *Writer) header() ([]byte, []uint64, error) {
	h := append([]byte("GGUF"), 3, 0, 0, 0)
	h = binary.LittleEndian.AppendUint64(h, uint64(len(w.tensors)))
	h = binary.LittleEndian.AppendUint64(h, uint64(len(w.kvs)))
	for i := range w.kvs {
		h = append(appendString(h, w.kvs[i].key), w.kvs[i].raw...)
	}
	sizes := make([]uint64, len(w.tensors))
	offset := uint64(0)
	for i := range w.tensors {
		t := &w.tensors[i]
		n, err := t.bytes()
		if err != nil {
			return nil, nil, err
		}
		sizes[i] = n
		h = binary.LittleEndian.AppendUint32(appendString(h, t.name), uint32(len(t.dims)))
		for _, d := range t.dims {
			h = binary.LittleEndian.AppendUint64(h, d)
		}
		h = binary.LittleEndian.AppendUint32(h, uint32(t.typ))
		h = binary.LittleEndian.AppendUint64(h, offset)
		offset = pad(offset + n)
	}
	return append(h, make([]byte, pad(uint64(len(h)))-uint64(len(h)))...), sizes, nil
}

// countWriter counts what a tensor's data function wrote, to hold it to the size its header states.
type countWriter struct {
	w io.Writer
	n uint64
}

func (c *countWriter) Write(b []byte) (int, error) {
	n, err := c.w.Write(b)
	c.n += uint64(n)
	return n, err
}

// Write writes the whole file.
func (w *Writer) Write(out io.Writer) error {
	h, sizes, err := w.header()
	if err != nil {
		return err
	}
	if _, err := out.Write(h); err != nil {
		return fmt.Errorf("write GGUF header: %w", err)
	}
	for i := range w.tensors {
		c := &countWriter{w: out}
		if err := w.tensors[i].data(c); err != nil {
			return fmt.Errorf("write tensor %q: %w", w.tensors[i].name, err)
		}
		if c.n != sizes[i] {
			return fmt.Errorf("write tensor %q: got %d bytes of data, its type and dimensions take %d", w.tensors[i].name, c.n, sizes[i])
		}
		if _, err := out.Write(make([]byte, pad(c.n)-c.n)); err != nil {
			return fmt.Errorf("write tensor %q: %w", w.tensors[i].name, err)
		}
	}
	return nil
}

// WriteFile writes the file beside path and renames it, so that a reader never sees half of it.
func (w *Writer) WriteFile(path string) (err error) {
	tmp, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".*")
	if err != nil {
		return fmt.Errorf("create model file: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(tmp.Name()))
		}
	}()
	buf := bufio.NewWriterSize(tmp, 1<<20)
	if err := errors.Join(w.Write(buf), buf.Flush(), tmp.Chmod(0o644), tmp.Close()); err != nil {
		return err
	}
	return os.Rename(tmp.Name(), path)
}

// Dequantize returns a writer of the same model with every tensor as F32.
func (f *File) Dequantize() (*Writer, error) { return f.Convert(F32) }

// fileTypes is how general.file_type names a file of mostly one type.
var fileTypes = map[Type]uint32{F32: 0, F16: 1, Q4_0: 2, Q4_1: 3, Q8_0: 7, BF16: 32}

// FileType is the value of general.file_type for a file whose matrices have type t.
func (t Type) FileType() uint32 { return fileTypes[t] }

// Convert returns a writer of the same model with every matrix in type t. Tensors of one dimension become F32, as
// engines expect of norms.
func (f *File) Convert(to Type) (*Writer, error) {
	if !to.Known() {
		return nil, fmt.Errorf("convert to type %s: it is not supported (%s are)", to, TypeNames)
	}
	w := &Writer{}
	for _, e := range f.kvs {
		if e.key != "general.alignment" { // this writer has its own
			w.kvs = append(w.kvs, kv{key: e.key, kind: e.kind, raw: e.raw})
		}
	}
	w.SetUint32("general.file_type", to.FileType())
	for _, t := range f.tensors {
		if !t.Type.Known() {
			return nil, fmt.Errorf("convert tensor %q: type %s is not supported (%s are)", t.Name, t.Type, TypeNames)
		}
		as := to
		if len(t.Dims) == 1 {
			as = F32
		}
		w.addTensor(t.Name, as, t.Dims, func(out io.Writer) error { return t.convert(out, as) })
	}
	return w, nil
}

// convert writes the tensor's data as another type, row by row.
func (t *Tensor) convert(out io.Writer, to Type) error {
	row := t.Type.RowBytes(t.Cols())
	var vals []float32
	var enc []byte
	for at := 0; at < len(t.Data); at += row {
		vals = Dequantize(vals[:0], t.Type, t.Data[at:at+row])
		enc = Quantize(enc[:0], to, vals)
		if _, err := out.Write(enc); err != nil {
			return err
		}
	}
	return nil
}
