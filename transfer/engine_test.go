package transfer_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/shm"
	"github.com/headrace/headrace/transfer/tcp"
	"github.com/headrace/headrace/transfer/transporttest"
)

func newRand() *rand.Rand { return rand.New(rand.NewPCG(uint64(time.Now().UnixNano()), 3)) }

func fakePair(t *testing.T, fake *transporttest.Fake, change func(*transfer.Config)) *transporttest.Pair {
	f := transporttest.Factory{New: func() transfer.Transport { return fake }, Network: transporttest.NewNetwork()}
	return transporttest.NewPair(t, f, transporttest.Options{Config: change})
}

// muffled is a network on which bytes wait while it is held: nobody hears anything, and nothing is lost.
type muffled struct {
	mu   sync.Mutex
	held chan struct{} // closed when it is let go; nil: it is not held
}

func (m *muffled) hold() (release func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	held := make(chan struct{})
	m.held = held
	return func() {
		m.mu.Lock()
		m.held = nil
		m.mu.Unlock()
		close(held)
	}
}

func (m *muffled) wait() {
	m.mu.Lock()
	held := m.held
	m.mu.Unlock()
	if held != nil {
		<-held
	}
}

// over puts the network between a configuration's engine and its peers.
func (m *muffled) over(c *transfer.Config) {
	dial := c.Dial
	c.Dial = func(ctx context.Context, addr string) (net.Conn, error) {
		near, err := dial(ctx, addr)
		if err != nil {
			return nil, err
		}
		inner, outer := net.Pipe()
		relay := func(to, from net.Conn) {
			defer to.Close()
			b := make([]byte, 64<<10)
			for {
				n, err := from.Read(b)
				m.wait()
				if err != nil {
					return
				}
				if _, err := to.Write(b[:n]); err != nil {
					from.Close()
					return
				}
			}
		}
		go relay(near, inner)
		go relay(inner, near)
		return outer, nil
	}
}

// A peer that stops answering is noticed in 2.5 s, and the leases end on both sides.
func TestSilentPeerIsNoticed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var network muffled
		pair := fakePair(t, &transporttest.Fake{}, network.over)
		q := pair.NewRequest(newRand(), 100, 0, time.Minute)
		q.Present(t, nil)
		q.Bind(t)
		time.Sleep(10 * time.Second) // idle channels live
		if evs := pair.P.Events(q.Ticket.Nonce); len(evs) != 1 {
			t.Fatalf("events of an idle lease: %+v", evs)
		}
		release := network.hold()
		noticed := false
		began := time.Now()
		for _, s := range []*transporttest.Side{pair.P, pair.D} {
			ev := s.End(t, q.Ticket.Nonce)
			if ev.Kind != transfer.EventEnded {
				t.Errorf("%s: %v %q", s.ID, ev.Kind, ev.Reason)
			}
			noticed = noticed || strings.Contains(ev.Reason, "no answer") // whoever is first takes the lanes down for both
		}
		if !noticed {
			t.Error("neither end says that the other did not answer")
		}
		if d := time.Since(began); d > 3500*time.Millisecond {
			t.Errorf("noticed after %v", d)
		}
		release()
		pair.Close(t)
	})
}

