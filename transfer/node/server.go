package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync"
	"time"

	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/node/wire"
	"golang.org/x/sys/unix"
)

// server is one running daemon. Lock order: mu alone, never held while a connection or the engine is called.
type server struct {
	cfg Config
	log *slog.Logger
	eng *transfer.Engine
	ctx context.Context // ends when the daemon stops

	mu       sync.Mutex
	engines  map[string]*conn
	stopping bool
	conns    sync.WaitGroup
	pending  chan struct{} // connections that have not said HELLO
}

// maxPending bounds connections before HELLO; more wait in the listen backlog.
const maxPending = 64

// Run serves until ctx ends, then fences everything and returns nil.
func Run(ctx context.Context, cfg Config) error {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return err
	}
	sock, err := listenSocket(cfg.Socket)
	if err != nil {
		return err
	}
	defer sock.Close()
	m := newMetrics()
	eng, err := newEngine(cfg, m)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s := &server{ctx: ctx, cfg: cfg, log: cfg.Logger, eng: eng, engines: make(map[string]*conn), pending: make(chan struct{}, maxPending)}
	ready := Ready{NodeID: eng.NodeID(), Epoch: eng.Epoch(), PID: os.Getpid(), Socket: sock.path, DataAddr: eng.DataAddr()}
	admin, err := s.startAdmin(m)
	if err != nil {
		return errors.Join(err, eng.Close())
	}
	if admin != nil {
		ready.Admin = admin.addr
	}
	accepted := make(chan error, 1)
	go func() { accepted <- s.accept(sock.UnixListener) }()
	s.log.Info("node daemon is up", "node", ready.NodeID, "socket", ready.Socket, "data", ready.DataAddr, "admin", ready.Admin)
	if cfg.OnReady != nil {
		cfg.OnReady(ready)
	}
	select {
	case <-ctx.Done():
	case err = <-accepted:
		accepted <- nil
	}
	cancel()
	return errors.Join(err, s.stop(sock, accepted, admin))
}

// stop is the orderly way down: no new engines, every engine fenced and told, then the data plane, then HTTP.
func (s *server) stop(sock *socket, accepted <-chan error, admin *admin) error {
	start := time.Now()
	s.mu.Lock()
	s.stopping = true
	live := make([]*conn, 0, len(s.engines))
	for _, c := range s.engines {
		live = append(live, c)
	}
	s.mu.Unlock()
	_ = sock.UnixListener.Close()
	if err := <-accepted; err != nil && !errors.Is(err, net.ErrClosed) {
		s.log.Warn("accept engines", "error", err)
	}
	for _, c := range live {
		c.shutdown()
	}
	s.conns.Wait()
	err := s.eng.Close()
	if admin != nil {
		err = errors.Join(err, admin.close())
	}
	s.log.Info("node daemon is down", "node", s.cfg.NodeID, "engines", len(live), "took", time.Since(start))
	return err
}

func (s *server) accept(l *net.UnixListener) error {
	for {
		s.pending <- struct{}{}
		uc, err := l.AcceptUnix()
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return nil
			}
			<-s.pending
			if errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) || errors.Is(err, unix.ENOBUFS) || errors.Is(err, unix.ENOMEM) {
				s.log.Error("cannot accept engine: raise the limit on open files (ulimit -n)", "err", err)
				select { // descriptors may come free
				case <-time.After(100 * time.Millisecond):
				case <-s.ctx.Done():
				}
				continue
			}
			return fmt.Errorf("accept on %s: %w", s.cfg.Socket, err)
		}
		s.conns.Go(func() { s.serve(uc) })
	}
}

// add attaches the engine. An earlier connection of the same id is given a moment to be fenced: an engine that was
// killed and came back may be quicker than the news of its socket's end.
func (s *server) add(c *conn) error {
	timeout := time.NewTimer(s.cfg.AttachTimeout)
	defer timeout.Stop()
	for {
		s.mu.Lock()
		if s.stopping {
			s.mu.Unlock()
			return wire.Errorf(wire.CodeShutdown, "the daemon is stopping")
		}
		before := s.engines[c.id]
		if before == nil {
			s.engines[c.id] = c
			s.mu.Unlock()
			client, err := s.eng.Attach(c.id, c.event)
			if err != nil {
				s.remove(c)
				close(c.gone)
				return err
			}
			c.client = client
			return nil
		}
		s.mu.Unlock()
		select {
		case <-before.gone:
		case <-s.ctx.Done():
		case <-timeout.C:
			return wire.Errorf(wire.CodeAttached, "engine %q is attached by process %d: give this one another id or stop that one", c.id, before.cred.Pid)
		}
	}
}

func (s *server) remove(c *conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.engines[c.id] == c {
		delete(s.engines, c.id)
	}
}
