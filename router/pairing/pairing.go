// Package pairing chooses the prefill and the decode worker of a request together: filter, score, pick.
//
// A policy is pure: it sees a request and a snapshot of the fleet and answers with a decision that explains itself.
// It opens nothing, has no clock of its own and keeps nothing but a tie-breaker. What is learned of workers is part of the
// snapshot.
package pairing

import (
	"context"
	"fmt"
	"math"
	"slices"
	"time"
)

// Role is what a worker offers.
type Role string

// Roles.
const (
	RolePrefill Role = "prefill"
	RoleDecode  Role = "decode"
	RoleBoth    Role = "both"
)

// Prefills tells whether the role takes prefill legs.
func (r Role) Prefills() bool { return r == RolePrefill || r == RoleBoth }

// Decodes tells whether the role takes decode legs.
func (r Role) Decodes() bool { return r == RoleDecode || r == RoleBoth }

// Worker is an engine as the registry knows it.
type Worker struct {
	ID       string
	Role     Role
	Model    string
	Addr     string // host:port of its HTTP server
	NodeID   string // of its node daemon, "" for none
	NodeData string // host:port of that daemon's data plane, "" while it has none
	Dialect  string
	// Incarnation changes when the worker was restarted.
	Incarnation string

	Fingerprint string // hex, of the model; only equals exchange KV

	BlockTokens   uint32
	Blocks        uint32
	ContextTokens uint32

	TensorParallel uint32 // ranks that share the KV heads
	// Opaque: the inside of a block means something to its own engine alone, so that only blocks of one size, divided
	// over equally many ranks, can be moved.
	Opaque bool

	// KVAddr is the host:port at which its own KV connector is found by its peers: the bootstrap server of SGLang or Mooncake,
	// NIXL's side channel, P2P-NCCL's socket; "" for a connector that needs none. KVEngine is what its peers call it, where
	// they must know beforehand.
	KVAddr, KVEngine string
	PipelineParallel uint32 // 0 is 1

	// Events and EventsReplay are host:port of its KV events' publisher and of their replay, "" for none.
	Events, EventsReplay string

	// LoRAs are the adapters it serves beside its model, under the names that clients ask for.
	LoRAs []string
	// Weight is the part of the traffic that it is to get of what another worker in its place would, 0 to 1. 0: it drains,
	// and gets nothing. nil is 1.
	Weight *float64
}

// Serves tells whether clients that ask for a model of this name can be answered by the worker.
func (w *Worker) Serves(model string) bool {
	return w.Model == model || slices.Contains(w.LoRAs, model)
}

// weight is Weight within its bounds. What is no number counts as not said.
func (w *Worker) weight() float64 {
	if w.Weight == nil || math.IsNaN(*w.Weight) {
		return 1
	}
	return min(max(*w.Weight, 0), 1)
}

// misfit says why KV cache cannot go from p to d, "" if it can.
func misfit(p, d *Worker) string {
	switch {
	case p.Dialect != d.Dialect:
		return fmt.Sprintf("dialects %s and %s", p.Dialect, d.Dialect)
	case p.Fingerprint != d.Fingerprint:
		return fmt.Sprintf("fingerprints %.8s and %.8s", p.Fingerprint, d.Fingerprint)
	case !p.Opaque && !d.Opaque:
		return ""
	case p.Opaque != d.Opaque:
		return "opaque blocks and others"
	case p.BlockTokens != d.BlockTokens:
		return fmt.Sprintf("opaque blocks of %d and %d tokens", p.BlockTokens, d.BlockTokens)
	case p.TensorParallel != d.TensorParallel:
		return fmt.Sprintf("opaque blocks over %d and %d ranks", p.TensorParallel, d.TensorParallel)
	}
	return ""
}

