package transfer_test

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/tcp"
	"github.com/headrace/headrace/transfer/ticket"
	"github.com/headrace/headrace/transfer/transporttest"
)

var tcpFactory = transporttest.Factory{New: func() transfer.Transport { return tcp.New(tcp.Config{}) }, ReadPause: transfer.PauseReadFrame}

// peer plays P's daemon by hand, up to a bound lease.
type peer struct {
	t       *testing.T
	pair    *transporttest.Pair
	channel [16]byte
	control net.Conn
	lane    net.Conn
	raw     []byte
	target  transfer.LeaseID
	epoch   uint64
	blocks  []uint32
}

const peerTokens = 48

func dial(t *testing.T, addr string) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	c.SetDeadline(time.Now().Add(20 * time.Second))
	t.Cleanup(func() { c.Close() })
	return c
}

func newPeer(t *testing.T, pair *transporttest.Pair) *peer {
	t.Helper()
	p := &peer{t: t, pair: pair, blocks: []uint32{7, 3, 5}}
	rand.Read(p.channel[:])
	p.control = dial(t, pair.Addr)
	if _, err := transfer.DialHandshake(p.control, transporttest.Key, "node-p", 1, transfer.KindControl, 0, p.channel, "tcp"); err != nil {
		t.Fatal(err)
	}
	p.send(transfer.OpenFrame("tcp", 1))
	p.lane = dial(t, pair.Addr)
	if _, err := transfer.DialHandshake(p.lane, transporttest.Key, "node-p", 1, transfer.KindLane, 0, p.channel, "tcp"); err != nil {
		t.Fatal(err)
	}
	p.expect(2)
	return p
}

func (p *peer) send(b []byte) {
	p.t.Helper()
	if _, err := p.control.Write(b); err != nil {
		p.t.Fatal(err)
	}
}

// expect reads control frames until one of the type comes.
func (p *peer) expect(kind uint16) []byte {
	p.t.Helper()
	for {
		k, b, err := transfer.ReadFrame(p.control)
		if err != nil {
			p.t.Fatalf("waiting for frame type %d: %v", kind, err)
		}
		if k == kind {
			return b
		}
	}
}

func (p *peer) bind() {
	p.t.Helper()
	tk, raw := p.pair.Ticket(time.Minute)
	p.raw = raw
	p.send(transfer.PresentFrame(9, raw, peerTokens, p.pair.P.Layouts...))
	p.pair.D.Wait(p.t, tk.Nonce, transfer.EventPresented)
	if _, err := p.pair.D.Client.Bind(transfer.BindReq{Ticket: raw, Regions: p.pair.D.Regions, Blocks: p.blocks}); err != nil {
		p.t.Fatal(err)
	}
	var err error
	if p.target, p.epoch, err = transfer.BoundTarget(p.expect(17)); err != nil {
		p.t.Fatal(err)
	}
}

func (p *peer) good() transfer.Piece {
	return transfer.Piece{Lease: p.target, Epoch: p.epoch, ID: 1, Stripe: 1, First: 0, Count: 3, Bytes: 3 * 64 << 10}
}

func frame(p transfer.Piece, whole bool) []byte {
	var h [transfer.DataHeaderSize]byte
	var tr [transfer.DataTrailerSize]byte
	p.PutHeader(&h)
	transfer.PutTrailer(&tr, whole, 0)
	b := append(h[:], bytes.Repeat([]byte{0x55}, int(min(p.Bytes, 1<<21)))...)
	return append(b, tr[:]...)
}

func untouched(t *testing.T, m []byte) {
	t.Helper()
	if i := bytes.IndexByte(m, 0x55); i >= 0 {
		t.Errorf("a byte was written at %d", i)
	}
}

