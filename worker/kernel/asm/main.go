// Command asm generates the AVX2 and AVX-512 kernels of package kernel. It is a module of its own so that nothing
// else depends on avo. Every kernel keeps the order of operations that package kernel's documentation fixes.
package main

import (
	"fmt"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	. "github.com/mmcloughlin/avo/reg"
)

// vecs are the physical vector registers: the kernels place them by hand, because instructions without an EVEX
// form must not meet registers 16 to 31.
var vecs = []VecPhysical{
	Z0, Z1, Z2, Z3, Z4, Z5, Z6, Z7, Z8, Z9, Z10, Z11, Z12, Z13, Z14, Z15,
	Z16, Z17, Z18, Z19, Z20, Z21, Z22, Z23, Z24, Z25, Z26, Z27, Z28, Z29, Z30, Z31,
}

// isa emits the operations on a "wide", 16 float lanes: one register with AVX-512, two with AVX2.
type isa struct {
	name  string
	parts int // registers a wide takes
	tileR int // rows of a full tile
	tileT int // most tokens of a tile
	fuseT int // most tokens of a fused quantized tile
}

var (
	avx2   = isa{name: "AVX2", parts: 2, tileR: 2, tileT: 3, fuseT: 1}
	avx512 = isa{name: "AVX512", parts: 1, tileR: 4, tileT: 6, fuseT: 4}
)

func (s isa) partBytes() int { return 64 / s.parts }

// reg is the i-th vector register at this instruction set's width.
func (s isa) reg(i int) Op {
	if s.parts == 2 {
		return vecs[i].AsY()
	}
	return vecs[i]
}

func x(i int) Op { return vecs[i].AsX() }
func y(i int) Op { return vecs[i].AsY() }

func (s isa) zero(i int) {
	if s.parts == 2 {
		VXORPS(s.reg(i), s.reg(i), s.reg(i))
		return
	}
	VPXORD(s.reg(i), s.reg(i), s.reg(i))
}

// fold adds the 16 lanes of the wide starting at register i down to the four low lanes of register i:
// lane j + lane j+8, then lane j + lane j+4. tmp is overwritten.
func (s isa) fold(i, tmp int) {
	if s.parts == 2 {
		VADDPS(y(i+1), y(i), y(i))
		VEXTRACTF128(Imm(1), y(i), x(tmp))
	} else {
		VEXTRACTF64X4(Imm(1), vecs[i], y(tmp))
		VADDPS(y(tmp), y(i), y(i))
		VEXTRACTF32X4(Imm(1), y(i), x(tmp))
	}
	VADDPS(x(tmp), x(i), x(i))
}

// pairs adds lanes j and j+2 of two folded registers into dst: (a0+a2, a1+a3, b0+b2, b1+b3).
func pairs(a, b, dst, tmp int) {
	VUNPCKHPD(x(b), x(a), x(tmp))
	VUNPCKLPD(x(b), x(a), x(dst))
	VADDPS(x(tmp), x(dst), x(dst))
}

// finish ends the reduction of the wides in regs (1, 2 or 4 of them) and stores their sums side by side.
func (s isa) finish(regs []int, tmp int, out Mem) {
	for _, r := range regs {
		s.fold(r, tmp)
	}
	a := regs[0]
	switch len(regs) {
	case 1:
		pairs(a, a, a, tmp)
		VMOVSHDUP(x(a), x(tmp))
		VADDSS(x(tmp), x(a), x(a))
		VMOVSS(x(a), out)
	case 2:
		pairs(a, regs[1], a, tmp)
		VSHUFPS(Imm(0x0d), x(a), x(a), x(tmp))
		VSHUFPS(Imm(0x08), x(a), x(a), x(a))
		VADDPS(x(tmp), x(a), x(a))
		VMOVLPS(x(a), out)
	case 4:
		c := regs[2]
		pairs(a, regs[1], a, tmp)
		pairs(c, regs[3], c, tmp)
		VSHUFPS(Imm(0xdd), x(c), x(a), x(tmp))
		VSHUFPS(Imm(0x88), x(c), x(a), x(a))
		VADDPS(x(tmp), x(a), x(a))
		VMOVUPS(x(a), out)
	}
}

// rows addresses up to six rows of a matrix with two moving pointers: base, base+stride, base+2*stride, then the
// same three from base+3*stride.
type rows struct{ base, base3, stride GPVirtual }

