package node

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"syscall"
	"time"

	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/node/wire"
	"golang.org/x/sys/unix"
)

// progressEvery is how often a draining daemon tells its successor how far it is.
const progressEvery = 250 * time.Millisecond

// acceptSuccessors serves the socket for hand-overs. One at a time is dealt with; it ends with the one that succeeds.
func (s *server) acceptSuccessors(l *net.UnixListener) {
	for {
		uc, err := l.AcceptUnix()
		if err != nil {
			if errors.Is(err, net.ErrClosed) || s.ctx.Err() != nil {
				return
			}
			select {
			case <-time.After(100 * time.Millisecond):
				continue
			case <-s.ctx.Done():
				return
			}
		}
		s.hands.Go(func() {
			defer uc.Close()
			h := &handConn{s.ctx, uc}
			if err := s.handOver(h); err != nil {
				s.log.Error("no hand-over: this daemon goes on", "err", err)
				_ = h.send(handMsg{Kind: handRefuse, Reason: err.Error()})
			}
		})
	}
}

// handOver gives this daemon's place to a successor. On an error everything is as it was.
func (s *server) handOver(h *handConn) error {
	cred, err := checkPeer(h.uc, nil)
	if err != nil {
		return err
	}
	hello, _, err := h.receive(handHello, handTimeout)
	switch {
	case err != nil:
		return err
	case hello.Version != handVersion:
		return fmt.Errorf("the new daemon (%s) hands over by version %d, the running one (%s) by %d: stop the running one and start the new one",
			hello.Build, hello.Version, s.cfg.Build, handVersion)
	case hello.NodeID != s.cfg.NodeID:
		return fmt.Errorf("the new daemon is node %q, the running one %q: give it the same --id", hello.NodeID, s.cfg.NodeID)
	case !s.handing.CompareAndSwap(false, true):
		return errors.New("a hand-over is under way already")
	}
	defer s.handing.Store(false)
	s.log.Info("handing over to a new daemon", "pid", cred.Pid, "build", hello.Build)
	if err := s.offer(h); err != nil {
		return err
	}
	if _, _, err := h.receive(handPrepared, prepareTimeout); err != nil {
		return fmt.Errorf("the new daemon (pid %d) did not start: %w", cred.Pid, err)
	}
	start := time.Now()
	cut := s.makeCut()
	err = h.send(handMsg{Kind: handCut, Cut: &cut})
	if err == nil {
		_, _, err = h.receive(handServing, handTimeout)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("the new daemon (pid %d) did not get to serve: %w", cred.Pid, err), s.resume())
	}
	s.log.Info("handed over: draining", "pid", cred.Pid, "leases", s.eng.Leases(), "gap", time.Since(start))
	s.drain(h)
	return nil
}

// offer sends the descriptors.
func (s *server) offer(h *handConn) error {
	m := handMsg{Kind: handOffer, Version: handVersion, Build: s.cfg.Build, NodeID: s.cfg.NodeID, PID: os.Getpid(), Epoch: s.eng.Epoch(), DataAddr: s.eng.DataAddr()}
	var fds []int
	defer func() {
		for _, fd := range fds {
			_ = unix.Close(fd)
		}
	}()
	add := func(name string, c syscall.Conn) error {
		fd, err := dupOf(c)
		if err != nil {
			return fmt.Errorf("duplicate the %s descriptor: %w", name, err)
		}
		m.FDs, fds = append(m.FDs, name), append(fds, fd)
		return nil
	}
	err := add("lock", s.sock.lock)
	if l, ok := s.eng.Listener().(syscall.Conn); ok && err == nil {
		err = add("data", l)
	}
	if s.admin != nil && err == nil {
		if l, ok := s.admin.listener.(syscall.Conn); ok {
			err = add("admin", l)
		}
	}
	if err != nil {
		return err
	}
	return h.send(m, fds...)
}

// makeCut takes nothing new from now on.
func (s *server) makeCut() transfer.Cut {
	s.mu.Lock()
	s.draining = true
	s.mu.Unlock()
	return s.eng.Drain()
}

