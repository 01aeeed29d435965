package twin

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/transporttest"
)

// Two rails between two machines: the first is what things are done to, the second also carries the control connection.

// late is how long packets are held up: longer than it takes to settle their lease over the other rail.
const late = 10 * time.Second

// railed joins the machines over two rails, RDMA first and TCP last.
func railed(t *testing.T) transporttest.Twin {
	t.Helper()
	devs, peers := strings.Split(os.Getenv("LAB_RAILS"), ","), strings.Split(os.Getenv("LAB_PEERS"), ",")
	if os.Getenv("LAB_MACHINES") != "2" || len(devs) < 2 || len(peers) < 2 {
		t.Skip("needs two machines with two rails (make lab ARGS=\"-scenario twin-rails\")")
	}
	tw := machines(t, overRDMA)
	far := peers[1]
	own := far[:len(far)-1] + strconv.Itoa(tw.Number)
	tw.Hosts[tw.Number-1], tw.Hosts[2-tw.Number] = own, far
	tw.Factory.Config = func(c *transfer.Config) {
		patient(c)
		c.Transports = []transfer.Transport{overRDMA(), overTCP()}
	}
	var mark uint64
	tw.Do["late-by-far"] = func() error { return netem(devs[0], "delay "+late.String()) }
	tw.Do["slow"] = func() error { return netem(devs[0], "rate 40mbit") }
	tw.Do["queued"] = func() error { return until("no packet waits", func() bool { return backlog(devs[0]) > 64<<10 }) }
	tw.Do["sent"] = func() error { // the queue is never empty: the rail is tried again all the time
		<-time.After(late + time.Second/2)
		return nil
	}
	tw.Do["down"] = func() error { return ip("link", "set", devs[0], "down") }
	tw.Do["up"] = func() error {
		err := ip("link", "set", devs[0], "up")
		mark = received(devs[0])
		return err
	}
	tw.Do["arrived"] = func() error {
		err := until("the late packets did not arrive", func() bool { return received(devs[0]) > mark+64 })
		fmt.Printf("%d packets came over the rail after its return\n", received(devs[0])-mark)
		return err
	}
	return tw
}

func netem(dev, what string) error {
	_ = exec.Command("tc", "qdisc", "del", "dev", dev, "root").Run() // there may be none
	args := append([]string{"qdisc", "add", "dev", dev, "root", "netem", "limit", "20000"}, strings.Fields(what)...)
	if out, err := exec.Command("tc", args...).CombinedOutput(); err != nil {
		return fmt.Errorf("tc %s: %w: %s", strings.Join(args, " "), err, out)
	}
	return nil
}

func ip(words ...string) error {
	if out, err := exec.Command("ip", words...).CombinedOutput(); err != nil {
		return fmt.Errorf("ip %s: %w: %s", strings.Join(words, " "), err, out)
	}
	return nil
}

// until polls with a deadline.
func until(not string, ok func() bool) error {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	deadline := time.Now().Add(30 * time.Second)
	for range tick.C {
		if ok() {
			return nil
		}
		if time.Now().After(deadline) {
			return errors.New(not)
		}
	}
	panic("unreachable")
}

var backlogBytes = regexp.MustCompile(`backlog (\d+)(K|M)?b`)

// backlog is how many bytes wait in an interface's queue.
func backlog(dev string) (n int) {
	out, err := exec.Command("tc", "-s", "qdisc", "show", "dev", dev).Output()
	if m := backlogBytes.FindSubmatch(out); err == nil && m != nil {
		n, _ = strconv.Atoi(string(m[1])) // digits
		switch string(m[2]) {
		case "K":
			n <<= 10
		case "M":
			n <<= 20
		}
	}
	return n
}

// received is how many packets came in over an interface.
func received(dev string) uint64 {
	b, err := os.ReadFile("/sys/class/net/" + dev + "/statistics/rx_packets")
	if err != nil {
		return 0
	}
	n, _ := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64) // the kernel's
	return n
}

// rails gives a machine's only channel, and its rails by name.
func rails(m *transporttest.Machine) (transfer.ChannelStatus, map[string]transfer.RailStatus) {
	list := m.Status().Channels
	by := make(map[string]transfer.RailStatus)
	if len(list) != 1 {
		return transfer.ChannelStatus{}, by
	}
	for _, r := range list[0].Rails {
		by[r.Name] = r
	}
	return list[0], by
}

