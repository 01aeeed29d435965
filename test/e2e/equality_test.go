package e2e

import (
	"fmt"
	"strings"
	"sync"
	"testing"
)

// lengths of the prompts: block borders, chunk borders, and what lies between.
var lengths = []int{
	1, 2, 3, 5, 8, 13, 15, 16, 17, 24, 31, 32, 33, 47, 48, 49, 63, 64, 65, 80, 96, 100, 111, 127, 128, 129, 150, 160,
	191, 192, 200, 255, 256, 257, 300, 320, 383, 400, 448, 511, 512, 513, 600, 640, 700, 768, 800, 900, 1000, 1023, 1024,
	1025, 1200, 1500, 1777, 2000,
}

// sampled gives a request one of three ways to pick tokens.
func sampled(r request, i int) request {
	r.Seed = uint64(1000 + i)
	switch i % 3 {
	case 1:
		r.Temperature, r.TopP, r.TopK = 0.8, 0.95, 40
	case 2:
		r.Temperature = 1.3
	}
	return r
}

// mixed is request i of a set: its length, way of sampling and way of answering vary.
func mixed(seed uint64, i int) request {
	r := request{Prompt: seededPrompt(seed+uint64(i), lengths[i%len(lengths)]), MaxTokens: 12 + i*11%190}
	r.Stream = i%2 == 0
	return sampled(r, i)
}

// TestEquality: what prefill + transfer + decode give through the router is what the same engine gives run whole.
func TestEquality(t *testing.T) {
	needAll(t)
	for _, nodes := range []int{1, 2} {
		t.Run(fmt.Sprintf("%d nodes", nodes), func(t *testing.T) {
			c := start(t, options{nodes: nodes})
			o := oracleFor(t, tinyModel(t))
			t.Run("one by one", func(t *testing.T) { oneByOne(t, c, o) })
			t.Run("chat", func(t *testing.T) { chats(t, c, o) })
			t.Run("16 at once", func(t *testing.T) { sixteenAtOnce(t, c, o) })
			t.Run("prefix hits", func(t *testing.T) { prefixHits(t, c, o) })
			t.Run("one side knows the prefix", func(t *testing.T) { oneSideKnows(t, c, o) })
			t.Run("conversation", func(t *testing.T) { conversation(t, c, o) })
			t.Run("prefix hits, 16 at once", func(t *testing.T) { prefixHitsAtOnce(t, c, o) })
			c.transport(map[int]string{1: "shm", 2: "tcp"}[nodes])
		})
	}
	t.Run("1 node, tcp to itself", func(t *testing.T) {
		c := start(t, options{args: []string{"--transport", "tcp"}})
		o := oracleFor(t, tinyModel(t))
		t.Run("16 at once", func(t *testing.T) { sixteenAtOnce(t, c, o) })
		t.Run("prefix hits", func(t *testing.T) { prefixHits(t, c, o) })
		c.transport("tcp")
	})
	t.Run("2 prefill and 3 decode workers", func(t *testing.T) {
		c := start(t, options{nodes: 2, args: []string{"--prefill", "2", "--decode", "3"}})
		o := oracleFor(t, tinyModel(t))
		t.Run("16 at once", func(t *testing.T) { sixteenAtOnce(t, c, o) })
		t.Run("prefix hits, 16 at once", func(t *testing.T) { prefixHitsAtOnce(t, c, o) })
		for _, w := range c.view().Workers {
			if st, err := (worker{w}).status(); err != nil || st.Counters.GenerationTokens == 0 {
				t.Errorf("worker %s had nothing to do: %+v %v", w.ID, st, err)
			}
		}
	})
}

// transport checks that KV went the way that was meant.
func (c *cluster) transport(want string) {
	c.t.Helper()
	n := c.nodeOf(c.prefill())
	st, err := n.status()
	if err != nil {
		c.t.Fatal(err)
	}
	for _, ch := range st.Channels {
		if ch.Transport == want && ch.BytesSent > 0 {
			return
		}
	}
	c.t.Errorf("no bytes went over %s: channels %+v", want, st.Channels)
}

