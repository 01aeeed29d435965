package router

import (
	"cmp"
	"errors"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/headrace/headrace/router/breaker"
	"github.com/headrace/headrace/router/dialects"
	"github.com/headrace/headrace/router/pairing"
)

// Breaking says when workers that fail are left alone, and how much is tried again.
type Breaking struct {
	breaker.Config
	// EjectShare is the part of the workers of one model, role and dialect, but at least one, that may be left alone for errors at once.
	// Who cannot be reached does not count, and is left alone besides. 0.5
	EjectShare float64
	// SlowFactor is how many times longer than its peers' median a worker must take for first tokens to be left alone for it, as for errors.
	// 0: it never is
	SlowFactor float64
	// RetryShare of the requests of the last seconds, and RetryRate a second, may be tried again for errors. 0.2 and 10; below 0: none
	RetryShare, RetryRate float64
}

func (b *Breaking) check() error {
	b.EjectShare = cmp.Or(b.EjectShare, 0.5)
	if !(b.EjectShare > 0 && b.EjectShare <= 1) {
		return errors.New("configure router: the share of workers that may be left alone must be over 0 and at most 1")
	}
	b.RetryShare, b.RetryRate = max(cmp.Or(b.RetryShare, 0.2), 0), max(cmp.Or(b.RetryRate, 10), 0)
	return errors.Join(b.Check(), breaker.CheckSlow(b.SlowFactor))
}

// breakerMetrics count what breakers and the retry budget do.
type breakerMetrics struct {
	opened *prometheus.CounterVec
	denied prometheus.Counter
}

func newBreakerMetrics(reg *prometheus.Registry, f *fleet) *breakerMetrics {
	m := &breakerMetrics{
		opened: prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: "headrace", Subsystem: "router", Name: "breakers_opened_total",
			Help: "Times that a worker began to be left alone, by why: lost (it did not answer), errors, slow."}, []string{"why"}),
		denied: prometheus.NewCounter(prometheus.CounterOpts{Namespace: "headrace", Subsystem: "router", Name: "retries_denied_total",
			Help: "Requests not tried again because as many were as may be."}),
	}
	reg.MustRegister(m.opened, m.denied, prometheus.NewGaugeFunc(prometheus.GaugeOpts{Namespace: "headrace", Subsystem: "router", Name: "workers_left_alone",
		Help: "Workers whose breaker is open or half-open."}, func() float64 {
		n := 0
		for _, x := range *f.order.Load() {
			if x.health.breaker.State(f.now()).Phase != breaker.Closed {
				n++
			}
		}
		return float64(n)
	}))
	return m
}

// shut writes what a breaker says into a candidate; true if it is left alone for errors, and others may need it.
func (f *fleet) shut(c *pairing.Candidate, s breaker.State, now time.Time) bool {
	switch {
	case s.Phase == breaker.Open:
		c.CoolUntil, c.CoolReason = s.Until, s.Reason
		return !s.Lost
	case s.Phase == breaker.HalfOpen && s.Trying:
		c.CoolUntil, c.CoolReason = now.Add(f.breaking.OpenMin), "one request tries it ("+s.Reason+")"
	}
	return false
}

// spare lets workers back that are left alone for errors where too many of their sort are: those first that would be back first.
func (f *fleet) spare(v *pairing.View, out []*pairing.Candidate) {
	slices.SortFunc(out, func(a, b *pairing.Candidate) int { return a.CoolUntil.Compare(b.CoolUntil) })
	alike := func(a, b *pairing.Candidate) bool {
		return a.Model == b.Model && a.Role == b.Role && a.Dialect == b.Dialect
	}
	for i, c := range out {
		all, left := 0, 0
		for j := range v.Workers {
			if alike(&v.Workers[j], c) {
				all++
			}
		}
		for _, o := range out[i:] {
			if alike(o, c) {
				left++
			}
		}
		if left > max(1, int(f.breaking.EjectShare*float64(all))) {
			c.CoolUntil, c.CoolReason = time.Time{}, ""
		}
	}
}

