package routerbench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// loop asks over several connections from one thread, which waits in a poller of its own. With goroutines that sleep and are woken for
// each request and each answer, the median of a request straight to a worker was 170 us at 15,000 a second, in place of 100.
type loop struct {
	epoll   int
	clients map[int32]*client // by descriptor
	idle    []*client         // in the order in which they became so
	looked  time.Time         // for clients that wait too long

	rate float64 // requests a second, arriving at random; 0: each client asks again as soon as it is answered
	gaps *rand.Rand
	at   time.Time // when the next request arrives
}

// client is one connection, what it asks and what it measured.
type client struct {
	addr   string
	sent   [][]byte
	turn   int
	marks  int // where in the one request that is sent its number stands, which makes it another one; 0: nowhere
	stream bool
	paced  bool // the time between its events is measured

	fd     int
	asks   bool      // there is a request
	at     time.Time // of its arrival
	left   []byte    // of it, to be written
	write  bool      // the poller is to tell when that goes on
	answer answer

	took, first, stalls []time.Duration
	errors              int
	err                 error
}

// lookEvery is how often a loop looks whether somebody waits too long, or it is to end.
const lookEvery = 100 * time.Millisecond

func newLoop(clients []*client, rate float64) (*loop, error) {
	epoll, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("epoll_create1", err)
	}
	l := &loop{epoll: epoll, clients: map[int32]*client{}, rate: rate, gaps: rand.New(rand.NewPCG(1, uint64(rate)))}
	for _, c := range clients {
		if err := l.add(c); err != nil {
			return nil, errors.Join(err, l.close())
		}
	}
	return l, nil
}

func (l *loop) close() error {
	for _, c := range l.clients {
		_ = unix.Close(c.fd)
	}
	return os.NewSyscallError("close", unix.Close(l.epoll))
}

// add connects a client, and has the poller tell of what it can read.
func (l *loop) add(c *client) error {
	if err := c.connect(); err != nil {
		return fmt.Errorf("connect to %s: %w", c.addr, err)
	}
	ev := unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(c.fd)}
	if err := unix.EpollCtl(l.epoll, unix.EPOLL_CTL_ADD, c.fd, &ev); err != nil {
		_ = unix.Close(c.fd)
		return os.NewSyscallError("epoll_ctl", err)
	}
	l.clients[ev.Fd] = c
	l.idle = append(l.idle, c)
	return nil
}

// run has requests come from began until then, each at the first client that is not busy, and returns when all were answered.
func (l *loop) run(ctx context.Context, began, until time.Time) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	// The kernel may otherwise wake a thread 50 us late.
	if err := unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0); err != nil {
		return os.NewSyscallError("prctl", err)
	}
	defer func() { _ = unix.Prctl(unix.PR_SET_TIMERSLACK, 0, 0, 0, 0) }() // to what it was
	var events [64]unix.EpollEvent
	l.at = began
	for now := began; ; now = time.Now() {
		if l.rate == 0 {
			l.at = now
		}
		for len(l.idle) > 0 && !l.at.After(now) && !l.at.After(until) {
			if err := l.ask(); err != nil {
				return err
			}
		}
		over := l.at.After(until)
		if over && len(l.idle) == len(l.clients) {
			return nil
		}
		if now.Sub(l.looked) >= lookEvery {
			l.looked = now
			if err := errors.Join(ctx.Err(), l.giveUp(now)); err != nil {
				return err
			}
		}
		wait := lookEvery
		if len(l.idle) > 0 && !over {
			wait = min(wait, max(l.at.Sub(now), 0))
		}
		n, err := l.wait(events[:], wait)
		if err != nil {
			return err
		}
		for _, ev := range events[:n] {
			if c := l.clients[ev.Fd]; c != nil { // else it has failed, and there is another in its place
				if err := l.event(c); err != nil {
					return err
				}
			}
		}
	}
}

