package transfer

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"
)

// Status is a snapshot.
func (e *Engine) Status() Status {
	t := &e.totals
	s := Status{
		NodeID: e.cfg.NodeID, Epoch: e.cfg.Epoch, DataAddr: e.DataAddr(), Checksum: e.cfg.Checksum.String(), RateLimitBps: e.rate.get(), Tickets: e.book.len(), Waiting: e.parking.len(), Draining: e.Draining(),
		Transports: e.transportStatus(), Engines: []ClientStatus{}, Leases: []LeaseStatus{}, Channels: []ChannelStatus{},
		Totals: Totals{
			BytesSent: t.sent.Load(), BytesLanded: t.landed.Load(), PiecesDuplicate: t.duplicate.Load(), PiecesDiscarded: t.discarded.Load(),
			LeasesPresented: t.presented.Load(), LeasesSettled: t.settled.Load(), LeasesRevoked: t.revoked.Load(), LeasesExpired: t.expired.Load(),
			TicketsRefused: t.refused.Load(), TicketsRecalled: t.recalled.Load(), ChannelsOpened: t.opened.Load(), ChannelsDied: t.died.Load(), HandshakesFailed: t.handshakes.Load(),
			FencesForced: t.forced.Load(), LeasesUngranted: t.ungranted.Load(), PiecesVerified: t.verified.Load(), PiecesAltered: t.altered.Load(), PiecesResent: t.resent.Load(), LeasesMoved: t.moved.Load(), PresentedAgain: t.again.Load(), VersionRefusals: t.skews.Load(),
		},
	}
	e.mu.Lock()
	clients := make([]*Client, 0, len(e.clients))
	for _, c := range e.clients {
		clients = append(clients, c)
	}
	channels := make([]*channel, 0, len(e.channels))
	for c := range e.channels {
		channels = append(channels, c)
	}
	for node, p := range e.skewed {
		s.Unusable = append(s.Unusable, PeerRefusal{Node: node, Reason: p.err.Error(), Since: p.since})
	}
	for node, f := range e.faults {
		if e.skewed[node] == nil && time.Since(f.last) <= faultsLast {
			s.Unusable = append(s.Unusable, PeerRefusal{Node: node, Reason: f.reason, Since: f.since, Tries: f.tries})
		}
	}
	e.mu.Unlock()
	slices.SortFunc(s.Unusable, func(a, b PeerRefusal) int { return cmp.Compare(a.Node, b.Node) })
	for _, c := range clients {
		cs, leases := c.status()
		s.Engines = append(s.Engines, cs)
		for _, l := range leases {
			s.Leases = append(s.Leases, l.status())
		}
	}
	for _, c := range channels {
		s.Channels = append(s.Channels, c.status())
	}
	slices.SortFunc(s.Engines, func(a, b ClientStatus) int { return cmp.Compare(a.EngineID, b.EngineID) })
	slices.SortFunc(s.Leases, func(a, b LeaseStatus) int { return cmp.Compare(a.ID, b.ID) })
	slices.SortFunc(s.Channels, func(a, b ChannelStatus) int {
		return cmp.Or(cmp.Compare(a.PeerNode, b.PeerNode), a.Since.Compare(b.Since))
	})
	return s
}

// transportStatus adds what the transports have to say now.
func (e *Engine) transportStatus() []TransportStatus {
	list := slices.Clone(e.refused)
	for _, t := range e.cfg.Transports {
		p, ok := t.(Porter)
		i := slices.IndexFunc(list, func(s TransportStatus) bool { return s.Name == t.Name() })
		if ok && i >= 0 {
			list[i].Ports = p.Ports()
		}
	}
	return list
}

func (c *Client) status() (ClientStatus, []*lease) {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := ClientStatus{EngineID: c.id, MemberOf: c.MemberOf(), Leases: len(c.leases), Regions: []RegionStatus{}}
	for _, r := range c.regions {
		s.Regions = append(s.Regions, r.status())
	}
	slices.SortFunc(s.Regions, func(a, b RegionStatus) int { return cmp.Compare(a.ID, b.ID) })
	leases := make([]*lease, 0, len(c.leases))
	for _, l := range c.leases {
		leases = append(leases, l)
	}
	return s, leases
}

func (l *lease) status() LeaseStatus {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := LeaseStatus{ID: l.id, Side: l.side(), State: l.state.String(), Engine: l.client.id, Tokens: l.tokens, Deadline: l.ticket.Deadline}
	s.PeerNode = l.ticket.PNode
	if l.src != nil {
		s.PeerNode = l.ticket.DNode
	}
	if l.geom.pairs != nil {
		s.UnitsWanted, s.RegionPairs = l.geom.wanted, len(l.geom.pairs)
		if l.src != nil {
			s.UnitsDone = l.src.posted.n
		} else {
			s.UnitsDone = l.dst.landed.n
		}
	}
	return s
}

// downWords says why rails are down; where they do not, the last lane that failed does.
func downWords(rails []RailStatus, last error) string {
	var words []string
	for i := range rails {
		if rails[i].State == "down" {
			words = append(words, rails[i].Name+": "+rails[i].Why)
		}
	}
	if len(words) == 0 && last != nil {
		words = append(words, last.Error())
	}
	return strings.Join(words, "; ")
}

func (c *channel) status() ChannelStatus {
	rails := c.railStatus()
	wire := c.gauge.Wire() // asks the kernel: not under the lock
	c.mu.Lock()
	defer c.mu.Unlock()
	s := ChannelStatus{
		PeerNode: c.peer.NodeID, PeerAddr: c.addr, PeerEpoch: c.peer.Epoch, Leaving: c.leaving, Dialled: c.dialled, Transport: c.transport, Why: c.why, Fencing: c.fencing(), Lanes: c.lanes.n,
		LanesUp: int(c.lanes.up.Load()), Since: c.since, BacklogBytes: uint64(max(c.backlog.Load(), 0)), RTTMicros: float64(c.rttNS.Load()) / 1e3,
		BytesSent: c.sent.Load(), BytesLanded: c.landed.Load(), Errors: c.errs.Load(), Altered: c.altered.Load(), Redialled: c.redialled.Load(),
	}
	if _, railed := c.link.(Railed); railed {
		s.Lanes = 0
		for i := range rails {
			if rails[i].State != "spare" {
				s.Lanes += rails[i].Lanes
			}
		}
	}
	s.Rails, s.Carrier, s.Fallbacks = rails, c.carrier(), c.fallbacks.Load()
	if s.Carrier != "" && s.Carrier != s.Transport {
		s.Why += fmt.Sprintf("; %s carries at present, because no lane of %s is up: %s", s.Carrier, s.Transport, downWords(rails, c.lastErr))
	}
	s.Wire = wire
	s.SentBps, s.LandedBps, s.SpeedBps = c.rates.get()
	s.Methods = append(c.sending.Status(), c.receiving.Status()...)
	if c.reason != nil {
		s.LastError = c.reason.Error()
	}
	return s
}
