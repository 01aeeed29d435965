package openai

import (
	"bytes"
	"encoding/json"
	"math"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
)

func mustParse(t *testing.T, ep Endpoint, body string) *Request {
	t.Helper()
	r, e := ParseRequest(ep, []byte(body), Options{AllowKV: true})
	if e != nil {
		t.Fatalf("%s: %v", body, e)
	}
	return r
}

func TestParseChat(t *testing.T) {
	r := mustParse(t, Chat, ` {
		"model": "m", "unknown": {"a": [1, 2, "}"]}, "user": "u", "n": 1, "logprobs": false, "presence_penalty": 0.0, "response_format": {"type": "text"},
		"messages": [
			{"role": "system", "content": "be \"brief\" \u00e9\ud83d\ude00\n"},
			{"role": "user", "name": "bob", "content": [{"type": "text", "text": "one"}, {"text": "two", "type": "text"}]},
			{"role": "assistant", "content": null, "tool_calls": [{"id": "c"}]},
			{"role": "tool", "tool_call_id": "c", "content": ""}],
		"max_tokens": 5, "max_completion_tokens": 7, "temperature": 0.5, "top_p": 0.25, "top_k": 40, "seed": 9223372036854775807,
		"stop": ["a", "", "é"], "stop_token_ids": [1, 2], "stream": true, "stream_options": {"include_usage": true, "x": 1},
		"ignore_eos": true, "return_token_ids": true, "skip_special_tokens": false, "str\u0065am": false, "tools": [{"type": "function"}], "tool_choice": "auto",
		"chat_template_kwargs": {"x": 1}
	}`)
	want := &Request{N: 1, Repetition: 1,
		Endpoint: Chat, Model: "m",
		Messages: []Message{
			{Role: "system", Content: "be \"brief\" é😀\n"},
			{Role: "user", Name: "bob", Content: "one\ntwo"},
			{Role: "assistant", Null: true, ToolCalls: json.RawMessage(`[{"id": "c"}]`)},
			{Role: "tool", ToolCallID: "c"},
		},
		Tools: json.RawMessage(`[{"type": "function"}]`), TemplateArgs: json.RawMessage(`{"x": 1}`), AddGenerationPrompt: true,
		MaxTokens: 7, Temperature: 0.5, TopP: 0.25, TopK: 40, Seed: math.MaxInt64, HasSeed: true, Stop: []string{"a", "é"}, StopTokens: []int32{1, 2},
		IgnoreEOS: true, Stream: false, IncludeUsage: true, ReturnTokenIDs: true, KeepSpecial: true,
	}
	if !reflect.DeepEqual(r, want) {
		t.Errorf("got  %+v\nwant %+v", r, want)
	}
}

func TestParseDefaults(t *testing.T) {
	r := mustParse(t, Completions, `{"prompt":"x","seed":null,"stop":null,"max_tokens":null,"temperature":null,"stream":null,"logit_bias":{ },"suffix":null,"kv_transfer_params":null}`)
	want := &Request{N: 1, Repetition: 1, Endpoint: Completions, Prompt: "x", Temperature: 1, TopP: 1, AddGenerationPrompt: true, AddSpecialTokens: true}
	if !reflect.DeepEqual(r, want) {
		t.Errorf("got  %+v\nwant %+v", r, want)
	}
}

func TestParsePrompts(t *testing.T) {
	for body, want := range map[string]Request{
		`"a b"`:      {Prompt: "a b"},
		`["a b"]`:    {Prompt: "a b"},
		`[1, 2,3]`:   {PromptTokens: []int32{1, 2, 3}},
		`[[4 , 5 ]]`: {PromptTokens: []int32{4, 5}},
	} {
		r := mustParse(t, Completions, `{"prompt":`+body+`}`)
		if r.Prompt != want.Prompt || !slices.Equal(r.PromptTokens, want.PromptTokens) {
			t.Errorf("%s: %q %v", body, r.Prompt, r.PromptTokens)
		}
	}
	for _, body := range []string{`null`, `[]`, `[[]]`, `["a","b"]`, `[[1],[2]]`, `[1,"a"]`, `["a",1]`, `[-1]`, `[1.5]`, `[3000000000]`, `{}`, `true`, `5`} {
		if _, e := ParseRequest(Completions, []byte(`{"prompt":`+body+`}`), Options{}); e == nil || e.Param != "prompt" || e.Status != 400 {
			t.Errorf("prompt %s: %+v", body, e)
		}
	}
}

