package dialects

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/tidwall/gjson"

	"github.com/headrace/headrace/router/body"
)

// question is a request whose stream is remembered.
func question(t testing.TB, path, text string) *Request {
	t.Helper()
	b, refused := body.Parse([]byte(text))
	if refused != nil {
		t.Fatal(refused)
	}
	return &Request{Path: path, Body: b, Stream: b.Stream}
}

const pathChat = "/v1/chat/completions"

// speaker makes events as vLLM does.
type speaker struct {
	chat, logs, ids bool
	id              string
	resumed         int      // of tokens
	tokens          []string // the text of each token of the answer; "" for one that ends within a character
	prompt          int
	at, offset      int // of the next token, of its text
}

func (s *speaker) head() string {
	return fmt.Sprintf(`{"id":"%s","object":"x","created":17%s,"model":"m","choices":[`, s.id, s.id[1:])
}

func (s *speaker) list(from, n int) string {
	var out []string
	for i := range n {
		out = append(out, fmt.Sprint(1000+from+i))
	}
	return strings.Join(out, ",")
}

// role is a chat's first event.
func (s *speaker) role() string {
	return "data: " + s.head() + `{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"prompt_token_ids":` + s.promptIDs() + "}\n\n"
}

func (s *speaker) promptIDs() string {
	if !s.ids {
		return "null"
	}
	return "[" + strings.TrimSuffix(strings.Repeat("7,", s.prompt), ",") + "]"
}

// say makes an event of the next n tokens.
func (s *speaker) say(n int) string {
	first := s.at == s.resumed
	text, names, offsets, values := "", []string{}, []int{}, []float64{}
	for _, tok := range s.tokens[s.at:min(s.at+n, len(s.tokens))] {
		text += tok
		names, offsets, values = append(names, tok), append(offsets, s.offset), append(values, -float64(s.at+len(names)))
		s.offset += utf8.RuneCountInString(tok)
	}
	n = len(names)
	quoted, _ := json.Marshal(text)
	ids, logs, finish := "null", "null", "null"
	if s.ids {
		ids = "[" + s.list(s.at, n) + "]"
	}
	if s.logs {
		b, _ := json.Marshal(map[string]any{"tokens": names, "text_offset": offsets, "token_logprobs": values, "top_logprobs": nil})
		logs = string(b)
	}
	s.at += n
	if s.at == len(s.tokens) {
		finish = `"length"`
	}
	given := s.at - s.resumed
	usage := fmt.Sprintf(`"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d}`, s.prompt+s.resumed, s.prompt+s.at, given)
	if s.chat {
		if finish != "null" {
			finish += `,"stop_reason":null`
		}
		return "data: " + s.head() + `{"index":0,"delta":{"content":` + string(quoted) + `},"logprobs":` + logs + `,"finish_reason":` + finish + `,"token_ids":` + ids + `}],` + usage + "}\n\n"
	}
	prompt := "null"
	if first {
		prompt = s.promptIDs()
	}
	return "data: " + s.head() + `{"index":0,"text":` + string(quoted) + `,"logprobs":` + logs + `,"finish_reason":` + finish + `,"stop_reason":null,"prompt_token_ids":` + prompt + `,"token_ids":` + ids + `}],` + usage + "}\n\n"
}

// heard is what a client makes of a stream.
type heard struct {
	text, finish, usage string
	ids, logs           []string
	heads               map[string]bool
}

func hear(t *testing.T, events []string) heard {
	t.Helper()
	h := heard{heads: map[string]bool{}}
	for _, e := range events {
		data := strings.TrimSuffix(strings.TrimPrefix(e, "data: "), "\n\n")
		if !json.Valid([]byte(data)) {
			t.Fatalf("no JSON: %q", e)
		}
		v := gjson.Parse(data)
		h.heads[v.Get("id").String()+v.Get("created").String()] = true
		h.text += v.Get("choices.0.text").String() + v.Get("choices.0.delta.content").String()
		h.finish += v.Get("choices.0.finish_reason").String()
		if u := v.Get("usage"); u.Exists() {
			h.usage = u.Raw
		}
		for _, id := range v.Get("choices.0.token_ids").Array() {
			h.ids = append(h.ids, id.Raw)
		}
		tokens, at, values := v.Get("choices.0.logprobs.tokens").Array(), v.Get("choices.0.logprobs.text_offset").Array(), v.Get("choices.0.logprobs.token_logprobs").Array()
		for i := range tokens {
			h.logs = append(h.logs, fmt.Sprint(tokens[i].String(), at[i].Int(), values[i].Num))
		}
	}
	return h
}

