package engine

import (
	"context"
	"time"

	"github.com/headrace/headrace/internal/openai"
	"github.com/headrace/headrace/worker/api"
	"github.com/headrace/headrace/worker/kv"
	"github.com/headrace/headrace/worker/sample"
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
	req    *api.Request
	ctx    context.Context // the client's
	out    chan api.TokenEvent
	behind []api.TokenEvent // events that out had no room for
	stop   func() bool      // ends the watch on the client's context
	timer  *time.Timer      // deadline of a wait that depends on a peer
	order  uint64           // of arrival

	state     state
	tokens    []int32 // prompt, resumed and sampled tokens
	context   int     // len(prompt)+len(resume): what prefill has to compute
	computed  int     // tokens whose KV is in the blocks
	blocks    []uint32
	committed int // leading blocks that the pool can find again
	content   kv.ContentID
	cached    int              // context tokens found in the prefix cache at first admission
	scores    []openai.Logprob // of the prompt's tokens so far, when they are asked for
	lease     *lease
	fences    int // of leases that it has no more, awaited
	outClosed bool
}

func (s *seq) prompt() int        { return len(s.req.Prompt) }
func (s *seq) remaining() int     { return len(s.tokens) - s.computed }
func (s *seq) decoding() bool     { return s.remaining() == 1 && s.computed >= s.context }
func (s *seq) generated() int     { return len(s.tokens) - s.prompt() }
func (s *seq) bound() bool        { return s.lease != nil && s.lease.state == leaseBound }
func (s *seq) isPrefillLeg() bool { return s.req.Role == api.RolePrefill }

// scoring tells whether the prompt's log probabilities are still to be found: all of it is computed then, a token a row,
// whatever the prefix cache knows.
func (s *seq) scoring() bool { return s.req.PromptLogprobs && s.generated() == 0 }

// place is where the next token is drawn.
func (s *seq) place() sample.Place {
	p := s.prompt()
	return sample.Place{Choice: s.req.Choice, Position: len(s.tokens), Prompt: s.tokens[:p], Generated: s.tokens[p:]}
}

// outBuffer is how many events a reader may be behind before they are queued. Readers drain at once, so the queue is
// there for the one that was not scheduled for a while.
const outBuffer = 64

// emit never blocks: what the channel does not take is queued, in order.
func (s *seq) emit(ev api.TokenEvent) {
	if s.outClosed {
		return
	}
	s.behind = append(s.behind, ev)
	for len(s.behind) > 0 {
		select {
		case s.out <- s.behind[0]:
			s.behind = s.behind[1:]
		default:
			return
		}
	}
	s.behind = nil
}

func (s *seq) phase(name string) { s.emit(api.TokenEvent{Kind: api.EventPhase, Phase: name}) }

// finishOut ends the client's view of the request: the channel is closed when the reader has all events, gave up,
// or the engine ends.
func (s *seq) finishOut(e *Engine) {
	if s.outClosed {
		return
	}
	s.outClosed = true
	s.stop()
	if s.timer != nil {
		s.timer.Stop()
	}
	if len(s.behind) == 0 {
		close(s.out)
		return
	}
	e.done.Go(func() {
		defer close(s.out)
		for _, ev := range s.behind {
			select {
			case s.out <- ev:
			case <-s.ctx.Done():
				return
			case <-e.ctx.Done():
				return
			}
		}
	})
}

func newSeq(ctx context.Context, r *api.Request) *seq {
	s := &seq{req: r, ctx: ctx, out: make(chan api.TokenEvent, outBuffer), content: kv.Root}
	s.tokens = make([]int32, 0, len(r.Prompt)+len(r.Resume)+64)
	s.tokens = append(append(s.tokens, r.Prompt...), r.Resume...)
	s.context = len(s.tokens)
	return s
}

// watch runs cancel once when the client's context ends.
func (s *seq) watch(cancel func()) { s.stop = context.AfterFunc(s.ctx, cancel) }
