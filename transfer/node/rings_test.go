package node_test

import (
	"errors"
	"testing"

	"github.com/headrace/headrace/internal/leaktest"
	"github.com/headrace/headrace/internal/memfd"
	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/node/nodeclient"
	"github.com/headrace/headrace/transfer/node/ring"
	"github.com/headrace/headrace/transfer/node/wire"
	"golang.org/x/sys/unix"
)

// rawRing is an engine's ring, made by hand.
type rawRing struct {
	t             *testing.T
	mem           *memfd.Memory
	bell, ownBell int
	sub           ring.Producer
	comp          ring.Consumer
}

func newRawRing(t *testing.T, submissions, completions uint32) *rawRing {
	t.Helper()
	mem, err := memfd.Create("ring", ring.Size(submissions, completions))
	if err != nil {
		t.Fatal(err)
	}
	r := &rawRing{t: t, mem: mem}
	if err := ring.Init(mem.Bytes(), submissions, completions); err != nil {
		t.Fatal(err)
	}
	for _, fd := range []*int{&r.bell, &r.ownBell} {
		if *fd, err = ring.NewBell(); err != nil {
			t.Fatal(err)
		}
	}
	r.sub, r.comp = ring.EngineEnd(mem.Bytes(), submissions, completions)
	t.Cleanup(func() { _, _, _ = mem.Close(), unix.Close(r.bell), unix.Close(r.ownBell) })
	return r
}

func (r *rawRing) fds() []int { return []int{r.mem.FD(), r.bell, r.ownBell} }

func (r *rawRing) put(e [ring.EntrySize]byte) {
	r.t.Helper()
	if ok, err := r.sub.Put(&e); !ok || err != nil {
		r.t.Fatalf("submit: %v, %v", ok, err)
	}
	if err := ring.Ring(r.bell); err != nil {
		r.t.Fatal(err)
	}
}

// take waits for a completion.
func (r *rawRing) take() (c ring.Completion) {
	r.t.Helper()
	eventually(r.t, "completion", func() bool {
		var e [ring.EntrySize]byte
		ok, err := r.comp.Get(&e)
		if err == nil && ok {
			err = c.Parse(&e)
		}
		if err != nil {
			r.t.Fatal(err)
		}
		return ok
	})
	return c
}

func ringed(t *testing.T, socket, id string, submissions, completions uint32) (*rawConn, *rawRing) {
	t.Helper()
	c := rawDial(t, socket)
	c.hello(id, 2, 2)
	c.expect(wire.TypeHelloOK)
	r := newRawRing(t, submissions, completions)
	c.send(2, 0, 2, wire.SetupRing{Submissions: submissions, Completions: completions}, r.fds()...)
	c.expect(wire.TypeOK)
	return c, r
}

