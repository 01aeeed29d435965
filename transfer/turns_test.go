package transfer

import (
	"math/rand/v2"
	"testing"
)

// However many leases engines have and however large their pieces are, engines that always have something to send get
// equal shares, up to what is in their hands, and so do the leases of one.
func TestTurnsAreFair(t *testing.T) {
	for seed := range uint64(50) {
		rng := rand.New(rand.NewPCG(seed, 1))
		lanes := 1 + rng.IntN(6)
		q := newTurns()
		sent, of := map[*Client]int64{}, map[*sourceLease]int64{}
		size := map[*Client]uint32{}
		var clients []*Client
		for range 2 + rng.IntN(4) {
			c := &Client{}
			clients = append(clients, c)
			size[c] = 1 + rng.Uint32N(PieceMax)
			for range 1 + rng.IntN(100) {
				l := &sourceLease{lease: lease{client: c}}
				of[l] = 0
				q.push(l)
			}
		}
		var total int64
		var carried []*sourceLease
		const rounds = 20000
		for range rounds {
			// A single lease of an engine may be on several lanes, as when a lane helps with it.
			l := q.pop()
			for range 1 + rng.IntN(laneQuantum) {
				q.charge(l.client, size[l.client])
				sent[l.client] += int64(size[l.client])
				of[l] += int64(size[l.client])
				total += int64(size[l.client])
			}
			q.push(l)
			if carried = append(carried, l); len(carried) == lanes {
				i := rng.IntN(lanes)
				q.done(carried[i])
				carried = append(carried[:i], carried[i+1:]...)
			}
		}
		fair := total / int64(len(clients))
		for _, c := range clients {
			if d := sent[c] - fair; max(d, -d) > 8*laneQuantum*PieceMax {
				t.Errorf("seed %d: an engine sent %d of %d bytes, fair were %d", seed, sent[c], total, fair)
			}
		}
		for l, n := range of {
			leases := int64(0)
			for other := range of {
				if other.client == l.client {
					leases++
				}
			}
			if mean := sent[l.client] / leases; mean > 16*laneQuantum*int64(size[l.client]) && n < mean/2 || n > 2*mean+laneQuantum*PieceMax {
				t.Errorf("seed %d: a lease sent %d bytes, its engine's %d send %d on average", seed, n, leases, mean)
			}
		}
	}
}

// What has nothing to send leaves nothing behind.
func TestTurnsForget(t *testing.T) {
	q := newTurns()
	c := &Client{}
	a, b := &sourceLease{lease: lease{client: c}}, &sourceLease{lease: lease{client: c}}
	if !q.push(a) || q.push(a) || !q.push(b) {
		t.Error("a lease waits twice")
	}
	for _, want := range []*sourceLease{a, b} {
		if got := q.pop(); got != want {
			t.Error("not first come, first served")
		}
		q.charge(c, PieceMax)
	}
	q.done(a)
	q.done(b)
	if !q.empty() || len(q.of) != 0 || len(q.in) != 0 {
		t.Errorf("left behind: %+v", q)
	}
}
