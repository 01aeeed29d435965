package tcp

import (
	"bufio"
	"encoding/base64"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/ticket"
	"github.com/headrace/headrace/transfer/transporttest"
)

// A benchmark's target runs in a process of its own, this binary started again, as the C loop's does.
const targetEnv = "HEADRACE_BENCH_TARGET"

func TestMain(m *testing.M) {
	if spec := os.Getenv(targetEnv); spec != "" {
		runTarget(spec)
		return
	}
	os.Exit(m.Run())
}

// benchShape is 512 MiB in blocks of that many KiB.
func benchShape(blockKiB uint32) transporttest.Shape {
	return transporttest.Shape{Layers: 4, Blocks: 128 << 10 / blockKiB, BlockTokens: 16, Heads: 4, HeadBytes: blockKiB << 10 / 16 / 4 / 2}
}

func scattered(n uint32, seed uint64) []uint32 {
	ids := make([]uint32, n)
	for i, v := range rand.New(rand.NewPCG(seed, 1)).Perm(int(n)) {
		ids[i] = uint32(v)
	}
	return ids
}

type benchEngine struct {
	e      *transfer.Engine
	c      *transfer.Client
	region transfer.RegionID
	lay    transfer.Layout
	mem    *transporttest.Memory
}

// benchCase is what a benchmark's two ends agree on.
type benchCase struct {
	kib    uint32 // of a block
	lanes  int
	run    uint32 // bytes of a run, when the target keeps heads apart; 0: runs are blocks
	method string
}

func (c benchCase) String() string {
	return fmt.Sprintf("%d %d %d %s", c.kib, c.lanes, c.run, c.method)
}

func (c benchCase) layout(target bool) transfer.Layout {
	l := benchShape(c.kib).Layout()
	if c.run == 0 {
		return l
	}
	s := benchShape(c.kib)
	s.HeadBytes, s.Heads = c.run, s.Heads*s.HeadBytes/c.run
	l = s.Layout()
	if target { // tokens of a head lie together, where the source has heads of a token together
		l.TokenStride, l.HeadStride = l.HeadStride, uint64(c.run)*uint64(s.BlockTokens)
	}
	return l
}

func newBenchEngine(t testing.TB, node, engine string, c benchCase, ev func(transfer.Event)) *benchEngine {
	e, err := transfer.New(transfer.Config{
		NodeID: node, ClusterKey: transporttest.Key, Transports: []transfer.Transport{New(Config{SendBuffer: envInt("SNDBUF"), ReceiveBuffer: envInt("RCVBUF")})}, Lanes: c.lanes, Method: c.method, Listen: "127.0.0.1:0",
	})
	if err != nil {
		t.Fatal(err)
	}
	b := &benchEngine{e: e, lay: c.layout(engine == "decode")}
	if b.c, err = e.Attach(engine, ev); err != nil {
		t.Fatal(err)
	}
	size := b.lay.LayerStride * uint64(b.lay.Layers)
	b.mem = transporttest.NewMemory(t, size)
	for i := 0; i < len(b.mem.Bytes); i += 4096 {
		b.mem.Bytes[i] = 1
	}
	if b.region, err = b.c.AddRegion(b.mem.FD(t), size, b.lay, transfer.RegionPopulate); err != nil {
		t.Fatal(err)
	}
	return b
}

func envInt(name string) int {
	n, _ := strconv.Atoi(os.Getenv(name))
	return n
}

// target is the child: it binds whatever is presented, until its standard input ends.
func runTarget(spec string) {
	var c benchCase
	fmt.Sscanf(spec, "%d %d %d %s", &c.kib, &c.lanes, &c.run, &c.method)
	t := &fatalTB{}
	events := make(chan transfer.Event, 64)
	b := newBenchEngine(t, "node-d", "decode", c, func(ev transfer.Event) { events <- ev })
	fmt.Println("addr", b.e.DataAddr())
	tickets := make(chan []byte, 64)
	go func() {
		in := bufio.NewScanner(os.Stdin)
		for in.Scan() {
			raw, err := base64.StdEncoding.DecodeString(in.Text())
			if err != nil {
				t.Fatal(err)
			}
			tickets <- raw
		}
		os.Exit(0)
	}()
	for ev := range events {
		if ev.Kind != transfer.EventPresented {
			continue
		}
		req := transfer.BindReq{Ticket: <-tickets, Regions: []transfer.RegionID{b.region}, Blocks: scattered(b.lay.Blocks, 2)}
		if _, err := b.c.Bind(req); err != nil {
			t.Fatal(err)
		}
	}
}

