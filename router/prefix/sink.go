package prefix

import (
	"math"

	"github.com/headrace/headrace/router/collect"
)

const (
	mediumNone = math.MaxUint16
	groupNone  = math.MaxUint16
)

// full tells whether blocks of a group are all needed for a prefix to be of use. An engine keeps those of a sliding window, or
// a state, only while they can be of use: that it has full attention's does not promise these, and it mostly does.
func full(spec string) bool {
	switch spec {
	case "", "full_attention", "mla_attention", "sink_full_attention", "unknown":
		return true
	}
	return false
}

// Stored implements collect.Sink.
func (x *Index) Stored(name collect.Source, b *collect.Stored) {
	if len(b.Keys) == 0 {
		return
	}
	s := x.told(name)
	if s == nil {
		return
	}
	defer s.mu.Unlock()
	s.counts.events.Add(1)
	if !x.counted(s, b) {
		s.counts.ignored.Add(uint64(len(b.Keys)))
		return
	}
	x.hear(s)
	s.counts.stored.Add(uint64(len(b.Keys)))
	x.mu.Lock()
	defer x.mu.Unlock()
	x.store(s, s.seat.Load(), b)
}

// hear notes that a source tells what it has: what was noted of its worker counts no more. The caller holds s.mu.
func (x *Index) hear(s *source) {
	if !s.heard.Swap(true) {
		x.forgetNoted(s.name)
	}
}

// counted tells whether blocks are of the kind that a request can use, and takes a better kind for the source's own.
//
// Of a source only the blocks in the nearest medium that it has ever named count. An engine that computes on a CPU may say so,
// or GPU; what was moved from a GPU to a CPU's memory must come back before it is of use.
func (x *Index) counted(s *source, b *collect.Stored) bool {
	medium, at := collect.MediumRank(b.Medium), s.seat.Load()
	switch {
	case !full(b.Spec):
		return false
	case b.BlockTokens == 0 || b.BlockTokens > blockTokensMax || medium > s.medium:
		return false
	case medium == s.medium && b.Group > s.groupOf:
		return false // every group has what a request needs: one is enough
	case medium == s.medium && b.Group == s.groupOf && at != nil && b.BlockTokens < at.plane.blockTokens:
		return false // a part of a block, kept for what is finer than blocks
	case medium == s.medium && b.Group == s.groupOf && at != nil && b.BlockTokens == at.plane.blockTokens:
		return true
	}
	x.clear(s)
	s.medium, s.groupOf = medium, b.Group
	if at != nil && at.plane.blockTokens == b.BlockTokens {
		return true
	}
	x.rise(s)
	return x.sit(s, b.BlockTokens) == nil
}

// store takes blocks in. Where the parent is not known, or the tokens are not all there, nothing is known of a block but
// that it may have been told of before: its key covers what is before it.
func (x *Index) store(s *source, at *seat, b *collect.Stored) {
	n := int(b.BlockTokens)
	whole := len(b.Tokens) == len(b.Keys)*n
	parent, depth, stamp, known := x.parent(s, at, b)
	for i, key := range b.Keys {
		if i%stripMax == 0 {
			x.touch(s, at, b, i, parent, known, whole)
		}
		k := place(s.tag, uint64(key))
		var before entry
		if e := x.table.find(k); e != nil {
			before = e.entry()
		}
		h, right := Hash(before.v), before.k != 0
		if known && whole {
			var extra uint64
			var err error
			if i < len(b.Extra) {
				extra, err = extraOf(b.Extra[i], b.LoRA)
			}
			h, right = chain(parent, x.sums[i%stripMax], extra), err == nil
		}
		if !right {
			s.counts.orphaned.Add(1)
			known = false
			continue
		}
		switch {
		case before.k == 0:
			x.hold(s, at, h, depth, stamp, false)
			x.setKey(s, k, h, 1, depth)
		case Hash(before.v) == h:
			depth = keyDepth(before.m)
			x.hold(s, at, h, depth, stamp, true)
			x.setKey(s, k, h, keyCount(before.m)+1, depth)
		default: // the key has another meaning now
			s.counts.changed.Add(1)
			x.drop(s, at, Hash(before.v))
			x.hold(s, at, h, depth, stamp, false)
			x.setKey(s, k, h, 1, depth)
		}
		parent, known, depth = h, true, depth+1
	}
}

// touch reads where the blocks from i on are to go, so that the memory is at hand when it is their turn: these loads do not
// wait for each other, those in store do. It sums the tokens up, too.
func (x *Index) touch(s *source, at *seat, b *collect.Stored, i int, parent Hash, known, whole bool) {
	n := int(b.BlockTokens)
	var touched uint64
	for j, key := range b.Keys[i:min(i+stripMax, len(b.Keys))] {
		k := place(s.tag, uint64(key))
		touched += x.table.segment(k).slots[home(k)].k.Load()
		if !whole {
			continue
		}
		x.sums[j] = sum(b.Tokens[(i+j)*n : (i+j+1)*n])
		if !known {
			continue
		}
		var extra uint64
		if i+j < len(b.Extra) {
			extra, _ = extraOf(b.Extra[i+j], b.LoRA)
		}
		parent = chain(parent, x.sums[j], extra)
		k = at.plane.place(parent)
		touched += x.table.segment(k).slots[home(k)].k.Load()
	}
	x.touched += touched
}

