// Package kernel holds the arithmetic of the reference engine: matrix products of F32, F16, BF16, Q8_0, Q4_0 and
// Q4_1 weights with F32 activations, norms, activations and attention over a paged cache, and the pool of threads they run on. It must not
// know what a model is.
//
// Every result is fixed bit for bit, whatever the instruction set (AVX-512, AVX2, plain Go), tile, batch or number of
// threads, because prefill and decode may run on different machines and must agree with a run on one:
//
//   - A dot product has 16 lanes. Element i goes to lane i%16 with one fused multiply-add, i rising from 0.
//     Lanes are then added as s[j]+s[j+8], s[j]+s[j+4], s[j]+s[j+2], s[0]+s[1]. Sums of squares and of
//     exponentials use the same lanes and the same tree.
//   - A weight of another type than F32 is first turned into the float32 that gguf.Dequantize gives; activations are never quantized.
//     So a quantized matrix and its dequantized copy give the same bits.
//   - Attention adds weighted values by rising position with one fused multiply-add each.
//   - The exponential is one polynomial, step by step the same everywhere. Below -87.33654 it is exactly zero.
//
// Lengths of rows must be multiples of 16 (32 for quantized rows). A call into assembly stays far below a
// millisecond, because Go's garbage collector cannot stop a thread inside it.
package kernel

//go:generate go run -C asm . -out ../kernels_amd64.s -stubs ../stubs_amd64.go -pkg kernel
