package ring

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Size is how many bytes a ring takes.
func Size(submissions, completions uint32) uint64 {
	return HeaderSize + EntrySize*(uint64(submissions)+uint64(completions))
}

// CheckSizes says whether queues may have these sizes.
func CheckSizes(submissions, completions uint32) error {
	for _, n := range []uint32{submissions, completions} {
		if n < EntriesMin || n > EntriesMax || n&(n-1) != 0 {
			return fmt.Errorf("queue of %d entries: need a power of two from %d to %d", n, EntriesMin, EntriesMax)
		}
	}
	if completions < 2*submissions {
		return fmt.Errorf("%d completions for %d submissions: need twice as many", completions, submissions)
	}
	return nil
}

// Init writes the header of a new ring; b is Size bytes of zeros.
func Init(b []byte, submissions, completions uint32) error {
	if err := CheckSizes(submissions, completions); err != nil {
		return err
	}
	if uint64(len(b)) < Size(submissions, completions) {
		return fmt.Errorf("ring of %d and %d entries in %d bytes: need %d", submissions, completions, len(b), Size(submissions, completions))
	}
	copy(b, Magic)
	le.PutUint32(b[offVersion:], Version)
	le.PutUint32(b[offSubmissions:], submissions)
	le.PutUint32(b[offCompletions:], completions)
	return nil
}

// Map maps an engine's ring into the daemon. It does not take over fd. What it checks is what keeps the mapping from ever
// faulting: a memfd of ordinary pages that cannot shrink.
func Map(fd int, submissions, completions uint32) ([]byte, error) {
	if err := CheckSizes(submissions, completions); err != nil {
		return nil, err
	}
	seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil {
		return nil, fmt.Errorf("the ring is not a memfd made with MFD_ALLOW_SEALING: get seals: %w", err)
	}
	if seals&unix.F_SEAL_SHRINK == 0 {
		return nil, fmt.Errorf("the ring's memfd may still shrink: add F_SEAL_SHRINK (seals now %#x)", seals)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, fmt.Errorf("stat the ring's memfd: %w", err)
	}
	size := Size(submissions, completions)
	if st.Size < 0 || uint64(st.Size) < size {
		return nil, fmt.Errorf("the ring's memfd has %d bytes, %d and %d entries need %d", st.Size, submissions, completions, size)
	}
	blksize := int64(st.Blksize)           //nolint:unconvert // int32 on arm64
	if blksize > int64(os.Getpagesize()) { // a huge page may be taken out again by a hole, and none be left
		return nil, errors.New("the ring's memfd has huge pages: make it with ordinary ones")
	}
	b, err := unix.Mmap(fd, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map the ring: %w", err)
	}
	if err := checkHeader(b, submissions, completions); err != nil {
		_ = unix.Munmap(b)
		return nil, err
	}
	return b, nil
}

func checkHeader(b []byte, submissions, completions uint32) error {
	var h [16]byte
	copy(h[:], b)
	if string(h[:4]) != Magic || le.Uint32(h[offVersion:]) != Version || le.Uint32(h[offSubmissions:]) != submissions || le.Uint32(h[offCompletions:]) != completions {
		return fmt.Errorf("the ring's header is % x: need magic %q, version %d and the sizes of the message", h[:], Magic, Version)
	}
	if binary.NativeEndian.Uint16([]byte{1, 0}) != 1 {
		return errors.New("rings need a little-endian processor")
	}
	return nil
}

// word is one of the header's counters.
func word(b []byte, off int) *atomic.Uint32 { return (*atomic.Uint32)(unsafe.Pointer(&b[off])) }

// Producer is the putting end of a queue. One goroutine at a time uses it.
type Producer struct {
	size, tail uint32
	headp      *atomic.Uint32
	tailp      *atomic.Uint32
	flags      *atomic.Uint32 // the consumer's
	entries    []byte
}

