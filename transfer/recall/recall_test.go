package recall_test

import (
	"context"
	"errors"
	"net"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/handshake"
	"github.com/headrace/headrace/transfer/recall"
	"github.com/headrace/headrace/transfer/tcp"
	"github.com/headrace/headrace/transfer/ticket"
	"github.com/headrace/headrace/transfer/transporttest"
)

var factory = transporttest.Factory{New: func() transfer.Transport { return tcp.New(tcp.Config{}) }, ReadPause: transfer.PauseReadFrame}

// counting counts what is dialled.
type counting struct{ n atomic.Int32 }

func (c *counting) dial(ctx context.Context, addr string) (net.Conn, error) {
	c.n.Add(1)
	return (&net.Dialer{}).DialContext(ctx, "tcp", addr)
}

func newCaller(t *testing.T, edit ...func(*recall.Config)) *recall.Caller {
	t.Helper()
	cfg := recall.Config{ClusterKey: transporttest.Key, Name: "router-0"}
	for _, f := range edit {
		f(&cfg)
	}
	c, err := recall.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return c
}

func want(t *testing.T, what string, got []recall.Verdict, err error, verdicts ...recall.Verdict) {
	t.Helper()
	if err != nil || !slices.Equal(got, verdicts) {
		t.Errorf("%s: %v, %v; want %v", what, got, err, verdicts)
	}
}

