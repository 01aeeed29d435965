package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/node/wire"
	"github.com/headrace/headrace/transfer/telemetry"
	"golang.org/x/sys/unix"
)

// server is one running daemon. Lock order: mu alone, never held while a connection or the engine is called.
type server struct {
	cfg     Config
	log     *slog.Logger
	eng     *transfer.Engine
	tel     *telemetry.Telemetry // nil: nothing is measured from outside
	metrics *metrics
	ctx     context.Context // ends when the daemon stops
	broken  chan error      // capacity 1: a listener cannot go on
	drained chan struct{}   // closed when a successor has this daemon's place and nothing is left here
	handing atomic.Bool     // a hand-over is under way
	before  atomic.Pointer[Predecessor]
	accepts sync.WaitGroup // loops over listeners
	hands   sync.WaitGroup // hand-overs
	loops   sync.WaitGroup // what goes on until ctx ends, also while leases drain

	mu       sync.Mutex
	sock     *socket
	admin    *admin
	engines  map[string]*conn
	draining bool
	stopping bool
	left     transfer.SubmissionStatus // of engines that have left
	conns    sync.WaitGroup
	pending  chan struct{} // connections that have not said HELLO
}

// maxPending bounds connections before HELLO; more wait in the listen backlog.
const maxPending = 64

// arrivalTimeout is how long peers wait for the engines of a predecessor to come over before they are told that one is
// not attached. It is less than a peer's patience with a connection.
const arrivalTimeout = 2 * time.Second

