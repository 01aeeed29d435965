//go:build amd64 || arm64

package telemetry

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/headrace/headrace/cgo"
	"github.com/headrace/headrace/transfer"
)

const (
	roceBlock  = 64 << 10
	roceMemory = 1 << 20
	rocePort   = 4790 // where the two ends of a test meet, over TCP
)

// roceEnd is one end of a queue pair between two machines of the lab.
type roceEnd struct {
	dev    *cgo.Device
	pd     *cgo.PD
	mr     *cgo.MR
	cq     *cgo.CQ
	qp     *cgo.QP
	mem    []byte
	gid    cgo.GID
	mtu    uint32
	netdev string
	tell   telling
	peer   roceHello
}

// roceHello is what the ends tell each other.
type roceHello struct {
	QPN, PSN, Key uint32
	Addr          uint64
	GID           [16]byte
}

// needTwo skips unless this is one of two machines.
func needTwo(t *testing.T) (vm int, own, peer, netdev string) {
	t.Helper()
	if os.Getenv("LAB_MACHINES") != "2" {
		t.Skip("soft RoCE is seen on a wire between two machines alone: make lab ARGS=\"-scenario telemetry-roce\"")
	}
	vm = int(os.Getenv("LAB_VM")[0] - '0')
	peer = strings.Split(os.Getenv("LAB_PEERS"), ",")[0]
	return vm, fmt.Sprintf("10.9.0.%d", vm), peer, strings.Split(os.Getenv("LAB_RAILS"), ",")[0]
}

