package transfer

// The wire between two daemons, version 2. Byte order is little-endian throughout, every field has a fixed width, and
// lengths are checked against limits before anything is allocated or read.
//
// A channel is one TCP connection for control and, for the TCP transport, one more a lane. All of them go to the peer's
// data address, begin with the same handshake (package handshake) and are closed by whoever sees anything it does not understand.
//
// # Control frames
//
// After the handshake a control connection carries frames both ways:
//
//	offset size field
//	     0    4 size of the payload in bytes, at most 2097152
//	     4    2 type
//	     6    1 role of the sender in the lease: 1 source, 2 target; 0 in frames about the channel
//	     7    1 reserved, 0
//	     8    8 lease: the id the source's daemon gave it; 0 in frames about the channel
//	    16      payload
//
// Strings called "reason" take the rest of the payload, at most 512 bytes of UTF-8.
//
//	type name     role  payload
//	   1 OPEN      0    sent once, first, by the dialling end: how lanes are to be set up
//	                      0   16 transport: one length byte, then the name, then zeros
//	                     16    4 lanes, 1 to 64
//	                     20    4 reserved, 0
//	   2 OPENED    0    answer to OPEN when the accepting end's lanes are ready; or, with lanes 0, why not
//	                      0    4 lanes, or 0
//	                      4      reason
//	   3 EXCHANGE  0    transports' own set-up data, opaque, at most 65536 bytes; later again, when it changes
//	   4 BYE       0    the sender closes the channel
//	                      0      reason
//	   5 PING      0    every 500 ms
//	                      0    8 stamp, opaque
//	   6 PONG      0    answer to PING, at once, with its stamp
//	   7 DRAIN     0    the sender gives way to a successor at the same address: present nothing new on this channel
//	  16 PRESENT   1    a ticket is presented
//	                      0  352 ticket
//	                    352    4 tokens of the request
//	                    356    4 size of meta, at most the peer's limit (65536)
//	                    360    4 n: regions of the source's shard set, 1 to 64
//	                    364    4 reserved, 0
//	                    368 128n their layouts, in order of rank
//	                      .      meta
//	  17 BOUND     2    the ticket was bound
//	                      0    8 lease: the id the target's daemon gave it, which data frames carry
//	                      8    8 epoch of the target's daemon, which data frames carry
//	                     16    4 first token wanted
//	                     20    4 n: regions of the destination's shard set, 1 to 64
//	                     24    4 b: blocks
//	                     28    4 k: bytes of the regions' keys, 0 where the channel's transport needs none
//	                     32 128n layouts of the regions, in order of rank
//	                      .   4b destination block ids in the request's order
//	                      .    k for each region the size of its key (2), at most 1024, and the key, opaque
//	  18 REFUSED   2    the ticket was not bound and never will be
//	                      0      reason
//	  19 LANDED    2    pieces were counted; many at a time
//	                      0  4*n piece ids as data frames carried them, n from 1 to 4096
//	  20 HANDOFF   1    every wanted unit was sent. May come again, with new counts, when a lane failed in between
//	                      0    4 n, number of lanes that carried pieces of this lease, at most 4096
//	                      4    4 size of the record, at most 1048576
//	                      8 16*n for each: lane (4), 0 up or 1 failed (4), pieces sent on it (8)
//	                           record
//	  21 SETTLED   2    everything landed, the record arrived, the target is fenced
//	  22 REVOKE  1, 2   the lease has ended on the sender's side. The receiver stops sending, drains its lanes of the lease
//	                    and answers STOPPED
//	                      0    4 state: 4 revoked, 5 expired
//	                      4      reason
//	  23 STOPPED 1, 2   answer to REVOKE: the sender is fenced
//	  24 AGAIN     2    answer to PRESENT that says DRAIN too: the ticket was not taken, present it to the successor
//	  25 RESEND    2    a piece arrived altered: it did not land, and is to be sent again
//	                      0    4 piece id
//	                      4    4 lane it came over
//
// A lease's frames in order: PRESENT, then BOUND or REFUSED, then data frames on lanes and LANDED, then HANDOFF, then
// SETTLED. REVOKE may come at any time from either side. Frames for a lease that has ended are ignored, except that
// REVOKE is always answered.
//
// # Data frames (TCP lanes)
//
// After the handshake a lane carries frames both ways, one direction knowing nothing of the other. A frame is a header,
// its payload and a trailer. The header:
//
//	offset size field
//	     0    4 magic "HRD1"
//	     4    2 version, 2
//	     6    2 flags, 0
//	     8    8 lease: the id the target's daemon gave it (BOUND)
//	    16    8 epoch of the target's daemon (BOUND)
//	    24    4 piece id, given by the sender, answered in LANDED
//	    28    4 stripe: layer times the number of pairs of regions, plus the pair (shards.go)
//	    32    4 first unit: block index of the request, in source blocks
//	    36    4 number of units
//	    40    4 part: in units larger than 1048576 bytes, which part of that size; the number of units is 1 then
//	    44    4 size of the payload, 1 to 1048576
//	    48    4 CRC-32C of bytes 0 to 47
//	    52    4 reserved, 0
//	    56
//
// The payload is the units' bytes in the order of the copy plan (plan.go), which both ends compute from the two layouts.
// The trailer:
//
//	offset size field
//	     0    4 magic "HRDT"
//	     4    2 status: 0 whole, 1 aborted: the payload was filled up with zeros and must not be counted
//	     6    2 check: CRC-32C of bytes 0 to 5 and 8 to 15, its two halves XORed
//	     8    8 checksum of the payload: xxHash64, 1 where that is 0. 0: none
//	    16

