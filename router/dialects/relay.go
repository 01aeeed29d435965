package dialects

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"time"

	"github.com/tidwall/gjson"

	"github.com/headrace/headrace/router/pairing"
	"github.com/headrace/headrace/router/upstream"
)

const (
	// wholeBytesMax bounds an answer that is not streamed: a batch of embeddings is the largest there is.
	wholeBytesMax = 256 << 20
	// refusalGrace is how long decode may take to refuse, too, what prefill found wrong with a request.
	refusalGrace = time.Second
)

// relay is an attempt whose answer goes to the client as one worker gives it, byte for byte. Another worker may prefill
// for it; what that one answers stays here.
//
// Engines of this sort say nothing while they work. That they live is found out by asking.
type relay struct {
	*Attempt
	client *upstream.Client
	probes *Prober
	sink   Sink

	prefill *leg // nil for none
	answer  *leg // nil as long as prefill must come first
	// prefilled, when set, is called with the body of prefill's answer.
	prefilled func(body []byte) *Outcome
	// sameBody: prefill gets what decode gets, so that its answer may be a stream and what it refuses is the client's fault.
	sameBody bool
	tongue   tongue
	errands  *Errands // of deaf engines, which know the request as rid
	rid      string
	// merge, when set, needs prefill's answer before anything of decode's goes to the client: held is what has come.
	merge   *logprobs
	held    []upstream.Batch
	handed  bool // prefill's answer is here
	recall  func()
	through func(prefill *leg) bool // sees a prefill through that nobody wants any more
	closes  bool                    // an event was the last one of an answer that ends without [DONE]
	// until, when set, is when the answer must have begun.
	until *time.Timer
	safe  time.Time // when until fires
	late  func() *Outcome
	// miss, when set, is when missed is called unless the answer has begun.
	miss   *time.Timer
	missed func()

	begun   bool // the client was handed content
	refused *Outcome
	grace   <-chan time.Time
}

// call is what one leg asks for.
type call struct {
	worker  *pairing.Worker
	role    string
	body    [][]byte
	id      string // X-Request-Id; "" for the attempt's
	stream  bool   // also where prefill is asked
	headers [][2]string
}

// open sends a request of this attempt.
func (r *relay) open(w *pairing.Worker, role string, body [][]byte) *leg {
	return r.send(call{worker: w, role: role, body: body})
}

func (r *relay) send(c call) *leg {
	accept := "application/json"
	if c.stream || c.role != rolePrefill && r.Request.Stream {
		accept = "text/event-stream"
	}
	if c.id == "" {
		c.id = r.engineRequestID()
	}
	return &leg{worker: c.worker, role: c.role, alive: time.Now(), Leg: r.client.Open(target(c.worker), upstream.Request{
		Path: r.Request.Path, RequestID: c.id, Headers: c.headers, Body: c.body, Accept: accept, Patient: true, WholeBytesMax: wholeBytesMax})}
}

// engineRequestID is what the engine makes the answer's id of, by putting a prefix in front. A second attempt has another
// one: older engines take two requests of one id for one.
func (r *relay) engineRequestID() string {
	id := r.Request.RequestID
	if id == r.Request.ID {
		if i := bytes.IndexByte([]byte(id), '-'); i >= 0 {
			id = id[i+1:]
		}
	}
	if r.Number > 1 {
		id += "-" + strconv.Itoa(r.Number)
	}
	return id
}

// run serves until the answer is with the client, or will not be.
func (r *relay) run(ctx context.Context) Outcome {
	r.sink.Phase(Prefilling)
	look := time.NewTicker(max(r.probes.every/3, time.Millisecond))
	defer look.Stop()
	for {
		var prefill, answer <-chan upstream.Batch
		until, miss := r.timer(r.until), r.timer(r.miss)
		if r.prefill != nil && !r.prefill.ended {
			prefill = r.prefill.C
		}
		if r.answer != nil && len(r.held) < batchesQueuedMax {
			answer = r.answer.C
		}
		var out *Outcome
		select {
		case <-ctx.Done():
			return Outcome{Result: Cancelled, Err: context.Cause(ctx)}
		case b := <-prefill:
			out = r.fromPrefill(b)
		case b := <-answer:
			out = r.fromAnswer(b)
		case <-until:
			r.tongue.leased = false // it may not read any more
			out = r.late()
		case <-miss:
			r.missed()
		case <-r.grace:
			if r.grace = nil; !r.begun {
				out = r.refused
			}
		case <-look.C:
			out = r.look()
		}
		if out != nil {
			return *out
		}
	}
}

