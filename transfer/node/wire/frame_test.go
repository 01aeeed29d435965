package wire

import (
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/headrace/headrace/internal/leaktest"
)

func socketpair(t *testing.T) (a, b *net.UnixConn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	conn := func(fd int) *net.UnixConn {
		f := os.NewFile(uintptr(fd), "socketpair")
		defer f.Close()
		c, err := net.FileConn(f)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		return c.(*net.UnixConn)
	}
	return conn(fds[0]), conn(fds[1])
}

func mustFrame(t *testing.T, m Message) []byte {
	t.Helper()
	b, err := AppendFrame(nil, uint8(VersionMax), 0, 1, m)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestReadFramesAndDescriptor(t *testing.T) {
	a, b := socketpair(t)
	r := NewReader(b)
	ping, reg := mustFrame(t, Ping{Value: 1}), mustFrame(t, RegisterRegion{Size: 9})
	file, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if _, err := a.Write(append(append([]byte{}, ping...), ping...)); err != nil {
		t.Fatal(err)
	}
	if err := WriteFD(a, reg, int(file.Fd())); err != nil {
		t.Fatal(err)
	}
	if _, err := a.Write(ping); err != nil {
		t.Fatal(err)
	}
	for i, want := range []Type{TypePing, TypePing, TypeRegisterRegion, TypePing} {
		f, err := r.Read()
		if err != nil || f.Type != want {
			t.Fatalf("frame %d: %+v, %v", i, f, err)
		}
		if got := f.FD >= 0; got != (want == TypeRegisterRegion) {
			t.Errorf("frame %d has descriptor %d", i, f.FD)
		}
		if f.FD >= 0 {
			if flags, err := unix.FcntlInt(uintptr(f.FD), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
				t.Errorf("descriptor without close-on-exec: %v", err)
			}
		}
		f.Close()
	}
	_ = a.Close()
	if _, err := r.Read(); !errors.Is(err, io.EOF) {
		t.Errorf("after close: %v", err)
	}
}

func TestReadRefusesSurplusDescriptors(t *testing.T) {
	a, b := socketpair(t)
	r := NewReader(b)
	reg := mustFrame(t, RegisterRegion{Size: 9})
	before := leaktest.Descriptors(t)
	for n, want := range map[int]string{2: "2 descriptors", 4: "4 descriptors", 5: "truncated", 100: "truncated"} {
		fds := make([]int, n)
		for i := range fds {
			fds[i] = 0
		}
		if _, _, err := a.WriteMsgUnix(reg, unix.UnixRights(fds...), nil); err != nil {
			t.Fatal(err)
		}
		f, err := r.Read()
		if err != nil || f.FD != -1 || !strings.Contains(f.FDFault, want) {
			t.Errorf("%d descriptors: %+v, %v", n, f, err)
		}
	}
	// As many as a ring has are the message's own, closed with it.
	if _, _, err := a.WriteMsgUnix(reg, unix.UnixRights(0, 0, 0), nil); err != nil {
		t.Fatal(err)
	}
	if f, err := r.Read(); err != nil || f.FD != -1 || len(f.FDs) != RingFDs || f.FDFault != "" {
		t.Errorf("3 descriptors: %+v, %v", f, err)
	} else {
		f.Close()
	}
	// One with the header, one in the middle of the payload.
	if _, _, err := a.WriteMsgUnix(reg[:HeaderLen+4], unix.UnixRights(0), nil); err != nil {
		t.Fatal(err)
	}
	if _, _, err := a.WriteMsgUnix(reg[HeaderLen+4:], unix.UnixRights(0), nil); err != nil {
		t.Fatal(err)
	}
	if f, err := r.Read(); err != nil || f.FD != -1 || f.FDFault == "" {
		t.Errorf("two parts: %+v, %v", f, err)
	}
	// A descriptor on a frame that is cut off.
	if _, _, err := a.WriteMsgUnix(reg[:HeaderLen+4], unix.UnixRights(0), nil); err != nil {
		t.Fatal(err)
	}
	_ = a.CloseWrite()
	if _, err := r.Read(); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("cut frame: %v", err)
	}
	if after := leaktest.Descriptors(t); after != before {
		t.Errorf("%d descriptors before, %d after", before, after)
	}
}

func TestReadLargestFrame(t *testing.T) {
	a, b := socketpair(t)
	r := NewReader(b)
	frame := mustFrame(t, Handoff{Lease: 1, Record: make([]byte, MaxRecord)})
	go func() { _, _ = a.Write(frame); _, _ = a.Write(mustFrame(t, Ping{})) }()
	if f, err := r.Read(); err != nil || int(f.Length) != len(frame)-HeaderLen {
		t.Fatalf("%+v, %v", f, err)
	}
	if f, err := r.Read(); err != nil || f.Type != TypePing || cap(r.buf) > keepBuf {
		t.Fatalf("%+v, %v; buffer of %d kept", f, err, cap(r.buf))
	}
}
