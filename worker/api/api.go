// Package api is the worker's HTTP server: the OpenAI endpoints for anybody, the native dialect for a Headrace router,
// vLLM's metric names for whoever collects them.
//
// It declares what it needs of an engine, a tokenizer and a chat template, and turns token ids into text and chunks. It
// must not know how tokens come about, what a KV block is, or who the other workers are.
package api

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/headrace/headrace/internal/openai"
)

// Role says which part of a request this worker serves.
type Role uint8

// The roles. RoleWhole is the zero value: a request served alone.
const (
	RoleWhole Role = iota
	RolePrefill
	RoleDecode
)

func (r Role) String() string {
	switch r {
	case RolePrefill:
		return "prefill"
	case RoleDecode:
		return "decode"
	}
	return "whole"
}

// Sampling is sample.Params by another name: the two convert into each other.
type Sampling struct {
	Temperature, TopP, MinP         float32
	TopK                            int
	Seed                            uint64
	Repetition, Frequency, Presence float32
	Bias                            map[int32]float32
}

// Request is a request as an engine sees it: tokens in, tokens out.
type Request struct {
	ID       string
	Prompt   []int32
	Sampling Sampling
	Choice   int // number of the answer, of several for one prompt
	// MaxTokens bounds the completion, Resume included, and len(Prompt)+MaxTokens fits the model. At 0 the prompt is
	// computed and nothing sampled.
	MaxTokens int
	// Logprobs asks for the log probability of every sampled token, and of the TopLogprobs most likely ones beside it.
	// PromptLogprobs asks for those of the prompt.
	Logprobs, PromptLogprobs bool
	TopLogprobs              int
	// StopTokens end the completion as the model's own end tokens do.
	StopTokens []int32
	// IgnoreEOS goes on past the model's end tokens (not past StopTokens).
	IgnoreEOS bool

	Role     Role
	Ticket   []byte
	Peer     string    // prefill: host:port of the decode side's daemon
	Deadline time.Time // zero: none
	// Resume are tokens the client has been given already. They follow Prompt in the context, and sampling goes on at
	// the position behind them. They are never all there is to give: a complete Resume does not reach the engine.
	Resume []int32
	// Movable: whoever reads the answer understands EventHandoff behind any token.
	Movable bool
}

// EventKind says which fields of a TokenEvent mean something.
type EventKind uint8

// What an engine says of a request, in the order it happens. Exactly one of the ends comes last, then the channel is
// closed: EventToken with Finish, EventFinish, EventSettled (prefill, and who has moved), EventFailed, or none after ctx was cancelled.
const (
	// EventToken is a sampled token: Token, and Finish when it is the last one. An end token is announced too.
	EventToken EventKind = iota
	// EventFinish ends the completion without a token of its own: Finish.
	EventFinish
	// EventPrior is the decode role's first word on the tokens: Prior holds all sampled before, Resume included.
	EventPrior
	// EventPhase is for those who watch: Phase.
	EventPhase
	// EventHandoff (prefill): token one was sent, the decode side goes on. Of a request that moves: this one makes no more
	// tokens for now, another worker goes on.
	EventHandoff
	// EventSettled (prefill, and who moves): all KV has arrived at the decode side.
	EventSettled
	// EventFailed: this worker cannot go on, another may: Reason.
	EventFailed
	// EventPrompt comes before the first token when PromptLogprobs was asked for: Prompt has an entry a token.
	EventPrompt
	// EventStays: a request that was to move goes on here after all: Reason.
	EventStays
)

// Phases of a request.
const (
	PhaseQueued       = "queued"
	PhasePrefilling   = "prefilling"
	PhaseBound        = "bound"
	PhaseTransferring = "transferring"
	PhaseSettled      = "settled"
	PhaseDecoding     = "decoding"
)

// TokenEvent is one word of an engine on a request.
type TokenEvent struct {
	Kind   EventKind
	Token  int32
	Finish string // openai.FinishStop or openai.FinishLength
	Phase  string
	Reason string
	Prior  []int32
	// Logprob is that of Token, when it was asked for.
	Logprob *openai.Logprob
	Prompt  []openai.Logprob
	// CachedTokens is how much of the prompt was found in the prefix cache. Any event may carry it; the largest counts.
	CachedTokens int
}

// Engine serves requests. Its methods may be called by many goroutines.
type Engine interface {
	// Submit takes a request. It returns at once: ErrBusy, a TooLongError, or a channel that is closed at the end.
	// Cancelling ctx ends the request; the engine then closes the channel soon, once its blocks are safe. The reader
	// of the channel never waits for its client, so that an engine may use a small buffer and send with a select on
	// ctx.Done.
	Submit(ctx context.Context, r *Request) (<-chan TokenEvent, error)
	Model() ModelInfo
	// Stats is asked for at every scrape.
	Stats() Stats
	// Status is rendered as JSON for /status.
	Status() any
}

// ModelInfo is what the server must know of the model. It does not change.
type ModelInfo struct {
	ID          string   // as clients name it
	Aliases     []string // other names it answers to
	Created     time.Time
	Context     int     // tokens, prompt and completion together
	Vocab       int     // token ids are below it
	EndTokens   []int32 // the model's own end tokens
	BlockTokens int
	Blocks      int
}

// Stats are the engine's gauges and counters. Counters only grow.
type Stats struct {
	Running, Waiting int
	KVUsage          float64 // share of blocks in use, 0 to 1
	// Tokens looked up in the prefix cache and found there.
	PrefixQueries, PrefixHits uint64
	// Tokens whose KV came over a transfer, asked for and arrived.
	ExternalQueries, ExternalHits uint64
	PromptTokens                  uint64 // prefilled here
	GenerationTokens              uint64 // sampled here
	Preemptions                   uint64
}

// ErrBusy is an engine's answer when it has no room and its queue is full.
var ErrBusy = errors.New("engine is busy: its queue is full")

// TooLongError is an engine's answer to a request that can never fit.
type TooLongError struct{ Limit, Tokens int }

func (e *TooLongError) Error() string {
	return fmt.Sprintf("request of %d tokens does not fit the limit of %d", e.Tokens, e.Limit)
}
