package api

import (
	"context"
	"net/http"
	"time"

	"github.com/headrace/headrace/internal/openai"
)

// response carries one request's answer from the engine's events to the client. One goroutine owns it.
type response struct {
	s       *Server
	req     *openai.Request
	head    openai.Head
	choices []*choice
	ready   chan struct{} // holds one word when a choice has events

	ctx    context.Context
	cancel context.CancelFunc
	w      http.ResponseWriter

	failure string
	left    int // choices that have not ended
	ended   bool

	stream  bool // as events; else as one body
	native  bool
	started bool // the header has been sent
	out     []byte
	whole   openai.Whole
}

// newResponse makes the response for the choices that this server is to make: all of them, or the one of a leg.
func newResponse(s *Server, req *openai.Request, er *Request, head openai.Head, began time.Time) *response {
	o := &response{
		s: s, req: req, head: head, ready: make(chan struct{}, 1),
		stream: req.Stream || req.KV != nil,
		native: req.KV != nil,
	}
	n := req.N
	if o.native {
		n = 1
	}
	for i := range n {
		engine := *er
		engine.Choice += i
		o.choices = append(o.choices, newChoice(o, &engine, began))
	}
	o.left = n
	return o
}

// submit gives a choice to the engine.
func (o *response) submit(c *choice) error {
	ctx, cancel := context.WithCancel(o.ctx)
	events, err := o.s.cfg.Engine.Submit(ctx, c.engine)
	if err != nil {
		cancel()
		return err
	}
	c.cancel = cancel
	o.s.pumps.Add(1)
	go func() {
		defer o.s.pumps.Done()
		c.queue.pump(events)
	}()
	return nil
}

// submitRest gives the other choices to the engine, once the first has put the prompt into the prefix cache.
func (o *response) submitRest() {
	for _, c := range o.choices[1:] {
		if c.cancel != nil || o.ended {
			continue
		}
		if err := o.submit(c); err != nil {
			o.fail(err.Error())
		}
	}
}

// run takes the engine's events until one ends the answer or the client leaves.
func (o *response) run() {
	defer o.done()
	var beat <-chan time.Time
	if o.native {
		ticker := time.NewTicker(o.s.cfg.Heartbeat)
		defer ticker.Stop()
		beat = ticker.C
		o.start()
		if o.flush() != nil {
			return
		}
	}
	var events []TokenEvent
	quiet := true // nothing was sent since the last beat
	for {
		select {
		case <-o.ctx.Done():
			return
		case <-beat:
			if !quiet {
				quiet = true
				continue
			}
			o.out = openai.AppendComment(o.out, "hb", "")
		case <-o.ready:
			quiet = false
			for _, c := range o.choices {
				events = c.take(events)
			}
			if first := o.choices[0]; first.tokens > 0 || first.ended {
				o.submitRest()
			}
		}
		if err := o.flush(); err != nil || o.ended {
			return
		}
	}
}

// done ends the request at the engine and counts it.
func (o *response) done() {
	o.cancel()
	for _, c := range o.choices {
		reason := c.finish
		switch {
		case c.cancel == nil:
			continue
		case o.failure != "" && reason == "":
			reason = "error"
		case reason == "" && !c.handedOff:
			reason = "abort"
		}
		c.watch.end(reason, len(c.engine.Prompt), c.completion)
	}
}

func (o *response) comment(name, arg string) {
	if o.native {
		o.out = openai.AppendComment(o.out, name, arg)
	}
}

// usage counts the prompt once.
func (o *response) usage() (u openai.Usage) {
	for i, c := range o.choices {
		u.Add(i, openai.Usage{Prompt: len(c.engine.Prompt), Completion: c.completion, Cached: min(c.cached, len(c.engine.Prompt))})
	}
	return u
}

// conclude ends the answer well, when all its choices have.
func (o *response) conclude() {
	o.ended = true
	if !o.stream {
		o.whole.Usage = o.usage()
		if o.req.ReturnTokenIDs {
			o.whole.PromptIDs = o.choices[0].engine.Prompt
		}
		o.out = o.head.AppendWhole(o.out, &o.whole)
		return
	}
	if o.native || o.req.IncludeUsage {
		o.out = o.head.AppendUsage(o.out, o.usage())
	}
	if o.native {
		o.out = openai.AppendComment(o.out, "final", "")
	} else {
		o.out = append(o.out, openai.Done...)
	}
}

// fail ends the answer badly. A router sends the request elsewhere; others are told.
func (o *response) fail(reason string) {
	o.failure, o.ended = reason, true
	o.s.cfg.Logger.Warn("request failed", "id", o.head.ID, "reason", reason)
	switch {
	case o.native:
		o.comment("failed", reason)
	case o.started:
		o.out = openai.Internal("The request failed: %s.", reason).AppendEvent(o.out)
	default:
		o.out = o.out[:0]
		o.started = true
		writeError(o.w, openai.Unavailable("The request failed: %s.", reason))
	}
}

// start sends the header of a stream. A plain client's waits for the first token, so that what fails before it gets a
// status.
func (o *response) start() {
	if o.started {
		return
	}
	o.started = true
	h := o.w.Header()
	h.Set("Content-Type", "text/event-stream; charset=utf-8")
	h.Set("Cache-Control", "no-cache")
	h.Set("X-Accel-Buffering", "no")
	o.w.WriteHeader(http.StatusOK)
}

// flush sends what has been rendered. The engine's side never waits for it.
func (o *response) flush() error {
	if !o.stream {
		if len(o.out) > 0 {
			writeJSON(o.w, http.StatusOK, o.out)
			o.out = o.out[:0]
		}
		return nil
	}
	if !o.started {
		return nil
	}
	rc := http.NewResponseController(o.w)
	_ = rc.SetWriteDeadline(time.Now().Add(o.s.cfg.WriteTimeout)) // not every ResponseWriter has one
	if len(o.out) > 0 {
		if _, err := o.w.Write(o.out); err != nil {
			return err
		}
		o.out = o.out[:0]
	}
	return rc.Flush()
}
