package transfer_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/transporttest"
)

// An engine that computes in chunks presents the blocks it has, and appends the others as it takes them: before the lease
// is bound and after.
func TestBlocksComeChunkByChunk(t *testing.T) {
	pair := transporttest.NewPair(t, tcpFactory, transporttest.Options{})
	q := pair.NewRequest(newRand(), 100, 16, time.Minute) // 7 blocks, the last one partial
	all, p := q.Src, pair.P.Client
	q.Src = all[:2]
	q.Present(t, nil)
	units := func(first, count uint32) []transfer.Unit {
		return []transfer.Unit{{Layer: transfer.AllLayers, First: first, Count: count}}
	}
	refused := func(what string, err error, words string) {
		t.Helper()
		if !errors.Is(err, transfer.ErrInvalid) || !strings.Contains(err.Error(), words) {
			t.Errorf("%s: %v, want %q", what, err, words)
		}
	}
	refused("push of blocks to come", p.Push(q.PLease, units(1, 2), 1), "2 of its 7 blocks so far")
	refused("hand-off too early", p.Handoff(q.PLease, nil), "2 of its 7 blocks")
	refused("no blocks", p.Extend(q.PLease, nil), "no blocks")
	refused("a block twice", p.Extend(q.PLease, []uint32{all[2], all[2]}), "twice")
	refused("a block of before", p.Extend(q.PLease, []uint32{all[2], all[0]}), "twice")
	refused("beyond the region", p.Extend(q.PLease, []uint32{1 << 20}), "the region has")
	refused("too many", p.Extend(q.PLease, make([]uint32, 6)), "takes 7")
	if err := p.Push(q.PLease, units(0, 2), 1); err != nil {
		t.Fatal(err)
	}
	if err := p.Extend(q.PLease, all[2:3]); err != nil { // what was refused left nothing behind
		t.Fatal(err)
	}
	if err := p.Push(q.PLease, units(2, 1), 2); err != nil {
		t.Fatal(err)
	}
	q.Bind(t)
	pair.P.Wait(t, q.Ticket.Nonce, transfer.EventBound)
	refused("a push after binding", p.Push(q.PLease, units(2, 2), 3), "3 of its 7 blocks so far")
	if err := p.Extend(q.PLease, all[3:]); err != nil {
		t.Fatal(err)
	}
	refused("more than all", p.Extend(q.PLease, all[:1]), "takes 7")
	refused("a push beyond all", p.PushNow(q.PLease, units(3, 5), 3), "has 7 blocks and 4 layers")
	refused("a layer too many", p.Push(q.PLease, []transfer.Unit{{Layer: 4, First: 0, Count: 1}}, 3), "4 layers")
	if err := p.PushNow(q.PLease, units(3, 4), 3); err != nil {
		t.Fatal(err)
	}
	if err := p.Handoff(q.PLease, []byte("done")); err != nil {
		t.Fatal(err)
	}
	q.Src = all
	q.Settled(t, []byte("done"))
	seqs := 0
	for _, ev := range pair.P.Events(q.Ticket.Nonce) {
		if ev.Kind == transfer.EventPushed {
			seqs++
		}
	}
	if seqs != 3 {
		t.Errorf("%d pushes were told to have landed, want 3", seqs)
	}
	if err := p.Extend(q.PLease, all[:1]); !errors.Is(err, transfer.ErrUnknownLease) && !errors.Is(err, transfer.ErrLeaseEnded) {
		t.Errorf("extend after the end: %v", err)
	}
}

// A lease with no block at all yet, and one that ends before it was complete: its fence holds as any other's.
func TestIncompleteLeaseIsRevoked(t *testing.T) {
	pair := transporttest.NewPair(t, tcpFactory, transporttest.Options{})
	q := pair.NewRequest(newRand(), 64, 0, time.Minute)
	all := q.Src
	q.Src = nil
	q.Present(t, nil)
	q.Bind(t)
	if err := pair.P.Client.Extend(q.PLease, all[:3]); err != nil {
		t.Fatal(err)
	}
	if err := pair.P.Client.Push(q.PLease, []transfer.Unit{{Layer: transfer.AllLayers, Count: 3}}, 1); err != nil {
		t.Fatal(err)
	}
	pair.P.Wait(t, q.Ticket.Nonce, transfer.EventPushed)
	if err := pair.P.Client.Revoke(q.PLease, "preempted"); err != nil {
		t.Fatal(err)
	}
	if ev := pair.D.End(t, q.Ticket.Nonce); ev.Kind != transfer.EventEnded || ev.Reason != "preempted" {
		t.Errorf("D hears %v: %q", ev.Kind, ev.Reason)
	}
}

// Blocks are appended while lanes send others: for the race detector.
func TestExtendWhileSending(t *testing.T) {
	pair := transporttest.NewPair(t, tcpFactory, transporttest.Options{})
	q := pair.NewRequest(newRand(), 63*16, 0, time.Minute)
	all := q.Src
	q.Src = all[:1]
	q.Present(t, nil)
	q.Bind(t)
	for i := range uint32(len(all)) {
		if i > 0 {
			if err := pair.P.Client.Extend(q.PLease, all[i:i+1]); err != nil {
				t.Fatal(err)
			}
		}
		push := pair.P.Client.Push
		if i%2 == 1 {
			push = pair.P.Client.PushNow
		}
		if err := push(q.PLease, []transfer.Unit{{Layer: transfer.AllLayers, First: i, Count: 1}}, uint64(i)); err != nil {
			t.Fatal(err)
		}
	}
	if err := pair.P.Client.Handoff(q.PLease, nil); err != nil {
		t.Fatal(err)
	}
	q.Src = all
	q.Settled(t, nil)
}
