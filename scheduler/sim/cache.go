package sim

// cache remembers which blocks of prompts an engine has computed, up to a number of them; what was longest unused goes first.
// Blocks are entries of arrays, linked by their numbers: 0 is the ring's head.
type cache struct {
	at    map[uint64]int32
	ids   []uint64
	older []int32
	newer []int32
	free  []int32
}

func newCache() *cache {
	return &cache{at: make(map[uint64]int32), ids: make([]uint64, 1), older: make([]int32, 1), newer: make([]int32, 1)}
}

func (c *cache) clear() {
	clear(c.at)
	c.ids, c.older, c.newer, c.free = c.ids[:1], c.older[:1], c.newer[:1], c.free[:0]
	c.older[0], c.newer[0] = 0, 0
}

// has is how many of the blocks, from the first on, are there.
func (c *cache) has(blocks []uint64) int {
	for i, id := range blocks {
		if _, ok := c.at[id]; !ok {
			return i
		}
	}
	return len(blocks)
}

func (c *cache) unlink(i int32) {
	c.newer[c.older[i]], c.older[c.newer[i]] = c.newer[i], c.older[i]
}

// link makes an entry the newest.
func (c *cache) link(i int32) {
	c.older[i], c.newer[i] = c.older[0], 0
	c.newer[c.older[0]] = i
	c.older[0] = i
}

// use makes blocks the newest, those that are not there yet too, and forgets the oldest beyond limit.
func (c *cache) use(blocks []uint64, limit int) {
	for k := len(blocks) - 1; k >= 0; k-- { // the beginnings of prompts stay longest
		id := blocks[k]
		i, ok := c.at[id]
		switch {
		case ok:
			c.unlink(i)
		case len(c.free) > 0:
			i = c.free[len(c.free)-1]
			c.free = c.free[:len(c.free)-1]
			c.ids[i] = id
		default:
			i = int32(len(c.ids))
			c.ids, c.older, c.newer = append(c.ids, id), append(c.older, 0), append(c.newer, 0)
		}
		c.at[id] = i
		c.link(i)
	}
	for len(c.at) > max(limit, 0) {
		i := c.newer[0]
		c.unlink(i)
		delete(c.at, c.ids[i])
		c.free = append(c.free, i)
	}
}
