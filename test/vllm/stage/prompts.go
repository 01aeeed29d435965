package stage

import (
	"math/rand/v2"
)

// vocabulary is the range of random token ids: no special ones of either model, and all of the tiny one's others.
const vocabulary = 1000

// Prompt is n random tokens, the same for the same seed and different from the first token on for another.
func Prompt(seed, n int) []int {
	r := rand.New(rand.NewPCG(uint64(seed), 7))
	out := make([]int, n)
	for i := range out {
		out[i] = 20 + r.IntN(vocabulary-20)
	}
	return out
}

// Lengths are n prompt lengths from 5 to 1,900 tokens, around multiples of the block size too.
func Lengths(n int) []int {
	edges := []int{5, 31, 32, 33, 63, 64, 65, 1900, 1024, 1025, 256, 257}
	out := make([]int, 0, n)
	for i := range n {
		if i < len(edges) {
			out = append(out, edges[i])
		} else {
			out = append(out, 90+(i*631)%1790)
		}
	}
	return out
}
