package api

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/headrace/headrace/internal/chat"
	"github.com/headrace/headrace/internal/openai"
	"github.com/headrace/headrace/internal/openai/openaitest"
)

func TestWholeChat(t *testing.T) {
	h := start(t, &fakeEngine{play: says("Hi \xf0\x9f\x98\x80!", openai.FinishStop)}, nil)
	status, body := h.post("/v1/chat/completions", `{"model":"other","messages":[{"role":"user","content":"x"}],"seed":18446744073709551615}`)
	var got struct {
		ID, Object, Model string
		Created           int64
		Choices           []struct {
			Index        int
			Message      struct{ Role, Content string }
			FinishReason string `json:"finish_reason"`
		}
		Usage struct {
			PromptTokens     int `json:"prompt_tokens"`
			CompletionTokens int `json:"completion_tokens"`
			TotalTokens      int `json:"total_tokens"`
			Details          struct {
				Cached int `json:"cached_tokens"`
			} `json:"prompt_tokens_details"`
		}
	}
	if err := json.Unmarshal([]byte(body), &got); err != nil || status != 200 {
		t.Fatalf("%d %s: %v", status, body, err)
	}
	c := got.Choices[0]
	if c.Message.Content != "Hi 😀!" || c.Message.Role != "assistant" || c.FinishReason != "stop" || got.Model != "other" ||
		got.Object != "chat.completion" || !strings.HasPrefix(got.ID, "chatcmpl-") || got.Created == 0 {
		t.Errorf("body %s", body)
	}
	if u := got.Usage; u.PromptTokens != 6 || u.CompletionTokens != 9 || u.TotalTokens != 15 || u.Details.Cached != 2 {
		t.Errorf("usage %+v", u)
	}
	if r := h.engine.last(); r.Sampling.Seed != 1<<64-1 || r.MaxTokens != 194 || string(bytesTokenizer{}.Decode(nil, r.Prompt, true)) != "u:x;a:" {
		t.Errorf("engine was given %+v", r)
	}
}

func TestStreams(t *testing.T) {
	h := start(t, &fakeEngine{play: says("a\xc3\xa9b", openai.FinishLength)}, nil)
	h.expect("/v1/chat/completions", `{"messages":[{"role":"user","content":"x"}],"stream":true,"stream_options":{"include_usage":true}}`,
		"role", `text "a"`, `text "é"`, `text "b"`, "finish length", "usage 6+4 cached 2", "data: [DONE]")
	h.expect("/v1/completions", `{"prompt":"xyz","stream":true,"max_tokens":4}`,
		`text "a"`, `text "é"`, `text "b"`, "finish length", "data: [DONE]")
	if r := h.engine.last(); r.MaxTokens != 4 {
		t.Errorf("max tokens %d", r.MaxTokens)
	}
	_, body := h.post("/v1/completions", `{"prompt":[1,2],"return_token_ids":true}`)
	if !strings.Contains(body, `"token_ids":[97,195,169,98]`) || !strings.Contains(body, `"prompt_token_ids":[1,2]`) {
		t.Errorf("return_token_ids: %s", body)
	}
	if r := h.engine.last(); r.MaxTokens != openai.DefaultCompletionTokens {
		t.Errorf("max tokens %d", r.MaxTokens)
	}
}

func TestStopStringsCrossTokens(t *testing.T) {
	e := &fakeEngine{play: func(ctx context.Context, _ *Request, send func(TokenEvent)) {
		for _, id := range append(ids("one st"), phrase) {
			send(TokenEvent{Token: id})
		}
		<-ctx.Done() // the server must end the request itself
	}}
	h := start(t, e, nil)
	h.expect("/v1/completions", `{"prompt":"x","stream":true,"stop":["ststop","zzz"]}`,
		`text "o"`, `text "n"`, `text "e"`, `text " "`, "finish stop", "data: [DONE]")
	<-e.canceled
	status, body := h.post("/v1/completions", `{"prompt":"x","stop":"ststop"}`)
	if status != 200 || !strings.Contains(body, `"text":"one "`) || !strings.Contains(body, `"completion_tokens":7`) {
		t.Errorf("%d %s", status, body)
	}
	<-e.canceled
}

