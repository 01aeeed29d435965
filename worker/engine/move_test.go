package engine

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/headrace/headrace/transfer/ticket"
	"github.com/headrace/headrace/worker/api"
	"github.com/headrace/headrace/worker/model"
)

// stepped is a toy that takes each step when it is told to, until it is free.
type stepped struct {
	toy
	door, gate, free chan struct{}
}

func (m *stepped) Forward(c *model.Cache, seqs []*model.Seq, onLayer func(int)) error {
	select {
	case m.door <- struct{}{}:
	case <-m.free:
	}
	select {
	case <-m.gate:
	case <-m.free:
	}
	return m.toy.Forward(c, seqs, onLayer)
}

// mover is a pair whose prefill side decodes a request, a step at a time, that moves to the other.
type mover struct {
	*pair
	t      *testing.T
	steps  *stepped
	prompt []int32
	max    int
	tk     []byte
	cancel context.CancelFunc // of the client at the source
	from   <-chan api.TokenEvent
	tokens []int32          // of the source so far
	told   []api.TokenEvent // by it, but for tokens and phases
}

// newMover has the source's answer at its k-th token, and the loop in front of the next step.
func newMover(t *testing.T, length, k int, change ...func(*Config)) *mover {
	t.Helper()
	m := &mover{t: t, prompt: prompt(uint64(length), length), max: 40,
		steps: &stepped{door: make(chan struct{}), gate: make(chan struct{}), free: make(chan struct{})}}
	change = append(change, nil)
	m.pair = newPair(t, 200, func(c *Config) {
		c.Model = m.steps
		if change[0] != nil {
			change[0](c)
		}
	}, nil)
	t.Cleanup(func() { // before the engine is closed, which waits for the step
		select {
		case <-m.steps.free:
		default:
			close(m.steps.free)
		}
	})
	m.start(k)
	return m
}

// start has the source make k tokens of an answer.
func (m *mover) start(k int) {
	m.t.Helper()
	m.tokens, m.told, m.tk = nil, nil, m.ticket()
	var ctx context.Context
	ctx, m.cancel = context.WithCancel(m.t.Context())
	m.t.Cleanup(m.cancel)
	m.from = m.begin(ctx, "a")
	m.arrive()
	for len(m.tokens) < k {
		m.step()
	}
}

// begin gives the source a request that may move.
func (m *mover) begin(ctx context.Context, id string) <-chan api.TokenEvent {
	m.t.Helper()
	ch, err := m.p.Submit(ctx, &api.Request{ID: id, Prompt: m.prompt, MaxTokens: m.max, Movable: true})
	if err != nil {
		m.t.Fatal(err)
	}
	return ch
}

// beside gives the source one more request, in the course of a step.
func (m *mover) beside(r *api.Request) <-chan api.TokenEvent {
	m.t.Helper()
	taken := make(chan (<-chan api.TokenEvent), 1)
	go func() {
		ch, err := m.p.Submit(m.t.Context(), r)
		if err != nil {
			m.t.Error(err)
		}
		taken <- ch
	}()
	posted(m.p, 1)
	m.step()
	return <-taken
}

func (m *mover) arrive() {
	m.t.Helper()
	select {
	case <-m.steps.door:
	case <-time.After(30 * time.Second):
		m.t.Fatal("the source computes nothing")
	}
}

// last lets the source compute the step that it stands in front of.
func (m *mover) last() {
	m.t.Helper()
	select {
	case m.steps.gate <- struct{}{}:
	case <-time.After(30 * time.Second):
		m.t.Fatal("the source computes nothing")
	}
}

// step does that, and waits for it to come to the next. What it said until then is known behind it.
func (m *mover) step() {
	m.t.Helper()
	m.last()
	m.arrive()
	for {
		select {
		case ev := <-m.from:
			m.note(ev)
		default:
			return
		}
	}
}

func (m *mover) note(ev api.TokenEvent) {
	switch ev.Kind {
	case api.EventToken:
		m.tokens = append(m.tokens, ev.Token)
	case api.EventPhase:
	default:
		m.told = append(m.told, ev)
	}
}

// heir asks the other side for the rest of the answer, as the router does.
func (m *mover) heir(ctx context.Context, resume []int32) <-chan api.TokenEvent {
	m.t.Helper()
	ch, err := m.d.Submit(ctx, m.request(m.prompt, m.max, api.RoleDecode, m.tk, slices.Clone(resume)))
	if err != nil {
		m.t.Fatal(err)
	}
	return ch
}

// ask has the source told of a move, in the course of a step.
func (m *mover) ask(x api.Move) error {
	m.t.Helper()
	told := make(chan error, 1)
	m.p.q.post(func() { told <- m.p.move(x) })
	m.step()
	return <-told
}

// move has the first k tokens moved.
func (m *mover) move(k int) {
	m.t.Helper()
	if err := m.ask(api.Move{ID: "a", Ticket: m.tk, Peer: "hub:1", Tokens: k}); err != nil {
		m.t.Fatal(err)
	}
}

// next has the source hear the daemon's next word.
func (m *mover) next() {
	m.t.Helper()
	posted(m.p, 1)
	m.step()
}