import (
	"encoding/binary"
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/headrace/headrace/transfer/handshake"
	"github.com/headrace/headrace/transfer/ticket"
)

// ErrProtocol says that a peer sent what the protocol does not allow.
var ErrProtocol = handshake.ErrProtocol

// Sizes of the wire's fixed parts.
const (
	FrameHeaderSize  = 16
	FramePayloadMax  = 2 << 20
	DataHeaderSize   = 56
	DataTrailerSize  = 16
	dataVersion      = 2
	reasonMax        = 512
	landedMax        = 4096
	lanesMax         = 64      // of a channel
	laneIDsMax       = 1 << 16 // of a channel's life: a lane that is dialled again gets a new one
	laneCountsMax    = 4096    // lanes that carry pieces of one lease
	metaBytesLimit   = 64 << 10
	recordBytesLimit = 1 << 20
)

type frameType uint16

const (
	frameOpen     frameType = 1
	frameOpened   frameType = 2
	frameExchange frameType = 3
	frameBye      frameType = 4
	framePing     frameType = 5
	framePong     frameType = 6
	frameDrain    frameType = 7
	framePresent  frameType = 16
	frameBound    frameType = 17
	frameRefused  frameType = 18
	frameLanded   frameType = 19
	frameHandoff  frameType = 20
	frameSettled  frameType = 21
	frameRevoke   frameType = 22
	frameStopped  frameType = 23
	frameAgain    frameType = 24
	frameResend   frameType = 25
)

const (
	roleNone   = 0
	roleSource = 1
	roleTarget = 2
)

// frameHeader is the head of a control frame.
type frameHeader struct {
	size  uint32
	kind  frameType
	role  uint8
	lease LeaseID
}

func parseFrameHeader(b *[FrameHeaderSize]byte) (frameHeader, error) {
	le := binary.LittleEndian
	h := frameHeader{le.Uint32(b[0:]), frameType(le.Uint16(b[4:])), b[6], LeaseID(le.Uint64(b[8:]))}
	if h.size > FramePayloadMax {
		return h, fmt.Errorf("%w: frame of %d bytes, at most %d", ErrProtocol, h.size, FramePayloadMax)
	}
	if b[7] != 0 {
		return h, fmt.Errorf("%w: reserved byte of a frame is %d", ErrProtocol, b[7])
	}
	ok := false
	switch h.kind {
	case frameOpen, frameOpened, frameExchange, frameBye, framePing, framePong, frameDrain:
		ok = h.role == roleNone && h.lease == 0
	case framePresent, frameHandoff:
		ok = h.role == roleSource && h.lease != 0
	case frameBound, frameRefused, frameLanded, frameSettled, frameResend, frameAgain:
		ok = h.role == roleTarget && h.lease != 0
	case frameRevoke, frameStopped:
		ok = (h.role == roleSource || h.role == roleTarget) && h.lease != 0
	}
	if !ok {
		return h, fmt.Errorf("%w: frame type %d with role %d and lease %d", ErrProtocol, h.kind, h.role, h.lease)
	}
	return h, nil
}