// timer is when t runs out, as long as the answer has not begun.
func (r *relay) timer(t *time.Timer) <-chan time.Time {
	if t == nil || r.begun {
		return nil
	}
	return t.C
}

// close ends the legs.
func (r *relay) close(finished bool) {
	for _, b := range r.held {
		b.Release()
	}
	if !finished && r.tongue.leased {
		r.lastAnswer()
	}
	for _, t := range []*time.Timer{r.until, r.miss} {
		if t != nil {
			t.Stop()
		}
	}
	if r.until != nil && time.Until(r.safe) < r.client.FinishTimeout() { // the blocks may be another request's before it has got so far
		r.tongue.leased = false
	}
	e := r.tongue.end(r.prefill.course(), r.answer.course(), r.begun, finished)
	if e.prefill == seeThrough && r.through(r.prefill) {
		r.prefill = nil // it is the errand's now
	}
	r.do(e.prefill, r.prefill)
	r.do(e.answer, r.answer)
	if e.recall && r.recall != nil {
		r.recall()
	}
}

// do does with a leg what the ending says.
func (r *relay) do(d deed, l *leg) {
	switch {
	case l == nil:
	case d == finish:
		l.Finish()
	case d == linger:
		l.Linger()
	default:
		l.Close()
		if d == callOff {
			r.errands.abort(l.Target, r.rid)
		}
	}
}

// lastAnswer takes what prefill has just answered: somebody must tell it that the blocks are not wanted, and that is decode.
func (r *relay) lastAnswer() {
	if r.prefill == nil || r.prefill.ended || r.answer != nil || r.prefilled == nil {
		return
	}
	select {
	case b := <-r.prefill.C:
		r.prefill.took(b)
		if b.Err == io.EOF && b.Status == http.StatusOK && !b.SSE {
			_ = r.prefilled(b.Data)
		}
		b.Release()
	default:
	}
}

// look asks after workers that were silent for long.
func (r *relay) look() *Outcome {
	for _, l := range []*leg{r.prefill, r.answer} {
		if l == nil || l.ended || time.Since(l.LastHeard()) < r.probes.every || l == r.prefill && r.begun {
			continue
		}
		p := l.probe
		if p == nil {
			l.probe = r.probes.ask(l.Target)
			continue
		}
		if !p.over() {
			continue
		}
		l.probe = nil
		if p.began.Before(l.alive) { // it is about a life before this request
			continue
		}
		if p.err != nil {
			return r.fail(l, string(upstream.KindSilent), fmt.Errorf("%w: %w", errProbe, p.err))
		}
		l.alive = p.began
	}
	return nil
}

// fromPrefill takes what the prefill leg brought.
func (r *relay) fromPrefill(b upstream.Batch) *Outcome {
	defer b.Release()
	l := r.prefill
	l.took(b)
	switch {
	case r.begun:
		return nil // it does not matter any more
	case b.SSE && r.sameBody:
		return r.fromPrefillStream(b)
	case b.SSE:
		return r.fail(l, "protocol", errors.New("an event stream where none was asked for"))
	case !l.ended:
		return nil
	case b.Err != io.EOF:
		return r.broken(l, b.Err)
	case b.Status == http.StatusOK:
		r.sink.Phase(Transferring)
		r.handed = true
		if r.merge != nil {
			r.merge.prefill(b.Data)
		}
		if r.prefilled != nil {
			if out := r.prefilled(b.Data); out != nil {
				return out
			}
		}
		return r.release()
	case clientFault(b.Status):
		return r.prefillRefused(b.Status, b.Data)
	}
	return r.status(l, b)
}

