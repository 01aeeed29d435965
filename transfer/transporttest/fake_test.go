package transporttest

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/headrace/headrace/transfer"
)

func fakeFactory(mk func() *Fake) Factory {
	f := mk() // both daemons share it: it is their network
	return Factory{New: func() transfer.Transport { return f }, Network: NewNetwork(), ReadPause: transfer.PauseReadFrame, Config: func(c *transfer.Config) {
		c.FenceGrace = time.Second // where threads wait, ends that agree may take longer than an engine gives them, and the channel would go
	}}
}

func TestFakeConformance(t *testing.T) {
	for _, oneSided := range []bool{false, true} {
		t.Run(fmt.Sprintf("oneSided=%v", oneSided), func(t *testing.T) {
			Run(t, fakeFactory(func() *Fake { return &Fake{OneSided: oneSided} }))
		})
	}
}

// The canary test once more, with every second piece in some trouble that a lane survives.
func TestFakeCanaryUnderFaults(t *testing.T) {
	for _, oneSided := range []bool{false, true} {
		t.Run(fmt.Sprintf("oneSided=%v", oneSided), func(t *testing.T) {
			var mu sync.Mutex
			r := rand.New(rand.NewPCG(9, 9))
			testCanary(t, fakeFactory(func() *Fake {
				return &Fake{OneSided: oneSided, Faults: func(int, int, transfer.Piece) Fault {
					mu.Lock()
					defer mu.Unlock()
					return []Fault{None, None, Delay, Duplicate, Reorder}[r.IntN(5)]
				}}
			}))
		})
	}
}

// The canary test with every fence made by force.
func TestFakeForcedCanaries(t *testing.T) {
	ForcedCanaries(t, fakeFactory(func() *Fake { return &Fake{OneSided: true} }))
}

// The same where the right to write can be taken back from one lease: the conformance suite, fences by force, and other leases
// that do not notice.
func TestFakeGrants(t *testing.T) {
	granting := func(faults Faults) Factory {
		return fakeFactory(func() *Fake { return &Fake{OneSided: true, Grants: true, Faults: faults} })
	}
	t.Run("Conformance", func(t *testing.T) { Run(t, granting(nil)) })
	t.Run("ForcedCanaries", func(t *testing.T) { ForcedCanaries(t, granting(nil)) })
	t.Run("ForcedSparesOthers", func(t *testing.T) {
		late := func(int, int, transfer.Piece) Fault { return Delay }
		ForcedSparesOthers(t, granting(late))
	})
	t.Run("Status", func(t *testing.T) {
		p := NewPair(t, granting(nil), Options{})
		q := p.request(64, 0, patience)
		q.Present(t, nil)
		q.Bind(t)
		q.PushAll(t, nil)
		q.Settled(t, nil)
		if c := p.D.Engine.Status().Channels; len(c) != 1 || c[0].Fencing != "by taking back the fake right" {
			t.Errorf("channels %+v", c)
		}
	})
}

// A fault on one lane: the lease settles over the others, nothing counts twice, and what landed is right.
func TestFakeSettlesDespiteLaneFaults(t *testing.T) {
	for _, oneSided := range []bool{false, true} {
		for name, fault := range map[string]Fault{
			"Drop": Drop, "Truncate": Truncate, "Corrupt": Corrupt, "Duplicate": Duplicate, "Reorder": Reorder, "Delay": Delay,
		} {
			t.Run(fmt.Sprintf("%s/oneSided=%v", name, oneSided), func(t *testing.T) {
				defer CheckLeaks(t)()
				faults := func(lane, n int, _ transfer.Piece) Fault {
					if n == 3 {
						return fault
					}
					return None
				}
				p := NewPair(t, fakeFactory(func() *Fake { return &Fake{OneSided: oneSided, Faults: faults} }), Options{})
				q := p.NewRequest(NewRand(), 900, 0, patience)
				q.Present(t, nil)
				q.Bind(t)
				q.PushAll(t, []byte("record"))
				q.Settled(t, []byte("record"))
				if got, want := p.D.Engine.Status().Totals.BytesLanded, uint64(900)*4*2*4*512; got != want {
					t.Errorf("%d bytes counted, want %d", got, want)
				}
				p.Close(t)
			})
		}
	}
}

