package bench

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/headrace/headrace/transfer"
)

// rig is pairs of engines with memory lent to their daemons: two daemons, or one for local copies.
type rig struct {
	daemons []*daemon
	key     []byte
	pairs   []*pair
	whole   bool // the machine's CPU time is the rig's: a kernel does the work, as soft RoCE's
}

// rigOptions say what a rig is made of.
type rigOptions struct {
	child     []string // command line of the daemons
	dir       string
	transport string
	lanes     int
	engines   int   // pairs
	memory    int64 // of all pairs, on each side
	messages  bool  // without the ring
	devices   []string
	spin      time.Duration
}

func newRig(ctx context.Context, o rigOptions) (r *rig, err error) {
	r = &rig{key: make([]byte, 32), whole: o.transport == "rdma"}
	rand.Read(r.key)
	dir, err := os.MkdirTemp(o.dir, "rig-")
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.close())
		}
	}()
	names := []string{"bench-p", "bench-d"}
	if o.transport == "shm" {
		names = names[:1]
	}
	for _, n := range names {
		c := daemonConfig{NodeID: n, Socket: filepath.Join(dir, n+".sock"), Transport: o.transport, Key: r.key, Lanes: o.lanes, Devices: o.devices, Spin: o.spin}
		if o.transport != "shm" {
			c.Listen = "127.0.0.1:0"
		}
		d, err := startDaemon(ctx, o.child, &c)
		if err != nil {
			return r, err
		}
		r.daemons = append(r.daemons, d)
	}
	for i := range o.engines {
		p, err := newPair(ctx, r, i, o.memory/int64(o.engines), o.messages)
		if p != nil {
			r.pairs = append(r.pairs, p)
		}
		if err != nil {
			return r, err
		}
	}
	return r, nil
}

func (r *rig) pNode() *daemon { return r.daemons[0] }
func (r *rig) dNode() *daemon { return r.daemons[len(r.daemons)-1] }

// lend gives every pair's memory a new meaning.
func (r *rig) lend(ctx context.Context, l func(memory uint64) transfer.Layout) error {
	for _, p := range r.pairs {
		if err := p.lend(ctx, l(p.src.Size())); err != nil {
			return err
		}
	}
	return nil
}

// blocksPerLayer bounds a lease's block list; smaller blocks become more layers.
const blocksPerLayer = 32768

// blockLayout lays memory out so that each unit, a layer's block, is one run of block bytes.
func blockLayout(block int) func(uint64) transfer.Layout {
	return func(memory uint64) transfer.Layout {
		blocks, layers := memory/uint64(block), uint64(1)
		for blocks > blocksPerLayer && blocks%2 == 0 {
			blocks, layers = blocks/2, layers*2
		}
		const tokens = 16
		b := uint64(block)
		return transfer.Layout{DType: transfer.F32, Layers: uint32(layers), Blocks: uint32(blocks), BlockTokens: tokens, Planes: 1, Heads: 1, HeadsTotal: 1,
			HeadBytes: uint32(b / tokens), TPSize: 1, LayerStride: blocks * b, BlockStride: b, PlaneStride: b, TokenStride: b / tokens, HeadStride: b / tokens}
	}
}

// move transfers all memory as often as it takes. The clock runs from the first push until both engines of each pair have
// heard that every lease settled. The first leases are bound before; later ones while others are sent, inside the
// measured time.
func (r *rig) move(ctx context.Context, size int64) (Measure, error) {
	var memory int64
	for _, p := range r.pairs {
		memory += int64(p.src.Size())
	}
	passes := max(int(size/memory), 1)
	first := make([]*flight, 0, groups*len(r.pairs))
	for _, p := range r.pairs {
		for g := range groups {
			f, err := p.open(ctx, g, groups)
			if err != nil {
				return Measure{}, err
			}
			first = append(first, f)
		}
	}
	before, start := r.cpu(), time.Now()
	errs := make(chan error, len(first))
	for i, f := range first {
		go func() {
			p := r.pairs[i/groups]
			err := p.send(ctx, f, 1)
			for n := 1; n < passes && err == nil; n++ {
				if f, err = p.open(ctx, i%groups, groups); err == nil {
					err = p.send(ctx, f, 1)
				}
			}
			errs <- err
		}()
	}
	var err error
	for range first {
		err = errors.Join(err, <-errs)
	}
	return Measure{Bytes: int64(passes) * memory, Seconds: time.Since(start).Seconds(), CPUSeconds: r.cpu() - before}, err
}

// How rush measures.
const (
	rushPieces  = 16 // pushes a lease, so that what has landed is known finely
	rushRampUp  = 100 * time.Millisecond
	rushMeasure = 400 * time.Millisecond
)

// rushTimes is how long the rig is let run in and measured. What is emulated needs longer to get going.
func (r *rig) rushTimes() (rampUp, measure time.Duration) {
	if r.whole {
		return 10 * rushRampUp, 5 * rushMeasure
	}
	return rushRampUp, rushMeasure
}

// rush lets every pair move its memory over and over, and counts what landed of each in the same stretch of time.
func (r *rig) rush(ctx context.Context) (Measure, []float64, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	stop := make(chan struct{})
	for _, p := range r.pairs {
		for g := range groups {
			wg.Go(func() {
				for {
					f, err := p.open(ctx, g, groups)
					if err == nil {
						err = p.send(ctx, f, rushPieces)
					}
					if err != nil {
						cancel(err)
						return
					}
					select {
					case <-stop:
						return
					default:
					}
				}
			})
		}
	}
	landed := func() []int64 {
		v := make([]int64, len(r.pairs))
		for i, p := range r.pairs {
			v[i] = p.landed.Load()
		}
		return v
	}
	rampUp, stretch := r.rushTimes()
	sleep(ctx, rampUp)
	before, cpu, start := landed(), r.cpu(), time.Now()
	sleep(ctx, stretch)
	after := landed()
	m := Measure{Seconds: time.Since(start).Seconds(), CPUSeconds: r.cpu() - cpu}
	close(stop)
	wg.Wait()
	rates := make([]float64, len(r.pairs))
	for i := range rates {
		m.Bytes += after[i] - before[i]
		rates[i] = float64(after[i]-before[i]) / m.Seconds / 1e9
	}
	if err := context.Cause(ctx); err != nil {
		return m, rates, err
	}
	if m.Bytes == 0 {
		return m, rates, errors.New("nothing landed")
	}
	return m, rates, nil
}

func sleep(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}

// verify moves everything into cleared memory and compares what landed with the source, block for block.
func (r *rig) verify(ctx context.Context) (int64, error) {
	for _, p := range r.pairs {
		refill(p.dst, 0xee)
	}
	if _, err := r.move(ctx, 0); err != nil {
		return 0, err
	}
	var sum int64
	for i, p := range r.pairs {
		n, err := p.verify()
		if err != nil {
			return 0, fmt.Errorf("verify engine %d: %w", i, err)
		}
		sum += n
	}
	return sum, nil
}

// cpu is what the daemons and this process, which is all engines, have used.
func (r *rig) cpu() float64 {
	if r.whole {
		return busyCPU()
	}
	sum := ownCPU()
	for _, d := range r.daemons {
		sum += processCPU(d.PID)
	}
	return sum
}

func (r *rig) close() error {
	var errs []error
	for _, p := range r.pairs {
		errs = append(errs, p.close())
	}
	for _, d := range r.daemons {
		errs = append(errs, d.Stop(stopTimeout))
	}
	return errors.Join(errs...)
}
