package transporttest

import (
	"errors"
	"fmt"
	"sync"

	"github.com/headrace/headrace/transfer"
)

// grantingLink is a one-sided fake link whose receiving end can take the right to write back from one lease, as memory windows
// do: the lane on which such a write comes all the same fails.
type grantingLink struct{ *fakeLink }

var _ transfer.Granter = grantingLink{}

// fakeGrant is a lease's right to write. Each step of a piece is made under mu.
type fakeGrant struct {
	link  *fakeLink
	lease transfer.LeaseID
	parts []transfer.Part

	mu        sync.RWMutex
	withdrawn bool
}

var errFakeAccess = errors.New("fake remote access error")

// Grant implements transfer.Granter.
func (l grantingLink) Grant(lease transfer.LeaseID, parts []transfer.Part) (transfer.Grant, error) {
	g := &fakeGrant{link: l.fakeLink, lease: lease, parts: parts}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.grants == nil {
		l.grants = make(map[transfer.LeaseID]*fakeGrant)
	}
	l.grants[lease] = g
	return g, nil
}

// Fencing implements transfer.Granter.
func (grantingLink) Fencing() string { return "by taking back the fake right" }

// Keys implements transfer.Grant.
func (g *fakeGrant) Keys() (keys [][]byte) {
	for _, p := range g.parts {
		keys = append(keys, g.key(p.Region))
	}
	return keys
}

func (g *fakeGrant) key(r *transfer.Region) []byte {
	return fmt.Appendf(nil, "fake region %d for lease %d", r.ID(), g.lease)
}

// Withdraw implements transfer.Grant.
func (g *fakeGrant) Withdraw() {
	g.mu.Lock()
	g.withdrawn = true
	g.mu.Unlock()
	g.link.mu.Lock()
	defer g.link.mu.Unlock()
	delete(g.link.grants, g.lease)
}

// Release implements transfer.Grant.
func (g *fakeGrant) Release() { g.Withdraw() }

// allow makes one step if the lease may still be written to, and the step keeps to what was granted.
func (g *fakeGrant) allow(landing *transfer.Landing, at, n uint64, step func()) error {
	g.mu.RLock()
	defer g.mu.RUnlock()
	for _, p := range g.parts {
		if p.Region == landing.Dst && at >= p.First && at+n <= p.End && !g.withdrawn {
			step()
			return nil
		}
	}
	return errFakeAccess
}

func (l *fakeLink) grantOf(lease transfer.LeaseID) *fakeGrant {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.grants[lease]
}
