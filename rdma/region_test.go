package rdma

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/headrace/headrace/cgo"
	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/transporttest"
)

func TestRegisterErrorsSayWhatToDo(t *testing.T) {
	for _, c := range []struct {
		err      error
		hostless bool
		words    string
	}{
		{unix.ENOMEM, false, "ulimit -l"},
		{fmt.Errorf("register: %w", unix.EPERM), true, "ulimit -l"},
		{cgo.ErrNotSupported, true, "let the engine stage over host memory"},
		{unix.EPROTONOSUPPORT, true, "mlx5_9 takes no memory of other devices"},
		{unix.EFAULT, false, "bad address"},
	} {
		got := registerError(c.err, "mlx5_9", c.hostless)
		if !errors.Is(got, c.err) || !strings.Contains(got.Error(), c.words) {
			t.Errorf("%v: %v, want it to say %q", c.err, got, c.words)
		}
	}
}

// memory is a sealed memfd, mapped.
func memory(t testing.TB, size int, flags int) (fd int, mem []byte) {
	t.Helper()
	fd, err := unix.MemfdCreate("region", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING|flags)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	if err := unix.Ftruncate(fd, int64(size)); err != nil {
		t.Fatal(err)
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK); err != nil {
		t.Fatal(err)
	}
	if mem, err = unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Munmap(mem) })
	return fd, mem
}

func resident(t testing.TB, fd int) int {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		t.Fatal(err)
	}
	return int(st.Blocks) * 512
}

func TestPrefaultTouchesEveryPage(t *testing.T) {
	for _, size := range []int{prefaultFrom - 4096, prefaultFrom, prefaultFrom + prefaultStep/2 + 4096} {
		fd, mem := memory(t, size, 0)
		prefault(mem, false)
		want := size
		if size < prefaultFrom {
			want = 0
		}
		if got := resident(t, fd); got != want {
			t.Errorf("%d of %d bytes are there, want %d", got, size, want)
		}
	}
	// Reading allocates the pages of a shared file as well, on kernels that have the advice; it must not write.
	_, mem := memory(t, prefaultFrom, 0)
	if err := unix.Mprotect(mem, unix.PROT_READ); err != nil {
		t.Fatal(err)
	}
	prefault(mem, true)
}

// BenchmarkPrefault is what faulting in costs, by one thread and by several.
func BenchmarkPrefault(b *testing.B) {
	const size = 1 << 30
	for name, fault := range map[string]func([]byte){
		"one":     func(mem []byte) { _ = unix.Madvise(mem, unix.MADV_POPULATE_WRITE) },
		"several": func(mem []byte) { prefault(mem, false) },
	} {
		b.Run(name, func(b *testing.B) {
			b.SetBytes(size)
			for b.Loop() {
				b.StopTimer()
				fd, mem := memory(b, size, 0)
				b.StartTimer()
				fault(mem)
				b.StopTimer()
				if err := unix.Ftruncate(fd, size); err != nil || resident(b, fd) != size {
					b.Fatal(err)
				}
				_ = unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, size)
				b.StartTimer()
			}
		})
	}
}

// How long registering takes, by size, and what faulting in beforehand gains.
func TestRegistrationTime(t *testing.T) {
	needDevice(t)
	checkObjects(t)
	tr := New(Config{}).(*transport)
	defer tr.Close()
	rails, err := tr.open()
	if err != nil {
		t.Fatal(err)
	}
	took := func(size int, before func([]byte)) (total, registering time.Duration) {
		_, mem := memory(t, size, 0)
		start := time.Now()
		if before != nil {
			before(mem)
		}
		mid := time.Now()
		mr, err := rails[0].pd.Register(mem, cgo.LocalWrite|cgo.RemoteWrite)
		if err != nil {
			t.Fatal(err)
		}
		defer mr.Close()
		return time.Since(start), time.Since(mid)
	}
	for _, size := range []int{1 << 20, 16 << 20, 64 << 20, 256 << 20} {
		plain, _ := took(size, nil)
		total, pinning := took(size, func(mem []byte) { prefault(mem, false) })
		t.Logf("%4d MiB: %8v; faulted in before: %8v, of it %v registering", size>>20, plain.Round(time.Microsecond), total.Round(time.Microsecond), pinning.Round(time.Microsecond))
	}
}

