package api

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/headrace/headrace/internal/openai"
)

// perChoice is a script that says another text for each choice.
func perChoice(texts ...string) func(context.Context, *Request, func(TokenEvent)) {
	return func(ctx context.Context, r *Request, send func(TokenEvent)) {
		says(texts[r.Choice], openai.FinishLength)(ctx, r, send)
	}
}

func TestChoicesOfOneAnswer(t *testing.T) {
	e := &fakeEngine{play: perChoice("abc", "de", "f")}
	h := start(t, e, nil)
	status, body := h.post("/v1/completions", `{"prompt":"xy","n":3,"seed":5}`)
	var got struct {
		Choices []struct {
			Index  int
			Text   string
			Finish string `json:"finish_reason"`
		}
		Usage struct {
			Prompt     int `json:"prompt_tokens"`
			Completion int `json:"completion_tokens"`
			Details    struct {
				Cached int `json:"cached_tokens"`
			} `json:"prompt_tokens_details"`
		}
	}
	if err := json.Unmarshal([]byte(body), &got); err != nil || status != 200 || len(got.Choices) != 3 {
		t.Fatalf("%d %s", status, body)
	}
	for i, want := range []string{"abc", "de", "f"} {
		if c := got.Choices[i]; c.Index != i || c.Text != want || c.Finish != "length" {
			t.Errorf("%+v", c)
		}
	}
	if u := got.Usage; u.Prompt != 2 || u.Completion != 6 || u.Details.Cached != 2 {
		t.Errorf("%+v", u)
	}
	for i, r := range e.requests {
		if r.Choice != i || r.Sampling.Seed != 5 {
			t.Errorf("request %d: choice %d, seed %d", i, r.Choice, r.Sampling.Seed)
		}
	}
	_, body = h.post("/v1/chat/completions", `{"messages":[{"role":"user","content":"x"}],"n":2,"stream":true,"stream_options":{"include_usage":true}}`)
	for _, want := range []string{`"index":0,"delta":{"role"`, `"index":1,"delta":{"role"`, `"index":1,"delta":{"content":"d"}`, `"completion_tokens":5`} {
		if strings.Count(body, want) != 1 {
			t.Errorf("not once %s in %s", want, body)
		}
	}
	if !strings.HasSuffix(body, openai.Done) || strings.Count(body, `"finish_reason":"length"`) != 2 {
		t.Error(body)
	}
}

// TestFirstChoiceGoesAhead: the others come when the first has its first token, and a stop ends one alone.
func TestFirstChoiceGoesAhead(t *testing.T) {
	var begun atomic.Bool
	release := make(chan struct{})
	e := &fakeEngine{play: func(ctx context.Context, r *Request, send func(TokenEvent)) {
		if r.Choice > 0 && !begun.Load() {
			t.Error("a choice came before the first had begun")
		}
		if r.Choice == 0 {
			<-release
			begun.Store(true)
		}
		says("a|"+strings.Repeat("b", 3), "")(ctx, r, send)
		if r.Choice == 1 {
			<-ctx.Done() // its stop string
			return
		}
		send(TokenEvent{Token: 'c', Finish: openai.FinishLength})
	}}
	e.submitted = make(chan struct{}, 8)
	h := start(t, e, nil)
	go func() {
		<-e.submitted
		select {
		case <-e.submitted:
			t.Error("a second was submitted at once")
		case <-time.After(20 * time.Millisecond):
		}
		close(release)
	}()
	_, body := h.post("/v1/completions", `{"prompt":"xy","n":3,"stop":"|"}`)
	if strings.Count(body, `"text":"a"`) != 3 || strings.Count(body, `"finish_reason":"stop"`) != 3 {
		t.Error(body)
	}
}

func TestChoiceFails(t *testing.T) {
	e := &fakeEngine{play: func(ctx context.Context, r *Request, send func(TokenEvent)) {
		if r.Choice == 1 {
			send(TokenEvent{Kind: EventFailed, Reason: "broken"})
			return
		}
		send(TokenEvent{Token: 'a'})
		<-ctx.Done()
	}}
	h := start(t, e, nil)
	if status, body := h.post("/v1/completions", `{"prompt":"xy","n":2}`); status != 503 || !strings.Contains(body, "broken") {
		t.Errorf("%d %s", status, body)
	}
	<-e.canceled
	if _, body := h.post("/v1/completions", `{"prompt":"xy","n":2,"stream":true}`); !strings.Contains(body, `data: {"error"`) || strings.Contains(body, "[DONE]") {
		t.Error(body)
	}
	<-e.canceled
	few := start(t, &fakeEngine{err: errors.New("not to be asked")}, func(c *Config) { c.InFlightMax = 3 })
	if status, body := few.post("/v1/completions", `{"prompt":"xy","n":4}`); status != 503 || !strings.Contains(body, "3 answers in flight") {
		t.Errorf("%d %s", status, body)
	}
}

