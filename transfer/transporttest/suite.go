package transporttest

import (
	"bytes"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/ticket"
)

// Factory makes the transport under test.
type Factory struct {
	New     func() transfer.Transport // one for each daemon
	Local   bool                      // joins a daemon with itself
	Network *Network                  // nil: real TCP on 127.0.0.1
	// ReadPause is the pause point that the transport passes before it writes into blocks, "" if it has none.
	ReadPause string
	Config    func(*transfer.Config) // what the suite's daemons are to differ in
}

// Run runs the conformance suite.
func Run(t *testing.T, f Factory) {
	for _, c := range []struct {
		name string
		test func(*testing.T, Factory)
	}{
		{"Settles", testSettles}, {"PartialAndPrefix", testPartialAndPrefix}, {"Layouts", testLayouts}, {"Shards", testShards}, {"ShardRequests", testShardRequests}, {"LargeUnits", testLargeUnits},
		{"NothingWanted", testNothingWanted}, {"PushBeforeBound", testPushBeforeBound}, {"ManyLeases", testManyLeases},
		{"Refuse", testRefuse}, {"WrongTickets", testWrongTickets}, {"Absent", testAbsent}, {"Replay", testReplay}, {"BadRequests", testBadRequests},
		{"Expires", testExpires}, {"ClientCloses", testClientCloses}, {"RegionRemoved", testRegionRemoved}, {"EngineCloses", testEngineCloses},
		{"RevokeHeldAtPause", testRevokeHeldAtPause}, {"RateLimit", testRateLimit}, {"Status", testStatus}, {"Canary", testCanary}, {"CanaryChecksums", testCanaryChecksums},
		{"CanaryShards", testCanaryShards},
	} {
		t.Run(c.name, func(t *testing.T) { c.test(t, f) })
	}
}

func testSettles(t *testing.T, f Factory) {
	defer CheckLeaks(t)()
	p := NewPair(t, f, Options{})
	r := NewRand()
	for i := range 3 {
		q := p.NewRequest(r, 300, 0, patience)
		q.Present(t, []byte("meta"))
		q.Bind(t)
		record := bytes.Repeat([]byte{byte(i)}, 1000*i)
		q.PushAll(t, record)
		q.Settled(t, record)
		ev := p.D.Wait(t, q.Ticket.Nonce, transfer.EventPresented)
		if ev.Tokens != 300 || string(ev.Meta) != "meta" || ev.PEngine != p.P.ID || !slices.Equal(ev.Layouts, p.P.Layouts) {
			t.Errorf("presented event %+v", ev)
		}
		checkOrder(t, p.P.Events(q.Ticket.Nonce), int(p.P.Layout.Layers))
	}
	p.Close(t)
}

// checkOrder wants Bound, every Pushed once, Settled.
func checkOrder(t *testing.T, evs []transfer.Event, pushes int) {
	t.Helper()
	if len(evs) != pushes+2 || evs[0].Kind != transfer.EventBound || evs[len(evs)-1].Kind != transfer.EventSettled {
		t.Fatalf("source's events: %s", describe(evs))
	}
	seen := make(map[uint64]bool)
	for _, ev := range evs[1 : len(evs)-1] {
		if ev.Kind != transfer.EventPushed || seen[ev.Seq] {
			t.Fatalf("source's events: %s", describe(evs))
		}
		seen[ev.Seq] = true
	}
}

func testPartialAndPrefix(t *testing.T, f Factory) {
	p := NewPair(t, f, Options{})
	r := NewRand()
	for _, c := range []struct{ tokens, first uint32 }{{1, 0}, {16, 0}, {17, 16}, {33, 16}, {1000, 480}, {1024, 1008}} {
		q := p.NewRequest(r, c.tokens, c.first, patience)
		q.Present(t, nil)
		q.Bind(t)
		q.PushAll(t, []byte("r"))
		q.Settled(t, []byte("r"))
		if ev := p.P.Wait(t, q.Ticket.Nonce, transfer.EventBound); ev.FirstToken != c.first {
			t.Errorf("bound from token %d, want %d", ev.FirstToken, c.first)
		}
	}
}

