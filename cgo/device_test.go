package cgo

import (
	"bytes"
	"errors"
	"os"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// What follows needs a device: an RDMA NIC, or soft RoCE as in `make lab`, where a skip is a failure.

const memSize = 1 << 20

func openDevice(t testing.TB) *Device {
	t.Helper()
	v := Probe()
	if v.State != Listed || len(v.Devices) == 0 {
		if os.Getenv("HEADRACE_LAB") != "" {
			t.Fatalf("the lab has no device: %v", v.Err())
		}
		t.Skipf("%v (make lab has one)", v.Err())
	}
	t.Cleanup(func() {
		if h := Live(); h.Total() != 0 {
			t.Errorf("objects are left: %+v", h)
		}
	})
	return made(Open(v.Devices[0]))(t)
}

// made checks that something was made and closes it with the test, twice: the second time does nothing.
func made[T interface{ Close() error }](v T, err error) func(testing.TB) T {
	return func(t testing.TB) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			for range 2 {
				if err := v.Close(); err != nil {
					t.Error(err)
				}
			}
		})
		return v
	}
}

// end is one of two queue pairs that are connected with each other, and memory of its own.
type end struct {
	t   testing.TB
	gid GID
	pd  *PD
	ch  *Channel
	cq  *CQ
	qp  *QP
	mem []byte
	mr  *MR
}

func newEnd(t testing.TB, d *Device) *end {
	t.Helper()
	e := &end{t: t, gid: gidOf(t, d)}
	mem, err := unix.Mmap(-1, 0, memSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Munmap(mem) })
	e.mem = mem
	e.pd = made(d.NewPD())(t)
	e.mr = made(e.pd.Register(mem, LocalWrite|RemoteWrite|RemoteRead|BindWindow))(t)
	e.ch = made(d.NewChannel())(t)
	e.cq = made(d.NewCQ(256, e.ch))(t)
	e.qp = made(e.pd.NewQP(e.cq, e.cq, QPCaps{SendWR: 128, RecvWR: 64, SendSGE: 1, RecvSGE: 1, InlineBytes: 64}))(t)
	if e.qp.Caps.SendWR < 128 || e.qp.Caps.InlineBytes < 64 {
		t.Errorf("granted %+v", e.qp.Caps)
	}
	return e
}

// gidOf gives a RoCE v2 address of the first port, one that stands for an IPv4 address if there is one.
func gidOf(t testing.TB, d *Device) (gid GID) {
	t.Helper()
	table, err := d.GIDTable(1)
	if err != nil {
		t.Fatal(err)
	}
	found := false
	for _, g := range table {
		v4 := bytes.HasPrefix(g.Addr[:], []byte{10: 0xff, 11: 0xff})
		if g.Type == GIDRoCEv2 && (!found || v4) {
			gid, found = g, true
		}
	}
	if !found {
		t.Fatalf("no RoCE v2 address among %+v", table)
	}
	return gid
}

func (e *end) connect(to *end) {
	e.t.Helper()
	for _, a := range []QPAttr{
		{State: QPInit, Port: 1, Access: LocalWrite | RemoteWrite | RemoteRead | BindWindow},
		{
			State: QPRTR, Port: 1, PathMTU: 1024, DestQPN: to.qp.Num, MaxReadsServed: 4, MinRNRTimer: 12,
			IsGlobal: 1, DGID: to.gid.Addr, SGIDIndex: e.gid.Index, HopLimit: 64,
		},
		{State: QPRTS, Timeout: 14, RetryCount: 7, RNRRetry: 7, MaxReads: 4},
	} {
		if err := e.qp.To(a.State, a); err != nil {
			e.t.Fatal(err)
		}
		if s, err := e.qp.State(); err != nil || s != a.State {
			e.t.Fatalf("state %v, %v", s, err)
		}
	}
}

func newEnds(t testing.TB) (a, b *end) {
	t.Helper()
	d := openDevice(t)
	a, b = newEnd(t, d), newEnd(t, d)
	a.connect(b)
	b.connect(a)
	return a, b
}

