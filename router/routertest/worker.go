package routertest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/headrace/headrace/internal/openai"
	"github.com/headrace/headrace/router/pairing"
)

// Stages at which a worker asks its Fault what to do. At StageAnnounced and StageToken n is the position of the token.
const (
	StageRequest   = "request"   // before the header
	StageBegun     = "begun"     // behind the header
	StageAnnounced = "announced" // behind `: t`, before its data
	StageToken     = "token"     // behind the data
	StageHandoff   = "handoff"   // behind `: handoff`
	StageBound     = "bound"     // decode has bound the ticket
	StageTransfer  = "transfer"  // before the KV is pushed
	StageSettled   = "settled"   // behind settling
	StageFinish    = "finish"    // behind the finish event, before `: final`
	StageMove      = "move"      // asked to let the stream go on elsewhere, before the answer
	StageAsked     = "asked"     // it will, at its next token
)

// Action is what a Fault makes of a stage.
type Action int

// Actions.
const (
	Go    Action = iota
	Die          // break the connection
	Stall        // say nothing any more, not even that it lives
	Fail         // `: failed`
	Busy         // 503 (StageRequest)
	Bad          // 400 (StageRequest)
	Wait         // go on living, without getting on, until the request is cancelled
	Err          // 500 (StageRequest)
	Lose         // answer well although the lease ended where nobody knew of it: its daemon was killed (StagePresent); forget what was agreed to (StageMove)
)

// Worker is a fake worker.
type Worker struct {
	pairing.Worker
	Cluster *Cluster
	// Fault, when set, is asked at each stage.
	Fault func(c *Call, stage string, n int) Action
	// Heartbeat is 20 ms when zero.
	Heartbeat time.Duration
	// Metrics is what /metrics answers; nil for those of an engine with nothing to do.
	Metrics atomic.Pointer[string]
	// NoMoves: it knows nothing of streams that go on elsewhere.
	NoMoves bool

	live sync.Map // of *Call, by streamOf

	server[Call]
}

// Start makes w listen. Empty fields are filled in.
func (w *Worker) Start() error {
	if w.Heartbeat == 0 {
		w.Heartbeat = 20 * time.Millisecond
	}
	if w.Model == "" {
		w.Model = "fake"
	}
	if w.NodeID == "" {
		w.NodeID, w.NodeData = "node-"+w.ID, dataAddr(w.ID)
	}
	if w.Fingerprint == "" {
		w.Fingerprint = strings.Repeat("ab", 32)
	}
	w.Dialect, w.BlockTokens, w.ContextTokens = "native", 16, 4096
	var err error
	w.Addr, err = w.listen(w.handle)
	return err
}

// Call is one request to a worker.
type Call struct {
	Worker *Worker
	N      int // 1 for the worker's first
	Path   string
	Body   []byte
	KV     KV
	Prompt string
	Tokens int // max_tokens

	w     http.ResponseWriter
	ctx   context.Context
	mu    sync.Mutex // guards writes
	quiet bool
	lease *lease
	asked chan *lease // to move
	head  openai.Head
	detok *openai.Detok
	at    int // position of the next token
}

// KV is kv_transfer_params.
type KV struct {
	Dialect    string   `json:"dialect"`
	Role       string   `json:"role"`
	ID         string   `json:"id"`
	Created    int64    `json:"created"`
	Seed       uint64   `json:"seed"`
	Ticket     []byte   `json:"ticket"`
	Peer       string   `json:"peer"`
	DeadlineMS int64    `json:"deadline_ms"`
	Resume     *[]int32 `json:"resume"`
	Choice     int      `json:"choice"`
}

var errAbort = errors.New("abort")

func (w *Worker) handle(rw http.ResponseWriter, r *http.Request) {
	if r.URL.Path == "/metrics" {
		serveMetrics(rw, w.Metrics.Load())
		return
	}
	if r.URL.Path == openai.PathMove {
		w.move(rw, r)
		return
	}
	defer w.end()
	c := &Call{Worker: w, N: w.begin(), Path: r.URL.Path, w: rw, ctx: r.Context()}
	var err error
	if c.Body, err = io.ReadAll(r.Body); err != nil {
		return
	}
	if err := c.parse(); err != nil {
		w.Cluster.violate("worker %s: %v in %.300s", w.ID, err, c.Body)
		rw.WriteHeader(http.StatusBadRequest)
		return
	}
	w.keep(&Call{Worker: w, N: c.N, Path: c.Path, Body: c.Body, KV: c.KV, Prompt: c.Prompt, Tokens: c.Tokens})
	err = c.serve()
	c.letGo()
	if err != nil {
		panic(http.ErrAbortHandler)
	}
}

