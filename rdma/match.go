package rdma

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/headrace/headrace/cgo"
	"github.com/headrace/headrace/transfer"
)

// railInfo is what the ends of a channel tell each other of their rails, in the order that region keys have.
type railInfo struct {
	name   string
	gid    [16]byte
	rate   uint32 // Mb/s, 0: unknown
	lid    uint16
	layer  cgo.LinkLayer
	prefix uint8 // bits of the GID that the rail's subnet has, 0: unknown
	up     bool
	numa   int // -1: unknown
}

// A list of rails, little-endian:
//
//	offset size field
//	     0    4 magic "HRR1"
//	     4    2 version, 1
//	     6    2 n: rails, at most 64
//	     8  64n the rails, each:
//	            0   32 name: one length byte, then the name, then zeros
//	           32   16 GID, zeros where there is none
//	           48    4 rate in Mb/s, 0 where it is not known
//	           52    2 LID
//	           54    1 link layer: 1 InfiniBand, 2 Ethernet, 0 unknown
//	           55    1 bits of the GID that are the subnet's, at most 128; 0 where that is not known
//	           56    1 1: it carries traffic, 0: not at present
//	           57    1 NUMA node + 1, 0 where it is not known
//	           58    6 reserved, 0
const (
	railsVersion  = 1
	railInfoSize  = 64
	railNameField = 32
	numaMax       = 254
)

func encodeRails(rails []railInfo) []byte {
	le := binary.LittleEndian
	b := append(make([]byte, 0, 8+railInfoSize*len(rails)), "HRR1"...)
	b = le.AppendUint16(b, railsVersion)
	b = le.AppendUint16(b, uint16(len(rails)))
	for _, r := range rails {
		var f [railInfoSize]byte
		f[0] = byte(copy(f[1:railNameField], r.name))
		copy(f[32:], r.gid[:])
		le.PutUint32(f[48:], r.rate)
		le.PutUint16(f[52:], r.lid)
		f[54], f[55] = byte(r.layer), r.prefix
		if r.up {
			f[56] = 1
		}
		f[57] = byte(min(max(r.numa, -1), numaMax) + 1)
		b = append(b, f[:]...)
	}
	return b
}

func parseRails(b []byte) ([]railInfo, error) {
	le := binary.LittleEndian
	if len(b) < 8 || string(b[:4]) != "HRR1" || le.Uint16(b[4:]) != railsVersion {
		return nil, fmt.Errorf("%w: list of rails begins with %x", transfer.ErrProtocol, b[:min(len(b), 8)])
	}
	n := int(le.Uint16(b[6:]))
	if n > railsMax || len(b) != 8+n*railInfoSize {
		return nil, fmt.Errorf("%w: list of %d rails in %d bytes", transfer.ErrProtocol, n, len(b))
	}
	rails := make([]railInfo, n)
	for i := range rails {
		f := b[8+i*railInfoSize:][:railInfoSize]
		size := int(f[0])
		if size >= railNameField || !zero(f[min(1+size, railNameField):railNameField]) || !zero(f[58:]) || f[54] > byte(cgo.Ethernet) || f[55] > 128 || f[56] > 1 {
			return nil, fmt.Errorf("%w: rail %d has a field out of range: %x", transfer.ErrProtocol, i, f)
		}
		rails[i] = railInfo{
			name: string(f[1 : 1+size]), gid: [16]byte(f[32:48]), rate: le.Uint32(f[48:]), lid: le.Uint16(f[52:]), layer: cgo.LinkLayer(f[54]), prefix: f[55],
			up: f[56] == 1, numa: int(f[57]) - 1,
		}
	}
	return rails, nil
}

func zero(b []byte) bool { return len(bytes.Trim(b, "\x00")) == 0 }

// pair is a rail of the dialling end and one of the accepting end that belong together.
type pair struct {
	dial, accept int
	how          string
}

