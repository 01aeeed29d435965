package prefix

import (
	"math/bits"
	"runtime"
	"sync/atomic"
)

// The table is an extendible hash table: segments of one size, a directory that is never larger, and nothing else, so that
// its bytes are known exactly, and growing costs the split of one segment, never a copy of the whole.
//
// One goroutine writes at a time (Index.mu); any number read without a lock. A reader finds its segment in the directory
// and probes it. What a writer does to a segment is one of three things:
//   - it fills a free slot, the key last, or changes a value: a reader sees it or not;
//   - it moves or removes entries: the segment's sequence number is odd meanwhile, and who sees it change looks again;
//   - it moves entries to another segment: they are there before the directory says so, and only then gone here. Who finds
//     nothing looks whether the directory still says what it said.
//
// Segments are used again, never while the directory names them; keys are unique, so that a reader who comes late to a
// segment of other use finds nothing there, and looks at the directory.

const (
	segmentBytes = 16 << 10 // a size class of the runtime: nothing is lost to rounding
	segmentSlots = (segmentBytes - 32) / 24
	fillMax      = segmentSlots * 4 / 5
	mergeMax     = segmentSlots * 2 / 5 // entries of two segments that are made one
	readTriesMax = 1000
	freeKeptMax  = 8 // segments kept for use again
)

// slot is one entry; a key of 0 is none. What the words mean is entry.go's.
type slot struct{ k, v, m atomic.Uint64 }

type segment struct {
	seq   atomic.Uint64 // odd while entries move
	n     int           // the writer's
	depth uint          // of the key's upper bits, how many all its entries have in common
	slots [segmentSlots]slot
}

type entry struct{ k, v, m uint64 }

type table struct {
	dir      []atomic.Pointer[segment]
	dirDepth uint
	shift    uint // 64 - dirDepth

	// The writer's.
	free     []*segment
	segments int // in the directory or free
	most     int // segments there may be
	entries  int
	scratch  []entry
	// evict makes room in a full segment, when there is no memory to split it.
	evict func(*segment)

	waits atomic.Uint64 // readers that looked too often, and asked for the lock
}

// init sizes the table for bytes.
func (t *table) init(bytes int64) {
	t.most = max(2, int(bytes/segmentBytes))
	t.dirDepth = min(uint(bits.Len(uint(t.most-1)))+1, 28)
	for t.most > 2 && int64(t.most)*segmentBytes+t.dirBytes() > bytes {
		t.most--
	}
	t.shift = 64 - t.dirDepth
	t.dir = make([]atomic.Pointer[segment], 1<<t.dirDepth)
	t.scratch = make([]entry, 0, segmentSlots)
	first := t.alloc()
	for i := range t.dir {
		t.dir[i].Store(first)
	}
}

func (t *table) dirBytes() int64 { return 8 << t.dirDepth }

// bytes are what the table takes of the heap.
func (t *table) bytes() int64 {
	return int64(t.segments)*segmentBytes + t.dirBytes() + segmentSlots*24
}

// alloc returns an empty segment, nil when there is no memory for it.
func (t *table) alloc() *segment {
	if n := len(t.free); n > 0 {
		s := t.free[n-1]
		t.free[n-1] = nil
		t.free = t.free[:n-1]
		return s
	}
	if t.segments >= t.most {
		return nil
	}
	t.segments++
	return &segment{}
}

// give takes back a segment that the directory names no more.
func (t *table) give(s *segment) {
	if len(t.free) >= freeKeptMax {
		t.segments--
		return // for the garbage collector
	}
	s.begin()
	s.clear()
	s.end()
	t.free = append(t.free, s)
}

func (s *segment) begin() { s.seq.Add(1) }
func (s *segment) end()   { s.seq.Add(1) }

func (s *segment) clear() {
	for i := range s.slots {
		if s.slots[i].k.Load() != 0 {
			s.slots[i].k.Store(0)
		}
	}
	s.n = 0
}

// home is where k is looked for first. Keys that differ in the lowest bits alone have one.
func home(k uint64) int { return int(uint64(uint32(k)&^(groupPlanes-1)) * segmentSlots >> 32) }

func (t *table) segment(k uint64) *segment { return t.dir[k>>t.shift].Load() }

// find is where k is in its segment; nil for nowhere. The writer's.
func (s *segment) find(k uint64) *slot {
	for i := home(k); ; {
		x := &s.slots[i]
		switch x.k.Load() {
		case k:
			return x
		case 0:
			return nil
		}
		if i++; i == segmentSlots {
			i = 0
		}
	}
}

// find is good until the next insert or remove. The writer's.
func (t *table) find(k uint64) *slot { return t.segment(k).find(k) }

// aside is what was read of the entries of one spot, by what is in the lowest bits of their keys.
type aside struct {
	seen uint64
	v, m [groupPlanes]uint64
	at   [groupPlanes]uint16 // slots
}

// read reads the entries whose keys differ from k, a spot, in the lowest bits alone, or of them those that are wanted, without a
// lock. It tells in which segment they are; nil when it could not be told.
func (t *table) read(k, want uint64, out *aside) *segment {
	for try := range readTriesMax {
		d := &t.dir[k>>t.shift]
		s := d.Load()
		seq := s.seq.Load()
		if seq&1 == 0 {
			s.probe(k, want, out)
			if s.seq.Load() == seq && (out.seen&want == want || d.Load() == s) {
				return s
			}
		}
		if try > 20 {
			runtime.Gosched() // the writer was interrupted
		}
	}
	t.waits.Add(1)
	return nil
}