// until has the source hear the daemon's words until it has said something of them.
func (m *mover) until(kind api.EventKind) {
	m.t.Helper()
	for !slices.ContainsFunc(m.told, func(ev api.TokenEvent) bool { return ev.Kind == kind }) {
		m.next()
	}
}

// handOff does that, too: it stops.
func (m *mover) handOff() {
	m.t.Helper()
	posted(m.p, 1)
	m.last()
}

// rest reads the source's answer to its end.
func (m *mover) rest() {
	m.t.Helper()
	timeout := time.After(30 * time.Second)
	for {
		select {
		case ev, ok := <-m.from:
			if !ok {
				return
			}
			m.note(ev)
		case <-timeout:
			m.t.Fatal("no end of the source's answer")
		}
	}
}

// says checks what the source has said besides tokens.
func (m *mover) says(want ...api.EventKind) {
	m.t.Helper()
	var got []api.EventKind
	for _, ev := range m.told {
		got = append(got, ev.Kind)
	}
	if !slices.Equal(got, want) {
		m.t.Errorf("the source says %+v", m.told)
	}
}

// carried moves the request, and checks that the two sides make what one would have made.
func (m *mover) carried() {
	m.t.Helper()
	at := len(m.tokens)
	to := m.heir(m.t.Context(), m.tokens)
	m.move(at)
	m.next()    // bound: it pushes
	m.handOff() // landed
	m.rest()
	m.says(api.EventHandoff, api.EventSettled)
	var prior, rest []int32
	for ev := range to {
		switch ev.Kind {
		case api.EventPrior:
			prior = ev.Prior
		case api.EventToken:
			rest = append(rest, ev.Token)
		case api.EventFailed:
			m.t.Fatalf("prompt of %d, %d tokens: %s", len(m.prompt), at, ev.Reason)
		}
	}
	if all := want(m.prompt, m.max); !slices.Equal(prior, m.tokens) || !slices.Equal(slices.Concat(m.tokens, rest), all) || len(m.tokens) != at+3 {
		m.t.Fatalf("prompt of %d, %d tokens: source %v, prior %v, rest %v, want %v", len(m.prompt), at, m.tokens, prior, rest, all)
	}
	m.idle(m.t)
}

// TestMove moves requests at every place within a block: what both sides make is what one would have made, the other computes nothing
// of what came over, and nobody holds a block in the end.
func TestMove(t *testing.T) {
	for _, length := range []int{1, 3, 4, 13, 32, 57} {
		for _, k := range []int{1, 2, 3, 4, 5, 9} {
			m := newMover(t, length, k)
			m.carried()
			if c := m.d.Snapshot().Counters; c.ExternalHits != uint64(length+k) || c.PromptTokens != 0 {
				t.Fatalf("prompt of %d, %d tokens: %d came over, %d were computed", length, k, c.ExternalHits, c.PromptTokens)
			}
		}
	}
}

// TestMoveOfWhatIsKnown: blocks that the other side has are not sent.
func TestMoveOfWhatIsKnown(t *testing.T) {
	m := newMover(t, 21, 3)
	m.carried()
	before := m.h.copied
	m.start(6)
	m.carried()
	if n := m.h.copied - before; n != toyLayers*((21+6)%toyBlock) {
		t.Errorf("%d tokens were sent in %d layers of what the other side had", n, toyLayers)
	}
}

// TestMoveComesToNothing has each side, and the daemon, let a move down at each of its stages: the source goes on as if nothing had been.
func TestMoveComesToNothing(t *testing.T) {
	const asked, bound, handed = "asked", "bound", "handed off"
	leaves := func(_ *mover, leave context.CancelFunc) { leave() }
	dies := func(m *mover, _ context.CancelFunc) { close(m.h.p.done); close(m.h.p.gone) }
	for _, c := range []struct {
		stage, what string
		fail        func(m *mover, leave context.CancelFunc)
	}{
		{asked, "another prompt there", nil},
		{asked, "its client leaves there", leaves}, {bound, "its client leaves there", leaves}, {handed, "its client leaves there", leaves},
		{asked, "the daemon dies", dies}, {bound, "the daemon dies", dies}, {handed, "the daemon dies", dies},
	} {
		t.Run(c.stage+", "+c.what, func(t *testing.T) {
			m := newMover(t, 21, 3)
			ctx, leave := context.WithCancel(t.Context())
			defer leave()
			m.h.lose = true
			given := slices.Clone(m.tokens)
			if c.fail == nil {
				given[0]++
			}
			m.move(len(m.tokens))
			release := func() {}
			if c.stage == bound { // nothing of the push is done
				hold := make(chan struct{})
				m.h.hold, release = hold, func() { close(hold) }
			}
			to := m.heir(ctx, given)
			switch c.stage {
			case bound:
				m.next()
			case handed:
				m.next()
				m.handOff()
			}
			if c.fail != nil {
				c.fail(m, leave)
			}
			if c.stage != handed { // else it stands still
				m.until(api.EventStays)
			}
			close(m.steps.free)
			m.rest()
			release()
			leave()
			for range to { // to its end
			}
			switch {
			case c.stage == handed, c.stage == asked && len(m.told) > 1: // the other side may have been faster than its client
				m.says(api.EventHandoff, api.EventStays)
			default:
				m.says(api.EventStays)
			}
			if all := want(m.prompt, m.max); !slices.Equal(m.tokens, all) {
				t.Fatalf("got %v, want %v", m.tokens, all)
			}
			m.idle(t)
		})
	}
}

