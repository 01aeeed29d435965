package rdma

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"github.com/headrace/headrace/cgo"
	"github.com/headrace/headrace/transfer"
)

// roce is a rail with an IPv4 address.
func roceRail(name string, a, b, c, d byte, bits uint8, up bool) railInfo {
	return railInfo{name: name, gid: [16]byte{10: 0xff, 11: 0xff, 12: a, 13: b, 14: c, 15: d}, layer: cgo.Ethernet, prefix: 96 + bits, up: up, numa: -1}
}

func TestMatch(t *testing.T) {
	ib := func(name string, subnet byte) railInfo {
		return railInfo{name: name, gid: [16]byte{0: 0xfe, 7: subnet, 15: 1}, layer: cgo.InfiniBand, up: true}
	}
	a1, a2 := roceRail("a1", 10, 1, 0, 1, 24, true), roceRail("a2", 10, 2, 0, 1, 24, true)
	b1, b2 := roceRail("b1", 10, 1, 0, 2, 24, true), roceRail("b2", 10, 2, 0, 2, 24, true)
	down := func(r railInfo) railInfo { r.up = false; return r }
	nowhere := railInfo{name: "x", layer: cgo.Ethernet, up: true}
	for _, c := range []struct {
		name         string
		dial, accept []railInfo
		want         string
		alone        string // of the first rail that is
	}{
		{"by subnet, in whatever order", []railInfo{a1, a2}, []railInfo{b2, b1}, "0-1 same subnet 10.1.0.0/24; 1-0 same subnet 10.2.0.0/24", ""},
		{"one is down", []railInfo{a1, a2}, []railInfo{b1, down(b2)}, "0-0 same subnet 10.1.0.0/24", ""},
		{"this end's is down", []railInfo{a1, down(a2)}, []railInfo{b1, b2}, "0-0 same subnet 10.1.0.0/24", ""},
		{"all in one subnet: one to one", []railInfo{a1, a1}, []railInfo{b1, b1}, "0-0 same subnet 10.1.0.0/24; 1-1 same subnet 10.1.0.0/24", ""},
		{"two to one", []railInfo{a1, a1}, []railInfo{b1}, "0-0 same subnet 10.1.0.0/24; 1-0 same subnet 10.1.0.0/24", ""},
		{"one to two", []railInfo{a1}, []railInfo{b1, b1}, "0-0 same subnet 10.1.0.0/24; 0-1 same subnet 10.1.0.0/24", ""},
		{"InfiniBand by subnet", []railInfo{ib("a", 1), ib("b", 2)}, []railInfo{ib("c", 2), ib("d", 1)}, "0-1 same InfiniBand subnet fe00000000000001; 1-0 same InfiniBand subnet fe00000000000002", ""},
		{"InfiniBand and Ethernet", []railInfo{ib("a", 1)}, []railInfo{b1}, "", "b1 of the other end is Ethernet, this one InfiniBand"},
		{"no subnet in common", []railInfo{a1}, []railInfo{b2}, "0-0 10.1.0.1 and 10.2.0.2, if they are routed", ""},
		{"no address", []railInfo{nowhere}, []railInfo{b1}, "", "no address is known"},
		{"nothing there", []railInfo{a1}, nil, "", "the other end has no rail"},
		{"all down there", []railInfo{a1}, []railInfo{down(b1)}, "", "b1 of the other end is down"},
		{"all down here", []railInfo{down(a1)}, []railInfo{b1}, "", "it is down"},
	} {
		pairs, alone := match(c.dial, c.accept, false)
		var words []string
		for _, p := range pairs {
			words = append(words, fmt.Sprintf("%d-%d %s", p.dial, p.accept, p.how))
		}
		if got := strings.Join(words, "; "); got != c.want || alone[0] != c.alone {
			t.Errorf("%s: %q, alone %v", c.name, got, alone)
		}
	}
	if pairs, _ := match([]railInfo{down(a1)}, []railInfo{down(b1)}, true); len(pairs) != 1 {
		t.Errorf("as if all were up: %v", pairs)
	}
}

// What is not surely in one subnet is tried, and proves itself or not: see lane.prove.
func TestReach(t *testing.T) {
	six := func(a []byte) railInfo {
		r := railInfo{layer: cgo.Ethernet, prefix: 64}
		copy(r.gid[:], a)
		return r
	}
	local, wide := six([]byte{0xfe, 0x80, 15: 1}), six([]byte{0xfd, 1, 15: 1})
	for _, c := range []struct {
		a, b  railInfo
		score int
	}{
		{local, six([]byte{0xfe, 0x80, 15: 2}), 2}, {wide, six([]byte{0xfd, 1, 15: 9}), 2}, {wide, six([]byte{0xfd, 2, 15: 9}), 1}, {local, wide, 0},
		{wide, roceRail("", 10, 0, 0, 1, 24, true), 0}, {roceRail("", 10, 0, 0, 1, 0, true), roceRail("", 10, 0, 0, 2, 32, true), 1},
	} {
		if score, how := reach(&c.a, &c.b); score != c.score || how == "" {
			t.Errorf("%x %x: %d %s", c.a.gid, c.b.gid, score, how)
		}
	}
}

const railsHex = "48525231" + "0100" + "0200" +
	"066d6c78355f30" + "00000000000000000000000000000000000000000000000000" + "00000000000000000000ffff0a010001" + "a0860100" + "0700" + "02" + "78" + "01" + "02" + "000000000000" +
	"00" + "00000000000000000000000000000000000000000000000000000000000000" + "00000000000000000000000000000000" + "00000000" + "0000" + "00" + "00" + "00" + "00" + "000000000000"

func TestRailsBytes(t *testing.T) {
	r := roceRail("mlx5_0", 10, 1, 0, 1, 24, true)
	r.rate, r.lid, r.numa = 100000, 7, 1
	list := []railInfo{r, {numa: -1}}
	b := encodeRails(list)
	if got := hex.EncodeToString(b); got != railsHex {
		t.Errorf("\n%s, want\n%s", got, railsHex)
	}
	if got, err := parseRails(b); err != nil || !reflect.DeepEqual(got, list) {
		t.Errorf("%+v, %v", got, err)
	}
	for at, v := range map[int]byte{0: 0, 4: 2, 6: 3, 8: 32, 9 + 6: 1, 8 + 54: 3, 8 + 55: 129, 8 + 56: 2, 8 + 63: 1} {
		bad := bytes.Clone(b)
		bad[at] = v
		if _, err := parseRails(bad); !errors.Is(err, transfer.ErrProtocol) {
			t.Errorf("byte %d: %v", at, err)
		}
	}
}

func FuzzRails(f *testing.F) {
	f.Add(encodeRails([]railInfo{roceRail("mlx5_0", 10, 1, 0, 1, 24, true), {numa: -1}}))
	f.Fuzz(func(t *testing.T, b []byte) {
		rails, err := parseRails(b)
		if err != nil {
			return
		}
		if !bytes.Equal(encodeRails(rails), b) {
			t.Errorf("%x reads as %+v", b, rails)
		}
		pairs, alone := match(rails, rails, false)
		for _, p := range pairs {
			if !rails[p.dial].up || !rails[p.accept].up || alone[p.dial] != "" {
				t.Errorf("%+v: %+v, %v", rails, pairs, alone)
			}
		}
	})
}
