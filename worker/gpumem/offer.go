package gpumem

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync"

	"github.com/headrace/headrace/cgo"
)

// Offer names the blocks of a request in one process's GPU memory to another on the same host. It travels as the meta of
// PRESENT, which daemons do not look into.
//
// P computes, records Ready and presents with the offer. D copies when it is PRESENTED, then binds wanting nothing (first
// token = tokens); P hands its record off, and the lease settles. P's blocks stay as they are until the lease has ended, as
// always: that is what keeps them while D copies. Where the lease ends before, D's bind is refused, and D throws away what
// it copied into blocks that are its own. D binds only what it has copied whole, so a fence has nothing to wait for.
type Offer struct {
	Memory cgo.IPCHandle // of the allocation
	Ready  cgo.IPCHandle // an event behind what computed the blocks
	Whole  uint64        // bytes of the allocation
	Place  Place         // Base is the offset into the allocation
	Blocks []uint32      // in the request's order
}

const (
	offerVersion = 1
	offerFixed   = 4 + 64 + 64 + 8 + 5*8 + 4*4
	offerBlocks  = (64<<10 - offerFixed) / 4 // PRESENT's meta is at most 64 KiB
)

// ErrOffer is what is wrong with an offer that does not parse.
var ErrOffer = errors.New("malformed offer of GPU memory")

// MarshalBinary writes an offer, little-endian: "HRG", version (1), memory (64), ready (64), whole (8), base, strides of layer,
// plane and block, bytes (8 each), layers, planes, blocks of the place, number of blocks (4 each), blocks (4 each).
func (o *Offer) MarshalBinary() ([]byte, error) {
	if len(o.Blocks) == 0 || len(o.Blocks) > offerBlocks {
		return nil, fmt.Errorf("%w: %d blocks, need 1 to %d", ErrOffer, len(o.Blocks), offerBlocks)
	}
	le := binary.LittleEndian
	b := append(make([]byte, 0, offerFixed+4*len(o.Blocks)), 'H', 'R', 'G', offerVersion)
	b = append(b, o.Memory[:]...)
	b = append(b, o.Ready[:]...)
	p := &o.Place
	for _, v := range [...]uint64{o.Whole, p.Base, p.LayerStride, p.PlaneStride, p.BlockStride, p.Bytes} {
		b = le.AppendUint64(b, v)
	}
	for _, v := range [...]uint32{p.Layers, p.Planes, p.Blocks, uint32(len(o.Blocks))} {
		b = le.AppendUint32(b, v)
	}
	for _, v := range o.Blocks {
		b = le.AppendUint32(b, v)
	}
	return b, o.check()
}

// UnmarshalBinary reads an offer of another process, and checks that its blocks lie in its allocation.
func (o *Offer) UnmarshalBinary(b []byte) error {
	if len(b) < offerFixed || string(b[:3]) != "HRG" || b[3] != offerVersion {
		return fmt.Errorf("%w: %d bytes", ErrOffer, len(b))
	}
	le := binary.LittleEndian
	copy(o.Memory[:], b[4:])
	copy(o.Ready[:], b[68:])
	p := &o.Place
	for i, v := range [...]*uint64{&o.Whole, &p.Base, &p.LayerStride, &p.PlaneStride, &p.BlockStride, &p.Bytes} {
		*v = le.Uint64(b[132+8*i:])
	}
	for i, v := range [...]*uint32{&p.Layers, &p.Planes, &p.Blocks} {
		*v = le.Uint32(b[180+4*i:])
	}
	n, rest := le.Uint32(b[192:]), b[offerFixed:]
	if n == 0 || n > offerBlocks || len(rest) != 4*int(n) {
		return fmt.Errorf("%w: %d blocks in %d bytes", ErrOffer, n, len(rest))
	}
	o.Blocks = make([]uint32, n)
	for i := range o.Blocks {
		o.Blocks[i] = le.Uint32(rest[4*i:])
	}
	return o.check()
}

func (o *Offer) check() error {
	size, err := o.Place.Size()
	if err != nil {
		return fmt.Errorf("%w: %w", ErrOffer, err)
	}
	if o.Place.Base > o.Whole || size > o.Whole-o.Place.Base {
		return fmt.Errorf("%w: %d bytes at %d of an allocation of %d", ErrOffer, size, o.Place.Base, o.Whole)
	}
	for _, b := range o.Blocks {
		if b >= o.Place.Blocks {
			return fmt.Errorf("%w: block %d of %d", ErrOffer, b, o.Place.Blocks)
		}
	}
	return nil
}

