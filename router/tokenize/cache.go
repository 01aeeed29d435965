package tokenize

import (
	"hash/maphash"
	"math/bits"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/headrace/headrace/router/tokens"
)

// The cache remembers prompts by the raw bytes of the messages they came from. A node stands for the first n messages of
// a conversation, rendered without a generation prompt: the tokens up to the last place where the text behind is encoded
// independently, and the text from there on. A conversation that goes on costs its new messages alone.
//
// Nodes of one conversation share the memory of their tokens: each holds a prefix of the same run, and whoever extends
// the longest of them appends in place. Where a conversation branches, the branch is a run of its own that begins behind
// so many tokens of the other.

// key names a prefix of a conversation: a chain of hashes with a secret seed of this process, 64 bits wide. That two
// prefixes of a million have one key has a probability of 1 in 10^7, and would cost a cache hit.
type key uint64

// node is immutable but for its place in the list of its shard.
type node struct {
	key    key
	run    *run
	tokens int    // of run, that are this node's
	tail   string // the rendered text behind them
	inside bool   // some text lies before tail
	stub   []kind // stands for the messages when the next ones are rendered
	final  []uint32
	asked  bool // final holds the tokens of tail with the generation prompt

	bytes      int64
	prev, next *node
}

// run is memory for tokens: the first skip of its nodes' tokens are those of base, the others are in ids.
type run struct {
	ids   []uint32
	base  *run // in the same shard; nil where skip is 0
	skip  int
	depth int // of runs below
	refs  int // nodes, and runs that this is the base of
	memo  tokens.Memo
}

// depthMax bounds the runs that the tokens of one node lie in.
const depthMax = 8

// parts appends the first n tokens of a run to list, the last part first. They must not be changed.
func (r *run) parts(list []tokens.Part, n int) []tokens.Part {
	for r != nil {
		own := n - r.skip
		list = append(list, tokens.Part{IDs: r.ids[:own:own], Memo: &r.memo})
		r, n = r.base, r.skip
	}
	return list
}

// joinParts appends the tokens of such a list.
func joinParts(dst []uint32, list []tokens.Part) []uint32 {
	for _, part := range slices.Backward(list) {
		dst = append(dst, part.IDs...)
	}
	return dst
}

const nodeBytes = 256 // about what a node takes beside its texts

type shard struct {
	mu    sync.Mutex
	nodes map[key]*node
	list  node // a ring: next is the node used last, prev the one to drop first
	bytes int64
	limit int64
}

type cache struct {
	seed   maphash.Seed
	shards []shard
	off    atomic.Bool // a prompt turned out wrong: nothing is taken from the cache any more

	hits, misses, checks, wrong atomic.Uint64
}

// shardBytesMin keeps a shard large enough for the longest conversations.
const shardBytesMin = 16 << 20

func newCache(limit int64) *cache {
	c := &cache{seed: maphash.MakeSeed(), shards: make([]shard, max(1, min(16, limit/shardBytesMin)))}
	for i := range c.shards {
		s := &c.shards[i]
		s.nodes = map[key]*node{}
		s.list.prev, s.list.next = &s.list, &s.list
		s.limit = limit / int64(len(c.shards))
	}
	return c
}

func (c *cache) hash(b []byte) uint64 { return maphash.Bytes(c.seed, b) }

// chain adds a hash to a key.
func chain(k key, h uint64) key {
	hi, lo := bits.Mul64(uint64(k)^0x9E3779B97F4A7C15, h^0xD6E8FEB86659FD93)
	return key(hi ^ lo)
}

// shardOf returns the shard of the first n messages whose keys are given: all prefixes of a conversation from its second
// message on are in one, so that they can share a run.
func (c *cache) shardOf(keys []key, n int) *shard {
	return &c.shards[uint64(keys[min(n, 2)-1])%uint64(len(c.shards))]
}

