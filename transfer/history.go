package transfer

import (
	"encoding/hex"
	"sync"
	"time"
)

// historyMax is how many ended leases an engine remembers.
const historyMax = 1024

// course is when what happened to a lease. Guarded by lease.mu, as are the pieces that it is about.
type course struct {
	bound       time.Time
	first, last time.Time // piece that was sent whole, or that landed
	again       uint64    // pieces that were sent again, or arrived again
}

// piece notes one that is through.
func (c *course) piece() {
	c.last = time.Now()
	if c.first.IsZero() {
		c.first = c.last
	}
}

// LeaseCourse is what happened to a lease at this end of it. Times that are missing did not come.
type LeaseCourse struct {
	ID        LeaseID    `json:"id"`
	Ticket    string     `json:"ticket"` // its nonce in hex, by which routers know the request's attempt
	Side      string     `json:"side"`   // source or target
	Engine    string     `json:"engine"`
	PeerNode  string     `json:"peer_node"`
	Transport string     `json:"transport,omitempty"`
	State     string     `json:"state"`
	Reason    string     `json:"reason,omitempty"` // why it ended, where it was not settled
	Tokens    uint32     `json:"tokens"`
	Presented time.Time  `json:"presented"` // when this end had the lease
	Bound     *time.Time `json:"bound,omitempty"`
	First     *time.Time `json:"first_piece,omitempty"`
	Last      *time.Time `json:"last_piece,omitempty"`
	Ended     *time.Time `json:"ended,omitempty"` // and fenced
	Bytes     uint64     `json:"bytes"`           // that landed, as far as this end knows
	Pieces    uint64     `json:"pieces"`
	Again     uint64     `json:"pieces_again"` // sent, or come, more than once
	Lanes     int        `json:"lanes"`        // that carried pieces
}

// known returns t where it is a time.
func known(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	return &t
}

// courseNow says what happened to the lease so far.
func (l *lease) courseNow() LeaseCourse {
	l.mu.Lock()
	defer l.mu.Unlock()
	c := LeaseCourse{ID: l.id, Ticket: hex.EncodeToString(l.ticket.Nonce[:]), Side: l.side(), Engine: l.client.id, PeerNode: l.ticket.PNode, State: l.state.String(), Tokens: l.tokens,
		Presented: l.opened, Bound: known(l.course.bound), First: known(l.course.first), Last: known(l.course.last), Bytes: l.bytes, Again: l.course.again}
	if l.ch != nil {
		c.Transport = l.ch.transport
	}
	if l.src != nil {
		c.PeerNode = l.ticket.DNode
		for _, n := range l.src.laneSent {
			if c.Pieces += n; n > 0 {
				c.Lanes++
			}
		}
		return c
	}
	for _, n := range l.dst.received {
		if c.Pieces += n; n > 0 {
			c.Lanes++
		}
	}
	return c
}

// remember keeps what happened to the lease, which has ended.
func (l *lease) remember(o *outcome) {
	c := l.courseNow()
	now := time.Now()
	c.Ended, c.Reason = &now, o.reason
	l.e.history.add(c)
}

// history keeps the leases that ended last.
type history struct {
	mu   sync.Mutex
	ring []LeaseCourse // grows up to historyMax
	next int
}

func (h *history) add(c LeaseCourse) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.ring) < historyMax {
		h.ring = append(h.ring, c)
		return
	}
	h.ring[h.next] = c
	h.next = (h.next + 1) % historyMax
}

// Courses returns what happened to the leases of a ticket, by its nonce: those that live, and those that ended and are
// remembered. There may be two where both ends of a lease are this engine's.
func (e *Engine) Courses(nonce [16]byte) []LeaseCourse {
	list := []LeaseCourse{}
	e.mu.Lock()
	clients := make([]*Client, 0, len(e.clients))
	for _, c := range e.clients {
		clients = append(clients, c)
	}
	e.mu.Unlock()
	seen := map[LeaseID]bool{}
	for _, c := range clients {
		_, leases := c.status()
		for _, l := range leases {
			if l.ticket.Nonce == nonce {
				list = append(list, l.courseNow())
				seen[l.id] = true
			}
		}
	}
	ticket := hex.EncodeToString(nonce[:])
	e.history.mu.Lock()
	defer e.history.mu.Unlock()
	for i := range e.history.ring {
		if c := &e.history.ring[i]; c.Ticket == ticket && !seen[c.ID] {
			list = append(list, *c)
		}
	}
	return list
}