func loadRows(ptr, stride string, n int) rows {
	r := rows{base: GP64(), stride: GP64()}
	Load(Param(ptr), r.base)
	Load(Param(stride), r.stride)
	if n > 3 {
		r.base3 = GP64()
		LEAQ(Mem{Base: r.base, Index: r.stride, Scale: 2}, r.base3)
		ADDQ(r.stride, r.base3)
	}
	return r
}

func (r rows) at(i, disp int) Mem {
	b := r.base
	if i >= 3 {
		b, i = r.base3, i-3
	}
	if i == 0 {
		return Mem{Base: b, Disp: disp}
	}
	return Mem{Base: b, Index: r.stride, Scale: uint8(i), Disp: disp}
}

func (r rows) advance(bytes int) {
	ADDQ(Imm(uint64(bytes)), r.base)
	if r.base3 != nil {
		ADDQ(Imm(uint64(bytes)), r.base3)
	}
}

// begin starts an assembly function that works on a counted loop.
func begin(name, signature, doc string) {
	TEXT(name, NOSPLIT, "func("+signature+")")
	Pragma("noescape")
	Doc(name + " " + doc)
}

// loop runs body while the counter named by param, which is not zero at first, counts down to zero.
func loop(param string, body func()) {
	n := GP64()
	Load(Param(param), n)
	Label("loop")
	body()
	DECQ(n)
	JNZ(LabelRef("loop"))
}

func end() {
	VZEROUPPER()
	RET()
}

func main() {
	ConstraintExpr("amd64")
	for _, s := range []isa{avx2, avx512} {
		s.tiles()
		s.quantized()
		s.attention()
		s.elementwise()
	}
	pause()
	Generate()
}

func pause() {
	begin("pause", "n uint64", "waits for n turns of a spin loop without starving the sibling thread.")
	loop("n", func() { PAUSE() })
	RET()
}

// tiles emits dot products of r rows of w with t rows of x: out[t*ostride + r] in floats, strides in bytes,
// k16 counts steps of 16 floats.
func (s isa) tiles() {
	for _, r := range []int{1, s.tileR} {
		for t := 1; t <= s.tileT; t++ {
			name := fmt.Sprintf("tileR%dT%d%s", r, t, s.name)
			begin(name, "w *float32, wstride uintptr, x *float32, xstride uintptr, out *float32, ostride uintptr, k16 uintptr",
				fmt.Sprintf("multiplies %d rows of w with %d rows of x.", r, t))
			s.tile(r, t)
			end()
		}
	}
}

func (s isa) tile(r, t int) {
	w, xs := loadRows("w", "wstride", r), loadRows("x", "xstride", t)
	acc := func(i, j int) int { return (j*r + i) * s.parts }
	wreg := r * t * s.parts
	for i := range wreg {
		s.zero(i)
	}
	ahead := s.prefetch(w, r, t)
	loop("k16", func() {
		ahead()
		for p := range s.parts {
			disp := p * s.partBytes()
			for i := range r {
				VMOVUPS(w.at(i, disp), s.reg(wreg+i))
			}
			for j := range t {
				src := Op(xs.at(j, disp))
				if s.parts == 1 && r > 1 { // registers are plenty: load once for all rows
					VMOVUPS(src, s.reg(wreg+r))
					src = s.reg(wreg + r)
				}
				for i := range r {
					VFMADD231PS(src, s.reg(wreg+i), s.reg(acc(i, j)+p))
				}
			}
		}
		w.advance(64)
		xs.advance(64)
	})
	s.storeTile(r, t, acc, wreg)
}

// prefetch returns what fetches the next r rows of w while these are multiplied, a line a row and step. It matters
// when w streams through memory for few tokens: the hardware does not see a stream in a few short rows.
func (s isa) prefetch(w rows, r, t int) func() {
	if t > 3 {
		return func() {}
	}
	next := rows{base: GP64(), stride: w.stride}
	LEAQ(Mem{Base: w.base, Index: w.stride, Scale: uint8(r)}, next.base)
	if r > 3 {
		next.base3 = GP64()
		LEAQ(Mem{Base: w.base3, Index: w.stride, Scale: uint8(r)}, next.base3)
	}
	return func() {
		for i := range r {
			PREFETCHT0(next.at(i, 0))
		}
		next.advance(64)
	}
}

// storeTile reduces and stores accumulators; registers from tmp on are free.
func (s isa) storeTile(r, t int, acc func(i, j int) int, tmp int) {
	out := loadRows("out", "ostride", t)
	for j := range t {
		var regs []int
		for i := range r {
			regs = append(regs, acc(i, j))
		}
		s.finish(regs, tmp, out.at(j, 0))
	}
}
