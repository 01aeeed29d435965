package router

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/tidwall/gjson"

	"github.com/headrace/headrace/router/routertest"
)

// said is what engines are made to say at an endpoint, whole and as a stream: all that clients read from answers, in words that no
// reader that thinks in floats or sorts members would write again.
var said = map[string]struct{ ask, whole, stream string }{
	"/v1/chat/completions": {
		ask: `{"model":"fake","max_tokens":4,"messages":[{"role":"user","content":"weather?"}],"tools":[{"type":"function","function":{"name":"get_weather","parameters":{"type":"object"}}}],"tool_choice":"auto","logprobs":true,"top_logprobs":1`,
		whole: `{"id":"chatcmpl-7","object":"chat.completion","created":1700000000,"model":"fake","choices":[{"index":0,"message":{"role":"assistant","content":null,"tool_calls":[` +
			`{"id":"call_a","type":"function","function":{"name":"get_weather","arguments":"{\"id\": 9007199254740993, \"at\": 1e400, \"city\": \"K\u00f8benhavn\"}"}},` +
			`{"id":"call_b","type":"function","function":{"name":"get_weather","arguments":"{}"}}]},"finish_reason":"tool_calls","logprobs":{"content":[{"token":"\u00e9","logprob":-1.0E-7,"bytes":[195,169],"top_logprobs":[{"token":"x","logprob":-9007199254740993,"bytes":null}]}]}},` +
			`{"index":1,"message":{"role":"assistant","content":"mild"},"finish_reason":"stop"}],"usage":{"prompt_tokens":18446744073709551615,"completion_tokens":2,"total_tokens":3,"prompt_tokens_details":{"cached_tokens":1024,"audio_tokens":0},"completion_tokens_details":{"reasoning_tokens":1}}}`,
		stream: `data: {"id":"chatcmpl-7","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"role":"assistant","content":null,"tool_calls":[{"index":0,"id":"call_a","type":"function","function":{"name":"get_weather","arguments":""}}]}}]}` + "\n\n" +
			`data: {"id":"chatcmpl-7","choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":"{\"id\": 9007199254740993,"}}]},"logprobs":{"content":[{"token":"{","logprob":-1.0E-7}]}}]}` + "\n\n" +
			`data: {"id":"chatcmpl-7","choices":[{"index":0,"delta":{"tool_calls":[{"index":1,"id":"call_b","function":{"name":"f","arguments":"{}"}}]}},{"index":1,"delta":{"content":"mild"}}]}` + "\n\n" +
			`data: {"id":"chatcmpl-7","choices":[{"index":0,"delta":{},"finish_reason":"tool_calls"},{"index":1,"delta":{},"finish_reason":"stop"}]}` + "\n\n" +
			`data: {"id":"chatcmpl-7","choices":[],"usage":{"prompt_tokens":18446744073709551615,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":1024}}}` + "\n\n" +
			"data: [DONE]\n\n",
	},
	"/v1/completions": {
		ask:   `{"model":"fake","max_tokens":4,"prompt":"words","logprobs":2,"echo":false`,
		whole: `{"id":"cmpl-7","object":"text_completion","choices":[{"index":0,"text":"\ud83d\ude00","logprobs":{"tokens":["a"],"token_logprobs":[-0.10],"top_logprobs":[{"a":-0.10,"b":-1e-320}],"text_offset":[9007199254740993]},"finish_reason":"stop","stop_reason":null}],"usage":{"prompt_tokens":1}}`,
		stream: `data: {"id":"cmpl-7","choices":[{"index":0,"text":"\ud83d","logprobs":{"token_logprobs":[-0.10],"text_offset":[9007199254740993]}}]}` + "\n\n" +
			`data: {"id":"cmpl-7","choices":[{"index":0,"text":"","finish_reason":"stop"}]}` + "\n\ndata: [DONE]\n\n",
	},
	"/v1/responses": {
		ask:   `{"model":"fake","input":"words","max_output_tokens":4,"tools":[{"type":"function","name":"f"}]`,
		whole: `{"id":"resp_7","object":"response","status":"completed","output":[{"type":"function_call","call_id":"call_a","name":"f","arguments":"{\"n\": 9007199254740993}"}],"usage":{"input_tokens":5,"input_tokens_details":{"cached_tokens":4}}}`,
		stream: "event: response.created\ndata: {\"type\":\"response.created\",\"sequence_number\":0,\"response\":{\"id\":\"resp_7\",\"status\":\"in_progress\"}}\n\n" +
			"event: response.function_call_arguments.delta\ndata: {\"type\":\"response.function_call_arguments.delta\",\"sequence_number\":1,\"delta\":\"{\\\"n\\\": 9007199254740993}\"}\n\n" +
			"event: response.completed\ndata: {\"type\":\"response.completed\",\"sequence_number\":2,\"response\":{\"id\":\"resp_7\",\"status\":\"completed\",\"output\":[]}}\n\n",
	},
	"/v1/embeddings": {
		ask:   `{"model":"fake","input":["a","b"],"dimensions":2`,
		whole: `{"object":"list","data":[{"object":"embedding","index":0,"embedding":[-0.10,1E-45]},{"object":"embedding","index":1,"embedding":[9007199254740993,0]}],"model":"fake","usage":{"prompt_tokens":2,"total_tokens":2}}` + "\n",
	},
}

