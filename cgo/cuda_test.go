package cgo

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"unsafe"

	"github.com/headrace/headrace/cgo/cudatest"
)

// standIn opens the stand-in for the driver, and takes the context of its first device.
func standIn(t *testing.T, defines ...string) *GPUContext {
	t.Helper()
	if !Enabled {
		t.Skip("built without cgo")
	}
	noGPULeaks(t)
	d, err := LoadCUDA(cudatest.Build(t, defines...))
	if err != nil {
		t.Fatal(err)
	}
	x, err := d.Context(0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(x.Close(), x.Close()); err != nil {
			t.Error(err)
		}
	})
	return x
}

func noGPULeaks(t *testing.T) {
	t.Cleanup(func() {
		if h := LiveGPU(); h.Total() != 0 {
			t.Errorf("left over: %+v", h)
		}
	})
}

func TestGPUStructSizes(t *testing.T) {
	if !Enabled {
		t.Skip("built without cgo")
	}
	want := []uint64{uint64(unsafe.Sizeof(GPU{})), uint64(unsafe.Sizeof(Copy{})), uint64(unsafe.Sizeof(IPCHandle{})), uint64(unsafe.Sizeof(Pointer{}))}
	if got := cudaStructSizes(); !slices.Equal(got, want) {
		t.Errorf("C has %d, Go %d", got, want)
	}
}

// What this host really has: whatever it is, it is one of the states and says what to do.
func TestProbeCUDA(t *testing.T) {
	g := ProbeCUDA()
	t.Logf("state %d, version %d, %d devices: %q; %q", g.State, g.Version, len(g.Devices), g.Reason(), g.Remedy())
	if Enabled == (g.State == CUDANotBuilt) {
		t.Errorf("cgo is enabled: %t, yet the probe says %+v", Enabled, g)
	}
	if (g.Err() == nil) != (len(g.Devices) > 0) || (g.Reason() == "") != (g.Err() == nil) || (g.Remedy() == "") != (g.Err() == nil) {
		t.Errorf("%+v: %v, %q, %q", g, g.Err(), g.Reason(), g.Remedy())
	}
}

func TestCUDAProbesOfDrivers(t *testing.T) {
	if !Enabled {
		t.Skip("built without cgo")
	}
	for name, c := range map[string]struct {
		defines []string
		env     [2]string
		state   CUDAState
		devices int
		reason  string
		none    bool // conclusive: there is none
	}{
		"one":           {state: CUDAListed, devices: 1},
		"three":         {env: [2]string{cudatest.Devices, "3"}, state: CUDAListed, devices: 3},
		"none":          {env: [2]string{cudatest.Devices, "0"}, state: CUDAListed, reason: "no GPU", none: true},
		"init: none":    {env: [2]string{cudatest.Faults, "cuInit=100"}, state: CUDAFailed, reason: "no GPU", none: true},
		"init: unknown": {env: [2]string{cudatest.Faults, "cuInit=999"}, state: CUDAFailed, reason: "cuInit"},
		"mismatch":      {env: [2]string{cudatest.Faults, "cuInit=803"}, state: CUDAFailed, reason: "cuInit"},
		"listing fails": {env: [2]string{cudatest.Faults, "cuDeviceGetName=999"}, state: CUDAFailed, reason: "query GPU 0"},
		"lacks":         {defines: []string{"LACKS_RETAIN"}, state: CUDAFailed, reason: "lacks cuDevicePrimaryCtxRetain"},
		"old":           {defines: []string{"OLD", "LACKS_EXPORT"}, state: CUDAListed, devices: 1},
	} {
		t.Run(name, func(t *testing.T) {
			if c.env[0] != "" {
				t.Setenv(c.env[0], c.env[1])
			}
			g := probeCUDA(cudatest.Build(t, c.defines...))
			if g.State != c.state || len(g.Devices) != c.devices || !strings.Contains(g.Reason(), c.reason) || (c.reason == "") != (g.Err() == nil) {
				t.Errorf("%+v: %v, reason %q", g, g.Err(), g.Reason())
			}
			if errors.Is(g.Err(), ErrNoCUDA) != c.none {
				t.Errorf("conclusive: want %t, got %v", c.none, g.Err())
			}
			if g.Err() != nil && g.Remedy() == "" {
				t.Error("no remedy")
			}
		})
	}
	if g := probeCUDA("/no/such/libcuda.so.1"); g.State != CUDANoLibrary || !errors.Is(g.Err(), ErrNoCUDA) || !strings.Contains(g.Reason(), "/no/such") {
		t.Errorf("%+v: %v", g, g.Err())
	}
	if _, err := LoadCUDA("/no/such/libcuda.so.1"); !errors.Is(err, ErrNoCUDA) || !strings.Contains(err.Error(), "container toolkit") {
		t.Errorf("no remedy in %v", err)
	}
}

