package hangup

import (
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// eventsAtOnce is how many ends are taken in one call.
const eventsAtOnce = 128

// Watcher watches connections. Its methods are safe for concurrent use.
type Watcher struct {
	file *os.File // the epoll instance; Go's poller tells when it has something
	raw  syscall.RawConn
	done sync.WaitGroup

	mu   sync.Mutex // guards what follows
	next uint64
	gone map[uint64]func()
}

// New makes a Watcher. Close ends it.
func New() (*Watcher, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("create epoll: %w", err)
	}
	if err := unix.SetNonblock(fd, true); err != nil { // for os.NewFile to have Go's poller watch it
		return nil, errors.Join(fmt.Errorf("create epoll: %w", err), unix.Close(fd))
	}
	w := &Watcher{file: os.NewFile(uintptr(fd), "epoll"), gone: map[uint64]func(){}}
	if w.raw, err = w.file.SyscallConn(); err != nil {
		return nil, errors.Join(err, w.file.Close())
	}
	w.done.Go(w.run)
	return w, nil
}

// Close ends the watching; nothing is called afterwards. Idempotent.
func (w *Watcher) Close() error {
	err := w.file.Close()
	w.done.Wait()
	if errors.Is(err, os.ErrClosed) {
		return nil
	}
	return err
}

// Add has gone called, once, from the watcher's goroutine, when the other end has closed its sending side or reset the
// connection; gone must not wait. remove ends it, and must be called before the connection is closed or soon after.
func (w *Watcher) Add(c net.Conn, gone func()) (remove func(), err error) {
	sc, ok := c.(syscall.Conn)
	if !ok {
		return nil, ErrNotSupported
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return nil, err
	}
	w.mu.Lock()
	w.next++
	id := w.next // not the descriptor: that is another connection's in a moment
	w.gone[id] = gone
	w.mu.Unlock()
	remove = func() {
		w.mu.Lock()
		delete(w.gone, id)
		w.mu.Unlock()
	}
	ev := unix.EpollEvent{Events: unix.EPOLLRDHUP | unix.EPOLLET, Fd: int32(uint32(id)), Pad: int32(uint32(id >> 32))}
	var added error
	err = w.raw.Control(func(epoll uintptr) {
		added = raw.Control(func(fd uintptr) { err = unix.EpollCtl(int(epoll), unix.EPOLL_CTL_ADD, int(fd), &ev) })
	})
	if err = errors.Join(err, added); err != nil {
		remove()
		return nil, fmt.Errorf("watch a connection for its end: %w", err)
	}
	return remove, nil
}

func (w *Watcher) run() {
	var events [eventsAtOnce]unix.EpollEvent
	for {
		n := 0
		err := w.raw.Read(func(fd uintptr) bool {
			var err error
			if n, err = unix.EpollWait(int(fd), events[:], 0); err != nil {
				n = 0
			}
			return n > 0
		})
		if err != nil { // closed
			return
		}
		for i := range events[:n] {
			id := uint64(uint32(events[i].Fd)) | uint64(uint32(events[i].Pad))<<32
			w.mu.Lock()
			gone := w.gone[id]
			delete(w.gone, id)
			w.mu.Unlock()
			if gone != nil {
				gone()
			}
		}
	}
}
