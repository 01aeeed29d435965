package memfd

import (
	"errors"
	"testing"

	"golang.org/x/sys/unix"
)

func TestCreate(t *testing.T) {
	m, err := Create("test", 1<<16+4)
	if err != nil {
		t.Fatal(err)
	}
	m.Float32s()[1<<14] = 1
	if got := m.Bytes()[1<<16+3]; got != 0x3f || m.Size() != 1<<16+4 {
		t.Errorf("last byte %#x of %d", got, m.Size())
	}
	for _, size := range []int64{1 << 12, 1 << 20} {
		if err := unix.Ftruncate(m.FD(), size); !errors.Is(err, unix.EPERM) {
			t.Errorf("resize to %d: %v, want EPERM", size, err)
		}
	}
	if flags, err := unix.FcntlInt(uintptr(m.FD()), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
		t.Errorf("not closed on exec: %v", err)
	}
	if err := errors.Join(m.Close(), m.Close()); err != nil {
		t.Error(err)
	}
	for _, size := range []uint64{0, 1 << 63} {
		if _, err := Create("bad", size); err == nil {
			t.Errorf("%d bytes accepted", size)
		}
	}
}
