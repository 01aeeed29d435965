package rdma

import (
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/tcp"
	"github.com/headrace/headrace/transfer/transporttest"
)

// What several rails and their life come to, in a machine with two of them: scenario "rails" of the lab.

// labRails names the network interfaces of the machine's rails.
func labRails(t *testing.T, n int) []string {
	t.Helper()
	needDevice(t)
	devs := strings.Split(os.Getenv("LAB_RAILS"), ",")
	if len(devs) < n {
		t.Skipf("%d rails in a lab machine are needed, LAB_RAILS is %q: make lab ARGS=\"-scenario rails\"", n, os.Getenv("LAB_RAILS"))
	}
	return devs
}

func ip(t testing.TB, words ...string) {
	t.Helper()
	if out, err := exec.Command("ip", words...).CombinedOutput(); err != nil {
		t.Errorf("ip %s: %v: %s", strings.Join(words, " "), err, out)
	}
}

// railShape makes leases of 8 MiB.
var railShape = transporttest.Shape{Layers: 8, Blocks: 32, BlockTokens: 16, Heads: 4, HeadBytes: 256}

const railTokens = 32 * 16

// stack is two daemons with RDMA first and TCP last.
func stack(t *testing.T, more func(*transfer.Config)) *transporttest.Pair {
	t.Helper()
	checkObjects(t)
	return transporttest.NewPair(t, factory(), transporttest.Options{P: railShape, D: railShape, Config: func(c *transfer.Config) {
		c.Transports = []transfer.Transport{New(Config{}), tcp.New(tcp.Config{})}
		if more != nil {
			more(c)
		}
	}})
}

// move has one lease settle, and its content compared.
func move(t *testing.T, p *transporttest.Pair, r *rand.Rand) (bytes uint64) {
	t.Helper()
	q := p.NewRequest(r, railTokens, 0, time.Minute)
	q.Present(t, nil)
	q.Bind(t)
	q.PushAll(t, []byte("record"))
	q.Settled(t, []byte("record"))
	return uint64(len(q.Dst)) * uint64(railShape.Layers) * p.D.Layout.BlockStride
}

// channelOf is the one channel of an engine.
func channelOf(e *transfer.Engine) (c transfer.ChannelStatus) {
	if list := e.Status().Channels; len(list) == 1 {
		return list[0]
	}
	return c
}

func railOf(c *transfer.ChannelStatus, name string) transfer.RailStatus {
	for _, r := range c.Rails {
		if r.Name == name {
			return r
		}
	}
	return transfer.RailStatus{}
}

// eventually waits until ok, and says how long that took.
func eventually(what string, within time.Duration, ok func() bool) (time.Duration, error) {
	began := time.Now()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for range tick.C {
		d := time.Since(began)
		if ok() {
			return d, nil
		}
		if d > within {
			return d, fmt.Errorf("%s: not within %v", what, within)
		}
	}
	panic("unreachable")
}

func mustEventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	if _, err := eventually(what, 20*time.Second, ok); err != nil {
		t.Fatal(err)
	}
}

// allUp says whether a rail has all of its lanes, at both ends.
func allUp(p *transporttest.Pair, rail string) bool {
	for _, e := range []*transfer.Engine{p.P.Engine, p.D.Engine} {
		c := channelOf(e)
		if r := railOf(&c, rail); r.State != "up" || r.LanesUp == 0 || r.LanesUp < r.Lanes {
			return false
		}
	}
	return true
}

func noneUp(p *transporttest.Pair, rail string) bool {
	for _, e := range []*transfer.Engine{p.P.Engine, p.D.Engine} {
		c := channelOf(e)
		if railOf(&c, rail).LanesUp != 0 {
			return false
		}
	}
	return true
}

// once checks that what landed was counted once.
func once(t *testing.T, p *transporttest.Pair, moved uint64) {
	t.Helper()
	if got := p.D.Engine.Status().Totals.BytesLanded; got != moved {
		t.Errorf("%d bytes are counted as landed, %d were moved", got, moved)
	}
}

// shareOf is what part of the bytes that were sent between two looks at a channel went over a rail.
func shareOf(before, after *transfer.ChannelStatus, rail string) float64 {
	all := uint64(0)
	for i := range after.Rails {
		all += after.Rails[i].BytesSent - railOf(before, after.Rails[i].Name).BytesSent
	}
	return float64(railOf(after, rail).BytesSent-railOf(before, rail).BytesSent) / float64(max(all, 1))
}

