// Package dialects runs one dispatch attempt of a request in the protocol that its workers speak, one file a dialect.
//
// A dialect owns the attempt's legs: it opens them, splices what they send into one stream for the client and closes
// them, on every way out, before it returns. It knows neither the client's socket nor whether there will be another
// attempt: the router owns both, and the deadline.
package dialects

import (
	"context"
	"net/http"
	"time"

	"github.com/headrace/headrace/internal/openai"
	"github.com/headrace/headrace/router/body"
	"github.com/headrace/headrace/router/pairing"
	"github.com/headrace/headrace/router/upstream"
)

// Dialect runs attempts. Implementations hold no state of a request.
type Dialect interface {
	// Name is what workers of this dialect register with.
	Name() string
	// Run serves the request or says why it did not. The cancellation of ctx ends it at once; all legs are closed
	// when it returns.
	Run(ctx context.Context, a *Attempt, s Sink) Outcome
}

// Attempt is one dispatch of a request.
type Attempt struct {
	Request  *Request
	Number   int // 1 for the first
	Decision pairing.Decision
	// Ticket is the nonce of the ticket that Run minted, by which node daemons know the attempt; zero where there is none.
	Ticket [16]byte
	// Progress is what earlier attempts gave the client. The dialect carries it on.
	Progress *Progress
	// Trail, of engines that are not ours: what the client has been given; nil where it is not remembered.
	Trail *Trail
	// Mover, of our own workers: where the stream goes on when its worker drains; nil: it ends where it is.
	Mover Mover
	// EstablishBy, when set, is when all legs must have been answered: after a fault the client is not kept waiting
	// for one dead worker after the other.
	EstablishBy time.Time
	// Began is when the attempt was made; zero: now.
	Began time.Time
	// At is the time of what the sink is told, where Run has read the clock for it; zero where it has not.
	At time.Time
	// Room is where Run may keep what it needs, nil for anywhere.
	Room *Room
}

// Room is what one attempt that one worker serves takes of memory, for one after the other. The zero value is ready to use.
type Room struct {
	relay  relay
	answer legRoom
}

type legRoom struct {
	leg leg
	up  upstream.Room
}

// Free tells whether nothing of the attempt that had the room goes on. Who ran it alone may ask, when it has returned.
func (r *Room) Free() bool { return r.answer.up.Free() }

// Aborter can be made to end at once, from any goroutine. Abort must not wait.
type Aborter interface{ Abort() }

// Ending is a context that aborts what must end with it, for somebody who looks at Ended from time to time: so it needs no timer, and
// that takes no memory.
type Ending interface {
	context.Context
	// AbortAtEnd has a aborted when the context ends; Spare undoes it.
	AbortAtEnd(a Aborter)
	Spare(a Aborter)
	// Ended is Err for who knows the time.
	Ended(now time.Time) error
}

// Request is what stays the same over all attempts.
type Request struct {
	Path      string
	ID        string // of the response, such as chatcmpl-...
	RequestID string
	Created   int64
	Body      *body.Body
	Seed      uint64 // used when the client gave none
	Deadline  time.Time
	Choice    int // which of the request's answers
	Stream    bool
	// Trace are the headers of the trace that engines are to take part in; nil for none.
	Trace [][2]string
}

// Progress is what the client has been given. Its invariant: the text of all data events handed to the sink is exactly
// the text that the tokens in Given yield. Tokens that a leg announced count from the moment their data event is
// handed on, not before: a leg that dies in between leaves them out, and they are sampled again.
type Progress struct {
	Given []int32
	// RoleSent tells that what comes before all tokens was handed on, a chat's first chunk or the echo of a prompt, which
	// no client wants twice.
	RoleSent bool
}

// Phase is where an attempt is.
type Phase uint8

// Phases of an attempt.
const (
	// Reserving: what the engines must be told of each other is being found out.
	Reserving Phase = iota
	Prefilling
	Transferring
	Decoding
)

// Kind is what a data event is.
type Kind uint8

// Kinds of data events.
const (
	KindRole Kind = iota
	KindText
	KindFinish
	KindUsage
	// KindRaw is an engine's event that is not looked into, KindComment one without data.
	KindRaw
	KindComment
)

// Sink takes the client's stream.
type Sink interface {
	// Event takes one whole data event, its empty line included. raw and data, its JSON, are valid during the call.
	// n is how many tokens the event is for.
	Event(kind Kind, raw, data []byte, n int) error
	// Flush is called when nothing more is to be had without waiting, and when the attempt failed; behind a finished
	// one the caller flushes.
	Flush() error
	// Whole takes an answer that is not streamed, as the worker gave it. It is valid during the call.
	Whole(contentType string, body []byte) error
	// Phase tells where the attempt is. It may be called with the same phase again.
	Phase(Phase)
}

// Result is how an attempt ended.
type Result uint8

// Results.
const (
	// Finished: the client has the whole answer.
	Finished Result = iota
	// Refused: a worker answered with an error that is the client's. Status and Body are for the client.
	Refused
	// Failed: another attempt may do better.
	Failed
	// Cancelled: ctx ended.
	Cancelled
	// SinkFailed: the client cannot be written to.
	SinkFailed
)

// Outcome is how an attempt ended, and whose fault it was.
type Outcome struct {
	Result Result
	// Refused. Body may also be there when an attempt failed: what the worker said of it.
	Status int
	Body   []byte
	// Failed. Reason is one of few words, for metrics; Err has the particulars.
	Reason     string
	Err        error
	Blame      []Blame
	FaultAt    time.Time     // when the failing worker was last well
	RetryAfter time.Duration // what a busy worker asked for
	// Undialled tells that a worker could not be dialled: the attempt cost nothing.
	Undialled bool
	// GotOn tells that the failing worker had taken the request and the fault is a new one.
	GotOn bool
	// Whole asks for one worker to do everything in the attempt that follows.
	Whole bool
}

// Blame names a worker that failed.
type Blame struct {
	Worker string
	Reason string
	// Hard: the worker did not answer at all, other requests had better avoid it too.
	Hard bool
	// Pair: not one of the two but both together could not.
	Pair bool
}

// clientFault tells whether a worker's status means that the request itself is at fault, so that no other worker
// would do better.
func clientFault(status int) bool {
	switch status {
	case http.StatusUnauthorized, http.StatusForbidden, http.StatusRequestTimeout, http.StatusTooManyRequests:
		return false // about the router's standing with the worker, or the worker's load
	}
	return status >= 400 && status < 500
}

// Roles of legs, as errors and metrics name them.
const (
	rolePrefill = openai.RolePrefill
	roleDecode  = openai.RoleDecode
	roleWhole   = openai.RoleWhole
)

// target is where to dial a worker.
func target(w *pairing.Worker) upstream.Target { return upstream.Target{ID: w.ID, Addr: w.Addr} }
