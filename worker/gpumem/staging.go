package gpumem

import (
	"errors"
	"fmt"
	"sync"
	"unsafe"

	"github.com/headrace/headrace/cgo"
	"github.com/headrace/headrace/internal/memfd"
)

// Staging is pinned host memory to be lent to the daemon in place of a GPU's: what is to be sent is copied into it before
// it is pushed, and what arrived is copied out of it when the lease has settled. Methods may be called from any goroutine.
type Staging struct {
	x    *cgo.GPUContext
	mem  *memfd.Memory
	out  *cgo.Stream // from the device
	in   *cgo.Stream // to the device: the two directions do not wait for each other
	mu   sync.Mutex  // guards closing
	dead bool
}

// NewStaging makes size bytes, in a memfd that is sealed as the daemon wants it.
func NewStaging(x *cgo.GPUContext, size uint64) (_ *Staging, err error) {
	s := &Staging{x: x}
	if s.mem, err = memfd.Create("gpu-staging", size); err != nil {
		return nil, err
	}
	if err := x.Pin(s.mem.Bytes()); err != nil {
		return nil, errors.Join(err, s.mem.Close())
	}
	if s.out, err = x.NewStream(); err == nil {
		s.in, err = x.NewStream()
	}
	if err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// FD is the descriptor to lend; Staging keeps its own.
func (s *Staging) FD() int { return s.mem.FD() }

// Size is how many bytes it has.
func (s *Staging) Size() uint64 { return s.mem.Size() }

// Close waits for the copies under way. No lease may go from or to the memory any more.
func (s *Staging) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.dead {
		return nil
	}
	s.dead = true
	var errs []error
	for _, stream := range []*cgo.Stream{s.in, s.out} {
		if stream != nil {
			errs = append(errs, stream.Sync(), stream.Close())
		}
	}
	return errors.Join(append(errs, s.x.Unpin(s.mem.Bytes()), s.mem.Close())...)
}

// Batch is copies under way.
type Batch struct{ done *cgo.Event }

// Wait waits until they are, and ends the batch. It is to be called once.
func (b *Batch) Wait() error { return errors.Join(b.done.Sync(), b.done.Close()) }

// ToHost copies from the GPU into the staging memory, behind an event of the stream that computes what is copied; nil is none.
// The copies' Dst are offsets into the memory.
func (s *Staging) ToHost(after *cgo.Event, copies []cgo.Copy) (*Batch, error) {
	return s.copy(s.out, cgo.CopyToHost, after, copies)
}

// ToDevice copies from the staging memory to the GPU. The copies' Src are offsets into the memory.
func (s *Staging) ToDevice(after *cgo.Event, copies []cgo.Copy) (*Batch, error) {
	return s.copy(s.in, cgo.CopyToDevice, after, copies)
}

func (s *Staging) copy(stream *cgo.Stream, kind cgo.CopyKind, after *cgo.Event, copies []cgo.Copy) (*Batch, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.dead {
		return nil, errors.New("stage: the memory is closed")
	}
	base := uint64(uintptr(unsafe.Pointer(unsafe.SliceData(s.mem.Bytes()))))
	moved := make([]cgo.Copy, len(copies))
	for i, c := range copies {
		offset := &c.Dst
		if kind == cgo.CopyToDevice {
			offset = &c.Src
		}
		if *offset > s.Size() || c.Len > s.Size()-*offset {
			return nil, fmt.Errorf("%w: %d bytes at %d of %d of staging memory", ErrPlace, c.Len, *offset, s.Size())
		}
		*offset += base
		moved[i] = c
	}
	return queue(s.x, stream, kind, after, moved)
}

// queue puts copies into a stream, behind an event, and an event behind them.
func queue(x *cgo.GPUContext, stream *cgo.Stream, kind cgo.CopyKind, after *cgo.Event, copies []cgo.Copy) (*Batch, error) {
	if after != nil {
		if err := stream.Wait(after); err != nil {
			return nil, err
		}
	}
	done, err := x.NewEvent(cgo.EventOrder)
	if err != nil {
		return nil, err
	}
	if err := stream.Copy(kind, copies); err != nil {
		// Some may be under way: they must not go on when the caller believes that nothing does.
		return nil, errors.Join(err, stream.Sync(), done.Close())
	}
	if err := done.Record(stream); err != nil {
		return nil, errors.Join(err, stream.Sync(), done.Close())
	}
	return &Batch{done}, nil
}
