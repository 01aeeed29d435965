package gpumem

import (
	"bytes"
	"errors"
	"math"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"github.com/headrace/headrace/cgo"
	"github.com/headrace/headrace/cgo/cudatest"
)

// standIn takes the context of a stand-in's GPU.
func standIn(t *testing.T) (x *cgo.GPUContext, library string) {
	t.Helper()
	if !cgo.Enabled {
		t.Skip("built without cgo")
	}
	library = cudatest.Build(t)
	return open(t, library), library
}

func open(t *testing.T, library string) *cgo.GPUContext {
	t.Helper()
	d, err := cgo.LoadCUDA(library)
	if err != nil {
		t.Fatal(err)
	}
	x, err := d.Context(0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := x.Close(); err != nil {
			t.Error(err)
		}
		if h := cgo.LiveGPU(); h.Total() != 0 {
			t.Errorf("left over: %+v", h)
		}
	})
	return x
}

// realGPU takes the context of the host's first GPU, or skips the test.
func realGPU(t *testing.T) *cgo.GPUContext {
	t.Helper()
	cudatest.NeedGPU(t, cgo.ProbeCUDA().Reason())
	return open(t, "")
}

// cache is a KV cache on the GPU: three layers of two planes of eight blocks of 4 KiB, a vLLM-like layout.
func cache(t *testing.T, x *cgo.GPUContext) Place {
	t.Helper()
	p := Place{LayerStride: 2 * 8 * 4096, PlaneStride: 8 * 4096, BlockStride: 4096, Bytes: 4096, Layers: 3, Planes: 2, Blocks: 8}
	size, err := p.Size()
	if err != nil {
		t.Fatal(err)
	}
	if p.Base, err = x.Alloc(size); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := x.Free(p.Base); err != nil {
			t.Error(err)
		}
	})
	if err := x.Fill(p.Base, 0xee, size); err != nil {
		t.Fatal(err)
	}
	return p
}

// value is what the bytes of a block of a request are filled with.
func value(layer, plane, i int) byte { return byte(1 + layer*64 + plane*32 + i) }

func each(p *Place, blocks []uint32, f func(addr uint64, v byte)) {
	for layer := range int(p.Layers) {
		for plane := range int(p.Planes) {
			for i, b := range blocks {
				f(p.Base+uint64(layer)*p.LayerStride+uint64(plane)*p.PlaneStride+uint64(b)*p.BlockStride, value(layer, plane, i))
			}
		}
	}
}

func fill(t *testing.T, x *cgo.GPUContext, p *Place, blocks []uint32) {
	t.Helper()
	each(p, blocks, func(addr uint64, v byte) {
		if err := x.Fill(addr, v, p.Bytes); err != nil {
			t.Fatal(err)
		}
	})
}

// compare reads a cache back: the blocks hold the request, and all others what they held.
func compare(t *testing.T, x *cgo.GPUContext, p *Place, blocks []uint32) {
	t.Helper()
	size, err := p.Size()
	if err != nil {
		t.Fatal(err)
	}
	got, err := x.AllocHost(int(size))
	if err != nil {
		t.Fatal(err)
	}
	defer x.FreeHost(got)
	s, err := x.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	to := uint64(uintptr(unsafe.Pointer(unsafe.SliceData(got))))
	if err := errors.Join(s.Copy(cgo.CopyToHost, []cgo.Copy{{Dst: to, Src: p.Base, Len: size}}), s.Sync()); err != nil {
		t.Fatal(err)
	}
	want := bytes.Repeat([]byte{0xee}, int(size))
	each(p, blocks, func(addr uint64, v byte) {
		copy(want[addr-p.Base:], bytes.Repeat([]byte{v}, int(p.Bytes)))
	})
	for i := range want {
		if got[i] != want[i] {
			t.Fatalf("byte %d is %#x, want %#x", i, got[i], want[i])
		}
	}
}

