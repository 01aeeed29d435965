package collect

// Source is one publisher of KV events: a data-parallel rank of one process of a worker.
type Source struct {
	Worker      string
	Incarnation string
	Rank        int
}

// Key is what an engine calls a block's content, the low 64 bits of its hash. It means something to its own engine
// alone: another one, or the same one with other settings, has another key for the same tokens.
type Key uint64

// Stored says that an engine has blocks. It is good during the call only.
type Stored struct {
	Keys        []Key // one a block, each the next one's parent
	Parent      Key   // of the first
	HasParent   bool  // else the first one begins a prompt
	Tokens      []uint32
	BlockTokens uint32
	Extra       [][]byte // for each block what its hash covers besides, as it came (msgpack); nil for nothing
	LoRA        string
	LoRAID      int64  // older engines say only this; -1: not said
	Medium      string // GPU, CPU, STORAGE
	Group       uint16 // of the KV cache's groups
	Spec        string // kind of attention that the group serves, as full_attention; "" for not said
}

// Removed says that an engine let blocks go, each of them once: it may have the same content in another block.
// It is good during the call only.
type Removed struct {
	Keys   []Key
	Medium string
	Group  uint16
}

// MediumRank orders what an event names as Medium, the nearest to the engine first. Those that are not known are one.
func MediumRank(name string) uint16 {
	switch name {
	case "", "GPU":
		return 0
	case "CPU":
		return 1
	case "STORAGE":
		return 2
	}
	return 3
}

// Sink takes what engines say of their blocks, in order. Calls for one source come one at a time; they must not block.
type Sink interface {
	Stored(s Source, b *Stored)
	Removed(s Source, b *Removed)
	// Cleared: the engine has no block any more.
	Cleared(s Source)
	// Reset: what was heard of the source is void, because the engine is another one, has gone, or events were missed that
	// cannot be had again. Not to be taken for Cleared: it may have blocks, and what is heard of these from now on is right.
	Reset(s Source, why string)
	// Lost: so many batches of events went unheard, 0 for nobody knows how many. Behind a Reset, or before anything else: the
	// engine has blocks that no one will hear of. What is heard is right, and not all.
	Lost(s Source, batches uint64)
}

// Batches is what a Sink may be besides. It hears the numbers of batches, which only mean something for one process of
// the engine, and can pass over those that it knows of already.
type Batches interface {
	// Begin: a batch comes, of this number, and with this hash of its bytes. On false it is kept from this sink.
	Begin(s Source, seq, sum uint64) bool
	// End: all that could be read of a batch was told.
	End(s Source, seq, sum uint64)
}

// sinks passes on to several.
type sinks []Sink

// wanting are those of all that a batch is for.
func (x sinks) wanting(s Source, seq, sum uint64, into sinks) sinks {
	for _, k := range x {
		if b, ok := k.(Batches); !ok || b.Begin(s, seq, sum) {
			into = append(into, k)
		}
	}
	return into
}

func (x sinks) end(s Source, seq, sum uint64) {
	for _, k := range x {
		if b, ok := k.(Batches); ok {
			b.End(s, seq, sum)
		}
	}
}

func (x sinks) Stored(s Source, b *Stored) {
	for _, k := range x {
		k.Stored(s, b)
	}
}

func (x sinks) Removed(s Source, b *Removed) {
	for _, k := range x {
		k.Removed(s, b)
	}
}

func (x sinks) Cleared(s Source) {
	for _, k := range x {
		k.Cleared(s)
	}
}

func (x sinks) Reset(s Source, why string) {
	for _, k := range x {
		k.Reset(s, why)
	}
}

func (x sinks) Lost(s Source, batches uint64) {
	for _, k := range x {
		k.Lost(s, batches)
	}
}