func TestParseSeeds(t *testing.T) {
	for in, want := range map[string]uint64{"9007199254740993": 9007199254740993, "18446744073709551615": math.MaxUint64, "-1": math.MaxUint64, "7.0": 7, "0": 0} {
		if r := mustParse(t, Completions, `{"prompt":"x","seed":`+in+`}`); r.Seed != want || !r.HasSeed {
			t.Errorf("seed %s became %d", in, r.Seed)
		}
	}
}

func TestParseRefuses(t *testing.T) {
	chat := func(more string) string { return `{"messages":[{"role":"user","content":"x"}],` + more + `}` }
	for _, c := range []struct{ body, param, code string }{
		{``, "", CodeInvalidJSON}, {`[]`, "", CodeInvalidJSON}, {`{"a":1}x`, "", CodeInvalidJSON}, {`{"a":}`, "", CodeInvalidJSON}, {"{\"a\":\"\x01\"}", "", CodeInvalidJSON},
		{`{"messages":` + strings.Repeat("[", 100) + strings.Repeat("]", 100) + `}`, "", CodeInvalidJSON},
		{strings.Repeat(`{"a":`, 5_000_000), "", CodeInvalidJSON},
		{`{}`, "messages", CodeInvalidValue},
		{`{"messages":"x"}`, "messages", CodeInvalidValue},
		{`{"messages":["x"]}`, "messages[0]", CodeInvalidValue},
		{`{"messages":[{"content":"x"}]}`, "messages[0].role", CodeInvalidValue},
		{`{"messages":[{"role":"user"}]}`, "messages[0].content", CodeInvalidValue},
		{`{"messages":[{"role":"user","content":5}]}`, "messages[0].content", CodeInvalidValue},
		{`{"messages":[{"role":"user","content":[{"type":"text"}]}]}`, "messages[0].content[0].text", CodeInvalidValue},
		{`{"messages":[{"role":"user","content":[{"type":"text","text":"x"},{"type":"image_url","image_url":{"url":"x"}}]}]}`, "messages[0].content[1].type", CodeUnsupported},
		{chat(`"model":5`), "model", CodeInvalidValue},
		{chat(`"max_tokens":0`), "max_tokens", CodeInvalidValue},
		{chat(`"max_tokens":"5"`), "max_tokens", CodeInvalidValue},
		{chat(`"max_completion_tokens":1.5`), "max_completion_tokens", CodeInvalidValue},
		{chat(`"temperature":2.5`), "temperature", CodeInvalidValue},
		{chat(`"temperature":-0.1`), "temperature", CodeInvalidValue},
		{chat(`"temperature":1e999`), "temperature", CodeInvalidValue},
		{chat(`"temperature":"NaN"`), "temperature", CodeInvalidValue},
		{chat(`"top_p":0`), "top_p", CodeInvalidValue},
		{chat(`"top_p":1.1`), "top_p", CodeInvalidValue},
		{chat(`"top_k":-2`), "top_k", CodeInvalidValue},
		{chat(`"seed":1e30`), "seed", CodeInvalidValue},
		{chat(`"seed":"1"`), "seed", CodeInvalidValue},
		{chat(`"stop":[1]`), "stop", CodeInvalidValue},
		{chat(`"stop":{}`), "stop", CodeInvalidValue},
		{chat(`"stop":["` + strings.Repeat(`a","`, 16) + `a"]`), "stop", CodeInvalidValue},
		{chat(`"stop":"` + strings.Repeat("a", 300) + `"`), "stop", CodeInvalidValue},
		{chat(`"stream":"yes"`), "stream", CodeInvalidValue},
		{chat(`"stream_options":5`), "stream_options", CodeInvalidValue},
		{chat(`"n":0`), "n", CodeInvalidValue},
		{chat(`"n":129`), "n", CodeInvalidValue},
		{chat(`"n":2,"best_of":3`), "best_of", CodeUnsupported},
		{chat(`"best_of":2`), "best_of", CodeUnsupported},
		{chat(`"logprobs":3`), "logprobs", CodeInvalidValue},
		{chat(`"top_logprobs":3`), "top_logprobs", CodeInvalidValue},
		{chat(`"logprobs":false,"top_logprobs":3`), "top_logprobs", CodeInvalidValue},
		{chat(`"logprobs":true,"top_logprobs":21`), "top_logprobs", CodeInvalidValue},
		{chat(`"echo":true`), "echo", CodeUnsupported},
		{chat(`"frequency_penalty":2.5`), "frequency_penalty", CodeInvalidValue},
		{chat(`"presence_penalty":-2.5`), "presence_penalty", CodeInvalidValue},
		{chat(`"repetition_penalty":0`), "repetition_penalty", CodeInvalidValue},
		{chat(`"min_p":1.5`), "min_p", CodeInvalidValue},
		{chat(`"logit_bias":{"1":200}`), "logit_bias", CodeInvalidValue},
		{chat(`"logit_bias":{"x":2}`), "logit_bias", CodeInvalidValue},
		{chat(`"logit_bias":[1]`), "logit_bias", CodeInvalidValue},
		{chat(`"response_format":{"type":"json_object"}`), "response_format", CodeUnsupported},
		{chat(`"response_format":5`), "response_format", CodeInvalidValue},
		{chat(`"tools":5`), "tools", CodeInvalidValue},
		{chat(`"tools":[{}],"tool_choice":"required"`), "tool_choice", CodeUnsupported},
		{chat(`"tools":[{}],"tool_choice":{"type":"function"}`), "tool_choice", CodeUnsupported},
		{chat(`"kv_transfer_params":{}`), "kv_transfer_params", CodeUnsupported},
	} {
		_, e := ParseRequest(Chat, []byte(c.body), Options{})
		if e == nil || e.Param != c.param || e.Code != c.code || e.Status != 400 || e.Type != TypeInvalidRequest {
			t.Errorf("%.80s: %+v, want param %q, code %q", c.body, e, c.param, c.code)
		}
	}
}

