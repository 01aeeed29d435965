package nodeclient

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// soPeerPidfd (Linux 6.5) gives a pidfd of the very process that listens: no id that could be reused in between.
const soPeerPidfd = 77

// peerProcess finds the daemon's process. The id is 0 when it lives in another PID namespace.
func peerProcess(conn *net.UnixConn) (pid int, pidfd *os.File, err error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return 0, nil, err
	}
	fd := -1
	var inner error
	if err := raw.Control(func(s uintptr) {
		cred, err := unix.GetsockoptUcred(int(s), unix.SOL_SOCKET, unix.SO_PEERCRED)
		if err != nil {
			inner = fmt.Errorf("get peer credentials: %w", err)
			return
		}
		pid = int(cred.Pid)
		if fd, err = unix.GetsockoptInt(int(s), unix.SOL_SOCKET, soPeerPidfd); err == nil {
			return
		}
		fd = -1
		if pid <= 0 {
			inner = fmt.Errorf("get pidfd: the daemon is in another PID namespace, and SO_PEERPIDFD (Linux 6.5) says: %w", err)
			return
		}
		if fd, err = unix.PidfdOpen(pid, 0); err != nil {
			fd, inner = -1, fmt.Errorf("open pidfd of process %d: %w", pid, err)
		}
	}); err != nil {
		return pid, nil, err
	}
	if fd < 0 {
		return pid, nil, inner
	}
	file, err := pollable(fd)
	return pid, file, err
}

// pollable hands the descriptor to the runtime's poller. It owns fd, also when it fails.
func pollable(fd int) (*os.File, error) {
	unix.CloseOnExec(fd)
	if err := unix.SetNonblock(fd, true); err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("prepare pidfd: %w", err)
	}
	return os.NewFile(uintptr(fd), "pidfd"), nil
}

func (c *Client) closePidfd() {
	c.mu.Lock()
	f := c.pidfd
	c.pidfd = nil
	c.mu.Unlock()
	if f != nil {
		_ = f.Close()
	}
}

// ErrNoPidfd says that the daemon's process cannot be watched.
var ErrNoPidfd = errors.New("the daemon's process cannot be watched: no pidfd")

// PeerGone waits until the daemon's process is gone, not merely its socket: from then on nothing can touch lent memory.
// Call it before Close, which ends it with ErrClosed.
func (c *Client) PeerGone(ctx context.Context) error {
	c.mu.Lock()
	f, closed := c.pidfd, c.closed
	var own int
	var err error
	if f != nil && !closed {
		own, err = dupFile(f)
	}
	c.mu.Unlock()
	switch {
	case closed:
		return ErrClosed
	case f == nil:
		return ErrNoPidfd
	case err != nil:
		return err
	}
	file, err := pollable(own) // one a waiter: deadlines belong to the file
	if err != nil {
		return err
	}
	defer file.Close()
	wake := func() { _ = file.SetReadDeadline(time.Unix(1, 0)) }
	defer context.AfterFunc(ctx, wake)()
	ended := make(chan struct{})
	defer close(ended)
	go func() { // Close, and only Close, ends the wait too
		select {
		case <-c.closing:
			wake()
		case <-ended:
		}
	}()
	raw, err := file.SyscallConn()
	if err != nil {
		return err
	}
	err = raw.Read(func(fd uintptr) bool { return exited(int(fd)) })
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return ctx.Err()
	case errors.Is(err, os.ErrDeadlineExceeded):
		return ErrClosed
	}
	return fmt.Errorf("wait for the daemon's process: %w", err)
}

// exited polls without waiting: a pidfd is readable when its process has ended.
func exited(fd int) bool {
	p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	n, err := unix.Poll(p, 0)
	return err == nil && n == 1 && p[0].Revents&unix.POLLIN != 0
}

func dup(fd int) (int, error) {
	n, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("duplicate descriptor %d: %w", fd, err)
	}
	return n, nil
}

func dupFile(f *os.File) (n int, err error) {
	raw, err := f.SyscallConn()
	if err != nil {
		return -1, err
	}
	if cerr := raw.Control(func(fd uintptr) { n, err = dup(int(fd)) }); cerr != nil {
		return -1, cerr
	}
	return n, err
}