// newFrame starts a frame; finishFrame sets its size.
func newFrame(kind frameType, role uint8, lease LeaseID, sizeHint int) []byte {
	b := make([]byte, FrameHeaderSize, FrameHeaderSize+sizeHint)
	binary.LittleEndian.PutUint16(b[4:], uint16(kind))
	b[6] = role
	binary.LittleEndian.PutUint64(b[8:], uint64(lease))
	return b
}

func finishFrame(b []byte) []byte {
	if len(b)-FrameHeaderSize > FramePayloadMax {
		panic("transfer: frame exceeds FramePayloadMax: a limit was not checked")
	}
	binary.LittleEndian.PutUint32(b, uint32(len(b)-FrameHeaderSize))
	return b
}

func malformed(what string, b []byte) error {
	return fmt.Errorf("%w: malformed %s frame of %d bytes", ErrProtocol, what, len(b))
}

// cleanReason makes a peer's or a client's words safe to log and bounded.
func cleanReason(s string) string {
	if len(s) > reasonMax {
		s = s[:reasonMax]
		for len(s) > 0 && !utf8.ValidString(s[len(s)-1:]) && !utf8.ValidString(s) {
			s = s[:len(s)-1]
		}
	}
	return strings.Map(func(r rune) rune {
		if r < 0x20 || r == 0x7f || r == utf8.RuneError {
			return -1
		}
		return r
	}, s)
}

func parseReason(b []byte) (string, error) {
	if len(b) > reasonMax {
		return "", fmt.Errorf("%w: reason of %d bytes, at most %d", ErrProtocol, len(b), reasonMax)
	}
	return cleanReason(string(b)), nil
}

type openMsg struct {
	transport string
	lanes     uint32
}

func (m openMsg) frame() []byte {
	b := newFrame(frameOpen, roleNone, 0, 24)
	b = handshake.AppendPadded(b, m.transport, 16)
	b = binary.LittleEndian.AppendUint32(b, m.lanes)
	return finishFrame(binary.LittleEndian.AppendUint32(b, 0))
}

func parseOpen(b []byte) (m openMsg, err error) {
	le := binary.LittleEndian
	if len(b) != 24 || le.Uint32(b[20:]) != 0 {
		return m, malformed("open", b)
	}
	m.lanes = le.Uint32(b[16:])
	if m.lanes == 0 || m.lanes > lanesMax {
		return m, fmt.Errorf("%w: %d lanes, need 1 to %d", ErrProtocol, m.lanes, lanesMax)
	}
	m.transport, err = handshake.ParsePadded(b[:16])
	return m, err
}

type openedMsg struct {
	lanes  uint32
	reason string
}

func (m openedMsg) frame() []byte {
	b := newFrame(frameOpened, roleNone, 0, 4+len(m.reason))
	b = binary.LittleEndian.AppendUint32(b, m.lanes)
	return finishFrame(append(b, cleanReason(m.reason)...))
}

func parseOpened(b []byte) (m openedMsg, err error) {
	if len(b) < 4 {
		return m, malformed("opened", b)
	}
	m.lanes = binary.LittleEndian.Uint32(b)
	if m.lanes > lanesMax {
		return m, fmt.Errorf("%w: %d lanes, at most %d", ErrProtocol, m.lanes, lanesMax)
	}
	m.reason, err = parseReason(b[4:])
	return m, err
}

func reasonFrame(kind frameType, role uint8, lease LeaseID, reason string) []byte {
	return finishFrame(append(newFrame(kind, role, lease, len(reason)), cleanReason(reason)...))
}