// TestMoveIsNotAwaited: who is to take the request over does not come, and the ticket's deadline passes.
func TestMoveIsNotAwaited(t *testing.T) {
	m := newMover(t, 21, 3)
	m.tk = ticket.Mint([]byte("key"), ticket.Ticket{Nonce: ticket.NewNonce(), PNode: "hub", DNode: "hub", PEngine: "p", DEngine: "d", Deadline: time.Now().Add(time.Millisecond)})
	m.move(len(m.tokens))
	m.next() // the deadline
	close(m.steps.free)
	m.rest()
	m.says(api.EventStays)
	if all := want(m.prompt, m.max); !slices.Equal(m.tokens, all) {
		t.Fatalf("got %v, want %v", m.tokens, all)
	}
	settle(t, m.p, idle)
}

// TestEndsWhileItMoves: the source makes its last token, or its client leaves, with the move at each of its stages.
func TestEndsWhileItMoves(t *testing.T) {
	for _, left := range []bool{false, true} {
		for _, stage := range []string{"asked", "bound", "handed off"} {
			if !left && stage == "handed off" {
				continue // it makes no more tokens
			}
			m := newMover(t, 21, 3)
			m.h.lose = true
			m.move(len(m.tokens))
			var to <-chan api.TokenEvent
			hold := make(chan struct{})
			if stage != "asked" {
				if stage == "bound" {
					m.h.hold = hold
				}
				to = m.heir(t.Context(), m.tokens[:3])
				m.next()
				if stage == "handed off" {
					m.handOff()
				}
			}
			if left {
				m.cancel()
			}
			close(m.steps.free)
			m.rest()
			close(hold)
			if !left && len(m.tokens) != m.max {
				t.Errorf("%s: %d tokens of %d", stage, len(m.tokens), m.max)
			}
			if to != nil {
				if _, last := collect(t, to); last.Kind != api.EventFailed {
					t.Errorf("%s, left %v: the other side says %+v", stage, left, last)
				}
			}
			m.idle(t)
		}
	}
}

// TestMoveIsRefused holds what a source does not begin.
func TestMoveIsRefused(t *testing.T) {
	m := newMover(t, 21, 3)
	m.beside(&api.Request{ID: "plain", Prompt: m.prompt, MaxTokens: 30})
	m.step()
	moving := m.tk
	m.move(2)
	for _, row := range []struct {
		move api.Move
		why  string
	}{
		{api.Move{ID: "b", Ticket: m.ticket(), Tokens: 1}, "no such request"},
		{api.Move{ID: "a", Choice: 1, Ticket: m.ticket(), Tokens: 1}, "no such request"},
		{api.Move{ID: "plain", Ticket: m.ticket(), Tokens: 1}, "no such request"},
		{api.Move{ID: "a", Ticket: m.ticket(), Tokens: 1}, "moves already"},
		{api.Move{ID: "a", Ticket: moving, Tokens: 1}, "moves already"},
		{api.Move{ID: "a", Ticket: []byte("nonsense"), Tokens: 1}, "read the ticket"},
	} {
		if err := m.ask(row.move); err == nil || !strings.Contains(err.Error(), row.why) {
			t.Errorf("%+v: %v, want %q", row.move, err, row.why)
		}
	}
	n := newMover(t, 21, 3)
	if err := n.ask(api.Move{ID: "a", Ticket: n.tk, Tokens: 30}); err == nil || !strings.Contains(err.Error(), "30 tokens are to be moved") {
		t.Errorf("more tokens than there are: %v", err)
	}
}

// TestMovesDoNotFillTheCache: requests on their way cannot be preempted, and must not stand in each other's way for all that.
func TestMovesDoNotFillTheCache(t *testing.T) {
	m := newMover(t, 20, 3, func(c *Config) { c.Cache = toyCache(20) })
	second := m.beside(&api.Request{ID: "b", Prompt: m.prompt, MaxTokens: m.max, Movable: true})
	for range 6 { // the prompt of 20 in steps of 8 tokens at most
		m.step()
	}
	for _, id := range []string{"a", "b"} {
		if err := m.ask(api.Move{ID: id, Ticket: m.ticket(), Peer: "hub:1", Tokens: 1}); err != nil {
			t.Fatal(err)
		}
	}
	close(m.steps.free) // nobody binds, and 2 requests of 60 tokens do not fit into 80
	all := want(m.prompt, m.max)
	tokens, _ := collect(t, second)
	m.rest()
	if !slices.Equal(m.tokens, all) || !slices.Equal(tokens, all) {
		t.Fatalf("the first made %v, the second %v, want %v", m.tokens, tokens, all)
	}
	settle(t, m.p, idle)
}
