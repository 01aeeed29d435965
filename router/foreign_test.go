package router

import (
	"fmt"
	"strings"
	"testing"

	"github.com/tidwall/gjson"

	"github.com/headrace/headrace/router/routertest"
)

// TestResponses: a response is shared as other requests are, in its own words, and its stream ends with its own last event.
func TestResponses(t *testing.T) {
	for _, name := range []string{"vllm", "nixl", "nixl-push", "mooncake", "nccl", "sglang", "openai"} {
		t.Run(name, func(t *testing.T) {
			h := startEngines(t, nil, fates[name]()...)
			for _, stream := range []bool{false, true} {
				body := fmt.Sprintf(`{"model":"fake","input":"some words","max_output_tokens":4,"seed":7,"store":true,"request_id":"mine","stream":%v,"tools":[{"type":"function","name":"f"}]}`, stream)
				status, got := raw(t, h.client, h.addr, "/v1/responses", body)
				if status != 200 {
					t.Fatalf("%d %s", status, got)
				}
				text := gjson.Get(got, "output.0.content.0.text").String()
				if stream {
					events := strings.Split(strings.TrimSpace(got), "\n\n")
					last := events[len(events)-1]
					if !strings.HasPrefix(last, "event: response.completed\ndata: ") || strings.Contains(got, "[DONE]") {
						t.Errorf("the last event is %s", last)
					}
					text = gjson.Get(last[strings.Index(last, "{"):], "response.output.0.content.0.text").String()
				}
				if want := routertest.Text("some words", 7, 4); text != want {
					t.Errorf("got %q, want %q in %s", text, want, got)
				}
			}
			if d := h.r.decisions.list("")[0]; (d.Whole == "") != (name != "openai") {
				t.Errorf("decision %+v", d)
			}
		})
	}
	h := startEngines(t, nil, engines("vllm", "p1", "d1")...)
	for more, why := range map[string]string{`,"previous_response_id":"resp_1"`: "previous_response_id", `,"background":true`: "background", `,"tools":[{"type":"function"},{"type":"web_search"}]`: "tools that the engine calls"} {
		if status, got := raw(t, h.client, h.addr, "/v1/responses", `{"model":"fake","input":"x"`+more+`}`); status != 200 {
			t.Fatalf("%s: %d %s", more, status, got)
		}
		if d := h.r.decisions.list("")[0]; d.Whole == "" || !strings.Contains(d.Reason, why) {
			t.Errorf("%s: %+v", more, d)
		}
	}
}

// TestGenerate: SGLang's own endpoint, where prefill's log probabilities of the prompt belong into decode's answer.
func TestGenerate(t *testing.T) {
	h := startEngines(t, nil, engines("sglang", "p1", "d1")...)
	const list = `[[-0.50, 9007199254740993, null],[-1.50, 9007199254740993, null]]`
	for _, stream := range []bool{false, true} {
		for _, wanted := range []bool{false, true} {
			body := fmt.Sprintf(`{"model":"fake","text":"some words","sampling_params":{"max_new_tokens":3},"rid":"mine","return_logprob":%v,"stream":%v}`, wanted, stream)
			status, got := raw(t, h.client, h.addr, "/generate", body)
			if status != 200 || strings.Contains(got, list) != wanted || stream != strings.HasSuffix(got, "data: [DONE]\n\n") {
				t.Errorf("stream %v, log probabilities %v: %d %s", stream, wanted, status, got)
			}
			events := strings.Split(strings.TrimSuffix(got, "\n\ndata: [DONE]\n\n"), "\n\n")
			if last := strings.TrimPrefix(events[len(events)-1], "data: "); gjson.Get(last, "text").String() != routertest.Text("some words", 0, 3) {
				t.Errorf("got %s", got)
			}
		}
	}
	for _, body := range []string{
		`{"model":"fake","text":["a","b","c"],"sampling_params":{"max_new_tokens":2}}`, `{"model":"fake","input_ids":[[1],[2]]}`, `{"model":"fake","input_ids":[1,2]}`,
	} {
		if status, got := raw(t, h.client, h.addr, "/generate", body); status != 200 {
			t.Errorf("%s: %d %s", body, status, got)
		}
	}
	if status, _ := raw(t, h.client, h.addr, "/v1/chat/completions", `{"model":"fake","n":3,"max_tokens":2,"messages":[{"role":"user","content":"x"}]}`); status != 200 {
		t.Errorf("three choices: %d", status)
	}
	if status, got := raw(t, h.client, h.addr, "/v1/completions", `{"model":"fake","prompt":"x","bootstrap_host":"evil.example"}`); status != 400 {
		t.Errorf("a client's own bootstrap server: %d %s", status, got)
	}
}

// TestGenerateIsSGLangs: nobody else is asked.
func TestGenerateIsSGLangs(t *testing.T) {
	h := startEngines(t, nil, engines("vllm", "p1", "d1")...)
	if status, got := raw(t, h.client, h.addr, "/generate", `{"model":"fake","text":"x"}`); status != 503 || h.engines[0].Calls()+h.engines[1].Calls() != 0 {
		t.Errorf("%d %s", status, got)
	}
}
