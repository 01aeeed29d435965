package rdma

import (
	"os"
	"testing"
	"time"

	"github.com/headrace/headrace/cgo"
	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/transporttest"
)

// needDevice skips a test where there is no RDMA port; in the lab there is one, and a skip would be a failure.
func needDevice(t testing.TB) {
	t.Helper()
	rdma := New(Config{})
	err := rdma.Probe()
	if cerr := rdma.Close(); cerr != nil {
		t.Fatal(cerr)
	}
	switch {
	case err == nil:
	case os.Getenv("HEADRACE_LAB") != "":
		t.Fatalf("the lab has no RDMA: %v", err)
	default:
		t.Skipf("%v (make lab has it)", err)
	}
}

// checkObjects wants every object of libibverbs closed at the end.
func checkObjects(t testing.TB) {
	t.Helper()
	t.Cleanup(func() {
		if h := cgo.Live(); h.Total() != 0 {
			t.Errorf("objects are left: %+v", h)
		}
	})
}

// patient gives an emulated machine, which is some fifty times slower, the time to agree on fences and to answer pings.
func patient(c *transfer.Config) {
	c.FenceGrace, c.DeadAfter, c.DialTimeout = time.Second, 20*time.Second, 20*time.Second
}

func factory() transporttest.Factory {
	return transporttest.Factory{New: func() transfer.Transport { return New(Config{}) }, Config: patient}
}

func TestConformance(t *testing.T) {
	needDevice(t)
	checkObjects(t)
	transporttest.Run(t, factory())
}

func pulling() transporttest.Factory {
	f := factory()
	f.New = func() transfer.Transport { return New(Config{Op: OpRead}) }
	return f
}

// The same where the other end reads what is sent.
func TestConformanceRead(t *testing.T) {
	needDevice(t)
	checkObjects(t)
	transporttest.Run(t, pulling())
}

// One end writes, the other has its pieces read: each direction of a lane goes its own way.
func TestMixedOps(t *testing.T) {
	needDevice(t)
	checkObjects(t)
	ops, n := []string{OpRead, OpWrite}, 0
	f := factory()
	f.New = func() transfer.Transport { n++; return New(Config{Op: ops[n%2]}) }
	for range 2 { // first one end, then the other
		transporttest.RoundTrip(t, f)
		n++
	}
}

// The canaries once more, with every fence made by force that agreement does not make at once.
func TestForcedCanaries(t *testing.T) {
	needDevice(t)
	checkObjects(t)
	transporttest.ForcedCanaries(t, factory())
}

func TestForcedCanariesRead(t *testing.T) {
	needDevice(t)
	checkObjects(t)
	transporttest.ForcedCanaries(t, pulling())
}
