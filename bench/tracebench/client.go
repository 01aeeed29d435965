package tracebench

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
	"sync"
	"time"

	"github.com/headrace/headrace/bench/pairsim"
)

// Prompts are made of words that come again as those of a language do (Zipf), since tokenizers remember the words they have met.
const (
	vocabulary   = 8192
	wordExponent = 1.07
)

var dictionary = sync.OnceValue(func() []string {
	r := rand.New(rand.NewPCG(1, 0x776f726473))
	words := make([]string, vocabulary)
	for i := range words {
		w := make([]byte, 2+r.IntN(8), 10)
		for k := range w {
			w[k] = byte('a' + r.IntN(26))
		}
		words[i] = string(append(w, ' '))
	}
	return words
})

// blockText is the text of a block of a trace: different from its first byte on for another number, and as many tokens for a
// stand-in as it has bytes.
func blockText(id uint32) [pairsim.BlockTokens]byte {
	var b [pairsim.BlockTokens]byte
	next := rand.NewZipf(rand.New(rand.NewPCG(uint64(id), 0x7472616365)), wordExponent, 1, vocabulary-1)
	words := dictionary()
	for n := copy(b[:], strconv.FormatUint(uint64(id), 10)+" "); n < len(b); {
		n += copy(b[n:], words[next.Uint64()])
	}
	return b
}

// body is a request of the trace, for a stream with usage at its end.
func body(q *pairsim.Request) []byte {
	b := make([]byte, 0, q.Input+256)
	b = fmt.Appendf(b, `{"model":%q,"stream":true,"stream_options":{"include_usage":true},"temperature":0,"ignore_eos":true,"max_tokens":%d,"prompt":"`, model, q.Output)
	left := q.Input
	for _, id := range q.Blocks {
		text := blockText(id)
		n := min(left, len(text))
		b = append(b, text[:n]...)
		left -= n
	}
	return append(b, `"}`...)
}

// bodies are those of a trace.
func bodies(trace []pairsim.Request) [][]byte {
	out := make([][]byte, len(trace))
	for i := range trace {
		out[i] = body(&trace[i])
	}
	return out
}

// answer is what a client saw of one request.
type answer struct {
	late   time.Duration // behind its time in the trace, when it was sent
	first  time.Duration // from its time in the trace to the first token
	last   time.Duration // the same, to the last one
	tokens int           // of the answer
	prompt int           // tokens, as the engine counts them
	cached int           // of these
	ended  time.Time
	err    error
}

var (
	dataMark  = []byte("data: ")
	usageMark = []byte(`"usage":{`)
	doneMark  = []byte("[DONE]")
)

// ask sends a request under an id, whose time is at, and reads the stream to its end.
func ask(ctx context.Context, c *http.Client, url, id string, q *pairsim.Request, raw []byte, at time.Time) (a answer) {
	a.late = time.Since(at)
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(raw))
	if err != nil {
		a.err = err
		return a
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Request-Id", id)
	resp, err := c.Do(req)
	if err != nil {
		a.err = err
		return a
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		said, _ := io.ReadAll(io.LimitReader(resp.Body, 4<<10))
		a.err = fmt.Errorf("%s: %.300s", resp.Status, said)
		return a
	}
	a.err = a.read(resp.Body, at)
	a.ended = time.Now()
	switch {
	case a.err != nil:
	case a.prompt != q.Input:
		a.err = fmt.Errorf("a prompt of %d tokens was one of %d to the engine", q.Input, a.prompt)
	case a.tokens != q.Output:
		a.err = fmt.Errorf("%d tokens, want %d", a.tokens, q.Output)
	}
	return a
}

func (a *answer) read(from io.Reader, at time.Time) error {
	in := bufio.NewReaderSize(from, 32<<10)
	for {
		line, err := in.ReadSlice('\n')
		if err != nil {
			return errors.Join(errors.New("the stream ends without its end"), err)
		}
		data, ok := bytes.CutPrefix(line, dataMark)
		switch {
		case !ok:
		case bytes.HasPrefix(data, doneMark):
			return nil
		case bytes.Contains(data, usageMark):
			var u struct {
				Usage struct {
					Prompt     int `json:"prompt_tokens"`
					Completion int `json:"completion_tokens"`
					Details    struct {
						Cached int `json:"cached_tokens"`
					} `json:"prompt_tokens_details"`
				} `json:"usage"`
			}
			if err := json.Unmarshal(data, &u); err != nil {
				return fmt.Errorf("usage %.200q: %w", data, err)
			}
			a.prompt, a.tokens, a.cached = u.Usage.Prompt, u.Usage.Completion, u.Usage.Details.Cached
		default:
			a.last = time.Since(at)
			if a.first == 0 {
				a.first = a.last
			}
		}
	}
}
