package transporttest

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/headrace/headrace/transfer"
)

// MemoryFaults takes the pages of either end away in the middle of a transfer: the lease must end with the reason, and the
// channel must go on. It is for transports that touch lent memory by system calls or by copying.
func MemoryFaults(t *testing.T, f Factory) {
	for _, end := range []string{"prefill", "decode"} {
		t.Run(end, func(t *testing.T) {
			p := NewPair(t, f, Options{})
			q := p.NewRequest(NewRand(), 500, 0, patience)
			p.P.Pauses.Set(transfer.PauseWriteFrame, 1)
			q.Present(t, nil)
			q.Bind(t)
			q.PushAll(t, nil)
			WaitHeld(t, p.P.Pauses, transfer.PauseWriteFrame)
			mem := p.P.Mem
			if end == "decode" {
				mem = p.D.Mem
			}
			protect := func(prot int) {
				for _, m := range mem.otherMappings(t) {
					if err := unix.Mprotect(m, prot); err != nil {
						t.Fatal(err)
					}
				}
			}
			protect(unix.PROT_NONE)
			p.P.Pauses.ReleaseAll()
			for _, s := range []*Side{p.P, p.D} {
				if ev := s.End(t, q.Ticket.Nonce); ev.Kind != transfer.EventEnded || !strings.Contains(ev.Reason, "memory fault") {
					t.Errorf("%s: %v %q", s.ID, ev.Kind, ev.Reason)
				}
			}
			protect(unix.PROT_READ | unix.PROT_WRITE)
			for _, c := range p.P.Engine.Status().Channels {
				if c.LanesUp != c.Lanes || c.Errors != 0 {
					t.Errorf("channel after the fault: %+v", c)
				}
			}
			q = p.NewRequest(NewRand(), 500, 0, patience)
			q.Present(t, nil)
			q.Bind(t)
			q.PushAll(t, nil)
			q.Settled(t, nil)
		})
	}
}

// otherMappings gives the memory's mappings in this process other than Bytes: the daemon's.
func (m *Memory) otherMappings(t testing.TB) (out [][]byte) {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Fstat(m.fd, &st); err != nil {
		t.Fatal(err)
	}
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	own := uintptr(unsafe.Pointer(&m.Bytes[0]))
	for _, line := range strings.Split(string(maps), "\n") {
		var from, to, off uintptr
		var inode uint64
		var perms, dev string
		n, _ := fmt.Sscanf(line, "%x-%x %s %x %s %d", &from, &to, &perms, &off, &dev, &inode)
		if n == 6 && inode == st.Ino && from != own {
			out = append(out, unsafe.Slice(*(**byte)(unsafe.Pointer(&from)), to-from))
		}
	}
	return out
}
