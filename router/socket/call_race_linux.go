//go:build race

package socket

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The race detector takes what was written to a socket for ordered before what was read from one, which these calls tell it.

func read(fd uintptr, b []byte) (int, unix.Errno) { return call(syscall.Read(int(fd), b)) }

func write(fd uintptr, b []byte) (int, unix.Errno) { return call(syscall.Write(int(fd), b)) }

// writev writes the first piece, as syscall has no such call.
func writev(fd uintptr, pieces []unix.Iovec) (int, unix.Errno) {
	return write(fd, unsafe.Slice(pieces[0].Base, int(pieces[0].Len)))
}

func call(n int, err error) (int, unix.Errno) {
	if err == nil {
		return n, 0
	}
	errno, ok := err.(unix.Errno) //nolint:errorlint // a system call's own error, wrapped by nobody
	if !ok {
		errno = unix.EIO
	}
	return 0, errno
}