func native(role, extra string) string {
	if role != "whole" {
		extra += `,"ticket":"dGlja2V0","peer":"h:1"`
	}
	return `{"messages":[{"role":"user","content":"x"}],"stop":["END"],"stream":true,"stream_options":{"include_usage":true},"max_tokens":20,` +
		`"kv_transfer_params":{"dialect":"headrace/1","role":"` + role + `","id":"chatcmpl-7","created":1790000000,"seed":9007199254740993,"deadline_ms":1790000005000` + extra + `}}`
}

func TestPrefillLeg(t *testing.T) {
	h := start(t, &fakeEngine{play: func(_ context.Context, _ *Request, send func(TokenEvent)) {
		send(TokenEvent{Kind: EventPhase, Phase: PhasePrefilling})
		send(TokenEvent{Kind: EventPhase, Phase: PhaseBound})
		send(TokenEvent{Token: 'h'})
		send(TokenEvent{Kind: EventHandoff})
		send(TokenEvent{Kind: EventSettled})
	}}, nil)
	h.expect("/v1/chat/completions", native("prefill", ""),
		": phase prefilling", ": phase bound", "role", ": t 104", `text "h"`, ": handoff", ": settled")
	r := h.engine.last()
	if r.Role != RolePrefill || string(r.Ticket) != "ticket" || r.Peer != "h:1" || r.ID != "chatcmpl-7" || r.Sampling.Seed != 9007199254740993 ||
		!r.Deadline.Equal(time.UnixMilli(1790000005000)) {
		t.Errorf("engine was given %+v", r)
	}
	_, body := h.post("/v1/chat/completions", native("prefill", ""))
	if !strings.Contains(body, `"id":"chatcmpl-7","object":"chat.completion.chunk","created":1790000000`) {
		t.Errorf("chunks must carry the router's id and time: %s", body)
	}
}

func TestPrefillEndsRequest(t *testing.T) {
	h := start(t, &fakeEngine{play: says("", openai.FinishStop)}, nil)
	h.expect("/v1/chat/completions", native("prefill", ""),
		": phase prefilling", "role", ": t 256", "finish stop", "usage 6+1 cached 0", ": final")
}

func TestDecodeLeg(t *testing.T) {
	h := start(t, &fakeEngine{play: func(_ context.Context, _ *Request, send func(TokenEvent)) {
		send(TokenEvent{Kind: EventPrior, Prior: ids("E"), CachedTokens: 4})
		send(TokenEvent{Kind: EventPhase, Phase: PhaseDecoding})
		for _, id := range ids("Ex\xc3") {
			send(TokenEvent{Token: id})
		}
		send(TokenEvent{Token: eos, Finish: openai.FinishStop})
	}}, nil)
	// "E" may begin END: whoever sampled it held it back, so this leg gives it.
	h.expect("/v1/chat/completions", native("decode", ""),
		": prior 69", ": phase decoding", ": t 69", `text "E"`, ": t 120", `text "Ex"`, ": t 195", ": t 256", "finish stop �", "usage 6+5 cached 4", ": final")
}

func TestResume(t *testing.T) {
	h := start(t, &fakeEngine{play: says("D!", openai.FinishLength)}, nil)
	h.expect("/v1/chat/completions", native("whole", `,"resume":[97,69,78]`),
		": phase prefilling", ": t 68", "finish stop", "usage 6+4 cached 2", ": final")
	if r := h.engine.last(); len(r.Resume) != 3 || r.MaxTokens != 20 {
		t.Errorf("engine was given %+v", r)
	}
	h.expect("/v1/chat/completions", native("whole", `,"resume":[]`),
		": phase prefilling", ": t 68", `text "D"`, ": t 33", `text "!"`, "finish length", "usage 6+2 cached 2", ": final")
}

func TestCompleteResumeNeedsNoEngine(t *testing.T) {
	h := start(t, &fakeEngine{err: errors.New("must not be asked")}, nil)
	h.expect("/v1/chat/completions", native("whole", `,"resume":[97,256]`), "finish stop", "usage 6+2 cached 0", ": final")
	h.expect("/v1/chat/completions", native("whole", `,"resume":[69,78,68]`), "finish stop", "usage 6+3 cached 0", ": final")
	twenty := strings.Repeat("97,", 19) + "69"
	h.expect("/v1/chat/completions", native("decode", `,"resume":[`+twenty+`]`), "finish length E", "usage 6+20 cached 0", ": final")
}