// meet connects the two machines: the first one listens.
func meet(t *testing.T, vm int, own, peer string) net.Conn {
	t.Helper()
	deadline := time.Now().Add(60 * time.Second)
	if vm == 1 {
		l, err := net.Listen("tcp4", fmt.Sprintf("%s:%d", own, rocePort))
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		l.(*net.TCPListener).SetDeadline(deadline)
		c, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	for {
		c, err := net.DialTimeout("tcp4", fmt.Sprintf("%s:%d", peer, rocePort), time.Second)
		if err == nil {
			return c
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
		runtime.Gosched()
	}
}

// telling is the connection of the two machines' tests. Its decoder reads ahead: there is one for all that comes.
type telling struct {
	net.Conn
	in *json.Decoder
}

func swap[T any](t *testing.T, c telling, own T) (theirs T) {
	t.Helper()
	c.SetDeadline(time.Now().Add(150 * time.Second))
	if err := json.NewEncoder(c).Encode(own); err != nil {
		t.Fatal(err)
	}
	if err := c.in.Decode(&theirs); err != nil {
		t.Fatal(err)
	}
	return theirs
}

// openRoCE makes a queue pair and joins it with the other machine's.
func openRoCE(t *testing.T, tell telling, netdev string) *roceEnd {
	t.Helper()
	e := &roceEnd{tell: tell, netdev: netdev}
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	var err error
	e.mem, err = unix.Mmap(-1, 0, roceMemory, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	check(err)
	e.dev, err = cgo.Open("rxe0")
	check(err)
	port, err := e.dev.Port(1)
	check(err)
	e.mtu = port.ActiveMTU
	gids, err := e.dev.GIDTable(1)
	check(err)
	for _, g := range gids {
		if g.Type == cgo.GIDRoCEv2 && netip.AddrFrom16(g.Addr).Is4In6() {
			e.gid = g
		}
	}
	e.pd, err = e.dev.NewPD()
	check(err)
	e.mr, err = e.pd.Register(e.mem, cgo.LocalWrite|cgo.RemoteWrite)
	check(err)
	e.cq, err = e.dev.NewCQ(256, nil)
	check(err)
	e.qp, err = e.pd.NewQP(e.cq, e.cq, cgo.QPCaps{SendWR: 128, RecvWR: 16, SendSGE: 1, RecvSGE: 1})
	check(err)
	t.Cleanup(func() {
		if err := errors.Join(e.qp.Close(), e.cq.Close(), e.mr.Close(), e.pd.Close(), e.dev.Close(), unix.Munmap(e.mem)); err != nil {
			t.Error(err)
		}
	})
	psn := uint32(time.Now().UnixNano()) & 0xffffff
	e.peer = swap(t, tell, roceHello{QPN: e.qp.Num, PSN: psn, Key: e.mr.RKey, Addr: uint64(uintptr(unsafe.Pointer(&e.mem[0]))), GID: e.gid.Addr})
	check(e.qp.To(cgo.QPInit, cgo.QPAttr{Port: 1, Access: cgo.LocalWrite | cgo.RemoteWrite}))
	check(e.qp.To(cgo.QPRTR, cgo.QPAttr{
		Port: 1, PathMTU: e.mtu, DestQPN: e.peer.QPN, RQPSN: e.peer.PSN, MaxReadsServed: 1, MinRNRTimer: 12,
		IsGlobal: 1, DGID: e.peer.GID, SGIDIndex: e.gid.Index, HopLimit: 64,
	}))
	check(e.qp.To(cgo.QPRTS, cgo.QPAttr{
		Timeout: 14, RetryCount: 7, RNRRetry: 7, SQPSN: psn, MaxReads: 1,
	}))
	return e
}

// write writes blocks to the other machine and waits for all of them.
func (e *roceEnd) write(t *testing.T, blocks int) {
	t.Helper()
	const window = 32
	at, wcs := uint64(uintptr(unsafe.Pointer(&e.mem[0]))), make([]cgo.WC, window)
	deadline := time.Now().Add(120 * time.Second)
	for posted, done := 0, 0; done < blocks; {
		for ; posted < blocks && posted-done < window; posted++ {
			offset := uint64(posted%(roceMemory/roceBlock)) * roceBlock
			wr := cgo.WR{ID: uint64(posted + 1), Local: at + offset, Remote: e.peer.Addr + offset, Len: roceBlock, LKey: e.mr.LKey, RKey: e.peer.Key, Op: cgo.Write, Flags: cgo.Signaled}
			if n, errno := e.qp.PostSend([]cgo.WR{wr}); n != 1 {
				t.Fatal(errno)
			}
		}
		n, err := e.cq.Poll(wcs)
		if err != nil {
			t.Fatal(err)
		}
		for _, wc := range wcs[:n] {
			if wc.Status != cgo.Success {
				t.Fatalf("write %d: %v", wc.ID, wc.Status)
			}
			done++
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d of %d blocks are written after 2 min", done, blocks)
		}
		if n == 0 {
			runtime.Gosched()
		}
	}
}

// Between two machines, over a wire that loses packets, the programs count what soft RoCE counts, packet for packet, and what
// was sent again is what was sent beyond the blocks.
func TestRoCEPacketsAgreeWithTheDevicesCounters(t *testing.T) {
	vm, own, peer, netdev := needTwo(t)
	dev, err := netlink.LinkByName(netdev)
	if err != nil {
		t.Fatal(err)
	}
	conn := meet(t, vm, own, peer)
	tell := telling{conn, json.NewDecoder(conn)}
	defer tell.Close()
	losses := []float64{0, 1}
	if os.Getenv("HEADRACE_FULL") != "" {
		losses = append(losses, 3)
	}
	for _, loss := range losses {
		t.Run(fmt.Sprintf("%v percent", loss), func(t *testing.T) {
			e := openRoCE(t, tell, netdev)
			if loss > 0 {
				lose(t, dev, loss)
				defer netlink.QdiscDel(netlink.NewNetem(netlink.QdiscAttrs{LinkIndex: dev.Attrs().Index, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT}, netlink.NetemQdiscAttrs{}))
			}
			e.compare(t, vm, loss)
		})
	}
}

func (e *roceEnd) compare(t *testing.T, vm int, loss float64) {
	const blocks = 300
	tel := openFor(t, Config{Mode: EBPF, Posts: needPosts(t), Cgroup: ownCgroupOf(t)})
	g := tel.Channel()
	defer g.Close()
	end := g.Lane(transfer.Flow{Transport: "rdma", Queue: &transfer.QueuePair{
		Device: "rxe0", Port: 1, Netdev: e.netdev, Num: e.qp.Num, PeerNum: e.peer.QPN, PeerPort: netip.AddrFrom16(e.peer.GID),
	}})
	before, err := readCounters(os.DirFS("/sys"), "rxe0", 1)
	if err != nil {
		t.Fatal(err)
	}
	swap(t, e.tell, "begin")
	if vm == 2 {
		e.write(t, blocks)
	}
	swap(t, e.tell, "written")
	after, err := readCounters(os.DirFS("/sys"), "rxe0", 1)
	if err != nil {
		t.Fatal(err)
	}
	w, rail := g.Wire(), tel.Rails()[0]
	if w.Source != sourceEBPF || rail.Source != sourceEBPF {
		t.Fatalf("measured by %s: %s", w.Source, w.Why)
	}
	delta := func(name string) uint64 { return after[name] - before[name] }
	for name := range after {
		if d := delta(name); d > 0 {
			t.Logf("hw_counters/%s: %d", name, d)
		}
	}
	t.Logf("eBPF: sent %+v", rail.Sent)
	t.Logf("eBPF: received %+v", rail.Received)
	within(t, "packets sent", rail.Sent.Packets, delta("sent_pkts"), 0.05)
	within(t, "packets received", rail.Received.Packets, delta("rcvd_pkts"), 0.05)
	within(t, "the lane's packets sent", w.SentPackets, delta("sent_pkts"), 0.05)
	if vm == 2 {
		distinct := uint64(blocks * roceBlock / int(e.mtu))
		again := delta("sent_pkts") - distinct // the writer sends nothing but writes
		within(t, "packets sent again", w.RetransmittedPackets, again, 0.05)
		within(t, "bytes sent", w.SentBytes, delta("sent_pkts")*uint64(e.mtu), 0.05)
		within(t, "bytes sent again", w.RetransmittedBytes, again*uint64(e.mtu), 0.05)
		if loss > 0 && (again < 10 || delta("completer_retry_err") == 0) {
			t.Errorf("%d packets were sent again, in %d tries: nothing was lost", again, delta("completer_retry_err"))
		}
		if s := tel.Status().Posts; s.Count < blocks/64 {
			t.Errorf("%d of %d posts were timed: %+v", s.Count, blocks, s)
		} else {
			t.Logf("from post to completion: %+v", s)
		}
	}
	end()
	if left := g.Wire(); left.SentPackets != w.SentPackets {
		t.Errorf("%+v after the lane's end, %+v before", left, w)
	}
	if r := tel.Rails()[0]; r.Sent.Packets < rail.Sent.Packets {
		t.Errorf("the rail lost packets with its lane: %+v, before %+v", r.Sent, rail.Sent)
	}
}

// ownCgroupOf is where this process is; the programs of sockets have to be somewhere.
func ownCgroupOf(t *testing.T) string {
	t.Helper()
	dir, err := ownCgroup(os.ReadFile)
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Clean(dir)
}
