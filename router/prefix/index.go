package prefix

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math/bits"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/headrace/headrace/router/collect"
)

const (
	bytesMin       = 1 << 20
	bytesDefault   = 256 << 20
	fixedBytes     = 128 << 10 // the Index itself and what it works in
	sourceBytes    = 2 << 10   // what a source takes beside its entries, its share of maps and readers' copies included
	planeBytes     = 1 << 10
	blockTokensMax = 1 << 16
)

// Config of an Index. Zero values are defaults.
type Config struct {
	// Bytes is the limit of what the index takes of the heap, 256 MiB; at least 1 MiB. A block that one worker has takes
	// some 64, each further worker half of that.
	Bytes int64

	// NotedTTL is how long what was routed to a worker that tells nothing is believed to be there, 15 min.
	NotedTTL time.Duration
	// NotedTokens is how many tokens are believed to be there where the size of the worker's cache is not known, 1 Mi.
	NotedTokens int64
	// NotedBlock is the size of the blocks of that, 64 tokens or the worker's own if they are larger: a guess needs no finer
	// ones, and a long prompt is noted in a quarter of the time.
	NotedBlock uint32

	Now func() time.Time
}

func (c *Config) setDefaults() error {
	c.Bytes = cmp.Or(c.Bytes, bytesDefault)
	c.NotedTTL = cmp.Or(c.NotedTTL, 15*time.Minute)
	c.NotedTokens = cmp.Or(c.NotedTokens, 1<<20)
	c.NotedBlock = cmp.Or(c.NotedBlock, 64)
	if c.Now == nil {
		c.Now = time.Now
	}
	switch {
	case c.Bytes < bytesMin:
		return fmt.Errorf("the prefix index is limited to %d bytes: give it %d or more", c.Bytes, bytesMin)
	case c.NotedTTL < 0 || c.NotedTokens < 0 || c.NotedBlock > blockTokensMax:
		return fmt.Errorf("what the prefix index notes: %v, %d tokens in blocks of %d: out of range", c.NotedTTL, c.NotedTokens, c.NotedBlock)
	}
	return nil
}

// Index is safe for concurrent use. It needs no closing: nothing of it runs by itself.
type Index struct {
	cfg   Config
	begun time.Time

	// Lock order: a source's that tells, one that was noted, mu. Readers take none.
	mu      sync.Mutex // guards the table for writing, and what follows
	table   table
	planes  [planesMax]*plane
	ids     [sourcesMax + 1]*source // 0 is none
	side    int64                   // bytes beside the table, of sideMax
	sideMax int64
	victims []victim
	scores  []uint64
	sums    [stripMax]uint64 // of the tokens of the blocks at hand
	touched uint64           // so that loads that only fill the cache are not left out

	shape   atomic.Pointer[shape] // what readers know of sources; replaced, never changed
	looked  atomic.Uint32         // stamp of the last look for what is too old
	figures figures
}

var _ collect.Sink = (*Index)(nil)

// shape is who there is.
type shape struct {
	sources map[collect.Source]*source // all of them
	workers map[string][]*source       // the same
	kept    map[string]Worker          // as Keep said; nil before it said anything
	groups  []group
}

// group is the planes of one block size.
type group struct {
	blockTokens uint32
	tag         uint64
	planes      []*plane
}

// plane is 64 sources with one block size, whose contents are looked up at once.
type plane struct {
	id          int
	blockTokens uint32
	index       uint8         // among those of one block size, below groupPlanes
	tag         uint64        // of their contents: one for all of them
	live        atomic.Uint64 // bits of those that answer
	approximate atomic.Uint64 // bits of those whose contents were noted
	taken       uint64        // bits in use; Index.mu
}

// source is one whose blocks are known: a publisher of events, or a worker that tells nothing, with Rank noted.
type source struct {
	name  collect.Source
	id    uint16
	tag   uint64 // of its keys
	more  uint64 // of its contents that have more than one key
	noted bool

	seat  atomic.Pointer[seat] // nil until its blocks' size is known
	heard atomic.Bool          // something since the last Reset: what is known is the engine's word

	mu              sync.Mutex // one call at a time. Guards what follows
	ended           sync.Cond  // a batch has ended
	gone            bool
	open            bool // within a batch
	medium, groupOf uint16
	progress
	fifo fifo

	keys, mores atomic.Int64 // entries; written under Index.mu
	counts      counts
}