func TestFailures(t *testing.T) {
	fails := func(before string) *fakeEngine {
		return &fakeEngine{play: func(_ context.Context, _ *Request, send func(TokenEvent)) {
			for _, id := range ids(before) {
				send(TokenEvent{Token: id})
			}
			send(TokenEvent{Kind: EventFailed, Reason: "lease expired:\nlate"})
		}}
	}
	h := start(t, fails("h"), nil)
	h.expect("/v1/chat/completions", native("whole", ""), "role", ": t 104", `text "h"`, ": failed lease expired: late")
	_, body := h.post("/v1/completions", `{"prompt":"x","stream":true}`)
	if !strings.Contains(body, `"h"`) || !strings.Contains(body, `data: {"error":{`) || strings.Contains(body, "[DONE]") {
		t.Errorf("a stream that fails: %s", body)
	}
	for _, c := range []*fakeEngine{fails(""), {play: func(context.Context, *Request, func(TokenEvent)) {}}, {err: ErrBusy}, {err: errors.New("no")}} {
		h := start(t, c, nil)
		for _, body := range []string{`{"prompt":"x","stream":true}`, `{"prompt":"x"}`} {
			if status, got := h.post("/v1/completions", body); status != 503 || !strings.Contains(got, `"type":"server_error"`) {
				t.Errorf("%s: %d %s", body, status, got)
			}
		}
	}
}

func TestRequestErrors(t *testing.T) {
	h := start(t, &fakeEngine{play: says("x", openai.FinishLength)}, func(c *Config) { c.BodyBytesMax = 4000 })
	long := strings.Repeat("a", 190)
	for _, c := range []struct {
		path, body string
		status     int
		want       string
	}{
		{"/v1/chat/completions", `{`, 400, "invalid_json"},
		{"/v1/chat/completions", `{"model":"no","messages":[{"role":"user","content":"x"}]}`, 404, "model_not_found"},
		{"/v1/chat/completions", `{"messages":[]}`, 400, `"param":"messages"`},
		{"/v1/chat/completions", `{"messages":[{"role":"user","content":"bad"}]}`, 400, "bad talk"},
		{"/v1/chat/completions", `{"messages":[{"role":"user","content":"x"}],"tools":[{"type":"function"}]}`, 400, `"param":"tools"`},
		{"/v1/chat/completions", `{"messages":[{"role":"user","content":"` + long + `xxxxxxxxxx"}]}`, 400, "context_length_exceeded"},
		{"/v1/completions", `{"prompt":"` + strings.Repeat("a", 3000) + `"}`, 400, "context_length_exceeded"},
		{"/v1/completions", `{"prompt":"` + long + `","max_tokens":11}`, 400, `"param":"max_tokens","code":"context_length_exceeded"`},
		{"/v1/completions", `{"prompt":""}`, 400, `"param":"prompt"`},
		{"/v1/completions", `{"prompt":[1,259]}`, 400, "no token 259"},
		{"/v1/completions", `{"prompt":"x","stop_token_ids":[300]}`, 400, `"param":"stop_token_ids"`},
		{"/v1/completions", `{"prompt":"x","n":129}`, 400, `"param":"n"`},
		{"/v1/completions", `{"prompt":"x","logit_bias":{"300":1}}`, 400, `"param":"logit_bias"`},
		{"/v1/completions", `{"prompt":"x","max_tokens":0}`, 400, `"param":"max_tokens"`},
		{"/v1/completions", `{"prompt":"` + strings.Repeat("a", 5000) + `"}`, 413, "request_too_large"},
		{"/v1/completions", `{"prompt":"x","kv_transfer_params":{"dialect":"x"}}`, 400, `"param":"kv_transfer_params"`},
		{"/v1/completions", `{"prompt":"x","max_tokens":1,"kv_transfer_params":{"dialect":"headrace/1","role":"whole","id":"a","resume":[1,2]}}`, 400, "resume has 2"},
		{"/v1/nothing", `{}`, 404, "not_found"},
		{"/health", `{}`, 405, "method_not_allowed"},
	} {
		status, body := h.post(c.path, c.body)
		if status != c.status || !strings.Contains(body, c.want) || !json.Valid([]byte(body)) {
			t.Errorf("%s %.60s: %d %s, want %d %s", c.path, c.body, status, body, c.status, c.want)
		}
	}
}

