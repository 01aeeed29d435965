package prefix

import (
	"bufio"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"

	"github.com/cespare/xxhash/v2"

	"github.com/headrace/headrace/router/collect"
)

// A snapshot lets another router begin with what this one knows. All integers of fixed size are little-endian, the others
// varints as of encoding/binary.
//
//	"HRPX" | version 1 | hash version 1 | 0 0
//	then sections: kind 1 | length 4 | payload | xxhash64 of kind, length and payload 8
//
//	source   worker, incarnation (length, bytes) | rank (zigzag) | block tokens | medium | group | flags 1 | next | sum 8
//	entries  told:  key 8 | hash 8 | blocks | depth
//	         noted: hash 8 | age in seconds | depth, the oldest first
//	done     entries of that source
//	end      sources
//
// A source is taken when it is there to its end, and whatever else is broken.
const (
	snapshotVersion = 1
	sectionMax      = 1 << 20
	nameMax         = 1 << 10

	sectionSource  = 1
	sectionEntries = 2
	sectionDone    = 3
	sectionEnd     = 4

	flagNoted = 1 // known by what was routed there
	flagNext  = 2 // next and sum mean something
)

var snapshotMagic = [8]byte{'H', 'R', 'P', 'X', snapshotVersion, hashVersion}

// ErrSnapshot is what a snapshot is refused with that cannot be read. What came whole before is kept.
var ErrSnapshot = errors.New("no snapshot of a prefix index that this version reads")

// pendingMax is how long, in seconds, batches are passed over that a snapshot has already, while its last one does not come.
const pendingMax = 30

// progress is how far a source's events were heard.
type progress struct {
	known     bool
	next, sum uint64 // number of the batch to come, hash of the one before
	// pending: this and all that is known is of a snapshot. Nothing of it is told before the last batch that the other
	// router took has come again, and is the same: the engine may have begun anew since.
	pending bool
	since   uint32 // stamp of the first batch passed over, 0 for none
}

var _ collect.Batches = (*Index)(nil)

// Begin implements collect.Batches.
func (x *Index) Begin(name collect.Source, seq, sum uint64) bool {
	s := x.entered(name)
	if s == nil {
		return true
	}
	defer s.mu.Unlock()
	p := &s.progress
	if p.pending {
		stamp := x.stamp()
		switch {
		case seq+1 < p.next && (p.since == 0 || stamp-p.since <= pendingMax):
			p.since = max(1, cmp.Or(p.since, stamp))
			return false
		case seq+1 == p.next && sum == p.sum:
			p.pending = false
			x.hear(s)
			return false
		case seq == p.next:
			// Nobody can say whether it is the same engine but its registration, which calls it the same process.
			p.pending = false
			x.hear(s)
		default:
			x.void(s)
		}
	}
	s.open = true
	return true
}

// End implements collect.Batches.
func (x *Index) End(name collect.Source, seq, sum uint64) {
	s := x.entered(name)
	if s == nil {
		return
	}
	defer s.mu.Unlock()
	s.progress = progress{known: true, next: seq + 1, sum: sum}
	s.open = false
	s.ended.Broadcast()
}

// void forgets all that is known of a source. The caller holds s.mu.
func (x *Index) void(s *source) {
	s.heard.Store(false)
	s.progress = progress{}
	x.clear(s)
}

// saved is one entry of a snapshot.
type saved struct {
	key, hash    uint64
	count, depth uint32 // count: of a noted one the age in seconds
}

// Save writes what the index knows. Each source is saved as it was between two batches; it waits for no longer than it
// takes to go through the table once, and others do not wait. Memory for one source's blocks is taken beside the limit.
func (x *Index) Save(w io.Writer) error {
	out := bufio.NewWriterSize(w, 64<<10)
	_, err := out.Write(snapshotMagic[:])
	n := uint64(0)
	for _, s := range x.shape.Load().sources {
		head, list, ok := x.copy(s)
		if !ok || err != nil {
			continue
		}
		n++
		err = save(out, head, list)
	}
	if err == nil {
		err = section(out, sectionEnd, binary.AppendUvarint(nil, n))
	}
	if err = errors.Join(err, out.Flush()); err != nil {
		return fmt.Errorf("save the prefix index: %w", err)
	}
	return nil
}

// header is what a snapshot says of a source.
type header struct {
	name          collect.Source
	blockTokens   uint32
	medium, group uint16
	noted         bool
	progress
}

