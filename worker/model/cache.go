package model

import (
	"fmt"

	"github.com/headrace/headrace/worker/kernel"
)

// Cache is a paged KV cache in one piece of memory or more: each shard holds all blocks of a range of key heads, as a
// tensor-parallel rank would. Results do not depend on the cut: heads meet in no sum before the output projection.
type Cache struct {
	Layers, Blocks, BlockTokens int
	KVHeads, HeadDim            int
	Shards                      []Shard // of equally many heads each, in order of the heads
}

// Shard is the part of a cache that holds HeadCount key heads from HeadFirst on, laid out as
// [layer][block][keys, values][token][head of the shard][dimension]. Mem is usually a view of memory that others may
// be lent.
type Shard struct {
	Mem                  []float32
	HeadFirst, HeadCount int
}

// ShardFloats is how many floats the memory of each of so many shards of a cache must have.
func (c *Config) ShardFloats(blocks, blockTokens, shards int) (int, error) {
	out, err := c.shape(blocks, blockTokens, shards)
	if err != nil {
		return 0, err
	}
	return out.shardFloats(c.KVHeads / shards), nil
}

// NewCache allocates a cache of the model's shape in ordinary memory.
func (c *Config) NewCache(blocks, blockTokens, shards int) (*Cache, error) {
	n, err := c.ShardFloats(blocks, blockTokens, shards)
	if err != nil {
		return nil, err
	}
	mems := make([][]float32, shards)
	for i := range mems {
		mems[i] = make([]float32, n)
	}
	return c.CacheOver(blocks, blockTokens, mems)
}

// CacheOver is a cache of the model's shape over given memory, one piece a shard.
func (c *Config) CacheOver(blocks, blockTokens int, mems [][]float32) (*Cache, error) {
	out, err := c.shape(blocks, blockTokens, len(mems))
	if err != nil {
		return nil, err
	}
	per := c.KVHeads / len(mems)
	for i, mem := range mems {
		if want := out.shardFloats(per); len(mem) < want {
			return nil, fmt.Errorf("lay out KV cache: shard %d has %d floats of memory, %d blocks of %d tokens take %d", i, len(mem), blocks, blockTokens, want)
		}
		out.Shards = append(out.Shards, Shard{Mem: mem, HeadFirst: i * per, HeadCount: per})
	}
	return out, nil
}

func (c *Config) shape(blocks, blockTokens, shards int) (*Cache, error) {
	switch {
	case blocks < 1 || blockTokens < 1:
		return nil, fmt.Errorf("lay out KV cache: %d blocks of %d tokens: give at least one of each", blocks, blockTokens)
	case shards < 1 || c.KVHeads%shards != 0:
		return nil, fmt.Errorf("lay out KV cache: %d key heads do not divide evenly among %d shards; use a number that divides %d", c.KVHeads, shards, c.KVHeads)
	}
	return &Cache{Layers: c.Layers, Blocks: blocks, BlockTokens: blockTokens, KVHeads: c.KVHeads, HeadDim: c.HeadDim}, nil
}

// shardFloats is what a shard of so many heads takes.
func (c *Cache) shardFloats(heads int) int {
	return c.Layers * c.layerFloats(heads)
}

func (c *Cache) layerFloats(heads int) int {
	return c.Blocks * 2 * c.planeFloats(heads)
}

// planeFloats is how far the values of a block are behind its keys.
func (c *Cache) planeFloats(heads int) int { return c.BlockTokens * heads * c.HeadDim }

// layer is the part of shard s that holds layer l.
func (c *Cache) layer(s *Shard, l int) []float32 {
	n := c.layerFloats(s.HeadCount)
	return s.Mem[l*n : (l+1)*n]
}

// slot is where the keys of a token start within a layer of shard s.
func (c *Cache) slot(s *Shard, block uint32, token int) int {
	return (int(block)*2*c.BlockTokens + token) * s.HeadCount * c.HeadDim
}

// pages is layer l of shard s as attention reads it.
func (c *Cache) pages(s *Shard, l int) kernel.Pages {
	plane := c.planeFloats(s.HeadCount)
	return kernel.Pages{
		Mem: c.layer(s, l), BlockTokens: c.BlockTokens, HeadDim: c.HeadDim,
		RowStride: s.HeadCount * c.HeadDim, PlaneStride: plane, BlockStride: 2 * plane,
	}
}

func (m *Model) checkCache(c *Cache) error {
	if c.Layers != m.Layers || c.KVHeads != m.KVHeads || c.HeadDim != m.HeadDim {
		return fmt.Errorf("use cache: %d layers of %d key heads of %d floats, the model has %d of %d of %d",
			c.Layers, c.KVHeads, c.HeadDim, m.Layers, m.KVHeads, m.HeadDim)
	}
	if _, err := m.shape(c.Blocks, c.BlockTokens, len(c.Shards)); err != nil {
		return err
	}
	per := m.KVHeads / len(c.Shards)
	for i, s := range c.Shards {
		if s.HeadFirst != i*per || s.HeadCount != per || len(s.Mem) < c.shardFloats(per) {
			return fmt.Errorf("use cache: shard %d holds %d key heads from %d in %d floats, want %d from %d in %d",
				i, s.HeadCount, s.HeadFirst, len(s.Mem), per, i*per, c.shardFloats(per))
		}
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
