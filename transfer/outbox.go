package transfer

import (
	"net"
	"sync"
	"time"
)

// outbox is the writing half of a control connection. Frames leave in the order they were sent in; acknowledgements
// gather while a write is under way and leave many in a frame. Sending never blocks: a peer that reads so slowly that
// a limit is reached has lost its channel.
type outbox struct {
	max  int
	full func() // called once when a limit is reached

	mu      sync.Mutex
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

// ack says that a piece landed. Their number is bounded by the pieces of living leases.
func (o *outbox) ack(lease LeaseID, piece uint32) {
	o.mu.Lock()
	if !o.closing && !o.over {
		o.acks = append(o.acks, ack{lease, piece})
	}
	o.mu.Unlock()
	o.signal()
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

// run is the writer. Each write must be through in time.
func (o *outbox) run(c net.Conn, timeout time.Duration) error {
	defer close(o.done)
	for range o.wake {
		o.mu.Lock()
		frames, acks, closing := o.frames, o.acks, o.closing
		o.frames, o.acks, o.size = nil, nil, 0
		o.mu.Unlock()
		// Acknowledgements first: a frame that ends a lease was sent after all of its acknowledgements.
		bufs := net.Buffers(ackFrames(acks))
		bufs = append(bufs, frames...)
		if len(bufs) > 0 {
			c.SetWriteDeadline(time.Now().Add(timeout))
			if _, err := bufs.WriteTo(c); err != nil {
				return err
			}
		}
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
