package node_test

import (
	"errors"
	"io"
	"net"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/headrace/headrace/internal/leaktest"
	"github.com/headrace/headrace/transfer/node/wire"
	"golang.org/x/sys/unix"
)

// rawConn speaks the protocol by hand.
type rawConn struct {
	*net.UnixConn
	t *testing.T
	r *wire.Reader
}

func rawDial(t *testing.T, socket string) *rawConn {
	t.Helper()
	c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetReadDeadline(time.Now().Add(10 * time.Second))
	return &rawConn{UnixConn: c, t: t, r: wire.NewReader(c)}
}

func (c *rawConn) send(version uint8, flags uint32, request uint64, m wire.Message, fds ...int) {
	c.t.Helper()
	b, err := wire.AppendFrame(nil, version, flags, request, m)
	if err != nil {
		c.t.Fatal(err)
	}
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	if _, _, err := c.WriteMsgUnix(b, oob, nil); err != nil {
		c.t.Fatal(err)
	}
}

func (c *rawConn) hello(id string, low, high uint16) {
	c.t.Helper()
	c.send(uint8(high), 0, 1, wire.Hello{VersionMin: low, VersionMax: high, EngineID: id})
}

func (c *rawConn) next() (*wire.Frame, wire.Message) {
	c.t.Helper()
	f, err := c.r.Read()
	if err != nil {
		c.t.Fatalf("read: %v", err)
	}
	m, err := wire.Parse(f.Type, f.Payload)
	if err != nil {
		c.t.Fatal(err)
	}
	return f, m
}

func (c *rawConn) expect(want wire.Type) wire.Message {
	c.t.Helper()
	f, m := c.next()
	if f.Type != want {
		c.t.Fatalf("got %s %+v, want %s", f.Type, m, want)
	}
	return m
}

// refused expects an ERROR answering request.
func (c *rawConn) refused(request uint64, code wire.Code, want string) {
	c.t.Helper()
	f, m := c.next()
	e, ok := m.(*wire.Error)
	if !ok || f.Request != request || e.Code != code || !strings.Contains(e.Text, want) {
		c.t.Errorf("request %d: got %s for request %d: %+v; want %s %q", request, f.Type, f.Request, m, code, want)
	}
}

// ended expects the connection's end, after a GOODBYE where there may be one.
func (c *rawConn) ended() {
	c.t.Helper()
	for {
		f, err := c.r.Read()
		if err == nil && f.Type == wire.TypeGoodbye {
			continue
		}
		if !errors.Is(err, io.EOF) && !errors.Is(err, unix.ECONNRESET) {
			c.t.Errorf("connection goes on: %+v, %v", f, err)
		}
		return
	}
}

func TestHello(t *testing.T) {
	r := startNode(t, nodeConfig{NodeID: "node-a", Transport: "shm"})
	c := rawDial(t, r.Socket)
	c.hello("new", 2, 9) // a newer engine that still speaks 2
	ok := c.expect(wire.TypeHelloOK).(wire.HelloOK)
	if ok.Version != 2 || ok.NodeID != "node-a" || ok.Epoch != r.Epoch || ok.PID != uint32(r.PID) || ok.PingMS == 0 || ok.SilenceMS == 0 {
		t.Errorf("%+v", ok)
	}
	c.hello("new", 2, 2)
	c.refused(1, wire.CodeState, "once")

	for name, say := range map[string]func(c *rawConn){
		"the engine 3 to 4: upgrade the daemon": func(c *rawConn) { c.hello("x", 3, 4) },
		"the engine 0 to 1: upgrade the engine": func(c *rawConn) { c.hello("x", 0, 1) },
	} {
		c := rawDial(t, r.Socket)
		say(c)
		c.refused(1, wire.CodeVersion, "this daemon speaks versions 2 to 2 of the protocol with engines, "+name)
		c.ended()
	}
	c = rawDial(t, r.Socket)
	c.send(2, 0, 5, wire.Ping{})
	c.refused(5, wire.CodeState, "want HELLO")
	c.ended()
	c = rawDial(t, r.Socket)
	c.send(2, 0, 5, wire.Hello{VersionMin: 2, VersionMax: 2, EngineID: "x"}, 0)
	c.refused(5, wire.CodeDescriptor, "descriptors came with HELLO")
	c.ended()
	c = rawDial(t, r.Socket)
	c.hello(strings.Repeat("x", wire.MaxName), 2, 2) // longer than the transfer engine takes
	c.refused(1, wire.CodeInvalid, "")
	c.ended()
}

