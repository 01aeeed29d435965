package rdma

import (
	"errors"
	"maps"
	"runtime"
	"slices"
	"strings"
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

// unhurried gives lanes of an emulated machine time to withdraw windows: those that took longer than a network card may would be aborted, and
// with one that is late all that are not through by then.
func unhurried(op string) transporttest.Factory {
	f := factory()
	f.New = func() transfer.Transport { return New(Config{Op: op, withdraw: 5 * time.Second}) }
	return f
}

// A fence by force takes its own lease's lane at most: another lease of the channel goes on.
func TestForcedFenceSparesOthers(t *testing.T) {
	needDevice(t)
	checkObjects(t)
	transporttest.ForcedSparesOthers(t, unhurried(OpWrite))
}

func TestForcedFenceSparesOthersRead(t *testing.T) {
	needDevice(t)
	checkObjects(t)
	transporttest.ForcedSparesOthers(t, unhurried(OpRead))
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

// withoutWindows makes transports whose rails' windows are said to be of no use.
func withoutWindows(t *testing.T) func() transfer.Transport {
	return func() transfer.Transport {
		tr := New(Config{})
		rails, err := tr.(*transport).open()
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range rails {
			r.windows.probed, r.windows.why = true, errors.New("a test does without")
		}
		return tr
	}
}

// Where there are no windows a fence by force takes all lanes, and status says why.
func TestForcedCanariesWithoutWindows(t *testing.T) {
	needDevice(t)
	checkObjects(t)
	f := transporttest.Factory{New: withoutWindows(t), Config: patient}
	transporttest.ForcedCanaries(t, f)
	p := transporttest.NewPair(t, f, transporttest.Options{})
	transfers(t, p, 100)
	s := p.D.Engine.Status()
	if len(s.Channels) != 1 || !strings.Contains(s.Channels[0].Fencing, "a test does without") || s.Totals.LeasesUngranted != 1 {
		t.Errorf("%d leases without a grant, channels %+v", s.Totals.LeasesUngranted, s.Channels)
	}
	p.Close(t)
}

func transfers(t *testing.T, p *transporttest.Pair, tokens uint32) {
	t.Helper()
	q := p.NewRequest(transporttest.NewRand(), tokens, 0, 10*time.Second)
	q.Present(t, nil)
	q.Bind(t)
	q.PushAll(t, nil)
	q.Settled(t, nil)
}

// A lease goes on over lanes that were dialled after it was bound: they have windows of their own for it.
func TestLeaseOverRedialledLanes(t *testing.T) {
	needDevice(t)
	checkObjects(t)
	var made []*transport
	f := transporttest.Factory{Config: patient, New: func() transfer.Transport {
		tr := New(Config{})
		made = append(made, tr.(*transport))
		return tr
	}}
	p := transporttest.NewPair(t, f, transporttest.Options{})
	transfers(t, p, 100)
	q := p.NewRequest(transporttest.NewRand(), 900, 0, 60*time.Second)
	q.Present(t, nil)
	q.Bind(t)
	lanesUp := func() (up int, redialled uint64) {
		for _, c := range p.P.Engine.Status().Channels {
			up, redialled = up+c.LanesUp, redialled+c.Redialled
		}
		return up, redialled
	}
	whole, _ := lanesUp()
	for lane := range whole {
		made[0].linkMu.Lock()
		links := slices.Collect(maps.Keys(made[0].links))
		made[0].linkMu.Unlock()
		for _, l := range links {
			l.Abort(lane, errors.New("a test takes it down"))
		}
		for deadline := time.Now().Add(20 * time.Second); ; runtime.Gosched() {
			if up, n := lanesUp(); up == whole && n == uint64(lane)+1 {
				break
			}
			if time.Now().After(deadline) {
				t.Fatalf("lane %d is not replaced", lane)
			}
		}
	}
	q.PushAll(t, []byte("over other lanes"))
	q.Settled(t, []byte("over other lanes"))
	if s := p.P.Engine.Status(); s.Totals.ChannelsOpened != 1 || p.D.Engine.Status().Totals.LeasesUngranted != 0 {
		t.Errorf("%d channels were opened, want 1; %d leases without a grant", s.Totals.ChannelsOpened, p.D.Engine.Status().Totals.LeasesUngranted)
	}
	p.Close(t)
}
