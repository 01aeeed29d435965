package transfer

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/headrace/headrace/transfer/ticket"
)

// Client is one attached inference engine: its regions and its leases. Or it is a member of one: then it has regions alone.
type Client struct {
	e     *Engine
	id    string
	owner uint32
	of    atomic.Pointer[string] // the engine it is a member of
	ev    func(Event)
	gone  chan struct{} // closed when Close is through

	evMu sync.Mutex

	mu      sync.Mutex // nothing is locked under it but regions
	closed  bool
	regions map[RegionID]*Region
	leases  map[LeaseID]*lease
	nonces  map[[16]byte][]*lease
}

func (c *Client) emit(ev Event) {
	c.evMu.Lock()
	defer c.evMu.Unlock()
	c.ev(ev)
}

// add makes a lease known. A source lease comes with its regions, which must not go away under it.
func (c *Client) add(l *lease, regions []*Region) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return ErrClientClosed
	}
	if len(c.leases) >= c.e.cfg.Limits.LeasesPerClient {
		return fmt.Errorf("%w: engine %q has %d leases", ErrLimit, c.id, len(c.leases))
	}
	for _, other := range c.nonces[l.ticket.Nonce] {
		if (other.src != nil) == (l.src != nil) {
			return ErrTicketUsed
		}
	}
	if err := holdAll(regions, l); err != nil {
		return err
	}
	l.regions = regions
	c.leases[l.id] = l
	c.nonces[l.ticket.Nonce] = append(c.nonces[l.ticket.Nonce], l)
	return nil
}

func (c *Client) drop(l *lease) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.leases, l.id)
	rest := c.nonces[l.ticket.Nonce][:0]
	for _, other := range c.nonces[l.ticket.Nonce] {
		if other != l {
			rest = append(rest, other)
		}
	}
	if c.nonces[l.ticket.Nonce] = rest; len(rest) == 0 {
		delete(c.nonces, l.ticket.Nonce)
	}
}

func (c *Client) lease(id LeaseID) (*lease, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if l := c.leases[id]; l != nil {
		return l, nil
	}
	return nil, fmt.Errorf("%w: %d", ErrUnknownLease, id)
}

func (c *Client) source(id LeaseID) (*sourceLease, error) {
	l, err := c.lease(id)
	if err != nil {
		return nil, err
	}
	if l.src == nil {
		return nil, fmt.Errorf("%w: lease %d is the target's", ErrInvalid, id)
	}
	return l.src, nil
}

// target finds the presented lease of a ticket.
func (c *Client) target(nonce [16]byte) *targetLease {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, l := range c.nonces[nonce] {
		if l.dst != nil {
			return l.dst
		}
	}
	return nil
}

// hasSource tells whether a living lease presents a ticket.
func (c *Client) hasSource(nonce [16]byte) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.ContainsFunc(c.nonces[nonce], func(l *lease) bool { return l.src != nil })
}

// AddRegion takes over fd, also when it fails. The descriptor must be a memfd sealed against shrinking (F_SEAL_SHRINK),
// at least size bytes long, and l must fit in size bytes.
func (c *Client) AddRegion(fd int, size uint64, l Layout, flags RegionFlags) (RegionID, error) {
	r, err := openRegion(RegionID(c.e.nextRegion.Add(1)), fd, size, l, flags)
	if err != nil {
		return 0, err
	}
	return c.addRegion(r, flags)
}

// addRegion registers a region and makes it known. It is closed where that fails.
func (c *Client) addRegion(r *Region, flags RegionFlags) (_ RegionID, err error) {
	if err := r.register(c.e.usable, c.e.spare() != nil); err != nil {
		return 0, errors.Join(err, r.close())
	}
	for transport, err := range r.refusals {
		c.e.log.Warn("region goes over another transport", "engine", c.id, "region", r.id, "transport", transport, "instead", c.e.spare().Name(), "error", err)
	}
	c.mu.Lock()
	switch {
	case c.closed:
		err = ErrClientClosed
	case len(c.regions) >= c.e.cfg.Limits.RegionsPerClient:
		err = fmt.Errorf("%w: engine %q has %d regions", ErrLimit, c.id, len(c.regions))
	default:
		r.client = c
		c.regions[r.id] = r
	}
	c.mu.Unlock()
	if err != nil {
		return 0, errors.Join(err, r.close())
	}
	if flags&RegionPopulate != 0 {
		c.e.spawn(r.populate)
	}
	return r.id, nil
}

