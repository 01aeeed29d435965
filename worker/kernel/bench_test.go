package kernel

import (
	"math/rand/v2"
	"testing"

	"github.com/headrace/headrace/internal/gguf"
)

// BenchmarkMul reports multiply-adds a second of one thread: small stays in the caches, large does not.
func BenchmarkMul(b *testing.B) {
	r := rand.New(rand.NewPCG(1, 1))
	for _, im := range Impls()[:len(Impls())-1] {
		for _, typ := range gguf.Types {
			for _, size := range []struct {
				name   string
				rows   int
				tokens int
			}{{"small/1", 64, 1}, {"large/1", 49152, 1}, {"small/240", 32, 240}} {
				b.Run(im.Name+"/"+typ.String()+"/"+size.name, func(b *testing.B) {
					const cols = 576
					m := matrix(b, typ, size.rows, cols, random(r, size.rows*cols))
					x, out := random(r, size.tokens*cols), make([]float32, size.tokens*size.rows)
					var s Scratch
					for b.Loop() {
						im.Mul(out, size.rows, m, 0, size.rows, x, cols, size.tokens, &s)
					}
					b.ReportMetric(float64(size.rows*cols*size.tokens)*float64(b.N)/b.Elapsed().Seconds()/1e9, "GMAC/s")
				})
			}
		}
	}
}
