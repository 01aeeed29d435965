package transfer

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/headrace/headrace/transfer/ticket"
)

// An engine whose tensor-parallel ranks are processes of their own has a client of its own, which presents and binds, and
// one for each rank: a member, which lends that rank's memory and pushes from it. Clients come and go in any order; an
// engine and its members find each other by the engine's id and by their owner.

var (
	// ErrRanksMissing says that a member has not lent its region yet: try again.
	ErrRanksMissing = errors.New("the engine's ranks are not all here")
	// ErrDenied says that an engine is another owner's.
	ErrDenied = errors.New("not allowed")
)

// AttachAs is Attach for an engine of an owner: members of an engine have its owner.
func (e *Engine) AttachAs(engineID string, owner uint32, ev func(Event)) (*Client, error) {
	if engineID == "" || len(engineID) > ticket.IDMax {
		return nil, fmt.Errorf("%w: engine id of %d bytes, need 1 to %d", ErrInvalid, len(engineID), ticket.IDMax)
	}
	if ev == nil {
		return nil, fmt.Errorf("%w: no event function", ErrInvalid)
	}
	c, err := e.addClient(engineID, owner, ev)
	if err == nil {
		e.openParked(engineID)
	}
	return c, err
}

func (e *Engine) addClient(engineID string, owner uint32, ev func(Event)) (*Client, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	switch {
	case e.closed:
		return nil, ErrClosed
	case e.clients[engineID] != nil:
		return nil, fmt.Errorf("attach engine %q: %w", engineID, ErrAttached)
	case len(e.clients) >= e.cfg.Limits.Clients:
		return nil, fmt.Errorf("attach engine %q: %w: %d engines", engineID, ErrLimit, len(e.clients))
	}
	c := &Client{
		e: e, id: engineID, owner: owner, ev: ev, gone: make(chan struct{}), regions: make(map[RegionID]*Region),
		leases: make(map[LeaseID]*lease), nonces: make(map[[16]byte][]*lease),
	}
	e.clients[engineID] = c
	e.drain.arrive(engineID)
	return c, nil
}

// Join makes the client a member of an engine, which may attach later, and again. It may be called before the client has
// lent anything.
func (c *Client) Join(engineID string) error {
	c.mu.Lock()
	used := len(c.regions) > 0 || len(c.leases) > 0
	c.mu.Unlock()
	e := c.e
	e.mu.Lock()
	defer e.mu.Unlock()
	engine := e.clients[engineID]
	switch {
	case engineID == "" || len(engineID) > ticket.IDMax || engineID == c.id:
		return fmt.Errorf("%w: join engine %q: need another engine's id of 1 to %d bytes", ErrInvalid, engineID, ticket.IDMax)
	case c.MemberOf() != "":
		return fmt.Errorf("%w: %q is a member of %q already", ErrInvalid, c.id, c.MemberOf())
	case used:
		return fmt.Errorf("%w: join engine %q before lending memory", ErrInvalid, engineID)
	case engine != nil && engine.MemberOf() != "":
		return fmt.Errorf("%w: %q is a member of %q itself: join that one", ErrInvalid, engineID, engine.MemberOf())
	case engine != nil && engine.owner != c.owner:
		return fmt.Errorf("%w: engine %q belongs to user %d, its member %q to user %d", ErrDenied, engineID, engine.owner, c.id, c.owner)
	}
	c.of.Store(&engineID)
	return nil
}

// MemberOf is the engine that the client is a member of, "" if it is one by itself.
func (c *Client) MemberOf() string {
	if of := c.of.Load(); of != nil {
		return *of
	}
	return ""
}

// alone refuses members what is their engine's.
func (c *Client) alone() error {
	if of := c.MemberOf(); of != "" {
		return fmt.Errorf("%w: %q is a member of engine %q, which presents and binds", ErrInvalid, c.id, of)
	}
	return nil
}

// pushed finds the lease that a client pushes for: its own, or its engine's.
func (c *Client) pushed(id LeaseID) (*sourceLease, error) {
	of := c.MemberOf()
	if of == "" {
		return c.source(id)
	}
	engine := c.e.client(of)
	if engine == nil || engine.owner != c.owner {
		return nil, fmt.Errorf("%w: %d: engine %q is not attached", ErrUnknownLease, id, of)
	}
	return engine.source(id)
}

