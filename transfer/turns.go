package transfer

import "slices"

// turns is the queue of leases that wait for a lane. It is fair among engines first and then among an engine's leases, so
// that an engine with a hundred of them gets no more than one with a single one: deficit round robin by bytes among
// engines, first come first served among the leases of one. It is not safe for concurrent use.
type turns struct {
	order []*turn // engines with waiting leases; the first one's turn it is
	of    map[*Client]*turn
	in    map[*sourceLease]struct{}
}

type turn struct {
	leases []*sourceLease
	credit int64 // bytes it may send before it is another engine's turn
	lanes  int   // that carry a lease of it
}

// turnBytes is what an engine may send in its turn. Debts beyond creditMin are forgiven: they come from times when nobody
// else waited for long.
const (
	turnBytes = PieceMax
	creditMin = -4 * turnBytes
)

func newTurns() turns {
	return turns{of: make(map[*Client]*turn), in: make(map[*sourceLease]struct{})}
}

func (t *turns) empty() bool { return len(t.order) == 0 }

// front is the lease that waits longest of the engine whose turn it is. The queue is not empty.
func (t *turns) front() *sourceLease { return t.order[0].leases[0] }

// push queues a lease; false means that it waits already.
func (t *turns) push(l *sourceLease) bool {
	if _, in := t.in[l]; in {
		return false
	}
	t.in[l] = struct{}{}
	q := t.get(l.client)
	q.leases = append(q.leases, l)
	switch {
	case len(q.leases) > 1:
	case q.lanes > 0 && q.credit > 0: // in the middle of its turn, with a lease that was on a lane
		t.order = slices.Insert(t.order, 0, q)
	default:
		if q.credit <= 0 { // its turn ended with what it had waiting
			q.credit += turnBytes
		}
		t.order = append(t.order, q)
	}
	return true
}

func (t *turns) get(c *Client) *turn {
	q := t.of[c]
	if q == nil {
		q = &turn{credit: turnBytes}
		t.of[c] = q
	}
	return q
}

// pop gives the lease whose turn it is, to a lane. The queue is not empty.
func (t *turns) pop() *sourceLease {
	q := t.order[0]
	for ; q.credit <= 0; q = t.order[0] {
		if len(t.order) == 1 { // the others have nothing that waits; if there are others, they will, and the debt stands
			if len(t.of) == 1 {
				q.credit = turnBytes
			}
			break
		}
		q.credit += turnBytes
		t.order = append(t.order[1:], q)
	}
	l := q.leases[0]
	q.leases[0] = nil
	if q.leases = q.leases[1:]; len(q.leases) == 0 {
		q.leases = nil
		t.order = t.order[1:]
	}
	delete(t.in, l)
	q.lanes++
	return l
}

// carry is pop for a lease that does not wait.
func (t *turns) carry(l *sourceLease) { t.get(l.client).lanes++ }

// charge notes that a lane sends bytes of an engine.
func (t *turns) charge(c *Client, bytes uint32) {
	q := t.get(c)
	q.credit = max(q.credit-int64(bytes), creditMin)
}

// done says that a lane carries the lease no more.
func (t *turns) done(l *sourceLease) {
	q := t.get(l.client)
	if q.lanes--; q.lanes <= 0 && len(q.leases) == 0 {
		delete(t.of, l.client)
	}
}
