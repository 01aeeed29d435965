package transporttest

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/headrace/headrace/transfer"
)

// testShards moves requests between shard sets: any number of ranks and block sizes on the two sides, heads that do not
// divide evenly, and more ranks than heads.
func testShards(t *testing.T, f Factory) {
	for _, c := range []struct{ heads, p, pTokens, d, dTokens uint32 }{
		{4, 1, 16, 2, 16}, {4, 2, 16, 1, 16}, {4, 1, 16, 4, 64}, {4, 4, 64, 1, 16}, {4, 2, 16, 4, 16}, {4, 4, 16, 2, 64}, {6, 4, 16, 5, 32},
		{2, 4, 16, 1, 16}, {2, 1, 16, 8, 16}, {3, 5, 12, 4, 8},
	} {
		t.Run(fmt.Sprintf("%dheads/%dx%dto%dx%d", c.heads, c.p, c.pTokens, c.d, c.dTokens), func(t *testing.T) {
			src := Shape{Layers: 3, Blocks: 40, BlockTokens: c.pTokens, Heads: c.heads, HeadBytes: 512, Shards: c.p}
			dst := Shape{Layers: 3, Blocks: 40, BlockTokens: c.dTokens, Heads: c.heads, HeadBytes: 512, Shards: c.d}
			p := NewPair(t, f, Options{P: src, D: dst})
			for _, first := range []uint32{0, c.dTokens, 3 * c.dTokens} {
				q := p.NewRequest(NewRand(), 3*c.dTokens+5, first, patience)
				q.Present(t, nil)
				if ev := p.D.Wait(t, q.Ticket.Nonce, transfer.EventPresented); !slices.Equal(ev.Layouts, p.P.Layouts) {
					t.Errorf("presented layouts %+v", ev.Layouts)
				}
				q.Bind(t)
				if ev := p.P.Wait(t, q.Ticket.Nonce, transfer.EventBound); !slices.Equal(ev.Layouts, p.D.Layouts) {
					t.Errorf("bound layouts %+v", ev.Layouts)
				}
				q.PushAll(t, []byte("r"))
				q.Settled(t, []byte("r"))
			}
		})
	}
	t.Run("rank by rank", func(t *testing.T) { testPushRankByRank(t, f) })
	t.Run("large units", func(t *testing.T) {
		// 2.5 MiB a unit of rank 0 and 5 MiB of rank 1, in parts.
		src := Shape{Layers: 1, Blocks: 4, BlockTokens: 80, Heads: 3, HeadBytes: 16384, Shards: 2}
		dst := src
		dst.Shards = 3
		p := NewPair(t, f, Options{P: src, D: dst})
		q := p.NewRequest(NewRand(), 211, 80, patience)
		q.Present(t, nil)
		q.Bind(t)
		q.PushAll(t, nil)
		q.Settled(t, nil)
	})
}

// testPushRankByRank: a push may name one region, and everything is counted all the same.
func testPushRankByRank(t *testing.T, f Factory) {
	src, dst := DefaultShape, DefaultShape
	src.Shards, dst.Shards = 4, 2
	p := NewPair(t, f, Options{P: src, D: dst})
	q := p.NewRequest(NewRand(), 100, 0, patience)
	q.Present(t, nil)
	q.Bind(t)
	seq := uint64(0)
	for shard := src.Shards; shard > 0; shard-- {
		for layer := range src.Layers {
			seq++
			if err := p.P.Client.Push(q.PLease, []transfer.Unit{{Layer: layer, Count: uint32(len(q.Src)), Shard: shard}}, seq); err != nil {
				t.Fatal(err)
			}
		}
		if shard > 1 && p.D.Events(q.Ticket.Nonce)[len(p.D.Events(q.Ticket.Nonce))-1].Kind == transfer.EventSettled {
			t.Fatal("settled before all ranks had pushed")
		}
	}
	if err := p.P.Client.Handoff(q.PLease, nil); err != nil {
		t.Fatal(err)
	}
	q.Settled(t, nil)
	checkOrder(t, p.P.Events(q.Ticket.Nonce), int(seq))
}

// testShardRequests: what is no shard set is refused, with the reason, and binds nothing.
func testShardRequests(t *testing.T, f Factory) {
	src, dst := DefaultShape, DefaultShape
	src.Shards, dst.Shards = 2, 4
	p := NewPair(t, f, Options{P: src, D: dst})
	q := p.NewRequest(NewRand(), 40, 0, patience)
	a, b := p.P.Regions[0], p.P.Regions[1]
	for _, c := range []struct {
		regions []transfer.RegionID
		is      error
		says    string
	}{
		{nil, transfer.ErrRanksMissing, "no member"}, {make([]transfer.RegionID, 65), transfer.ErrInvalid, "65 regions"},
		{[]transfer.RegionID{a, a}, transfer.ErrInvalid, "twice"}, {[]transfer.RegionID{a, 99}, transfer.ErrUnknownRegion, "99"},
		{[]transfer.RegionID{a}, transfer.ErrPlan, "no region holds heads 2 to 3 of 4"}, {[]transfer.RegionID{b, a}, transfer.ErrPlan, "order of rank"},
	} {
		_, err := p.P.Client.Present(transfer.PresentReq{Ticket: q.Raw, Peer: p.Addr, Regions: c.regions, Tokens: q.Tokens, Blocks: q.Src})
		if !errors.Is(err, c.is) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("present of regions %v: %v, want %q", c.regions, err, c.says)
		}
	}
	q.Present(t, nil)
	p.D.Wait(t, q.Ticket.Nonce, transfer.EventPresented)
	for says, regions := range map[string][]transfer.RegionID{
		"3 regions for 4": p.D.Regions[:3], "no member": nil, "twice": append(slices.Clone(p.D.Regions[:3]), p.D.Regions[0]),
	} {
		_, err := p.D.Client.Bind(transfer.BindReq{Ticket: q.Raw, Regions: regions, Blocks: q.Dst})
		if err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("bind to regions %v: %v, want %q", regions, err, says)
		}
	}
	if err := p.P.Client.Push(q.PLease, []transfer.Unit{{Count: 1, Shard: 3}}, 1); !errors.Is(err, transfer.ErrInvalid) {
		t.Errorf("push of a third region of two: %v", err)
	}
	q.Bind(t)
	other := p.NewRequest(NewRand(), 40, 0, patience)
	other.Present(t, nil)
	p.D.Wait(t, other.Ticket.Nonce, transfer.EventPresented)
	if _, err := p.D.Client.Bind(transfer.BindReq{Ticket: other.Raw, Regions: p.D.Regions, Blocks: q.Dst}); !errors.Is(err, transfer.ErrInvalid) {
		t.Errorf("bind of blocks that another lease has: %v", err)
	}
	// Removing any region of the set ends the lease.
	if err := p.D.Client.RemoveRegion(p.D.Regions[2]); err != nil {
		t.Fatal(err)
	}
	for _, s := range []*Side{p.P, p.D} {
		if ev := s.End(t, q.Ticket.Nonce); ev.Kind != transfer.EventEnded || !strings.Contains(ev.Reason, "removed") {
			t.Errorf("%s: %v %q", s.ID, ev.Kind, ev.Reason)
		}
	}
}
