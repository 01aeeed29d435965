package main

import (
	"fmt"
	"math"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	. "github.com/mmcloughlin/avo/reg"
)

// format is a block of 32 elements of another type than F32.
type format struct {
	name  string
	bytes int
}

var formats = []format{{"F16", 64}, {"BF16", 64}, {"Q40", 18}, {"Q41", 20}, {"Q80", 34}}

var constants = map[string]Mem{}

// constant is a read-only vector of 16 dwords.
func constant(name string, at func(i int) Constant) Mem {
	if m, ok := constants[name]; ok {
		return m
	}
	m := GLOBL(name, RODATA|NOPTR)
	for i := range 16 {
		DATA(4*i, at(i))
	}
	constants[name] = m
	return m
}

func iota16() Mem {
	return constant("iota16", func(i int) Constant { return U32(math.Float32bits(float32(i))) })
}

// levels16 is what a nibble of Q4_0 means, before its scale.
func levels16() Mem {
	return constant("levels16", func(i int) Constant { return U32(math.Float32bits(float32(i - 8))) })
}
func eight() Mem  { return constant("eight", func(int) Constant { return U32(8) }) }
func nibble() Mem { return constant("nibble", func(int) Constant { return U32(15) }) }

// half loads a half-precision scale and spreads it over a register.
func (s isa) half(src Mem, dst int) {
	if s.parts == 2 {
		VPBROADCASTW(src, x(dst))
		VCVTPH2PS(x(dst), y(dst))
		return
	}
	VPBROADCASTW(src, y(dst))
	VCVTPH2PS(y(dst), vecs[dst])
}

// block dequantizes 32 elements at src and hands them over register by register, in order: part counts registers.
// Registers from tmp on (six of them) are free; keep is a register that prepare has set.
func (s isa) block(f format, src Mem, keep, tmp int, use func(part, reg int)) {
	d, m, w, q := tmp, tmp+1, tmp+2, tmp+3
	at := func(disp int) Mem { return src.Offset(disp) }
	step := 16 / s.parts
	switch f.name {
	case "F16":
		for p := range 32 / step {
			VCVTPH2PS(at(2*p*step), s.reg(w))
			use(p, w)
		}
		return
	case "BF16":
		for p := range 32 / step {
			VPMOVZXWD(at(2*p*step), s.reg(w))
			VPSLLD(Imm(16), s.reg(w), s.reg(w))
			use(p, w)
		}
		return
	}
	s.half(at(0), d)
	switch {
	case f.name == "Q80":
		for p := range 32 / step {
			VPMOVSXBD(at(2+p*step), s.reg(w))
			VCVTDQ2PS(s.reg(w), s.reg(w))
			VMULPS(s.reg(d), s.reg(w), s.reg(w))
			use(p, w)
		}
	case s.parts == 1:
		// All 16 values a nibble can mean, then a lookup; VPERMPS looks at the low four bits only.
		if f.name == "Q41" {
			s.half(at(2), m)
			VFMADD213PS(s.reg(m), s.reg(keep), s.reg(d))
		} else {
			VMULPS(s.reg(keep), s.reg(d), s.reg(d))
		}
		VPMOVZXBD(at(f.bytes-16), s.reg(q))
		VPERMPS(s.reg(d), s.reg(q), s.reg(w))
		use(0, w)
		VPSRLD(Imm(4), s.reg(q), s.reg(q))
		VPERMPS(s.reg(d), s.reg(q), s.reg(w))
		use(1, w)
	default:
		if f.name == "Q41" {
			s.half(at(2), m)
		}
		for p := range 4 {
			VPMOVZXBD(at(f.bytes-16+p%2*8), y(w))
			if p >= 2 {
				VPSRLD(Imm(4), y(w), y(w))
			}
			VPAND(y(keep), y(w), y(w))
			if f.name == "Q40" {
				VPSUBD(eight(), y(w), y(w))
				VCVTDQ2PS(y(w), y(w))
				VMULPS(y(d), y(w), y(w))
			} else {
				VCVTDQ2PS(y(w), y(w))
				VFMADD213PS(y(m), y(d), y(w))
			}
			use(p, w)
		}
	}
}

// prepare loads the constant that block wants in register keep.
func (s isa) prepare(f format, keep int) {
	switch {
	case f.name != "Q40" && f.name != "Q41":
	case s.parts == 2:
		VMOVUPS(nibble(), s.reg(keep))
	case f.name == "Q41":
		VMOVUPS(iota16(), s.reg(keep))
	default:
		VMOVUPS(levels16(), s.reg(keep))
	}
}

func (s isa) quantized() {
	for _, f := range formats {
		s.dequantize(f)
		for _, r := range []int{1, 4} {
			for t := 1; t <= s.fuseT; t++ {
				s.fused(f, r, t)
			}
		}
	}
}