func oneByOne(t *testing.T, c *cluster, o *oracle) {
	c.in(t)
	perToken := uint64(0)
	for i := range lengths {
		r := mixed(10_000, i)
		want := o.want(t, r)
		settledBefore, before := c.moved()
		a := ask(c.url(), r)
		mustEqual(t, a, want, fmt.Sprintf("prompt of %d tokens, request %+v", len(r.Prompt), brief(r)))
		c.blocksBack(waitShort, "after an answer") // so that the lease is settled at both ends
		settled, after := c.moved()
		if settled == settledBefore {
			t.Fatalf("prompt of %d tokens: no lease settled: it was not disaggregated", len(r.Prompt))
		}
		if i == 0 {
			perToken = after - before
		}
		if got, want := after-before, perToken*uint64(len(r.Prompt)); got != want || got == 0 {
			t.Fatalf("prompt of %d tokens: %d bytes of KV landed, want %d", len(r.Prompt), got, want)
		}
	}
	t.Logf("%d prompts of 1 to %d tokens are equal, %d bytes of KV a token", len(lengths), lengths[len(lengths)-1], perToken)
}

// brief is a request without its tokens.
func brief(r request) string {
	return fmt.Sprintf("%s max_tokens=%d temperature=%g top_p=%g top_k=%d seed=%d stream=%v", r.path(), r.MaxTokens, r.Temperature, r.TopP, r.TopK, r.Seed, r.Stream)
}

func chats(t *testing.T, c *cluster, o *oracle) {
	c.in(t)
	for i := range 12 {
		text := strings.Repeat(fmt.Sprintf("Water falls down race %d. ", i), 1+i*3)
		r := sampled(request{Chat: text, MaxTokens: 10 + i, Stream: i%2 == 0, MayEnd: i%3 == 0}, i)
		mustEqual(t, ask(c.url(), r), o.want(t, r), fmt.Sprintf("chat %d", i))
	}
}

// atOnce runs f for 0 to n-1, so many at a time.
func atOnce(n, width int, f func(i int)) {
	var wg sync.WaitGroup
	next := make(chan int)
	for range width {
		wg.Go(func() {
			for i := range next {
				f(i)
			}
		})
	}
	for i := range n {
		next <- i
	}
	close(next)
	wg.Wait()
}

// equalAtOnce sends requests 16 at a time and compares all.
func equalAtOnce(t *testing.T, c *cluster, o *oracle, requests []request) []*answer {
	t.Helper()
	for _, r := range requests {
		o.want(t, r)
	}
	answers := make([]*answer, len(requests))
	atOnce(len(requests), 16, func(i int) { answers[i] = ask(c.url(), requests[i]) })
	for i, a := range answers {
		mustEqual(t, a, o.want(t, requests[i]), fmt.Sprintf("request %d of %d tokens among 16 at once: %s", i, len(requests[i].Prompt), brief(requests[i])))
	}
	c.blocksBack(waitShort, "after requests at once")
	return answers
}

func sixteenAtOnce(t *testing.T, c *cluster, o *oracle) {
	c.in(t)
	var requests []request
	for i := range 64 {
		requests = append(requests, mixed(20_000, i*5))
	}
	settledBefore, _ := c.moved()
	equalAtOnce(t, c, o, requests)
	if settled, _ := c.moved(); settled-settledBefore < uint64(len(requests)) {
		t.Errorf("%d leases settled for %d requests", settled-settledBefore, len(requests))
	}
}

// wholeBlocks is how many of n tokens a prefix cache can know: whole blocks, and never the last token.
func (c *cluster) wholeBlocks(n int) int {
	bt := int(c.prefill().BlockTokens)
	return (n - 1) / bt * bt
}

// hit asks for a prompt of which both sides know the first tokens, and checks that they used it.
func (c *cluster) hit(t *testing.T, o *oracle, r request, known int) {
	t.Helper()
	want := o.want(t, r)
	_, before := c.moved()
	a := ask(c.url(), r)
	mustEqual(t, a, want, fmt.Sprintf("prompt of %d tokens, %d of them known: %s", len(r.Prompt), known, brief(r)))
	if a.Usage.Details.Cached != known {
		t.Fatalf("prompt of %d tokens: cached_tokens %d, want %d", len(r.Prompt), a.Usage.Details.Cached, known)
	}
	c.blocksBack(waitShort, "after a prefix hit")
	_, after := c.moved()
	if got, want := after-before, uint64(len(r.Prompt)-known)*c.perToken(t); got != want {
		t.Fatalf("prompt of %d tokens, %d known: %d bytes landed, want %d", len(r.Prompt), known, got, want)
	}
}

// perToken measures the bytes of KV of one token.
func (c *cluster) perToken(t *testing.T) uint64 {
	t.Helper()
	_, before := c.moved()
	if a := ask(c.url(), request{Prompt: freshPrompt(1), MaxTokens: 2}); !a.Done {
		t.Fatal(a.outcome())
	}
	c.blocksBack(waitShort, "after a prompt of one token")
	_, after := c.moved()
	return after - before
}

