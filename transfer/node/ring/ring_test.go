package ring

import (
	"bytes"
	"encoding/hex"
	"errors"
	"reflect"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/headrace/headrace/internal/memfd"
)

func newRing(t testing.TB, submissions, completions uint32) []byte {
	t.Helper()
	m, err := memfd.Create("ring", Size(submissions, completions))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = m.Close() })
	if err := Init(m.Bytes(), submissions, completions); err != nil {
		t.Fatal(err)
	}
	return m.Bytes()
}

func TestGolden(t *testing.T) {
	for name, g := range Golden() {
		b, err := hex.DecodeString(g)
		if err != nil || len(b) != EntrySize {
			t.Fatalf("%s: %d bytes, %v", name, len(b), err)
		}
		var again [EntrySize]byte
		switch name {
		case "RING_HEADER":
			got := make([]byte, Size(256, 1024))
			if err := Init(got, 256, 1024); err != nil || !bytes.Equal(got[:EntrySize], b) {
				t.Errorf("%s: % x, %v", name, got[:EntrySize], err)
			}
			continue
		case "RING_PUSH":
			var s Submission
			if err := s.Parse((*[EntrySize]byte)(b)); err != nil || s.Lease != 11 || s.Seq != 3 || !reflect.DeepEqual(s.Units, []Unit{{0, 0, 3, 0}, {1, 0, 2, 1}}) {
				t.Errorf("%s: %+v, %v", name, s, err)
			}
			s.Put(&again)
		default:
			var c Completion
			if err := c.Parse((*[EntrySize]byte)(b)); err != nil || c.Lease != 11 || c.Seq != 3 || c.After != 2 || (c.Status == 0) != (name == "RING_PUSHED") {
				t.Errorf("%s: %+v, %v", name, c, err)
			}
			c.Put(&again)
		}
		if !bytes.Equal(again[:], b) {
			t.Errorf("%s: % x, want % x", name, again, b)
		}
	}
}

// One goroutine puts while another takes, many times round, sleeping whenever there is nothing to do.
func TestQueueKeepsOrder(t *testing.T) {
	b := newRing(t, 4, 8)
	sub, _ := EngineEnd(b, 4, 8)
	got, _ := DaemonEnd(b, 4, 8)
	fd, err := NewBell()
	if err != nil {
		t.Fatal(err)
	}
	bell, err := Listen(fd)
	if err != nil {
		t.Fatal(err)
	}
	defer bell.Close()
	const n = 20000
	done := make(chan error, 1)
	go func() {
		done <- func() error {
			spin := Spinner{Max: SpinDefault}
			for want := uint64(0); want < n; {
				var e [EntrySize]byte
				var s Submission
				ok, err := got.Get(&e)
				if err != nil {
					return err
				}
				if ok {
					if err := s.Parse(&e); err != nil || s.Seq != want {
						return errors.Join(err, errors.New("wrong order"))
					}
					want++
					continue
				}
				if spin.Spin(func() bool { return !got.Empty() }) {
					continue
				}
				spin.Sleep()
				if err := bell.Wait(func() bool { return !got.Sleep() }); err != nil {
					return err
				}
				spin.Woke()
				got.Awake()
			}
			return nil
		}()
	}()
	for i := uint64(0); i < n; {
		s := Submission{Lease: 1, Seq: i, Units: []Unit{{1, 2, 3, 4}}}
		var e [EntrySize]byte
		s.Put(&e)
		ok, err := sub.Put(&e)
		if err != nil {
			t.Fatal(err)
		}
		if !ok {
			yield(true)
			continue
		}
		if i++; sub.Wanted() {
			if err := Ring(fd); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
	if sub.Room() != 4 || !got.Empty() {
		t.Errorf("%d entries of 4 are free at the end", sub.Room())
	}
}

func TestQueueFull(t *testing.T) {
	b := newRing(t, 2, 4)
	sub, _ := EngineEnd(b, 2, 4)
	var e [EntrySize]byte
	for i := range 3 {
		if ok, err := sub.Put(&e); ok != (i < 2) || err != nil {
			t.Errorf("entry %d: %v, %v", i, ok, err)
		}
	}
}

// The other side's words may be anything: an error, or entries, and never more than the queue holds.
func TestBrokenWords(t *testing.T) {
	b := newRing(t, 4, 8)
	got, comp := DaemonEnd(b, 4, 8)
	var e [EntrySize]byte
	for _, tail := range []uint32{5, 1 << 31, ^uint32(0)} {
		word(b, offSubTail).Store(tail)
		if ok, err := got.Get(&e); ok || !errors.Is(err, ErrBroken) {
			t.Errorf("tail %d: %v, %v", tail, ok, err)
		}
	}
	for _, head := range []uint32{1, 100, 1 << 31} {
		word(b, offCompHead).Store(head)
		if ok, err := comp.Put(&e); ok || !errors.Is(err, ErrBroken) {
			t.Errorf("head %d: %v, %v", head, ok, err)
		}
		if comp.Room() > 8 {
			t.Errorf("head %d: room for %d", head, comp.Room())
		}
	}
	word(b, offSubTail).Store(2)
	for i := range 3 {
		if ok, err := got.Get(&e); err != nil || ok != (i < 2) {
			t.Errorf("entry %d: %v, %v", i, ok, err)
		}
	}
}

func TestMapRefuses(t *testing.T) {
	sealed, err := memfd.Create("ring", Size(4, 8))
	if err != nil {
		t.Fatal(err)
	}
	defer sealed.Close()
	open, err := unix.MemfdCreate("open", unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(open)
	if err := unix.Ftruncate(open, 1<<20); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		fd        int
		sub, comp uint32
		want      string
	}{
		{sealed.FD(), 4, 8, "need magic"},
		{sealed.FD(), 8, 16, "need"},
		{sealed.FD(), 3, 8, "power of two"},
		{sealed.FD(), 0, 8, "power of two"},
		{sealed.FD(), 4, 4, "twice"},
		{sealed.FD(), 1 << 31, 1 << 31, "power of two"},
		{open, 4, 8, "shrink"},
		{0, 4, 8, "not a memfd"},
		{-1, 4, 8, "not a memfd"},
	} {
		if _, err := Map(c.fd, c.sub, c.comp); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: %v", c, err)
		}
	}
	if err := Init(sealed.Bytes(), 4, 8); err != nil {
		t.Fatal(err)
	}
	b, err := Map(sealed.FD(), 4, 8)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Munmap(b); err != nil {
		t.Error(err)
	}
	if _, err := Map(sealed.FD(), 2, 8); err == nil {
		t.Error("other sizes than the header's were accepted")
	}
}

func TestCheckBell(t *testing.T) {
	fd, err := NewBell()
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := CheckBell(fd); err != nil {
		t.Error(err)
	}
	for _, fd := range []int{0, -1} {
		if err := CheckBell(fd); err == nil {
			t.Errorf("descriptor %d passes for an eventfd", fd)
		}
	}
}

// A writer that a full counter blocks goes on when the counter is taken down.
func TestSilence(t *testing.T) {
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	full := [8]byte{0xfe, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff}
	if _, err := unix.Write(fd, full[:]); err != nil {
		t.Fatal(err)
	}
	rung := make(chan error, 1)
	go func() { rung <- Ring(fd) }()
	for {
		select {
		case err := <-rung:
			if err != nil {
				t.Error(err)
			}
			return
		default:
			Silence(fd)
			yield(true)
		}
	}
}

// FuzzSubmission and FuzzCompletion: what parses is, byte for byte, what Put writes.
func FuzzSubmission(f *testing.F) {
	for _, g := range Golden() {
		b, _ := hex.DecodeString(g)
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var e, again [EntrySize]byte
		copy(e[:], b)
		var s Submission
		if s.Parse(&e) != nil {
			return
		}
		if s.Put(&again); e != again || len(s.Units) > UnitsMax {
			t.Fatalf("% x became %+v, % x", e, s, again)
		}
	})
}

