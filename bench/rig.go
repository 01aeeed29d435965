package bench

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/headrace/headrace/internal/memfd"
	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/node/nodeclient"
	"github.com/headrace/headrace/transfer/ticket"
)

// blocksPerLayer bounds a lease's block list; smaller blocks become more layers.
const blocksPerLayer = 32768

// rig is a prefill and a decode engine with memory lent to their daemons: two daemons, or one for local copies.
type rig struct {
	daemons    []*daemon
	key        []byte
	layout     transfer.Layout
	from, to   []uint32
	src, dst   *memfd.Memory
	p, d       *nodeclient.Client
	pReg, dReg transfer.RegionID
	dAddr      string
	setup      []float64

	mu      sync.Mutex
	flights map[[16]byte]*flight
}

// flight is one lease on its way.
type flight struct {
	nonce     [16]byte
	lease     transfer.LeaseID
	blocks    uint32
	ticket    []byte
	presented chan struct{}
	bound     chan struct{}
	pushed    chan struct{}
	settled   chan error // both sides' ends
}

func newRig(ctx context.Context, o Options, dir, transport string, block int) (r *rig, err error) {
	r = &rig{key: make([]byte, 32), layout: blockLayout(block, o.Region), flights: make(map[[16]byte]*flight)}
	rand.Read(r.key)
	defer func() {
		if err != nil {
			err = errors.Join(err, r.close())
		}
	}()
	names := []string{"bench-p", "bench-d"}
	if transport == "shm" {
		names = names[:1]
	}
	for _, n := range names {
		c := childConfig{NodeID: n, Socket: filepath.Join(dir, n+".sock"), Transport: transport, Key: r.key, Lanes: o.Lanes}
		if transport != "shm" {
			c.Listen = "127.0.0.1:0"
		}
		d, err := startDaemon(ctx, o.Child, c)
		if err != nil {
			return r, err
		}
		r.daemons = append(r.daemons, d)
	}
	last := r.daemons[len(r.daemons)-1]
	r.dAddr = last.DataAddr
	n := int(r.layout.Blocks)
	r.from, r.to = shuffled(n, 1), shuffled(n, 2)
	if r.src, err = filled(o.Region, 0); err != nil {
		return r, err
	}
	for i := 0; i < len(r.src.Bytes()); i += 8 {
		binary.LittleEndian.PutUint64(r.src.Bytes()[i:], uint64(i)*0x9e3779b97f4a7c15)
	}
	if r.dst, err = filled(o.Region, 0xee); err != nil {
		return r, err
	}
	if r.p, r.pReg, err = r.engine(ctx, r.daemons[0], "p", r.src); err != nil {
		return r, err
	}
	r.d, r.dReg, err = r.engine(ctx, last, "d", r.dst)
	return r, err
}

func (r *rig) engine(ctx context.Context, d *daemon, id string, m *memfd.Memory) (*nodeclient.Client, transfer.RegionID, error) {
	c, err := nodeclient.Dial(ctx, d.Socket, nodeclient.Options{EngineID: id, OnEvent: r.event})
	if err != nil {
		return nil, 0, err
	}
	reg, err := c.RegisterRegion(ctx, m.FD(), m.Size(), r.layout)
	if err != nil {
		return nil, 0, errors.Join(err, c.Close())
	}
	return c, reg, nil
}

// blockLayout lays a region out so that each unit, a layer's block, is one run of block bytes.
func blockLayout(block int, region int64) transfer.Layout {
	blocks, layers := uint64(region)/uint64(block), uint64(1)
	for blocks > blocksPerLayer && blocks%2 == 0 {
		blocks, layers = blocks/2, layers*2
	}
	const tokens = 16
	b := uint64(block)
	return transfer.Layout{DType: transfer.F32, Layers: uint32(layers), Blocks: uint32(blocks), BlockTokens: tokens, Planes: 1, Heads: 1, HeadsTotal: 1,
		HeadBytes: uint32(b / tokens), TPSize: 1, LayerStride: blocks * b, BlockStride: b, PlaneStride: b, TokenStride: b / tokens, HeadStride: b / tokens}
}

func (r *rig) event(ev transfer.Event) {
	r.mu.Lock()
	f := r.flights[ev.Nonce]
	r.mu.Unlock()
	if f == nil {
		return
	}
	switch ev.Kind {
	case transfer.EventPresented:
		close(f.presented)
	case transfer.EventBound:
		close(f.bound)
	case transfer.EventPushed:
		select { // nobody listens but latency
		case f.pushed <- struct{}{}:
		default:
		}
	case transfer.EventSettled:
		f.settled <- nil
	case transfer.EventEnded, transfer.EventRefused:
		f.settled <- fmt.Errorf("lease %s: %s", ev.Kind, ev.Reason)
	}
}

// groups is how many leases move at a time, each over blocks of its own: one is presented while others are sent.
const groups = 4

// part is the share of the blocks that belongs to a group.
func part(blocks []uint32, group int) []uint32 {
	return blocks[len(blocks)*group/groups : len(blocks)*(group+1)/groups]
}

