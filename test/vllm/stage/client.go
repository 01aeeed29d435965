package stage

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// Request is what a client asks for, always greedily and past the end token.
type Request struct {
	Model     string
	Prompt    []int  // completions by token ids, or
	Text      string // completions by text, or
	Chat      string // chat with one message
	MaxTokens int
	Stream    bool
	Salt      string         // keeps its prefixes apart
	More      map[string]any // other fields of the body; nil values take fields away
}

// Answer is what came back.
type Answer struct {
	Status   int
	ID       string // of the request, as a router calls it
	Prompt   []int  // its tokens, as the engine says; not of every answer
	Tokens   []int
	Logprobs []float64
	Text     string
	Finish   string
	Chunks   int           // of a stream
	First    time.Duration // until the first token, of a stream
	Took     time.Duration
	Params   json.RawMessage // kv_transfer_params
	Err      error           // anything that is not a whole and clear answer with status 200
}

func (r Request) body() (path string, body []byte) {
	m := map[string]any{"model": r.Model, "max_tokens": r.MaxTokens, "temperature": 0, "ignore_eos": true, "return_token_ids": true}
	path = "/completions"
	switch {
	case r.Chat != "":
		path = "/chat/completions"
		m["messages"] = []map[string]string{{"role": "user", "content": r.Chat}}
		m["logprobs"], m["top_logprobs"] = true, 1
	case r.Text != "":
		m["prompt"], m["logprobs"] = r.Text, 1
	default:
		m["prompt"], m["logprobs"] = r.Prompt, 1
	}
	if r.Stream {
		m["stream"] = true
	}
	if r.Salt != "" {
		m["cache_salt"] = r.Salt
	}
	for k, v := range r.More {
		if m[k] = v; v == nil {
			delete(m, k)
		}
	}
	body, err := json.Marshal(m)
	if err != nil {
		panic(err) // only strings and numbers go in
	}
	return path, body
}

// requests goes without a limit of its own: contexts have one. vLLM's server closes connections that were idle for 5 s.
var requests = &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64, DisableCompression: true, IdleConnTimeout: 3 * time.Second}}

// Ask sends a request and waits for the end of the answer.
func Ask(ctx context.Context, base string, r Request) *Answer { return AskWith(ctx, base, r, nil) }

// AskWith also calls each with every token of a stream as it comes.
func AskWith(ctx context.Context, base string, r Request, each func(*Answer)) *Answer {
	a := &Answer{}
	begun := time.Now()
	ctx, cancel := context.WithTimeout(ctx, 3*time.Minute)
	defer cancel()
	a.Err = a.ask(ctx, base, r, begun, each)
	a.Took = time.Since(begun)
	return a
}

func (a *Answer) ask(ctx context.Context, base string, r Request, begun time.Time, each func(*Answer)) error {
	path, body := r.body()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, base+path, bytes.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := requests.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	a.Status, a.ID = resp.StatusCode, resp.Header.Get("X-Request-Id")
	if resp.StatusCode != http.StatusOK {
		said, _ := io.ReadAll(io.LimitReader(resp.Body, 4<<10))
		return fmt.Errorf("status %s: %s", resp.Status, bytes.TrimSpace(said))
	}
	if !r.Stream {
		data, err := io.ReadAll(resp.Body)
		if err != nil {
			return err
		}
		if err := a.add(data); err != nil {
			return err
		}
		return a.whole(r)
	}
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, 4<<20)
	for lines.Scan() {
		data, ok := strings.CutPrefix(lines.Text(), "data: ")
		if !ok {
			continue
		}
		if data == "[DONE]" {
			return a.whole(r)
		}
		had := len(a.Tokens)
		if err := a.add([]byte(data)); err != nil {
			return err
		}
		a.Chunks++
		if had == 0 && len(a.Tokens) > 0 {
			a.First = time.Since(begun)
		}
		if each != nil && len(a.Tokens) > had {
			each(a)
		}
	}
	if err := lines.Err(); err != nil {
		return err
	}
	return fmt.Errorf("the stream ends after %d tokens without [DONE]", len(a.Tokens))
}