func testLayouts(t *testing.T, f Factory) {
	for _, c := range []struct{ p, d uint32 }{{16, 64}, {64, 16}, {16, 4}, {12, 8}} {
		t.Run(fmt.Sprintf("%dto%d", c.p, c.d), func(t *testing.T) {
			src, dst := DefaultShape, DefaultShape
			src.BlockTokens, dst.BlockTokens, dst.Blocks = c.p, c.d, 128
			p := NewPair(t, f, Options{P: src, D: dst})
			q := p.NewRequest(NewRand(), 205, c.d, patience)
			q.Present(t, nil)
			q.Bind(t)
			q.PushAll(t, nil)
			q.Settled(t, nil)
		})
	}
}

func testLargeUnits(t *testing.T, f Factory) {
	// 2.5 MiB a unit: three parts.
	s := Shape{Layers: 2, Blocks: 4, BlockTokens: 40, Heads: 4, HeadBytes: 8192}
	p := NewPair(t, f, Options{P: s, D: s})
	q := p.NewRequest(NewRand(), 111, 40, patience)
	q.Present(t, nil)
	q.Bind(t)
	q.PushAll(t, nil)
	q.Settled(t, nil)
}

func testNothingWanted(t *testing.T, f Factory) {
	p := NewPair(t, f, Options{})
	q := p.NewRequest(NewRand(), 40, 40, patience)
	q.Present(t, nil)
	q.Bind(t)
	q.PushAll(t, []byte("all of it is there"))
	q.Settled(t, []byte("all of it is there"))
	if s := p.D.Engine.Status(); s.Totals.BytesLanded != 0 {
		t.Errorf("%d bytes landed", s.Totals.BytesLanded)
	}
}

func testPushBeforeBound(t *testing.T, f Factory) {
	p := NewPair(t, f, Options{})
	q := p.NewRequest(NewRand(), 200, 0, patience)
	q.Present(t, nil)
	q.PushAll(t, []byte("early"))
	q.Bind(t)
	q.Settled(t, []byte("early"))
}

func testManyLeases(t *testing.T, f Factory) {
	s := DefaultShape
	s.Blocks = 256
	p := NewPair(t, f, Options{P: s, D: s})
	r := NewRand()
	perm := r.Perm(256)
	var qs []*Request
	for i := range 16 { // disjoint blocks
		q := &Request{Pair: p, Tokens: 250}
		q.Ticket, q.Raw = p.Ticket(patience)
		for _, b := range perm[16*i : 16*i+16] {
			q.Src, q.Dst = append(q.Src, uint32(b)), append(q.Dst, uint32(255-b))
		}
		q.FillSource(byte(i))
		p.D.set(q.Dst, 0x80)
		qs = append(qs, q)
		q.Present(t, nil)
	}
	for _, q := range qs {
		q.Bind(t)
		q.PushAll(t, []byte("many"))
	}
	for _, q := range qs {
		q.Settled(t, []byte("many"))
	}
}

func testRefuse(t *testing.T, f Factory) {
	p := NewPair(t, f, Options{})
	r := NewRand()
	t.Run("Presented", func(t *testing.T) {
		q := p.NewRequest(r, 20, 0, patience)
		q.Present(t, nil)
		p.D.Wait(t, q.Ticket.Nonce, transfer.EventPresented)
		if err := p.D.Client.Refuse(q.Raw, "no blocks"); err != nil {
			t.Fatal(err)
		}
		if ev := p.P.End(t, q.Ticket.Nonce); ev.Kind != transfer.EventRefused || ev.Reason != "no blocks" {
			t.Errorf("source: %v %q", ev.Kind, ev.Reason)
		}
		p.D.Wait(t, q.Ticket.Nonce, transfer.EventEnded)
	})
	t.Run("BeforePresented", func(t *testing.T) {
		q := p.NewRequest(r, 20, 0, patience)
		if err := p.D.Client.Refuse(q.Raw, "gone home"); err != nil {
			t.Fatal(err)
		}
		if p.Local { // the one daemon knows at once
			if _, err := p.P.Client.Present(transfer.PresentReq{Ticket: q.Raw, Regions: p.P.Regions, Tokens: 20, Blocks: q.Src}); !errors.Is(err, transfer.ErrTicketUsed) {
				t.Errorf("present: %v", err)
			}
			return
		}
		q.Present(t, nil)
		if ev := p.P.End(t, q.Ticket.Nonce); ev.Kind != transfer.EventRefused || !strings.Contains(ev.Reason, "gone home") {
			t.Errorf("source: %v %q", ev.Kind, ev.Reason)
		}
	})
}

