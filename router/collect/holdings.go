package collect

import "sync"

// heldMax bounds the contents that are kept account of for one source. What is beyond is counted, and not held.
const heldMax = 1 << 20

type blockID struct {
	key    Key
	group  uint16
	medium uint16
}

// held is one content. An engine that computes the same content twice stores it twice and removes it twice.
type held struct{ blocks, tokens uint32 }

// holdings is the set of blocks that one source has, as far as its events say. It is a Sink for that source.
type holdings struct {
	mu                                       sync.Mutex // guards what follows
	set                                      map[blockID]held
	blocks, tokens                           int64
	stored, removed, cleared, unheld, beyond uint64
}

var _ Sink = (*holdings)(nil)

func (h *holdings) Stored(_ Source, b *Stored) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.set == nil {
		h.set = make(map[blockID]held)
	}
	m := MediumRank(b.Medium)
	for _, k := range b.Keys {
		h.stored++
		id := blockID{k, b.Group, m}
		x, ok := h.set[id]
		if !ok && len(h.set) >= heldMax {
			h.beyond++
			continue
		}
		if !ok {
			x.tokens = b.BlockTokens
		}
		x.blocks++
		h.set[id] = x
		h.blocks++
		h.tokens += int64(x.tokens)
	}
}

func (h *holdings) Removed(_ Source, b *Removed) {
	h.mu.Lock()
	defer h.mu.Unlock()
	m := MediumRank(b.Medium)
	for _, k := range b.Keys {
		h.removed++
		id := blockID{k, b.Group, m}
		x, ok := h.set[id]
		if !ok {
			h.unheld++
			continue
		}
		h.blocks--
		h.tokens -= int64(x.tokens)
		if x.blocks--; x.blocks == 0 {
			delete(h.set, id)
		} else {
			h.set[id] = x
		}
	}
}

func (h *holdings) Cleared(Source) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.cleared++
	h.set, h.blocks, h.tokens = nil, 0, 0
}

func (h *holdings) Reset(Source, string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.set, h.blocks, h.tokens = nil, 0, 0
}

func (h *holdings) Lost(Source, uint64) {}
