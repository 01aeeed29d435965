package transfer

import (
	"encoding/hex"
	"errors"
	"math"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/headrace/headrace/transfer/ticket"
)

var wireKey = []byte("a cluster key of the tests")

// Computed by an independent implementation (Python hmac, and a bitwise CRC-32C) over the same bytes.
const (
	goldenDataSum = "49632ed9"
)

func wireTicket() []byte {
	return ticket.Mint(wireKey, ticket.Ticket{
		Nonce: [16]byte{1, 2, 3}, PNode: "p", DNode: "d", PEngine: "pe", DEngine: "de", Deadline: time.UnixMilli(1790000000000),
	})
}

// The golden bytes hold the wire still: a change here is a new protocol version.
func TestControlFramesAreGolden(t *testing.T) {
	lay := testLayout(3, 7, 16, 4, 128)
	rank1 := lay
	rank1.TPRank = 1
	two := []Layout{lay, rank1}
	layHex, rank1Hex := hex.EncodeToString(appendLayouts(nil, two[:1])), hex.EncodeToString(appendLayouts(nil, two[1:]))
	tkHex := hex.EncodeToString(wireTicket())
	for _, c := range []struct {
		name  string
		frame []byte
		want  string
	}{
		{"open", openMsg{"tcp", 4}.frame(), "18000000" + "0100" + "0000" + "0000000000000000" + "03746370000000000000000000000000" + "04000000" + "00000000"},
		{"opened", openedMsg{lanes: 4}.frame(), "04000000" + "0200" + "0000" + "0000000000000000" + "04000000"},
		{"not opened", openedMsg{reason: "no"}.frame(), "06000000" + "0200" + "0000" + "0000000000000000" + "00000000" + "6e6f"},
		{"bye", reasonFrame(frameBye, roleNone, 0, "bye"), "03000000" + "0400" + "0000" + "0000000000000000" + "627965"},
		{"ping", stampFrame(framePing, 0x0102030405060708), "08000000" + "0500" + "0000" + "0000000000000000" + "0807060504030201"},
		{"pong", stampFrame(framePong, 1), "08000000" + "0600" + "0000" + "0000000000000000" + "0100000000000000"},
		{"present", presentMsg{wireTicket(), two, 33, []byte("m")}.frame(9), "71020000" + "1000" + "0100" + "0900000000000000" + tkHex + "21000000" + "01000000" + "02000000" + "00000000" + layHex + rank1Hex + "6d"},
		{"bound", boundMsg{8, 7, two, 16, []uint32{5, 6, 7}, nil}.frame(9), "2c010000" + "1100" + "0200" + "0900000000000000" + "0800000000000000" + "0700000000000000" + "10000000" + "02000000" + "03000000" + "00000000" + layHex + rank1Hex + "05000000" + "06000000" + "07000000"},
		{"bound keys", boundMsg{8, 7, two, 16, []uint32{5, 6, 7}, [][]byte{{1, 2}, {3}}}.frame(9), "33010000" + "1100" + "0200" + "0900000000000000" + "0800000000000000" + "0700000000000000" + "10000000" + "02000000" + "03000000" + "07000000" + layHex + rank1Hex + "05000000" + "06000000" + "07000000" + "0200" + "0102" + "0100" + "03"},
		{"refused", reasonFrame(frameRefused, roleTarget, 9, "no"), "02000000" + "1200" + "0200" + "0900000000000000" + "6e6f"},
		{"landed", landedFrame(9, []uint32{3, 4}), "08000000" + "1300" + "0200" + "0900000000000000" + "03000000" + "04000000"},
		{"handoff", handoffMsg{[]laneCount{{1, 0, 20}, {2, 1, 3}}, []byte("rec")}.frame(9), "2b000000" + "1400" + "0100" + "0900000000000000" + "02000000" + "03000000" +
			"01000000" + "00000000" + "1400000000000000" + "02000000" + "01000000" + "0300000000000000" + "726563"},
		{"settled", finishFrame(newFrame(frameSettled, roleTarget, 9, 0)), "00000000" + "1500" + "0200" + "0900000000000000"},
		{"revoke", revokeFrame(roleSource, 9, LeaseRevoked, "why"), "07000000" + "1600" + "0100" + "0900000000000000" + "04000000" + "776879"},
		{"drain", finishFrame(newFrame(frameDrain, roleNone, 0, 0)), "00000000" + "0700" + "0000" + "0000000000000000"},
		{"again", finishFrame(newFrame(frameAgain, roleTarget, 9, 0)), "00000000" + "1800" + "0200" + "0900000000000000"},
		{"stopped", finishFrame(newFrame(frameStopped, roleTarget, 9, 0)), "00000000" + "1700" + "0200" + "0900000000000000"},
		{"resend", resendMsg{3, 2}.frame(9), "08000000" + "1900" + "0200" + "0900000000000000" + "03000000" + "02000000"},
	} {
		if got := hex.EncodeToString(c.frame); got != c.want {
			t.Errorf("%s\n got %s\nwant %s", c.name, got, c.want)
		}
		if err := parseAny(c.frame); err != nil {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

// parseAny decodes one whole control frame by its type.
func parseAny(frame []byte) error {
	if len(frame) < FrameHeaderSize {
		return errors.New("short")
	}
	h, err := parseFrameHeader((*[FrameHeaderSize]byte)(frame))
	if err != nil {
		return err
	}
	b := frame[FrameHeaderSize:]
	if uint32(len(b)) != h.size {
		return errors.New("short")
	}
	switch h.kind {
	case frameOpen:
		_, err = parseOpen(b)
	case frameOpened:
		_, err = parseOpened(b)
	case framePing, framePong:
		_, err = parseStamp(b)
	case framePresent:
		_, err = parsePresent(b)
	case frameBound:
		_, err = parseBound(b)
	case frameLanded:
		_, err = parseLanded(b)
	case frameHandoff:
		_, err = parseHandoff(b)
	case frameRevoke:
		_, _, err = parseRevoke(b)
	case frameResend:
		_, err = parseResend(b)
	case frameBye, frameRefused:
		_, err = parseReason(b)
	}
	return err
}

func TestDataHeaderIsGolden(t *testing.T) {
	p := Piece{Lease: 8, Epoch: 7, ID: 6, Stripe: 5, First: 4, Count: 3, Part: 2, Bytes: 1 << 20}
	var b [DataHeaderSize]byte
	p.PutHeader(&b)
	const want = "48524431" + "0200" + "0000" + "0800000000000000" + "0700000000000000" + "06000000" + "05000000" + "04000000" + "03000000" + "02000000" + "00001000"
	if got := hex.EncodeToString(b[:48]); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	if got := hex.EncodeToString(b[48:]); got != goldenDataSum+"00000000" {
		t.Errorf("checksum %s, want %s", got, goldenDataSum)
	}
	if back, err := ParseHeader(&b); err != nil || back != p {
		t.Errorf("round trip: %+v, %v", back, err)
	}
	for i := range b {
		c := b
		c[i] ^= 1
		if _, err := ParseHeader(&c); !errors.Is(err, ErrProtocol) {
			t.Errorf("byte %d flipped: %v", i, err)
		}
	}
	var tr [DataTrailerSize]byte
	PutTrailer(&tr, false, 9)
	if got := hex.EncodeToString(tr[:]); got != "48524454"+"0100"+"ce50"+"0000000000000000" {
		t.Errorf("trailer %s", got)
	}
	PutTrailer(&tr, true, 0x0102030405060708)
	if got := hex.EncodeToString(tr[:]); got != "48524454"+"0000"+"7afa"+"0807060504030201" {
		t.Errorf("trailer %s", got)
	}
	for i := range tr {
		for change := 1; change < 256; change++ {
			c := tr
			c[i] ^= byte(change)
			if _, _, err := ParseTrailer(&c); !errors.Is(err, ErrProtocol) {
				t.Errorf("byte %d changed by %#x: %v", i, change, err)
			}
		}
	}
}

func FuzzControlFrame(f *testing.F) {
	lay := testLayout(3, 7, 16, 4, 128)
	for _, b := range [][]byte{
		openMsg{"tcp", 4}.frame(), openedMsg{lanes: 4}.frame(), stampFrame(framePing, 1), presentMsg{wireTicket(), []Layout{lay, lay}, 33, []byte("m")}.frame(9),
		boundMsg{8, 7, []Layout{lay, lay}, 16, []uint32{5, 6}, [][]byte{{1, 2}, {3}}}.frame(9), landedFrame(9, []uint32{3}), handoffMsg{[]laneCount{{1, 0, 20}}, []byte("rec")}.frame(9),
		revokeFrame(roleSource, 9, LeaseRevoked, "why"), reasonFrame(frameBye, roleNone, 0, "bye"),
	} {
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if err := parseAny(b); err != nil && !errors.Is(err, ErrProtocol) && !errors.Is(err, ErrLayout) && err.Error() != "short" {
			t.Errorf("untyped error %v", err)
		}
	})
}

// FuzzPiece lets arbitrary data frame headers loose on a bound lease: what is accepted must stay inside of the region.
func FuzzPiece(f *testing.F) {
	p := Piece{Lease: 8, Epoch: 7, Stripe: 1, First: 1, Count: 2, Bytes: 2 * 16 * 2 * 4 * 128}
	var b [DataHeaderSize]byte
	p.PutHeader(&b)
	f.Add(b[:], uint32(100), uint32(16))
	f.Fuzz(func(t *testing.T, b []byte, tokens, first uint32) {
		if len(b) != DataHeaderSize {
			return
		}
		var h [DataHeaderSize]byte
		copy(h[:], b)
		p, err := ParseHeader(&h)
		if err != nil { // mend the checksum: the fuzzer cannot
			q := Piece{}
			for i, v := range []*uint32{&q.ID, &q.Stripe, &q.First, &q.Count, &q.Part, &q.Bytes} {
				*v = uint32(b[24+4*i]) | uint32(b[25+4*i])<<8 | uint32(b[26+4*i])<<16 | uint32(b[27+4*i])<<24
			}
			p = q
		}
		src, dst := shardsOf(testLayout(3, 64, 16, 4, 128), 2), shardsOf(testLayout(3, 32, 32, 4, 128), 3)
		tokens = tokens%1024 + 1
		first = min(first%1025, tokens)
		pairs, err := PlanShards(src, dst)
		if err != nil {
			t.Fatal(err)
		}
		g, err := newGeometry(pairs, tokens, first, 1<<20)
		if err != nil {
			t.Fatal(err)
		}
		n, err := g.bytesOf(&p)
		if err != nil {
			if !errors.Is(err, ErrProtocol) {
				t.Errorf("untyped error %v", err)
			}
			return
		}
		var sum uint64
		p.Bytes = uint32(n)
		for _, r := range g.appendRuns(nil, &p, nil, nil) {
			sum += r.Len
			if r.Dst+r.Len > layoutBytes(dst[g.pair(&p).Dst]) {
				t.Fatalf("run %+v leaves the region", r)
			}
		}
		if sum != n || n > PieceMax {
			t.Fatalf("runs hold %d bytes, the piece %d", sum, n)
		}
		g.each(&p, func(bit uint64) {
			if bit >= g.bits {
				t.Fatalf("landing bit %d of %d", bit, g.bits)
			}
		})
	})
}

func TestGeometryLimits(t *testing.T) {
	big := testLayout(4096, 1<<20, 16, 1, 1)
	p, err := PlanCopy(big, big)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := newGeometry([]ShardPair{{Plan: p}}, math.MaxUint32, 0, 1<<22); !errors.Is(err, ErrLimit) {
		t.Errorf("uncountable lease: %v", err)
	}
}

func TestBucketHoldsItsRate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBucket(1000)
		began := time.Now()
		for range 50 {
			b.wait(100, nil, nil)
		}
		if d := time.Since(began); d < 4800*time.Millisecond || d > 5200*time.Millisecond {
			t.Errorf("5,000 bytes at 1,000 a second took %v", d)
		}
		done := make(chan time.Duration)
		began = time.Now()
		go func() {
			b.wait(100000, nil, nil)
			b.wait(1, nil, nil) // 100 s at the old rate
			done <- time.Since(began)
		}()
		time.Sleep(time.Second)
		b.set(0)
		if d := <-done; d != time.Second {
			t.Errorf("a changed rate was noticed after %v", d)
		}
	})
}