func prefixHits(t *testing.T, c *cluster, o *oracle) {
	c.in(t)
	shared := seededPrompt(30_000, 512)
	first := request{Prompt: shared, MaxTokens: 8}
	mustEqual(t, ask(c.url(), first), o.want(t, first), "the shared prefix")
	c.blocksBack(waitShort, "after the shared prefix")
	for i := range 12 {
		r := sampled(request{MaxTokens: 10 + i, Stream: i%2 == 0}, i)
		r.Prompt = append(append([]int32(nil), shared...), seededPrompt(30_001+uint64(i), 1+i*7)...)
		c.hit(t, o, r, c.wholeBlocks(513))
		c.hit(t, o, r, c.wholeBlocks(len(r.Prompt))) // the very same again
	}
}

func prefixHitsAtOnce(t *testing.T, c *cluster, o *oracle) {
	c.in(t)
	shared := seededPrompt(40_000, 700)
	var requests []request
	for i := range 48 {
		r := sampled(request{MaxTokens: 10 + i%20, Stream: i%2 == 0}, i)
		r.Prompt = append(append([]int32(nil), shared[:100*(1+i%7)]...), seededPrompt(40_001+uint64(i%16), 1+i%16*5)...)
		requests = append(requests, r)
	}
	cached := 0
	for _, a := range equalAtOnce(t, c, o, requests) {
		cached += a.Usage.Details.Cached
	}
	if cached == 0 {
		t.Error("no prompt token was found in a prefix cache")
	}
}

// oneSideKnows: a prefix that only one of the two has seen changes what moves, not what is answered.
func oneSideKnows(t *testing.T, c *cluster, o *oracle) {
	c.in(t)
	for _, w := range []worker{c.prefill(), c.decode()} {
		for i, n := range []int{15, 16, 17, 250, 640} {
			prompt := freshPrompt(n)
			whole := request{Prompt: prompt, MaxTokens: 5}
			mustEqual(t, ask(w.url(), whole), o.want(t, whole), "whole at the "+w.Role+" worker")
			r := sampled(request{Prompt: append(prompt, freshPrompt(20)...), MaxTokens: 20, Stream: i%2 == 0}, i)
			mustEqual(t, ask(c.url(), r), o.want(t, r), fmt.Sprintf("%d tokens known at the %s worker only", n, w.Role))
		}
	}
	c.blocksBack(waitShort, "after one-sided hits")
}

// conversation: each turn goes on from what decode has generated, which prefill has never seen.
func conversation(t *testing.T, c *cluster, o *oracle) {
	c.in(t)
	prompt := freshPrompt(90)
	for turn := range 6 {
		r := sampled(request{Prompt: append([]int32(nil), prompt...), MaxTokens: 40, Stream: turn%2 == 0}, turn)
		a := ask(c.url(), r)
		mustEqual(t, a, o.want(t, r), fmt.Sprintf("turn %d of %d tokens", turn, len(prompt)))
		prompt = append(append(prompt, a.Tokens...), freshPrompt(11)...)
	}
	c.blocksBack(waitShort, "after a conversation")
}

// TestEqualitySmolLM2 is the same with the default model and text.
func TestEqualitySmolLM2(t *testing.T) {
	needAll(t)
	model := smolModel(t)
	o := oracleFor(t, model)
	c := start(t, options{model: model, nodes: 2})
	words := strings.Fields(strings.Repeat("The mill race brings water from the head of the weir to the wheel, and the miller opens the gate when the grain is dry. ", 24))
	longest := 0
	for i, n := range []int{2, 12, 40, 75, 140, 220, 310, 400} {
		text := fmt.Sprintf("Go on with story %d: ", i) + strings.Join(words[:n], " ")
		r := sampled(request{Model: c.prefill().Model, Chat: text, MaxTokens: 16, Stream: i%2 == 0}, i)
		want := o.want(t, r)
		settledBefore, _ := c.moved()
		a := ask(c.url(), r)
		mustEqual(t, a, want, fmt.Sprintf("chat of %d words", n))
		c.blocksBack(waitShort, "after an answer")
		if settled, _ := c.moved(); settled == settledBefore {
			t.Errorf("chat of %d words: it was not disaggregated", n)
		}
		if longest = max(longest, a.Usage.Prompt); longest > 512 {
			t.Fatalf("the prompt has %d tokens, want up to 512", longest)
		}
	}
	if longest < 400 {
		t.Errorf("the longest prompt has %d tokens, want up to 512", longest)
	}
	t.Logf("8 prompts of up to %d tokens are equal", longest)
}