func testWrongTickets(t *testing.T, f Factory) {
	p := NewPair(t, f, Options{})
	other := append([]byte(nil), Key...)
	other[0] ^= 1
	for _, c := range []struct {
		name   string
		change func(*ticket.Ticket)
		key    []byte
		want   error
	}{
		{"Key", func(*ticket.Ticket) {}, other, ticket.ErrBadMAC},
		{"Expired", func(x *ticket.Ticket) { x.Deadline = time.Now().Add(-time.Second) }, Key, ticket.ErrExpired},
		{"TooLong", func(x *ticket.Ticket) { x.Deadline = time.Now().Add(24 * time.Hour) }, Key, transfer.ErrLimit},
		{"PrefillNode", func(x *ticket.Ticket) { x.PNode = "node-x" }, Key, transfer.ErrWrongTicket},
		{"PrefillEngine", func(x *ticket.Ticket) { x.PEngine = "someone" }, Key, transfer.ErrWrongTicket},
		{"Model", func(x *ticket.Ticket) { x.Fingerprint[0]++ }, Key, transfer.ErrWrongTicket},
	} {
		t.Run(c.name, func(t *testing.T) {
			q := p.NewRequest(NewRand(), 20, 0, patience)
			c.change(&q.Ticket)
			q.Raw = ticket.Mint(c.key, q.Ticket)
			_, err := p.P.Client.Present(transfer.PresentReq{Ticket: q.Raw, Peer: p.Addr, Regions: p.P.Regions, Tokens: 20, Blocks: q.Src})
			if !errors.Is(err, c.want) {
				t.Errorf("present: %v, want %v", err, c.want)
			}
		})
	}
	if s := p.D.Engine.Status(); s.Totals.BytesLanded != 0 || len(s.Leases) != 0 {
		t.Errorf("%d bytes landed, %d leases left", s.Totals.BytesLanded, len(s.Leases))
	}
}

// testAbsent: a ticket for an engine that is not attached waits for it, until P takes it back.
func testAbsent(t *testing.T, f Factory) {
	p := NewPair(t, f, Options{})
	q := p.NewRequest(NewRand(), 20, 0, patience)
	if err := p.D.Client.Close(); err != nil {
		t.Fatal(err)
	}
	q.Present(t, nil)
	p.D.Reattach(t)
	q.Bind(t)
	q.PushAll(t, nil)
	q.Settled(t, nil)
	if err := p.D.Client.Close(); err != nil {
		t.Fatal(err)
	}
	back := p.NewRequest(NewRand(), 20, 0, patience)
	back.Present(t, nil)
	if err := p.P.Client.Revoke(back.PLease, "taken back"); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(patience); p.D.Engine.Status().Waiting > 0; runtime.Gosched() {
		if time.Now().After(deadline) {
			t.Fatal("it still waits")
		}
	}
}

func testReplay(t *testing.T, f Factory) {
	p := NewPair(t, f, Options{})
	q := p.NewRequest(NewRand(), 20, 0, patience)
	q.Present(t, nil)
	if _, err := p.P.Client.Present(transfer.PresentReq{Ticket: q.Raw, Peer: p.Addr, Regions: p.P.Regions, Tokens: 20, Blocks: q.Src}); !errors.Is(err, transfer.ErrTicketUsed) {
		t.Errorf("second present while the first lives: %v", err)
	}
	q.Bind(t)
	if _, err := p.D.Client.Bind(transfer.BindReq{Ticket: q.Raw, Regions: p.D.Regions, Blocks: q.Dst}); !errors.Is(err, transfer.ErrTicketUsed) {
		t.Errorf("second bind: %v", err)
	}
	q.PushAll(t, nil)
	q.Settled(t, nil)
	// P's daemon has forgotten the ticket, D's has not.
	again, err := p.P.Client.Present(transfer.PresentReq{Ticket: q.Raw, Peer: p.Addr, Regions: p.P.Regions, Tokens: 20, Blocks: q.Src})
	if err != nil {
		t.Fatal(err)
	}
	ev := p.P.Wait(t, q.Ticket.Nonce, transfer.EventRefused)
	if ev.Lease != again || !strings.Contains(ev.Reason, "used already") {
		t.Errorf("replayed ticket: %v of lease %d: %q", ev.Kind, ev.Lease, ev.Reason)
	}
	if _, err := p.D.Client.Bind(transfer.BindReq{Ticket: q.Raw, Regions: p.D.Regions, Blocks: q.Dst}); !errors.Is(err, transfer.ErrNotPresented) {
		t.Errorf("bind after the end: %v", err)
	}
}

