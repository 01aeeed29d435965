package bench

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/headrace/headrace/internal/memfd"
	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/node/nodeclient"
	"github.com/headrace/headrace/transfer/ticket"
)

// pair is a prefill and a decode engine.
type pair struct {
	rig        *rig
	number     int
	layout     transfer.Layout
	from, to   []uint32
	src, dst   *memfd.Memory
	p, d       *nodeclient.Client
	pReg, dReg transfer.RegionID
	landed     atomic.Int64 // bytes of all pushes that have landed

	mu      sync.Mutex
	flights map[[16]byte]*flight
	setup   []float64
}

// flight is one lease on its way.
type flight struct {
	nonce     [16]byte
	lease     transfer.LeaseID
	blocks    uint32
	ticket    []byte
	presented chan struct{}
	bound     chan struct{}
	pushed    func(seq uint64) // under the pair's lock
	settled   chan error       // both sides' ends
}

func newPair(ctx context.Context, r *rig, number int, memory int64, messages bool) (*pair, error) {
	p := &pair{rig: r, number: number, flights: make(map[[16]byte]*flight)}
	var err error
	if p.src, err = filled(memory, 0); err != nil {
		return nil, err
	}
	for i := 0; i < len(p.src.Bytes()); i += 8 {
		binary.LittleEndian.PutUint64(p.src.Bytes()[i:], uint64(i+number+1)*0x9e3779b97f4a7c15)
	}
	if p.dst, err = filled(memory, 0xee); err != nil {
		return p, err
	}
	if p.p, err = nodeclient.Dial(ctx, r.pNode().Socket, nodeclient.Options{EngineID: p.id("p"), OnEvent: p.event, Messages: messages}); err != nil {
		return p, err
	}
	p.d, err = nodeclient.Dial(ctx, r.dNode().Socket, nodeclient.Options{EngineID: p.id("d"), OnEvent: p.event, Messages: messages})
	return p, err
}

func (p *pair) id(side string) string { return fmt.Sprintf("%s%d", side, p.number) }

// lend gives the memory to the daemons under a layout, after taking it back from the one before.
func (p *pair) lend(ctx context.Context, l transfer.Layout) error {
	if p.pReg != 0 {
		if err := errors.Join(p.p.RemoveRegion(ctx, p.pReg), p.d.RemoveRegion(ctx, p.dReg)); err != nil {
			return err
		}
		p.pReg, p.dReg = 0, 0
	}
	var err error
	p.layout = l
	p.from, p.to = shuffled(int(l.Blocks), 1), shuffled(int(l.Blocks), 2)
	if p.pReg, err = p.p.RegisterRegion(ctx, p.src.FD(), p.src.Size(), l); err != nil {
		return err
	}
	p.dReg, err = p.d.RegisterRegion(ctx, p.dst.FD(), p.dst.Size(), l)
	return err
}

func (p *pair) event(ev transfer.Event) {
	p.mu.Lock()
	f := p.flights[ev.Nonce]
	var pushed func(uint64)
	if f != nil {
		pushed = f.pushed
	}
	p.mu.Unlock()
	if f == nil {
		return
	}
	switch ev.Kind {
	case transfer.EventPresented:
		close(f.presented)
	case transfer.EventBound:
		close(f.bound)
	case transfer.EventPushed:
		if pushed != nil {
			pushed(ev.Seq)
		}
	case transfer.EventSettled:
		f.settled <- nil
	case transfer.EventEnded, transfer.EventRefused:
		f.settled <- fmt.Errorf("lease %s: %s", ev.Kind, ev.Reason)
	}
}

// groups is how many leases a pair moves at a time, each over blocks of its own: one is presented while others are sent.
const groups = 4

// share is a part of the blocks.
func share(blocks []uint32, part, parts int) []uint32 {
	return blocks[len(blocks)*part/parts : len(blocks)*(part+1)/parts]
}

// open presents and binds a lease over a share of the blocks.
func (p *pair) open(ctx context.Context, part, parts int) (*flight, error) {
	return p.openBlocks(ctx, share(p.from, part, parts), share(p.to, part, parts))
}

func (p *pair) openBlocks(ctx context.Context, from, to []uint32) (*flight, error) {
	start := time.Now()
	t := ticket.Ticket{Nonce: ticket.NewNonce(), PNode: p.rig.pNode().NodeID, DNode: p.rig.dNode().NodeID, PEngine: p.id("p"), DEngine: p.id("d"),
		Fingerprint: p.layout.Fingerprint, Deadline: time.Now().Add(5 * time.Minute)}
	f := &flight{nonce: t.Nonce, blocks: uint32(len(from)), ticket: ticket.Mint(p.rig.key, t), presented: make(chan struct{}), bound: make(chan struct{}), settled: make(chan error, 4)}
	p.mu.Lock()
	p.flights[t.Nonce] = f
	p.mu.Unlock()
	var err error
	tokens := f.blocks * p.layout.BlockTokens
	if f.lease, err = p.p.Present(ctx, transfer.PresentReq{Ticket: f.ticket, Peer: p.rig.dNode().DataAddr, Regions: []transfer.RegionID{p.pReg}, Tokens: tokens, Blocks: from}); err != nil {
		return nil, err
	}
	if err := f.wait(ctx, f.presented); err != nil {
		return nil, fmt.Errorf("wait for presented: %w", err)
	}
	if _, err := p.d.Bind(ctx, transfer.BindReq{Ticket: f.ticket, Regions: []transfer.RegionID{p.dReg}, Blocks: to}); err != nil {
		return nil, err
	}
	if err := f.wait(ctx, f.bound); err != nil {
		return nil, fmt.Errorf("wait for bound: %w", err)
	}
	p.mu.Lock()
	p.setup = append(p.setup, micros(time.Since(start)))
	p.mu.Unlock()
	return f, nil
}

