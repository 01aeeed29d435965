package node_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/headrace/headrace/internal/memfd"
	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/node/nodeclient"
	"github.com/headrace/headrace/transfer/node/wire"
)

// rankLayout is one rank of two of wideLayout's tokens: one head of two a rank.
func rankLayout(rank, ranks uint32) transfer.Layout {
	l := transfer.Layout{DType: transfer.F32, Layers: 2, Blocks: 64, BlockTokens: 16, Planes: 1, Heads: 1, HeadFirst: rank, HeadsTotal: ranks, HeadBytes: 4096,
		TPRank: rank, TPSize: ranks, BlockStride: 1 << 16, PlaneStride: 1 << 16, TokenStride: 4096, HeadStride: 4096}
	l.LayerStride = uint64(l.Blocks) * l.BlockStride
	return l
}

// memberConfig is a rank's process: it lends the memfd that it inherited, and does what its standard input says.
type memberConfig struct {
	Socket, Engine string
	Rank, Ranks    uint32
	Peer           string
	Ticket         []byte // not nil: it is the engine's own connection instead, presents this, and waits for its end
}

func (c memberConfig) id() string { return fmt.Sprintf("%s/%d", c.Engine, c.Rank) }

// memberChild says "lent", and "landed" after each push.
func memberChild(doc string) error {
	var c memberConfig
	if err := json.Unmarshal([]byte(doc), &c); err != nil {
		return err
	}
	ctx, landed := context.Background(), make(chan uint64, 64)
	if c.Ticket != nil {
		return presentAndWait(ctx, &c)
	}
	client, err := nodeclient.Dial(ctx, c.Socket, nodeclient.Options{EngineID: c.id(), OnEvent: func(ev transfer.Event) {
		if ev.Kind == transfer.EventPushed {
			landed <- ev.Seq
		}
	}})
	if err != nil {
		return err
	}
	if err := client.Join(ctx, c.Engine); err != nil {
		return err
	}
	l := rankLayout(c.Rank, c.Ranks)
	const inherited = 3
	if _, err := client.RegisterRegion(ctx, inherited, layoutSize(l), l); err != nil {
		return err
	}
	fmt.Println("lent")
	for seq := uint64(1); ; seq++ {
		var lease transfer.LeaseID
		var first, count uint32
		if _, err := fmt.Scan(&lease, &first, &count); err != nil {
			return nil //nolint:nilerr // told to end
		}
		if err := client.Push(ctx, lease, []transfer.Unit{{Layer: transfer.AllLayers, First: first, Count: count}}, seq); err != nil {
			return err
		}
		if got := <-landed; got != seq {
			return fmt.Errorf("push %d landed, want %d", got, seq)
		}
		fmt.Println("landed")
	}
}

func presentAndWait(ctx context.Context, c *memberConfig) error {
	client, err := nodeclient.Dial(ctx, c.Socket, nodeclient.Options{EngineID: c.Engine})
	if err != nil {
		return err
	}
	lease, err := client.Present(ctx, transfer.PresentReq{Ticket: c.Ticket, Peer: c.Peer, Tokens: 8 * 16, Blocks: []uint32{0, 1}})
	if err != nil {
		return err
	}
	fmt.Println(uint64(lease))
	<-client.Done()
	return nil
}

// ranked is an engine whose ranks are processes. The test holds their memory too.
type ranked struct {
	*engine // of its own connection: it lends nothing
	socket  string
	mems    []*memfd.Memory
	procs   []*child
}

func newRanked(t *testing.T, socket, id string, ranks uint32) *ranked {
	t.Helper()
	r := &ranked{socket: socket}
	r.engine = &engine{t: t, id: id, layout: rankLayout(0, ranks), events: make(map[[16]byte]chan transfer.Event)}
	for rank := range ranks {
		mem, err := memfd.Create(fmt.Sprintf("%s-%d", id, rank), layoutSize(r.layout))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = mem.Close() })
		r.mems = append(r.mems, mem)
		pattern(&engine{mem: mem}, rank+uint32(len(id)))
	}
	r.procs = make([]*child, ranks)
	return r
}

// attach opens the engine's own connection.
func (r *ranked) attach() {
	r.t.Helper()
	c, err := nodeclient.Dial(r.t.Context(), r.socket, nodeclient.Options{EngineID: r.id, OnEvent: r.event})
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { _ = c.Close() })
	r.Client = c
}