// A process that did not run for a minute has heard nothing for a minute, and finds one tick of its ticker waiting. It must
// not take that for its peer's silence: not before its own ticks have said so.
func TestStarvedIsNotSilent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var network muffled
		var ticks []chan time.Time // of both ends
		pair := fakePair(t, &transporttest.Fake{}, func(c *transfer.Config) {
			network.over(c)
			ticks = append(ticks, make(chan time.Time, 1)) // as a ticker's: what is missed is one tick
			c.SetTicks(ticks[len(ticks)-1])
		})
		beat := func() {
			for _, c := range ticks {
				c <- time.Now()
			}
			synctest.Wait()
		}
		q := pair.NewRequest(newRand(), 100, 0, time.Hour)
		q.Present(t, nil)
		q.Bind(t)
		for range 3 {
			release := network.hold()
			time.Sleep(time.Minute) // nothing runs
			beat()                  // the ticks are first, and what came meanwhile is still to be read
			release()
			synctest.Wait()
		}
		for _, s := range []*transporttest.Side{pair.P, pair.D} {
			if evs := s.Events(q.Ticket.Nonce); len(evs) != 1 {
				t.Errorf("%s lost its lease: %+v", s.ID, evs)
			}
		}
		release := network.hold() // now it is the peer
		for range 5 {             // the first finds what was heard before
			beat()
		}
		if evs := pair.P.Events(q.Ticket.Nonce); len(evs) != 1 {
			t.Errorf("given up too early: %+v", evs)
		}
		beat()
		if ev := pair.P.End(t, q.Ticket.Nonce); !strings.Contains(ev.Reason, "no answer") {
			t.Errorf("P hears %v %q", ev.Kind, ev.Reason)
		}
		release()
		pair.Close(t)
	})
}

func TestDeadlineOfAnUnreachablePeer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pair := fakePair(t, &transporttest.Fake{}, func(c *transfer.Config) {
			c.Dial = func(ctx context.Context, addr string) (net.Conn, error) {
				<-ctx.Done()
				return nil, ctx.Err()
			}
		})
		q := pair.NewRequest(newRand(), 100, 0, time.Minute)
		q.Present(t, nil)
		began := time.Now()
		if ev := pair.P.End(t, q.Ticket.Nonce); ev.Kind != transfer.EventEnded || !strings.Contains(ev.Reason, "present ticket") {
			t.Errorf("%v %q", ev.Kind, ev.Reason)
		}
		if d := time.Since(began); d > 3500*time.Millisecond {
			t.Errorf("gave up after %v", d)
		}
		q = pair.NewRequest(newRand(), 100, 0, time.Second)
		q.Present(t, nil)
		if ev := pair.P.End(t, q.Ticket.Nonce); ev.State != transfer.LeaseExpired {
			t.Errorf("%v %v %q, want expired", ev.Kind, ev.State, ev.Reason)
		}
		pair.Close(t)
	})
}

func TestRegionRefusals(t *testing.T) {
	pair := fakePair(t, &transporttest.Fake{}, nil)
	lay := pair.P.Layout
	size := lay.LayerStride * uint64(lay.Layers)
	memfd := func(size int64, seals int) int {
		fd, err := unix.MemfdCreate("test", unix.MFD_ALLOW_SEALING|unix.MFD_CLOEXEC)
		if err != nil {
			t.Fatal(err)
		}
		if err := unix.Ftruncate(fd, size); err != nil {
			t.Fatal(err)
		}
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err != nil {
			t.Fatal(err)
		}
		return fd
	}
	file := func() int {
		f, err := os.CreateTemp(t.TempDir(), "")
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if err := f.Truncate(int64(size)); err != nil {
			t.Fatal(err)
		}
		fd, err := unix.Dup(int(f.Fd()))
		if err != nil {
			t.Fatal(err)
		}
		return fd
	}
	for _, c := range []struct {
		name, reason string
		fd           int
		size         uint64
		want         error
	}{
		{"unsealed", "may still shrink", memfd(int64(size), 0), size, transfer.ErrRegion},
		{"sealed against growing only", "may still shrink", memfd(int64(size), unix.F_SEAL_GROW), size, transfer.ErrRegion},
		{"a file", "not a memfd", file(), size, transfer.ErrRegion},
		{"too short", "asked for", memfd(int64(size)-1, unix.F_SEAL_SHRINK), size, transfer.ErrRegion},
		{"read-only", "lend it read-only", memfd(int64(size), unix.F_SEAL_SHRINK|unix.F_SEAL_WRITE), size, transfer.ErrRegion},
		{"no size", "asked for", memfd(int64(size), unix.F_SEAL_SHRINK), 0, transfer.ErrRegion},
		{"overflowing size", "asked for", memfd(int64(size), unix.F_SEAL_SHRINK), 1<<64 - 1, transfer.ErrRegion},
		{"layout beyond the size", "needs", memfd(int64(size), unix.F_SEAL_SHRINK), size - 1, transfer.ErrLayout},
	} {
		if _, err := pair.P.Client.AddRegion(c.fd, c.size, lay, 0); !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.reason) {
			t.Errorf("%s: %v, want a refusal that says %q", c.name, err, c.reason)
		}
		if err := unix.Close(c.fd); err != unix.EBADF {
			t.Errorf("%s: the descriptor was left open", c.name)
		}
	}
	fd := memfd(int64(size), unix.F_SEAL_SHRINK|unix.F_SEAL_WRITE)
	id, err := pair.D.Client.AddRegion(fd, size, lay, transfer.RegionReadOnly)
	if err != nil {
		t.Fatal(err)
	}
	q := pair.NewRequest(newRand(), 40, 0, time.Minute)
	q.Present(t, nil)
	pair.D.Wait(t, q.Ticket.Nonce, transfer.EventPresented)
	if _, err := pair.D.Client.Bind(transfer.BindReq{Ticket: q.Raw, Regions: []transfer.RegionID{id}, Blocks: q.Dst}); !errors.Is(err, transfer.ErrRegion) {
		t.Errorf("bind to a read-only region: %v", err)
	}
	q.Bind(t) // another region will do
}

