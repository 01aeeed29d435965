package model

import "fmt"

// Cache is a paged KV cache, laid out as [layer][block][keys, values][token][key head][dimension]. Mem is usually a
// view of memory that others may be lent.
type Cache struct {
	Mem                                []float32
	Layers, Blocks, BlockTokens, KVDim int
}

// Floats is how many floats Mem must have.
func (c *Cache) Floats() int { return c.Layers * c.Blocks * c.BlockTokens * c.KVDim * 2 }

// NewCache allocates a cache of the model's shape in ordinary memory.
func (c *Config) NewCache(blocks, blockTokens int) *Cache {
	out := &Cache{Layers: c.Layers, Blocks: blocks, BlockTokens: blockTokens, KVDim: c.kvDim}
	out.Mem = make([]float32, out.Floats())
	return out
}

// layer is the part of Mem that holds layer l.
func (c *Cache) layer(l int) []float32 {
	n := c.Blocks * c.BlockTokens * c.KVDim * 2
	return c.Mem[l*n : (l+1)*n]
}

// slot is where the keys of a token start within its layer; its values start BlockTokens*KVDim later.
func (c *Cache) slot(block uint32, token int) int {
	return (int(block)*2*c.BlockTokens + token) * c.KVDim
}

func (m *Model) checkCache(c *Cache) error {
	if c.Layers != m.Layers || c.KVDim != m.kvDim || c.BlockTokens < 1 || c.Blocks < 1 {
		return fmt.Errorf("use cache: %d layers x %d floats a token, the model has %d x %d", c.Layers, c.KVDim, m.Layers, m.kvDim)
	}
	if len(c.Mem) < c.Floats() {
		return fmt.Errorf("use cache: %d floats of memory, its shape takes %d", len(c.Mem), c.Floats())
	}
	return nil
}

// Seq is one sequence's part of a batch: Tokens at positions Pos and after, whose keys and values go to (and whose
// past is read from) the blocks of the table Blocks, which starts at position 0.
type Seq struct {
	Tokens []int32
	Pos    int
	Blocks []uint32
	Logits bool      // compute the logits of the last token
	Out    []float32 // gets them; at least Vocab long
}

func (m *Model) checkSeq(c *Cache, i int, s *Seq) error {
	end := s.Pos + len(s.Tokens)
	switch {
	case len(s.Tokens) == 0 || s.Pos < 0:
		return fmt.Errorf("run sequence %d: %d tokens at position %d", i, len(s.Tokens), s.Pos)
	case end > m.Context:
		return fmt.Errorf("run sequence %d: position %d is past the model's context of %d", i, end-1, m.Context)
	case end > len(s.Blocks)*c.BlockTokens:
		return fmt.Errorf("run sequence %d: %d blocks of %d tokens do not reach position %d", i, len(s.Blocks), c.BlockTokens, end-1)
	case s.Logits && len(s.Out) < m.Vocab:
		return fmt.Errorf("run sequence %d: room for %d logits, the vocabulary has %d", i, len(s.Out), m.Vocab)
	}
	for _, t := range s.Tokens {
		if t < 0 || int(t) >= m.Vocab {
			return fmt.Errorf("run sequence %d: token %d is outside the vocabulary of %d", i, t, m.Vocab)
		}
	}
	for _, b := range s.Blocks[:(end+c.BlockTokens-1)/c.BlockTokens] {
		if int(b) >= c.Blocks {
			return fmt.Errorf("run sequence %d: block %d of a cache of %d", i, b, c.Blocks)
		}
	}
	return nil
}
