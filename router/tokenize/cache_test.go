package tokenize

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/headrace/headrace/router/tokens"
)

// TestCacheAgrees plays conversations that go on, branch, are edited and repeated, with tools and without, and holds every
// prompt against that of a Tokenizer without a cache.
func TestCacheAgrees(t *testing.T) {
	for _, name := range templates {
		t.Run(name, func(t *testing.T) {
			family := "llama3"
			if name == "mistral" {
				family = "llama2"
			}
			whole := load(t, family, name, Options{CacheBytes: -1})
			cached := load(t, family, name, Options{CacheBytes: 4 << 20})
			if cached.cache == nil {
				t.Fatal("the template did not pass its probes")
			}
			rng := rand.New(rand.NewPCG(11, 12))
			asked := 0
			for range 5 {
				asked += playRandom(t, rng, whole, cached)
			}
			c := cached.cache
			if c.wrong.Load() > 0 || c.off.Load() {
				t.Error("a check found the cache wrong")
			}
			if hits := c.hits.Load(); hits < uint64(asked)/3 {
				t.Errorf("%d of %d requests were answered from the cache", hits, asked)
			}
		})
	}
}

// playRandom plays one conversation and returns how many requests the model took.
func playRandom(t *testing.T, rng *rand.Rand, whole, cached *Tokenizer) (asked int) {
	t.Helper()
	request := map[string]any{}
	if rng.IntN(3) == 0 {
		request["tools"] = json.RawMessage(`[{"type":"function","function":{"name":"f","description":"does <f>","parameters":{"type":"object"}}}]`)
	}
	if rng.IntN(4) == 0 {
		request["chat_template_kwargs"] = map[string]any{"enable_thinking": rng.IntN(2) == 0}
	}
	var messages []map[string]any
	for _, turn := range probeTurns(rng) {
		messages = append(messages, turn...)
		switch rng.IntN(8) {
		case 0: // an edit of an earlier message
			messages = slices.Clone(messages)
			at := rng.IntN(len(messages))
			edited := map[string]any{"role": messages[at]["role"], "content": fmt.Sprint("edited ", rng.IntN(3))}
			messages[at] = edited
		case 1: // the same again
			ask(t, request, messages, whole, cached)
		case 2:
			request["add_generation_prompt"] = false
		default:
			delete(request, "add_generation_prompt")
		}
		if ask(t, request, messages, whole, cached) {
			asked++
		}
	}
	return asked
}

func ask(t *testing.T, request map[string]any, messages []map[string]any, whole, cached *Tokenizer) bool {
	t.Helper()
	request["messages"] = messages
	body, err := json.Marshal(request)
	if err != nil {
		t.Fatal(err)
	}
	want, errWant := whole.AppendPrompt(nil, ChatCompletions, body)
	got, errGot := cached.AppendPrompt([]uint32{9}, ChatCompletions, body)
	if (errWant == nil) != (errGot == nil) || !slices.Equal(got[1:], want) {
		t.Fatalf("%s:\n got %v, %v\nwant %v, %v", body, got[1:], errGot, want, errWant)
	}
	return errWant == nil
}

// TestCacheStaysWithinItsBytes also makes every node and run be dropped in the end.
func TestCacheStaysWithinItsBytes(t *testing.T) {
	const limit = 120_000
	tok := load(t, "llama3", "chatml", Options{CacheBytes: limit})
	for i := range 25 {
		body := fmt.Sprintf(`{"messages":[{"role":"user","content":"%d %s"}`, i, strings.Repeat("words and words ", 100+i))
		for branch := range 12 { // it goes on, and branches at every second turn
			last := body + fmt.Sprintf(`,{"role":"assistant","content":"<|im_end|>ok"},{"role":"user","content":"more %d"}`, branch)
			if _, err := tok.AppendPrompt(nil, ChatCompletions, []byte(last+"]}")); err != nil {
				t.Fatal(err)
			}
			if branch%2 == 0 {
				body = last
			}
		}
		for k := range tok.cache.shards {
			s := &tok.cache.shards[k]
			if s.bytes > s.limit || s.bytes != counted(s) {
				t.Fatalf("after %d: %d bytes of %d, counted %d", i, s.bytes, s.limit, counted(s))
			}
		}
	}
	s := &tok.cache.shards[0]
	if len(s.nodes) < 2 {
		t.Errorf("%d nodes are left", len(s.nodes))
	}
	for s.list.prev != &s.list {
		s.drop(s.list.prev)
	}
	if s.bytes != 0 || len(s.nodes) != 0 {
		t.Errorf("%d bytes and %d nodes are left of nothing", s.bytes, len(s.nodes))
	}
}

// counted adds up what the nodes of a shard take.
func counted(s *shard) (bytes int64) {
	runs := map[*run]bool{}
	for _, e := range s.nodes {
		bytes += e.bytes
		for r := e.run; r != nil && !runs[r]; r = r.base {
			runs[r] = true
			bytes += runBytes + 4*int64(cap(r.ids))
		}
	}
	return bytes
}

// Another question about the same is answered from what the first one left behind.
func TestOnlyTheLastMessageDiffers(t *testing.T) {
	for _, name := range templates {
		t.Run(name, func(t *testing.T) {
			family := "llama3"
			if name == "mistral" {
				family = "llama2"
			}
			whole, cached := load(t, family, name, Options{CacheBytes: -1}), load(t, family, name, Options{})
			messages := []map[string]any{{"role": "user", "content": "<|im_end|> a long text "}, {"role": "assistant", "content": "read"}, nil}
			for i := range 6 {
				messages[2] = map[string]any{"role": "user", "content": fmt.Sprint(" question ", i)}
				if !ask(t, map[string]any{}, messages, whole, cached) {
					t.Fatal("the model does not take it")
				}
				// "thinking" looks ahead for the last question: nothing is kept that does not stand for all of them.
				if hits := cached.cache.hits.Load(); hits != uint64(i) && name != "thinking" {
					t.Fatalf("%d hits behind %d further questions", hits, i)
				}
			}
			if cached.cache.wrong.Load() > 0 {
				t.Error("a check found the cache wrong")
			}
		})
	}
}