// A piece that arrives altered is sent again, and is no reason to fail a lane.
func TestFakeAlteredPieceIsSentAgain(t *testing.T) {
	for _, oneSided := range []bool{false, true} {
		t.Run(fmt.Sprintf("oneSided=%v", oneSided), func(t *testing.T) {
			defer CheckLeaks(t)()
			faults := func(_, n int, _ transfer.Piece) Fault { return map[int]Fault{1: Flip, 3: Flip, 7: Flip}[n] }
			p := NewPair(t, fakeFactory(func() *Fake { return &Fake{OneSided: oneSided, Faults: faults} }), Options{Config: func(c *transfer.Config) {
				c.Checksum = transfer.ChecksumAlways
			}})
			q := p.NewRequest(NewRand(), 900, 0, patience)
			q.Present(t, nil)
			q.Bind(t)
			q.PushAll(t, []byte("record"))
			q.Settled(t, []byte("record"))
			d, s := p.D.Engine.Status(), p.P.Engine.Status()
			if got, want := d.Totals.BytesLanded, uint64(900)*4*2*4*512; got != want {
				t.Errorf("%d bytes counted, want %d", got, want)
			}
			if d.Totals.PiecesAltered != 3 || s.Totals.PiecesResent != 3 || d.Totals.PiecesVerified < 4 {
				t.Errorf("%d pieces verified, %d altered, %d sent again", d.Totals.PiecesVerified, d.Totals.PiecesAltered, s.Totals.PiecesResent)
			}
			for _, c := range s.Channels {
				if c.LanesUp != c.Lanes {
					t.Errorf("%d of %d lanes are up", c.LanesUp, c.Lanes)
				}
			}
			p.Close(t)
		})
	}
}

// A piece that arrives altered again and again fails its lease, with a word that names peer and lane.
func TestFakePieceAlwaysAlteredFailsTheLease(t *testing.T) {
	defer CheckLeaks(t)()
	faults := func(_, _ int, p transfer.Piece) Fault {
		if p.Stripe == 1 {
			return Flip
		}
		return None
	}
	p := NewPair(t, fakeFactory(func() *Fake { return &Fake{Faults: faults} }), Options{Config: func(c *transfer.Config) {
		c.Checksum = transfer.ChecksumAlways
	}})
	q := p.NewRequest(NewRand(), 200, 0, patience)
	q.Present(t, nil)
	q.Bind(t)
	q.PushAll(t, nil)
	for _, s := range []*Side{p.P, p.D} {
		ev := s.End(t, q.Ticket.Nonce)
		if ev.Kind != transfer.EventEnded || !strings.Contains(ev.Reason, "altered 4 times at node-d, last over lane") {
			t.Errorf("%s: %v %q", s.ID, ev.Kind, ev.Reason)
		}
	}
	p.Close(t)
}

// A lane that stalls in the middle of a piece is fenced by force where agreement cannot stop it, and the channel goes on.
func TestFakeStallIsFenced(t *testing.T) {
	for _, oneSided := range []bool{false, true} {
		for _, who := range []string{"prefill", "decode"} {
			t.Run(fmt.Sprintf("%s/oneSided=%v", who, oneSided), func(t *testing.T) {
				defer CheckLeaks(t)()
				stalled := make(chan struct{})
				var once atomic.Bool // a new channel counts from 0 again
				p := NewPair(t, fakeFactory(func() *Fake {
					return &Fake{OneSided: oneSided, Stalled: func() { close(stalled) }, Faults: func(lane, n int, _ transfer.Piece) Fault {
						if n == 2 && once.CompareAndSwap(false, true) {
							return Stall
						}
						return None
					}}
				}), Options{Config: func(c *transfer.Config) { c.FenceGrace = time.Millisecond }})
				q := p.NewRequest(NewRand(), 900, 0, patience)
				q.Present(t, nil)
				q.Bind(t)
				q.PushAll(t, nil)
				<-stalled
				s, id := p.P, q.PLease
				if who == "decode" {
					s, id = p.D, q.DLease
				}
				if err := s.Client.Revoke(id, "stalled"); err != nil {
					t.Fatal(err)
				}
				if who == "decode" {
					p.D.set(q.Dst, canaryTarget)
				}
				p.P.End(t, q.Ticket.Nonce)
				p.D.End(t, q.Ticket.Nonce)
				if who == "decode" {
					checkOnly(t, p.D, q.Dst, canaryTarget, "a byte landed after a forced fence")
				}
				if forced := p.P.Engine.Status().Totals.FencesForced + p.D.Engine.Status().Totals.FencesForced; (forced > 0) != oneSided {
					t.Errorf("%d fences were forced", forced)
				}
				p.reopen(t, NewRand()) // what a fence has forced may have been the channel's last lane
				q2 := p.NewRequest(NewRand(), 300, 0, patience)
				q2.Present(t, nil)
				q2.Bind(t)
				q2.PushAll(t, nil)
				q2.Settled(t, nil)
				p.Close(t)
			})
		}
	}
}
