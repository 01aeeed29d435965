package router

import (
	"context"
	"fmt"
	"math"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/headrace/headrace/router/pairing"
)

// nodesOnly is a source of daemons.
type nodesOnly []Node

func (n nodesOnly) Nodes() []Node { return n }

// nobody is a source that knows no daemons.
type nobody struct{}

func (nobody) Workers() []pairing.Worker { return nil }
func (nobody) Changed() <-chan struct{}  { return nil }

// A daemon's answers become figures of its channels, the share sent again from one answer to the next.
func TestChannelsAreAskedFor(t *testing.T) {
	var sent, again atomic.Int64
	var broken atomic.Bool
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if broken.Load() || r.URL.Path != "/status" {
			http.Error(w, "no", http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintf(w, `{"engines":[{"engine_id":"p","regions":[{"bytes":64000,"blocks":10}]},{"engine_id":"p/1","member_of":"p","regions":[{"bytes":64000,"blocks":10}]}],
			"channels":[{"peer_node":"far","lanes_up":2,"speed_bytes_per_s":1e9,"bytes_sent":7000,"backlog_bytes":5000,"rtt_us":300,"wire":{"sent_packets":%d,"retransmitted_packets":%d,"rtt_us":150}},
			{"peer_node":"idle","lanes_up":1,"speed_bytes_per_s":1},{"peer_node":"gone","lanes_up":0,"speed_bytes_per_s":1,"bytes_sent":1}]}`, sent.Load(), again.Load())
	}))
	defer srv.Close()
	now := time.Unix(1_790_000_000, 0)
	c := newChannels(nobody{}) // it asks nobody by itself
	defer c.close()
	c.source, c.now = nodesOnly{{ID: "near", Admin: strings.TrimPrefix(srv.URL, "http://")}, {ID: "mute"}}, func() time.Time { return now }
	p, d := &pairing.Worker{ID: "p", NodeID: "near", BlockTokens: 16}, &pairing.Worker{ID: "d", NodeID: "far"}
	ask := func() pairing.Channel {
		t.Helper()
		c.ask(context.Background())
		x, ok := c.between(p, d)
		if !ok {
			t.Fatal("nothing is known")
		}
		return x
	}
	sent.Store(1000)
	again.Store(500) // before we asked
	if x := ask(); x.SpeedBps != 1e9 || x.BacklogBytes != 5000 || x.RTT != 150*time.Microsecond || x.TokenBytes != 800 || x.AgainShare != 0 {
		t.Errorf("%+v", x)
	}
	if got := fmt.Sprintf("%+v", c.status()); got != "[{From:near To:far SpeedBps:1e+09 SentBytes:7000 BacklogBytes:5000 RTTMicros:150 AgainShare:0}]" {
		t.Errorf("shown are %s", got)
	}
	if b := c.tokenBytes(p); b != 800 {
		t.Errorf("a token is said to take %v bytes", b)
	}
	for range 20 {
		sent.Add(1000)
		again.Add(100)
		ask()
	}
	if x := ask(); math.Abs(x.AgainShare-0.1) > 0.01 {
		t.Errorf("%v of the packets were sent again, want 0.1", x.AgainShare)
	}
	broken.Store(true)
	if x := ask(); x.SpeedBps != 1e9 {
		t.Errorf("%+v: the answer before is good for a while", x)
	}
	now = now.Add(figuresLast + time.Second)
	if x, ok := c.between(p, d); ok {
		t.Errorf("%+v: it is too old", x)
	}
	if got := c.status(); len(got) != 0 {
		t.Errorf("%+v are shown, of a daemon that answers no more", got)
	}
	if _, ok := c.between(p, &pairing.Worker{NodeID: "gone"}); ok {
		t.Error("a channel without lanes was counted with")
	}
}

func TestShareOfFewPacketsWaits(t *testing.T) {
	old := &channelFigures{sent: 1000, again: 10, Channel: pairing.Channel{AgainShare: 0.2}}
	x := &channelFigures{sent: 1010, again: 10}
	x.share(old)
	if x.AgainShare != 0.2 || x.sent != 1000 {
		t.Errorf("%+v", x)
	}
	anew := &channelFigures{sent: 5}
	anew.share(old)
	if anew.AgainShare != 0 {
		t.Errorf("%+v", anew)
	}
}
