package kernel

import (
	"math"
	"unsafe"

	"github.com/headrace/headrace/internal/gguf"
)

// generic is the plain Go implementation: the specification of the others, and slow.
var generic = &Impl{
	Name:  "go",
	tileR: 4, tileT: maxTileT,
	tile1:      genericTiles(1),
	tileN:      genericTiles(4),
	f16:        genericQuant(gguf.F16),
	bf16:       genericQuant(gguf.BF16),
	q40:        genericQuant(gguf.Q4_0),
	q41:        genericQuant(gguf.Q4_1),
	q80:        genericQuant(gguf.Q8_0),
	mix16:      genericMixes(16),
	expSum:     genericExpSum,
	maxOf:      genericMaxOf,
	siluMul:    genericSiluMul,
	sumSquares: genericSumSquares,
	scaleMul:   genericScaleMul,
	add:        genericAdd,
	scale:      genericScale,
}

// fma32 is a*b+c rounded once. The product is exact in float64, and so is the float32 rounding of the float64 sum
// unless that sum, already rounded, looks like a tie: then the part that the sum lost decides.
func fma32(a, b, c float32) float32 {
	p, q := float64(a)*float64(b), float64(c)
	s := p + q
	if bits := math.Float64bits(s); bits&0x1fffffff == 0x10000000 || math.Abs(s) < 0x1p-125 {
		return float32(oddSum(p, q, s))
	}
	return float32(s)
}

// oddSum is p+q rounded to odd: s, their sum rounded to nearest, moved to its odd neighbour where it is not exact.
// Rounding that to float32 rounds as if the first rounding had not happened.
func oddSum(p, q, s float64) float64 {
	if math.IsInf(s, 0) || math.IsNaN(s) {
		return s
	}
	t := s - p
	lost := (p - (s - t)) + (q - t)
	bits := math.Float64bits(s)
	if lost == 0 || bits&1 == 1 {
		return s
	}
	if (lost > 0) == (s > 0) {
		return math.Float64frombits(bits + 1)
	}
	return math.Float64frombits(bits - 1)
}

// reduce adds 16 lanes in the order that the package comment fixes.
func reduce(s *[16]float32) float32 {
	for _, half := range []int{8, 4, 2, 1} {
		for j := range half {
			s[j] += s[j+half]
		}
	}
	return s[0]
}

func floats(p *float32, n uintptr) []float32 { return unsafe.Slice(p, n) }

func row(p *float32, stride uintptr, i int) *float32 {
	return (*float32)(unsafe.Add(unsafe.Pointer(p), stride*uintptr(i)))
}

func genericDot(w, x []float32) float32 {
	var s [16]float32
	for i := 0; i < len(w); i += 16 {
		for j := range 16 {
			s[j] = fma32(w[i+j], x[i+j], s[j])
		}
	}
	return reduce(&s)
}

func genericTiles(r int) []tileFn {
	fns := []tileFn{nil}
	for t := 1; t <= maxTileT; t++ {
		fns = append(fns, func(w *float32, ws uintptr, x *float32, xs uintptr, out *float32, os uintptr, k16 uintptr) {
			for j := range t {
				o := floats(row(out, os, j), uintptr(r))
				for i := range r {
					o[i] = genericDot(floats(row(w, ws, i), k16*16), floats(row(x, xs, j), k16*16))
				}
			}
		})
	}
	return fns
}

func genericQuant(t gguf.Type) quantFns {
	bytes := uintptr(t.RowBytes(gguf.BlockLen))
	values := func(dst []float32, src *byte, blocks uintptr) []float32 {
		return gguf.Dequantize(dst, t, unsafe.Slice(src, blocks*bytes))
	}
	dots := func(r int) []dotFn {
		return []dotFn{nil, func(w *byte, ws uintptr, x *float32, xs uintptr, out *float32, os uintptr, blocks uintptr) {
			o := floats(out, uintptr(r))
			for i := range r {
				src := (*byte)(unsafe.Add(unsafe.Pointer(w), ws*uintptr(i)))
				o[i] = genericDot(values(nil, src, blocks), floats(x, blocks*gguf.BlockLen))
			}
		}}
	}
	return quantFns{
		dequant: func(dst *float32, src *byte, blocks uintptr) {
			values(floats(dst, blocks*gguf.BlockLen)[:0], src, blocks)
		},
		dot1: dots(1),
		dot4: dots(4),
	}
}

func genericMixes(d int) []mixFn {
	fns := []mixFn{nil}
	for q := 1; q <= maxTileT; q++ {
		fns = append(fns, func(p *float32, ps uintptr, v *float32, vs uintptr, out *float32, os uintptr, n uintptr) {
			for j := range q {
				o := floats(row(out, os, j), uintptr(d))
				for i, weight := range floats(row(p, ps, j), n) {
					for c, x := range floats(row(v, vs, i), uintptr(d)) {
						o[c] = fma32(weight, x, o[c])
					}
				}
			}
		})
	}
	return fns
}

// exp32 is e^x as every implementation computes it: x = n*ln2 + r, a polynomial in r, and n put into the exponent.
func exp32(x float32) float32 {
	if x < -87.33654 {
		return 0
	}
	x = min(x, 88.02)
	n := float32(math.RoundToEven(float64(x * 1.44269504)))
	x = fma32(n, -0.693359375, x)
	x = fma32(n, 2.12194440e-4, x)
	p := float32(1.9875691500e-4)
	for _, c := range [...]float32{1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1} {
		p = fma32(p, x, c)
	}
	p = float32(p * x)
	p = fma32(p, x, x)
	p++
	return p * math.Float32frombits(uint32(int32(n)+127)<<23)
}

func genericExpSum(x *float32, peak float32, n16 uintptr, sum *float32) {
	var s [16]float32
	v := floats(x, n16*16)
	for i := range v {
		v[i] = exp32(v[i] - peak)
		s[i%16] += v[i]
	}
	*sum = reduce(&s)
}

func genericMaxOf(x *float32, n16 uintptr, out *float32) {
	m := *x
	for _, v := range floats(x, n16*16) {
		m = max(m, v)
	}
	*out = m
}

func genericSiluMul(g, u *float32, n16 uintptr) {
	gs, us := floats(g, n16*16), floats(u, n16*16)
	for i, v := range gs {
		gs[i] = float32(v/(1+exp32(0-v))) * us[i]
	}
}

func genericSumSquares(x *float32, n16 uintptr, sum *float32) {
	var s [16]float32
	for i, v := range floats(x, n16*16) {
		s[i%16] = fma32(v, v, s[i%16])
	}
	*sum = reduce(&s)
}

func genericScaleMul(dst, x, w *float32, f float32, n16 uintptr) {
	d, xs, ws := floats(dst, n16*16), floats(x, n16*16), floats(w, n16*16)
	for i, v := range xs {
		d[i] = float32(v*f) * ws[i]
	}
}

func genericAdd(dst, x *float32, n16 uintptr) {
	d := floats(dst, n16*16)
	for i, v := range floats(x, n16*16) {
		d[i] += v
	}
}

func genericScale(dst *float32, f float32, n16 uintptr) {
	d := floats(dst, n16*16)
	for i := range d {
		d[i] *= f
	}
}