// release hands on what was held for prefill's answer.
func (r *relay) release() *Outcome {
	held := r.held
	r.held = nil
	for i, b := range held {
		if out := r.hear(b); out != nil {
			for _, b := range held[i+1:] {
				b.Release()
			}
			return out
		}
	}
	return nil
}

// prefillRefused: prefill got the request in another shape than the client gave it, so that what it finds wrong with it may
// not be the client's fault. Decode, or a worker that does everything, has the last word.
func (r *relay) prefillRefused(status int, why []byte) *Outcome {
	out := r.fail(r.prefill, "rejected", fmt.Errorf("status %d: %.200s", status, why))
	out.Whole = true
	if r.sameBody {
		out = &Outcome{Result: Refused, Status: status, Body: errorObject(why)}
	}
	if r.answer == nil {
		return out
	}
	r.refused, r.grace = out, time.After(refusalGrace)
	return nil
}

// prefillError judges an error within prefill's stream.
func (r *relay) prefillError(arg []byte) *Outcome {
	if code := int(gjson.GetBytes(arg, "error.code").Int()); clientFault(code) {
		return r.prefillRefused(code, arg)
	}
	return r.fail(r.prefill, "error", fmt.Errorf("worker says %.200s", arg))
}

// errorObject is a worker's error in OpenAI's shape: SGLang's has the error's members at the top.
func errorObject(b []byte) []byte {
	if v := gjson.ParseBytes(b); v.IsObject() && !v.Get("error").Exists() && v.Get("message").Type == gjson.String {
		return append(append([]byte(`{"error":`), bytes.TrimSpace(b)...), '}')
	}
	return bytes.Clone(b)
}

// fromAnswer takes what the answering leg brought.
func (r *relay) fromAnswer(b upstream.Batch) *Outcome {
	r.answer.took(b)
	if r.merge != nil && !r.handed && (b.Err == nil || b.Err == io.EOF) && b.Status == http.StatusOK {
		r.held = append(r.held, b)
		return nil
	}
	return r.hear(b)
}

// hear handles what the answering leg brought.
func (r *relay) hear(b upstream.Batch) *Outcome {
	defer b.Release()
	l := r.answer
	if !b.SSE {
		switch {
		case b.Err == nil:
			return nil
		case b.Err != io.EOF:
			return r.broken(l, b.Err)
		case b.Status != http.StatusOK:
			return r.status(l, b)
		case r.Request.Stream:
			return r.fail(l, "protocol", errors.New("the answer is no event stream"))
		}
		r.begin()
		if r.merge != nil {
			b.Data = r.merge.decode(b.Data)
		}
		if err := r.sink.Whole(b.ContentType, b.Data); err != nil {
			return &Outcome{Result: SinkFailed, Err: err}
		}
		return &Outcome{Result: Finished}
	}
	if !r.Request.Stream {
		return r.fail(l, "protocol", errors.New("an event stream where none was asked for"))
	}
	if out := r.events(b.Data); out != nil {
		return out
	}
	if err := r.sink.Flush(); err != nil {
		return &Outcome{Result: SinkFailed, Err: err}
	}
	switch b.Err {
	case nil:
		return nil
	case io.EOF:
		if r.closes {
			return &Outcome{Result: Finished}
		}
		return r.fail(l, "lost", errNoDone)
	}
	return r.broken(l, b.Err)
}

var errNoDone = errors.New("the stream ended without [DONE]")

