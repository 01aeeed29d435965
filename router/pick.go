package router

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/headrace/headrace/internal/openai"
	"github.com/headrace/headrace/router/pairing"
)

// bytesPerToken estimates a prompt's length for load figures.
const bytesPerToken = 4

// pick chooses workers and charges them: an attempt is to follow. After a fault it waits, as long as recovery may take, for one to
// come back.
func (q *request) pick(ctx context.Context) (pairing.Decision, error) {
	q.enter(statePairing)
	if d := q.picked; d != nil {
		q.picked = nil
		return *d, nil
	}
	if q.r.prompts != nil && q.prompt == nil && !q.foreign {
		q.prompt = q.r.prompts.of(q.dreq.Path, q.body.Model, q.body)
	}
	for raced := false; ; {
		changed := *q.r.fleet.changed.Load()
		now := q.start
		if q.dispatches > 0 || q.waited > 0 || raced || q.prompt != nil {
			now = q.r.fleet.now()
		}
		if ended(ctx, now) != nil {
			return pairing.Decision{}, context.Cause(ctx)
		}
		v := q.r.fleet.viewAt(now)
		if q.prompt != nil {
			q.prompt.fill(v, q.body.Model)
		}
		preq := pairing.Request{
			ID: q.id, Model: q.body.Model, PromptTokens: q.promptTokens(), Attempt: q.dispatches + 1,
			// The last attempt takes what is least likely to fail.
			Whole: q.whole || q.attempts > 0 && q.attempts == q.r.cfg.MaxAttempts-1,
			Warm:  q.warm, Refuse: q.refuser, Unpaired: q.unpaired,
			Session: q.r.sessions.workers(q.session, v.Now),
		}
		failed, again, until := q.excluded(now)
		preq.Exclude = failed
		d, err := q.r.cfg.Policy.Pick(ctx, preq, v)
		if err != nil && len(again) < len(failed) { // better who failed it than nobody
			preq.Exclude = again
			d, err = q.r.cfg.Policy.Pick(ctx, preq, v)
		}
		taken := err == nil && q.take(&d, v, now, raced)
		q.r.fleet.viewed(v)
		if taken {
			return d, nil
		}
		if err == nil {
			raced = true
			continue
		}
		var none *pairing.ErrNone
		if !errors.As(err, &none) {
			return d, openai.Internal("No worker could be chosen: %s.", err)
		}
		if e := q.never(); e != nil {
			return d, e
		}
		if q.faultAt.IsZero() || !q.await(ctx, changed, until) {
			return d, openai.Unavailable("No worker can serve model %q now: %s.", q.body.Model, none.Reason)
		}
	}
}

// take charges the workers of a decision, unless another request has just been given one of them, or has just begun to try it: then
// what the decision was made by is not so any more. With must it does in any case.
func (q *request) take(d *pairing.Decision, v *pairing.View, now time.Time, must bool) bool {
	var ok bool
	if q.trials, ok = q.r.fleet.claim(d, now); !ok && !must {
		return false
	}
	if must {
		v = nil
	}
	if q.room == nil || q.dispatches > 0 {
		q.room = &attemptRoom{}
	}
	if !q.r.fleet.charge(&q.room.charge, d, v, q.tokensToPrefill(d), q.promptTokens(), time.Now()) {
		q.endTrials()
		return false
	}
	return true
}

// ended is ctx.Err for who knows the time.
func ended(ctx context.Context, now time.Time) error {
	if l, ok := ctx.(*lifetime); ok {
		return l.Ended(now)
	}
	return ctx.Err()
}

// await waits for a change of the fleet, or until a time unless that is zero; false when there is no more time to.
func (q *request) await(ctx context.Context, changed <-chan struct{}, until time.Time) bool {
	by := q.recoverBy()
	early := !until.IsZero() && until.Before(by)
	if early {
		by = until
	}
	timer := time.NewTimer(time.Until(by))
	defer timer.Stop()
	select {
	case <-changed:
		return true
	case <-timer.C:
		return early
	case <-ctx.Done():
		return true // pick sees it
	}
}

func (q *request) promptTokens() int64 {
	n := q.body.Len() / bytesPerToken
	if q.prompt != nil {
		n = q.prompt.length
	}
	return int64(n + q.given())
}

// idsOf are the workers of a decision.
func idsOf(d pairing.Decision) []string {
	if d.Whole != nil {
		return []string{d.Whole.ID}
	}
	return []string{d.Prefill.ID, d.Decode.ID}
}

// warmTokens is what remains of a prompt that the worker knows: the end of it, that fills no block.
const warmTokens = 16

func (q *request) tokensToPrefill(d *pairing.Decision) int64 {
	n := q.promptTokens()
	n -= min(d.CachedTokens, n-1)
	for _, w := range []*pairing.Worker{d.Prefill, d.Whole} {
		if w != nil && slices.Contains(q.warm, w.ID) {
			n = min(n, warmTokens)
		}
	}
	return n
}
