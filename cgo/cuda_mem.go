package cgo

import (
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"syscall"
	"unsafe"
)

// counted counts what was made, if it was.
func (x *GPUContext) counted(n *atomic.Int64, by int64, code int, format string, args ...any) error {
	if code == 0 {
		n.Add(by)
	}
	return x.check(code, format, args...)
}

// Alloc allocates device memory.
func (x *GPUContext) Alloc(bytes uint64) (addr uint64, err error) {
	addr, r := cudaAlloc(x.d.c, x.c, bytes)
	return addr, x.counted(&gpuLive.memory, 1, r, "allocate %d bytes", bytes)
}

// Free frees what Alloc gave.
func (x *GPUContext) Free(addr uint64) error {
	return x.counted(&gpuLive.memory, -1, cudaFree(x.d.c, x.c, addr), "free memory at %#x", addr)
}

// Fill sets every byte, and returns when they are set.
func (x *GPUContext) Fill(addr uint64, b byte, bytes uint64) error {
	return x.check(cudaFill(x.d.c, x.c, addr, b, bytes), "fill %d bytes at %#x", bytes, addr)
}

// AllocHost allocates pinned host memory.
func (x *GPUContext) AllocHost(bytes int) ([]byte, error) {
	p, r := cudaHostAlloc(x.d.c, x.c, uint64(bytes))
	if err := x.counted(&gpuLive.host, 1, r, "allocate %d bytes of pinned host memory", bytes); err != nil {
		return nil, err
	}
	return unsafe.Slice((*byte)(p), bytes), nil
}

// FreeHost frees what AllocHost gave.
func (x *GPUContext) FreeHost(mem []byte) error {
	return x.counted(&gpuLive.host, -1, cudaHostFree(x.d.c, x.c, memAddr(mem)), "free pinned host memory")
}

// Pin makes mapped memory, as of a memfd, such that the device copies to and from it by itself. It must not be the Go heap,
// and is to be unpinned before it is unmapped.
func (x *GPUContext) Pin(mem []byte) error {
	return x.counted(&gpuLive.host, 1, cudaHostRegister(x.d.c, x.c, memAddr(mem), uint64(len(mem))), "pin %d bytes of host memory (is the limit of locked memory, ulimit -l, high enough?)", len(mem))
}

// Unpin undoes Pin.
func (x *GPUContext) Unpin(mem []byte) error {
	return x.counted(&gpuLive.host, -1, cudaHostUnregister(x.d.c, x.c, memAddr(mem)), "unpin host memory")
}

func memAddr(mem []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(mem)))) }

// Segments is memory that was mapped piece by piece into one range of addresses, as PyTorch's expandable segments are.
type Segments struct {
	x                     *GPUContext
	Addr, Size            uint64
	Piece                 uint64 // of one segment
	mapped                uint64
	reserved, rdmaCapable bool
}

// MapSegments reserves count segments of at least piece bytes and maps them.
func (x *GPUContext) MapSegments(piece uint64, count int, rdma bool) (_ *Segments, err error) {
	granule, r := cudaGranularity(x.d.c, x.Device)
	if r != 0 {
		return nil, x.check(r, "ask for the granularity of mappings")
	}
	piece = (max(piece, 1) + granule - 1) / granule * granule
	s := &Segments{x: x, Piece: piece, Size: piece * uint64(count), rdmaCapable: rdma}
	if s.Addr, r = cudaReserve(x.d.c, x.c, s.Size); r != 0 {
		return nil, x.check(r, "reserve %d bytes of addresses", s.Size)
	}
	s.reserved = true
	gpuLive.segments.Add(1)
	for s.mapped < s.Size {
		if r := cudaMap(x.d.c, x.c, x.Device, s.Addr+s.mapped, piece, rdma); r != 0 {
			return nil, errors.Join(x.check(r, "map a segment of %d bytes", piece), s.Close())
		}
		s.mapped += piece
	}
	return s, nil
}

// Close unmaps the memory.
func (s *Segments) Close() error {
	var errs []error
	for ; s.mapped > 0; s.mapped -= s.Piece {
		errs = append(errs, s.x.check(cudaUnmap(s.x.d.c, s.x.c, s.Addr+s.mapped-s.Piece, s.Piece), "unmap a segment"))
	}
	if s.reserved {
		s.reserved = false
		errs = append(errs, s.x.counted(&gpuLive.segments, -1, cudaUnreserve(s.x.d.c, s.x.c, s.Addr, s.Size), "give addresses back"))
	}
	return errors.Join(errs...)
}

// Pointer says what lies at a device address.
func (x *GPUContext) Pointer(addr uint64) (p Pointer, err error) {
	err = x.check(cudaPointer(x.d.c, x.c, addr, &p), "look at address %#x", addr)
	return p, err
}

