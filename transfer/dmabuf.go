package transfer

import (
	"errors"
	"fmt"
	"math"
	"os"
	"slices"

	"golang.org/x/sys/unix"
)

// DMABuf is a device's memory, as a GPU's, lent by a descriptor. The region's first byte lies at Offset of it, and at Address in
// the engine's process; NICs address it by that too.
type DMABuf struct {
	FD              int
	Offset, Address uint64
	Device          string // PCI address of the device whose memory it is, "" where the engine does not say
}

// DMABuf is what a region that is Hostless was lent by. The descriptor stays the region's.
func (r *Region) DMABuf() DMABuf {
	if r.dmabuf == nil {
		return DMABuf{FD: -1}
	}
	return *r.dmabuf
}

// errHostless is the reason of transports that copy by the processor.
var errHostless = fmt.Errorf("%w: it is a device's memory, which is not mapped into the daemon and which only RDMA moves: let both daemons run with --transport rdma, or let the engine stage over host memory", ErrRegion)

// AddDMABuf is AddRegion for a device's memory. It takes over the descriptor, also when it fails. A transport must register
// it: where none does, it is refused with each one's reason.
func (c *Client) AddDMABuf(buf DMABuf, size uint64, l Layout, flags RegionFlags) (RegionID, error) {
	r, err := openDMABuf(RegionID(c.e.nextRegion.Add(1)), buf, size, l, flags)
	if err != nil {
		return 0, err
	}
	return c.addRegion(r, flags)
}

// dmaBufSize gives the size of what a descriptor names if that is a dma-buf. Tests replace it where there is none to be had.
var dmaBufSize = func(fd int) (uint64, error) {
	var st unix.Statfs_t
	if err := unix.Fstatfs(fd, &st); err != nil {
		return 0, fmt.Errorf("look at descriptor: %w", err)
	}
	if int64(st.Type) != unix.DMA_BUF_MAGIC { //nolint:unconvert // int32 on some machines
		return 0, fmt.Errorf("the descriptor is no dma-buf (file system type %#x): memfds are lent with REGISTER_REGION", st.Type)
	}
	n, err := unix.Seek(fd, 0, unix.SEEK_END)
	if err != nil {
		return 0, fmt.Errorf("ask for the dma-buf's size: %w", err)
	}
	return uint64(n), nil
}

func openDMABuf(id RegionID, buf DMABuf, size uint64, l Layout, flags RegionFlags) (_ *Region, err error) {
	defer func() {
		if err != nil {
			err = errors.Join(err, unix.Close(buf.FD))
		}
	}()
	have, err := dmaBufSize(buf.FD)
	switch page := uint64(os.Getpagesize()); {
	case err != nil:
		return nil, fmt.Errorf("%w: %w", ErrRegion, err)
	case size == 0 || size > math.MaxInt64/2 || buf.Offset > have || size > have-buf.Offset:
		return nil, fmt.Errorf("%w: %d bytes at offset %d asked for, the dma-buf has %d", ErrRegion, size, buf.Offset, have)
	case buf.Address+size < buf.Address:
		return nil, fmt.Errorf("%w: %d bytes at address %#x", ErrRegion, size, buf.Address)
	case buf.Offset%page != buf.Address%page:
		return nil, fmt.Errorf("%w: offset %#x and address %#x lie differently in their pages of %d bytes: export from the address rounded down to a page, and lend the difference as the offset",
			ErrRegion, buf.Offset, buf.Address, page)
	case flags&RegionPopulate != 0:
		return nil, fmt.Errorf("%w: a device's memory is there already: lend it without populate", ErrRegion)
	}
	if err := l.Validate(size); err != nil {
		return nil, err
	}
	return &Region{id: id, layout: l, size: size, dmabuf: &buf, readOnly: flags&RegionReadOnly != 0, lent: make(map[uint32]LeaseID)}, nil
}

// reachable says why a transport cannot move a region's bytes, nil if it can.
func (r *Region) reachable(transport string) error {
	if _, registered := r.keys[transport]; !r.Hostless() || registered {
		return nil
	}
	if why := r.refusals[transport]; why != nil {
		return fmt.Errorf("region %d: transport %s: %w", r.id, transport, why)
	}
	return fmt.Errorf("region %d over transport %s: %w", r.id, transport, errHostless)
}

// hostless says whether one of a shard set's regions is.
func hostless(rs []*Region) bool { return slices.ContainsFunc(rs, (*Region).Hostless) }

// canLeave says why the lease's blocks cannot be sent to where these keys are from. l.mu is held.
func (l *sourceLease) canLeave(keys [][]byte) error {
	if !hostless(l.regions) {
		return nil
	}
	if err := allReachable(l.regions, l.ch.transport); err != nil {
		return err
	}
	if len(keys) == 0 || slices.ContainsFunc(keys, func(k []byte) bool { return len(k) == 0 }) {
		return fmt.Errorf("the other end's regions are not registered with %s: %w", l.ch.transport, errHostless)
	}
	return nil
}

// allReachable is reachable for a shard set.
func allReachable(rs []*Region, transport string) error {
	for _, r := range rs {
		if err := r.reachable(transport); err != nil {
			return err
		}
	}
	return nil
}

func (r *Region) status() RegionStatus {
	s := RegionStatus{ID: r.id, Bytes: r.size, Blocks: r.layout.Blocks, Layers: r.layout.Layers, Kind: "memory", Page: r.page}
	if r.Hostless() {
		s.Kind, s.Reason = "device memory", "not mapped here: RDMA alone moves it, and its pieces carry no checksums"
	}
	return s
}