// find returns the node of the longest prefix known of at most n messages, and its tokens as run.parts does, in list's
// memory.
func (c *cache) find(keys []key, n int, list []tokens.Part) (at int, found *node, parts []tokens.Part) {
	for ; n > 0; n-- {
		s := c.shardOf(keys, n)
		s.mu.Lock()
		if e := s.nodes[keys[n-1]]; e != nil {
			e.unlink()
			s.push(e)
			parts = e.run.parts(list[:0], e.tokens)
			s.mu.Unlock()
			return n, e, parts
		}
		s.mu.Unlock()
	}
	return 0, nil, nil
}

// add puts a node for the first n messages into the cache: the tokens of the node it goes on from, which may be nil and
// whose parts are before, and more behind them. e has everything but its tokens.
func (c *cache) add(keys []key, n int, from *node, before []tokens.Part, more []uint32, e *node) {
	s := c.shardOf(keys, n)
	e.key = keys[n-1]
	e.bytes = nodeBytes + int64(len(e.tail)+4*len(e.final)+32*len(e.stub))
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.nodes[e.key] != nil {
		return // another request was faster
	}
	shared := from != nil && s.nodes[from.key] == from
	switch {
	case shared && from.run.skip+len(from.run.ids) == from.tokens:
		e.run, e.tokens = from.run, from.tokens+len(more)
		grown := -cap(e.run.ids)
		e.run.ids = append(e.run.ids, more...)
		s.bytes += tokenBytes * int64(grown+cap(e.run.ids))
	case shared && from.run.depth < depthMax:
		from.run.refs++
		e.tokens = from.tokens + len(more)
		e.run = &run{ids: slices.Clone(more), base: from.run, skip: from.tokens, depth: from.run.depth + 1}
		s.bytes += runBytes + tokenBytes*int64(cap(e.run.ids))
	default:
		ids := append(joinParts(nil, before), more...)
		e.run, e.tokens = &run{ids: ids}, len(ids)
		s.bytes += runBytes + tokenBytes*int64(cap(ids))
	}
	e.run.refs++
	s.nodes[e.key] = e
	s.push(e)
	s.bytes += e.bytes
	for s.bytes > s.limit && s.list.prev != &s.list {
		s.drop(s.list.prev)
	}
}

const (
	runBytes   = 192
	tokenBytes = 4 + tokens.BytesPerToken // of a run, what is computed of it included
)

func (s *shard) drop(e *node) {
	e.unlink()
	delete(s.nodes, e.key)
	s.bytes -= e.bytes
	for r := e.run; r != nil; r = r.base {
		if r.refs--; r.refs > 0 {
			return
		}
		s.bytes -= runBytes + tokenBytes*int64(cap(r.ids))
	}
}

func (s *shard) push(e *node) {
	e.prev, e.next = &s.list, s.list.next
	e.prev.next, e.next.prev = e, e
}

func (e *node) unlink() { e.prev.next, e.next.prev = e.next, e.prev }

// foldMax bounds the messages of a stub.
const foldMax = 24

// fold appends a message to the stub of a conversation and folds it: a stretch of messages is left out where it leads
// from one pair of neighbours back to the same pair at an index of the same parity, and every pair of neighbours within
// it has been before. What remains shows a template every succession of roles that the conversation has, in their first
// order, the same parity, and the same end. nil where it cannot be kept short.
func fold(stub []kind, k kind) []kind {
	stub = append(stub, k)
	j := len(stub) - 1
	for i := 2 - j%2; i < j; i += 2 { // never 0: templates treat the first message apart
		if stub[i] == stub[j] && stub[i-1] == stub[j-1] && covered(stub, i, j) {
			return stub[:i+1]
		}
	}
	if len(stub) > foldMax {
		return nil
	}
	return stub
}

// covered tells whether all pairs of neighbours in stub[i:j+1] occur in stub[:i+1].
func covered(stub []kind, i, j int) bool {
	for at := i + 1; at <= j; at++ {
		known := false
		for b := 1; b <= i && !known; b++ {
			known = stub[b-1] == stub[at-1] && stub[b] == stub[at]
		}
		if !known {
			return false
		}
	}
	return true
}

// foldAll folds several messages into a copy of a stub.
func foldAll(stub, more []kind) []kind {
	out := slices.Clone(stub)
	for _, k := range more {
		if out = fold(out, k); out == nil {
			return nil
		}
	}
	return out
}
