package kernel

import (
	"math"
	"unsafe"
)

// steps returns len(x)/16 and panics on what is no multiple: the callers check their shapes at load.
func steps(x []float32) uintptr {
	if len(x) == 0 || len(x)%16 != 0 {
		panic("kernel: vector length is no multiple of 16")
	}
	return uintptr(len(x) / 16)
}

// RMSNorm sets dst to x / sqrt(mean(x*x)+eps) * w.
func (im *Impl) RMSNorm(dst, x, w []float32, eps float32) {
	n := steps(x)
	_, _ = dst[len(x)-1], w[len(x)-1]
	var sum float32
	im.sumSquares(&x[0], n, &sum)
	f := float32(1 / math.Sqrt(float64(sum/float32(len(x))+eps)))
	im.scaleMul(&dst[0], &x[0], &w[0], f, n)
}

// SiluMul replaces g by silu(g) * u.
func (im *Impl) SiluMul(g, u []float32) {
	n := steps(g)
	_ = u[len(g)-1]
	im.siluMul(&g[0], &u[0], n)
}

// Add adds x to dst.
func (im *Impl) Add(dst, x []float32) {
	n := steps(dst)
	_ = x[len(dst)-1]
	im.add(&dst[0], &x[0], n)
}

// Pages is the paged K and V cache of one layer as attention sees it, in floats: the key of a token of a block starts
// at block*BlockStride + token*RowStride + head's offset, its value PlaneStride after that.
type Pages struct {
	Mem                                 []float32
	BlockStride, PlaneStride, RowStride int
	BlockTokens, HeadDim                int
}

// MaxQueries is the most queries one Attend takes.
const MaxQueries = maxTileT

// Attend computes attention of len(ctx) queries that read the same key head: query i, at q[i*qstride], sees the
// first ctx[i] positions of the sequence whose block table is blocks. q must already carry the score's scale.
// The result goes to out[i*ostride]. Score, Softmax and Mix are its parts, for callers that spread one over threads.
func (im *Impl) Attend(p *Pages, blocks []uint32, head int, q []float32, qstride int, ctx []int, out []float32, ostride int, s *Scratch) {
	most := 0
	for _, c := range ctx {
		most = max(most, c)
	}
	width := ScoreWidth(most)
	scores := grow(&s.scores, len(ctx)*width)
	im.Score(p, blocks, head, q, qstride, len(ctx), 0, most, scores, width)
	var inv [MaxQueries]float32
	for i, c := range ctx {
		inv[i] = im.Softmax(scores[i*width:(i+1)*width], c)
	}
	im.Mix(p, blocks, head, p.HeadDim, scores, width, most, inv[:len(ctx)], out, ostride)
}

// ScoreWidth is the room that the scores of n positions take: whole vector steps.
func ScoreWidth(n int) int { return (n + 15) &^ 15 }

// Score puts the products of queries with the keys of positions [from,to) into rows of scores, width floats apart.
// from must be where a block starts.
func (im *Impl) Score(p *Pages, blocks []uint32, head int, q []float32, qstride, queries, from, to int, scores []float32, width int) {
	p.eachBlock(blocks, from, to, head, p.HeadDim, func(k []float32, at, n int) {
		im.tiles(&k[0], p.RowStride, n, q, qstride, queries, scores[at:], width, p.HeadDim)
	})
}

// Mix sets dims floats of each query's out, of the head's from offset head on, to the values of the first n positions
// weighted by its row of scores and multiplied by its factor inv.
func (im *Impl) Mix(p *Pages, blocks []uint32, head, dims int, scores []float32, width, n int, inv, out []float32, ostride int) {
	for i := range inv {
		clear(out[i*ostride : i*ostride+dims])
	}
	p.eachBlock(blocks, 0, n, head+p.PlaneStride, dims, func(v []float32, at, n int) {
		im.mix(scores[at:], width, v, p.RowStride, n, out, ostride, len(inv), dims)
	})
	for i := range inv {
		o := out[i*ostride : i*ostride+dims]
		im.scale(&o[0], inv[i], steps(o))
	}
}

// eachBlock calls f with the part of each block that holds positions [from,to): so many floats of each row from
// offset on, which picks the plane, the head and the first of its dimensions.
func (p *Pages) eachBlock(blocks []uint32, from, to, offset, floats int, f func(rows []float32, at, n int)) {
	for ; from < to; from += p.BlockTokens {
		m := min(p.BlockTokens, to-from)
		at := int(blocks[from/p.BlockTokens])*p.BlockStride + offset
		f(p.Mem[at:at+(m-1)*p.RowStride+floats], from, m)
	}
}

// Softmax turns the first n scores into unnormalized weights, the rest into zeros, and returns the factor that
// normalizes them.
func (im *Impl) Softmax(scores []float32, n int) float32 {
	for i := n; i < len(scores); i++ {
		scores[i] = float32(math.Inf(-1))
	}
	var peak, sum float32
	im.maxOf(&scores[0], steps(scores), &peak)
	im.expSum(&scores[0], peak, steps(scores), &sum)
	return 1 / sum
}

func (im *Impl) mix(p []float32, pstride int, v []float32, vstride, n int, out []float32, ostride, queries, dims int) {
	ps, vs, os := uintptr(pstride)*4, uintptr(vstride)*4, uintptr(ostride)*4
	d := 0
	if im.mix64 != nil {
		for ; d+64 <= dims; d += 64 {
			im.mix64[queries](&p[0], ps, &v[d], vs, &out[d], os, uintptr(n))
		}
		for ; d+32 <= dims; d += 32 {
			im.mix32[queries](&p[0], ps, &v[d], vs, &out[d], os, uintptr(n))
		}
	}
	for ; d < dims; d += 16 {
		im.mix16[queries](&p[0], ps, &v[d], vs, &out[d], os, uintptr(n))
	}
}

// Floats views bytes as float32s. The bytes must be aligned: GGUF aligns tensors to 32 bytes.
func Floats(b []byte) []float32 {
	if len(b) < 4 {
		return nil
	}
	return unsafe.Slice((*float32)(unsafe.Pointer(&b[0])), len(b)/4)
}
