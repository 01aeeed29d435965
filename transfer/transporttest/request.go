package transporttest

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"runtime"
	"testing"
	"time"

	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/ticket"
)

// Request is one lease under test.
type Request struct {
	Pair       *Pair
	Ticket     ticket.Ticket
	Raw        []byte
	Tokens     uint32
	FirstToken uint32
	Src, Dst   []uint32
	PLease     transfer.LeaseID
	DLease     transfer.LeaseID
	salt       byte
}

// NewRequest picks blocks at random and fills the source with bytes below 0x80 and the destination with 0x80.
func (p *Pair) NewRequest(r *rand.Rand, tokens, firstToken uint32, life time.Duration) *Request {
	q := &Request{Pair: p, Tokens: tokens, FirstToken: firstToken}
	q.Ticket, q.Raw = p.Ticket(life)
	q.Src = pick(r, p.P.Layout, tokens)
	q.Dst = pick(r, p.D.Layout, tokens)
	q.FillSource(byte(r.IntN(0x80)))
	p.D.set(q.Dst, 0x80)
	return q
}

func pick(r *rand.Rand, l transfer.Layout, tokens uint32) []uint32 {
	ids := make([]uint32, (tokens+l.BlockTokens-1)/l.BlockTokens)
	for i, v := range r.Perm(int(l.Blocks))[:len(ids)] {
		ids[i] = uint32(v)
	}
	return ids
}

// FillSource writes a pattern below 0x80 that tells places apart.
func (q *Request) FillSource(salt byte) {
	q.salt = salt
	i := 0
	q.Pair.P.eachBlock(q.Src, func(b []byte) {
		at := (int(salt)*4099 + i*251) % (len(noise) / 2)
		for n := 0; n < len(b); {
			n += copy(b[n:], noise[at:])
		}
		i++
	})
}

// noise is bytes below 0x80 that do not repeat soon.
var noise = func() []byte {
	r := rand.New(rand.NewPCG(3, 5))
	b := make([]byte, 256<<10)
	for i := range b {
		b[i] = byte(r.Uint32()) & 0x7f
	}
	return b
}()

// eachBlock gives the bytes of blocks, shard by shard and layer by layer. The shapes' blocks are contiguous.
func (s *Side) eachBlock(blocks []uint32, f func([]byte)) {
	for i, l := range s.Layouts {
		for layer := range l.Layers {
			for _, b := range blocks {
				off := uint64(layer)*l.LayerStride + uint64(b)*l.BlockStride
				f(s.Mems[i].Bytes[off : off+l.BlockStride])
			}
		}
	}
}

// set fills blocks with one byte, fast.
func (s *Side) set(blocks []uint32, v byte) {
	s.eachBlock(blocks, func(b []byte) {
		b[0] = v
		for n := 1; n < len(b); n *= 2 {
			copy(b[n:], b[:n])
		}
	})
}

// Present presents the ticket.
func (q *Request) Present(t testing.TB, meta []byte) {
	t.Helper()
	id, err := q.Pair.P.Client.Present(transfer.PresentReq{
		Ticket: q.Raw, Peer: q.Pair.Addr, Regions: q.Pair.P.Regions, Tokens: q.Tokens, Blocks: q.Src, Meta: meta,
	})
	if err != nil {
		t.Fatalf("present: %v", err)
	}
	q.PLease = id
}

// Bind waits until the ticket is presented and binds it.
func (q *Request) Bind(t testing.TB) {
	t.Helper()
	q.Pair.D.Wait(t, q.Ticket.Nonce, transfer.EventPresented)
	if err := q.bind(); err != nil {
		t.Fatalf("bind: %v", err)
	}
}

func (q *Request) bind() (err error) {
	d := q.Pair.D
	q.DLease, err = d.Client.Bind(transfer.BindReq{Ticket: q.Raw, Regions: d.Regions, FirstToken: q.FirstToken, Blocks: q.Dst})
	return err
}