// Tickets in every state a ticket can be in, over one connection.
func TestRecall(t *testing.T) {
	defer transporttest.CheckLeaks(t)()
	pair := transporttest.NewPair(t, factory, transporttest.Options{})
	var dialled counting
	c := newCaller(t, func(cfg *recall.Config) { cfg.Dial = dialled.dial })
	ask := func(tickets ...[]byte) ([]recall.Verdict, error) {
		return c.Recall(t.Context(), pair.Addr, "client left", tickets...)
	}
	r := transporttest.NewRand()

	unknown := pair.NewRequest(r, 40, 0, time.Minute)
	got, err := ask(unknown.Raw)
	want(t, "unknown", got, err, recall.Remembered)
	got, err = ask(unknown.Raw)
	want(t, "remembered", got, err, recall.Remembered)
	unknown.Present(t, nil)
	if ev := pair.P.End(t, unknown.Ticket.Nonce); ev.Kind != transfer.EventRefused || !strings.Contains(ev.Reason, "recalled by router-0: client left") {
		t.Errorf("a recalled ticket is presented: %v %q", ev.Kind, ev.Reason)
	}

	open, bound := pair.NewRequest(r, 40, 0, time.Minute), pair.NewRequest(r, 40, 0, time.Minute)
	open.Present(t, nil)
	pair.D.Wait(t, open.Ticket.Nonce, transfer.EventPresented)
	bound.Present(t, nil)
	bound.Bind(t)
	got, err = ask(open.Raw, bound.Raw)
	want(t, "presented and bound", got, err, recall.Revoked, recall.Revoked)
	for what, q := range map[string]*transporttest.Request{"presented": open, "bound": bound} {
		d := pair.D.Events(q.Ticket.Nonce) // there already: the answer came behind the fence
		if last := d[len(d)-1]; last.Kind != transfer.EventEnded || last.Reason != "recalled by router-0: client left" {
			t.Errorf("%s: D heard %v %q", what, last.Kind, last.Reason)
		}
		if p := pair.P.End(t, q.Ticket.Nonce); p.Kind != transfer.EventEnded || !strings.Contains(p.Reason, "client left") {
			t.Errorf("%s: P hears %v %q", what, p.Kind, p.Reason)
		}
	}

	done := pair.NewRequest(r, 40, 0, time.Minute)
	done.Present(t, nil)
	done.Bind(t)
	done.PushAll(t, nil)
	done.Settled(t, nil)
	other := unknown.Ticket
	other.Nonce, other.DNode = ticket.NewNonce(), "node-x"
	late := unknown.Ticket
	late.Nonce, late.Deadline = ticket.NewNonce(), time.Now().Add(-time.Second)
	forged := ticket.Mint([]byte("another cluster key"), unknown.Ticket)
	got, err = ask(done.Raw, open.Raw, ticket.Mint(transporttest.Key, other), ticket.Mint(transporttest.Key, late), forged)
	want(t, "settled, recalled, another node's, late, forged", got, err, recall.Ended, recall.Ended, recall.Refused, recall.Refused, recall.Refused)

	many := make([][]byte, 2*recall.TicketsMax+1)
	for i := range many {
		_, many[i] = pair.Ticket(time.Minute)
	}
	got, err = ask(many...)
	want(t, "many", got, err, slices.Repeat([]recall.Verdict{recall.Remembered}, len(many))...)
	if n := dialled.n.Load(); n != 1 {
		t.Errorf("%d connections were dialled", n)
	}
	if n := pair.D.Engine.Status().Totals.TicketsRecalled; n != uint64(len(many))+6 {
		t.Errorf("status counts %d recalled tickets", n)
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	if _, err := ask(open.Raw); !errors.Is(err, recall.ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
	pair.Close(t)
}

func TestRecallIsRefused(t *testing.T) {
	pair := transporttest.NewPair(t, factory, transporttest.Options{Config: func(c *transfer.Config) { c.Limits.Tickets = 8 }})
	_, raw := pair.Ticket(time.Minute)
	stranger := newCaller(t, func(c *recall.Config) { c.ClusterKey = []byte("some other cluster key") })
	if _, err := stranger.Recall(t.Context(), pair.Addr, "", raw); !errors.Is(err, handshake.ErrHandshake) {
		t.Errorf("without the key: %v", err)
	}
	c := newCaller(t)
	if _, err := c.Recall(t.Context(), pair.Addr, "", raw[:100]); err == nil {
		t.Error("a short ticket passes")
	}
	if got, err := c.Recall(t.Context(), pair.Addr, ""); err != nil || len(got) != 0 {
		t.Errorf("no tickets: %v %v", got, err)
	}
	var full []recall.Verdict
	for range 8 {
		_, raw := pair.Ticket(time.Minute)
		got, err := c.Recall(t.Context(), pair.Addr, strings.Repeat("é", recall.ReasonMax), raw)
		if err != nil {
			t.Fatal(err)
		}
		full = append(full, got...)
	}
	if n := len(slices.DeleteFunc(full, func(v recall.Verdict) bool { return v != recall.Full })); n != 2 { // a quarter is kept free
		t.Errorf("%d of 8 tickets could not be remembered, want 2", n)
	}
	for _, cfg := range []recall.Config{{ClusterKey: transporttest.Key}, {Name: "x", ClusterKey: []byte("short")}} {
		if _, err := recall.New(cfg); err == nil {
			t.Errorf("%+v passes", cfg)
		}
	}
}

// A daemon that says nothing costs its timeout, and a connection that was kept is replaced.
func TestRecallHasADeadline(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	raw := make([]byte, ticket.Size)
	c := newCaller(t, func(c *recall.Config) { c.Timeout = 50 * time.Millisecond })
	if _, err := c.Recall(t.Context(), l.Addr().String(), "", raw); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a daemon that says nothing: %v", err)
	}
}

// The daemon at an address is another one now: the kept connection is of no use, and nobody notices.
func TestRecallAfterARestart(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	var dialled counting
	c := newCaller(t, func(cfg *recall.Config) { cfg.Dial = dialled.dial })
	for life := range 3 {
		if life > 0 {
			if l, err = net.Listen("tcp", addr); err != nil {
				t.Fatal(err)
			}
		}
		e, err := transfer.New(transfer.Config{NodeID: "node-d", ClusterKey: transporttest.Key, Listener: l, Transports: []transfer.Transport{tcp.New(tcp.Config{})}})
		if err != nil {
			t.Fatal(err)
		}
		raw := ticket.Mint(transporttest.Key, ticket.Ticket{Nonce: ticket.NewNonce(), PNode: "p", DNode: "node-d", PEngine: "p", DEngine: "d", Deadline: time.Now().Add(time.Minute)})
		for range 2 {
			got, err := c.Recall(t.Context(), addr, "x", raw)
			want(t, "recall", got, err, recall.Remembered)
		}
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	}
	if n := dialled.n.Load(); n != 3 {
		t.Errorf("%d connections were dialled, want one a daemon", n)
	}
}

// Recalls race with what they recall; whoever wins, no lease is left when the answer is there.
func TestRecallRacesWithPresent(t *testing.T) {
	pair := transporttest.NewPair(t, factory, transporttest.Options{})
	c := newCaller(t)
	r := transporttest.NewRand()
	for range 30 {
		q := pair.NewRequest(r, 40, 0, time.Minute)
		var wg sync.WaitGroup
		wg.Go(func() {
			if _, err := c.Recall(t.Context(), pair.Addr, "race", q.Raw); err != nil {
				t.Error(err)
			}
			for _, l := range pair.D.Engine.Status().Leases {
				t.Errorf("lease %d is %s after the recall", l.ID, l.State)
			}
		})
		q.Present(t, nil)
		wg.Wait()
		if ev := pair.P.End(t, q.Ticket.Nonce); ev.Kind == transfer.EventSettled {
			t.Error("it settled")
		}
	}
}

// What a router asks when decode has not begun although prefill has answered: only what nobody presents becomes void, and
// decode's engine hears of that, as often as it is asked.
func TestIdle(t *testing.T) {
	pair := transporttest.NewPair(t, factory, transporttest.Options{})
	c := newCaller(t)
	r := transporttest.NewRand()
	idle := func(tickets ...[]byte) ([]recall.Verdict, error) {
		return c.Ask(t.Context(), pair.Addr, recall.KindIdle, "nobody presented it", tickets...)
	}
	open, bound, never := pair.NewRequest(r, 40, 0, time.Minute), pair.NewRequest(r, 40, 0, time.Minute), pair.NewRequest(r, 40, 0, time.Minute)
	open.Present(t, nil)
	pair.D.Wait(t, open.Ticket.Nonce, transfer.EventPresented)
	bound.Present(t, nil)
	bound.Bind(t)
	before := pair.D.Engine.Status().Totals.TicketsRecalled
	got, err := idle(open.Raw, bound.Raw, never.Raw)
	want(t, "presented, bound, never presented", got, err, recall.Living, recall.Living, recall.Remembered)
	if n := pair.D.Engine.Status().Totals.TicketsRecalled - before; n != 1 {
		t.Errorf("%d tickets were recalled", n)
	}
	if ev := pair.D.End(t, never.Ticket.Nonce); ev.Kind != transfer.EventEnded || ev.Lease != 0 || !strings.Contains(ev.Reason, "nobody presented it") {
		t.Errorf("D hears %v of lease %d: %q", ev.Kind, ev.Lease, ev.Reason)
	}
	if got, err = idle(never.Raw); len(pair.D.Events(never.Ticket.Nonce)) != 2 {
		t.Errorf("asked again (%v, %v), D has heard %v", got, err, pair.D.Events(never.Ticket.Nonce))
	}
	never.Present(t, nil)
	if ev := pair.P.End(t, never.Ticket.Nonce); ev.Kind != transfer.EventRefused {
		t.Errorf("P presents it after all, and hears %v %q", ev.Kind, ev.Reason)
	}
	bound.PushAll(t, nil) // nothing was done to it
	bound.Settled(t, nil)
	got, err = idle(bound.Raw, open.Raw)
	want(t, "settled, presented", got, err, recall.Ended, recall.Living)
	if evs := pair.D.Events(open.Ticket.Nonce); len(evs) != 1 {
		t.Errorf("D has heard %+v of the ticket that is presented", evs)
	}
}

// An engine whose connection ended before it read of a ticket's end is told when somebody asks.
func TestIdleTellsOfAnEnd(t *testing.T) {
	pair := transporttest.NewPair(t, factory, transporttest.Options{})
	c := newCaller(t)
	q := pair.NewRequest(transporttest.NewRand(), 40, 0, time.Minute)
	q.Present(t, nil)
	pair.D.Wait(t, q.Ticket.Nonce, transfer.EventPresented)
	if err := pair.D.Client.Close(); err != nil {
		t.Fatal(err)
	}
	pair.P.End(t, q.Ticket.Nonce)
	pair.D.Reattach(t)
	heard := len(pair.D.Events(q.Ticket.Nonce))
	got, err := c.Ask(t.Context(), pair.Addr, recall.KindIdle, "x", q.Raw)
	want(t, "ended with its engine's connection", got, err, recall.Ended)
	if evs := pair.D.Events(q.Ticket.Nonce); len(evs) != heard+1 || evs[heard].Kind != transfer.EventEnded || evs[heard].Lease != 0 {
		t.Errorf("D has heard %+v", evs)
	}
}

// A ticket that waits at D's daemon for its engine is presented: that is none of the router's business.
func TestIdleLeavesWhatWaits(t *testing.T) {
	pair := transporttest.NewPair(t, factory, transporttest.Options{})
	c := newCaller(t)
	q := pair.NewRequest(transporttest.NewRand(), 40, 0, time.Minute)
	if err := pair.D.Client.Close(); err != nil {
		t.Fatal(err)
	}
	q.Present(t, nil)
	for deadline := time.Now().Add(10 * time.Second); pair.D.Engine.Status().Waiting == 0; runtime.Gosched() {
		if time.Now().After(deadline) {
			t.Fatal("the ticket does not wait for its engine within 10 s")
		}
	}
	got, err := c.Ask(t.Context(), pair.Addr, recall.KindIdle, "x", q.Raw)
	want(t, "waiting", got, err, recall.Living)
	pair.D.Reattach(t)
	q.Bind(t)
	q.PushAll(t, nil)
	q.Settled(t, nil)
}

// P's daemon says of which tickets it has a living lease.
func TestLook(t *testing.T) {
	pair := transporttest.NewPair(t, factory, transporttest.Options{})
	c := newCaller(t)
	r := transporttest.NewRand()
	addr := pair.P.Engine.DataAddr()
	look := func(tickets ...[]byte) ([]recall.Verdict, error) {
		return c.Ask(t.Context(), addr, recall.KindLook, "", tickets...)
	}
	q, never := pair.NewRequest(r, 40, 0, time.Minute), pair.NewRequest(r, 40, 0, time.Minute)
	q.Present(t, nil)
	got, err := look(q.Raw, never.Raw)
	want(t, "presented, never presented", got, err, recall.Living, recall.Absent)
	if err := pair.P.Client.Revoke(q.PLease, "x"); err != nil {
		t.Fatal(err)
	}
	got, err = look(q.Raw)
	want(t, "revoked", got, err, recall.Absent)
	got, err = c.Ask(t.Context(), pair.Addr, recall.KindLook, "", q.Raw)
	want(t, "at D's daemon", got, err, recall.Refused)
	if n := pair.P.Engine.Status().Totals.TicketsRecalled; n != 0 {
		t.Errorf("%d tickets were recalled by looking", n)
	}
}

// Asking races with presenting: either the ticket is void for both sides, or the lease goes on.
func TestIdleRacesWithPresent(t *testing.T) {
	pair := transporttest.NewPair(t, factory, transporttest.Options{})
	c := newCaller(t)
	r := transporttest.NewRand()
	for range 30 {
		q := pair.NewRequest(r, 40, 0, time.Minute)
		verdict := make(chan []recall.Verdict, 1)
		go func() {
			got, err := c.Ask(t.Context(), pair.Addr, recall.KindIdle, "race", q.Raw)
			if err != nil {
				t.Error(err)
			}
			verdict <- got
		}()
		q.Present(t, nil)
		switch got := <-verdict; {
		case slices.Equal(got, []recall.Verdict{recall.Living}):
			q.Bind(t)
			q.PushAll(t, nil)
			q.Settled(t, nil)
		case slices.Equal(got, []recall.Verdict{recall.Remembered}):
			if ev := pair.P.End(t, q.Ticket.Nonce); ev.Kind != transfer.EventRefused {
				t.Errorf("void, and P hears %v %q", ev.Kind, ev.Reason)
			}
		default:
			t.Errorf("verdict %v", got)
		}
	}
}
