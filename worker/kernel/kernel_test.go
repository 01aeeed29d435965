package kernel

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/big"
	"math/rand/v2"
	"testing"

	"github.com/headrace/headrace/internal/gguf"
)

func random(r *rand.Rand, n int) []float32 {
	v := make([]float32, n)
	for i := range v {
		v[i] = float32(r.NormFloat64())
	}
	return v
}

// same fails unless a and b have the same bits.
func same(t testing.TB, what string, a, b []float32) {
	t.Helper()
	for i := range a {
		if math.Float32bits(a[i]) != math.Float32bits(b[i]) {
			t.Fatalf("%s: element %d is %v (%#08x), want %v (%#08x)", what, i, a[i], math.Float32bits(a[i]), b[i], math.Float32bits(b[i]))
		}
	}
}

func matrix(t testing.TB, typ gguf.Type, rows, cols int, v []float32) *Matrix {
	t.Helper()
	m, err := NewMatrix(typ, rows, cols, gguf.Quantize(nil, typ, v))
	if err != nil {
		t.Fatal(err)
	}
	return &m
}

// others are the implementations to hold against plain Go.
func others(t testing.TB) []*Impl {
	all := Impls()
	if len(all) == 1 {
		t.Skip("this machine runs plain Go only")
	}
	return all[:len(all)-1]
}

func TestProductsHaveTheSameBitsEverywhere(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	for _, typ := range gguf.Types {
		for _, shape := range [][2]int{{4, 32}, {23, 96}, {48, 576}} {
			rows, cols := shape[0], shape[1]
			m := matrix(t, typ, rows, cols, random(r, rows*cols))
			x := random(r, 13*cols)
			want := make([]float32, 13*rows)
			generic.Mul(want, rows, m, 0, rows, x, cols, 13, &Scratch{})
			for _, im := range Impls() {
				for tokens := 1; tokens <= 13; tokens++ {
					got := make([]float32, tokens*rows)
					im.Mul(got, rows, m, 0, rows, x, cols, tokens, &Scratch{})
					same(t, fmt.Sprintf("%s %s %v with %d tokens", im.Name, typ, shape, tokens), got, want)
				}
				one := make([]float32, 5)
				for from := range rows - 4 {
					im.Mul(one, 5, m, from, from+5, x, cols, 1, &Scratch{})
					same(t, fmt.Sprintf("%s %s rows from %d", im.Name, typ, from), one, want[from:])
				}
			}
		}
	}
}

func TestQuantizedEqualsDequantized(t *testing.T) {
	r := rand.New(rand.NewPCG(2, 1))
	const rows, cols = 19, 256
	for _, typ := range gguf.Types[1:] {
		q := matrix(t, typ, rows, cols, random(r, rows*cols))
		f := matrix(t, gguf.F32, rows, cols, gguf.Dequantize(nil, typ, q.data))
		x := random(r, 9*cols)
		for _, im := range Impls() {
			for _, tokens := range []int{1, 3, 9} {
				a, b := make([]float32, tokens*rows), make([]float32, tokens*rows)
				im.Mul(a, rows, q, 0, rows, x, cols, tokens, &Scratch{})
				im.Mul(b, rows, f, 0, rows, x, cols, tokens, &Scratch{})
				same(t, im.Name+" "+typ.String(), a, b)
			}
		}
	}
}

func TestProductIsNearTheExactOne(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 1))
	const cols = 1536
	w, x := random(r, cols), random(r, cols)
	m := matrix(t, gguf.F32, 1, cols, w)
	exact, size := 0.0, 0.0
	for i := range w {
		p := float64(w[i]) * float64(x[i])
		exact, size = exact+p, size+math.Abs(p)
	}
	for _, im := range Impls() {
		var got [1]float32
		im.Mul(got[:], 1, m, 0, 1, x, cols, 1, &Scratch{})
		if d := math.Abs(float64(got[0]) - exact); d > size*1e-6 {
			t.Errorf("%s: off by %g of %g", im.Name, d, size)
		}
	}
}

