package telemetry

import (
	"context"
	"errors"
	"io"
	"math"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/headrace/headrace/transfer"
)

// inLab says that what is missing is a failure.
func inLab() bool { return os.Getenv("HEADRACE_LAB") != "" }

// skip skips a test for want of something, by name; in the lab everything is there.
func skip(t *testing.T, format string, args ...any) {
	t.Helper()
	if inLab() {
		t.Fatalf(format, args...)
	}
	t.Skipf(format, args...)
}

// needSockets attaches the programs to a cgroup of the test's own, which this process moves into.
func needSockets(t *testing.T) (cgroup string) {
	t.Helper()
	if c := judge("sockets", closed(newSockets(""))); c.Answer != Yes {
		skip(t, "%s; %s", c.Reason, c.Remedy)
	}
	own, err := ownCgroup(os.ReadFile)
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp(own, "headrace-test-")
	if err != nil {
		skip(t, "no cgroup can be made: %v", err)
	}
	move := func(dir string) error {
		return os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(os.Getpid())), 0)
	}
	if err := move(dir); err != nil {
		t.Fatal(errors.Join(err, os.Remove(dir)))
	}
	t.Cleanup(func() {
		if err := errors.Join(move(own), os.Remove(dir)); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// newNetwork puts the test's goroutine into a network of its own, with a loopback that drops some of what is sent over it.
// Sockets stay in the network that they were made in.
func newNetwork(t *testing.T, lossPercent float64) {
	t.Helper()
	runtime.LockOSThread()
	old, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		old.Close()
		runtime.UnlockOSThread()
		skip(t, "no network of its own: %v", err)
	}
	t.Cleanup(func() {
		if err := errors.Join(unix.Setns(int(old.Fd()), unix.CLONE_NEWNET), old.Close()); err != nil {
			t.Error(err) // the thread stays locked, and ends with the test
			return
		}
		runtime.UnlockOSThread()
	})
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	// Segments as they are on a wire: without offloading, each is lost by itself.
	if err := errors.Join(netlink.LinkSetMTU(lo, 1500), netlink.LinkSetGSOMaxSize(lo, 3000), netlink.LinkSetUp(lo)); err != nil {
		t.Fatal(err)
	}
	if lossPercent > 0 {
		lose(t, lo, lossPercent)
	}
}

// lose makes a device drop packets: by netem, or where the kernel has none by a program of our own.
func lose(t *testing.T, dev netlink.Link, percent float64) {
	t.Helper()
	index := dev.Attrs().Index
	netem := netlink.NewNetem(netlink.QdiscAttrs{LinkIndex: index, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT}, netlink.NetemQdiscAttrs{Loss: float32(percent), Limit: 10000})
	err := netlink.QdiscAdd(netem)
	if err == nil {
		return
	}
	if inLab() {
		t.Fatalf("add netem: %v", err)
	}
	prog, perr := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, License: "GPL", Instructions: asm.Instructions{
		asm.FnGetPrandomU32.Call(),
		asm.JGT.Imm32(asm.R0, int32(percent/100*math.MaxUint32), "keep"),
		asm.Mov.Imm(asm.R0, 2), // TC_ACT_SHOT
		asm.Return(),
		asm.Mov.Imm(asm.R0, -1).WithSymbol("keep"),
		asm.Return(),
	}})
	if perr != nil {
		t.Fatal(err, perr)
	}
	l, perr := link.AttachTCX(link.TCXOptions{Interface: index, Program: prog, Attach: ebpf.AttachTCXIngress}) // the sender must not see it
	if perr != nil {
		t.Fatal(err, perr)
	}
	t.Cleanup(func() { errors.Join(l.Close(), prog.Close()) })
}

// pair is a connection whose ends are both lanes of one telemetry.
type pair struct {
	dialled, accepted *net.TCPConn
	near, far         transfer.Gauge
	endNear, endFar   func()
}

