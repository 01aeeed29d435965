// Package nodeclient is an engine's end of the node daemon's unix socket: transfer.Client's methods over package wire.
//
// Requests may be sent from any goroutine. They take effect in the daemon in the order sent, except that Revoke,
// RevokeTicket and RemoveRegion, which wait for fences, are answered aside. Events are delivered by one goroutine, in
// order. It must not know how the daemon works, nor what a prompt is.
package nodeclient

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/node/ring"
	"github.com/headrace/headrace/transfer/node/wire"
)

// ErrClosed is what calls on a closed client give.
var ErrClosed = errors.New("client of the node daemon is closed")

// ErrVersion says that this engine and the daemon have no protocol version in common.
var ErrVersion = errors.New("no protocol version in common")

// dialTimeout bounds Dial where its context does not. The daemon itself waits 5 s for an earlier connection's fence.
const dialTimeout = 8 * time.Second

// Options configure a Client. EngineID is needed.
type Options struct {
	EngineID string
	// OnEvent hears what happens to leases, one event at a time and in order. It may call the client. An event may come
	// before the call that made its lease has returned: the ticket's nonce tells which it is.
	OnEvent func(transfer.Event)
	Logger  *slog.Logger
	// Silence is after how much silence of this engine the daemon fences it and closes the connection, so that a stopped
	// engine does not keep its peers waiting. 0 means 3 s, negative never.
	Silence time.Duration
	// Messages makes pushes go as messages also where the daemon takes a ring.
	Messages bool
	// Spin is how long to go on looking for a completion, where they come that often, before sleeping. 0 means 100 us,
	// negative never.
	Spin time.Duration
}

// Info says which daemon it is.
type Info struct {
	NodeID   string
	Epoch    uint64 // one a life of the daemon
	DataAddr string // where peers reach its data plane
	PID      int
}

// Client is one connection. Lock order: mu alone, never held while writing or calling out.
type Client struct {
	conn    *net.UnixConn
	opts    Options
	log     *slog.Logger
	info    Info
	version uint8
	pidfd   *os.File // nil where the kernel has none
	ping    time.Duration
	silence time.Duration

	out    chan outgoing
	slots  chan struct{} // requests in flight
	nextID atomic.Uint64
	heard  atomic.Bool

	mu      sync.Mutex
	waiting map[uint64]chan answer
	err     error
	closed  bool           // by Close
	calls   sync.WaitGroup // calls that may still put something into out

	events  *events
	ring    atomic.Pointer[ringEnd] // whose completions the reader takes
	pushes  atomic.Pointer[ringEnd] // the same, once pushes may go into it
	done    chan struct{}
	leaving chan struct{} // closed by deliver when the daemon gives way
	closing chan struct{} // closed by Close
	wg      sync.WaitGroup
}

type answer struct {
	m   wire.Message
	err error
}

// outgoing is a frame for the writer, with descriptors of its own.
type outgoing struct {
	frame []byte
	fds   []int
}

// Dial connects to the daemon at socketPath and attaches as opts.EngineID. Success says also that everything of an
// earlier connection under this id has been fenced by the daemon that Info names.
func Dial(ctx context.Context, socketPath string, opts Options) (*Client, error) {
	if opts.Logger == nil {
		opts.Logger = slog.New(slog.DiscardHandler)
	}
	if opts.Silence == 0 {
		opts.Silence = 3 * time.Second
	}
	if opts.Spin == 0 {
		opts.Spin = ring.SpinDefault
	}
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	nc, err := (&net.Dialer{}).DialContext(ctx, "unix", socketPath)
	if err != nil {
		return nil, fmt.Errorf("connect to node daemon at %s: %w (is `headrace node` running?)", socketPath, err)
	}
	c := &Client{conn: nc.(*net.UnixConn), opts: opts, log: opts.Logger, version: uint8(wire.VersionMax), waiting: make(map[uint64]chan answer),
		out: make(chan outgoing, 64), events: newEvents(), done: make(chan struct{}), leaving: make(chan struct{}), closing: make(chan struct{})}
	if err := c.attach(ctx); err != nil {
		_ = c.conn.Close()
		c.closePidfd()
		return nil, fmt.Errorf("attach to node daemon at %s as %q: %w", socketPath, opts.EngineID, err)
	}
	if opts.Messages {
		return c, nil
	}
	if err := c.setupRing(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("attach to node daemon at %s as %q: %w", socketPath, opts.EngineID, err), c.Close())
	}
	return c, nil
}

