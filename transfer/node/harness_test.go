package node_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/headrace/headrace/internal/memfd"
	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/node"
	"github.com/headrace/headrace/transfer/node/nodeclient"
	"github.com/headrace/headrace/transfer/ticket"
)

var clusterKey = []byte("a cluster key of thirty-two bytes")

// nodeConfig is a daemon's configuration as it travels to a child process.
type nodeConfig struct {
	NodeID, Dir, Transport string
	Checksum, Telemetry    string
	EventFrames            int
	Takeover               bool
	Admin                  string
	DrainTimeout           time.Duration
	Silence                time.Duration // patient, for a machine may stop whom it likes for a while
}

const (
	// patient is the silence of those that are not to be given up.
	patient = 20 * time.Second
	// prompt is the product's own, for tests in which somebody is.
	prompt = 2500 * time.Millisecond
)

func (c nodeConfig) socket() string { return filepath.Join(c.Dir, c.NodeID+".sock") }

func (c nodeConfig) config(ready func(node.Ready)) node.Config {
	cfg := node.Config{NodeID: c.NodeID, Socket: c.socket(), ClusterKey: clusterKey, Transport: c.Transport, Admin: "127.0.0.1:0", Debug: true,
		OnReady: ready, EventFrames: c.EventFrames, Checksum: c.Checksum, Telemetry: c.Telemetry, AttachTimeout: 2 * time.Second,
		Peers: make(chan map[string]string)} // as in the program: somebody waits for news
	if c.Admin != "" {
		cfg.Admin = c.Admin
	}
	cfg.Takeover, cfg.DrainTimeout, cfg.Silence = c.Takeover, c.DrainTimeout, patient
	if c.Silence != 0 {
		cfg.Silence = c.Silence
	}
	if c.Transport != "shm" {
		cfg.Listen = "127.0.0.1:0"
	}
	if os.Getenv("HEADRACE_TEST_LOG") != "" {
		cfg.Logger = slog.New(slog.NewTextHandler(os.Stderr, nil)).With("node", c.NodeID)
	}
	return cfg
}

const (
	nodeEnv   = "HEADRACE_TEST_NODE"
	engineEnv = "HEADRACE_TEST_ENGINE"
	memberEnv = "HEADRACE_TEST_MEMBER"
)