// copy takes a source's entries. ok is false when there is nothing to be said of it, or what there is was never confirmed.
func (x *Index) copy(s *source) (header, []saved, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.open && !s.gone {
		s.ended.Wait()
	}
	at := s.seat.Load()
	if s.gone || at == nil || s.pending || !s.noted && !s.heard.Load() {
		return header{}, nil, false
	}
	list := make([]saved, 0, s.keys.Load())
	stamp := x.stamp()
	x.mu.Lock()
	for i := 0; i < len(x.table.dir); {
		seg := x.table.dir[i].Load()
		for j := range seg.slots {
			e := seg.slots[j].entry()
			if e.k == 0 || kindOf(e.m) != kindKey && kindOf(e.m) != kindNoted || sourceOf(e.m) != s.id {
				continue
			}
			one := saved{key: displace(s.tag, e.k), hash: e.v, count: keyCount(e.m), depth: keyDepth(e.m)}
			if s.noted {
				one.count, one.depth = stamp-min(stamp, stampOf(e.m)), 0
				if c := x.table.find(at.plane.place(Hash(e.v))); c != nil {
					one.depth = contentDepth(c.m.Load())
				}
			}
			list = append(list, one)
		}
		first, n := x.table.span(uint64(i)<<x.table.shift, seg)
		i = first + n
		x.mu.Unlock() // what moves stays in its part of the directory, and nobody else changes what s has but by driving it out
		x.mu.Lock()
	}
	x.mu.Unlock()
	slices.SortFunc(list, func(a, b saved) int {
		if s.noted {
			return cmp.Or(cmp.Compare(b.count, a.count), cmp.Compare(b.depth, a.depth), cmp.Compare(a.key, b.key))
		}
		return cmp.Or(cmp.Compare(a.depth, b.depth), cmp.Compare(a.key, b.key)) // parents first
	})
	// A merge may have brought what was copied already before what was not.
	list = slices.CompactFunc(list, func(a, b saved) bool { return a.key == b.key && a.hash == b.hash })
	return header{s.name, at.plane.blockTokens, s.medium, s.groupOf, s.noted, s.progress}, list, true
}

func section(w io.Writer, kind byte, payload []byte) error {
	b := append(make([]byte, 0, len(payload)+13), kind)
	b = append(binary.LittleEndian.AppendUint32(b, uint32(len(payload))), payload...)
	_, err := w.Write(binary.LittleEndian.AppendUint64(b, xxhash.Sum64(b)))
	return err
}

func save(w io.Writer, h header, list []saved) error {
	b := appendString(appendString(nil, h.name.Worker), h.name.Incarnation)
	b = binary.AppendVarint(b, int64(h.name.Rank))
	for _, v := range []uint64{uint64(h.blockTokens), uint64(h.medium), uint64(h.group)} {
		b = binary.AppendUvarint(b, v)
	}
	flags := byte(0)
	if h.noted {
		flags |= flagNoted
	}
	if h.known {
		flags |= flagNext
	}
	b = binary.LittleEndian.AppendUint64(binary.AppendUvarint(append(b, flags), h.next), h.sum)
	if err := section(w, sectionSource, b); err != nil {
		return err
	}
	b = b[:0]
	for i, e := range list {
		if !h.noted {
			b = binary.LittleEndian.AppendUint64(b, e.key)
		}
		b = binary.LittleEndian.AppendUint64(b, e.hash)
		b = binary.AppendUvarint(binary.AppendUvarint(b, uint64(e.count)), uint64(e.depth))
		if len(b) > sectionMax-64 || i == len(list)-1 {
			if err := section(w, sectionEntries, b); err != nil {
				return err
			}
			b = b[:0]
		}
	}
	return section(w, sectionDone, binary.AppendUvarint(nil, uint64(len(list))))
}

func appendString(b []byte, s string) []byte {
	return append(binary.AppendUvarint(b, uint64(len(s))), s...)
}

// Load takes in what another index saved. Sources that this one knows better are left as they are, and those of workers that
// there are not. What engines told counts once the engine has confirmed the last batch of it; without sequence numbers
// it is of no use, and left out. An error says that the snapshot is broken or cut off; what came before it is taken.
func (x *Index) Load(r io.Reader) error {
	in := &reader{r: bufio.NewReaderSize(r, 64<<10)}
	var magic [8]byte
	if _, err := io.ReadFull(in.r, magic[:]); err != nil || magic != snapshotMagic {
		return fmt.Errorf("%w (%x)", ErrSnapshot, magic)
	}
	for n := uint64(0); ; n++ {
		kind, payload, err := in.section()
		if err != nil {
			return err
		}
		if kind == sectionEnd {
			if f := (fields{b: payload}); f.uvarint() != n || f.bad {
				return fmt.Errorf("%w: %d sources came", ErrSnapshot, n)
			}
			return nil
		}
		h, err := parseHeader(kind, payload)
		if err != nil {
			return err
		}
		list, err := in.entries(h.noted, x.table.most*segmentSlots)
		if err != nil {
			return err
		}
		x.take(h, list)
	}
}

type reader struct {
	r   *bufio.Reader
	buf []byte
}

func (r *reader) section() (kind byte, payload []byte, err error) {
	r.buf = slices.Grow(r.buf[:0], 5)[:5]
	if _, err := io.ReadFull(r.r, r.buf); err != nil {
		return 0, nil, fmt.Errorf("%w: %w", ErrSnapshot, err)
	}
	n := binary.LittleEndian.Uint32(r.buf[1:])
	if n > sectionMax {
		return 0, nil, fmt.Errorf("%w: a section of %d bytes", ErrSnapshot, n)
	}
	r.buf = slices.Grow(r.buf, int(n)+8)[:5+int(n)+8]
	if _, err := io.ReadFull(r.r, r.buf[5:]); err != nil {
		return 0, nil, fmt.Errorf("%w: %w", ErrSnapshot, err)
	}
	body := r.buf[:5+n]
	if binary.LittleEndian.Uint64(r.buf[5+n:]) != xxhash.Sum64(body) {
		return 0, nil, fmt.Errorf("%w: a section's checksum", ErrSnapshot)
	}
	return body[0], body[5:], nil
}

