package api

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/headrace/headrace/internal/openai"
)

// choice is one of a response's answers: its own request at the engine, its own text.
type choice struct {
	o      *response
	engine *Request
	head   openai.Head
	queue  *queue
	watch  watch
	cancel context.CancelFunc // nil until the engine has it

	detok      *openai.Detok
	style      openai.LogprobStyle
	offset     int // style's, behind the prompt's echo
	prompt     []openai.Logprob
	tokens     int // of this leg
	completion int // tokens, those before this leg included
	cached     int
	finish     string
	ended      bool
	begun      bool // the role, or the echo, has been sent
	handedOff  bool
}

func newChoice(o *response, er *Request, began time.Time) *choice {
	c := &choice{o: o, engine: er, head: o.head, queue: newQueue(o.ready)}
	c.head.Index = er.Choice
	c.watch = watch{m: o.s.metrics, began: began, decode: er.Role == RoleDecode}
	c.begun = o.req.Endpoint == openai.Completions && !o.req.Echo || er.Role == RoleDecode || er.Resume != nil
	c.style = openai.LogprobStyle{Endpoint: o.req.Endpoint, Vocab: o.s.cfg.Tokenizer, KeepSpecial: o.req.KeepSpecial}
	if o.req.Echo && er.Logprobs {
		er.PromptLogprobs = !c.begun
		if c.begun {
			c.skipEcho()
		}
	}
	c.restart(er.Resume)
	return c
}

// restart begins the text anew, behind tokens that the client has been given; it says whether a stop string is complete.
func (c *choice) restart(tokens []int32) (stopped bool) {
	c.completion = len(tokens)
	c.detok = openai.NewDetok(c.o.s.cfg.Tokenizer, openai.DetokOptions{Stop: c.o.req.Stop, KeepSpecial: c.o.req.KeepSpecial})
	c.style.Offset = c.offset
	c.style.Advance(tokens)
	return c.detok.PushAll(tokens)
}

// complete says whether the resumed tokens are all there is to give: the worker that gave the last one may have died
// before it could say that it was the last.
func (c *choice) complete() (finish string, done bool) {
	resume := c.engine.Resume
	if len(resume) == 0 {
		return "", false
	}
	last := resume[len(resume)-1]
	if c.isEnd(last) {
		c.restart(resume[:len(resume)-1])
		c.completion = len(resume)
		return openai.FinishStop, true
	}
	if c.restart(resume) {
		return openai.FinishStop, true
	}
	return openai.FinishLength, len(resume) >= c.engine.MaxTokens
}

// isEnd reports whether a token ends the completion.
func (c *choice) isEnd(id int32) bool {
	return (!c.engine.IgnoreEOS && c.o.s.ends[id]) || slices.Contains(c.engine.StopTokens, id)
}

// take handles what has come from the engine, and returns a buffer for the next call.
func (c *choice) take(spare []TokenEvent) []TokenEvent {
	if c.cancel == nil || c.ended || c.o.ended {
		return spare
	}
	events, closed := c.queue.take(spare)
	for i := range events {
		if c.step(&events[i]); c.ended || c.o.ended {
			return events
		}
	}
	if closed && c.o.ctx.Err() == nil { // else the engine has let go of it because the client has
		c.o.fail("the engine stopped without an end")
	}
	return events
}

// step renders one event.
func (c *choice) step(ev *TokenEvent) {
	c.cached = max(c.cached, ev.CachedTokens)
	switch ev.Kind {
	case EventToken:
		c.token(ev)
	case EventFinish:
		c.conclude(ev.Finish)
	case EventPrior:
		c.prior(ev.Prior)
	case EventPrompt:
		c.prompt = ev.Prompt
	case EventPhase:
		c.watch.phase(ev.Phase)
		c.o.comment("phase", ev.Phase)
	case EventHandoff:
		c.handedOff = true
		c.o.comment("handoff", "")
	case EventStays:
		c.handedOff = false
		c.o.comment("stays", ev.Reason)
	case EventSettled:
		c.o.comment("settled", "")
		c.o.ended = true
	case EventFailed:
		c.o.fail(ev.Reason)
	}
}

// prior takes over the tokens that were sampled before, in place of those that came with the request.
func (c *choice) prior(tokens []int32) {
	stopped := c.restart(tokens)
	if c.o.native {
		c.o.out = openai.AppendTokenComment(c.o.out, "prior", tokens)
	}
	if stopped {
		c.conclude(openai.FinishStop)
	}
}

