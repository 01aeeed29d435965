package transfer_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/tcp"
	"github.com/headrace/headrace/transfer/transporttest"
)

// railed is two daemons over a rail that can be taken down, with TCP as the last rail.
func railed(t *testing.T, refusal error) (*transporttest.Pair, *transporttest.Rail) {
	t.Helper()
	a, b := transporttest.NewRails()
	a.Refusal = refusal
	first := true
	f := transporttest.Factory{New: func() transfer.Transport { return tcp.New(tcp.Config{}) }}
	return transporttest.NewPair(t, f, transporttest.Options{Config: func(c *transfer.Config) {
		rail := a
		if !first {
			rail = b
		}
		first = false
		c.Transports = []transfer.Transport{rail, tcp.New(tcp.Config{})}
	}}), a
}

func settle(t *testing.T, p *transporttest.Pair) {
	t.Helper()
	q := p.NewRequest(transporttest.NewRand(), 512, 0, 30*time.Second)
	q.Present(t, nil)
	q.Bind(t)
	q.PushAll(t, []byte("record"))
	q.Settled(t, []byte("record"))
}

// theChannel waits until the only channel of an engine is as wanted.
func theChannel(t *testing.T, e *transfer.Engine, what string, ok func(transfer.ChannelStatus) bool) (c transfer.ChannelStatus) {
	t.Helper()
	deadline := time.NewTimer(10 * time.Second)
	defer deadline.Stop()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		if list := e.Status().Channels; len(list) == 1 {
			if c = list[0]; ok(c) {
				return c
			}
		}
		select {
		case <-tick.C:
		case <-deadline.C:
			t.Fatalf("%s: %+v", what, c)
		}
	}
}

func spareUp(c transfer.ChannelStatus) bool {
	return len(c.Rails) == 2 && c.Rails[1].Name == "tcp" && c.Rails[1].LanesUp == c.Rails[1].Lanes && c.Rails[0].LanesUp == c.Rails[0].Lanes
}

// The rail goes away and comes back, again and again: TCP carries meanwhile, on the same channel.
func TestSpareCarries(t *testing.T) {
	defer transporttest.CheckLeaks(t)()
	p, rail := railed(t, nil)
	settle(t, p)
	for i := range 3 {
		for _, e := range []*transfer.Engine{p.P.Engine, p.D.Engine} {
			theChannel(t, e, "all lanes are up", spareUp)
		}
		before := theChannel(t, p.P.Engine, "RDMA carries", func(c transfer.ChannelStatus) bool { return c.Carrier == "fake" })
		rail.Set(false)
		settle(t, p)
		c := theChannel(t, p.P.Engine, "TCP carries", func(c transfer.ChannelStatus) bool { return c.Carrier == "tcp" })
		if c.Fallbacks != uint64(i)+1 || c.Rails[1].BytesSent == before.Rails[1].BytesSent || c.Rails[0].State != "down" || !strings.Contains(c.Why, "fake0: the rail is down") {
			t.Errorf("while the rail is down: %+v", c)
		}
		rail.Set(true)
		c = theChannel(t, p.P.Engine, "the rail is back", func(c transfer.ChannelStatus) bool { return c.Carrier == "fake" && spareUp(c) })
		settle(t, p)
		after := theChannel(t, p.P.Engine, "it carries", func(now transfer.ChannelStatus) bool { return now.Rails[0].BytesSent > c.Rails[0].BytesSent })
		if after.Rails[1].BytesSent != c.Rails[1].BytesSent || strings.Contains(after.Why, "at present") {
			t.Errorf("with the rail: %+v", after)
		}
	}
	if st := p.P.Engine.Status().Totals; st.ChannelsOpened != 1 || st.ChannelsDied != 0 {
		t.Errorf("%d channels opened, %d died", st.ChannelsOpened, st.ChannelsDied)
	}
	p.Close(t)
}

