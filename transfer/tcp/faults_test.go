package tcp

import (
	"context"
	"math/rand/v2"
	"net"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/headrace/headrace/internal/stall"
	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/transporttest"
)

func factory() transporttest.Factory {
	return transporttest.Factory{New: func() transfer.Transport { return New(Config{}) }, ReadPause: transfer.PauseReadFrame}
}

// dialled are the connections of a dialling end, in order: the first is the control connection, the others are lanes.
type dialled struct {
	mu    sync.Mutex
	conns []net.Conn
}

func (d *dialled) dial(ctx context.Context, addr string) (net.Conn, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", addr)
	d.mu.Lock()
	d.conns = append(d.conns, conn)
	d.mu.Unlock()
	return conn, err
}

// reset breaks a connection off, by number; -1 is the last one.
func (d *dialled) reset(n int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if n < 0 {
		n += len(d.conns)
	}
	d.conns[n].(*net.TCPConn).SetLinger(0)
	d.conns[n].Close()
}

// A lane that is reset in the middle of a transfer: the lease settles over the others, and nothing is counted twice.
func TestLaneResetMidTransfer(t *testing.T) {
	defer transporttest.CheckLeaks(t)()
	var conns dialled
	pair := transporttest.NewPair(t, factory(), transporttest.Options{Config: func(c *transfer.Config) {
		c.Lanes, c.Dial = 3, conns.dial
	}})
	q := pair.NewRequest(rand.New(rand.NewPCG(1, 1)), 1000, 0, 10*time.Second)
	pair.P.Pauses.Set(transfer.PauseWriteFrame, 3)
	q.Present(t, nil)
	q.Bind(t)
	q.PushAll(t, []byte("record"))
	waitFor(t, func() bool { return pair.P.Pauses.Snapshot()[transfer.PauseWriteFrame] == 3 })
	conns.reset(2)
	pair.P.Pauses.ReleaseAll()
	q.Settled(t, []byte("record"))
	if got, want := pair.D.Engine.Status().Totals.BytesLanded, uint64(1000)*4*2*4*512; got != want {
		t.Errorf("%d bytes counted, want %d", got, want)
	}
	// The lane is dialled again, in time, and carries pieces like the others.
	lanes := func(s *transporttest.Side) transfer.ChannelStatus { return s.Engine.Status().Channels[0] }
	// Until its end is noticed the dead lane counts as one that is up.
	waitFor(t, func() bool {
		p := lanes(pair.P)
		return p.Redialled > 0 && p.LanesUp == 3 && lanes(pair.D).LanesUp == 3
	})
	if c := lanes(pair.P); c.Errors != 1 || c.Redialled != 1 || c.Lanes != 3 {
		t.Errorf("channel after the reset: %+v", c)
	}
	pair.P.Pauses.Set(transfer.PauseWriteFrame, 0)
	q = pair.NewRequest(rand.New(rand.NewPCG(1, 2)), 1000, 0, 10*time.Second)
	q.Present(t, nil)
	q.Bind(t)
	q.PushAll(t, nil)
	waitFor(t, func() bool { return pair.P.Pauses.Snapshot()[transfer.PauseWriteFrame] == 3 })
	pair.P.Pauses.ReleaseAll()
	q.Settled(t, nil)
	pair.Close(t)
}

func waitFor(t *testing.T, f func() bool) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); !f(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("waited 10 s for a condition")
		}
	}
}

// A target process that is stopped (SIGSTOP) in the middle of a transfer is noticed within 5 s; one that is killed, at once.
func TestPeerProcessStopsOrDies(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seconds: waits for a stopped process to be noticed")
	}
	for _, c := range []struct {
		signal syscall.Signal
		limit  time.Duration
	}{{syscall.SIGKILL, time.Second}, {syscall.SIGSTOP, 5 * time.Second}} {
		t.Run(c.signal.String(), func(t *testing.T) {
			defer transporttest.CheckLeaks(t)()
			child := startTarget(t, benchCase{kib: 64, lanes: 2, method: "auto"})
			defer child.stop()
			events := make(chan transfer.Event, 1024)
			p := newBenchEngine(t, "node-p", "prefill", benchCase{kib: 64, lanes: 2}, func(ev transfer.Event) { events <- ev })
			defer p.mem.Close()
			defer p.e.Close()
			p.e.SetRate(64 << 20) // 8 s for a lease
			id := present(t, p, child)
			waitKind(t, events, transfer.EventBound)
			for layer := range p.lay.Layers {
				if err := p.c.Push(id, []transfer.Unit{{Layer: layer, Count: p.lay.Blocks}}, uint64(layer)); err != nil {
					t.Fatal(err)
				}
			}
			waitFor(t, func() bool { return p.e.Status().Totals.BytesSent > 4<<20 })
			began, stalled := time.Now(), stall.Watch(t)
			if err := child.cmd.Process.Signal(c.signal); err != nil {
				t.Fatal(err)
			}
			select {
			case ev := <-events:
				if ev.Kind != transfer.EventEnded {
					t.Errorf("%v %q", ev.Kind, ev.Reason)
				}
			case <-time.After(30 * time.Second):
				t.Fatal("not noticed within 30 s")
			}
			if d := time.Since(began); d > c.limit+stalled() {
				t.Errorf("noticed after %v, want %v", d, c.limit)
			}
		})
	}
}

// A page that cannot be read or written ends its lease with a word: neither the daemon nor the lane.
func TestMemoryFaultEndsTheLease(t *testing.T) { transporttest.MemoryFaults(t, factory()) }

// Lanes that fail over and over are dialled again with longer and longer pauses, each with a number of its own.
func TestLanesThatKeepFailingAreDialledAgain(t *testing.T) {
	defer transporttest.CheckLeaks(t)()
	var conns dialled
	pair := transporttest.NewPair(t, factory(), transporttest.Options{Config: func(c *transfer.Config) {
		c.Lanes, c.Dial = 2, conns.dial
	}})
	r := rand.New(rand.NewPCG(1, 1))
	for i := range 4 {
		q := pair.NewRequest(r, 700, 0, 10*time.Second)
		pair.P.Pauses.Set(transfer.PauseWriteFrame, 1)
		q.Present(t, nil)
		q.Bind(t)
		q.PushAll(t, nil)
		waitFor(t, func() bool { return pair.P.Pauses.Snapshot()[transfer.PauseWriteFrame] > 0 })
		conns.reset(-1)
		pair.P.Pauses.ReleaseAll()
		q.Settled(t, nil)
		waitFor(t, func() bool {
			p, d := pair.P.Engine.Status().Channels[0], pair.D.Engine.Status().Channels[0]
			return p.Redialled == uint64(i+1) && p.LanesUp == 2 && d.LanesUp == 2
		})
	}
	pair.Close(t)
}

// An observer is told of every lane, by its socket.
func TestLanesAreMeasured(t *testing.T) {
	defer transporttest.CheckLeaks(t)()
	transporttest.Measured(t, factory(), func(t *testing.T, f transfer.Flow) {
		if f.Transport != "tcp" || f.Socket == nil || !f.Peer.IsLoopback() {
			t.Errorf("%+v", f)
		}
	})
}
