package gpumem

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/headrace/headrace/cgo"
	"github.com/headrace/headrace/internal/memfd"
	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/node"
	"github.com/headrace/headrace/transfer/node/nodeclient"
	"github.com/headrace/headrace/transfer/ticket"
)

var key = []byte("a cluster key of thirty-two bytes")

// daemon runs a node daemon for two engines of one host.
func daemon(t *testing.T) (socket string) {
	t.Helper()
	socket = filepath.Join(t.TempDir(), "node.sock")
	ctx, cancel := context.WithCancel(t.Context())
	ready, done := make(chan struct{}), make(chan error, 1)
	go func() {
		done <- node.Run(ctx, node.Config{NodeID: "host", Socket: socket, ClusterKey: key, Transport: "shm", OnReady: func(node.Ready) { close(ready) }})
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil && !errors.Is(err, context.Canceled) {
			t.Errorf("daemon: %v", err)
		}
	})
	select {
	case <-ready:
	case err := <-done:
		done <- err
		t.Fatalf("daemon: %v", err)
	}
	return socket
}

// layout is that of cache(), as host memory has it.
func layout(p *Place) transfer.Layout {
	return transfer.Layout{
		DType: transfer.F32, Layers: p.Layers, Blocks: p.Blocks, BlockTokens: 16, Planes: p.Planes, Heads: 1, HeadsTotal: 1, HeadBytes: uint32(p.Bytes / 16), TPSize: 1,
		LayerStride: p.LayerStride, PlaneStride: p.PlaneStride, BlockStride: p.BlockStride, TokenStride: p.Bytes / 16, HeadStride: p.Bytes / 16,
	}
}

type engine struct {
	*nodeclient.Client
	events chan transfer.Event
}

func attach(ctx context.Context, socket, id string) (*engine, error) {
	e := &engine{events: make(chan transfer.Event, 64)}
	var err error
	e.Client, err = nodeclient.Dial(ctx, socket, nodeclient.Options{EngineID: id, OnEvent: func(ev transfer.Event) { e.events <- ev }})
	return e, err
}

// until waits for an event of the kind, passing over those before it.
func (e *engine) until(ctx context.Context, kind transfer.EventKind) (transfer.Event, error) {
	for {
		select {
		case ev := <-e.events:
			switch ev.Kind {
			case kind:
				return ev, nil
			case transfer.EventEnded, transfer.EventRefused, transfer.EventSettled:
				return ev, fmt.Errorf("waiting for %v: %v %s", kind, ev.Kind, ev.Reason)
			}
		case <-ctx.Done():
			return transfer.Event{}, fmt.Errorf("waiting for %v: %w", kind, ctx.Err())
		}
	}
}

func newTicket() []byte {
	return ticket.Mint(key, ticket.Ticket{Nonce: ticket.NewNonce(), PNode: "host", DNode: "host", PEngine: "p", DEngine: "d", Deadline: time.Now().Add(time.Minute)})
}

