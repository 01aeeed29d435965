package node

import (
	"net"
	"sync"
	"time"
)

// queue holds the frames on their way to one engine. Pushing never blocks: who lets it grow over its limits is
// disconnected, because the alternative is memory without bound or a daemon that waits for one engine.
type queue struct {
	maxFrames, maxBytes int

	mu     sync.Mutex
	frames net.Buffers
	bytes  int
	over   bool // no frame is taken any more
	done   bool // finished: nothing follows
	wake   chan struct{}
}

func newQueue(maxFrames, maxBytes int) *queue {
	return &queue{maxFrames: maxFrames, maxBytes: maxBytes, wake: make(chan struct{}, 1)}
}

// push reports whether the frame was taken; false for an overflow, and then the queue is over.
func (q *queue) push(frame []byte) (ok, overflow bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.over {
		return false, false
	}
	if len(q.frames) >= q.maxFrames || q.bytes+len(frame) > q.maxBytes {
		q.over = true
		return false, true
	}
	q.frames = append(q.frames, frame)
	q.bytes += len(frame)
	q.signal()
	return true, false
}

// finish ends the queue with a last frame; what waits is thrown away if discard says so.
func (q *queue) finish(last []byte, discard bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.done {
		return
	}
	if discard {
		q.frames = nil
	}
	if last != nil {
		q.frames = append(q.frames, last)
	}
	q.over, q.done = true, true
	q.signal()
}

func (q *queue) signal() {
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

// drain writes to conn until the queue is finished and empty, or a write fails.
func (q *queue) drain(conn *net.UnixConn) error {
	for range q.wake {
		for {
			q.mu.Lock()
			batch, done := q.frames, q.done
			q.frames, q.bytes = nil, 0
			q.mu.Unlock()
			if len(batch) == 0 {
				if done {
					return nil
				}
				break
			}
			if _, err := batch.WriteTo(conn); err != nil {
				return err
			}
		}
	}
	return nil
}

// hurry limits how long the writer may still take.
func hurry(conn *net.UnixConn, d time.Duration) { _ = conn.SetWriteDeadline(time.Now().Add(d)) }
