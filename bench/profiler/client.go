package profiler

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strconv"
	"time"
)

// Prompts are token ids of this range: in every vocabulary, and hardly anywhere those of special tokens.
const (
	idFirst = 32
	idCount = 200
)

// prompt is one of tokens that no other seed begins with.
func prompt(tokens int, seed ...uint64) []byte {
	mix := uint64(0x9e3779b97f4a7c15)
	for _, s := range seed {
		mix = (mix ^ s) * 0xff51afd7ed558ccd
		mix ^= mix >> 33
	}
	r := rand.New(rand.NewPCG(mix, seed[0]))
	b := make([]byte, 0, 4*tokens+2)
	b = append(b, '[')
	for i := range tokens {
		if i > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendInt(b, int64(idFirst+r.IntN(idCount)), 10)
	}
	return append(b, ']')
}

// first are the first tokens of a prompt.
func first(prompt []byte, tokens int) []byte {
	at := 0
	for range tokens {
		n := bytes.IndexAny(prompt[at+1:], ",]")
		at += 1 + n
	}
	return append(append([]byte{}, prompt[:at]...), ']')
}

// client asks one engine.
type client struct {
	http  *http.Client
	base  string // http://host:port
	model string
}

// told is what a stream said at its end.
type told struct {
	tokens int // of the answer
	prompt int
	cached int  // -1: not said
	usage  bool // said at all
}

// event is what is read of one.
type event struct {
	Choices []struct {
		Text   string  `json:"text"`
		IDs    []int32 `json:"token_ids"`
		Finish *string `json:"finish_reason"`
	} `json:"choices"`
	Usage *struct {
		Prompt     int `json:"prompt_tokens"`
		Completion int `json:"completion_tokens"`
		Details    *struct {
			Cached int `json:"cached_tokens"`
		} `json:"prompt_tokens_details"`
	} `json:"usage"`
	Error json.RawMessage `json:"error"`
}

// errRefused is an answer other than 200.
type errRefused struct {
	code int
	body string
}

func (e *errRefused) Error() string {
	return fmt.Sprintf("the engine answers %d: %s", e.code, e.body)
}

// generate streams max tokens behind a prompt of token ids. seen is called with how many tokens there are so far, whenever there are more; a
// false ends it.
func (c *client) generate(ctx context.Context, prompt []byte, max int, seen func(tokens int, at time.Time) bool) (*told, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	body := fmt.Appendf(nil, `{"model":%q,"stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true},"return_token_ids":true,"temperature":0,"ignore_eos":true,"max_tokens":%d,"prompt":`, c.model, max)
	body = append(append(body, prompt...), '}')
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.base+"/v1/completions", bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		said, _ := io.ReadAll(io.LimitReader(resp.Body, 300))
		return nil, &errRefused{resp.StatusCode, string(bytes.TrimSpace(said))}
	}
	return read(resp.Body, seen)
}

var (
	dataMark = []byte("data:")
	doneMark = []byte("[DONE]")
)

func read(from io.Reader, seen func(tokens int, at time.Time) bool) (*told, error) {
	t := &told{cached: -1}
	in := bufio.NewReaderSize(from, 64<<10)
	for {
		line, err := in.ReadBytes('\n')
		if err != nil {
			return nil, fmt.Errorf("the stream ended early: %w", err)
		}
		at := time.Now()
		data, ok := bytes.CutPrefix(line, dataMark)
		if data = bytes.TrimSpace(data); !ok || len(data) == 0 {
			continue
		}
		if bytes.Equal(data, doneMark) {
			if t.tokens == 0 {
				return nil, errors.New("the engine's answer has no token")
			}
			return t, nil
		}
		var e event
		if err := json.Unmarshal(data, &e); err != nil {
			return nil, fmt.Errorf("read the stream: %w in %.200q", err, data)
		}
		if len(e.Error) > 0 && string(e.Error) != "null" {
			return nil, fmt.Errorf("the engine answers an error: %.300s", e.Error)
		}
		if before := t.tokens; t.add(&e) > before && seen != nil && !seen(t.tokens, at) {
			return t, nil
		}
	}
}

// add counts tokens: as the engine counts them where it says so with each event, by their ids where it sends those, and an event for one
// otherwise.
func (t *told) add(e *event) int {
	if u := e.Usage; u != nil {
		t.prompt, t.usage = u.Prompt, true
		t.tokens = max(t.tokens, u.Completion)
		if u.Details != nil {
			t.cached = u.Details.Cached
		}
		return t.tokens
	}
	for _, c := range e.Choices {
		switch {
		case len(c.IDs) > 0:
			t.tokens += len(c.IDs)
		case c.Text != "" || c.Finish != nil && t.tokens == 0:
			t.tokens++
		}
	}
	return t.tokens
}
