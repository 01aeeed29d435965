package cgo

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
)

// cudaLibrary is the driver's, which comes with the kernel module and not with a toolkit.
const cudaLibrary = "libcuda.so.1"

// CUDA is the opened driver. Its methods, and those of what it makes, may be called from any goroutine.
type CUDA struct{ c object }

// CUDAState is how far CUDA can be used.
type CUDAState int

// The states, from what this build lacks to what the host has. CUDAFailed alone is not conclusive.
const (
	CUDANotBuilt  CUDAState = iota // built without cgo
	CUDANoLibrary                  // libcuda.so.1 cannot be opened on this host
	CUDAFailed                     // the driver is there and could not be started
	CUDAListed                     // Devices holds what there is, possibly nothing
)

// GPUs is what a probe found.
type GPUs struct {
	State   CUDAState
	Version int // of CUDA that the driver is for, as 12040
	Devices []GPU
	Code    int    // the driver's error, where it could not be started
	Detail  string // what the dynamic linker or the driver said
}

// Err is nil when there is a device to use, else ErrNoCUDA or why it is not known, with the reason.
func (g GPUs) Err() error {
	switch {
	case g.State == CUDAFailed && g.Code != CUDANoDevice:
		return errors.New("start the CUDA driver: " + g.Detail)
	case g.State == CUDAListed && len(g.Devices) > 0:
		return nil
	}
	return fmt.Errorf("%w: %s", ErrNoCUDA, g.Reason())
}

// Reason says in a few words what is missing, "" when there is a device.
func (g GPUs) Reason() string {
	switch {
	case g.State == CUDANotBuilt:
		return "built without cgo"
	case g.State == CUDANoLibrary:
		return cudaLibrary + " cannot be opened: " + g.Detail
	case g.State == CUDAFailed && g.Code != CUDANoDevice:
		return g.Detail
	case len(g.Devices) == 0:
		return "no GPU"
	}
	return ""
}

// Remedy says what to do about it, "" when nothing is to be done.
func (g GPUs) Remedy() string {
	switch {
	case g.State == CUDANotBuilt:
		return "install a C compiler (apt-get install gcc libc6-dev) and build with CGO_ENABLED=1"
	case g.State == CUDANoLibrary:
		return "install the NVIDIA driver, or in a container run it with the NVIDIA container toolkit (--gpus all)"
	case g.State == CUDAFailed && g.Code != CUDANoDevice:
		return "run nvidia-smi: the kernel module may not be loaded, or be of another version than the library (reboot after an upgrade), or need nvidia-fabricmanager"
	case len(g.Devices) == 0:
		return "none is needed for host memory; else check CUDA_VISIBLE_DEVICES and nvidia-smi"
	}
	return ""
}

// PeerHint says how NICs can reach the memory of a GPU, and what to do where they cannot. The daemon registers memory that
// belongs to the engines' processes, so it needs dma-buf: nvidia-peermem serves only the process that owns the memory.
func (g *GPU) PeerHint(kernelModules string) (reason, remedy string) {
	switch {
	case g.DMABuf() && g.RDMA():
		return "NICs reach its memory by dma-buf", ""
	case !g.RDMA():
		return "NICs cannot reach its memory (GPUDirect RDMA is not supported)", "engines stage over pinned host memory"
	}
	reason = "its driver exports no dma-buf"
	if strings.Contains(kernelModules, "nvidia_peermem") {
		reason += ", and nvidia-peermem, which is loaded, serves only the process that owns the memory"
	}
	return reason, "install the driver's open kernel modules (R515 or later; Turing or later; kernel 5.12 or later); else engines stage over pinned host memory"
}

// NUMA is the node that a PCI device is attached to, -1 where the host does not say.
func (g *GPU) NUMA() int { return pciNUMA("/sys/bus/pci/devices", g.Bus()) }

func pciNUMA(root, bus string) int {
	b, err := os.ReadFile(filepath.Join(root, bus, "numa_node"))
	if err == nil {
		if n, err := strconv.Atoi(strings.TrimSpace(string(b))); err == nil {
			return n
		}
	}
	return -1
}

