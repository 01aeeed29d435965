package prefix

import (
	"sync"
	"time"

	"github.com/headrace/headrace/router/collect"
	"github.com/headrace/headrace/router/tokens"
)

// A worker that tells nothing is believed to keep what was routed to it, as engines do: the blocks that were used last, of a
// prompt the first ones longest, as many as its cache has. A queue has them in the order in which they go. Who is used
// again is put in anew; its old place in the queue is recognised by the stamp.

const (
	notedFresh  = 4   // seconds within which a block is not put in anew
	chunkNotes  = 512 // 8 KiB, a size class
	chunkBytes  = 16 * chunkNotes
	staleChunks = 2 // chunks of places that are void, beyond as many as are not, before the queue is put in order
)

type note struct {
	hash  Hash
	stamp uint32
	_     uint32
}

// fifo is a queue of notes. Its chunks are of the bytes beside the table.
type fifo struct {
	chunks     []*[chunkNotes]note
	head, tail int // places in the first chunk and behind the last one's last
}

func (f *fifo) len() int { return len(f.chunks)*chunkNotes - f.head - (f.room()) }

func (f *fifo) room() int {
	if len(f.chunks) == 0 {
		return 0
	}
	return chunkNotes - f.tail
}

func (f *fifo) first() *note { return &f.chunks[0][f.head] }

// push is false when there is no memory.
func (x *Index) push(f *fifo, n note) bool {
	if f.room() == 0 {
		if x.side+chunkBytes > x.sideMax/2 {
			return false // the rest is for those that tell
		}
		x.side += chunkBytes
		f.chunks = append(f.chunks, new([chunkNotes]note))
		f.tail = 0
	}
	f.chunks[len(f.chunks)-1][f.tail] = n
	f.tail++
	return true
}

func (x *Index) pop(f *fifo) note {
	n := *f.first()
	f.head++
	switch {
	case f.len() == 0:
		x.release(f)
	case f.head == chunkNotes:
		f.chunks[0] = nil
		f.chunks, f.head = f.chunks[1:], 0
		x.side -= chunkBytes
	}
	return n
}

// release gives all chunks back.
func (x *Index) release(f *fifo) {
	x.side -= chunkBytes * int64(len(f.chunks))
	*f = fifo{}
}

// noting is what Routed works in.
type noting struct {
	hashes []Hash
	blocks blocks
}

var hashBuffers = sync.Pool{New: func() any { return new(noting) }}

// Routed is RoutedParts of a prompt that comes in one.
func (x *Index) Routed(worker string, prompt []uint32, seed Seed) {
	x.RoutedParts(worker, []tokens.Part{{IDs: prompt}}, seed)
}

// RoutedParts notes that a prompt goes to a worker. It does nothing for one that tells itself what it has.
func (x *Index) RoutedParts(worker string, prompt []tokens.Part, seed Seed) {
	sh := x.shape.Load()
	for _, s := range sh.workers[worker] {
		if s.heard.Load() && !s.noted {
			return
		}
	}
	w, ok := sh.kept[worker]
	if sh.kept != nil && !ok {
		return
	}
	size := x.notedBlock(w)
	capacity := x.notedMax(w, size)
	n := min(lengthOf(prompt)/int(size), capacity)
	if n == 0 {
		return
	}
	buf := hashBuffers.Get().(*noting)
	defer hashBuffers.Put(buf)
	buf.blocks.begin(prompt, int(size), seed)
	buf.hashes = buf.hashes[:0]
	for range n {
		buf.hashes = append(buf.hashes, buf.blocks.next())
	}
	buf.blocks.end()
	hashes := buf.hashes

	s := x.enter(collect.Source{Worker: worker, Incarnation: w.Incarnation, Rank: rankNoted})
	if s == nil {
		return
	}
	defer s.mu.Unlock()
	if at := s.seat.Load(); at == nil || at.plane.blockTokens != size {
		x.clear(s)
		x.rise(s)
		if x.sit(s, size) != nil {
			return
		}
	}
	s.counts.events.Add(1)
	x.mu.Lock()
	defer x.mu.Unlock()
	x.note(s, hashes)
	x.forget(s, capacity, x.stamp())
}

