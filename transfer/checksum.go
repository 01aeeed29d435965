package transfer

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"runtime/debug"
	"strconv"
	"strings"
	"time"

	"github.com/cespare/xxhash/v2"
)

// Checksum says of which pieces a daemon sends a checksum: of one in so many. 0 is none, 1 is all. Who receives one
// verifies it.
type Checksum uint32

// The checksums that have names.
const (
	ChecksumOff     Checksum = 0
	ChecksumAlways  Checksum = 1
	ChecksumSampled Checksum = 64
)

const checksumEveryMax = 1 << 20

// ParseChecksum reads off, sampled (1/64), always or 1/N.
func ParseChecksum(s string) (Checksum, error) {
	switch s {
	case "off":
		return ChecksumOff, nil
	case "sampled":
		return ChecksumSampled, nil
	case "always":
		return ChecksumAlways, nil
	}
	if every, ok := strings.CutPrefix(s, "1/"); ok {
		if n, err := strconv.ParseUint(every, 10, 32); err == nil && n > 0 && n <= checksumEveryMax {
			return Checksum(n), nil
		}
	}
	return 0, fmt.Errorf("%w: checksum %q: choose off, sampled, always, or 1/N with N from 1 to %d", ErrInvalid, s, checksumEveryMax)
}

func (c Checksum) String() string {
	switch c {
	case ChecksumOff:
		return "off"
	case ChecksumAlways:
		return "always"
	}
	return fmt.Sprintf("1/%d", uint32(c))
}

// A piece may arrive altered this often before its lease fails: more is no accident.
const alteredMax = 3

// A channel on which a piece arrived altered has every piece checked for this long.
const suspectFor = time.Minute

// checks says whether the next piece of a channel carries a checksum.
func (c *channel) checks() bool {
	every := uint64(c.e.cfg.Checksum)
	if every <= 1 {
		return every == 1
	}
	return c.checked.Add(1)%every == 0 || c.suspect.Load() > int64(time.Since(c.since))
}

// Sum gives the checksum of the payload, or 0 when the piece is to carry none. It is to be asked before the first byte
// is sent; gathered is the payload, where Gather copied it. The error is ErrFenced or ErrMemory.
func (w *Write) Sum(gathered []byte) (uint64, error) {
	if !w.check || w.Src.Hostless() { // the processor does not see what it would hash
		return 0, nil
	}
	if gathered != nil {
		return sumBytes(gathered), nil
	}
	if !w.Enter() {
		return 0, ErrFenced
	}
	defer w.Leave()
	return sumRuns(w.Src.Bytes(), w.Runs, true)
}

// Verify compares the payload, as it lies in the blocks, with the checksum that came with it; 0 is none. It is to be
// asked after the last byte and before End, which then makes the source send an altered piece again.
func (x *Landing) Verify(sum uint64) bool {
	if sum == 0 || x.lease == nil || x.Discard() || x.Dst.Hostless() {
		return true
	}
	if !x.Enter() {
		return false
	}
	got, err := sumRuns(x.Dst.Bytes(), x.Runs, false)
	x.Leave()
	if err != nil {
		x.Fault(err)
		return false
	}
	x.lease.e.totals.verified.Add(1)
	x.altered = got != sum
	return !x.altered
}

// sumRuns is the xxHash64 of the runs' bytes at one end, 1 where that is 0. A fault in the lent memory (see Region) is
// an error.
func sumRuns(mem []byte, runs []Run, source bool) (sum uint64, err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if fault := recover(); fault != nil {
			err = faultError("compute checksum", fault)
		}
	}()
	var d xxhash.Digest
	d.Reset()
	for i := 0; i < len(runs); {
		at := func(r *Run) uint64 {
			if source {
				return r.Src
			}
			return r.Dst
		}
		// Runs that touch at this end are one for the hash.
		start := at(&runs[i])
		end := start + runs[i].Len
		for i++; i < len(runs) && at(&runs[i]) == end; i++ {
			end += runs[i].Len
		}
		_, _ = d.Write(mem[start:end])
	}
	return max(d.Sum64(), 1), nil
}

func sumBytes(b []byte) uint64 { return max(xxhash.Sum64(b), 1) }

// resendMsg says that a piece arrived altered over a lane.
type resendMsg struct{ piece, lane uint32 }

func (m resendMsg) frame(lease LeaseID) []byte {
	b := newFrame(frameResend, roleTarget, lease, 8)
	b = binary.LittleEndian.AppendUint32(b, m.piece)
	return finishFrame(binary.LittleEndian.AppendUint32(b, m.lane))
}

func parseResend(b []byte) (resendMsg, error) {
	if len(b) != 8 {
		return resendMsg{}, malformed("resend", b)
	}
	return resendMsg{binary.LittleEndian.Uint32(b), binary.LittleEndian.Uint32(b[4:])}, nil
}

// refuseAltered asks the source for a piece once more. l.mu is held.
func (l *targetLease) refuseAltered(x *Landing) {
	l.e.totals.altered.Add(1)
	l.ch.altered.Add(1)
	p := &x.Piece
	l.e.log.Warn("piece arrived altered, asking for it again", "peer", l.ch.peer.NodeID, "transport", l.ch.transport, "lane", x.lane, "lease", l.id,
		"layer", l.geom.layer(p), "region", l.geom.pair(p).Dst, "first", p.First, "units", p.Count, "bytes", p.Bytes)
	l.ch.out.send(resendMsg{p.ID, uint32(x.lane)}.frame(l.sourceID))
}

// resend queues a piece that arrived altered, unless it has been queued since or that happened too often.
func (l *sourceLease) resend(m resendMsg) {
	l.mu.Lock()
	f := l.flying[m.piece]
	if l.state != LeaseBound || f == nil || f.push == nil || f.lane != int(m.lane) {
		l.mu.Unlock()
		return
	}
	ch := l.ch
	l.e.totals.resent.Add(1)
	ch.suspect.Store(int64(time.Since(ch.since) + suspectFor))
	l.e.log.Warn("piece arrived altered, sending it again", "peer", ch.peer.NodeID, "transport", ch.transport, "lane", m.lane, "lease", l.id,
		"layer", l.geom.layer(&f.piece), "region", l.geom.pair(&f.piece).Src, "first", f.piece.First, "units", f.piece.Count, "bytes", f.piece.Bytes, "time", f.altered+1)
	if f.altered++; f.altered > alteredMax {
		l.mu.Unlock()
		l.e.wg.Go(func() {
			l.fail("blocks %d+%d of layer %d arrived altered %d times at %s, last over lane %d of %s: check that network, and the memory of both hosts",
				f.piece.First, f.piece.Count, l.geom.layer(&f.piece), alteredMax+1, ch.peer.NodeID, m.lane, ch.transport)
		})
		return
	}
	if f.done {
		l.again(f)
	} else {
		f.bad = true // its lane is about to say that it is through
	}
	l.mu.Unlock()
	ch.lanes.push(l)
}

// trailerCheck guards a data frame's trailer: a status that flips would let a lease wait for ever.
func trailerCheck(b *[DataTrailerSize]byte) uint16 {
	c := crc32.Update(crc32.Checksum(b[:6], castagnoli), castagnoli, b[8:])
	return uint16(c) ^ uint16(c>>16)
}
