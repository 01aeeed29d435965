package transfer

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
)

// Piece names what one write carries: of one layer and one pair of regions, the units [First, First+Count), or one part
// of one unit.
type Piece struct {
	Lease        LeaseID // the target's
	Epoch        uint64  // of the target's daemon
	ID           uint32  // given by the source, answered when it landed
	Stripe       uint32  // layer times the number of pairs of regions, plus the pair
	First, Count uint32
	Part         uint32
	Bytes        uint32
}

var (
	dataMagic    = [4]byte{'H', 'R', 'D', '1'}
	trailerMagic = [4]byte{'H', 'R', 'D', 'T'}
	castagnoli   = crc32.MakeTable(crc32.Castagnoli)
)

// PutHeader encodes p's data frame header.
func (p *Piece) PutHeader(b *[DataHeaderSize]byte) {
	le := binary.LittleEndian
	copy(b[:], dataMagic[:])
	le.PutUint16(b[4:], dataVersion)
	le.PutUint16(b[6:], 0)
	le.PutUint64(b[8:], uint64(p.Lease))
	le.PutUint64(b[16:], p.Epoch)
	for i, v := range [...]uint32{p.ID, p.Stripe, p.First, p.Count, p.Part, p.Bytes} {
		le.PutUint32(b[24+4*i:], v)
	}
	le.PutUint32(b[48:], crc32.Checksum(b[:48], castagnoli))
	le.PutUint32(b[52:], 0)
}

// ParseHeader decodes a data frame header. What it names is checked by Target.Begin.
func ParseHeader(b *[DataHeaderSize]byte) (Piece, error) {
	le := binary.LittleEndian
	var p Piece
	if [4]byte(b[:4]) != dataMagic || le.Uint16(b[4:]) != dataVersion || le.Uint16(b[6:]) != 0 || le.Uint32(b[52:]) != 0 {
		return p, fmt.Errorf("%w: not a data frame header: % x", ErrProtocol, b[:8])
	}
	if sum := crc32.Checksum(b[:48], castagnoli); sum != le.Uint32(b[48:]) {
		return p, fmt.Errorf("%w: data frame header has checksum %08x, says %08x", ErrProtocol, sum, le.Uint32(b[48:]))
	}
	p.Lease, p.Epoch = LeaseID(le.Uint64(b[8:])), le.Uint64(b[16:])
	for i, f := range [...]*uint32{&p.ID, &p.Stripe, &p.First, &p.Count, &p.Part, &p.Bytes} {
		*f = le.Uint32(b[24+4*i:])
	}
	if p.Bytes == 0 || p.Bytes > PieceMax {
		return p, fmt.Errorf("%w: payload of %d bytes, need 1 to %d", ErrProtocol, p.Bytes, PieceMax)
	}
	return p, nil
}

// PutTrailer encodes a data frame's trailer; sum is the payload's checksum, 0 for none.
func PutTrailer(b *[DataTrailerSize]byte, whole bool, sum uint64) {
	*b = [DataTrailerSize]byte{}
	copy(b[:], trailerMagic[:])
	if !whole {
		b[4], sum = 1, 0
	}
	binary.LittleEndian.PutUint64(b[8:], sum)
	binary.LittleEndian.PutUint16(b[6:], trailerCheck(b))
}

// ParseTrailer says whether the payload before it is whole, and its checksum, 0 if there is none.
func ParseTrailer(b *[DataTrailerSize]byte) (whole bool, sum uint64, err error) {
	le := binary.LittleEndian
	status := le.Uint16(b[4:])
	if [4]byte(b[:4]) != trailerMagic || status > 1 || le.Uint16(b[6:]) != trailerCheck(b) {
		return false, 0, fmt.Errorf("%w: not a data frame trailer: % x", ErrProtocol, b[:])
	}
	return status == 0, le.Uint64(b[8:]), nil
}