// Share makes an engine's cache known to others: NewOffer then names blocks of it. place.Base is a device address. Memory that
// was mapped in segments has no handle: ErrNotSupported.
func Share(x *cgo.GPUContext, place Place) (Offer, error) {
	p, err := x.Pointer(place.Base)
	if err != nil {
		return Offer{}, err
	}
	if !p.Shareable() {
		return Offer{}, fmt.Errorf("share GPU memory at %#x: %w: it was mapped in segments (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False gives other memory), or comes from another process",
			place.Base, cgo.ErrNotSupported)
	}
	h, err := x.ShareMemory(p.Base)
	if err != nil {
		return Offer{}, err
	}
	o := Offer{Memory: h, Whole: p.Size, Place: place}
	o.Place.Base -= p.Base
	return o, o.check()
}

// Of is an offer of some blocks of the cache that o was made for by Share, behind a shared event.
func (o Offer) Of(blocks []uint32, ready *cgo.Event) (_ Offer, err error) {
	o.Blocks = blocks
	if o.Ready, err = ready.Share(); err != nil {
		return Offer{}, err
	}
	return o, o.check()
}

// peersMax bounds how many caches of other processes are kept open; the one longest unused makes room.
const peersMax = 64

// Peers copies what other processes offer.
type Peers struct {
	x      *cgo.GPUContext
	stream *cgo.Stream

	mu   sync.Mutex // held while copies are queued, so that none is closed under them
	open []*peer    // the latest used last
}

type peer struct {
	handle     cgo.IPCHandle
	addr, size uint64
}

// NewPeers takes offers for a GPU's memory.
func NewPeers(x *cgo.GPUContext) (*Peers, error) {
	s, err := x.NewStream()
	if err != nil {
		return nil, err
	}
	return &Peers{x: x, stream: s}, nil
}

// Close waits for the copies under way and closes what was opened.
func (p *Peers) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.stream == nil {
		return nil
	}
	errs := []error{p.stream.Sync()}
	for _, o := range p.open {
		errs = append(errs, p.x.CloseMemory(o.addr))
	}
	errs = append(errs, p.stream.Close())
	p.open, p.stream = nil, nil
	return errors.Join(errs...)
}

// Take begins to copy what is offered into blocks of this process's cache, in the request's order; to.Base is a device
// address. When the batch is done the blocks are whole.
func (p *Peers) Take(o *Offer, to *Place, blocks []uint32) (*Batch, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.stream == nil {
		return nil, errors.New("take offered GPU memory: closed")
	}
	if err := o.check(); err != nil {
		return nil, err
	}
	from, err := p.find(o)
	if err != nil {
		return nil, err
	}
	place := o.Place
	place.Base += from.addr
	copies, err := Copies(to, &place, blocks, o.Blocks, 0, place.Layers)
	if err != nil {
		return nil, err
	}
	ready, err := p.x.OpenEvent(o.Ready)
	if err != nil {
		return nil, err
	}
	b, err := queue(p.x, p.stream, cgo.CopyDevice, ready, copies)
	return b, errors.Join(err, ready.Close()) // the stream keeps what it waits for
}

// find opens an allocation, once. p.mu is held.
func (p *Peers) find(o *Offer) (*peer, error) {
	for i, known := range p.open {
		if known.handle == o.Memory {
			p.open = append(append(p.open[:i], p.open[i+1:]...), known)
			return known, known.fits(o)
		}
	}
	if len(p.open) == peersMax {
		if err := errors.Join(p.stream.Sync(), p.x.CloseMemory(p.open[0].addr)); err != nil {
			return nil, err
		}
		p.open = p.open[1:]
	}
	addr, err := p.x.OpenMemory(o.Memory)
	if err != nil {
		return nil, err
	}
	at, err := p.x.Pointer(addr)
	if err != nil {
		return nil, errors.Join(err, p.x.CloseMemory(addr))
	}
	n := &peer{handle: o.Memory, addr: addr, size: at.Size}
	p.open = append(p.open, n)
	return n, n.fits(o)
}

// fits says whether the memory is as large as the offer says: what is not there must not be read.
func (n *peer) fits(o *Offer) error {
	if o.Whole > n.size {
		return fmt.Errorf("%w: an allocation of %d bytes is offered, it has %d", ErrOffer, o.Whole, n.size)
	}
	return nil
}

// Forget closes an allocation of a process that has gone or is about to free it, before it does.
func (p *Peers) Forget(memory cgo.IPCHandle) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i, known := range p.open {
		if known.handle == memory {
			p.open = append(p.open[:i], p.open[i+1:]...)
			return errors.Join(p.stream.Sync(), p.x.CloseMemory(known.addr))
		}
	}
	return nil
}