func TestTicketBookForgetsAndRefuses(t *testing.T) {
	now := time.Unix(1000, 0)
	b := newTicketBook(4)
	for i := range 4 {
		if err := b.claim([16]byte{byte(i + 1)}, now.Add(time.Duration(i+1)*time.Second), now); err != nil {
			t.Fatal(err)
		}
	}
	if err := b.claim([16]byte{1}, now.Add(time.Second), now); !errors.Is(err, ErrTicketUsed) {
		t.Errorf("replay: %v", err)
	}
	if err := b.claim([16]byte{9}, now.Add(time.Second), now); !errors.Is(err, ErrLimit) {
		t.Errorf("full book: %v", err)
	}
	if err := b.bury([16]byte{9}, now.Add(time.Second), now, "x"); !errors.Is(err, ErrLimit) {
		t.Errorf("full book: %v", err)
	}
	now = now.Add(2 * time.Second) // two deadlines passed
	if err := b.bury([16]byte{9}, now.Add(time.Second), now, "given up"); err != nil {
		t.Error(err)
	}
	if err := b.claim([16]byte{9}, now.Add(time.Second), now); !errors.Is(err, ErrTicketUsed) || !strings.Contains(err.Error(), "given up") {
		t.Errorf("buried ticket: %v", err)
	}
	if b.len() != 3 {
		t.Errorf("%d remembered, want 3", b.len())
	}
}
