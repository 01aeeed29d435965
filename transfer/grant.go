package transfer

import "fmt"

// Granter is a one-sided link at whose receiving end the right to write can be taken back from one lease alone.
type Granter interface {
	// Grant lets the other end write to parts of regions for one lease. It may wait for the device, not for the other end.
	// An error means that the lease has to do without: with the regions' own keys, and a fence that takes all lanes.
	Grant(lease LeaseID, parts []Part) (Grant, error)
	// Fencing says how leases that are bound at this end are fenced by force, and why not better.
	Fencing() string
}

// Grant is one lease's right to write. All methods may be called at any time, and more than once.
type Grant interface {
	// Keys are what the writer needs, one for each part, at most RegionKeyMax bytes each.
	Keys() [][]byte
	// Withdraw returns when no byte lands by this grant any more, whatever the writer does.
	Withdraw()
	// Release is Withdraw for a writer that has stopped: nobody waits for it.
	Release()
}

// Puller is a one-sided link of which one end may fetch what the other one sends.
type Puller interface {
	// Pulls says that what arrives at this end is fetched by it, under Landing's guard: nobody else writes here.
	Pulls() bool
	// Offers says that the other end fetches what this one sends.
	Offers() bool
	// Fetching lists the lanes on which something is being fetched for a lease.
	Fetching(lease LeaseID) []int
}

// pulls says that leases bound at this end are fetched by it.
func pulls(link Link) bool {
	p, can := link.(Puller)
	return can && p.Pulls()
}

// offers says that what this end sends is fetched by the other one.
func offers(link Link) bool {
	p, can := link.(Puller)
	return can && p.Offers()
}

// Part is a range of a region's bytes.
type Part struct {
	Region     *Region
	First, End uint64 // First == End: nothing of it
}

// grant asks the channel's link for a lease's right to write to blocks, nil where there is no such thing, and gives the
// keys that the writer is to be told.
func (c *channel) grant(l *targetLease, regions []*Region, blocks []uint32) (Grant, [][]byte) {
	keys := keysOf(regions, c.transport)
	g, can := c.currentLink().(Granter)
	if !can || pulls(c.currentLink()) {
		return nil, keys
	}
	parts := make([]Part, len(regions))
	for i, r := range regions {
		parts[i] = Part{Region: r}
		parts[i].First, parts[i].End = r.layout.span(blocks)
	}
	grant, err := g.Grant(l.id, parts)
	if err != nil {
		c.e.totals.ungranted.Add(1)
		c.e.log.Debug("a fence of this lease would take all lanes", "lease", l.id, "peer", c.peer.NodeID, "error", err)
		return nil, keys
	}
	return grant, grant.Keys()
}

// endGrant ends the writer's right to write of a lease that is fenced: the writer has stopped, and nothing of it is on its
// way, or the right was withdrawn before. It holds no lock.
func (l *targetLease) endGrant() {
	l.mu.Lock()
	g := l.grant
	l.grant = nil
	l.mu.Unlock()
	if g != nil {
		g.Release()
	}
}

// gone says that nothing of a fenced source is on its way over a one-sided lane.
func (s *laneSet) gone(l *sourceLease) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.closed || !s.carriesOneSided(l)
}

// awaitGone waits until nothing of a fenced source is on its way over a one-sided lane: those that carried it are through
// with its pieces, or dead at both ends. Its blocks are free before, as nothing reads them any more.
func (s *laneSet) awaitGone(l *sourceLease) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.watchers++
	defer func() { s.watchers-- }()
	for !s.closed && s.carriesOneSided(l) {
		s.cond.Wait()
	}
}

// carriesOneSided says that a one-sided lane that is up carries a lease. mu is held.
func (s *laneSet) carriesOneSided(l *sourceLease) bool {
	for lane, other := range s.carries {
		if at, up := s.at[lane]; up && other == l && at.link.OneSided() {
			return true
		}
	}
	return false
}

// forceTarget makes an end of what a one-sided writer may do to a lease's blocks. Where the writer was given a right of its
// own for the lease, that right is taken back, and only a lane on which it is used afterwards suffers.
// Where this end fetches by itself, it ends the lanes on which it does.
// Else nobody knows which lanes carry the lease, and all are aborted.
func (c *channel) forceTarget(l *targetLease, link Link, cause error) {
	l.mu.Lock()
	g := l.grant
	l.mu.Unlock()
	switch {
	case g != nil:
		g.Withdraw()
	case pulls(link):
		for _, lane := range link.(Puller).Fetching(l.id) {
			link.Abort(lane, cause)
		}
	default:
		for _, lane := range c.lanes.bar() {
			link.Abort(lane, cause)
		}
	}
	l.peerStopped()
}

func (c *channel) fencing() string {
	link := c.link
	if link == nil || !link.OneSided() {
		return ""
	}
	if g, can := link.(Granter); can {
		return g.Fencing()
	}
	return fmt.Sprintf("by aborting all lanes: transport %s has nothing better", c.transport)
}

// span is the range of bytes from the first to the last one of blocks in all layers, empty where there are none.
func (l *Layout) span(blocks []uint32) (first, end uint64) {
	if len(blocks) == 0 {
		return 0, 0
	}
	low, high := blocks[0], blocks[0]
	for _, b := range blocks[1:] {
		low, high = min(low, b), max(high, b)
	}
	end = l.offset(l.Layers-1, high, l.Planes-1, l.BlockTokens-1) // no stride is negative
	return l.offset(0, low, 0, 0), end + uint64(l.Heads-1)*l.HeadStride + uint64(l.HeadBytes)
}