// vgemBuffer makes a real dma-buf, of the kernel's virtual graphics memory.
func vgemBuffer(t *testing.T, size uint32) int {
	t.Helper()
	cards, _ := filepath.Glob("/dev/dri/card*") // the pattern is well formed
	if len(cards) == 0 {
		if os.Getenv("HEADRACE_LAB") != "" {
			t.Fatal("the lab has no vgem")
		}
		t.Skip("no dma-buf to be had: no /dev/dri (modprobe vgem)")
	}
	f, err := os.OpenFile(cards[0], os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	call := func(what string, request uintptr, arg unsafe.Pointer) {
		if _, _, errno := syscall.Syscall(syscall.SYS_IOCTL, f.Fd(), request, uintptr(arg)); errno != 0 {
			t.Fatalf("%s: %v", what, errno)
		}
	}
	dumb := struct {
		height, width, bpp, flags, handle, pitch uint32
		size                                     uint64
	}{height: size / 4096, width: 1024, bpp: 32}
	call("make a buffer", 0xc02064b2, unsafe.Pointer(&dumb)) // DRM_IOCTL_MODE_CREATE_DUMB
	prime := struct {
		handle, flags uint32
		fd            int32
	}{handle: dumb.handle, flags: unix.O_CLOEXEC | unix.O_RDWR}
	call("export the buffer", 0xc00c642d, unsafe.Pointer(&prime)) // DRM_IOCTL_PRIME_HANDLE_TO_FD
	return int(prime.fd)
}

// Soft RoCE takes no dma-buf: a real one is refused with what to do, over RDMA alone and where TCP could carry for it.
func TestDMABufOfANICThatTakesNone(t *testing.T) {
	needDevice(t)
	checkObjects(t)
	pair := transporttest.NewPair(t, factory(), transporttest.Options{})
	lay := pair.P.Layout
	size := lay.LayerStride * uint64(lay.Layers)
	fd := vgemBuffer(t, uint32(max(size, 1<<20)))
	_, err := pair.P.Client.AddDMABuf(transfer.DMABuf{FD: fd, Address: 1 << 40}, size, lay, 0)
	if !errors.Is(err, transfer.ErrRegion) && !errors.Is(err, cgo.ErrNotSupported) || !strings.Contains(fmt.Sprint(err), "let the engine stage over host memory") {
		t.Errorf("got %v", err)
	}
	t.Log(err)
	if err := unix.Close(fd); err != unix.EBADF {
		t.Error("the descriptor was left open")
	}
}

func TestAccessOfDMABufs(t *testing.T) {
	const all = cgo.LocalWrite | cgo.RemoteWrite | cgo.RemoteRead
	if got := dmabufAccess(all | cgo.BindWindow); got != all {
		t.Errorf("%#x, want %#x", got, all)
	}
}

// taker is a transport that registers whatever it is given.
type taker struct {
	transfer.Transport
	regions []*transfer.Region
}

func (k *taker) Register(r *transfer.Region) ([]byte, error) {
	k.regions = append(k.regions, r)
	return []byte{1}, nil
}

func (*taker) Unregister(*transfer.Region) error { return nil }

// A real dma-buf, as a card that takes it would see it: no window is asked for.
func TestNoWindowsOverDMABufs(t *testing.T) {
	size := uint32(64 << 20)
	fd := vgemBuffer(t, size)
	k := &taker{Transport: New(Config{})}
	pair := transporttest.NewPair(t, transporttest.Factory{New: func() transfer.Transport { return k }, Config: patient}, transporttest.Options{})
	lay := pair.P.Layout
	id, err := pair.P.Client.AddDMABuf(transfer.DMABuf{FD: fd, Address: 1 << 40}, lay.LayerStride*uint64(lay.Layers), lay, 0)
	if err != nil {
		t.Fatal(err)
	}
	r := k.regions[len(k.regions)-1]
	if b := r.DMABuf(); r.ID() != id || !r.Hostless() || r.Bytes() != nil || b.FD != fd || b.Address != 1<<40 {
		t.Errorf("region %d: %+v", r.ID(), b)
	}
	l := &link{t: New(Config{}).(*transport)}
	if g, err := l.Grant(1, []transfer.Part{{Region: r, End: 1}}); g != nil || !errors.Is(err, transfer.ErrRegion) {
		t.Errorf("granted %v, %v", g, err)
	}
	if err := pair.P.Client.RemoveRegion(id); err != nil {
		t.Error(err)
	}
	if err := unix.Close(fd); err != unix.EBADF {
		t.Error("the descriptor was left open")
	}
}

// Huge pages that the engine lends are taken as they are.
func TestHugePages(t *testing.T) {
	needDevice(t)
	checkObjects(t)
	const free = "/proc/sys/vm/nr_hugepages"
	old, err := os.ReadFile(free)
	if err != nil {
		t.Fatal(err)
	}
	const size = 64 << 20
	if n, _ := strconv.Atoi(strings.TrimSpace(string(old))); n < 2*size>>21 {
		if err := os.WriteFile(free, fmt.Appendf(nil, "%d", 3*size>>21), 0o644); err != nil {
			if os.Getenv("HEADRACE_LAB") != "" {
				t.Fatal(err)
			}
			t.Skipf("no huge pages: %v", err)
		}
		t.Cleanup(func() { os.WriteFile(free, old, 0o644) })
	}
	pair := transporttest.NewPair(t, factory(), transporttest.Options{})
	for _, flags := range []int{0, unix.MFD_HUGETLB} {
		fd, _ := memory(t, size, flags)
		lent, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 3)
		if err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		id, err := pair.P.Client.AddRegion(lent, size, pair.P.Layout, 0)
		took := time.Since(start)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range pair.P.Engine.Status().Engines {
			for _, r := range e.Regions {
				if r.ID != id {
					continue
				}
				t.Logf("%d MiB in pages of %d KiB: lent in %v", size>>20, r.Page>>10, took)
				if want := map[int]uint64{0: 4 << 10, unix.MFD_HUGETLB: 2 << 20}[flags]; r.Page != want {
					t.Errorf("pages of %d bytes, want %d", r.Page, want)
				}
			}
		}
		if err := pair.P.Client.RemoveRegion(id); err != nil {
			t.Error(err)
		}
	}
	// Of huge pages that are not there nothing is mapped, so nothing is touched that is not there.
	fd, err := unix.MemfdCreate("huge", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING|unix.MFD_HUGETLB)
	if err == nil {
		err = unix.Ftruncate(fd, 8<<30)
	}
	if err == nil {
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK)
	}
	if err != nil {
		t.Fatal(err)
	}
	if _, err := pair.P.Client.AddRegion(fd, 8<<30, pair.P.Layout, 0); !errors.Is(err, unix.ENOMEM) {
		t.Errorf("8 GiB of huge pages: %v", err)
	}
}

