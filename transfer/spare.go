package transfer

import (
	"context"
	"fmt"
	"slices"
)

// The last rail of a channel: lanes of a transport that needs no network card of a kind (TCP), beside those of one over
// rails. They carry while the channel's own link has no lane, and always for leases with a region that its devices
// could not register. They are dialled when the channel opens, so that either end can change over without a word: pieces
// are counted by what they are, not by what brought them. What a fence needs is decided by lane: one-sided ones have to be
// drained, those of the spare link ask the lease's guard before each touch.

// spare is the transport that carries where another cannot, nil where there is no choice.
func (e *Engine) spare() Transport {
	var far []Transport
	for _, t := range e.usable {
		if !t.Local() {
			far = append(far, t)
		}
	}
	if len(far) < 2 {
		return nil
	}
	return far[len(far)-1]
}

// spareFor is the spare transport of this channel.
func (c *channel) spareFor() Transport {
	t := c.e.spare()
	if t == nil || c.local || t.Name() == c.transport || !slices.Contains(c.peer.Transports, t.Name()) {
		return nil
	}
	return t
}

// openSpare makes an empty link beside one over rails, nil beside others. When it fails it closes own.
func (c *channel) openSpare(ctx context.Context, own Link) (link Link, name string, err error) {
	t := c.spareFor()
	if _, railed := own.(Railed); t == nil || !railed {
		return nil, "", nil
	}
	if link, err = t.Dial(ctx, c.setupFor(0)); err != nil {
		own.Close()
		return nil, "", fmt.Errorf("set up %s beside %s: %w", t.Name(), c.transport, err)
	}
	if _, can := link.(Extender); !can || link.OneSided() {
		link.Close() // its lanes could not be had later, or could not be trusted beside the others
		return nil, "", nil
	}
	return link, t.Name(), nil
}

// needsSpare says whether a lease between regions with these keys is for the spare link alone.
func (c *channel) needsSpare(sources []*Region, keys [][]byte) bool {
	if c.spare == nil {
		return false // fixed since before the channel was ready
	}
	if len(keys) == 0 {
		return true
	}
	for _, k := range keys {
		if len(k) == 0 {
			return true
		}
	}
	return slices.ContainsFunc(sources, func(r *Region) bool { return r.refusals[c.transport] != nil })
}

// noteCarrier says so when another transport carries than before.
func (c *channel) noteCarrier() {
	c.mu.Lock()
	was := c.carried
	now := c.carrier()
	if now == "" || now == was || c.closed {
		c.mu.Unlock()
		return
	}
	c.carried = now
	cause := c.lastErr
	c.mu.Unlock()
	switch {
	case now != c.transport:
		c.fallbacks.Add(1)
		c.e.log.Warn("channel falls back", "peer", c.peer.NodeID, "from", c.transport, "to", now, "error", cause)
	case was != "":
		c.e.log.Info("channel is back on its rails", "peer", c.peer.NodeID, "transport", now)
	}
}

// carrier is the transport that carries, "" for none.
func (c *channel) carrier() string {
	switch {
	case c.lanes.up.Load() > 0:
		return c.transport
	case c.lanes.spareUp.Load() > 0:
		return c.spareName
	}
	return ""
}

// exchanged takes what the other end's transport says: during set-up, for who waits for it; later, for the link.
func (c *channel) exchanged(b []byte) error {
	if !c.setup.first {
		c.setup.first = true
		offer(c.setup.exchange, b)
		return nil
	}
	c.mu.Lock()
	if c.link == nil {
		full := len(c.setup.news) >= newsMax
		c.setup.news = append(c.setup.news, b)
		c.mu.Unlock()
		if full {
			return fmt.Errorf("%w: news for a link that is not there yet, again and again", ErrProtocol)
		}
		return nil
	}
	c.mu.Unlock()
	return c.hear(b)
}

func (c *channel) hear(b []byte) error {
	r, is := c.currentLink().(Railed)
	if !is {
		return fmt.Errorf("%w: %s has no rails to hear of", ErrProtocol, c.transport)
	}
	return r.Hear(b)
}

// railStatus says how the rails are.
func (c *channel) railStatus() []RailStatus {
	c.mu.Lock()
	link, spare := c.link, c.spare
	c.mu.Unlock()
	rails := []RailStatus{}
	if r, is := link.(Railed); is {
		rails = append(rails, r.Rails()...)
	} else if link != nil {
		rails = append(rails, RailStatus{Key: c.transport, Name: c.transport, State: "up", Lanes: c.lanes.n, Why: c.why})
	}
	if spare != nil {
		rails = append(rails, RailStatus{Key: c.spareName, Name: c.spareName, State: "spare", Lanes: min(sparesMax, c.e.cfg.Lanes), Why: "carries where " + c.transport + " cannot"})
	}
	c.lanes.measured(rails)
	return rails
}