// TestSeam cuts random streams anywhere, again and again, and lets each be gone on with in events of other sizes: together they are the whole stream.
func TestSeam(t *testing.T) {
	pieces := []string{"a", " the", "é", "\"q\"", "\\n", "", "", "🦜", "\n", "{\"token_ids\":[1]}"}
	for seed := range uint64(600) {
		r := rand.New(rand.NewPCG(seed, 1))
		chat, shown := r.IntN(2) == 0, r.IntN(2) == 0
		logs, retell := !chat && r.IntN(2) == 0, r.IntN(4) == 0
		tokens := make([]string, 2+r.IntN(20))
		for i := range tokens {
			tokens[i] = pieces[r.IntN(len(pieces))]
		}
		text := fmt.Sprintf(`{"model":"m","stream":true,"temperature":0,"max_tokens":%d,"prompt":"x"`, len(tokens))
		path := pathCompletions
		if chat {
			path, text = pathChat, strings.Replace(text, `"prompt":"x"`, `"messages":[{"role":"user","content":"x"}]`, 1)
		}
		if shown {
			text += `,"return_token_ids":true`
		}
		if logs {
			text += `,"logprobs":1`
		}
		if retell {
			text += `,"presence_penalty":1`
			logs = logs && shown // else an event with log probabilities cannot be cut
		}
		q := question(t, path, text+"}")
		trail := NewTrail(q, Tokens)
		if trail == nil {
			t.Fatal("no trail")
		}
		var got, undisturbed []string
		take := func(event string) {
			raw := []byte(event)
			arg, _ := dataOf(raw)
			out, err := trail.take(raw, arg)
			if err != nil {
				t.Fatalf("seed %d: %v at %s", seed, err, event)
			}
			if out != nil {
				got = append(got, string(out))
			}
		}
		sp := &speaker{chat: chat, logs: logs, ids: !retell || shown, id: "x1", tokens: tokens, prompt: 3}
		plain := &speaker{chat: chat, logs: logs, ids: shown, id: "x1", tokens: tokens, prompt: 3}
		for plain.at < len(tokens) {
			undisturbed = append(undisturbed, plain.say(1))
		}
		if chat {
			take(sp.role())
		}
		for deaths := 0; sp.at < len(tokens); {
			if deaths < 3 && r.IntN(4) == 0 && len(trail.head) > 0 {
				deaths++
				next, how, why := trail.GoOn(q, 0)
				sp = &speaker{chat: chat, logs: logs, ids: !retell || shown, id: fmt.Sprintf("y%d", deaths), tokens: tokens, prompt: 3}
				switch how {
				case Resumed:
					sp.chat = false
					sp.resumed = strings.Count(string(next.Body.Value("prompt")), ",") + 1 - 3
					sp.at = sp.resumed
					if n := string(next.Body.Value("max_tokens")); n != fmt.Sprint(len(tokens)-sp.resumed) {
						t.Fatalf("seed %d: %s more of %d, %d are there", seed, n, len(tokens), sp.resumed)
					}
				case Retold:
					if chat {
						take(sp.role())
					}
				default:
					t.Fatalf("seed %d: %s %s", seed, how, why)
				}
			}
			take(sp.say(1 + r.IntN(3)))
		}
		if trail.behind() {
			t.Fatalf("seed %d: behind at the end", seed)
		}
		g, w := hear(t, got), hear(t, undisturbed)
		if fmt.Sprint(g) != fmt.Sprint(w) {
			t.Fatalf("seed %d, chat %v, shown %v, logs %v: got\n%v\nwant\n%v\n%s", seed, chat, shown, logs, g, w, strings.Join(got, ""))
		}
		trail.Free()
	}
}