// parse is strict about all that section 5 of the protocol asks for.
func (c *Call) parse() error {
	var b struct {
		Model         string          `json:"model"`
		Stream        bool            `json:"stream"`
		StreamOptions map[string]bool `json:"stream_options"`
		Seed          json.Number     `json:"seed"`
		MaxTokens     int             `json:"max_tokens"`
		Prompt        string          `json:"prompt"`
		Messages      []struct{ Content string }
		KV            json.RawMessage `json:"kv_transfer_params"`
	}
	if err := json.Unmarshal(c.Body, &b); err != nil {
		return err
	}
	d := json.NewDecoder(strings.NewReader(string(b.KV)))
	d.DisallowUnknownFields()
	if err := d.Decode(&c.KV); err != nil {
		return fmt.Errorf("kv_transfer_params: %w", err)
	}
	c.Prompt, c.Tokens = b.Prompt, b.MaxTokens
	for _, m := range b.Messages {
		c.Prompt += m.Content
	}
	if c.Tokens == 0 {
		c.Tokens = 16
	}
	ep, ok := openai.EndpointOf(c.Path)
	switch k := &c.KV; {
	case !ok:
		return fmt.Errorf("path %s", c.Path)
	case !c.Worker.Serves(b.Model):
		return fmt.Errorf("model %q", b.Model)
	case !b.Stream || !b.StreamOptions["include_usage"]:
		return errors.New("no stream with usage")
	case b.Seed == "":
		return errors.New("no seed")
	case k.Dialect != "headrace/1" || k.ID == "" || k.Created == 0 || k.DeadlineMS < time.Now().UnixMilli():
		return errors.New("dialect, id, created or deadline")
	case k.Role == "whole" && (k.Ticket != nil || k.Peer != ""), k.Role != "whole" && k.Ticket == nil, (k.Role == "prefill") != (k.Peer != ""):
		return errors.New("ticket or peer")
	}
	c.head = openai.Head{Endpoint: ep, ID: c.KV.ID, Created: c.KV.Created, Model: b.Model, Index: c.KV.Choice}
	return nil
}

// fault asks the worker's Fault; an error says that the call is over.
func (c *Call) fault(stage string, n int) error {
	if c.Worker.Fault == nil {
		return nil
	}
	switch c.Worker.Fault(c, stage, n) {
	case Die:
		return errAbort
	case Stall:
		c.mu.Lock()
		c.quiet = true
		c.mu.Unlock()
		<-c.ctx.Done()
		return errAbort
	case Wait:
		<-c.ctx.Done()
		return errAbort
	case Fail:
		return c.fail("a fault was asked for")
	}
	return nil
}

func (c *Call) fail(why string) error {
	if c.lease != nil {
		c.lease.end(why)
	}
	_ = c.comment("failed", why)
	return errDone
}

// errDone ends a call whose response is whole.
var errDone = errors.New("done")

// write sends b at once.
func (c *Call) write(b []byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.quiet {
		return nil
	}
	if _, err := c.w.Write(b); err != nil {
		return err
	}
	return http.NewResponseController(c.w).Flush()
}

func (c *Call) comment(name, arg string) error {
	return c.write(openai.AppendComment(nil, name, arg))
}

func (c *Call) serve() error {
	w := c.Worker
	if w.Fault != nil {
		switch w.Fault(c, StageRequest, 0) {
		case Die:
			return errAbort
		case Stall, Wait:
			<-c.ctx.Done()
			return errAbort
		case Busy:
			c.w.Header().Set("Retry-After", "7")
			c.httpError(openai.Unavailable("busy"))
			return nil
		case Err:
			c.httpError(openai.Internal("%s errs", w.ID))
			return nil
		case Bad:
			c.httpError(openai.BadRequest("messages", "fake", "bad, says %s", w.ID))
			return nil
		}
	}
	c.w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
	if err := c.comment("phase", "queued"); err != nil {
		return err
	}
	stop := c.beat()
	defer stop()
	err := c.fault(StageBegun, 0)
	if err == nil {
		err = c.role()
	}
	if errors.Is(err, errDone) {
		return nil
	}
	return err
}

func (c *Call) httpError(e *openai.Error) {
	c.w.Header().Set("Content-Type", "application/json")
	c.w.WriteHeader(e.Status)
	_, _ = c.w.Write(e.AppendJSON(nil))
}

// beat sends heartbeats until stopped.
func (c *Call) beat() (stop func()) {
	quit, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		t := time.NewTicker(c.Worker.Heartbeat)
		defer t.Stop()
		for {
			select {
			case <-quit:
				return
			case <-t.C:
				_ = c.comment("hb", "")
			}
		}
	}()
	return func() { close(quit); <-done }
}

