package routertest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/headrace/headrace/internal/openai"
	"github.com/headrace/headrace/router/pairing"
)

// Stages of an Engine, beside StageRequest (its HTTP server has the request, its scheduler has not), StageToken and StageFinish. Workers have StageLoad and StageLoaded too.
const (
	StagePresent  = "present"  // prefill has seen the request and is about to present its ticket
	StagePrefill  = "prefill"  // computing the prompt
	StageAnswer   = "answer"   // prefill's answer is about to go
	StageAnswered = "answered" // it went
	StageLoad     = "load"     // decode has seen the request and has no KV yet
	StageLoaded   = "loaded"   // decode has the KV
)

// Engine is a fake of an engine that is not ours: vLLM with Headrace's connector (dialect vllm), with one of its own
// (vllm-nixl, vllm-nixl-push, vllm-mooncake, vllm-p2p-nccl), or with none (openai), or SGLang (sglang).
type Engine struct {
	pairing.Worker
	Cluster *Cluster
	// Fault, when set, is asked at each stage.
	Fault func(c *EngineCall, stage string, n int) Action
	// Reply, when set, is what the engine answers with instead of the fake model's tokens.
	Reply func(c *EngineCall) (contentType string, body string)
	// Metrics is what /metrics answers; nil for those of an engine with nothing to do.
	Metrics atomic.Pointer[string]
	// Lease is how long NIXL's prefill keeps blocks: 30 s. Expiry is what it says of it: null.
	Lease  time.Duration
	Expiry string
	// Ranks is how many data-parallel ranks Mooncake's bootstrap server names: 1. BootstrapFault, when set, says with which status it
	// answers.
	Ranks int
	// NoIDs: it is too old to say its tokens.
	NoIDs bool
	// Burst is how many tokens come in one event: 1.
	Burst          int
	BootstrapFault func(ctx context.Context) int

	probed    atomic.Int64
	stopped   atomic.Bool // it answers nothing
	bootstrap server[struct{}]
	queries   atomic.Int64
	known     registered
	server[EngineCall]
}

// Start makes e listen. Empty fields are filled in.
func (e *Engine) Start() error {
	if e.Model == "" {
		e.Model = "fake"
	}
	if e.Dialect == "vllm" && e.NodeID == "" {
		e.NodeID, e.NodeData = "node-"+e.ID, dataAddr(e.ID)
	}
	if e.Dialect == "vllm" && e.Fingerprint == "" {
		e.Fingerprint = strings.Repeat("cd", 32)
	}
	if e.Lease == 0 {
		e.Lease = 30 * time.Second
	}
	if e.Expiry == "" {
		e.Expiry = "null"
	}
	e.ContextTokens = 4096
	if err := e.startConnector(); err != nil {
		return err
	}
	var err error
	e.Addr, err = e.listen(e.handle)
	return err
}

// startConnector gives the engine an address for its peers.
func (e *Engine) startConnector() error {
	switch e.Dialect {
	case "vllm-mooncake":
		if e.Role.Prefills() {
			return e.startBootstrap()
		}
	case "vllm-nixl-push":
		e.KVAddr, e.KVEngine = "10.1.2.3:"+fmt.Sprint(5600+len(e.ID)), "id-of-"+e.ID
	case "sglang":
		if e.Role == pairing.RolePrefill {
			e.KVAddr = e.ID + ".example:8998"
		}
	case "vllm-p2p-nccl":
		e.KVAddr = "kv-of-" + e.ID + ":14579"
	}
	return nil
}

// Stop kills the engine, its bootstrap server too.
func (e *Engine) Stop() {
	if e.bootstrap.srv != nil {
		e.bootstrap.Stop()
	}
	e.server.Stop()
	e.died()
}

// Conns returns how many connections are open, those to its bootstrap server among them.
func (e *Engine) Conns() int { return e.server.Conns() + e.bootstrap.Conns() }

// Header returns a header of the request.
func (c *EngineCall) Header(name string) string { return c.header.Get(name) }

// Probes returns how many questions after its health came.
func (e *Engine) Probes() int { return int(e.probed.Load()) }

