package engine

import (
	"context"
	"errors"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/headrace/headrace/worker/api"
	"github.com/headrace/headrace/worker/model"
)

// toy is a model whose next token depends on every KV entry of the context, in every layer: a block that is wrong,
// stale, shared by mistake or in the wrong place changes all that follows.
type toy struct {
	gate chan struct{} // when not nil, each step takes one
}

const (
	toyLayers, toyDim, toyVocab, toyBlock = 2, 2, 97, 4
	toyEnd                                = 96
)

func (m *toy) Forward(c *model.Cache, seqs []*model.Seq, onLayer func(int)) error {
	if m.gate != nil {
		<-m.gate
	}
	for l := range toyLayers {
		for _, s := range seqs {
			for i, t := range s.Tokens {
				pos := s.Pos + i
				k := toyAt(c, l, s.Blocks, pos)
				c.Shards[0].Mem[k] = float32(t)
				c.Shards[0].Mem[k+toyDim*c.BlockTokens] = float32(pos*(l+1)%31 + int(t))
			}
		}
		if onLayer != nil {
			onLayer(l)
		}
	}
	for _, s := range seqs {
		if s.Logits {
			clear(s.Out)
			s.Out[toyNext(c, s.Blocks, s.Pos+len(s.Tokens))] = 1
		}
	}
	return nil
}

func toyAt(c *model.Cache, layer int, blocks []uint32, pos int) int {
	bt := c.BlockTokens
	return ((layer*c.Blocks+int(blocks[pos/bt]))*2*bt + pos%bt) * toyDim
}

func toyNext(c *model.Cache, blocks []uint32, n int) int {
	h := uint64(14695981039346656037)
	for l := range toyLayers {
		for p := range n {
			k := toyAt(c, l, blocks, p)
			h = (h ^ uint64(c.Shards[0].Mem[k])) * 1099511628211
			h = (h ^ uint64(c.Shards[0].Mem[k+toyDim*c.BlockTokens])) * 1099511628211
		}
	}
	return int(h>>20) % (toyVocab - 1)
}

func toyCache(blocks int) *model.Cache { return toyCacheOf(blocks, toyBlock) }

func toyCacheOf(blocks, blockTokens int) *model.Cache {
	return &model.Cache{
		Shards: []model.Shard{{Mem: make([]float32, toyLayers*blocks*2*blockTokens*toyDim), HeadCount: 1}},
		Layers: toyLayers, Blocks: blocks, BlockTokens: blockTokens, KVHeads: 1, HeadDim: toyDim,
	}
}

// want computes the greedy continuation the slow way, alone.
func want(prompt []int32, n int) []int32 {
	blocks := make([]uint32, (len(prompt)+n)/toyBlock+1)
	for i := range blocks {
		blocks[i] = uint32(i)
	}
	c := toyCache(len(blocks))
	s := &model.Seq{Tokens: prompt, Blocks: blocks, Logits: true, Out: make([]float32, toyVocab)}
	var out []int32
	for range n {
		_ = (&toy{}).Forward(c, []*model.Seq{s}, nil)
		next := int32(slices.Index(s.Out, 1))
		out = append(out, next)
		s = &model.Seq{Tokens: []int32{next}, Pos: s.Pos + len(s.Tokens), Blocks: blocks, Logits: true, Out: s.Out}
	}
	return out
}

func newEngine(t *testing.T, blocks int, change func(*Config)) *Engine {
	t.Helper()
	cfg := Config{
		Model: &toy{}, Cache: toyCache(blocks), BatchTokens: 8,
		Info: api.ModelInfo{Context: 4096, Vocab: toyVocab, EndTokens: []int32{toyEnd}},
	}
	if change != nil {
		change(&cfg)
	}
	e, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	return e
}

func prompt(seed uint64, n int) []int32 {
	rnd := rand.New(rand.NewPCG(seed, 1))
	p := make([]int32, n)
	for i := range p {
		p[i] = int32(rnd.IntN(toyVocab - 1))
	}
	return p
}

// collect reads a request to its end.
func collect(t *testing.T, ch <-chan api.TokenEvent) (tokens []int32, last api.TokenEvent) {
	t.Helper()
	timeout := time.After(20 * time.Second)
	for {
		select {
		case ev, ok := <-ch:
			if !ok {
				return tokens, last
			}
			if ev.Kind == api.EventToken {
				tokens = append(tokens, ev.Token)
			}
			if ev.Kind != api.EventPhase {
				last = ev
			}
		case <-timeout:
			t.Fatal("no end of the request within 20 s")
		}
	}
}

// settle waits until the loop has no work and returns its state.
func settle(t *testing.T, e *Engine, ok func(Status) bool) Status {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for {
		seen := make(chan Status, 1)
		e.q.post(func() { e.publish(); seen <- e.Snapshot() })
		st := <-seen
		if ok(st) {
			return st
		}
		if time.Now().After(deadline) {
			t.Fatalf("engine did not settle: %+v", st)
		}
	}
}

func idle(st Status) bool {
	return st.Running == 0 && st.Waiting == 0 && st.Fencing == 0 && st.BlocksFree == st.BlocksTotal
}

