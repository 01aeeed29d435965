package rdma

import (
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/headrace/headrace/cgo"
	"github.com/headrace/headrace/transfer"
)

// The sizes of a lane.
const (
	depth       = 8   // pieces under way
	slotCount   = 32  // announcements that the other end has room for
	slotSize    = 128 // one announcement: header, trailer, and room to keep them in cache lines of their own
	sendQueue   = 512 // work requests
	sendReserve = 8   // of those, kept for giving slots back and for the last request of all
	chainMax    = 64  // work requests posted at once, of which the last one says when it is done
	giveBack    = slotCount / 4
	// While fewer than giveBack slots are kept, no more than slotCount/giveBack counts are on their way.
	// Nor are more answers than pieces under way. As many of both may have come whose receives are not posted again yet.
	recvQueue    = slotCount + 2*(slotCount/giveBack+depth) + 4
	announceSize = transfer.DataHeaderSize + transfer.DataTrailerSize
)

// What an immediate says: its kind in the upper half, a number in the lower.
const (
	immPiece = 1 << 16 // a piece is announced in that slot
	immSlots = 2 << 16 // so many slots are free again
)

// Ids of work requests. Those of a send queue are counted from 1.
const (
	idRecv     = 1 << 62
	idLastSend = 1 << 61
)

// peerPatience is how long the other end of a failing lane is waited for. It answers as soon as its queue pair is drained,
// and if its process dies the stream says so. One that does not answer is stopped or cut off: by then the channel is dead
// too, and no packet is that late.
const peerPatience = 3 * time.Second

// lane is one queue pair. Whoever posts to its send queue holds mu; its completion queue, its receive queue and its end
// belong to one goroutine, run. mu is a leaf.
type lane struct {
	link  *link
	index int
	rail  *rail
	at    standing // the rail's when the lane was made
	conn  net.Conn
	peer  hello
	psn   uint32

	measured func() // takes the last readings, before the queue pair goes

	qp     *cgo.QP
	cq     *cgo.CQ
	events *cgo.Channel
	parked *os.File // a duplicate of the events' descriptor that Go's poller waits for
	raw    syscall.RawConn
	slots  []byte // slotCount to arrive in, then as many to leave from
	slotMR *cgo.MR
	inline cgo.Flags // Inline where announcements may be posted so

	credits  chan struct{} // slots at the other end
	room     chan struct{} // something of the send queue was completed
	down     chan struct{} // closed when the lane is failing
	drained  chan struct{} // closed when nothing of this end is under way any more
	peerDone chan struct{} // closed when the other end is drained, or gone
	done     chan struct{} // closed when all is over and freed

	mu        sync.Mutex
	failing   bool
	buried    bool // its pieces were ended
	quiet     bool // nobody wants to hear of the end
	cause     error
	posted    uint64 // work requests of the send queue
	completed uint64
	moved     time.Time // when completed last grew, or something was posted while nothing was under way
	signalled uint64    // the last one that will say so
	announced uint64    // pieces
	pieces    []pending
	chain     [chainMax]cgo.WR
	works     []*work              // about windows, in the order of posting
	windows   map[*window]struct{} // bound, or about to be or not to be any more

	noWindows error              // why leases get none on this lane
	late      map[lateKey]uint32 // the other end's windows of leases that were bound before the lane was set up

	// Where pieces are read: see pull.go.
	inLists, outLists *lists // nil where nobody reads
	peerLists         struct {
		addr uint64
		rkey uint32
	}
	fetching map[transfer.LeaseID]int // pieces being read; guarded by mu

	// run's own.
	consumed int // slots not given back
	arrived  uint64
	receives int  // posted
	used     int  // receives, not posted again yet
	lastSend bool // posted
	flushed  bool // it came back
	landing  transfer.Landing

	offerRuns []sourceRun // of the piece that is being offered
	fetches   []*pull     // in the order of their offers
	reads     []readsPosted
	answers   uint32 // not given
}

// pending is a piece of which something was posted.
type pending struct {
	w    *transfer.Write
	end  uint64 // its last work request
	err  error
	left bool // the source's guard
}

var errDown = errors.New("lane is down")