func stampFrame(kind frameType, stamp uint64) []byte {
	return finishFrame(binary.LittleEndian.AppendUint64(newFrame(kind, roleNone, 0, 8), stamp))
}

func parseStamp(b []byte) (uint64, error) {
	if len(b) != 8 {
		return 0, malformed("ping or pong", b)
	}
	return binary.LittleEndian.Uint64(b), nil
}

type presentMsg struct {
	ticket  []byte
	layouts []Layout
	tokens  uint32
	meta    []byte
}

func (m presentMsg) frame(lease LeaseID) []byte {
	b := newFrame(framePresent, roleSource, lease, ticket.Size+16+LayoutSize*len(m.layouts)+len(m.meta))
	b = append(b, m.ticket...)
	for _, v := range [...]uint32{m.tokens, uint32(len(m.meta)), uint32(len(m.layouts)), 0} {
		b = binary.LittleEndian.AppendUint32(b, v)
	}
	return finishFrame(append(appendLayouts(b, m.layouts), m.meta...))
}

func parsePresent(b []byte) (m presentMsg, err error) {
	const fixed = ticket.Size + 16
	le := binary.LittleEndian
	if len(b) < fixed || le.Uint32(b[fixed-4:]) != 0 {
		return m, malformed("present", b)
	}
	meta, n := uint64(le.Uint32(b[fixed-12:])), uint64(le.Uint32(b[fixed-8:]))
	if n == 0 || n > ShardsMax || meta > metaBytesLimit || fixed+LayoutSize*n+meta != uint64(len(b)) {
		return m, malformed("present", b)
	}
	m.ticket, m.meta = b[:ticket.Size], b[fixed+LayoutSize*n:]
	m.tokens = le.Uint32(b[ticket.Size:])
	m.layouts, err = parseLayouts(b[fixed : fixed+LayoutSize*n])
	return m, err
}

func appendLayouts(b []byte, ls []Layout) []byte {
	for i := range ls {
		b, _ = ls[i].AppendBinary(b)
	}
	return b
}

// parseLayouts decodes layouts that follow each other.
func parseLayouts(b []byte) ([]Layout, error) {
	ls := make([]Layout, len(b)/LayoutSize)
	for i := range ls {
		var err error
		if ls[i], err = UnmarshalLayout(b[LayoutSize*i : LayoutSize*(i+1)]); err != nil {
			return nil, err
		}
	}
	return ls, nil
}

type boundMsg struct {
	target     LeaseID
	epoch      uint64
	layouts    []Layout
	firstToken uint32
	blocks     []uint32
	keys       [][]byte // of the regions, or none
}

func (m boundMsg) frame(lease LeaseID) []byte {
	le := binary.LittleEndian
	keys := 0
	for _, k := range m.keys {
		keys += 2 + len(k)
	}
	b := newFrame(frameBound, roleTarget, lease, 32+LayoutSize*len(m.layouts)+4*len(m.blocks)+keys)
	b = le.AppendUint64(b, uint64(m.target))
	b = le.AppendUint64(b, m.epoch)
	for _, v := range [...]uint32{m.firstToken, uint32(len(m.layouts)), uint32(len(m.blocks)), uint32(keys)} {
		b = le.AppendUint32(b, v)
	}
	b = appendLayouts(b, m.layouts)
	for _, id := range m.blocks {
		b = le.AppendUint32(b, id)
	}
	for _, k := range m.keys {
		b = append(le.AppendUint16(b, uint16(len(k))), k...)
	}
	return finishFrame(b)
}

func parseBound(b []byte) (m boundMsg, err error) {
	const fixed = 32
	le := binary.LittleEndian
	if len(b) < fixed {
		return m, malformed("bound", b)
	}
	n, blocks, keys := uint64(le.Uint32(b[20:])), uint64(le.Uint32(b[24:])), uint64(le.Uint32(b[28:]))
	if n == 0 || n > ShardsMax || fixed+LayoutSize*n+4*blocks+keys != uint64(len(b)) {
		return m, malformed("bound", b)
	}
	var whole bool
	if m.keys, whole = parseKeys(b[uint64(len(b))-keys:], int(n)); !whole {
		return m, malformed("bound", b)
	}
	m.target, m.epoch = LeaseID(le.Uint64(b)), le.Uint64(b[8:])
	m.firstToken = le.Uint32(b[16:])
	m.blocks = make([]uint32, blocks)
	for i := range m.blocks {
		m.blocks[i] = le.Uint32(b[fixed+LayoutSize*int(n)+4*i:])
	}
	m.layouts, err = parseLayouts(b[fixed : fixed+LayoutSize*n])
	return m, err
}

