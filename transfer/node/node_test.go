package node_test

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"net/url"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/headrace/headrace/internal/leaktest"
	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/node"
	"github.com/headrace/headrace/transfer/node/nodeclient"
	"github.com/headrace/headrace/transfer/node/wire"
	"github.com/headrace/headrace/transfer/ticket"
	"golang.org/x/sys/unix"
)

// pair gives a prefill and a decode engine: on two daemons over TCP, or on one for the local copy.
func pair(t *testing.T, transport string, l transfer.Layout) (p, d *engine) {
	t.Helper()
	a := startNode(t, nodeConfig{NodeID: "node-a", Transport: transport})
	b := a
	if transport == "tcp" {
		b = startNode(t, nodeConfig{NodeID: "node-b", Transport: transport})
	}
	return newEngine(t, a.Socket, "p", l), newEngine(t, b.Socket, "d", l)
}

// sameKV compares the wanted blocks and that the others at d are untouched.
func sameKV(t *testing.T, a *attempt, untouched byte) {
	t.Helper()
	wanted := map[uint32]bool{}
	for layer := range a.p.layout.Layers {
		for i, from := range a.from {
			if uint32(i)*a.p.layout.BlockTokens < a.first {
				continue
			}
			wanted[a.to[i]] = true
			if !bytes.Equal(block(a.p, layer, from), block(a.d, layer, a.to[i])) {
				t.Errorf("layer %d, block %d of the request arrived altered", layer, i)
			}
		}
		for id := range a.d.layout.Blocks {
			if b := block(a.d, layer, id); !wanted[id] && (b[0] != untouched || b[len(b)-1] != untouched) {
				t.Errorf("layer %d, block %d was written and is not the lease's", layer, id)
			}
		}
	}
}

func TestMoveKV(t *testing.T) {
	for _, transport := range []string{"tcp", "shm"} {
		t.Run(transport, func(t *testing.T) {
			p, d := pair(t, transport, testLayout())
			for round, first := range []uint32{0, 16, 64} {
				pattern(p, uint32(round))
				fill(d.mem.Bytes(), 0xdd)
				a := newAttempt(p, d)
				a.from, a.to, a.tokens, a.first = a.from[:10], a.to[5:15], 160, first
				a.bind()
				for l := range p.layout.Layers { // as an engine does, layer by layer
					if err := p.Push(t.Context(), a.pLease, []transfer.Unit{{Layer: l, Count: 10}}, uint64(l)); err != nil {
						t.Fatal(err)
					}
				}
				for range p.layout.Layers {
					p.until(a.nonce, transfer.EventPushed)
				}
				record := bytes.Repeat([]byte("r"), 1<<20)
				if err := p.Handoff(t.Context(), a.pLease, record); err != nil {
					t.Fatal(err)
				}
				if ev := d.until(a.nonce, transfer.EventSettled); !bytes.Equal(ev.Record, record) || ev.Lease != a.dLease {
					t.Errorf("settled with a record of %d bytes for lease %d, want %d", len(ev.Record), ev.Lease, a.dLease)
				}
				p.until(a.nonce, transfer.EventSettled)
				sameKV(t, a, 0xdd)
			}
		})
	}
}

func TestLastPartialBlock(t *testing.T) {
	p, d := pair(t, "tcp", testLayout())
	pattern(p, 1)
	fill(d.mem.Bytes(), 0xdd)
	a := newAttempt(p, d)
	a.from, a.to, a.tokens = []uint32{7}, []uint32{3}, 5
	a.bind()
	a.push(1)
	if err := p.Handoff(t.Context(), a.pLease, nil); err != nil {
		t.Fatal(err)
	}
	d.until(a.nonce, transfer.EventSettled)
	got, want := block(d, 1, 3), block(p, 1, 7)
	if n := 5 * 128; !bytes.Equal(got[:n], want[:n]) || !bytes.Equal(got[2048:2048+n], want[2048:2048+n]) || got[n] != 0xdd || got[2048+n] != 0xdd {
		t.Error("five tokens of both planes, and no more, should have arrived")
	}
}

