package transfer

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/headrace/headrace/transfer/handshake"
	"github.com/headrace/headrace/transfer/ticket"
)

// Engine is the data plane of one node daemon.
type Engine struct {
	cfg        Config
	log        *slog.Logger
	listener   net.Listener
	usable     []Transport
	names      []string
	refused    []TransportStatus
	rate       *bucket
	book       *ticketBook
	handshakes chan struct{}
	exams      chan struct{}
	recalls    chan struct{}
	ctx        context.Context
	cancel     context.CancelFunc
	wg         sync.WaitGroup
	nextLease  atomic.Uint64
	nextRegion atomic.Uint64
	leases     atomic.Int64
	totals     counters
	drain      drainState
	parking    parkingLot

	mu       sync.Mutex
	closed   bool
	clients  map[string]*Client
	channels map[*channel]struct{}
	accepted map[[16]byte]*channel
	dials    map[string]*dialCall
	skewed   map[string]*skewedPeer
	faults   map[string]*peerFault
	keeper   keeper

	history history
}

type counters struct {
	sent, landed, duplicate, discarded            atomic.Uint64
	presented, settled, revoked, expired, refused atomic.Uint64
	moved, again, skews, recalled                 atomic.Uint64
	opened, died, handshakes, forced, ungranted   atomic.Uint64
	verified, altered, resent                     atomic.Uint64
}

// New starts an engine: it listens, if it was told to, and dials peers when tickets are presented to them.
func New(cfg Config) (*Engine, error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	e := &Engine{
		cfg: cfg, log: cfg.Logger.With("node", cfg.NodeID), rate: newBucket(cfg.RateLimit), book: newTicketBook(cfg.Limits.Tickets),
		handshakes: make(chan struct{}, cfg.Limits.Handshakes), exams: make(chan struct{}, examsMax), recalls: make(chan struct{}, recallsMax), clients: make(map[string]*Client),
		channels: make(map[*channel]struct{}), accepted: make(map[[16]byte]*channel), dials: make(map[string]*dialCall), skewed: make(map[string]*skewedPeer), faults: make(map[string]*peerFault),
	}
	e.drain.init(cfg.Successor)
	if err := e.probe(); err != nil {
		for _, t := range cfg.Transports {
			err = errors.Join(err, t.Close())
		}
		return nil, err
	}
	e.listener = cfg.Listener
	if e.listener == nil && cfg.Listen != "" {
		l, err := net.Listen("tcp", cfg.Listen)
		if err != nil {
			return nil, fmt.Errorf("listen for peers: %w", err)
		}
		e.listener = l
	}
	e.ctx, e.cancel = context.WithCancel(context.Background())
	if e.listener != nil {
		e.wg.Go(func() { e.accept(e.listener) })
	}
	return e, nil
}

// probe finds out which transports this host can use, and keeps the reasons against the others.
func (e *Engine) probe() error {
	for _, t := range e.cfg.Transports {
		s := TransportStatus{Name: t.Name()}
		if e.cfg.Transport != "" && e.cfg.Transport != "auto" && e.cfg.Transport != t.Name() {
			s.Reason = "the configuration asks for " + e.cfg.Transport
		} else if err := t.Probe(); err != nil && e.waitsFor(t) {
			s.Usable, s.Reason = true, "not at the start of this daemon: "+err.Error()
			e.log.Warn("transport is not usable yet", "transport", t.Name(), "reason", err)
			e.usable = append(e.usable, t)
			e.names = append(e.names, t.Name())
		} else if err != nil {
			s.Reason = err.Error()
			e.log.Info("transport is not usable here", "transport", t.Name(), "reason", s.Reason)
		} else {
			s.Usable = true
			e.usable = append(e.usable, t)
			e.names = append(e.names, t.Name())
		}
		e.refused = append(e.refused, s)
	}
	if len(e.usable) == 0 {
		return fmt.Errorf("no usable transport: %s", e.transportWords())
	}
	if n := len(strings.Join(e.names, ",")); n >= handshake.TransportsField {
		return fmt.Errorf("names of the transports take %d bytes, at most %d", n, handshake.TransportsField-1)
	}
	return nil
}

// waitsFor says whether a transport that cannot be used now is to be used when it can: another one carries until then.
func (e *Engine) waitsFor(t Transport) bool {
	w, may := t.(Waiter)
	last := e.cfg.Transports[len(e.cfg.Transports)-1]
	return may && w.Waits() && (e.cfg.Transport == "" || e.cfg.Transport == "auto") && last != t && !last.Local()
}