// parent is what the first of blocks hangs below, how deep they are, and the stamp they get: their parent's, since nobody
// can have looked for them later. So what is used goes with what it hangs on, and never before.
func (x *Index) parent(s *source, at *seat, b *collect.Stored) (h Hash, depth, stamp uint32, known bool) {
	stamp = x.stamp()
	if !b.HasParent {
		if b.LoRA == "" && b.LoRAID >= 0 {
			return rootOfNumber(b.LoRAID), 0, stamp, true
		}
		return rootOf(b.LoRA), 0, stamp, true
	}
	e := x.table.find(place(s.tag, uint64(b.Parent)))
	if e == nil {
		return 0, 0, stamp, false
	}
	h, depth = Hash(e.v.Load()), keyDepth(e.m.Load())+1
	if c := x.table.find(at.plane.place(h)); c != nil {
		stamp = stampOf(c.m.Load())
	}
	return h, depth, stamp, true
}

// hold notes that s has a content. again: no further key of s stands for it.
//
// What it puts in may drive out anything else, so it comes before the key's own entry: a content without a key would
// stay for good.
func (x *Index) hold(s *source, at *seat, h Hash, depth, stamp uint32, again bool) {
	k := at.plane.place(h)
	c := x.table.find(k)
	switch {
	case c == nil:
		x.table.insert(entry{k, at.bit, contentMeta(at.plane.id, depth, stamp)})
	case c.v.Load()&at.bit == 0:
		c.v.Store(c.v.Load() | at.bit)
	case !again:
		m := place(s.more, uint64(h))
		if e := x.table.find(m); e != nil {
			e.v.Store(e.v.Load() + 1)
		} else {
			s.mores.Add(1)
			x.table.insert(entry{m, 1, moreMeta(s.id)})
		}
	}
}

// drop takes one key's part in a content away.
func (x *Index) drop(s *source, at *seat, h Hash) {
	if s.mores.Load() > 0 {
		m := place(s.more, uint64(h))
		if e := x.table.find(m); e != nil {
			if v := e.v.Load(); v > 1 {
				e.v.Store(v - 1)
			} else {
				s.mores.Add(-1)
				x.table.remove(m)
			}
			return
		}
	}
	k := at.plane.place(h)
	c := x.table.find(k)
	if c == nil {
		return
	}
	if v := c.v.Load() &^ at.bit; v != 0 {
		c.v.Store(v)
	} else {
		x.table.remove(k)
	}
}

func (x *Index) setKey(s *source, k uint64, h Hash, count, depth uint32) {
	m := keyMeta(s.id, count, depth)
	if e := x.table.find(k); e != nil {
		e.v.Store(uint64(h))
		e.m.Store(m)
		return
	}
	s.keys.Add(1)
	x.table.insert(entry{k, uint64(h), m})
}

// Removed implements collect.Sink. What is not known to be there was not counted, or was driven out.
func (x *Index) Removed(name collect.Source, b *collect.Removed) {
	s := x.told(name)
	if s == nil {
		return
	}
	defer s.mu.Unlock()
	s.counts.events.Add(1)
	at := s.seat.Load()
	if at == nil || collect.MediumRank(b.Medium) != s.medium || b.Group != s.groupOf {
		s.counts.ignored.Add(uint64(len(b.Keys)))
		return
	}
	s.counts.removed.Add(uint64(len(b.Keys)))
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, key := range b.Keys {
		k := place(s.tag, uint64(key))
		e := x.table.find(k)
		if e == nil {
			s.counts.unheld.Add(1)
			continue
		}
		v, m := e.v.Load(), e.m.Load()
		if n := keyCount(m); n > 1 {
			e.m.Store(keyMeta(s.id, n-1, keyDepth(m)))
			continue
		}
		s.keys.Add(-1)
		x.table.remove(k)
		x.drop(s, at, Hash(v))
	}
}

// Cleared implements collect.Sink.
func (x *Index) Cleared(name collect.Source) {
	s := x.told(name)
	if s == nil {
		return
	}
	defer s.mu.Unlock()
	s.counts.cleared.Add(1)
	x.hear(s)
	x.clear(s)
}

// Reset implements collect.Sink. Until the source is heard again the index knows nothing of it, and what is routed to its
// worker counts.
func (x *Index) Reset(name collect.Source, _ string) {
	s := x.entered(name)
	if s == nil {
		return
	}
	defer s.mu.Unlock()
	s.counts.resets.Add(1)
	s.open = false
	s.ended.Broadcast()
	if x.shape.Load().stranger(name) {
		x.remove(s)
		return
	}
	x.void(s)
}

// Lost implements collect.Sink. What is known stays right, and is not all.
func (x *Index) Lost(name collect.Source, batches uint64) {
	s := x.enter(name)
	if s == nil {
		return
	}
	s.counts.lost.Add(max(1, batches))
	s.mu.Unlock()
}