func testBadRequests(t *testing.T, f Factory) {
	p := NewPair(t, f, Options{})
	r := NewRand()
	q := p.NewRequest(r, 40, 0, patience)
	present := func(tokens uint32, blocks ...uint32) error {
		_, err := p.P.Client.Present(transfer.PresentReq{Ticket: q.Raw, Peer: p.Addr, Regions: p.P.Regions, Tokens: tokens, Blocks: blocks})
		return err
	}
	for name, err := range map[string]error{
		"no tokens": present(0), "too many": present(40, 1, 2, 3, 4), "twice": present(40, 1, 2, 1),
		"out of range": present(40, 1, 2, 64), "huge": present(1<<32-1, 1),
	} {
		if !errors.Is(err, transfer.ErrInvalid) {
			t.Errorf("present with %s: %v", name, err)
		}
	}
	q.Present(t, nil)
	p.D.Wait(t, q.Ticket.Nonce, transfer.EventPresented)
	bind := func(first uint32, blocks ...uint32) error {
		_, err := p.D.Client.Bind(transfer.BindReq{Ticket: q.Raw, Regions: p.D.Regions, FirstToken: first, Blocks: blocks})
		return err
	}
	for name, err := range map[string]error{
		"too few blocks": bind(0, 1, 2), "twice": bind(0, 1, 2, 1), "out of range": bind(0, 1, 2, 1<<31), "odd first token": bind(5, 1, 2, 3),
		"first token beyond": bind(48, 1, 2, 3),
	} {
		if !errors.Is(err, transfer.ErrInvalid) {
			t.Errorf("bind with %s: %v", name, err)
		}
	}
	q.Bind(t)
	q2 := p.NewRequest(r, 40, 0, patience)
	q2.Present(t, nil)
	p.D.Wait(t, q2.Ticket.Nonce, transfer.EventPresented)
	if _, err := p.D.Client.Bind(transfer.BindReq{Ticket: q2.Raw, Regions: p.D.Regions, Blocks: q.Dst}); !errors.Is(err, transfer.ErrInvalid) {
		t.Errorf("bind of blocks that another lease has: %v", err)
	}
	for name, units := range map[string][]transfer.Unit{
		"none": nil, "layer": {{Layer: 4, First: 0, Count: 1}}, "empty": {{Layer: 0, First: 0, Count: 0}}, "beyond": {{Layer: 0, First: 2, Count: 2}},
		"overflow": {{Layer: 0, First: 1, Count: 1<<32 - 1}},
	} {
		if err := p.P.Client.Push(q.PLease, units, 1); !errors.Is(err, transfer.ErrInvalid) {
			t.Errorf("push of %s: %v", name, err)
		}
	}
	if err := p.P.Client.Handoff(q.PLease, make([]byte, 1<<20+1)); !errors.Is(err, transfer.ErrLimit) {
		t.Errorf("oversize record: %v", err)
	}
	q.PushAll(t, make([]byte, 1<<20))
	q.Settled(t, make([]byte, 1<<20))
}

func testExpires(t *testing.T, f Factory) {
	p := NewPair(t, f, Options{})
	// On a busy machine the first deadline may pass before the ticket is bound.
	for life := 300 * time.Millisecond; ; life *= 4 {
		q := p.NewRequest(NewRand(), 20, 0, life)
		q.Present(t, nil)
		if !q.bindInTime() && life < patience {
			t.Logf("a deadline of %v passed before the ticket was bound", life)
			p.P.End(t, q.Ticket.Nonce)
			continue
		}
		for _, s := range []*Side{p.P, p.D} {
			if ev := s.End(t, q.Ticket.Nonce); ev.Kind != transfer.EventEnded || ev.State != transfer.LeaseExpired {
				t.Errorf("%s: %v %v %q, want expired", s.ID, ev.Kind, ev.State, ev.Reason)
			}
		}
		return
	}
}

