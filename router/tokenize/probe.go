package tokenize

import (
	"encoding/json"
	"math/rand/v2"
	"slices"
	"unsafe"
)

// view is b as a string. b must not change while it is in use.
func view(b []byte) string { return unsafe.String(unsafe.SliceData(b), len(b)) }

// probes is the number of conversations that are tried when a model is loaded.
const probes = 10

// startCache makes the cache and tries it on conversations of many shapes against rendering everything. It is given up
// where it is ever wrong.
func (t *Tokenizer) startCache(limit int64) {
	t.cache = newCache(limit)
	rng := rand.New(rand.NewPCG(20261122, 7))
	for i := range probes {
		turns := probeTurns(rng)
		other := slices.Concat(turns[:len(turns)/2], probeTurns(rng)[1:])
		if i < 2 { // long enough to be folded
			turns, other = plainTurns(i == 0), plainTurns(i == 1)
		}
		if !t.probe(rng, turns) || !t.probe(rng, other) {
			t.cache = nil
			return
		}
	}
	if t.cache.wrong.Load() > 0 { // a check has mended the answer
		t.cache = nil
		return
	}
	t.cache = newCache(limit)
}

// plainTurns is a long conversation of messages of the same kinds.
func plainTurns(system bool) [][]map[string]any {
	turns := [][]map[string]any{{{"role": "user", "content": "a"}}}
	if system {
		turns[0] = []map[string]any{{"role": "system", "content": "s"}, {"role": "user", "content": "a"}}
	}
	for range 12 {
		turns = append(turns, []map[string]any{{"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}})
	}
	return turns
}

// probe plays a conversation turn by turn.
func (t *Tokenizer) probe(rng *rand.Rand, turns [][]map[string]any) bool {
	var messages []map[string]any
	for _, turn := range turns {
		messages = append(messages, turn...)
		request := map[string]any{"messages": messages}
		if rng.IntN(4) == 0 {
			request["add_generation_prompt"] = false
		}
		body, err := json.Marshal(request)
		if err != nil || !t.agrees(body) {
			return false
		}
	}
	return true
}

// agrees tells whether cache and full rendering give the same for a request.
func (t *Tokenizer) agrees(body []byte) bool {
	known := t.cache
	got, err := t.AppendPrompt(nil, ChatCompletions, body)
	t.cache = nil
	want, errWhole := t.AppendPrompt(nil, ChatCompletions, body)
	t.cache = known
	return (err == nil) == (errWhole == nil) && slices.Equal(got, want)
}

// probeTurns makes a conversation: its turns, each what a client adds before the model is asked.
func probeTurns(rng *rand.Rand) [][]map[string]any {
	text := func() string {
		words := []string{"one", " two", "\nthree", "<b>", "</think>", "<think>", "42", "  ", "<|im_end|>", "é", "\n\n", "[INST]", "<tool_response>x</tool_response>"}
		out := ""
		for range 1 + rng.IntN(5) {
			out += words[rng.IntN(len(words))]
		}
		return out
	}
	message := func(role string) map[string]any { return map[string]any{"role": role, "content": text()} }
	call := func() map[string]any {
		m := message("assistant")
		m["tool_calls"] = []any{map[string]any{"id": "call0", "type": "function", "function": map[string]any{"name": "f", "arguments": `{"a":1}`}}}
		if rng.IntN(2) == 0 {
			m["content"] = ""
		}
		if rng.IntN(3) == 0 {
			m["reasoning_content"] = text()
		}
		return m
	}
	first := []map[string]any{message("user")}
	if rng.IntN(2) == 0 {
		first = []map[string]any{message("system"), message("user")}
	}
	turns := [][]map[string]any{first}
	tools := rng.IntN(2) == 0
	for range 2 + rng.IntN(5) {
		turn := []map[string]any{message("assistant")}
		if rng.IntN(4) == 0 {
			turn[0]["reasoning_content"] = text()
		}
		if tools && rng.IntN(3) == 0 {
			turns = append(turns, []map[string]any{call(), message("tool")})
			if rng.IntN(2) == 0 {
				turns = append(turns, []map[string]any{call(), message("tool"), message("tool")})
			}
		}
		turns = append(turns, append(turn, message("user")))
	}
	return turns
}