func TestGPUDescription(t *testing.T) {
	x := standIn(t)
	gpus, err := x.d.GPUs()
	if err != nil || len(gpus) != 1 {
		t.Fatal(gpus, err)
	}
	g := &gpus[0]
	if g.Name() != "Stand-in 0" || g.Bus() != "0000:3b:00.0" || g.Memory != 16<<30 || g.UUID != [16]byte([]byte(strings.Repeat("\x10", 16))) || g.Major != 9 {
		t.Errorf("%s at %s, %+v", g.Name(), g.Bus(), g)
	}
	if !g.DMABuf() || !g.RDMA() || !g.RDMAMapped() || !g.Mapped() || !g.Settled() {
		t.Errorf("%+v", g)
	}
	root := t.TempDir()
	if err := os.MkdirAll(filepath.Join(root, "0000:3b:00.0"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(root, "0000:3b:00.0/numa_node"), []byte("1\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if n := pciNUMA(root, g.Bus()); n != 1 {
		t.Errorf("NUMA node %d", n)
	}
	if n := pciNUMA(root, "0000:ff:00.0"); n != -1 {
		t.Errorf("NUMA node of nothing: %d", n)
	}
}

func TestPeerHint(t *testing.T) {
	for name, c := range map[string]struct {
		g       GPU
		modules string
		reason  string
		remedy  string
	}{
		"dma-buf": {GPU{dmaBuf: 1, rdma: 1}, "", "by dma-buf", ""},
		"closed":  {GPU{rdma: 1}, "nvidia 1 0", "exports no dma-buf", "open kernel modules"},
		"peermem": {GPU{rdma: 1}, "nvidia_peermem 16384 0", "nvidia-peermem, which is loaded, serves only", "open kernel modules"},
		"none":    {GPU{dmaBuf: 1}, "", "GPUDirect RDMA is not supported", "stage"},
	} {
		reason, remedy := c.g.PeerHint(c.modules)
		if !strings.Contains(reason, c.reason) || !strings.Contains(remedy, c.remedy) || (c.remedy == "") != (remedy == "") {
			t.Errorf("%s: %q, %q", name, reason, remedy)
		}
	}
}

// alloc allocates device memory for a test.
func alloc(t *testing.T, x *GPUContext, bytes uint64) uint64 {
	t.Helper()
	addr, err := x.Alloc(bytes)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := x.Free(addr); err != nil {
			t.Error(err)
		}
	})
	return addr
}

func fdSize(t *testing.T, fd int) uint64 {
	t.Helper()
	n, err := syscall.Seek(fd, 0, 2)
	if err != nil {
		t.Fatal(err)
	}
	return uint64(n)
}

// A part of an allocation is exported as the whole allocation, from its base, in whole pages; the offset says where it begins.
func TestCUDAExportIsOfTheWholeAllocation(t *testing.T) {
	x := standIn(t)
	page := uint64(os.Getpagesize())
	addr := alloc(t, x, 5*page-100)
	var out []DMABuf
	calls := cudatest.Calls(t, func() {
		var err error
		if out, err = x.Export(addr+page+8, 2*page); err != nil {
			t.Fatal(err)
		}
	})
	defer out[0].Close()
	if len(out) != 1 || out[0].Offset != page+8 || out[0].Addr != addr+page+8 || out[0].Size != 2*page {
		t.Errorf("%+v of an allocation at %#x", out, addr)
	}
	if n := fdSize(t, out[0].FD); n != 5*page-100 { // the stand-in's memory is a file of the size asked for
		t.Errorf("the descriptor has %d bytes", n)
	}
	if want := "cuMemGetHandleForAddressRange 20480 1 0"; !slices.Contains(calls, want) {
		t.Errorf("no %q in %q", want, calls)
	}
	if !slices.Contains(calls, "cuPointerSetAttribute 6 1") {
		t.Errorf("synchronous copies were not made to be waited for: %q", calls)
	}
	if flags, _, _ := syscall.Syscall(syscall.SYS_FCNTL, uintptr(out[0].FD), syscall.F_GETFD, 0); flags&syscall.FD_CLOEXEC == 0 {
		t.Error("the descriptor is inherited by children")
	}
	if err := errors.Join(out[0].Close(), out[0].Close()); err != nil {
		t.Error(err)
	}
}