func TestVectorStepsHaveTheSameBitsEverywhere(t *testing.T) {
	r := rand.New(rand.NewPCG(4, 1))
	for _, im := range others(t) {
		for _, n := range []int{16, 48, 576} {
			x, y, w := random(r, n), random(r, n), random(r, n)
			for i := range x {
				x[i] *= 30
			}
			run := func(im *Impl) []float32 {
				var sum, peak, sq float32
				e := append([]float32(nil), x...)
				im.maxOf(&e[0], uintptr(n/16), &peak)
				im.expSum(&e[0], peak, uintptr(n/16), &sum)
				g := append([]float32(nil), x...)
				im.SiluMul(g, y)
				im.sumSquares(&x[0], uintptr(n/16), &sq)
				nrm := make([]float32, n)
				im.RMSNorm(nrm, x, w, 1e-5)
				im.Add(nrm, y)
				im.scale(&nrm[0], 0.3, uintptr(n/16))
				return append(append(append(e, g...), nrm...), sum, peak, sq)
			}
			same(t, im.Name, run(im), run(generic))
		}
	}
}

func TestExp(t *testing.T) {
	if exp32(float32(math.Inf(-1))) != 0 || exp32(-88) != 0 || exp32(0) != 1 {
		t.Error("exp of -inf, -88, 0 is", exp32(float32(math.Inf(-1))), exp32(-88), exp32(0))
	}
	worst := 0.0
	for x := float32(-87.3); x < 88; x += 0.0137 {
		want := math.Exp(float64(x))
		worst = max(worst, math.Abs(float64(exp32(x))-want)/want)
	}
	if worst > 2e-7 {
		t.Errorf("relative error %g", worst)
	}
	v := make([]float32, 1<<12)
	r := rand.New(rand.NewPCG(5, 1))
	for _, im := range others(t) {
		for i := range v {
			v[i] = float32(r.Float64()*400 - 200)
		}
		copy(v, []float32{float32(math.Inf(-1)), -87.33654, -87.33655, -87.33653, 88.02, 88.03, 3e38, -3e38, 0, float32(math.Copysign(0, -1))})
		got := append([]float32(nil), v...)
		var sum, sum2 float32
		im.expSum(&got[0], 0, uintptr(len(v)/16), &sum)
		genericExpSum(&v[0], 0, uintptr(len(v)/16), &sum2)
		same(t, im.Name, got, v)
		same(t, im.Name, []float32{sum}, []float32{sum2})
	}
}

// pages builds a cache of one layer with heads of dim floats, and a shuffled block table.
func pages(r *rand.Rand, blocks, blockTokens, heads, dim int) (*Pages, []uint32) {
	rowStride := heads * dim
	p := &Pages{RowStride: rowStride, PlaneStride: blockTokens * rowStride, BlockStride: 2 * blockTokens * rowStride, BlockTokens: blockTokens, HeadDim: dim}
	p.Mem = random(r, blocks*p.BlockStride)
	table := make([]uint32, blocks)
	for i, b := range r.Perm(blocks) {
		table[i] = uint32(b)
	}
	return p, table
}

func TestAttentionHasTheSameBitsEverywhere(t *testing.T) {
	r := rand.New(rand.NewPCG(6, 1))
	for _, dim := range []int{16, 48, 64, 80} {
		p, table := pages(r, 9, 8, 2, dim)
		ctx := []int{60, 61, 62, 63, 64, 65}
		q := random(r, 6*dim)
		want := make([]float32, 6*dim)
		generic.Attend(p, table, dim, q, dim, ctx, want, dim, &Scratch{})
		for _, im := range Impls() {
			for n := 1; n <= 6; n++ {
				for at := 0; at+n <= 6; at++ {
					got := make([]float32, n*dim)
					im.Attend(p, table, dim, q[at*dim:], dim, ctx[at:at+n], got, dim, &Scratch{})
					same(t, fmt.Sprintf("%s, %d queries from %d, dim %d", im.Name, n, at, dim), got, want[at*dim:])
				}
			}
		}
	}
}