func (e *end) addr(off int) uint64 { return uint64(uintptr(unsafe.Pointer(&e.mem[off]))) }

func (e *end) post(wrs ...WR) {
	e.t.Helper()
	if n, errno := e.qp.PostSend(wrs); n != len(wrs) || errno != 0 {
		e.t.Fatalf("posted %d of %d: %v", n, len(wrs), errno)
	}
}

func (e *end) recv(id uint64) {
	e.t.Helper()
	if n, errno := e.qp.PostRecv([]Recv{{ID: id}}); n != 1 || errno != 0 {
		e.t.Fatalf("posted %d receives: %v", n, errno)
	}
}

// wait takes the next completion: arm, poll again, park on the channel's descriptor.
func (e *end) wait() WC {
	e.t.Helper()
	wc := make([]WC, 1)
	for deadline := time.Now().Add(20 * time.Second); time.Now().Before(deadline); {
		if n, err := e.cq.Poll(wc); err != nil {
			e.t.Fatal(err)
		} else if n == 1 {
			return wc[0]
		}
		if err := e.cq.Arm(); err != nil {
			e.t.Fatal(err)
		}
		if n, err := e.cq.Poll(wc); err != nil {
			e.t.Fatal(err)
		} else if n == 1 {
			return wc[0]
		}
		fds := []unix.PollFd{{Fd: int32(e.ch.FD), Events: unix.POLLIN}}
		if _, err := unix.Poll(fds, 5000); err != nil && err != unix.EINTR {
			e.t.Fatal(err)
		}
		for e.ch.Event() == 0 {
		}
	}
	e.t.Fatal("no completion came")
	return WC{}
}

func (e *end) want(id uint64, status Status, op WCOp) WC {
	e.t.Helper()
	wc := e.wait()
	if wc.ID != id || wc.Status != status || status == Success && wc.Op != op || wc.QPN != e.qp.Num {
		e.t.Fatalf("completion %+v (%v), want id %d, %v, op %d", wc, wc.Status, id, status, op)
	}
	return wc
}

func fillWith(b []byte, salt byte) {
	for i := range b {
		b[i] = byte(i*7) ^ byte(i>>8) ^ salt
	}
}

func TestDeviceTellsWhatItIs(t *testing.T) {
	d := openDevice(t)
	a, err := d.Attr()
	if err != nil || a.Ports == 0 || a.MaxQPWR == 0 || a.MaxMRSize == 0 {
		t.Fatalf("%+v, %v", a, err)
	}
	p, err := d.Port(1)
	if err != nil || p.State != PortActive || p.ActiveMTU < 256 || p.ActiveMTU > p.MaxMTU || p.GIDs == 0 {
		t.Fatalf("%+v, %v", p, err)
	}
	t.Logf("%s: firmware %q, memory windows %v; port %v, MTU %d of %d, %v, %d Mb/s", d.Name, a.Firmware(), a.MemoryWindows(), p.State, p.ActiveMTU, p.MaxMTU, p.LinkLayer, p.RateMbps())
	if key, err := d.PKey(1, 0); err != nil || key&0x7fff != 0x7fff {
		t.Errorf("P_Key %#x, %v", key, err)
	}
	if _, err := d.Port(99); err == nil {
		t.Error("port 99 was found")
	}
	table, err := d.GIDTable(1)
	if err != nil {
		t.Fatal(err)
	}
	for _, g := range table { // both ways of asking say the same
		if file, err := gidFromSysfs("/sys/class/infiniband", d.Name, 1, int(g.Index)); err != nil || file != g {
			t.Errorf("%+v, and by the files %+v, %v", g, file, err)
		}
	}
	if fd, err := d.AsyncFD(); err != nil || fd < 0 {
		t.Errorf("events: %d, %v", fd, err)
	}
	if e, err := d.AsyncEvent(); !errors.Is(err, syscall.EAGAIN) {
		t.Errorf("event %+v, %v", e, err)
	}
}