func (e *Engine) transportWords() string {
	var words []string
	for _, s := range e.refused {
		if s.Usable {
			words = append(words, s.Name)
		} else {
			words = append(words, s.Name+" ("+s.Reason+")")
		}
	}
	return strings.Join(words, ", ")
}

// complete fills in defaults and says what is missing.
func (c *Config) complete() error {
	probe := ticket.Ticket{Nonce: [16]byte{1}, PNode: c.NodeID, DNode: "x", PEngine: "x", DEngine: "x", Deadline: time.UnixMilli(1)}
	if err := probe.Validate(); err != nil {
		return fmt.Errorf("%w: node id: %w", ErrInvalid, err)
	}
	if len(c.ClusterKey) < 16 {
		return fmt.Errorf("%w: cluster key of %d bytes, need at least 16", ErrInvalid, len(c.ClusterKey))
	}
	if len(c.Transports) == 0 {
		return fmt.Errorf("%w: no transports", ErrInvalid)
	}
	for c.Epoch == 0 {
		var b [8]byte
		rand.Read(b[:])
		c.Epoch = binary.LittleEndian.Uint64(b[:])
	}
	if c.Dial == nil {
		d := net.Dialer{}
		c.Dial = func(ctx context.Context, addr string) (net.Conn, error) { return d.DialContext(ctx, "tcp", addr) }
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	orDefault(&c.Lanes, lanesDefault())
	if err := CheckWays(c.Method, c.Lanes); err != nil {
		return err
	}
	orDefault(&c.PingInterval, 500*time.Millisecond)
	orDefault(&c.DeadAfter, 2500*time.Millisecond)
	orDefault(&c.DialTimeout, 3*time.Second)
	orDefault(&c.FenceGrace, 20*time.Millisecond)
	if c.ticks == nil {
		c.ticks = systemTicks
	}
	c.Limits.complete()
	return nil
}

// CheckWays says what cannot be of a Config's Method and Lanes.
func CheckWays(method string, lanes int) error {
	switch method {
	case "", "auto", Direct.String(), Staged.String():
	default:
		return fmt.Errorf("%w: method %q: choose auto, direct or staged", ErrInvalid, method)
	}
	if lanes < 0 || lanes > lanesMax {
		return fmt.Errorf("%w: %d lanes: 1 to %d, 0 for the daemon's choice", ErrInvalid, lanes, lanesMax)
	}
	return nil
}

// lanesDefault is four streams, where there are processors for them: more streams than processors share what there is and
// cost their switches (two processors, 64 KiB blocks: 0.43 s of CPU a GB with four lanes, 0.37 with two).
func lanesDefault() int { return min(4, max(2, runtime.NumCPU())) }

func orDefault[T int | time.Duration](v *T, d T) {
	if *v <= 0 {
		*v = d
	}
}

func (l *Limits) complete() {
	for _, f := range [...]struct {
		v *int
		d int
	}{
		{&l.Clients, 64}, {&l.RegionsPerClient, 64}, {&l.LeasesPerClient, 4096}, {&l.Leases, 16384}, {&l.Channels, 1024},
		{&l.Handshakes, 64}, {&l.Blocks, 65536}, {&l.PiecesPerLease, 1 << 22}, {&l.PushesPerLease, 4096}, {&l.UnitsPerPush, 65536},
		{&l.MetaBytes, metaBytesLimit}, {&l.RecordBytes, recordBytesLimit}, {&l.Tickets, 65536}, {&l.ControlQueue, 8192},
	} {
		orDefault(f.v, f.d)
	}
	// What the wire can carry is the end of it.
	l.MetaBytes = min(l.MetaBytes, metaBytesLimit)
	l.RecordBytes = min(l.RecordBytes, recordBytesLimit)
	l.Blocks = min(l.Blocks, (FramePayloadMax-1024-ShardsMax*LayoutSize)/4)
	orDefault(&l.TicketLife, time.Hour)
}

// NodeID is the daemon's id in the cluster.
func (e *Engine) NodeID() string { return e.cfg.NodeID }

// Epoch tells this life of the daemon from others.
func (e *Engine) Epoch() uint64 { return e.cfg.Epoch }

// DataAddr is what peers dial, "" when the engine does not listen.
func (e *Engine) DataAddr() string {
	switch {
	case e.cfg.Advertise != "":
		return e.cfg.Advertise
	case e.listener != nil:
		return e.listener.Addr().String()
	}
	return ""
}

// Listener is the data plane's, nil when the engine does not listen.
func (e *Engine) Listener() net.Listener { return e.listener }

// SetRate changes the rate limit, bytes a second; 0 takes it away.
func (e *Engine) SetRate(bytesPerSecond int64) { e.rate.set(bytesPerSecond) }

// Rate is the rate limit in force.
func (e *Engine) Rate() int64 { return e.rate.get() }

// Pauses are the pause points of the configuration, nil if it had none.
func (e *Engine) Pauses() *Pauses { return e.cfg.Pauses }

func (e *Engine) now() time.Time { return time.Now() }

func (e *Engine) identity() handshake.Identity {
	return handshake.Identity{NodeID: e.cfg.NodeID, Epoch: e.cfg.Epoch, Transports: e.names}
}

// pieceGoal is how many bytes of small units go into a piece: less than PieceMax when the rate limit would make a full
// one take longer than 20 ms.
func (e *Engine) pieceGoal() int64 {
	if r := e.rate.get(); r > 0 {
		return max(1, min(PieceMax, r/50))
	}
	return PieceMax
}

// remember makes a channel known. It fails when there are too many, or the engine is closed.
func (e *Engine) remember(c *channel) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return ErrClosed
	}
	if len(e.channels) >= e.cfg.Limits.Channels {
		return fmt.Errorf("%w: %d channels", ErrLimit, len(e.channels))
	}
	if !c.dialled {
		if e.accepted[c.id] != nil {
			return fmt.Errorf("%w: channel id is taken", ErrProtocol)
		}
		e.accepted[c.id] = c
	}
	e.channels[c] = struct{}{}
	return nil
}

