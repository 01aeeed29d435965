package transfer

import (
	"container/heap"
	"fmt"
	"sync"
	"time"
)

// ticketBook remembers the nonces of tickets that were presented here, or given up before they were, until their
// deadlines: a ticket binds once. It holds a bounded number and refuses new tickets when that many are alive.
type ticketBook struct {
	mu     sync.Mutex
	max    int
	nonces map[[16]byte]string // why the ticket is worth nothing any more; "" for a presented one
	order  ticketHeap
}

type ticketEntry struct {
	nonce    [16]byte
	deadline time.Time
}

type ticketHeap []ticketEntry

func (h ticketHeap) Len() int           { return len(h) }
func (h ticketHeap) Less(i, j int) bool { return h[i].deadline.Before(h[j].deadline) }
func (h ticketHeap) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *ticketHeap) Push(x any)        { *h = append(*h, x.(ticketEntry)) }
func (h *ticketHeap) Pop() any {
	old := *h
	x := old[len(old)-1]
	*h = old[:len(old)-1]
	return x
}

func newTicketBook(n int) *ticketBook {
	return &ticketBook{max: n, nonces: make(map[[16]byte]string)}
}

func (b *ticketBook) sweep(now time.Time) {
	for len(b.order) > 0 && !now.Before(b.order[0].deadline) {
		delete(b.nonces, heap.Pop(&b.order).(ticketEntry).nonce)
	}
}

func (b *ticketBook) add(nonce [16]byte, deadline time.Time, word string) {
	b.nonces[nonce] = word
	heap.Push(&b.order, ticketEntry{nonce, deadline})
}

// claim notes that a ticket was presented. It fails when it was before, or was given up.
func (b *ticketBook) claim(nonce [16]byte, deadline, now time.Time) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.sweep(now)
	if err := b.reason(nonce); err != nil {
		return err
	}
	if len(b.nonces) >= b.max {
		return fmt.Errorf("%w: %d tickets are remembered until their deadlines", ErrLimit, b.max)
	}
	b.add(nonce, deadline, "")
	return nil
}

// bury makes a ticket that has not been presented worthless. A quarter of the book is kept free of such entries.
func (b *ticketBook) bury(nonce [16]byte, deadline, now time.Time, reason string) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.sweep(now)
	if _, known := b.nonces[nonce]; known {
		return nil
	}
	if len(b.nonces) >= b.max/4*3 {
		return fmt.Errorf("%w: %d tickets are remembered until their deadlines", ErrLimit, len(b.nonces))
	}
	if reason == "" {
		reason = "given up before it was presented"
	}
	b.add(nonce, deadline, reason)
	return nil
}

// void buries a ticket that nobody has presented, and tells of one that somebody has.
func (b *ticketBook) void(nonce [16]byte, deadline, now time.Time, reason string) (presented bool, err error) {
	b.mu.Lock()
	b.sweep(now)
	word, known := b.nonces[nonce]
	b.mu.Unlock()
	if known {
		return word == "", nil
	}
	if err := b.bury(nonce, deadline, now, reason); err != nil {
		return false, err
	}
	return b.buried(nonce, now) == "", nil // it may have been presented in between
}

// check says why a ticket cannot be presented, without claiming it.
func (b *ticketBook) check(nonce [16]byte, now time.Time) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.sweep(now)
	return b.reason(nonce)
}

// reason is why a ticket is worth nothing; nil: it is. b.mu is held.
func (b *ticketBook) reason(nonce [16]byte) error {
	word, known := b.nonces[nonce]
	switch {
	case !known:
		return nil
	case word != "":
		return fmt.Errorf("%w: %s", ErrTicketUsed, word)
	}
	return ErrTicketUsed
}

// buried answers why a ticket was given up, "" if it was not.
func (b *ticketBook) buried(nonce [16]byte, now time.Time) string {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.sweep(now)
	return b.nonces[nonce]
}

// used gives what is remembered, for a successor.
func (b *ticketBook) used(now time.Time) []UsedTicket {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.sweep(now)
	out := make([]UsedTicket, 0, len(b.order))
	for _, t := range b.order {
		out = append(out, UsedTicket{Nonce: t.nonce[:], DeadlineMS: t.deadline.UnixMilli(), Word: b.nonces[t.nonce]})
	}
	return out
}

// load remembers what a predecessor did.
func (b *ticketBook) load(tickets []UsedTicket, now time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, t := range tickets {
		// Rounded up: a ticket must not be forgotten before it expires.
		if deadline := time.UnixMilli(t.DeadlineMS + 1); len(t.Nonce) == 16 && now.Before(deadline) {
			if _, known := b.nonces[[16]byte(t.Nonce)]; !known {
				b.add([16]byte(t.Nonce), deadline, t.Word)
			}
		}
	}
}

func (b *ticketBook) len() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.nonces)
}