const memlockEnv = "HEADRACE_TEST_MEMLOCK"

// Without the right to lock memory, registering fails with what to do. The test runs as a user of its own.
func TestLockedMemory(t *testing.T) {
	needDevice(t)
	if os.Getenv("HEADRACE_LAB") == "" {
		t.Skip("it changes who may use RDMA devices: make lab")
	}
	devices, _ := filepath.Glob("/dev/infiniband/*") // the pattern is well formed
	for _, d := range devices {
		if err := os.Chmod(d, 0o666); err != nil {
			t.Fatal(err)
		}
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	c := exec.CommandContext(t.Context(), exe, "-test.run=^TestLockedMemoryOfAUser$", "-test.v")
	c.Dir = "/"
	c.Env = append(os.Environ(), memlockEnv+"=1")
	c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	if out, err := c.CombinedOutput(); err != nil || !strings.Contains(string(out), "PASS: TestLockedMemoryOfAUser") {
		t.Errorf("%v\n%s", err, out)
	}
}

// TestLockedMemoryOfAUser is the process of TestLockedMemory.
func TestLockedMemoryOfAUser(t *testing.T) {
	if os.Getenv(memlockEnv) == "" {
		t.Skip("it is the other process of TestLockedMemory")
	}
	// What the rail itself needs is there; what a region needs is not.
	limit := unix.Rlimit{Cur: 4 << 20, Max: 4 << 20}
	if err := unix.Setrlimit(unix.RLIMIT_MEMLOCK, &limit); err != nil {
		t.Fatal(err)
	}
	rails, err := New(Config{}).(*transport).open()
	if err != nil {
		t.Fatal(err)
	}
	_, mem := memory(t, 16<<20, 0)
	_, err = rails[0].pd.Register(mem, cgo.LocalWrite)
	if err == nil {
		t.Fatal("16 MiB were registered under a limit of 4 MiB")
	}
	if err = registerError(err, rails[0].name, false); !strings.Contains(err.Error(), "LimitMEMLOCK=infinity") {
		t.Error(err)
	}
	t.Log(err)
}
