// Package memfd makes memory that can be lent to the node daemon: an anonymous file, sized, sealed
// against changing its size and mapped shared. The seal is what lets the daemon touch the mapping
// without fearing SIGBUS.
package memfd

import (
	"errors"
	"fmt"
	"math"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Memory is one mapped memfd.
type Memory struct {
	fd   int
	data []byte
}

// Create makes size bytes of zeroed memory. Pages are allocated when first touched.
func Create(name string, size uint64) (*Memory, error) {
	if size == 0 || size > math.MaxInt {
		return nil, fmt.Errorf("create memfd %q: size %d is out of range", name, size)
	}
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("create memfd %q: %w", name, err)
	}
	return open(name, fd, size)
}

// CreateHuge is Create in huge pages, which must be free: the size becomes a multiple of theirs. Devices map such memory by a
// few hundred entries where it takes many thousands else.
func CreateHuge(name string, size uint64) (*Memory, error) {
	if size == 0 || size > math.MaxInt/2 {
		return nil, fmt.Errorf("create memfd %q: size %d is out of range", name, size)
	}
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING|unix.MFD_HUGETLB)
	if err != nil {
		return nil, fmt.Errorf("create memfd %q of huge pages: %w", name, err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, errors.Join(fmt.Errorf("memfd %q: ask for its page size: %w", name, err), unix.Close(fd))
	}
	page := uint64(st.Blksize)
	size = (size + page - 1) / page * page
	m, err := open(name, fd, size)
	if errors.Is(err, unix.ENOMEM) {
		err = fmt.Errorf("%w: %d huge pages of %d KiB must be free: see HugePages_Free in /proc/meminfo, and run: sysctl vm.nr_hugepages=N", err, size/page, page>>10)
	}
	return m, err
}

// open takes fd over.
func open(name string, fd int, size uint64) (*Memory, error) {
	data, err := prepare(fd, int(size))
	if err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("memfd %q of %d bytes: %w", name, size, err)
	}
	return &Memory{fd: fd, data: data}, nil
}

func prepare(fd, size int) ([]byte, error) {
	if err := unix.Ftruncate(fd, int64(size)); err != nil {
		return nil, fmt.Errorf("set size: %w", err)
	}
	seals := unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err != nil {
		return nil, fmt.Errorf("seal: %w", err)
	}
	data, err := unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if errors.Is(err, unix.ENOMEM) {
		return nil, fmt.Errorf("map: %w: see the limit of address space (ulimit -v) and vm.overcommit_memory", err)
	}
	if err != nil {
		return nil, fmt.Errorf("map: %w", err)
	}
	return data, nil
}

// FD is the descriptor to lend; Memory keeps owning it.
func (m *Memory) FD() int { return m.fd }

// Size is the size in bytes.
func (m *Memory) Size() uint64 { return uint64(len(m.data)) }

// Bytes is the memory. It must not be touched after Close.
func (m *Memory) Bytes() []byte { return m.data }

// Float32s is the same memory as floats.
func (m *Memory) Float32s() []float32 {
	if len(m.data) < 4 {
		return nil
	}
	return unsafe.Slice((*float32)(unsafe.Pointer(unsafe.SliceData(m.data))), len(m.data)/4)
}

// Close unmaps the memory and closes the descriptor. Whoever else holds the descriptor keeps the pages.
func (m *Memory) Close() error {
	if m.fd < 0 {
		return nil
	}
	err := errors.Join(unix.Munmap(m.data), unix.Close(m.fd))
	m.fd, m.data = -1, nil
	return err
}