func (c *Call) role() error {
	c.detok = openai.NewDetok(vocab{}, openai.DetokOptions{})
	if c.KV.Resume != nil {
		c.detok.PushAll(*c.KV.Resume)
		c.at = len(*c.KV.Resume)
	}
	if c.KV.Role != "prefill" {
		c.serves()
	}
	switch c.KV.Role {
	case "prefill":
		return c.prefill()
	case "decode":
		return c.decode()
	}
	if err := c.roleChunk(); err != nil {
		return err
	}
	return c.generate(-1)
}

func (c *Call) roleChunk() error {
	if c.KV.Resume != nil {
		return nil
	}
	return c.write(c.head.AppendRole(nil, nil))
}

// generate makes n tokens, or all that are left when n is negative, and ends the answer if it gets so far.
func (c *Call) generate(n int) error {
	for ; n != 0 && c.at < c.Tokens; n-- {
		if err := c.moveOn(); err != nil {
			return err
		}
		id := tokenAt(c.Prompt, c.KV.Seed+uint64(c.KV.Choice), c.at)
		if err := c.write(openai.AppendTokenComment(nil, "t", []int32{id})); err != nil {
			return err
		}
		if err := c.fault(StageAnnounced, c.at); err != nil {
			return err
		}
		if text, _ := c.detok.Push(id); len(text) > 0 {
			if err := c.write(c.head.AppendText(nil, text, nil, nil)); err != nil {
				return err
			}
		}
		if err := c.fault(StageToken, c.at); err != nil {
			return err
		}
		c.at++
	}
	if c.at < c.Tokens {
		return nil
	}
	// Text held back to the end goes into the finish event.
	finish := strings.Replace(string(c.head.AppendText(nil, c.detok.Flush(), nil, nil)), `"finish_reason":null`, `"finish_reason":"length"`, 1)
	if err := c.write([]byte(finish)); err != nil {
		return err
	}
	if err := c.fault(StageFinish, c.at); err != nil {
		return err
	}
	u := openai.Usage{Prompt: len(strings.Fields(c.Prompt)), Completion: c.at}
	if err := c.write(c.head.AppendUsage(nil, u)); err != nil {
		return err
	}
	if err := c.comment("final", ""); err != nil {
		return err
	}
	return errDone
}

func (c *Call) prefill() error {
	if c.lease = c.Worker.Cluster.use(c.Worker, "prefill", &c.KV); c.lease == nil {
		return c.fail("ticket")
	}
	if err := c.comment("phase", "prefilling"); err != nil {
		return err
	}
	c.lease.mark("presented", c.lease.presented)
	if err := c.roleChunk(); err != nil {
		return err
	}
	c.lease.hand(c.answer(c.at + 1))
	if err := c.generate(1); err != nil {
		return err
	}
	if err := c.comment("handoff", ""); err != nil {
		return err
	}
	if err := c.fault(StageHandoff, 0); err != nil {
		return err
	}
	select {
	case <-c.lease.bound:
	case <-c.lease.ended:
		return c.fail(c.lease.reason())
	case <-c.ctx.Done():
		return errAbort
	}
	if err := c.fault(StageTransfer, 0); err != nil {
		return err
	}
	if !c.lease.mark("settled", c.lease.settled) {
		return c.fail(c.lease.reason())
	}
	if err := c.fault(StageSettled, 0); err != nil {
		return err
	}
	return c.comment("settled", "")
}

const blocksPerLease = 4

func (c *Call) decode() error {
	if c.lease = c.Worker.Cluster.use(c.Worker, "decode", &c.KV); c.lease == nil {
		return c.fail("ticket")
	}
	if err := c.fault(StageLoad, 0); err != nil {
		return err
	}
	select {
	case <-c.lease.presented:
	case <-c.lease.ended:
		return c.fail(c.lease.reason())
	case <-c.ctx.Done():
		return errAbort
	}
	c.Worker.Cluster.hold(blocksPerLease)
	defer c.Worker.Cluster.hold(-blocksPerLease)
	c.lease.mark("bound", c.lease.bound)
	if err := c.comment("phase", "bound"); err != nil {
		return err
	}
	if err := c.fault(StageBound, 0); err != nil {
		return err
	}
	select {
	case <-c.lease.settled:
	case <-c.lease.ended:
		return c.fail(c.lease.reason())
	case <-c.ctx.Done():
		return errAbort
	}
	if err := c.fault(StageLoaded, 0); err != nil {
		return err
	}
	if err := c.comment("phase", "settled"); err != nil {
		return err
	}
	if err := c.fault(StageSettled, 0); err != nil {
		return err
	}
	prior := c.lease.handed()
	c.detok.PushAll(prior[c.at:])
	c.at = len(prior)
	if err := c.write(openai.AppendTokenComment(nil, "prior", prior)); err != nil {
		return err
	}
	if err := c.comment("phase", "decoding"); err != nil {
		return err
	}
	return c.generate(-1)
}
