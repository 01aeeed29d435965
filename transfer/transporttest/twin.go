package transporttest

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/rpc"
	"sync"
	"testing"
	"time"

	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/ticket"
)

// Twin is one of two processes, in two machines, that run the same test: the first drives, the second does as it is told.
type Twin struct {
	Factory Factory
	Number  int                     // 1 drives, 2 serves
	Hosts   [2]string               // the machines' addresses, the first one's first
	Port    string                  // where the second takes orders; 7900 when empty
	Do      map[string]func() error // what the driver can have done in either machine
}

// twinWait bounds how long one machine waits for the other to come to the same test.
const twinWait = 90 * time.Second

// Meet runs drive in the first machine; the second one serves it until it is through.
func (tw Twin) Meet(t *testing.T, drive func(*testing.T, *Machines)) {
	t.Helper()
	self := &agent{tw: tw, t: orderTB{t}}
	MeetTwin(t, tw.Number, net.JoinHostPort(tw.Hosts[1], cmp.Or(tw.Port, "7900")), self, func(t *testing.T, clients [2]*rpc.Client) {
		drive(t, &Machines{{t: t, rpc: clients[0]}, {t: t, rpc: clients[1]}})
	})
	if tw.Number == 2 {
		self.Stop(0, new(bool))
	}
}

// MeetTwin joins two processes that run the same test. What the agent's methods do, as net/rpc has them, the first one can
// order in either process: the clients are of the first and of the second. The second process, at addr, serves the first
// one until that is through.
func MeetTwin(t *testing.T, number int, addr string, agent any, drive func(*testing.T, [2]*rpc.Client)) {
	t.Helper()
	end := &ending{}
	server := rpc.NewServer()
	if err := errors.Join(server.RegisterName("Agent", agent), server.RegisterName("Ending", end)); err != nil {
		t.Fatal(err)
	}
	if number == 2 {
		serveTwin(t, addr, server, end)
		return
	}
	conn := dialTwin(t, addr)
	near, far := net.Pipe()
	go server.ServeConn(far)
	clients := [2]*rpc.Client{rpc.NewClient(near), rpc.NewClient(conn)}
	t.Cleanup(func() {
		if err := clients[1].Call("Ending.Leave", t.Failed(), new(bool)); err != nil {
			t.Errorf("the other machine does not say that it is through: %v", err)
		}
		clients[0].Close()
		clients[1].Close()
	})
	drive(t, clients)
}

// ending is how the driver takes its leave.
type ending struct{ left, failed bool }

// Leave ends the test in the second process.
func (e *ending) Leave(testFailed bool, _ *bool) error {
	e.left, e.failed = true, testFailed
	return nil
}

func dialTwin(t *testing.T, addr string) net.Conn {
	t.Helper()
	deadline := time.Now().Add(twinWait)
	for {
		conn, err := net.DialTimeout("tcp", addr, time.Second)
		if err == nil {
			return conn
		}
		if time.Now().After(deadline) {
			t.Fatalf("the other machine does not come: %v", err)
		}
		time.Sleep(20 * time.Millisecond) // polling with a deadline: the other machine boots
	}
}

// serveTwin takes orders over one connection. Whether the test holds is the driver's to say.
func serveTwin(t *testing.T, addr string, server *rpc.Server, end *ending) {
	t.Helper()
	l, err := net.Listen("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	if err := l.(*net.TCPListener).SetDeadline(time.Now().Add(twinWait)); err != nil {
		t.Fatal(err)
	}
	conn, err := l.Accept()
	if err = errors.Join(err, l.Close()); err != nil {
		t.Fatalf("wait for the other machine: %v", err)
	}
	server.ServeConn(conn) // returns when the driver has closed it
	switch {
	case !end.left:
		t.Error("the other machine went in the middle of the test")
	case end.failed:
		t.Error("the test failed in the other machine, which says why")
	}
}

// orderTB makes what would end the test an error of the order that is being carried out: orders run in goroutines of their
// own.
type orderTB struct{ testing.TB }

type orderFailed struct{ error }

func (orderTB) Helper() {}

func (orderTB) Fatal(args ...any) { panic(orderFailed{errors.New(fmt.Sprint(args...))}) }

func (orderTB) Fatalf(format string, args ...any) { panic(orderFailed{fmt.Errorf(format, args...)}) }

// failed is deferred by every order.
func failed(err *error) {
	switch v := recover().(type) {
	case nil:
	case orderFailed:
		*err = v.error
	default:
		panic(v)
	}
}

// agent is a daemon with a prefill and a decode engine, and carries out orders. Its methods are called by net/rpc.
type agent struct {
	tw Twin
	t  orderTB

	mu     sync.Mutex // guards what follows; orders come side by side
	pair   *Pair
	shadow *Side // what the other machine's prefill engine holds, to compare with
	reqs   map[[16]byte]*Request
	fenced []*Request // their blocks must keep their canaries until they are used again
}

