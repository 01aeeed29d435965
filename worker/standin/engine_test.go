package standin

import (
	"context"
	"fmt"
	"net"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/valyala/fasthttp/fasthttputil"

	"github.com/headrace/headrace/internal/openai"
	"github.com/headrace/headrace/worker/api"
)

// small is a table with figures that are easy to reckon with.
func small() Table {
	return Table{
		BlockTokens: 16, Blocks: 64, Context: 1024, BatchTokens: 256, StreamsMax: 8, WaitingMax: 100, BytesPerToken: 1,
		Prefill: []PrefillRow{{0, 0}, {100, 1}}, Decode: []DecodeRow{{1, 0, 0.1}, {2, 0, 0.2}},
		KVBytesPerToken: 1000, TransferBytesPerSecond: 1e6, TransferSetupSeconds: 0.5,
	}
}

func open(t *testing.T, c Config) *Engine {
	t.Helper()
	e, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
		if e.pool.Free() != e.pool.Total() {
			t.Errorf("%d of %d blocks are free in the end", e.pool.Free(), e.pool.Total())
		}
	})
	return e
}

func prompt(n, salt int) []int32 {
	list := make([]int32, n)
	for i := range list {
		list[i] = int32((i*7 + salt) % 1000)
	}
	return list
}

// answer is what a request yielded.
type answer1 struct {
	tokens        []int32
	finish        string
	failed        string
	cached        int
	first, last   time.Duration
	handed, prior bool
	settled       bool
}

func ask(t *testing.T, ctx context.Context, e *Engine, r *api.Request) (a answer1) {
	t.Helper()
	began := time.Now()
	events, err := e.Submit(ctx, r)
	if err != nil {
		t.Errorf("submit: %v", err)
		return a
	}
	for ev := range events {
		a.cached = max(a.cached, ev.CachedTokens)
		switch ev.Kind {
		case api.EventToken:
			if a.last = time.Since(began); len(a.tokens) == 0 {
				a.first = a.last
			}
			a.tokens = append(a.tokens, ev.Token)
			a.finish = ev.Finish
		case api.EventFinish:
			a.finish = ev.Finish
		case api.EventPrior:
			a.tokens, a.prior = slices.Clone(ev.Prior), true
		case api.EventHandoff:
			a.handed = true
		case api.EventSettled:
			a.settled = true
		case api.EventFailed:
			a.failed = ev.Reason
		}
	}
	return a
}

func TestRequestTakesWhatTheTableSays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := open(t, Config{Table: small()})
		a := ask(t, t.Context(), e, &api.Request{Prompt: prompt(400, 0), MaxTokens: 11})
		// 256 tokens in 2.56 s, 144 in 1.44 s, then ten steps of a stream.
		if a.first != 4*time.Second || a.last != 5*time.Second || a.finish != openai.FinishLength || len(a.tokens) != 11 {
			t.Errorf("first token after %v, last after %v, %d tokens, %q", a.first, a.last, len(a.tokens), a.finish)
		}
		// All but the last of the 25 blocks is known now.
		b := ask(t, t.Context(), e, &api.Request{Prompt: prompt(400, 0), MaxTokens: 11})
		if b.cached != 384 || b.first != 160*time.Millisecond || !slices.Equal(a.tokens, b.tokens) {
			t.Errorf("the second time %d cached, first token after %v", b.cached, b.first)
		}
		if st := e.Stats(); st.PrefixHits != 384 || st.PrefixQueries != 800 || st.PromptTokens != 416 || st.GenerationTokens != 22 {
			t.Errorf("counters: %+v", st)
		}
	})
}

func TestManyStreamsShareSteps(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := small()
		table.Blocks, table.StreamsMax, table.WaitingMax = 1<<16, 4000, 4000
		table.Prefill, table.Decode = []PrefillRow{{0, 0}, {1000, 0}}, []DecodeRow{{1, 0, 0.5}, {2, 0, 0.5}}
		e := open(t, Config{Table: table})
		var running sync.WaitGroup
		for i := range 2000 {
			running.Go(func() {
				if a := ask(t, t.Context(), e, &api.Request{Prompt: prompt(3, i), MaxTokens: 5}); len(a.tokens) != 5 || a.last-a.first != 2*time.Second {
					t.Errorf("%d tokens in %v", len(a.tokens), a.last-a.first)
				}
			})
		}
		running.Wait()
	})
}