// claim is called before an attempt. trials are breakers that it decides about: Done must be called for each. ok is false when one of
// the workers is being tried by another request.
func (f *fleet) claim(d *pairing.Decision, now time.Time) (trials []*breaker.Breaker, ok bool) {
	members := *f.members.Load()
	for _, w := range [...]*pairing.Worker{d.Prefill, d.Decode, d.Whole} {
		if w == nil || members[w.ID] == nil {
			continue
		}
		b := members[w.ID].health.breaker
		trial, ok := b.Take(now)
		if trial {
			trials = append(trials, b)
		}
		if !ok {
			for _, b := range trials {
				b.Done()
			}
			return nil, false
		}
	}
	return trials, true
}

// failed notes that a worker failed an attempt; true if it is left alone from now on.
func (f *fleet) failed(id string, fault breaker.Fault, reason string) bool {
	m := (*f.members.Load())[id]
	return m != nil && m.health.breaker.Failed(f.now(), fault, reason)
}

// served notes that workers served an attempt, or as much of it as shows that they do.
func (f *fleet) served(d *pairing.Decision, now time.Time) {
	members := *f.members.Load()
	for _, w := range [...]*pairing.Worker{d.Prefill, d.Decode, d.Whole} {
		if w != nil && members[w.ID] != nil {
			members[w.ID].health.breaker.Served(now)
		}
	}
}

// faultOf is what a failure shows of the worker; false where it shows nothing, as when it is busy.
func faultOf(b dialects.Blame) (breaker.Fault, bool) {
	if b.Hard {
		return breaker.Lost, true
	}
	return breaker.Erred, b.Reason == "error" || b.Reason == "slow"
}

// faultNames are what metrics call faults.
var faultNames = map[breaker.Fault]string{breaker.Lost: "lost", breaker.Erred: "errors", breaker.TooSlow: "slow"}

func newHealth(b *Breaking) *health {
	h := &health{breaker: breaker.New(&b.Config)}
	if b.SlowFactor > 0 {
		h.pace = breaker.NewPace(h.breaker)
	}
	return h
}

// sorts are the workers whose times can be compared.
func sorts(order []*member) map[string][]*breaker.Pace {
	out := map[string][]*breaker.Pace{}
	for _, m := range order {
		name := m.w.Model + "\x00" + string(m.w.Role) + "\x00" + m.w.Dialect
		out[name] = append(out[name], m.health.pace)
	}
	return out
}

// slowTimes is how long a worker's first tokens take in relation to the median of its peers; 0: not known.
func (f *fleet) slowTimes(id string) float64 {
	if m := (*f.members.Load())[id]; f.slow != nil && m != nil {
		return f.slow.Ratio(m.health.pace)
	}
	return 0
}

// timed compares the time up to the attempt's first token, or to prefill's hand-off, with that of other workers. An answer that comes
// whole has no such time.
func (q *request) timed(p dialects.Phase) {
	of := q.charge.prefill
	if of == nil || of.health == nil || of.health.pace == nil || p == dialects.Decoding && !q.dreq.Stream && dialectOf(q.decision) != dialects.NativeName {
		return
	}
	f := q.r.fleet
	now := f.now()
	if n := f.slow.Took(now, of.health.pace, q.charge.ahead, now.Sub(q.charge.at)); n > 0 {
		q.r.breakerMetrics.opened.WithLabelValues(faultNames[breaker.TooSlow]).Add(float64(n))
	}
}

// endTrials makes room for other trials.
func (q *request) endTrials() {
	for _, b := range q.trials {
		b.Done()
	}
	q.trials = nil
}

// retries tells whether the request may be tried again after such a failure. Where a worker was lost another does the work in its place:
// that is no more work than before, once. What could not even be dialled cost nothing. And a stream that the client has a part of is not
// given up for a budget.
func (q *request) retries(out dialects.Outcome) bool {
	lost := slices.ContainsFunc(out.Blame, func(b dialects.Blame) bool { return b.Hard })
	free := out.Undialled || lost && !q.replaced || q.sent
	q.replaced = q.replaced || lost && !out.Undialled
	if free || q.r.budget.Retry(q.r.fleet.now()) {
		return true
	}
	q.r.breakerMetrics.denied.Inc()
	return false
}