// TestDiverged: an engine that comes to something else is found out before the client has any of it.
func TestDiverged(t *testing.T) {
	for name, other := range map[string][]string{"another text": {"a", "b", "x", "d"}, "shorter": {"a", "b"}} {
		q := question(t, pathCompletions, `{"model":"m","stream":true,"temperature":0,"presence_penalty":1,"prompt":"x","max_tokens":9}`)
		trail := NewTrail(q, Tokens)
		sp := &speaker{id: "x1", tokens: []string{"a", "b", "c", "d"}}
		for range 3 {
			raw := []byte(sp.say(1))
			arg, _ := dataOf(raw)
			if _, err := trail.take(raw, arg); err != nil {
				t.Fatal(err)
			}
		}
		if _, how, why := trail.GoOn(q, 0); how != Retold {
			t.Fatal(how, why)
		}
		sp = &speaker{id: "y1", tokens: other}
		var err error
		for err == nil && sp.at < len(other) {
			raw := []byte(sp.say(1))
			arg, _ := dataOf(raw)
			var out []byte
			if out, err = trail.take(raw, arg); out != nil {
				t.Errorf("%s: the client got %s", name, out)
			}
		}
		if err == nil {
			t.Errorf("%s: not found out", name)
		}
	}
}

// TestQuick holds that the quick way notes and gives what the slow one does.
func TestQuick(t *testing.T) {
	for i, event := range []string{
		`{"id":"1","choices":[{"index":0,"delta":{"content":"a"},"logprobs":null,"finish_reason":null,"token_ids":[5]}]}`,
		`{"id":"1","choices":[{"index":0,"delta":{"content":"\"\\"},"logprobs":null,"finish_reason":null,"token_ids":[5,16]}]}`,
		`{"id":"1","choices":[{"index":0,"delta":{"content":""},"logprobs":null,"finish_reason":null,"token_ids":[5]}]}`,
		`{"id":"1","choices":[{"index":0,"delta":{"content":"\"token_ids\":[7]"},"logprobs":null,"finish_reason":null,"token_ids":[]}]}`,
		`{"id":"1","choices":[{"index":0,"delta":{"content":"x"},"logprobs":null,"finish_reason":null}]}`,
		`{"id":"1","choices":[{"index":0,"delta":{"reasoning":"x"},"logprobs":null,"finish_reason":null,"token_ids":[9]}]}`,
		`{"id":"1","choices":[{"index":0,"delta":{"reasoning_content":"x"},"logprobs":null,"finish_reason":null,"token_ids":[9]}],"usage":{"prompt_tokens":1}}`,
		`{"id":"1","choices":[{"index":0,"delta":{"reasoning":"x","content":"y"},"logprobs":null,"finish_reason":null,"token_ids":[9]}]}`,
		`{"id":"1","choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":null,"token_ids":[9]}]}`,
		`{"id":"1","choices":[{"index":0,"delta":{"content":"x"},"logprobs":null,"finish_reason":"stop","token_ids":[9]}]}`,
	} {
		q := question(t, pathChat, `{"model":"m","stream":true,"messages":[]}`)
		a, b := NewTrail(q, Tokens), NewTrail(q, Tokens)
		first := []byte("data: " + `{"id":"1","choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}],"prompt_token_ids":[1,2]}` + "\n\n")
		for _, trail := range []*Trail{a, b} {
			arg, _ := dataOf(first)
			trail.slow(first, arg)
		}
		raw := []byte("data: " + event + "\n\n")
		quick, ok := a.quick(raw)
		if want := i < 7; ok != want {
			t.Errorf("%s: quick %v", event, ok)
		}
		if !ok {
			continue
		}
		arg, _ := dataOf(raw)
		slow := b.slow(raw, arg)
		if string(quick) != string(slow) || state(a) != state(b) {
			t.Errorf("%s: quick\n%s%s\nslow\n%s%s", event, quick, state(a), slow, state(b))
		}
	}
}

func state(t *Trail) string {
	return fmt.Sprintf("%q %d %q %v %v %v %q", t.ids, t.given, t.text, t.marks, t.points, t.tokens, t.odd)
}