// A rail goes down in the middle of a lease, which goes on over TCP.
func TestSpareInLease(t *testing.T) {
	defer transporttest.CheckLeaks(t)()
	p, rail := railed(t, nil)
	settle(t, p)
	theChannel(t, p.P.Engine, "all lanes are up", spareUp)
	p.P.Pauses.Set(transfer.PauseWriteFrame, 1)
	q := p.NewRequest(transporttest.NewRand(), 1000, 0, 30*time.Second)
	q.Present(t, nil)
	q.Bind(t)
	q.PushAll(t, nil)
	transporttest.WaitHeld(t, p.P.Pauses, transfer.PauseWriteFrame)
	rail.Set(false)
	p.P.Pauses.ReleaseAll()
	q.Settled(t, nil)
	if c := theChannel(t, p.P.Engine, "TCP carries", func(c transfer.ChannelStatus) bool { return c.Carrier == "tcp" }); c.Rails[1].BytesSent == 0 {
		t.Errorf("%+v", c)
	}
	p.Close(t)
}

// A region that the devices cannot register goes over TCP, while the rail is up.
func TestSpareForRegion(t *testing.T) {
	defer transporttest.CheckLeaks(t)()
	p, _ := railed(t, errors.New("no memory may be locked"))
	for range 2 {
		settle(t, p)
	}
	c := theChannel(t, p.P.Engine, "TCP carried", func(c transfer.ChannelStatus) bool { return len(c.Rails) == 2 && c.Rails[1].BytesSent > 0 })
	if c.Rails[0].BytesSent != 0 || c.Carrier != "fake" {
		t.Errorf("%+v", c)
	}
	p.Close(t)
}

// Leases over both kinds of lanes are fenced: the spare lanes stay, whatever is done to the others.
func TestSpareFence(t *testing.T) {
	defer transporttest.CheckLeaks(t)()
	p, rail := railed(t, nil)
	settle(t, p)
	theChannel(t, p.P.Engine, "all lanes are up", spareUp)
	rail.Set(false)
	for range 5 {
		q := p.NewRequest(transporttest.NewRand(), 1000, 0, 30*time.Second)
		q.Present(t, nil)
		q.Bind(t)
		q.PushAll(t, nil)
		if err := p.D.Client.Revoke(q.DLease, "no more"); err != nil {
			t.Fatal(err)
		}
		p.D.End(t, q.Ticket.Nonce)
		p.P.End(t, q.Ticket.Nonce)
	}
	settle(t, p)
	if st := p.P.Engine.Status().Totals; st.ChannelsDied != 0 {
		t.Errorf("%d channels died", st.ChannelsDied)
	}
	p.Close(t)
}

// waiting is a rail that is of no use yet.
type waiting struct{ *transporttest.Rail }

func (waiting) Probe() error { return errors.New("its port is down") }
func (waiting) Waits() bool  { return true }

// With auto, a transport that waits is taken along where another carries meanwhile; by name, or as the last one, it is refused.
func TestWaiting(t *testing.T) {
	rail, _ := transporttest.NewRails()
	for _, c := range []struct {
		name       string
		transports []transfer.Transport
		transport  string
		usable     bool
	}{
		{"auto", []transfer.Transport{waiting{rail}, tcp.New(tcp.Config{})}, "auto", true},
		{"by name", []transfer.Transport{waiting{rail}, tcp.New(tcp.Config{})}, "fake", false},
		{"alone", []transfer.Transport{waiting{rail}}, "", false},
	} {
		e, err := transfer.New(transfer.Config{NodeID: "n", ClusterKey: transporttest.Key, Transports: c.transports, Transport: c.transport})
		if (err == nil) != c.usable {
			t.Errorf("%s: %v", c.name, err)
		}
		if err != nil {
			continue
		}
		if s := e.Status().Transports[0]; !s.Usable || !strings.Contains(s.Reason, "its port is down") {
			t.Errorf("%s: %+v", c.name, s)
		}
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	}
}