func TestErrorShape(t *testing.T) {
	e := BadRequest("n", CodeUnsupported, "no %q", "x\n")
	if got, want := string(e.AppendJSON(nil)), `{"error":{"message":"no \"x\\n\"","type":"invalid_request_error","param":"n","code":"unsupported_parameter"}}`; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	if got, want := string(Internal("x").AppendEvent(nil)), `data: {"error":{"message":"x","type":"server_error","param":null,"code":"internal_error"}}`+"\n\n"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	for e, status := range map[*Error]int{InvalidAPIKey(): 401, ModelNotFound("x"): 404, TooManyRequests(0, "x"): 429, Unavailable("x"): 503, Timeout("x"): 504, TooLarge(5): 413, NotFound("GET", "/"): 404} {
		if e.Status != status || e.Error() == "" || !json.Valid(e.AppendJSON(nil)) {
			t.Errorf("%+v", e)
		}
	}
}

func TestDispatch(t *testing.T) {
	body := `{"stream" : false, "seed": 9007199254740993,"messages":[{"role":"user","content":"\u00e9, \"stream\":1}"}] ,"kv_transf\u0065r_params":null,"stream_options":{"include_usage":false},"x":[{}]}`
	kv := &KVParams{Role: RolePrefill, ID: "chatcmpl-1", Created: 1790000000, Seed: 18446744073709551615, Ticket: []byte("\x00ticket"), Peer: "h:1", DeadlineMS: 1790000000001, Resume: []int32{}}
	out := appendDispatch(nil, []byte(body), kv)
	if !json.Valid(out) {
		t.Fatalf("not JSON: %s", out)
	}
	if !strings.Contains(string(out), `"seed": 9007199254740993,"messages":[{"role":"user","content":"\u00e9, \"stream\":1}"}],"x":[{}]}`) {
		t.Errorf("the client's bytes were changed: %s", out)
	}
	r := mustParse(t, Chat, string(out))
	if !r.Stream || !r.IncludeUsage || !reflect.DeepEqual(r.KV, kv) || r.Seed != 9007199254740993 {
		t.Errorf("came back as %+v, %+v", r, r.KV)
	}
	kv = &KVParams{Role: RoleWhole, ID: "x", Resume: []int32{1, 2}}
	if r = mustParse(t, Chat, string(appendDispatch(nil, out, kv))); !reflect.DeepEqual(r.KV, kv) {
		t.Errorf("dispatched twice: %+v", r.KV)
	}
}

