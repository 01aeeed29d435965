// Package tcp is the transport over TCP streams: one a lane, carrying pieces both ways. Payload goes from and into the
// lent memory by vectored system calls on nonblocking sockets, or where runs are tiny by way of one buffer a lane, as
// transfer.Chooser finds cheaper. Either end decides for itself. No system call
// touches a block unless the lease's guard was entered just before. The package knows nothing of leases but that.
package tcp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/headrace/headrace/transfer"
)

// Config has useful zero values.
type Config struct {
	SendBuffer    int // SO_SNDBUF; 0 leaves it to the kernel
	ReceiveBuffer int // SO_RCVBUF; 0 leaves it to the kernel
	// Congestion names the congestion control of lanes. "" is the host's own, but cubic on loopback: there is no path to
	// model there, and BBR's pacing timers cost up to 30 % of the rate. "host" is the host's own everywhere.
	Congestion  string
	UserTimeout time.Duration // until unacknowledged data, or a closed window, kills a lane. 0: 1 min, the channel notices a silent peer sooner
}

type transport struct{ cfg Config }

// New makes the transport.
func New(cfg Config) transfer.Transport {
	if cfg.UserTimeout <= 0 {
		cfg.UserTimeout = time.Minute
	}
	return &transport{cfg}
}

func (*transport) Name() string { return "tcp" }
func (*transport) Local() bool  { return false }
func (*transport) Probe() error { return nil }
func (*transport) Close() error { return nil }

// Dial opens all lanes at once.
func (t *transport) Dial(ctx context.Context, s *transfer.Setup) (transfer.Link, error) {
	conns, errs := make([]net.Conn, s.Lanes), make([]error, s.Lanes)
	var wg sync.WaitGroup
	for i := range s.Lanes {
		wg.Go(func() { conns[i], errs[i] = s.DialStream(ctx, i) })
	}
	wg.Wait()
	return t.newLink(s, conns, errors.Join(errs...))
}

// Accept waits for all lanes.
func (t *transport) Accept(ctx context.Context, s *transfer.Setup) (transfer.Link, error) {
	conns := make([]net.Conn, s.Lanes)
	for range s.Lanes {
		i, conn, err := s.AcceptStream(ctx)
		if err == nil && (i < 0 || i >= s.Lanes || conns[i] != nil) {
			conn.Close()
			err = fmt.Errorf("lane %d was not expected", i)
		}
		if err != nil {
			return t.newLink(s, conns, err)
		}
		conns[i] = conn
	}
	return t.newLink(s, conns, nil)
}

// newLink takes over the connections, also when there is an error.
func (t *transport) newLink(s *transfer.Setup, conns []net.Conn, err error) (transfer.Link, error) {
	l := &link{t: t, setup: s, lanes: make(map[int]*lane)}
	for i, conn := range conns {
		if err == nil {
			var x *lane
			if x, err = t.newLane(s, i, conn); err == nil {
				l.lanes[i] = x
			}
		}
	}
	if err != nil {
		for _, conn := range conns {
			if conn != nil {
				conn.Close()
			}
		}
		return nil, err
	}
	for _, x := range l.lanes {
		l.readers.Go(x.receive)
	}
	return l, nil
}

func (t *transport) newLane(s *transfer.Setup, index int, conn net.Conn) (*lane, error) {
	tc, ok := conn.(*net.TCPConn)
	if !ok {
		return nil, fmt.Errorf("lane %d is a %T, need a TCP connection", index, conn)
	}
	raw, err := tc.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("lane %d: %w", index, err)
	}
	if err := t.tune(tc, raw); err != nil {
		return nil, fmt.Errorf("set options of lane %d: %w", index, err)
	}
	return newLane(s, index, tc, raw), nil
}

func (t *transport) tune(c *net.TCPConn, raw syscall.RawConn) error {
	errs := []error{
		c.SetNoDelay(true),
		c.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: 5 * time.Second, Interval: time.Second, Count: 5}),
	}
	if t.cfg.SendBuffer > 0 {
		errs = append(errs, c.SetWriteBuffer(t.cfg.SendBuffer))
	}
	if t.cfg.ReceiveBuffer > 0 {
		errs = append(errs, c.SetReadBuffer(t.cfg.ReceiveBuffer))
	}
	var options error
	control := raw.Control(func(fd uintptr) {
		ms := int(t.cfg.UserTimeout / time.Millisecond)
		options = errors.Join(t.congestion(int(fd), c), unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, ms))
	})
	return errors.Join(append(errs, control, options)...)
}

// congestion sets what the configuration names. What is chosen for loopback need not be there.
func (t *transport) congestion(fd int, c *net.TCPConn) error {
	switch t.cfg.Congestion {
	case "host":
		return nil
	case "":
		if a, ok := c.RemoteAddr().(*net.TCPAddr); ok && a.IP.IsLoopback() {
			_ = unix.SetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION, "cubic")
		}
		return nil
	}
	if err := unix.SetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION, t.cfg.Congestion); err != nil {
		return fmt.Errorf("congestion control %q: %w; see sysctl net.ipv4.tcp_allowed_congestion_control", t.cfg.Congestion, err)
	}
	return nil
}

var _ transfer.Starter = (*link)(nil)

type link struct {
	t       *transport
	setup   *transfer.Setup
	readers sync.WaitGroup

	mu     sync.RWMutex
	lanes  map[int]*lane
	closed bool
}

var _ transfer.Extender = (*link)(nil)

// Extend implements transfer.Extender.
func (l *link) Extend(index int, conn net.Conn) error {
	x, err := l.t.newLane(l.setup, index, conn)
	if err != nil {
		conn.Close()
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed || l.lanes[index] != nil {
		x.ended()
		conn.Close()
		return fmt.Errorf("lane %d: %w", index, net.ErrClosed)
	}
	for i, old := range l.lanes {
		if old.quiet.Load() {
			delete(l.lanes, i) // it failed: nothing is posted to it any more
		}
	}
	l.lanes[index] = x
	l.readers.Go(x.receive)
	return nil
}

func (l *link) lane(index int) *lane {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.lanes[index]
}

func (*link) Depth() int     { return 1 }
func (*link) OneSided() bool { return false }

// Start sends one piece as far as it goes at once.
func (l *link) Start(index int, w *transfer.Write) bool {
	x := l.lane(index)
	if x == nil {
		w.Done(net.ErrClosed) // it failed, and was replaced
		return true
	}
	through, err := x.start(w)
	if through {
		x.end(w, err)
	}
	return through
}

// Post sends one piece in the calling goroutine.
func (l *link) Post(index int, w *transfer.Write) {
	x := l.lane(index)
	if x == nil {
		w.Done(net.ErrClosed) // it failed, and was replaced
		return
	}
	x.end(w, x.send(w))
}

func (l *lane) end(w *transfer.Write, err error) {
	if err != nil && !errors.Is(err, transfer.ErrFenced) && !errors.Is(err, transfer.ErrMemory) {
		l.fail(err)
	}
	w.Done(err)
}

// Abort closes the connection: Close of a net.TCPConn returns when no system call uses it any more.
func (l *link) Abort(index int, cause error) {
	if x := l.lane(index); x != nil {
		x.fail(cause)
	}
}

func (l *link) Close() error {
	l.mu.Lock()
	l.closed = true
	l.mu.Unlock()
	var errs []error
	for _, x := range l.lanes {
		x.quiet.Store(true)
		x.ended()
		if err := x.conn.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
			errs = append(errs, fmt.Errorf("close lane %d: %w", x.index, err))
		}
	}
	l.readers.Wait()
	return errors.Join(errs...)
}
