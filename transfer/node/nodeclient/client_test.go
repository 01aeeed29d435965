package nodeclient

import (
	"context"
	"errors"
	"net"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/headrace/headrace/internal/leaktest"
	"github.com/headrace/headrace/internal/memfd"
	"github.com/headrace/headrace/internal/stall"
	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/node/wire"
)

// checkLeaks fails the test if goroutines of this package or descriptors are left when it ends.
func checkLeaks(t *testing.T) {
	t.Helper()
	before := leaktest.Descriptors(t)
	t.Cleanup(func() {
		deadline := time.Now().Add(20 * time.Second)
		for {
			buf := make([]byte, 1<<20)
			stacks := string(buf[:runtime.Stack(buf, true)])
			left := strings.Count(stacks, "nodeclient.(*Client)")
			after := leaktest.Descriptors(t)
			if left == 0 && after <= before {
				return
			}
			if time.Now().After(deadline) {
				t.Errorf("%d goroutines left, %d descriptors before, %d after\n%s", left, before, after, stacks)
				return
			}
			runtime.Gosched()
		}
	})
}

// fake is a daemon that says what a test tells it to.
type fake struct {
	t    *testing.T
	path string
	conn *net.UnixConn
	r    *wire.Reader
}

func listen(t *testing.T) (*net.UnixListener, string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l, path
}

var helloOK = wire.HelloOK{Version: wire.VersionMax, PID: 1, Epoch: 7, MaxPayload: wire.MaxPayload, MaxInflight: 4, PingMS: 10, SilenceMS: 100, NodeID: "n", DataAddr: "a:1"}

// attach connects a client to a fake daemon; serve is given each frame but pings and runs until the connection ends.
func attach(t *testing.T, hello wire.Message, opts Options, serve func(f *fake, fr *wire.Frame)) (*Client, error) {
	t.Helper()
	l, path := listen(t)
	ended := make(chan struct{})
	t.Cleanup(func() { _ = l.Close(); <-ended })
	go func() {
		defer close(ended)
		uc, err := l.AcceptUnix()
		if err != nil {
			return
		}
		defer uc.Close()
		f := &fake{t: t, path: path, conn: uc, r: wire.NewReader(uc)}
		for {
			fr, err := f.r.Read()
			if err != nil {
				return
			}
			switch {
			case fr.Type == wire.TypeHello:
				f.send(fr.Request, hello)
			case fr.Type == wire.TypeSetupRing:
				f.send(fr.Request, wire.Errorf(wire.CodeUnknownType, "not a message of this protocol"))
			case serve != nil:
				serve(f, fr)
			}
			fr.Close()
		}
	}()
	opts.EngineID = "e"
	c, err := Dial(t.Context(), path, opts)
	if err == nil {
		t.Cleanup(func() { _ = c.Close() })
	}
	return c, err
}

func (f *fake) send(request uint64, m wire.Message) {
	b, err := wire.AppendFrame(nil, uint8(wire.VersionMax), 0, request, m)
	if err != nil {
		f.t.Error(err)
	}
	_, _ = f.conn.Write(b)
}

// pong answers pings and says whether the frame was one.
func (f *fake) pong(fr *wire.Frame) bool {
	if fr.Type == wire.TypePing {
		f.send(fr.Request, wire.Pong{})
	}
	return fr.Type == wire.TypePing
}

func TestDialRefused(t *testing.T) {
	checkLeaks(t)
	_, err := attach(t, wire.Errorf(wire.CodeVersion, "this daemon speaks protocol versions 3 to 4"), Options{}, nil)
	var e *wire.Error
	if !errors.As(err, &e) || e.Code != wire.CodeVersion || !strings.Contains(err.Error(), "versions 3 to 4") {
		t.Errorf("version skew: %v", err)
	}
	bad := helloOK
	bad.Version = 9
	if _, err := attach(t, bad, Options{}, nil); err == nil || !strings.Contains(err.Error(), "makes no sense") {
		t.Errorf("chosen version not ours: %v", err)
	}
	if _, err := attach(t, wire.Errorf(wire.CodeAttached, "taken"), Options{}, nil); !errors.Is(err, transfer.ErrAttached) {
		t.Errorf("attached: %v", err)
	}
	if _, err := Dial(t.Context(), filepath.Join(t.TempDir(), "none"), Options{EngineID: "e"}); err == nil || !strings.Contains(err.Error(), "headrace node") {
		t.Errorf("no daemon: %v", err)
	}
	if _, err := attach(t, helloOK, Options{EngineID: "x"}, nil); err != nil {
		t.Error(err)
	}
}

func TestDialEndsWithItsContext(t *testing.T) {
	checkLeaks(t)
	_, path := listen(t) // accepts nothing, as a stopped daemon does
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := Dial(ctx, path, Options{EngineID: "e"}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("dial: %v", err)
	}
}

