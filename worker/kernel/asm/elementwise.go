package main

import (
	"math"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	. "github.com/mmcloughlin/avo/reg"
)

func splat(name string, v float32) Mem {
	return constant(name, func(int) Constant { return U32(math.Float32bits(v)) })
}

// exp replaces the register v by e^v, with t and t+1 as temporaries. generic.go has the same steps in Go.
func (s isa) exp(v, t int) {
	n, p := s.reg(t), s.reg(t+1)
	low := s.reg(t + 2)
	VSUBPS(splat("expLow", -87.33654), s.reg(v), low) // its sign says: underflows to zero
	VPSRAD(Imm(31), low, low)
	VMINPS(splat("expHigh", 88.02), s.reg(v), s.reg(v))
	VMULPS(splat("log2e", 1.44269504), s.reg(v), n)
	if s.parts == 2 {
		VROUNDPS(Imm(0), n, n)
	} else {
		VRNDSCALEPS(Imm(0), n, n)
	}
	VFMADD231PS(splat("ln2High", -0.693359375), n, s.reg(v))
	VFMADD231PS(splat("ln2Low", 2.12194440e-4), n, s.reg(v))
	VMOVUPS(splat("expC0", 1.9875691500e-4), p)
	VFMADD213PS(splat("expC1", 1.3981999507e-3), s.reg(v), p)
	VFMADD213PS(splat("expC2", 8.3334519073e-3), s.reg(v), p)
	VFMADD213PS(splat("expC3", 4.1665795894e-2), s.reg(v), p)
	VFMADD213PS(splat("expC4", 1.6666665459e-1), s.reg(v), p)
	VFMADD213PS(splat("expC5", 5.0000001201e-1), s.reg(v), p)
	VMULPS(s.reg(v), p, p)
	VFMADD213PS(s.reg(v), s.reg(v), p) // p = p*v + v
	VADDPS(splat("one", 1), p, p)
	VCVTPS2DQ(n, n)
	if s.parts == 2 {
		VPADDD(constant("bias", func(int) Constant { return U32(127) }), n, n)
	} else {
		VPADDD(constant("bias", func(int) Constant { return U32(127) }), n, n)
	}
	VPSLLD(Imm(23), n, n)
	VMULPS(n, p, s.reg(v))
	if s.parts == 2 {
		VPANDN(s.reg(v), low, s.reg(v))
	} else {
		VPANDND(s.reg(v), low, s.reg(v))
	}
}

func (s isa) elementwise() {
	s.expSum()
	s.maxOf()
	s.siluMul()
	s.sumSquares()
	s.scaleMul()
	s.add()
	s.scale()
}

// parts runs f for each register of a wide.
func (s isa) each(f func(p, disp int)) {
	for p := range s.parts {
		f(p, p*s.partBytes())
	}
}

func step(ptrs ...GPVirtual) {
	for _, p := range ptrs {
		ADDQ(Imm(64), p)
	}
}

func (s isa) broadcast(param string, dst int) {
	tmp, err := Param(param).Resolve()
	if err != nil {
		panic(err)
	}
	VBROADCASTSS(tmp.Addr, s.reg(dst))
}

func (s isa) expSum() {
	begin("expSum"+s.name, "x *float32, peak float32, n16 uintptr, sum *float32", "replaces x by e^(x-peak) and sums it up.")
	p := gp("x", "sum")
	for i := range s.parts {
		s.zero(i)
	}
	s.broadcast("peak", 2)
	loop("n16", func() {
		s.each(func(i, disp int) {
			VMOVUPS(Mem{Base: p[0], Disp: disp}, s.reg(3))
			VSUBPS(s.reg(2), s.reg(3), s.reg(3))
			s.exp(3, 4)
			VMOVUPS(s.reg(3), Mem{Base: p[0], Disp: disp})
			VADDPS(s.reg(3), s.reg(i), s.reg(i))
		})
		step(p[0])
	})
	s.finish([]int{0}, 3, Mem{Base: p[1]})
	end()
}

