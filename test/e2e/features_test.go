package e2e

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"
)

// feature is a request whose answer has more than one text.
type feature struct {
	name, path string
	n          int
	body       map[string]any
}

func features() []feature {
	penalties := map[string]any{"presence_penalty": 1.1, "frequency_penalty": 0.7, "repetition_penalty": 1.3, "temperature": 1.2, "seed": 5, "max_tokens": 60}
	with := func(m map[string]any, kv ...any) map[string]any {
		m = maps.Clone(m)
		for i := 0; i < len(kv); i += 2 {
			m[kv[i].(string)] = kv[i+1]
		}
		return m
	}
	prompt := func(seed uint64, n int) map[string]any {
		return map[string]any{"prompt": seededPrompt(60_000+seed, n), "max_tokens": 40, "seed": 77, "temperature": 1.4}
	}
	chat := map[string]any{"messages": []map[string]string{{"role": "user", "content": "Water falls down the race."}}, "max_tokens": 30, "seed": -3}
	list := []feature{
		{"penalties", "", 1, with(prompt(1, 130), "logprobs", 3)},
		{"penalties of greedy", "", 1, with(prompt(2, 70), "temperature", 0, "presence_penalty", 2, "frequency_penalty", 0.5)},
		{"logit_bias and min_p", "", 1, with(prompt(3, 50), "logit_bias", map[string]float64{"65": -100, "97": 4.5, "98": 5}, "min_p", 0.05, "logprobs", 0)},
		{"several", "", 3, with(prompt(4, 200), "top_p", 0.9, "logprobs", 2)},
		{"several of one token", "", 4, with(prompt(5, 33), "max_tokens", 1, "logprobs", 1)},
		{"echo", "", 2, with(prompt(6, 90), "echo", true, "logprobs", 2)},
		{"echo without logprobs", "", 1, with(prompt(7, 40), "echo", true)},
		{"echo alone", "", 1, with(prompt(8, 100), "echo", true, "max_tokens", 0, "logprobs", 4)},
		{"chat", "/v1/chat/completions", 3, with(chat, "logprobs", true, "top_logprobs", 4, "frequency_penalty", 1, "min_p", 0.02)},
		{"chat, logprobs alone", "/v1/chat/completions", 1, with(chat, "logprobs", true)},
	}
	maps.Copy(list[0].body, penalties)
	for i := range list {
		if list[i].path == "" {
			list[i].path = "/v1/completions"
		}
		maps.Copy(list[i].body, map[string]any{"model": "tiny", "n": list[i].n, "ignore_eos": true, "return_token_ids": true})
	}
	return list
}

// part is all of one choice, log probabilities to the last digit as they were written.
type part struct {
	Text, Finish string
	Tokens       []int32
	Logprobs     map[string]string
}

type parts struct {
	Choices []part
	Usage   usage
}

// add takes a chunk of a stream, or a whole answer.
func (p *parts) add(data []byte) error {
	var b struct {
		Choices []struct {
			choice
			Logprobs map[string]json.RawMessage `json:"logprobs"`
		} `json:"choices"`
		Usage *usage    `json:"usage"`
		Error *apiError `json:"error"`
	}
	if err := json.Unmarshal(data, &b); err != nil {
		return err
	}
	if b.Error != nil {
		return errors.New(b.Error.Message)
	}
	if b.Usage != nil {
		p.Usage = *b.Usage
		p.Usage.Details.Cached = 0 // who was asked before is not the point
	}
	for _, c := range b.Choices {
		if c.Index >= len(p.Choices) {
			return fmt.Errorf("choice %d of %d", c.Index, len(p.Choices))
		}
		at := &p.Choices[c.Index]
		at.Text += c.Text + c.Delta.Content + c.Message.Content
		at.Tokens = append(at.Tokens, c.TokenIDs...)
		if c.Finish != nil {
			at.Finish += *c.Finish
		}
		for name, list := range c.Logprobs {
			if string(list) == "null" {
				continue
			}
			if at.Logprobs == nil {
				at.Logprobs = map[string]string{}
			}
			if at.Logprobs[name] != "" {
				at.Logprobs[name] += ","
			}
			at.Logprobs[name] += strings.Trim(string(list), "[]")
		}
	}
	return nil
}

