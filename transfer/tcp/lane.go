package tcp

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/headrace/headrace/transfer"
)

// lane is one TCP connection. One goroutine at a time sends (the engine's lane loop), another one receives.
type lane struct {
	index int
	conn  *net.TCPConn
	raw   syscall.RawConn
	setup *transfer.Setup
	quiet atomic.Bool // nobody wants to hear of the end
	ended func()      // takes the last readings; before the connection is closed
	out   sender
	in    receiver
}

// scratchSize is the unit in which a fenced piece is padded or thrown away.
const scratchSize = 256 << 10

// zeros pads pieces that were fenced while they were sent. Nobody writes it.
var zeros [scratchSize]byte

func newLane(s *transfer.Setup, index int, conn *net.TCPConn, raw syscall.RawConn) *lane {
	l := &lane{index: index, conn: conn, raw: raw, setup: s}
	l.ended = sync.OnceFunc(s.Watch(transfer.Flow{Transport: "tcp", Peer: peerOf(conn), Socket: raw}))
	l.out.step = l.out.write
	l.out.once = func(fd uintptr) bool {
		l.out.through = l.out.write(fd)
		return true
	}
	l.in.step = l.in.read
	return l
}

func peerOf(conn net.Conn) netip.Addr {
	if a, ok := conn.RemoteAddr().(*net.TCPAddr); ok {
		return a.AddrPort().Addr().Unmap()
	}
	return netip.Addr{}
}

func (l *lane) fail(err error) {
	l.ended()
	if l.quiet.Swap(true) {
		l.conn.Close()
		return
	}
	l.conn.Close()
	l.setup.LaneDown(l.index, err)
}

// iovec is the kernel's struct iovec. Its base is a number, not a pointer: it mostly points into lent memory, which the
// garbage collector must not look at, and which may be unmapped while a stale one still lies about. What points into
// the Go heap is kept alive by the lane.
type iovec struct {
	base uintptr
	len  uint64
}

const iovMax = 1024 // UIO_MAXIOV

// vector is a list of iovecs that is consumed from the front.
type vector struct {
	all  []iovec
	next int
}

func (v *vector) reset() { v.all, v.next = v.all[:0], 0 }

// add appends n bytes at base, joined with the last ones where they touch.
func (v *vector) add(base uintptr, n uint64) {
	if k := len(v.all); k > v.next {
		if last := &v.all[k-1]; last.base+uintptr(last.len) == base {
			last.len += n
			return
		}
	}
	v.all = append(v.all, iovec{base, n})
}

// addApart appends n bytes that must stay an iovec of their own.
func (v *vector) addApart(b []byte) {
	v.all = append(v.all, iovec{uintptr(unsafe.Pointer(unsafe.SliceData(b))), uint64(len(b))})
}

func (v *vector) advance(n uint64) {
	for n > 0 {
		x := &v.all[v.next]
		if n < x.len {
			x.base += uintptr(n)
			x.len -= n
			return
		}
		n -= x.len
		v.next++
	}
}

func (v *vector) empty() bool { return v.next == len(v.all) }

// call runs readv or writev on the front of the vector.
func (v *vector) call(trap, fd uintptr) (uint64, syscall.Errno) {
	count := min(len(v.all)-v.next, iovMax)
	for {
		n, _, errno := syscall.Syscall(trap, fd, uintptr(unsafe.Pointer(&v.all[v.next])), uintptr(count))
		if errno != unix.EINTR {
			return uint64(n), errno
		}
	}
}

// timed is call, with the time it took added to spent.
func (v *vector) timed(trap, fd uintptr, measure bool, spent *time.Duration) (uint64, syscall.Errno) {
	if !measure {
		return v.call(trap, fd)
	}
	began := time.Now()
	n, errno := v.call(trap, fd)
	*spent += time.Since(began)
	return n, errno
}

// sender is the state of the piece being sent.
type sender struct {
	step    func(fd uintptr) bool // write, bound once
	once    func(fd uintptr) bool // write, without asking for more
	through bool                  // once wrote everything
	choice  transfer.Choice
	w       *transfer.Write // nil between pieces
	vec     vector
	left    uint64        // payload bytes not written
	head    uint64        // header bytes not written
	stage   []byte        // of PieceMax bytes, once a piece was staged
	spent   time.Duration // in system calls and copies, where it is measured
	timed   bool
	padding bool // fenced, or the source cannot be read: the rest is zeros
	fault   bool // the source cannot be read
	err     error
	header  [transfer.DataHeaderSize]byte
	trailer [transfer.DataTrailerSize]byte
}

// send writes one piece: header, payload straight from the source, trailer. If the lease is fenced before the first byte,
// nothing is written; if later, the rest of the payload is zeros and the trailer says so.
func (l *lane) send(w *transfer.Write) error {
	if l.out.w != w { // else start has begun it
		if err := l.begin(w); err != nil {
			return err
		}
	}
	return l.sent(l.raw.Write(l.out.step))
}

