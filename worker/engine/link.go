package engine

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/headrace/headrace/transfer"
)

// Daemon is what the loop needs of a connection to the node daemon; package nodeclient has the real one.
type Daemon interface {
	Present(ctx context.Context, r transfer.PresentReq) (transfer.LeaseID, error)
	Push(ctx context.Context, l transfer.LeaseID, units []transfer.Unit, seq uint64) error
	Handoff(ctx context.Context, l transfer.LeaseID, record []byte) error
	Bind(ctx context.Context, r transfer.BindReq) (transfer.LeaseID, error)
	Refuse(ctx context.Context, ticket []byte, reason string) error
	// NodeID and Epoch name one life of one daemon.
	NodeID() string
	Epoch() uint64
	// RevokeTicket returns when no byte of the attempt is read or written on this host any more.
	RevokeTicket(ctx context.Context, nonce [16]byte, reason string) error
	// Draining is closed when the daemon gives way to a successor, which the next dial reaches.
	Draining() <-chan struct{}
	// Done is closed when the daemon is gone or silent; Err says why; PeerGone waits for the end of its process.
	Done() <-chan struct{}
	Err() error
	PeerGone(ctx context.Context) error
	Close() error
}

// ErrVersion is what a Dialer's error is when engine and daemon have no protocol version in common.
var ErrVersion = errors.New("no protocol version in common with the node daemon")

// Dialer connects to the daemon and lends it the cache. Events are delivered in order. Its success says also that the
// daemon it names has fenced everything of earlier connections.
type Dialer func(ctx context.Context, onEvent func(transfer.Event)) (Daemon, []transfer.RegionID, error)

// Link keeps the engine connected to its node daemon.
type Link struct {
	e    *Engine
	conn *conn // the loop's: nil while there is no daemon
	// retiring are connections to daemons that gave way: the loop's. What they were asked ends there.
	retiring []*conn
	id       atomic.Pointer[string]
	problem  atomic.Pointer[string] // why there is no daemon
}

// node is the id of the connected daemon, or "".
func (l *Link) node() string {
	if p := l.id.Load(); p != nil {
		return *p
	}
	return ""
}

func newLink(e *Engine) *Link { return &Link{e: e} }

// conn is one connection. Calls to the daemon are made in order by a goroutine of its own, so that a daemon that
// does not answer never holds up the loop.
type conn struct {
	e       *Engine
	daemon  Daemon
	regions []transfer.RegionID // the cache's shards
	calls   *queue
	fenced  chan struct{} // closed when a later connection to the same life of the daemon shows that all is fenced
	safe    chan struct{} // closed when the daemon can touch nothing of ours any more, after the connection was lost

	// The loop's.
	live    bool          // the region is lent: what was presented may be bound
	fences  int           // under way
	retired chan struct{} // closed when a retiring connection is not needed any more
}

// do runs f behind all calls made before.
func (c *conn) do(f func(d Daemon)) { c.calls.post(func() { f(c.daemon) }) }

// behind runs f, which may take long, behind all calls made before but in front of none.
func (c *conn) behind(f func(d Daemon)) {
	run := func() { c.e.done.Go(func() { f(c.daemon) }) }
	if !c.calls.post(run) {
		run()
	}
}

func (c *conn) run(ctx context.Context) {
	for {
		for _, f := range c.calls.take() {
			f()
		}
		select {
		case <-c.calls.wake:
		case <-c.daemon.Done():
			c.drain()
			return
		case <-ctx.Done():
			c.drain()
			return
		}
	}
}

// drain makes the calls that are left: each fails at once, and its owner hears of it.
func (c *conn) drain() {
	for {
		left := c.calls.takeAndCloseIfEmpty()
		if len(left) == 0 {
			return
		}
		for _, f := range left {
			f()
		}
	}
}

const (
	redialMin = 20 * time.Millisecond
	redialMax = time.Second
	// redialSkewed is the pause after a refusal for the protocol's version.
	redialSkewed = 5 * time.Second
)

