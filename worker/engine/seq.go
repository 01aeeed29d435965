package engine

import (
	"context"
	"time"

	"github.com/headrace/headrace/worker/api"
	"github.com/headrace/headrace/worker/kv"
)

type state uint8

const (
	stWaiting state = iota // holds no blocks; wants to be scheduled
	stRunning              // holds blocks; has tokens whose KV is to be computed
	stAwaitKV              // D: waits for P to present, for the blocks to land, for the record
	stHandoff              // P: all computed, first token out; waits for the lease to settle
	stFencing              // over for the client; its blocks are held until the fence stands
	stDone
)

// seq is one request on its way through the engine. The loop owns it.
type seq struct {
	req   *api.Request
	out   chan api.TokenEvent
	stop  func() bool // ends the watch on the client's context
	timer *time.Timer // deadline of a wait that depends on a peer
	order uint64      // of arrival

	state     state
	tokens    []int32 // prompt, resumed and sampled tokens
	context   int     // len(prompt)+len(resume): what prefill has to compute
	computed  int     // tokens whose KV is in the blocks
	blocks    []uint32
	committed int // leading blocks that the pool can find again
	content   kv.ContentID
	cached    int // context tokens found in the prefix cache at first admission
	lease     *lease
	outClosed bool
}

func (s *seq) prompt() int        { return len(s.req.Prompt) }
func (s *seq) remaining() int     { return len(s.tokens) - s.computed }
func (s *seq) decoding() bool     { return s.remaining() == 1 && s.computed >= s.context }
func (s *seq) generated() int     { return len(s.tokens) - s.prompt() }
func (s *seq) bound() bool        { return s.lease != nil && s.lease.state == leaseBound }
func (s *seq) isPrefillLeg() bool { return s.req.Role == api.RolePrefill }

// emit never blocks: the channel holds every event that a request can produce.
func (s *seq) emit(ev api.TokenEvent) {
	if s.outClosed {
		return
	}
	select {
	case s.out <- ev:
	default:
		panic("engine: event channel of a request is full")
	}
}

func (s *seq) phase(name string) { s.emit(api.TokenEvent{Kind: api.EventPhase, Phase: name}) }

// finishOut ends the client's view of the request.
func (s *seq) finishOut() {
	if s.outClosed {
		return
	}
	s.outClosed = true
	s.stop()
	if s.timer != nil {
		s.timer.Stop()
	}
	close(s.out)
}

// eventsMax bounds the events of a request: one a token and the few phases beside them.
func eventsMax(maxTokens int) int { return maxTokens + 32 }

func newSeq(r *api.Request) *seq {
	s := &seq{req: r, out: make(chan api.TokenEvent, eventsMax(r.MaxTokens)), content: kv.Root}
	s.tokens = make([]int32, 0, len(r.Prompt)+r.MaxTokens+1)
	s.tokens = append(append(s.tokens, r.Prompt...), r.Resume...)
	s.context = len(s.tokens)
	return s
}

// watch runs cancel once when the client's context ends.
func (s *seq) watch(ctx context.Context, cancel func()) { s.stop = context.AfterFunc(ctx, cancel) }
