package router

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/headrace/headrace/router/pairing"
	"github.com/headrace/headrace/router/routertest"
)

// engines makes fake engines of a dialect. An id that begins with p prefills, with d decodes, others do both.
func engines(dialect string, ids ...string) []*routertest.Engine {
	var es []*routertest.Engine
	for _, id := range ids {
		role := pairing.RoleBoth
		switch id[0] {
		case 'p':
			role = pairing.RolePrefill
		case 'd':
			role = pairing.RoleDecode
		}
		es = append(es, &routertest.Engine{Worker: pairing.Worker{ID: id, Role: role, Dialect: dialect, BlockTokens: 32, TensorParallel: 1}})
	}
	return es
}

func startEngines(t *testing.T, change func(*Config), es ...*routertest.Engine) *harness {
	t.Helper()
	leakCheck(t)
	return startMixed(t, change, nil, es)
}

// fates are the sets of engines on which an undisturbed request must come to the same.
var fates = map[string]func() []*routertest.Engine{
	"openai":    func() []*routertest.Engine { return engines("openai", "e1") },
	"vllm":      func() []*routertest.Engine { return engines("vllm", "p1", "d1") },
	"vllm-both": func() []*routertest.Engine { return engines("vllm", "b1", "b2") },
	"nixl":      func() []*routertest.Engine { return engines("vllm-nixl", "p1", "d1") },
	"nixl-both": func() []*routertest.Engine { return engines("vllm-nixl", "b1", "b2") },
	"nixl-one":  func() []*routertest.Engine { return engines("vllm-nixl", "p1") },
	"vllm-one":  func() []*routertest.Engine { return engines("vllm", "d1") },

	"nixl-push":      func() []*routertest.Engine { return engines("vllm-nixl-push", "p1", "d1") },
	"nixl-push-both": func() []*routertest.Engine { return engines("vllm-nixl-push", "b1", "b2") },
	"nixl-push-one":  func() []*routertest.Engine { return engines("vllm-nixl-push", "d1") },
	"mooncake":       func() []*routertest.Engine { return ranked(engines("vllm-mooncake", "p1", "d1"), 4) },
	"mooncake-both":  func() []*routertest.Engine { return engines("vllm-mooncake", "b1", "b2") },
	"mooncake-one":   func() []*routertest.Engine { return engines("vllm-mooncake", "d1") },
	"nccl":           func() []*routertest.Engine { return engines("vllm-p2p-nccl", "p1", "d1") },
	"sglang":         func() []*routertest.Engine { return engines("sglang", "p1", "d1") },
	"sglang-one":     func() []*routertest.Engine { return engines("sglang", "b1") },
}

func ranked(es []*routertest.Engine, n int) []*routertest.Engine {
	for _, e := range es {
		e.Ranks = n
	}
	return es
}

// alike is an answer without the id that the router gave the request, which for some connectors is new for each dispatch.
func alike(answer string) string { return requestIDs.ReplaceAllString(answer, "ID") }

var requestIDs = regexp.MustCompile(`(chatcmpl|cmpl|resp)[-_][A-Za-z0-9_:.-]+`)

// loner is an engine that answers without a peer, and what it says is what all are to say.
func loner(t *testing.T) *routertest.Engine {
	t.Helper()
	alone := &routertest.Engine{Worker: pairing.Worker{ID: "alone", Role: pairing.RoleBoth, Dialect: "openai"}, Cluster: routertest.NewCluster()}
	if err := alone.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(alone.Stop)
	return alone
}

// raw sends body and returns the whole answer as it came.
func raw(t *testing.T, c *http.Client, addr, path, body string) (int, string) {
	t.Helper()
	req, err := http.NewRequest("POST", "http://"+addr+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Request-Id", "my-own-id")
	resp, err := c.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatalf("%v behind %q", err, b)
	}
	return resp.StatusCode, string(b)
}

// TestEngines holds that the client gets an engine's very bytes, whichever way they came about.
func TestEngines(t *testing.T) {
	for name, make := range fates {
		t.Run(name, func(t *testing.T) {
			h := startEngines(t, nil, make()...)
			alone := loner(t)
			for _, path := range []string{"/v1/chat/completions", "/v1/completions"} {
				for _, n := range []int{1, 2, 3, 8} {
					both(t, func(t *testing.T, stream bool) {
						q := ask{path: path, n: n, stream: stream, usage: stream && n%2 == 0}
						h.do(q).wantWhole(t, q)
						wantStatus, want := raw(t, h.client, alone.Addr, path, q.body())
						if status, got := raw(t, h.client, h.addr, path, q.body()); status != wantStatus || alike(got) != alike(want) {
							t.Errorf("got %d\n%s\nthe engine itself says %d\n%s", status, got, wantStatus, want)
						}
					})
				}
			}
			if n := h.cluster.Recalls(); n != 0 {
				t.Errorf("%d tickets recalled of requests that went well", n)
			}
		})
	}
}

