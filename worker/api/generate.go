package api

import (
	"context"
	"errors"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"slices"
	"time"

	"github.com/headrace/headrace/internal/chat"
	"github.com/headrace/headrace/internal/openai"
	"github.com/headrace/headrace/worker/tokenizer"
)

// generate answers both generating endpoints.
func (s *Server) generate(w http.ResponseWriter, r *http.Request, ep openai.Endpoint) {
	began := time.Now()
	if e := s.enter(1); e != nil {
		writeError(w, e)
		return
	}
	entered := int64(1)
	defer func() { s.inFlight.Add(-entered) }()
	body, e := s.readBody(w, r)
	if e != nil {
		writeError(w, e)
		return
	}
	req, e := openai.ParseRequest(ep, body, openai.Options{AllowKV: true})
	if e != nil {
		writeError(w, e)
		return
	}
	out, e := s.prepare(req, began)
	if e == nil && len(out.choices) > 1 {
		more := int64(len(out.choices) - 1)
		if e = s.enter(more); e == nil {
			entered += more
		}
	}
	if e != nil {
		writeError(w, e)
		return
	}
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	out.ctx, out.cancel, out.w = ctx, cancel, w
	first := out.choices[0]
	if finish, done := first.complete(); done {
		first.conclude(finish)
		_ = out.flush() // a router that has left dispatches again
		return
	}
	if err := out.submit(first); err != nil {
		writeError(w, s.submitError(req, err))
		return
	}
	out.run()
}

// enter counts choices in; leaving is subtracting them.
func (s *Server) enter(n int64) *openai.Error {
	if s.inFlight.Add(n) > int64(s.cfg.InFlightMax) {
		s.inFlight.Add(-n)
		return openai.Unavailable("This worker has %d answers in flight and takes no more.", s.cfg.InFlightMax)
	}
	return nil
}

// readBody reads all of the body: the server notices a client that leaves only once it has.
func (s *Server) readBody(w http.ResponseWriter, r *http.Request) ([]byte, *openai.Error) {
	rc := http.NewResponseController(w)
	_ = rc.SetReadDeadline(time.Now().Add(s.cfg.ReadTimeout)) // not every ResponseWriter has one
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, s.cfg.BodyBytesMax))
	_ = rc.SetReadDeadline(time.Time{})
	if err == nil {
		return body, nil
	}
	var large *http.MaxBytesError
	if errors.As(err, &large) {
		return nil, openai.TooLarge(large.Limit)
	}
	return nil, openai.BadRequest("", openai.CodeInvalidJSON, "Could not read the request's body: %v.", err)
}

func (s *Server) submitError(req *openai.Request, err error) *openai.Error {
	var long *TooLongError
	switch {
	case errors.Is(err, ErrBusy):
		return openai.Unavailable("This worker is busy: its queue is full.")
	case errors.As(err, &long):
		return openai.ContextLength(req.Endpoint, long.Limit, long.Tokens, 0)
	}
	s.cfg.Logger.Error("submit request", "error", err)
	return openai.Unavailable("This worker cannot take the request: %v.", err)
}

// echoLogprobsMax keeps the event with a prompt's log probabilities within openai.EventBytesMax.
const echoLogprobsMax = 1 << 16

// prepare turns a client's request into an engine's, and makes the response that will carry the answer.
func (s *Server) prepare(req *openai.Request, began time.Time) (*response, *openai.Error) {
	model := s.model.ID
	if req.Model != "" {
		if req.Model != s.model.ID && !slices.Contains(s.model.Aliases, req.Model) {
			return nil, openai.ModelNotFound(req.Model)
		}
		model = req.Model
	}
	head := openai.Head{Endpoint: req.Endpoint, Created: began.Unix(), Model: model}
	if req.KV != nil {
		head.ID, head.Created = req.KV.ID, req.KV.Created
	} else {
		head.ID = openai.NewID(req.Endpoint)
	}
	prompt, e := s.promptTokens(req, time.Unix(head.Created, 0))
	if e != nil {
		return nil, e
	}
	room := s.model.Context - len(prompt)
	if room < 1 {
		return nil, openai.ContextLength(req.Endpoint, s.model.Context, len(prompt), 0)
	}
	maxTokens := req.MaxTokens
	switch {
	case maxTokens > room:
		return nil, openai.ContextLength(req.Endpoint, s.model.Context, len(prompt), maxTokens)
	case req.PromptOnly:
	case maxTokens == 0 && req.Endpoint == openai.Completions:
		maxTokens = min(room, openai.DefaultCompletionTokens)
	case maxTokens == 0:
		maxTokens = room
	}
	er := &Request{
		ID: head.ID, Prompt: prompt, MaxTokens: maxTokens, StopTokens: req.StopTokens, IgnoreEOS: req.IgnoreEOS,
		Sampling: Sampling{
			Temperature: req.Temperature, TopP: req.TopP, MinP: req.MinP, TopK: req.TopK, Seed: req.Seed,
			Repetition: req.Repetition, Frequency: req.Frequency, Presence: req.Presence, Bias: req.Bias,
		},
		Logprobs: req.Logprobs, TopLogprobs: req.TopLogprobs,
	}
	if e := s.checkIDs("stop_token_ids", req.StopTokens); e != nil {
		return nil, e
	}
	if e := s.checkIDs("logit_bias", slices.Sorted(maps.Keys(req.Bias))); e != nil {
		return nil, e
	}
	if rows := len(prompt) * (1 + req.TopLogprobs); req.Echo && req.Logprobs && rows > echoLogprobsMax {
		return nil, openai.BadRequest("echo", openai.CodeInvalidValue,
			"'echo' with 'logprobs' gives at most %d log probabilities, this prompt of %d tokens needs %d: ask for fewer 'logprobs'.", echoLogprobsMax, len(prompt), rows)
	}
	if kv := req.KV; kv != nil {
		if kv.Choice >= req.N {
			return nil, openai.BadRequest("kv_transfer_params", openai.CodeInvalidValue, "Invalid value for 'kv_transfer_params': choice %d of %d.", kv.Choice, req.N)
		}
		if e := s.addLeg(er, kv); e != nil {
			return nil, e
		}
	} else if !req.HasSeed && req.Temperature > 0 {
		er.Sampling.Seed = rand.Uint64()
	}
	return newResponse(s, req, er, head, began), nil
}