// probe is read of one segment.
func (s *segment) probe(k, want uint64, out *aside) {
	out.seen = 0
	i := home(k)
	for range segmentSlots {
		x := &s.slots[i]
		at := x.k.Load()
		if at == 0 {
			return
		}
		if j := at ^ k; j < groupPlanes {
			out.v[j], out.m[j], out.at[j] = x.v.Load(), x.m.Load(), uint16(i)
			if out.seen |= 1 << j; out.seen&want == want {
				return
			}
		}
		if i++; i == segmentSlots {
			i = 0
		}
	}
}

// insert puts in what is not there.
func (t *table) insert(e entry) {
	s := t.segment(e.k)
	for s.n >= fillMax {
		if !t.split(s) {
			t.evict(s)
		}
		s = t.segment(e.k)
	}
	s.put(e)
	t.entries++
}

func (s *segment) put(e entry) {
	i := home(e.k)
	for s.slots[i].k.Load() != 0 {
		if i++; i == segmentSlots {
			i = 0
		}
	}
	x := &s.slots[i]
	x.v.Store(e.v)
	x.m.Store(e.m)
	x.k.Store(e.k)
	s.n++
}

// remove takes k out, if it is there.
func (t *table) remove(k uint64) {
	s := t.segment(k)
	if s.remove(k) {
		t.entries--
		if s.n < mergeMax/4 && s.n&15 == 0 {
			t.merge(k)
		}
	}
}

// remove closes the gap: entries behind that would not be found any more move up.
func (s *segment) remove(k uint64) bool {
	i := home(k)
	for {
		at := s.slots[i].k.Load()
		if at == k {
			break
		}
		if at == 0 {
			return false
		}
		if i++; i == segmentSlots {
			i = 0
		}
	}
	s.begin()
	for j := i; ; {
		if j++; j == segmentSlots {
			j = 0
		}
		next := s.slots[j].k.Load()
		if next == 0 {
			break
		}
		if h := home(next); i <= j && (i < h && h <= j) || i > j && (i < h || h <= j) {
			continue
		}
		s.slots[i].v.Store(s.slots[j].v.Load())
		s.slots[i].m.Store(s.slots[j].m.Load())
		s.slots[i].k.Store(next)
		i = j
	}
	s.slots[i].k.Store(0)
	s.end()
	s.n--
	return true
}

// span is which entries of the directory name the segment that k belongs to: n of them from first.
func (t *table) span(k uint64, s *segment) (first, n int) {
	n = 1 << (t.dirDepth - s.depth)
	return int(k>>t.shift) &^ (n - 1), n
}

// split makes two of a segment. It fails when there is no memory, or the directory has no more bits.
func (t *table) split(s *segment) bool {
	if s.depth >= t.dirDepth {
		return false
	}
	other := t.alloc()
	if other == nil {
		return false
	}
	s.depth++
	other.depth = s.depth
	bit := uint64(1) << (64 - s.depth)
	k := uint64(0)
	for i := range s.slots {
		if e := s.slots[i].entry(); e.k != 0 {
			k = e.k
			if e.k&bit != 0 {
				other.put(e)
			}
		}
	}
	first, n := t.span(k|bit, other)
	for i := first; i < first+n; i++ {
		t.dir[i].Store(other)
	}
	t.filter(s, func(e *entry) bool { return e.k&bit == 0 })
	t.entries += other.n
	return true
}

// filter keeps some of a segment's entries, and may change what it keeps.
func (t *table) filter(s *segment, keep func(e *entry) bool) {
	before := s.n
	kept := t.scratch[:0]
	for i := range s.slots {
		if e := s.slots[i].entry(); e.k != 0 && keep(&e) {
			kept = append(kept, e)
		}
	}
	s.begin()
	s.clear()
	for _, e := range kept {
		s.put(e)
	}
	s.end()
	t.entries += s.n - before
	t.scratch = kept[:0]
}

// sweep keeps some of all entries. Between segments pause lets others write.
func (t *table) sweep(keep func(e *entry) bool, pause func()) {
	for i := 0; i < len(t.dir); {
		k := uint64(i) << t.shift
		s := t.dir[i].Load()
		t.filter(s, keep)
		first, n := t.span(k, s)
		i = first + n
		if s.n < mergeMax {
			t.merge(k)
		}
		pause()
	}
}

// merge makes one of the segment of k and its neighbour, while both have little.
func (t *table) merge(k uint64) {
	for {
		s := t.segment(k)
		if s.depth == 0 {
			return
		}
		first, n := t.span(k, s)
		other := t.dir[first^n].Load()
		if other.depth != s.depth || s.n+other.n > mergeMax {
			return
		}
		for i := range other.slots {
			if e := other.slots[i].entry(); e.k != 0 {
				s.put(e)
			}
		}
		for i := first ^ n; i < first^n+n; i++ {
			t.dir[i].Store(s)
		}
		s.depth--
		other.n = 0
		t.give(other)
	}
}

func (x *slot) entry() entry {
	k := x.k.Load()
	if k == 0 {
		return entry{}
	}
	return entry{k, x.v.Load(), x.m.Load()}
}
