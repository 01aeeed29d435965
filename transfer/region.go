package transfer

import (
	"errors"
	"fmt"
	"math"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// Region is memory that an engine lent, mapped into the daemon. It never lies in the Go heap.
//
// A page fault beyond the end of a file raises SIGBUS, which would take the daemon and every other engine's transfers
// along. It cannot happen here: the file is sealed against shrinking before its size is read, and nothing beyond that
// size is mapped as Bytes. Huge pages are reserved when the region is mapped. What is left, a poisoned page or a
// cgroup out of memory, gives EFAULT in system calls, and transports that copy in user space turn the fault into an error
// (debug.SetPanicOnFault).
type Region struct {
	id       RegionID
	client   *Client // that lent it
	layout   Layout
	size     uint64
	mem      []byte  // exactly the registered size; nil of a device's memory
	dmabuf   *DMABuf // of a device's memory
	page     uint64  // bytes of a page of mapped memory
	readOnly bool

	keys     map[string][]byte // by the name of the transport that registered it
	refusals map[string]error  // by the name of the transport that did not
	regs     []Registrar       // those that did

	mapMu   sync.Mutex // held while the region is populated or unmapped
	mapping []byte

	mu    sync.Mutex          // a leaf
	lent  map[uint32]LeaseID  // destination blocks in the hands of a living lease
	users map[*lease]struct{} // leases that it is of; whoever finds one here may end it
	going bool                // it is being removed: no lease takes it any more
	idle  chan struct{}       // since it goes: closed when the last lease has let go of it
}

// hold makes the region one of a lease's.
func (r *Region) hold(l *lease) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.going {
		return fmt.Errorf("%w: %d", ErrUnknownRegion, r.id)
	}
	if r.users == nil {
		r.users = make(map[*lease]struct{})
	}
	r.users[l] = struct{}{}
	return nil
}

// release lets go of the region, once or again.
func (r *Region) release(l *lease) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.users, l)
	if r.idle != nil && len(r.users) == 0 {
		close(r.idle)
		r.idle = nil
	}
}

func (r *Region) used() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.users) > 0
}

func (r *Region) retiring() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.going
}

// retire ends the region's leases, whosever they are, and returns when they have let go of it. It is false for who comes
// second, and does not wait then.
func (r *Region) retire(reason string) bool {
	r.mu.Lock()
	if r.going {
		r.mu.Unlock()
		return false
	}
	r.going = true
	idle := make(chan struct{})
	var users []*lease
	for l := range r.users {
		users = append(users, l)
	}
	if len(users) == 0 {
		close(idle)
	} else {
		r.idle = idle
	}
	r.mu.Unlock()
	for _, l := range users {
		l.fail("%s", reason)
	}
	<-idle
	return true
}

// holdAll holds all regions of a set, or none.
func holdAll(rs []*Region, l *lease) error {
	for i, r := range rs {
		if err := r.hold(l); err != nil {
			releaseAll(rs[:i], l)
			return err
		}
	}
	return nil
}

func releaseAll(rs []*Region, l *lease) {
	for _, r := range rs {
		r.release(l)
	}
}

// ID names the region.
func (r *Region) ID() RegionID { return r.id }

// ReadOnly says whether nothing may be written to it.
func (r *Region) ReadOnly() bool { return r.readOnly }

// register makes the region known to the transports that want that. With spare, another transport carries for one that
// cannot; the reason is kept.
func (r *Region) register(transports []Transport, spare bool) error {
	for _, t := range transports {
		reg, wants := t.(Registrar)
		if !wants {
			continue
		}
		key, err := reg.Register(r)
		if err == nil {
			r.regs = append(r.regs, reg)
			if len(key) > RegionKeyMax {
				err = fmt.Errorf("%w: a key of %d bytes, at most %d", ErrLimit, len(key), RegionKeyMax)
			}
		}
		if err != nil && spare {
			if r.refusals == nil {
				r.refusals = make(map[string]error)
			}
			r.refusals[t.Name()] = err
			continue
		}
		if err != nil {
			return fmt.Errorf("register region with transport %s: %w", t.Name(), err)
		}
		if r.keys == nil {
			r.keys = make(map[string][]byte)
		}
		r.keys[t.Name()] = key
	}
	if r.Hostless() && len(r.keys) == 0 {
		errs := []error{errHostless}
		for name, why := range r.refusals {
			errs = append(errs, fmt.Errorf("transport %s: %w", name, why))
		}
		return errors.Join(errs...)
	}
	return nil
}

// keysOf gives the regions' keys for a transport, empty for those that it does not know; nil if it knows none.
func keysOf(rs []*Region, transport string) (keys [][]byte) {
	known := false
	for _, r := range rs {
		key, registered := r.keys[transport]
		keys, known = append(keys, key), known || registered
	}
	if !known {
		return nil
	}
	return keys
}