// events hands on whole events.
func (r *relay) events(data []byte) *Outcome {
	for len(data) > 0 {
		raw := nextRaw(data)
		data = data[len(raw):]
		arg, ok := dataOf(raw)
		var err error
		switch {
		case !ok: // a comment that keeps the connection alive
			err = r.sink.Event(KindComment, raw, nil, 0)
		case string(arg) == "[DONE]":
			return &Outcome{Result: Finished}
		case isError(arg):
			return r.errorEvent(arg)
		default:
			r.begin()
			if r.merge != nil {
				arg = r.merge.decode(arg)
				raw = append(append([]byte("data: "), arg...), "\n\n"...)
			}
			r.closes = r.closes || r.Request.Path == PathResponses && endsResponse(arg)
			err = r.sink.Event(KindRaw, raw, arg, 0)
		}
		if err != nil {
			return &Outcome{Result: SinkFailed, Err: err}
		}
	}
	return nil
}

func isError(data []byte) bool { return bytes.HasPrefix(data, []byte(`{"error"`)) }

// PathResponses is the endpoint whose streams end with an event of their own.
const PathResponses = "/v1/responses"

// endsResponse tells whether an event of a response is its last one.
func endsResponse(data []byte) bool {
	switch gjson.GetBytes(data, "type").String() {
	case "response.completed", "response.incomplete", "response.failed", "response.cancelled":
		return true
	}
	return false
}

func (r *relay) begin() {
	if !r.begun {
		r.begun = true
		r.sink.Phase(Decoding)
	}
}

// errorEvent judges an engine's error within a stream that began well: what is wrong with a request, engines may find
// out only then.
func (r *relay) errorEvent(arg []byte) *Outcome {
	code := int(gjson.GetBytes(arg, "error.code").Int())
	if !r.begun && clientFault(code) {
		return &Outcome{Result: Refused, Status: code, Body: bytes.Clone(arg)}
	}
	out := r.fail(r.answer, "error", fmt.Errorf("worker says %.200s", arg))
	out.Body = bytes.Clone(arg)
	return out
}

// status judges an answer with a status that is not 200.
func (r *relay) status(l *leg, b upstream.Batch) *Outcome {
	switch {
	case clientFault(b.Status):
		return &Outcome{Result: Refused, Status: b.Status, Body: errorObject(b.Data)}
	case b.Status == http.StatusTooManyRequests || b.Status == http.StatusServiceUnavailable:
		out := r.fail(l, "busy", fmt.Errorf("status %d: %.200s", b.Status, b.Data))
		out.RetryAfter = b.RetryAfter
		return out
	}
	return r.fail(l, "error", fmt.Errorf("status %d: %.200s", b.Status, b.Data))
}

// broken judges a leg that broke.
func (r *relay) broken(l *leg, err error) *Outcome {
	how := "lost"
	var e *upstream.Error
	if errors.As(err, &e) {
		how = string(e.Kind)
	}
	return r.fail(l, how, err)
}

// fail makes the outcome of an attempt that l could not go on with.
func (r *relay) fail(l *leg, how string, err error) *Outcome {
	out := &Outcome{Result: Failed, Reason: l.role + "_" + how, FaultAt: time.Now(), GotOn: l.answered,
		Err: fmt.Errorf("%s by worker %s: %w", l.role, l.worker.ID, err), Blame: []Blame{{Worker: l.worker.ID, Reason: how}}}
	switch upstream.Kind(how) {
	case upstream.KindSilent:
		out.Blame[0].Hard = true
	case upstream.KindRefused:
		out.Blame[0].Hard, out.Undialled = true, true
	case upstream.KindLost, upstream.KindProtocol:
		out.Blame[0].Hard = true
	}
	return out
}

// nextRaw returns the first event of b, which ends in a whole one, up to behind its empty line.
func nextRaw(b []byte) []byte {
	end := len(b)
	if i := bytes.Index(b, []byte("\n\n")); i >= 0 {
		end = i + 2
	}
	if i := bytes.Index(b[:end], []byte("\n\r\n")); i >= 0 {
		end = i + 3
	}
	return b[:end]
}

// dataOf returns an event's data, of several lines the first; false when it has none.
func dataOf(event []byte) ([]byte, bool) {
	for line := range bytes.Lines(event) {
		if arg, ok := bytes.CutPrefix(line, []byte("data:")); ok {
			return bytes.TrimSpace(arg), true
		}
	}
	return nil, false
}