// newLane makes a lane of a stream, and joins it with the other end's. The dialling end says which rails are to be used,
// by pair; the accepting end is told. It takes conn over, also when it fails.
func newLane(l *link, index int, conn net.Conn, p *pair, deadline time.Time) (_ *lane, err error) {
	x := &lane{
		link: l, index: index, conn: conn, psn: randomPSN(),
		credits: make(chan struct{}, slotCount), room: make(chan struct{}, 1), down: make(chan struct{}),
		drained: make(chan struct{}), peerDone: make(chan struct{}), done: make(chan struct{}),
		windows: make(map[*window]struct{}), fetching: make(map[transfer.LeaseID]int),
	}
	defer func() {
		if err != nil {
			l.dismiss(x)
			err = errors.Join(fmt.Errorf("set up lane %d: %w", index, err), x.free())
		}
	}()
	if err := x.conn.SetDeadline(deadline); err != nil {
		return nil, err
	}
	if p != nil {
		err = x.call(p)
	} else {
		err = x.answer()
	}
	if err != nil {
		return nil, err
	}
	if err := x.meet(); err != nil {
		return nil, err
	}
	x.measure()
	for range slotCount {
		x.credits <- struct{}{}
	}
	if err := x.prove(deadline); err != nil {
		return nil, fmt.Errorf("no packet gets through from %s to %s of the other end: %w", x.rail.found.name(), x.peerRail(), err)
	}
	x.noWindows = x.probeWindows()
	if err := x.agree(deadline); err != nil {
		return nil, err
	}
	return x, x.conn.SetDeadline(time.Time{})
}

// call is the dialling end's part: it makes its queue pair on its rail of the pair, and learns of the other end's.
func (x *lane) call(p *pair) error {
	if err := x.makeOn(x.link.local[p.dial]); err != nil {
		return err
	}
	h := x.hello()
	h.want = uint32(p.accept)
	if _, err := x.conn.Write(h.encode()); err != nil {
		return fmt.Errorf("send hello: %w", err)
	}
	if err := x.readHello(); err != nil {
		return err
	}
	if int(x.peer.rail) != p.accept {
		return fmt.Errorf("%w: the other end took its rail %d, asked for %d", transfer.ErrProtocol, x.peer.rail, p.accept)
	}
	return nil
}

// answer is the accepting end's part: it is told which of its rails the lane is for.
func (x *lane) answer() error {
	if err := x.readHello(); err != nil {
		return err
	}
	if int(x.peer.want) >= len(x.link.local) {
		return fmt.Errorf("%w: the other end asks for rail %d, there are %d", transfer.ErrProtocol, x.peer.want, len(x.link.local))
	}
	if err := x.makeOn(x.link.local[x.peer.want]); err != nil {
		return err
	}
	h := x.hello()
	if _, err := x.conn.Write(h.encode()); err != nil {
		return fmt.Errorf("send hello: %w", err)
	}
	return nil
}

func (x *lane) readHello() error {
	b := make([]byte, helloSize)
	if _, err := readFull(x.conn, b); err != nil {
		return fmt.Errorf("read the other end's hello: %w", err)
	}
	var err error
	x.peer, err = parseHello(b)
	return err
}

// makeOn makes this end of the lane on a rail, as it is now.
func (x *lane) makeOn(r *rail) error {
	x.rail, x.at = r, r.now()
	if !x.at.up {
		return fmt.Errorf("%s is not up: %s", r.found.name(), x.at.why)
	}
	return x.make()
}

func (x *lane) peerRail() string { return x.link.peerName(int(x.peer.rail)) }

// prove sends a request without payload, and returns when the other end's device has acknowledged it: what two ends agree
// on over TCP says nothing of the rails between them.
func (x *lane) prove(deadline time.Time) error {
	if err := x.parked.SetReadDeadline(deadline); err != nil {
		return err
	}
	x.mu.Lock()
	n, err := x.push([]cgo.WR{{Remote: x.peer.slotAddr, RKey: x.peer.slotKey, Imm: immSlots, Op: cgo.WriteImm}})
	x.mu.Unlock()
	if n != 1 {
		return errors.Join(errors.New("the send queue is full"), err)
	}
	wcs := make([]cgo.WC, pollBatch)
	for x.proven() < 1 {
		n, err := x.poll(wcs)
		if err != nil {
			return err
		}
		for i := range wcs[:n] {
			if err := x.handle(&wcs[i]); err != nil {
				return err
			}
		}
		if n == 0 && time.Now().After(deadline) {
			return os.ErrDeadlineExceeded
		}
	}
	return x.parked.SetReadDeadline(time.Time{})
}

func (x *lane) proven() uint64 {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.completed
}

// make makes what this end of the lane consists of.
func (x *lane) make() (err error) {
	r := x.rail
	if x.slots, err = unix.Mmap(-1, 0, 2*slotCount*slotSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS); err != nil {
		return fmt.Errorf("map slots: %w", err)
	}
	if x.slotMR, err = r.pd.Register(x.slots, cgo.LocalWrite|cgo.RemoteWrite); err != nil {
		return err
	}
	if x.events, err = r.dev.NewChannel(); err != nil {
		return err
	}
	fd, err := unix.FcntlInt(uintptr(x.events.FD), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("duplicate the completion channel's descriptor: %w", err)
	}
	x.parked = os.NewFile(uintptr(fd), "rdma completions") // nonblocking, as its original is: so Go polls it
	if x.raw, err = x.parked.SyscallConn(); err != nil {
		return err
	}
	if x.cq, err = r.dev.NewCQ(sendQueue+windowQueue+recvQueue+1, x.events); err != nil {
		return err
	}
	caps := cgo.QPCaps{SendWR: sendQueue + windowQueue + 1, RecvWR: recvQueue, SendSGE: 1, RecvSGE: 1, InlineBytes: announceSize}
	if x.qp, err = r.pd.NewQP(x.cq, x.cq, caps); err != nil {
		caps.InlineBytes = 0 // some devices have less
		if x.qp, err = r.pd.NewQP(x.cq, x.cq, caps); err != nil {
			return err
		}
	}
	if x.qp.Caps.InlineBytes >= announceSize {
		x.inline = cgo.Inline
	}
	if err := x.toInit(); err != nil {
		return err
	}
	x.used = recvQueue
	return x.repost()
}

