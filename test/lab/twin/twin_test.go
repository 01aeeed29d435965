package twin

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/headrace/headrace/rdma"
	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/tcp"
	"github.com/headrace/headrace/transfer/transporttest"
)

// machines joins the two lab machines over their first wire.
func machines(t *testing.T, make func() transfer.Transport) transporttest.Twin {
	t.Helper()
	if os.Getenv("LAB_MACHINES") != "2" {
		t.Skip("needs two machines (make lab has them)")
	}
	if err := wire("clean"); err != nil {
		t.Fatal(err)
	}
	tw := transporttest.Twin{Number: 1, Do: map[string]func() error{}, Factory: transporttest.Factory{New: make, Config: patient}}
	if os.Getenv("LAB_VM") == "2" {
		tw.Number = 2
	}
	tw.Hosts[0], tw.Hosts[1], _ = strings.Cut(os.Getenv("LAB_HOSTS"), ",")
	for name := range wires {
		tw.Do[name] = func() error { return wire(name) }
	}
	t.Cleanup(func() {
		if err := wire("clean"); err != nil {
			t.Error(err)
		}
	})
	return tw
}

// patient gives emulated machines the time to agree on fences and to answer pings.
func patient(c *transfer.Config) {
	c.FenceGrace, c.DeadAfter, c.DialTimeout = time.Second, 20*time.Second, 20*time.Second
}

func overRDMA() transfer.Transport { return rdma.New(rdma.Config{}) }

// overPatientRDMA waits half a second for an acknowledgement before it sends again: where the machines get little of their host's processors
// those of soft RoCE come late, and its going back then breaks lanes of a wire that has lost nothing. See rdma/stall.go.
func overPatientRDMA() transfer.Transport { return rdma.New(rdma.Config{AckTimeout: 17}) }

func overTCP() transfer.Transport { return tcp.New(tcp.Config{}) }

// wires is what is done to what each machine sends.
var wires = map[string]string{
	"clean":     "",
	"loss":      "loss 1%",
	"delay":     "delay 10ms",
	"reorder":   "delay 2ms reorder 1%",
	"duplicate": "duplicate 2%",
	"corrupt":   "corrupt 0.2%",
	"all":       "delay 3ms reorder 0.5% loss 0.5% duplicate 0.5% corrupt 0.1%",
	"late":      "delay 20ms reorder 1% duplicate 3%",
}

// wire sets this machine's end of the first wire. It is an error if one that was to lose packets has lost none.
func wire(name string) error {
	dev, _, _ := strings.Cut(os.Getenv("LAB_RAILS"), ",")
	before, err := exec.Command("tc", "-s", "qdisc", "show", "dev", dev).Output()
	if err != nil {
		return fmt.Errorf("tc -s: %w", err)
	}
	if m := counted.FindSubmatch(before); m != nil {
		sent, _ := strconv.Atoi(string(m[1])) // digits
		if err := exec.Command("tc", "qdisc", "del", "dev", dev, "root").Run(); err != nil {
			return fmt.Errorf("tc qdisc del: %w", err)
		}
		if sent > 2000 && bytes.Contains(before, []byte("loss")) && string(m[2]) == "0" {
			return fmt.Errorf("netem lost none of %d packets: the test shows nothing: %s", sent, before)
		}
	}
	if wires[name] == "" {
		return nil
	}
	// A segment that the card would cut is one packet to netem: of sixty at a time it would lose few or none.
	if out, err := exec.Command("ip", "link", "set", "dev", dev, "gso_max_segs", "1").CombinedOutput(); err != nil {
		return fmt.Errorf("ip link set dev %s gso_max_segs 1: %w: %s", dev, err, out)
	}
	args := append([]string{"qdisc", "add", "dev", dev, "root", "netem", "limit", "20000"}, strings.Fields(wires[name])...)
	if out, err := exec.Command("tc", args...).CombinedOutput(); err != nil {
		return fmt.Errorf("tc %s: %w: %s", strings.Join(args, " "), err, out)
	}
	return nil
}