// TestMain also is the daemon, or the engine, of tests that want real processes.
func TestMain(m *testing.M) {
	var err error
	switch {
	case os.Getenv(nodeEnv) != "":
		err = nodeChild(os.Getenv(nodeEnv))
	case os.Getenv(engineEnv) != "":
		err = engineChild(os.Getenv(engineEnv))
	case os.Getenv(memberEnv) != "":
		err = memberChild(os.Getenv(memberEnv))
	default:
		code := m.Run()
		if left := leaked(); code == 0 && left != "" {
			fmt.Fprintln(os.Stderr, "goroutines left behind:\n"+left)
			code = 1
		}
		os.Exit(code)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// leaked gives the goroutines of ours that do not end.
func leaked() string {
	http.DefaultClient.CloseIdleConnections()
	for deadline := time.Now().Add(20 * time.Second); ; runtime.Gosched() {
		left := ""
		for _, g := range strings.Split(stacks(), "\n\n") {
			if strings.Contains(g, "headrace/transfer") && !strings.Contains(g, "TestMain") {
				left += g + "\n\n"
			}
		}
		if left == "" || time.Now().After(deadline) {
			return left
		}
	}
}

func nodeChild(doc string) error {
	var c nodeConfig
	if err := json.Unmarshal([]byte(doc), &c); err != nil {
		return err
	}
	return node.Run(untilStdinCloses(), c.config(func(r node.Ready) { _ = json.NewEncoder(os.Stdout).Encode(r) }))
}

func untilStdinCloses() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	return ctx
}

// startNode runs a daemon in this process.
func startNode(t *testing.T, c nodeConfig) node.Ready {
	t.Helper()
	r, stop := runNode(t, c)
	t.Cleanup(stop)
	return r
}

func runNode(t *testing.T, c nodeConfig) (node.Ready, func()) {
	t.Helper()
	if c.Dir == "" {
		c.Dir = t.TempDir()
	}
	ctx, cancel := context.WithCancel(context.Background())
	ready, done := make(chan node.Ready, 1), make(chan error, 1)
	go func() { done <- node.Run(ctx, c.config(func(r node.Ready) { ready <- r })) }()
	stop := sync.OnceFunc(func() {
		cancel()
		select {
		case err := <-done:
			if err != nil {
				t.Errorf("daemon %s: %v", c.NodeID, err)
			}
		case <-time.After(20 * time.Second):
			t.Errorf("daemon %s does not stop\n%s", c.NodeID, stacks())
		}
	})
	select {
	case r := <-ready:
		return r, stop
	case err := <-done:
		t.Fatalf("start daemon: %v", err)
	case <-time.After(20 * time.Second):
		t.Fatal("daemon does not start")
	}
	return node.Ready{}, nil
}

func stacks() string {
	buf := make([]byte, 1<<20)
	return string(buf[:runtime.Stack(buf, true)])
}

// child is a process of this test binary.
type child struct {
	t     *testing.T
	cmd   *exec.Cmd
	stdin io.WriteCloser
	out   *bufio.Reader
	wait  func() error
}

func startChild(t *testing.T, env string, config any, extra ...*os.File) *child {
	t.Helper()
	doc, err := json.Marshal(config)
	if err != nil {
		t.Fatal(err)
	}
	c := &child{t: t, cmd: exec.Command(os.Args[0])}
	c.cmd.Env = append(os.Environ(), env+"="+string(doc))
	c.cmd.Stderr = os.Stderr
	c.cmd.ExtraFiles = extra
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if c.stdin, err = c.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	stdout, err := c.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	c.out = bufio.NewReader(stdout)
	// Pdeathsig follows the thread that started the child, so it must not be one the runtime lets end.
	if err := c.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	c.wait = sync.OnceValue(c.cmd.Wait)
	t.Cleanup(func() {
		c.signal(syscall.SIGKILL)
		_ = c.wait()
	})
	return c
}

func (c *child) line() []byte {
	c.t.Helper()
	b, err := c.out.ReadBytes('\n')
	if err != nil {
		c.t.Fatalf("read from child: %v", err)
	}
	return b
}

func (c *child) signal(s syscall.Signal) { _ = c.cmd.Process.Signal(s) }

func (c *child) kill() {
	c.signal(syscall.SIGKILL)
	_ = c.wait()
}

// startNodeProcess runs a daemon in a process of its own.
func startNodeProcess(t *testing.T, c nodeConfig) (node.Ready, *child) {
	t.Helper()
	if c.Dir == "" {
		c.Dir = t.TempDir()
	}
	ch := startChild(t, nodeEnv, c)
	var r node.Ready
	if err := json.Unmarshal(ch.line(), &r); err != nil {
		t.Fatal(err)
	}
	return r, ch
}

// engine is an inference engine as far as the daemon can tell.
type engine struct {
	*nodeclient.Client
	t      *testing.T
	id     string
	mem    *memfd.Memory
	layout transfer.Layout
	region transfer.RegionID

	mu     sync.Mutex
	events map[[16]byte]chan transfer.Event
}

// testLayout has units of 4 KiB in two planes.
func testLayout() transfer.Layout {
	return transfer.Layout{DType: transfer.F32, Layers: 3, Blocks: 32, BlockTokens: 16, Planes: 2, Heads: 2, HeadsTotal: 2, HeadBytes: 64, TPSize: 1,
		LayerStride: 32 * 4096, BlockStride: 4096, PlaneStride: 2048, TokenStride: 128, HeadStride: 64}
}

// wideLayout is one layer of 256 blocks of 64 KiB: enough to be cancelled in its middle.
func wideLayout() transfer.Layout {
	return transfer.Layout{DType: transfer.F32, Layers: 1, Blocks: 256, BlockTokens: 16, Planes: 1, Heads: 1, HeadsTotal: 1, HeadBytes: 4096, TPSize: 1,
		LayerStride: 256 << 16, BlockStride: 1 << 16, PlaneStride: 1 << 16, TokenStride: 4096, HeadStride: 4096}
}

func layoutSize(l transfer.Layout) uint64 { return uint64(l.Layers) * l.LayerStride }

// newEngine attaches an engine with memory of its own.
func newEngine(t *testing.T, socket, id string, l transfer.Layout) *engine {
	t.Helper()
	mem, err := memfd.Create(id, layoutSize(l))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = mem.Close() })
	return attachEngine(t, socket, id, l, mem)
}

func attachEngine(t *testing.T, socket, id string, l transfer.Layout, mem *memfd.Memory) *engine {
	t.Helper()
	e := &engine{t: t, id: id, layout: l, mem: mem, events: make(map[[16]byte]chan transfer.Event)}
	c, err := nodeclient.Dial(t.Context(), socket, nodeclient.Options{EngineID: id, OnEvent: e.event, Silence: patient})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	e.Client = c
	if e.region, err = c.RegisterRegion(t.Context(), mem.FD(), mem.Size(), l); err != nil {
		t.Fatal(err)
	}
	return e
}

func (e *engine) of(nonce [16]byte) chan transfer.Event {
	e.mu.Lock()
	defer e.mu.Unlock()
	ch := e.events[nonce]
	if ch == nil {
		ch = make(chan transfer.Event, 256)
		e.events[nonce] = ch
	}
	return ch
}

func (e *engine) event(ev transfer.Event) { e.of(ev.Nonce) <- ev }

