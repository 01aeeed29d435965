package dialects

import (
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/headrace/headrace/router/pairing"
	"github.com/headrace/headrace/router/upstream"
)

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
	if len(c.headers) == 0 {
		c.headers = r.Request.Trace
	} else if len(r.Request.Trace) > 0 {
		c.headers = slices.Concat(c.headers, r.Request.Trace)
	}
	var now time.Time
	var room *legRoom
	if r.Room != nil && c.role == roleWhole {
		room = &r.Room.answer
	} else {
		room = &legRoom{}
	}
	if r.Decision.Whole != nil {
		now = r.Began
	}
	if now.IsZero() {
		now = time.Now()
	}
	r.At = now
	l := &room.leg
	*l = leg{worker: c.worker, role: c.role, alive: now, Leg: r.client.OpenInline(target(c.worker), upstream.Request{
		Path: r.Request.Path, RequestID: c.id, Headers: c.headers, Body: c.body, Accept: accept, Patient: true, WholeBytesMax: wholeBytesMax, Now: now, Room: &room.up})}
	return l
}

// engineRequestID is what the engine makes the answer's id of, by putting a prefix in front. A second attempt has another
// one: older engines take two requests of one id for one.
func (r *relay) engineRequestID() string {
	id := r.Request.RequestID
	if id == r.Request.ID {
		if i := strings.IndexByte(id, '-'); i >= 0 {
			id = id[i+1:]
		}
	}
	if r.Number > 1 {
		id += "-" + strconv.Itoa(r.Number)
	}
	return id
}

// close ends the legs.
func (r *relay) close(finished bool) {
	for _, b := range r.held {
		b.Release()
	}
	if !finished && r.tongue.leased {
		r.lastAnswer()
	}
	r.note()
	if !r.until.IsZero() && time.Until(r.until) < r.client.FinishTimeout() { // the blocks may be another request's before it has got so far
		r.tongue.leased = false
	}
	e := r.tongue.end(r.prefill.course(), r.answer.course(), r.begun, finished)
	if e.prefill == seeThrough && r.through(r.prefill) {
		r.prefill = nil // it is the errand's now
	}
	if r.dismiss(e.prefill == finish || e.prefill == leave) {
		r.do(e.prefill, r.prefill)
	}
	r.do(e.answer, r.answer)
	if e.recall && r.recall != nil {
		r.recall()
	}
}

// do does with a leg what the ending says.
func (r *relay) do(d deed, l *leg) {
	switch {
	case l == nil:
	case d == finish, d == leave && l.whole: // what is still to come, if anything, says nothing
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
	if r.prefill == nil || r.prefill.ended || r.answer != nil || r.prefilled == nil || !r.prefill.Ready() {
		return
	}
	b, ok := r.prefill.Next(time.Now().Add(time.Millisecond))
	if !ok {
		return
	}
	r.prefill.took(b)
	if b.Err == io.EOF && b.Status == http.StatusOK && !b.SSE {
		_ = r.prefilled(b.Data)
	}
	b.Release()
}
