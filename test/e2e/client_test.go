package e2e

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// request is what a test asks for. Zero fields are left out of the body.
type request struct {
	Model       string  // the tiny one's name
	Prompt      []int32 // completions, by token ids
	Chat        string  // chat with one user message
	MaxTokens   int
	Temperature float64
	TopP        float64
	TopK        int
	Seed        uint64
	Stream      bool
	Stop        []string
	MayEnd      bool // heed the model's end tokens
}

func (r request) path() string {
	if r.Chat != "" {
		return "/v1/chat/completions"
	}
	return "/v1/completions"
}

func (r request) body() []byte {
	m := map[string]any{
		"model":      cmp.Or(r.Model, "tiny"),
		"max_tokens": r.MaxTokens, "temperature": r.Temperature, "ignore_eos": !r.MayEnd, "return_token_ids": true,
	}
	if r.Chat != "" {
		m["messages"] = []map[string]string{{"role": "user", "content": r.Chat}}
	} else {
		m["prompt"] = r.Prompt
	}
	if r.TopP != 0 {
		m["top_p"] = r.TopP
	}
	if r.TopK != 0 {
		m["top_k"] = r.TopK
	}
	if r.Temperature != 0 {
		m["seed"] = r.Seed
	}
	if len(r.Stop) > 0 {
		m["stop"] = r.Stop
	}
	if r.Stream {
		m["stream"] = true
		m["stream_options"] = map[string]any{"include_usage": true}
	}
	b, err := json.Marshal(m)
	if err != nil {
		panic(err)
	}
	return b
}

// streamed is the request with the answer streamed.
func (r request) streamed() request {
	r.Stream = true
	return r
}

type apiError struct {
	Message string  `json:"message"`
	Type    string  `json:"type"`
	Param   *string `json:"param"`
	Code    *string `json:"code"`
}

type usage struct {
	Prompt     int `json:"prompt_tokens"`
	Completion int `json:"completion_tokens"`
	Total      int `json:"total_tokens"`
	Details    struct {
		Cached int `json:"cached_tokens"`
	} `json:"prompt_tokens_details"`
}

// answer is all that a client was given.
type answer struct {
	Status int
	Header http.Header
	ID     string
	Model  string
	Text   string
	Tokens []int32
	Prompt []int32 // prompt_token_ids
	Finish string
	Usage  *usage
	Error  *apiError // in OpenAI's shape, from a status or from within a stream
	Done   bool      // [DONE] was seen, or the body of a whole answer was complete
	Events int       // data events of a stream
	Wrong  []string  // what no client should be given
	Broken error     // the connection ended before the answer did

	First, Last time.Time     // when the first and the last byte came
	Gap         time.Duration // the longest time between two of them, or before the first
}

type choice struct {
	Index   int    `json:"index"`
	Text    string `json:"text"`
	Message struct {
		Role    string `json:"role"`
		Content string `json:"content"`
	} `json:"message"`
	Delta struct {
		Role    string `json:"role"`
		Content string `json:"content"`
	} `json:"delta"`
	Finish         *string `json:"finish_reason"`
	TokenIDs       []int32 `json:"token_ids"`
	PromptTokenIDs []int32 `json:"prompt_token_ids"`
}

type body struct {
	ID             string    `json:"id"`
	Object         string    `json:"object"`
	Created        int64     `json:"created"`
	Model          string    `json:"model"`
	Choices        []choice  `json:"choices"`
	Usage          *usage    `json:"usage"`
	Error          *apiError `json:"error"`
	PromptTokenIDs []int32   `json:"prompt_token_ids"`
}

// stream is a request under way.
type stream struct {
	req    request
	cancel context.CancelFunc
	done   chan struct{}
	sent   time.Time

	mu      sync.Mutex
	a       answer
	changed chan struct{}
}

// httpClient reuses connections as real clients do.
var httpClient = &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64}}

// post sends a request and returns at once.
func post(base string, r request) *stream {
	return postWith(base, r, nil)
}

func postWith(base string, r request, header http.Header) *stream {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	s := &stream{req: r, cancel: cancel, done: make(chan struct{}), changed: make(chan struct{}), sent: time.Now()}
	go func() {
		defer close(s.done)
		defer cancel()
		s.run(ctx, base, header)
	}()
	return s
}

// ask sends a request and waits for the end of the answer.
func ask(base string, r request) *answer { return post(base, r).wait() }

// wait returns the whole answer.
func (s *stream) wait() *answer {
	<-s.done
	return &s.a
}