// DMABuf is device memory as a descriptor that a NIC's driver takes. The memory begins at Offset of it.
type DMABuf struct {
	FD                 int
	Offset, Addr, Size uint64
}

// Close closes the descriptor. Who registered it keeps the memory until that is undone.
func (b *DMABuf) Close() error {
	if b.FD < 0 {
		return nil
	}
	fd := b.FD
	b.FD = -1
	return syscall.Close(fd)
}

// segmentsMax bounds how many segments of mapped memory are looked at: more is no KV cache.
const segmentsMax = 1 << 16

// Export gives size bytes of device memory from addr on as descriptors, in order and without gaps: one for all of it,
// else, where the driver refuses memory of several segments as one, one for each segment.
//
// The range is that of the allocations it lies in, since a driver takes whole pages of whole allocations.
// cuMemGetAddressRange gives for mapped memory the segment alone, so all of them are asked for.
func (x *GPUContext) Export(addr, size uint64) ([]DMABuf, error) {
	segments, err := x.segments(addr, size)
	if err != nil {
		return nil, err
	}
	last := segments[len(segments)-1]
	whole := Pointer{Base: segments[0].Base}
	whole.Size = last.Base + last.Size - whole.Base
	// Not every kind of memory has this attribute; where it has, the engine's synchronous copies are done before a NIC reads.
	_ = cudaSyncMemops(x.d.c, x.c, addr)
	b, err := x.export(whole, addr, size)
	if err == nil {
		return []DMABuf{b}, nil
	}
	if len(segments) == 1 || errors.Is(err, ErrNotSupported) {
		return nil, err
	}
	var out []DMABuf
	for end := addr + size; addr < end; addr += b.Size {
		s := segments[len(out)]
		if b, err = x.export(s, addr, min(end, s.Base+s.Size)-addr); err != nil {
			for i := range out {
				err = errors.Join(err, out[i].Close())
			}
			return nil, err
		}
		out = append(out, b)
	}
	return out, nil
}

// segments lists the allocations that a range lies in.
func (x *GPUContext) segments(addr, size uint64) (all []Pointer, err error) {
	if size == 0 || addr+size < addr {
		return nil, fmt.Errorf("export %d bytes at %#x: %w", size, addr, syscall.EINVAL)
	}
	for at := addr; at < addr+size; {
		p, err := x.Pointer(at)
		if err != nil {
			return nil, fmt.Errorf("%w: is it memory of this GPU, all of it mapped?", err)
		}
		if p.Base > at || p.Base+p.Size <= at || len(all) == segmentsMax || len(all) > 0 && p.Device != all[0].Device {
			return nil, fmt.Errorf("export %d bytes at %#x: at %#x lies %+v, which does not go on from there: %w", size, addr, at, p, syscall.EINVAL)
		}
		all = append(all, p)
		at = p.Base + p.Size
	}
	return all, nil
}

func (x *GPUContext) export(p Pointer, addr, size uint64) (DMABuf, error) {
	page := uint64(os.Getpagesize())
	start := p.Base &^ (page - 1)
	end := (p.Base + p.Size + page - 1) &^ (page - 1)
	fd, r := cudaExport(x.d.c, x.c, start, end-start, 0)
	switch r {
	case 0:
		syscall.CloseOnExec(fd)
		return DMABuf{FD: fd, Offset: addr - start, Addr: addr, Size: size}, nil
	case CUDANotSupported, LacksFunction:
		return DMABuf{FD: -1}, x.check(r, "export %d bytes as a dma-buf (install the driver's open kernel modules, or stage over host memory)", end-start)
	}
	return DMABuf{FD: -1}, x.check(r, "export %d bytes at %#x as a dma-buf", end-start, start)
}

// FlushWrites returns when what NICs wrote to the device's memory is seen by its kernels. Where GPU.Settled it is so anyway.
func (x *GPUContext) FlushWrites() error {
	return x.check(cudaFlushRDMA(x.d.c, x.c), "flush what NICs wrote")
}

// ShareMemory names an allocation to other processes on the host; addr is its base.
func (x *GPUContext) ShareMemory(addr uint64) (h IPCHandle, err error) {
	err = x.check(cudaIPCGet(x.d.c, x.c, addr, &h), "share memory at %#x", addr)
	return h, err
}

// OpenMemory maps memory that another process shared. It must be closed before that one frees it.
func (x *GPUContext) OpenMemory(h IPCHandle) (addr uint64, err error) {
	addr, r := cudaIPCOpen(x.d.c, x.c, &h)
	return addr, x.counted(&gpuLive.shared, 1, r, "open memory of another process")
}

// CloseMemory undoes OpenMemory.
func (x *GPUContext) CloseMemory(addr uint64) error {
	return x.counted(&gpuLive.shared, -1, cudaIPCClose(x.d.c, x.c, addr), "close memory of another process")
}