// shards finds the regions of a set. c.mu is held.
func (c *Client) shards(ids []RegionID) ([]*Region, error) {
	if len(ids) == 0 || len(ids) > ShardsMax {
		return nil, fmt.Errorf("%w: %d regions, need 1 to %d", ErrInvalid, len(ids), ShardsMax)
	}
	rs := make([]*Region, len(ids))
	for i, id := range ids {
		if rs[i] = c.regions[id]; rs[i] == nil {
			return nil, fmt.Errorf("%w: %d", ErrUnknownRegion, id)
		}
		if slices.Contains(ids[:i], id) {
			return nil, fmt.Errorf("%w: region %d is listed twice", ErrInvalid, id)
		}
	}
	return rs, nil
}

// RemoveRegion revokes the region's leases, waits for their fences and unmaps it.
func (c *Client) RemoveRegion(id RegionID) error {
	c.mu.Lock()
	r := c.regions[id]
	c.mu.Unlock()
	if r == nil || !r.retire("its region was removed") {
		return fmt.Errorf("%w: %d", ErrUnknownRegion, id)
	}
	c.mu.Lock()
	delete(c.regions, id)
	c.mu.Unlock()
	return r.close()
}

// Present (P) presents a ticket to D's daemon. EventBound, EventRefused or EventEnded answers.
func (c *Client) Present(r PresentReq) (LeaseID, error) {
	e := c.e
	t, err := e.verify(r.Ticket)
	if err != nil {
		return 0, err
	}
	if t.PNode != e.cfg.NodeID || t.PEngine != c.id {
		return 0, fmt.Errorf("%w: prefill engine %q on %q, this is %q on %q", ErrWrongTicket, t.PEngine, t.PNode, c.id, e.cfg.NodeID)
	}
	if err := c.alone(); err != nil {
		return 0, err
	}
	regions, err := c.lent(r.Regions)
	if err != nil {
		return 0, err
	}
	if err := checkShards(layoutsOf(regions), false); err != nil {
		return 0, err
	}
	lay := &regions[0].layout
	if lay.Fingerprint != t.Fingerprint {
		return 0, fmt.Errorf("%w: the ticket is for model %x, the region holds %x", ErrWrongTicket, t.Fingerprint[:6], lay.Fingerprint[:6])
	}
	if len(r.Meta) > e.cfg.Limits.MetaBytes {
		return 0, fmt.Errorf("%w: %d bytes of meta, at most %d", ErrLimit, len(r.Meta), e.cfg.Limits.MetaBytes)
	}
	blocks := declared{need: blocksOf(r.Tokens, lay.BlockTokens)}
	if r.Tokens == 0 || len(r.Blocks) > int(blocks.need) || int(blocks.need) > e.cfg.Limits.Blocks {
		return 0, fmt.Errorf("%w: %d blocks of %d tokens for %d tokens, at most %d", ErrInvalid, len(r.Blocks), lay.BlockTokens, r.Tokens, e.cfg.Limits.Blocks)
	}
	if err := blocks.extend(r.Blocks, lay.Blocks); err != nil {
		return 0, err
	}
	if why := e.book.buried(t.Nonce, e.now()); why != "" {
		return 0, fmt.Errorf("%w: %s", ErrTicketUsed, why)
	}
	if e.Draining() {
		return 0, ErrDraining
	}
	l := &sourceLease{
		addr: r.Peer, blocks: blocks,
		meta: append([]byte(nil), r.Meta...), flying: make(map[uint32]*flight), laneSent: make(map[int]uint64),
	}
	if err := e.initLease(&l.lease, c, t, r.Ticket, r.Tokens); err != nil {
		return 0, err
	}
	l.src = l
	if err := c.add(&l.lease, regions); err != nil {
		e.leases.Add(-1)
		return 0, orMissing(err, r.Regions)
	}
	l.startTimer()
	e.totals.presented.Add(1)
	if !e.spawn(func() { l.present() }) {
		l.fail("%v", ErrClosed)
	}
	return l.id, nil
}