// fields reads a payload; bad says that it was too short.
type fields struct {
	b   []byte
	bad bool
}

func (f *fields) uvarint() uint64 { return number(f, binary.Uvarint) }
func (f *fields) varint() int64   { return number(f, binary.Varint) }

// number reads an integer as read, of encoding/binary, does.
func number[T int64 | uint64](f *fields, read func([]byte) (T, int)) T {
	v, n := read(f.b)
	if n <= 0 {
		f.bad, f.b = true, nil
		return 0
	}
	f.b = f.b[n:]
	return v
}

func (f *fields) bytes(n uint64) []byte {
	if uint64(len(f.b)) < n {
		f.bad, f.b = true, nil
		return make([]byte, min(n, 8))
	}
	v := f.b[:n]
	f.b = f.b[n:]
	return v
}

func (f *fields) u64() uint64 { return binary.LittleEndian.Uint64(f.bytes(8)) }

func (f *fields) string() string {
	n := f.uvarint()
	if n > nameMax {
		f.bad = true
		return ""
	}
	return string(f.bytes(n))
}

func parseHeader(kind byte, payload []byte) (header, error) {
	f := fields{b: payload}
	var h header
	h.name.Worker, h.name.Incarnation = f.string(), f.string()
	rank := f.varint()
	size, medium, group := f.uvarint(), f.uvarint(), f.uvarint()
	flags := f.bytes(1)[0]
	h.next, h.sum = f.uvarint(), f.u64()
	h.noted, h.known = flags&flagNoted != 0, flags&flagNext != 0
	if kind != sectionSource || f.bad || size == 0 || size > blockTokensMax || medium > math.MaxUint16 || group > math.MaxUint16 ||
		rank < rankNoted || rank > math.MaxInt32 || (rank == rankNoted) != h.noted {
		return header{}, fmt.Errorf("%w: what it says of a source", ErrSnapshot)
	}
	h.name.Rank, h.blockTokens, h.medium, h.group = int(rank), uint32(size), uint16(medium), uint16(group)
	return h, nil
}

// entries reads a source's entries to the end. What is beyond most is left out: it would be driven out in any case.
func (r *reader) entries(noted bool, most int) ([]saved, error) {
	var list []saved
	for n := uint64(0); ; {
		kind, payload, err := r.section()
		if err != nil {
			return nil, err
		}
		f := fields{b: payload}
		if kind == sectionDone {
			if f.uvarint() != n || f.bad {
				return nil, fmt.Errorf("%w: %d blocks of a source came", ErrSnapshot, n)
			}
			return list, nil
		}
		if kind != sectionEntries {
			return nil, fmt.Errorf("%w: a section of kind %d among blocks", ErrSnapshot, kind)
		}
		for ; len(f.b) > 0; n++ {
			var e saved
			if !noted {
				e.key = f.u64()
			}
			e.hash = f.u64()
			e.count, e.depth = uint32(min(f.uvarint(), math.MaxUint32)), uint32(min(f.uvarint(), depthMax))
			if f.bad {
				return nil, fmt.Errorf("%w: a block", ErrSnapshot)
			}
			if len(list) < most {
				list = append(list, e)
			}
		}
	}
}

// take takes a source in of which nothing is known.
func (x *Index) take(h header, list []saved) {
	sh := x.shape.Load()
	if sh.stranger(h.name) || !h.noted && !h.known || h.noted && x.tells(sh, h.name.Worker) {
		return
	}
	s := x.enter(h.name)
	if s == nil {
		return
	}
	defer s.mu.Unlock()
	if s.seat.Load() != nil || s.heard.Load() || s.known || s.open || x.sit(s, h.blockTokens) != nil {
		return
	}
	s.medium, s.groupOf = h.medium, h.group
	at, stamp := s.seat.Load(), x.stamp()
	if !h.noted {
		s.progress = progress{known: true, next: h.next, sum: h.sum, pending: true}
	}
	for len(list) > 0 {
		n := min(len(list), 1024) // a millisecond
		x.mu.Lock()
		for _, e := range list[:n] {
			if h.noted {
				x.noteOne(s, Hash(e.hash), e.depth, stamp-min(e.count, stamp-1))
				continue
			}
			k := place(s.tag, e.key)
			if e.count > 0 && x.table.find(k) == nil {
				x.hold(s, at, Hash(e.hash), e.depth, stamp, false)
				x.setKey(s, k, Hash(e.hash), e.count, e.depth)
			}
		}
		x.mu.Unlock()
		list = list[n:]
	}
}

// tells tells whether a worker's engine does.
func (x *Index) tells(sh *shape, worker string) bool {
	return slices.ContainsFunc(sh.workers[worker], func(s *source) bool { return !s.noted && s.heard.Load() })
}
