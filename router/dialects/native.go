package dialects

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"time"

	"github.com/headrace/headrace/internal/openai"
	"github.com/headrace/headrace/router/pairing"
	"github.com/headrace/headrace/router/upstream"
)

// NativeName is the dialect of the project's own workers.
const NativeName = "native"

const (
	// settleGrace is how long decode may take to say that it has everything, when prefill died behind its hand-off.
	settleGrace = 300 * time.Millisecond
	// blameGrace is how long the other leg may take to explain a leg's failure.
	blameGrace = 200 * time.Millisecond
	// batchesQueuedMax bounds what decode may be ahead of prefill.
	batchesQueuedMax = 64
)

// Native pushes KV from prefill to decode while it is computed: both legs are sent at once with one ticket, the client
// gets prefill's events up to its hand-off, then decode's.
type Native struct {
	Client *upstream.Client
	Key    []byte // the cluster's
}

var _ Dialect = (*Native)(nil)

// Name is "native".
func (*Native) Name() string { return NativeName }

// leg is a request to one worker in one role.
type leg struct {
	*upstream.Leg
	role     string
	worker   *pairing.Worker
	answered bool
	ended    bool // its last batch was taken
	// Of workers that do not speak our own dialect.
	whole     bool // its response is complete
	undialled bool
	dropped   bool // nothing that it says counts any more

	// Of workers that may be silent: when it was last known to live, and the question that is under way.
	alive time.Time
	probe *probe
}

// attempt is the state of one Run.
type attempt struct {
	*Attempt
	native *Native
	sink   Sink
	splice splice

	first  *leg // prefill or whole: its events come first
	decode *leg // nil for whole

	queue     []upstream.Batch // of decode, before the hand-off
	final     bool             // it ends with decode's final
	handedOff bool
	settled   bool // decode has all KV
	decoding  bool
	grace     <-chan time.Time
	// The outcome at the end of grace: prefill was lost behind its hand-off, or a worker said that it cannot go on.
	lost, doomed *Outcome

	// Of streams that move to another worker.
	move       *move
	again      <-chan struct{} // closed when it may be time to move
	considered bool            // nothing has changed since that was asked
	movedOn    bool            // the legs are not those that the attempt began with
	// The outcome if the source of a move that was given up turns out to have let go of the stream: who should have gone on did not.
	orphan *Outcome
}

// Run serves the request by a pair or by one worker.
func (n *Native) Run(ctx context.Context, a *Attempt, s Sink) Outcome {
	t := &attempt{Attempt: a, native: n, sink: s, splice: splice{sink: s, progress: a.Progress}}
	if err := n.dispatch(t); err != nil {
		return *unminted(a.Decision, err)
	}
	var out Outcome
	defer func() { t.close(out.Result == Finished) }()
	out = t.loop(ctx)
	if out.Result == Failed { // what was handed to the sink counts as given
		if err := s.Flush(); err != nil {
			out = Outcome{Result: SinkFailed, Err: err}
		}
	}
	return out
}

// close ends the legs: those that have done their part end by themselves, the others are cancelled.
func (t *attempt) close(finished bool) {
	t.endMove()
	for _, b := range t.queue {
		b.Release()
	}
	if l := t.first; finished && (!t.handedOff || t.settled) {
		l.Finish()
	} else {
		l.Close()
	}
	if l := t.decode; l == nil {
		return
	} else if finished && t.handedOff {
		l.Finish()
	} else {
		l.Close()
	}
}

// dispatch opens the legs.
func (n *Native) dispatch(t *attempt) error {
	d, kv := t.Decision, t.params()
	if t.Progress.RoleSent || len(t.Progress.Given) > 0 {
		kv.Resume = append([]int32{}, t.Progress.Given...)
	}
	if d.Whole != nil {
		t.first = n.open(t, d.Whole, openai.RoleWhole, kv)
		return nil
	}
	var err error
	if kv.Ticket, err = t.mint(n.Key); err != nil {
		return err
	}
	t.decode = n.open(t, d.Decode, openai.RoleDecode, kv)
	kv.Peer = d.Decode.NodeData
	t.first = n.open(t, d.Prefill, openai.RolePrefill, kv)
	return nil
}