// fatalTB is a testing.TB for the child.
type fatalTB struct{ testing.TB }

func (*fatalTB) Helper()        {}
func (*fatalTB) Cleanup(func()) {}
func (*fatalTB) Fatal(a ...any) {
	fmt.Fprintln(os.Stderr, a...)
	os.Exit(1)
}
func (t *fatalTB) Fatalf(f string, a ...any) { t.Fatal(fmt.Sprintf(f, a...)) }

// BenchmarkScattered pushes leases of 512 MiB in scattered blocks between two processes. Its peer is
// lab/peers/limits/scattered-tcp.c with the same block size.
func BenchmarkScattered(b *testing.B) {
	for _, kib := range []uint32{16, 64, 256} {
		for _, lanes := range []int{1, 2, 4} {
			b.Run(fmt.Sprintf("%dKiB/lanes=%d", kib, lanes), func(b *testing.B) { benchScattered(b, benchCase{kib: kib, lanes: lanes, method: "auto"}) })
		}
	}
}

// BenchmarkTinyRuns is a transfer between tensor-parallel degrees, as far as its runs go: one a token and head.
func BenchmarkTinyRuns(b *testing.B) {
	for _, run := range []uint32{64, 128, 256, 512, 1024, 2048, 4096} {
		for _, method := range []string{"direct", "staged", "auto"} {
			b.Run(fmt.Sprintf("%dB/%s", run, method), func(b *testing.B) {
				benchScattered(b, benchCase{kib: 256, lanes: 4, run: run, method: method})
			})
		}
	}
}

// targetProcess is a child that binds what is presented to it.
type targetProcess struct {
	cmd  *exec.Cmd
	in   io.WriteCloser
	addr string
}

func startTarget(t testing.TB, c benchCase) *targetProcess {
	t.Helper()
	p := &targetProcess{cmd: exec.Command(os.Args[0])}
	p.cmd.Env = append(os.Environ(), targetEnv+"="+c.String())
	p.cmd.Stderr = os.Stderr
	var err error
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	p.addr = strings.Fields(line)[1]
	return p
}

func (p *targetProcess) stop() {
	p.in.Close()
	p.cmd.Process.Kill()
	p.cmd.Wait()
}

// present presents a fresh ticket for the whole region.
func present(t testing.TB, p *benchEngine, target *targetProcess) transfer.LeaseID {
	t.Helper()
	tk := ticket.Ticket{
		Nonce: ticket.NewNonce(), PNode: "node-p", DNode: "node-d", PEngine: "prefill", DEngine: "decode",
		Fingerprint: transporttest.Fingerprint, Deadline: time.Now().Add(time.Minute),
	}
	raw := ticket.Mint(transporttest.Key, tk)
	fmt.Fprintln(target.in, base64.StdEncoding.EncodeToString(raw))
	id, err := p.c.Present(transfer.PresentReq{
		Ticket: raw, Peer: target.addr, Regions: []transfer.RegionID{p.region}, Tokens: p.lay.Blocks * p.lay.BlockTokens, Blocks: scattered(p.lay.Blocks, 1),
	})
	if err != nil {
		t.Fatal(err)
	}
	return id
}

func benchScattered(b *testing.B, c benchCase) {
	child := startTarget(b, c)
	defer child.stop()
	events := make(chan transfer.Event, 1024)
	p := newBenchEngine(b, "node-p", "prefill", c, func(ev transfer.Event) { events <- ev })
	defer p.e.Close()
	b.SetBytes(int64(len(p.mem.Bytes)))
	b.ResetTimer()
	for range b.N {
		b.StopTimer()
		id := present(b, p, child)
		waitKind(b, events, transfer.EventBound)
		b.StartTimer()
		for layer := range p.lay.Layers {
			if err := p.c.Push(id, []transfer.Unit{{Layer: layer, Count: p.lay.Blocks}}, uint64(layer)); err != nil {
				b.Fatal(err)
			}
		}
		p.c.Handoff(id, nil)
		waitKind(b, events, transfer.EventSettled)
	}
}

func waitKind(b testing.TB, events chan transfer.Event, kind transfer.EventKind) {
	for ev := range events {
		if ev.Kind == kind {
			return
		}
		if ev.Kind != transfer.EventPushed {
			b.Fatalf("%v: %s", ev.Kind, ev.Reason)
		}
	}
}