func TestSilentDaemonIsGivenUp(t *testing.T) {
	checkLeaks(t)
	c, err := attach(t, helloOK, Options{}, func(*fake, *wire.Frame) {})
	if err != nil {
		t.Fatal(err)
	}
	start, stalled := time.Now(), stall.Watch(t)
	if _, err := c.Present(t.Context(), transfer.PresentReq{}); err == nil || !strings.Contains(err.Error(), "silent") {
		t.Errorf("waiter: %v", err)
	}
	<-c.Done()
	if err := c.Err(); err == nil || !strings.Contains(err.Error(), "silent") {
		t.Errorf("Err: %v", err)
	}
	if d := time.Since(start); d > 3*time.Second+stalled() {
		t.Errorf("took %v for a silence of 100 ms", d)
	}
}

func TestGoodbyeIsTold(t *testing.T) {
	checkLeaks(t)
	var heard []transfer.EventKind
	done := make(chan struct{})
	c, err := attach(t, helloOK, Options{OnEvent: func(e transfer.Event) { heard = append(heard, e.Kind); close(done) }}, func(f *fake, fr *wire.Frame) {
		if !f.pong(fr) {
			f.send(0, wire.Event{Kind: wire.TypeEnded, Lease: 3, Code: uint16(transfer.LeaseRevoked)})
			f.send(0, wire.Event{Kind: wire.TypeGoodbye, Code: uint16(wire.CodeShutdown), Text: "the daemon is stopping"})
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Push(t.Context(), 1, nil, 1); !errors.Is(err, transfer.ErrClosed) || !strings.Contains(err.Error(), "stopping") {
		t.Errorf("waiter: %v", err)
	}
	<-done
	if len(heard) != 1 || heard[0] != transfer.EventEnded {
		t.Errorf("heard %v before the goodbye", heard)
	}
}

// Events come in order, and their handler may use the client although many more wait.
func TestEventsInOrder(t *testing.T) {
	checkLeaks(t)
	const n = 2000
	var c *Client
	var mu sync.Mutex
	var got []uint64
	ready, done := make(chan struct{}), make(chan struct{})
	c, err := attach(t, helloOK, Options{OnEvent: func(e transfer.Event) {
		<-ready
		if e.Seq%500 == 0 {
			if err := c.Revoke(t.Context(), 1, "x"); !errors.Is(err, transfer.ErrUnknownLease) {
				t.Errorf("revoke: %v", err)
			}
		}
		mu.Lock()
		defer mu.Unlock()
		if got = append(got, e.Seq); len(got) == n {
			close(done)
		}
	}}, func(f *fake, fr *wire.Frame) {
		switch {
		case f.pong(fr):
		case fr.Type == wire.TypeRevoke:
			f.send(fr.Request, wire.Errorf(wire.CodeUnknownLease, "no such lease"))
		default:
			for i := range n {
				f.send(0, wire.Event{Kind: wire.TypePushed, Seq: uint64(i)})
			}
			f.send(fr.Request, wire.OK{})
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	close(ready)
	if err := c.Push(t.Context(), 1, nil, 1); err != nil {
		t.Fatal(err)
	}
	<-done
	for i, s := range got {
		if s != uint64(i) {
			t.Fatalf("event %d has sequence %d", i, s)
		}
	}
}

// Contexts end waits; Close ends the rest; what was half sent leaves no descriptor behind.
func TestWaitersAreUnblocked(t *testing.T) {
	checkLeaks(t)
	quiet := helloOK
	quiet.SilenceMS = 60_000
	c, err := attach(t, quiet, Options{}, func(*fake, *wire.Frame) {}) // answers nothing
	if err != nil {
		t.Fatal(err)
	}
	m, err := memfd.Create("t", 4096)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if _, err := c.RegisterRegion(ctx, m.FD(), m.Size(), transfer.Layout{}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("register: %v", err)
	}
	errs := make(chan error, 16)
	for range cap(errs) { // more than may be in flight
		go func() { errs <- c.Handoff(t.Context(), 1, make([]byte, 1<<20)) }()
	}
	gone := make(chan error, 1)
	go func() { gone <- c.PeerGone(t.Context()) }()
	if err := c.PeerGone(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("PeerGone with its context ended: %v", err)
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	for range cap(errs) {
		if err := <-errs; !errors.Is(err, ErrClosed) {
			t.Errorf("after Close: %v", err)
		}
	}
	if err := <-gone; !errors.Is(err, ErrClosed) {
		t.Errorf("PeerGone after Close: %v", err)
	}
	if err := c.Revoke(t.Context(), 1, ""); !errors.Is(err, ErrClosed) {
		t.Errorf("call after Close: %v", err)
	}
}

// A frame that makes no sense ends the connection with the reason.
func TestNonsenseIsRefused(t *testing.T) {
	checkLeaks(t)
	for name, m := range map[string]struct {
		request uint64
		m       wire.Message
	}{
		"request":   {1, wire.Push{}},
		"layout":    {0, wire.Event{Kind: wire.TypePresented, Layouts: []byte{1}}},
		"error":     {0, wire.Errorf(wire.CodeFraming, "bad magic")},
		"hello":     {1, helloOK},
		"wrong ans": {3, wire.StatusOK{JSON: []byte("{")}},
	} {
		c, err := attach(t, helloOK, Options{}, func(f *fake, fr *wire.Frame) {
			if !f.pong(fr) {
				f.send(max(m.request, 0), m.m)
				f.send(fr.Request, m.m)
			}
		})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.Status(t.Context()); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}
