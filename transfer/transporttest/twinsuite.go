package transporttest

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/headrace/headrace/transfer"
)

// RunTwin runs the conformance suite of a channel between two machines, in both directions.
func RunTwin(t *testing.T, tw Twin) {
	for _, c := range []struct {
		name string
		test func(*testing.T, *Machines)
	}{
		{"Settles", twinSettles}, {"Layouts", twinLayouts}, {"Shards", twinShards}, {"LargeUnits", twinLargeUnits}, {"BothWays", twinBothWays},
		{"Refuse", twinRefuse}, {"Expires", twinExpires}, {"ClientLeaves", twinClientLeaves}, {"DaemonRestarts", twinDaemonRestarts},
	} {
		t.Run(c.name, func(t *testing.T) { tw.Meet(t, c.test) })
	}
	t.Run("Canary", func(t *testing.T) {
		tw.Meet(t, func(t *testing.T, m *Machines) { TwinCanaries(t, m, StartOrder{Lanes: 2}, canaryRounds()/2) })
	})
}

// eachWay runs a test with either machine as the sender.
func eachWay(f func(from int)) {
	for from := range 2 {
		f(from)
	}
}

func twinSettles(t *testing.T, m *Machines) {
	m.Start(StartOrder{Lanes: 2})
	eachWay(func(from int) {
		for _, c := range []struct{ tokens, first uint32 }{{300, 0}, {1, 0}, {17, 16}, {33, 16}, {1000, 480}, {1024, 1008}, {40, 40}} {
			m.Carry(from, SendOrder{Tokens: c.tokens, First: c.first, Record: []byte(fmt.Sprint(c))})
		}
	})
}

func twinLayouts(t *testing.T, m *Machines) {
	for _, c := range []struct{ p, d uint32 }{{16, 64}, {64, 16}, {12, 8}} {
		src, dst := DefaultShape, DefaultShape
		src.BlockTokens, dst.BlockTokens, dst.Blocks = c.p, c.d, 128
		m.Start(StartOrder{P: src, D: dst})
		eachWay(func(from int) { m.Carry(from, SendOrder{Tokens: 205, First: c.d}) })
	}
}

func twinShards(t *testing.T, m *Machines) {
	for _, c := range []struct{ p, d uint32 }{{2, 4}, {4, 1}} {
		src, dst := DefaultShape, DefaultShape
		src.Shards, dst.Shards = c.p, c.d
		m.Start(StartOrder{P: src, D: dst})
		eachWay(func(from int) { m.Carry(from, SendOrder{Tokens: 300}) })
	}
}

func twinLargeUnits(t *testing.T, m *Machines) {
	s := Shape{Layers: 2, Blocks: 4, BlockTokens: 40, Heads: 4, HeadBytes: 8192}
	m.Start(StartOrder{P: s, D: s})
	eachWay(func(from int) { m.Carry(from, SendOrder{Tokens: 111, First: 40}) })
}

// twinBothWays has eight transfers under way in each direction at once: a channel is full-duplex.
func twinBothWays(t *testing.T, m *Machines) {
	s := DefaultShape
	s.Blocks = 128
	m.Start(StartOrder{P: s, D: s, Lanes: 2})
	r := NewRand()
	var flights []*Flight
	for range 2 { // the second round over the channel that the first one opened
		flights = flights[:0]
		perm := r.Perm(128)
		for i := range 8 {
			var blocks []uint32
			for _, b := range perm[16*i : 16*i+16] {
				blocks = append(blocks, uint32(b))
			}
			eachWay(func(from int) {
				f := m.Send(from, SendOrder{Tokens: 250, Src: blocks, Record: []byte("both")})
				f.Sent.Dst = blocks
				flights = append(flights, f)
			})
		}
		for _, f := range flights {
			f.Bind()
		}
		for _, f := range flights {
			f.Settled()
		}
	}
	for i, mc := range m {
		if s := mc.Status(); len(s.Leases) != 0 || s.Totals.LeasesSettled == 0 {
			t.Errorf("machine %d: %d leases left, %d settled", i+1, len(s.Leases), s.Totals.LeasesSettled)
		}
	}
}

func twinRefuse(t *testing.T, m *Machines) {
	m.Start(StartOrder{})
	eachWay(func(from int) {
		f := m.Send(from, SendOrder{Tokens: 20})
		call[bool](f.To, "Refuse", f.Sent)
		if e := call[Ended](f.From, "End", f.Nonce); e.Kind != transfer.EventRefused || e.Reason != "no blocks" {
			t.Errorf("source: %v %q", e.Kind, e.Reason)
		}
	})
}