func (x *Index) notedBlock(w Worker) uint32 {
	size := max(1, x.cfg.NotedBlock)
	if w.BlockTokens > 1 && w.BlockTokens <= blockTokensMax {
		size = max(1, size/w.BlockTokens) * w.BlockTokens
	}
	return size
}

func (x *Index) notedMax(w Worker, size uint32) int {
	tokens := x.cfg.NotedTokens
	if w.Blocks > 0 && w.BlockTokens > 0 {
		tokens = min(w.Blocks, 1<<40) * int64(min(w.BlockTokens, blockTokensMax))
	}
	return int(max(1, min(tokens/int64(size), x.cfg.Bytes/64)))
}

// note puts blocks in, the deepest first. The caller holds both locks.
func (x *Index) note(s *source, hashes []Hash) {
	stamp := x.stamp()
	for i := len(hashes) - 1; i >= 0; i-- {
		x.noteOne(s, hashes[i], uint32(i), stamp)
	}
}

// noteOne puts one in; stamps never fall.
func (x *Index) noteOne(s *source, h Hash, depth, stamp uint32) {
	k := place(s.tag, uint64(h))
	if e := x.table.find(k); e != nil && stampOf(e.m.Load())+notedFresh > stamp {
		return
	}
	for !x.push(&s.fifo, note{hash: h, stamp: stamp}) {
		if s.fifo.len() == 0 {
			return // others have all there is
		}
		x.unnote(s, x.pop(&s.fifo))
	}
	x.hold(s, s.seat.Load(), h, depth, stamp, true)
	if e := x.table.find(k); e != nil {
		e.m.Store(notedMeta(s.id, stamp))
		return
	}
	s.counts.stored.Add(1)
	s.keys.Add(1)
	x.table.insert(entry{k, uint64(h), notedMeta(s.id, stamp)})
}

// unnote takes out what stands at a place of the queue, unless it was put in anew.
func (x *Index) unnote(s *source, n note) {
	k := place(s.tag, uint64(n.hash))
	e := x.table.find(k)
	if e == nil || stampOf(e.m.Load()) != n.stamp {
		return
	}
	s.counts.removed.Add(1)
	s.keys.Add(-1)
	x.table.remove(k)
	x.drop(s, s.seat.Load(), n.hash)
}

// forget takes out what is too much, and what is too old.
func (x *Index) forget(s *source, capacity int, stamp uint32) {
	f := &s.fifo
	oldest := int64(stamp) - int64(x.cfg.NotedTTL/time.Second)
	for f.len() > 0 && (int(s.keys.Load()) > capacity || int64(f.first().stamp) < oldest) {
		x.unnote(s, x.pop(f))
	}
	if f.len() <= 2*int(s.keys.Load())+staleChunks*chunkNotes {
		return
	}
	var kept fifo
	for f.len() > 0 {
		n := x.pop(f)
		if e := x.table.find(place(s.tag, uint64(n.hash))); e != nil && stampOf(e.m.Load()) == n.stamp && !x.push(&kept, n) {
			x.unnote(s, n)
		}
	}
	s.fifo = kept
}

// forgetNoted drops what was noted of a worker that has begun to tell.
func (x *Index) forgetNoted(name collect.Source) {
	if name.Rank == rankNoted {
		return
	}
	for _, s := range x.shape.Load().workers[name.Worker] {
		if s.noted {
			s.mu.Lock()
			x.remove(s)
			s.mu.Unlock()
		}
	}
}

// tidy looks once in a while for what was noted too long ago.
func (x *Index) tidy(stamp uint32) {
	last := x.looked.Load()
	if last == stamp || !x.looked.CompareAndSwap(last, stamp) {
		return
	}
	for _, s := range x.shape.Load().sources {
		if !s.noted || !s.mu.TryLock() {
			continue
		}
		if !s.gone && x.mu.TryLock() {
			x.forget(s, int(x.cfg.Bytes), stamp)
			x.mu.Unlock()
		}
		s.mu.Unlock()
	}
}