func testClientCloses(t *testing.T, f Factory) {
	for _, who := range []string{"prefill", "decode"} {
		t.Run(who, func(t *testing.T) {
			p := NewPair(t, f, Options{})
			q := p.NewRequest(NewRand(), 900, 0, patience)
			p.P.Pauses.Set(transfer.PauseWriteFrame, 1)
			q.Present(t, nil)
			q.Bind(t)
			q.PushAll(t, nil)
			WaitHeld(t, p.P.Pauses, transfer.PauseWriteFrame)
			closing, other := p.P, p.D
			if who == "decode" {
				closing, other = p.D, p.P
			}
			if err := closing.Client.Close(); err != nil {
				t.Fatal(err)
			}
			if ev := other.End(t, q.Ticket.Nonce); ev.Kind != transfer.EventEnded || !strings.Contains(ev.Reason, "left") {
				t.Errorf("%s: %v %q", other.ID, ev.Kind, ev.Reason)
			}
			if evs := closing.Events(q.Ticket.Nonce); evs[len(evs)-1].Kind != transfer.EventEnded {
				t.Errorf("%s closed and heard %s", closing.ID, describe(evs))
			}
			if c, err := closing.Engine.Attach(closing.ID, closing.event); err != nil {
				t.Errorf("a successor cannot attach: %v", err)
			} else if err := c.Close(); err != nil {
				t.Error(err)
			}
		})
	}
}

// WaitHeld waits until a goroutine is held at a pause point.
func WaitHeld(t testing.TB, p *transfer.Pauses, point string) {
	t.Helper()
	deadline := time.NewTimer(patience)
	defer deadline.Stop()
	for {
		n, changed := p.Waiting(point)
		if n > 0 {
			return
		}
		select {
		case <-changed:
		case <-deadline.C:
			t.Fatalf("waited %v for a goroutine to be held at %s", patience, point)
		}
	}
}

func testRegionRemoved(t *testing.T, f Factory) {
	p := NewPair(t, f, Options{})
	q := p.NewRequest(NewRand(), 900, 0, patience)
	p.P.Pauses.Set(transfer.PauseWriteFrame, 1)
	q.Present(t, nil)
	q.Bind(t)
	q.PushAll(t, nil)
	WaitHeld(t, p.P.Pauses, transfer.PauseWriteFrame)
	if err := p.D.Client.RemoveRegion(p.D.Regions[0]); err != nil {
		t.Fatal(err)
	}
	p.P.Pauses.ReleaseAll()
	for _, s := range []*Side{p.P, p.D} {
		if ev := s.End(t, q.Ticket.Nonce); ev.Kind != transfer.EventEnded || !strings.Contains(ev.Reason, "removed") {
			t.Errorf("%s: %v %q", s.ID, ev.Kind, ev.Reason)
		}
	}
	if err := p.D.Client.RemoveRegion(p.D.Regions[0]); !errors.Is(err, transfer.ErrUnknownRegion) {
		t.Errorf("second removal: %v", err)
	}
}

func testEngineCloses(t *testing.T, f Factory) {
	if f.Local {
		return // both ends are one engine, and nobody is left to tell
	}
	p := NewPair(t, f, Options{})
	q := p.NewRequest(NewRand(), 900, 0, patience)
	p.P.Pauses.Set(transfer.PauseWriteFrame, 1)
	q.Present(t, nil)
	q.Bind(t)
	q.PushAll(t, nil)
	WaitHeld(t, p.P.Pauses, transfer.PauseWriteFrame)
	if err := p.D.Engine.Close(); err != nil {
		t.Fatal(err)
	}
	if ev := p.P.End(t, q.Ticket.Nonce); ev.Kind != transfer.EventEnded {
		t.Errorf("source: %v %q", ev.Kind, ev.Reason)
	}
}