func (c *choice) token(ev *TokenEvent) {
	c.watch.token()
	c.tokens++
	c.completion++
	c.begin()
	if c.o.native {
		c.o.out = openai.AppendTokenComment(c.o.out, "t", []int32{ev.Token})
	}
	var text []byte
	stopped := false
	// The token that ends a completion is counted and named, and has no text.
	if ev.Finish != openai.FinishStop {
		text, stopped = c.detok.Push(ev.Token)
	}
	c.text(text, ev)
	switch {
	case stopped:
		c.conclude(openai.FinishStop)
	case ev.Finish != "":
		c.conclude(ev.Finish)
	}
}

// begin sends what comes before all tokens: a chat's role, or the echo of the prompt.
func (c *choice) begin() {
	if c.begun {
		return
	}
	c.begun = true
	o := c.o
	if o.req.Echo {
		c.echo()
		return
	}
	if o.stream {
		var ids []int32
		if o.req.ReturnTokenIDs {
			ids = c.engine.Prompt
		}
		o.start()
		o.out = c.head.AppendRole(o.out, ids)
	}
}

// echoText is the prompt as text, and how many tokens it has that are not in the text: the marks that were added.
func (c *choice) echoText() (text string, marks int) {
	prompt, tok := c.engine.Prompt, c.o.s.cfg.Tokenizer
	all := string(tok.Decode(nil, prompt, true))
	if c.o.req.PromptTokens != nil || all == c.o.req.Prompt {
		return strings.ToValidUTF8(all, "\uFFFD"), 0
	}
	if strings.HasSuffix(all, c.o.req.Prompt) {
		marks = 1
	}
	return c.o.req.Prompt, marks
}

// promptStyle is how the prompt's tokens are rendered: special ones are part of the echo.
func (c *choice) promptStyle() openai.LogprobStyle {
	style := c.style
	style.KeepSpecial, style.Offset = true, 0
	return style
}

// skipEcho moves on behind an echo that somebody else has sent.
func (c *choice) skipEcho() {
	_, marks := c.echoText()
	style := c.promptStyle()
	style.Advance(c.engine.Prompt[marks:])
	c.offset = style.Offset
}

func (c *choice) echo() {
	o := c.o
	text, marks := c.echoText()
	var chunk openai.Logprobs
	lp := &chunk
	if !o.stream {
		lp = &o.whole.At(c.head.Index).Logprobs
	}
	if c.engine.Logprobs {
		style := c.promptStyle()
		for i := range c.prompt {
			lp.Add(&style, &c.prompt[i])
			if i+1 == marks {
				style.Offset = 0
			}
		}
		c.prompt, c.offset = nil, style.Offset
		c.style.Offset += c.offset
	}
	if !o.stream {
		whole := o.whole.At(c.head.Index)
		whole.Text = append(whole.Text, text...)
		return
	}
	o.start()
	o.comment("head", "")
	o.out = c.head.AppendText(o.out, []byte(text), nil, lp)
}

// text adds a token's text to the answer, and its id and log probability when the client asked for them. Then each
// token has an event of its own, though its text may be held back: whoever takes the stream over cannot know the log
// probabilities of tokens before its own.
func (c *choice) text(text []byte, ev *TokenEvent) {
	o := c.o
	var ids []int32
	if o.req.ReturnTokenIDs {
		ids = []int32{ev.Token}
	}
	if !o.stream {
		whole := o.whole.At(c.head.Index)
		whole.Text = append(whole.Text, text...)
		whole.TokenIDs = append(whole.TokenIDs, ids...)
		if ev.Logprob != nil {
			whole.Logprobs.Add(&c.style, ev.Logprob)
		}
		return
	}
	var lp *openai.Logprobs
	if ev.Logprob != nil {
		lp = &openai.Logprobs{}
		lp.Add(&c.style, ev.Logprob)
	}
	if len(text) > 0 || ids != nil || lp != nil {
		o.start()
		o.out = c.head.AppendText(o.out, text, ids, lp)
	}
}

// conclude ends the choice well. Text that was held back until now goes into the finish event itself: it is released by
// the end, not by a token, so whoever takes the stream over must not count it as given with the tokens before it.
func (c *choice) conclude(finish string) {
	o := c.o
	c.begin()
	c.finish, c.ended = finish, true
	if c.cancel != nil {
		c.cancel()
	}
	tail := c.detok.Flush()
	if o.stream {
		o.start()
		o.out = c.head.AppendFinish(o.out, tail, finish)
	} else {
		whole := o.whole.At(c.head.Index)
		whole.Text, whole.Finish = append(whole.Text, tail...), finish
	}
	if o.left--; o.left == 0 {
		o.conclude()
	}
}