func TestRailsShare(t *testing.T) {
	labRails(t, 2)
	p := stack(t, nil)
	r := transporttest.NewRand()
	moved := move(t, p, r)
	before := channelOf(p.P.Engine)
	began := time.Now()
	for range 8 {
		moved += move(t, p, r)
	}
	took := time.Since(began)
	c := channelOf(p.P.Engine)
	t.Logf("8 leases, %.0f MB/s", float64(moved*8/9)/1e6/took.Seconds())
	for _, name := range []string{"rxe0", "rxe1"} {
		rail := railOf(&c, name)
		share := shareOf(&before, &c, name)
		t.Logf("%s>%s: share %.2f, piece %.1f ms, %.0f MB/s, %d lanes: %s", rail.Name, rail.Peer, share, rail.PieceMicros/1e3, rail.SpeedBps/1e6, rail.LanesUp, rail.Why)
		if share < 0.3 || !strings.Contains(rail.Why, "same subnet") || rail.LanesUp != 1 {
			t.Errorf("rail %+v, share %.2f", rail, share)
		}
	}
	if spare := railOf(&c, "tcp"); spare.BytesSent != 0 || spare.LanesUp == 0 || c.Carrier != "rdma" || c.Fallbacks != 0 {
		t.Errorf("spare %+v, channel %+v", spare, c)
	}
	once(t, p, moved)
	p.Close(t)
}

// Ports go down and come back while leases run.
func TestRailsFlap(t *testing.T) {
	devs := labRails(t, 2)
	flaps := 2
	if os.Getenv("HEADRACE_FULL") != "" {
		flaps = 10
	}
	p := stack(t, nil)
	r := transporttest.NewRand()
	moved, leases := move(t, p, r), 1
	over := make(chan error, 1)
	go func() {
		for i := range flaps {
			if err := flap(t, p, devs[i%2], fmt.Sprintf("rxe%d", i%2)); err != nil {
				over <- fmt.Errorf("flap %d: %w", i, err)
				return
			}
		}
		over <- nil
	}()
	for running := true; running; leases++ {
		select {
		case err := <-over:
			if err != nil {
				t.Error(err)
			}
			running = false
		default:
		}
		moved += move(t, p, r)
	}
	t.Logf("%d leases of %d MiB were compared", leases, moved/uint64(leases)>>20)
	once(t, p, moved)
	if c := channelOf(p.P.Engine); c.Fallbacks != 0 || c.Transport != "rdma" {
		t.Errorf("the channel: %+v", c)
	}
	if st := p.P.Engine.Status(); st.Totals.ChannelsOpened != 1 || st.Totals.ChannelsDied != 0 {
		t.Errorf("channels: %d opened, %d died", st.Totals.ChannelsOpened, st.Totals.ChannelsDied)
	}
	p.Close(t)
}

// backWithin is how soon a rail must have its full share after its port's return.
const backWithin = 5 * time.Second

func flap(t *testing.T, p *transporttest.Pair, dev, rail string) error {
	landed := func() uint64 { return p.D.Engine.Status().Totals.BytesLanded }
	ip(t, "link", "set", dev, "down")
	out, err := eventually(rail+" is taken out", 10*time.Second, func() bool { return noneUp(p, rail) })
	if err != nil {
		return err
	}
	mark := landed()
	if _, err := eventually("the other rail carries on", 20*time.Second, func() bool { return landed() > mark+32<<20 }); err != nil {
		return err
	}
	before := channelOf(p.P.Engine)
	ip(t, "link", "set", dev, "up")
	began := time.Now()
	back, err := eventually(rail+" is back", backWithin, func() bool { return allUp(p, rail) })
	if err != nil {
		c := channelOf(p.P.Engine)
		return fmt.Errorf("%w: %+v", err, c.Rails)
	}
	var share float64
	full, err := eventually(rail+" has its share", backWithin, func() bool {
		c := channelOf(p.P.Engine)
		if c.BytesSent-before.BytesSent < 4<<20 {
			return false
		}
		share = shareOf(&before, &c, rail)
		before = c
		return share >= 0.4
	})
	if total := time.Since(began); err != nil || total > backWithin {
		return fmt.Errorf("share %.2f after %v: %w", share, total, err)
	}
	t.Logf("%s out after %v, lanes back after %v, share %.2f after %v", rail, out.Round(time.Millisecond), back.Round(time.Millisecond), share, (back + full).Round(time.Millisecond))
	return nil
}

