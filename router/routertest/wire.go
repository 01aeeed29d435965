package routertest

import (
	"context"
	"fmt"
	"net"
	"sync"
)

// Wire is a network of pipes, which testing/synctest's clock can wait for. The zero value has no listeners.
type Wire struct {
	mu        sync.Mutex
	listeners map[string]*pipes
}

// pipes is a listener.
type pipes struct {
	addr wireAddr
	ch   chan net.Conn
	once sync.Once
	done chan struct{}
}

type wireAddr string

func (wireAddr) Network() string  { return "wire" }
func (a wireAddr) String() string { return string(a) }

// Listen listens on an address of its own.
func (w *Wire) Listen() net.Listener {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.listeners == nil {
		w.listeners = map[string]*pipes{}
	}
	l := &pipes{addr: wireAddr(fmt.Sprintf("host%d.wire:%d", len(w.listeners), 1000+len(w.listeners))), ch: make(chan net.Conn), done: make(chan struct{})}
	w.listeners[l.addr.String()] = l
	return l
}

// Dial connects to a listener.
func (w *Wire) Dial(ctx context.Context, addr string) (net.Conn, error) {
	w.mu.Lock()
	l := w.listeners[addr]
	w.mu.Unlock()
	if l == nil {
		return nil, fmt.Errorf("dial %s: nobody listens", addr)
	}
	here, there := net.Pipe()
	select {
	case l.ch <- there:
		return here, nil
	case <-l.done:
		return nil, fmt.Errorf("dial %s: %w", addr, net.ErrClosed)
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (l *pipes) Accept() (net.Conn, error) {
	select {
	case c := <-l.ch:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

func (l *pipes) Close() error   { l.once.Do(func() { close(l.done) }); return nil }
func (l *pipes) Addr() net.Addr { return l.addr }
