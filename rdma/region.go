package rdma

import (
	"encoding/binary"
	"errors"
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/headrace/headrace/cgo"
	"github.com/headrace/headrace/transfer"
)

// registration is a region as the devices know it.
type registration struct {
	base uint64
	mrs  []*cgo.MR // by rail
}

func (g *registration) close() error {
	var errs []error
	for _, m := range g.mrs {
		errs = append(errs, m.Close())
	}
	return errors.Join(errs...)
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
	mem := r.Bytes()
	g := &registration{base: addressOf(mem)}
	var access cgo.Access
	if !r.ReadOnly() {
		access = cgo.LocalWrite | cgo.RemoteWrite
	}
	for _, rail := range rails {
		m, err := rail.pd.Register(mem, access)
		if err != nil {
			if errors.Is(err, unix.ENOMEM) || errors.Is(err, unix.EPERM) {
				err = fmt.Errorf("%w: raise the limit of locked memory (ulimit -l unlimited, LimitMEMLOCK=infinity), or run with --transport tcp", err)
			}
			return nil, errors.Join(err, g.close())
		}
		g.mrs = append(g.mrs, m)
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
	return g.close()
}

func (t *transport) registered(r *transfer.Region) *registration {
	t.regionMu.RLock()
	defer t.regionMu.RUnlock()
	return t.regions[r]
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
