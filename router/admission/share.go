package admission

import (
	"cmp"
	"container/heap"
	"slices"
)

// idleMax bounds the shares of a class that are kept though nobody in them waits.
const idleMax = 4096

// class is the waiters of one priority. It exists as long as there are any.
//
// Its places go to tenants by start-time fair queueing: each share has a tag, the virtual time at which its next request
// begins, and the least tag is served; being served moves it on by tokens / weight. The clock is the tag that was served last.
// Who comes begins at the clock: nobody saves up for having been away.
type class struct {
	priority int
	line     line // all, by age
	clock    float64
	shares   map[string]*share
	turns    shareHeap // that have waiters, the least tag first
	greed    shareHeap // the same, who holds most for its weight first
	idle     shareHeap // that have none and are ahead of the clock, the least tag first
}

// share is a tenant's part of a class.
type share struct {
	class  *class // nil when it is forgotten
	tenant string
	weight float64
	tag    float64
	hold   float64 // of the room to wait, divided by the weight
	line   line
	at     [2]int // its places in turns or idle, and in greed
}

func newClass(priority int) *class {
	byTag := func(a, b *share) bool { return a.tag < b.tag }
	return &class{
		priority: priority, line: line{k: inClass}, shares: map[string]*share{},
		turns: shareHeap{slot: 0, less: byTag}, idle: shareHeap{slot: 0, less: byTag},
		greed: shareHeap{slot: 1, less: func(a, b *share) bool { return a.hold > b.hold }},
	}
}

// class finds the class of a priority; at is where it is, or belongs.
func (q *Queue) class(priority int) (at int, found bool) {
	return slices.BinarySearchFunc(q.classes, priority, func(c *class, p int) int { return cmp.Compare(c.priority, p) })
}

// add puts w behind those of its share.
func (q *Queue) add(w *waiter) {
	at, found := q.class(w.Priority)
	if !found {
		q.classes = slices.Insert(q.classes, at, newClass(w.Priority))
	}
	c := q.classes[at]
	s := c.shares[w.Tenant]
	if s == nil {
		s = &share{class: c, tenant: w.Tenant, weight: q.weight(w.Tenant), tag: c.clock, line: line{k: inShare}}
		c.shares[w.Tenant] = s
	} else if s.line.n == 0 {
		heap.Remove(&c.idle, s.at[0])
		s.tag = max(s.tag, c.clock)
	}
	w.share = s
	c.line.push(w)
	s.line.push(w)
	s.hold += q.hold(w)
	if s.line.n == 1 {
		heap.Push(&c.turns, s)
		heap.Push(&c.greed, s)
	} else {
		heap.Fix(&c.greed, s.at[1])
	}
	q.waiting++
	q.places += w.Places
	q.bytes += w.Bytes
}

// remove takes w out.
func (q *Queue) remove(w *waiter) {
	s := w.share
	c := s.class
	c.line.remove(w)
	s.line.remove(w)
	s.hold -= q.hold(w)
	q.waiting--
	q.places -= w.Places
	q.bytes -= w.Bytes
	switch {
	case c.line.n == 0:
		for _, s := range c.shares {
			s.class = nil
		}
		at, _ := q.class(c.priority)
		q.classes = slices.Delete(q.classes, at, at+1)
	case s.line.n == 0:
		s.hold = 0 // without what rounding has left
		heap.Remove(&c.turns, s.at[0])
		heap.Remove(&c.greed, s.at[1])
		heap.Push(&c.idle, s)
		c.forget()
	default:
		heap.Fix(&c.greed, s.at[1])
	}
}

// charge moves the share and the clock on for a request that is served.
func (c *class) charge(s *share, tokens int64) {
	c.clock = max(c.clock, s.tag)
	s.tag += float64(tokens) / s.weight
	heap.Fix(&c.turns, s.at[0])
	c.forget()
}

// refund gives back tokens that a share was charged with and did not need; below 0 it charges more.
func (q *Queue) refund(s *share, tokens int64) {
	c := s.class
	if c == nil {
		return
	}
	s.tag -= float64(tokens) / s.weight
	if s.line.n > 0 {
		heap.Fix(&c.turns, s.at[0])
		return
	}
	heap.Fix(&c.idle, s.at[0])
	c.forget()
}

// forget drops shares that would begin at the clock anyhow.
func (c *class) forget() {
	for c.idle.Len() > 0 && (c.idle.items[0].tag <= c.clock || c.idle.Len() > idleMax) {
		s := heap.Pop(&c.idle).(*share)
		delete(c.shares, s.tenant)
		s.class = nil
	}
}

func (q *Queue) weight(tenant string) float64 {
	if w, ok := q.cfg.Weights[tenant]; ok {
		return w
	}
	return 1
}

// hold is the part of the room to wait that a waiter takes of its tenant's share of it: by number and by bytes.
func (q *Queue) hold(w *waiter) float64 { return q.holdOf(&w.Request) / w.share.weight }

func (q *Queue) holdOf(r *Request) float64 {
	return 1/float64(q.cfg.Waiting) + float64(r.Bytes)/float64(q.cfg.WaitingBytes)
}

// The two lines that a waiter stands in.
const (
	inClass = iota
	inShare
)

type links struct{ prev, next *waiter }

// line is a list of waiters in the order of their coming.
type line struct {
	k          int
	head, tail *waiter
	n          int
}

func (l *line) push(w *waiter) {
	w.links[l.k] = links{prev: l.tail}
	if l.tail == nil {
		l.head = w
	} else {
		l.tail.links[l.k].next = w
	}
	l.tail = w
	l.n++
}

func (l *line) remove(w *waiter) {
	at := w.links[l.k]
	if at.prev == nil {
		l.head = at.next
	} else {
		at.prev.links[l.k].next = at.next
	}
	if at.next == nil {
		l.tail = at.prev
	} else {
		at.next.links[l.k].prev = at.prev
	}
	w.links[l.k] = links{}
	l.n--
}

// shareHeap is a heap of shares that know where in it they are.
type shareHeap struct {
	slot  int
	less  func(a, b *share) bool
	items []*share
}

var _ heap.Interface = (*shareHeap)(nil)

func (h *shareHeap) Len() int           { return len(h.items) }
func (h *shareHeap) Less(i, j int) bool { return h.less(h.items[i], h.items[j]) }

func (h *shareHeap) Swap(i, j int) {
	h.items[i], h.items[j] = h.items[j], h.items[i]
	h.items[i].at[h.slot], h.items[j].at[h.slot] = i, j
}

// Push is heap.Push's.
func (h *shareHeap) Push(x any) {
	s := x.(*share)
	s.at[h.slot] = len(h.items)
	h.items = append(h.items, s)
}

// Pop is heap.Pop's.
func (h *shareHeap) Pop() any {
	last := len(h.items) - 1
	s := h.items[last]
	h.items[last] = nil
	h.items = h.items[:last]
	return s
}