func TestCopiesAreJoined(t *testing.T) {
	from := Place{Base: 1 << 20, LayerStride: 1 << 16, PlaneStride: 1 << 15, BlockStride: 4096, Bytes: 4096, Layers: 2, Planes: 2, Blocks: 8}
	to := from
	to.Base = 0
	got, err := Copies(&to, &from, []uint32{3, 4, 5, 0}, []uint32{1, 2, 3, 7}, 1, 1)
	want := []cgo.Copy{
		{Dst: 1<<16 + 3*4096, Src: 1<<20 + 1<<16 + 4096, Len: 3 * 4096}, {Dst: 1 << 16, Src: 1<<20 + 1<<16 + 7*4096, Len: 4096},
		{Dst: 1<<16 + 1<<15 + 3*4096, Src: 1<<20 + 1<<16 + 1<<15 + 4096, Len: 3 * 4096}, {Dst: 1<<16 + 1<<15, Src: 1<<20 + 1<<16 + 1<<15 + 7*4096, Len: 4096},
	}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("%v, %v, want %v", got, err, want)
	}
	all := []uint32{0, 1, 2, 3, 4, 5, 6, 7}
	if got, err = Copies(&to, &from, all, all, 0, 2); err != nil || len(got) != 1 || got[0].Len != 2<<16 {
		t.Errorf("a whole cache: %v, %v", got, err)
	}
}

func TestPlacesThatDoNotFit(t *testing.T) {
	ok := Place{LayerStride: 1 << 16, PlaneStride: 1 << 15, BlockStride: 4096, Bytes: 4096, Layers: 2, Planes: 2, Blocks: 8}
	for name, change := range map[string]func(*Place){
		"no layers": func(p *Place) { p.Layers = 0 }, "no bytes": func(p *Place) { p.Bytes = 0 }, "many": func(p *Place) { p.Blocks = math.MaxUint32 },
		"stride": func(p *Place) { p.LayerStride = 1 << 63 }, "base": func(p *Place) { p.Base = math.MaxUint64 - 10 }, "end": func(p *Place) { p.Base = math.MaxInt64 - 10 },
	} {
		p := ok
		change(&p)
		if n, err := p.Size(); !errors.Is(err, ErrPlace) {
			t.Errorf("%s: %d, %v", name, n, err)
		}
		if c, err := Copies(&ok, &p, nil, nil, 0, 1); !errors.Is(err, ErrPlace) {
			t.Errorf("%s: %v, %v", name, c, err)
		}
	}
	other := ok
	other.Bytes = 2048
	for name, c := range map[string]struct {
		to           *Place
		dst, src     []uint32
		first, count uint32
	}{
		"bytes": {&other, nil, nil, 0, 1}, "lengths": {&ok, []uint32{1}, nil, 0, 1}, "to": {&ok, []uint32{8}, []uint32{0}, 0, 1},
		"from": {&ok, []uint32{0}, []uint32{8}, 0, 1}, "layers": {&ok, nil, nil, 1, 2}, "layer": {&ok, nil, nil, 3, math.MaxUint32},
	} {
		if got, err := Copies(c.to, &ok, c.dst, c.src, c.first, c.count); !errors.Is(err, ErrPlace) {
			t.Errorf("%s: %v, %v", name, got, err)
		}
	}
}

func TestStagingFaults(t *testing.T) {
	x, _ := standIn(t)
	s, err := NewStaging(x, 1<<16)
	if err != nil {
		t.Fatal(err)
	}
	p := cache(t, x)
	for _, c := range []cgo.Copy{{Dst: 1 << 16, Src: p.Base, Len: 1}, {Dst: math.MaxUint64, Src: p.Base, Len: 2}, {Dst: 1, Src: p.Base, Len: 1 << 16}} {
		if _, err := s.ToHost(nil, []cgo.Copy{c}); !errors.Is(err, ErrPlace) {
			t.Errorf("%+v: %v", c, err)
		}
		if _, err := s.ToDevice(nil, []cgo.Copy{{Dst: c.Src, Src: c.Dst, Len: c.Len}}); !errors.Is(err, ErrPlace) {
			t.Errorf("%+v: %v", c, err)
		}
	}
	for _, fault := range []string{"cuEventCreate=2", "cuMemcpyDtoHAsync_v2=700", "cuEventRecord=700", "cuStreamSynchronize=700,cuMemcpyDtoHAsync_v2=1"} {
		t.Setenv(cudatest.Faults, fault)
		if _, err := s.ToHost(nil, []cgo.Copy{{Src: p.Base, Len: 4096}}); err == nil {
			t.Errorf("%s: copied", fault)
		}
	}
	t.Setenv(cudatest.Faults, "")
	if err := errors.Join(s.Close(), s.Close()); err != nil {
		t.Error(err)
	}
	if _, err := s.ToHost(nil, nil); err == nil {
		t.Error("copied to memory that is closed")
	}
	for _, fault := range []string{"cuMemHostRegister_v2=2", "cuStreamCreate=2"} {
		t.Setenv(cudatest.Faults, fault)
		if s, err := NewStaging(x, 4096); err == nil {
			t.Errorf("%s: made", fault)
			s.Close()
		}
	}
	t.Setenv(cudatest.Faults, "")
}