// seat is a source's bit in a plane.
type seat struct {
	plane *plane
	bit   uint64
}

// rankNoted is the rank in the name of what was noted.
const rankNoted = -1

// Worker is what an index is told of a worker.
type Worker struct {
	ID          string
	Incarnation string // changes with its process
	BlockTokens uint32 // 0: not known
	Blocks      int64  // that its cache has; 0: not known
}

// New makes an Index.
func New(cfg Config) (*Index, error) {
	if err := cfg.setDefaults(); err != nil {
		return nil, err
	}
	x := &Index{cfg: cfg, begun: cfg.Now(), sideMax: cfg.Bytes / 8}
	x.table.init(cfg.Bytes - x.sideMax - fixedBytes)
	x.table.evict = x.evict
	x.victims, x.scores = make([]victim, 0, segmentSlots), make([]uint64, 0, segmentSlots)
	x.shape.Store(&shape{sources: map[collect.Source]*source{}, workers: map[string][]*source{}})
	return x, nil
}

// stampFirst leaves room below for what a snapshot says of the time before.
const stampFirst = 1 << 24

// stamp is the time in seconds since the index began, and stampFirst.
func (x *Index) stamp() uint32 {
	return uint32(max(0, x.cfg.Now().Sub(x.begun))/time.Second) + stampFirst
}

var errFull = errors.New("the prefix index has no place for another source")

// enter returns a source with its lock held, a new one if need be; nil when there is no place for one.
func (x *Index) enter(name collect.Source) *source {
	for {
		s := x.shape.Load().sources[name]
		if s == nil {
			var err error
			if s, err = x.add(name); err != nil {
				x.figures.turnedAway.Add(1)
				return nil
			}
		}
		s.mu.Lock()
		if !s.gone {
			return s
		}
		s.mu.Unlock()
	}
}

// entered is enter for what makes no new source: nil where nothing was heard of it.
func (x *Index) entered(name collect.Source) *source {
	if x.shape.Load().sources[name] == nil {
		return nil
	}
	return x.enter(name)
}

// told is enter for an engine that tells of its blocks: what a snapshot said of these before, and nobody has confirmed, is
// void.
func (x *Index) told(name collect.Source) *source {
	s := x.enter(name)
	if s != nil && s.pending {
		x.void(s)
	}
	return s
}

// add makes a source.
func (x *Index) add(name collect.Source) (*source, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if s := x.shape.Load().sources[name]; s != nil {
		return s, nil
	}
	size := sourceBytes + 4*int64(len(name.Worker)+len(name.Incarnation))
	id := slices.Index(x.ids[1:], nil) + 1
	most := x.sideMax
	if name.Rank == rankNoted {
		most /= 2 // a guess takes no place of those that tell
	}
	if id == 0 || x.side+size > most {
		return nil, errFull
	}
	x.side += size
	s := &source{name: name, id: uint16(id), tag: newTag(), more: newTag(), noted: name.Rank == rankNoted, medium: mediumNone, groupOf: groupNone}
	s.ended.L = &s.mu
	x.ids[id] = s
	x.reshape(func(sh *shape) { sh.sources[name] = s })
	return s, nil
}

// reshape makes readers see a change. The caller holds mu.
func (x *Index) reshape(change func(sh *shape)) {
	old := x.shape.Load()
	sh := &shape{sources: maps.Clone(old.sources), workers: make(map[string][]*source, len(old.workers)), kept: old.kept}
	change(sh)
	for name, s := range sh.sources {
		sh.workers[name.Worker] = append(sh.workers[name.Worker], s)
	}
	for _, p := range x.planes {
		if p == nil {
			continue
		}
		i := slices.IndexFunc(sh.groups, func(g group) bool { return g.blockTokens == p.blockTokens })
		if i < 0 {
			i = len(sh.groups)
			sh.groups = append(sh.groups, group{blockTokens: p.blockTokens, tag: p.tag})
		}
		sh.groups[i].planes = append(sh.groups[i].planes, p)
	}
	x.shape.Store(sh)
}

