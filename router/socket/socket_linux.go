package socket

import (
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// conn is a TCP connection that waits in Go's poller, as every one does, but reads and writes by itself.
type conn struct {
	*net.TCPConn
	raw           syscall.RawConn
	reads, writes transfer
	pieces        func(fd uintptr) bool // writes.writeList
}

// transfer is what one call reads or writes. One at a time goes each way.
type transfer struct {
	mu  sync.Mutex
	b   []byte
	n   int
	err unix.Errno
	f   func(fd uintptr) bool // bound once, so that a call takes no memory

	waited bool // there was nothing to read

	list net.Buffers // to be written in place of b
	iov  [piecesAtOnce]unix.Iovec
}

// piecesAtOnce is how many pieces one call writes.
const piecesAtOnce = 8

// New is c where it is no TCP connection.
func New(c net.Conn) net.Conn {
	tc, ok := c.(*net.TCPConn)
	if !ok {
		return c
	}
	raw, err := tc.SyscallConn()
	if err != nil {
		return c
	}
	s := &conn{TCPConn: tc, raw: raw}
	s.reads.f, s.writes.f = s.reads.read, s.writes.write
	s.pieces = s.writes.writeList
	return s
}

// WriteBuffers writes all pieces in order, several a call, or says why it did not. What was written is taken out of them.
func WriteBuffers(c net.Conn, pieces *net.Buffers) (int64, error) {
	s, ok := c.(*conn)
	if !ok {
		return pieces.WriteTo(c)
	}
	t := &s.writes
	t.mu.Lock()
	defer t.mu.Unlock()
	t.begin(nil)
	t.list = *pieces
	n, err := t.end("writev", s.raw.Write(s.pieces))
	*pieces, t.list = t.list, nil
	return int64(n), err
}

func (s *conn) Read(p []byte) (int, error) {
	t := &s.reads
	t.mu.Lock()
	defer t.mu.Unlock()
	t.begin(p)
	err := s.raw.Read(t.f)
	n, err := t.end("read", err)
	if n == 0 && err == nil && len(p) > 0 {
		return 0, io.EOF
	}
	return n, err
}

// Write writes all of p, or says why it did not.
func (s *conn) Write(p []byte) (int, error) {
	t := &s.writes
	t.mu.Lock()
	defer t.mu.Unlock()
	t.begin(p)
	return t.end("write", s.raw.Write(t.f))
}

// WriteTo and ReadFrom would go past Read and Write.

// WriteTo is io.Copy's.
func (s *conn) WriteTo(w io.Writer) (int64, error) { return io.Copy(w, struct{ io.Reader }{s}) }

// ReadFrom is io.Copy's.
func (s *conn) ReadFrom(r io.Reader) (int64, error) { return io.Copy(struct{ io.Writer }{s}, r) }

func (t *transfer) begin(p []byte) { t.b, t.n, t.err, t.waited = p, 0, 0, false }

func (t *transfer) end(call string, err error) (int, error) {
	t.b = nil
	if err == nil && t.err != 0 {
		err = os.NewSyscallError(call, t.err)
	}
	return t.n, err
}

// read takes what there is; false when there is nothing.
func (t *transfer) read(fd uintptr) bool {
	if len(t.b) == 0 {
		return true
	}
	if t.waited {
		yields.came.Add(1)
	}
	for {
		n, errno := read(fd, t.b)
		switch errno {
		case 0:
			t.n = n
			return true
		case unix.EINTR:
		case unix.EAGAIN:
			t.waited = true
			return false
		default:
			t.err = errno
			return true
		}
	}
}

// write gives all that the socket takes; false when there is more.
func (t *transfer) write(fd uintptr) bool {
	for t.n < len(t.b) {
		n, errno := write(fd, t.b[t.n:])
		switch errno {
		case 0:
			t.n += n
		case unix.EINTR:
		case unix.EAGAIN:
			return false
		default:
			t.err = errno
			return true
		}
	}
	return true
}

// writeList is write of a list.
func (t *transfer) writeList(fd uintptr) bool {
	defer clear(t.iov[:])
	for {
		n := 0
		for i := 0; i < len(t.list) && n < len(t.iov); i++ {
			if p := t.list[i]; len(p) > 0 {
				t.iov[n].Base = unsafe.SliceData(p)
				t.iov[n].SetLen(len(p))
				n++
			}
		}
		if n == 0 {
			t.list = t.list[len(t.list):]
			return true
		}
		wrote, errno := writev(fd, t.iov[:n])
		switch errno {
		case 0:
			t.n += wrote
			t.wrote(wrote)
		case unix.EINTR:
		case unix.EAGAIN:
			return false
		default:
			t.err = errno
			return true
		}
	}
}

// wrote takes n bytes off the list.
func (t *transfer) wrote(n int) {
	for len(t.list) > 0 && n >= len(t.list[0]) {
		n -= len(t.list[0])
		t.list[0] = nil
		t.list = t.list[1:]
	}
	if n > 0 {
		t.list[0] = t.list[0][n:]
	}
}
