// Package transporttest holds transports to what package transfer promises of them: one conformance suite, run against
// every transport of the project, and Fake, a transport in memory that injects faults. It is shipped so that transports
// outside this repository can be held to it too. It reaches transports through transfer.Engine only.
package transporttest

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/ticket"
)

// Key is the cluster key of all test engines.
var Key = []byte("the cluster key of the transport tests")

// Fingerprint is the model of all test regions.
var Fingerprint = [32]byte{'t', 'e', 's', 't'}

// Shape is the size of a test region.
type Shape struct {
	Layers, Blocks, BlockTokens, Heads, HeadBytes uint32
	Shards                                        uint32 // regions the heads are divided over, evenly or nearly so; 0 is 1
}

// DefaultShape has 64 blocks of 64 KiB a layer: pieces of 16 units.
var DefaultShape = Shape{Layers: 4, Blocks: 64, BlockTokens: 16, Heads: 4, HeadBytes: 512}

// Layout is [layer][block][plane][token][head][bytes] of the first shard.
func (s Shape) Layout() transfer.Layout { return s.Layouts()[0] }

// Layouts are those of all shards. With more shards than heads, heads are held by several.
func (s Shape) Layouts() []transfer.Layout {
	n := max(s.Shards, 1)
	out := make([]transfer.Layout, n)
	for rank := range n {
		first, end := rank*s.Heads/n, (rank+1)*s.Heads/n
		out[rank] = s.layout(rank, n, first, max(end-first, 1))
	}
	return out
}

func (s Shape) layout(rank, ranks, first, heads uint32) transfer.Layout {
	l := transfer.Layout{
		Fingerprint: Fingerprint, DType: transfer.F32, Layers: s.Layers, Blocks: s.Blocks, BlockTokens: s.BlockTokens, Planes: 2,
		Heads: heads, HeadFirst: first, HeadsTotal: s.Heads, HeadBytes: s.HeadBytes, TPRank: rank, TPSize: ranks,
	}
	l.HeadStride = uint64(s.HeadBytes)
	l.TokenStride = l.HeadStride * uint64(heads)
	l.PlaneStride = l.TokenStride * uint64(s.BlockTokens)
	l.BlockStride = l.PlaneStride * 2
	l.LayerStride = l.BlockStride * uint64(s.Blocks)
	return l
}

// Memory is a sealed memfd, mapped once more for the test's own eyes.
type Memory struct {
	Bytes []byte
	fd    int
}

// NewMemory makes sealed shared memory that goes away with the test.
func NewMemory(t testing.TB, size uint64) *Memory {
	t.Helper()
	fd, err := unix.MemfdCreate("headrace-test", unix.MFD_ALLOW_SEALING|unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatalf("create memfd: %v", err)
	}
	if err := unix.Ftruncate(fd, int64(size)); err != nil {
		t.Fatalf("size memfd: %v", err)
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW); err != nil {
		t.Fatalf("seal memfd: %v", err)
	}
	b, err := unix.Mmap(fd, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatalf("map memfd: %v", err)
	}
	m := &Memory{Bytes: b, fd: fd}
	t.Cleanup(m.Close)
	return m
}

// Close unmaps it.
func (m *Memory) Close() {
	if m.Bytes != nil {
		unix.Munmap(m.Bytes)
		unix.Close(m.fd)
		m.Bytes = nil
	}
}

// FD gives a descriptor of its own, for AddRegion to take over.
func (m *Memory) FD(t testing.TB) int {
	t.Helper()
	fd, err := unix.FcntlInt(uintptr(m.fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatalf("duplicate memfd: %v", err)
	}
	return fd
}

// Side is one inference engine with its daemon and its regions.
type Side struct {
	Engine  *transfer.Engine
	Client  *transfer.Client
	ID      string
	Regions []transfer.RegionID // a shard set; what follows is in the same order
	Layouts []transfer.Layout
	Mems    []*Memory
	Layout  transfer.Layout // the first region's
	Mem     *Memory
	Pauses  *transfer.Pauses

	mu     sync.Mutex
	events map[[16]byte][]transfer.Event
	ends   map[[16]byte]time.Time // when leases ended without having settled
	news   chan struct{}
	other  *Side // nil where it is another machine's
}

func newSide(id string) *Side {
	return &Side{ID: id, events: make(map[[16]byte][]transfer.Event), ends: make(map[[16]byte]time.Time), news: make(chan struct{}, 1)}
}

func (s *Side) event(ev transfer.Event) {
	s.mu.Lock()
	s.events[ev.Nonce] = append(s.events[ev.Nonce], ev)
	if ev.Kind == transfer.EventEnded {
		s.ends[ev.Nonce] = time.Now()
	}
	s.mu.Unlock()
	select {
	case s.news <- struct{}{}:
	default:
	}
}

// ended says when a lease ended that did not settle.
func (s *Side) ended(nonce [16]byte) time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ends[nonce]
}