func TestAttentionIsNearTheExactOne(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 1))
	const dim, n = 64, 100
	p, table := pages(r, 13, 8, 1, dim)
	q := random(r, dim)
	at := func(i, plane int) []float32 {
		o := int(table[i/8])*p.BlockStride + plane*p.PlaneStride + i%8*dim
		return p.Mem[o : o+dim]
	}
	var weights [n]float64
	var total float64
	for i := range n {
		s := 0.0
		for d, k := range at(i, 0) {
			s += float64(k) * float64(q[d])
		}
		weights[i] = math.Exp(s)
		total += weights[i]
	}
	got := make([]float32, dim)
	Impls()[0].Attend(p, table, 0, q, dim, []int{n}, got, dim, &Scratch{})
	for d := range dim {
		want := 0.0
		for i := range n {
			want += weights[i] / total * float64(at(i, 1)[d])
		}
		if math.Abs(want-float64(got[d])) > 1e-5 {
			t.Errorf("dimension %d: %v, want %v", d, got[d], want)
		}
	}
}

// exactFMA rounds a*b+c once, with big numbers.
func exactFMA(a, b, c float32) float32 {
	f := func(x float32) *big.Float { return new(big.Float).SetPrec(1000).SetFloat64(float64(x)) }
	p := new(big.Float).SetPrec(1000).Mul(f(a), f(b))
	out, _ := p.Add(p, f(c)).Float32()
	return out
}

func FuzzFMA(f *testing.F) {
	f.Add(uint32(0x3f800001), uint32(0x3f800001), uint32(0x33800000))
	f.Add(uint32(0x00800001), uint32(0x3f000001), uint32(1))
	f.Add(uint32(0x3f800001), uint32(0x34800001), uint32(0x4b800001))
	f.Fuzz(func(t *testing.T, a, b, c uint32) {
		x, y, z := math.Float32frombits(a), math.Float32frombits(b), math.Float32frombits(c)
		for _, v := range []float32{x, y, z} {
			if math.IsNaN(float64(v)) || math.IsInf(float64(v), 0) {
				return
			}
		}
		if got, want := fma32(x, y, z), exactFMA(x, y, z); got != want {
			t.Fatalf("fma(%v, %v, %v) = %v, want %v", x, y, z, got, want)
		}
	})
}

func TestFMAIsRoundedOnce(t *testing.T) {
	r := rand.New(rand.NewPCG(8, 1))
	for range 300000 {
		// Near ties: a product of many bits, and an addend whose last place is about its size.
		a, b := math.Float32frombits(0x3f800000|r.Uint32()&0x7fffff), math.Float32frombits(0x3f800000|r.Uint32()&0xfff<<11)
		c := math.Float32frombits((127+r.Uint32()%52-26)<<23 | r.Uint32()&0x80000003)
		if got, want := fma32(a, b, c), exactFMA(a, b, c); got != want {
			t.Fatalf("fma(%v, %v, %v) = %v, want %v", a, b, c, got, want)
		}
	}
}

// FuzzProducts feeds raw bytes as weights, any bit pattern of scales and floats that is finite.
func FuzzProducts(f *testing.F) {
	f.Add([]byte("seed"), uint8(3))
	f.Fuzz(func(t *testing.T, raw []byte, tokens uint8) {
		n := int(tokens%8) + 1
		var seed [32]byte
		copy(seed[:], raw)
		r := rand.New(rand.NewChaCha8(seed))
		const rows, cols = 5, 64
		x := random(r, n*cols)
		for i := 0; i+4 <= len(raw) && i/4 < len(x); i += 4 {
			if v := math.Float32frombits(binary.LittleEndian.Uint32(raw[i:])); math.Abs(float64(v)) < 1e30 {
				x[i/4] = v
			}
		}
		for _, typ := range gguf.Types {
			m := matrix(t, typ, rows, cols, random(r, rows*cols))
			want := make([]float32, n*rows)
			generic.Mul(want, rows, m, 0, rows, x, cols, n, &Scratch{})
			for _, im := range Impls() {
				got := make([]float32, n*rows)
				im.Mul(got, rows, m, 0, rows, x, cols, n, &Scratch{})
				same(t, im.Name+" "+typ.String(), got, want)
			}
		}
	})
}