// resume takes the cut back. The successor may have put sockets of its own in our sockets' place.
func (s *server) resume() error {
	s.eng.Resume()
	s.mu.Lock()
	s.draining = false
	s.mu.Unlock()
	if s.sock.ours() {
		return nil
	}
	fresh, err := prepareSocket(s.sock.path, s.sock.lock)
	if err == nil {
		if err = fresh.publish(); err != nil {
			fresh.closeListeners()
		}
	}
	if err != nil {
		return fmt.Errorf("listen again: %w", err)
	}
	old := s.sock
	s.mu.Lock()
	s.sock = fresh
	s.mu.Unlock()
	old.closeListeners()
	s.listen(fresh)
	return nil
}

// drain is the rest of this daemon's life: its engines go over to the successor, its leases end.
func (s *server) drain(h *handConn) {
	s.sock.give()
	s.accepts.Wait()
	engines := s.living()
	for _, c := range engines {
		c.send(0, wire.Event{Kind: wire.TypeDraining})
	}
	told := time.Now()
	s.moveAdmin()
	ctx, cancel := context.WithTimeout(s.ctx, s.cfg.DrainTimeout)
	defer cancel()
	// In the registry first: our entry goes only when the successor's has taken its place.
	if _, _, err := h.receive(handListed, handTimeout); err != nil {
		s.log.Warn("the new daemon did not say that it is listed", "err", err)
	}
	if s.cfg.OnHandedOver != nil {
		s.cfg.OnHandedOver()
	}
	understood, stop := context.WithTimeout(ctx, s.cfg.Silence)
	s.eng.GiveWay(understood)
	stop()
	left := make(chan struct{})
	go func() {
		defer close(left)
		s.conns.Wait()
	}()
	tick := time.NewTicker(progressEvery)
	defer tick.Stop()
	gone := false // the successor; we end all the same
	for {
		if !gone {
			m := handMsg{Kind: handProgress, Leases: s.eng.Leases()}
			if a := s.currentAdmin(); a != nil {
				m.Admin = a.addr
			}
			gone = h.send(m) != nil
		}
		select {
		case <-left:
			s.log.Info("drained: every engine has gone over")
		case <-ctx.Done():
			if s.ctx.Err() == nil {
				s.log.Warn("drain timeout: ending what is left", "leases", s.eng.Leases(), "engines", len(s.living()), "timeout", s.cfg.DrainTimeout)
			}
		case <-tick.C:
			if time.Since(told) > idleGrace {
				s.endIdle()
			}
			continue
		}
		close(s.drained)
		return
	}
}

// idleGrace is how long an engine of which nothing is left on this daemon may take to leave it. One that reads its socket only when it has
// work does not hear that it should.
const idleGrace = 2 * time.Second

// endIdle closes the connections on which nothing is left.
func (s *server) endIdle() {
	for _, c := range s.living() {
		if s.eng.Idle(c.id) {
			c.end(wire.Errorf(wire.CodeDraining, "%v, and nothing of this engine is left here: connect again", transfer.ErrDraining), false)
		}
	}
}

func (s *server) living() []*conn {
	s.mu.Lock()
	defer s.mu.Unlock()
	live := make([]*conn, 0, len(s.engines))
	for _, c := range s.engines {
		live = append(live, c)
	}
	slices.SortFunc(live, func(a, b *conn) int { return int(a.cred.Pid) - int(b.cred.Pid) })
	return live
}

// moveAdmin leaves the admin address to the successor and answers at another one, so that one can see what is left.
func (s *server) moveAdmin() {
	a := s.currentAdmin()
	if a == nil {
		return
	}
	host, _, _ := net.SplitHostPort(a.addr)
	if err := a.close(); err != nil {
		s.log.Warn("close admin HTTP", "err", err)
	}
	var next *admin
	l, err := net.Listen("tcp", net.JoinHostPort(host, "0"))
	if err != nil {
		s.log.Warn("no admin HTTP while draining", "err", err)
	} else {
		next = s.serveAdmin(l)
	}
	s.mu.Lock()
	s.admin = next
	s.mu.Unlock()
}

func (s *server) currentAdmin() *admin {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.admin
}