func FuzzCompletion(f *testing.F) {
	for _, g := range Golden() {
		b, _ := hex.DecodeString(g)
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var e, again [EntrySize]byte
		copy(e[:], b)
		var c Completion
		if c.Parse(&e) != nil {
			return
		}
		if c.Put(&again); e != again {
			t.Fatalf("% x became %+v, % x", e, c, again)
		}
	})
}

// FuzzMemory writes arbitrary bytes over the shared memory between the daemon's steps. Whatever they are, the daemon gets
// entries or an error, and its own positions move by one entry at a time.
func FuzzMemory(f *testing.F) {
	f.Add([]byte{0, 0, 128, 1, 2, 0, 128, 9})
	f.Add([]byte{64, 0, 64, 255, 3, 1, 4, 0})
	f.Fuzz(func(t *testing.T, steps []byte) {
		b := make([]byte, Size(4, 8)+8)
		b = b[:Size(4, 8)]
		if err := Init(b, 4, 8); err != nil {
			t.Fatal(err)
		}
		sub, comp := DaemonEnd(b, 4, 8)
		for ; len(steps) >= 4; steps = steps[4:] {
			at := (int(steps[0]) | int(steps[1])<<8) % len(b)
			b[at] = steps[2]
			var e [EntrySize]byte
			var s Submission
			switch steps[3] % 4 {
			case 0:
				head := sub.head
				ok, err := sub.Get(&e)
				if ok && err == nil {
					_ = s.Parse(&e)
				}
				if moved := sub.head - head; moved > 1 || (moved == 1) != ok {
					t.Fatalf("head moved by %d, %v", moved, ok)
				}
			case 1:
				tail := comp.tail
				ok, _ := comp.Put(&e)
				if moved := comp.tail - tail; moved > 1 || (moved == 1) != ok {
					t.Fatalf("tail moved by %d, %v", moved, ok)
				}
			case 2:
				sub.Sleep()
			case 3:
				if comp.Room() > 8 {
					t.Fatal("more room than entries")
				}
				comp.Wanted()
			}
		}
	})
}
