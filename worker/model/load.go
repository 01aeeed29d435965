package model

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"

	"github.com/headrace/headrace/internal/gguf"
	"github.com/headrace/headrace/worker/kernel"
)

// Options of Load. The zero value uses every processor and the best kernels.
type Options struct {
	Threads int // at most so many threads; 0 means one for every processor Go may use
	Kernel  *kernel.Impl
}

// Model is a loaded model. Forward calls exclude each other.
type Model struct {
	Config
	file       *gguf.File
	pool       *kernel.Pool
	im         *kernel.Impl
	mu         sync.Mutex
	embed, out kernel.Matrix
	outNorm    []float32
	layers     []layer
	ropeFreqs  []float64 // radians a position, a pair of dimensions
	rope       []float32 // cos, sin of (position, pair), as far as needed yet
	scratch    []kernel.Scratch
	buf        buffers
}

type layer struct {
	attnNorm, ffnNorm          []float32
	q, k, v, o, gate, up, down kernel.Matrix
}

// Load maps the GGUF file at path and checks that it is a model that Forward computes correctly.
func Load(path string, o Options) (*Model, error) {
	f, err := gguf.Open(path)
	if err != nil {
		return nil, err
	}
	m, err := build(f, o)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("load %s: %w", path, err), f.Close())
	}
	return m, nil
}

func build(f *gguf.File, o Options) (*Model, error) {
	c, err := readConfig(f)
	if err != nil {
		return nil, err
	}
	im := o.Kernel
	if im == nil {
		if im, err = kernel.Best(); err != nil {
			return nil, err
		}
	}
	m := &Model{Config: c, file: f, im: im}
	if err := m.bind(); err != nil {
		return nil, err
	}
	m.pool = kernel.NewPool(o.Threads)
	m.scratch = make([]kernel.Scratch, m.pool.Threads())
	m.buf.tmp = make([][]float32, m.pool.Threads())
	m.fingerprint()
	return m, nil
}

// Close ends the threads and unmaps the file.
func (m *Model) Close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.pool.Close()
	return m.file.Close()
}

// File is the file the model came from, with the tokenizer's metadata.
func (m *Model) File() *gguf.File { return m.file }

// Threads is the number of threads that Forward uses.
func (m *Model) Threads() int { return m.pool.Threads() }

// KernelName names the kernels in use.
func (m *Model) KernelName() string { return m.im.Name }

// binder takes tensors out of the file and remembers which; the first error stays.
type binder struct {
	f    *gguf.File
	used map[string]bool
	err  error
}

func (b *binder) take(name string) (gguf.Tensor, bool) {
	t, ok := b.f.Tensor(name)
	if !ok && b.err == nil {
		b.err = fmt.Errorf("file lacks tensor %s", name)
	}
	b.used[name] = true
	return t, ok && b.err == nil
}

func (b *binder) matrix(name string, rows, cols int) kernel.Matrix {
	t, ok := b.take(name)
	if !ok {
		return kernel.Matrix{}
	}
	if !t.Type.Known() {
		b.err = fmt.Errorf("tensor %s has type %s, only %s are supported", name, t.Type, gguf.TypeNames)
		return kernel.Matrix{}
	}
	if len(t.Dims) != 2 || t.Cols() != cols || t.Rows() != rows {
		b.err = fmt.Errorf("tensor %s has dimensions %v, want [%d %d]", name, t.Dims, cols, rows)
		return kernel.Matrix{}
	}
	m, err := kernel.NewMatrix(t.Type, rows, cols, t.Data)
	if err != nil {
		b.err = fmt.Errorf("tensor %s: %w", name, err)
	}
	return m
}

func (b *binder) vector(name string, n int) []float32 {
	t, ok := b.take(name)
	if !ok {
		return nil
	}
	if t.Type != gguf.F32 || len(t.Dims) != 1 || t.Cols() != n {
		b.err = fmt.Errorf("tensor %s is %s %v, want F32 [%d]", name, t.Type, t.Dims, n)
		return nil
	}
	return kernel.Floats(t.Data)
}

// bind finds every weight by name and refuses files with tensors that Forward would leave out.
func (m *Model) bind() error {
	b := &binder{f: m.file, used: map[string]bool{}}
	t, ok := b.take("token_embd.weight")
	if !ok {
		return b.err
	}
	if len(t.Dims) != 2 || t.Dims[1] > maxVocab {
		return fmt.Errorf("tensor token_embd.weight has dimensions %v", t.Dims)
	}
	m.Vocab = t.Rows()
	m.embed = b.matrix("token_embd.weight", m.Vocab, m.Dim)
	m.out = m.embed // tied unless the file has a head of its own
	if _, ok := m.file.Tensor("output.weight"); ok {
		m.out = b.matrix("output.weight", m.Vocab, m.Dim)
	}
	m.outNorm = b.vector("output_norm.weight", m.Dim)
	var factors []float32
	if _, ok := m.file.Tensor("rope_freqs.weight"); ok {
		factors = b.vector("rope_freqs.weight", m.HeadDim/2)
	}
	m.layers = make([]layer, m.Layers)
	for i := range m.layers {
		name := func(s string) string { return fmt.Sprintf("blk.%d.%s.weight", i, s) }
		m.layers[i] = layer{
			attnNorm: b.vector(name("attn_norm"), m.Dim),
			ffnNorm:  b.vector(name("ffn_norm"), m.Dim),
			q:        b.matrix(name("attn_q"), m.qDim, m.Dim),
			k:        b.matrix(name("attn_k"), m.kvDim, m.Dim),
			v:        b.matrix(name("attn_v"), m.kvDim, m.Dim),
			o:        b.matrix(name("attn_output"), m.Dim, m.qDim),
			gate:     b.matrix(name("ffn_gate"), m.FFN, m.Dim),
			up:       b.matrix(name("ffn_up"), m.FFN, m.Dim),
			down:     b.matrix(name("ffn_down"), m.Dim, m.FFN),
		}
	}
	if b.err != nil {
		return b.err
	}
	for _, t := range m.file.Tensors() {
		if !b.used[t.Name] {
			return fmt.Errorf("tensor %s is no part of a plain Llama model: this variant is not supported", t.Name)
		}
	}
	m.setRope(factors)
	return nil
}

// fingerprint hashes the shape and every tensor: each tensor by itself, on all threads, then the list of hashes.
// It reads the whole file once (about 1.5 GB/s a thread), which also brings it into the page cache.
func (m *Model) fingerprint() {
	tensors := m.file.Tensors()
	sums := make([][32]byte, len(tensors))
	m.pool.Run(len(tensors), func(_, i int) {
		t := &tensors[i]
		h := sha256.New()
		head := append([]byte(t.Name), 0)
		head = binary.LittleEndian.AppendUint32(head, uint32(t.Type))
		for _, d := range t.Dims {
			head = binary.LittleEndian.AppendUint64(head, d)
		}
		h.Write(head)
		h.Write(t.Data)
		h.Sum(sums[i][:0])
	})
	h := sha256.New()
	h.Write(m.appendShape([]byte("headrace kv 1\n")))
	for i := range sums {
		h.Write(sums[i][:])
	}
	h.Sum(m.Fingerprint[:0])
}
