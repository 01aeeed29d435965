package transfer_test

import (
	"fmt"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/recall"
	"github.com/headrace/headrace/transfer/shm"
	"github.com/headrace/headrace/transfer/ticket"
	"github.com/headrace/headrace/transfer/transporttest"
)

// absent is a pair whose D is not attached.
func absent(t *testing.T) (pair *transporttest.Pair, away func()) {
	t.Helper()
	pair = transporttest.NewPair(t, tcpFactory, transporttest.Options{})
	return pair, func() {
		if err := pair.D.Client.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// waits waits until so many tickets wait for their engine at D's daemon.
func waits(t *testing.T, e *transfer.Engine, n int) {
	t.Helper()
	until(t, fmt.Sprintf("%d tickets wait for their engine", n), func() bool { return e.Status().Waiting == n })
}

func until(t *testing.T, what string, f func() bool) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); !f(); runtime.Gosched() {
		if time.Now().After(deadline) {
			t.Fatalf("not within 10 s: %s", what)
		}
	}
}

// A ticket that is presented to an engine that is not attached waits for it, and goes its way when it comes.
func TestPresentWaitsForTheEngine(t *testing.T) {
	pair, away := absent(t)
	q := pair.NewRequest(newRand(), 100, 0, time.Minute)
	away()
	q.Present(t, []byte("meta"))
	waits(t, pair.D.Engine, 1)
	pair.D.Reattach(t)
	waits(t, pair.D.Engine, 0)
	q.Bind(t)
	q.PushAll(t, []byte("record"))
	q.Settled(t, []byte("record"))
}

// What ends a presentation that waits: P, a recall, the deadline, the channel.
func TestPresentStopsWaiting(t *testing.T) {
	pair, away := absent(t)
	away()
	present := func(life time.Duration) *transporttest.Request {
		t.Helper()
		q := &transporttest.Request{Pair: pair, Tokens: 16, Src: []uint32{1}}
		q.Ticket, q.Raw = pair.Ticket(life)
		q.Present(t, nil)
		return q
	}
	q := present(time.Minute)
	waits(t, pair.D.Engine, 1)
	if err := pair.P.Client.Revoke(q.PLease, "preempted"); err != nil {
		t.Fatal(err)
	}
	waits(t, pair.D.Engine, 0)

	q = present(time.Minute)
	waits(t, pair.D.Engine, 1)
	c, err := recall.New(recall.Config{ClusterKey: transporttest.Key, Name: "router"})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	got, err := c.Recall(t.Context(), pair.Addr, "gave up", q.Raw)
	if err != nil || len(got) != 1 || got[0] != recall.Revoked {
		t.Errorf("recall: %v %v", got, err)
	}
	if ev := pair.P.End(t, q.Ticket.Nonce); ev.Kind != transfer.EventRefused || !strings.Contains(ev.Reason, "gave up") {
		t.Errorf("P hears %v %q", ev.Kind, ev.Reason)
	}
	present(time.Minute)
	if _, err := pair.P.Client.Present(transfer.PresentReq{Ticket: q.Raw, Peer: pair.Addr, Regions: pair.P.Regions, Tokens: 16, Blocks: []uint32{2}}); err != nil {
		t.Fatal(err)
	}
	waits(t, pair.D.Engine, 1) // the recalled one does not wait: it is refused

	late := present(300 * time.Millisecond)
	if ev := pair.P.End(t, late.Ticket.Nonce); !strings.Contains(ev.Reason, "deadline") {
		t.Errorf("P hears %v %q", ev.Kind, ev.Reason)
	}
	waits(t, pair.D.Engine, 1)
	pair.P.Engine.DropChannels("test")
	waits(t, pair.D.Engine, 0)
	pair.D.Reattach(t)
	next := pair.NewRequest(newRand(), 40, 0, time.Minute)
	next.Present(t, nil)
	next.Bind(t)
	next.PushAll(t, nil)
	next.Settled(t, nil)
}

