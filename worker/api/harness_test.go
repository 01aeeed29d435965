package api

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/headrace/headrace/internal/chat"
	"github.com/headrace/headrace/internal/openai"
	"github.com/headrace/headrace/internal/openai/openaitest"
	"github.com/headrace/headrace/worker/tokenizer"
)

// bytesTokenizer has a token a byte, and three more: 256 ends the text, 257 is another control token, 258 is "stop it".
type bytesTokenizer struct{}

const (
	eos     = 256
	control = 257
	phrase  = 258
	vocab   = 259
)

func (bytesTokenizer) TokenBytes(id int32) []byte {
	switch {
	case id >= 0 && id < 256:
		return []byte{byte(id)}
	case id == eos:
		return []byte("</s>")
	case id == control:
		return []byte("<c>")
	case id == phrase:
		return []byte("stop it")
	}
	return nil
}

func (bytesTokenizer) Special(id int32) bool { return id == eos || id == control }
func (bytesTokenizer) TokenBytesMax() int    { return 7 }

func (bytesTokenizer) Encode(dst []int32, text string, _ tokenizer.EncodeOptions) ([]int32, error) {
	return append(dst, ids(text)...), nil
}

func (b bytesTokenizer) Decode(dst []byte, list []int32, keepSpecial bool) []byte {
	for _, id := range list {
		if keepSpecial || !b.Special(id) {
			dst = append(dst, b.TokenBytes(id)...)
		}
	}
	return dst
}

func ids(text string) []int32 {
	out := make([]int32, len(text))
	for i := range len(text) {
		out[i] = int32(text[i])
	}
	return out
}

// fakeEngine plays a script for each request.
type fakeEngine struct {
	play func(ctx context.Context, r *Request, send func(TokenEvent))
	err  error

	mu        sync.Mutex
	requests  []*Request
	submitted chan struct{} // gets a word for each request, when somebody waits
	canceled  chan struct{} // gets a word when a request's ctx ended before its script did
}

func (f *fakeEngine) Submit(ctx context.Context, r *Request) (<-chan TokenEvent, error) {
	if f.err != nil {
		return nil, f.err
	}
	f.mu.Lock()
	f.requests = append(f.requests, r)
	f.mu.Unlock()
	select {
	case f.submitted <- struct{}{}:
	default:
	}
	ch := make(chan TokenEvent)
	go func() {
		defer close(ch)
		f.play(ctx, r, func(ev TokenEvent) {
			select {
			case ch <- ev:
			case <-ctx.Done():
			}
		})
		if ctx.Err() != nil {
			select {
			case f.canceled <- struct{}{}:
			default:
			}
		}
	}()
	return ch, nil
}

func (f *fakeEngine) last() *Request {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.requests[len(f.requests)-1]
}

func (f *fakeEngine) Model() ModelInfo {
	return ModelInfo{ID: "tiny", Aliases: []string{"other"}, Created: time.Unix(1700000000, 0), Context: 200, Vocab: vocab,
		EndTokens: []int32{eos}, BlockTokens: 16, Blocks: 64}
}
func (f *fakeEngine) Stats() Stats { return Stats{Running: 3, PrefixHits: 7} }
func (f *fakeEngine) Status() any  { return map[string]int{"blocks_total": 64} }

// says is a script: each byte a token, then the finish.
func says(text, finish string) func(context.Context, *Request, func(TokenEvent)) {
	return func(_ context.Context, _ *Request, send func(TokenEvent)) {
		send(TokenEvent{Kind: EventPhase, Phase: PhasePrefilling})
		for i, id := range ids(text) {
			ev := TokenEvent{Token: id, CachedTokens: 2}
			if finish == openai.FinishLength && i == len(text)-1 {
				ev.Finish = finish
			}
			send(ev)
		}
		if finish == openai.FinishStop {
			send(TokenEvent{Token: eos, Finish: finish})
		}
	}
}

type harness struct {
	t      *testing.T
	engine *fakeEngine
	url    string
	client *http.Client
}

// start runs a server on a real socket.
func start(t *testing.T, e *fakeEngine, change func(*Config)) *harness {
	t.Helper()
	e.canceled = make(chan struct{}, 16)
	tpl, err := chat.New(`{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}{% if messages[0].content == 'bad' %}{{ raise_exception('bad talk') }}{% endif %}`, chat.Options{})
	if err != nil {
		t.Fatal(err)
	}
	cfg := Config{Engine: e, Tokenizer: bytesTokenizer{}, Chat: tpl, Heartbeat: time.Minute}
	if change != nil {
		change(&cfg)
	}
	s, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }()
	h := &harness{t: t, engine: e, url: "http://" + l.Addr().String(), client: &http.Client{Transport: &http.Transport{}}}
	t.Cleanup(func() {
		h.client.CloseIdleConnections()
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		// Shutdown waits for the pumps: a goroutine left behind fails the test here.
		if err := s.Shutdown(ctx); err != nil {
			t.Errorf("shut down: %v", err)
		}
		if err := <-served; err != nil {
			t.Errorf("serve: %v", err)
		}
	})
	return h
}

func (h *harness) post(path, body string) (int, string) {
	h.t.Helper()
	resp, err := h.client.Post(h.url+path, "application/json", strings.NewReader(body))
	if err != nil {
		h.t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		h.t.Fatal(err)
	}
	return resp.StatusCode, string(b)
}

func (h *harness) get(path string) (int, string) {
	h.t.Helper()
	resp, err := h.client.Get(h.url + path)
	if err != nil {
		h.t.Fatal(err)
	}
	defer resp.Body.Close()
	b, _ := io.ReadAll(resp.Body)
	return resp.StatusCode, string(b)
}

// lines are a native answer's events, data events cut down to what matters.
func lines(t *testing.T, body string) []string {
	t.Helper()
	var out []string
	s := openaitest.NewScanner(strings.NewReader(body), nil)
	for {
		ev, err := s.Next()
		if errors.Is(err, io.EOF) {
			return out
		}
		if err != nil {
			t.Fatalf("%v in %q", err, body)
		}
		if ev.Kind != openai.EventData {
			out = append(out, strings.TrimSpace(string(ev.Raw)))
			continue
		}
		c, err := openai.ParseChunk(ev.Arg)
		if err != nil {
			t.Fatal(err)
		}
		switch {
		case c.Usage != nil:
			out = append(out, fmt.Sprintf("usage %d+%d cached %d", c.Usage.Prompt, c.Usage.Completion, c.Usage.Cached))
		case c.Role:
			out = append(out, "role")
		case c.Finish != "":
			out = append(out, strings.TrimSpace("finish "+c.Finish+" "+c.Text))
		default:
			out = append(out, fmt.Sprintf("text %q", c.Text))
		}
	}
}

func (h *harness) expect(path, body string, want ...string) {
	h.t.Helper()
	status, got := h.post(path, body)
	if status != http.StatusOK {
		h.t.Fatalf("status %d: %s", status, got)
	}
	if g, w := strings.Join(lines(h.t, got), "\n"), strings.Join(want, "\n"); g != w {
		h.t.Errorf("got:\n%s\nwant:\n%s", g, w)
	}
}