// spawn runs f in a goroutine that Close waits for, unless the engine is closed.
func (e *Engine) spawn(f func()) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return false
	}
	e.wg.Go(f)
	return true
}

// present finds the way to D's daemon and presents the ticket there.
func (l *sourceLease) present() {
	l.e.cfg.Pauses.Wait(PausePresent, l.guard.stop)
	ctx, cancel := context.WithCancel(l.e.ctx)
	defer cancel()
	stop := make(chan struct{})
	defer close(stop)
	go func() {
		select {
		case <-l.guard.stop:
			cancel()
		case <-stop:
		}
	}()
	m := presentMsg{ticket: l.raw, layouts: layoutsOf(l.regions), tokens: l.tokens, meta: l.meta}
	self := l.ticket.DNode == l.e.cfg.NodeID
	if self {
		l.e.awaitEngines(ctx)
	}
	// A channel that dies between being found and being used is replaced, a few times.
	for try := 0; ; try++ {
		if self && l.e.Draining() {
			l.moved()
			return
		}
		ch, err := l.e.channelTo(ctx, l.ticket.DNode, l.addr)
		if err == nil {
			if err = ch.addSource(l, &m); err == nil {
				return
			}
		}
		if try >= openTries || ctx.Err() != nil || !errors.Is(err, ErrChannel) {
			l.fail("present ticket: %v", err)
			return
		}
	}
}

// Push (P) sends units whose KV is complete. It may be called before EventBound. EventPushed with seq answers when all of
// them landed. The blocks' bytes must not change until the lease ended. A member pushes for its engine's lease, from its
// own regions alone, and is answered itself.
func (c *Client) Push(id LeaseID, units []Unit, seq uint64) error {
	l, err := c.pushed(id)
	if err != nil {
		return err
	}
	return l.push(c, units, seq, false)
}

// PushNow is Push by a goroutine that may as well send a small push itself. It waits for no peer either.
func (c *Client) PushNow(id LeaseID, units []Unit, seq uint64) error {
	l, err := c.pushed(id)
	if err != nil {
		return err
	}
	return l.push(c, units, seq, true)
}

// Handoff (P) gives the record that D gets when the lease settles. It is sent when every wanted unit has been.
func (c *Client) Handoff(id LeaseID, record []byte) error {
	l, err := c.source(id)
	if err != nil {
		return err
	}
	return l.giveHandoff(record)
}

// Bind (D) binds a presented ticket to blocks. The lease is that of EventPresented.
func (c *Client) Bind(r BindReq) (LeaseID, error) {
	t, err := ticket.Decode(r.Ticket)
	if err != nil {
		return 0, err
	}
	l := c.target(t.Nonce)
	if l == nil {
		return 0, ErrNotPresented
	}
	regions, err := c.lent(r.Regions)
	if err != nil {
		return 0, err
	}
	c.mu.Lock()
	if l.regions != nil {
		err = fmt.Errorf("%w: it is bound", ErrTicketUsed)
	} else if err = holdAll(regions, &l.lease); err == nil {
		l.regions = regions // from now on who takes a region back ends the lease
	}
	c.mu.Unlock()
	if err != nil {
		return 0, orMissing(err, r.Regions)
	}
	m, err := l.bind(regions, &r)
	if err != nil {
		if !errors.Is(err, ErrTicketUsed) {
			c.mu.Lock()
			l.regions = nil
			c.mu.Unlock()
			releaseAll(regions, &l.lease)
		}
		return 0, err
	}
	tell := func() { l.ch.out.send(m.frame(l.sourceID)) }
	if c.e.cfg.Pauses == nil {
		tell()
		return l.id, nil
	}
	c.e.spawn(func() {
		c.e.cfg.Pauses.Wait(PauseBind, l.guard.stop)
		tell()
	})
	return l.id, nil
}