// Events gives the events of a ticket so far.
func (s *Side) Events(nonce [16]byte) []transfer.Event {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]transfer.Event(nil), s.events[nonce]...)
}

// patience bounds every wait of the suite: no wait is without a deadline.
var patience = func() time.Duration {
	if os.Getenv("HEADRACE_LAB") != "" { // emulated, on a machine that does other things too
		return 60 * time.Second
	}
	return 10 * time.Second
}()

// Wait waits for an event of one of the kinds, and gives the first.
func (s *Side) Wait(t testing.TB, nonce [16]byte, kinds ...transfer.EventKind) transfer.Event {
	t.Helper()
	deadline := time.NewTimer(patience)
	defer deadline.Stop()
	poll := time.NewTicker(5 * time.Millisecond) // two may wait for news of one side
	defer poll.Stop()
	for {
		evs := s.Events(nonce)
		for _, ev := range evs {
			for _, k := range kinds {
				if ev.Kind == k {
					return ev
				}
			}
		}
		if why := s.inVain(nonce, kinds); why != "" {
			t.Fatalf("%s: waited for %v, got %s, and %s", s.ID, kinds, describe(evs), why)
		}
		select {
		case <-s.news:
		case <-poll.C:
		case <-deadline.C:
			why := ""
			if s.other != nil {
				why = fmt.Sprintf("; %s got %s", s.other.ID, describe(s.other.Events(nonce)))
			}
			t.Fatalf("%s: waited %v for %v, got %s%s", s.ID, patience, kinds, describe(evs), why)
		}
	}
}

// inVain says why a ticket will not be presented any more: at the other side its lease has ended.
func (s *Side) inVain(nonce [16]byte, kinds []transfer.EventKind) string {
	if s.other == nil || len(kinds) != 1 || kinds[0] != transfer.EventPresented || len(s.Events(nonce)) > 0 {
		return ""
	}
	for _, ev := range s.other.Events(nonce) {
		if ev.Kind == transfer.EventEnded || ev.Kind == transfer.EventRefused {
			return fmt.Sprintf("%s got %s", s.other.ID, describe([]transfer.Event{ev}))
		}
	}
	return ""
}

// End waits for the event that ends a lease.
func (s *Side) End(t testing.TB, nonce [16]byte) transfer.Event {
	t.Helper()
	return s.Wait(t, nonce, transfer.EventSettled, transfer.EventEnded, transfer.EventRefused)
}

func describe(evs []transfer.Event) string {
	var b bytes.Buffer
	for _, ev := range evs {
		fmt.Fprintf(&b, "[%v seq %d %q] ", ev.Kind, ev.Seq, ev.Reason)
	}
	if b.Len() == 0 {
		return "nothing"
	}
	return b.String()
}

// Pair is a prefill and a decode engine whose daemons a transport joins.
type Pair struct {
	P, D  *Side
	Local bool
	Addr  string // of D's daemon
}

// Options modify NewPair.
type Options struct {
	P, D   Shape // DefaultShape where zero
	Config func(*transfer.Config)
}

// NewPair starts daemons and engines. They go away with the test, or with Close.
func NewPair(t testing.TB, f Factory, o Options) *Pair {
	t.Helper()
	for _, s := range []*Shape{&o.P, &o.D} {
		if *s == (Shape{}) {
			*s = DefaultShape
		}
	}
	pair := &Pair{P: newSide("prefill"), D: newSide("decode"), Local: f.Local}
	pair.P.Engine, pair.P.Pauses = newEngine(t, f, "node-p", o)
	pair.D.Engine, pair.D.Pauses = pair.P.Engine, pair.P.Pauses
	if !f.Local {
		pair.D.Engine, pair.D.Pauses = newEngine(t, f, "node-d", o)
	}
	pair.Addr = pair.D.Engine.DataAddr()
	pair.P.other, pair.D.other = pair.D, pair.P
	pair.attach(t, o)
	return pair
}

// JoinEngine makes a pair of engines that are attached to one daemon, which stays the caller's.
func JoinEngine(t testing.TB, e *transfer.Engine) *Pair {
	t.Helper()
	pair := &Pair{P: newSide("prefill"), D: newSide("decode"), Local: true, Addr: e.DataAddr()}
	pair.P.Engine, pair.D.Engine = e, e
	pair.attach(t, Options{P: DefaultShape, D: DefaultShape})
	return pair
}