func TestDisconnectCancels(t *testing.T) {
	e := &fakeEngine{play: func(ctx context.Context, _ *Request, send func(TokenEvent)) {
		send(TokenEvent{Token: 'h'})
		<-ctx.Done()
	}}
	h := start(t, e, nil)
	e.submitted = make(chan struct{}, 1)
	for _, body := range []string{`{"prompt":"x","stream":true}`, `{"prompt":"x"}`, native("whole", "")} {
		path := "/v1/completions"
		if strings.Contains(body, "messages") {
			path = "/v1/chat/completions"
		}
		ctx, cancel := context.WithCancel(context.Background())
		req, _ := http.NewRequestWithContext(ctx, "POST", h.url+path, strings.NewReader(body))
		answered := make(chan struct{})
		go func() {
			defer close(answered)
			resp, err := h.client.Do(req)
			if err == nil {
				_, _ = io.Copy(io.Discard, resp.Body)
				resp.Body.Close()
			}
		}()
		<-e.submitted
		cancel()
		<-e.canceled
		<-answered
	}
}

func TestHeartbeats(t *testing.T) {
	release := make(chan struct{})
	e := &fakeEngine{play: func(_ context.Context, _ *Request, send func(TokenEvent)) {
		<-release
		send(TokenEvent{Token: eos, Finish: openai.FinishStop})
	}}
	h := start(t, e, func(c *Config) { c.Heartbeat = time.Millisecond })
	resp, err := h.client.Post(h.url+"/v1/chat/completions", "application/json", strings.NewReader(native("whole", "")))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	s := openaitest.NewScanner(resp.Body, nil)
	for range 3 {
		if ev, err := s.Next(); err != nil || ev.Kind != openai.EventHeartbeat {
			t.Fatalf("%v %v", ev.Kind, err)
		}
	}
	close(release)
	for {
		ev, err := s.Next()
		if err != nil {
			t.Fatal(err)
		}
		if ev.Kind == openai.EventFinal {
			return
		}
	}
}

func TestPanicsBecome500(t *testing.T) {
	e := &fakeEngine{play: says("x", openai.FinishLength)}
	h := start(t, e, func(c *Config) { c.Chat = panicking{} })
	status, body := h.post("/v1/chat/completions", `{"messages":[{"role":"user","content":"x"}]}`)
	if status != 500 || !strings.Contains(body, "internal_error") {
		t.Errorf("%d %s", status, body)
	}
	if status, body = h.post("/v1/completions", `{"prompt":"x"}`); status != 200 {
		t.Errorf("after a panic: %d %s", status, body)
	}
}

type panicking struct{}

func (panicking) Render(chat.Input) (string, error) { panic("boom") }

func TestOtherEndpoints(t *testing.T) {
	h := start(t, &fakeEngine{play: says("xyz", openai.FinishStop)}, nil)
	h.post("/v1/completions", `{"prompt":"x"}`)
	for path, want := range map[string]string{
		"/v1/models":       `{"object":"list","data":[{"id":"tiny","object":"model","created":1700000000,`,
		"/v1/models/other": `{"id":"other",`,
		"/v1/models/none":  "model_not_found",
		"/health":          "",
		"/status":          `{"blocks_total":64}`,
		"/metrics":         `vllm:num_requests_running{engine="0",model_name="tiny"} 3`,
	} {
		if _, body := h.get(path); !strings.Contains(body, want) {
			t.Errorf("%s: %.200s, want %s", path, body, want)
		}
	}
	_, body := h.get("/metrics")
	for _, want := range []string{
		`vllm:prefix_cache_hits_total{engine="0",model_name="tiny"} 7`,
		`vllm:request_success_total{engine="0",finished_reason="stop",model_name="tiny"} 1`,
		`vllm:time_to_first_token_seconds_count{engine="0",model_name="tiny"} 1`,
		`vllm:inter_token_latency_seconds_count{engine="0",model_name="tiny"} 3`,
		`vllm:e2e_request_latency_seconds_count{engine="0",model_name="tiny"} 1`,
		`vllm:cache_config_info{block_size="16",`,
		`# TYPE vllm:generation_tokens_total counter`,
		`# TYPE vllm:kv_cache_usage_perc gauge`,
	} {
		if !strings.Contains(body, want) {
			t.Errorf("/metrics lacks %s", want)
		}
	}
	if _, body := h.post("/tokenize", `{"prompt":"ab"}`); body != `{"count":2,"max_model_len":200,"tokens":[97,98]}` {
		t.Errorf("/tokenize: %s", body)
	}
	if _, body := h.post("/tokenize", `{"messages":[{"role":"user","content":"b"}]}`); !strings.Contains(body, `"count":6`) {
		t.Errorf("/tokenize of a chat: %s", body)
	}
	if _, body := h.post("/detokenize", `{"tokens":[97,256,98,255]}`); body != `{"prompt":"a</s>b�"}` {
		t.Errorf("/detokenize: %s", body)
	}
}

