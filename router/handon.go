package router

import (
	"bytes"

	"github.com/headrace/headrace/internal/openai"
	"github.com/headrace/headrace/router/dialects"
)

// Event, Flush and Phase stand between the dialect and the client's sink.

// Event counts what the client gets.
func (q *request) Event(kind dialects.Kind, raw, data []byte, n int) error {
	if q.race != nil {
		if kind == dialects.KindComment {
			return nil
		}
		if !q.race.claim(q) {
			return errOutrun
		}
		q.race = nil
	}
	switch {
	case kind == dialects.KindComment:
		return q.out.Event(kind, raw, data, n)
	case kind == dialects.KindUsage || kind == dialects.KindRaw && openai.IsUsage(data):
		q.usage.take(data)
	case kind == dialects.KindRaw: // an event has a token, mostly
		if q.foreign && bytes.Contains(data, responseDone) {
			q.usage.take(data)
		}
		q.tokens++
		q.untimed++
	case n > 0 || kind == dialects.KindText:
		q.untimed += max(n, 1)
	}
	q.events++
	q.sent = true
	return q.out.Event(kind, raw, data, n)
}

// Whole passes on.
func (q *request) Whole(contentType string, answer []byte) error {
	if q.race != nil {
		if !q.race.claim(q) {
			return errOutrun
		}
		q.race = nil
	}
	q.sent = true
	q.usage.takeWhole(answer)
	if n := q.usage.Completion; n > 0 {
		q.tokens += n
		q.timeText(n)
	}
	if out, ok := q.out.(*wholeSink); ok {
		out.now = q.clock()
	}
	return q.out.Whole(contentType, answer)
}

func (q *request) timeText(n int) {
	now := q.clock()
	q.times.text(now.Sub(q.start))
	q.r.metrics.tokens.Add(float64(n))
	q.charge.text(n, now)
	if !q.firstText {
		q.firstText = true
		q.r.metrics.first.of(q.label).Observe(seconds(now.Sub(q.start)))
	} else if !q.lastText.IsZero() { // as it is in another choice than the first
		q.r.metrics.itl.Observe(seconds(now.Sub(q.lastText)) / float64(n))
	}
	q.lastText = now
}

// Flush passes on. What was handed on since the last time came together.
func (q *request) Flush() error {
	if q.race != nil { // nothing was handed on
		return nil
	}
	q.timeUntimed()
	return q.out.Flush()
}

func (q *request) timeUntimed() {
	if n := q.untimed; n > 0 {
		q.untimed = 0
		q.timeText(n)
	}
}

// Phase moves the state machine.
func (q *request) Phase(p dialects.Phase) {
	switch p {
	case dialects.Reserving:
		q.enter(stateReserving)
	case dialects.Prefilling:
		q.enter(statePrefilling)
	case dialects.Transferring:
		if q.r.fleet.slow != nil {
			q.timed(p)
		}
		q.charge.prefilled(q.clock())
		q.enter(stateTransferring)
	case dialects.Decoding:
		if q.r.fleet.slow != nil {
			q.timed(p)
		}
		q.charge.prefilled(q.clock())
		q.enter(stateDecoding)
		if len(q.trials) > 0 { // it has shown enough
			q.r.fleet.served(&q.decision, q.clock())
			q.endTrials()
		}
		if q.decoding != nil {
			q.decoding(q.decision)
		}
	}
}