// EngineCall is one request to an Engine.
type EngineCall struct {
	Engine *Engine
	N      int
	Path   string
	ID     string // X-Request-Id
	Body   []byte
	Params json.RawMessage // kv_transfer_params
	Role   string          // prefill, decode or whole

	prompt string
	prior  []int32 // tokens that the prompt ends in and that the model made, in a request that goes on
	b      engineBody
	kv     KV
	lease  *lease
	answer *nixlAnswer

	header    http.Header
	key       string // by which the two ends meet
	meeting   *meeting
	checkPeer func(peer *Engine) string
	rank      int
	sglang    sglangMembers

	wrong bool // what it computes from is not the prompt's KV
	w     http.ResponseWriter
	ctx   context.Context
}

// engineBody is what the fake looks at.
type engineBody struct {
	Model         string           `json:"model"`
	Stream        bool             `json:"stream"`
	StreamOptions *json.RawMessage `json:"stream_options"`
	Seed          uint64           `json:"seed"`
	MaxTokens     int              `json:"max_tokens"`
	MaxCompletion *int             `json:"max_completion_tokens"`
	N             int              `json:"n"`
	Prompt        json.RawMessage  `json:"prompt"`
	Messages      []struct{ Content string }
	Input         json.RawMessage `json:"input"`
	MaxOutput     *int            `json:"max_output_tokens"`
	Params        json.RawMessage `json:"kv_transfer_params"`
	Temperature   *float64        `json:"temperature"`
	TokenIDs      bool            `json:"return_token_ids"`
	Stop          []string        `json:"stop"`
	Logprobs      any             `json:"logprobs"`
}