func TestCacheByManyAtOnce(t *testing.T) {
	whole := load(t, "llama3", "thinking", Options{CacheBytes: -1})
	cached := load(t, "llama3", "thinking", Options{CacheBytes: 200_000})
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(i%2), 5)) // two by two they play the same
			for range 5 {
				playRandom(t, rng, whole, cached)
			}
		})
	}
	wg.Wait()
}

// A template that does what no probe shows is found out by a check, and the answer is right all the same.
func TestWrongCacheIsGivenUp(t *testing.T) {
	source := `{% for m in messages %}<|im_start|>{{ m.role }}{{ m.content }}{% if messages[0].content == 'secret' and loop.last %}!{% endif %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}`
	dir := folder(t, "llama3", source)
	cached, err := Load(dir, Options{})
	if err != nil || cached.cache == nil {
		t.Fatal(err)
	}
	whole, err := Load(dir, Options{CacheBytes: -1})
	if err != nil {
		t.Fatal(err)
	}
	messages := []map[string]any{{"role": "user", "content": "secret"}}
	for range 3 {
		ask(t, map[string]any{}, messages, whole, cached)
		messages = append(messages, map[string]any{"role": "assistant", "content": "a"}, map[string]any{"role": "user", "content": "b"})
	}
	if !cached.cache.off.Load() || cached.cache.wrong.Load() != 1 {
		t.Error("the cache was not given up")
	}
}

// A template whose output looks back at texts, or ahead, gets no wrong prompt for it.
func TestTemplatesThatLookAround(t *testing.T) {
	for name, source := range map[string]string{
		"first text":  `{% for m in messages %}<|im_start|>{{ m.content }}/{{ messages[0].content }}<|im_end|>{% endfor %}`,
		"count":       `{{ messages | length }}{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}`,
		"last text":   `{{ messages[-1].content }}{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}`,
		"index":       `{% for m in messages %}<|im_start|>{{ loop.index }}{{ m.content }}<|im_end|>{% endfor %}`,
		"total":       `{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + (m.content | length) %}<|im_start|>{{ ns.n }}<|im_end|>{% endfor %}`,
		"time of day": `{{ strftime_now("%H:%M") }}{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}`,
	} {
		t.Run(name, func(t *testing.T) {
			dir := folder(t, "llama3", source)
			cached, err := Load(dir, Options{})
			if err != nil {
				t.Fatal(err)
			}
			whole, err := Load(dir, Options{CacheBytes: -1})
			if err != nil {
				t.Fatal(err)
			}
			rng := rand.New(rand.NewPCG(1, 9))
			for range 4 {
				playRandom(t, rng, whole, cached)
			}
		})
	}
}

func TestFold(t *testing.T) {
	u, a, s := kind{role: "user"}, kind{role: "assistant"}, kind{role: "system"}
	var stub []kind
	for i := range 1000 {
		k := u
		if i%2 == 1 {
			k = a
		}
		if i == 0 {
			k = s
		}
		if stub = fold(stub, k); stub == nil || len(stub) > 6 || len(stub)%2 != (i+1)%2 || stub[len(stub)-1] != k || stub[0] != s {
			t.Fatalf("after %d: %v", i, stub)
		}
	}
	rng := rand.New(rand.NewPCG(1, 1))
	stub = nil
	for range 100 {
		if stub = fold(stub, kind{role: fmt.Sprint(rng.IntN(9))}); stub == nil {
			return
		}
	}
	t.Errorf("a wild conversation is kept as %d messages", len(stub))
}

// What is asked for in parts is what is asked for in one, whatever is known of the conversation, and its parts stay as they are when others
// of the conversation come.
func TestPromptInParts(t *testing.T) {
	tok := load(t, "llama3", "chatml", Options{})
	var apart tokens.Prompt
	before, was := tokens.Prompt{}, []uint32(nil)
	messages := `{"role":"user","content":"one"}`
	inParts := 0
	for i := range 30 {
		messages += fmt.Sprintf(`,{"role":"assistant","content":"a %d"},{"role":"user","content":"b %d"}`, i, i)
		for k := range 3 {
			body := fmt.Appendf(nil, `{"messages":[%s,{"role":"assistant","content":"x"},{"role":"user","content":"q %d"}]}`, messages, k)
			want, err := tok.AppendPrompt(nil, ChatCompletions, body)
			if err != nil {
				t.Fatal(err)
			}
			if err := tok.Prompt(&apart, ChatCompletions, body); err != nil {
				t.Fatal(err)
			}
			if got := apart.AppendTo(nil); !slices.Equal(got, want) {
				t.Fatalf("turn %d: %d tokens in %d parts, want %d", i, len(got), len(apart.Parts), len(want))
			}
			if got := before.AppendTo(nil); !slices.Equal(got, was) {
				t.Fatalf("turn %d: the prompt before is another now", i)
			}
			if len(apart.Parts) > 1 {
				inParts++
			}
			before = tokens.Prompt{Parts: slices.Clone(apart.Parts[:len(apart.Parts)-1])}
			was = before.AppendTo(nil)
		}
	}
	if inParts < 80 {
		t.Errorf("%d of 90 in parts", inParts)
	}
	if err := tok.Prompt(&apart, "/v1/embeddings", []byte(`{}`)); err == nil || apart.Len() != 0 {
		t.Errorf("%v, %d tokens", err, apart.Len())
	}
}