// twinExpires holds a transfer until its deadline. The clocks of two machines agree as well as those of two hosts.
func twinExpires(t *testing.T, m *Machines) {
	m.Start(StartOrder{})
	eachWay(func(from int) {
		f := m.Send(from, SendOrder{Tokens: 900, Held: 2, Life: 3 * time.Second})
		f.Bind()
		for _, mc := range m {
			if e := call[Ended](mc, "End", f.Nonce); e.Kind != transfer.EventEnded || e.State != transfer.LeaseExpired && !strings.Contains(e.Reason, "deadline") && !strings.Contains(e.Reason, "expired") {
				t.Errorf("%v %v %q, want expired", e.Kind, e.State, e.Reason)
			}
		}
		call[bool](f.From, "Release", 0)
		m.Carry(from, SendOrder{Tokens: 300})
	})
}

func twinClientLeaves(t *testing.T, m *Machines) {
	for _, who := range []string{"prefill", "decode"} {
		m.Start(StartOrder{})
		f := m.Send(0, SendOrder{Tokens: 900, Held: 1})
		f.Bind()
		call[bool](f.From, "Held", 0)
		leaves, other := f.From, f.To
		if who == "decode" {
			leaves, other = f.To, f.From
		}
		call[bool](leaves, "LeaveClient", who)
		call[bool](f.From, "Release", 0)
		if e := call[Ended](other, "End", f.Nonce); e.Kind != transfer.EventEnded || !strings.Contains(e.Reason, "left") {
			t.Errorf("%s left: the other end: %v %q", who, e.Kind, e.Reason)
		}
	}
}

// twinDaemonRestarts takes either daemon away in the middle of a transfer; its successor has another address.
func twinDaemonRestarts(t *testing.T, m *Machines) {
	m.Start(StartOrder{})
	eachWay(func(gone int) {
		m.Carry(0, SendOrder{Tokens: 300})
		f := m.Send(0, SendOrder{Tokens: 900, Held: 2})
		f.Bind()
		call[bool](f.From, "Held", 0)
		m[gone].Stop()
		call[bool](m[0], "ReleaseIfThere", 0)
		if e := call[Ended](m[1-gone], "End", f.Nonce); e.Kind != transfer.EventEnded {
			t.Errorf("at the other end: %v %q", e.Kind, e.Reason)
		}
		m[gone].Start(StartOrder{})
		eachWay(func(from int) { m.Carry(from, SendOrder{Tokens: 300}) })
	})
}

// TwinCanaries cancels transfers at random moments from either machine and overwrites the blocks at each end as soon as
// that end was told that it may: see testCanary. It gives how many were cancelled in flight.
func TwinCanaries(t *testing.T, m *Machines, o StartOrder, rounds int) (cancelled int) {
	t.Helper()
	m.Start(o)
	typical := max(m.Carry(0, SendOrder{Tokens: 400}), m.Carry(1, SendOrder{Tokens: 400}))
	r := NewRand()
	settled := 0
	for i := 0; i < rounds || fewInFlight(cancelled, i, rounds); i++ {
		if twinCancel(m, r, i%2, typical) {
			settled++
		} else {
			cancelled++
		}
		for _, mc := range m {
			call[bool](mc, "Canaries", 0)
		}
	}
	var forced, landed uint64
	for _, mc := range m {
		s := mc.Status()
		forced, landed = forced+s.Totals.FencesForced, landed+s.Totals.BytesLanded
	}
	t.Logf("%d cancelled in flight, %d settled before the cancel came, %d fences by force, %d MiB landed", cancelled, settled, forced, landed>>20)
	if cancelled < rounds/4 {
		t.Errorf("only %d of %d rounds were cancelled in flight: the test shows little", cancelled, rounds)
	}
	return cancelled
}

// twinCancel runs one transfer and revokes it from one end. It reports whether the transfer settled all the same.
func twinCancel(m *Machines, r *rand.Rand, from int, typical time.Duration) (settled bool) {
	t := m[0].t
	t.Helper()
	o := SendOrder{Tokens: uint32(200 + r.IntN(300)), Record: []byte("record")}
	if r.IntN(2) == 0 {
		o.Held = 1 + r.IntN(3)
	}
	f := m.Send(from, o)
	f.Bind()
	if o.Held > 0 {
		call[bool](f.From, "Held", 0)
	} else {
		<-time.After(time.Duration(r.Int64N(int64(typical)))) // chance decides where in the transfer the cancel comes
	}
	first, second := f.From, f.To
	if r.IntN(2) == 0 {
		first, second = second, first
	}
	settledAtP := false
	for i, mc := range []*Machine{first, second} {
		if i == 0 {
			call[bool](mc, "Revoke", f.Nonce)
		}
		e := call[Ended](mc, "End", f.Nonce)
		switch {
		case e.Kind != transfer.EventSettled:
			call[bool](mc, "Overwrite", f.Nonce)
		case mc == f.To:
			call[bool](mc, "Check", f.Nonce)
			settled = true
		default:
			settledAtP = true
		}
	}
	if settledAtP && !settled {
		t.Fatal("settled at P and not at D")
	}
	if o.Held > 0 {
		call[bool](f.From, "Release", 0)
	}
	return settled
}
