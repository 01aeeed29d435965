// Package kv keeps account of the paged KV cache: which block is free, who holds it, and which full blocks can be
// found again by the tokens they were computed from (automatic prefix caching, as in vLLM's PagedAttention
// block manager). It knows block numbers and token ids; it must not know memory, models, requests or sockets.
package kv

import (
	"errors"
	"fmt"

	"github.com/cespare/xxhash/v2"
)

// ContentID names what a full block holds: its own tokens and everything before them. Ids are never used twice, so
// a prefix match is exact: tokens are compared, and a parent's id stands for all that precedes it.
type ContentID uint64

// Root is the content before any token.
const Root ContentID = 1

// ErrNoBlocks says that fewer blocks are free than were asked for. Nothing was taken.
var ErrNoBlocks = errors.New("allocate KV blocks: cache is full")

type entry struct {
	refs    int32
	content ContentID // 0: holds nothing that can be found
	parent  ContentID
	tokens  []int32 // those of this block alone, only while content != 0
	prev    uint32  // free list links, valid while refs == 0
	next    uint32
}

type key struct {
	parent ContentID
	hash   uint64
}

// Pool accounts for the blocks of one cache. A block with no reference keeps its contents until it is needed: the
// free list is in order of use, so the least recently used content goes first. Not safe for concurrent use: the
// engine's loop owns it.
type Pool struct {
	blockTokens int
	blocks      []entry // one more than there are blocks: the last is the free list's head
	free        int
	cached      int
	index       map[key]uint32
	nextContent ContentID
	watcher     Watcher
}

// Watcher is told what can be found in the cache and what no longer can. It must not call the Pool.
type Watcher interface {
	// Stored: a block holds content, tokens behind those of parent. The tokens are good during the call only.
	Stored(id, parent ContentID, tokens []int32)
	// Removed: the block with that content has another use now.
	Removed(id ContentID)
}

type nobody struct{}

func (nobody) Stored(ContentID, ContentID, []int32) {}
func (nobody) Removed(ContentID)                    {}

// Watch makes w the pool's watcher, from now on.
func (p *Pool) Watch(w Watcher) { p.watcher = w }

// NewPool makes a pool of n free blocks of blockTokens tokens each.
func NewPool(n, blockTokens int) (*Pool, error) {
	if n < 1 || n > 1<<24 || blockTokens < 1 || blockTokens > 4096 {
		return nil, fmt.Errorf("size KV pool: %d blocks of %d tokens is out of range (1..16777216 blocks of 1..4096)", n, blockTokens)
	}
	p := &Pool{
		blockTokens: blockTokens,
		blocks:      make([]entry, n+1),
		index:       make(map[key]uint32, n),
		nextContent: Root + 1,
		watcher:     nobody{},
	}
	head := uint32(n)
	p.blocks[head].prev, p.blocks[head].next = head, head
	for i := range n {
		p.pushFree(uint32(i))
	}
	return p, nil
}

// BlockTokens is the number of tokens a block holds.
func (p *Pool) BlockTokens() int { return p.blockTokens }

// Total, Free and Cached count blocks: all, those nobody holds, and those of the free ones that hold content which
// a prefix match can still find.
func (p *Pool) Total() int  { return len(p.blocks) - 1 }
func (p *Pool) Free() int   { return p.free }
func (p *Pool) Cached() int { return p.cached }

// BlocksFor is the number of blocks that hold n tokens.
func (p *Pool) BlocksFor(n int) int { return (n + p.blockTokens - 1) / p.blockTokens }

// Match finds the longest chain of cached full blocks that holds a prefix of tokens, takes a reference on each and
// returns them with the content id of the last one (Root if none matched).
func (p *Pool) Match(tokens []int32) ([]uint32, ContentID) {
	var found []uint32
	at := Root
	for len(tokens) >= p.blockTokens {
		own := tokens[:p.blockTokens]
		b, ok := p.index[key{at, hashTokens(own)}]
		if !ok || !equal(p.blocks[b].tokens, own) {
			break
		}
		p.ref(b)
		found = append(found, b)
		at = p.blocks[b].content
		tokens = tokens[p.blockTokens:]
	}
	return found, at
}

