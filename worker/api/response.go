package api

import (
	"context"
	"net/http"
	"slices"
	"time"

	"github.com/headrace/headrace/internal/openai"
)

// response carries one request's answer from the engine's events to the client. One goroutine owns it.
type response struct {
	s      *Server
	req    *openai.Request
	engine *Request
	head   openai.Head
	queue  *queue
	watch  watch

	ctx    context.Context
	cancel context.CancelFunc
	w      http.ResponseWriter

	detok      *openai.Detok
	completion int // tokens, those before this leg included
	cached     int
	finish     string
	failure    string
	ended      bool
	roleSent   bool
	handedOff  bool

	stream  bool // as events; else as one body
	native  bool
	started bool // the header has been sent
	out     []byte
	whole   openai.Whole
}

func newResponse(s *Server, req *openai.Request, er *Request, head openai.Head, began time.Time) *response {
	o := &response{
		s: s, req: req, engine: er, head: head, queue: newQueue(),
		detok:  openai.NewDetok(s.cfg.Tokenizer, openai.DetokOptions{Stop: req.Stop, KeepSpecial: req.KeepSpecial}),
		stream: req.Stream || req.KV != nil,
		native: req.KV != nil,
	}
	o.watch = watch{m: s.metrics, began: began, decode: er.Role == RoleDecode}
	o.roleSent = req.Endpoint == openai.Completions || er.Role == RoleDecode || er.Resume != nil
	return o
}

// complete puts the resumed tokens through the detokeniser and says whether there is nothing left to generate: the
// worker that gave the last token may have died before it could say that it was the last.
func (o *response) complete() (finish string, done bool) {
	resume := o.engine.Resume
	o.completion = len(resume)
	if len(resume) == 0 {
		return "", false
	}
	last := resume[len(resume)-1]
	if o.isEnd(last) {
		o.detok.PushAll(resume[:len(resume)-1])
		return openai.FinishStop, true
	}
	if o.detok.PushAll(resume) {
		return openai.FinishStop, true
	}
	return openai.FinishLength, len(resume) >= o.engine.MaxTokens
}

// isEnd reports whether a token ends the completion.
func (o *response) isEnd(id int32) bool {
	return (!o.engine.IgnoreEOS && o.s.ends[id]) || slices.Contains(o.engine.StopTokens, id)
}

func (o *response) finishAtOnce(finish string) {
	o.conclude(finish)
	_ = o.flush() // a router that has left dispatches again
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
		closed := false
		select {
		case <-o.ctx.Done():
			return
		case <-beat:
			if !quiet {
				quiet = true
				continue
			}
			o.out = openai.AppendComment(o.out, "hb", "")
		case <-o.queue.ready:
			events, closed = o.queue.take(events)
			quiet = false
			for i := range events {
				if o.step(&events[i]); o.ended {
					break
				}
			}
			if closed && !o.ended {
				o.fail("the engine stopped without an end")
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
	reason := o.finish
	switch {
	case o.failure != "":
		reason = "error"
	case reason == "" && !o.handedOff:
		reason = "abort"
	}
	o.watch.end(reason, len(o.engine.Prompt), o.completion)
}

// step renders one event.
func (o *response) step(ev *TokenEvent) {
	o.cached = max(o.cached, ev.CachedTokens)
	switch ev.Kind {
	case EventToken:
		o.token(ev)
	case EventFinish:
		o.conclude(ev.Finish)
	case EventPrior:
		o.prior(ev.Prior)
	case EventPhase:
		o.watch.phase(ev.Phase)
		o.comment("phase", ev.Phase)
	case EventHandoff:
		o.handedOff = true
		o.comment("handoff", "")
	case EventSettled:
		o.comment("settled", "")
		o.ended = true
	case EventFailed:
		o.fail(ev.Reason)
	}
}

// prior takes over the tokens that were sampled before, in place of those that came with the request.
func (o *response) prior(tokens []int32) {
	o.completion = len(tokens)
	o.detok = openai.NewDetok(o.s.cfg.Tokenizer, openai.DetokOptions{Stop: o.req.Stop, KeepSpecial: o.req.KeepSpecial})
	stopped := o.detok.PushAll(tokens)
	if o.native {
		o.out = openai.AppendTokenComment(o.out, "prior", tokens)
	}
	if stopped {
		o.conclude(openai.FinishStop)
	}
}

func (o *response) token(ev *TokenEvent) {
	o.watch.token()
	o.completion++
	o.role()
	if o.native {
		o.out = openai.AppendTokenComment(o.out, "t", []int32{ev.Token})
	}
	var text []byte
	stopped := false
	// The token that ends a completion is counted and named, and has no text.
	if ev.Finish != openai.FinishStop {
		text, stopped = o.detok.Push(ev.Token)
	}
	o.text(text, ev.Token)
	switch {
	case stopped:
		o.conclude(openai.FinishStop)
	case ev.Finish != "":
		o.conclude(ev.Finish)
	}
}

// role begins a chat's stream.
func (o *response) role() {
	if o.roleSent {
		return
	}
	o.roleSent = true
	if o.stream {
		var ids []int32
		if o.req.ReturnTokenIDs {
			ids = o.engine.Prompt
		}
		o.start()
		o.out = o.head.AppendRole(o.out, ids)
	}
}

// text adds a token's text to the answer, and its id when the client asked for ids.
func (o *response) text(text []byte, token int32) {
	var ids []int32
	if o.req.ReturnTokenIDs {
		ids = []int32{token}
	}
	switch {
	case len(text) == 0 && ids == nil:
	case o.stream:
		o.start()
		o.out = o.head.AppendText(o.out, text, ids)
	default:
		o.whole.Text = append(o.whole.Text, text...)
		o.whole.TokenIDs = append(o.whole.TokenIDs, ids...)
	}
}

func (o *response) comment(name, arg string) {
	if o.native {
		o.out = openai.AppendComment(o.out, name, arg)
	}
}

func (o *response) usage() openai.Usage {
	return openai.Usage{Prompt: len(o.engine.Prompt), Completion: o.completion, Cached: min(o.cached, len(o.engine.Prompt))}
}

// conclude ends the answer well. Text that was held back until now goes into the finish event itself: it is released by
// the end, not by a token, so whoever takes the stream over must not count it as given with the tokens before it.
func (o *response) conclude(finish string) {
	o.finish, o.ended = finish, true
	tail := o.detok.Flush()
	if !o.stream {
		o.whole.Text = append(o.whole.Text, tail...)
		o.whole.Finish, o.whole.Usage = finish, o.usage()
		if o.req.ReturnTokenIDs {
			o.whole.PromptIDs = o.engine.Prompt
		}
		o.out = o.head.AppendWhole(o.out, &o.whole)
		return
	}
	o.role()
	o.start()
	o.out = o.head.AppendFinish(o.out, tail, finish)
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