// params is what all legs are told.
func (t *attempt) params() openai.KVParams {
	q := t.Request
	return openai.KVParams{ID: q.ID, Created: q.Created, Seed: seedOf(q), DeadlineMS: q.Deadline.UnixMilli(), Choice: q.Choice}
}

// open sends a leg.
func (n *Native) open(t *attempt, w *pairing.Worker, role string, kv openai.KVParams) *leg {
	q := t.Request
	kv.Role = role
	base := q.Body.Streaming(kv.Seed)
	tail := append(kv.AppendJSON([]byte(`"kv_transfer_params":`)), '}')
	pieces := append(base[:len(base):len(base)], tail)
	return &leg{Leg: n.Client.Open(target(w), upstream.Request{Path: q.Path, RequestID: q.RequestID, Headers: q.Trace, Body: pieces}), role: role, worker: w}
}

// seedOf is the client's seed as workers read it, else the router's.
func seedOf(q *Request) uint64 {
	if q.Body.Seed == "" {
		return q.Seed
	}
	if u, err := strconv.ParseUint(q.Body.Seed, 10, 64); err == nil {
		return u
	}
	if i, err := strconv.ParseInt(q.Body.Seed, 10, 64); err == nil {
		return uint64(i)
	}
	f, _ := strconv.ParseFloat(q.Body.Seed, 64) // 16.0 is taken for 16; what is no number is refused by the worker
	return uint64(int64(f))
}

func (t *attempt) loop(ctx context.Context) Outcome {
	var establish <-chan time.Time
	if !t.EstablishBy.IsZero() {
		timer := time.NewTimer(time.Until(t.EstablishBy))
		defer timer.Stop()
		establish = timer.C
	}
	t.sink.Phase(Prefilling)
	for {
		t.consider()
		var first, decode <-chan upstream.Batch
		if !t.first.ended {
			first = t.first.C
		}
		if t.decode != nil && !t.decode.ended && (t.handedOff || len(t.queue) < batchesQueuedMax) {
			decode = t.decode.C
		}
		var out *Outcome
		select {
		case <-ctx.Done():
			return Outcome{Result: Cancelled, Err: context.Cause(ctx)}
		case b := <-first:
			out = t.batch(t.first, b)
		case b := <-decode:
			out = t.batch(t.decode, b)
		case b := <-t.move.heard():
			t.fromHeir(b)
		case err := <-t.move.answer():
			t.answered(err)
		case <-t.move.tooLate():
			t.stay(MoveFailed, errors.New("the time for it has passed"))
		case <-t.again:
			t.again, t.considered = nil, false
		case <-t.grace:
			if out = t.doomed; out == nil {
				out = t.lost
			}
		case <-establish:
			if l := t.unanswered(); l != nil {
				out = t.fail(l, "slow", errors.New("no answer in the time left for recovery"))
			}
		}
		if out != nil {
			return *out
		}
	}
}

func (t *attempt) unanswered() *leg {
	for _, l := range []*leg{t.first, t.decode} {
		if l != nil && !l.answered {
			return l
		}
	}
	return nil
}