// start is send as far as it goes without waiting for the peer. If that is not to the end, send goes on with it.
func (l *lane) start(w *transfer.Write) (through bool, err error) {
	if err := l.begin(w); err != nil {
		return true, err
	}
	if err := l.raw.Write(l.out.once); err != nil || l.out.through {
		return true, l.sent(err)
	}
	return false, nil
}

// begin gets a piece ready to be written.
func (l *lane) begin(w *transfer.Write) error {
	o := &l.out
	choice := l.setup.Sending.Pick(uint64(w.Piece.Bytes), len(w.Runs))
	o.choice, o.timed, o.spent = choice, choice.Measured(), 0
	var payload []byte
	if choice.Mode == transfer.Staged {
		began := time.Now()
		if o.stage == nil {
			o.stage = make([]byte, transfer.PieceMax)
		}
		payload = o.stage[:w.Piece.Bytes]
		if err := w.Gather(payload); err != nil {
			return err
		}
		o.spent = time.Since(began)
	}
	sum, err := w.Sum(payload)
	if err != nil {
		return err
	}
	return l.prepare(w, payload, sum)
}

// prepare lists what is to be written: from payload if it was gathered there, else from the source.
func (l *lane) prepare(w *transfer.Write, payload []byte, sum uint64) error {
	o := &l.out
	if !w.Enter() {
		return transfer.ErrFenced
	}
	w.Piece.PutHeader(&o.header)
	transfer.PutTrailer(&o.trailer, true, sum)
	o.w, o.padding, o.fault, o.err = w, false, false, nil
	o.left, o.head = uint64(w.Piece.Bytes), uint64(len(o.header))
	o.vec.reset()
	o.vec.addApart(o.header[:])
	if payload != nil {
		o.vec.addApart(payload)
	} else {
		mem := w.Src.Bytes()
		base := uintptr(unsafe.Pointer(unsafe.SliceData(mem)))
		for i := range w.Runs {
			r := &w.Runs[i]
			_ = mem[r.Src : r.Src+r.Len] // the plan keeps to the layout, and the layout to the region
			o.vec.add(base+uintptr(r.Src), r.Len)
		}
	}
	o.vec.addApart(o.trailer[:])
	w.Leave()
	return nil
}

// sent gives the result of a piece; err is that of writing it.
func (l *lane) sent(err error) error {
	o, w := &l.out, l.out.w
	runtime.KeepAlive(l)
	o.w = nil
	if o.err == nil {
		o.err = err
	}
	switch {
	case o.err == nil && o.fault:
		return fmt.Errorf("send piece: %w", transfer.ErrMemory)
	case o.err == nil && o.padding:
		return transfer.ErrFenced
	case o.err == nil:
		l.setup.Sending.Took(o.choice, o.spent, uint64(w.Piece.Bytes))
	case !errors.Is(o.err, transfer.ErrFenced):
		return fmt.Errorf("send piece on lane %d: %w", l.index, o.err)
	}
	return o.err
}

// write is called with the descriptor when it may be writable; false asks to be called again when it is.
func (o *sender) write(fd uintptr) bool {
	for !o.vec.empty() {
		guarded := o.left > 0 && !o.padding
		if guarded && !o.w.Enter() {
			if o.head == uint64(len(o.header)) {
				o.err = transfer.ErrFenced // not a byte was written: the lane can go on
				return true
			}
			o.pad()
			continue
		}
		n, errno := o.vec.timed(unix.SYS_WRITEV, fd, o.timed, &o.spent)
		if guarded {
			o.w.Leave()
		}
		switch errno {
		case 0:
			o.vec.advance(n)
			h := min(n, o.head)
			o.head -= h
			o.left -= min(n-h, o.left)
		case unix.EAGAIN:
			return false
		case unix.EFAULT: // a poisoned page, or no memory for it: see transfer.Region
			if !guarded {
				o.err = errno
				return true
			}
			o.fault = true
			o.pad()
		default:
			o.err = errno
			return true
		}
	}
	return true
}

// pad replaces what is left of the payload by zeros.
func (o *sender) pad() {
	o.padding = true
	transfer.PutTrailer(&o.trailer, false, 0)
	headLeft := o.header[uint64(len(o.header))-o.head:]
	o.vec.reset()
	if len(headLeft) > 0 {
		o.vec.addApart(headLeft)
	}
	for left := o.left; left > 0; {
		n := min(left, scratchSize)
		o.vec.addApart(zeros[:n])
		left -= n
	}
	o.vec.addApart(o.trailer[:])
}

// receiver is the state of the piece being received.
type receiver struct {
	step    func(fd uintptr) bool // read, bound once
	x       transfer.Landing
	vec     vector
	left    uint64 // payload bytes not read
	tailGot int    // bytes of tail read
	need    int    // bytes of tail that must be read
	landing bool   // payload goes into blocks; else into scratch
	staged  bool   // by way of stage
	stage   []byte // of PieceMax bytes, once a piece was staged
	spent   time.Duration
	timed   bool
	err     error
	// tail takes the trailer, and what has come of the next header: one system call less.
	tail    [transfer.DataTrailerSize + transfer.DataHeaderSize]byte
	scratch []byte
}

