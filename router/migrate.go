package router

import (
	"errors"
	"fmt"
	"strings"

	"github.com/headrace/headrace/internal/openai"
	"github.com/headrace/headrace/router/dialects"
	"github.com/headrace/headrace/router/pairing"
)

// errEnded tells that nothing is missing of an answer but its end.
var errEnded = errors.New("only the end is missing")

// remember has the stream of the next attempt's engines remembered, as long as the client has nothing.
func (q *request) remember(d pairing.Decision) {
	if q.sent {
		return
	}
	q.trail.Free()
	q.trail = nil
	if q.dreq.Stream && !q.foreign {
		q.trail = dialects.NewTrail(&q.dreq, q.r.cfg.Migration[dialectOf(d)])
	}
}

// given is how many tokens the client has, where it is known.
func (q *request) given() int { return len(q.progress.Given) + q.trail.Given() }

// goOn prepares the attempt that goes on with a foreign engine's answer, when the client has a part of it already. It returns the error
// that the client is to have when nobody can, or errEnded. over tells that there may be no other attempt.
func (q *request) goOn(d pairing.Decision, out dialects.Outcome, over bool) error {
	dialect := dialectOf(d)
	switch {
	case q.trail == nil:
		return q.broken(d, out, "impossible", dialects.Nevers(&q.dreq, q.r.cfg.Migration[dialect]))
	case strings.HasSuffix(out.Reason, "_"+dialects.ReasonDiverged):
		return q.broken(d, out, "failed", out.Err.Error())
	}
	if q.own.Body == nil {
		q.own = q.dreq
	}
	next, how, why := q.trail.GoOn(&q.own, contextOf(d))
	switch {
	case how == "":
		return q.broken(d, out, "impossible", why)
	case over && how != dialects.Ended:
		return q.broken(d, out, "failed", "there were attempts enough")
	}
	q.r.metrics.migrations.WithLabelValues(dialect, how).Inc()
	q.r.log.Info("stream goes on elsewhere", "id", q.id, "request_id", q.dreq.RequestID, "how", how, "tokens", q.given(), "reason", out.Reason)
	if how == dialects.Ended {
		return errEnded
	}
	q.dreq = next
	q.r.metrics.redispatches.WithLabelValues(out.Reason).Inc()
	q.enter(statePairing)
	return nil
}

// broken is the error that ends a stream which nobody goes on with.
func (q *request) broken(d pairing.Decision, out dialects.Outcome, result, why string) error {
	q.r.metrics.migrations.WithLabelValues(dialectOf(d), result).Inc()
	q.r.log.Warn("stream breaks off", "id", q.id, "request_id", q.dreq.RequestID, "tokens", q.given(), "why", why)
	failure := openai.Unavailable("The answer broke off, and no other worker can go on with it: %s; %s. Please ask again.", q.explain(out.Reason), why)
	return &brokenOff{failure, out.Body}
}

// fingerprintOf is that of a decision's workers, which is one.
func fingerprintOf(d pairing.Decision) string {
	if d.Whole != nil {
		return d.Whole.Fingerprint
	}
	return d.Decode.Fingerprint
}

// contextOf is for how many tokens the workers of a decision have room, 0 when they do not say.
func contextOf(d pairing.Decision) int64 {
	for _, w := range []*pairing.Worker{d.Decode, d.Whole} {
		if w != nil {
			return int64(w.ContextTokens)
		}
	}
	return 0
}

// moved counts an answer that came to its end by another engine than began it.
func (q *request) moved() {
	if q.own.Body != nil {
		q.r.metrics.migrations.WithLabelValues(dialectOf(q.decision), "finished").Inc()
	}
}

// finishMoved gives the client the end of an answer that lacks nothing else.
func (q *request) finishMoved() error {
	q.moved()
	if q.body.IncludeUsage {
		raw, data := q.trail.Usage()
		if err := q.Event(dialects.KindRaw, raw, data, 0); err != nil {
			return clientError(fmt.Errorf("write the usage: %w", err))
		}
	}
	if err := q.out.finish(); err != nil {
		return clientError(err)
	}
	return nil
}