func (s isa) maxOf() {
	begin("maxOf"+s.name, "x *float32, n16 uintptr, out *float32", "finds the largest of x.")
	p := gp("x", "out")
	s.each(func(i, disp int) { VMOVUPS(Mem{Base: p[0], Disp: disp}, s.reg(i)) })
	loop("n16", func() {
		s.each(func(i, disp int) { VMAXPS(Mem{Base: p[0], Disp: disp}, s.reg(i), s.reg(i)) })
		step(p[0])
	})
	if s.parts == 2 {
		VMAXPS(y(1), y(0), y(0))
	} else {
		VEXTRACTF64X4(Imm(1), vecs[0], y(1))
		VMAXPS(y(1), y(0), y(0))
	}
	VEXTRACTF128(Imm(1), y(0), x(1))
	VMAXPS(x(1), x(0), x(0))
	VUNPCKHPD(x(0), x(0), x(1))
	VMAXPS(x(1), x(0), x(0))
	VMOVSHDUP(x(0), x(1))
	VMAXSS(x(1), x(0), x(0))
	VMOVSS(x(0), Mem{Base: p[1]})
	end()
}

func (s isa) siluMul() {
	begin("siluMul"+s.name, "gate *float32, up *float32, n16 uintptr", "replaces gate by gate / (1+e^-gate) * up.")
	p := gp("gate", "up")
	loop("n16", func() {
		s.each(func(_, disp int) {
			VMOVUPS(Mem{Base: p[0], Disp: disp}, s.reg(0))
			s.zero(1)
			VSUBPS(s.reg(0), s.reg(1), s.reg(1))
			s.exp(1, 2)
			VADDPS(splat("one", 1), s.reg(1), s.reg(1))
			VDIVPS(s.reg(1), s.reg(0), s.reg(0))
			VMULPS(Mem{Base: p[1], Disp: disp}, s.reg(0), s.reg(0))
			VMOVUPS(s.reg(0), Mem{Base: p[0], Disp: disp})
		})
		step(p...)
	})
	end()
}

func (s isa) sumSquares() {
	begin("sumSquares"+s.name, "x *float32, n16 uintptr, sum *float32", "sums up the squares of x.")
	p := gp("x", "sum")
	for i := range s.parts {
		s.zero(i)
	}
	loop("n16", func() {
		s.each(func(i, disp int) {
			VMOVUPS(Mem{Base: p[0], Disp: disp}, s.reg(3))
			VFMADD231PS(s.reg(3), s.reg(3), s.reg(i))
		})
		step(p[0])
	})
	s.finish([]int{0}, 3, Mem{Base: p[1]})
	end()
}

func (s isa) scaleMul() {
	begin("scaleMul"+s.name, "dst *float32, x *float32, w *float32, f float32, n16 uintptr", "sets dst to (x*f)*w.")
	p := gp("dst", "x", "w")
	s.broadcast("f", 1)
	loop("n16", func() {
		s.each(func(_, disp int) {
			VMULPS(Mem{Base: p[1], Disp: disp}, s.reg(1), s.reg(0))
			VMULPS(Mem{Base: p[2], Disp: disp}, s.reg(0), s.reg(0))
			VMOVUPS(s.reg(0), Mem{Base: p[0], Disp: disp})
		})
		step(p...)
	})
	end()
}

func (s isa) add() {
	begin("add"+s.name, "dst *float32, x *float32, n16 uintptr", "adds x to dst.")
	p := gp("dst", "x")
	loop("n16", func() {
		s.each(func(_, disp int) {
			VMOVUPS(Mem{Base: p[0], Disp: disp}, s.reg(0))
			VADDPS(Mem{Base: p[1], Disp: disp}, s.reg(0), s.reg(0))
			VMOVUPS(s.reg(0), Mem{Base: p[0], Disp: disp})
		})
		step(p...)
	})
	end()
}

func (s isa) scale() {
	begin("scale"+s.name, "dst *float32, f float32, n16 uintptr", "multiplies dst by f.")
	p := gp("dst")
	s.broadcast("f", 1)
	loop("n16", func() {
		s.each(func(_, disp int) {
			VMULPS(Mem{Base: p[0], Disp: disp}, s.reg(1), s.reg(0))
			VMOVUPS(s.reg(0), Mem{Base: p[0], Disp: disp})
		})
		step(p[0])
	})
	end()
}