func (s isa) dequantize(f format) {
	begin("dequant"+f.name+s.name, "dst *float32, src *byte, blocks uintptr", "dequantizes whole blocks.")
	dst, src := GP64(), GP64()
	Load(Param("dst"), dst)
	Load(Param("src"), src)
	s.prepare(f, 0)
	loop("blocks", func() {
		s.block(f, Mem{Base: src}, 0, 1, func(p, reg int) {
			VMOVUPS(s.reg(reg), Mem{Base: dst, Disp: p * s.partBytes()})
		})
		ADDQ(Imm(uint64(f.bytes)), src)
		ADDQ(Imm(128), dst)
	})
	end()
}

// fused emits the dot product that dequantizes in registers: worth it while few tokens share a block.
func (s isa) fused(f format, r, t int) {
	begin(fmt.Sprintf("dot%sR%dT%d%s", f.name, r, t, s.name),
		"w *byte, wstride uintptr, x *float32, xstride uintptr, out *float32, ostride uintptr, blocks uintptr",
		fmt.Sprintf("multiplies %d quantized rows of w with %d rows of x.", r, t))
	w, xs := loadRows("w", "wstride", r), loadRows("x", "xstride", t)
	acc := func(i, j int) int { return (j*r + i) * s.parts }
	free := r * t * s.parts
	for i := range free {
		s.zero(i)
	}
	s.prepare(f, free)
	// The next rows follow in memory. Fetching them while these are multiplied matters when weights stream through
	// once a token: the hardware does not see a stream in four short rows.
	ahead := GP64()
	LEAQ(Mem{Base: w.base, Index: w.stride, Scale: uint8(r)}, ahead)
	loop("blocks", func() {
		for disp := 0; disp < r*f.bytes; disp += 64 {
			PREFETCHT0(Mem{Base: ahead, Disp: disp})
		}
		ADDQ(I32(r*f.bytes), ahead)
		for i := range r {
			s.block(f, w.at(i, 0), free, free+1, func(p, reg int) {
				for j := range t {
					VFMADD231PS(xs.at(j, p*s.partBytes()), s.reg(reg), s.reg(acc(i, j)+p%s.parts))
				}
			})
		}
		w.advance(f.bytes)
		xs.advance(128)
	})
	s.storeTile(r, t, acc, free)
	end()
}

// attention emits out[q] += sum over positions of p[q][position] * v[position] for a slice of the head's
// dimensions, positions in order.
func (s isa) attention() {
	widths := []int{16}
	if s.parts == 1 {
		widths = []int{16, 32, 64}
	}
	for _, d := range widths {
		for q := 1; q <= 6; q++ {
			begin(fmt.Sprintf("mixD%dQ%d%s", d, q, s.name),
				"p *float32, pstride uintptr, v *float32, vstride uintptr, out *float32, ostride uintptr, n uintptr",
				fmt.Sprintf("adds n rows of v, weighted by %d rows of p, to %d floats of each row of out.", q, d))
			s.mix(d, q)
			end()
		}
	}
}

func (s isa) mix(d, q int) {
	ps, out := loadRows("p", "pstride", q), loadRows("out", "ostride", q)
	v, vstride := GP64(), GP64()
	Load(Param("v"), v)
	Load(Param("vstride"), vstride)
	regs := d / 16 * s.parts
	each := func(f func(j, c, acc int)) {
		for j := range q {
			for c := range regs {
				f(j, c, j*regs+c)
			}
		}
	}
	vreg := q * regs
	preg := vreg + regs
	each(func(j, c, acc int) { VMOVUPS(out.at(j, c*s.partBytes()), s.reg(acc)) })
	ahead := GP64()
	LEAQ(Mem{Base: v, Index: vstride, Scale: 4}, ahead)
	loop("n", func() {
		for disp := 0; disp < d*4; disp += 64 {
			PREFETCHT0(Mem{Base: ahead, Disp: disp})
		}
		ADDQ(vstride, ahead)
		for c := range regs {
			VMOVUPS(Mem{Base: v, Disp: c * s.partBytes()}, s.reg(vreg+c))
		}
		for j := range q {
			VBROADCASTSS(ps.at(j, 0), s.reg(preg))
			for c := range regs {
				VFMADD231PS(s.reg(preg), s.reg(vreg+c), s.reg(j*regs+c))
			}
		}
		ADDQ(vstride, v)
		ps.advance(4)
	})
	each(func(j, c, acc int) { VMOVUPS(s.reg(acc), out.at(j, c*s.partBytes())) })
}

// gp loads pointer parameters.
func gp(names ...string) []GPVirtual {
	var out []GPVirtual
	for _, n := range names {
		r := GP64()
		Load(Param(n), r)
		out = append(out, r)
	}
	return out
}