// revocable finds a lease that a client may revoke: its own, or one of its engine's that it pushes for.
func (c *Client) revocable(id LeaseID) (*lease, error) {
	if c.MemberOf() == "" {
		return c.lease(id)
	}
	src, err := c.pushed(id)
	if err == nil {
		_, err = src.shardsOf(c)
	}
	if err != nil {
		return nil, err
	}
	return &src.lease, nil
}

// shardsOf are the numbers, from 1 on, of a lease's regions that a member has lent; nil of who may push from all.
func (l *sourceLease) shardsOf(by *Client) (own []uint32, err error) {
	if by == l.client {
		return nil, nil
	}
	for i, r := range l.regions {
		if r.client == by {
			own = append(own, uint32(i)+1)
		}
	}
	if own == nil {
		return nil, fmt.Errorf("%w: no region of lease %d is of %q", ErrInvalid, l.id, by.id)
	}
	return own, nil
}

// lent finds the regions of a request: those it names, or all of the engine's members in order of rank.
func (c *Client) lent(ids []RegionID) ([]*Region, error) {
	if len(ids) == 0 {
		return c.ranks()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.shards(ids)
}

// ranks gives the members' regions, one a rank.
func (c *Client) ranks() ([]*Region, error) {
	var members []*Client
	c.e.mu.Lock()
	for _, m := range c.e.clients {
		if m.MemberOf() == c.id && m.owner == c.owner {
			members = append(members, m)
		}
	}
	c.e.mu.Unlock()
	var rs []*Region
	for _, m := range members {
		m.mu.Lock()
		for _, r := range m.regions {
			rs = append(rs, r)
		}
		m.mu.Unlock()
	}
	rs = slices.DeleteFunc(rs, (*Region).retiring)
	if len(rs) == 0 {
		return nil, fmt.Errorf("%w: no member of engine %q has lent memory yet: try again, or name regions", ErrRanksMissing, c.id)
	}
	slices.SortFunc(rs, func(a, b *Region) int {
		return cmp.Or(cmp.Compare(a.layout.TPRank, b.layout.TPRank), cmp.Compare(a.id, b.id))
	})
	return rs, c.checkRanks(rs)
}

// checkRanks wants one region of every rank. The regions are in order of rank.
func (c *Client) checkRanks(rs []*Region) error {
	size := rs[0].layout.TPSize
	if size > ShardsMax {
		return fmt.Errorf("%w: %d ranks, at most %d", ErrPlan, size, ShardsMax)
	}
	var missing []string
	next := uint32(0)
	for i, r := range rs {
		if i > 0 && r.layout.TPRank == rs[i-1].layout.TPRank {
			return fmt.Errorf("%w: rank %d is lent twice, by %q and %q: lend one region a rank", ErrPlan, r.layout.TPRank, rs[i-1].client.id, r.client.id)
		}
		for ; next < min(r.layout.TPRank, size); next++ {
			missing = append(missing, fmt.Sprint(next))
		}
		next = r.layout.TPRank + 1
	}
	for ; next < size; next++ {
		missing = append(missing, fmt.Sprint(next))
	}
	if len(missing) > 0 {
		return fmt.Errorf("%w: rank %s of %d of engine %q has not lent memory yet: try again", ErrRanksMissing, strings.Join(missing, ", "), size, c.id)
	}
	return nil
}

// orMissing says of a member's region that went just now what is said of one that is not there.
func orMissing(err error, ids []RegionID) error {
	if len(ids) == 0 && errors.Is(err, ErrUnknownRegion) {
		return fmt.Errorf("%w: one is leaving: try again", ErrRanksMissing)
	}
	return err
}

// Idle says that nothing of an engine is under way here: it has no lease, nor has the one that it is a member of, and its
// memory is in none. So it is where no such engine is attached.
func (e *Engine) Idle(engineID string) bool {
	c := e.client(engineID)
	if c == nil {
		return true
	}
	if of := c.MemberOf(); of != "" {
		if engine := e.client(of); engine != nil && !engine.idle() {
			return false
		}
	}
	return c.idle()
}

func (c *Client) idle() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, r := range c.regions {
		if r.used() {
			return false
		}
	}
	return len(c.leases) == 0
}