// counted is what tc says of a netem.
var counted = regexp.MustCompile(`(?s)qdisc netem.*?Sent \d+ bytes (\d+) pkt \(dropped (\d+)`)

func TestConformanceRDMA(t *testing.T) { transporttest.RunTwin(t, machines(t, overPatientRDMA)) }

func TestConformanceTCP(t *testing.T) { transporttest.RunTwin(t, machines(t, overTCP)) }

// rounds is a tenth where HEADRACE_FULL is not set.
func rounds(full int) int {
	if os.Getenv("HEADRACE_FULL") != "" {
		return full
	}
	return max(full/10, 2)
}

// besideTCP adds TCP as the last rail, as daemons have it: soft RoCE fails lanes of its own accord where packets are sent
// again (see rdma/stall.go), and when it fails the last two at once their lease goes on over TCP.
func besideTCP(c *transfer.Config) {
	patient(c)
	c.Transports = append(c.Transports, overTCP())
}

// Whatever the wire does, what lands is what was sent. How much slower that is goes into the report.
func TestBadWires(t *testing.T) {
	for _, c := range []struct {
		name   string
		make   func() transfer.Transport
		config func(*transfer.Config)
	}{{"rdma", overRDMA, besideTCP}, {"tcp", overTCP, patient}} {
		t.Run(c.name, func(t *testing.T) {
			tw := machines(t, c.make)
			tw.Factory.Config = c.config
			tw.Meet(t, func(t *testing.T, m *transporttest.Machines) {
				m.Start(transporttest.StartOrder{Lanes: 2})
				m.Carry(0, transporttest.SendOrder{Tokens: tokens})
				m.Carry(1, transporttest.SendOrder{Tokens: tokens})
				took := make(map[string][]time.Duration)
				names := []string{"clean", "loss", "delay", "reorder", "duplicate", "corrupt", "all"}
				for range rounds(20) { // in turn, so that a machine that is busy for a while slows all of them
					for _, name := range names {
						for from := range m {
							m[0].Do(name)
							m[1].Do(name)
							took[name] = append(took[name], m.Carry(from, transporttest.SendOrder{Tokens: tokens}))
						}
					}
				}
				s := transporttest.DefaultShape
				size := float64(tokens * s.Layers * 2 * s.Heads * s.HeadBytes)
				for _, name := range names {
					d := median(took[name])
					t.Logf("%-9s %-68q %6.1f MB/s, %4.1f times as long as clean", name, wires[name], size/1e6/d.Seconds(), d.Seconds()/median(took["clean"]).Seconds())
				}
				sent, failed := sentOver(m)
				if t.Logf("bytes sent over %v, lanes failed %v", sent, failed); sent[c.name] == 0 {
					t.Errorf("%s carried nothing", c.name)
				}
			})
		})
	}
}

// sentOver counts what both machines' channels sent, by transport, and how many lanes failed.
func sentOver(m *transporttest.Machines) (sent, failed map[string]uint64) {
	sent, failed = make(map[string]uint64), make(map[string]uint64)
	for _, mc := range m {
		for _, c := range mc.Status().Channels {
			for _, r := range c.Rails {
				sent[r.Transport] += r.BytesSent
				failed[r.Transport] += r.LanesFailed
			}
		}
	}
	return sent, failed
}

// tokens of a transfer: 8 MiB.
const tokens = 512

func median(d []time.Duration) time.Duration {
	d = slices.Sorted(slices.Values(d))
	return d[len(d)/2]
}

// Packets that are late, lost or doubled land nowhere after a fence.
func TestCanariesOnBadWires(t *testing.T) {
	for _, name := range []string{"late", "all"} {
		t.Run(name, func(t *testing.T) {
			machines(t, overRDMA).Meet(t, func(t *testing.T, m *transporttest.Machines) {
				m[0].Do(name)
				m[1].Do(name)
				transporttest.TwinCanaries(t, m, transporttest.StartOrder{Lanes: 2}, rounds(100))
			})
		})
	}
}