func railUp(m *transporttest.Machines, name string) bool {
	for _, x := range m {
		if _, by := rails(x); by[name].LanesUp == 0 || by[name].LanesUp < by[name].Lanes {
			return false
		}
	}
	return true
}

// Packets that a dead rail still holds land nowhere once their lease is settled and its blocks are used for something else.
func TestRailsLatePackets(t *testing.T) {
	railed(t).Meet(t, func(t *testing.T, m *transporttest.Machines) {
		m.Start(transporttest.StartOrder{Lanes: 2})
		m.Carry(0, transporttest.SendOrder{Tokens: 512})
		if !railUp(m, "rxe0") || !railUp(m, "rxe1") {
			c, _ := rails(m[0])
			t.Fatalf("rails: %+v", c)
		}
		for range rounds(20) {
			m[0].Do("late-by-far")
			f := m.Send(0, transporttest.SendOrder{Tokens: 1024})
			f.Bind()
			m[0].Do("queued")
			m[1].Do("down")
			f.Settled()
			m[1].Do("up")
			f.Overwrite()
			m[0].Do("sent")
			m[1].Do("arrived")
			m[1].Canaries()
			m[0].Do("clean")
			if err := until("the rail is not back", func() bool { return railUp(m, "rxe0") }); err != nil {
				c, _ := rails(m[0])
				t.Fatalf("%v: %+v", err, c.Rails)
			}
			m.Carry(0, transporttest.SendOrder{Tokens: 512})
		}
		c, by := rails(m[0])
		t.Logf("lanes failed on the rail: %d, pieces at the other end that had landed before: %d", by["rxe0"].LanesFailed, m[1].Status().Totals.PiecesDuplicate)
		// The other rail carries meanwhile, and TCP only if soft RoCE fails that one's lane of its own accord.
		if c.Fallbacks > by["rxe1"].LanesFailed || by["rxe0"].LanesFailed == 0 {
			t.Errorf("channel: %+v", c)
		}
	})
}

// A rail that is slower than the other gets less, and does not hold leases up.
func TestRailsSlow(t *testing.T) {
	railed(t).Meet(t, func(t *testing.T, m *transporttest.Machines) {
		shape := transporttest.Shape{Layers: 16, Blocks: 64, BlockTokens: 16, Heads: 4, HeadBytes: 512}
		m.Start(transporttest.StartOrder{Lanes: 2, P: shape, D: shape})
		m.Carry(0, transporttest.SendOrder{Tokens: 512})
		even, bytes := carryShape(m, shape)
		m[0].Do("slow")
		m.Carry(0, transporttest.SendOrder{Tokens: 512}) // to learn it
		_, before := rails(m[0])
		slow, _ := carryShape(m, shape)
		_, after := rails(m[0])
		sent := func(name string) float64 { return float64(after[name].BytesSent - before[name].BytesSent) }
		share := sent("rxe0") / (sent("rxe0") + sent("rxe1"))
		t.Logf("a lease of %d MiB: %v over two equal rails, %v with one of them at 5 MB/s: it carried %.2f", bytes>>20, even.Round(time.Millisecond), slow.Round(time.Millisecond), share)
		for _, name := range []string{"rxe0", "rxe1"} {
			t.Logf("%s: %.1f MB/s, piece %.0f ms", name, after[name].SpeedBps/1e6, after[name].PieceMicros/1e3)
		}
		m[0].Do("clean")
		// On a busy machine the other rail is hardly faster: then the slow one's share is what its speed is worth.
		worth := after["rxe0"].SpeedBps / max(after["rxe0"].SpeedBps+after["rxe1"].SpeedBps, 1)
		if share > max(0.35, worth+0.1) {
			t.Errorf("the slow rail carried %.2f, by their speeds it is worth %.2f", share, worth)
		}
		// If the slow rail took its half, that alone would take this long; without it the other one would take twice as long as both.
		if half := time.Duration(float64(bytes) / 2 / 5e6 * float64(time.Second)); slow > max(half, 2*even) {
			t.Errorf("a lease took %v, half of it over the slow rail alone would take %v, and all over the other one %v", slow, half, 2*even)
		}
	})
}

func carryShape(m *transporttest.Machines, s transporttest.Shape) (took time.Duration, bytes int) {
	n := 4
	for range n {
		took += m.Carry(0, transporttest.SendOrder{Tokens: 1024})
	}
	return took / time.Duration(n), int(1024 * s.Layers * 2 * s.Heads * s.HeadBytes)
}