// What breaks the data protocol costs the lane; nothing is written.
func TestHostileDataFrames(t *testing.T) {
	pair := transporttest.NewPair(t, tcpFactory, transporttest.Options{})
	for name, spoil := range map[string]func(p *transfer.Piece, b *[]byte){
		"stripe":        func(p *transfer.Piece, _ *[]byte) { p.Stripe = 4 },
		"first":         func(p *transfer.Piece, _ *[]byte) { p.First = 1 },
		"first wraps":   func(p *transfer.Piece, _ *[]byte) { p.First = 1<<32 - 1 },
		"count wraps":   func(p *transfer.Piece, _ *[]byte) { p.First, p.Count = 1, 1<<32-1 },
		"no units":      func(p *transfer.Piece, _ *[]byte) { p.Count = 0 },
		"part":          func(p *transfer.Piece, _ *[]byte) { p.Part = 1 },
		"short payload": func(p *transfer.Piece, _ *[]byte) { p.Bytes-- },
		"long payload":  func(p *transfer.Piece, _ *[]byte) { p.Bytes++ },
		"huge payload":  func(p *transfer.Piece, _ *[]byte) { p.Bytes = 1<<32 - 1 },
		"epoch":         func(p *transfer.Piece, _ *[]byte) { p.Epoch++ },
		"no magic":      func(_ *transfer.Piece, b *[]byte) { *b = bytes.Repeat([]byte{0x55}, 4096) },
		"checksum":      func(_ *transfer.Piece, b *[]byte) { *b = append(make([]byte, 0), 0) },
	} {
		t.Run(name, func(t *testing.T) {
			p := newPeer(t, pair)
			p.bind()
			piece := p.good()
			var b []byte
			spoil(&piece, &b)
			switch {
			case name == "checksum":
				b = frame(piece, true)
				b[30] ^= 1
			case b == nil:
				b = frame(piece, true)
			}
			p.lane.Write(b)
			if _, err := io.ReadFull(p.lane, make([]byte, 1)); err == nil {
				t.Error("the lane lives on")
			}
			tk, err := ticket.Decode(p.raw)
			if err != nil {
				t.Fatal(err)
			}
			if ev := pair.D.End(t, tk.Nonce); ev.Kind != transfer.EventEnded { // its last lane failed
				t.Errorf("lease: %v", ev.Kind)
			}
			untouched(t, pair.D.Mem.Bytes)
		})
	}
}

// Pieces that are right in form and have no right to land are thrown away, and the lane goes on.
func TestPiecesWithoutRightAreDiscarded(t *testing.T) {
	pair := transporttest.NewPair(t, tcpFactory, transporttest.Options{})
	p := newPeer(t, pair)
	p.bind()
	other := p.good()
	other.Lease += 1000
	p.lane.Write(frame(other, true))
	aborted := p.good() // its bytes may be written, but never count
	aborted.Stripe = 2
	p.lane.Write(frame(aborted, false))
	piece := p.good()
	p.lane.Write(frame(piece, true))
	p.lane.Write(frame(piece, true)) // twice
	for acks := 0; acks < 2; {       // together or apart
		got := p.expect(19)
		if id := binary.LittleEndian.Uint32(got); id != 1 {
			t.Errorf("landed: piece %d", id)
		}
		acks += len(got) / 4
	}
	s := pair.D.Engine.Status()
	if s.Totals.BytesLanded != uint64(piece.Bytes) || s.Totals.PiecesDuplicate != 1 || s.Totals.PiecesDiscarded != 2 {
		t.Errorf("totals %+v", s.Totals)
	}
	p.send(transfer.HandoffFrame(9, 0, 4, []byte("record"))) // far from complete
	p.send(transfer.PingFrame())
	p.expect(6)
	if s := pair.D.Engine.Status(); s.Totals.LeasesSettled != 0 {
		t.Error("settled without a full bitmap")
	}
}

// A lane of one channel has no right in a lease of another channel.
func TestLanesOfOtherChannelsAreDiscarded(t *testing.T) {
	pair := transporttest.NewPair(t, tcpFactory, transporttest.Options{})
	p := newPeer(t, pair)
	p.bind()
	stranger := newPeer(t, pair)
	stranger.lane.Write(frame(p.good(), true))
	stranger.send(transfer.PingFrame())
	stranger.expect(6)
	p.send(transfer.PingFrame())
	p.expect(6)
	untouched(t, pair.D.Mem.Bytes)
}