func (c *Client) attach(ctx context.Context) error {
	// The process is looked up before HELLO: that it answers afterwards shows that the id was not reused meanwhile.
	pid, pidfd, err := peerProcess(c.conn)
	if err != nil {
		c.log.Warn("cannot watch the daemon's process: blocks stay quarantined after its death", "err", err)
	}
	c.pidfd = pidfd
	stop := context.AfterFunc(ctx, func() { _ = c.conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	frame, err := wire.AppendFrame(nil, uint8(wire.VersionMax), 0, 1, wire.Hello{VersionMin: wire.VersionMin, VersionMax: wire.VersionMax,
		SilenceMS: uint32(max(c.opts.Silence, 0).Milliseconds()), EngineID: c.opts.EngineID})
	if err != nil {
		return err
	}
	if _, err := c.conn.Write(frame); err != nil {
		return ctxOr(ctx, err)
	}
	reader := wire.NewReader(c.conn)
	f, err := reader.Read()
	if err != nil {
		return ctxOr(ctx, err)
	}
	m, err := wire.Parse(f.Type, f.Payload)
	f.Close()
	if err != nil {
		return err
	}
	ok, is := m.(wire.HelloOK)
	if !is {
		if e, refused := m.(*wire.Error); refused {
			return fromWire(e)
		}
		return fmt.Errorf("daemon answered HELLO with %s", f.Type)
	}
	if ok.Version < wire.VersionMin || ok.Version > wire.VersionMax || ok.PingMS == 0 || ok.SilenceMS == 0 || ok.MaxInflight < 2 {
		return fmt.Errorf("daemon's HELLO_OK makes no sense: %+v", ok)
	}
	if !stop() {
		return ctx.Err()
	}
	_ = c.conn.SetDeadline(time.Time{})
	c.version = uint8(ok.Version)
	c.info = Info{NodeID: ok.NodeID, Epoch: ok.Epoch, DataAddr: ok.DataAddr, PID: pid}
	if c.info.PID == 0 {
		c.info.PID = int(ok.PID)
	}
	c.ping, c.silence = time.Duration(ok.PingMS)*time.Millisecond, time.Duration(ok.SilenceMS)*time.Millisecond
	c.slots = make(chan struct{}, ok.MaxInflight-1) // one is the ping's
	c.nextID.Store(1)
	c.wg.Go(func() { c.read(reader) })
	c.wg.Go(c.write)
	c.wg.Go(c.pingLoop)
	c.wg.Go(func() { c.events.deliver(c.deliver, c.done) })
	return nil
}

func ctxOr(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return err
}

// Info says which daemon it is.
func (c *Client) Info() Info { return c.info }

// Done is closed when the daemon is gone, was silent for too long, or the client was closed. Leases may still be served
// by a daemon that merely stopped: blocks are free after PeerGone, or after the next successful Dial to the same process.
func (c *Client) Done() <-chan struct{} { return c.done }

// Draining is closed when the daemon gives way to a successor at the same path: Dial again, lend the regions there and
// use the new connection for everything new. This one serves the leases it has; close it when those have ended. Until
// then Present is refused here with transfer.ErrDraining, and a lease that was presented to nobody ends with
// EventRefused in state LeaseMoved: present it again over the new connection.
func (c *Client) Draining() <-chan struct{} { return c.leaving }

func (c *Client) gone() bool {
	select {
	case <-c.done:
		return true
	default:
		return false
	}
}

// Err says why Done was closed, nil before.
func (c *Client) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// fail ends the connection, once, and unblocks everyone who waits.
func (c *Client) fail(err error) {
	c.mu.Lock()
	if c.err != nil {
		c.mu.Unlock()
		return
	}
	c.err = err
	waiting := c.waiting
	c.waiting = nil
	c.mu.Unlock()
	close(c.done)
	_ = c.conn.Close()
	for _, ch := range waiting {
		ch <- answer{err: err}
	}
}

// Close leaves the daemon, which fences this engine's leases; that it has is known from PeerGone or the next Dial.
// It unblocks all waiters and returns when the client's goroutines have ended, so OnEvent must not call it.
func (c *Client) Close() error {
	c.mu.Lock()
	if !c.closed {
		c.closed = true
		close(c.closing)
	}
	c.mu.Unlock()
	c.fail(ErrClosed)
	c.wg.Wait()
	c.calls.Wait()
	for {
		select {
		case o := <-c.out:
			o.close()
			continue
		default:
		}
		break
	}
	c.closePidfd()
	if r := c.ring.Load(); r != nil {
		r.close()
	}
	return nil
}

func (c *Client) read(reader *wire.Reader) {
	for {
		f, err := reader.Read()
		if err != nil {
			c.fail(fmt.Errorf("lost the node daemon: %w", err))
			return
		}
		c.heard.Store(true)
		surplus := f.FD >= 0 || len(f.FDs) > 0 || f.FDFault != ""
		f.Close()
		m, err := wire.Parse(f.Type, f.Payload)
		switch {
		case surplus:
			err = fmt.Errorf("descriptors came with %s", f.Type)
		case err == nil && f.Version != c.version:
			err = fmt.Errorf("%s of version %d, agreed was %d", f.Type, f.Version, c.version)
		}
		if err == nil {
			err = c.take(f.Request, m)
		}
		if err != nil {
			c.fail(fmt.Errorf("read from node daemon: %w", err))
			return
		}
	}
}

func (c *Client) take(request uint64, m wire.Message) error {
	switch m := m.(type) {
	case wire.Event:
		if m.Kind == wire.TypeDraining {
			return c.events.push(transfer.Event{}) // in its turn: behind the tickets that were presented before
		}
		if m.Kind == wire.TypeGoodbye {
			c.fail(fmt.Errorf("node daemon ended the connection: %w", fromWire(&wire.Error{Code: wire.Code(m.Code), Text: m.Text})))
			return nil
		}
		ev, err := fromEvent(m)
		if err != nil {
			return err
		}
		return c.event(ev)
	case *wire.Error:
		if request == 0 {
			return fromWire(m)
		}
		c.answer(request, answer{err: fromWire(m)})
	case wire.OK, wire.Pong, wire.StatusOK:
		c.answer(request, answer{m: m})
	default:
		return fmt.Errorf("unexpected %s", m.Type())
	}
	return nil
}

// deliver hands an event on, or takes the mark of DRAINING out. It is called once at a time.
func (c *Client) deliver(ev transfer.Event) {
	if ev.Kind != 0 {
		if c.opts.OnEvent != nil {
			c.opts.OnEvent(ev)
		}
		return
	}
	select {
	case <-c.leaving:
	default:
		close(c.leaving)
	}
}

func (c *Client) answer(request uint64, a answer) {
	c.mu.Lock()
	ch := c.waiting[request]
	delete(c.waiting, request)
	c.mu.Unlock()
	if ch != nil { // nobody waits for pings, nor where a context ended
		ch <- a
	}
}

// call sends a request and waits for its answer.
func (c *Client) call(ctx context.Context, m wire.Message, fds ...int) (wire.Message, error) {
	id := c.nextID.Add(1)
	frame, err := wire.AppendFrame(nil, c.version, 0, id, m)
	if err != nil {
		return nil, fromError(err)
	}
	select {
	case c.slots <- struct{}{}:
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-c.done:
		return nil, c.Err()
	}
	o := outgoing{frame: frame}
	for _, fd := range fds { // duplicates: the writer may come to it after the caller gave up and closed its own
		own, err := dup(fd)
		if err != nil {
			<-c.slots
			o.close()
			return nil, err
		}
		o.fds = append(o.fds, own)
	}
	ch := make(chan answer, 1)
	c.mu.Lock()
	if c.err != nil {
		c.mu.Unlock()
		o.close()
		return nil, c.Err()
	}
	c.waiting[id] = ch
	c.calls.Add(1)
	c.mu.Unlock()
	err = c.enqueue(ctx, o)
	c.calls.Done()
	if err != nil {
		c.answer(id, answer{})
		<-c.slots
		return nil, err
	}
	select {
	case a := <-ch:
		<-c.slots
		return a.m, a.err
	case <-ctx.Done():
		// The daemon still works on it: the slot comes free with the answer.
		go func() { <-ch; <-c.slots }()
		return nil, ctx.Err()
	}
}

func (c *Client) enqueue(ctx context.Context, o outgoing) error {
	select {
	case c.out <- o:
		return nil
	case <-ctx.Done():
		o.close()
		return ctx.Err()
	case <-c.done:
		o.close()
		return c.Err()
	}
}

// value is call for requests answered by OK.
func (c *Client) value(ctx context.Context, what string, m wire.Message, fds ...int) (uint64, error) {
	a, err := c.call(ctx, m, fds...)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", what, err)
	}
	ok, is := a.(wire.OK)
	if !is {
		return 0, fmt.Errorf("%s: daemon answered with %s", what, a.Type())
	}
	return ok.Value, nil
}

// RegisterRegion lends size bytes of fd, a memfd sealed against shrinking. The caller keeps its own descriptor.
func (c *Client) RegisterRegion(ctx context.Context, fd int, size uint64, l transfer.Layout, flags ...transfer.RegionFlags) (transfer.RegionID, error) {
	layout, err := l.MarshalBinary()
	if err != nil {
		return 0, fmt.Errorf("register region: %w", err)
	}
	m := wire.RegisterRegion{Size: size, Layout: layout}
	for _, f := range flags {
		m.Flags |= uint32(f)
	}
	id, err := c.value(ctx, "register region", m, fd)
	return transfer.RegionID(id), err
}

// RegisterDMABuf lends size bytes of a device's memory, exported as a dma-buf: they begin at its offset, and at its address in
// this process. The caller keeps its own descriptor, and the memory until the region is removed. Refused by a daemon that
// has no NIC to reach it with; the engine then stages over host memory.
func (c *Client) RegisterDMABuf(ctx context.Context, buf transfer.DMABuf, size uint64, l transfer.Layout, flags ...transfer.RegionFlags) (transfer.RegionID, error) {
	layout, err := l.MarshalBinary()
	if err != nil {
		return 0, fmt.Errorf("register dma-buf: %w", err)
	}
	m := wire.RegisterDMABuf{Size: size, Offset: buf.Offset, Address: buf.Address, Layout: layout, Device: buf.Device}
	for _, f := range flags {
		m.Flags |= uint32(f)
	}
	id, err := c.value(ctx, "register dma-buf", m, buf.FD)
	return transfer.RegionID(id), err
}

// RemoveRegion revokes the region's leases and returns when they are fenced and the daemon has unmapped it.
func (c *Client) RemoveRegion(ctx context.Context, id transfer.RegionID) error {
	_, err := c.value(ctx, "remove region", wire.RemoveRegion{Region: uint64(id)})
	return err
}

// Present (P) presents a ticket. If ctx ends before the answer, whether it was is unknown: RevokeTicket makes sure.
func (c *Client) Present(ctx context.Context, r transfer.PresentReq) (transfer.LeaseID, error) {
	id, err := c.value(ctx, "present ticket", wire.Present{Regions: regions(r.Regions), Tokens: r.Tokens, Ticket: r.Ticket, Peer: r.Peer, Meta: r.Meta, Blocks: r.Blocks})
	return transfer.LeaseID(id), err
}

func regions(ids []transfer.RegionID) []uint64 {
	out := make([]uint64, len(ids))
	for i, id := range ids {
		out[i] = uint64(id)
	}
	return out
}

// Push (P) sends complete units; EventPushed follows when they have landed. A few unit ranges go by ring, if the daemon
// takes one: then it returns at once, and a refusal, which is an engine's mistake unless the lease has ended, revokes the
// lease. Others go as a message, and it returns when the daemon has taken them.
func (c *Client) Push(ctx context.Context, id transfer.LeaseID, units []transfer.Unit, seq uint64) error {
	if r := c.pushes.Load(); r != nil {
		if c.gone() {
			return fmt.Errorf("push: %w", c.Err())
		}
		if ok, err := r.submit(id, units, seq); ok || err != nil {
			return err
		}
	}
	m := wire.Push{Lease: uint64(id), Seq: seq, Units: make([]wire.Unit, len(units))}
	for i, u := range units {
		m.Units[i] = wire.Unit(u)
	}
	_, err := c.value(ctx, "push", m)
	return err
}

// Handoff (P) gives the record that D gets when the lease settles.
func (c *Client) Handoff(ctx context.Context, id transfer.LeaseID, record []byte) error {
	_, err := c.value(ctx, "hand off", wire.Handoff{Lease: uint64(id), Record: record})
	return err
}

// Bind (D) binds a presented ticket to blocks. If ctx ends before the answer, whether it did is unknown: RevokeTicket
// before the blocks are used for anything else.
func (c *Client) Bind(ctx context.Context, r transfer.BindReq) (transfer.LeaseID, error) {
	id, err := c.value(ctx, "bind ticket", wire.Bind{Regions: regions(r.Regions), FirstToken: r.FirstToken, Ticket: r.Ticket, Blocks: r.Blocks})
	return transfer.LeaseID(id), err
}

// Refuse (D) answers a ticket, presented or still to be, with no.
func (c *Client) Refuse(ctx context.Context, ticket []byte, reason string) error {
	_, err := c.value(ctx, "refuse ticket", wire.Refuse{Ticket: ticket, Reason: wire.Cut(reason)})
	return err
}

// Revoke ends a lease. When it returns nil, or transfer.ErrLeaseEnded or ErrUnknownLease, no byte lands in its blocks and
// none is read from them any more.
func (c *Client) Revoke(ctx context.Context, id transfer.LeaseID, reason string) error {
	_, err := c.value(ctx, "revoke lease", wire.Revoke{Lease: uint64(id), Reason: wire.Cut(reason)})
	return err
}

// RevokeTicket is Revoke for who knows the ticket only.
func (c *Client) RevokeTicket(ctx context.Context, nonce [16]byte, reason string) error {
	_, err := c.value(ctx, "revoke ticket", wire.Revoke{Nonce: nonce, Reason: wire.Cut(reason)})
	return err
}

// Status is the daemon's snapshot.
func (c *Client) Status(ctx context.Context) (transfer.Status, error) {
	var st transfer.Status
	a, err := c.call(ctx, wire.Status{})
	if err != nil {
		return st, fmt.Errorf("get status: %w", err)
	}
	doc, is := a.(wire.StatusOK)
	if !is {
		return st, fmt.Errorf("get status: daemon answered with %s", a.Type())
	}
	if err := json.Unmarshal(doc.JSON, &st); err != nil {
		return st, fmt.Errorf("get status: %w", err)
	}
	return st, nil
}
