package dialects

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"

	"github.com/tidwall/gjson"

	"github.com/headrace/headrace/router/upstream"
)

// fromAnswer takes what the answering leg brought.
func (r *relay) fromAnswer(b upstream.Batch) *Outcome {
	r.answer.took(b)
	if r.merge != nil && !r.handed && (b.Err == nil || b.Err == io.EOF) && b.Status == http.StatusOK {
		kept := b.Kept() // the next one takes its place
		b.Release()
		r.held = append(r.held, kept)
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
		return finished
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
			return finished
		}
		return r.fail(l, "lost", errNoDone)
	}
	return r.broken(l, b.Err)
}

// finished is the outcome of an attempt that went well. Nobody changes it.
var finished = &Outcome{Result: Finished}

var errNoDone = errors.New("the stream ended without [DONE]")

// events hands on whole events.
func (r *relay) events(data []byte) *Outcome {
	for len(data) > 0 {
		raw, arg := oneLine(data)
		ok := raw != nil
		if !ok {
			raw = nextRaw(data)
			arg, ok = dataOf(raw)
		}
		data = data[len(raw):]
		var err error
		switch {
		case !ok: // a comment that keeps the connection alive
			err = r.sink.Event(KindComment, raw, nil, 0)
		case string(arg) == "[DONE]":
			return r.done()
		case isError(arg):
			return r.errorEvent(arg)
		default:
			r.begin()
			if r.merge != nil {
				arg = r.merge.decode(arg)
				raw = append(append([]byte("data: "), arg...), "\n\n"...)
			}
			r.closes = r.closes || r.Request.Path == PathResponses && endsResponse(arg)
			if r.Trail != nil {
				if raw, err = r.Trail.take(raw, arg); err != nil {
					return r.fail(r.answer, ReasonDiverged, err)
				}
				if raw == nil {
					continue
				}
				arg = raw
			}
			err = r.sink.Event(KindRaw, raw, arg, 0)
		}
		if err != nil {
			return &Outcome{Result: SinkFailed, Err: err}
		}
	}
	return nil
}

// done is the end of a stream.
func (r *relay) done() *Outcome {
	if r.Trail != nil && r.Trail.behind() {
		return r.fail(r.answer, ReasonDiverged, errDiverged)
	}
	return finished
}

// ReasonDiverged is how an attempt fails, behind the role, whose engine went on with an answer in another way than it was begun.
const ReasonDiverged = "diverged"

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
		if r.begun = true; r.beside != nil {
			r.beside.enough.Store(true)
		}
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
