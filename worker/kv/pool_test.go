package kv

import (
	"errors"
	"math/rand/v2"
	"testing"
)

func newPool(t *testing.T, n, bt int) *Pool {
	t.Helper()
	p, err := NewPool(n, bt)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func seq(from, n int) []int32 {
	s := make([]int32, n)
	for i := range s {
		s[i] = int32(from + i)
	}
	return s
}

// fill allocates and commits the full blocks of tokens behind what is already held.
func fill(t *testing.T, p *Pool, tokens []int32) []uint32 {
	t.Helper()
	held, at := p.Match(tokens)
	more, err := p.Alloc(len(tokens)/p.BlockTokens() - len(held))
	if err != nil {
		t.Fatal(err)
	}
	for i, b := range more {
		k := (len(held) + i) * p.BlockTokens()
		at = p.Commit(b, at, tokens[k:k+p.BlockTokens()])
	}
	return append(held, more...)
}

func TestMatchFindsTheLongestCachedPrefix(t *testing.T) {
	p := newPool(t, 8, 4)
	a := seq(0, 12)
	blocks := fill(t, p, a)
	p.Release(blocks)
	if p.Free() != 8 || p.Cached() != 3 {
		t.Fatalf("free %d cached %d, want 8 and 3", p.Free(), p.Cached())
	}
	got, at := p.Match(append(seq(0, 8), 99, 99, 99, 99))
	if len(got) != 2 || got[0] != blocks[0] || got[1] != blocks[1] || at == Root {
		t.Fatalf("matched %v, want the first two of %v", got, blocks)
	}
	if none, at := p.Match(seq(4, 8)); len(none) != 0 || at != Root {
		t.Fatalf("matched %v in the middle of a chain", none)
	}
	p.Release(got)
}

func TestLeastRecentlyUsedContentGoesFirstAndTailBeforeHead(t *testing.T) {
	p := newPool(t, 4, 2)
	old, young := seq(0, 4), seq(100, 4)
	p.Release(fill(t, p, old))
	p.Release(fill(t, p, young))
	b, err := p.Alloc(1)
	if err != nil {
		t.Fatal(err)
	}
	m, _ := p.Match(old)
	if len(m) != 1 {
		t.Fatalf("%d blocks of the old chain left, want its head only", len(m))
	}
	p.Release(m)
	m, _ = p.Match(young)
	if len(m) != 2 {
		t.Fatalf("%d blocks of the young chain left, want 2", len(m))
	}
	p.Release(m)
	p.Release(b)
}

func TestAllocTakesAllOrNone(t *testing.T) {
	p := newPool(t, 3, 2)
	b, err := p.Alloc(2)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.Alloc(2); !errors.Is(err, ErrNoBlocks) || p.Free() != 1 {
		t.Fatalf("err %v, free %d", err, p.Free())
	}
	p.Release(b)
}

func TestCommitOfKnownContentKeepsTheFirstBlock(t *testing.T) {
	p := newPool(t, 4, 2)
	a, _ := p.Alloc(2)
	id := p.Commit(a[0], Root, seq(0, 2))
	if got := p.Commit(a[1], Root, seq(0, 2)); got != id {
		t.Fatalf("second block got content %d, want %d", got, id)
	}
	p.Release(a)
	if p.Cached() != 1 {
		t.Fatalf("%d cached, want 1", p.Cached())
	}
}

// TestRandomUse drives the pool with random requests beside a model that remembers what each block was filled with.
func TestRandomUse(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	p := newPool(t, 32, 4)
	type held struct {
		blocks []uint32
		tokens []int32
	}
	var live []held
	content := map[uint32][]int32{} // block -> all tokens up to its end, as last committed
	for step := range 20000 {
		if len(live) > 0 && (rnd.IntN(3) == 0 || len(live) > 6) {
			i := rnd.IntN(len(live))
			p.Release(live[i].blocks)
			live = append(live[:i], live[i+1:]...)
			continue
		}
		tokens := seq(rnd.IntN(3)*1000, 4*(1+rnd.IntN(8)))
		for i := 4 * rnd.IntN(len(tokens)/4+1); i < len(tokens); i++ {
			tokens[i] += int32(rnd.IntN(2)) * 7
		}
		got, at := p.Match(tokens)
		for i, b := range got {
			if !equal(content[b], tokens[:(i+1)*4]) {
				t.Fatalf("step %d: block %d matched %v but holds %v", step, b, tokens[:(i+1)*4], content[b])
			}
		}
		more, err := p.Alloc(len(tokens)/4 - len(got))
		if err != nil {
			p.Release(got)
			continue
		}
		for i, b := range more {
			end := (len(got) + i + 1) * 4
			at = p.Commit(b, at, tokens[end-4:end])
			content[b] = tokens[:end]
		}
		live = append(live, held{append(got, more...), tokens})
	}
	for _, h := range live {
		p.Release(h.blocks)
	}
	if p.Free() != p.Total() {
		t.Fatalf("%d of %d blocks free after all was released", p.Free(), p.Total())
	}
}
