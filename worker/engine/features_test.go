package engine

import (
	"fmt"
	"reflect"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/headrace/headrace/internal/openai"
	"github.com/headrace/headrace/worker/api"
)

// told is what a request said of its tokens.
type told struct {
	tokens   []int32
	logprobs []openai.Logprob
	prompt   []openai.Logprob
	last     api.TokenEvent
}

func listen(t *testing.T, ch <-chan api.TokenEvent) *told {
	t.Helper()
	out := &told{}
	timeout := time.After(20 * time.Second)
	for {
		select {
		case ev, ok := <-ch:
			if !ok {
				return out
			}
			switch ev.Kind {
			case api.EventToken:
				out.tokens = append(out.tokens, ev.Token)
				if ev.Logprob != nil {
					out.logprobs = append(out.logprobs, *ev.Logprob)
				}
			case api.EventPrompt:
				out.prompt = ev.Prompt
			}
			if ev.Kind != api.EventPhase {
				out.last = ev
			}
		case <-timeout:
			t.Fatal("no end of the request within 20 s")
		}
	}
}

func (o *told) equals(t *testing.T, want *told, from int, what string) {
	t.Helper()
	if !slices.Equal(o.tokens, want.tokens[from:]) || !reflect.DeepEqual(o.logprobs, want.logprobs[from:]) {
		t.Fatalf("%s: got %v %+v\nwant %v %+v", what, o.tokens, o.logprobs, want.tokens[from:], want.logprobs[from:])
	}
}

// featured is a request with all that makes a token depend on those before it.
func featured(p []int32, n int) *api.Request {
	return &api.Request{
		Prompt: p, MaxTokens: n, Choice: 2, Logprobs: true, TopLogprobs: 3, IgnoreEOS: true,
		Sampling: api.Sampling{Temperature: 0.7, Seed: 4, Repetition: 1.4, Frequency: 0.9, Presence: -0.5, MinP: 0.01,
			Bias: map[int32]float32{3: 2, 9: -100}},
	}
}

func TestFeaturesDependOnTokensAlone(t *testing.T) {
	p := prompt(3, 37)
	all := listen(t, submit(t, newEngine(t, 300, nil), featured(p, 60)))
	if len(all.tokens) != 60 || len(all.logprobs) != 60 || slices.Contains(all.tokens, 9) {
		t.Fatalf("%+v", all)
	}
	plain := featured(p, 60)
	plain.Sampling.Frequency = 0
	if other := listen(t, submit(t, newEngine(t, 300, nil), plain)); slices.Equal(other.tokens, all.tokens) {
		t.Error("the penalty changes nothing")
	}
	e := newEngine(t, 300, nil)
	for _, k := range []int{1, 2, 30, 59} {
		r := featured(p, 60)
		r.Resume = all.tokens[:k]
		listen(t, submit(t, e, r)).equals(t, all, k, fmt.Sprintf("from token %d", k))
	}

	small := newEngine(t, 40, nil) // three do not fit: they preempt each other
	held, hold := make(chan struct{}), make(chan struct{})
	small.q.post(func() { close(held); <-hold })
	<-held // the loop stands still until all three are in
	var chans [3]<-chan api.TokenEvent
	var in sync.WaitGroup
	for i := range chans {
		in.Go(func() { chans[i], _ = small.Submit(t.Context(), featured(p, 60)) })
	}
	posted(small, len(chans))
	close(hold)
	in.Wait()
	for _, ch := range chans {
		listen(t, ch).equals(t, all, 0, "among others")
	}
	if st := settle(t, small, idle); st.Counters.Preemptions == 0 {
		t.Error("nobody was preempted")
	}

	x := newPair(t, 200, nil)
	for _, k := range []int{0, 3} {
		tk := x.ticket()
		leg := func(role api.Role) *api.Request {
			r := featured(p, 60)
			r.Role, r.Ticket, r.Peer, r.Resume = role, tk, "hub:1", all.tokens[:k]
			return r
		}
		dch := submit(t, x.d, leg(api.RoleDecode))
		one := listen(t, submit(t, x.p, leg(api.RolePrefill)))
		rest := listen(t, dch)
		both := &told{tokens: append(one.tokens, rest.tokens...), logprobs: append(one.logprobs, rest.logprobs...)}
		both.equals(t, all, k, "by a pair")
	}
	x.idle(t)
}

func TestPromptLogprobs(t *testing.T) {
	p := prompt(11, 90) // several chunks
	e := newEngine(t, 300, func(c *Config) { c.BatchTokens = 100 })
	scored := func(role api.Role, max int) *told {
		r := &api.Request{Prompt: p, MaxTokens: max, Logprobs: true, TopLogprobs: 2, PromptLogprobs: true, Role: role}
		return listen(t, submit(t, e, r))
	}
	first := scored(api.RoleWhole, 5)
	if len(first.prompt) != len(p) || !first.prompt[0].Unknown || len(first.tokens) != 5 || !slices.Equal(first.tokens, want(p, 5)) {
		t.Fatalf("%d entries, tokens %v", len(first.prompt), first.tokens)
	}
	for i := 1; i < len(p); i++ {
		r := &api.Request{Prompt: p[:i], MaxTokens: 1, Logprobs: true, TopLogprobs: toyVocab}
		top := listen(t, submit(t, e, r)).logprobs[0].Top
		at := slices.IndexFunc(top, func(l openai.TokenLogprob) bool { return l.Token == p[i] })
		if got := first.prompt[i]; got.TokenLogprob != top[at] || !slices.Equal(got.Top, top[:2]) || got.Unknown {
			t.Fatalf("token %d: got %+v, want %+v", i, got, top[at])
		}
	}
	if again := scored(api.RoleWhole, 5); !reflect.DeepEqual(again.prompt, first.prompt) { // now the prefix cache knows it
		t.Error("the second time differs")
	}
	alone := scored(api.RoleWhole, 0)
	if !reflect.DeepEqual(alone.prompt, first.prompt) || len(alone.tokens) != 0 || alone.last.Kind != api.EventFinish || alone.last.Finish != openai.FinishLength {
		t.Errorf("without an answer: %+v", alone.last)
	}
	settle(t, e, idle)
}
