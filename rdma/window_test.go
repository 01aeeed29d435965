package rdma

import (
	"bytes"
	"encoding/hex"
	"errors"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/headrace/headrace/cgo"
	"github.com/headrace/headrace/transfer"
)

func TestWindowsKeyBytes(t *testing.T) {
	k := windowsKey{part: 3, base: 0x1122334455667788, lanes: []laneKey{{1, 0xabcdef01}, {300, 7}}}
	const want = "02020300" + "8877665544332211" + "01000000" + "01efcdab" + "2c010000" + "07000000"
	b := k.encode()
	if got := hex.EncodeToString(b); got != want {
		t.Errorf("\n%s, want\n%s", got, want)
	}
	for lane, key := range map[int]uint32{1: 0xabcdef01, 300: 7, 2: 0} {
		if base, part, rkey := parseWindowsKey(b, lane); !isWindowsKey(b) || base != k.base || part != 3 || rkey != key {
			t.Errorf("lane %d: %x %d %x", lane, base, part, rkey)
		}
	}
	most := windowsKey{lanes: make([]laneKey, 64)}
	if n := len(most.encode()); n > transfer.RegionKeyMax {
		t.Errorf("the key of a lease on 64 lanes has %d bytes, at most %d", n, transfer.RegionKeyMax)
	}
	for _, bad := range [][]byte{nil, b[:11], b[:len(b)-1], append(slices.Clone(b), 0), {1, 1, 0, 0, 1, 2, 3, 4, 1, 2, 3, 4, 5, 6, 7, 8}} {
		if isWindowsKey(bad) {
			t.Errorf("%x passes for a lease's key", bad)
		}
	}
}

// A peer's key must not lead a writer anywhere but to the peer: whatever it says is only an address there.
func FuzzWindowsKey(f *testing.F) {
	f.Add((&windowsKey{part: 1, base: 2, lanes: []laneKey{{3, 4}}}).encode(), 3)
	f.Fuzz(func(t *testing.T, b []byte, lane int) {
		if isWindowsKey(b) {
			parseWindowsKey(b, lane)
		}
	})
}

func TestTermsBytes(t *testing.T) {
	m := terms{listAddr: 0x1122334455667788, listKey: 9, windows: []lateWindow{{lateKey{5, 6}, 7}}}
	const want = "48525431" + "01000000" + "8877665544332211" + "09000000" + "00000000" + "0500000000000000" + "06000000" + "07000000"
	if got := hex.EncodeToString(m.encode()); got != want {
		t.Errorf("\n%s, want\n%s", got, want)
	}
}

func readTermsOf(b []byte) (m terms, err error) {
	m, more, err := parseTermsHead(b[:min(len(b), termsHead)])
	if err == nil && more != len(b)-termsHead {
		err = transfer.ErrProtocol
	}
	if err == nil {
		err = m.parseWindows(b[termsHead:])
	}
	return m, err
}

func FuzzTerms(f *testing.F) {
	f.Add((&terms{listAddr: 1, listKey: 2, windows: []lateWindow{{lateKey{5, 6}, 7}}}).encode())
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := readTermsOf(b)
		if err == nil && !bytes.Equal(m.encode(), b) {
			t.Errorf("%x reads as %+v", b, m)
		}
		if err != nil && !errors.Is(err, transfer.ErrProtocol) {
			t.Error(err)
		}
	})
}

// Relaxed ordering would let bytes land after a completion that speaks for them: no region is registered for it.
func TestRegionAccess(t *testing.T) {
	with := &rail{attr: cgo.DeviceAttr{MaxMW: 1, CapFlags: 1 << 24}}
	for _, c := range []struct {
		rail            *rail
		readOnly, pulls bool
		want            cgo.Access
	}{
		{with, false, false, cgo.LocalWrite | cgo.RemoteWrite | cgo.BindWindow},
		{with, false, true, cgo.LocalWrite | cgo.RemoteWrite | cgo.BindWindow | cgo.RemoteRead},
		{&rail{}, false, false, cgo.LocalWrite | cgo.RemoteWrite},
		{with, true, false, 0},
		{with, true, true, cgo.RemoteRead},
	} {
		if got := c.rail.regionAccess(c.readOnly, c.pulls); got != c.want {
			t.Errorf("read-only %v, pulls %v: %#x, want %#x", c.readOnly, c.pulls, got, c.want)
		}
	}
}

// What a target reads is what the source's runs and its own say together, byte by byte, however the two are cut and however
// little the device takes at once.
func TestPullJoinsBothLists(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		total := 1 + r.Uint64N(4000)
		f := &pull{base: 1 << 20, rkey: 5, lkey: 6}
		var from, to []uint64 // address of every byte
		for at, left := uint64(1<<30), total; left > 0; {
			n := min(1+r.Uint64N(700), left)
			f.runs = appendSource(f.runs, at, uint32(n))
			for i := range n {
				from = append(from, at+i)
			}
			at += n + r.Uint64N(2)*64
			left -= n
		}
		for at, left := uint64(0), total; left > 0; {
			n := min(1+r.Uint64N(700), left)
			f.landing.Runs = append(f.landing.Runs, transfer.Run{Dst: at, Len: n})
			for i := range n {
				to = append(to, f.base+at+i)
			}
			at += n + r.Uint64N(100)
			left -= n
		}
		var gotFrom, gotTo []uint64
		for steps := 0; f.dst.run < len(f.landing.Runs); steps++ {
			if steps > 10000 {
				t.Fatal("it does not come to an end")
			}
			mark := f.mark()
			wrs := f.next(make([]cgo.WR, 1+r.IntN(5)), 1+r.Uint64N(900))
			took := wrs[:r.IntN(len(wrs)+1)]
			if len(took) < len(wrs) {
				f.rewind(mark, took)
			}
			for _, w := range took {
				if w.Op != cgo.Read || w.RKey != 5 || w.LKey != 6 || w.Len == 0 {
					t.Fatalf("request %+v", w)
				}
				for i := range uint64(w.Len) {
					gotFrom, gotTo = append(gotFrom, w.Remote+i), append(gotTo, w.Local+i)
				}
			}
		}
		if !slices.Equal(gotFrom, from) || !slices.Equal(gotTo, to) {
			t.Fatalf("%d bytes of %d are read, or others", len(gotFrom), total)
		}
	}
}