func (s *Server) addLeg(er *Request, kv *openai.KVParams) *openai.Error {
	switch kv.Role {
	case openai.RolePrefill:
		er.Role = RolePrefill
	case openai.RoleDecode:
		er.Role = RoleDecode
	}
	er.Movable = true
	er.Choice = kv.Choice
	er.Ticket, er.Peer, er.Resume = kv.Ticket, kv.Peer, kv.Resume
	er.Sampling.Seed = kv.Seed
	if kv.DeadlineMS != 0 {
		er.Deadline = time.UnixMilli(kv.DeadlineMS)
	}
	if len(kv.Resume) > er.MaxTokens {
		return openai.BadRequest("kv_transfer_params", openai.CodeInvalidValue,
			"Invalid value for 'kv_transfer_params': resume has %d tokens, the request is for %d.", len(kv.Resume), er.MaxTokens)
	}
	return s.checkIDs("kv_transfer_params", kv.Resume)
}

func (s *Server) checkIDs(param string, ids []int32) *openai.Error {
	for _, id := range ids {
		if int(id) >= s.model.Vocab {
			return openai.BadRequest(param, openai.CodeInvalidValue, "Invalid value for '%s': the vocabulary has no token %d.", param, id)
		}
	}
	return nil
}

// promptTokens is the prompt as tokens, rendered by the chat template for chats.
func (s *Server) promptTokens(req *openai.Request, now time.Time) ([]int32, *openai.Error) {
	if req.PromptTokens != nil {
		return req.PromptTokens, s.checkIDs("prompt", req.PromptTokens)
	}
	text, param := req.Prompt, "prompt"
	if req.Endpoint == openai.Chat {
		var e *openai.Error
		if text, e = s.render(req, now); e != nil {
			return nil, e
		}
		param = "messages"
	}
	// What cannot fit whatever its tokens are is not worth encoding.
	if least := len(text) / max(1, s.cfg.Tokenizer.TokenBytesMax()); least > s.model.Context {
		return nil, openai.ContextLength(req.Endpoint, s.model.Context, least, 0)
	}
	ids, err := s.cfg.Tokenizer.Encode(nil, text, tokenizer.EncodeOptions{AddMarks: req.AddSpecialTokens, ParseSpecial: true})
	if err != nil {
		return nil, openai.BadRequest(param, openai.CodeInvalidValue, "Invalid value for '%s': %v.", param, err)
	}
	if len(ids) == 0 {
		return nil, openai.BadRequest(param, openai.CodeInvalidValue, "Invalid value for '%s': it has no tokens.", param)
	}
	return ids, nil
}

func (s *Server) render(req *openai.Request, now time.Time) (string, *openai.Error) {
	if s.cfg.Chat == nil {
		return "", openai.BadRequest("messages", openai.CodeUnsupported, "The model has no chat template: use /v1/completions.")
	}
	text, err := s.cfg.Chat.Render(chat.Input{
		Messages: req.Messages, Tools: req.Tools, Args: req.TemplateArgs, Now: now,
		AddGenerationPrompt: req.AddGenerationPrompt, ContinueFinalMessage: req.ContinueFinalMessage,
	})
	var raised *chat.RaisedError
	switch {
	case err == nil:
		return text, nil
	case errors.Is(err, chat.ErrNoTools):
		return "", openai.Unsupported("tools", "The model's chat template knows no tools.")
	case errors.As(err, &raised):
		return "", openai.BadRequest("messages", openai.CodeInvalidValue, "The model's chat template refuses the conversation: %s", raised.Message)
	}
	return "", openai.BadRequest("messages", openai.CodeInvalidValue, "Could not render the conversation: %v.", err)
}