func TestHostileControlFrames(t *testing.T) {
	pair := transporttest.NewPair(t, tcpFactory, transporttest.Options{})
	header := func(size uint32, kind uint16, role, reserved byte, lease uint64, payload ...byte) []byte {
		b := binary.LittleEndian.AppendUint32(nil, size)
		b = binary.LittleEndian.AppendUint16(b, kind)
		b = binary.LittleEndian.AppendUint64(append(b, role, reserved), lease)
		return append(b, payload...)
	}
	_, raw := pair.Ticket(time.Minute)
	broken := pair.P.Layout
	broken.BlockStride = 0
	for name, b := range map[string][]byte{
		"oversize":           header(2<<20+1, 16, 1, 0, 9),
		"unknown type":       header(0, 99, 0, 0, 0),
		"reserved byte":      header(8, 5, 0, 1, 0, 1, 2, 3, 4, 5, 6, 7, 8),
		"wrong role":         header(0, 21, 1, 0, 9),
		"lease zero":         header(0, 21, 2, 0, 0),
		"short present":      header(4, 16, 1, 0, 9, 1, 2, 3, 4),
		"ping of 3 bytes":    header(3, 5, 0, 0, 0, 1, 2, 3),
		"open twice":         transfer.OpenFrame("tcp", 1),
		"handoff overflow":   header(8, 20, 1, 0, 9, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff),
		"landed of no lease": header(3, 19, 2, 0, 9, 1, 2, 3),
	} {
		t.Run(name, func(t *testing.T) {
			p := newPeer(t, pair)
			if name == "open twice" { // the first was taken: the second stays, the third is too many
				p.send(b)
			}
			p.send(b)
			bye := p.expect(4)
			if !strings.Contains(string(bye), "protocol violation") {
				t.Errorf("good-bye says %q", bye)
			}
			if _, _, err := transfer.ReadFrame(p.control); err == nil {
				t.Error("the connection lives on")
			}
		})
	}
	t.Run("layout that overlaps", func(t *testing.T) {
		p := newPeer(t, pair)
		p.send(transfer.PresentFrame(9, raw, peerTokens, broken))
		if why := p.expect(18); !strings.Contains(string(why), "overlaps") {
			t.Errorf("refused because %q", why)
		}
	})
	halves := transporttest.Shape{Layers: 4, Blocks: 64, BlockTokens: 16, Heads: 4, HeadBytes: 512, Shards: 2}.Layouts()
	for why, set := range map[string][]transfer.Layout{
		"no region holds heads 2 to 3 of 4": halves[:1], "rank 0 comes after rank 1": {halves[1], halves[0]}, "rank 0 comes after rank 0": {halves[0], halves[0]},
		"blocks": {halves[0], func() transfer.Layout { l := halves[1]; l.Blocks--; return l }()},
	} {
		t.Run("no shard set: "+why, func(t *testing.T) {
			p := newPeer(t, pair)
			p.send(transfer.PresentFrame(9, raw, peerTokens, set...))
			if got := p.expect(18); !strings.Contains(string(got), why) {
				t.Errorf("refused because %q", got)
			}
		})
	}
	t.Run("65 regions", func(t *testing.T) {
		p := newPeer(t, pair)
		p.send(transfer.PresentFrame(9, raw, peerTokens, slices.Repeat(halves[:1], 65)...))
		if bye := p.expect(4); !strings.Contains(string(bye), "malformed present") {
			t.Errorf("good-bye says %q", bye)
		}
	})
	t.Run("more tokens than blocks", func(t *testing.T) {
		p := newPeer(t, pair)
		p.send(transfer.PresentFrame(9, raw, 1<<32-1, pair.P.Layout))
		if why := p.expect(18); !strings.Contains(string(why), "tokens") {
			t.Errorf("refused because %q", why)
		}
	})
	t.Run("another node's ticket", func(t *testing.T) {
		p := newPeer(t, pair)
		tk, _ := ticket.Decode(raw)
		tk.PNode, tk.Nonce = "node-x", ticket.NewNonce()
		p.send(transfer.PresentFrame(9, ticket.Mint(transporttest.Key, tk), peerTokens, pair.P.Layout))
		if why := p.expect(18); !strings.Contains(string(why), "presented by") {
			t.Errorf("refused because %q", why)
		}
	})
}

func TestHandshakesAreBounded(t *testing.T) {
	defer transporttest.CheckLeaks(t)()
	pair := transporttest.NewPair(t, tcpFactory, transporttest.Options{Config: func(c *transfer.Config) {
		c.Limits.Handshakes, c.Limits.Channels, c.DialTimeout = 2, 2, 500*time.Millisecond
	}})
	var idle []net.Conn
	for deadline := time.Now().Add(20 * time.Second); ; { // the two may not have been accepted yet, or have been thrown out before the third came
		for _, c := range idle {
			c.Close()
		}
		idle = []net.Conn{dial(t, pair.Addr), dial(t, pair.Addr)} // connected, silent
		c := dial(t, pair.Addr)
		_, err := transfer.DialHandshake(c, transporttest.Key, "node-p", 1, transfer.KindControl, 0, [16]byte{1})
		c.Close()
		if err != nil && strings.Contains(err.Error(), "too many connections") {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("third handshake: %v", err)
		}
	}
	for _, c := range idle { // and they are thrown out
		if _, err := io.Copy(io.Discard, c); errors.Is(err, os.ErrDeadlineExceeded) {
			t.Error("an idle caller was kept")
		}
		c.Close()
	}
	pair.Close(t)
}

func TestLaneNeedsItsChannel(t *testing.T) {
	pair := transporttest.NewPair(t, tcpFactory, transporttest.Options{})
	p := newPeer(t, pair)
	for name, try := range map[string]struct {
		channel [16]byte
		lane    uint16
		node    string
	}{"unknown channel": {[16]byte{1, 2}, 1, "node-p"}, "lane taken": {p.channel, 0, "node-p"}, "another node": {p.channel, 1, "node-q"}} {
		_, err := transfer.DialHandshake(dial(t, pair.Addr), transporttest.Key, try.node, 1, transfer.KindLane, try.lane, try.channel)
		if err == nil || !strings.Contains(err.Error(), "not expect") {
			t.Errorf("%s: %v", name, err)
		}
	}
}
