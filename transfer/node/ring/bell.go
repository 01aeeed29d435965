package ring

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// NewBell makes an eventfd.
func NewBell() (int, error) {
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return -1, fmt.Errorf("make doorbell: %w", err)
	}
	return fd, nil
}

// CheckBell says whether a descriptor from elsewhere is an eventfd.
func CheckBell(fd int) error {
	what, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
	if err != nil {
		return fmt.Errorf("look at doorbell: %w", err)
	}
	if !strings.Contains(what, "[eventfd]") {
		return fmt.Errorf("doorbell is %s, need an eventfd", what)
	}
	return nil
}

// Ring rings a doorbell. It may block when the other side made it: both have one file, its counter may be driven up to
// its end and its O_NONBLOCK be cleared at any time.
func Ring(fd int) error {
	one := [8]byte{1}
	for {
		_, err := unix.Write(fd, one[:])
		switch {
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.EAGAIN): // so many were not taken note of: it is loud enough
			return nil
		case err != nil:
			return fmt.Errorf("ring doorbell: %w", err)
		default:
			return nil
		}
	}
}

// Silence takes the counter down, so that who blocks in Ring goes on. It never blocks.
func Silence(fd int) {
	var b [8]byte
	_, _ = unix.Preadv2(fd, [][]byte{b[:]}, -1, unix.RWF_NOWAIT)
}

// Listener waits for a doorbell in the runtime's poller. It never reads the counter, which would block where the other side
// clears O_NONBLOCK: the poller is edge-triggered, and each ring is an edge.
type Listener struct {
	file *os.File
	raw  syscall.RawConn
}

// Listen takes over fd, also when it fails.
func Listen(fd int) (*Listener, error) {
	unix.CloseOnExec(fd)
	if err := unix.SetNonblock(fd, true); err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("prepare doorbell: %w", err)
	}
	f := os.NewFile(uintptr(fd), "doorbell")
	raw, err := f.SyscallConn()
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return &Listener{file: f, raw: raw}, nil
}

// Wait returns when ready says yes, which is asked first and again after each ring. An error means that it was stopped.
func (l *Listener) Wait(ready func() bool) error {
	return l.raw.Read(func(uintptr) bool { return ready() })
}

// Control calls f with the descriptor.
func (l *Listener) Control(f func(fd int) error) (err error) {
	return errors.Join(l.raw.Control(func(fd uintptr) { err = f(int(fd)) }), err)
}

// Stop ends waits, now and later.
func (l *Listener) Stop() { _ = l.file.SetReadDeadline(time.Unix(1, 0)) }

// Close stops and closes the descriptor.
func (l *Listener) Close() error { return l.file.Close() }
