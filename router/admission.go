package router

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/headrace/headrace/internal/openai"
	"github.com/headrace/headrace/router/admission"
	"github.com/headrace/headrace/router/body"
)

const (
	// answerTokens is what an answer is taken to cost until it is known.
	answerTokens = 256
	// tenantBytesMax bounds the name that a tenant header may give.
	tenantBytesMax = 256
	// weightMin and weightMax bound tenants' weights.
	weightMin, weightMax = 0.001, 1000
)

// errQueueDeadline ends a request whose deadline passed while it waited for its turn.
var errQueueDeadline = errors.New("the deadline passed in the queue")

// refusals counts requests that were not admitted, by why.
type refusals map[admission.Why]prometheus.Counter

// whyDeadline is a request's own deadline that passed while it waited.
const whyDeadline admission.Why = "deadline"

// whyMemory is a body for which there was no room.
const whyMemory admission.Why = "memory"

func newRefusals(reg *prometheus.Registry, q *admission.Queue) refusals {
	total := prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: "headrace", Subsystem: "router", Name: "admission_refusals_total",
		Help: "Requests that got no turn, by why: full (no room in the queue), displaced (for one of more right to its room), late (the queue's timeout), deadline (their own), memory (their bodies would be more than may be held)."}, []string{"why"})
	reg.MustRegister(total)
	for _, g := range []struct {
		name, help string
		of         func(admission.Counts) float64
	}{
		{"admission_running", "Answers being made.", func(c admission.Counts) float64 { return float64(c.Running) }},
		{"admission_waiting", "Requests that wait for their turn.", func(c admission.Counts) float64 { return float64(c.Waiting) }},
		{"admission_waiting_bytes", "Bytes of the bodies of requests that wait for their turn.", func(c admission.Counts) float64 { return float64(c.Bytes) }},
	} {
		reg.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Namespace: "headrace", Subsystem: "router", Name: g.name, Help: g.help}, func() float64 { return g.of(q.Counts()) }))
	}
	r := refusals{}
	for _, why := range []admission.Why{admission.Full, admission.Displaced, admission.Late, whyDeadline, whyMemory} {
		r[why] = total.WithLabelValues(string(why))
	}
	return r
}

// rank is what counts in the queue.
type rank struct {
	priority int    // the lower, the sooner
	tenant   string // whose share of the places it takes
	timeout  time.Duration
}

// rank reads what a request's body and headers say of it. key is what its API key is called.
func (c *Config) rank(h peeker, b *body.Body, key string) (rank, *openai.Error) {
	q := rank{b.Priority, key, c.RequestTimeout}
	if v := header(h, c.PriorityHeader); len(v) > 0 {
		n, err := parsePriority(v)
		if err != nil {
			return q, openai.BadRequest("", openai.CodeInvalidValue, "The header %s must be a whole number, 0 for the usual priority and less for a higher one.", c.PriorityHeader)
		}
		q.priority = n
	}
	if v := header(h, c.TenantHeader); len(v) > 0 {
		q.tenant = string(v[:min(len(v), tenantBytesMax)])
	}
	if v := header(h, c.TimeoutHeader); len(v) > 0 {
		d, err := parseTimeout(string(v))
		if err != nil {
			return q, openai.BadRequest("", openai.CodeInvalidValue, "The header %s must be a time over 0, in seconds as 30 or 1.5, or with its unit as 500ms or 2m.", c.TimeoutHeader)
		}
		q.timeout = min(q.timeout, d)
	}
	return q, nil
}

// peeker gives the values of headers, nil where there is none.
type peeker interface{ Peek(name string) []byte }

// header is what a header has that is asked for; "-" and "" are no names.
func header(h peeker, name string) []byte {
	if name == "" || name == "-" {
		return nil
	}
	return h.Peek(name)
}

// parsePriority reads a priority. Those beyond the bounds count as the bounds.
func parsePriority(v []byte) (int, error) {
	n, err := strconv.Atoi(strings.TrimSpace(string(v)))
	if errors.Is(err, strconv.ErrRange) {
		err = nil
	}
	return min(max(n, -admission.PriorityMax), admission.PriorityMax), err
}

// parseTimeout reads a time in seconds, or with a unit.
func parseTimeout(s string) (time.Duration, error) {
	s = strings.TrimSpace(s)
	d, err := time.ParseDuration(s)
	if n, ferr := strconv.ParseFloat(s, 64); ferr == nil {
		if math.IsNaN(n) {
			return 0, errors.New("not a number")
		}
		d, err = time.Duration(min(max(n, 0), math.MaxInt32)*float64(time.Second)), nil
	}
	if err != nil {
		return 0, fmt.Errorf("read a time: %w", err)
	}
	if d <= 0 {
		return 0, errors.New("not over 0")
	}
	return d, nil
}

// admit waits for the request's turn. When it returns nil, the pass must be given back.
func (q *request) admit(ctx context.Context) (admission.Pass, error) {
	if p, ok := q.r.admission.TryEnter(q.body.N); ok {
		q.r.metrics.queued.Observe(0)
		return p, nil
	}
	began := time.Now()
	p, err := q.r.admission.Enter(ctx, admission.Request{
		Places: q.body.N, Bytes: int64(q.body.Len()), Tokens: q.promptTokens() + int64(q.body.N)*answerTokens, Priority: q.rank.priority, Tenant: q.rank.tenant,
	})
	q.waited = time.Since(began)
	q.r.metrics.queued.Observe(seconds(q.waited))
	var no *admission.Refusal
	switch {
	case errors.As(err, &no):
		q.r.refusals[no.Why].Inc()
		return p, refusal(no)
	case errors.Is(err, errDeadline):
		q.r.refusals[whyDeadline].Inc()
		return p, errQueueDeadline
	}
	return p, err
}

// refusal is what a client is told.
func refusal(no *admission.Refusal) *openai.Error {
	switch no.Why {
	case admission.Displaced:
		return openai.TooManyRequests(no.RetryAfter, "The router's queue is full, and a request of more right to this one's room has come. No engine has seen it. Please retry.")
	case admission.Late:
		e := openai.Unavailable("The request waited %s for its turn, longer than the router lets any. No engine has seen it. Please retry.", no.Waited.Round(time.Millisecond))
		e.RetryAfter = no.RetryAfter
		return e
	}
	return openai.TooManyRequests(no.RetryAfter, "The router serves and queues as many requests as it may. Please retry.")
}

// checkAdmission fills in what is not set, and says what cannot be.
func (c *Config) checkAdmission() error {
	if c.MaxQueueBytes == 0 {
		c.MaxQueueBytes = max(256<<20, int64(c.MaxBodyBytes))
	}
	if c.MaxQueueBytes < int64(c.MaxBodyBytes) {
		return fmt.Errorf("configure router: the queue may hold %d bytes, less than the %d of one body, which could never wait: raise max-queue-bytes or lower max-body", c.MaxQueueBytes, c.MaxBodyBytes)
	}
	if c.QueueTimeout < 0 {
		return fmt.Errorf("configure router: queue-timeout %s is negative; 0 is none", c.QueueTimeout)
	}
	for name, w := range c.TenantWeights {
		if name == "" || !(w >= weightMin && w <= weightMax) {
			return fmt.Errorf("configure router: tenant %q has weight %g; a weight is from %g to %g, and a tenant has a name", name, w, weightMin, float64(weightMax))
		}
	}
	return nil
}