// askFor sends a feature's request. onEvent, if given, is told of each event of a stream.
func askFor(base string, f feature, stream bool, onEvent func(n int)) (*parts, error) {
	m := maps.Clone(f.body)
	if stream {
		m["stream"], m["stream_options"] = true, map[string]any{"include_usage": true}
	}
	raw, err := json.Marshal(m)
	if err != nil {
		return nil, err
	}
	client := http.Client{Timeout: 60 * time.Second}
	resp, err := client.Post(base+f.path, "application/json", bytes.NewReader(raw))
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	p := &parts{Choices: make([]part, f.n)}
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, 16<<20)
	done := false
	for n := 0; lines.Scan(); {
		line := strings.TrimPrefix(lines.Text(), "data: ")
		switch line {
		case "":
			continue
		case "[DONE]":
			done = true
			continue
		}
		if err := p.add([]byte(line)); err != nil {
			return nil, fmt.Errorf("%w in %.300s", err, line)
		}
		if n++; onEvent != nil {
			onEvent(n)
		}
	}
	if stream && !done && lines.Err() == nil {
		return nil, errors.New("the stream ended without [DONE]")
	}
	return p, lines.Err()
}

func mustEqualParts(t *testing.T, got, want *parts, what string) {
	t.Helper()
	g, _ := json.MarshalIndent(got, "", " ")
	w, _ := json.MarshalIndent(want, "", " ")
	if bytes.Equal(g, w) {
		return
	}
	at := 0
	for at < len(g) && at < len(w) && g[at] == w[at] {
		at++
	}
	from := max(0, at-300)
	t.Errorf("%s: got\n...%s\nwant\n...%s", what, g[from:min(len(g), at+200)], w[from:min(len(w), at+200)])
}

// TestFeatures: log probabilities, penalties, biases, min_p, echoes and several choices are what the same engine gives
// run whole, streamed or not, and with a decode worker that is killed in their middle.
func TestFeatures(t *testing.T) {
	needAll(t)
	c := start(t, options{nodes: 2})
	o := oracleFor(t, tinyModel(t))
	for _, f := range features() {
		t.Run(f.name, func(t *testing.T) {
			c.in(t)
			want, err := askFor(o.url, f, false, nil)
			if err != nil {
				t.Fatal(err)
			}
			if max := f.body["max_tokens"].(int); len(want.Choices[0].Tokens) != max || want.Usage.Completion != max*f.n || f.body["logprobs"] != nil && want.Choices[f.n-1].Logprobs == nil {
				t.Fatalf("the engine alone gives %+v", want)
			}
			whole, err := askFor(o.url, f, true, nil)
			if err != nil {
				t.Fatal(err)
			}
			mustEqualParts(t, whole, want, "the engine's stream")
			settledBefore, _ := c.moved()
			for _, stream := range []bool{true, false} {
				got, err := askFor(c.url(), f, stream, nil)
				if err != nil {
					t.Fatal(err)
				}
				mustEqualParts(t, got, want, fmt.Sprintf("through the router, stream %v", stream))
			}
			c.blocksBack(waitShort, "after "+f.name)
			if settled, _ := c.moved(); f.body["max_tokens"].(int) > 1 && settled < settledBefore+2*uint64(f.n) {
				t.Errorf("%d leases settled", settled-settledBefore)
			}
		})
	}
	t.Run("one worker alone", func(t *testing.T) { featureWhole(t, c, o) })
	t.Run("decode worker killed", func(t *testing.T) { featureKill(t, c, o) })
}

// featureWhole: with prefill stopped, the router has decode's worker serve requests whole.
func featureWhole(t *testing.T, c *cluster, o *oracle) {
	c.in(t)
	stopped := c.prefill()
	signal := func(sig syscall.Signal) {
		if err := syscall.Kill(stopped.PID, sig); err != nil {
			t.Error(err)
		}
	}
	signal(syscall.SIGSTOP)
	defer func() {
		signal(syscall.SIGCONT)
		c.split(waitShort)
		c.blocksBack(waitShort, "after the stop")
	}()
	for _, f := range features()[3:6] {
		want, err := askFor(o.url, f, false, nil)
		if err != nil {
			t.Fatal(err)
		}
		got, err := askFor(c.url(), f, true, nil)
		if err != nil {
			t.Fatal(err)
		}
		mustEqualParts(t, got, want, f.name)
	}
}

// featureKill: no log probability is lost or given twice when a stream is taken over.
func featureKill(t *testing.T, c *cluster, o *oracle) {
	c.in(t)
	f := features()[0]
	f.n = 3
	f.body["n"], f.body["max_tokens"] = 3, 700
	want, err := askFor(o.url, f, false, nil)
	if err != nil {
		t.Fatal(err)
	}
	victim := c.decode()
	events := 0
	got, err := askFor(c.url(), f, true, func(n int) {
		if events = n; n == 300 {
			if err := syscall.Kill(victim.PID, syscall.SIGKILL); err != nil {
				t.Error(err)
			}
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	if events < 1500 {
		t.Errorf("%d events: the kill cannot have been in the middle", events)
	}
	mustEqualParts(t, got, want, "after the kill")
	c.split(waitShort)
	c.blocksBack(waitShort, "after the kill")
}