// Consumer is the taking end of a queue. One goroutine at a time uses it.
type Consumer struct {
	size, head uint32
	headp      *atomic.Uint32
	tailp      *atomic.Uint32
	flags      *atomic.Uint32 // its own
	entries    []byte
}

// EngineEnd gives the engine's ends of a ring.
func EngineEnd(b []byte, submissions, completions uint32) (Producer, Consumer) {
	sub, comp := entries(b, submissions, completions)
	return Producer{size: submissions, headp: word(b, offSubHead), tailp: word(b, offSubTail), flags: word(b, offDaemonFlags), entries: sub},
		Consumer{size: completions, headp: word(b, offCompHead), tailp: word(b, offCompTail), flags: word(b, offEngineFlags), entries: comp}
}

// DaemonEnd gives the daemon's ends of a ring.
func DaemonEnd(b []byte, submissions, completions uint32) (Consumer, Producer) {
	sub, comp := entries(b, submissions, completions)
	return Consumer{size: submissions, headp: word(b, offSubHead), tailp: word(b, offSubTail), flags: word(b, offDaemonFlags), entries: sub},
		Producer{size: completions, headp: word(b, offCompHead), tailp: word(b, offCompTail), flags: word(b, offEngineFlags), entries: comp}
}

func entries(b []byte, submissions, completions uint32) (sub, comp []byte) {
	at := HeaderSize + EntrySize*uint64(submissions)
	return b[HeaderSize:at], b[at : at+EntrySize*uint64(completions)]
}

func slot(entries []byte, size, n uint32) []byte {
	at := (n & (size - 1)) * EntrySize
	return entries[at : at+EntrySize]
}

// Put appends an entry; false means that the queue is full. The entry is published by the store of the tail, which the
// consumer's load of it follows.
func (p *Producer) Put(e *[EntrySize]byte) (bool, error) {
	used := p.tail - p.headp.Load()
	if used > p.size {
		return false, fmt.Errorf("%w: %d of %d entries in use", ErrBroken, used, p.size)
	}
	if used == p.size {
		return false, nil
	}
	copy(slot(p.entries, p.size, p.tail), e[:])
	p.tail++
	p.tailp.Store(p.tail)
	return true, nil
}

// Wanted says that the consumer wants its doorbell rung. It is asked after Put: the store of the tail before it and the
// load of the flag here are ordered (Go's atomics are), as are the consumer's store of the flag and its last look at the
// tail in Sleep, so that one of the two sees the other.
func (p *Producer) Wanted() bool { return p.flags.Load()&flagWakeup != 0 }

// Room is how many entries are free, by what the consumer says.
func (p *Producer) Room() uint32 { return p.size - min(p.tail-p.headp.Load(), p.size) }

// Get takes the oldest entry out; false means that there is none.
func (c *Consumer) Get(e *[EntrySize]byte) (bool, error) {
	if ok, err := c.Peek(e); !ok {
		return false, err
	}
	c.Pop()
	return true, nil
}

// Peek copies the oldest entry and leaves it where it is.
func (c *Consumer) Peek(e *[EntrySize]byte) (bool, error) {
	n := c.tailp.Load() - c.head
	if n == 0 {
		return false, nil
	}
	if n > c.size {
		return false, fmt.Errorf("%w: %d of %d entries in use", ErrBroken, n, c.size)
	}
	copy(e[:], slot(c.entries, c.size, c.head))
	return true, nil
}

// Pop drops the entry that was peeked at.
func (c *Consumer) Pop() {
	c.head++
	c.headp.Store(c.head)
}

// Empty says that there is nothing to take.
func (c *Consumer) Empty() bool { return c.tailp.Load() == c.head }

// Sleep asks for the doorbell and says whether the queue is empty still: then the consumer may wait for it.
func (c *Consumer) Sleep() bool {
	c.flags.Store(flagWakeup)
	return c.Empty()
}

// Awake takes the wish for the doorbell back.
func (c *Consumer) Awake() { c.flags.Store(0) }