// Load is what a worker has to do, as far as this router gave it.
type Load struct {
	PrefillTokens int64 // of prompts whose prefill has not ended yet, estimated
	Prefills      int64
	Decodes       int64 // streams, those still waiting for their KV included
	HeldTokens    int64 // of KV cache that those streams need, estimated from their prompts
	// HeadFor is for how long the prompt that is served now has been at work: since the one before it was done, or since
	// there was one to serve.
	HeadFor time.Duration
}

// Engine is what a worker said of itself a moment ago.
type Engine struct {
	Known            bool // else nothing was heard lately, and the rest means nothing
	Running, Waiting int64
	// Foreign is how many of these this router did not give it.
	Foreign int64
	// KVUsage is the part of its KV cache that requests hold, 0 to 1; what is only cached does not count. -1: not said.
	KVUsage float64
}

// Candidate is a worker with its load and health, and with what it means for one request.
type Candidate struct {
	*Worker
	Load Load
	// Given counts how often it was given work. While that stays, nothing was added to Load.
	Given  uint64
	Engine Engine
	// Speeds are what this router has learned of the worker.
	Speeds Speeds
	// CachedTokens is how much of the request's prompt the worker has in its KV cache, from the first token on.
	CachedTokens int64
	// CoolUntil, when after the view's Now, is the time up to which the worker is left alone because it just failed.
	CoolUntil time.Time
	// Why it is left alone.
	CoolReason string
}

// View is a snapshot of the fleet, for one Pick at a time. Policies must not change it.
type View struct {
	Now     time.Time
	Workers []Candidate
	// PairBarred tells whether the two were found unable to work together lately; nil for none.
	PairBarred func(prefill, decode string) bool
	// Channel gives what is known of the way of KV cache between two workers; nil: nothing is known.
	Channel func(prefill, decode *Worker) (Channel, bool)

	filtered filtered // room
}

// Request is what a policy may know of a request.
type Request struct {
	ID           string
	Model        string
	PromptTokens int64 // estimated
	Attempt      int   // 1 for the first
	// Exclude has the workers that failed this request already.
	Exclude []string
	// Whole asks for one worker to do everything.
	Whole bool
	// Warm has workers that computed or took the same prompt a moment ago.
	Warm []string
	// Session has the workers that served the request's session last. It stays with them, unless one of them is gone or overloaded.
	Session []string
	// Refuse, when set, says why the request cannot go to a worker; "" if it can.
	Refuse func(w *Worker) string
	// Unpaired, when set, says why workers of a dialect cannot share the request; "" if they can.
	Unpaired func(dialect string) string
}

// Decision is either Whole alone, or Prefill and Decode.
type Decision struct {
	Prefill, Decode, Whole *Worker
	// Reason says in words why these, and why not a pair when Whole is set.
	Reason string
	// Rejected has what the filters took out, for people to read.
	Rejected []Rejection
	// Options are the choices that were weighed, the cheapest first, at most optionsKept of them, where the policy weighs any.
	Options []Option
	// Weighed is how many there were.
	Weighed int
	// CachedTokens is how much of the prompt the worker that prefills has already.
	CachedTokens int64
}

// Estimate is for how long, in seconds, the policy took the request to wait for its first token; false of a policy that does not
// weigh. Of a pair it is until its KV cache is where it is decoded.
func (d *Decision) Estimate() (seconds float64, ok bool) {
	if len(d.Options) == 0 || !d.Options[0].Chosen {
		return 0, false
	}
	c := &d.Options[0].Cost
	return c.Queue + c.Prefill + c.Transfer, true
}

// Rejection is a worker that was not considered.
type Rejection struct {
	Worker string `json:"worker"`
	Reason string `json:"reason"`
}

// Policy decides.
type Policy interface {
	Name() string
	Pick(ctx context.Context, r Request, v *View) (Decision, error)
}

// ErrNone is what Pick answers when nobody can serve the request now.
type ErrNone struct {
	// ModelKnown tells that somebody has the model, though not now.
	ModelKnown bool
	Reason     string
}

func (e *ErrNone) Error() string { return fmt.Sprintf("pick workers: %s", e.Reason) }