// bindInTime waits until the ticket is presented and binds it; false when the lease ended first.
func (q *Request) bindInTime() bool {
	p, nonce := q.Pair, q.Ticket.Nonce
	for len(p.D.Events(nonce)) == 0 {
		for _, ev := range p.P.Events(nonce) {
			if ev.Kind == transfer.EventEnded || ev.Kind == transfer.EventRefused {
				return false
			}
		}
		runtime.Gosched()
	}
	return q.bind() == nil
}

// PushAll pushes every layer on its own, every second one perhaps in this goroutine, and gives the record.
func (q *Request) PushAll(t testing.TB, record []byte) {
	t.Helper()
	for layer := range q.Pair.P.Layout.Layers {
		push := q.Pair.P.Client.Push
		if layer%2 == 1 {
			push = q.Pair.P.Client.PushNow
		}
		if err := push(q.PLease, []transfer.Unit{{Layer: layer, First: 0, Count: uint32(len(q.Src))}}, uint64(layer)+1); err != nil {
			t.Fatalf("push layer %d: %v", layer, err)
		}
	}
	if err := q.Pair.P.Client.Handoff(q.PLease, record); err != nil {
		t.Fatalf("hand off: %v", err)
	}
}

// Settled waits for both ends and checks what arrived.
func (q *Request) Settled(t testing.TB, record []byte) {
	t.Helper()
	d := q.Pair.D.End(t, q.Ticket.Nonce)
	p := q.Pair.P.End(t, q.Ticket.Nonce)
	if d.Kind != transfer.EventSettled || p.Kind != transfer.EventSettled {
		t.Fatalf("ended with %v (%q) at D and %v (%q) at P, want settled", d.Kind, d.Reason, p.Kind, p.Reason)
	}
	if !bytes.Equal(d.Record, record) {
		t.Errorf("record is %d bytes, want %d", len(d.Record), len(record))
	}
	if err := q.CheckLanded(); err != nil {
		t.Error(err)
	}
}

// CheckLanded compares every wanted element of every shard of the destination with the source, and what was not wanted
// with 0x80.
func (q *Request) CheckLanded() error {
	for i, dst := range q.Pair.D.Layouts {
		for layer := range dst.Layers {
			for plane := range dst.Planes {
				for tok := range uint32(len(q.Dst)) * dst.BlockTokens {
					if err := q.checkToken(i, layer, plane, tok); err != nil {
						return err
					}
				}
			}
		}
	}
	return nil
}

func (q *Request) checkToken(shard int, layer, plane, tok uint32) error {
	p, d := q.Pair.P, q.Pair.D
	dst := &d.Layouts[shard]
	size := uint64(dst.HeadBytes)
	for h := dst.HeadFirst; h < dst.HeadFirst+dst.Heads; h++ {
		got := element(dst, d.Mems[shard].Bytes, q.Dst, layer, plane, tok, h)
		if tok < q.FirstToken || tok >= q.Tokens {
			if n := uint64(bytes.Count(got, []byte{0x80})); n != size {
				return fmt.Errorf("token %d of layer %d was not wanted and yet %d bytes of shard %d were written", tok, layer, size-n, shard)
			}
			continue
		}
		found := false // replicas hold the same head, each with a pattern of its own
		for i := range p.Layouts {
			if src := &p.Layouts[i]; h >= src.HeadFirst && h < src.HeadFirst+src.Heads {
				found = found || bytes.Equal(got, element(src, p.Mems[i].Bytes, q.Src, layer, plane, tok, h))
			}
		}
		if !found {
			return fmt.Errorf("layer %d plane %d token %d head %d of shard %d differs from the source", layer, plane, tok, h, shard)
		}
	}
	return nil
}

// element is one head of one token.
func element(l *transfer.Layout, mem []byte, blocks []uint32, layer, plane, tok, head uint32) []byte {
	at := uint64(layer)*l.LayerStride + uint64(blocks[tok/l.BlockTokens])*l.BlockStride + uint64(plane)*l.PlaneStride +
		uint64(tok%l.BlockTokens)*l.TokenStride + uint64(head-l.HeadFirst)*l.HeadStride
	return mem[at : at+uint64(l.HeadBytes)]
}

// NewRand is seeded by the clock.
func NewRand() *rand.Rand { return rand.New(rand.NewPCG(uint64(time.Now().UnixNano()), 7)) }