// open presents and binds a lease over a group's blocks.
func (r *rig) open(ctx context.Context, group int) (*flight, error) {
	start := time.Now()
	from, to := part(r.from, group), part(r.to, group)
	last := r.daemons[len(r.daemons)-1]
	t := ticket.Ticket{Nonce: ticket.NewNonce(), PNode: r.daemons[0].NodeID, DNode: last.NodeID, PEngine: "p", DEngine: "d", Deadline: time.Now().Add(5 * time.Minute)}
	f := &flight{nonce: t.Nonce, blocks: uint32(len(from)), ticket: ticket.Mint(r.key, t), presented: make(chan struct{}), bound: make(chan struct{}), pushed: make(chan struct{}, 1), settled: make(chan error, 4)}
	r.mu.Lock()
	r.flights[t.Nonce] = f
	r.mu.Unlock()
	var err error
	tokens := f.blocks * r.layout.BlockTokens
	if f.lease, err = r.p.Present(ctx, transfer.PresentReq{Ticket: f.ticket, Peer: r.dAddr, Regions: []transfer.RegionID{r.pReg}, Tokens: tokens, Blocks: from}); err != nil {
		return nil, err
	}
	if err := f.wait(ctx, f.presented); err != nil {
		return nil, fmt.Errorf("wait for presented: %w", err)
	}
	if _, err := r.d.Bind(ctx, transfer.BindReq{Ticket: f.ticket, Regions: []transfer.RegionID{r.dReg}, Blocks: to}); err != nil {
		return nil, err
	}
	if err := f.wait(ctx, f.bound); err != nil {
		return nil, fmt.Errorf("wait for bound: %w", err)
	}
	r.mu.Lock()
	r.setup = append(r.setup, float64(time.Since(start).Nanoseconds())/1e3)
	r.mu.Unlock()
	return f, nil
}

func (f *flight) wait(ctx context.Context, ch <-chan struct{}) error {
	select {
	case <-ch:
		return nil
	case err := <-f.settled:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// send pushes all of a lease and waits until both engines have heard that it settled.
func (r *rig) send(ctx context.Context, f *flight) error {
	units := make([]transfer.Unit, r.layout.Layers)
	for l := range units {
		units[l] = transfer.Unit{Layer: uint32(l), Count: f.blocks}
	}
	if err := errors.Join(r.p.Push(ctx, f.lease, units, 1), r.p.Handoff(ctx, f.lease, nil)); err != nil {
		return err
	}
	for range 2 {
		select {
		case err := <-f.settled:
			if err != nil {
				return err
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	r.mu.Lock()
	delete(r.flights, f.nonce)
	r.mu.Unlock()
	return nil
}

// move transfers the region as often as it takes. The clock runs from the first push until both engines have heard that
// every lease settled. The first leases are bound before; later ones while others are sent, inside the measured time.
func (r *rig) move(ctx context.Context, size int64) (Measure, error) {
	passes := int(size / int64(r.src.Size()))
	first := make([]*flight, groups)
	for g := range first {
		var err error
		if first[g], err = r.open(ctx, g); err != nil {
			return Measure{}, err
		}
	}
	before, start := r.cpu(), time.Now()
	errs := make(chan error, groups)
	for g, f := range first {
		go func() {
			err := r.send(ctx, f)
			for i := 1; i < passes && err == nil; i++ {
				if f, err = r.open(ctx, g); err == nil {
					err = r.send(ctx, f)
				}
			}
			errs <- err
		}()
	}
	var err error
	for range groups {
		err = errors.Join(err, <-errs)
	}
	return Measure{Bytes: int64(passes) * int64(r.src.Size()), Seconds: time.Since(start).Seconds(), CPUSeconds: r.cpu() - before}, err
}

// latency pushes one block at a time, each when the one before has landed, and gives the times from the engine's call to
// its event in microseconds.
func (r *rig) latency(ctx context.Context) ([]float64, error) {
	const samples = 500
	f, err := r.open(ctx, 0)
	if err != nil {
		return nil, err
	}
	var took []float64
	for i := range min(f.blocks, samples) {
		start := time.Now()
		if err := r.p.Push(ctx, f.lease, []transfer.Unit{{First: i, Count: 1}}, uint64(i)); err != nil {
			return nil, err
		}
		if err := f.wait(ctx, f.pushed); err != nil {
			return nil, err
		}
		took = append(took, float64(time.Since(start).Nanoseconds())/1e3)
	}
	if err := r.p.Revoke(ctx, f.lease, "measured"); err != nil {
		return nil, err
	}
	for range 2 {
		if err := <-f.settled; err == nil {
			return nil, errors.New("time one block: a revoked lease settled")
		}
	}
	return took, nil
}

// verify compares what landed with the source, block for block.
func (r *rig) verify() (int64, error) {
	b, stride := int(r.layout.BlockStride), int(r.layout.LayerStride)
	for l := range int(r.layout.Layers) {
		for i := range r.from {
			s, d := l*stride+int(r.from[i])*b, l*stride+int(r.to[i])*b
			if !bytes.Equal(r.src.Bytes()[s:s+b], r.dst.Bytes()[d:d+b]) {
				return 0, fmt.Errorf("block %d of layer %d arrived altered", i, l)
			}
		}
	}
	return int64(r.src.Size()), nil
}

// cpu is what the daemons and this process, which is both engines, have used.
func (r *rig) cpu() float64 {
	sum := ownCPU()
	for _, d := range r.daemons {
		sum += processCPU(d.PID)
	}
	return sum
}

// processCPU reads user and system time, in ticks of 10 ms.
func processCPU(pid int) float64 {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0
	}
	var user, system float64
	_, rest, _ := strings.Cut(string(b), ") ") // the name before it may hold anything
	fields := strings.Fields(rest)
	if len(fields) < 13 {
		return 0
	}
	_, _ = fmt.Sscan(fields[11], &user)
	_, _ = fmt.Sscan(fields[12], &system)
	return (user + system) / 100
}

func (r *rig) close() error {
	var errs []error
	for _, c := range []*nodeclient.Client{r.p, r.d} {
		if c != nil {
			errs = append(errs, c.Close())
		}
	}
	for _, d := range r.daemons {
		errs = append(errs, d.stop())
	}
	for _, m := range []*memfd.Memory{r.src, r.dst} {
		if m != nil {
			errs = append(errs, m.Close())
		}
	}
	return errors.Join(errs...)
}
