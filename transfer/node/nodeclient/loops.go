package nodeclient

import (
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/node/wire"
	"golang.org/x/sys/unix"
)

func (o *outgoing) close() {
	for _, fd := range o.fds {
		_ = unix.Close(fd)
	}
	o.fds = nil
}

// write is the only writer. It joins what waits into one system call, up to a frame with a descriptor.
func (c *Client) write() {
	var batch net.Buffers
	for {
		var o outgoing
		select {
		case o = <-c.out:
		case <-c.done:
			return
		}
		batch = batch[:0]
		for more := true; more && len(o.fds) == 0; {
			batch = append(batch, o.frame)
			o.frame = nil
			select {
			case o = <-c.out:
			default:
				more = false
			}
			more = more && len(batch) < 64
		}
		var err error
		if len(batch) > 0 {
			send := batch // WriteTo eats its receiver
			_, err = send.WriteTo(c.conn)
		}
		switch {
		case err != nil || o.frame == nil:
		case len(o.fds) > 0:
			err = wire.WriteFD(c.conn, o.frame, o.fds...)
		default:
			_, err = c.conn.Write(o.frame)
		}
		o.close()
		if err != nil {
			c.fail(fmt.Errorf("lost the node daemon: %w", err))
			return
		}
	}
}

// pingLoop pings and gives a silent daemon up. It counts its own ticks rather than time, so that a stop of this process
// is not taken for the daemon's.
func (c *Client) pingLoop() {
	t := time.NewTicker(c.ping)
	defer t.Stop()
	for quiet := time.Duration(0); ; {
		id := c.nextID.Add(1)
		if frame, err := wire.AppendFrame(nil, c.version, 0, id, wire.Ping{Value: id}); err == nil {
			select {
			case c.out <- outgoing{frame: frame}:
			case <-c.done:
				return
			default: // the writer is stuck: the daemon does not read
			}
		}
		select {
		case <-t.C:
		case <-c.done:
			return
		}
		if c.heard.Swap(false) {
			quiet = 0
		} else if quiet += c.ping; quiet >= c.silence {
			c.fail(fmt.Errorf("node daemon (pid %d) was silent for %v: it hangs or is stopped", c.info.PID, quiet))
			return
		}
	}
}

// eventsMax bounds events waiting for OnEvent. The reader cannot wait for it: OnEvent may wait for an answer.
const eventsMax = 1 << 16

// events is the queue between the reader and who calls OnEvent.
type events struct {
	calling sync.Mutex // held while OnEvent is called: one event at a time, in the queue's order

	mu   sync.Mutex
	q    []transfer.Event
	wake chan struct{}
}

func newEvents() *events { return &events{wake: make(chan struct{}, 1)} }

func (e *events) push(ev transfer.Event) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if len(e.q) >= eventsMax {
		return fmt.Errorf("%d events wait for OnEvent", len(e.q))
	}
	e.q = append(e.q, ev)
	select {
	case e.wake <- struct{}{}:
	default:
	}
	return nil
}

// flush delivers what is queued.
func (e *events) flush(f func(transfer.Event)) {
	e.calling.Lock()
	defer e.calling.Unlock()
	for _, ev := range e.take() {
		f(ev)
	}
}

func (e *events) take() []transfer.Event {
	e.mu.Lock()
	defer e.mu.Unlock()
	q := e.q
	e.q = nil
	return q
}

// deliver calls f until done; what came before that is delivered still.
func (e *events) deliver(f func(transfer.Event), done <-chan struct{}) {
	for {
		e.flush(f)
		select {
		case <-e.wake:
		case <-done:
			e.flush(f)
			return
		}
	}
}