// until waits for an event of the kind, passing over those before it.
func (e *engine) until(nonce [16]byte, kind transfer.EventKind) transfer.Event {
	e.t.Helper()
	timeout := time.After(15 * time.Second)
	for {
		select {
		case ev := <-e.of(nonce):
			if ev.Kind == kind {
				return ev
			}
			if ev.Kind == transfer.EventEnded || ev.Kind == transfer.EventRefused || ev.Kind == transfer.EventSettled {
				e.t.Fatalf("%s waits for %s, got %s: %s", e.id, kind, ev.Kind, ev.Reason)
			}
		case <-timeout:
			e.t.Fatalf("%s waits for %s in vain\n%s", e.id, kind, stacks())
		}
	}
}

// attempt is one request's transfer from p to d.
type attempt struct {
	p, d   *engine
	t      *testing.T
	nonce  [16]byte
	ticket []byte
	addr   string
	tokens uint32
	from   []uint32
	to     []uint32
	first  uint32
	pLease transfer.LeaseID
	dLease transfer.LeaseID
}

// newAttempt mints a ticket over all blocks of p's region, in reverse at d.
func newAttempt(p, d *engine, edit ...func(*ticket.Ticket)) *attempt {
	return newRemoteAttempt(p, p.Info().NodeID, d, edit...)
}

// works holds that KV moves from p to d.
func works(t *testing.T, p, d *engine) {
	t.Helper()
	at := newAttempt(p, d)
	at.bind()
	at.push(1)
	at.finish("x")
}

// newRemoteAttempt is newAttempt for a p that lives in another process.
func newRemoteAttempt(p *engine, pNode string, d *engine, edit ...func(*ticket.Ticket)) *attempt {
	t := ticket.Ticket{Nonce: ticket.NewNonce(), PNode: pNode, DNode: d.Info().NodeID, PEngine: p.id, DEngine: d.id,
		Fingerprint: p.layout.Fingerprint, Deadline: time.Now().Add(time.Minute)}
	for _, f := range edit {
		f(&t)
	}
	a := &attempt{p: p, d: d, t: p.t, nonce: t.Nonce, ticket: ticket.Mint(clusterKey, t), addr: d.Info().DataAddr}
	n := p.layout.Blocks
	a.tokens = n * p.layout.BlockTokens
	for i := range n {
		a.from, a.to = append(a.from, i), append(a.to, n-1-i)
	}
	return a
}

func (a *attempt) presentReq() transfer.PresentReq {
	return transfer.PresentReq{Ticket: a.ticket, Peer: a.addr, Regions: []transfer.RegionID{a.p.region}, Tokens: a.tokens, Blocks: a.from, Meta: []byte("meta")}
}

func (a *attempt) bindReq() transfer.BindReq {
	return transfer.BindReq{Ticket: a.ticket, Regions: []transfer.RegionID{a.d.region}, FirstToken: a.first, Blocks: a.to}
}

func (a *attempt) bind() {
	a.t.Helper()
	var err error
	if a.pLease, err = a.p.Present(a.t.Context(), a.presentReq()); err != nil {
		a.t.Fatal(err)
	}
	ev := a.d.until(a.nonce, transfer.EventPresented)
	if ev.Tokens != a.tokens || string(ev.Meta) != "meta" || ev.PEngine != a.p.id || !slices.Equal(ev.Layouts, []transfer.Layout{a.p.layout}) {
		a.t.Errorf("presented: %+v", ev)
	}
	if a.dLease, err = a.d.Bind(a.t.Context(), a.bindReq()); err != nil {
		a.t.Fatal(err)
	}
	if ev := a.p.until(a.nonce, transfer.EventBound); ev.FirstToken != a.first {
		a.t.Errorf("bound from token %d, want %d", ev.FirstToken, a.first)
	}
}

func (a *attempt) units() []transfer.Unit {
	n := (a.tokens + a.p.layout.BlockTokens - 1) / a.p.layout.BlockTokens
	var u []transfer.Unit
	for l := range a.p.layout.Layers {
		u = append(u, transfer.Unit{Layer: l, Count: n})
	}
	return u
}

func (a *attempt) push(seq uint64) {
	a.t.Helper()
	if err := a.p.Push(a.t.Context(), a.pLease, a.units(), seq); err != nil {
		a.t.Fatal(err)
	}
}

// block is one block of a region with one layout, where a plane's tokens lie together.
func block(e *engine, layer, id uint32) []byte {
	at := uint64(layer)*e.layout.LayerStride + uint64(id)*e.layout.BlockStride
	return e.mem.Bytes()[at : at+e.layout.BlockStride]
}

func fill(b []byte, v byte) {
	b[0] = v
	for n := 1; n < len(b); n *= 2 {
		copy(b[n:], b[:n])
	}
}

// pattern makes every byte of e's memory tell its place.
func pattern(e *engine, seed uint32) {
	for i := range e.mem.Bytes() {
		e.mem.Bytes()[i] = byte((uint32(i)*2654435761 + seed) >> 13)
	}
}

// eventually polls for what happens in another process or another goroutine's time.
func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	for deadline := time.Now().Add(15 * time.Second); !f(); runtime.Gosched() {
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within 15 s\n%s", what, stacks())
		}
	}
}

func contains(err error, want string) bool { return err != nil && strings.Contains(err.Error(), want) }
