// Package gguf reads and writes GGUF model files: typed metadata, and tensors as views of the mapped file.
// It knows the bytes of the format and how blocks are quantized; it must not know what a model does with them.
package gguf

import (
	"fmt"
	"math"
	"os"
	"syscall"
)

// File is an opened GGUF file. Metadata stays valid after Close, tensor data does not.
type File struct {
	kvs       []kv
	index     map[string]int
	tensors   []Tensor
	tensorIdx map[string]int
	mapped    []byte
	dataStart uint64
}

// Tensor is one tensor. Dims are in GGUF's order: Dims[0] is the length of a row.
type Tensor struct {
	Name string
	Type Type
	Dims []uint64
	// Data is a view of the mapped file; nil when this package does not know the type's block size.
	Data []byte
	// Offset is where Data starts in the file.
	Offset uint64
}

// Cols is the length of a row, Rows the number of rows.
func (t Tensor) Cols() int { return int(t.Dims[0]) }

// Rows is the number of rows of length Cols.
func (t Tensor) Rows() int {
	n := uint64(1)
	for _, d := range t.Dims[1:] {
		n *= d
	}
	return int(n)
}

// Open maps the file at path and parses its header. Close unmaps it.
func Open(path string) (*File, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("open model file: %w", err)
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("stat model file: %w", err)
	}
	if !st.Mode().IsRegular() {
		return nil, fmt.Errorf("open model file %s: not a regular file", path)
	}
	if st.Size() < headerBytes {
		return nil, fmt.Errorf("parse %s: %d bytes are too few for a GGUF header", path, st.Size())
	}
	if uint64(st.Size()) > math.MaxInt {
		return nil, fmt.Errorf("map %s: %d bytes do not fit this machine's address space", path, st.Size())
	}
	m, err := syscall.Mmap(int(f.Fd()), 0, int(st.Size()), syscall.PROT_READ, syscall.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map %s: %w", path, err)
	}
	g, err := Parse(m)
	if err != nil {
		_ = syscall.Munmap(m)
		return nil, fmt.Errorf("parse %s: %w", path, err)
	}
	g.mapped = m
	return g, nil
}

// Close unmaps the file: tensor data must not be touched afterwards. It is idempotent.
func (f *File) Close() error {
	if f.mapped == nil {
		return nil
	}
	m := f.mapped
	f.mapped = nil
	for i := range f.tensors {
		f.tensors[i].Data = nil
	}
	if err := syscall.Munmap(m); err != nil {
		return fmt.Errorf("unmap model file: %w", err)
	}
	return nil
}

// Keys lists the metadata keys in the file's order.
func (f *File) Keys() []string {
	out := make([]string, len(f.kvs))
	for i := range f.kvs {
		out[i] = f.kvs[i].key
	}
	return out
}

func (f *File) value(key string) any {
	i, ok := f.index[key]
	if !ok {
		return nil
	}
	return f.kvs[i].value
}

// String returns a string value.
func (f *File) String(key string) (string, bool) {
	s, ok := f.value(key).(string)
	return s, ok
}

// Bool returns a bool value.
func (f *File) Bool(key string) (bool, bool) {
	b, ok := f.value(key).(bool)
	return b, ok
}

// Uint returns an integer value of any width that is not negative.
func (f *File) Uint(key string) (uint64, bool) {
	switch v := f.value(key).(type) {
	case uint64:
		return v, true
	case int64:
		return uint64(v), v >= 0
	}
	return 0, false
}

// Float returns a float value, or an integer one converted.
func (f *File) Float(key string) (float64, bool) {
	switch v := f.value(key).(type) {
	case float64:
		return v, true
	case uint64:
		return float64(v), true
	case int64:
		return float64(v), true
	}
	return 0, false
}

// Strings returns an array of strings. The caller must not change it.
func (f *File) Strings(key string) ([]string, bool) {
	s, ok := f.value(key).([]string)
	return s, ok
}

// Ints returns an array of integers of any width, or of bools as 0 and 1. The caller must not change it.
func (f *File) Ints(key string) ([]int64, bool) {
	s, ok := f.value(key).([]int64)
	return s, ok
}

// Floats returns an array of floats. The caller must not change it.
func (f *File) Floats(key string) ([]float64, bool) {
	s, ok := f.value(key).([]float64)
	return s, ok
}

// Tensor returns a tensor by name.
func (f *File) Tensor(name string) (Tensor, bool) {
	i, ok := f.tensorIdx[name]
	if !ok {
		return Tensor{}, false
	}
	return f.tensors[i], true
}

// Tensors lists all tensors in the file's order. The caller must not change the slice.
func (f *File) Tensors() []Tensor { return f.tensors }
