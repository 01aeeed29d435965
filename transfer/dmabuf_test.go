package transfer_test

import (
	"errors"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/shm"
	"github.com/headrace/headrace/transfer/tcp"
	"github.com/headrace/headrace/transfer/transporttest"
)

// keyed is a transport whose devices know regions, or refuse them.
type keyed struct {
	transfer.Transport
	refuse error
	known  atomic.Int64
}

func (k *keyed) Register(r *transfer.Region) ([]byte, error) {
	if k.refuse != nil {
		return nil, k.refuse
	}
	if b := r.DMABuf(); r.Hostless() && (b.FD < 0 || b.Address == 0 || r.Bytes() != nil || r.Size() == 0) {
		return nil, errors.New("a device's memory without what to register it by")
	}
	k.known.Add(1)
	return []byte("key"), nil
}

func (k *keyed) Unregister(*transfer.Region) error {
	k.known.Add(-1)
	return nil
}

// buf is a descriptor that passes for a dma-buf.
func buf(t *testing.T, size uint64) transfer.DMABuf {
	t.Helper()
	fd, err := unix.MemfdCreate("dma-buf", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Ftruncate(fd, int64(size)); err != nil {
		t.Fatal(err)
	}
	return transfer.DMABuf{FD: fd, Address: 0x7f0000000000}
}

func closed(t *testing.T, fd int) {
	t.Helper()
	if err := unix.Close(fd); err != unix.EBADF {
		t.Errorf("descriptor %d was left open", fd)
	}
}

func TestDMABufsThatAreRefused(t *testing.T) {
	pair := transporttest.NewPair(t, transporttest.Factory{Local: true, New: shm.New}, transporttest.Options{})
	lay := pair.P.Layout
	size, page := lay.LayerStride*uint64(lay.Layers), uint64(os.Getpagesize())
	b := buf(t, size)
	if _, err := pair.P.Client.AddDMABuf(b, size, lay, 0); !errors.Is(err, transfer.ErrRegion) || !strings.Contains(err.Error(), "no dma-buf") {
		t.Errorf("a memfd: %v", err)
	}
	closed(t, b.FD)
	if _, err := pair.P.Client.AddDMABuf(transfer.DMABuf{FD: -1}, size, lay, 0); !errors.Is(err, transfer.ErrRegion) {
		t.Errorf("no descriptor: %v", err)
	}
	t.Cleanup(transfer.FakeDMABufs())
	for name, c := range map[string]struct {
		change func(*transfer.DMABuf)
		size   uint64
		flags  transfer.RegionFlags
		want   error
		words  string
	}{
		"no RDMA":    {nil, size, 0, transfer.ErrRegion, "--transport rdma"},
		"too short":  {nil, size + 1, 0, transfer.ErrRegion, "the dma-buf has"},
		"no size":    {nil, 0, 0, transfer.ErrRegion, "0 bytes"},
		"offset":     {func(b *transfer.DMABuf) { b.Offset, b.Address = page, b.Address+page }, size, 0, transfer.ErrRegion, "the dma-buf has"},
		"overflow":   {func(b *transfer.DMABuf) { b.Offset = ^uint64(0) - 100 }, size, 0, transfer.ErrRegion, "the dma-buf has"},
		"page":       {func(b *transfer.DMABuf) { b.Address += 16 }, size, 0, transfer.ErrRegion, "lie differently in their pages"},
		"address":    {func(b *transfer.DMABuf) { b.Address = ^uint64(0) &^ (page - 1) }, size, 0, transfer.ErrRegion, "at address"},
		"populate":   {nil, size, transfer.RegionPopulate, transfer.ErrRegion, "without populate"},
		"the layout": {nil, size - page, 0, transfer.ErrLayout, ""},
	} {
		b := buf(t, size)
		if c.change != nil {
			c.change(&b)
		}
		if _, err := pair.P.Client.AddDMABuf(b, c.size, lay, c.flags); !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.words) {
			t.Errorf("%s: %v, want %v that says %q", name, err, c.want, c.words)
		}
		closed(t, b.FD)
	}
}