func TestWriteAndAnnounce(t *testing.T) {
	a, b := newEnds(t)
	fillWith(a.mem, 1)
	b.recv(77)
	wrs := make([]WR, 0, 101)
	const piece = 4096
	for i := range 100 { // scattered, the last ones first
		wrs = append(wrs, WR{Local: a.addr(i * piece), Remote: b.addr((99 - i) * piece), ID: uint64(i), Len: piece, LKey: a.mr.LKey, RKey: b.mr.RKey})
	}
	wrs = append(wrs, WR{Local: a.addr(memSize - 64), Remote: b.addr(memSize - 64), ID: 100, Len: 64, LKey: a.mr.LKey, RKey: b.mr.RKey, Imm: 0xdeadbeef, Op: WriteImm, Flags: Signaled | Inline})
	a.post(wrs...)
	if wc := b.want(77, Success, WCRecvWrite); wc.Imm != 0xdeadbeef || wc.HasImm != 1 {
		t.Errorf("announced by %+v", wc)
	}
	for i := range 100 { // an announcement comes after what was written before it
		if !bytes.Equal(b.mem[(99-i)*piece:(100-i)*piece], a.mem[i*piece:(i+1)*piece]) {
			t.Fatalf("piece %d is torn", i)
		}
	}
	a.want(100, Success, WCWrite)
}

func TestRead(t *testing.T) {
	a, b := newEnds(t)
	fillWith(b.mem, 2)
	a.post(WR{Local: a.addr(0), Remote: b.addr(0), ID: 5, Len: memSize, LKey: a.mr.LKey, RKey: b.mr.RKey, Op: Read, Flags: Signaled})
	a.want(5, Success, WCRead)
	if !bytes.Equal(a.mem, b.mem) {
		t.Error("what was read is not what is there")
	}
}

func TestSendCarriesTheImmediate(t *testing.T) {
	a, b := newEnds(t)
	copy(a.mem, "over here")
	if n, errno := b.qp.PostRecv([]Recv{{Local: b.addr(100), ID: 1, Len: 64, LKey: b.mr.LKey}, {ID: 2}}); n != 2 || errno != 0 {
		t.Fatal(n, errno)
	}
	a.post(WR{Local: a.addr(0), ID: 3, Len: 9, LKey: a.mr.LKey, Op: SendImm, Imm: 42}, WR{ID: 4, Op: Send, Flags: Signaled})
	if wc := b.want(1, Success, WCRecv); wc.Bytes != 9 || wc.Imm != 42 || wc.HasImm != 1 {
		t.Errorf("%+v", wc)
	}
	if wc := b.want(2, Success, WCRecv); wc.Bytes != 0 || wc.HasImm != 0 {
		t.Errorf("%+v", wc)
	}
	a.want(4, Success, WCSend)
	if string(b.mem[100:109]) != "over here" {
		t.Errorf("received %q", b.mem[100:109])
	}
}

// The fence by memory window: after the invalidation no byte lands, and the writer's lane is in the error state.
func TestInvalidatedWindowIsAFence(t *testing.T) {
	a, b := newEnds(t)
	attr, err := b.pd.dev.Attr()
	if err != nil || !attr.MemoryWindows() {
		if os.Getenv("HEADRACE_LAB") != "" {
			t.Fatalf("the lab's device has no memory windows: %v", err)
		}
		t.Skipf("no memory windows of type 2: %+v, %v", attr, err)
	}
	w := made(b.pd.NewWindow())(t)
	first := w.RKey
	if err := b.qp.PostBind(w, b.mr, b.addr(4096), 8192, RemoteWrite, 1); err != nil {
		t.Fatal(err)
	}
	b.want(1, Success, WCBindMW)
	if w.RKey == first {
		t.Error("the bind did not change the key")
	}
	fillWith(a.mem, 3)
	write := WR{Local: a.addr(0), Remote: b.addr(4096), Len: 8192, LKey: a.mr.LKey, RKey: w.RKey, Flags: Signaled}
	write.ID = 2
	a.post(write)
	a.want(2, Success, WCWrite)
	if !bytes.Equal(a.mem[:8192], b.mem[4096:4096+8192]) {
		t.Fatal("the write through the window did not land")
	}
	b.post(WR{ID: 3, RKey: w.RKey, Op: LocalInv, Flags: Signaled})
	b.want(3, Success, WCLocalInv)
	canary := bytes.Repeat([]byte{0xdd}, memSize)
	copy(b.mem, canary)
	write.ID = 4
	a.post(write)
	a.want(4, RemoteAccess, WCOther)
	for _, e := range []*end{a, b} {
		if s, err := e.qp.State(); err != nil || s != QPError {
			t.Errorf("state %v, %v", s, err)
		}
	}
	if !bytes.Equal(b.mem, canary) {
		t.Error("a byte landed after the fence")
	}
}

