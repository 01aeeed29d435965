package kernel

import (
	"fmt"
	"os"
	"slices"
	"strings"
)

// maxTileT is the most tokens a tile of any implementation takes.
const maxTileT = 6

type (
	// tileFn multiplies rows of w with rows of x; strides in bytes, out[t*ostride+r], steps of 16 floats.
	tileFn func(w *float32, wstride uintptr, x *float32, xstride uintptr, out *float32, ostride uintptr, k16 uintptr)
	// dotFn is the same for rows of another type than F32, in steps of a block: 32 elements, of whatever type.
	dotFn     func(w *byte, wstride uintptr, x *float32, xstride uintptr, out *float32, ostride uintptr, blocks uintptr)
	dequantFn func(dst *float32, src *byte, blocks uintptr)
	// mixFn adds n rows of v, weighted by rows of p, to rows of out.
	mixFn func(p *float32, pstride uintptr, v *float32, vstride uintptr, out *float32, ostride uintptr, n uintptr)
)

// quantFns are the kernels of one type that must become F32 first: dot1 and dot4 take 1 and 4 rows, indexed by tokens.
type quantFns struct {
	dequant    dequantFn
	dot1, dot4 []dotFn
}

// Impl is one implementation of the kernels. All give the same bits.
type Impl struct {
	Name         string
	tileR, tileT int
	tile1, tileN []tileFn // one row, tileR rows; indexed by tokens
	f16, bf16    quantFns
	q40, q41     quantFns
	q80          quantFns
	mix16        []mixFn // indexed by queries
	mix32, mix64 []mixFn // nil where 16 floats at a time is all there is
	expSum       func(x *float32, peak float32, n16 uintptr, sum *float32)
	maxOf        func(x *float32, n16 uintptr, out *float32)
	siluMul      func(g, u *float32, n16 uintptr)
	sumSquares   func(x *float32, n16 uintptr, sum *float32)
	scaleMul     func(dst, x, w *float32, f float32, n16 uintptr)
	add          func(dst, x *float32, n16 uintptr)
	scale        func(dst *float32, f float32, n16 uintptr)
}

// Impls lists what this machine can run, best first. The last is always plain Go.
func Impls() []*Impl { return append(native(), generic) }

// Best is the fastest implementation, or the one that HEADRACE_KERNEL names.
func Best() (*Impl, error) {
	all := Impls()
	want := os.Getenv("HEADRACE_KERNEL")
	if want == "" {
		return all[0], nil
	}
	var names []string
	for _, im := range all {
		names = append(names, im.Name)
	}
	if i := slices.Index(names, want); i >= 0 {
		return all[i], nil
	}
	return nil, fmt.Errorf("choose kernels: HEADRACE_KERNEL is %q, this machine has %s", want, strings.Join(names, ", "))
}