// A sealed memfd cannot shrink under a lease: that is why a page fault cannot kill the daemon.
func TestSealedMemoryCannotShrink(t *testing.T) {
	m := transporttest.NewMemory(t, 1<<20)
	if err := unix.Ftruncate(m.FD(t), 4096); err != unix.EPERM {
		t.Errorf("shrink a sealed memfd: %v, want EPERM", err)
	}
}

// Two transports: engines of one daemon meet over the local copy, unless TCP is forced.
func TestTransportIsChosen(t *testing.T) {
	for forced, want := range map[string]string{"": "shm", "tcp": "tcp"} {
		e, err := transfer.New(transfer.Config{
			NodeID: "node", ClusterKey: transporttest.Key, Listen: "127.0.0.1:0", Transport: forced,
			Transports: []transfer.Transport{shm.New(), tcp.New(tcp.Config{})},
		})
		if err != nil {
			t.Fatal(err)
		}
		pair := transporttest.JoinEngine(t, e)
		q := pair.NewRequest(newRand(), 100, 0, time.Minute)
		q.Present(t, nil)
		q.Bind(t)
		q.PushAll(t, nil)
		q.Settled(t, nil)
		for _, c := range e.Status().Channels {
			if c.Transport != want {
				t.Errorf("forced %q: channel over %s, want %s", forced, c.Transport, want)
			}
		}
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	}
	if _, err := transfer.New(transfer.Config{NodeID: "n", ClusterKey: transporttest.Key, Transport: "rdma", Transports: []transfer.Transport{shm.New()}}); err == nil {
		t.Error("an engine without a usable transport started")
	}
}

// Both nodes prefill for each other over one channel.
func TestChannelIsSharedBothWays(t *testing.T) {
	pair := transporttest.NewPair(t, tcpFactory, transporttest.Options{})
	q := pair.NewRequest(newRand(), 100, 0, time.Minute)
	q.Present(t, nil)
	q.Bind(t)
	q.PushAll(t, nil)
	q.Settled(t, nil)
	back := &transporttest.Pair{P: pair.D, D: pair.P, Addr: "no one listens here"}
	q = back.NewRequest(newRand(), 100, 0, time.Minute)
	q.Present(t, nil)
	q.Bind(t)
	q.PushAll(t, nil)
	q.Settled(t, nil)
	if n := len(pair.P.Engine.Status().Channels); n != 1 {
		t.Errorf("%d channels", n)
	}
}