// Memory of several segments is one descriptor where the driver can, and one a segment where it cannot.
func TestCUDAExportOfSegments(t *testing.T) {
	x := standIn(t)
	s, err := x.MapSegments(1<<20, 4, true)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if s.Piece != 2<<20 || s.Size != 8<<20 {
		t.Fatalf("%+v", s)
	}
	if p, err := x.Pointer(s.Addr + 5<<20); err != nil || p.Base != s.Addr+4<<20 || p.Size != 2<<20 || p.Shareable() || !p.RDMA() {
		t.Errorf("%+v, %v", p, err)
	}
	from, size := s.Addr+1<<20, uint64(6<<20)
	out, err := x.Export(from, size)
	if err != nil || len(out) != 1 || out[0].Offset != 1<<20 || out[0].Size != size || fdSize(t, out[0].FD) != 8<<20 {
		t.Fatalf("%+v, %v", out, err)
	}
	out[0].Close()

	t.Setenv(cudatest.SegmentsApart, "1")
	out, err = x.Export(from, size)
	if err != nil || len(out) != 4 {
		t.Fatalf("%+v, %v", out, err)
	}
	at := from
	for i := range out {
		b := &out[i]
		if b.Addr != at || fdSize(t, b.FD) != 2<<20 || b.Offset != map[bool]uint64{true: 1 << 20}[i == 0] {
			t.Errorf("part %d: %+v, want it to begin at %#x", i, *b, at)
		}
		at += b.Size
		b.Close()
	}
	if at != from+size {
		t.Errorf("the parts end at %#x, want %#x", at, from+size)
	}
	if _, err := x.Export(s.Addr, s.Size+4096); err == nil {
		t.Error("addresses without memory were exported")
	}
}

func TestCUDAExportErrors(t *testing.T) {
	if !Enabled {
		t.Skip("built without cgo")
	}
	for name, c := range map[string]struct {
		defines     []string
		faults      string
		unsupported bool
		words       string
	}{
		"old driver":    {[]string{"LACKS_EXPORT"}, "", true, "open kernel modules"},
		"not supported": {nil, "cuMemGetHandleForAddressRange=801", true, "open kernel modules"},
		"refused":       {nil, "cuMemGetHandleForAddressRange=1", false, "CUDA_ERROR_INVALID_VALUE"},
		"no range":      {nil, "cuMemGetAddressRange_v2=1", false, "all of it mapped"},
		"wrong context": {nil, "cuCtxPushCurrent_v2=201", false, "CUDA_ERROR_INVALID_CONTEXT"},
	} {
		t.Run(name, func(t *testing.T) {
			x := standIn(t, c.defines...)
			addr := alloc(t, x, 1<<20)
			t.Setenv(cudatest.Faults, c.faults)
			out, err := x.Export(addr, 1<<20)
			t.Setenv(cudatest.Faults, "")
			if err == nil || out != nil || errors.Is(err, ErrNotSupported) != c.unsupported || !strings.Contains(err.Error(), c.words) {
				t.Errorf("%+v, %v", out, err)
			}
		})
	}
	x := standIn(t)
	addr := alloc(t, x, 1<<20)
	for _, c := range [][2]uint64{{addr, 0}, {addr, ^uint64(0)}, {16, 16}} {
		if out, err := x.Export(c[0], c[1]); err == nil {
			t.Errorf("%d bytes at %#x: %+v", c[1], c[0], out)
		}
	}
}

// The context is current for the call alone, on whatever thread the goroutine is: all threads end with none.
func TestCUDAContextsOfThreads(t *testing.T) {
	x := standIn(t)
	addr := alloc(t, x, 1<<16)
	calls := cudatest.Calls(t, func() {
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				runtime.LockOSThread()
				defer runtime.UnlockOSThread()
				if err := x.Fill(addr, 1, 1<<16); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
	})
	n := map[string]int{}
	for _, c := range calls {
		n[c]++
	}
	if n["cuCtxPushCurrent_v2"] != 8 || n["cuCtxPopCurrent_v2"] != 8 || n["cuMemsetD8_v2 65536"] != 8 {
		t.Errorf("%v", n)
	}
	t.Setenv(cudatest.Faults, "cuMemsetD8_v2=700")
	err := x.Fill(addr, 1, 1)
	var ce *CUDAError
	if !errors.As(err, &ce) || ce.Code != 700 {
		t.Errorf("got %v", err)
	}
	t.Setenv(cudatest.Faults, "") // the failed call has put the context back too, or this one's would lie on top of it
	calls = cudatest.Calls(t, func() { _ = x.Fill(addr, 1, 1) })
	if !slices.Equal(calls, []string{"cuCtxPushCurrent_v2", "cuMemsetD8_v2 1", "cuStreamSynchronize default", "cuCtxPopCurrent_v2"}) {
		t.Errorf("%q", calls)
	}
}