// wait does not tell Go's scheduler that the thread sleeps. It would give its processor to another one, and wake that for it.
func (l *loop) wait(events []unix.EpollEvent, limit time.Duration) (int, error) {
	ts := unix.NsecToTimespec(int64(limit))
	n, _, errno := unix.RawSyscall6(unix.SYS_EPOLL_PWAIT2, uintptr(l.epoll), uintptr(unsafe.Pointer(unsafe.SliceData(events))), uintptr(len(events)), uintptr(unsafe.Pointer(&ts)), 0, 0)
	switch errno {
	case 0:
		return int(n), nil
	case unix.EINTR: // by Go's scheduler, which has something to do
		return 0, nil
	}
	return 0, os.NewSyscallError("epoll_pwait2", errno)
}

// ask sends the request that has arrived.
func (l *loop) ask() error {
	c := l.idle[0]
	l.idle = l.idle[1:]
	c.turn++
	c.mark()
	c.asks, c.at, c.left = true, l.at, c.sent[c.turn%len(c.sent)]
	c.answer.begin()
	if l.rate > 0 {
		l.at = l.at.Add(time.Duration(l.gaps.ExpFloat64() / l.rate * float64(time.Second)))
	}
	return l.send(c)
}

// send writes what the socket takes.
func (l *loop) send(c *client) error {
	for len(c.left) > 0 {
		n, err := unix.Write(c.fd, c.left)
		if errors.Is(err, unix.EAGAIN) {
			break
		}
		if err != nil && !errors.Is(err, unix.EINTR) {
			return l.failed(c, os.NewSyscallError("write", err))
		}
		c.left = c.left[max(n, 0):]
	}
	more := len(c.left) > 0
	if more == c.write {
		return nil
	}
	ev := unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(c.fd)}
	if c.write = more; more {
		ev.Events |= unix.EPOLLOUT
	}
	return os.NewSyscallError("epoll_ctl", unix.EpollCtl(l.epoll, unix.EPOLL_CTL_MOD, c.fd, &ev))
}

// event goes on with a client whose socket can be read or written.
func (l *loop) event(c *client) error {
	if len(c.left) > 0 {
		if err := l.send(c); err != nil {
			return err
		}
	}
	n, err := unix.Read(c.fd, c.answer.room())
	switch {
	case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.EINTR):
		return nil
	case err != nil:
		return l.failed(c, os.NewSyscallError("read", err))
	case n == 0 && !c.asks: // it was kept for long enough
		return l.again(c)
	case n == 0:
		return l.failed(c, io.ErrUnexpectedEOF)
	case !c.asks:
		return l.failed(c, errors.New("an answer that nobody asked for"))
	}
	done, err := c.answer.read(n, c.stream)
	if err != nil {
		return l.failed(c, err)
	}
	if c.paced {
		if c.answer.heard(time.Now()); done {
			c.stalls = append(c.stalls, c.answer.stall)
		}
	}
	if done {
		c.took, c.first = append(c.took, time.Since(c.at)), append(c.first, c.answer.first.Sub(c.at))
		c.asks = false
		l.idle = append(l.idle, c)
	}
	return nil
}

// failed counts an error, and connects anew.
func (l *loop) failed(c *client, why error) error {
	c.errors, c.err = c.errors+1, why
	return l.again(c)
}

// again connects anew.
func (l *loop) again(c *client) error {
	if !c.asks {
		l.idle = slices.DeleteFunc(l.idle, func(other *client) bool { return other == c })
	}
	delete(l.clients, int32(c.fd))
	_ = unix.Close(c.fd)
	return l.add(c)
}

// giveUp fails those that wait too long.
func (l *loop) giveUp(now time.Time) error {
	for _, c := range l.clients {
		if c.asks && now.Sub(c.at) > answerTimeout {
			if err := l.failed(c, os.ErrDeadlineExceeded); err != nil {
				return err
			}
		}
	}
	return nil
}

// connect opens a connection that Go's own poller does not know.
func (c *client) connect() error {
	at, err := netip.ParseAddrPort(c.addr)
	if err != nil {
		return err
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	if err := errors.Join(
		os.NewSyscallError("connect", unix.Connect(fd, &unix.SockaddrInet4{Port: int(at.Port()), Addr: at.Addr().As4()})),
		os.NewSyscallError("setsockopt", unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)),
		os.NewSyscallError("fcntl", unix.SetNonblock(fd, true)),
	); err != nil {
		_ = unix.Close(fd)
		return err
	}
	c.fd, c.asks, c.left, c.write = fd, false, nil, false
	return nil
}
