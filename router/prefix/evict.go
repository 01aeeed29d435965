package prefix

// When memory is short, a full segment loses an eighth of its entries. Places are drawn by chance, so what is worst in a
// segment is about what is worst in all of them. First goes what was noted, then what was not looked up for the longest
// time, of that the deepest: contents and the keys that stand for them have the same rank, so both go.

const evictPart = 8

// victim is an entry and its rank; the least goes first.
type victim struct{ k, rank uint64 }

const (
	rankStamp = 20 // bits of depth below
	rankTold  = 1 << 62
)

// rankOf is the rank of a content.
func rankOf(told bool, stamp, depth uint32) uint64 {
	rank := uint64(stamp)<<rankStamp | uint64(depthMax-depth)
	if told {
		rank |= rankTold
	}
	return rank
}

// evict makes room in s. What goes may be of other segments, too: a key takes its source's part in a content along.
func (x *Index) evict(s *segment) {
	all, ranks := x.victims[:0], x.scores[:0]
	for i := range s.slots {
		if e := s.slots[i].entry(); e.k != 0 {
			rank := x.rank(e)
			all, ranks = append(all, victim{e.k, rank}), append(ranks, rank)
		}
	}
	n := max(1, len(all)/evictPart)
	worst := nth(ranks, n-1)
	for _, v := range all {
		if v.rank < worst {
			n--
			x.expel(v.k)
		}
	}
	for _, v := range all {
		if v.rank == worst && n > 0 {
			n--
			x.expel(v.k)
		}
	}
}

// rank of an entry of any kind. What stands for a content that is gone is of no use.
func (x *Index) rank(e entry) uint64 {
	switch kindOf(e.m) {
	case kindContent:
		p := x.planes[contentPlane(e.m)]
		if p == nil {
			return 0
		}
		return rankOf(e.v&^p.approximate.Load() != 0, stampOf(e.m), contentDepth(e.m))
	case kindMore:
		return rankOf(true, x.stamp(), 0)
	}
	s := x.ids[sourceOf(e.m)]
	if s == nil || s.seat.Load() == nil {
		return 0
	}
	c := x.table.find(s.seat.Load().plane.place(Hash(e.v)))
	if c == nil {
		return 0
	}
	m := c.m.Load()
	return rankOf(kindOf(e.m) == kindKey, stampOf(m), contentDepth(m))
}

// expel takes an entry out for want of memory.
func (x *Index) expel(k uint64) {
	at := x.table.find(k)
	if at == nil {
		return // went along with another
	}
	e := at.entry()
	x.table.remove(k)
	kind := kindOf(e.m)
	x.figures.evicted[kind].Add(1)
	if kind == kindContent {
		return
	}
	s := x.ids[sourceOf(e.m)]
	if s == nil || s.seat.Load() == nil {
		return
	}
	if kind == kindMore {
		s.mores.Add(-1)
		return
	}
	s.keys.Add(-1)
	x.drop(s, s.seat.Load(), Hash(e.v))
}

// nth returns the value that would be at i if a were sorted; it leaves a in another order.
func nth(a []uint64, i int) uint64 {
	lo, hi := 0, len(a)-1
	for lo < hi {
		pivot := a[(lo+hi)/2]
		l, r := lo, hi
		for l <= r {
			for a[l] < pivot {
				l++
			}
			for a[r] > pivot {
				r--
			}
			if l <= r {
				a[l], a[r] = a[r], a[l]
				l++
				r--
			}
		}
		switch {
		case i <= r:
			hi = r
		case i >= l:
			lo = l
		default:
			return a[i]
		}
	}
	return a[i]
}