func (p *Pair) attach(t testing.TB, o Options) {
	t.Helper()
	for i, s := range []*Side{p.P, p.D} {
		shape := []Shape{o.P, o.D}[i]
		var err error
		if s.Client, err = s.Engine.Attach(s.ID, s.event); err != nil {
			t.Fatal(err)
		}
		s.Layouts = shape.Layouts()
		for _, l := range s.Layouts {
			size := l.LayerStride * uint64(l.Layers)
			mem := NewMemory(t, size)
			region, err := s.Client.AddRegion(mem.FD(t), size, l, 0)
			if err != nil {
				t.Fatal(err)
			}
			s.Mems, s.Regions = append(s.Mems, mem), append(s.Regions, region)
		}
		s.Layout, s.Mem = s.Layouts[0], s.Mems[0]
	}
}

// Reattach attaches a side whose client was closed, and lends its memory anew.
func (s *Side) Reattach(t testing.TB) {
	t.Helper()
	var err error
	if s.Client, err = s.Engine.Attach(s.ID, s.event); err != nil {
		t.Fatal(err)
	}
	for i, l := range s.Layouts {
		if s.Regions[i], err = s.Client.AddRegion(s.Mems[i].FD(t), l.LayerStride*uint64(l.Layers), l, 0); err != nil {
			t.Fatal(err)
		}
	}
}

func newEngine(t testing.TB, f Factory, node string, o Options) (*transfer.Engine, *transfer.Pauses) {
	t.Helper()
	p := transfer.NewPauses()
	cfg := transfer.Config{NodeID: node, ClusterKey: Key, Transports: []transfer.Transport{f.New()}, Pauses: p, Lanes: 2}
	if f.Network != nil {
		cfg.Listener, cfg.Dial = f.Network.Listen(), f.Network.Dial
	} else if !f.Local {
		cfg.Listen = "127.0.0.1:0"
	}
	cfg.Logger = newJournal(t, node)
	if os.Getenv("HEADRACE_LAB") != "" { // an emulated machine is some fifty times slower, and not because the peer is
		cfg.FenceGrace = time.Second
	}
	if f.Config != nil {
		f.Config(&cfg)
	}
	if o.Config != nil {
		o.Config(&cfg)
	}
	e, err := transfer.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.ReleaseAll()
		if err := e.Close(); err != nil {
			t.Errorf("close engine %s: %v", node, err)
		}
	})
	return e, p
}

// Close ends both daemons and takes the memory away.
func (p *Pair) Close(t testing.TB) {
	t.Helper()
	for _, s := range []*Side{p.P, p.D} {
		s.Pauses.ReleaseAll()
		if err := s.Engine.Close(); err != nil {
			t.Errorf("close engine: %v", err)
		}
		for _, m := range s.Mems {
			m.Close()
		}
	}
}

// Ticket mints a ticket of the pair.
func (p *Pair) Ticket(life time.Duration) (ticket.Ticket, []byte) {
	tk := ticket.Ticket{
		Nonce: ticket.NewNonce(), PNode: p.P.Engine.NodeID(), DNode: p.D.Engine.NodeID(), PEngine: p.P.ID, DEngine: p.D.ID,
		Fingerprint: Fingerprint, Deadline: time.Now().Add(life),
	}
	return tk, ticket.Mint(Key, tk)
}

// Network is a network in memory whose connections are pipes: it works in a synctest bubble.
type Network struct {
	mu        sync.Mutex
	next      int
	listeners map[string]*pipeListener
}

// NewNetwork makes a network.
func NewNetwork() *Network { return &Network{listeners: make(map[string]*pipeListener)} }

type pipeListener struct {
	n    *Network
	addr pipeAddr
	in   chan net.Conn
	once sync.Once
	done chan struct{}
}

type pipeAddr string

func (pipeAddr) Network() string  { return "pipe" }
func (a pipeAddr) String() string { return string(a) }

// Listen makes a listener with an address of its own.
func (n *Network) Listen() net.Listener {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.next++
	l := &pipeListener{n: n, addr: pipeAddr(fmt.Sprintf("pipe-%d", n.next)), in: make(chan net.Conn), done: make(chan struct{})}
	n.listeners[string(l.addr)] = l
	return l
}

// Dial connects to a listener.
func (n *Network) Dial(ctx context.Context, addr string) (net.Conn, error) {
	n.mu.Lock()
	l := n.listeners[addr]
	n.mu.Unlock()
	if l == nil {
		return nil, fmt.Errorf("dial %s: connection refused", addr)
	}
	near, far := net.Pipe()
	select {
	case l.in <- far:
		return near, nil
	case <-l.done:
		return nil, fmt.Errorf("dial %s: connection refused", addr)
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (l *pipeListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.in:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

func (l *pipeListener) Close() error {
	l.once.Do(func() {
		close(l.done)
		l.n.mu.Lock()
		delete(l.n.listeners, string(l.addr))
		l.n.mu.Unlock()
	})
	return nil
}

func (l *pipeListener) Addr() net.Addr { return l.addr }