// Size is how many bytes it has.
func (r *Region) Size() uint64 { return r.size }

// Hostless says that it is a device's memory: nothing of it is mapped, and only a transport that has a key for it moves it.
func (r *Region) Hostless() bool { return r.dmabuf != nil }

// Bytes is the region's memory, nil of one that is Hostless. Only who has entered the guard of one of its leases may touch it.
func (r *Region) Bytes() []byte { return r.mem }

// openRegion maps fd, which it takes over, also when it fails.
func openRegion(id RegionID, fd int, size uint64, l Layout, flags RegionFlags) (_ *Region, err error) {
	defer func() {
		if cerr := unix.Close(fd); cerr != nil {
			err = errors.Join(err, fmt.Errorf("close region descriptor: %w", cerr))
		}
	}()
	seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil {
		return nil, fmt.Errorf("%w: the descriptor is not a memfd made with MFD_ALLOW_SEALING: get seals: %w", ErrRegion, err)
	}
	if seals&unix.F_SEAL_SHRINK == 0 {
		return nil, fmt.Errorf("%w: the memfd may still shrink: add F_SEAL_SHRINK (seals now %#x)", ErrRegion, seals)
	}
	if flags&RegionReadOnly == 0 && seals&(unix.F_SEAL_WRITE|unix.F_SEAL_FUTURE_WRITE) != 0 {
		return nil, fmt.Errorf("%w: the memfd is sealed against writing: lend it read-only (seals %#x)", ErrRegion, seals)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, fmt.Errorf("%w: stat descriptor: %w", ErrRegion, err)
	}
	if size == 0 || size > math.MaxInt64/2 || st.Size < 0 || uint64(st.Size) < size {
		return nil, fmt.Errorf("%w: %d bytes asked for, the memfd has %d", ErrRegion, size, st.Size)
	}
	if err := l.Validate(size); err != nil {
		return nil, err
	}
	prot := unix.PROT_READ | unix.PROT_WRITE
	if flags&RegionReadOnly != 0 {
		prot = unix.PROT_READ
	}
	blksize := int64(st.Blksize)                          //nolint:unconvert // int32 on arm64
	page := uint64(max(int64(os.Getpagesize()), blksize)) // of a hugetlb memfd: the huge page
	mapping, err := unix.Mmap(fd, 0, int((size+page-1)/page*page), prot, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("%w: map %d bytes: %w: this process may map no more (ulimit -v, the cgroup's memory, vm.max_map_count): lend less or raise it", ErrRegion, size, err)
	}
	r := &Region{id: id, layout: l, size: size, page: page, mem: mapping[:size:size], mapping: mapping, readOnly: flags&RegionReadOnly != 0, lent: make(map[uint32]LeaseID)}
	return r, nil
}

// close unmaps the region. All of its leases must be fenced.
func (r *Region) close() error {
	r.mapMu.Lock()
	defer r.mapMu.Unlock()
	var errs []error
	for _, reg := range r.regs {
		errs = append(errs, reg.Unregister(r))
	}
	r.regs = nil
	if r.mapping != nil {
		errs = append(errs, unix.Munmap(r.mapping))
		r.mapping, r.mem = nil, nil
	}
	if r.dmabuf != nil && r.dmabuf.FD >= 0 {
		errs = append(errs, unix.Close(r.dmabuf.FD))
		r.dmabuf.FD = -1
	}
	return errors.Join(errs...)
}

// populate faults the region in, some at a time, so that unmapping waits for one step at most.
func (r *Region) populate() {
	const step = 16 << 20
	advice := unix.MADV_POPULATE_WRITE
	if r.readOnly {
		advice = unix.MADV_POPULATE_READ
	}
	for off := 0; ; off += step {
		r.mapMu.Lock()
		var err error
		if off < len(r.mapping) {
			err = unix.Madvise(r.mapping[off:min(off+step, len(r.mapping))], advice)
		}
		last := off+step >= len(r.mapping)
		r.mapMu.Unlock()
		if err != nil || last {
			return // before Linux 5.14 there is no such advice: the first transfers fault the pages in
		}
	}
}

// lend marks destination blocks as a lease's own: two leases that write one block are an engine's mistake.
func (r *Region) lend(id LeaseID, blocks []uint32) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i, b := range blocks {
		if other, taken := r.lent[b]; taken {
			for _, undo := range blocks[:i] {
				delete(r.lent, undo)
			}
			if other == id {
				return fmt.Errorf("%w: block %d is listed twice", ErrInvalid, b)
			}
			return fmt.Errorf("%w: block %d is bound by lease %d", ErrInvalid, b, other)
		}
		r.lent[b] = id
	}
	return nil
}

func (r *Region) giveBack(blocks []uint32) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, b := range blocks {
		delete(r.lent, b)
	}
}