func TestCUDACopies(t *testing.T) {
	x := standIn(t)
	const size = 1 << 16
	a, b := alloc(t, x, size), alloc(t, x, size)
	host, err := x.AllocHost(size)
	if err != nil {
		t.Fatal(err)
	}
	defer x.FreeHost(host)
	s, err := x.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for i := range host {
		host[i] = byte(i * 7)
	}
	want := slices.Clone(host)
	h := memAddr(host)
	err = errors.Join(
		s.Copy(CopyToDevice, []Copy{{a, h, size}}),
		s.Copy(CopyDevice, []Copy{{b, a, size / 2}, {b + size/2, a + size/2, size / 2}}),
		s.Sync(),
	)
	clear(host)
	if err = errors.Join(err, s.Copy(CopyToHost, []Copy{{h, b, size}}), s.Copy(CopyDevice, nil), s.Sync()); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(host, want) {
		t.Error("the bytes are others")
	}
	err = s.Copy(CopyDevice, []Copy{{b, a, 1}, {b, a, 2}, {b, 4096, 1}})
	if err == nil || !strings.Contains(err.Error(), "copy 3 of 3") {
		t.Errorf("got %v", err)
	}
}

func TestCUDAEvents(t *testing.T) {
	x := standIn(t)
	s, err := x.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	var events [3]*Event
	for i, k := range []EventKind{EventTiming, EventTiming, EventShared} {
		if events[i], err = x.NewEvent(k); err != nil {
			t.Fatal(err)
		}
		defer events[i].Close()
	}
	from, to, shared := events[0], events[1], events[2]
	if err := errors.Join(from.Record(s), to.Record(s), s.Wait(shared), to.Sync()); err != nil {
		t.Fatal(err)
	}
	if d, err := to.Since(from); err != nil || d < 0 {
		t.Errorf("%v, %v", d, err)
	}
	if _, err := to.Since(nil); err == nil {
		t.Error("time from no event")
	}
	if h, err := shared.Share(); err != nil {
		t.Error(err)
	} else if e, err := x.OpenEvent(h); err != nil {
		t.Error(err)
	} else {
		e.Close()
	}
	if _, err := from.Share(); err == nil {
		t.Error("an event of one process was shared")
	}
	t.Setenv(cudatest.Faults, "cuEventQuery=600")
	if done, err := to.Done(); done || err != nil {
		t.Errorf("not ready is no error: %t, %v", done, err)
	}
	t.Setenv(cudatest.Faults, "cuEventQuery=700")
	if done, err := to.Done(); done || err == nil {
		t.Errorf("%t, %v", done, err)
	}
	t.Setenv(cudatest.Faults, "")
	if done, err := to.Done(); !done || err != nil {
		t.Errorf("%t, %v", done, err)
	}
}

// What was half made is taken back.
func TestCUDAFaultsLeaveNothingBehind(t *testing.T) {
	x := standIn(t)
	for _, faults := range []string{"cuMemMap=2", "cuMemSetAccess=1", "cuMemCreate=2", "cuMemAddressReserve=2", "cuMemGetAllocationGranularity=801", "cuMemRelease=400"} {
		t.Setenv(cudatest.Faults, faults)
		if s, err := x.MapSegments(1, 3, false); err == nil {
			t.Errorf("%s: mapped", faults)
			s.Close()
		}
	}
	t.Setenv(cudatest.Faults, "cuStreamCreate=2,cuEventCreate=2,cuMemHostAlloc=2,cuMemHostRegister_v2=2,cuMemAlloc_v2=2,cuIpcGetMemHandle=801,cuIpcOpenMemHandle_v2=205")
	if _, err := x.NewStream(); err == nil {
		t.Error("a stream")
	}
	if _, err := x.NewEvent(EventOrder); err == nil {
		t.Error("an event")
	}
	if _, err := x.AllocHost(1); err == nil {
		t.Error("host memory")
	}
	if err := x.Pin([]byte{1}); err == nil || !strings.Contains(err.Error(), "ulimit -l") {
		t.Errorf("pinned: %v", err)
	}
	if _, err := x.Alloc(1); err == nil {
		t.Error("memory")
	}
	if _, err := x.ShareMemory(1); !errors.Is(err, ErrNotSupported) {
		t.Errorf("shared: %v", err)
	}
	if _, err := x.OpenMemory(IPCHandle{}); err == nil {
		t.Error("opened")
	}
}

func TestCUDAOldDriverLacksWhatIsNew(t *testing.T) {
	x := standIn(t, "OLD", "LACKS_EXPORT")
	if err := x.FlushWrites(); !errors.Is(err, ErrNotSupported) {
		t.Errorf("flush: %v", err)
	}
	if _, err := x.MapSegments(1, 1, true); !errors.Is(err, ErrNotSupported) || !strings.Contains(err.Error(), "newer") {
		t.Errorf("segments: %v", err)
	}
	if g, err := x.d.GPUs(); err != nil || g[0].DMABuf() {
		t.Errorf("%+v, %v", g, err)
	}
	if v, err := x.d.Version(); v != 11020 || err != nil {
		t.Errorf("%d, %v", v, err)
	}
}

func TestCUDAFlush(t *testing.T) {
	if err := standIn(t).FlushWrites(); err != nil {
		t.Error(err)
	}
}