// TestFidelityOfEndpoints holds that clients get an engine's very bytes at each endpoint, and the engine theirs.
func TestFidelityOfEndpoints(t *testing.T) {
	// Members that nobody here knows: who is asked gets them as they were written.
	const odd = `,"user":"\u00e9","seed":18446744073709551615,"x_big":9007199254740993,"x_float":1.50e+400,"x":{"b":1,"a":[ ]}`
	for name, make := range fates {
		t.Run(name, func(t *testing.T) {
			es := make()
			for _, e := range es {
				e.Reply = func(c *routertest.EngineCall) (string, string) {
					if strings.Contains(string(c.Body), `"stream":true`) {
						return "text/event-stream; charset=utf-8", said[c.Path].stream
					}
					return "application/json", said[c.Path].whole
				}
			}
			h := startEngines(t, nil, es...)
			for path, s := range said {
				for _, stream := range []bool{false, true} {
					body, want := s.ask+odd+"}", s.whole
					if stream {
						if want = s.stream; want == "" {
							continue
						}
						body = s.ask + odd + `,"stream":true,"stream_options":{"include_usage":true}}`
					}
					if status, got := raw(t, h.client, h.addr, path, body); status != http.StatusOK || got != want {
						t.Errorf("%s, stream %v: got %d %q\nwant %q", path, stream, status, got, want)
					}
				}
			}
			for _, e := range es {
				for _, c := range e.Last() {
					if got := string(c.Body); c.Role != "prefill" && !strings.Contains(got, odd) || !strings.Contains(got, `"x_big":9007199254740993,"x_float":1.50e+400,"x":{"b":1,"a":[ ]}`) {
						t.Errorf("%s as %q got %s", e.ID, c.Role, got)
					}
				}
			}
		})
	}
}

// TestUsageOfOurs holds what our own engines' answers say of what was cached, with and without being asked.
func TestUsageOfOurs(t *testing.T) {
	h := start(t, nil, pair("p1", "d1")...)
	for _, stream := range []bool{false, true} {
		for _, wanted := range []bool{false, true} {
			a := h.do(ask{n: 2, stream: stream, usage: stream && wanted})
			if told := a.usage != nil; told != (!stream || wanted) {
				t.Errorf("stream %v, asked for %v: usage %v", stream, wanted, a.usage)
			}
			if details, _ := a.usage["prompt_tokens_details"].(map[string]any); a.usage != nil && (details["cached_tokens"] == nil || a.usage["completion_tokens"] != 2.0) {
				t.Errorf("usage %v", a.usage)
			}
		}
	}
}

// severalModels is a fleet of models, each served by workers of another kind.
func severalModels(t *testing.T) (h *harness, engines map[string][]*routertest.Engine) {
	leakCheck(t)
	ours := pair("p1", "d1")
	for _, w := range ours {
		w.Model = "alpha"
	}
	engines = map[string][]*routertest.Engine{"beta": enginesOf("beta", "vllm", "p2", "d2"), "org/gamma-7b": enginesOf("org/gamma-7b", "openai", "e3"), "delta": enginesOf("delta", "sglang", "p4", "d4")}
	var all []*routertest.Engine
	for _, es := range engines {
		all = append(all, es...)
	}
	return startMixed(t, nil, ours, all), engines
}