// sit gives a source without a seat one among those with blocks of the same size. The caller holds s.mu.
func (x *Index) sit(s *source, blockTokens uint32) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	var p *plane
	free, tag, used := -1, newTag(), uint64(0)
	for i, q := range x.planes {
		switch {
		case q == nil && free < 0:
			free = i
		case q != nil && q.blockTokens == blockTokens:
			tag, used = q.tag, used|1<<q.index
			if q.taken != ^uint64(0) {
				p = q
			}
		}
	}
	if p == nil {
		if free < 0 || x.side+planeBytes > x.sideMax {
			x.figures.turnedAway.Add(1)
			return errFull
		}
		x.side += planeBytes
		p = &plane{id: free, blockTokens: blockTokens, index: uint8(bits.TrailingZeros64(^used)), tag: tag}
		x.planes[free] = p
	}
	at := &seat{plane: p, bit: 1 << bits.TrailingZeros64(^p.taken)}
	p.taken |= at.bit
	if s.noted {
		p.approximate.Or(at.bit)
	} else {
		p.approximate.And(^at.bit)
	}
	s.seat.Store(at)
	x.reshape(func(*shape) {})
	p.live.Or(at.bit)
	return nil
}

// rise gives the seat back. The caller holds s.mu, and has cleared s.
func (x *Index) rise(s *source) {
	at := s.seat.Load()
	if at == nil {
		return
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	p := at.plane
	p.live.And(^at.bit)
	s.seat.Store(nil)
	if p.taken &^= at.bit; p.taken == 0 {
		x.planes[p.id] = nil
		x.side -= planeBytes
	}
	x.reshape(func(*shape) {})
}

// clear takes away all that s has. It answers nothing meanwhile. Others may write in between. The caller holds s.mu.
func (x *Index) clear(s *source) {
	at := s.seat.Load()
	if at == nil {
		return
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	x.release(&s.fifo)
	if s.keys.Load() == 0 {
		return
	}
	at.plane.live.And(^at.bit)
	x.table.sweep(func(e *entry) bool {
		if kindOf(e.m) == kindContent {
			if contentPlane(e.m) == at.plane.id {
				e.v &^= at.bit
			}
			return e.v != 0
		}
		return sourceOf(e.m) != s.id
	}, func() {
		x.mu.Unlock()
		x.mu.Lock()
	})
	s.keys.Store(0)
	s.mores.Store(0)
	at.plane.live.Or(at.bit)
}

// remove forgets s altogether. The caller holds s.mu.
func (x *Index) remove(s *source) {
	if s.gone {
		return
	}
	x.clear(s)
	x.rise(s)
	s.gone = true
	s.ended.Broadcast() // its batch ends for others
	x.mu.Lock()
	defer x.mu.Unlock()
	x.ids[s.id] = nil
	past := x.figures.past.of()
	for i, c := range s.counts.of() {
		past[i].Add(c.Load())
	}
	x.side -= sourceBytes + 4*int64(len(s.name.Worker)+len(s.name.Incarnation))
	x.reshape(func(sh *shape) { delete(sh.sources, s.name) })
}

// Keep tells which workers there are. What is known of others, or of other processes of these, is forgotten. Before the
// first call whoever says something is one.
func (x *Index) Keep(workers []Worker) {
	kept := make(map[string]Worker, len(workers))
	for _, w := range workers {
		kept[w.ID] = w
	}
	x.mu.Lock()
	x.reshape(func(sh *shape) { sh.kept = kept })
	x.mu.Unlock()
	for name, s := range x.shape.Load().sources {
		if w, ok := kept[name.Worker]; ok && w.Incarnation == name.Incarnation {
			continue
		}
		s.mu.Lock()
		x.remove(s)
		s.mu.Unlock()
	}
}

// stranger tells whether a source is of none of the workers that there are.
func (sh *shape) stranger(name collect.Source) bool {
	w, ok := sh.kept[name.Worker]
	return sh.kept != nil && (!ok || w.Incarnation != name.Incarnation)
}
