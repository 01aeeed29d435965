package rdma

import (
	"encoding/binary"
	"fmt"

	"github.com/headrace/headrace/cgo"
	"github.com/headrace/headrace/transfer"
)

// hello is what the ends of a lane tell each other. Little-endian:
//
//	offset size field
//	     0    4 magic "HRQ1"
//	     4    2 version, 2
//	     6    2 rail: index of the sender's port among its rails, which region keys are ordered by
//	     8    4 queue pair number, 24 bits
//	    12    4 first packet sequence number, 24 bits
//	    16    4 MTU in bytes: 256, 512, 1024, 2048 or 4096
//	    20    4 LID, 0 where there is none
//	    24    4 link layer: 1 InfiniBand, 2 Ethernet
//	    28    4 slots, from 4 to 1024
//	    32    4 key of the slots
//	    36    4 how the sender sends pieces: 0 it writes them, 1 it offers them for the other end to read
//	    40    8 address of the slots
//	    48   16 GID
//	    64    4 from the dialling end: the index of the receiver's port that the lane is for; back: 0
//	    68    4 reserved, 0
//	    72
//
// The accepting end makes its queue pair when it has read the other's hello, on the port asked for.
type hello struct {
	rail           uint16
	qpn, psn, mtu  uint32
	lid            uint32
	layer          cgo.LinkLayer
	slots, slotKey uint32
	pulls          bool // pieces are offered
	slotAddr       uint64
	gid            [16]byte
	want           uint32
}

const (
	helloSize    = 72
	helloVersion = 2
	slotsMin     = 4
	slotsMax     = 1024
	railsMax     = 64
)

func (h *hello) encode() []byte {
	le := binary.LittleEndian
	b := make([]byte, helloSize)
	copy(b, "HRQ1")
	le.PutUint16(b[4:], helloVersion)
	le.PutUint16(b[6:], h.rail)
	for i, v := range [...]uint32{h.qpn, h.psn, h.mtu, h.lid, uint32(h.layer), h.slots, h.slotKey} {
		le.PutUint32(b[8+4*i:], v)
	}
	if h.pulls {
		b[36] = 1
	}
	le.PutUint64(b[40:], h.slotAddr)
	copy(b[48:], h.gid[:])
	le.PutUint32(b[64:], h.want)
	return b
}

func parseHello(b []byte) (h hello, err error) {
	le := binary.LittleEndian
	if len(b) != helloSize || string(b[:4]) != "HRQ1" {
		return h, fmt.Errorf("%w: hello of a lane begins with %x", transfer.ErrProtocol, b[:min(len(b), 8)])
	}
	if v := le.Uint16(b[4:]); v != helloVersion {
		return h, fmt.Errorf("%w: hello of version %d, this daemon speaks %d", transfer.ErrProtocol, v, helloVersion)
	}
	h.rail = le.Uint16(b[6:])
	h.qpn, h.psn, h.mtu, h.lid = le.Uint32(b[8:]), le.Uint32(b[12:]), le.Uint32(b[16:]), le.Uint32(b[20:])
	h.layer, h.slots, h.slotKey = cgo.LinkLayer(le.Uint32(b[24:])), le.Uint32(b[28:]), le.Uint32(b[32:])
	h.pulls = le.Uint32(b[36:]) == 1
	h.slotAddr = le.Uint64(b[40:])
	copy(h.gid[:], b[48:])
	h.want = le.Uint32(b[64:])
	switch {
	case h.want >= railsMax, le.Uint32(b[68:]) != 0:
	case h.rail >= railsMax, h.qpn>>24 != 0, h.psn>>24 != 0, h.lid>>16 != 0, le.Uint32(b[36:]) > 1:
	case h.mtu < 256 || h.mtu > 4096 || h.mtu&(h.mtu-1) != 0:
	case h.layer != cgo.InfiniBand && h.layer != cgo.Ethernet:
	case h.slots < slotsMin || h.slots > slotsMax:
	default:
		return h, nil
	}
	return hello{}, fmt.Errorf("%w: hello of a lane has a field out of range: %x", transfer.ErrProtocol, b)
}