// Events must reach the client one by one, not when a buffer is full.
func TestEventsAreFlushed(t *testing.T) {
	next := make(chan struct{})
	e := &fakeEngine{play: func(ctx context.Context, _ *Request, send func(TokenEvent)) {
		for range 5 {
			send(TokenEvent{Token: 'x'})
			select {
			case <-next:
			case <-ctx.Done():
			}
		}
		send(TokenEvent{Token: eos, Finish: openai.FinishStop})
	}}
	h := start(t, e, nil)
	resp, err := h.client.Post(h.url+"/v1/completions", "application/json", strings.NewReader(`{"prompt":"x","stream":true}`))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	r := bufio.NewReader(resp.Body)
	for range 5 {
		line, err := r.ReadBytes('\n')
		if err != nil || !bytes.Contains(line, []byte(`"text":"x"`)) {
			t.Fatalf("%q %v", line, err)
		}
		if _, err := r.ReadBytes('\n'); err != nil {
			t.Fatal(err)
		}
		next <- struct{}{}
	}
}

type recordingListener struct {
	net.Listener
	conns chan *net.TCPConn
}

func (l *recordingListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if tcp, ok := c.(*net.TCPConn); ok {
		l.conns <- tcp
	}
	return c, err
}

func TestConnectionsHaveNoDelay(t *testing.T) {
	s, err := New(Config{Engine: &fakeEngine{}, Tokenizer: bytesTokenizer{}})
	if err != nil {
		t.Fatal(err)
	}
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l := &recordingListener{tcp, make(chan *net.TCPConn, 1)}
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }()
	resp, err := http.Get("http://" + l.Addr().String() + "/health")
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	raw, err := (<-l.conns).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	err = raw.Control(func(fd uintptr) {
		if v, err := syscall.GetsockoptInt(int(fd), syscall.IPPROTO_TCP, syscall.TCP_NODELAY); err != nil || v != 1 {
			t.Errorf("TCP_NODELAY = %d, %v", v, err)
		}
	})
	if err != nil {
		t.Error(err)
	}
	http.DefaultClient.CloseIdleConnections()
	if err := s.Shutdown(context.Background()); err != nil {
		t.Error(err)
	}
	if err := <-served; err != nil {
		t.Error(err)
	}
}

// An engine that lets a request go because its client has left has not failed it, whichever of the two is seen first.
func TestLeavingIsNoFailure(t *testing.T) {
	var log bytes.Buffer // the handler writes one record at a time
	t.Cleanup(func() {   // behind the server's end
		if said := log.String(); strings.Contains(said, "failed") {
			t.Error(said)
		}
	})
	h := start(t, &fakeEngine{play: func(ctx context.Context, _ *Request, send func(TokenEvent)) {
		send(TokenEvent{Token: 'a'})
		<-ctx.Done()
	}}, func(c *Config) { c.Logger = slog.New(slog.NewTextHandler(&log, nil)) })
	for range 50 {
		ctx, cancel := context.WithCancel(t.Context())
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, h.url+"/v1/completions", strings.NewReader(`{"model":"tiny","prompt":"x","stream":true,"max_tokens":9}`))
		if err != nil {
			t.Fatal(err)
		}
		resp, err := h.client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := resp.Body.Read(make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
		cancel()
		resp.Body.Close()
		<-h.engine.canceled
	}
}