func TestKVRefuses(t *testing.T) {
	for _, kv := range []string{`5`, `{}`, `{"dialect":"x"}`, `{"dialect":"headrace/1"}`, `{"dialect":"headrace/1","id":"a"}`,
		`{"dialect":"headrace/1","id":"a\n","role":"whole"}`, `{"dialect":"headrace/1","id":"a","role":"x"}`,
		`{"dialect":"headrace/1","id":"a","role":"decode"}`, `{"dialect":"headrace/1","id":"a","role":"prefill","ticket":"eA=="}`,
		`{"dialect":"headrace/1","id":"a","role":"whole","ticket":"x"}`, `{"dialect":"headrace/1","id":"a","role":"whole","resume":[-1]}`,
		`{"dialect":"headrace/1","id":"a","role":"whole","resume":5}`, `{"dialect":"headrace/1","id":"a","role":"whole","seed":"x"}`,
	} {
		_, e := ParseRequest(Completions, []byte(`{"prompt":"x","kv_transfer_params":`+kv+`}`), Options{AllowKV: true})
		if e == nil || e.Param != "kv_transfer_params" {
			t.Errorf("%s: %+v", kv, e)
		}
	}
}

func TestRenderGolden(t *testing.T) {
	chat := Head{Endpoint: Chat, ID: "chatcmpl-1", Created: 5, Model: "m\"x"}
	cmpl := Head{Endpoint: Completions, ID: "cmpl-1", Created: 5, Model: "m"}
	u := Usage{Prompt: 3, Completion: 2, Cached: 1}
	for got, want := range map[string]string{
		string(chat.AppendRole(nil, nil)):                                                                       `data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":5,"model":"m\"x","choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}` + "\n\n",
		string(chat.AppendText(nil, []byte("a\n\xff"), nil, nil)):                                               `data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":5,"model":"m\"x","choices":[{"index":0,"delta":{"content":"a\n�"},"logprobs":null,"finish_reason":null}]}` + "\n\n",
		string(chat.AppendFinish(nil, nil, "stop")):                                                             `data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":5,"model":"m\"x","choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop"}]}` + "\n\n",
		string(chat.AppendFinish(nil, []byte("x"), "length")):                                                   `data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":5,"model":"m\"x","choices":[{"index":0,"delta":{"content":"x"},"logprobs":null,"finish_reason":"length"}]}` + "\n\n",
		string(cmpl.AppendText(nil, []byte("a"), []int32{1, 2}, nil)):                                           `data: {"id":"cmpl-1","object":"text_completion","created":5,"model":"m","choices":[{"index":0,"text":"a","logprobs":null,"finish_reason":null,"token_ids":[1,2]}]}` + "\n\n",
		string(cmpl.AppendFinish(nil, nil, "stop")):                                                             `data: {"id":"cmpl-1","object":"text_completion","created":5,"model":"m","choices":[{"index":0,"text":"","logprobs":null,"finish_reason":"stop"}]}` + "\n\n",
		string(cmpl.AppendUsage(nil, u)):                                                                        `data: {"id":"cmpl-1","object":"text_completion","created":5,"model":"m","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5,"prompt_tokens_details":{"cached_tokens":1}}}` + "\n\n",
		string(cmpl.AppendRole(nil, nil)):                                                                       "",
		string(chat.AppendWhole(nil, &Whole{Choices: []Choice{{Text: []byte("t"), Finish: "stop"}}, Usage: u})): `{"id":"chatcmpl-1","object":"chat.completion","created":5,"model":"m\"x","choices":[{"index":0,"message":{"role":"assistant","content":"t","refusal":null},"logprobs":null,"finish_reason":"stop"}],"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5,"prompt_tokens_details":{"cached_tokens":1}}}`,
		string(cmpl.AppendWhole(nil, &Whole{Choices: []Choice{{Text: []byte("t"), Finish: "stop", TokenIDs: []int32{7}}}, Usage: u, PromptIDs: []int32{8}})): `{"id":"cmpl-1","object":"text_completion","created":5,"model":"m","choices":[{"index":0,"text":"t","logprobs":null,"finish_reason":"stop","token_ids":[7],"prompt_token_ids":[8]}],"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5,"prompt_tokens_details":{"cached_tokens":1}}}`,
		string(AppendModels(nil, []Model{{ID: "m", Created: 5, ContextLen: 9}})):                                                                             `{"object":"list","data":[{"id":"m","object":"model","created":5,"owned_by":"headrace","root":"m","parent":null,"max_model_len":9}]}`,
	} {
		if got != want {
			t.Errorf("got\n%s\nwant\n%s", got, want)
		}
	}
}

