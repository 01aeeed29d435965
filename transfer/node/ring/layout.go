// Package ring is the memory that an engine shares with its node daemon for submissions and completions, and the queues
// in it: one producer and one consumer each, as io_uring's. docs/protocol.md has the layout byte for byte. The package
// knows entries and doorbells, and nothing of leases.
//
// Neither side trusts the other's words: a queue keeps its own position in private memory, looks at the other's as a
// number that may be anything, and copies an entry out before looking into it.
package ring

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// The header page. Words that one side writes have a cache line of their own.
const (
	HeaderSize = 4096
	EntrySize  = 64
	Magic      = "HRR1"

	offVersion     = 4
	offSubmissions = 8
	offCompletions = 12
	offSubHead     = 64  // written by the daemon
	offSubTail     = 128 // written by the engine
	offDaemonFlags = 192
	offCompHead    = 256 // written by the engine
	offCompTail    = 320 // written by the daemon
	offEngineFlags = 384
)

// Version of the layout.
const Version = 1

// Limits of a queue, whose size is a power of two.
const (
	EntriesMin = 2
	EntriesMax = 4096
)

// flagWakeup in a side's flags says that it sleeps, or is about to, and wants its doorbell rung.
const flagWakeup = 1

// KindPush is the only kind of entry: what was asked for, and what a completion is about.
const KindPush = 1

// UnitsMax is how many unit ranges an entry holds. Longer pushes go as messages.
const UnitsMax = 2

// ErrBroken says that the other side wrote what no queue can hold.
var ErrBroken = errors.New("ring is broken")

var le = binary.LittleEndian

// Unit is Count blocks of one layer, from the request's block First on, of all of the lease's regions or of one.
type Unit struct{ Layer, First, Count, Shard uint32 }

// Submission is a push: 1 to UnitsMax unit ranges of a lease are complete in memory.
type Submission struct {
	Lease uint64
	Seq   uint64
	Units []Unit
}

// Put writes the entry.
func (s *Submission) Put(e *[EntrySize]byte) {
	clear(e[:])
	le.PutUint16(e[0:], KindPush)
	le.PutUint16(e[2:], uint16(len(s.Units)))
	le.PutUint64(e[8:], s.Lease)
	le.PutUint64(e[16:], s.Seq)
	for i, u := range s.Units {
		b := e[24+16*i:]
		le.PutUint32(b, u.Layer)
		le.PutUint32(b[4:], u.First)
		le.PutUint32(b[8:], u.Count)
		le.PutUint32(b[12:], u.Shard)
	}
}

// Parse reads an entry, into the slice that s has. It accepts exactly what Put writes.
func (s *Submission) Parse(e *[EntrySize]byte) error {
	kind, n := le.Uint16(e[0:]), int(le.Uint16(e[2:]))
	if kind != KindPush || n < 1 || n > UnitsMax {
		return fmt.Errorf("%w: submission of kind %d with %d unit ranges", ErrBroken, kind, n)
	}
	s.Lease, s.Seq, s.Units = le.Uint64(e[8:]), le.Uint64(e[16:]), s.Units[:0]
	rest := e[24:]
	for range n {
		s.Units = append(s.Units, Unit{le.Uint32(rest), le.Uint32(rest[4:]), le.Uint32(rest[8:]), le.Uint32(rest[12:])})
		rest = rest[16:]
	}
	if le.Uint32(e[4:]) != 0 || !zero(rest) {
		return fmt.Errorf("%w: reserved bytes of a submission are not 0", ErrBroken)
	}
	return nil
}

// Completion answers a submission: all of its units have landed (status 0), or it was refused (status: why).
type Completion struct {
	Status uint16
	After  uint32 // events sent to the engine before this, modulo 2^32
	Lease  uint64
	Seq    uint64
	Nonce  [16]byte
}

// Put writes the entry of a completion.
func (c *Completion) Put(e *[EntrySize]byte) {
	clear(e[:])
	le.PutUint16(e[0:], KindPush)
	le.PutUint16(e[2:], c.Status)
	le.PutUint32(e[4:], c.After)
	le.PutUint64(e[8:], c.Lease)
	le.PutUint64(e[16:], c.Seq)
	copy(e[24:], c.Nonce[:])
}

// Parse reads an entry. It accepts exactly what Put writes.
func (c *Completion) Parse(e *[EntrySize]byte) error {
	kind := le.Uint16(e[0:])
	c.Status, c.After = le.Uint16(e[2:]), le.Uint32(e[4:])
	c.Lease, c.Seq = le.Uint64(e[8:]), le.Uint64(e[16:])
	copy(c.Nonce[:], e[24:])
	if kind != KindPush || !zero(e[40:]) {
		return fmt.Errorf("%w: completion of kind %d", ErrBroken, kind)
	}
	return nil
}

func zero(b []byte) bool {
	for _, v := range b {
		if v != 0 {
			return false
		}
	}
	return true
}