// receive takes pieces until the connection ends.
func (l *lane) receive() {
	in := &l.in
	in.scratch = make([]byte, scratchSize)
	const trailer = transfer.DataTrailerSize
	in.tailGot = trailer // as if a trailer had just been read
	for {
		// The next header lies, in part, behind the last trailer.
		var header [transfer.DataHeaderSize]byte
		in.left, in.need, in.landing = 0, len(in.tail), false
		if err := l.fill(); err != nil {
			l.fail(err)
			return
		}
		copy(header[:], in.tail[trailer:])
		p, err := transfer.ParseHeader(&header)
		if err == nil {
			err = l.setup.Target.Begin(l.index, p, &in.x)
		}
		if err != nil {
			l.fail(fmt.Errorf("receive on lane %d: %w", l.index, err))
			return
		}
		whole, err := l.payload(&p)
		if err != nil {
			in.x.End(false)
			l.fail(err)
			return
		}
		in.x.End(whole)
	}
}

// payload reads a piece's payload and trailer; whole says that every byte is in its block.
func (l *lane) payload(p *transfer.Piece) (whole bool, err error) {
	in := &l.in
	in.left, in.tailGot, in.need = uint64(p.Bytes), 0, transfer.DataTrailerSize
	in.landing = !in.x.Discard()
	if in.landing {
		l.setup.Pauses.Wait(transfer.PauseReadFrame, in.x.Stop())
		in.landing = in.x.Enter()
	}
	in.vec.reset()
	var choice transfer.Choice
	in.staged, in.timed, in.spent = false, false, 0
	if in.landing {
		choice = l.setup.Receiving.Pick(in.left, len(in.x.Runs))
		in.staged, in.timed = choice.Mode == transfer.Staged, choice.Measured()
	}
	switch {
	case in.staged:
		in.x.Leave()
		if in.stage == nil {
			in.stage = make([]byte, transfer.PieceMax)
		}
		in.vec.addApart(in.stage[:in.left])
		in.vec.addApart(in.tail[:])
	case in.landing:
		mem := in.x.Dst.Bytes()
		base := uintptr(unsafe.Pointer(unsafe.SliceData(mem)))
		for i := range in.x.Runs {
			r := &in.x.Runs[i]
			_ = mem[r.Dst : r.Dst+r.Len] // the plan keeps to the layout, and the layout to the region
			in.vec.add(base+uintptr(r.Dst), r.Len)
		}
		in.x.Leave()
		in.vec.addApart(in.tail[:])
	default:
		in.discard()
	}
	if err := l.fill(); err != nil {
		return false, err
	}
	var trailer [transfer.DataTrailerSize]byte
	copy(trailer[:], in.tail[:])
	sent, sum, err := transfer.ParseTrailer(&trailer)
	if err != nil || !sent || !in.landing {
		return false, err
	}
	if in.staged {
		began := time.Now()
		if in.x.Scatter(in.stage[:p.Bytes]) != nil {
			return false, nil // fenced, or told to the lease: the lane goes on
		}
		in.spent += time.Since(began)
	}
	l.setup.Receiving.Took(choice, in.spent, uint64(p.Bytes))
	return in.x.Verify(sum), nil
}

// discard sends what is left of the payload to scratch.
func (in *receiver) discard() {
	in.landing = false
	in.vec.reset()
	for left := in.left; left > 0; {
		n := min(left, scratchSize)
		in.vec.addApart(in.scratch[:n])
		left -= n
	}
	in.vec.addApart(in.tail[in.tailGot:])
}

// fill reads until the payload is complete and the tail holds what is needed.
func (l *lane) fill() error {
	in := &l.in
	if in.left == 0 && in.tailGot >= in.need {
		return nil
	}
	if in.left == 0 {
		in.vec.reset()
		in.vec.addApart(in.tail[in.tailGot:])
	}
	in.err = nil
	err := l.raw.Read(in.step)
	runtime.KeepAlive(l)
	if in.err != nil {
		err = in.err
	}
	if err != nil {
		return fmt.Errorf("receive on lane %d: %w", l.index, err)
	}
	return nil
}

// read is called with the descriptor when it may be readable; false asks to be called again when it is.
func (in *receiver) read(fd uintptr) bool {
	for in.left > 0 || in.tailGot < in.need {
		guarded := in.landing && !in.staged && in.left > 0 // what is staged touches the blocks later
		if guarded && !in.x.Enter() {
			in.discard()
			continue
		}
		n, errno := in.vec.timed(unix.SYS_READV, fd, in.timed, &in.spent)
		if guarded {
			in.x.Leave()
		}
		switch {
		case errno == unix.EAGAIN:
			return false
		case errno == unix.EFAULT && guarded:
			in.x.Fault(transfer.ErrMemory)
			in.discard()
			continue
		case errno != 0:
			in.err = errno
			return true
		case n == 0:
			in.err = io.ErrUnexpectedEOF
			return true
		}
		in.vec.advance(n)
		p := min(n, in.left)
		in.left -= p
		in.tailGot += int(n - p)
	}
	return true
}
