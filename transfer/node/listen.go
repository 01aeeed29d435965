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

// socket is the listening socket, with the one for successors and the lock that says that its daemon lives.
type socket struct {
	*net.UnixListener
	ctl   *net.UnixListener
	path  string
	lock  *os.File
	inode uint64 // of what is published at path, 0 before
	given bool   // to a successor, with the lock
}

// prepareSocket makes the sockets, which nobody finds before publish. Liveness is a lock, which the kernel drops with
// the process, rather than a connection attempt: a stopped daemon answers none and still owns its socket. lock is the
// predecessor's, or nil to take one.
//
// The listening sockets themselves are never handed over, though descriptors could be: what a connecting engine is told
// of its peer's process (SO_PEERCRED, SO_PEERPIDFD) is who called listen, and the engine frees its blocks when that process
// has ended.
func prepareSocket(path string, lock *os.File) (*socket, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return nil, err
	}
	if tmp := temporary(path + socketControl); len(tmp) > maxSocketPath {
		return nil, errors.Join(fmt.Errorf("listen on %s: the path is longer than unix sockets allow (%d bytes): choose a shorter one", path, maxSocketPath-len(tmp)+len(path)), closeFile(lock))
	}
	if err := makeFolder(filepath.Dir(path)); err != nil {
		return nil, errors.Join(fmt.Errorf("listen on %s: %w", path, err), closeFile(lock))
	}
	if lock == nil {
		if lock, err = takeLock(path + ".lock"); err != nil {
			return nil, fmt.Errorf("listen on %s: %w", path, err)
		}
	}
	s := &socket{path: path, lock: lock}
	if s.UnixListener, err = bind(path); err == nil {
		s.ctl, err = bind(path + socketControl)
	}
	if err != nil {
		s.closeListeners()
		return nil, errors.Join(fmt.Errorf("listen on %s: %w", path, err), lock.Close())
	}
	return s, nil
}

func closeFile(f *os.File) error {
	if f == nil {
		return nil
	}
	return f.Close()
}

func temporary(path string) string { return fmt.Sprintf("%s.%d", path, os.Getpid()) }

// publish puts the sockets where engines and successors look for them: what was there is replaced in one step.
func (s *socket) publish() error {
	for _, path := range []string{s.path, s.path + socketControl} {
		if err := os.Rename(temporary(path), path); err != nil {
			return fmt.Errorf("listen on %s: %w", path, err)
		}
	}
	s.inode = inodeOf(s.path)
	notePID(s.lock)
	return nil
}

func inodeOf(path string) uint64 {
	var st unix.Stat_t
	if unix.Lstat(path, &st) != nil {
		return 0
	}
	return st.Ino
}

// ours tells whether engines still come to this daemon.
func (s *socket) ours() bool { return s.inode != 0 && inodeOf(s.path) == s.inode }

// give leaves path and lock to the successor: should that one die, another daemon may start at once.
func (s *socket) give() {
	s.given = true
	s.closeListeners()
	_ = s.lock.Close()
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
	return f, nil
}

// notePID says in the lock who holds it. That is for people: a full disk must not keep a daemon from starting.
func notePID(lock *os.File) {
	if lock.Truncate(0) == nil {
		_, _ = lock.WriteAt(fmt.Appendf(nil, "%d\n", os.Getpid()), 0)
	}
}

// bind makes a socket under a temporary name, for publish to rename into place once its mode is right: nobody can
// connect in between.
func bind(path string) (*net.UnixListener, error) {
	if st, err := os.Lstat(path); err == nil && st.Mode()&os.ModeSocket == 0 {
		return nil, errors.New("the file there is not a socket: move it away")
	}
	tmp := temporary(path)
	_ = os.Remove(tmp)
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: tmp, Net: "unix"})
	if err != nil {
		return nil, err
	}
	l.SetUnlinkOnClose(false)
	if err := os.Chmod(tmp, 0o600); err != nil {
		_ = os.Remove(tmp)
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}

func (s *socket) closeListeners() {
	for _, l := range []*net.UnixListener{s.UnixListener, s.ctl} {
		if l != nil {
			_ = l.Close()
		}
	}
	if s.inode == 0 { // not published
		_ = os.Remove(temporary(s.path))
		_ = os.Remove(temporary(s.path + socketControl))
	}
}

// Close removes the sockets while the lock is still held, so they cannot be a successor's. The lock file stays: removing
// it would let two daemons lock two files of the same name.
func (s *socket) Close() error {
	s.closeListeners()
	if s.given {
		return nil
	}
	var err error
	if s.ours() {
		err = errors.Join(os.Remove(s.path), os.Remove(s.path+socketControl))
	}
	return errors.Join(err, s.lock.Close())
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
