package rdma

import (
	"bytes"
	"encoding/hex"
	"errors"
	"slices"
	"testing"

	"github.com/headrace/headrace/cgo"
	"github.com/headrace/headrace/transfer"
)

var aHello = hello{
	rail: 1, qpn: 0x123456, psn: 0xabcdef, mtu: 4096, lid: 7, layer: cgo.Ethernet, slots: 32, slotKey: 0x99, pulls: true, slotAddr: 0x1122334455667788,
	gid: [16]byte{10: 0xff, 11: 0xff, 12: 10, 13: 9, 15: 1}, want: 3,
}

const helloHex = "48525131" + "0200" + "0100" + "56341200" + "efcdab00" + "00100000" + "07000000" + "02000000" + "20000000" + "99000000" + "01000000" +
	"8877665544332211" + "00000000000000000000ffff0a090001" + "03000000" + "00000000"

func TestHelloBytes(t *testing.T) {
	if got := hex.EncodeToString(aHello.encode()); got != helloHex {
		t.Errorf("\n%s, want\n%s", got, helloHex)
	}
	if h, err := parseHello(aHello.encode()); err != nil || h != aHello {
		t.Errorf("%+v, %v", h, err)
	}
	for at, b := range map[int]byte{0: 'h', 4: 1, 7: 1, 11: 1, 15: 1, 16: 1, 22: 1, 24: 3, 28: 3, 30: 1, 36: 2, 65: 1, 68: 1} {
		bad := aHello.encode()
		bad[at] = b
		if h, err := parseHello(bad); !errors.Is(err, transfer.ErrProtocol) {
			t.Errorf("byte %d: %+v, %v", at, h, err)
		}
	}
}

func FuzzHello(f *testing.F) {
	f.Add(aHello.encode())
	f.Fuzz(func(t *testing.T, b []byte) {
		if h, err := parseHello(b); err == nil && !bytes.Equal(h.encode(), b) {
			t.Errorf("%x reads as %+v", b, h)
		}
	})
}

func FuzzKey(f *testing.F) {
	f.Add([]byte{1, 1, 0, 0, 1, 2, 3, 4, 1, 2, 3, 4, 5, 6, 7, 8}, uint16(0))
	f.Fuzz(func(t *testing.T, b []byte, rail uint16) {
		if _, _, err := parseKey(b, rail); err != nil && !errors.Is(err, transfer.ErrRegion) {
			t.Error(err)
		}
	})
}

func TestKey(t *testing.T) {
	g := registration{base: 0x1122334455667788, mrs: []*cgo.MR{{Keys: cgo.Keys{RKey: 5}}, {Keys: cgo.Keys{RKey: 6}}}}
	for rail := range uint16(3) {
		base, key, err := parseKey(g.key(), rail)
		if (err == nil) != (rail < 2) || err == nil && (base != g.base || key != 5+uint32(rail)) {
			t.Errorf("rail %d: %#x, %d, %v", rail, base, key, err)
		}
	}
	if _, _, err := parseKey(nil, 0); !errors.Is(err, transfer.ErrRegion) {
		t.Errorf("no key: %v", err)
	}
}

func TestCursor(t *testing.T) {
	runs := []transfer.Run{{Src: 0, Dst: 100, Len: 10}, {Src: 20, Dst: 0, Len: 30}, {Src: 90, Dst: 50, Len: 10}}
	c := cursor{runs: runs, src: 1000, dst: 5000, srcSize: 100, lkey: 3, rkey: 4}
	buf := make([]cgo.WR, 2)
	first := slices.Clone(c.next(buf))
	want := []cgo.WR{{Local: 1000, Remote: 5100, Len: 10, LKey: 3, RKey: 4}, {Local: 1020, Remote: 5000, Len: 30, LKey: 3, RKey: 4}}
	if !slices.Equal(first, want) {
		t.Errorf("%+v", first)
	}
	c.back(1) // the device took one
	if again := c.next(buf); again[0] != want[1] || len(again) != 2 || !c.end() {
		t.Errorf("%+v", again)
	}
	defer func() {
		if recover() == nil {
			t.Error("a run beyond the region was posted")
		}
	}()
	c = cursor{runs: []transfer.Run{{Src: 95, Len: 6}}, srcSize: 100}
	c.next(buf)
}