// parseKeys takes the keys of n regions apart, or none.
func parseKeys(b []byte, n int) (keys [][]byte, whole bool) {
	for len(b) > 0 {
		if len(b) < 2 {
			return nil, false
		}
		size := int(binary.LittleEndian.Uint16(b))
		if size > RegionKeyMax || len(b)-2 < size {
			return nil, false
		}
		keys = append(keys, b[2:2+size:2+size])
		b = b[2+size:]
	}
	return keys, len(keys) == 0 || len(keys) == n
}

func landedFrame(lease LeaseID, pieces []uint32) []byte {
	b := newFrame(frameLanded, roleTarget, lease, 4*len(pieces))
	for _, id := range pieces {
		b = binary.LittleEndian.AppendUint32(b, id)
	}
	return finishFrame(b)
}

func parseLanded(b []byte) ([]uint32, error) {
	if len(b) == 0 || len(b)%4 != 0 || len(b) > 4*landedMax {
		return nil, malformed("landed", b)
	}
	ids := make([]uint32, len(b)/4)
	for i := range ids {
		ids[i] = binary.LittleEndian.Uint32(b[4*i:])
	}
	return ids, nil
}

type laneCount struct {
	lane   uint32
	failed uint32
	pieces uint64
}

type handoffMsg struct {
	lanes  []laneCount
	record []byte
}

func (m handoffMsg) frame(lease LeaseID) []byte {
	le := binary.LittleEndian
	b := newFrame(frameHandoff, roleSource, lease, 8+16*len(m.lanes)+len(m.record))
	b = le.AppendUint32(b, uint32(len(m.lanes)))
	b = le.AppendUint32(b, uint32(len(m.record)))
	for _, l := range m.lanes {
		b = le.AppendUint32(b, l.lane)
		b = le.AppendUint32(b, l.failed)
		b = le.AppendUint64(b, l.pieces)
	}
	return finishFrame(append(b, m.record...))
}

func parseHandoff(b []byte) (m handoffMsg, err error) {
	le := binary.LittleEndian
	if len(b) < 8 {
		return m, malformed("handoff", b)
	}
	n, size := uint64(le.Uint32(b)), uint64(le.Uint32(b[4:]))
	if n > laneCountsMax || size > recordBytesLimit || 8+16*n+size != uint64(len(b)) {
		return m, malformed("handoff", b)
	}
	for i := range n {
		f := b[8+16*i:]
		if le.Uint32(f) >= laneIDsMax || le.Uint32(f[4:]) > 1 {
			return m, malformed("handoff", b)
		}
		m.lanes = append(m.lanes, laneCount{le.Uint32(f), le.Uint32(f[4:]), le.Uint64(f[8:])})
	}
	m.record = b[8+16*n:]
	return m, nil
}

func revokeFrame(role uint8, lease LeaseID, state LeaseState, reason string) []byte {
	b := newFrame(frameRevoke, role, lease, 4+len(reason))
	b = binary.LittleEndian.AppendUint32(b, uint32(state))
	return finishFrame(append(b, cleanReason(reason)...))
}

func parseRevoke(b []byte) (LeaseState, string, error) {
	if len(b) < 4 {
		return 0, "", malformed("revoke", b)
	}
	s := binary.LittleEndian.Uint32(b)
	if s != uint32(LeaseRevoked) && s != uint32(LeaseExpired) {
		return 0, "", fmt.Errorf("%w: revoke to state %d", ErrProtocol, s)
	}
	reason, err := parseReason(b[4:])
	return LeaseState(s), reason, err
}
