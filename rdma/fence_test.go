package rdma

import (
	"testing"
	"time"

	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/transporttest"
)

const byWindows = "by invalidating the lease's memory windows"

// Status says how leases are fenced by force; the lab's device has windows, so there it must be by them.
func TestStatusSaysHowItFences(t *testing.T) {
	needDevice(t)
	checkObjects(t)
	p := transporttest.NewPair(t, factory(), transporttest.Options{})
	q := p.NewRequest(transporttest.NewRand(), 100, 0, 10*time.Second)
	q.Present(t, nil)
	q.Bind(t)
	q.PushAll(t, nil)
	q.Settled(t, nil)
	s := p.D.Engine.Status()
	if len(s.Channels) != 1 || s.Channels[0].Fencing != byWindows || s.Totals.LeasesUngranted != 0 {
		t.Errorf("%d leases without a grant, channels %+v", s.Totals.LeasesUngranted, s.Channels)
	}
	p.Close(t)
}

// A fence by force takes its own lease's lane at most: another lease of the channel goes on.
func TestForcedFenceSparesOthers(t *testing.T) {
	needDevice(t)
	checkObjects(t)
	transporttest.ForcedSparesOthers(t, factory())
}

func TestForcedFenceSparesOthersRead(t *testing.T) {
	needDevice(t)
	checkObjects(t)
	transporttest.ForcedSparesOthers(t, pulling())
}

// product is what users run with: fences have 20 ms to be agreed on.
func product(c *transfer.Config) {
	c.DeadAfter, c.DialTimeout = 20*time.Second, 20*time.Second
}

// Blocks of a transfer that is cancelled in flight are back within 100 ms, with the product's own time to agree.
func TestCancels(t *testing.T) {
	for _, op := range []string{OpWrite, OpRead} {
		t.Run(op, func(t *testing.T) {
			needDevice(t)
			checkObjects(t)
			transporttest.Cancels(t, transporttest.Factory{New: func() transfer.Transport { return New(Config{Op: op}) }, Config: product}, 100*time.Millisecond)
		})
	}
}