func connect(t *testing.T, tel *Telemetry, l net.Listener) *pair {
	t.Helper()
	accepted := make(chan net.Conn, 1)
	go func() {
		c, err := l.Accept()
		if err != nil {
			close(accepted)
			return
		}
		accepted <- c
	}()
	c, err := tel.Dial(t.Context(), l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	p := &pair{dialled: c.(*net.TCPConn), near: tel.Channel(), far: tel.Channel()}
	other, ok := <-accepted
	if !ok {
		t.Fatal("not accepted")
	}
	p.accepted = other.(*net.TCPConn)
	p.endNear, p.endFar = p.near.Lane(flowOf(t, p.dialled)), p.far.Lane(flowOf(t, p.accepted))
	t.Cleanup(func() { p.dialled.Close(); p.accepted.Close() })
	return p
}

func flowOf(t *testing.T, c *net.TCPConn) transfer.Flow {
	t.Helper()
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	return transfer.Flow{Transport: "tcp", Peer: c.RemoteAddr().(*net.TCPAddr).AddrPort().Addr(), Socket: raw}
}

// send moves bytes from one end to the other and waits until all of them are acknowledged.
func send(t *testing.T, from, to *net.TCPConn, size int64) {
	t.Helper()
	got := make(chan error, 1)
	go func() {
		_, err := io.CopyN(io.Discard, to, size)
		got <- err
	}()
	block := make([]byte, 64<<10)
	for left := size; left > 0; left -= int64(len(block)) {
		if _, err := from.Write(block); err != nil {
			t.Fatal(err)
		}
	}
	if err := <-got; err != nil {
		t.Fatal(err)
	}
	info := tcpInfo{flowOf(t, from).Socket}
	deadline := time.Now().Add(10 * time.Second)
	for time.Now().Before(deadline) {
		var left int
		if err := info.conn.Control(func(fd uintptr) { left, _ = unix.IoctlGetInt(int(fd), unix.SIOCOUTQ) }); err != nil {
			t.Fatal(err)
		}
		if left == 0 {
			return
		}
		runtime.Gosched()
	}
	t.Fatal("not acknowledged within 10 s")
}

// within fails when two figures differ by more than a share of the second.
func within(t *testing.T, what string, got, want uint64, share float64) {
	t.Helper()
	d := math.Abs(float64(got)-float64(want)) / math.Max(1, float64(want))
	t.Logf("%-28s eBPF %12d  kernel %12d  differ by %.2f %%", what, got, want, 100*d)
	if d > share {
		t.Errorf("%s: %d by eBPF, %d by the kernel: they differ by %.1f %%, at most %.0f %% is allowed", what, got, want, 100*d, 100*share)
	}
}

// listen opens the port that lanes come to, in this thread's network.
func listen(t *testing.T) net.Listener {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

func openFor(t *testing.T, cfg Config) *Telemetry {
	t.Helper()
	tel, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := tel.Close(); err != nil {
			t.Error(err)
		}
	})
	return tel
}