// batch takes what a leg brought; nil means to go on.
func (t *attempt) batch(l *leg, b upstream.Batch) *Outcome {
	l.answered = l.answered || b.Status != 0
	l.ended = b.Err != nil
	if l.dropped {
		b.Release()
		return nil
	}
	if t.doomed != nil {
		return t.lastWords(l, b)
	}
	if b.Status != 0 && !b.SSE {
		defer b.Release()
		return t.httpError(l, b)
	}
	if l == t.decode && !t.handedOff {
		t.queue = append(t.queue, b)
		return t.early(b)
	}
	out := t.events(l, b.Data)
	b.Release()
	if out == nil && t.handedOff && len(t.queue) > 0 {
		out = t.replay()
	}
	if out == nil && b.Err != nil && t.doomed == nil && !l.dropped {
		out = t.ended(l, b.Err)
	}
	if out != nil {
		return out
	}
	if err := t.sink.Flush(); err != nil {
		return &Outcome{Result: SinkFailed, Err: err}
	}
	return nil
}

// events takes whole events of a leg whose turn it is.
func (t *attempt) events(l *leg, data []byte) *Outcome {
	for len(data) > 0 {
		ev, n, err := openai.NextEvent(data)
		if err != nil {
			return t.fail(l, "protocol", err)
		}
		if n == 0 {
			break
		}
		data = data[n:]
		if l.dropped {
			break
		}
		if t.handedOff && l == t.first && (ev.Kind == openai.EventData || ev.Kind == openai.EventTokens || ev.Kind == openai.EventHandoff || ev.Kind == openai.EventFinal) {
			return t.fail(l, "protocol", errors.New("prefill goes on behind its hand-off"))
		}
		what, err := t.splice.take(ev)
		var sinkErr sinkError
		if errors.As(err, &sinkErr) {
			return &Outcome{Result: SinkFailed, Err: sinkErr.error}
		} else if err != nil {
			return t.fail(l, "protocol", err)
		}
		if ev.Kind == openai.EventData && l.role != openai.RolePrefill && len(t.Progress.Given) > 0 {
			what = newsDecoding
		}
		if out := t.heard(l, what); out != nil {
			return out
		}
	}
	return nil
}

func (t *attempt) heard(l *leg, what news) *Outcome {
	if out, ours := t.heardMove(l, what); ours {
		return out
	}
	switch what {
	case newsHandoff:
		if l.role != openai.RolePrefill {
			return t.fail(l, "protocol", fmt.Errorf("hand-off from a worker in role %s", l.role))
		}
		t.handedOff = true
		t.sink.Phase(Transferring)
	case newsSettled, newsLoaded:
		t.settled, t.grace = true, nil
	case newsDecoding:
		if l.role == openai.RolePrefill {
			break
		}
		t.settled, t.grace = true, nil
		if !t.decoding {
			t.decoding = true
			t.sink.Phase(Decoding)
		}
	case newsFinal:
		return &Outcome{Result: Finished}
	case newsFailed:
		if l == t.first && t.handedOff && t.settled {
			break // decode has everything
		}
		return t.doom(l, t.splice.reason)
	}
	return nil
}

// doom takes a worker's word that it cannot go on. What one says about a lease may be the other's doing: prefill may
// have ended the answer with its first token, or be dead. So the other gets a moment to speak.
func (t *attempt) doom(l *leg, why []byte) *Outcome {
	out := t.fail(l, "failed", fmt.Errorf("worker says %q", why))
	switch {
	case t.lost != nil:
		return t.lost
	case t.decode == nil || t.doomed != nil:
		return out
	}
	t.doomed = out
	l.ended = true
	t.grace = time.After(blameGrace)
	return nil
}

// lastWords takes what comes from the other leg of a doomed attempt.
func (t *attempt) lastWords(l *leg, b upstream.Batch) *Outcome {
	defer b.Release()
	if l == t.first && !t.handedOff && b.SSE {
		if out := t.events(l, b.Data); out != nil {
			return out
		}
	}
	var e *upstream.Error
	switch {
	case errors.As(b.Err, &e) && e.Kind != upstream.KindProtocol:
		return t.ended(l, b.Err)
	case b.Err != nil, t.handedOff && l == t.first:
		return t.doomed
	}
	return nil
}

