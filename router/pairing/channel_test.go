package pairing

import (
	"context"
	"strings"
	"testing"
	"time"
)

// The same two decode workers, alike but for the channel to each: the dearer one is not chosen.
func TestDearChannelsAreAvoided(t *testing.T) {
	const mega = 1e6
	good := Channel{SpeedBps: 1000 * mega, RTT: 100 * time.Microsecond, TokenBytes: 128 << 10}
	change := func(f func(*Channel)) Channel { c := good; f(&c); return c }
	for name, bad := range map[string]Channel{
		"slow":           change(func(c *Channel) { c.SpeedBps /= 4 }),
		"retransmitting": change(func(c *Channel) { c.AgainShare = 0.05 }),
		"losing all":     change(func(c *Channel) { c.AgainShare = 1 }),
		"backlog":        change(func(c *Channel) { c.BacklogBytes = 2000 * mega }),
		"far":            change(func(c *Channel) { c.RTT = 80 * time.Millisecond }),
	} {
		t.Run(name, func(t *testing.T) {
			v := &View{Now: now, Workers: []Candidate{worker("p", RolePrefill), worker("d1", RoleDecode), worker("d2", RoleDecode)},
				Channel: func(_, d *Worker) (Channel, bool) {
					if d.ID == "d1" {
						return bad, true
					}
					return good, true
				}}
			var policy LeastLoaded
			for range 4 { // whatever turn it is
				d, err := policy.Pick(context.Background(), Request{Model: "m", PromptTokens: 2000}, v)
				if err != nil || d.Decode == nil || d.Decode.ID != "d2" {
					t.Fatalf("%+v, %v", d, err)
				}
				if !strings.Contains(d.Reason, "1000 MB/s") {
					t.Errorf("the reason says nothing of the channel: %s", d.Reason)
				}
			}
			// Enough load on the other side outweighs it, unless it is hopeless.
			v.Workers[2].Load.PrefillTokens = bad.cost(2000) - good.cost(2000) + costStep
			if d, err := policy.Pick(context.Background(), Request{Model: "m", PromptTokens: 2000}, v); err != nil || d.Decode.ID != "d1" {
				t.Errorf("with more than that to do elsewhere: %+v, %v", d, err)
			}
		})
	}
}

func TestChannelCosts(t *testing.T) {
	c := Channel{SpeedBps: 1e9, TokenBytes: 1e5}
	if got := c.transfer(10000); got != time.Second {
		t.Errorf("1 GB at 1 GB/s takes %v", got)
	}
	last := int64(-1)
	for _, share := range []float64{0, 0.01, 0.03, 0.09, 1} {
		c.AgainShare = share
		if got := c.cost(10000); got <= last {
			t.Errorf("with %v sent again it costs %d, with less %d", share, got, last)
		} else {
			last = got
		}
	}
	if got := (&Channel{TokenBytes: 1e5, BacklogBytes: 1e9}).cost(10000); got != 0 {
		t.Errorf("a channel of unknown speed costs %d: it would never be tried", got)
	}
	// Small differences do not decide.
	a, b := Channel{SpeedBps: 1e9, TokenBytes: 5e4}, Channel{SpeedBps: 1.05e9, TokenBytes: 5e4}
	if x, y := a.cost(300), b.cost(300); x != y {
		t.Errorf("channels of nearly the same speed cost %d and %d", x, y)
	}
}
