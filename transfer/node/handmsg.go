package node

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"
	"time"

	"github.com/headrace/headrace/transfer"
	"golang.org/x/sys/unix"
)

// The hand-over of one daemon's place to its successor, over the socket beside the engines' one (socketControl). Each
// message is a length (u32, little-endian) and JSON; descriptors come with an offer's first byte. Both are the same
// program in two versions, so fields may be added, and handVersion says whether the steps are the same:
//
//	successor    hello     who it is
//	running one  offer     the lock, and the TCP listeners, as descriptors
//	successor    prepared  it could start; nothing has changed for anybody so far
//	running one  cut       it takes nothing new from now on: what the successor must know
//	successor    serving   it can be reached at the same places; the running one drains
//	successor    listed    it is in the registry, if there is one
//	running one  progress  how many leases it still has; then it ends
//
// Until "serving" came, a successor's end lets the running one go on as before.
type handMsg struct {
	Kind     string        `json:"kind"`
	Version  int           `json:"version,omitempty"`
	Build    string        `json:"build,omitempty"`
	NodeID   string        `json:"node_id,omitempty"`
	PID      int           `json:"pid,omitempty"`
	Epoch    uint64        `json:"epoch,omitempty"`
	FDs      []string      `json:"fds,omitempty"` // what each descriptor is: lock, data, admin
	DataAddr string        `json:"data_addr,omitempty"`
	Admin    string        `json:"admin,omitempty"` // where the draining one answers HTTP
	Cut      *transfer.Cut `json:"cut,omitempty"`
	Leases   int           `json:"leases"`
	Reason   string        `json:"reason,omitempty"`
}

const (
	handVersion  = 1
	handBytesMax = 64 << 20
	handFDsMax   = 8

	// What each side waits for the other: a start probes transports and reads keys, the rest is a few system calls.
	prepareTimeout = 30 * time.Second
	handTimeout    = 10 * time.Second

	socketControl = ".ctl"
)

// Kinds of handMsg.
const (
	handHello    = "hello"
	handOffer    = "offer"
	handRefuse   = "refuse"
	handPrepared = "prepared"
	handCut      = "cut"
	handServing  = "serving"
	handListed   = "listed"
	handProgress = "progress"
)

// handConn is either end of a hand-over.
type handConn struct {
	ctx context.Context // its end breaks waits off
	uc  *net.UnixConn
}

func (h *handConn) send(m handMsg, fds ...int) error {
	doc, err := json.Marshal(m)
	if err != nil {
		return err
	}
	b := append(binary.LittleEndian.AppendUint32(nil, uint32(len(doc))), doc...)
	_ = h.uc.SetWriteDeadline(time.Now().Add(handTimeout))
	var rights []byte
	if len(fds) > 0 {
		rights = unix.UnixRights(fds...)
	}
	n, _, err := h.uc.WriteMsgUnix(b, rights, nil)
	if err == nil && n < len(b) {
		_, err = h.uc.Write(b[n:])
	}
	if err != nil {
		return fmt.Errorf("send %q: %w", m.Kind, err)
	}
	return nil
}

// receive reads one message of the kind within the timeout, with its descriptors; 0 waits for ever.
func (h *handConn) receive(kind string, timeout time.Duration) (m handMsg, fds []*os.File, err error) {
	deadline := time.Time{}
	if timeout > 0 {
		deadline = time.Now().Add(timeout)
	}
	_ = h.uc.SetReadDeadline(deadline)
	stop := context.AfterFunc(h.ctx, func() { _ = h.uc.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	defer func() {
		if err != nil {
			closeFiles(fds)
			fds = nil
		}
	}()
	var head [4]byte
	if fds, err = h.readFull(head[:], fds); err != nil {
		return m, fds, fmt.Errorf("wait for %q: %w", kind, err)
	}
	n := binary.LittleEndian.Uint32(head[:])
	if n > handBytesMax {
		return m, fds, fmt.Errorf("wait for %q: %d bytes, at most %d", kind, n, handBytesMax)
	}
	doc := make([]byte, n)
	if fds, err = h.readFull(doc, fds); err != nil {
		return m, fds, fmt.Errorf("read %q: %w", kind, err)
	}
	if err := json.Unmarshal(doc, &m); err != nil {
		return m, fds, fmt.Errorf("read %q: %w", kind, err)
	}
	switch {
	case m.Kind == handRefuse:
		return m, fds, errors.New(m.Reason)
	case m.Kind != kind:
		return m, fds, fmt.Errorf("wait for %q: the other daemon says %q", kind, m.Kind)
	case len(m.FDs) != len(fds):
		return m, fds, fmt.Errorf("read %q: %d descriptors came, %d were announced", kind, len(fds), len(m.FDs))
	}
	return m, fds, nil
}

func (h *handConn) readFull(b []byte, fds []*os.File) ([]*os.File, error) {
	oob := make([]byte, unix.CmsgSpace(4*handFDsMax))
	for len(b) > 0 {
		n, oobn, flags, _, err := h.uc.ReadMsgUnix(b, oob) // sets MSG_CMSG_CLOEXEC
		if oobn > 0 {
			more, perr := parseRights(oob[:oobn])
			fds = append(fds, more...)
			if perr != nil {
				return fds, perr
			}
		}
		switch {
		case err != nil:
			return fds, err
		case flags&syscall.MSG_CTRUNC != 0:
			return fds, errors.New("descriptors were lost on the way: this process may be at its limit of open files (ulimit -n)")
		case n == 0:
			return fds, io.ErrUnexpectedEOF
		}
		b = b[n:]
	}
	return fds, nil
}

func parseRights(oob []byte) (files []*os.File, err error) {
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, err
	}
	for i := range msgs {
		fds, err := unix.ParseUnixRights(&msgs[i])
		if err != nil {
			return files, err
		}
		for _, fd := range fds {
			files = append(files, os.NewFile(uintptr(fd), "handed over"))
		}
	}
	return files, nil
}

func closeFiles(files []*os.File) {
	for _, f := range files {
		if f != nil {
			_ = f.Close()
		}
	}
}

// fdOf lends a descriptor to f without changing its mode, as File and Fd would.
func fdOf(c syscall.Conn, f func(fd int) error) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var inner error
	if err := raw.Control(func(fd uintptr) { inner = f(int(fd)) }); err != nil {
		return err
	}
	return inner
}

// dupOf is a descriptor of its own for the same open file.
func dupOf(c syscall.Conn) (n int, err error) {
	err = fdOf(c, func(fd int) (err error) {
		n, err = unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
		return err
	})
	return n, err
}
