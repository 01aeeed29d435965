package prefix

import (
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/headrace/headrace/router/tokens"
)

// cut makes parts of a prompt, with a memo for all but the last.
func cut(r *rand.Rand, prompt []uint32) []tokens.Part {
	var parts []tokens.Part
	for len(prompt) > 0 && r.IntN(6) > 0 {
		n := r.IntN(len(prompt) + 1)
		parts = append(parts, tokens.Part{IDs: prompt[:n], Memo: &tokens.Memo{}})
		prompt = prompt[n:]
	}
	return append(parts, tokens.Part{IDs: prompt})
}

// However a prompt is cut, and whoever asked before about how much of it, its blocks have the hashes they have in one.
func TestBlocksOfParts(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 8))
	seeds := []Seed{{}, {Salt: "s"}, {LoRA: "l"}}
	for range 300 {
		prompt := make([]uint32, r.IntN(3000))
		for i := range prompt {
			prompt[i] = r.Uint32()
		}
		parts := cut(r, prompt)
		for range 8 {
			size, seed := []int{1, 15, 16, 64, 100}[r.IntN(5)], seeds[r.IntN(len(seeds))]
			list := parts
			if last := len(parts) - 2; last >= 0 && r.IntN(2) == 0 { // a shorter prompt that begins alike
				list = append([]tokens.Part(nil), parts[:last+1]...)
				list[last].IDs = list[last].IDs[:r.IntN(len(list[last].IDs)+1)]
				list = append(list, tokens.Part{IDs: []uint32{1, 2, 3}})
			}
			ids := (&tokens.Prompt{Parts: list}).AppendTo(nil)
			var b blocks
			b.begin(list, size, seed)
			h, extra := rootOf(seed.LoRA), seed.extra()
			for i := range r.IntN(len(ids)/size + 1) {
				h = chain(h, sum(ids[i*size:(i+1)*size]), extra)
				if extra = 0; b.next() != h {
					t.Fatalf("block %d of %d of %d tokens in %d parts, %+v", i, size, len(ids), len(list), seed)
				}
			}
			b.end()
		}
	}
}

// Requests of one conversation come at the same time.
func TestBlocksAtOnce(t *testing.T) {
	r := rand.New(rand.NewPCG(9, 10))
	prompt := make([]uint32, 5000)
	for i := range prompt {
		prompt[i] = r.Uint32()
	}
	parts := []tokens.Part{{IDs: prompt[:4001], Memo: &tokens.Memo{}}, {IDs: prompt[4001:]}}
	want := rootOf("")
	for i := range 300 {
		want = chain(want, sum(prompt[i*16:(i+1)*16]), 0)
	}
	var asking sync.WaitGroup
	for range 8 {
		asking.Go(func() {
			for range 20 {
				var b blocks
				b.begin(parts, 16, Seed{})
				var h Hash
				for range 300 {
					h = b.next()
				}
				if b.end(); h != want {
					t.Error("another hash")
				}
			}
		})
	}
	asking.Wait()
}