// Refuse (D) answers a presented ticket with no. A ticket that has not been presented yet will be refused when it is.
func (c *Client) Refuse(b []byte, reason string) error {
	t, err := ticket.Decode(b)
	if err != nil {
		return err
	}
	if reason == "" {
		reason = "refused by the decode engine"
	}
	if l := c.target(t.Nonce); l != nil {
		if !l.finish(outcome{state: LeaseRevoked, kind: EventRefused, reason: reason}) {
			return ErrLeaseEnded
		}
		return nil
	}
	if t, err = c.e.verify(b); err != nil {
		return err
	}
	return c.e.book.bury(t.Nonce, t.Deadline, c.e.now(), reason)
}

// Revoke ends a lease. When it returns, no byte lands in its blocks and none is read from them any more; the peer is told.
// EventEnded was sent by then. A lease that has ended already gives ErrLeaseEnded or ErrUnknownLease: it is fenced too.
func (c *Client) Revoke(id LeaseID, reason string) error {
	l, err := c.revocable(id)
	if err != nil {
		return err
	}
	if !l.finish(outcome{state: LeaseRevoked, kind: EventEnded, reason: orReason(reason)}) {
		return fmt.Errorf("%w: %d", ErrLeaseEnded, id)
	}
	return nil
}

func orReason(reason string) string {
	if reason == "" {
		return "revoked"
	}
	return reason
}

// A ticket that is revoked by its nonce alone, before it is presented, is remembered this long.
const buriedLife = 10 * time.Minute

// RevokeTicket is Revoke for who knows the ticket only. A ticket that has not been presented yet will be refused when it is.
func (c *Client) RevokeTicket(nonce [16]byte, reason string) error {
	if err := c.alone(); err != nil {
		return err
	}
	c.mu.Lock()
	leases := append([]*lease(nil), c.nonces[nonce]...)
	c.mu.Unlock()
	if len(leases) == 0 {
		now := c.e.now()
		return c.e.book.bury(nonce, now.Add(buriedLife), now, orReason(reason))
	}
	for _, l := range leases {
		l.finish(outcome{state: LeaseRevoked, kind: EventEnded, reason: orReason(reason)})
	}
	return nil
}

// Close revokes all leases, drops all regions, and returns when everything is fenced and unmapped.
func (c *Client) Close() error { return c.close("the engine has left") }

func (c *Client) close(reason string) error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		<-c.gone
		return nil
	}
	c.closed = true
	var leases []*lease
	for _, l := range c.leases {
		leases = append(leases, l)
	}
	var regions []*Region
	for _, r := range c.regions {
		regions = append(regions, r)
	}
	clear(c.regions)
	c.mu.Unlock()
	if c.MemberOf() != "" { // it is its engine's leases that hear of it
		reason = fmt.Sprintf("rank process %q: %s", c.id, reason)
	}
	var wg sync.WaitGroup
	for _, l := range leases {
		wg.Go(func() { l.fail("%s", reason) })
	}
	wg.Wait()
	errs := make([]error, len(regions))
	for i, r := range regions {
		wg.Go(func() {
			if r.retire(reason) { // else RemoveRegion has it
				errs[i] = r.close()
			}
		})
	}
	wg.Wait()
	c.e.mu.Lock()
	if c.e.clients[c.id] == c {
		delete(c.e.clients, c.id)
	}
	c.e.mu.Unlock()
	close(c.gone)
	return errors.Join(errs...)
}
