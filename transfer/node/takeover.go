package node

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"github.com/headrace/headrace/transfer"
)

// predecessor is the running daemon as its successor sees it. A nil one is that of a daemon that starts afresh.
type predecessor struct {
	hand *handConn
	pid  int
	lock *os.File
	data net.Listener // nil when it has none, or another one is wanted
	http net.Listener
}

// askPredecessor connects to the daemon that serves cfg.Socket and gets what it has to give. It answers nil when no
// daemon is there: then there is nothing to take over.
func askPredecessor(ctx context.Context, cfg Config) (_ *predecessor, err error) {
	nc, err := (&net.Dialer{Timeout: handTimeout}).DialContext(ctx, "unix", cfg.Socket+socketControl)
	if err != nil {
		cfg.Logger.Info("no daemon to take over from: starting afresh", "socket", cfg.Socket, "err", err)
		return nil, nil
	}
	p := &predecessor{hand: &handConn{ctx, nc.(*net.UnixConn)}}
	defer func() {
		if err != nil {
			p.close()
			err = fmt.Errorf("take over from the daemon at %s: %w; it goes on", cfg.Socket, err)
		}
	}()
	if err := p.hand.send(handMsg{Kind: handHello, Version: handVersion, Build: cfg.Build, NodeID: cfg.NodeID, PID: os.Getpid()}); err != nil {
		return nil, err
	}
	m, fds, err := p.hand.receive(handOffer, handTimeout)
	if err != nil {
		return nil, err
	}
	p.pid = m.PID
	defer func() { closeFiles(fds) }()
	for i, what := range m.FDs {
		switch what {
		case "lock":
			p.lock, fds[i] = fds[i], nil
		case "data":
			p.data, err = inherit(fds[i], cfg.Listen)
		case "admin":
			p.http, err = inherit(fds[i], cfg.Admin)
		}
		if err != nil {
			return nil, fmt.Errorf("use the %s descriptor: %w", what, err)
		}
	}
	if p.lock == nil {
		return nil, errors.New("it did not give its lock")
	}
	return p, nil
}

// inherit makes a listener of a descriptor, or nil when its port is not the one that is asked for now.
func inherit(f *os.File, want string) (net.Listener, error) {
	_, port, err := net.SplitHostPort(want)
	if err != nil {
		return nil, nil //nolint:nilerr // this daemon is to have no such listener; a bad address is reported where it is used
	}
	l, err := net.FileListener(f)
	if err != nil {
		return nil, err
	}
	if _, have, _ := net.SplitHostPort(l.Addr().String()); port != "0" && port != have {
		return nil, l.Close()
	}
	return l, nil
}

func (p *predecessor) close() {
	if p == nil {
		return
	}
	_ = p.hand.uc.Close()
	if p.lock != nil {
		_ = p.lock.Close()
	}
	for _, l := range []net.Listener{p.data, p.http} {
		if l != nil {
			_ = l.Close()
		}
	}
}

// takeLock and the like move what was given to its new owner.
func (p *predecessor) takeLock() (f *os.File) {
	if p != nil {
		f, p.lock = p.lock, nil
	}
	return f
}

func (p *predecessor) takeData() (l net.Listener) {
	if p != nil {
		l, p.data = p.data, nil
	}
	return l
}

func (p *predecessor) takeAdmin() (l net.Listener) {
	if p != nil {
		l, p.http = p.http, nil
	}
	return l
}

// cut asks for the cut: from then on the predecessor takes nothing new, so this daemon must serve soon.
func (p *predecessor) cut() (transfer.Cut, error) {
	if err := p.hand.send(handMsg{Kind: handPrepared}); err != nil {
		return transfer.Cut{}, err
	}
	m, _, err := p.hand.receive(handCut, handTimeout)
	if err != nil || m.Cut == nil {
		return transfer.Cut{}, errors.Join(err, errIf(m.Cut == nil && err == nil, "an empty cut"))
	}
	return *m.Cut, nil
}

func errIf(is bool, text string) error {
	if is {
		return errors.New(text)
	}
	return nil
}

// Predecessor is what a status shows of a daemon that drains after its hand-over.
type Predecessor struct {
	PID    int    `json:"pid"`
	Leases int    `json:"leases"`
	Admin  string `json:"admin,omitempty"`
}

// follow keeps s.before true until the predecessor has ended.
func (s *server) follow(p *predecessor) {
	defer p.close()
	defer s.before.Store(nil)
	s.before.Store(&Predecessor{PID: p.pid})
	start := time.Now()
	for {
		m, _, err := p.hand.receive(handProgress, 0)
		if err != nil {
			if s.ctx.Err() == nil {
				s.log.Info("the daemon before this one has ended", "pid", p.pid, "after", time.Since(start))
			}
			return
		}
		s.before.Store(&Predecessor{PID: p.pid, Leases: m.Leases, Admin: m.Admin})
		if s.ctx.Err() != nil {
			return
		}
	}
}
