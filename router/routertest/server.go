package routertest

import (
	"net"
	"net/http"
	"sync"
	"sync/atomic"
)

// server is the HTTP server of a fake, with the calls it got.
type server[C any] struct {
	// Wire, when set, is the network that it listens on, in place of loopback.
	Wire *Wire

	srv    *http.Server
	wg     sync.WaitGroup // of the handlers too
	conns  atomic.Int64
	active atomic.Int64
	calls  atomic.Int64
	quit   chan struct{} // closed by Stop
	stop   sync.Once

	mu   sync.Mutex // guards what follows
	last []*C
}

// listen serves on a port of loopback or of the wire, which it returns as an address.
func (s *server[C]) listen(handle http.HandlerFunc) (addr string, err error) {
	var ln net.Listener
	if s.Wire != nil {
		ln = s.Wire.Listen()
	} else if ln, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
		return "", err
	}
	s.quit = make(chan struct{})
	s.srv = &http.Server{ConnState: s.count, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.wg.Add(1)
		defer s.wg.Done()
		handle(w, r)
	})}
	s.wg.Go(func() { _ = s.srv.Serve(ln) })
	return ln.Addr().String(), nil
}

func (s *server[C]) count(_ net.Conn, state http.ConnState) {
	switch state {
	case http.StateNew:
		s.conns.Add(1)
	case http.StateClosed, http.StateHijacked:
		s.conns.Add(-1)
	}
}

// begin counts a call in, and gives it its number; end is to be called behind it.
func (s *server[C]) begin() (n int) {
	s.active.Add(1)
	return int(s.calls.Add(1))
}

func (s *server[C]) end() { s.active.Add(-1) }

func (s *server[C]) keep(c *C) {
	s.mu.Lock()
	s.last = append(s.last, c)
	s.mu.Unlock()
}

// Stop kills the fake: all its connections break. Idempotent.
func (s *server[C]) Stop() {
	s.stop.Do(func() { close(s.quit) })
	_ = s.srv.Close()
	s.wg.Wait()
}

// killed tells whether Stop was called.
func (s *server[C]) killed() bool {
	select {
	case <-s.quit:
		return true
	default:
		return false
	}
}

// Active returns how many requests are being served.
func (s *server[C]) Active() int { return int(s.active.Load()) }

// Conns returns how many connections are open.
func (s *server[C]) Conns() int { return int(s.conns.Load()) }

// Calls returns how many requests came.
func (s *server[C]) Calls() int { return int(s.calls.Load()) }

// Last returns the requests so far.
func (s *server[C]) Last() []*C {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]*C(nil), s.last...)
}
