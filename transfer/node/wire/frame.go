package wire

import (
	"errors"
	"fmt"
	"io"
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// Header is what stands before every payload.
type Header struct {
	Version uint8 // the negotiated version; on HELLO the sender's highest, not checked there
	Type    Type
	Length  uint32 // of the payload
	Flags   uint32
	Request uint64 // 0 on events
}

// AppendFrame writes header and payload, or says why the message cannot be sent.
func AppendFrame(b []byte, version uint8, flags uint32, request uint64, m Message) ([]byte, error) {
	if err := m.Check(); err != nil {
		return b, err
	}
	at := len(b)
	b = append(b, make([]byte, HeaderLen)...)
	b = m.append(b)
	n := len(b) - at - HeaderLen
	if err := checkLen("payload", n, MaxPayload); err != nil {
		return b[:at], err
	}
	putHeader(b[at:], Header{Version: version, Type: m.Type(), Length: uint32(n), Flags: flags, Request: request})
	return b, nil
}

func putHeader(b []byte, h Header) {
	le.PutUint32(b, Magic)
	b[4], b[5] = h.Version, 0
	le.PutUint16(b[6:], uint16(h.Type))
	le.PutUint32(b[8:], h.Length)
	le.PutUint32(b[12:], h.Flags)
	le.PutUint64(b[16:], h.Request)
}

// ParseHeader reads a header. Its errors mean that the stream's frames are lost.
func ParseHeader(b []byte) (Header, error) {
	if len(b) < HeaderLen {
		return Header{}, Errorf(CodeFraming, "header of %d bytes, want %d", len(b), HeaderLen)
	}
	if m := le.Uint32(b); m != Magic {
		return Header{}, Errorf(CodeFraming, "bad magic %#08x, want %#08x: not a headrace engine, or frames were lost", m, uint32(Magic))
	}
	if b[5] != 0 {
		return Header{}, Errorf(CodeFraming, "reserved header byte is %#x, want 0", b[5])
	}
	h := Header{Version: b[4], Type: Type(le.Uint16(b[6:])), Length: le.Uint32(b[8:]), Flags: le.Uint32(b[12:]), Request: le.Uint64(b[16:])}
	if h.Length > MaxPayload {
		return h, Errorf(CodeFraming, "%s of %d bytes exceeds the limit of %d", h.Type, h.Length, MaxPayload)
	}
	return h, nil
}

// Frame is one message as it came. Payload is valid until the next Read. FD is -1 or the descriptor that came, FDs are
// those of a message with RingFDs of them: the caller must close or hand them on.
type Frame struct {
	Header
	Payload []byte
	FD      int
	FDs     []int
	FDFault string // why the descriptors that came were refused; they are closed already
}

// RingFDs is how many descriptors SETUP_RING carries: the memory, the daemon's doorbell, the engine's doorbell.
const RingFDs = 3

// Close closes the descriptors nobody took.
func (f *Frame) Close() {
	if f.FD >= 0 {
		_ = unix.Close(f.FD)
		f.FD = -1
	}
	closeAll(f.FDs)
	f.FDs = nil
}

func closeAll(fds []int) {
	for _, fd := range fds {
		_ = unix.Close(fd)
	}
}

// Reader reads frames. It never reads beyond the frame at hand, so a descriptor received
// during a frame was sent with that frame: the kernel ends a read at bytes that carry one.
type Reader struct {
	conn *net.UnixConn
	hdr  [HeaderLen]byte
	buf  []byte
	oob  []byte
}

// keepBuf is the largest payload buffer kept between frames.
const keepBuf = 64 << 10

// NewReader reads frames from conn.
func NewReader(conn *net.UnixConn) *Reader {
	// Room for more than any message has: a surplus one must be seen, and closed.
	return &Reader{conn: conn, buf: make([]byte, 4096), oob: make([]byte, unix.CmsgSpace((RingFDs+1)*4))}
}

// Read returns the next frame: io.EOF between frames, io.ErrUnexpectedEOF inside one, *Error with
// CodeFraming when the stream cannot be followed any more.
func (r *Reader) Read() (*Frame, error) {
	f := &Frame{FD: -1}
	if n, err := r.full(r.hdr[:], f); err != nil {
		f.Close()
		if errors.Is(err, io.EOF) && n > 0 {
			err = io.ErrUnexpectedEOF
		}
		return nil, err
	}
	h, err := ParseHeader(r.hdr[:])
	if err != nil {
		f.Close()
		return nil, err
	}
	f.Header = h
	n := int(h.Length)
	if n > cap(r.buf) || (cap(r.buf) > keepBuf && n <= keepBuf) {
		r.buf = make([]byte, max(n, 4096))
	}
	f.Payload = r.buf[:n]
	if _, err := r.full(f.Payload, f); err != nil {
		f.Close()
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return nil, err
	}
	return f, nil
}

func (r *Reader) full(b []byte, f *Frame) (int, error) {
	got := 0
	for got < len(b) {
		n, oobn, flags, _, err := r.conn.ReadMsgUnix(b[got:], r.oob) // sets MSG_CMSG_CLOEXEC
		if oobn > 0 || flags&syscall.MSG_CTRUNC != 0 {
			r.takeFDs(f, r.oob[:oobn], flags)
		}
		if err != nil {
			return got, err
		}
		if n == 0 {
			return got, io.EOF
		}
		got += n
	}
	return got, nil
}

// takeFDs keeps the descriptors if they are as many as some message has, else it closes them and notes the fault.
func (r *Reader) takeFDs(f *Frame, oob []byte, flags int) {
	var fds []int
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		f.FDFault = fmt.Sprintf("ancillary data does not parse: %v", err)
	}
	for i := range msgs {
		if got, err := unix.ParseUnixRights(&msgs[i]); err == nil {
			fds = append(fds, got...)
		} else {
			f.FDFault = "ancillary data other than descriptors"
		}
	}
	if f.FD >= 0 {
		fds = append(fds, f.FD)
		f.FD = -1
	}
	fds = append(fds, f.FDs...)
	f.FDs = nil
	switch {
	case flags&syscall.MSG_CTRUNC != 0:
		f.FDFault = "descriptors were truncated: send as many as the message has (or this process is out of descriptors)"
	case len(fds) > 1 && len(fds) != RingFDs:
		f.FDFault = fmt.Sprintf("%d descriptors came, want exactly one", len(fds))
	}
	switch {
	case f.FDFault != "":
		closeAll(fds)
	case len(fds) == 1:
		f.FD = fds[0]
	default:
		f.FDs = fds
	}
}

// WriteFD writes one frame with descriptors at its first byte.
func WriteFD(conn *net.UnixConn, frame []byte, fds ...int) error {
	n, _, err := conn.WriteMsgUnix(frame, unix.UnixRights(fds...), nil)
	if err == nil && n < len(frame) {
		_, err = conn.Write(frame[n:])
	}
	return err
}