// Alloc takes n blocks, least recently used content first, each with one reference and no content. It takes all or,
// with ErrNoBlocks, none.
func (p *Pool) Alloc(n int) ([]uint32, error) {
	if n > p.free {
		return nil, ErrNoBlocks
	}
	out := make([]uint32, n)
	for i := range out {
		b := p.blocks[len(p.blocks)-1].next
		p.ref(b)
		p.forget(b)
		out[i] = b
	}
	return out, nil
}

// Commit says that block b, held by the caller, now holds tokens (exactly a block's worth) after the content parent.
// It returns the content's id, which is the parent of the next block. When another block holds the same content
// already, that one stays the findable one and its id is returned.
func (p *Pool) Commit(b uint32, parent ContentID, tokens []int32) ContentID {
	e := &p.blocks[b]
	if e.refs == 0 || len(tokens) != p.blockTokens {
		panic(fmt.Sprintf("kv: commit of block %d with %d references and %d tokens", b, e.refs, len(tokens)))
	}
	if e.content != 0 {
		return e.content
	}
	k := key{parent, hashTokens(tokens)}
	if other, ok := p.index[k]; ok {
		if equal(p.blocks[other].tokens, tokens) {
			return p.blocks[other].content
		}
		p.forget(other) // a hash collision: one of the two has to give way, and the newer is likelier to be asked for
	}
	e.content, e.parent = p.nextContent, parent
	p.nextContent++
	e.tokens = append(e.tokens[:0], tokens...)
	p.index[k] = b
	p.watcher.Stored(e.content, parent, e.tokens)
	return e.content
}

// Release gives back one reference on each block. The last of the list is reused first, so that of a chain the end
// goes before the beginning that other prompts may share.
func (p *Pool) Release(blocks []uint32) {
	for i := len(blocks) - 1; i >= 0; i-- {
		e := &p.blocks[blocks[i]]
		if e.refs <= 0 {
			panic(fmt.Sprintf("kv: release of block %d that nobody holds", blocks[i]))
		}
		e.refs--
		if e.refs == 0 {
			p.pushFree(blocks[i])
		}
	}
}

// Reset forgets all content that nobody holds.
func (p *Pool) Reset() {
	for i := range p.Total() {
		if p.blocks[i].refs == 0 {
			p.forget(uint32(i))
		}
	}
}

func (p *Pool) ref(b uint32) {
	e := &p.blocks[b]
	if e.refs == 0 {
		p.blocks[e.prev].next = e.next
		p.blocks[e.next].prev = e.prev
		p.free--
		if e.content != 0 {
			p.cached--
		}
	}
	e.refs++
}

// pushFree appends to the tail, or to the head where the block holds nothing worth keeping.
func (p *Pool) pushFree(b uint32) {
	head := uint32(len(p.blocks) - 1)
	e := &p.blocks[b]
	if e.content != 0 {
		e.prev, e.next = p.blocks[head].prev, head
		p.cached++
	} else {
		e.prev, e.next = head, p.blocks[head].next
	}
	p.blocks[e.prev].next = b
	p.blocks[e.next].prev = b
	p.free++
}

func (p *Pool) forget(b uint32) {
	e := &p.blocks[b]
	if e.content == 0 {
		return
	}
	k := key{e.parent, hashTokens(e.tokens)}
	if p.index[k] == b {
		delete(p.index, k)
	}
	if e.refs == 0 {
		p.cached--
	}
	p.watcher.Removed(e.content)
	e.content, e.parent = 0, 0
	e.tokens = e.tokens[:0]
}

func hashTokens(tokens []int32) uint64 {
	var buf [64 * 4]byte
	if len(tokens) <= 64 {
		return xxhash.Sum64(appendTokens(buf[:0], tokens))
	}
	return xxhash.Sum64(appendTokens(nil, tokens))
}

func appendTokens(b []byte, tokens []int32) []byte {
	for _, t := range tokens {
		b = append(b, byte(t), byte(t>>8), byte(t>>16), byte(t>>24))
	}
	return b
}

func equal(a, b []int32) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if a[i] != b[i] {
			return false
		}
	}
	return true
}
