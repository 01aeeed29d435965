package cgo

import (
	"errors"
	"fmt"
	"strings"
	"unsafe"
)

// GPU is a device of the CUDA driver.
type GPU struct {
	name    [96]byte
	bus     [16]byte
	UUID    [16]byte
	Memory  uint64 // bytes
	Ordinal int32
	Major   int32 // compute capability
	Minor   int32

	dmaBuf, rdma, rdmaVMM, vmm, unified int32
	RDMAOrdering                        int32 // see Settled
	rdmaFlush, integrated, reserved     int32
}

// Name is what the vendor calls it.
func (g *GPU) Name() string { return text(g.name[:]) }

// Bus is its PCI address as the kernel writes it, 0000:3b:00.0.
func (g *GPU) Bus() string { return strings.ToLower(text(g.bus[:])) }

// DMABuf says whether its memory can be exported for other devices.
func (g *GPU) DMABuf() bool { return g.dmaBuf != 0 }

// RDMA says whether NICs can reach its memory at all, RDMAMapped whether memory that was mapped in segments as well.
func (g *GPU) RDMA() bool { return g.rdma != 0 }

// RDMAMapped see RDMA.
func (g *GPU) RDMAMapped() bool { return g.rdmaVMM != 0 }

// Mapped says whether memory can be mapped in segments.
func (g *GPU) Mapped() bool { return g.vmm != 0 }

// Settled says whether what a NIC wrote to the GPU's memory is seen by its own kernels without a flush.
func (g *GPU) Settled() bool { return g.RDMAOrdering >= 100 }

// Copy is one copy of a batch: addresses of the device or the host, as the kind of the batch says.
type Copy struct{ Dst, Src, Len uint64 }

// CopyKind says which addresses of a batch are the host's.
type CopyKind uint32

// The kinds.
const (
	CopyDevice CopyKind = iota
	CopyToDevice
	CopyToHost
)

// IPCHandle names memory or an event of one process to another on the same host.
type IPCHandle [64]byte

// Pointer is what lies at a device address. Of memory mapped in segments it is the segment.
type Pointer struct {
	Base, Size uint64
	Device     int32
	rdma       int32
	legacy     int32
	reserved   int32
}

// RDMA says whether NICs can reach it.
func (p *Pointer) RDMA() bool { return p.rdma != 0 }

// Shareable says whether an IPC handle can name it: memory mapped in segments has none.
func (p *Pointer) Shareable() bool { return p.legacy != 0 }

// C's structs have the same sizes: cuda_lib.c.
var (
	_ [184]byte = [unsafe.Sizeof(GPU{})]byte{}
	_ [24]byte  = [unsafe.Sizeof(Copy{})]byte{}
	_ [64]byte  = [unsafe.Sizeof(IPCHandle{})]byte{}
	_ [32]byte  = [unsafe.Sizeof(Pointer{})]byte{}
)

// ErrNoCUDA is the answer of a build or host without a CUDA driver.
var ErrNoCUDA = errors.New("CUDA is not supported here")

// CUDAError is an error of the driver.
type CUDAError struct {
	Code       int
	Name, Text string
}

// The codes that callers tell apart. LacksFunction is ours: the driver is older than the function.
const (
	LacksFunction      = -1
	CUDAInvalidValue   = 1
	CUDAOutOfMemory    = 2
	CUDANoDevice       = 100
	CUDAInvalidContext = 201
	CUDANotReady       = 600
	CUDANotPermitted   = 800
	CUDANotSupported   = 801
)

func (e *CUDAError) Error() string {
	switch {
	case e.Code == LacksFunction:
		return "the CUDA driver is too old for this: install a newer one (CUDA 11.7 or later)"
	case e.Name == "":
		return fmt.Sprintf("CUDA error %d", e.Code)
	case e.Text == "":
		return e.Name
	}
	return e.Name + ": " + e.Text
}

// Is makes what the driver or the device cannot do ErrNotSupported.
func (e *CUDAError) Is(target error) bool {
	return target == ErrNotSupported && (e.Code == LacksFunction || e.Code == CUDANotSupported)
}

// GPUHandles counts what exists in this process.
type GPUHandles struct {
	Contexts, Memory, Host, Segments, Shared, Streams, Events int64
}

// Total is how many there are.
func (h GPUHandles) Total() int64 {
	return h.Contexts + h.Memory + h.Host + h.Segments + h.Shared + h.Streams + h.Events
}