// match pairs the rails of two ends: those in one subnet, or else those that a router may join; a rail whose partner in its
// subnet is down waits for it, because one that cannot be reached costs its time-out each time. Each rail of the
// dialling end gets the other end's that has the fewest pairs so far, and of those the one that stands at the same place.
// A rail of the accepting end that is left over gets one too. Both ends come to the same result. Unless all is set, rails
// that carry no traffic are left out. alone says of each rail of the dialling end without a pair why it has none.
func match(dial, accept []railInfo, all bool) (pairs []pair, alone map[int]string) {
	alone = make(map[int]string)
	used := make([]int, len(accept))
	for i := range dial {
		if p, why := bestFor(dial, accept, i, used, all); p != nil {
			pairs = append(pairs, *p)
			used[p.accept]++
		} else {
			alone[i] = why
		}
	}
	mine := make([]int, len(dial))
	for _, p := range pairs {
		mine[p.dial]++
	}
	for j := range accept {
		if used[j] > 0 {
			continue
		}
		if p, _ := bestFor(accept, dial, j, mine, all); p != nil {
			pairs = append(pairs, pair{dial: p.accept, accept: p.dial, how: p.how})
			mine[p.accept]++
		}
	}
	return pairs[:min(len(pairs), railsMax)], alone
}

// bestFor finds the other end's rail for one of this end's.
func bestFor(own, others []railInfo, i int, used []int, all bool) (best *pair, why string) {
	why = "the other end has no rail"
	if !own[i].up && !all {
		return nil, "it is down"
	}
	nearest, bestScore := 1, 0
	for j := range others {
		score, _ := reach(&own[i], &others[j])
		nearest = max(nearest, score)
	}
	for j := range others {
		score, how := reach(&own[i], &others[j])
		switch {
		case score < nearest && score > 0:
			continue
		case score == 0:
			why = how
			continue
		case !others[j].up && !all:
			why = others[j].name + " of the other end is down"
			continue
		}
		score = score<<16 - used[j]<<8
		if j == i%len(others) {
			score++
		}
		if best == nil || score > bestScore {
			best, bestScore = &pair{i, j, how}, score
		}
	}
	return best, why
}

// reach says whether two rails can reach each other: 2 surely, 1 perhaps, 0 not; and why.
func reach(a, b *railInfo) (score int, how string) {
	none := [16]byte{}
	switch {
	case a.layer != b.layer:
		return 0, fmt.Sprintf("%s of the other end is %v, this one %v", b.name, b.layer, a.layer)
	case a.layer == cgo.InfiniBand && [8]byte(a.gid[:8]) == [8]byte(b.gid[:8]):
		return 2, fmt.Sprintf("same InfiniBand subnet %x", a.gid[:8])
	case a.layer == cgo.InfiniBand:
		return 1, fmt.Sprintf("InfiniBand subnets %x and %x, if they are routed", a.gid[:8], b.gid[:8])
	case a.gid == none || b.gid == none:
		return 0, "no address is known"
	}
	x, y := netip.AddrFrom16(a.gid).Unmap(), netip.AddrFrom16(b.gid).Unmap()
	if x.Is4() != y.Is4() {
		return 0, fmt.Sprintf("%v and %v are not of one family", x, y)
	}
	bits := int(max(a.prefix, b.prefix))
	if p, err := netip.AddrFrom16(a.gid).Prefix(bits); bits > 0 && err == nil && p.Contains(netip.AddrFrom16(b.gid)) {
		return 2, "same subnet " + subnet(x, bits)
	}
	if x.IsLinkLocalUnicast() != y.IsLinkLocalUnicast() {
		return 0, fmt.Sprintf("%v and %v: one of them is link-local", x, y)
	}
	return 1, fmt.Sprintf("%v and %v, if they are routed", x, y)
}

func subnet(a netip.Addr, bits int) string {
	if a.Is4() {
		bits = max(bits-96, 0)
	}
	p, err := a.Prefix(bits)
	if err != nil {
		return a.String()
	}
	return p.String()
}
