package engine

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/ticket"
	"github.com/headrace/headrace/worker/api"
	"github.com/headrace/headrace/worker/model"
)

// hub is a daemon for two engines that copies in memory at once. It is here for what the real one will not do on
// demand: hold an answer, refuse, vanish. The real daemon is tried in package node and end to end.
type hub struct {
	mu     sync.Mutex
	leases map[nonce]*hubLease
	hold   chan struct{} // when not nil, pushes wait for it
	lose   bool          // records do not arrive
	d, p   *hubEnd
	copied int // tokens times layers
}

type hubLease struct {
	nonce    nonce
	src, dst []uint32
	tokens   int
	first    int             // token
	landed   map[[2]int]bool // layer and token
	record   []byte
	ended    bool
}

type hubEnd struct {
	h       *hub
	prefill bool
	cache   *model.Cache
	onEvent func(transfer.Event)
	done    chan struct{}
	gone    chan struct{}

	draining chan struct{}

	closeOnce sync.Once
	closed    chan struct{}
}

func (x *hubEnd) NodeID() string        { return "hub" }
func (x *hubEnd) Epoch() uint64         { return 1 }
func (x *hubEnd) Done() <-chan struct{} { return x.done }

func (x *hubEnd) Draining() <-chan struct{} { return x.draining }
func (x *hubEnd) Err() error                { return errors.New("killed by the test") }
func (x *hubEnd) Close() error {
	x.closeOnce.Do(func() { close(x.closed) })
	return nil
}