func testRevokeHeldAtPause(t *testing.T, f Factory) {
	points := []string{transfer.PauseWriteFrame}
	if f.ReadPause != "" {
		points = append(points, f.ReadPause)
	}
	for _, point := range points {
		for _, who := range []string{"prefill", "decode"} {
			t.Run(point+"/"+who, func(t *testing.T) {
				p := NewPair(t, f, Options{})
				q := p.NewRequest(NewRand(), 900, 0, patience)
				holds := p.P.Pauses
				if point == f.ReadPause {
					holds = p.D.Pauses
				}
				holds.Set(point, 2)
				q.Present(t, nil)
				q.Bind(t)
				q.PushAll(t, nil)
				WaitHeld(t, holds, point)
				s, id := p.P, q.PLease
				if who == "decode" {
					s, id = p.D, q.DLease
				}
				began := time.Now()
				if err := s.Client.Revoke(id, "enough"); err != nil {
					t.Fatal(err)
				}
				if d := time.Since(began); d > 2*time.Second {
					t.Errorf("revoke took %v while a transfer was held", d)
				}
				if err := s.Client.Revoke(id, "again"); !errors.Is(err, transfer.ErrUnknownLease) && !errors.Is(err, transfer.ErrLeaseEnded) {
					t.Errorf("second revoke: %v", err)
				}
				for _, s := range []*Side{p.P, p.D} {
					if ev := s.End(t, q.Ticket.Nonce); ev.Kind != transfer.EventEnded || ev.Reason != "enough" {
						t.Errorf("%s: %v %q", s.ID, ev.Kind, ev.Reason)
					}
				}
				holds.ReleaseAll()
				p.reopen(t, NewRand())                          // what a fence has forced may have been the channel's last lane
				q2 := p.NewRequest(NewRand(), 900, 0, patience) // the channel still works
				q2.Present(t, nil)
				q2.Bind(t)
				q2.PushAll(t, nil)
				q2.Settled(t, nil)
			})
		}
	}
}

func testRateLimit(t *testing.T, f Factory) {
	p := NewPair(t, f, Options{Config: func(c *transfer.Config) { c.RateLimit = 16 << 20 }})
	q := p.NewRequest(NewRand(), 512, 0, patience) // 8 MiB
	q.Present(t, nil)
	q.Bind(t)
	began := time.Now()
	q.PushAll(t, nil)
	q.Settled(t, nil)
	if d := time.Since(began); d < 300*time.Millisecond {
		t.Errorf("8 MiB at 16 MiB/s took %v only", d)
	}
	q = p.NewRequest(NewRand(), 1024, 0, patience) // 16 MiB: 1 s
	q.Present(t, nil)
	q.Bind(t)
	p.P.Engine.SetRate(1 << 10)
	q.PushAll(t, nil)
	p.P.Engine.SetRate(0)
	q.Settled(t, nil)
}

func testStatus(t *testing.T, f Factory) {
	p := NewPair(t, f, Options{})
	q := p.NewRequest(NewRand(), 900, 0, patience)
	p.P.Pauses.Set(transfer.PauseWriteFrame, 2)
	q.Present(t, nil)
	q.Bind(t)
	q.PushAll(t, nil)
	WaitHeld(t, p.P.Pauses, transfer.PauseWriteFrame)
	s := p.P.Engine.Status()
	var c *transfer.ChannelStatus
	for i := range s.Channels {
		if s.Channels[i].Dialled {
			c = &s.Channels[i]
		}
	}
	if c == nil || c.BacklogBytes == 0 || c.LanesUp != 2 || c.Why == "" || c.Transport == "" {
		t.Fatalf("channel in the middle of a transfer: %+v", c)
	}
	if len(s.Leases) == 0 || s.Leases[0].State != "bound" || s.Leases[0].UnitsDone >= s.Leases[0].UnitsWanted {
		t.Errorf("leases in the middle of a transfer: %+v", s.Leases)
	}
	p.P.Pauses.ReleaseAll()
	q.Settled(t, nil)
	s = p.P.Engine.Status()
	for _, c := range s.Channels {
		if c.BacklogBytes != 0 {
			t.Errorf("backlog of %d bytes after settling", c.BacklogBytes)
		}
	}
	want := uint64(900) * 4 * 2 * 4 * 512
	if got := p.D.Engine.Status().Totals.BytesLanded; got != want {
		t.Errorf("%d bytes landed, want %d", got, want)
	}
	runtime.KeepAlive(p)
}
