package shm

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/ticket"
	"github.com/headrace/headrace/transfer/transporttest"
)

// BenchmarkScattered copies leases of 512 MiB in scattered blocks between two engines of one daemon. Its peer is
// lab/peers/limits/scattered-copy.c (memfd4k).
func BenchmarkScattered(b *testing.B) {
	for _, kib := range []uint32{16, 64, 256} {
		for _, lanes := range []int{1, 2} {
			b.Run(fmt.Sprintf("%dKiB/lanes=%d", kib, lanes), func(b *testing.B) { benchScattered(b, kib, lanes) })
		}
	}
}

func benchScattered(b *testing.B, kib uint32, lanes int) {
	e, err := transfer.New(transfer.Config{NodeID: "node", ClusterKey: transporttest.Key, Transports: []transfer.Transport{New()}, Lanes: lanes})
	if err != nil {
		b.Fatal(err)
	}
	defer e.Close()
	lay := transporttest.Shape{Layers: 4, Blocks: 128 << 10 / kib, BlockTokens: 16, Heads: 4, HeadBytes: kib << 10 / 16 / 4 / 2}.Layout()
	size := lay.LayerStride * 4
	events := make(chan transfer.Event, 1024)
	attach := func(id string) (*transfer.Client, transfer.RegionID) {
		c, err := e.Attach(id, func(ev transfer.Event) { events <- ev })
		if err != nil {
			b.Fatal(err)
		}
		m := transporttest.NewMemory(b, size)
		for i := 0; i < len(m.Bytes); i += 4096 {
			m.Bytes[i] = 1
		}
		r, err := c.AddRegion(m.FD(b), size, lay, transfer.RegionPopulate)
		if err != nil {
			b.Fatal(err)
		}
		return c, r
	}
	p, pr := attach("prefill")
	d, dr := attach("decode")
	wait := func(want transfer.EventKind, times int) {
		for ev := range events {
			if ev.Kind == want {
				if times--; times == 0 {
					return
				}
			} else if ev.Kind != transfer.EventPushed && ev.Kind != transfer.EventPresented {
				b.Fatalf("%v: %s", ev.Kind, ev.Reason)
			}
		}
	}
	src, dst := shuffled(lay.Blocks, 1), shuffled(lay.Blocks, 2)
	b.SetBytes(int64(size))
	b.ResetTimer()
	for range b.N {
		b.StopTimer()
		raw := ticket.Mint(transporttest.Key, ticket.Ticket{
			Nonce: ticket.NewNonce(), PNode: "node", DNode: "node", PEngine: "prefill", DEngine: "decode",
			Fingerprint: transporttest.Fingerprint, Deadline: time.Now().Add(time.Minute),
		})
		id, err := p.Present(transfer.PresentReq{Ticket: raw, Regions: []transfer.RegionID{pr}, Tokens: lay.Blocks * lay.BlockTokens, Blocks: src})
		if err != nil {
			b.Fatal(err)
		}
		wait(transfer.EventPresented, 1)
		if _, err := d.Bind(transfer.BindReq{Ticket: raw, Regions: []transfer.RegionID{dr}, Blocks: dst}); err != nil {
			b.Fatal(err)
		}
		wait(transfer.EventBound, 1)
		b.StartTimer()
		for layer := range lay.Layers {
			if err := p.Push(id, []transfer.Unit{{Layer: layer, Count: lay.Blocks}}, uint64(layer)); err != nil {
				b.Fatal(err)
			}
		}
		if err := p.Handoff(id, nil); err != nil {
			b.Fatal(err)
		}
		wait(transfer.EventSettled, 2)
	}
}

func shuffled(n uint32, seed uint64) []uint32 {
	ids := make([]uint32, n)
	for i, v := range rand.New(rand.NewPCG(seed, 1)).Perm(int(n)) {
		ids[i] = uint32(v)
	}
	return ids
}