// scored is a script with log probabilities: of each token minus its number in the answer, and of the prompt.
func scored(text string) func(context.Context, *Request, func(TokenEvent)) {
	return func(_ context.Context, r *Request, send func(TokenEvent)) {
		if r.PromptLogprobs {
			list := make([]openai.Logprob, len(r.Prompt))
			for i, id := range r.Prompt {
				list[i] = openai.Logprob{TokenLogprob: openai.TokenLogprob{Token: id, Logprob: -100}, Unknown: i == 0}
			}
			send(TokenEvent{Kind: EventPrompt, Prompt: list})
		}
		if r.MaxTokens == 0 {
			send(TokenEvent{Kind: EventFinish, Finish: openai.FinishLength})
			return
		}
		prior := len(r.Resume)
		if r.Role == RoleDecode {
			prior++
			send(TokenEvent{Kind: EventPrior, Prior: ids(text[:prior])})
		}
		all := ids(text)
		for i := prior; i < len(all); i++ {
			ev := TokenEvent{Token: all[i]}
			if r.Logprobs {
				ev.Logprob = &openai.Logprob{TokenLogprob: openai.TokenLogprob{Token: all[i], Logprob: -float32(i)}}
			}
			if r.Role == RolePrefill {
				send(ev)
				send(TokenEvent{Kind: EventHandoff})
				send(TokenEvent{Kind: EventSettled})
				return
			}
			if i == len(all)-1 {
				ev.Finish = openai.FinishLength
			}
			send(ev)
		}
	}
}

func TestEcho(t *testing.T) {
	h := start(t, &fakeEngine{play: scored("dé")}, nil)
	for _, c := range []struct{ body, want string }{
		{`{"prompt":"abc","echo":true}`, `"text":"abcdé","logprobs":null`},
		{`{"prompt":[97,256,98],"echo":true}`, `"text":"a</s>bdé"`},
		{`{"prompt":"abc","echo":true,"logprobs":0}`, `"logprobs":{"tokens":["a","b","c","d","bytes:\\xc3","bytes:\\xa9"],"token_logprobs":[null,-100,-100,0,-1,-2],` +
			`"top_logprobs":[null,{"b":-100},{"c":-100},{"d":0},{"bytes:\\xc3":-1},{"bytes:\\xa9":-2}],"text_offset":[0,1,2,3,4,5]}`},
		{`{"prompt":"abc","echo":true,"logprobs":0,"max_tokens":0}`, `"text":"abc","logprobs":{"tokens":["a","b","c"],"token_logprobs":[null,-100,-100]`},
		{`{"prompt":"ab","echo":true,"n":2}`, `"index":1,"text":"abdé"`},
	} {
		if status, body := h.post("/v1/completions", c.body); status != 200 || !strings.Contains(body, c.want) {
			t.Errorf("%s: %d %s, want %s", c.body, status, body, c.want)
		}
	}
	h.expect("/v1/completions", `{"prompt":"abc","echo":true,"stream":true}`, `text "abc"`, `text "d"`, `text "é"`, "finish length", "data: [DONE]")
}

// leg is a request of the native dialect for completions with an echo and log probabilities.
func leg(role, extra string) string {
	body := native(role, extra)
	body = strings.Replace(body, `"messages":[{"role":"user","content":"x"}]`, `"prompt":"pq","echo":true,"logprobs":0,"n":3`, 1)
	return body
}

// TestLegsOfEcho: the echo is sent once, by whoever begins, and the offsets go on behind it.
func TestLegsOfEcho(t *testing.T) {
	h := start(t, &fakeEngine{play: scored("é!?")}, nil)
	h.expect("/v1/completions", leg("prefill", `,"choice":2`), ": head", `text "pq"`, ": t 195", `text ""`, ": handoff", ": settled")
	if r := h.engine.last(); r.Choice != 2 || !r.PromptLogprobs {
		t.Errorf("%+v", r)
	}
	_, body := h.post("/v1/completions", leg("prefill", `,"choice":2`))
	if !strings.Contains(body, `"index":2`) || strings.Contains(body, `"index":0`) || !strings.Contains(body, `"text_offset":[0,1]`) || !strings.Contains(body, `"text_offset":[2]`) {
		t.Error(body)
	}
	decode := []string{": prior 195", ": t 169", `text "é"`, ": t 33", `text "!"`, ": t 63", `text "?"`, "finish length", "usage 2+4 cached 0", ": final"}
	h.expect("/v1/completions", leg("decode", ""), decode...)
	_, body = h.post("/v1/completions", leg("decode", ""))
	for _, want := range []string{`"token_logprobs":[-1]`, `"text_offset":[3]`, `"text_offset":[4]`} {
		if !strings.Contains(body, want) {
			t.Errorf("no %s in %s", want, body)
		}
	}
	h.expect("/v1/completions", leg("whole", `,"resume":[195,169]`), ": t 33", `text "!"`, ": t 63", `text "?"`, "finish length", "usage 2+4 cached 0", ": final")
	if r := h.engine.last(); r.PromptLogprobs {
		t.Error("the prompt's log probabilities are asked for again")
	}
	_, body = h.post("/v1/completions", leg("whole", `,"resume":[195,169]`))
	if !strings.Contains(body, `"text_offset":[3]`) {
		t.Error(body)
	}
	if status, body := h.post("/v1/completions", leg("whole", `,"choice":3`)); status != 400 || !strings.Contains(body, "choice 3 of 3") {
		t.Errorf("%d %s", status, body)
	}
}