func (r *ranked) start(rank uint32) {
	r.t.Helper()
	fd, err := syscall.Dup(r.mems[rank].FD())
	if err != nil {
		r.t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "memfd")
	defer f.Close()
	r.procs[rank] = startChild(r.t, memberEnv, memberConfig{Socket: r.socket, Engine: r.id, Rank: rank, Ranks: r.layout.TPSize}, f)
	if got := string(r.procs[rank].line()); got != "lent\n" {
		r.t.Fatalf("rank %d says %q", rank, got)
	}
}

// push makes a rank push, and waits until it says that it landed.
func (r *ranked) push(rank uint32, lease transfer.LeaseID, first, count int) {
	r.t.Helper()
	fmt.Fprintln(r.procs[rank].stdin, uint64(lease), first, count)
	if got := string(r.procs[rank].line()); got != "landed\n" {
		r.t.Fatalf("rank %d says %q", rank, got)
	}
}

// present and bind name no region: the ranks' are meant.
func rankedAttempt(p, d *ranked) *attempt {
	a := newAttempt(p.engine, d.engine)
	a.from, a.to, a.tokens = a.from[:8], a.to[3:11], 8*16
	return a
}

func (a *attempt) presentRanks(blocks []uint32) error {
	req := a.presentReq()
	req.Regions, req.Blocks = nil, blocks
	var err error
	a.pLease, err = a.p.Present(a.t.Context(), req)
	return err
}

func (a *attempt) bindRanks() error {
	req := a.bindReq()
	req.Regions = nil
	var err error
	a.dLease, err = a.d.Bind(a.t.Context(), req)
	return err
}

// sameRanks compares what every rank of D has with P's.
func sameRanks(t *testing.T, a *attempt, p, d *ranked) {
	t.Helper()
	for rank := range p.mems {
		from, to := &engine{mem: p.mems[rank], layout: p.layout}, &engine{mem: d.mems[rank], layout: d.layout}
		for layer := range p.layout.Layers {
			for i := range a.from {
				if string(block(from, layer, a.from[i])) != string(block(to, layer, a.to[i])) {
					t.Errorf("rank %d, layer %d, block %d of the request arrived altered", rank, layer, i)
				}
			}
		}
	}
}

// Two ranks in processes of their own and an engine's own connection, at both ends: everything comes, and comes again,
// in any order, and each process may die.
func TestRanksInProcesses(t *testing.T) {
	for _, transport := range []string{"tcp", "shm"} {
		t.Run(transport, func(t *testing.T) { testRanksInProcesses(t, transport) })
	}
}

func testRanksInProcesses(t *testing.T, transport string) {
	a := startNode(t, nodeConfig{NodeID: "node-a", Transport: transport})
	b := a
	if transport == "tcp" {
		b = startNode(t, nodeConfig{NodeID: "node-b", Transport: transport})
	}
	p, d := newRanked(t, a.Socket, "p", 2), newRanked(t, b.Socket, "d", 2)
	p.start(1) // before its engine
	p.attach()
	d.attach()
	d.start(0)
	d.start(1)
	at := rankedAttempt(p, d)
	if err := at.presentRanks(at.from[:2]); !errors.Is(err, transfer.ErrRanksMissing) || !strings.Contains(err.Error(), "rank 0 of 2") {
		t.Fatalf("present while rank 0 is missing: %v", err)
	}
	p.start(0)
	moveRanks(t, p, d)

	for rank := range uint32(2) { // a rank of P is killed while a lease is open, then one of D's
		for _, dies := range []*ranked{p, d} {
			at := rankedAttempt(p, d)
			at.bindBoth(t)
			dies.procs[rank].kill()
			for _, e := range []*engine{at.p, at.d} {
				ev := e.until(at.nonce, transfer.EventEnded)
				if want := fmt.Sprintf("%s/%d", dies.id, rank); e.id == dies.id && !strings.Contains(ev.Reason, want) {
					t.Errorf("%s hears %q, want the name of %s", e.id, ev.Reason, want)
				}
			}
			again := rankedAttempt(p, d)
			if dies == p {
				if err := again.presentRanks(nil); !errors.Is(err, transfer.ErrRanksMissing) {
					t.Errorf("present after rank %d died: %v", rank, err)
				}
			}
			dies.start(rank)
			moveRanks(t, p, d)
		}
	}

	controlIsKilled(t, p, d)
	for _, e := range []*ranked{p, d} { // the engine's own connection goes; its ranks stay
		at := rankedAttempt(p, d)
		at.bindBoth(t)
		_ = e.Close()
		if e == p {
			d.until(at.nonce, transfer.EventEnded)
		} else {
			p.until(at.nonce, transfer.EventEnded)
		}
		e.attach()
		moveRanks(t, p, d)
	}
}