// within waits for the end of the answer at most so long.
func (s *stream) within(d time.Duration) (*answer, error) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-s.done:
		return &s.a, nil
	case <-timer.C:
		s.mu.Lock()
		defer s.mu.Unlock()
		return nil, fmt.Errorf("no end of the answer in %s: %d tokens so far, error %v", d, len(s.a.Tokens), s.a.Error)
	}
}

// hangUp closes the connection and waits until that is done.
func (s *stream) hangUp() {
	s.cancel()
	<-s.done
}

// until waits until the client has at least n tokens. It is an error if the answer ends before.
func (s *stream) until(n int, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	for {
		s.mu.Lock()
		got, changed := len(s.a.Tokens), s.changed
		s.mu.Unlock()
		if got >= n {
			return nil
		}
		select {
		case <-changed:
		case <-s.done:
			if len(s.a.Tokens) >= n {
				return nil
			}
			return fmt.Errorf("the answer ended after %d tokens: %s", len(s.a.Tokens), s.a.outcome())
		case <-timer.C:
			return fmt.Errorf("%d tokens in %s, want %d", got, d, n)
		}
	}
}

// tokens is how many the client has now.
func (s *stream) tokens() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.a.Tokens)
}

// ended tells whether the answer is complete.
func (s *stream) ended() bool {
	select {
	case <-s.done:
		return true
	default:
		return false
	}
}

func (s *stream) update(f func(a *answer)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f(&s.a)
	now := time.Now()
	if s.a.First.IsZero() {
		s.a.First, s.a.Last = now, s.sent
	}
	s.a.Gap = max(s.a.Gap, now.Sub(s.a.Last))
	s.a.Last = now
	close(s.changed)
	s.changed = make(chan struct{})
}

func (s *stream) run(ctx context.Context, base string, header http.Header) {
	broken := func(err error) { s.update(func(a *answer) { a.Broken = err }) }
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, base+s.req.path(), bytes.NewReader(s.req.body()))
	if err != nil {
		broken(err)
		return
	}
	for k, v := range header {
		req.Header[k] = v
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := httpClient.Do(req)
	if err != nil {
		broken(err)
		return
	}
	defer func() { _ = resp.Body.Close() }()
	s.update(func(a *answer) { a.Status, a.Header = resp.StatusCode, resp.Header })
	if s.req.Stream && resp.StatusCode == http.StatusOK {
		s.readStream(resp.Body)
		return
	}
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		broken(err)
		return
	}
	s.update(func(a *answer) { a.whole(data) })
}

func (s *stream) readStream(r io.Reader) {
	lines := bufio.NewScanner(r)
	lines.Buffer(make([]byte, 64<<10), 16<<20)
	for lines.Scan() {
		line := lines.Text()
		s.update(func(a *answer) { a.line(line) })
	}
	err := lines.Err()
	s.update(func(a *answer) {
		if err == nil && !a.Done && a.Error == nil {
			err = io.ErrUnexpectedEOF
		}
		a.Broken = err
	})
}

// line takes one line of a stream and notes what must not be there.
func (a *answer) line(line string) {
	wrong := func(format string, args ...any) {
		if len(a.Wrong) < 10 {
			a.Wrong = append(a.Wrong, fmt.Sprintf(format, args...))
		}
	}
	if line == "" || strings.HasPrefix(line, ":") {
		// comments are allowed by the format; ours are for routers alone
		for _, ours := range []string{": t ", ": phase", ": handoff", ": settled", ": final", ": failed", ": prior"} {
			if strings.HasPrefix(line, ours) {
				wrong("a line of the native dialect reached the client: %q", line)
			}
		}
		return
	}
	data, ok := strings.CutPrefix(line, "data: ")
	if !ok {
		wrong("not an event: %q", line)
		return
	}
	if a.Done || a.Error != nil {
		wrong("an event after the end: %q", line)
	}
	a.Events++
	if data == "[DONE]" {
		a.Done = true
		return
	}
	var b body
	if err := json.Unmarshal([]byte(data), &b); err != nil {
		wrong("not JSON: %q: %v", line, err)
		return
	}
	if b.Error != nil {
		a.Error = b.Error
		return
	}
	a.chunk(&b, wrong)
}