func TestExportAsOne(t *testing.T) {
	x, _ := standIn(t)
	s, err := x.MapSegments(2<<20, 2, true)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	b, err := Export(x, s.Addr+4096, s.Size-8192)
	if err != nil || b.Offset != 4096 {
		t.Fatalf("%+v, %v", b, err)
	}
	b.Close()
	t.Setenv(cudatest.SegmentsApart, "1")
	if b, err := Export(x, s.Addr, s.Size); !errors.Is(err, cgo.ErrNotSupported) || !strings.Contains(err.Error(), "expandable_segments:False") {
		t.Errorf("%+v, %v", b, err)
	}
	if o, err := Share(x, Place{Base: s.Addr, Bytes: 4096, Layers: 1, Planes: 1, Blocks: 1}); !errors.Is(err, cgo.ErrNotSupported) || !strings.Contains(err.Error(), "expandable_segments:False") {
		t.Errorf("%+v, %v", o, err)
	}
}

func sampleOffer() Offer {
	return Offer{Memory: cgo.IPCHandle{1, 2}, Ready: cgo.IPCHandle{3}, Whole: 1 << 20, Blocks: []uint32{7, 0},
		Place: Place{Base: 4096, LayerStride: 1 << 16, PlaneStride: 1 << 15, BlockStride: 4096, Bytes: 4096, Layers: 3, Planes: 2, Blocks: 8}}
}

func TestOffersOnTheWire(t *testing.T) {
	o := sampleOffer()
	b, err := o.MarshalBinary()
	if err != nil || len(b) != 196+8 || string(b[:4]) != "HRG\x01" || b[4] != 1 || b[68] != 3 || b[196] != 7 {
		t.Fatalf("%x, %v", b, err)
	}
	var got Offer
	if err := got.UnmarshalBinary(b); err != nil || got.Place != o.Place || got.Memory != o.Memory || !slices.Equal(got.Blocks, o.Blocks) {
		t.Errorf("%+v, %v", got, err)
	}
	for name, change := range map[string]func(*Offer){
		"no blocks": func(o *Offer) { o.Blocks = nil }, "block": func(o *Offer) { o.Blocks = []uint32{8} }, "beyond": func(o *Offer) { o.Whole = 4096 },
		"far": func(o *Offer) { o.Place.Base = 1 << 21 }, "many": func(o *Offer) { o.Blocks = make([]uint32, offerBlocks+1) }, "place": func(o *Offer) { o.Place.Bytes = 0 },
	} {
		o := sampleOffer()
		change(&o)
		if _, err := o.MarshalBinary(); !errors.Is(err, ErrOffer) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func FuzzOffer(f *testing.F) {
	o := sampleOffer()
	b, err := o.MarshalBinary()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add(b[:100])
	f.Fuzz(func(t *testing.T, b []byte) {
		var o Offer
		if err := o.UnmarshalBinary(b); err != nil {
			if !errors.Is(err, ErrOffer) {
				t.Fatal(err)
			}
			return
		}
		again, err := o.MarshalBinary()
		if err != nil || !bytes.Equal(again, b) {
			t.Fatalf("%x parsed to %+v, which is %x, %v", b, o, again, err)
		}
	})
}
