package kernel

import "golang.org/x/sys/cpu"

// native lists the assembly that this processor runs.
func native() []*Impl {
	x := &cpu.X86
	var out []*Impl
	if !x.HasAVX2 || !x.HasFMA { // whatever has these has F16C
		return nil
	}
	if x.HasAVX512F && x.HasAVX512BW && x.HasAVX512VL && x.HasAVX512DQ {
		out = append(out, avx512)
	}
	return append(out, avx2)
}

var avx512 = &Impl{
	Name:  "avx512",
	tileR: 4, tileT: 6,
	tile1: []tileFn{nil, tileR1T1AVX512, tileR1T2AVX512, tileR1T3AVX512, tileR1T4AVX512, tileR1T5AVX512, tileR1T6AVX512},
	tileN: []tileFn{nil, tileR4T1AVX512, tileR4T2AVX512, tileR4T3AVX512, tileR4T4AVX512, tileR4T5AVX512, tileR4T6AVX512},
	f16: quantFns{
		dequant: dequantF16AVX512,
		dot1:    []dotFn{nil, dotF16R1T1AVX512, dotF16R1T2AVX512, dotF16R1T3AVX512, dotF16R1T4AVX512},
		dot4:    []dotFn{nil, dotF16R4T1AVX512, dotF16R4T2AVX512, dotF16R4T3AVX512, dotF16R4T4AVX512},
	},
	bf16: quantFns{
		dequant: dequantBF16AVX512,
		dot1:    []dotFn{nil, dotBF16R1T1AVX512, dotBF16R1T2AVX512, dotBF16R1T3AVX512, dotBF16R1T4AVX512},
		dot4:    []dotFn{nil, dotBF16R4T1AVX512, dotBF16R4T2AVX512, dotBF16R4T3AVX512, dotBF16R4T4AVX512},
	},
	q40: quantFns{
		dequant: dequantQ40AVX512,
		dot1:    []dotFn{nil, dotQ40R1T1AVX512, dotQ40R1T2AVX512, dotQ40R1T3AVX512, dotQ40R1T4AVX512},
		dot4:    []dotFn{nil, dotQ40R4T1AVX512, dotQ40R4T2AVX512, dotQ40R4T3AVX512, dotQ40R4T4AVX512},
	},
	q41: quantFns{
		dequant: dequantQ41AVX512,
		dot1:    []dotFn{nil, dotQ41R1T1AVX512, dotQ41R1T2AVX512, dotQ41R1T3AVX512, dotQ41R1T4AVX512},
		dot4:    []dotFn{nil, dotQ41R4T1AVX512, dotQ41R4T2AVX512, dotQ41R4T3AVX512, dotQ41R4T4AVX512},
	},
	q80: quantFns{
		dequant: dequantQ80AVX512,
		dot1:    []dotFn{nil, dotQ80R1T1AVX512, dotQ80R1T2AVX512, dotQ80R1T3AVX512, dotQ80R1T4AVX512},
		dot4:    []dotFn{nil, dotQ80R4T1AVX512, dotQ80R4T2AVX512, dotQ80R4T3AVX512, dotQ80R4T4AVX512},
	},
	mix16:      []mixFn{nil, mixD16Q1AVX512, mixD16Q2AVX512, mixD16Q3AVX512, mixD16Q4AVX512, mixD16Q5AVX512, mixD16Q6AVX512},
	mix32:      []mixFn{nil, mixD32Q1AVX512, mixD32Q2AVX512, mixD32Q3AVX512, mixD32Q4AVX512, mixD32Q5AVX512, mixD32Q6AVX512},
	mix64:      []mixFn{nil, mixD64Q1AVX512, mixD64Q2AVX512, mixD64Q3AVX512, mixD64Q4AVX512, mixD64Q5AVX512, mixD64Q6AVX512},
	expSum:     expSumAVX512,
	maxOf:      maxOfAVX512,
	siluMul:    siluMulAVX512,
	sumSquares: sumSquaresAVX512,
	scaleMul:   scaleMulAVX512,
	add:        addAVX512,
	scale:      scaleAVX512,
}

var avx2 = &Impl{
	Name:  "avx2",
	tileR: 2, tileT: 3,
	tile1: []tileFn{nil, tileR1T1AVX2, tileR1T2AVX2, tileR1T3AVX2},
	tileN: []tileFn{nil, tileR2T1AVX2, tileR2T2AVX2, tileR2T3AVX2},
	f16: quantFns{
		dequant: dequantF16AVX2,
		dot1:    []dotFn{nil, dotF16R1T1AVX2},
		dot4:    []dotFn{nil, dotF16R4T1AVX2},
	},
	bf16: quantFns{
		dequant: dequantBF16AVX2,
		dot1:    []dotFn{nil, dotBF16R1T1AVX2},
		dot4:    []dotFn{nil, dotBF16R4T1AVX2},
	},
	q40: quantFns{
		dequant: dequantQ40AVX2,
		dot1:    []dotFn{nil, dotQ40R1T1AVX2},
		dot4:    []dotFn{nil, dotQ40R4T1AVX2},
	},
	q41: quantFns{
		dequant: dequantQ41AVX2,
		dot1:    []dotFn{nil, dotQ41R1T1AVX2},
		dot4:    []dotFn{nil, dotQ41R4T1AVX2},
	},
	q80: quantFns{
		dequant: dequantQ80AVX2,
		dot1:    []dotFn{nil, dotQ80R1T1AVX2},
		dot4:    []dotFn{nil, dotQ80R4T1AVX2},
	},
	mix16:      []mixFn{nil, mixD16Q1AVX2, mixD16Q2AVX2, mixD16Q3AVX2, mixD16Q4AVX2, mixD16Q5AVX2, mixD16Q6AVX2},
	expSum:     expSumAVX2,
	maxOf:      maxOfAVX2,
	siluMul:    siluMulAVX2,
	sumSquares: sumSquaresAVX2,
	scaleMul:   scaleMulAVX2,
	add:        addAVX2,
	scale:      scaleAVX2,
}