// step fails the test on an error; what it returns is the rest.
func step[T any](v T, err error) func(testing.TB) T {
	return func(t testing.TB) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

// Two engines that stage: GPU, pinned memory, the daemon's transfer, pinned memory, GPU.
func TestStagedTransfer(t *testing.T) {
	x, _ := standIn(t)
	stagedTransfer(t, x)
}

func TestGPUStagedTransfer(t *testing.T) { stagedTransfer(t, realGPU(t)) }

func stagedTransfer(t *testing.T, x *cgo.GPUContext) {
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	socket := daemon(t)
	from, to := cache(t, x), cache(t, x)
	size := step(from.Size())(t)
	src, dst := []uint32{6, 1, 2}, []uint32{0, 1, 5}
	var engines [2]*engine
	var staging [2]*Staging
	var regions [2]transfer.RegionID
	host := from // the same order, at offset 0
	host.Base = 0
	for i, id := range []string{"p", "d"} {
		staging[i] = step(NewStaging(x, size))(t)
		defer staging[i].Close()
		engines[i] = step(attach(ctx, socket, id))(t)
		defer engines[i].Close()
		regions[i] = step(engines[i].RegisterRegion(ctx, staging[i].FD(), size, layout(&from)))(t)
	}
	p, d := engines[0], engines[1]
	fill(t, x, &from, src)
	tk := newTicket()
	lease := step(p.Present(ctx, transfer.PresentReq{Ticket: tk, Regions: regions[:1], Tokens: 48, Blocks: src}))(t)
	step(d.until(ctx, transfer.EventPresented))(t)
	step(d.Bind(ctx, transfer.BindReq{Ticket: tk, Regions: regions[1:], Blocks: dst}))(t)
	for layer := range from.Layers { // one after the other, as they are computed
		computed := step(x.NewEvent(cgo.EventOrder))(t)
		defer computed.Close()
		b := step(staging[0].ToHost(computed, step(Copies(&host, &from, src, src, layer, 1))(t)))(t)
		if err := b.Wait(); err != nil {
			t.Fatal(err)
		}
		if err := p.Push(ctx, lease, []transfer.Unit{{Layer: layer, Count: uint32(len(src))}}, uint64(layer)); err != nil {
			t.Fatal(err)
		}
	}
	if err := p.Handoff(ctx, lease, []byte("record")); err != nil {
		t.Fatal(err)
	}
	step(p.until(ctx, transfer.EventSettled))(t)
	step(d.until(ctx, transfer.EventSettled))(t)
	b := step(staging[1].ToDevice(nil, step(Copies(&to, &host, dst, dst, 0, to.Layers))(t)))(t)
	if err := b.Wait(); err != nil {
		t.Fatal(err)
	}
	compare(t, x, &to, dst)
}

const processEnv = "HEADRACE_TEST_GPU_ENGINE"

// task is what the other process, P, is to do.
type task struct {
	Library, Socket string
	Ticket          []byte
	Blocks          []uint32
}

// Two processes and one GPU: what P offers in its meta D copies by itself, and then binds wanting nothing.
func TestOfferedTransfer(t *testing.T) {
	x, library := standIn(t)
	offeredTransfer(t, x, library)
}

func TestGPUOfferedTransfer(t *testing.T) { offeredTransfer(t, realGPU(t), "") }

func offeredTransfer(t *testing.T, x *cgo.GPUContext, library string) {
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	tk, socket := newTicket(), daemon(t)
	to := cache(t, x)
	d := step(attach(ctx, socket, "d"))(t)
	defer d.Close()
	mem := step(memfd.Create("d", step(to.Size())(t)))(t)
	defer mem.Close()
	region := step(d.RegisterRegion(ctx, mem.FD(), mem.Size(), layout(&to)))(t)
	peers := step(NewPeers(x))(t)
	defer peers.Close()

	src, dst := []uint32{6, 1, 2}, []uint32{0, 1, 5}
	c := exec.CommandContext(ctx, os.Args[0], "-test.run=^TestOfferingProcess$", "-test.v")
	c.Env = append(os.Environ(), processEnv+"="+string(step(json.Marshal(task{library, socket, tk, src}))(t)))
	out := make(chan error, 1)
	go func() {
		said, err := c.CombinedOutput()
		if err != nil {
			err = fmt.Errorf("the other process: %w\n%s", err, said)
			cancel()
		}
		out <- err
	}()
	ev, err := d.until(ctx, transfer.EventPresented)
	if err != nil {
		t.Fatal(errors.Join(err, <-out))
	}
	var o Offer
	if err := o.UnmarshalBinary(ev.Meta); err != nil {
		t.Fatal(err)
	}
	lie := o
	lie.Whole *= 2
	if _, err := peers.Take(&lie, &to, dst); !errors.Is(err, ErrOffer) {
		t.Errorf("an offer of more than there is: %v", err)
	}
	b := step(peers.Take(&o, &to, dst))(t)
	if err := b.Wait(); err != nil {
		t.Fatal(err)
	}
	step(d.Bind(ctx, transfer.BindReq{Ticket: tk, Regions: []transfer.RegionID{region}, FirstToken: 48, Blocks: dst}))(t)
	if ev := step(d.until(ctx, transfer.EventSettled))(t); string(ev.Record) != "record" {
		t.Errorf("record %q", ev.Record)
	}
	compare(t, x, &to, dst)
	if err := errors.Join(peers.Forget(o.Memory), peers.Forget(o.Memory)); err != nil {
		t.Error(err)
	}
	if err := d.Close(); err != nil { // tells the other process that nothing of it is open any more
		t.Error(err)
	}
	if err := os.WriteFile(socket+".done", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := <-out; err != nil {
		t.Error(err)
	}
}

// TestOfferingProcess is P.
func TestOfferingProcess(t *testing.T) {
	doc := os.Getenv(processEnv)
	if doc == "" {
		t.Skip("it is the other process of the tests of offers")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	var c task
	if err := json.Unmarshal([]byte(doc), &c); err != nil {
		t.Fatal(err)
	}
	x := open(t, c.Library)
	from := cache(t, x)
	fill(t, x, &from, c.Blocks)
	shared := step(Share(x, from))(t)
	stream := step(x.NewStream())(t)
	defer stream.Close()
	ready := step(x.NewEvent(cgo.EventShared))(t)
	defer ready.Close()
	if err := ready.Record(stream); err != nil {
		t.Fatal(err)
	}
	offer := step(shared.Of(c.Blocks, ready))(t)
	p := step(attach(ctx, c.Socket, "p"))(t)
	defer p.Close()
	mem := step(memfd.Create("p", step(from.Size())(t)))(t)
	defer mem.Close()
	region := step(p.RegisterRegion(ctx, mem.FD(), mem.Size(), layout(&from)))(t)
	lease := step(p.Present(ctx, transfer.PresentReq{Ticket: c.Ticket, Regions: []transfer.RegionID{region}, Tokens: 48, Blocks: c.Blocks, Meta: step(offer.MarshalBinary())(t)}))(t)
	if ev := step(p.until(ctx, transfer.EventBound))(t); ev.FirstToken != 48 {
		t.Errorf("bound from token %d", ev.FirstToken)
	}
	if err := p.Handoff(ctx, lease, []byte("record")); err != nil {
		t.Fatal(err)
	}
	step(p.until(ctx, transfer.EventSettled))(t)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for { // the other end closes the memory before it is freed
		if _, err := os.Stat(c.Socket + ".done"); err == nil {
			return
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatal(ctx.Err())
		}
	}
}
