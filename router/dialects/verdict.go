package dialects

import (
	"bytes"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/tidwall/gjson"

	"github.com/headrace/headrace/router/upstream"
)

// errorObject is a worker's error in OpenAI's shape: SGLang's has the error's members at the top.
func errorObject(b []byte) []byte {
	if v := gjson.ParseBytes(b); v.IsObject() && !v.Get("error").Exists() && v.Get("message").Type == gjson.String {
		return append(append([]byte(`{"error":`), bytes.TrimSpace(b)...), '}')
	}
	return bytes.Clone(b)
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
