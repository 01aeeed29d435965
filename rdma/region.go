package rdma

import (
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/headrace/headrace/cgo"
	"github.com/headrace/headrace/transfer"
)

// registration is a region as the devices know it.
type registration struct {
	base    uint64
	mrs     []*cgo.MR // by rail
	spot    spot
	near    []float64      // each rail to the region
	windows sync.WaitGroup // those bound to it, and who is about to bind one
}

func (g *registration) close() error {
	var errs []error
	for _, m := range g.mrs {
		if m != nil {
			errs = append(errs, m.Close())
		}
	}
	return errors.Join(errs...)
}

func registerWith(pd *cgo.PD, r *transfer.Region, access cgo.Access) (*cgo.MR, error) {
	if r.Hostless() {
		b := r.DMABuf()
		return pd.RegisterDMABuf(b.FD, b.Offset, r.Size(), b.Address, dmabufAccess(access))
	}
	return pd.Register(r.Bytes(), access)
}

// dmabufAccess leaves out what the kernel refuses for dma-bufs with EINVAL (REG_DMABUF_MR in uverbs_std_types_mr.c): the right to
// bind memory windows. A lease on such memory is fenced by its lanes.
func dmabufAccess(a cgo.Access) cgo.Access { return a &^ cgo.BindWindow }

// registerError adds what to do.
func registerError(err error, device string, hostless bool) error {
	switch {
	case hostless && (errors.Is(err, cgo.ErrNotSupported) || errors.Is(err, unix.EPROTONOSUPPORT)):
		return fmt.Errorf("%w: %s takes no memory of other devices: let the engine stage over host memory, or use a NIC whose driver takes dma-bufs (mlx5, bnxt_re, efa, irdma; Linux 5.12 or later)", err, device)
	case errors.Is(err, unix.ENOMEM) || errors.Is(err, unix.EPERM):
		return fmt.Errorf("%w: raise the limit of locked memory (ulimit -l unlimited, LimitMEMLOCK=infinity), or run with --transport tcp", err)
	}
	return err
}

// Pages are faulted in by several threads before a device pins them, since it faults them in one by one. Below prefaultFrom
// the threads cost more than they gain.
const (
	prefaultFrom    = 64 << 20
	prefaultStep    = 16 << 20
	prefaultThreads = 16
)

// prefault faults memory in as far as it can. What it cannot, a kernel before 5.14 or a cgroup out of memory, registering finds out.
func prefault(mem []byte, readOnly bool) {
	if len(mem) < prefaultFrom {
		return
	}
	advice := unix.MADV_POPULATE_WRITE
	if readOnly {
		advice = unix.MADV_POPULATE_READ
	}
	var next atomic.Int64
	var wg sync.WaitGroup
	for range min(runtime.GOMAXPROCS(0), prefaultThreads, len(mem)/prefaultStep) {
		wg.Go(func() {
			for {
				at := int(next.Add(prefaultStep)) - prefaultStep
				if at >= len(mem) || unix.Madvise(mem[at:min(at+prefaultStep, len(mem))], advice) != nil {
					return
				}
			}
		})
	}
	wg.Wait()
}

// Register implements transfer.Registrar: every rail's device learns of the region, and the key lets a peer write to it.
//
// The key, little-endian: version (1), number of rails (1), reserved (2), then for each rail its key (4), then the region's
// address (8).
func (t *transport) Register(r *transfer.Region) ([]byte, error) {
	rails, err := t.open()
	if err != nil {
		return nil, err
	}
	g := &registration{base: addressOf(r.Bytes()), mrs: make([]*cgo.MR, len(rails))}
	if r.Hostless() {
		g.base = r.DMABuf().Address
	} else {
		prefault(r.Bytes(), r.ReadOnly())
	}
	// Devices pin and map the pages each for itself: side by side.
	errs := make([]error, len(rails))
	var wg sync.WaitGroup
	for i, rail := range rails {
		wg.Go(func() {
			if g.mrs[i], errs[i] = registerWith(rail.pd, r, rail.regionAccess(r.ReadOnly(), t.cfg.Op == OpRead)); errs[i] != nil {
				errs[i] = registerError(errs[i], rail.name, r.Hostless())
			}
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		return nil, errors.Join(err, g.close())
	}
	g.spot = kernelTree.spotOf(r)
	for _, rail := range rails {
		near, _ := kernelTree.nearness(&rail.found.at, &g.spot)
		g.near = append(g.near, near)
	}
	t.regionMu.Lock()
	t.regions[r] = g
	t.regionMu.Unlock()
	return g.key(), nil
}

// Unregister implements transfer.Registrar.
func (t *transport) Unregister(r *transfer.Region) error {
	t.regionMu.Lock()
	g := t.regions[r]
	delete(t.regions, r)
	t.regionMu.Unlock()
	if g == nil {
		return nil
	}
	g.windows.Wait() // the leases are fenced, so their windows are being invalidated
	return g.close()
}

func (t *transport) registered(r *transfer.Region) *registration {
	t.regionMu.RLock()
	defer t.regionMu.RUnlock()
	return t.regions[r]
}

// hold is registered for who is about to bind a window to the region: until windows.Done it stays registered.
func (t *transport) hold(r *transfer.Region) *registration {
	t.regionMu.RLock()
	defer t.regionMu.RUnlock()
	g := t.regions[r]
	if g != nil {
		g.windows.Add(1)
	}
	return g
}

const keyVersion = 1

func (g *registration) key() []byte {
	b := []byte{keyVersion, byte(len(g.mrs)), 0, 0}
	for _, m := range g.mrs {
		b = binary.LittleEndian.AppendUint32(b, m.RKey)
	}
	return binary.LittleEndian.AppendUint64(b, g.base)
}

// parseKey gives the address of a peer's region, and its key on one of the peer's rails.
func parseKey(b []byte, rail uint16) (base uint64, rkey uint32, err error) {
	if len(b) < 4 || b[0] != keyVersion || len(b) != 12+4*int(b[1]) || int(rail) >= int(b[1]) {
		return 0, 0, fmt.Errorf("%w: the destination's key %x does not name rail %d", transfer.ErrRegion, b, rail)
	}
	return binary.LittleEndian.Uint64(b[len(b)-8:]), binary.LittleEndian.Uint32(b[4+4*int(rail):]), nil
}

// addressOf is where mapped memory lies, as a number: devices know it by that.
func addressOf(mem []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(mem)))) }