// Under loss, what the programs count is what TCP_INFO says, at both ends, also when the lane is gone.
func TestBytesAndRetransmissionsAgreeWithTCPInfoUnderLoss(t *testing.T) {
	for _, loss := range []float64{0, 1, 5} {
		t.Run(strconv.FormatFloat(loss, 'f', -1, 64)+" percent", func(t *testing.T) {
			cgroup := needSockets(t)
			newNetwork(t, loss)
			l := listen(t)
			tel := openFor(t, Config{Mode: EBPF, Cgroup: cgroup})
			tel.Listening(l)
			p := connect(t, tel, l)
			send(t, p.dialled, p.accepted, 16<<20)
			send(t, p.accepted, p.dialled, 4<<20)
			ends := []struct {
				name  string
				conn  *net.TCPConn
				gauge transfer.Gauge
				end   func()
			}{{"dialled", p.dialled, p.near, p.endNear}, {"accepted", p.accepted, p.far, p.endFar}}
			var said [2]counts // before either end closes
			for i, e := range ends {
				var err error
				if said[i], err = (tcpInfo{flowOf(t, e.conn).Socket}).read(); err != nil {
					t.Fatal(err)
				}
			}
			for i, e := range ends {
				want := said[i]
				w := e.gauge.Wire()
				if w.Source != sourceEBPF {
					t.Fatalf("the %s end is measured by %s: %s", e.name, w.Source, w.Why)
				}
				within(t, e.name+": bytes sent", w.SentBytes, want.sentBytes, 0.05)
				// The programs count what came twice as often as it came, the kernel once; not all that is sent again does come twice.
				// Without a loss it all does: a receiver that gets no processor is sent again what it has.
				within(t, e.name+": bytes received", w.ReceivedBytes, min(max(w.ReceivedBytes, want.receivedBytes), want.receivedBytes+said[1-i].againBytes), 0.05)
				within(t, e.name+": packets sent", w.SentPackets, want.sentPackets, 0.05)
				within(t, e.name+": packets received", w.ReceivedPackets, want.receivedPackets, 0.05)
				within(t, e.name+": bytes sent again", w.RetransmittedBytes, want.againBytes, 0.05)
				within(t, e.name+": packets sent again", w.RetransmittedPackets, want.againPackets, 0.05)
				// The programs are told once a round trip, TCP_INFO has every sample: after a timeout they differ for a while.
				t.Logf("%s: round trip: eBPF %.0f us, kernel %.0f us", e.name, w.RTTMicros, want.rttMicros)
				if w.RTTMicros <= 0 || w.RTTMicros > 1e6 {
					t.Errorf("%s: a round trip takes %.0f us by eBPF, %.0f us by the kernel", e.name, w.RTTMicros, want.rttMicros)
				}
				if loss > 0 && want.againPackets < 10 {
					t.Errorf("only %d packets were sent again: nothing was lost", want.againPackets)
				}
				e.end()
				e.conn.Close()
				after := e.gauge.Wire()
				if after.SentBytes < w.SentBytes || after.RetransmittedPackets < w.RetransmittedPackets {
					t.Errorf("the counts went down with the lane: %+v, before %+v", after, w)
				}
				e.gauge.Close()
			}
			if n := entries(t, tel.sockets.objs.Lanes) + entries(t, tel.sockets.objs.Adopted); n != 0 {
				t.Errorf("%d lanes are left in the maps", n)
			}
		})
	}
}

// Sockets that never become lanes leave nothing behind: refused, without a way, closed by the peer, closed by us.
func TestSocketsThatBecomeNoLanesAreForgotten(t *testing.T) {
	cgroup := needSockets(t)
	newNetwork(t, 0)
	l := listen(t)
	tel := openFor(t, Config{Mode: EBPF, Cgroup: cgroup})
	tel.Listening(l)
	closed := listen(t)
	closed.Close()
	for _, addr := range []string{closed.Addr().String(), "192.0.2.1:1"} {
		if c, err := tel.Dial(t.Context(), addr); err == nil {
			c.Close()
			t.Errorf("%s answers", addr)
		}
	}
	near, err := tel.Dial(t.Context(), l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	far, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	if n := entries(t, tel.sockets.objs.Lanes); n != 2 {
		t.Errorf("%d sockets are counted, want both ends", n)
	}
	for _, c := range []net.Conn{near, far} {
		if err := c.(*net.TCPConn).SetLinger(0); err != nil {
			t.Fatal(err)
		}
		c.Close()
	}
	for deadline := time.Now().Add(10 * time.Second); entries(t, tel.sockets.objs.Lanes) > 0 && time.Now().Before(deadline); runtime.Gosched() {
	}
	if n := entries(t, tel.sockets.objs.Lanes); n != 0 {
		t.Errorf("%d sockets are left in the map", n)
	}
}

func entries(t *testing.T, m *ebpf.Map) (n int) {
	t.Helper()
	var k, v []byte
	all := m.Iterate()
	for all.Next(&k, &v) {
		n++
	}
	if err := all.Err(); err != nil {
		t.Fatal(err)
	}
	return n
}
