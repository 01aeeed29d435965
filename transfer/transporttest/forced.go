package transporttest

import (
	"bytes"
	"testing"
	"time"

	"github.com/headrace/headrace/transfer"
)

// ForcedSparesOthers makes fences by force while another lease of the same channel runs, from either end, and wants that other
// lease to settle with the right bytes, over the same channel. It is for transports that can take the right to write back
// from one lease alone: an end of a one-sided channel that cannot has to take all lanes down.
func ForcedSparesOthers(t *testing.T, f Factory) {
	for _, who := range []string{"prefill", "decode"} {
		t.Run(who, func(t *testing.T) { forcedSparesOthers(t, f, who == "decode") })
	}
}

// forcedLanes is enough for the lanes that die of some fences not to be all.
const (
	forcedLanes  = 8
	forcedRounds = 4
)

func forcedSparesOthers(t *testing.T, f Factory, target bool) {
	defer CheckLeaks(t)()
	shape := DefaultShape
	shape.Blocks = 256
	p := NewPair(t, f, Options{P: shape, D: shape, Config: func(c *transfer.Config) {
		c.FenceGrace, c.Lanes = time.Nanosecond, forcedLanes
	}})
	r := NewRand()
	warm := p.request(64, 0, patience)
	warm.Present(t, nil)
	warm.Bind(t)
	warm.PushAll(t, nil)
	warm.Settled(t, nil) // the channel is open
	opened := p.P.Engine.Status().Totals.ChannelsOpened
	forced, rounds := func() uint64 {
		return p.P.Engine.Status().Totals.FencesForced + p.D.Engine.Status().Totals.FencesForced
	}, 0
	for ; rounds < 10*forcedRounds && forced() < forcedRounds; rounds++ {
		q, other := p.request(16*16, 0, patience), p.request(64*16, 64, patience)
		for _, l := range []*Request{q, other} {
			l.Present(t, nil)
			l.Bind(t)
		}
		// One piece, on one lane, and then all of the other lease, over the others.
		if err := p.P.Client.Push(q.PLease, []transfer.Unit{{Layer: 0, Count: 16}}, 1); err != nil {
			t.Fatal(err)
		}
		other.PushAll(t, []byte("other"))
		for p.onTheWay(q) && r.IntN(8) > 0 { // a moment, but not until it has landed
		}
		if target {
			p.D.Client.Revoke(q.DLease, "forced")
			p.D.End(t, q.Ticket.Nonce)
			p.D.set(q.Dst, canaryTarget)
		} else {
			p.P.Client.Revoke(q.PLease, "forced")
			p.P.End(t, q.Ticket.Nonce)
			p.P.set(q.Src, canarySource)
			p.D.End(t, q.Ticket.Nonce)
			p.D.eachBlock(q.Dst, func(b []byte) {
				if bytes.IndexByte(b, canarySource) >= 0 {
					t.Fatal("a source byte that was overwritten after the fence arrived")
				}
			})
			p.D.set(q.Dst, canaryTarget)
		}
		other.Settled(t, []byte("other"))
		checkOnly(t, p.D, q.Dst, canaryTarget, "a byte landed after the fence")
	}
	s := p.P.Engine.Status()
	var up int
	for _, c := range s.Channels {
		up += c.LanesUp
	}
	t.Logf("%d fences by force in %d rounds; %d of %d lanes are up, %d channels were opened", forced(), rounds, up, forcedLanes, s.Totals.ChannelsOpened)
	if forced() == 0 {
		t.Error("no fence was made by force: the test shows nothing")
	}
	if s.Totals.ChannelsOpened != opened || s.Totals.ChannelsDied != 0 || p.D.Engine.Status().Totals.ChannelsDied != 0 {
		t.Errorf("the channel died: %d opened, %d died", s.Totals.ChannelsOpened, s.Totals.ChannelsDied)
	}
	if up < forcedLanes-int(forced()) {
		t.Errorf("%d lanes are up after %d fences by force, each of one lane's lease", up, forced())
	}
	p.Close(t)
}

// request is a lease of blocks from a certain one on, so that several do not meet.
func (p *Pair) request(tokens, firstBlock uint32, life time.Duration) *Request {
	q := &Request{Pair: p, Tokens: tokens}
	q.Ticket, q.Raw = p.Ticket(life)
	for i := range (tokens + p.P.Layout.BlockTokens - 1) / p.P.Layout.BlockTokens {
		q.Src, q.Dst = append(q.Src, firstBlock+i), append(q.Dst, firstBlock+i)
	}
	q.FillSource(byte(firstBlock))
	p.D.set(q.Dst, 0x80)
	return q
}

// onTheWay says that a lease lives and that nothing of it has landed.
func (p *Pair) onTheWay(q *Request) bool {
	for _, l := range p.D.Engine.Status().Leases {
		if l.ID == q.DLease && l.Side == "target" {
			return l.UnitsDone == 0
		}
	}
	return false
}

// RoundTrip runs transfers from either end of a channel to the other at once.
func RoundTrip(t *testing.T, f Factory) {
	t.Helper()
	defer CheckLeaks(t)()
	p := NewPair(t, f, Options{})
	back := &Pair{P: p.D, D: p.P, Local: p.Local, Addr: p.P.Engine.DataAddr()}
	qs := []*Request{p.request(300, 0, patience), back.request(300, 32, patience), p.request(200, 19, patience)}
	for _, q := range qs {
		q.Present(t, nil)
	}
	for _, q := range qs {
		q.Bind(t)
		q.PushAll(t, []byte("there and back"))
	}
	for _, q := range qs {
		q.Settled(t, []byte("there and back"))
	}
	if s := p.P.Engine.Status(); s.Totals.BytesLanded == 0 || s.Totals.BytesSent == 0 {
		t.Errorf("%d bytes landed, %d were sent: not both ways", s.Totals.BytesLanded, s.Totals.BytesSent)
	}
	p.Close(t)
}