// Run connects, and connects again when the daemon was lost or gives way, until ctx ends. up is told of every change.
func (l *Link) Run(ctx context.Context, dial Dialer, up func(d Daemon)) {
	wait := redialMin
	var lost []*conn  // whose blocks may be in quarantine
	var before Daemon // gives way
	said := ""        // of what is wrong
	var tended sync.WaitGroup
	defer tended.Wait()
	for ctx.Err() == nil {
		c := &conn{e: l.e, calls: newQueue(), fenced: make(chan struct{}), safe: make(chan struct{}), retired: make(chan struct{})}
		d, regions, err := dial(ctx, func(ev transfer.Event) { l.e.q.post(func() { l.e.onEvent(c, ev) }) })
		if err != nil {
			if before != nil && isClosed(before.Done()) {
				before = nil
				l.id.Store(nil)
				up(nil)
			}
			// Two that do not speak the same version will not learn it: one of them has to be replaced first.
			if errors.Is(err, ErrVersion) {
				wait = redialSkewed
			}
			if text := err.Error(); wait >= redialMax && text != said {
				said = text
				l.e.log.Warn("connect to the node daemon; whole requests are served meanwhile", "err", err)
			}
			problem := said // whoever asks for the status reads it while said changes
			l.problem.Store(&problem)
			pause(ctx, wait)
			wait = min(2*wait, max(wait, redialMax))
			continue
		}
		wait = redialMin
		said = ""
		l.problem.Store(nil)
		c.daemon, c.regions, before = d, regions, nil
		lost = fencedBy(lost, d)
		l.e.log.Info("lent the KV cache to the node daemon", "epoch", d.Epoch())
		ended := make(chan struct{})
		tended.Go(func() {
			defer close(ended)
			c.run(ctx)
		})
		l.e.q.post(func() { l.use(c) })
		id := d.NodeID()
		l.id.Store(&id)
		up(d)
		select {
		case <-d.Draining():
			l.e.log.Info("the node daemon gives way: going over to its successor", "epoch", d.Epoch())
			before = d
			tended.Go(func() { l.tend(ctx, c, ended) })
			continue // at once, with the next one
		case <-d.Done():
		case <-ctx.Done():
		}
		l.id.Store(nil)
		up(nil)
		l.e.q.post(func() { l.lose(c) })
		<-ended
		l.e.done.Go(c.mourn)
		lost = append(lost, c)
	}
}

func isClosed(ch <-chan struct{}) bool {
	select {
	case <-ch:
		return true
	default:
		return false
	}
}

// use makes a connection the one for everything new. What waits without having been presented goes over to it.
func (l *Link) use(c *conn) {
	if old := l.conn; old != nil {
		l.retiring = append(l.retiring, old)
	}
	l.conn, c.live = c, true
	l.e.adopt(c)
}

// lose is the end of a connection that nobody asked for.
func (l *Link) lose(c *conn) {
	if l.conn == c {
		l.conn = nil
	}
	l.retiring = slices.DeleteFunc(l.retiring, func(x *conn) bool { return x == c })
	l.e.onDown(c, c.daemon.Err())
}

// tend looks after a connection whose daemon gives way, until it has nothing to do any more or was lost.
func (l *Link) tend(ctx context.Context, c *conn, ended <-chan struct{}) {
	select {
	case <-c.retired: // nothing of ours is in its hands
		c.behind(func(d Daemon) { _ = d.Close() })
		<-ended
		return
	case <-c.daemon.Done():
	case <-ctx.Done():
	}
	l.e.q.post(func() { l.lose(c) })
	<-ended
	c.mourn()
}

// retire lets go of the connections that have nothing left to do. The loop calls it after every round.
func (l *Link) retire() {
	l.retiring = slices.DeleteFunc(l.retiring, func(c *conn) bool {
		if c.fences > 0 || l.e.uses(c) {
			return false
		}
		close(c.retired)
		return true
	})
}

// mourn closes safe when the lost daemon's process has ended, or has told a later connection that everything is fenced.
// Only then is the client closed: it holds the descriptor by which the process is watched.
func (c *conn) mourn() {
	defer func() { _ = c.daemon.Close() }()
	ctx, cancel := context.WithCancel(c.e.ctx)
	defer cancel()
	stop := make(chan struct{})
	defer close(stop)
	go func() {
		select {
		case <-c.fenced:
			cancel()
		case <-stop:
		}
	}()
	if err := c.daemon.PeerGone(ctx); err == nil {
		close(c.safe)
		return
	}
	select { // the process cannot be watched, or the wait was ended
	case <-c.fenced:
		close(c.safe)
	case <-c.e.ctx.Done():
	}
}

// fencedBy marks the lost connections that were to the same life of the daemon as d, and returns the others. Of these
// only the last few are kept: each waits for its process as well.
func fencedBy(lost []*conn, d Daemon) []*conn {
	lost = slices.DeleteFunc(lost, func(c *conn) bool {
		same := c.daemon.NodeID() == d.NodeID() && c.daemon.Epoch() == d.Epoch()
		if same {
			close(c.fenced)
		}
		return same
	})
	return lost[max(0, len(lost)-lostMax):]
}

const lostMax = 64

func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}