// early looks at what decode sends before it is its turn: whether it can go on at all.
func (t *attempt) early(b upstream.Batch) *Outcome {
	for data := b.Data; len(data) > 0; {
		ev, n, err := openai.NextEvent(data)
		if err != nil {
			return t.fail(t.decode, "protocol", err)
		}
		if n == 0 {
			break
		}
		data = data[n:]
		switch {
		case ev.Kind == openai.EventFailed:
			return t.doom(t.decode, ev.Arg)
		case ev.Kind == openai.EventSettled, ev.Kind == openai.EventPhase && (string(ev.Arg) == "settled" || string(ev.Arg) == "decoding"):
			t.settled = true
		case ev.Kind == openai.EventFinal:
			t.final = true
		}
	}
	if b.Err != nil && !t.final {
		return t.ended(t.decode, b.Err)
	}
	return nil
}

// replay takes what decode sent before the hand-off.
func (t *attempt) replay() *Outcome {
	queue, l := t.queue, t.decode
	t.queue = nil
	for i, b := range queue {
		out := t.events(l, b.Data)
		if b.Release(); out == nil && b.Err != nil && t.doomed == nil && !l.dropped {
			out = t.ended(l, b.Err)
		}
		if out != nil {
			t.queue = queue[i+1:]
			return out
		}
	}
	return nil
}

// ended judges a response that is over without having said final.
func (t *attempt) ended(l *leg, err error) *Outcome {
	how := "lost"
	var e *upstream.Error
	if errors.As(err, &e) {
		how = string(e.Kind)
	} else if err == io.EOF {
		err = errors.New("the response ended too early")
	}
	if m := t.move; m != nil && l == m.to && !m.from.ended {
		t.stay(MoveFailed, err)
		return nil
	}
	if l != t.first || !t.handedOff {
		return t.fail(l, how, err)
	}
	if !t.settled { // decode may have all it needs, and say so in a moment
		t.lost = t.fail(l, how, err)
		t.grace = time.After(settleGrace)
	}
	return nil
}

// httpError judges an answer that is no event stream.
func (t *attempt) httpError(l *leg, b upstream.Batch) *Outcome {
	if b.Err == nil || b.Err == io.EOF {
		switch {
		case clientFault(b.Status):
			return &Outcome{Result: Refused, Status: b.Status, Body: append([]byte(nil), b.Data...)}
		case b.Status == 429 || b.Status == 503:
			out := t.fail(l, "busy", fmt.Errorf("status %d: %.200s", b.Status, b.Data))
			out.RetryAfter = b.RetryAfter
			return out
		case b.Status == 200:
			return t.fail(l, "protocol", errors.New("the answer is no event stream"))
		}
		return t.fail(l, "error", fmt.Errorf("status %d: %.200s", b.Status, b.Data))
	}
	return t.ended(l, b.Err)
}

// fail makes the outcome of an attempt that l could not go on with.
func (t *attempt) fail(l *leg, how string, err error) *Outcome {
	out := &Outcome{Result: Failed, Reason: l.role + "_" + how, FaultAt: time.Now(),
		Err: fmt.Errorf("%s by worker %s: %w", l.role, l.worker.ID, err)}
	switch how {
	case "failed":
		if t.decode != nil && !t.movedOn {
			out.Blame = []Blame{{Worker: t.first.worker.ID, Reason: err.Error(), Pair: true}, {Worker: t.decode.worker.ID, Reason: err.Error(), Pair: true}}
			break
		}
		out.Blame = []Blame{{Worker: l.worker.ID, Reason: err.Error()}}
	case "busy", "error", "slow":
		out.Blame = []Blame{{Worker: l.worker.ID, Reason: how}}
	default:
		out.Blame = []Blame{{Worker: l.worker.ID, Reason: how, Hard: true}}
	}
	if how == string(upstream.KindSilent) {
		out.FaultAt = l.LastHeard()
	}
	out.Undialled = how == string(upstream.KindRefused)
	return out
}