func TestRefusedRegions(t *testing.T) {
	r := startNode(t, nodeConfig{NodeID: "node-a", Transport: "shm"})
	e := newEngine(t, r.Socket, "e", testLayout())
	before := leaktest.Descriptors(t)
	raw := func(seals int) int {
		fd, err := unix.MemfdCreate("x", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
		if err != nil {
			t.Fatal(err)
		}
		if err := unix.Ftruncate(fd, int64(e.mem.Size())); err != nil {
			t.Fatal(err)
		}
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err != nil {
			t.Fatal(err)
		}
		return fd
	}
	file, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	unsealed, growOnly := raw(0), raw(unix.F_SEAL_GROW)
	outside := testLayout()
	outside.LayerStride *= 2
	for name, c := range map[string]struct {
		fd   int
		size uint64
		l    transfer.Layout
		want error
	}{
		"unsealed":     {unsealed, e.mem.Size(), testLayout(), transfer.ErrRegion},
		"shrinkable":   {growOnly, e.mem.Size(), testLayout(), transfer.ErrRegion},
		"no memfd":     {int(file.Fd()), e.mem.Size(), testLayout(), transfer.ErrRegion},
		"larger":       {e.mem.FD(), e.mem.Size() + 1, testLayout(), transfer.ErrRegion},
		"overflow":     {e.mem.FD(), 1 << 63, testLayout(), transfer.ErrRegion},
		"outside":      {e.mem.FD(), e.mem.Size(), outside, transfer.ErrLayout},
		"empty layout": {e.mem.FD(), e.mem.Size(), transfer.Layout{}, transfer.ErrLayout},
	} {
		if _, err := e.RegisterRegion(t.Context(), c.fd, c.size, c.l); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}
	for name, c := range map[string]struct {
		fd    int
		words string
	}{"a memfd": {e.mem.FD(), "no dma-buf"}, "a file": {int(file.Fd()), "no dma-buf"}} {
		b := transfer.DMABuf{FD: c.fd, Address: 1 << 40}
		if _, err := e.RegisterDMABuf(t.Context(), b, e.mem.Size(), testLayout()); !errors.Is(err, transfer.ErrRegion) || !strings.Contains(err.Error(), c.words) {
			t.Errorf("%s as a device's memory: %v", name, err)
		}
	}
	for _, fd := range []int{unsealed, growOnly} {
		_ = unix.Close(fd)
	}
	_ = file.Close()
	if err := e.RemoveRegion(t.Context(), 999); !errors.Is(err, transfer.ErrUnknownRegion) {
		t.Errorf("remove unknown region: %v", err)
	}
	if err := e.RemoveRegion(t.Context(), e.region); err != nil {
		t.Error(err)
	}
	eventually(t, "descriptors closed", func() bool { return leaktest.Descriptors(t) <= before })
}

// refusedAt presents an attempt that must come to nothing: at once, or by an event.
func refusedAt(t *testing.T, a *attempt) error {
	t.Helper()
	if _, err := a.p.Present(t.Context(), a.presentReq()); err != nil {
		return err
	}
	select {
	case ev := <-a.p.of(a.nonce):
		if ev.Kind != transfer.EventRefused && ev.Kind != transfer.EventEnded {
			t.Errorf("got %s", ev.Kind)
		}
		return errors.New(ev.Reason)
	case <-time.After(10 * time.Second):
		t.Fatal("neither refused nor ended")
		return nil
	}
}

func TestRefusedTickets(t *testing.T) {
	p, d := pair(t, "tcp", testLayout())
	cases := map[string]func(*attempt){
		"forged":  func(a *attempt) { a.ticket[len(a.ticket)-1] ^= 1 },
		"altered": func(a *attempt) { a.ticket[60] ^= 1 },
		"cut":     func(a *attempt) { a.ticket = a.ticket[:100] },
		"empty":   func(a *attempt) { a.ticket = nil },
		"expired": func(a *attempt) {
			*a = *newAttempt(p, d, func(t *ticket.Ticket) { t.Deadline = time.Now().Add(-time.Second) })
		},
		"other P":     func(a *attempt) { *a = *newAttempt(p, d, func(t *ticket.Ticket) { t.PEngine = "q" }) },
		"other node":  func(a *attempt) { *a = *newAttempt(p, d, func(t *ticket.Ticket) { t.PNode = "node-x" }) },
		"other DNode": func(a *attempt) { *a = *newAttempt(p, d, func(t *ticket.Ticket) { t.DNode = "node-x" }) },
		"no such D": func(a *attempt) { // waits for it
			*a = *newAttempt(p, d, func(t *ticket.Ticket) { t.DEngine, t.Deadline = "x", time.Now().Add(200*time.Millisecond) })
		},
		"no region":   func(a *attempt) { a.p.region += 100 },
		"block range": func(a *attempt) { a.from[0] = 1 << 20 },
		"more blocks": func(a *attempt) { a.tokens -= 16 },
		"no tokens":   func(a *attempt) { a.tokens = 0 },
		"nobody": func(a *attempt) {
			*a = *newAttempt(p, d, func(t *ticket.Ticket) { t.DNode = "node-c" })
			a.addr = "127.0.0.1:1"
		},
		"no address": func(a *attempt) {
			*a = *newAttempt(p, d, func(t *ticket.Ticket) { t.DNode = "node-c" })
			a.addr = "::"
		},
	}
	region := p.region
	for name, edit := range cases {
		a := newAttempt(p, d)
		edit(a)
		t.Run(name, func(t *testing.T) {
			if err := refusedAt(t, a); err == nil || err.Error() == "" {
				t.Error("no reason")
			} else {
				t.Log(err)
			}
		})
		p.region = region
	}
	a := newAttempt(p, d) // the pair is as good as before
	a.bind()
	if err := p.Revoke(t.Context(), a.pLease, "done"); err != nil {
		t.Error(err)
	}
}

func TestRefusedBindings(t *testing.T) {
	p, d := pair(t, "tcp", testLayout())
	a := newAttempt(p, d)
	if _, err := d.Bind(t.Context(), a.bindReq()); !errors.Is(err, transfer.ErrNotPresented) {
		t.Errorf("before it was presented: %v", err)
	}
	a.bind()
	if _, err := d.Bind(t.Context(), a.bindReq()); err == nil {
		t.Error("a ticket bound twice")
	}
	if err := refusedAt(t, a); err == nil {
		t.Error("a ticket was presented twice")
	}
	if err := d.Revoke(t.Context(), a.dLease, "client left"); err != nil {
		t.Fatal(err)
	}
	d.until(a.nonce, transfer.EventEnded)
	if ev := p.until(a.nonce, transfer.EventEnded); !strings.Contains(ev.Reason, "client left") || ev.State != transfer.LeaseRevoked {
		t.Errorf("P hears %s %q", ev.State, ev.Reason)
	}
	if _, err := d.Bind(t.Context(), a.bindReq()); err == nil {
		t.Error("an ended ticket was bound")
	}
	asMessage := append(a.units(), a.units()...) // too many for an entry of the ring
	if err := p.Push(t.Context(), a.pLease, asMessage, 1); !errors.Is(err, transfer.ErrLeaseEnded) && !errors.Is(err, transfer.ErrUnknownLease) {
		t.Errorf("push after the end: %v", err)
	}
	for name, edit := range map[string]func(*transfer.BindReq){
		"region":     func(r *transfer.BindReq) { r.Regions[0] += 100 },
		"blocks":     func(r *transfer.BindReq) { r.Blocks = r.Blocks[:1] },
		"range":      func(r *transfer.BindReq) { r.Blocks[0] = 1 << 30 },
		"twice":      func(r *transfer.BindReq) { r.Blocks[0] = r.Blocks[1] },
		"odd token":  func(r *transfer.BindReq) { r.FirstToken = 3 },
		"past token": func(r *transfer.BindReq) { r.FirstToken = 1 << 30 },
	} {
		a := newAttempt(p, d)
		if _, err := p.Present(t.Context(), a.presentReq()); err != nil {
			t.Fatal(err)
		}
		d.until(a.nonce, transfer.EventPresented)
		req := a.bindReq()
		edit(&req)
		if _, err := d.Bind(t.Context(), req); err == nil {
			t.Errorf("%s: accepted", name)
		}
		if err := d.Refuse(t.Context(), a.ticket, "no blocks left"); err != nil {
			t.Errorf("%s: refuse: %v", name, err)
		}
		if ev := p.until(a.nonce, transfer.EventRefused); !strings.Contains(ev.Reason, "no blocks left") {
			t.Errorf("%s: refused because of %q", name, ev.Reason)
		}
	}
}

func TestExpiredLease(t *testing.T) {
	p, d := pair(t, "tcp", testLayout())
	a := newAttempt(p, d, func(t *ticket.Ticket) { t.Deadline = time.Now().Add(300 * time.Millisecond) })
	a.bind()
	for _, e := range []*engine{p, d} {
		if ev := e.until(a.nonce, transfer.EventEnded); ev.State != transfer.LeaseExpired {
			t.Errorf("%s: %s because of %q", e.id, ev.State, ev.Reason)
		}
	}
}

// An engine that leaves takes its leases along: the peer hears of it, and the id is free again once all is fenced.
func TestEngineLeaves(t *testing.T) {
	for _, who := range []string{"p", "d"} {
		t.Run(who, func(t *testing.T) {
			a := startNode(t, nodeConfig{NodeID: "node-a", Transport: "tcp"})
			b := startNode(t, nodeConfig{NodeID: "node-b", Transport: "tcp"})
			p, d := newEngine(t, a.Socket, "p", testLayout()), newEngine(t, b.Socket, "d", testLayout())
			at := newAttempt(p, d)
			at.bind()
			leaver, other, socket := p, d, a.Socket
			if who == "d" {
				leaver, other, socket = d, p, b.Socket
			}
			if err := leaver.Close(); err != nil {
				t.Fatal(err)
			}
			other.until(at.nonce, transfer.EventEnded)
			again := attachEngine(t, socket, who, testLayout(), leaver.mem)
			if who == "p" {
				p = again
			} else {
				d = again
			}
			next := newAttempt(p, d)
			next.bind()
			next.push(1)
			p.until(next.nonce, transfer.EventPushed)
		})
	}
}

func TestSameEngineTwice(t *testing.T) {
	r := startNode(t, nodeConfig{NodeID: "node-a", Transport: "shm"})
	newEngine(t, r.Socket, "e", testLayout())
	if _, err := nodeclient.Dial(t.Context(), r.Socket, nodeclient.Options{EngineID: "e"}); !errors.Is(err, transfer.ErrAttached) {
		t.Errorf("second engine of the same id: %v", err)
	}
}

func TestShutdownTellsEngines(t *testing.T) {
	r, stop := runNode(t, nodeConfig{NodeID: "node-a", Transport: "shm"})
	p, d := newEngine(t, r.Socket, "p", testLayout()), newEngine(t, r.Socket, "d", testLayout())
	a := newAttempt(p, d)
	a.bind()
	if err := node.Run(t.Context(), node.Config{NodeID: "other", Socket: r.Socket, ClusterKey: clusterKey}); !contains(err, "another daemon") {
		t.Errorf("second daemon on the socket: %v", err)
	}
	stop()
	for _, e := range []*engine{p, d} {
		e.until(a.nonce, transfer.EventEnded)
		<-e.Done()
		if err := e.Err(); !errors.Is(err, transfer.ErrClosed) || !contains(err, "stopping") {
			t.Errorf("%s: %v", e.id, err)
		}
	}
	if _, err := os.Stat(r.Socket); !os.IsNotExist(err) {
		t.Errorf("socket is left: %v", err)
	}
}

// An engine that reads nothing is disconnected with the reason, and its leases are fenced.
func TestSlowEngineIsDisconnected(t *testing.T) {
	r := startNode(t, nodeConfig{NodeID: "node-a", Transport: "shm", EventFrames: 16})
	c := rawDial(t, r.Socket)
	c.hello("slow", 2, 2)
	c.expect(wire.TypeHelloOK)
	b, err := wire.AppendFrame(nil, 2, 0, 9, wire.Status{})
	if err != nil {
		t.Fatal(err)
	}
	batch := bytes.Repeat(b, 500)
	_ = c.SetWriteDeadline(time.Now().Add(10 * time.Second))
	for { // until the daemon has enough of it
		if _, err := c.Write(batch); err != nil {
			break
		}
	}
	eventually(t, "engine gone from status", func() bool { return !strings.Contains(get(t, r, "/status"), `"slow"`) })
}

func get(t *testing.T, r node.Ready, path string) string {
	t.Helper()
	return do(t, http.MethodGet, r, path)
}

func do(t *testing.T, method string, r node.Ready, path string) string {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, "http://"+r.Admin+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	if res.StatusCode != http.StatusOK {
		return "status " + res.Status + ": " + string(b)
	}
	return string(b)
}

func TestStatusOverSocket(t *testing.T) {
	_, d := pair(t, "tcp", testLayout())
	st, err := d.Status(t.Context())
	if err != nil || st.NodeID != "node-b" || len(st.Engines) != 1 {
		t.Errorf("status over the socket: %+v, %v", st, err)
	}
}

func TestAdminHTTP(t *testing.T) {
	a := startNode(t, nodeConfig{NodeID: "node-a", Transport: "tcp"})
	b := startNode(t, nodeConfig{NodeID: "node-b", Transport: "tcp"})
	p, d := newEngine(t, a.Socket, "p", testLayout()), newEngine(t, b.Socket, "d", testLayout())
	if got := do(t, http.MethodPost, a, "/debug/pause?point=write.frame&after=0"); !strings.Contains(got, "write.frame") {
		t.Errorf("pause: %s", got)
	}
	at := newAttempt(p, d)
	at.bind()
	at.push(1)
	eventually(t, "a writer held", func() bool { return !strings.Contains(get(t, a, "/debug/pauses"), `: 0`) })
	for path, want := range map[string][]string{
		"/healthz": {"ok"},
		"/status":  {`"node_id": "node-a"`, `"engine_id": "p"`, `"state": "bound"`, `"transport": "tcp"`},
		"/metrics": {`headrace_leases{side="source",state="bound"} 1`, "headrace_engines 1", "headrace_regions 1", "headrace_channel_rtt_seconds", "headrace_channel_backlog_bytes"},
	} {
		got := get(t, a, path)
		for _, w := range want {
			if !strings.Contains(got, w) {
				t.Errorf("%s lacks %q:\n%s", path, w, got)
			}
		}
	}
	for path, want := range map[string]string{
		"/debug/pause?point=nowhere": "no pause point", "/debug/pause?point=settle&after=x": "no count", "/debug/rate?bytes_per_s=fast": "must be a number",
		"/debug/rate?" + url.Values{"bytes_per_s": {"1000000"}}.Encode(): `"bytes_per_s": 1000000`,
	} {
		if got := do(t, http.MethodPost, a, path); !strings.Contains(got, want) {
			t.Errorf("%s: %s, want %q", path, got, want)
		}
	}
	do(t, http.MethodPost, a, "/debug/release?point=write.frame")
	p.until(at.nonce, transfer.EventPushed)
	if err := p.Revoke(t.Context(), at.pLease, "done"); err != nil {
		t.Error(err)
	}
	d.until(at.nonce, transfer.EventEnded)
	if got := get(t, a, "/metrics"); !strings.Contains(got, `headrace_leases_ended_total{side="source",state="revoked",transport="tcp"} 1`) || !strings.Contains(got, "headrace_fence_seconds_count") {
		t.Errorf("metrics after the end:\n%s", got)
	}
}

func TestConfigRefused(t *testing.T) {
	dir := t.TempDir()
	ok := nodeConfig{NodeID: "n", Dir: dir, Transport: "shm"}.config(nil)
	for name, edit := range map[string]func(*node.Config){
		"no node id":         func(c *node.Config) { c.NodeID = "" },
		"no socket":          func(c *node.Config) { c.Socket = "" },
		"debug for everyone": func(c *node.Config) { c.Admin = "0.0.0.0:0" },
		"transport":          func(c *node.Config) { c.Transport = "pigeon" },
		"cluster key":        func(c *node.Config) { c.ClusterKey = []byte("short") },
		"admin":              func(c *node.Config) { c.Debug, c.Admin = false, "nowhere:http:x" },
	} {
		c := ok
		edit(&c)
		if err := node.Run(t.Context(), c); err == nil {
			t.Errorf("%s: accepted", name)
		} else {
			t.Logf("%s: %v", name, err)
		}
	}
}

// Opaque blocks arrive as they are, the last one too, which the request fills in part only.
func TestMoveOpaqueKV(t *testing.T) {
	l := transfer.Layout{DType: transfer.BF16, Opaque: true, Layers: 3, Blocks: 32, BlockTokens: 16, Planes: 1, Heads: 2, HeadsTotal: 2, HeadBytes: 128, TPSize: 1,
		LayerStride: 32 * 4096, BlockStride: 4096, PlaneStride: 4096, TokenStride: 256, HeadStride: 128}
	for _, transport := range []string{"tcp", "shm"} {
		t.Run(transport, func(t *testing.T) {
			p, d := pair(t, transport, l)
			pattern(p, 9)
			fill(d.mem.Bytes(), 0xdd)
			a := newAttempt(p, d)
			a.from, a.to, a.tokens, a.first = a.from[:10], a.to[5:15], 149, 16
			a.bind()
			a.push(1)
			if err := p.Handoff(t.Context(), a.pLease, []byte("x")); err != nil {
				t.Fatal(err)
			}
			d.until(a.nonce, transfer.EventSettled)
			sameKV(t, a, 0xdd)
		})
	}
}