func (a *Answer) whole(r Request) error {
	if a.Finish == "" {
		return fmt.Errorf("no finish reason after %d tokens", len(a.Tokens))
	}
	if v, changed := r.More["logprobs"]; changed && v == nil {
		return nil
	}
	if len(a.Logprobs) != len(a.Tokens) {
		return fmt.Errorf("%d tokens with %d logprobs", len(a.Tokens), len(a.Logprobs))
	}
	return nil
}

// add takes a whole answer or a chunk of one.
func (a *Answer) add(data []byte) error {
	var b struct {
		Choices []struct {
			Text    string                   `json:"text"`
			Message struct{ Content string } `json:"message"`
			Delta   struct{ Content string } `json:"delta"`
			Tokens  []int                    `json:"token_ids"`
			Prompt  []int                    `json:"prompt_token_ids"`
			Finish  *string                  `json:"finish_reason"`
			Logs    *struct {
				Token   []float64                   `json:"token_logprobs"`
				Content []struct{ Logprob float64 } `json:"content"`
			} `json:"logprobs"`
		} `json:"choices"`
		Prompt []int           `json:"prompt_token_ids"`
		Params json.RawMessage `json:"kv_transfer_params"`
		Error  json.RawMessage `json:"error"`
	}
	if err := json.Unmarshal(data, &b); err != nil {
		return fmt.Errorf("not JSON: %.200q: %w", data, err)
	}
	if len(b.Error) > 0 && !bytes.Equal(b.Error, []byte("null")) {
		return fmt.Errorf("an error in the answer: %s", b.Error)
	}
	if b.Params != nil {
		a.Params = b.Params
	}
	a.Prompt = append(a.Prompt, b.Prompt...)
	for _, c := range b.Choices {
		a.Prompt = append(a.Prompt, c.Prompt...)
		a.Text += c.Text + c.Message.Content + c.Delta.Content
		a.Tokens = append(a.Tokens, c.Tokens...)
		if c.Logs != nil {
			a.Logprobs = append(a.Logprobs, c.Logs.Token...)
			for _, l := range c.Logs.Content {
				a.Logprobs = append(a.Logprobs, l.Logprob)
			}
		}
		if c.Finish != nil {
			a.Finish = *c.Finish
		}
	}
	return nil
}

// logprob is the i-th one, for people.
func (a *Answer) logprob(i int) string {
	if i >= len(a.Logprobs) {
		return "unknown"
	}
	return strconv.FormatFloat(a.Logprobs[i], 'f', 4, 64)
}

// Differs says how an answer differs from the right one in its tokens, nil when it does not; and by how much the
// logprobs differ at most.
func (a *Answer) Differs(want *Answer) (logprobs float64, err error) {
	if want.Err != nil {
		return 0, fmt.Errorf("the answer to compare with: %w", want.Err)
	}
	if a.Err != nil {
		return 0, a.Err
	}
	if len(a.Tokens) == 0 || len(a.Tokens) != len(want.Tokens) {
		return 0, fmt.Errorf("%d tokens, want %d", len(a.Tokens), len(want.Tokens))
	}
	for i := range a.Tokens {
		if a.Tokens[i] != want.Tokens[i] {
			return 0, fmt.Errorf("token %d of %d is %d, want %d (logprobs %s, want %s)", i, len(a.Tokens), a.Tokens[i], want.Tokens[i], a.logprob(i), want.logprob(i))
		}
		if i >= len(a.Logprobs) || i >= len(want.Logprobs) {
			continue
		}
		logprobs = max(logprobs, math.Abs(a.Logprobs[i]-want.Logprobs[i]))
	}
	if a.Text != want.Text || a.Finish != want.Finish {
		return logprobs, errors.New("the tokens are equal, but the text or the finish reason is not")
	}
	return logprobs, nil
}
