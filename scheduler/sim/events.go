package sim

// What an event is about.
type eventKind uint8

const (
	stepEnds  eventKind = iota // who is an engine
	gotReady                   // an engine
	kvLanded                   // a request
	lookAgain                  // nobody
)

// event is what happens to somebody at a moment, in nanoseconds. Of equal moments the one made first comes first.
type event struct {
	at   int64
	made uint64
	who  int32
	kind eventKind
}

// events is a heap of four children a node, the earliest event first.
type events struct {
	heap []event
	made uint64
}

func before(a, b *event) bool { return a.at < b.at || a.at == b.at && a.made < b.made }

func (h *events) push(at int64, kind eventKind, who int32) {
	h.made++
	e := event{at: at, made: h.made, who: who, kind: kind}
	h.heap = append(h.heap, e)
	i := len(h.heap) - 1
	for i > 0 {
		up := (i - 1) / 4
		if !before(&e, &h.heap[up]) {
			break
		}
		h.heap[i] = h.heap[up]
		i = up
	}
	h.heap[i] = e
}

func (h *events) pop() event {
	top := h.heap[0]
	last := h.heap[len(h.heap)-1]
	h.heap = h.heap[:len(h.heap)-1]
	n := len(h.heap)
	if n == 0 {
		return top
	}
	i := 0
	for {
		least := 4*i + 1
		if least >= n {
			break
		}
		for c := least + 1; c < min(4*i+5, n); c++ {
			if before(&h.heap[c], &h.heap[least]) {
				least = c
			}
		}
		if !before(&h.heap[least], &last) {
			break
		}
		h.heap[i] = h.heap[least]
		i = least
	}
	h.heap[i] = last
	return top
}

// fifo is a queue of requests' numbers.
type fifo struct {
	items []int32
	head  int
}

func (q *fifo) len() int      { return len(q.items) - q.head }
func (q *fifo) first() int32  { return q.items[q.head] }
func (q *fifo) push(id int32) { q.items = append(q.items, id) }

func (q *fifo) pop() int32 {
	id := q.items[q.head]
	q.head++
	if q.head > 64 && q.head*2 > len(q.items) {
		q.items = q.items[:copy(q.items, q.items[q.head:])]
		q.head = 0
	}
	return id
}

func (q *fifo) clear() { q.items, q.head = q.items[:0], 0 }

// stream is a request that is decoded, until its engine has made so many steps.
type stream struct {
	end int64
	who int32
}

// streams is a binary heap, who ends first is first.
type streams []stream

func (h streams) less(i, k int) bool {
	return h[i].end < h[k].end || h[i].end == h[k].end && h[i].who < h[k].who
}

func (h *streams) push(s stream) {
	*h = append(*h, s)
	for i := len(*h) - 1; i > 0; {
		up := (i - 1) / 2
		if !h.less(i, up) {
			return
		}
		(*h)[i], (*h)[up] = (*h)[up], (*h)[i]
		i = up
	}
}

func (h *streams) pop() stream {
	top := (*h)[0]
	n := len(*h) - 1
	(*h)[0] = (*h)[n]
	*h = (*h)[:n]
	for i := 0; ; {
		least := 2*i + 1
		if least >= n {
			return top
		}
		if least+1 < n && h.less(least+1, least) {
			least++
		}
		if !h.less(least, i) {
			return top
		}
		(*h)[i], (*h)[least] = (*h)[least], (*h)[i]
		i = least
	}
}