// otherEndOf finds the other end of a local channel, nil when it is closed.
func (e *Engine) otherEndOf(c *channel) *channel {
	e.mu.Lock()
	defer e.mu.Unlock()
	for other := range e.channels {
		if other != c && other.id == c.id {
			return other
		}
	}
	return nil
}

func (e *Engine) forget(c *channel) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.channels, c)
	if e.accepted[c.id] == c {
		delete(e.accepted, c.id)
	}
}

func (e *Engine) client(id string) *Client {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.clients[id]
}

// initLease counts a lease and fills in what both sides need.
func (e *Engine) initLease(l *lease, c *Client, t ticket.Ticket, raw []byte, tokens uint32) error {
	if n := e.leases.Add(1); n > int64(e.cfg.Limits.Leases) {
		e.leases.Add(-1)
		return fmt.Errorf("%w: %d leases live", ErrLimit, n-1)
	}
	l.e, l.client, l.ticket, l.tokens = e, c, t, tokens
	l.raw = append([]byte(nil), raw...)
	l.id = LeaseID(e.nextLease.Add(1))
	l.opened, l.state = time.Now(), LeaseOpen
	l.guard, l.done = newGuard(), make(chan struct{})
	return nil
}

// Attach adds an inference engine. Events are delivered by calling ev, one at a time and in order; ev must neither block
// nor call into the Engine or the Client. A second Attach with the same id is refused while the first one lives.
func (e *Engine) Attach(engineID string, ev func(Event)) (*Client, error) {
	return e.AttachAs(engineID, 0, ev)
}

// Close fences all leases, closes clients, channels, the listener and the transports, and waits for every goroutine.
func (e *Engine) Close() error {
	e.mu.Lock()
	if e.closed {
		e.mu.Unlock()
		e.wg.Wait()
		return nil
	}
	e.closed = true
	var clients []*Client
	for _, c := range e.clients {
		clients = append(clients, c)
	}
	e.mu.Unlock()
	var errs []error
	e.cancel()
	if e.listener != nil {
		if err := e.listener.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
			errs = append(errs, fmt.Errorf("close listener: %w", err))
		}
	}
	for _, c := range clients {
		errs = append(errs, c.close("the node daemon is closing"))
	}
	e.mu.Lock()
	var channels []*channel
	for c := range e.channels {
		channels = append(channels, c)
	}
	e.mu.Unlock()
	var wg sync.WaitGroup
	for _, c := range channels {
		wg.Go(func() {
			c.out.send(reasonFrame(frameBye, roleNone, 0, "the node daemon is closing"))
			c.close(ErrClosed)
		})
	}
	wg.Wait()
	e.wg.Wait()
	for _, t := range e.cfg.Transports {
		if err := t.Close(); err != nil {
			errs = append(errs, fmt.Errorf("close transport %s: %w", t.Name(), err))
		}
	}
	return errors.Join(errs...)
}