// What is not a ring is refused, with every descriptor closed, and the connection goes on without.
func TestRingRefused(t *testing.T) {
	n := startNode(t, nodeConfig{NodeID: "node-a", Transport: "shm"})
	c := rawDial(t, n.Socket)
	c.hello("e", 2, 2)
	c.expect(wire.TypeHelloOK)
	r := newRawRing(t, 4, 8)
	empty, err := memfd.Create("empty", ring.Size(4, 8))
	if err != nil {
		t.Fatal(err)
	}
	defer empty.Close()
	unsealed, err := unix.MemfdCreate("unsealed", unix.MFD_ALLOW_SEALING|unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(unsealed)
	if err := unix.Ftruncate(unsealed, 1<<20); err != nil {
		t.Fatal(err)
	}
	before := leaktest.Descriptors(t)
	setup := wire.SetupRing{Submissions: 4, Completions: 8}
	mem, bell, own := r.mem.FD(), r.bell, r.ownBell
	for i, x := range []struct {
		m    wire.SetupRing
		fds  []int
		code wire.Code
		want string
	}{
		{setup, nil, wire.CodeDescriptor, "0 descriptors"},
		{setup, []int{mem}, wire.CodeDescriptor, "1 descriptors"},
		{setup, []int{mem, bell}, wire.CodeDescriptor, "2 descriptors"},
		{setup, []int{mem, bell, own, own}, wire.CodeDescriptor, "4 descriptors"},
		{setup, []int{bell, mem, own}, wire.CodeDescriptor, "need an eventfd"},
		{setup, []int{mem, bell, 0}, wire.CodeDescriptor, "need an eventfd"},
		{setup, []int{bell, bell, own}, wire.CodeRegion, "not a memfd"},
		{setup, []int{unsealed, bell, own}, wire.CodeRegion, "may still shrink"},
		{setup, []int{empty.FD(), bell, own}, wire.CodeRegion, "magic"},
		{wire.SetupRing{Submissions: 8, Completions: 16}, r.fds(), wire.CodeRegion, "need"},
		{wire.SetupRing{Submissions: 5, Completions: 16}, r.fds(), wire.CodeRegion, "power of two"},
		{wire.SetupRing{Submissions: 4, Completions: 4}, r.fds(), wire.CodeRegion, "twice"},
		{wire.SetupRing{Submissions: 1 << 31, Completions: 1 << 31}, r.fds(), wire.CodeRegion, "power of two"},
	} {
		c.send(2, 0, uint64(10+i), x.m, x.fds...)
		c.refused(uint64(10+i), x.code, x.want)
	}
	eventually(t, "descriptors closed", func() bool { return leaktest.Descriptors(t) <= before })
	c.send(2, 0, 40, setup, r.fds()...)
	c.expect(wire.TypeOK)
	c.send(2, 0, 41, setup, r.fds()...)
	c.refused(41, wire.CodeState, "already")
	c.send(2, 0, 42, wire.Ping{})
	c.expect(wire.TypePong)
}

// An engine that breaks its ring loses its connection, and nobody else anything.
func TestHostileRing(t *testing.T) {
	n := startNode(t, nodeConfig{NodeID: "node-a", Transport: "shm"})
	p, d := newEngine(t, n.Socket, "p", testLayout()), newEngine(t, n.Socket, "d", testLayout())
	var push, bad [ring.EntrySize]byte
	s := ring.Submission{Lease: 99, Seq: 5, Units: []ring.Unit{{Count: 1}}}
	s.Put(&push)
	bad = push
	bad[0] = 7
	le32 := func(r *rawRing, at int, v uint32) {
		for i := range 4 {
			r.mem.Bytes()[at+i] = byte(v >> (8 * i))
		}
	}
	for name, attack := range map[string]func(r *rawRing){
		"tail ahead":  func(r *rawRing) { le32(r, 128, 5); _ = ring.Ring(r.bell) },
		"tail behind": func(r *rawRing) { le32(r, 128, ^uint32(0)); _ = ring.Ring(r.bell) },
		"no kind":     func(r *rawRing) { r.put(bad) },
		"head ahead":  func(r *rawRing) { le32(r, 256, 3); r.put(push) }, // a refusal is to be put in
		"everything": func(r *rawRing) {
			for i := range r.mem.Bytes() {
				r.mem.Bytes()[i] = 0xff
			}
			_ = ring.Ring(r.bell)
		},
		"takes no refusals": func(r *rawRing) {
			eventually(t, "refusals to fill the queue", func() bool {
				if ok, err := r.sub.Put(&push); err != nil || r.comp.Empty() && !ok {
					return err != nil
				}
				_ = ring.Ring(r.bell)
				return r.mem.Bytes()[320] >= 8
			})
			r.put(push)
		},
		"unclean pages": func(r *rawRing) { // what was in the pages is gone: no faults, entries of zeros
			if err := unix.Fallocate(r.mem.FD(), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, int64(r.mem.Size())); err != nil {
				t.Fatal(err)
			}
			r.put([ring.EntrySize]byte{})
		},
	} {
		t.Run(name, func(t *testing.T) {
			c, r := ringed(t, n.Socket, "hostile", 4, 8)
			attack(r)
			c.ended()
		})
	}
	// A doorbell that blocks whoever rings it holds up nobody but its owner.
	c, r := ringed(t, n.Socket, "hostile", 4, 8)
	if err := unix.SetNonblock(r.ownBell, false); err != nil {
		t.Fatal(err)
	}
	full := [8]byte{0xfe, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff}
	if _, err := unix.Write(r.ownBell, full[:]); err != nil {
		t.Fatal(err)
	}
	r.comp.Sleep()
	for range 3 {
		r.put(push)
	}
	for range 3 {
		if got := r.take(); got.Status != uint16(wire.CodeUnknownLease) || got.Lease != 99 || got.Seq != 5 {
			t.Errorf("refusal: %+v", got)
		}
	}
	c.send(2, 0, 3, wire.Ping{})
	c.expect(wire.TypePong)
	_ = c.Close()
	eventually(t, "the hostile engine's id is free", func() bool {
		again, err := nodeclient.Dial(t.Context(), n.Socket, nodeclient.Options{EngineID: "hostile"})
		return err == nil && again.Close() == nil
	})
	a := newAttempt(p, d)
	a.bind()
	a.push(1)
	if err := p.Handoff(t.Context(), a.pLease, nil); err != nil {
		t.Fatal(err)
	}
	p.until(a.nonce, transfer.EventSettled)
}

// All completions of a lease come before its end, by ring and, where it is full, as messages: none is lost.
func TestRingOverflow(t *testing.T) {
	n := startNode(t, nodeConfig{NodeID: "node-a", Transport: "shm"})
	d := newEngine(t, n.Socket, "d", testLayout())
	c, r := ringed(t, n.Socket, "p", 4, 8)
	mem, err := memfd.Create("p", layoutSize(testLayout()))
	if err != nil {
		t.Fatal(err)
	}
	defer mem.Close()
	layout, err := testLayout().MarshalBinary()
	if err != nil {
		t.Fatal(err)
	}
	c.send(2, 0, 3, wire.RegisterRegion{Size: mem.Size(), Layout: layout}, mem.FD())
	region := c.expect(wire.TypeOK).(wire.OK).Value
	a := newRemoteAttempt(&engine{Client: d.Client, t: t, id: "p", layout: testLayout()}, "node-a", d)
	c.send(2, 0, 4, wire.Present{Regions: []uint64{region}, Tokens: a.tokens, Ticket: a.ticket, Blocks: a.from})
	lease := c.expect(wire.TypeOK).(wire.OK).Value
	d.until(a.nonce, transfer.EventPresented)
	if _, err := d.Bind(t.Context(), a.bindReq()); err != nil {
		t.Fatal(err)
	}
	c.expect(wire.TypeBound)
	// A block a push, and completions are left where they are.
	pushes := 0
	for layer := range testLayout().Layers {
		for b := range testLayout().Blocks {
			pushes++
			s := ring.Submission{Lease: lease, Seq: uint64(pushes), Units: []ring.Unit{{Layer: layer, First: b, Count: 1}}}
			var e [ring.EntrySize]byte
			s.Put(&e)
			eventually(t, "room for a submission", func() bool { return r.sub.Room() > 0 })
			r.put(e)
		}
	}
	c.send(2, 0, 5, wire.Handoff{Lease: lease, Record: []byte("record")})
	seen, settled := map[uint64]bool{}, false
	for !settled {
		_, m := c.next()
		if ev, ok := m.(wire.Event); ok {
			if ev.Kind == wire.TypePushed {
				seen[ev.Seq] = true
			}
			settled = ev.Kind == wire.TypeSettled
		}
	}
	byMessage := len(seen)
	for !r.comp.Empty() {
		got := r.take()
		if got.Status != 0 || got.Lease != lease || got.Nonce != a.nonce || got.After != 1 {
			t.Errorf("completion %+v", got)
		}
		seen[got.Seq] = true
	}
	if len(seen) != pushes || byMessage < pushes-8 {
		t.Errorf("%d of %d completions, %d of them as messages", len(seen), pushes, byMessage)
	}
	st, err := d.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range st.Engines {
		if e.EngineID == "p" && (e.Submission.RingPushes != uint64(pushes) || e.Submission.OverflowCompletions != uint64(byMessage)) {
			t.Errorf("status: %+v", e.Submission)
		}
	}
}

// The client pushes by ring where it can, hears events and completions in the order in which they happened, and a push
// that is refused later ends its lease.
func TestClientUsesRing(t *testing.T) {
	for _, messages := range []bool{false, true} {
		n := startNode(t, nodeConfig{NodeID: "node-a", Transport: "shm"})
		p, d := newEngine(t, n.Socket, "p", testLayout()), newEngine(t, n.Socket, "d", testLayout())
		if messages {
			_ = p.Close()
			c, err := nodeclient.Dial(t.Context(), n.Socket, nodeclient.Options{EngineID: "p", OnEvent: p.event, Messages: true})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = c.Close() })
			p.Client = c
			if p.region, err = c.RegisterRegion(t.Context(), p.mem.FD(), p.mem.Size(), p.layout); err != nil {
				t.Fatal(err)
			}
		}
		a := newAttempt(p, d)
		var err error
		if a.pLease, err = p.Present(t.Context(), a.presentReq()); err != nil {
			t.Fatal(err)
		}
		const pushes = 50
		for i := range uint64(pushes) { // before it is bound: their completions follow BOUND
			u := a.units()[i%3]
			u.Count = 1
			if i < 3 {
				u = a.units()[i]
			}
			if err := p.Push(t.Context(), a.pLease, []transfer.Unit{u}, i); err != nil {
				t.Fatal(err)
			}
		}
		if err := p.Handoff(t.Context(), a.pLease, nil); err != nil {
			t.Fatal(err)
		}
		d.until(a.nonce, transfer.EventPresented)
		if _, err := d.Bind(t.Context(), a.bindReq()); err != nil {
			t.Fatal(err)
		}
		var order []transfer.EventKind
		for ev := range p.of(a.nonce) {
			if order = append(order, ev.Kind); ev.Kind == transfer.EventSettled {
				break
			}
			if ev.Kind == transfer.EventEnded {
				t.Fatal(ev.Reason)
			}
		}
		if order[0] != transfer.EventBound {
			t.Errorf("messages %v: events %v", messages, order)
		}
		eventually(t, "all pushes taken", func() bool { // the lease may settle before the last of them, which say nothing new
			st, err := p.Status(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			for _, e := range st.Engines {
				if s := e.Submission; e.EngineID == "p" && s.RingPushes+s.MessagePushes == pushes {
					return messages == (s.RingPushes == 0)
				}
			}
			return false
		})
		d.until(a.nonce, transfer.EventSettled) // its blocks are free again
		b := newAttempt(p, d)
		b.bind()
		err = p.Push(t.Context(), b.pLease, []transfer.Unit{{Layer: 1 << 20, Count: 1}}, 1)
		if messages != errors.Is(err, transfer.ErrInvalid) {
			t.Errorf("messages %v: push of nonsense: %v", messages, err)
		}
		if !messages {
			if ev := p.until(b.nonce, transfer.EventEnded); ev.Reason == "" {
				t.Errorf("ended: %+v", ev)
			}
		}
	}
}