func (a *answer) chunk(b *body, wrong func(string, ...any)) {
	if a.ID == "" {
		a.ID, a.Model = b.ID, b.Model
	}
	if b.ID != a.ID || b.Model != a.Model || b.ID == "" || b.Created == 0 {
		wrong("chunk of %q (model %q, created %d) in the answer %q (model %q)", b.ID, b.Model, b.Created, a.ID, a.Model)
	}
	if b.PromptTokenIDs != nil {
		a.Prompt = b.PromptTokenIDs
	}
	if b.Usage != nil {
		if a.Usage != nil {
			wrong("a second usage chunk")
		}
		a.Usage = b.Usage
	}
	for _, c := range b.Choices {
		if c.PromptTokenIDs != nil {
			a.Prompt = c.PromptTokenIDs
		}
		if c.Delta.Role != "" && a.Events > 1 {
			wrong("the role in event %d", a.Events)
		}
		if a.Finish != "" {
			wrong("a choice after the finish reason: %q", c.Text+c.Delta.Content)
		}
		a.Text += c.Text + c.Delta.Content
		a.Tokens = append(a.Tokens, c.TokenIDs...)
		if c.Finish != nil {
			a.Finish = *c.Finish
		}
	}
}

// whole takes the body of an answer that is not streamed.
func (a *answer) whole(data []byte) {
	var b body
	if err := json.Unmarshal(data, &b); err != nil {
		a.Wrong = append(a.Wrong, fmt.Sprintf("status %d with a body that is not JSON: %.200q", a.Status, data))
		return
	}
	a.ID, a.Model, a.Usage, a.Error, a.Prompt = b.ID, b.Model, b.Usage, b.Error, b.PromptTokenIDs
	a.Done = b.Error == nil
	for _, c := range b.Choices {
		a.Text += c.Text + c.Message.Content
		a.Tokens = append(a.Tokens, c.TokenIDs...)
		if c.PromptTokenIDs != nil {
			a.Prompt = c.PromptTokenIDs
		}
		if c.Finish != nil {
			a.Finish = *c.Finish
		}
	}
}

// outcome says in a few words how it went.
func (a *answer) outcome() string {
	switch {
	case a.Error != nil:
		return fmt.Sprintf("error (status %d, %s): %s", a.Status, a.Error.Type, a.Error.Message)
	case a.Broken != nil:
		return fmt.Sprintf("broken: %v", a.Broken)
	case len(a.Wrong) > 0:
		return "wrong: " + strings.Join(a.Wrong, "; ")
	case a.Done:
		return fmt.Sprintf("%d tokens, %s", len(a.Tokens), a.Finish)
	}
	return "unfinished"
}

// equals says how the answer differs from the one that is right.
func (a *answer) equals(want *answer) error {
	if a.Error != nil || a.Broken != nil || !a.Done {
		return errors.New(a.outcome())
	}
	if len(a.Wrong) > 0 {
		return errors.New(a.outcome())
	}
	if i := firstDifference(a.Tokens, want.Tokens); i >= 0 {
		return fmt.Errorf("token %d of %d differs (%d wanted): got %v, want %v", i, len(a.Tokens), len(want.Tokens), around(a.Tokens, i), around(want.Tokens, i))
	}
	if a.Text != want.Text {
		return fmt.Errorf("the tokens are equal but the text differs: %.300q, want %.300q", a.Text, want.Text)
	}
	if a.Finish != want.Finish {
		return fmt.Errorf("finish_reason %q, want %q", a.Finish, want.Finish)
	}
	if a.Usage == nil {
		return errors.New("no usage")
	}
	if a.Usage.Prompt != want.Usage.Prompt || a.Usage.Completion != want.Usage.Completion || a.Usage.Total != a.Usage.Prompt+a.Usage.Completion {
		return fmt.Errorf("usage %+v, want %+v", *a.Usage, *want.Usage)
	}
	return nil
}

// equalsOrFails is for a request that a fault may have ended: a right answer, or a clear error behind a right beginning.
func (a *answer) equalsOrFails(want *answer) error {
	if a.Error == nil {
		return a.equals(want)
	}
	if a.Error.Message == "" || a.Error.Type == "" {
		return fmt.Errorf("an error that is not clear: %+v", *a.Error)
	}
	if a.Status != http.StatusOK && a.Status < 400 {
		return fmt.Errorf("an error with status %d", a.Status)
	}
	if len(a.Wrong) > 0 {
		return errors.New(strings.Join(a.Wrong, "; "))
	}
	if len(a.Tokens) > len(want.Tokens) || !slices.Equal(a.Tokens, want.Tokens[:len(a.Tokens)]) {
		return fmt.Errorf("%d tokens before the error are not the beginning of the right answer", len(a.Tokens))
	}
	return nil
}

func firstDifference(a, b []int32) int {
	for i := range max(len(a), len(b)) {
		if i >= len(a) || i >= len(b) || a[i] != b[i] {
			return i
		}
	}
	return -1
}

func around(v []int32, i int) []int32 { return v[min(len(v), max(0, i-2)):min(len(v), i+3)] }

// mustEqual fails the test when the answer is not the wanted one.
func mustEqual(t testing.TB, a, want *answer, what string) {
	t.Helper()
	if err := a.equals(want); err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}