// Where a transport registers it, a device's memory is bound over that transport alone: over the others it is refused with the
// reason, at whichever end it is.
func TestDMABufsArePaired(t *testing.T) {
	t.Cleanup(transfer.FakeDMABufs())
	device := &keyed{Transport: tcp.New(tcp.Config{})}
	pair := transporttest.NewPair(t, transporttest.Factory{Local: true, New: shm.New}, transporttest.Options{Config: func(c *transfer.Config) {
		c.Transports = append(c.Transports, device)
	}})
	add := func(s *transporttest.Side) transfer.RegionID {
		size := s.Layout.LayerStride * uint64(s.Layout.Layers)
		id, err := s.Client.AddDMABuf(buf(t, size), size, s.Layout, 0)
		if err != nil {
			t.Fatal(err)
		}
		return id
	}
	host, p, d := pair.P.Regions, add(pair.P), add(pair.D)
	if n := device.known.Load(); n != 4 {
		t.Errorf("%d regions are registered, want 4", n)
	}
	for _, e := range pair.P.Engine.Status().Engines {
		for _, r := range e.Regions {
			if r.ID == p && (r.Kind != "device memory" || r.Reason == "" || r.Bytes == 0) || r.ID == host[0] && (r.Kind != "memory" || r.Page == 0 || r.Reason != "") {
				t.Errorf("status %+v", r)
			}
		}
	}

	q := pair.NewRequest(newRand(), 40, 0, time.Minute)
	q.Present(t, nil)
	pair.D.Wait(t, q.Ticket.Nonce, transfer.EventPresented)
	_, err := pair.D.Client.Bind(transfer.BindReq{Ticket: q.Raw, Regions: []transfer.RegionID{d}, Blocks: q.Dst})
	if !errors.Is(err, transfer.ErrRegion) || !strings.Contains(err.Error(), "shm") || !strings.Contains(err.Error(), "stage over host memory") {
		t.Errorf("bind over a local copy: %v", err)
	}
	q.Bind(t) // host memory will do
	if err := pair.P.Client.Revoke(q.PLease, "done"); err != nil {
		t.Error(err)
	}
	pair.D.End(t, q.Ticket.Nonce)

	q = pair.NewRequest(newRand(), 40, 0, time.Minute)
	pair.P.Regions = []transfer.RegionID{p}
	q.Present(t, nil)
	q.Bind(t)
	for _, s := range []*transporttest.Side{pair.P, pair.D} {
		if ev := s.End(t, q.Ticket.Nonce); ev.Kind != transfer.EventEnded || !strings.Contains(ev.Reason, "stage over host memory") {
			t.Errorf("%s: %v %q", s.ID, ev.Kind, ev.Reason)
		}
	}
	for _, s := range []*transporttest.Side{pair.P, pair.D} {
		if err := s.Client.RemoveRegion(map[*transporttest.Side]transfer.RegionID{pair.P: p, pair.D: d}[s]); err != nil {
			t.Error(err)
		}
	}
	if n := device.known.Load(); n != 2 {
		t.Errorf("%d regions are registered, want 2", n)
	}
}

// Over a channel of the transport that knows them both ends are bound; and not where the other end's memory is not known.
func TestDMABufsAreBound(t *testing.T) {
	t.Cleanup(transfer.FakeDMABufs())
	for _, known := range []bool{true, false} {
		pair := transporttest.NewPair(t, transporttest.Factory{New: func() transfer.Transport { return &keyed{Transport: tcp.New(tcp.Config{})} }}, transporttest.Options{
			Config: func(c *transfer.Config) {
				if !known && c.NodeID == "node-d" {
					c.Transports = []transfer.Transport{tcp.New(tcp.Config{})}
				}
			},
		})
		size := pair.P.Layout.LayerStride * uint64(pair.P.Layout.Layers)
		id, err := pair.P.Client.AddDMABuf(buf(t, size), size, pair.P.Layout, transfer.RegionReadOnly)
		if err != nil {
			t.Fatal(err)
		}
		host := pair.P.Regions
		pair.P.Regions = []transfer.RegionID{id}
		q := pair.NewRequest(newRand(), 40, 0, time.Minute)
		q.Present(t, nil)
		q.Bind(t)
		if !known {
			if ev := pair.P.End(t, q.Ticket.Nonce); !strings.Contains(ev.Reason, "are not registered with tcp") {
				t.Errorf("%v %q", ev.Kind, ev.Reason)
			}
		} else {
			pair.P.Wait(t, q.Ticket.Nonce, transfer.EventBound)
			if err := pair.P.Client.Revoke(q.PLease, "done"); err != nil {
				t.Error(err)
			}
		}
		pair.P.Regions = host
		pair.Close(t)
	}
}

// A device that refuses, alone: its reason is the answer.
func TestDMABufRefusedByTheDevice(t *testing.T) {
	t.Cleanup(transfer.FakeDMABufs())
	refusal := errors.New("this NIC takes none")
	device := &keyed{Transport: tcp.New(tcp.Config{})}
	pair := transporttest.NewPair(t, transporttest.Factory{New: func() transfer.Transport { return device }}, transporttest.Options{})
	device.refuse = refusal
	size := pair.P.Layout.LayerStride * uint64(pair.P.Layout.Layers)
	b := buf(t, size)
	if _, err := pair.P.Client.AddDMABuf(b, size, pair.P.Layout, 0); !errors.Is(err, refusal) {
		t.Errorf("got %v", err)
	}
	closed(t, b.FD)
}