// Requests that make no sense are refused, and the connection lives on: frames are not lost.
func TestMalformedRequests(t *testing.T) {
	r := startNode(t, nodeConfig{NodeID: "node-a", Transport: "shm"})
	before := leaktest.Descriptors(t)
	c := rawDial(t, r.Socket)
	c.hello("e", 2, 2)
	c.expect(wire.TypeHelloOK)
	c.send(2, 0, 2, wire.RegisterRegion{Size: 4096})
	c.refused(2, wire.CodeDescriptor, "0 descriptors came with REGISTER_REGION, want 1")
	c.send(2, 0, 3, wire.RegisterRegion{Size: 4096}, 0, 1)
	c.refused(3, wire.CodeDescriptor, "2 descriptors")
	c.send(2, 0, 4, wire.RegisterRegion{Size: 4096}, make([]int, 200)...)
	c.refused(4, wire.CodeDescriptor, "truncated")
	c.send(2, 0, 5, wire.Ping{}, 0)
	c.refused(5, wire.CodeDescriptor, "1 descriptors came with PING, want 0")
	c.send(2, 0, 6, wire.RegisterRegion{Size: 4096, Layout: []byte("nonsense")}, 0)
	c.refused(6, wire.CodeLayout, "")
	c.send(2, 0, 0, wire.Ping{})
	c.refused(0, wire.CodeMalformed, "without a request id")
	c.send(1, 0, 7, wire.Ping{})
	c.refused(7, wire.CodeVersion, "agreed was 2")
	c.send(2, 2, 8, wire.Push{})
	c.refused(8, wire.CodeMalformed, "flags")
	c.send(2, wire.FlagQuiet, 9, wire.Ping{})
	c.refused(9, wire.CodeMalformed, "flags")
	c.send(2, 0, 10, wire.OK{})
	c.refused(10, wire.CodeUnknownType, "not a request")
	c.send(2, 0, 11, wire.Event{Kind: 0x99})
	c.refused(11, wire.CodeUnknownType, "not a request")
	c.send(2, 0, 12, wire.Revoke{Lease: 77})
	c.refused(12, wire.CodeUnknownLease, "")
	c.send(2, wire.FlagQuiet, 13, wire.Push{Lease: 77})
	c.refused(13, wire.CodeUnknownLease, "")
	handoff, _ := wire.AppendFrame(nil, 2, 0, 14, wire.Handoff{Lease: 1, Record: []byte("x")})
	for i := range 4 {
		handoff[wire.HeaderLen+8+i] = 0xff // a record of 4 GiB
	}
	if _, err := c.Write(handoff); err != nil {
		t.Fatal(err)
	}
	c.refused(14, wire.CodeMalformed, "record of 4294967295 exceeds")
	c.send(2, 0, 15, wire.Ping{Value: 42})
	if m := c.expect(wire.TypePong).(wire.Pong); m.Value != 42 {
		t.Errorf("pong %d", m.Value)
	}
	_ = c.Close()
	eventually(t, "descriptors closed", func() bool { return leaktest.Descriptors(t) <= before })
}

// Where frames are lost the connection ends, with the reason.
func TestLostFraming(t *testing.T) {
	r := startNode(t, nodeConfig{NodeID: "node-a", Transport: "shm"})
	for name, edit := range map[string]func([]byte){
		"magic":  func(b []byte) { b[0] = 'X' },
		"length": func(b []byte) { b[11] = 0xff },
	} {
		c := rawDial(t, r.Socket)
		c.hello(name, 2, 2)
		c.expect(wire.TypeHelloOK)
		b, _ := wire.AppendFrame(nil, 2, 0, 2, wire.Ping{})
		edit(b)
		if _, err := c.Write(b); err != nil {
			t.Fatal(err)
		}
		if ev := c.expect(wire.TypeGoodbye).(wire.Event); wire.Code(ev.Code) != wire.CodeFraming || ev.Text == "" {
			t.Errorf("%s: %+v", name, ev)
		}
		c.ended()
	}
	c := rawDial(t, r.Socket)
	if _, err := c.Write([]byte("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")); err != nil {
		t.Fatal(err)
	}
	c.refused(0, wire.CodeFraming, "bad magic")
	c.ended()
}

// A silent engine that asked to be watched is given up; one that did not is not.
func TestSilentEngine(t *testing.T) {
	r := startNode(t, nodeConfig{NodeID: "node-a", Transport: "shm"})
	c := rawDial(t, r.Socket)
	c.send(2, 0, 1, wire.Hello{VersionMin: 2, VersionMax: 2, SilenceMS: 50, EngineID: "silent"})
	c.expect(wire.TypeHelloOK)
	patient := rawDial(t, r.Socket)
	patient.hello("patient", 2, 2)
	patient.expect(wire.TypeHelloOK)
	if ev := c.expect(wire.TypeGoodbye).(wire.Event); wire.Code(ev.Code) != wire.CodeSlow {
		t.Errorf("%+v", ev)
	}
	c.ended()
	patient.send(2, 0, 2, wire.Ping{})
	patient.expect(wire.TypePong)
}

// A process of another user is refused, also where the socket's mode would let it in.
func TestOtherUserIsRefused(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can be somebody else for a moment")
	}
	dir, err := os.MkdirTemp("", "other-user") // t.TempDir lies in a folder closed to others
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	r := startNode(t, nodeConfig{NodeID: "node-a", Transport: "shm", Dir: dir})
	for path, mode := range map[string]os.FileMode{r.Socket: 0o666, dir: 0o755} {
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
	}
	conn := make(chan *net.UnixConn, 1)
	go func() { // on a thread of its own, whose credentials alone change
		defer close(conn)
		runtime.LockOSThread()
		const nobody, keep = 65534, ^uintptr(0)
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, keep, nobody, keep); errno != 0 {
			t.Error(errno)
			return // still locked: the thread ends with the goroutine
		}
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err == nil {
			err = unix.Connect(fd, &unix.SockaddrUnix{Name: r.Socket})
		}
		if err != nil {
			t.Errorf("connect as another user: %v", err)
			return
		}
		f := os.NewFile(uintptr(fd), "socket")
		defer f.Close()
		c, err := net.FileConn(f)
		if err != nil {
			t.Error(err)
			return
		}
		conn <- c.(*net.UnixConn)
	}()
	uc := <-conn
	if uc == nil {
		return
	}
	defer uc.Close()
	c := &rawConn{UnixConn: uc, t: t, r: wire.NewReader(uc)}
	c.refused(0, wire.CodeDenied, "user id 65534 may not attach")
	c.ended()
}