// With all ports down TCP carries on in the same lease, and RDMA when they are back.
func TestRailsFallback(t *testing.T) {
	devs := labRails(t, 2)
	p := stack(t, nil)
	r := transporttest.NewRand()
	moved := move(t, p, r)
	mustEventually(t, "the spare lanes are up", func() bool {
		c, d := channelOf(p.P.Engine), channelOf(p.D.Engine)
		a, b := railOf(&c, "tcp"), railOf(&d, "tcp")
		return a.LanesUp == a.Lanes && b.LanesUp == a.Lanes && a.Lanes > 0
	})
	q := p.NewRequest(r, railTokens, 0, time.Minute)
	q.Present(t, nil)
	q.Bind(t)
	push := func(layer uint32) {
		t.Helper()
		if err := p.P.Client.Push(q.PLease, []transfer.Unit{{Layer: layer, Count: uint32(len(q.Src))}}, uint64(layer)+1); err != nil {
			t.Fatal(err)
		}
	}
	half := railShape.Layers / 2
	for layer := range half {
		push(layer)
	}
	for _, dev := range devs {
		ip(t, "link", "set", dev, "down")
	}
	for layer := half; layer < railShape.Layers; layer++ {
		push(layer)
	}
	if err := p.P.Client.Handoff(q.PLease, []byte("record")); err != nil {
		t.Fatal(err)
	}
	q.Settled(t, []byte("record"))
	moved += moved
	mustEventually(t, "the rails are seen to be down", func() bool { return noneUp(p, "rxe0") && noneUp(p, "rxe1") })
	moved += move(t, p, r)
	c := channelOf(p.P.Engine)
	over := railOf(&c, "tcp").BytesSent
	t.Logf("%d KiB went over TCP: %s", over>>10, c.Why)
	if c.Carrier != "tcp" || c.Fallbacks != 1 || over == 0 || !strings.Contains(c.Why, "is down") || railOf(&c, "rxe0").State != "down" {
		t.Errorf("without rails: %+v", c)
	}
	for _, dev := range devs {
		ip(t, "link", "set", dev, "up")
	}
	mustEventually(t, "both rails are back", func() bool { return allUp(p, "rxe0") && allUp(p, "rxe1") })
	over = func() uint64 { c := channelOf(p.P.Engine); return railOf(&c, "tcp").BytesSent }()
	moved += move(t, p, r)
	if c = channelOf(p.P.Engine); c.Carrier != "rdma" || railOf(&c, "tcp").BytesSent != over || strings.Contains(c.Why, "carries at present") {
		t.Errorf("with rails again: %+v", c)
	}
	if st := p.P.Engine.Status(); st.Totals.ChannelsOpened != 1 || st.Totals.ChannelsDied != 0 {
		t.Errorf("channels: %d opened, %d died", st.Totals.ChannelsOpened, st.Totals.ChannelsDied)
	}
	once(t, p, moved)
	p.Close(t)
}

// A rail whose address changes is used under the new one.
func TestRailsAddress(t *testing.T) {
	devs := labRails(t, 2)
	p := stack(t, nil)
	r := transporttest.NewRand()
	moved := move(t, p, r)
	for _, change := range [][2]string{{"10.9.0.1/24", "10.9.0.7/24"}, {"10.9.0.7/24", "10.9.0.1/24"}} {
		failed := func() uint64 { c := channelOf(p.P.Engine); return railOf(&c, "rxe0").LanesFailed }
		before := failed()
		ip(t, "addr", "del", change[0], "dev", devs[0])
		ip(t, "addr", "add", change[1], "dev", devs[0])
		moved += move(t, p, r)
		took, err := eventually("the rail is back under its new address", 20*time.Second, func() bool { return failed() > before && allUp(p, "rxe0") })
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("%s to %s: back after %v", change[0], change[1], took.Round(time.Millisecond))
		moved += move(t, p, r)
	}
	once(t, p, moved)
	p.Close(t)
}

// A daemon that starts while all ports are down uses them when they come up.
func TestRailsDownAtStart(t *testing.T) {
	devs := labRails(t, 2)
	for _, dev := range devs {
		ip(t, "link", "set", dev, "down")
	}
	up := func() {
		for _, dev := range devs {
			ip(t, "link", "set", dev, "up")
		}
	}
	t.Cleanup(up)
	p := stack(t, nil)
	r := transporttest.NewRand()
	moved := move(t, p, r)
	c := channelOf(p.P.Engine)
	if c.Transport != "rdma" || c.Carrier != "tcp" || !strings.Contains(c.Why, "it is down") {
		t.Errorf("without rails: %+v", c)
	}
	t.Log(c.Why)
	up()
	mustEventually(t, "both rails are up", func() bool { return allUp(p, "rxe0") && allUp(p, "rxe1") })
	before := channelOf(p.P.Engine)
	moved += move(t, p, r)
	if c = channelOf(p.P.Engine); c.Carrier != "rdma" || shareOf(&before, &c, "tcp") != 0 {
		t.Errorf("with rails: %+v", c)
	}
	once(t, p, moved)
	p.Close(t)
}