// controlIsKilled kills the process of P's own connection while a rank's push is on its way: D's lease ends, P's ranks stay and
// serve the next one.
func controlIsKilled(t *testing.T, p, d *ranked) {
	t.Helper()
	_ = p.Close()
	at := newRemoteAttempt(p.engine, p.Info().NodeID, d.engine)
	control := startChild(t, memberEnv, memberConfig{Socket: p.socket, Engine: p.id, Peer: at.addr, Ticket: at.ticket})
	if _, err := fmt.Sscan(string(control.line()), &at.pLease); err != nil {
		t.Fatal(err)
	}
	d.until(at.nonce, transfer.EventPresented)
	at.to = at.to[:8]
	if err := at.bindRanks(); err != nil {
		t.Fatal(err)
	}
	p.push(0, at.pLease, 0, 2)
	control.kill()
	d.until(at.nonce, transfer.EventEnded)
	p.attach()
	moveRanks(t, p, d)
}

func (a *attempt) bindBoth(t *testing.T) {
	t.Helper()
	if err := a.presentRanks(a.from[:2]); err != nil {
		t.Fatal(err)
	}
	if ev := a.d.until(a.nonce, transfer.EventPresented); len(ev.Layouts) != 2 || ev.Layouts[1].TPRank != 1 {
		t.Errorf("presented: %+v", ev.Layouts)
	}
	if err := a.bindRanks(); err != nil {
		t.Fatal(err)
	}
	a.p.until(a.nonce, transfer.EventBound)
}

// moveRanks moves one request as vLLM does: blocks chunk by chunk, each rank by itself.
func moveRanks(t *testing.T, p, d *ranked) {
	t.Helper()
	at := rankedAttempt(p, d)
	at.bindBoth(t)
	p.push(1, at.pLease, 0, 2)
	p.push(0, at.pLease, 0, 2)
	if err := p.Extend(t.Context(), at.pLease, at.from[2:]); err != nil {
		t.Fatal(err)
	}
	p.push(0, at.pLease, 2, 6)
	if err := p.Handoff(t.Context(), at.pLease, []byte("record")); err != nil {
		t.Fatal(err)
	}
	p.push(1, at.pLease, 2, 6)
	if ev := d.until(at.nonce, transfer.EventSettled); string(ev.Record) != "record" {
		t.Errorf("record %q", ev.Record)
	}
	p.until(at.nonce, transfer.EventSettled)
	sameRanks(t, at, p, d)
}