// Run serves until ctx ends, then fences everything and returns nil; or until a successor has taken over and nothing is
// left to do here.
func Run(ctx context.Context, cfg Config) (err error) {
	if cfg, err = cfg.withDefaults(); err != nil {
		return err
	}
	var from *predecessor
	if cfg.Takeover {
		if from, err = askPredecessor(ctx, cfg); err != nil {
			return err
		}
		cfg.Takeover = from != nil
	}
	defer func() {
		if err != nil {
			from.close()
		}
	}()
	sock, err := prepareSocket(cfg.Socket, from.takeLock())
	if err != nil {
		return err
	}
	m := newMetrics()
	eng, tel, err := newEngine(cfg, m, from.takeData())
	if err != nil {
		return errors.Join(err, sock.Close())
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s := &server{ctx: ctx, cfg: cfg, log: cfg.Logger, eng: eng, tel: tel, metrics: m, sock: sock, broken: make(chan error, 1), drained: make(chan struct{}),
		engines: make(map[string]*conn), pending: make(chan struct{}, maxPending)}
	if err := s.begin(from); err != nil {
		cancel()
		return errors.Join(err, s.stop())
	}
	select {
	case <-ctx.Done():
	case <-s.drained:
	case err = <-s.broken:
	}
	cancel()
	return errors.Join(err, s.stop())
}

// begin makes the daemon reachable: in its predecessor's place, if it has one.
func (s *server) begin(from *predecessor) (err error) {
	if from != nil {
		cut, err := from.cut()
		if err != nil {
			return fmt.Errorf("take over from process %d: %w; it goes on", from.pid, err)
		}
		s.eng.Succeed(cut, arrivalTimeout)
	}
	if s.admin, err = s.startAdmin(from.takeAdmin()); err != nil {
		return err
	}
	if err := s.sock.publish(); err != nil {
		return err
	}
	s.listen(s.sock)
	ready := Ready{NodeID: s.eng.NodeID(), Epoch: s.eng.Epoch(), PID: os.Getpid(), Socket: s.sock.path, DataAddr: s.eng.DataAddr()}
	if s.admin != nil {
		ready.Admin = s.admin.addr
	}
	if from != nil {
		if err := from.hand.send(handMsg{Kind: handServing}); err != nil {
			return fmt.Errorf("take over from process %d: %w", from.pid, err)
		}
		s.log.Info("took over", "node", ready.NodeID, "from", from.pid, "socket", ready.Socket, "data", ready.DataAddr, "admin", ready.Admin)
	} else {
		s.log.Info("node daemon is up", "node", ready.NodeID, "socket", ready.Socket, "data", ready.DataAddr, "admin", ready.Admin)
	}
	if s.cfg.OnReady != nil {
		s.cfg.OnReady(ready)
	}
	if s.cfg.Peers != nil {
		s.loops.Go(s.keepPeers)
	}
	if from != nil {
		if err := from.hand.send(handMsg{Kind: handListed}); err != nil {
			s.log.Warn("the daemon before this one is gone already", "pid", from.pid, "err", err)
		}
		s.hands.Go(func() { s.follow(from) })
	}
	return nil
}

// keepPeers hands the data plane the peers to hold channels open to.
func (s *server) keepPeers() {
	for {
		select {
		case <-s.ctx.Done():
			return
		case peers := <-s.cfg.Peers:
			s.eng.Keep(peers)
		}
	}
}

// listen accepts engines and successors.
func (s *server) listen(sock *socket) {
	s.accepts.Go(func() {
		if err := s.accept(sock.UnixListener); err != nil {
			select {
			case s.broken <- err:
			default:
			}
		}
	})
	s.accepts.Go(func() { s.acceptSuccessors(sock.ctl) })
}

// stop is the orderly way down: no new engines, every engine fenced and told, then the data plane, then HTTP.
func (s *server) stop() error {
	start := time.Now()
	s.mu.Lock()
	s.stopping = true
	sock, admin := s.sock, s.admin
	s.mu.Unlock()
	live := s.living()
	sock.closeListeners()
	s.accepts.Wait()
	for _, c := range live {
		c.shutdown()
	}
	s.conns.Wait()
	err := errors.Join(s.eng.Close(), s.tel.Close())
	s.hands.Wait()
	s.loops.Wait()
	if admin != nil {
		err = errors.Join(err, admin.close())
	}
	err = errors.Join(err, sock.Close())
	s.log.Info("node daemon is down", "node", s.cfg.NodeID, "engines", len(live), "took", time.Since(start))
	return err
}

// fullEvery is how often a daemon at its limit of open files says so.
const fullEvery = 10 * time.Second

func (s *server) accept(l *net.UnixListener) error {
	var said time.Time
	for {
		s.pending <- struct{}{}
		uc, err := l.AcceptUnix()
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return nil
			}
			<-s.pending
			if errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) || errors.Is(err, unix.ENOBUFS) || errors.Is(err, unix.ENOMEM) {
				if time.Since(said) > fullEvery {
					said = time.Now()
					s.log.Error("cannot accept engine: raise the limit on open files (ulimit -n)", "err", err)
				}
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
		if s.stopping || s.draining {
			draining := s.draining
			s.mu.Unlock()
			if draining {
				return wire.Errorf(wire.CodeDraining, "%v: connect again", transfer.ErrDraining)
			}
			return wire.Errorf(wire.CodeShutdown, "the daemon is stopping")
		}
		before := s.engines[c.id]
		if before == nil {
			s.engines[c.id] = c
			s.mu.Unlock()
			return s.attach(c)
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

// attach makes the connection an engine's. Its id is taken.
func (s *server) attach(c *conn) error {
	client, err := s.eng.AttachAs(c.id, c.cred.Uid, c.event)
	if err != nil {
		s.remove(c)
		close(c.gone)
		return err
	}
	c.client = client
	for _, m := range s.living() {
		if of := m.member.Load(); of != nil && *of == c.id && m.cred.Uid != c.cred.Uid {
			m.end(wire.Errorf(wire.CodeDenied, "engine %q belongs to user %d, this member of it to user %d", c.id, c.cred.Uid, m.cred.Uid), false)
		}
	}
	return nil
}

func (s *server) remove(c *conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.engines[c.id] == c {
		delete(s.engines, c.id)
		s.left = addSubmissions(s.left, c.subs.status())
	}
}

// snapshot is the engine's status with what the daemon knows of the attached engines' rings.
func (s *server) snapshot() transfer.Status {
	st := s.eng.Status()
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range st.Engines {
		if c := s.engines[st.Engines[i].EngineID]; c != nil {
			st.Engines[i].Submission = c.subs.status()
			if about := c.about.Load(); about != nil {
				st.Engines[i].About = *about
			}
		}
	}
	return st
}

// submissions adds up what came from all engines, also those that have left.
func (s *server) submissions() transfer.SubmissionStatus {
	s.mu.Lock()
	defer s.mu.Unlock()
	sum := s.left
	for _, c := range s.engines {
		sum = addSubmissions(sum, c.subs.status())
	}
	return sum
}

func addSubmissions(a, b transfer.SubmissionStatus) transfer.SubmissionStatus {
	a.RingPushes += b.RingPushes
	a.MessagePushes += b.MessagePushes
	a.RefusedPushes += b.RefusedPushes
	a.OverflowCompletions += b.OverflowCompletions
	a.Doorbells += b.Doorbells
	a.Wakeups += b.Wakeups
	a.Spins += b.Spins
	return a
}
