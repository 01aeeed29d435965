package kernel

import (
	"fmt"
	"unsafe"

	"github.com/headrace/headrace/internal/gguf"
)

// Matrix is a weight matrix: Rows outputs of Cols inputs each, in the bytes of the file.
type Matrix struct {
	Type       gguf.Type
	Rows, Cols int
	data       []byte
	rowBytes   int
}

// NewMatrix checks that data holds rows x cols elements of a type that has kernels. data must stay mapped.
func NewMatrix(t gguf.Type, rows, cols int, data []byte) (Matrix, error) {
	if !t.Known() {
		return Matrix{}, fmt.Errorf("type %s has no kernel (%s have)", t, gguf.TypeNames)
	}
	if rows <= 0 || cols <= 0 || cols%gguf.BlockLen != 0 {
		return Matrix{}, fmt.Errorf("%d x %d elements: rows must be multiples of %d long", rows, cols, gguf.BlockLen)
	}
	n := t.RowBytes(cols)
	if len(data) != rows*n {
		return Matrix{}, fmt.Errorf("%d bytes of data, %d rows of %d %s elements take %d", len(data), rows, cols, t, rows*n)
	}
	return Matrix{Type: t, Rows: rows, Cols: cols, data: data, rowBytes: n}, nil
}

// Row appends the dequantized row i to dst.
func (m *Matrix) Row(dst []float32, i int) []float32 {
	return gguf.Dequantize(dst, m.Type, m.data[i*m.rowBytes:(i+1)*m.rowBytes])
}

// panelFloats bounds a dequantized panel: it stays in the second-level cache while all tokens pass over it.
const panelFloats = 24 << 10

// PanelRows is how many rows of m one task should take when the matrix meets so many tokens: enough tasks for all
// threads, panels of whole tiles and, for the callers' vector steps, multiples of 16.
func (m *Matrix) PanelRows(tokens, threads int) int {
	most := 256
	if tokens > 1 {
		most = panelFloats / m.Cols
	}
	n := min(most, m.Rows/(4*threads)) &^ 15
	return max(n, 16)
}

// Scratch is the memory one thread needs for Mul; it grows as needed.
type Scratch struct {
	panel  []float32
	scores []float32
}

func grow(b *[]float32, n int) []float32 {
	if cap(*b) < n {
		*b = make([]float32, n)
	}
	return (*b)[:n]
}

func (im *Impl) quant(t gguf.Type) *quantFns {
	switch t {
	case gguf.F16:
		return &im.f16
	case gguf.BF16:
		return &im.bf16
	case gguf.Q4_0:
		return &im.q40
	case gguf.Q4_1:
		return &im.q41
	}
	return &im.q80
}

// Mul multiplies rows [from,to) of m with tokens rows of x: out[t*ostride + r-from]. Strides are in floats.
func (im *Impl) Mul(out []float32, ostride int, m *Matrix, from, to int, x []float32, xstride, tokens int, s *Scratch) {
	if from < 0 || to > m.Rows || from >= to || tokens <= 0 || len(x) < (tokens-1)*xstride+m.Cols ||
		len(out) < (tokens-1)*ostride+to-from {
		panic(fmt.Sprintf("kernel: Mul of rows [%d,%d) of %d x %d with %d tokens: %d floats in, %d out",
			from, to, m.Rows, m.Cols, tokens, len(x), len(out)))
	}
	data := m.data[from*m.rowBytes : to*m.rowBytes]
	rows := to - from
	if m.Type == gguf.F32 {
		im.tiles((*float32)(unsafe.Pointer(&data[0])), m.Cols, rows, x, xstride, tokens, out, ostride, m.Cols)
		return
	}
	q := im.quant(m.Type)
	if tokens < len(q.dot4) {
		im.fused(q, data, m, rows, x, xstride, tokens, out, ostride)
		return
	}
	panel := grow(&s.panel, rows*m.Cols)
	q.dequant(&panel[0], &data[0], uintptr(rows*m.Cols/gguf.BlockLen))
	im.tiles(&panel[0], m.Cols, rows, x, xstride, tokens, out, ostride, m.Cols)
}

func (im *Impl) fused(q *quantFns, data []byte, m *Matrix, rows int, x []float32, xstride, tokens int, out []float32, ostride int) {
	xs, os, ws, blocks := uintptr(xstride)*4, uintptr(ostride)*4, uintptr(m.rowBytes), uintptr(m.Cols/gguf.BlockLen)
	r := 0
	for f := q.dot4[tokens]; r+4 <= rows; r += 4 {
		f(&data[r*m.rowBytes], ws, &x[0], xs, &out[r], os, blocks)
	}
	for f := q.dot1[tokens]; r < rows; r++ {
		f(&data[r*m.rowBytes], ws, &x[0], xs, &out[r], os, blocks)
	}
}

// tiles covers rows x tokens with full tiles and what is left over: out[t*ostride+r] = w[r] . x[t], strides in floats.
func (im *Impl) tiles(w *float32, wstride, rows int, x []float32, xstride, tokens int, out []float32, ostride, k int) {
	xs, os, ws, k16 := uintptr(xstride)*4, uintptr(ostride)*4, uintptr(wstride)*4, uintptr(k/16)
	for t := 0; t < tokens; t += im.tileT {
		n := min(im.tileT, tokens-t)
		r := 0
		for f := im.tileN[n]; r+im.tileR <= rows; r += im.tileR {
			f(row(w, ws, r), ws, &x[t*xstride], xs, &out[t*ostride+r], os, k16)
		}
		for f := im.tile1[n]; r < rows; r++ {
			f(row(w, ws, r), ws, &x[t*xstride], xs, &out[t*ostride+r], os, k16)
		}
	}
}
