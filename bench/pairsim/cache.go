package pairsim

// cache is a KV cache of so many blocks. What nobody uses stays until room is needed, the longest unused goes first.
type cache struct {
	capacity int
	used     int // held blocks, with a number or not, and those that only are kept
	blocks   map[uint32]*block
	// Blocks that nobody holds, in order of their last use: a ring through idle.
	idle  block
	idles int
}

type block struct {
	id         uint32
	holders    int
	prev, next *block
}

func newCache(capacity int) *cache {
	c := &cache{capacity: capacity, blocks: make(map[uint32]*block)}
	c.idle.prev, c.idle.next = &c.idle, &c.idle
	return c
}

// cached is how many of the blocks, from the first on, are there.
func (c *cache) cached(ids []uint32) int {
	for i, id := range ids {
		if c.blocks[id] == nil {
			return i
		}
	}
	return len(ids)
}

// fits tells whether so many blocks can be had beside those of ids that are there already.
func (c *cache) fits(ids []uint32, n int) bool {
	busy := 0 // that would be taken out of what can be evicted
	for _, id := range ids {
		if c.blocks[id].holders == 0 {
			busy++
		}
	}
	return c.used-c.idles+busy+n <= c.capacity
}

// hold keeps blocks that are there.
func (c *cache) hold(ids []uint32) {
	for _, id := range ids {
		b := c.blocks[id]
		if b.holders == 0 {
			b.prev.next, b.next.prev = b.next, b.prev
			c.idles--
		}
		b.holders++
	}
}

// take makes room for n blocks, and has them.
func (c *cache) take(n int) {
	c.used += n
	for c.used > c.capacity && c.idles > 0 {
		b := c.idle.next
		b.prev.next, b.next.prev = b.next, b.prev
		delete(c.blocks, b.id)
		c.idles--
		c.used--
	}
}

// name makes taken blocks such that others find them. One that is there already stays the one that is found, and the new
// one is given back. The blocks are held as before.
func (c *cache) name(ids []uint32) {
	for _, id := range ids {
		if b := c.blocks[id]; b != nil {
			c.hold([]uint32{id})
			c.used--
			continue
		}
		c.blocks[id] = &block{id: id, holders: 1}
	}
}

// release lets go of held blocks, the last first, so that the beginnings of prompts stay longest.
func (c *cache) release(ids []uint32) {
	for i := len(ids) - 1; i >= 0; i-- {
		b := c.blocks[ids[i]]
		if b.holders--; b.holders == 0 {
			b.prev, b.next = c.idle.prev, &c.idle
			b.prev.next, c.idle.prev = b, b
			c.idles++
		}
	}
}

// give gives back taken blocks that have no number.
func (c *cache) give(n int) { c.used -= n }

// usage is the part that is held.
func (c *cache) usage() float64 { return float64(c.used-c.idles) / float64(c.capacity) }

// PooledHits is the share of the prompts' tokens that one cache of so many blocks, all requests in order, would have had.
func PooledHits(trace []Request, blocks int) float64 {
	c := newCache(blocks)
	var hit, all int
	for i := range trace {
		q := &trace[i]
		ids := q.whole()
		n := c.cached(ids)
		hit += min(n*BlockTokens, q.Input-1)
		all += q.Input
		if len(ids) > blocks {
			continue
		}
		c.hold(ids[:n])
		c.take(len(ids) - n)
		c.name(ids[n:])
		c.release(ids)
	}
	return float64(hit) / float64(all)
}