// rawMember attaches a member from this process.
func rawMember(t *testing.T, socket, engine string, rank uint32) *nodeclient.Client {
	t.Helper()
	c, err := nodeclient.Dial(t.Context(), socket, nodeclient.Options{EngineID: fmt.Sprintf("%s/%d", engine, rank), Messages: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	if err := c.Join(t.Context(), engine); err != nil {
		t.Fatal(err)
	}
	return c
}

func lendRank(t *testing.T, c *nodeclient.Client, l transfer.Layout) transfer.RegionID {
	t.Helper()
	mem, err := memfd.Create("rank", layoutSize(l))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = mem.Close() })
	id, err := c.RegisterRegion(t.Context(), mem.FD(), mem.Size(), l)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// What members may not do is refused with the reason.
func TestMembersAreRefused(t *testing.T) {
	r := startNode(t, nodeConfig{NodeID: "node-a", Transport: "shm"})
	p, d := newRanked(t, r.Socket, "p", 2), newEngine(t, r.Socket, "d", wideLayout())
	p.attach()
	at := newAttempt(p.engine, d)
	if err := at.presentRanks(nil); !errors.Is(err, transfer.ErrRanksMissing) || !strings.Contains(err.Error(), "no member") {
		t.Errorf("present without any member: %v", err)
	}
	zero, one := rawMember(t, r.Socket, "p", 0), rawMember(t, r.Socket, "p", 1)
	if err := d.Join(t.Context(), "p"); !contains(err, "before lending memory") {
		t.Errorf("an engine that lends joins: %v", err)
	}
	if err := zero.Join(t.Context(), "d"); !contains(err, `member of "p" already`) {
		t.Errorf("join twice: %v", err)
	}
	other, err := nodeclient.Dial(t.Context(), r.Socket, nodeclient.Options{EngineID: "other"})
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	for engine, why := range map[string]string{"other": "another engine's id", "p/0": `"p/0" is a member of "p" itself`} {
		if err := other.Join(t.Context(), engine); !contains(err, why) {
			t.Errorf("join %s: %v", engine, err)
		}
	}
	if _, err := zero.Present(t.Context(), at.presentReq()); !errors.Is(err, &wire.Error{Code: wire.CodeState}) || !contains(err, "lends memory and pushes") {
		t.Errorf("a member presents: %v", err)
	}
	first := lendRank(t, zero, rankLayout(0, 2))
	twice := lendRank(t, one, rankLayout(0, 2))
	if err := at.presentRanks(nil); !errors.Is(err, transfer.ErrPlan) || !contains(err, "rank 0 is lent twice") {
		t.Errorf("present with a rank lent twice: %v", err)
	}
	if err := one.RemoveRegion(t.Context(), twice); err != nil {
		t.Fatal(err)
	}
	lendRank(t, one, rankLayout(1, 2))
	at.from, at.tokens = at.from[:4], 64
	if err := at.presentRanks(at.from); err != nil {
		t.Fatal(err)
	}
	unit := []transfer.Unit{{Count: 4}}
	stranger := rawMember(t, r.Socket, "q", 0)
	if err := stranger.Push(t.Context(), at.pLease, unit, 1); !errors.Is(err, transfer.ErrUnknownLease) || !contains(err, `"q" is not attached`) {
		t.Errorf("a member of nobody pushes: %v", err)
	}
	spare := rawMember(t, r.Socket, "p", 7)
	if err := spare.Push(t.Context(), at.pLease, unit, 1); !errors.Is(err, transfer.ErrInvalid) || !contains(err, `is of "p/7"`) {
		t.Errorf("a member without a region pushes: %v", err)
	}
	if err := one.Push(t.Context(), at.pLease, []transfer.Unit{{Count: 4, Shard: 1}}, 1); !contains(err, "pushes from its own") {
		t.Errorf("a member names a region: %v", err)
	}
	if err := zero.RemoveRegion(t.Context(), first); err != nil { // ends the lease
		t.Fatal(err)
	}
	p.until(at.nonce, transfer.EventEnded)
	if err := one.Push(t.Context(), at.pLease, unit, 2); !errors.Is(err, transfer.ErrUnknownLease) && !errors.Is(err, transfer.ErrLeaseEnded) {
		t.Errorf("a push after the lease's end: %v", err)
	}
	lendRank(t, zero, rankLayout(0, 2))
	last := newAttempt(p.engine, d)
	if err := last.presentRanks(nil); err != nil {
		t.Fatal(err)
	}
	if err := one.Revoke(t.Context(), last.pLease, "rank 1 gives up"); err != nil {
		t.Fatal(err)
	}
	if ev := p.until(last.nonce, transfer.EventEnded); ev.Reason != "rank 1 gives up" {
		t.Errorf("the engine hears %q", ev.Reason)
	}
}

// What an engine says of itself is in the status, as it said it.
func TestDescribe(t *testing.T) {
	r := startNode(t, nodeConfig{NodeID: "node-a", Transport: "shm"})
	e := newEngine(t, r.Socket, "e", testLayout())
	rawMember(t, r.Socket, "e", 0)
	for _, bad := range []any{"text", 7, []int{1}, nil, map[string]string{"long": strings.Repeat("x", wire.MaxAbout)}} {
		if err := e.Describe(t.Context(), bad); err == nil {
			t.Errorf("%.20v passes for a description", bad)
		}
	}
	for _, model := range []string{"first", "tiny"} { // the last one counts
		if err := e.Describe(t.Context(), map[string]any{"engine": "vllm", "model": model, "block_tokens": 32}); err != nil {
			t.Fatal(err)
		}
	}
	st := statusOf(t, r.Admin)
	var about struct {
		Model       string
		BlockTokens int `json:"block_tokens"`
	}
	if len(st.Engines) != 2 || json.Unmarshal(st.Engines[0].About, &about) != nil || about.Model != "tiny" || about.BlockTokens != 32 {
		t.Errorf("status says %s", st.Engines[0].About)
	}
	if text := get(t, r, "/metrics"); !strings.Contains(text, "headrace_engines 1\n") || !strings.Contains(text, "headrace_tickets_waiting 0\n") {
		t.Errorf("a rank counts as an engine:\n%s", text)
	}
	if m := st.Engines[1]; m.EngineID != "e/0" || m.MemberOf != "e" || m.About != nil {
		t.Errorf("the member is shown as %+v", m)
	}
}