// ProbeCUDA looks for GPUs. It makes no context on them.
func ProbeCUDA() GPUs { return probeCUDA(cudaLibrary) }

func probeCUDA(library string) (g GPUs) {
	d, state, code, detail := cudaOpen(library)
	if g = (GPUs{State: state, Code: code, Detail: detail}); state != CUDAListed {
		return g
	}
	var err error
	if g.Version, err = d.Version(); err == nil {
		g.Devices, err = d.GPUs()
	}
	if err != nil {
		g = GPUs{State: CUDAFailed, Version: g.Version, Detail: err.Error()}
		var ce *CUDAError
		if errors.As(err, &ce) {
			g.Code = ce.Code
		}
	}
	return g
}

var opened = struct {
	sync.Mutex
	by map[string]*CUDA
}{by: make(map[string]*CUDA)}

// LoadCUDA opens the driver, once; library is for another one than libcuda.so.1.
func LoadCUDA(library string) (*CUDA, error) {
	if library == "" {
		library = cudaLibrary
	}
	opened.Lock()
	defer opened.Unlock()
	if d := opened.by[library]; d != nil {
		return d, nil
	}
	d, state, code, detail := cudaOpen(library)
	if state != CUDAListed {
		g := GPUs{State: state, Code: code, Detail: detail}
		return nil, fmt.Errorf("%w; %s", g.Err(), g.Remedy())
	}
	opened.by[library] = d
	return d, nil
}

// check makes an error of a result; nil of 0.
func (d *CUDA) check(code int, format string, args ...any) error {
	if code == 0 {
		return nil
	}
	e := &CUDAError{Code: code}
	if code > 0 {
		e.Name, e.Text = cudaWords(d.c, code)
	}
	return fmt.Errorf("%s: %w", fmt.Sprintf(format, args...), e)
}

// Version is the newest CUDA that the driver is for, as 12040.
func (d *CUDA) Version() (int, error) {
	v, r := cudaVersion(d.c)
	return v, d.check(r, "ask for the CUDA driver's version")
}

// GPUs lists the devices; CUDA_VISIBLE_DEVICES may hide some.
func (d *CUDA) GPUs() ([]GPU, error) {
	n, r := cudaCount(d.c)
	if r != 0 {
		return nil, d.check(r, "count GPUs")
	}
	gpus := make([]GPU, n)
	for i := range gpus {
		if r := cudaDevice(d.c, i, &gpus[i]); r != 0 {
			return nil, d.check(r, "query GPU %d", i)
		}
	}
	return gpus, nil
}

var gpuLive struct {
	contexts, memory, host, segments, shared, streams, events atomic.Int64
}

// LiveGPU counts the objects that exist in this process.
func LiveGPU() GPUHandles {
	l := &gpuLive
	return GPUHandles{
		Contexts: l.contexts.Load(), Memory: l.memory.Load(), Host: l.host.Load(), Segments: l.segments.Load(), Shared: l.shared.Load(),
		Streams: l.streams.Load(), Events: l.events.Load(),
	}
}

// GPUContext is what memory and streams of a device belong to: the device's primary context, the one that the CUDA runtime
// and the frameworks built on it use.
type GPUContext struct {
	d      *CUDA
	c      object
	Device int
	closed atomic.Bool
}

// Context takes the primary context of a device, or shares it with who has taken it.
func (d *CUDA) Context(device int) (*GPUContext, error) {
	c, r := cudaRetain(d.c, device)
	if r != 0 {
		return nil, d.check(r, "take the context of GPU %d", device)
	}
	gpuLive.contexts.Add(1)
	return &GPUContext{d: d, c: c, Device: device}, nil
}

// Close gives the context back; what was made in it must be closed before.
func (x *GPUContext) Close() error {
	if x == nil || x.closed.Swap(true) {
		return nil
	}
	gpuLive.contexts.Add(-1)
	return x.d.check(cudaRelease(x.d.c, x.Device), "give the context of GPU %d back", x.Device)
}

func (x *GPUContext) check(code int, format string, args ...any) error {
	if code == 0 {
		return nil
	}
	return x.d.check(code, "%s on GPU %d", fmt.Sprintf(format, args...), x.Device)
}