func (e *Engine) handle(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path == "/health" {
		e.probed.Add(1)
		if e.stopped.Load() {
			<-r.Context().Done()
			panic(http.ErrAbortHandler)
		}
		return
	}
	if r.URL.Path == "/metrics" {
		serveMetrics(w, e.Metrics.Load())
		return
	}
	if r.URL.Path == "/abort_request" && e.Dialect == "sglang" {
		e.abortRequest(w, r)
		return
	}
	defer e.end()
	c := &EngineCall{Engine: e, N: e.begin(), Path: r.URL.Path, ID: r.Header.Get("X-Request-Id"), w: w, ctx: r.Context(), header: r.Header}
	var err error
	if c.Body, err = io.ReadAll(r.Body); err != nil {
		return
	}
	if err := c.parse(); err != nil {
		e.Cluster.violate("engine %s: %v in %.600s", e.ID, err, c.Body)
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	e.keep(&EngineCall{Engine: e, N: c.N, Path: c.Path, ID: c.ID, Body: c.Body, Params: c.Params, Role: c.Role})
	if err := c.serve(); err != nil && !errors.Is(err, errDone) {
		panic(http.ErrAbortHandler)
	}
}

// parse is strict about what each connector is to be told.
func (c *EngineCall) parse() error {
	if err := json.Unmarshal(c.Body, &c.b); err != nil {
		return err
	}
	if bytes.Count(c.Body, []byte(`"kv_transfer_params"`)) > 1 {
		return errors.New("kv_transfer_params twice")
	}
	c.Params, c.Role = c.b.Params, "whole"
	for _, text := range []json.RawMessage{c.b.Prompt, c.b.Input} {
		if text != nil && json.Unmarshal(text, &c.prompt) != nil {
			c.prompt = string(text)
		}
	}
	for _, m := range c.b.Messages {
		c.prompt += m.Content
	}
	c.parseIDs()
	for _, most := range []*int{c.b.MaxCompletion, c.b.MaxOutput} {
		if most != nil {
			c.b.MaxTokens = *most
		}
	}
	if c.b.MaxTokens == 0 {
		c.b.MaxTokens = 16
	}
	m, ok := manners[c.Engine.Dialect]
	if !ok {
		return fmt.Errorf("a fake of dialect %q", c.Engine.Dialect)
	}
	err := m.parse(c)
	switch {
	case err != nil:
		return err
	case !c.Engine.Serves(c.b.Model):
		return fmt.Errorf("model %q", c.b.Model)
	case c.ID == "":
		return errors.New("no X-Request-Id")
	case c.Role == "prefill" && c.Engine.Dialect != "sglang":
		return c.checkPrefill()
	}
	return nil
}

// manner is how an engine of a dialect is asked, and what it does. parse sets the call's Role, and where two ends meet its key.
type manner struct {
	parse, prefill, decode func(c *EngineCall) error
	deaf                   bool // to a client's leaving
}

var manners = map[string]manner{
	"openai":         {parse: (*EngineCall).parsePlain},
	"vllm":           {parse: (*EngineCall).parsePush, prefill: (*EngineCall).pushPrefill, decode: (*EngineCall).pushDecode},
	"vllm-nixl":      {parse: (*EngineCall).parseNixl, prefill: (*EngineCall).nixlPrefill, decode: (*EngineCall).nixlDecode},
	"vllm-nixl-push": {parse: (*EngineCall).parseNixlPush, prefill: (*EngineCall).pushPrefillItself, decode: (*EngineCall).takeItself},
	"vllm-mooncake":  {parse: (*EngineCall).parseMooncake, prefill: (*EngineCall).pushPrefillItself, decode: (*EngineCall).takeItself},
	"vllm-p2p-nccl":  {parse: (*EngineCall).parseNCCL, prefill: (*EngineCall).ncclPrefill, decode: (*EngineCall).ncclDecode},
	"sglang":         {parse: (*EngineCall).parseSGLang, prefill: (*EngineCall).sglangPrefill, decode: (*EngineCall).sglangDecode, deaf: true},
}

func (c *EngineCall) parsePlain() error {
	if len(c.Params) > 0 {
		return errors.New("transfer parameters for an engine without a connector")
	}
	return nil
}

// checkPrefill holds that nothing is left in the body that makes no sense beside one token, or costs something.
func (c *EngineCall) checkPrefill() error {
	var members map[string]json.RawMessage
	if err := json.Unmarshal(c.Body, &members); err != nil {
		return err
	}
	for _, name := range []string{"stream_options", "min_tokens", "n", "best_of", "logprobs", "top_logprobs", "stop", "seed", "logit_bias", "structured_outputs",
		"presence_penalty", "prompt_logprobs", "echo"} {
		if _, ok := members[name]; ok {
			return fmt.Errorf("prefill is asked for %s", name)
		}
	}
	if c.b.Stream || c.b.MaxTokens != 1 {
		return errors.New("prefill is not asked for one token at once")
	}
	return nil
}

func (c *EngineCall) parsePush() error {
	if len(c.Params) == 0 {
		return nil
	}
	var p struct {
		Headrace *struct {
			V          int    `json:"v"`
			Role       string `json:"role"`
			Ticket     []byte `json:"ticket"`
			Peer       string `json:"peer"`
			DeadlineMS int64  `json:"deadline_ms"`
		} `json:"headrace"`
	}
	d := json.NewDecoder(bytes.NewReader(c.Params))
	d.DisallowUnknownFields()
	if err := d.Decode(&p); err != nil {
		return fmt.Errorf("kv_transfer_params: %w", err)
	}
	h := p.Headrace
	if h == nil || h.V != 1 || h.DeadlineMS < time.Now().UnixMilli() || (h.Role == "prefill") != (h.Peer != "") || h.Role != "prefill" && h.Role != "decode" {
		return fmt.Errorf("kv_transfer_params %s", c.Params)
	}
	c.Role, c.kv = h.Role, KV{Role: h.Role, Ticket: h.Ticket, Peer: h.Peer}
	return nil
}

// fault asks the engine's Fault; an error says that the call is over.
func (c *EngineCall) fault(stage string, n int) error {
	if c.Engine.Fault == nil {
		return nil
	}
	switch c.Engine.Fault(c, stage, n) {
	case Die:
		return errAbort
	case Stall:
		c.Engine.stopped.Store(true)
		<-c.ctx.Done()
		return errAbort
	case Wait:
		<-c.ctx.Done()
		return errAbort
	case Fail:
		return c.refuse(http.StatusInternalServerError, "it broke")
	case Busy:
		c.w.Header().Set("Retry-After", "7")
		return c.refuse(http.StatusServiceUnavailable, "busy")
	case Bad:
		return c.refuse(http.StatusBadRequest, "bad, says "+c.Engine.ID)
	}
	return nil
}

func (c *EngineCall) refuse(status int, message string) error {
	c.w.Header().Set("Content-Type", "application/json")
	c.w.WriteHeader(status)
	fmt.Fprintf(c.w, `{"error":{"message":%q,"type":"Error","param":null,"code":%d}}`, message, status)
	return errDone
}

func (c *EngineCall) serve() error {
	if err := c.fault(StageRequest, 0); err != nil {
		return err
	}
	m := manners[c.Engine.Dialect]
	if c.ctx.Err() != nil && !m.deaf {
		return errAbort
	}
	if c.key != "" {
		if err := c.join(); err != nil {
			c.Engine.Cluster.violate("engine %s: %v in %.600s", c.Engine.ID, err, c.Body)
			return c.refuse(http.StatusBadRequest, err.Error())
		}
	}
	switch c.Role {
	case "prefill":
		return m.prefill(c)
	case "decode":
		return m.decode(c)
	}
	return c.generate()
}

// write sends b at once.
func (c *EngineCall) write(b string) error {
	if _, err := io.WriteString(c.w, b); err != nil {
		return err
	}
	return http.NewResponseController(c.w).Flush()
}

// json answers with the whole of b, so that its end is known at once.
func (c *EngineCall) json(b string) error {
	c.w.Header().Set("Content-Type", "application/json")
	c.w.Header().Set("Content-Length", strconv.Itoa(len(b)))
	return c.write(b)
}

// generate answers as vLLM does.
func (c *EngineCall) generate() error {
	if c.Engine.Reply != nil {
		kind, body := c.Engine.Reply(c)
		c.w.Header().Set("Content-Type", kind)
		return c.write(body)
	}
	prompt := c.prompt
	if c.wrong {
		prompt += " of somebody else"
	}
	if c.Path == "/v1/responses" && c.b.Stream {
		return c.respond(prompt)
	}
	if !c.b.Stream {
		for i := range c.b.MaxTokens {
			if err := c.fault(StageToken, i); err != nil {
				return err
			}
		}
		c.w.Header().Set("Content-Type", "application/json")
		return c.write(c.whole(prompt))
	}
	return c.stream(prompt)
}

func quote(s []byte) string { return string(openai.AppendString(nil, s)) }

func (c *EngineCall) chat() bool { return strings.HasSuffix(c.Path, "chat/completions") }

func (c *EngineCall) head(suffix string) string {
	if !c.chat() {
		return fmt.Sprintf(`{"id":"cmpl-%s","object":"text_completion","created":1700000000,"model":"fake",`, c.ID)
	}
	return fmt.Sprintf(`{"id":"chatcmpl-%s","object":"chat.completion%s","created":1700000000,"model":"fake",`, c.ID, suffix)
}

// respond streams a response, whose last event says that it is the last.
func (c *EngineCall) respond(prompt string) error {
	c.w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
	event := func(kind, more string) error {
		return c.write("event: " + kind + "\ndata: {\"type\":\"" + kind + "\"," + more + "}\n\n")
	}
	if err := event("response.created", `"response":{"status":"in_progress"}`); err != nil {
		return err
	}
	detok := openai.NewDetok(vocab{}, openai.DetokOptions{})
	for i := range c.b.MaxTokens {
		if err := c.fault(StageToken, i); err != nil {
			return err
		}
		text, _ := detok.Push(tokenAt(prompt, c.b.Seed, i))
		if err := event("response.output_text.delta", `"delta":`+quote(text)); err != nil {
			return err
		}
	}
	if err := c.fault(StageFinish, 0); err != nil {
		return err
	}
	return event("response.completed", `"response":`+c.whole(prompt))
}

func (c *EngineCall) whole(prompt string) string {
	if c.Path == "/v1/responses" {
		return `{"id":"resp_` + c.ID + `","object":"response","status":"completed","output":[{"type":"message","role":"assistant","content":[{"type":"output_text","text":` +
			quote([]byte(Text(prompt, c.b.Seed, c.b.MaxTokens))) + `}]}],"kv_transfer_params":null}`
	}
	text := quote([]byte(Text(prompt, c.b.Seed, c.b.MaxTokens)))
	choice := `{"index":0,"text":` + text + `,"logprobs":null,"finish_reason":"length"}`
	if c.chat() {
		choice = `{"index":0,"message":{"role":"assistant","content":` + text + `,"refusal":null,"tool_calls":[]},"finish_reason":"length"}`
	}
	return c.head("") + `"choices":[` + choice + `],` + c.usage() + `,"kv_transfer_params":null}`
}
