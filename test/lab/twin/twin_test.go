package twin

import (
	"fmt"
	"os"
	"os/exec"
	"slices"
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
	"late":      "delay 60ms reorder 1% duplicate 3%",
}

// wire sets this machine's end of the first wire.
func wire(name string) error {
	dev, _, _ := strings.Cut(os.Getenv("LAB_RAILS"), ",")
	_ = exec.Command("tc", "qdisc", "del", "dev", dev, "root").Run() // there may be none
	if wires[name] == "" {
		return nil
	}
	args := append([]string{"qdisc", "add", "dev", dev, "root", "netem", "limit", "20000"}, strings.Fields(wires[name])...)
	if out, err := exec.Command("tc", args...).CombinedOutput(); err != nil {
		return fmt.Errorf("tc %s: %w: %s", strings.Join(args, " "), err, out)
	}
	return nil
}

func TestConformanceRDMA(t *testing.T) { transporttest.RunTwin(t, machines(t, overRDMA)) }

func TestConformanceTCP(t *testing.T) { transporttest.RunTwin(t, machines(t, overTCP)) }

// rounds is a tenth where HEADRACE_FULL is not set.
func rounds(full int) int {
	if os.Getenv("HEADRACE_FULL") != "" {
		return full
	}
	return max(full/10, 2)
}

// Whatever the wire does, what lands is what was sent. How much slower that is goes into the report.
func TestBadWires(t *testing.T) {
	for _, c := range []struct {
		name string
		make func() transfer.Transport
	}{{"rdma", overRDMA}, {"tcp", overTCP}} {
		t.Run(c.name, func(t *testing.T) {
			machines(t, c.make).Meet(t, func(t *testing.T, m *transporttest.Machines) {
				m.Start(transporttest.StartOrder{Lanes: 2})
				var clean time.Duration
				for _, name := range []string{"clean", "loss", "delay", "reorder", "duplicate", "corrupt", "all"} {
					m[0].Do(name)
					m[1].Do(name)
					took, bytes := carry(m, rounds(40))
					if name == "clean" {
						clean = took
					}
					t.Logf("%-9s %-52q %6.1f MB/s, %5.1f times as long as clean", name, wires[name], float64(bytes)/1e6/took.Seconds(), took.Seconds()/clean.Seconds())
				}
			})
		})
	}
}

// carry makes transfers in either direction and gives the median time and the size of one.
func carry(m *transporttest.Machines, n int) (median time.Duration, bytes int) {
	m.Carry(0, transporttest.SendOrder{Tokens: 64}) // the channel may be new
	var took []time.Duration
	for i := range n {
		took = append(took, m.Carry(i%2, transporttest.SendOrder{Tokens: 256}))
	}
	slices.Sort(took)
	s := transporttest.DefaultShape
	return took[len(took)/2], int(256 * s.Layers * 2 * s.Heads * s.HeadBytes)
}

// Packets that are late, lost or doubled land nowhere after a fence.
func TestCanariesOnBadWires(t *testing.T) {
	for _, name := range []string{"late", "all"} {
		t.Run(name, func(t *testing.T) {
			machines(t, overRDMA).Meet(t, func(t *testing.T, m *transporttest.Machines) {
				m[0].Do(name)
				m[1].Do(name)
				transporttest.TwinCanaries(t, m, transporttest.StartOrder{Lanes: 2}, rounds(200))
			})
		})
	}
}