// hello is what the other end is told of this one.
func (x *lane) hello() hello {
	return hello{
		rail: uint16(x.rail.index), qpn: x.qp.Num, psn: x.psn, mtu: x.at.state.ActiveMTU, lid: x.at.state.LID, layer: x.at.state.LinkLayer,
		slots: slotCount, slotKey: x.slotMR.RKey, slotAddr: addressOf(x.slots), pulls: x.pulls(), gid: x.at.gid.Addr,
	}
}

// meet joins the two queue pairs, and returns when both can receive.
func (x *lane) meet() error {
	own := x.hello()
	if x.peer.layer != own.layer || x.peer.slots != slotCount {
		return fmt.Errorf("%w: the other end's port is %v with %d slots, this one's %v with %d", transfer.ErrProtocol, x.peer.layer, x.peer.slots, own.layer, slotCount)
	}
	if err := x.toRTR(); err != nil {
		return err
	}
	if err := x.toRTS(); err != nil {
		return err
	}
	if answer, err := x.swap([]byte{byteReady}); err != nil || answer[0] != byteReady {
		return fmt.Errorf("wait for the other end's queue pair: %w", errors.Join(err, errUnless(err, answer)))
	}
	return nil
}

func errUnless(err error, answer []byte) error {
	if err != nil {
		return nil
	}
	return fmt.Errorf("%w: it says %x", transfer.ErrProtocol, answer)
}

// What the ends of a lane say over its stream after their hellos.
const (
	byteReady   = 'R'
	byteDrained = 'E'
)

// swap sends and receives as many bytes. The writes are small: they do not wait for the other end's reads on a TCP
// connection, but they may on a pipe.
func (x *lane) swap(out []byte) ([]byte, error) {
	sent := make(chan error, 1)
	go func() {
		_, err := x.conn.Write(out)
		sent <- err
	}()
	in := make([]byte, len(out))
	_, err := readFull(x.conn, in)
	if err != nil {
		x.conn.Close()
	}
	return in, errors.Join(err, <-sent)
}

// free gives back what make and meet made, in reverse order. Nobody else may use the lane any more.
func (x *lane) free() error {
	x.conn.Close()
	if x.measured != nil {
		x.measured()
	}
	errs := []error{x.dropWindows()}
	if x.qp != nil {
		errs = append(errs, x.qp.Close())
	}
	if !isClosed(x.drained) { // it never ran
		close(x.drained)
	}
	if x.cq != nil {
		errs = append(errs, x.cq.Close())
	}
	if x.parked != nil {
		errs = append(errs, x.parked.Close())
	}
	if x.events != nil {
		errs = append(errs, x.events.Close())
	}
	errs = append(errs, x.inLists.close(), x.outLists.close())
	if x.slotMR != nil {
		errs = append(errs, x.slotMR.Close())
	}
	if x.slots != nil {
		errs = append(errs, unix.Munmap(x.slots))
	}
	return errors.Join(errs...)
}

func (x *lane) isUp() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return !x.failing
}

// fail moves the lane to the error state. run does the rest.
func (x *lane) fail(cause error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.failing {
		return
	}
	x.failing, x.cause = true, cause
	close(x.down)
	if err := x.toError(); err != nil {
		x.cause = errors.Join(cause, err)
	}
	x.parked.SetReadDeadline(time.Unix(1, 0)) //nolint:errcheck // wakes run, which will find out if it does not
}

// hush is fail for an end that is wanted.
func (x *lane) hush() {
	x.mu.Lock()
	x.quiet = true
	x.mu.Unlock()
	x.fail(net.ErrClosed)
}

// watch waits for what the other end says next: that it is drained, or nothing at all.
func (x *lane) watch() {
	var b [1]byte
	_, err := readFull(x.conn, b[:])
	close(x.peerDone)
	switch {
	case err != nil:
		x.fail(fmt.Errorf("the other end of lane %d is gone: %w", x.index, err))
	case b[0] != byteDrained:
		x.fail(fmt.Errorf("%w: the other end of lane %d says %x", transfer.ErrProtocol, x.index, b))
	default:
		x.fail(fmt.Errorf("lane %d failed at the other end", x.index))
	}
}