func submit(t *testing.T, e *Engine, r *api.Request) <-chan api.TokenEvent {
	t.Helper()
	ch, err := e.Submit(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	return ch
}

func TestWholeRequestsAreIndependentOfCompany(t *testing.T) {
	e := newEngine(t, 300, nil)
	var chans []<-chan api.TokenEvent
	var wants [][]int32
	for i := range 24 {
		p := prompt(uint64(i%9), 1+i*7)
		chans = append(chans, submit(t, e, &api.Request{Prompt: p, MaxTokens: 20 + i}))
		wants = append(wants, want(p, 20+i))
	}
	for i, ch := range chans {
		got, last := collect(t, ch)
		if !slices.Equal(got, wants[i]) || last.Finish != "length" {
			t.Fatalf("request %d: got %v (%+v), want %v", i, got, last, wants[i])
		}
	}
	settle(t, e, idle)
}

func TestPrefixHitsGiveTheSameTokens(t *testing.T) {
	e := newEngine(t, 64, nil)
	p := prompt(1, 61)
	first, _ := collect(t, submit(t, e, &api.Request{Prompt: p, MaxTokens: 9}))
	again, last := collect(t, submit(t, e, &api.Request{Prompt: p, MaxTokens: 9}))
	if !slices.Equal(first, again) || !slices.Equal(first, want(p, 9)) {
		t.Fatalf("first %v, again %v, want %v", first, again, want(p, 9))
	}
	if last.CachedTokens != 60 {
		t.Fatalf("%d cached tokens, want 60", last.CachedTokens)
	}
	whole, last := collect(t, submit(t, e, &api.Request{Prompt: p[:60], MaxTokens: 1}))
	if !slices.Equal(whole, want(p[:60], 1)) || last.CachedTokens != 56 {
		t.Fatalf("a fully cached prompt: got %v with %d cached", whole, last.CachedTokens)
	}
}

// posted waits until n functions wait for the loop, which something holds up.
func posted(e *Engine, n int) {
	for {
		e.q.mu.Lock()
		got := len(e.q.items)
		e.q.mu.Unlock()
		if got >= n {
			return
		}
		runtime.Gosched()
	}
}

func TestPreemptionIsInvisible(t *testing.T) {
	e := newEngine(t, 20, nil)
	held, hold := make(chan struct{}), make(chan struct{})
	e.q.post(func() { close(held); <-hold })
	<-held // the loop stands still until all six are in
	chans := make([]<-chan api.TokenEvent, 6)
	var in sync.WaitGroup
	for i := range chans {
		in.Go(func() {
			chans[i], _ = e.Submit(context.Background(), &api.Request{Prompt: prompt(uint64(i), 9), MaxTokens: 40})
		})
	}
	posted(e, len(chans))
	close(hold)
	in.Wait()
	for i, ch := range chans {
		if got, _ := collect(t, ch); !slices.Equal(got, want(prompt(uint64(i), 9), 40)) {
			t.Fatalf("request %d: %v", i, got)
		}
	}
	if st := settle(t, e, idle); st.Counters.Preemptions == 0 {
		t.Fatal("nothing was preempted: the test proves nothing")
	}
}

func TestReaderThatIsBehindMissesNothing(t *testing.T) {
	e := newEngine(t, 200, nil)
	p := prompt(4, 10)
	ch := submit(t, e, &api.Request{Prompt: p, MaxTokens: 5 * outBuffer})
	settle(t, e, idle) // all is computed before the first event is read
	if got, last := collect(t, ch); !slices.Equal(got, want(p, 5*outBuffer)) || last.Finish != "length" {
		t.Fatalf("got %d tokens, want %d; last %+v", len(got), 5*outBuffer, last)
	}
}

func TestResumeContinuesWhereItStopped(t *testing.T) {
	e := newEngine(t, 64, nil)
	p := prompt(3, 30)
	all := want(p, 25)
	got, _ := collect(t, submit(t, e, &api.Request{Prompt: p, Resume: all[:11], MaxTokens: 25}))
	if !slices.Equal(got, all[11:]) {
		t.Fatalf("resumed %v, want %v", got, all[11:])
	}
}

func TestCancelGivesBlocksBack(t *testing.T) {
	gate := make(chan struct{})
	e := newEngine(t, 64, func(c *Config) { c.Model = &toy{gate: gate} })
	ctx, cancel := context.WithCancel(t.Context())
	ch, err := e.Submit(ctx, &api.Request{Prompt: prompt(1, 30), MaxTokens: 50})
	if err != nil {
		t.Fatal(err)
	}
	gate <- struct{}{} // one step of several
	cancel()
	close(gate)
	collect(t, ch)
	settle(t, e, idle)
}

// TestClientGoneBeforeAdmission: a context may have ended before the loop sees the request, or end in between.
func TestClientGoneBeforeAdmission(t *testing.T) {
	e := newEngine(t, 600, nil)
	var clients sync.WaitGroup
	for i := range 2000 {
		ctx, cancel := context.WithCancel(t.Context())
		if i%2 == 0 {
			cancel()
		} else {
			clients.Go(cancel)
		}
		ch, err := e.Submit(ctx, &api.Request{Prompt: prompt(uint64(i), 20), MaxTokens: 2000})
		if err != nil {
			t.Fatal(err)
		}
		clients.Go(func() {
			for range ch {
			}
		})
	}
	clients.Wait()
	if st := settle(t, e, idle); st.Counters.GenerationTokens > 2000*500 { // of 2000*2000, were they not noticed
		t.Errorf("%d tokens were sampled for clients that had gone", st.Counters.GenerationTokens)
	}
}

func TestRefusals(t *testing.T) {
	e := newEngine(t, 4, func(c *Config) { c.WaitingMax = 1; c.Model = &toy{gate: make(chan struct{})} })
	var tooLong *api.TooLongError
	if _, err := e.Submit(t.Context(), &api.Request{Prompt: prompt(1, 16), MaxTokens: 1}); !errors.As(err, &tooLong) {
		t.Fatalf("a prompt as long as the cache: %v", err)
	}
	if _, err := e.Submit(t.Context(), &api.Request{Prompt: []int32{toyVocab}, MaxTokens: 1}); err == nil {
		t.Fatal("a token outside the vocabulary was taken")
	}
}