func TestPreemptedRequestsAreAnsweredAsUndisturbedOnes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := open(t, Config{Table: small()})
		var running sync.WaitGroup
		answers := make([]answer1, 6)
		for i := range answers {
			running.Go(func() { answers[i] = ask(t, t.Context(), e, &api.Request{Prompt: prompt(100, i), MaxTokens: 150}) })
		}
		running.Wait()
		if e.Stats().Preemptions == 0 {
			t.Error("six contexts of 250 tokens fitted into 1,024")
		}
		alone := open(t, Config{Table: small()})
		for i := range answers {
			if want := ask(t, t.Context(), alone, &api.Request{Prompt: prompt(100, i), MaxTokens: 150}); !slices.Equal(answers[i].tokens, want.tokens) {
				t.Errorf("request %d: %d tokens, or others", i, len(answers[i].tokens))
			}
		}
	})
}

func TestAnswersAreAFunctionOfRequestAndSeed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e, other := open(t, Config{Table: small(), Seed: 7}), open(t, Config{Table: small(), Seed: 8})
		base := func() *api.Request { return &api.Request{Prompt: prompt(20, 1), MaxTokens: 12} }
		want := ask(t, t.Context(), e, base()).tokens
		resumed := base()
		resumed.Resume = want[:5]
		if got := ask(t, t.Context(), e, resumed).tokens; !slices.Equal(got, want[5:]) {
			t.Errorf("behind five tokens it goes on with %v, not %v", got, want[5:])
		}
		drawn := base()
		drawn.Sampling.Temperature, drawn.Sampling.Seed = 1, 3
		for name, got := range map[string][]int32{
			"another engine's seed":  ask(t, t.Context(), other, base()).tokens,
			"another request's seed": ask(t, t.Context(), e, drawn).tokens,
			"another choice":         ask(t, t.Context(), e, &api.Request{Prompt: prompt(20, 1), MaxTokens: 12, Choice: 1}).tokens,
			"another prompt":         ask(t, t.Context(), e, &api.Request{Prompt: prompt(20, 2), MaxTokens: 12}).tokens,
		} {
			if slices.Equal(got, want) {
				t.Errorf("%s gives the same", name)
			}
		}
	})
}

func TestAnswersEndByThemselves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := small()
		table.AnswerTokens = 20
		e := open(t, Config{Table: table})
		for i := range 20 {
			a := ask(t, t.Context(), e, &api.Request{Prompt: prompt(20, i), MaxTokens: 500})
			if n := len(a.tokens); n < 10 || n > 30 || a.finish != openai.FinishStop || a.tokens[n-1] != endToken {
				t.Errorf("%d tokens, %q", n, a.finish)
			}
		}
		if a := ask(t, t.Context(), e, &api.Request{Prompt: prompt(20, 0), MaxTokens: 50, IgnoreEOS: true}); len(a.tokens) != 50 {
			t.Errorf("%d tokens past the end", len(a.tokens))
		}
	})
}

// pair makes two engines that reach each other without a network.
func pair(t *testing.T, table Table) (p, d *Engine) {
	ln := fasthttputil.NewInmemoryListener()
	d = open(t, Config{Table: table, Peers: ln})
	p = open(t, Config{Table: table, Dial: func(context.Context, string) (net.Conn, error) { return ln.Dial() }})
	return p, d
}

func legs(n int, tokens []int32, maxTokens int) (p, d *api.Request) {
	ticket := []byte(fmt.Sprint("ticket ", n))
	return &api.Request{Prompt: tokens, MaxTokens: maxTokens, Role: api.RolePrefill, Ticket: ticket, Peer: "d"},
		&api.Request{Prompt: tokens, MaxTokens: maxTokens, Role: api.RoleDecode, Ticket: ticket}
}

func TestPairAnswersAsOneWorkerDoes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, d := pair(t, small())
		want := ask(t, t.Context(), open(t, Config{Table: small()}), &api.Request{Prompt: prompt(200, 0), MaxTokens: 10})
		pr, dr := legs(1, prompt(200, 0), 10)
		var first, rest answer1
		var running sync.WaitGroup
		running.Go(func() { first = ask(t, t.Context(), p, pr) })
		running.Go(func() { rest = ask(t, t.Context(), d, dr) })
		running.Wait()
		if !first.handed || !first.settled || !slices.Equal(first.tokens, want.tokens[:1]) || first.first != 2*time.Second {
			t.Errorf("prefill: %+v", first)
		}
		// 2 s of prefill, 200 KB at 1 MB/s, 0.5 s, nine steps.
		if !rest.prior || !slices.Equal(rest.tokens, want.tokens) || rest.last != 3600*time.Millisecond {
			t.Errorf("decode: %+v, want %v", rest, want.tokens)
		}
		if st := d.Stats(); st.ExternalQueries != 200 || st.ExternalHits != 200 || st.PromptTokens != 0 {
			t.Errorf("decode's counters: %+v", st)
		}
	})
}