func TestAssemblerTokenIDs(t *testing.T) {
	h := Head{Endpoint: Chat, ID: "a", Model: "m"}
	var a Assembler
	for _, ev := range [][]byte{h.AppendRole(nil, []int32{1, 2}), h.AppendText(nil, []byte("x"), []int32{3}, nil), h.AppendText(nil, nil, []int32{4}, nil), h.AppendFinish(nil, []byte("y"), "stop"), h.AppendUsage(nil, Usage{})} {
		if _, err := a.Add(ev[len("data: "):]); err != nil {
			t.Fatal(err)
		}
	}
	if w := a.Whole; string(w.Choices[0].Text) != "xy" || !slices.Equal(w.Choices[0].TokenIDs, []int32{3, 4}) || !slices.Equal(w.PromptIDs, []int32{1, 2}) {
		t.Errorf("%+v", w)
	}
}

func TestEncodersDoNotAllocate(t *testing.T) {
	h := Head{Endpoint: Chat, ID: "chatcmpl-0123456789", Created: 1790000000, Model: "model"}
	buf := make([]byte, 0, 4096)
	text := []byte("some text \"quoted\" é")
	event := h.AppendText(nil, text, nil, nil)
	var ids [4]int32
	n := testing.AllocsPerRun(100, func() {
		buf = AppendTokenComment(buf[:0], "t", ids[:1])
		buf = h.AppendText(buf, text, nil, nil)
		buf = h.AppendUsage(buf, Usage{1, 2, 3})
		if _, _, err := NextEvent(event); err != nil {
			t.Error(err)
		}
	})
	if n != 0 {
		t.Errorf("%v allocations for an event", n)
	}
}

func FuzzParseRequest(f *testing.F) {
	f.Add([]byte(`{"messages":[{"role":"user","content":[{"type":"text","text":"x"}]}],"stop":["a"],"seed":1}`), true)
	f.Add([]byte(`{"prompt":[[1,2]],"max_tokens":5,"kv_transfer_params":{"dialect":"headrace/1","role":"whole","id":"a","resume":[1]}}`), false)
	f.Add([]byte(`{"a":"\ud800","stream":tru`), false)
	f.Fuzz(func(t *testing.T, body []byte, chat bool) {
		ep := Completions
		if chat {
			ep = Chat
		}
		r, e := ParseRequest(ep, body, Options{AllowKV: true})
		if e != nil {
			if !json.Valid(e.AppendJSON(nil)) {
				t.Fatalf("error is not JSON: %s", e.AppendJSON(nil))
			}
			return
		}
		if !json.Valid(body) {
			t.Fatalf("took what is not JSON: %q", body)
		}
		kv := &KVParams{Role: RoleWhole, ID: "id"}
		again, e := ParseRequest(ep, appendDispatch(nil, body, kv), Options{AllowKV: true})
		if e != nil {
			t.Fatalf("the dispatched body is refused: %v", e)
		}
		r.Stream, r.IncludeUsage, r.KV = true, true, kv
		if !reflect.DeepEqual(r, again) {
			t.Fatalf("dispatch changes the request:\n%+v\n%+v", r, again)
		}
	})
}

func BenchmarkAppendText(b *testing.B) {
	h := Head{Endpoint: Chat, ID: "chatcmpl-0123456789", Created: 1790000000, Model: "model"}
	buf := make([]byte, 0, 4096)
	for b.Loop() {
		buf = h.AppendText(buf[:0], []byte(" token"), nil, nil)
	}
}

// appendDispatch appends a client's body as a router sends it to a worker: with the native fields spliced in, whatever
// the client said of them left out, and every other byte as it came. body must have passed ParseRequest.
func appendDispatch(dst, body []byte, kv *KVParams) []byte {
	dst = append(dst, `{"stream":true,"stream_options":{"include_usage":true},"kv_transfer_params":`...)
	dst = kv.AppendJSON(dst)
	_ = walkObject(body, func(f field) error {
		switch f.key {
		case "stream", "stream_options", "kv_transfer_params":
		default:
			dst = append(dst, ',')
			dst = append(dst, body[f.start:f.end]...)
		}
		return nil
	})
	return append(dst, '}')
}

// TestEveryFieldIsDocumented holds docs/api.md to the parser.
func TestEveryFieldIsDocumented(t *testing.T) {
	text, err := os.ReadFile("../../docs/api.md")
	if err != nil {
		t.Fatal(err)
	}
	for name := range fieldSetters {
		if !bytes.Contains(text, []byte("`"+name)) {
			t.Errorf("docs/api.md does not name %s", name)
		}
	}
}
