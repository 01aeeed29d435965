package transfer

import (
	"net"
	"sync"

	"golang.org/x/sys/unix"
)

// outbox is the writing half of a control connection. Frames leave in the order they were sent in; acknowledgements
// gather while a write is under way and leave many in a frame. Sending never blocks: a peer that reads so slowly that
// a limit is reached, or does not read at all (channel.tick), has lost its channel.
type outbox struct {
	max  int
	full func() // called once when a limit is reached

	mu      sync.Mutex
	direct  func(b []byte) int // writes what can be written at once; nil where that is not known
	writing bool               // somebody is in a write
	turn    uint64             // changes with each write of the writer
	rest    []byte             // of a frame that direct began
	frames  [][]byte
	size    int
	acks    []ack
	closing bool
	over    bool
	wake    chan struct{}
	done    chan struct{} // closed when the writer is through
}

type ack struct {
	lease LeaseID
	piece uint32
}

const outboxBytesMax = 64 << 20

func newOutbox(maxFrames int, full func()) *outbox {
	return &outbox{max: maxFrames, full: full, wake: make(chan struct{}, 1), done: make(chan struct{})}
}

func (o *outbox) send(frame []byte) {
	o.mu.Lock()
	if o.closing || o.over {
		o.mu.Unlock()
		return
	}
	if len(o.frames) >= o.max || o.size+len(frame) > outboxBytesMax {
		o.over = true
		o.mu.Unlock()
		o.full()
		return
	}
	o.frames = append(o.frames, frame)
	o.size += len(frame)
	o.mu.Unlock()
	o.signal()
}

// ack says that a piece landed. Their number is bounded by the pieces of living leases. Where nothing else is on its way it
// is written at once, without waiting, which saves the time until the writer runs.
func (o *outbox) ack(lease LeaseID, piece uint32) {
	o.mu.Lock()
	if o.closing || o.over {
		o.mu.Unlock()
		return
	}
	if o.direct == nil || o.writing || len(o.rest)+len(o.frames)+len(o.acks) > 0 {
		o.acks = append(o.acks, ack{lease, piece})
		o.mu.Unlock()
		o.signal()
		return
	}
	o.writing = true
	o.mu.Unlock()
	frame := landedFrame(lease, []uint32{piece})
	n := o.direct(frame)
	o.mu.Lock()
	o.writing = false
	o.rest = frame[n:]
	more := o.closing || len(o.rest)+len(o.frames)+len(o.acks) > 0
	o.mu.Unlock()
	if more {
		o.signal()
	}
}

// atOnce gives a function that writes to a connection without waiting, or nil.
func atOnce(c net.Conn) func([]byte) int {
	tcp, is := c.(*net.TCPConn)
	if !is {
		return nil
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		return nil
	}
	return func(b []byte) (n int) {
		_ = raw.Write(func(fd uintptr) bool { // what it does not write, for whatever reason, is the writer's
			n, err = unix.Write(int(fd), b)
			if err != nil {
				n = 0
			}
			return true
		})
		return n
	}
}

func (o *outbox) signal() {
	select {
	case o.wake <- struct{}{}:
	default:
	}
}

// close lets the writer write what it has, and then end.
func (o *outbox) close() {
	o.mu.Lock()
	o.closing = true
	o.mu.Unlock()
	o.signal()
}

// progress is another number each time, unless the writer is in the write that it was in the time before.
func (o *outbox) progress() uint64 {
	o.mu.Lock()
	defer o.mu.Unlock()
	if !o.writing {
		o.turn++
	}
	return o.turn
}

// run is the writer. Its connection's end breaks a write off.
func (o *outbox) run(c net.Conn) error {
	defer close(o.done)
	for range o.wake {
		o.mu.Lock()
		if o.writing { // it signals when it is through
			o.mu.Unlock()
			continue
		}
		rest, frames, acks, closing := o.rest, o.frames, o.acks, o.closing
		o.rest, o.frames, o.acks, o.size = nil, nil, nil, 0
		o.writing = true
		o.mu.Unlock()
		// Acknowledgements first: a frame that ends a lease was sent after all of its acknowledgements.
		var bufs net.Buffers
		if len(rest) > 0 {
			bufs = append(bufs, rest)
		}
		bufs = append(append(bufs, ackFrames(acks)...), frames...)
		if len(bufs) > 0 {
			if _, err := bufs.WriteTo(c); err != nil {
				return err
			}
		}
		o.mu.Lock()
		o.writing = false
		o.turn++
		o.mu.Unlock()
		if closing {
			return nil
		}
	}
	return nil
}

// ackFrames joins neighbouring acknowledgements of a lease.
func ackFrames(acks []ack) (frames [][]byte) {
	var ids []uint32
	for i := 0; i < len(acks); {
		lease := acks[i].lease
		ids = ids[:0]
		for ; i < len(acks) && acks[i].lease == lease && len(ids) < landedMax; i++ {
			ids = append(ids, acks[i].piece)
		}
		frames = append(frames, landedFrame(lease, ids))
	}
	return frames
}