func micros(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 }

func (f *flight) wait(ctx context.Context, ch <-chan struct{}) error {
	select {
	case <-ch:
		return nil
	case err := <-f.settled:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// send pushes all of a lease layer by layer, as an engine does that has computed them, each layer in some pieces, and
// waits until both engines have heard that it settled.
func (p *pair) send(ctx context.Context, f *flight, pieces uint32) error {
	unitBytes := int64(p.layout.Planes) * int64(p.layout.Heads) * int64(p.layout.HeadBytes) * int64(p.layout.BlockTokens)
	p.onPushed(f, func(count uint64) { p.landed.Add(int64(count) * unitBytes) })
	for l := range p.layout.Layers {
		for i := range pieces {
			first, end := f.blocks*i/pieces, f.blocks*(i+1)/pieces
			if first == end {
				continue
			}
			// The sequence number is the engine's own: here it says how much has landed.
			if err := p.p.Push(ctx, f.lease, []transfer.Unit{{Layer: l, First: first, Count: end - first}}, uint64(end-first)); err != nil {
				return err
			}
		}
	}
	if err := p.p.Handoff(ctx, f.lease, nil); err != nil {
		return err
	}
	return p.settle(ctx, f)
}

// settle waits until both engines have heard that a lease settled.
func (p *pair) settle(ctx context.Context, f *flight) error {
	for range 2 {
		select {
		case err := <-f.settled:
			if err != nil {
				return err
			}
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	p.forget(f)
	return nil
}

func (p *pair) onPushed(f *flight, call func(seq uint64)) {
	p.mu.Lock()
	f.pushed = call
	p.mu.Unlock()
}

func (p *pair) forget(f *flight) {
	p.mu.Lock()
	delete(p.flights, f.nonce)
	p.mu.Unlock()
}

// warmUp is how many requests go before those that are timed, as with the peers.
const warmUp = 50

// paced pushes batch blocks at a time, each batch when the one before has landed, at most count times and all of the
// memory. It gives the times from the engine's call to its event in microseconds. The lease is open before.
func (p *pair) paced(ctx context.Context, batch, count int) (Measure, []float64, error) {
	f, err := p.open(ctx, 0, 1)
	if err != nil {
		return Measure{}, nil, err
	}
	pushed := make(chan struct{}, 1)
	p.onPushed(f, func(uint64) { pushed <- struct{}{} })
	one := func(layer, first uint32) error {
		if err := p.p.Push(ctx, f.lease, []transfer.Unit{{Layer: layer, First: first, Count: uint32(batch)}}, 0); err != nil {
			return err
		}
		return f.wait(ctx, pushed)
	}
	var took []float64
	before, start, skip := p.rig.cpu(), time.Now(), min(warmUp, int(f.blocks)/batch/2)
	for l := range p.layout.Layers {
		for first := uint32(0); first+uint32(batch) <= f.blocks && len(took) < count; first += uint32(batch) {
			at := time.Now()
			if err := one(l, first); err != nil {
				return Measure{}, nil, err
			}
			if skip--; skip >= 0 {
				before, start = p.rig.cpu(), time.Now()
				continue
			}
			took = append(took, micros(time.Since(at)))
		}
	}
	m := Measure{Bytes: int64(len(took)) * int64(batch) * int64(p.layout.BlockStride), Seconds: time.Since(start).Seconds(), CPUSeconds: p.rig.cpu() - before}
	if err := p.p.Revoke(ctx, f.lease, "measured"); err != nil {
		return m, nil, err
	}
	for range 2 {
		if err := <-f.settled; err == nil {
			return m, nil, errors.New("time one block: a revoked lease settled")
		}
	}
	p.forget(f)
	return m, took, nil
}

// verify compares what landed with the source, block for block and plane for plane.
func (p *pair) verify() (int64, error) {
	l := &p.layout
	n := int(l.BlockTokens) * int(l.Heads) * int(l.HeadBytes)
	var sum int64
	for layer := range int(l.Layers) {
		for i := range p.from {
			for plane := range int(l.Planes) {
				at := layer*int(l.LayerStride) + plane*int(l.PlaneStride)
				s, d := at+int(p.from[i])*int(l.BlockStride), at+int(p.to[i])*int(l.BlockStride)
				if !bytes.Equal(p.src.Bytes()[s:s+n], p.dst.Bytes()[d:d+n]) {
					return 0, fmt.Errorf("block %d of layer %d arrived altered", i, layer)
				}
				sum += int64(n)
			}
		}
	}
	return sum, nil
}

func (p *pair) close() error {
	var errs []error
	for _, c := range []*nodeclient.Client{p.p, p.d} {
		if c != nil {
			errs = append(errs, c.Close())
		}
	}
	for _, m := range []*memfd.Memory{p.src, p.dst} {
		if m != nil {
			errs = append(errs, m.Close())
		}
	}
	return errors.Join(errs...)
}