// StartOrder says what daemon to start.
type StartOrder struct {
	P, D       Shape // DefaultShape where zero
	Lanes      int
	FenceGrace time.Duration // the factory's where zero
	Checksum   transfer.Checksum
}

// Start starts a daemon with both engines, in place of the one before it, and gives its address.
func (a *agent) Start(o StartOrder, addr *string) (err error) {
	defer failed(&err)
	if err := a.Stop(0, new(bool)); err != nil {
		return err
	}
	opts := Options{P: o.P, D: o.D, Config: func(c *transfer.Config) {
		c.Listen = net.JoinHostPort(a.tw.Hosts[a.tw.Number-1], "0")
		if o.Lanes > 0 {
			c.Lanes = o.Lanes
		}
		if o.FenceGrace > 0 {
			c.FenceGrace = o.FenceGrace
		}
		c.Checksum = o.Checksum
	}}
	for _, s := range []*Shape{&opts.P, &opts.D} {
		if *s == (Shape{}) {
			*s = DefaultShape
		}
	}
	e, pauses := newEngine(a.t, a.tw.Factory, nodeName(a.tw.Number), opts)
	p := &Pair{P: newSide("prefill"), D: newSide("decode"), Addr: e.DataAddr()}
	p.P.Engine, p.D.Engine, p.P.Pauses, p.D.Pauses = e, e, pauses, pauses
	p.attach(a.t, opts)
	shadow := newSide("shadow")
	shadow.Layouts = opts.P.Layouts()
	for _, l := range shadow.Layouts {
		shadow.Mems = append(shadow.Mems, NewMemory(a.t, l.LayerStride*uint64(l.Layers)))
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.pair, a.shadow, a.reqs, a.fenced = p, shadow, make(map[[16]byte]*Request), nil
	*addr = p.Addr
	return nil
}

func nodeName(number int) string { return fmt.Sprintf("node-%d", number) }

// Stop closes the daemon, if there is one.
func (a *agent) Stop(_ int, _ *bool) (err error) {
	defer failed(&err)
	a.mu.Lock()
	p, shadow := a.pair, a.shadow
	a.pair = nil
	a.mu.Unlock()
	if p == nil {
		return nil
	}
	p.Close(a.t)
	for _, m := range shadow.Mems {
		m.Close()
	}
	return nil
}

// SendOrder asks for a transfer to the other machine.
type SendOrder struct {
	Addr          string
	Tokens, First uint32
	Src           []uint32 // at random when empty
	Life          time.Duration
	Record        []byte
	Held          int // hold it at the so many-th piece; 0: do not
}

// Sent describes a transfer to who is to receive it.
type Sent struct {
	Raw           []byte
	Tokens, First uint32
	Src, Dst      []uint32 // Dst: at random when empty
	Salt          byte
}

// Send presents a ticket and pushes everything.
func (a *agent) Send(o SendOrder, s *Sent) (err error) {
	defer failed(&err)
	a.mu.Lock()
	p := a.pair
	r := NewRand()
	there := *p
	there.Addr = o.Addr
	q := &Request{Pair: &there, Tokens: o.Tokens, FirstToken: o.First, Src: o.Src}
	q.Ticket = ticket.Ticket{
		Nonce: ticket.NewNonce(), PNode: nodeName(a.tw.Number), DNode: nodeName(3 - a.tw.Number), PEngine: p.P.ID, DEngine: p.D.ID,
		Fingerprint: Fingerprint, Deadline: time.Now().Add(o.Life),
	}
	q.Raw = ticket.Mint(Key, q.Ticket)
	if len(q.Src) == 0 {
		q.Src = pick(r, p.P.Layout, q.Tokens)
	}
	q.FillSource(byte(r.IntN(0x80)))
	a.reqs[q.Ticket.Nonce] = q
	a.mu.Unlock()
	if o.Held > 0 {
		p.P.Pauses.Set(transfer.PauseWriteFrame, o.Held)
	}
	q.Present(a.t, nil)
	q.PushAll(a.t, o.Record)
	*s = Sent{Raw: q.Raw, Tokens: q.Tokens, First: q.FirstToken, Src: q.Src, Salt: q.salt}
	return nil
}

// Bind waits for a transfer from the other machine and binds it.
func (a *agent) Bind(s Sent, _ *bool) (err error) {
	defer failed(&err)
	q, err := a.expect(s)
	if err != nil {
		return err
	}
	q.Bind(a.t)
	return nil
}

func (a *agent) expect(s Sent) (*Request, error) {
	tk, err := ticket.Decode(s.Raw)
	if err != nil {
		return nil, err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	q := &Request{
		Pair:   &Pair{P: a.shadow, D: a.pair.D, Addr: a.pair.Addr},
		Ticket: tk, Raw: s.Raw, Tokens: s.Tokens, FirstToken: s.First, Src: s.Src, Dst: s.Dst, salt: s.Salt,
	}
	if len(q.Dst) == 0 {
		q.Dst = pick(NewRand(), a.pair.D.Layout, s.Tokens)
	}
	a.fenced = withoutBlocks(a.fenced, q.Dst)
	a.pair.D.set(q.Dst, 0x80)
	a.reqs[tk.Nonce] = q
	return q, nil
}

// Refuse waits for a transfer from the other machine and refuses it.
func (a *agent) Refuse(s Sent, _ *bool) (err error) {
	defer failed(&err)
	q, err := a.expect(s)
	if err != nil {
		return err
	}
	q.Pair.D.Wait(a.t, q.Ticket.Nonce, transfer.EventPresented)
	return q.Pair.D.Client.Refuse(q.Raw, "no blocks")
}

// side finds a transfer and this machine's side of it.
func (a *agent) side(nonce [16]byte) (*Request, *Side, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch q := a.reqs[nonce]; {
	case q == nil || a.pair == nil:
		return nil, nil, fmt.Errorf("no transfer %x is known here", nonce[:4])
	case q.Pair.P == a.shadow:
		return q, a.pair.D, nil
	default:
		return q, a.pair.P, nil
	}
}

// Ended is how a transfer ended at one side.
type Ended struct {
	Kind   transfer.EventKind
	State  transfer.LeaseState
	Reason string
	Record []byte
}

// End waits for a transfer's end.
func (a *agent) End(nonce [16]byte, e *Ended) (err error) {
	defer failed(&err)
	_, s, err := a.side(nonce)
	if err != nil {
		return err
	}
	ev := s.End(a.t, nonce)
	*e = Ended{ev.Kind, ev.State, ev.Reason, ev.Record}
	return nil
}

// Check compares what landed with what was sent.
func (a *agent) Check(nonce [16]byte, _ *bool) error {
	q, _, err := a.side(nonce)
	if err != nil {
		return err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	q.FillSource(q.salt)
	return q.CheckLanded()
}

// Held waits until the transfer of this machine that is to be held is.
func (a *agent) Held(_ int, _ *bool) (err error) {
	defer failed(&err)
	WaitHeld(a.t, a.pair.P.Pauses, transfer.PauseWriteFrame)
	return nil
}

// Release lets what is held go on.
func (a *agent) Release(_ int, _ *bool) error {
	a.pair.P.Pauses.ReleaseAll()
	return nil
}

// ReleaseIfThere is Release where the daemon may be gone.
func (a *agent) ReleaseIfThere(_ int, done *bool) error {
	if a.pair == nil {
		return nil
	}
	return a.Release(0, done)
}

// Revoke ends a transfer. When this side has ended otherwise before, that is no error.
func (a *agent) Revoke(nonce [16]byte, _ *bool) error {
	q, s, err := a.side(nonce)
	if err != nil {
		return err
	}
	id := q.PLease
	if q.Pair.P == a.shadow {
		id = q.DLease
	}
	if err := s.Client.Revoke(id, "enough"); err != nil && !errors.Is(err, transfer.ErrUnknownLease) && !errors.Is(err, transfer.ErrLeaseEnded) {
		return err
	}
	return nil
}

// Overwrite writes canaries into the blocks of a transfer that has ended here.
func (a *agent) Overwrite(nonce [16]byte, _ *bool) error {
	q, s, err := a.side(nonce)
	if err != nil {
		return err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if s == a.pair.P {
		s.set(q.Src, canarySource)
		return nil
	}
	found := error(nil)
	s.eachBlock(q.Dst, func(b []byte) {
		if bytes.IndexByte(b, canarySource) >= 0 {
			found = errors.New("a source byte that was overwritten after the fence arrived")
		}
	})
	s.set(q.Dst, canaryTarget)
	a.fenced = append(a.fenced, q)
	return found
}

// Canaries looks whether all are there.
func (a *agent) Canaries(_ int, _ *bool) (err error) {
	defer failed(&err)
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, q := range a.fenced {
		checkOnly(a.t, a.pair.D, q.Dst, canaryTarget, "a byte landed after the fence")
	}
	return nil
}

// LeaveClient closes an engine's client: "prefill" or "decode".
func (a *agent) LeaveClient(id string, _ *bool) error {
	if id == "prefill" {
		return a.pair.P.Client.Close()
	}
	return a.pair.D.Client.Close()
}

// Status gives the daemon's.
func (a *agent) Status(_ int, s *transfer.Status) error {
	*s = a.pair.P.Engine.Status()
	return nil
}

// Do does what the test gave a name.
func (a *agent) Do(name string, _ *bool) error {
	f := a.tw.Do[name]
	if f == nil {
		return fmt.Errorf("nobody here knows how to %s", name)
	}
	return f()
}
