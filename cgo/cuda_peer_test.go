package cgo

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"testing"
	"time"

	"github.com/headrace/headrace/cgo/cudatest"
)

// realGPU takes the context of the host's first GPU, or skips the test.
func realGPU(t *testing.T) *GPUContext {
	t.Helper()
	cudatest.NeedGPU(t, ProbeCUDA().Reason())
	noGPULeaks(t)
	d, err := LoadCUDA("")
	if err != nil {
		t.Fatal(err)
	}
	x, err := d.Context(0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { x.Close() })
	return x
}

func TestGPUExport(t *testing.T) {
	x := realGPU(t)
	gpus, err := x.d.GPUs()
	if err != nil {
		t.Fatal(err)
	}
	g := gpus[0]
	t.Logf("%s at %s: dma-buf %t, RDMA %t (mapped %t), settled %t", g.Name(), g.Bus(), g.DMABuf(), g.RDMA(), g.RDMAMapped(), g.Settled())
	const size = 8 << 20
	addr := alloc(t, x, size)
	out, err := x.Export(addr+4096, 1<<20)
	if !g.DMABuf() {
		if !errors.Is(err, ErrNotSupported) {
			t.Errorf("a GPU without dma-buf: %+v, %v", out, err)
		}
		return
	}
	if err != nil || len(out) != 1 || out[0].Size != 1<<20 || fdSize(t, out[0].FD) < out[0].Offset+out[0].Size {
		t.Fatalf("%+v, %v", out, err)
	}
	out[0].Close()
	host, err := x.AllocHost(1 << 16)
	if err != nil {
		t.Fatal(err)
	}
	defer x.FreeHost(host)
	for name, c := range map[string][2]uint64{"nothing": {addr, 0}, "nowhere": {4096, 4096}, "beyond": {addr, 1 << 46}} {
		if out, err := x.Export(c[0], c[1]); err == nil {
			t.Errorf("%s: exported as %+v", name, out)
		} else {
			t.Logf("%s: %v", name, err)
		}
	}
	if !g.Mapped() {
		return
	}
	s, err := x.MapSegments(20<<20, 3, g.RDMAMapped())
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if out, err = x.Export(s.Addr+1<<20, s.Size-2<<20); err != nil {
		t.Fatal(err)
	}
	t.Logf("three segments came as %d descriptors", len(out))
	at := s.Addr + 1<<20
	for i := range out {
		if out[i].Addr != at || fdSize(t, out[i].FD) < out[i].Offset+out[i].Size {
			t.Errorf("part %d: %+v, want it to begin at %#x", i, out[i], at)
		}
		at += out[i].Size
		out[i].Close()
	}
}

// Two processes and one GPU: the second maps what the first allocated, and copies it.
func TestCUDACopyBetweenProcesses(t *testing.T) {
	if !Enabled {
		t.Skip("built without cgo")
	}
	betweenProcesses(t, standIn(t), 1<<20)
}

func TestGPUCopyBetweenProcesses(t *testing.T) {
	x := realGPU(t)
	for _, size := range []uint64{1 << 20, 16 << 20, 256 << 20} {
		plain, shared := betweenProcesses(t, x, size)
		t.Logf("%4d MiB: plain copy %.1f GB/s, from the other process %.1f GB/s, %.2fx", size>>20, rate(size, plain), rate(size, shared), float64(plain)/float64(shared))
		if shared > 2*plain {
			t.Errorf("%d bytes: a copy from another process takes %v, a plain one %v", size, shared, plain)
		}
	}
}

func rate(size uint64, d time.Duration) float64 { return float64(size) / float64(d) }

const peerEnv = "HEADRACE_TEST_GPU_PEER"

// peerTask goes to the second process, peerAnswer comes back.
type peerTask struct {
	Library string
	Memory  IPCHandle
	Size    uint64
	First   byte
}

type peerAnswer struct {
	Nanos time.Duration
	Error string
}

