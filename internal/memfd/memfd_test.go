package memfd

import (
	"errors"
	"os"
	"strings"
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

// Where there are huge pages the memory is of them; where there are not, the error says how to get them.
func TestCreateHuge(t *testing.T) {
	if os.Getenv("HEADRACE_LAB") != "" {
		if err := os.WriteFile("/proc/sys/vm/nr_hugepages", []byte("8"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	m, err := CreateHuge("test", 3<<20)
	switch {
	case err == nil:
		m.Bytes()[m.Size()-1] = 1
		if m.Size() < 3<<20 || m.Size()%(2<<20) != 0 {
			t.Errorf("%d bytes", m.Size())
		}
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	case os.Getenv("HEADRACE_LAB") != "":
		t.Error(err)
	case errors.Is(err, unix.ENOMEM) && !strings.Contains(err.Error(), "sysctl vm.nr_hugepages"):
		t.Errorf("no remedy in %v", err)
	}
	t.Log(err)
	if _, err := CreateHuge("bad", 0); err == nil {
		t.Error("no bytes were accepted")
	}
}
