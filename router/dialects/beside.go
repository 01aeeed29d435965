package dialects

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/tidwall/gjson"

	"github.com/headrace/headrace/router/upstream"
)

// attendant reads prefill's leg while the relay reads the answer, which it wakes once: when prefill's part is done, or cannot
// be. Of what prefill streams nothing else is of use, so that most requests take no more than this of it.
type attendant struct {
	leg *upstream.Leg
	// events: prefill may answer with a stream, of which merge, unless it is nil, takes the prompt's log probabilities.
	events bool
	merge  *logprobs
	answer *upstream.Leg // whose reader is woken

	enough atomic.Bool   // what a stream of prefill's still has does not matter any more
	over   atomic.Bool   // report stands
	owner  atomic.Uint32 // who ends the leg
	done   chan struct{} // closed when the attendant is gone
	report report
}

// Whoever changes owner from nobody ends the leg, or has ended it.
const (
	ownedByNobody uint32 = iota
	ownedByRelay
	ownedByAttendant
)

// report is how prefill's leg came out.
type report struct {
	last  upstream.Batch // what was taken last, its data a copy; for a stream without
	done  bool           // the stream is whole, whether the leg has ended or not
	fault []byte         // an error within the stream
}

// attendEvery is how often an attendant looks whether it is still needed, where nothing comes.
const attendEvery = time.Second

// attend has prefill's leg read.
func (r *relay) attend() {
	r.beside = &attendant{leg: r.prefill.Leg, answer: r.answer.Leg, events: r.sameBody, merge: r.merge, done: make(chan struct{})}
	go r.beside.run()
}

func (a *attendant) run() {
	defer close(a.done)
	for {
		b, ok := a.leg.Next(time.Now().Add(attendEvery))
		told := ok && a.take(b)
		b.Release()
		if told || a.enough.Load() && (b.SSE || b.Err != nil) || a.owner.Load() != ownedByNobody {
			break
		}
	}
	if a.over.Load() && !a.enough.Load() {
		a.answer.Interrupt(false)
	}
	if !a.owner.CompareAndSwap(ownedByNobody, ownedByRelay) {
		a.leg.Drain()
	}
}

// take looks at what came, and makes the report when that says how the leg comes out.
func (a *attendant) take(b upstream.Batch) bool {
	p := &a.report
	if a.events && b.SSE {
		a.stream(b.Data)
	} else if b.Err == nil && !b.SSE {
		return false
	}
	if b.Err == nil && !p.done && p.fault == nil && (a.events || !b.SSE) {
		return false
	}
	if b.SSE {
		b.Data = nil
	}
	p.last = b.Kept()
	a.over.Store(true)
	return true
}

// stream takes events.
func (a *attendant) stream(data []byte) {
	p := &a.report
	for len(data) > 0 && p.fault == nil {
		raw := nextRaw(data)
		data = data[len(raw):]
		arg, ok := dataOf(raw)
		switch {
		case !ok:
		case string(arg) == "[DONE]":
			p.done = true
		case p.done:
		case isError(arg):
			p.fault = bytes.Clone(arg)
		case a.merge != nil:
			a.merge.prefill(arg)
		}
	}
}

// heard takes what the attendant says, if it has said anything new.
func (r *relay) heard() *Outcome {
	if !r.note() || r.begun { // it does not matter any more
		return nil
	}
	switch p := &r.beside.report; {
	case p.fault != nil:
		return r.prefillError(p.fault)
	case p.done, p.last.SSE && r.sameBody && p.last.Err == io.EOF:
		return r.prefillDone()
	default:
		return r.fromPrefill(p.last)
	}
}

// note has prefill's leg be what the attendant says of it; false where that is nothing new.
func (r *relay) note() bool {
	if r.beside == nil || r.reported || !r.beside.over.Load() {
		return false
	}
	r.reported = true
	p := &r.beside.report
	r.prefill.took(p.last)
	r.prefill.whole = r.prefill.whole || p.done
	return true
}

// prefillDone: prefill's stream is whole.
func (r *relay) prefillDone() *Outcome {
	r.handed = true
	r.sink.Phase(Transferring)
	return r.release()
}

// dismiss ends what an attendant does, and gives prefill's leg back to the relay; false when it is the attendant's to end by
// now. finish says that the leg is to end by itself.
func (r *relay) dismiss(finish bool) (ours bool) {
	a := r.beside
	if a == nil {
		return true
	}
	if finish && a.leg.Sent() && a.owner.CompareAndSwap(ownedByNobody, ownedByAttendant) {
		return false
	}
	if a.owner.Load() != ownedByRelay {
		a.leg.Abort()
	}
	<-a.done
	return true
}

// fromPrefill takes what prefill's leg brought that is no stream, or no stream that was asked for.
func (r *relay) fromPrefill(b upstream.Batch) *Outcome {
	l := r.prefill
	switch {
	case b.SSE && (b.Err == nil || b.Err == io.EOF):
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
	r.refused, r.grace = out, time.Now().Add(refusalGrace)
	return nil
}

// prefillError judges an error within prefill's stream.
func (r *relay) prefillError(arg []byte) *Outcome {
	if code := int(gjson.GetBytes(arg, "error.code").Int()); clientFault(code) {
		return r.prefillRefused(code, arg)
	}
	return r.fail(r.prefill, "error", fmt.Errorf("worker says %.200s", arg))
}