func betweenProcesses(t *testing.T, x *GPUContext, size uint64) (plain, shared time.Duration) {
	t.Helper()
	src, dst := alloc(t, x, size), alloc(t, x, size)
	if err := errors.Join(x.Fill(src, 0x5a, size), x.Fill(src, 0x01, 1)); err != nil {
		t.Fatal(err)
	}
	plain, err := timeCopy(x, dst, src, size)
	if err != nil {
		t.Fatal(err)
	}
	h, err := x.ShareMemory(src)
	if err != nil {
		t.Fatal(err)
	}
	if addr, err := x.OpenMemory(h); err == nil {
		t.Error("a process opened its own handle")
		x.CloseMemory(addr)
	}
	opened.Lock()
	task := peerTask{Memory: h, Size: size, First: 1}
	for library, d := range opened.by {
		if d == x.d {
			task.Library = library
		}
	}
	opened.Unlock()
	in, err := json.Marshal(task)
	if err != nil {
		t.Fatal(err)
	}
	c := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestCUDAPeerProcess$", "-test.v")
	c.Env = append(os.Environ(), peerEnv+"=1")
	c.Stdin, c.Stderr = bytes.NewReader(in), os.Stderr
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	c.ExtraFiles = []*os.File{w}
	if out, err := c.Output(); err != nil {
		t.Fatalf("the other process: %v\n%s", err, out)
	}
	w.Close()
	var a peerAnswer
	if err := json.NewDecoder(r).Decode(&a); err != nil || a.Error != "" {
		t.Fatalf("the other process: %v, %s", err, a.Error)
	}
	return plain, a.Nanos
}

// TestCUDAPeerProcess is the second process.
func TestCUDAPeerProcess(t *testing.T) {
	if os.Getenv(peerEnv) == "" {
		t.Skip("it is the other end of the tests between two processes")
	}
	var a peerAnswer
	var err error
	if a.Nanos, err = peerCopies(t); err != nil {
		a.Error = err.Error()
	}
	if err := json.NewEncoder(os.NewFile(3, "answer")).Encode(a); err != nil {
		t.Fatal(err)
	}
}

func peerCopies(t *testing.T) (best time.Duration, err error) {
	var task peerTask
	if err := json.NewDecoder(os.Stdin).Decode(&task); err != nil {
		return 0, err
	}
	noGPULeaks(t)
	d, err := LoadCUDA(task.Library)
	if err != nil {
		return 0, err
	}
	x, err := d.Context(0)
	if err != nil {
		return 0, err
	}
	defer x.Close()
	src, err := x.OpenMemory(task.Memory)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, x.CloseMemory(src)) }()
	dst, err := x.Alloc(task.Size)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, x.Free(dst)) }()
	if best, err = timeCopy(x, dst, src, task.Size); err != nil {
		return 0, err
	}
	host, err := x.AllocHost(int(task.Size))
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, x.FreeHost(host)) }()
	s, err := x.NewStream()
	if err != nil {
		return 0, err
	}
	defer s.Close()
	if err := errors.Join(s.Copy(CopyToHost, []Copy{{memAddr(host), dst, task.Size}}), s.Sync()); err != nil {
		return 0, err
	}
	if host[0] != task.First || !bytes.Equal(host[1:], bytes.Repeat([]byte{0x5a}, len(host)-1)) {
		return 0, fmt.Errorf("other bytes came: %x...", host[:8])
	}
	return best, nil
}

// timeCopy is the median of ten copies on the device, as its own events measure them.
func timeCopy(x *GPUContext, dst, src, size uint64) (time.Duration, error) {
	s, err := x.NewStream()
	if err != nil {
		return 0, err
	}
	defer s.Close()
	var events [2]*Event
	for i := range events {
		if events[i], err = x.NewEvent(EventTiming); err != nil {
			return 0, err
		}
		defer events[i].Close()
	}
	var times []time.Duration
	for range 11 { // the first warms up
		if err := errors.Join(events[0].Record(s), s.Copy(CopyDevice, []Copy{{dst, src, size}}), events[1].Record(s), events[1].Sync()); err != nil {
			return 0, err
		}
		d, err := events[1].Since(events[0])
		if err != nil {
			return 0, err
		}
		times = append(times, max(d, 1))
	}
	times = times[1:]
	slices.Sort(times)
	return times[len(times)/2], nil
}