// A write outside of what was registered, or with a wrong key, lands nowhere.
func TestWrongKeyIsRefused(t *testing.T) {
	for name, c := range map[string]struct {
		off uint64
		key uint32
	}{"key": {0, 0x55}, "end": {memSize - 10, 0}} {
		t.Run(name, func(t *testing.T) {
			a, b := newEnds(t)
			a.post(WR{Local: a.addr(0), Remote: b.addr(0) + c.off, ID: 1, Len: 100, LKey: a.mr.LKey, RKey: b.mr.RKey ^ c.key, Flags: Signaled})
			a.want(1, RemoteAccess, WCOther)
			if !bytes.Equal(b.mem, make([]byte, memSize)) {
				t.Error("a byte was written")
			}
		})
	}
}

// The error state flushes whatever was posted, in order; nothing is left under way.
func TestErrorStateFlushes(t *testing.T) {
	a, b := newEnds(t)
	for i := range 10 {
		b.recv(uint64(i))
	}
	if err := b.qp.To(QPError, QPAttr{}); err != nil {
		t.Fatal(err)
	}
	b.post(WR{ID: 100, Op: Send, Flags: Signaled})
	seen := make(map[uint64]bool)
	var receives uint64
	for range 11 {
		wc := b.wait()
		if wc.Status != Flushed || seen[wc.ID] {
			t.Fatalf("%+v (%v)", wc, wc.Status)
		}
		if wc.ID < 100 {
			if wc.ID != receives {
				t.Errorf("receive %d was flushed after %d others", wc.ID, receives)
			}
			receives++
		}
		seen[wc.ID] = true
	}
	fillWith(a.mem, 4)
	a.post(WR{Local: a.addr(0), Remote: b.addr(0), ID: 1, Len: 4096, LKey: a.mr.LKey, RKey: b.mr.RKey, Flags: Signaled})
	// What the dead end does not answer is given up by the writer's own error state.
	if err := a.qp.To(QPError, QPAttr{}); err != nil {
		t.Fatal(err)
	}
	a.want(1, Flushed, WCOther)
	if !bytes.Equal(b.mem, make([]byte, memSize)) {
		t.Error("a byte landed at an end in the error state")
	}
}

func TestDMABufErrors(t *testing.T) {
	d := openDevice(t)
	pd := made(d.NewPD())(t)
	f, err := os.Open("/dev/null")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, fd := range []int{-1, int(f.Fd())} {
		if mr, err := pd.RegisterDMABuf(fd, 0, 4096, 0, LocalWrite); err == nil {
			t.Errorf("descriptor %d was registered as %+v", fd, mr)
			mr.Close()
		} else {
			t.Log(err)
		}
	}
}

func TestRegisterErrors(t *testing.T) {
	d := openDevice(t)
	pd := made(d.NewPD())(t)
	if _, err := pd.Register(nil, LocalWrite); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("nothing was registered: %v", err)
	}
	mem, err := unix.Mmap(-1, 0, 4096, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(mem)
	if mr, err := pd.Register(mem, LocalWrite|RemoteWrite); err == nil {
		t.Error("memory that cannot be touched was registered")
		mr.Close()
	}
}
