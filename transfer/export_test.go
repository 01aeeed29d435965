package transfer

import (
	"errors"
	"net"
	"time"

	"golang.org/x/sys/unix"

	"github.com/headrace/headrace/transfer/handshake"
)

// What tests in package transfer_test need to play a peer by hand.

const (
	KindControl = handshake.KindControl
	KindLane    = handshake.KindLane
)

func DialHandshake(c net.Conn, key []byte, node string, epoch uint64, kind, lane uint16, channel [16]byte, transports ...string) (peerEpoch uint64, err error) {
	id, err := handshake.Dial(c, key, handshake.Identity{NodeID: node, Epoch: epoch, Transports: transports}, kind, lane, channel)
	return id.Epoch, err
}

func OpenFrame(transport string, lanes uint32) []byte { return openMsg{transport, lanes}.frame() }

func PresentFrame(lease LeaseID, ticket []byte, tokens uint32, ls ...Layout) []byte {
	return presentMsg{ticket, ls, tokens, nil}.frame(lease)
}

func HandoffFrame(lease LeaseID, lane uint32, pieces uint64, record []byte) []byte {
	return handoffMsg{[]laneCount{{lane, 0, pieces}}, record}.frame(lease)
}

func PingFrame() []byte { return stampFrame(framePing, 1) }

// SetTicks makes channels count these ticks in place of the clock's.
func (c *Config) SetTicks(ticks <-chan time.Time) {
	c.ticks = func(time.Duration) (<-chan time.Time, func()) { return ticks, func() {} }
}

// ReadFrame reads one control frame.
func ReadFrame(c net.Conn) (kind uint16, payload []byte, err error) {
	var b [FrameHeaderSize]byte
	if err := readFull(c, b[:]); err != nil {
		return 0, nil, err
	}
	h, err := parseFrameHeader(&b)
	if err != nil {
		return 0, nil, err
	}
	payload = make([]byte, h.size)
	return uint16(h.kind), payload, readFull(c, payload)
}

func readFull(c net.Conn, b []byte) error {
	for len(b) > 0 {
		n, err := c.Read(b)
		if err != nil {
			return err
		}
		b = b[n:]
	}
	return nil
}

// BoundTarget gives the target's lease id of a BOUND frame.
func BoundTarget(payload []byte) (LeaseID, uint64, error) {
	m, err := parseBound(payload)
	return m.target, m.epoch, err
}

// FakeDMABufs makes descriptors of any kind pass for dma-bufs of their size, until undo.
func FakeDMABufs() (undo func()) {
	real := dmaBufSize
	dmaBufSize = func(fd int) (uint64, error) {
		n, err := unix.Seek(fd, 0, unix.SEEK_END)
		return uint64(n), err
	}
	return func() { dmaBufSize = real }
}

// DropChannels closes all channels, as if their peers had died.
func (e *Engine) DropChannels(why string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for c := range e.channels {
		c.closeSoon(errors.New(why))
	}
}