func TestWants(t *testing.T) {
	for more, want := range map[string]string{
		``: "||false", `,"temperature":0`: "||true", `,"temperature":0.00`: "||true", `,"temperature":0.01`: "||false", `,"top_k":1`: "||true", `,"seed":5`: "|a seed|true", `,"seed":5,"temperature":0`: "||true",
		`,"n":2`: "several answers||false", `,"tools":[]`: "||false", `,"tools":[{}]`: "|tools|false", `,"response_format":{"type":"text"}`: "||false", `,"response_format":{"type":"json_object"}`: "|response_format|false",
		`,"logprobs":true`: "|log probabilities of a chat|false", `,"logprobs":false`: "||false", `,"presence_penalty":0.0`: "||false", `,"frequency_penalty":1`: "|frequency_penalty|false", `,"repetition_penalty":1.3`: "||false",
		`,"use_beam_search":true`: "beam search||false", `,"guided_json":{}`: "|guided_json|false", `,"structured_outputs":null`: "||false",
	} {
		q := question(t, pathChat, `{"model":"m","stream":true,"messages":[]`+more+`}`)
		w := wantsOf(q.Path, q.Body)
		if got := fmt.Sprintf("%s|%s|%v", w.never, w.retell, w.fixed); got != want {
			t.Errorf("%s: %s, want %s", more, got, want)
		}
	}
}

func TestParseMigration(t *testing.T) {
	for list, want := range map[string]int{"default": 7, "none": 0, "vllm": 1, "vllm, openai=tokens": 2, "default,openai=tokens": 7} {
		if m, err := ParseMigration(list); err != nil || len(m) != want {
			t.Errorf("%s: %v, %v", list, m, err)
		}
	}
	for _, list := range []string{"", "vlm", "vllm=all", "sglang=tokens", "none,vllm", "native"} {
		if m, err := ParseMigration(list); err == nil {
			t.Errorf("%s: %v", list, m)
		}
	}
}

// FuzzTrail: no event breaks it, and what it gives of an event that is JSON is JSON.
func FuzzTrail(f *testing.F) {
	sp := &speaker{chat: true, ids: true, id: "x1", tokens: []string{"a", "b\"", "c"}, prompt: 2}
	f.Add(sp.role(), sp.say(1), sp.say(2), true)
	f.Add(`data: {"choices":[{"text":"\`, `data: {"choices":[{"text":"x","token_ids":[`, "data: {}\n\n", false)
	f.Fuzz(func(t *testing.T, a, b, c string, chat bool) {
		path := pathCompletions
		if chat {
			path = pathChat
		}
		q := question(t, path, `{"model":"m","stream":true,"temperature":0,"max_tokens":9,"prompt":"x"}`)
		trail := NewTrail(q, Tokens)
		for i, event := range []string{a, b, c, a, b} {
			raw := []byte(event)
			arg, ok := dataOf(raw)
			if !ok || len(arg) == 0 {
				continue
			}
			if i == 3 {
				if _, how, _ := trail.GoOn(q, 100); how != Resumed && how != Retold {
					return
				}
			}
			out, err := trail.take(raw, arg)
			if err != nil || out == nil {
				continue
			}
			if got, _ := dataOf(out); json.Valid(arg) && i < 3 && !json.Valid(got) {
				t.Errorf("%q becomes %q", event, out)
			}
		}
	})
}

// BenchmarkTrail is what an event costs: noting its text, and noting its tokens and taking them out.
func BenchmarkTrail(b *testing.B) {
	for name, m := range map[string]Memory{"text": Text, "tokens": Tokens} {
		b.Run(name, func(b *testing.B) {
			q := question(b, pathChat, `{"model":"m","stream":true,"temperature":0,"messages":[]}`)
			sp := &speaker{chat: true, ids: m == Tokens, id: "chatcmpl-0123456789abcdef0123456789abcdef", tokens: []string{" token"}, prompt: 3}
			first := []byte(sp.role())
			event := []byte(`data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk","created":1763786096,"model":"meta-llama/Llama-3.1-8B-Instruct","choices":[{"index":0,"delta":{"content":" token"},"logprobs":null,"finish_reason":null,"token_ids":null}]}` + "\n\n")
			if m == Tokens {
				event = []byte(strings.Replace(string(event), `"token_ids":null`, `"token_ids":[12345]`, 1))
			}
			arg, _ := dataOf(event)
			start, _ := dataOf(first)
			b.ReportAllocs()
			for b.Loop() {
				trail := NewTrail(q, m)
				_, _ = trail.take(first, start)
				for range 63 {
					_, _ = trail.take(event, arg)
				}
				trail.Free()
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/64, "ns/event")
		})
	}
}