func enginesOf(model, dialect string, ids ...string) []*routertest.Engine {
	es := engines(dialect, ids...)
	for _, e := range es {
		e.Model = model
	}
	return es
}

// TestSeveralModels: behind one router each request goes to workers of its own model.
func TestSeveralModels(t *testing.T) {
	h, engines := severalModels(t)
	models := []string{"alpha", "beta", "delta", "org/gamma-7b"}
	var asking sync.WaitGroup
	for i := range 24 {
		asking.Go(func() {
			q := ask{n: 2 + i%3, stream: i%2 == 0}
			body := strings.Replace(q.body(), `"fake"`, fmt.Sprintf("%q", models[i%len(models)]), 1)
			resp, err := h.client.Post("http://"+h.addr+"/v1/chat/completions", "application/json", strings.NewReader(body))
			if err != nil {
				t.Error(err)
				return
			}
			defer resp.Body.Close()
			read(t, resp).wantWhole(t, q)
		})
	}
	asking.Wait()
	for model, es := range engines {
		for _, e := range es {
			if len(e.Last()) == 0 {
				t.Errorf("%s of %s was not asked", e.ID, model)
			}
			for _, c := range e.Last() {
				if got := gjson.GetBytes(c.Body, "model").String(); got != model {
					t.Errorf("%s of %s was asked for %s", e.ID, model, got)
				}
			}
		}
	}
	for _, d := range h.r.decisions.list("") { // our own engines check the model themselves
		if ours := d.Decode == "d1"; ours != (d.Model == "alpha") || ours && d.Prefill != "p1" {
			t.Errorf("%s: %s and %s", d.Model, d.Prefill, d.Decode)
		}
	}
	resp, err := h.client.Get("http://" + h.addr + "/v1/models")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var list struct {
		Object string
		Data   []struct{ ID, Object string }
	}
	if err := json.NewDecoder(resp.Body).Decode(&list); err != nil || list.Object != "list" {
		t.Fatalf("%+v, %v", list, err)
	}
	var names []string
	for _, m := range list.Data {
		if names = append(names, m.ID); m.Object != "model" {
			t.Errorf("%+v", m)
		}
	}
	if slices.Sort(names); !slices.Equal(names, models) {
		t.Errorf("models %v", names)
	}
}

// TestUnknownModel: at each endpoint it is OpenAI's error, in OpenAI's shape.
func TestUnknownModel(t *testing.T) {
	h, _ := severalModels(t)
	check := func(what string, resp *http.Response, err error) {
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		b, _ := io.ReadAll(resp.Body)
		e := gjson.GetBytes(b, "error")
		if resp.StatusCode != http.StatusNotFound || resp.Header.Get("Content-Type") != contentJSON || e.Get("type").String() != "invalid_request_error" || e.Get("param").String() != "model" ||
			e.Get("code").String() != "model_not_found" || !strings.Contains(e.Get("message").String(), "omega") {
			t.Errorf("%s: %d %s", what, resp.StatusCode, b)
		}
	}
	for path, s := range said {
		for _, more := range []string{"}", `,"stream":true}`} {
			body := strings.Replace(s.ask, `"fake"`, `"omega"`, 1) + more
			resp, err := h.client.Post("http://"+h.addr+path, "application/json", strings.NewReader(body))
			check(path+" "+body, resp, err)
		}
	}
	resp, err := h.client.Get("http://" + h.addr + "/v1/models/org/omega")
	check("a model's card", resp, err)
	if resp, err := h.client.Get("http://" + h.addr + "/v1/models/org/gamma-7b"); err != nil || resp.StatusCode != http.StatusOK {
		t.Errorf("%v, %v", resp, err)
	} else {
		resp.Body.Close()
	}
	// Nobody of alpha's embeds, whatever others do.
	if status, got := raw(t, h.client, h.addr, "/v1/embeddings", `{"model":"alpha","input":"x"}`); status != http.StatusNotFound || gjson.Get(got, "error.code").String() != "not_found" {
		t.Errorf("%d %s", status, got)
	}
}