func (x *hubEnd) PeerGone(ctx context.Context) error {
	select {
	case <-x.closed:
		return errors.New("client is closed")
	case <-x.gone:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

var errGone = errors.New("daemon is gone")

func (x *hubEnd) dead() bool {
	select {
	case <-x.done:
		return true
	default:
		return false
	}
}

func (x *hubEnd) Present(_ context.Context, r transfer.PresentReq) (transfer.LeaseID, error) {
	if x.dead() {
		return 0, errGone
	}
	tk, _ := ticket.Decode(r.Ticket)
	x.h.mu.Lock()
	defer x.h.mu.Unlock()
	if l := x.h.leases[tk.Nonce]; l != nil {
		x.onEvent(transfer.Event{Kind: transfer.EventRefused, Nonce: tk.Nonce, Reason: "revoked before it was presented"})
		return 1, nil
	}
	x.h.leases[tk.Nonce] = &hubLease{nonce: tk.Nonce, src: r.Blocks, tokens: int(r.Tokens), landed: map[[2]int]bool{}}
	x.h.d.onEvent(transfer.Event{Kind: transfer.EventPresented, Nonce: tk.Nonce, Tokens: r.Tokens, Meta: r.Meta})
	return 1, nil
}

func (x *hubEnd) Bind(_ context.Context, r transfer.BindReq) (transfer.LeaseID, error) {
	if x.dead() {
		return 0, errGone
	}
	tk, _ := ticket.Decode(r.Ticket)
	x.h.mu.Lock()
	defer x.h.mu.Unlock()
	l := x.h.leases[tk.Nonce]
	if l == nil || l.ended {
		return 0, transfer.ErrLeaseEnded
	}
	l.dst, l.first = r.Blocks, int(r.FirstToken)
	x.h.p.onEvent(transfer.Event{Kind: transfer.EventBound, Nonce: tk.Nonce, FirstToken: r.FirstToken, Lease: 1})
	return 1, nil
}

// only finds the single living lease: the tests with several requests at once give each push its lease by blocks.
func (h *hub) byID() []*hubLease {
	var out []*hubLease
	for _, l := range h.leases {
		if !l.ended && l.dst != nil {
			out = append(out, l)
		}
	}
	return out
}

func (x *hubEnd) Push(_ context.Context, _ transfer.LeaseID, units []transfer.Unit, seq uint64) error {
	if x.dead() {
		return errGone
	}
	if x.h.hold != nil {
		<-x.h.hold
	}
	x.h.mu.Lock()
	defer x.h.mu.Unlock()
	for _, l := range x.h.byID() {
		for _, u := range units {
			x.h.copyUnit(l, u)
		}
		if seq != 0 {
			x.onEvent(transfer.Event{Kind: transfer.EventPushed, Nonce: l.nonce, Seq: seq})
		}
		x.h.trySettle(l)
	}
	return nil
}

// copyUnit copies the wanted tokens of some blocks, whatever the block sizes of the two ends.
func (h *hub) copyUnit(l *hubLease, u transfer.Unit) {
	p, d := h.p.cache, h.d.cache
	for tok := max(int(u.First)*p.BlockTokens, l.first); tok < min(int(u.First+u.Count)*p.BlockTokens, l.tokens); tok++ {
		from, to := toyAt(p, int(u.Layer), l.src, tok), toyAt(d, int(u.Layer), l.dst, tok)
		for plane := range 2 {
			copy(d.Shards[0].Mem[to+plane*toyDim*d.BlockTokens:][:toyDim], p.Shards[0].Mem[from+plane*toyDim*p.BlockTokens:][:toyDim])
		}
		l.landed[[2]int{int(u.Layer), tok}] = true
		h.copied++
	}
}

func (x *hubEnd) Handoff(_ context.Context, _ transfer.LeaseID, record []byte) error {
	if x.dead() {
		return errGone
	}
	x.h.mu.Lock()
	defer x.h.mu.Unlock()
	for _, l := range x.h.byID() {
		if x.h.lose {
			continue
		}
		l.record = record
		x.h.trySettle(l)
	}
	return nil
}

func (h *hub) trySettle(l *hubLease) {
	if l.record == nil || len(l.landed) != toyLayers*(l.tokens-l.first) {
		return
	}
	l.ended = true
	for n, x := range h.leases {
		if x == l {
			h.d.onEvent(transfer.Event{Kind: transfer.EventSettled, Nonce: n, Record: l.record})
			h.p.onEvent(transfer.Event{Kind: transfer.EventSettled, Nonce: n})
		}
	}
}

func (x *hubEnd) Refuse(_ context.Context, t []byte, reason string) error {
	tk, _ := ticket.Decode(t)
	return x.RevokeTicket(context.Background(), tk.Nonce, reason)
}

func (x *hubEnd) RevokeTicket(_ context.Context, n [16]byte, reason string) error {
	if x.dead() {
		return errGone
	}
	x.h.mu.Lock()
	defer x.h.mu.Unlock()
	l := x.h.leases[n]
	if l == nil {
		x.h.leases[n] = &hubLease{ended: true}
		return nil
	}
	if l.ended {
		return transfer.ErrLeaseEnded
	}
	l.ended = true
	for _, end := range []*hubEnd{x.h.p, x.h.d} {
		end.onEvent(transfer.Event{Kind: transfer.EventEnded, Nonce: n, Reason: reason})
	}
	return nil
}

// pair is a prefill and a decode engine with a hub between them.
type pair struct {
	h    *hub
	p, d *Engine
}

func newPair(t *testing.T, blocks int, change ...func(*Config)) *pair {
	t.Helper()
	change = append(change, nil, nil) // of P and of D
	x := &pair{h: &hub{leases: map[nonce]*hubLease{}}}
	x.p, x.d = newEngine(t, blocks, change[0]), newEngine(t, blocks, change[1])
	x.h.p = &hubEnd{h: x.h, prefill: true, cache: x.p.cfg.Cache, done: make(chan struct{}), gone: make(chan struct{}), closed: make(chan struct{})}
	x.h.d = &hubEnd{h: x.h, cache: x.d.cfg.Cache, done: make(chan struct{}), gone: make(chan struct{}), closed: make(chan struct{})}
	for e, end := range map[*Engine]*hubEnd{x.p: x.h.p, x.d: x.h.d} {
		ctx, cancel := context.WithCancel(context.Background())
		up, ended := make(chan struct{}, 4), make(chan struct{})
		first := true
		go func() {
			defer close(ended)
			e.Link().Run(ctx, func(_ context.Context, onEvent func(transfer.Event)) (Daemon, []transfer.RegionID, error) {
				if !first {
					return nil, nil, errGone
				}
				first = false
				end.onEvent = onEvent
				return end, []transfer.RegionID{1}, nil
			}, func(Daemon) { up <- struct{}{} })
		}()
		<-up
		t.Cleanup(func() { cancel(); <-ended })
	}
	return x
}

func (x *pair) ticket() []byte {
	return ticket.Mint([]byte("key"), ticket.Ticket{
		Nonce: ticket.NewNonce(), PNode: "hub", DNode: "hub", PEngine: "p", DEngine: "d",
		Deadline: time.Now().Add(time.Minute),
	})
}

func (x *pair) request(p []int32, n int, role api.Role, tk []byte, resume []int32) *api.Request {
	return &api.Request{Prompt: p, MaxTokens: n, Role: role, Ticket: tk, Peer: "hub:1", Resume: resume}
}

func (x *pair) idle(t *testing.T) {
	t.Helper()
	settle(t, x.p, idle)
	settle(t, x.d, idle)
}

func TestDisaggregatedEqualsWhole(t *testing.T) {
	x := newPair(t, 200, nil)
	for i, n := range []int{1, 2, 3, 4, 5, 7, 8, 9, 31, 32, 33, 100, 333, 100, 333} {
		p := prompt(uint64(n), n)
		all := want(p, 12)
		resume := all[:i%4]
		tk := x.ticket()
		dch := submit(t, x.d, x.request(p, 12, api.RoleDecode, tk, resume))
		pch := submit(t, x.p, x.request(p, 12, api.RolePrefill, tk, resume))
		one, last := collect(t, pch)
		if last.Kind != api.EventSettled {
			t.Fatalf("prompt of %d: prefill ended with %+v", n, last)
		}
		rest, _ := collect(t, dch)
		if got := slices.Concat(resume, one, rest); !slices.Equal(got, all) {
			t.Fatalf("prompt of %d, resume %d: got %v, want %v", n, len(resume), got, all)
		}
	}
	x.idle(t)
	if st := x.d.Snapshot(); st.Counters.ExternalHits == 0 || st.Counters.PrefixHits == 0 {
		t.Fatalf("nothing came over the transfer, or nothing was found in D's cache: %+v", st)
	}
}

// Each side counts in blocks of its own: P pushes whole ones of its size, D knows prefixes in its own.
func TestDisaggregatedWithOtherBlockSizes(t *testing.T) {
	for _, bt := range [][2]int{{16, 4}, {4, 16}, {3, 8}, {32, 1}, {5, 7}} {
		x := newPair(t, 200, func(c *Config) { c.Cache = toyCacheOf(800/bt[0], bt[0]) }, func(c *Config) { c.Cache = toyCacheOf(800/bt[1], bt[1]) })
		known := prompt(77, 90)
		whole, _ := collect(t, submit(t, x.d, &api.Request{Prompt: known, MaxTokens: 2}))
		if !slices.Equal(whole, want(known, 2)) {
			t.Fatalf("blocks of %v: whole at D: %v", bt, whole)
		}
		for i, n := range []int{1, 3, 4, 5, 16, 17, 50, 90, 91, 120, 91, 200} {
			p := prompt(uint64(n), n)
			if i%2 == 1 { // D knows some of it
				p = append(slices.Clone(known[:min(n-1, 85)]), prompt(uint64(i), n-min(n-1, 85))...)
			}
			tk := x.ticket()
			dch := submit(t, x.d, x.request(p, 6, api.RoleDecode, tk, nil))
			pch := submit(t, x.p, x.request(p, 6, api.RolePrefill, tk, nil))
			one, last := collect(t, pch)
			if last.Kind != api.EventSettled {
				t.Fatalf("blocks of %v, prompt of %d: prefill ended with %+v", bt, n, last)
			}
			rest, _ := collect(t, dch)
			if got, all := slices.Concat(one, rest), want(p, 6); !slices.Equal(got, all) {
				t.Fatalf("blocks of %v, prompt of %d: got %v, want %v", bt, n, got, all)
			}
		}
		x.idle(t)
		if st := x.d.Snapshot(); st.Counters.PrefixHits == 0 || st.Counters.ExternalHits == 0 {
			t.Fatalf("blocks of %v: nothing came over the transfer, or nothing was found in D's cache: %+v", bt, st.Counters)
		}
	}
}

func TestPresentedBeforeAndAfterTheRequestArrives(t *testing.T) {
	x := newPair(t, 64, nil)
	p := prompt(5, 21)
	tk := x.ticket()
	pch := submit(t, x.p, x.request(p, 6, api.RolePrefill, tk, nil))
	for ev := range pch {
		if ev.Kind == api.EventHandoff {
			break // all is computed and D has never heard of the request
		}
	}
	dch := submit(t, x.d, x.request(p, 6, api.RoleDecode, tk, nil))
	if _, last := collect(t, pch); last.Kind != api.EventSettled {
		t.Fatalf("prefill ended with %+v", last)
	}
	if rest, _ := collect(t, dch); !slices.Equal(rest, want(p, 6)[1:]) {
		t.Fatalf("decode gave %v", rest)
	}
	x.idle(t)
}

func TestCancelOnEitherSideFreesBoth(t *testing.T) {
	for _, side := range []string{"prefill", "decode"} {
		x := newPair(t, 64, nil)
		x.h.hold = make(chan struct{})
		p := prompt(6, 40)
		tk := x.ticket()
		pctx, pcancel := context.WithCancel(t.Context())
		dctx, dcancel := context.WithCancel(t.Context())
		dch, _ := x.d.Submit(dctx, x.request(p, 6, api.RoleDecode, tk, nil))
		pch, _ := x.p.Submit(pctx, x.request(p, 6, api.RolePrefill, tk, nil))
		for ev := range pch {
			if ev.Phase == api.PhaseBound {
				break
			}
		}
		if side == "prefill" {
			pcancel()
		} else {
			dcancel()
		}
		close(x.h.hold)
		collect(t, pch)
		collect(t, dch)
		x.idle(t)
		pcancel()
		dcancel()
	}
}

func TestWrongPromptIsRefused(t *testing.T) {
	x := newPair(t, 64, nil)
	tk := x.ticket()
	dch := submit(t, x.d, x.request(prompt(7, 20), 6, api.RoleDecode, tk, nil))
	pch := submit(t, x.p, x.request(prompt(8, 20), 6, api.RolePrefill, tk, nil))
	if _, last := collect(t, dch); last.Kind != api.EventFailed {
		t.Fatalf("decode took another prompt's KV: %+v", last)
	}
	if _, last := collect(t, pch); last.Kind != api.EventFailed {
		t.Fatalf("prefill ended with %+v", last)
	}
	x.idle(t)
}

func TestDaemonDeathQuarantinesUntilItsProcessIsGone(t *testing.T) {
	x := newPair(t, 64, nil)
	x.h.hold = make(chan struct{})
	p := prompt(9, 40)
	tk := x.ticket()
	dch := submit(t, x.d, x.request(p, 6, api.RoleDecode, tk, nil))
	pch := submit(t, x.p, x.request(p, 6, api.RolePrefill, tk, nil))
	for ev := range pch {
		if ev.Phase == api.PhaseBound {
			break
		}
	}
	close(x.h.d.done)
	if _, last := collect(t, dch); last.Kind != api.EventFailed {
		t.Fatalf("decode ended with %+v", last)
	}
	st := settle(t, x.d, func(st Status) bool { return st.BlocksQuarantined > 0 })
	if st.BlocksFree+st.BlocksQuarantined != st.BlocksTotal {
		t.Fatalf("%+v", st)
	}
	whole, _ := collect(t, submit(t, x.d, &api.Request{Prompt: p, MaxTokens: 6}))
	if !slices.Equal(whole, want(p, 6)) {
		t.Fatalf("whole request beside quarantined blocks: %v", whole)
	}
	if st := settle(t, x.d, func(Status) bool { return true }); st.BlocksQuarantined == 0 {
		t.Fatal("blocks left quarantine while the daemon's process lived")
	}
	close(x.h.d.gone)
	settle(t, x.d, idle)
	close(x.h.hold)
}

func TestFinishedButUnboundIsDroppedWhenTheCacheIsFull(t *testing.T) {
	x := newPair(t, 24, nil)
	var chans []<-chan api.TokenEvent
	for i := range 3 { // 3 x 10 blocks do not fit 24, and no one ever binds
		chans = append(chans, submit(t, x.p, x.request(prompt(uint64(i), 40), 6, api.RolePrefill, x.ticket(), nil)))
	}
	if _, last := collect(t, chans[0]); last.Kind != api.EventFailed {
		t.Fatalf("the oldest ended with %+v", last)
	}
}