// TestEngineBodies holds what each leg is asked for, byte for byte.
func TestEngineBodies(t *testing.T) {
	h := startEngines(t, nil, engines("vllm", "p1", "d1")...)
	const body = ` { "model":"fake", "messages" : [{"role":"user","content":"é \"q\""}] ,"big":9007199254740993,"x":1e400, "n":3,"max_tokens":4,"min_tokens":2,"seed":18446744073709551615,` +
		`"stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true},"logprobs":true,"top_logprobs":2,"tools":[{"a":1}],"tool_choice":"auto",` +
		`"response_format":{"type":"json_object"},"temperature":0.7,"st\u006fp":["x"],"user":"u"} `
	resp, err := h.client.Post("http://"+h.addr+"/v1/chat/completions", "application/json", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	answer, _ := io.ReadAll(resp.Body)
	resp.Body.Close()
	p, d := h.engines[0].Last(), h.engines[1].Last()
	if resp.StatusCode != 200 || len(p) != 1 || len(d) != 1 {
		t.Fatalf("status %d, %d requests to prefill, %d to decode: %s", resp.StatusCode, len(p), len(d), answer)
	}
	strip := func(c *routertest.EngineCall) string {
		return strings.Replace(string(c.Body), `"kv_transfer_params":`+string(c.Params), "KV", 1)
	}
	if got, want := strip(d[0]), strings.TrimRight(body, "} ")+`,KV} `; got != want {
		t.Errorf("decode got\n%s\nwant\n%s", got, want)
	}
	const want = `{"model":"fake", "messages" : [{"role":"user","content":"é \"q\""}] ,"big":9007199254740993,"x":1e400,"tools":[{"a":1}],"tool_choice":"auto",` +
		`"response_format":{"type":"json_object"},"user":"u","stream":false,"temperature":0,"max_tokens":1,KV}`
	if got := strip(p[0]); got != want {
		t.Errorf("prefill got\n%s\nwant\n%s", got, want)
	}
	if p[0].ID != d[0].ID || p[0].ID == "" || !strings.Contains(string(answer), `"id":"chatcmpl-`+d[0].ID+`"`) {
		t.Errorf("request ids %q and %q, answer %.200s", p[0].ID, d[0].ID, answer)
	}
}

// TestFidelity has an engine say what no model of ours would.
func TestFidelity(t *testing.T) {
	stream := ": keep-alive\n\n" +
		`data: {"id":"chatcmpl-1","choices":[{"index":0,"delta":{"role":"assistant","content":"","reasoning":"h\u00e9"},"token_ids":[9007199254740993]}]}` + "\n\n" +
		`data: {"id":"chatcmpl-1","choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"id":"call_1","type":"function","function":{"name":"f","arguments":"{\"a\": 1e400}"}}]}}],"usage":{"prompt_tokens":5}}` + "\r\n\r\n" +
		": keep-alive\n\n" +
		"event: odd\ndata: {\"choices\":[{\"index\":1,\"delta\":{\"content\":\"{\\\"error\\\":1} [DONE]\"},\"finish_reason\":\"tool_calls\"}]}\n\n" +
		`data: {"choices":[],"usage":{"prompt_tokens":18446744073709551615,"prompt_tokens_details":{"cached_tokens":3}}}` + "\n\n" +
		"data: [DONE]\n\n"
	whole := ` {"id" : "x", "choices":[{"message":{"tool_calls":[{"function":{"arguments":"{}"}}],"reasoning":"r"}}], "n":9007199254740993, "kv_transfer_params":{"headrace":{}}}` + "\n"
	for name, make := range fates {
		t.Run(name, func(t *testing.T) {
			es := make()
			for _, e := range es {
				e.Reply = func(c *routertest.EngineCall) (string, string) {
					if strings.Contains(string(c.Body), `"stream":true`) {
						return "text/event-stream; charset=utf-8", stream
					}
					return "application/json", whole
				}
			}
			h := startEngines(t, nil, es...)
			for _, tt := range []struct {
				q    ask
				want string
			}{{ask{stream: true}, stream}, {ask{}, whole}} {
				if status, got := raw(t, h.client, h.addr, "/v1/chat/completions", tt.q.body()); status != 200 || got != tt.want {
					t.Errorf("got %d %q\nwant %q", status, got, tt.want)
				}
			}
		})
	}
}

// TestForeignPaths: what only other engines offer goes to one of them, and back, as it is.
func TestForeignPaths(t *testing.T) {
	leakCheck(t)
	es := engines("vllm", "p1", "d1")
	for _, e := range es {
		e.Reply = func(c *routertest.EngineCall) (string, string) { return "application/x-odd", "<" + c.Path + ">" }
	}
	h := startMixed(t, func(c *Config) { c.APIKeys = []string{"k"} }, pair("p9", "d9"), es)
	for _, path := range []string{"/v1/embeddings", "/tokenize", "/detokenize"} {
		body := `{"model":"fake","input":["a","b"],"stream":true, "x":1e400}`
		if status, _ := raw(t, h.client, h.addr, path, body); status != 401 {
			t.Errorf("%s without a key: %d", path, status)
		}
		req, _ := http.NewRequest("POST", "http://"+h.addr+path, strings.NewReader(body))
		req.Header.Set("Authorization", "Bearer k")
		resp, err := h.client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		got, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		if resp.StatusCode != 200 || string(got) != "<"+path+">" || resp.Header.Get("Content-Type") != "application/x-odd" {
			t.Errorf("%s: %d %v %q", path, resp.StatusCode, resp.Header, got)
		}
		calls := es[1].Last()
		if last := calls[len(calls)-1]; string(last.Body) != body || last.Path != path {
			t.Errorf("the engine got %s %s", last.Path, last.Body)
		}
	}
	h.source.set(h.workers...)
	h.until("the engines to be forgotten", func() bool { return len(h.r.Status().Workers) == 2 })
	req, _ := http.NewRequest("POST", "http://"+h.addr+"/v1/embeddings", strings.NewReader(`{"model":"fake"}`))
	req.Header.Set("Authorization", "Bearer k")
	resp, err := h.client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != 404 {
		t.Errorf("our own engine's embeddings: %d", resp.StatusCode)
	}
}

// TestUnpaired holds which requests one engine serves alone.
func TestUnpaired(t *testing.T) {
	h := startEngines(t, nil, engines("vllm", "p1", "d1")...)
	for _, tt := range []struct{ more, why string }{
		{``, ""}, {`,"n":3`, ""}, {`,"echo":false,"use_beam_search":false,"prompt_logprobs":null,"truncate_prompt_tokens":5`, ""}, {`,"prompt":["a"]`, ""}, {`,"prompt":[1,2]`, ""},
		{`,"echo":true`, "echo"}, {`,"prompt_logprobs":0`, "prompt_logprobs"}, {`,"use_beam_search":true`, "beam search"}, {`,"truncate_prompt_tokens":-1`, "truncate_prompt_tokens"},
		{`,"prompt":["a","b"]`, "several prompts"}, {`,"prompt":[[1],[2]]`, "several prompts"}, {`,"prompt_embeds":"x"`, "prompt_embeds"},
	} {
		if a := h.do(ask{path: "/v1/completions", more: tt.more, n: 2}); a.status != 200 {
			t.Fatalf("%s: %+v", tt.more, a)
		}
		d := h.r.decisions.list("")[0]
		if paired := d.Whole == ""; paired != (tt.why == "") || !strings.Contains(d.Reason, tt.why) || d.Dialect != "vllm" {
			t.Errorf("%s: decision %+v, want %q", tt.more, d, tt.why)
		}
	}
}

// engineFault breaks the first engine in role who that gets to the stage.
func engineFault(es []*routertest.Engine, who, stage string, n int, action routertest.Action) *routertest.Once {
	once := &routertest.Once{}
	for _, e := range es {
		e.Fault = func(c *routertest.EngineCall, s string, i int) routertest.Action {
			if c.Role == who && s == stage && i == n && once.Take() {
				return action
			}
			return routertest.Go
		}
	}
	return once
}

// engineCase is a fault of one engine, and why the attempt fails that it hits.
type engineCase struct {
	who, stage string
	n          int
	action     routertest.Action
	reason     string
}

// run has other engines make the fault good, for a stream and a whole answer; then is called behind the answers. Stalls are found by
// the time that passes: it passes for all of them at once.
func (c *engineCase) run(t *testing.T, dialect string, lease time.Duration, then func(t *testing.T, h *harness)) {
	stalls := c.action == routertest.Stall
	t.Run(fmt.Sprintf("%s-%s-%d-%d", c.who, c.stage, c.n, c.action), func(t *testing.T) {
		if stalls {
			t.Parallel()
		}
		both(t, func(t *testing.T, stream bool) {
			if stalls {
				t.Parallel()
			}
			if stream && c.stage == routertest.StageLoad && c.action == routertest.Fail {
				t.Skip("the header went with status 200 before")
			}
			es := engines(dialect, "p1", "p2", "d1", "d2")
			for _, e := range es {
				e.Lease = lease
			}
			once := engineFault(es, c.who, c.stage, c.n, c.action)
			h := startMixed(t, func(cfg *Config) { unless(stalls)(cfg); cfg.NixlLease = lease }, nil, es)
			q := ask{n: 6, stream: stream, usage: stream}
			h.do(q).wantWhole(t, q)
			if !once.Within(patience) {
				t.Error("the fault did not happen")
			}
			if m := h.r.metrics.upstream.WithLabelValues(c.reason); !h.counted(m, 1) {
				t.Errorf("%v attempts failed by %s in %+v", value(m), c.reason, h.r.decisions.list(""))
			}
			then(t, h)
		})
	})
}

// TestEngineFaults: another attempt makes it good, whatever the client has by then.
func TestEngineFaults(t *testing.T) {
	leakCheck(t)
	for _, c := range []engineCase{
		{who: "prefill", stage: routertest.StageRequest, action: routertest.Die, reason: "prefill_lost"},
		{who: "prefill", stage: routertest.StageRequest, action: routertest.Busy, reason: "prefill_busy"},
		{who: "prefill", stage: routertest.StageRequest, action: routertest.Bad, reason: "prefill_rejected"},
		{who: "prefill", stage: routertest.StageRequest, action: routertest.Fail, reason: "prefill_error"},
		{who: "prefill", stage: routertest.StageRequest, action: routertest.Stall, reason: "prefill_silent"},
		{who: "prefill", stage: routertest.StagePrefill, action: routertest.Die, reason: "prefill_lost"},
		{who: "prefill", stage: routertest.StagePrefill, action: routertest.Stall, reason: "prefill_silent"},
		{who: "decode", stage: routertest.StageRequest, action: routertest.Die, reason: "decode_lost"},
		{who: "decode", stage: routertest.StageRequest, action: routertest.Busy, reason: "decode_busy"},
		{who: "decode", stage: routertest.StageRequest, action: routertest.Stall, reason: "decode_silent"},
		{who: "decode", stage: routertest.StageLoad, action: routertest.Die, reason: "decode_lost"},
		{who: "decode", stage: routertest.StageLoad, action: routertest.Stall, reason: "decode_silent"},
		{who: "decode", stage: routertest.StageLoaded, action: routertest.Die, reason: "decode_lost"},
		{who: "decode", stage: routertest.StageToken, action: routertest.Die, reason: "decode_lost"},
		{who: "decode", stage: routertest.StageToken, action: routertest.Stall, reason: "decode_silent"},
		{who: "decode", stage: routertest.StageToken, n: 3, action: routertest.Die, reason: "decode_lost"},
		{who: "decode", stage: routertest.StageToken, n: 3, action: routertest.Stall, reason: "decode_silent"},
	} {
		c.run(t, "vllm", 0, func(*testing.T, *harness) {})
	}
}

// TestNixlFaults: the same for vLLM's own connector.
func TestNixlFaults(t *testing.T) {
	leakCheck(t)
	for _, c := range []engineCase{
		{who: "prefill", stage: routertest.StageRequest, action: routertest.Die, reason: "prefill_lost"},
		{who: "prefill", stage: routertest.StageRequest, action: routertest.Bad, reason: "prefill_rejected"},
		{who: "prefill", stage: routertest.StagePrefill, action: routertest.Stall, reason: "prefill_silent"},
		{who: "prefill", stage: routertest.StageAnswer, action: routertest.Die, reason: "prefill_lost"},
		{who: "decode", stage: routertest.StageRequest, action: routertest.Busy, reason: "decode_busy"},
		{who: "decode", stage: routertest.StageLoad, action: routertest.Die, reason: "decode_lost"},
		{who: "decode", stage: routertest.StageLoad, action: routertest.Fail, reason: "decode_error"}, // kv_load_failure_policy fail
		{who: "decode", stage: routertest.StageLoad, action: routertest.Wait, reason: "decode_lease"},
		{who: "decode", stage: routertest.StageLoaded, action: routertest.Die, reason: "decode_lost"},
		{who: "decode", stage: routertest.StageToken, n: 3, action: routertest.Die, reason: "decode_lost"},
	} {
		lease := 2 * patience
		if c.action == routertest.Wait {
			lease = 500 * time.Millisecond // it is to end
		}
		c.run(t, "vllm-nixl", lease, func(t *testing.T, h *harness) {
			if last := h.r.decisions.list("")[0]; c.reason == "decode_lease" && last.Whole == "" {
				t.Errorf("shared again: %+v", last)
			}
			if c.reason == "decode_busy" { // prefill keeps for decode what nobody asks for
				h.cluster.EndLeases()
			}
		})
	}
}

// TestRefusedOnce: a request that prefill and decode refuse is the client's fault, whichever is asked first.
func TestRefusedOnce(t *testing.T) {
	es := engines("vllm-nixl", "p1", "d1")
	for _, e := range es {
		e.Fault = func(*routertest.EngineCall, string, int) routertest.Action { return routertest.Bad }
	}
	h := startEngines(t, nil, es...)
	if a := h.do(ask{}); a.status != 400 || a.failure != "bad, says d1" {
		t.Errorf("got %+v", a)
	}
	if p, d := es[0].Calls(), es[1].Calls(); p != 1 || d != 1 {
		t.Errorf("%d requests to prefill, %d to decode", p, d)
	}
	for _, w := range h.r.Status().Workers {
		if w.Cooling != "" {
			t.Errorf("a client's fault makes %s cool down: %s", w.ID, w.Cooling)
		}
	}
}

// TestRecall: an engine whose scheduler has not seen a request that the client has left lets nobody go; the router does.
func TestRecall(t *testing.T) {
	es := engines("vllm", "p1", "d1")
	waits := make(chan struct{}, 1)
	es[1].Fault = func(_ *routertest.EngineCall, stage string, _ int) routertest.Action {
		if stage == routertest.StageRequest {
			waits <- struct{}{}
			return routertest.Wait
		}
		return routertest.Go
	}
	h := startEngines(t, nil, es...)
	c := h.dial()
	if _, err := io.WriteString(c, post(ask{n: 6}.body())); err != nil {
		t.Fatal(err)
	}
	<-waits
	h.until("prefill's answer", func() bool { return value(h.r.metrics.phases[stateTransferring]) == 1 })
	if h.cluster.Held() == 0 {
		t.Error("prefill holds nothing, so nothing is shown")
	}
	c.Close()
	h.quiet()
	if n := h.cluster.Recalls(); n != 1 {
		t.Errorf("%d tickets recalled", n)
	}
}

// TestLostLease: prefill has answered well, and its ticket is presented to nobody. Decode goes on without.
func TestLostLease(t *testing.T) {
	es := engines("vllm", "p1", "d1")
	es[0].Fault = func(_ *routertest.EngineCall, stage string, _ int) routertest.Action {
		if stage == routertest.StagePresent {
			return routertest.Lose
		}
		return routertest.Go
	}
	h := startEngines(t, nil, es...)
	for _, stream := range []bool{true, false} {
		q := ask{n: 5, stream: stream}
		h.do(q).wantWhole(t, q)
	}
	h.quiet()
	if n := h.cluster.Recalls(); n != 0 {
		t.Errorf("%d tickets recalled", n)
	}
}

// TestMixedFleet has all sorts of workers of one model: each kind is paired with its own.
func TestMixedFleet(t *testing.T) {
	leakCheck(t)
	es := append(append(engines("vllm", "p-v", "d-v"), engines("vllm-nixl", "p-x", "d-x")...), engines("openai", "e-o")...)
	h := startMixed(t, nil, pair("p-n", "d-n"), es)
	seen := map[string]bool{}
	var failed sync.WaitGroup
	for i := range 12 {
		failed.Go(func() {
			q := ask{n: 5, stream: i%2 == 0, usage: i%4 == 0}
			h.do(q).wantWhole(t, q)
		})
	}
	failed.Wait()
	for _, d := range h.r.decisions.list("") {
		seen[d.Dialect] = true
		if d.Whole != "" || d.Prefill[1:] != d.Decode[1:] {
			t.Errorf("decision %+v", d)
		}
	}
	if len(seen) < 2 {
		t.Errorf("dialects %v", seen)
	}
	// Several choices: our own engine's are put together here, the others' come in one piece.
	a := h.do(ask{n: 3, more: `,"n":2`})
	if a.status != 200 {
		t.Errorf("got %+v", a)
	}
}

// TestNoOtherTongue: an answer that one kind of engine has begun is not gone on with by another kind.
func TestNoOtherTongue(t *testing.T) {
	leakCheck(t)
	ws, es := pair("p1", "d1"), engines("openai", "e1")
	once := &routertest.Once{}
	got := make(chan struct{}) // the client has the beginning
	ws[1].Fault = func(c *routertest.Call, stage string, n int) routertest.Action {
		if c.KV.Role != "decode" || stage != routertest.StageToken || n != 3 || !once.Take() {
			return routertest.Go
		}
		<-got
		return routertest.Die
	}
	h := startMixed(t, nil, ws, es)
	h.r.cfg.Policy = firstNative{h.r.cfg.Policy}
	q := ask{n: 9, stream: true}
	resp, err := h.client.Post("http://"+h.addr+"/v1/chat/completions", "application/json", strings.NewReader(q.body()))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	begin := make([]byte, 100)
	if _, err := io.ReadFull(resp.Body, begin); err != nil {
		t.Fatal(err)
	}
	close(got)
	resp.Body = io.NopCloser(io.MultiReader(bytes.NewReader(begin), resp.Body))
	read(t, resp).wantWhole(t, q)
	if es[0].Calls() != 0 {
		t.Errorf("%d requests to the other kind", es[0].Calls())
	}
}

// firstNative refuses foreign engines for first attempts.
type firstNative struct{ pairing.Policy }

func (p firstNative) Pick(ctx context.Context, r pairing.Request, v *pairing.View) (pairing.Decision, error) {
	refuse := r.Refuse
	r.Refuse = func(w *pairing.Worker) string {
		if r.Attempt == 1 && w.Dialect != "native" {
			return "a test"
		}
		return refuse(w)
	}
	return p.Policy.Pick(ctx, r, v)
}

// TestEngineRefuses: what decode finds wrong with a request goes to the client in decode's words, at once.
func TestEngineRefuses(t *testing.T) {
	es := engines("vllm", "p1", "d1")
	var late atomic.Bool // that something is wrong is found out within the stream; the last requests may still be on their way by then
	for _, e := range es {
		e.Fault = func(c *routertest.EngineCall, stage string, _ int) routertest.Action {
			if stage == routertest.StageRequest && !late.Load() {
				return routertest.Bad
			}
			return routertest.Go
		}
		e.Reply = func(*routertest.EngineCall) (string, string) {
			return "text/event-stream", `data: {"error": {"message": "no grammar", "type": "BadRequestError", "param": null, "code": 400}}` + "\n\ndata: [DONE]\n\n"
		}
	}
	h := startEngines(t, func(c *Config) { c.RecoveryTimeout = 2 * patience }, es...)
	both(t, func(t *testing.T, stream bool) {
		before := time.Now()
		if a := h.do(ask{stream: stream}); a.status != 400 || a.failure != "bad, says d1" {
			t.Errorf("got %+v", a)
		}
		if took := time.Since(before); took > patience {
			t.Errorf("took %s", took)
		}
	})
	late.Store(true)
	if a := h.do(ask{stream: true}); a.status != 400 || a.failure != "no grammar" || !json.Valid([]byte(a.raw)) {
		t.Errorf("got %+v", a)
	}
}

// TestSlowIsNotSilent: an engine that says nothing, and lives, may take its time.
func TestSlowIsNotSilent(t *testing.T) {
	es := engines("vllm", "p1", "d1")
	release := make(chan struct{})
	es[0].Fault = func(c *routertest.EngineCall, stage string, _ int) routertest.Action {
		if stage == routertest.StagePrefill {
			<-release
		}
		return routertest.Go
	}
	h := startEngines(t, func(c *Config) { c.Upstream.SilenceTimeout = 30 * time.Millisecond }, es...)
	done := make(chan struct{})
	go func() {
		defer close(done)
		q := ask{n: 3, stream: true}
		h.do(q).wantWhole(t, q)
	}()
	h.until("both to be asked for their health three times", func() bool { return es[0].Probes() >= 3 && es[1].Probes() >= 3 })
	close(release)
	<-done
	if d := h.r.decisions.list(""); len(d) != 1 {
		t.Errorf("%d dispatches", len(d))
	}
}