// The engine comes and goes, and P takes back, all at once: nothing is left behind.
func TestPresentWaitsAndIsTakenBack(t *testing.T) {
	pair, _ := absent(t)
	for range 20 {
		if err := pair.D.Client.Close(); err != nil {
			t.Fatal(err)
		}
		q := &transporttest.Request{Pair: pair, Tokens: 16, Src: []uint32{1}}
		q.Ticket, q.Raw = pair.Ticket(time.Minute)
		q.Present(t, nil)
		back := make(chan error, 1)
		go func() { back <- pair.P.Client.Revoke(q.PLease, "taken back") }()
		pair.D.Reattach(t)
		<-back
		waits(t, pair.D.Engine, 0)
		until(t, "no lease is left", func() bool { return len(pair.D.Engine.Status().Leases) == 0 })
	}
}

// A daemon that gives way sends on what waits at it.
func TestPresentWaitsAtTheSuccessor(t *testing.T) {
	pair, away := absent(t)
	away()
	q := &transporttest.Request{Pair: pair, Tokens: 16, Src: []uint32{1}}
	q.Ticket, q.Raw = pair.Ticket(time.Minute)
	q.Present(t, nil)
	waits(t, pair.D.Engine, 1)
	pair.D.Engine.Drain()
	waits(t, pair.D.Engine, 0)
	pair.D.Engine.Resume() // it is its own successor
	waits(t, pair.D.Engine, 1)
	if n := pair.P.Engine.Status().Totals.PresentedAgain; n != 1 {
		t.Errorf("presented again %d times", n)
	}
}

// The clock alone ends it where P does not.
func TestPresentWaitsUntilTheDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e, err := transfer.New(transfer.Config{NodeID: "node", ClusterKey: transporttest.Key, Transports: []transfer.Transport{shm.New()}})
		if err != nil {
			t.Fatal(err)
		}
		ended := make(chan transfer.Event, 4)
		p, err := e.Attach("p", func(ev transfer.Event) { ended <- ev })
		if err != nil {
			t.Fatal(err)
		}
		l := transporttest.DefaultShape.Layout()
		size := l.LayerStride * uint64(l.Layers)
		region, err := p.AddRegion(transporttest.NewMemory(t, size).FD(t), size, l, 0)
		if err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		raw := ticket.Mint(transporttest.Key, ticket.Ticket{Nonce: ticket.NewNonce(), PNode: "node", DNode: "node", PEngine: "p", DEngine: "d",
			Fingerprint: transporttest.Fingerprint, Deadline: start.Add(time.Minute)})
		if _, err := p.Present(transfer.PresentReq{Ticket: raw, Regions: []transfer.RegionID{region}, Tokens: 16, Blocks: []uint32{1}}); err != nil {
			t.Fatal(err)
		}
		ev := <-ended
		if took := time.Since(start); took < 59*time.Second || took > 61*time.Second || !strings.Contains(ev.Reason, "deadline") {
			t.Errorf("after %v: %v %q", took, ev.Kind, ev.Reason)
		}
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	})
}

// An engine waits for a ticket that is recalled before anybody presented it: it is told that nobody will.
func TestRecallBeforePresented(t *testing.T) {
	pair := transporttest.NewPair(t, tcpFactory, transporttest.Options{})
	c, err := recall.New(recall.Config{ClusterKey: transporttest.Key, Name: "router"})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	tk, raw := pair.Ticket(time.Minute)
	if got, err := c.Recall(t.Context(), pair.Addr, "gave up", raw); err != nil || len(got) != 1 || got[0] != recall.Remembered {
		t.Errorf("recall: %v %v", got, err)
	}
	if ev := pair.D.End(t, tk.Nonce); ev.Kind != transfer.EventEnded || ev.Lease != 0 || !strings.Contains(ev.Reason, "gave up") {
		t.Errorf("D hears %v of lease %d: %q", ev.Kind, ev.Lease, ev.Reason)
	}
}
