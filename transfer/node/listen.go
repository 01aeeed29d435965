package node

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// maxSocketPath is what sockaddr_un holds, less its final zero.
const maxSocketPath = 107

// socket is the listening socket with the lock that says that its daemon lives.
type socket struct {
	*net.UnixListener
	path string
	lock *os.File
}

// listenSocket listens at path. Liveness is a lock, which the kernel drops with the process, rather than a connection
// attempt: a stopped daemon answers none and still owns its socket.
func listenSocket(path string) (*socket, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return nil, err
	}
	tmp := fmt.Sprintf("%s.%d", path, os.Getpid())
	if len(tmp) > maxSocketPath {
		return nil, fmt.Errorf("listen on %s: the path is longer than unix sockets allow (%d bytes): choose a shorter one", path, maxSocketPath-len(tmp)+len(path))
	}
	if err := makeFolder(filepath.Dir(path)); err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	lock, err := takeLock(path + ".lock")
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	l, err := bind(tmp, path)
	if err != nil {
		_ = lock.Close()
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	return &socket{UnixListener: l, path: path, lock: lock}, nil
}

func makeFolder(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		return fmt.Errorf("look at %s: %w", dir, err)
	}
	if st.Mode&0o022 != 0 && st.Mode&unix.S_ISVTX == 0 {
		return fmt.Errorf("others can write to %s: chmod 700 it or choose another folder", dir)
	}
	return nil
}

func takeLock(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		defer f.Close()
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return nil, fmt.Errorf("lock %s: %w", path, err)
		}
		owner, _ := io.ReadAll(io.LimitReader(f, 32))
		return nil, fmt.Errorf("another daemon (pid %s) serves it: stop that one or give this one a socket of its own", strings.TrimSpace(string(owner)))
	}
	if err := errors.Join(f.Truncate(0), writeAt(f, fmt.Sprintf("%d\n", os.Getpid()))); err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("write %s: %w", path, err)
	}
	return f, nil
}

func writeAt(f *os.File, s string) error {
	_, err := f.WriteAt([]byte(s), 0)
	return err
}

// bind makes the socket under a temporary name and renames it into place once its mode is right: nobody can connect
// in between, and a dead daemon's socket is replaced in one step.
func bind(tmp, path string) (*net.UnixListener, error) {
	if st, err := os.Lstat(path); err == nil && st.Mode()&os.ModeSocket == 0 {
		return nil, errors.New("the file there is not a socket: move it away")
	}
	_ = os.Remove(tmp)
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: tmp, Net: "unix"})
	if err != nil {
		return nil, err
	}
	l.SetUnlinkOnClose(false)
	if err := errors.Join(os.Chmod(tmp, 0o600)); err == nil {
		err = os.Rename(tmp, path)
		if err == nil {
			return l, nil
		}
	}
	_ = os.Remove(tmp)
	return nil, errors.Join(err, l.Close())
}

// Close removes the socket while the lock is still held, so it cannot be a successor's. The lock file stays: removing
// it would let two daemons lock two files of the same name.
func (s *socket) Close() error {
	err := errors.Join(s.UnixListener.Close(), os.Remove(s.path), s.lock.Close())
	return err
}

// checkPeer refuses processes of other users.
func checkPeer(conn *net.UnixConn, allowed []uint32) (*unix.Ucred, error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return nil, err
	}
	var cred *unix.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) {
		cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return nil, err
	}
	if credErr != nil {
		return nil, fmt.Errorf("get peer credentials: %w", credErr)
	}
	if !uidAllowed(cred.Uid, uint32(os.Geteuid()), allowed) {
		return cred, fmt.Errorf("user id %d may not attach: run the engine as user id %d or allow it with --allow-uid", cred.Uid, os.Geteuid())
	}
	return cred, nil
}

func uidAllowed(uid, own uint32, allowed []uint32) bool {
	return uid == own || uid == 0 || slices.Contains(allowed, uid)
}
