package transfer_test

import (
	"net"
	"testing"
	"time"

	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/tcp"
	"github.com/headrace/headrace/transfer/transporttest"
)

// Channels that are to be kept are there before they are needed, come back, and are not opened twice.
func TestKeep(t *testing.T) {
	defer transporttest.CheckLeaks(t)()
	f := transporttest.Factory{New: func() transfer.Transport { return tcp.New(tcp.Config{}) }}
	p := transporttest.NewPair(t, f, transporttest.Options{})
	nobody, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	away := nobody.Addr().String()
	nobody.Close()
	e := p.P.Engine
	e.Keep(nil)
	peers := map[string]string{"node-d": p.Addr, "node-away": away, e.NodeID(): e.DataAddr()}
	e.Keep(peers)
	e.Keep(peers)
	up := func(c transfer.ChannelStatus) bool { return c.LanesUp == c.Lanes && c.PeerNode == "node-d" }
	first := theChannel(t, e, "the channel is there", up)
	q := p.NewRequest(transporttest.NewRand(), 100, 0, 30*time.Second)
	q.Present(t, nil)
	q.Bind(t)
	q.PushAll(t, nil)
	q.Settled(t, nil)
	if n := e.Status().Totals.ChannelsOpened; n != 1 {
		t.Errorf("%d channels were opened", n)
	}
	e.DropChannels("for the test")
	theChannel(t, e, "the channel is there again", func(c transfer.ChannelStatus) bool { return up(c) && c.Since.After(first.Since) })
	p.Close(t)
}