func TestTransfersShareALinkAndSkipWhatDecodeHas(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := small()
		table.Prefill = []PrefillRow{{0, 0}, {100, 0}}
		p, d := pair(t, table)
		ask(t, t.Context(), d, &api.Request{Prompt: prompt(200, 0), MaxTokens: 1})
		var running sync.WaitGroup
		took := make([]time.Duration, 2)
		for i := range took {
			pr, dr := legs(i, prompt(200, i*500), 2)
			running.Go(func() { ask(t, t.Context(), p, pr) })
			running.Go(func() { took[i] = ask(t, t.Context(), d, dr).last })
		}
		running.Wait()
		// 8 tokens and 200 tokens on one link, whoever comes first, and a step each or one for both.
		slices.Sort(took)
		if took[1] < 800*time.Millisecond || took[1] > 910*time.Millisecond || took[0] < 608*time.Millisecond || took[0] > took[1] {
			t.Errorf("took %v", took)
		}
	})
}

// TestCancelledRequestsHoldNothing: open looks at the blocks.
func TestCancelledRequestsHoldNothing(t *testing.T) {
	for after := time.Duration(0); after < 5*time.Second; after += 170 * time.Millisecond {
		t.Run(after.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p, d := pair(t, small())
				ctx, cancel := context.WithTimeout(t.Context(), after)
				defer cancel()
				var running sync.WaitGroup
				for i := range 3 {
					pr, dr := legs(i, prompt(100, i), 20)
					running.Go(func() { ask(t, ctx, p, pr) })
					running.Go(func() { ask(t, ctx, d, dr) })
					running.Go(func() { ask(t, ctx, p, &api.Request{Prompt: prompt(50, i+10), MaxTokens: 20}) })
				}
				running.Wait()
				synctest.Wait()
				if len(d.byTicket) != 0 || len(p.active)+len(d.active)+len(p.waiting)+len(d.waiting) != 0 {
					t.Error("something is left")
				}
			})
		})
	}
}

func TestLegsFailWithoutTheirOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, d := pair(t, small())
		pr, dr := legs(1, prompt(40, 0), 5)
		dr.Deadline = time.Now().Add(3 * time.Second)
		if a := ask(t, t.Context(), d, dr); a.failed == "" {
			t.Error("decode waits beyond its deadline")
		}
		pr.Deadline = time.Now().Add(3 * time.Second)
		if a := ask(t, t.Context(), p, pr); a.failed == "" || len(a.tokens) != 1 {
			t.Errorf("prefill: %+v", a)
		}
		pr, dr = legs(2, prompt(40, 0), 5)
		dr.Prompt = prompt(40, 1)
		var running sync.WaitGroup
		ctx, cancel := context.WithCancel(t.Context())
		running.Go(func() { ask(t, ctx, d, dr) })
		if a := ask(t, t.Context(), p, pr); a.failed == "" {
			t.Error("two prompts under one ticket")
		}
		cancel()
		running.Wait()
		lone := open(t, Config{Table: small()})
		_, dr = legs(3, prompt(40, 0), 5)
		if a := ask(t, t.Context(), lone, dr); a.failed == "" {
			t.Error("an engine that nobody reaches decodes for others")
		}
	})
}

func TestLimits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := small()
		table.WaitingMax, table.StreamsMax = 1, 1
		e := open(t, Config{Table: table})
		if _, err := e.Submit(t.Context(), &api.Request{Prompt: prompt(1024, 0)}); err == nil {
			t.Error("a prompt of the whole context is taken")
		}
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		for range 2 {
			events, err := e.Submit(ctx, &api.Request{Prompt: prompt(10, 0), MaxTokens: 5})
			if err != nil {
				t.Fatal(err)
			}
			go func() {
				for range events {
				}
			}()
			synctest.Wait()
		}
		if _, err := e.Submit(ctx, &api.Request{Prompt: prompt(10, 0), MaxTokens: 5}); err != api.ErrBusy {
			t.Errorf("over the queue: %v", err)
		}
		cancel()
		synctest.Wait()
	})
}
