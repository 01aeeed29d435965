package router

import (
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics of a router. Labels have few values only: nothing a client sends becomes one.
type metrics struct {
	requests     *prometheus.CounterVec
	redispatches *prometheus.CounterVec
	cancels      *prometheus.CounterVec
	upstream     *prometheus.CounterVec
	decisions    *prometheus.CounterVec
	attempts     *prometheus.CounterVec
	recalls      *prometheus.CounterVec
	checks       *prometheus.CounterVec
	aborts       *prometheus.CounterVec
	inFlight     *prometheus.GaugeVec
	ttft         *prometheus.HistogramVec
	e2e          *prometheus.HistogramVec
	itl          prometheus.Histogram
	queued       prometheus.Histogram
	overhead     prometheus.Histogram
	tokens       prometheus.Counter
	phases       [stateCount]prometheus.Gauge // of inFlight
}

func newMetrics(reg *prometheus.Registry) *metrics {
	opts := func(name, help string) prometheus.CounterOpts {
		return prometheus.CounterOpts{Namespace: "headrace", Subsystem: "router", Name: name, Help: help}
	}
	histogram := func(name, help string, first, factor float64, n int) prometheus.HistogramOpts {
		return prometheus.HistogramOpts{Namespace: "headrace", Subsystem: "router", Name: name, Help: help, Buckets: prometheus.ExponentialBuckets(first, factor, n)}
	}
	m := &metrics{
		requests:     prometheus.NewCounterVec(opts("requests_total", "Requests answered, by endpoint, status code (499: the client left) and how they ended."), []string{"endpoint", "code", "outcome"}),
		redispatches: prometheus.NewCounterVec(opts("redispatches_total", "Requests dispatched again, by what was wrong with the attempt before."), []string{"reason"}),
		cancels:      prometheus.NewCounterVec(opts("cancels_total", "Requests cancelled, by the phase they were in and why."), []string{"phase", "cause"}),
		upstream:     prometheus.NewCounterVec(opts("upstream_errors_total", "Attempts that failed, by role and how."), []string{"reason"}),
		decisions:    prometheus.NewCounterVec(opts("decisions_total", "Pairing decisions, by policy and kind."), []string{"policy", "kind"}),
		attempts:     prometheus.NewCounterVec(opts("attempts_total", "Dispatches, by the workers' dialect and how they ended."), []string{"dialect", "result"}),
		recalls:      prometheus.NewCounterVec(opts("recalls_total", "Tickets that daemons were told are void, by what became of them there."), []string{"verdict"}),
		checks:       prometheus.NewCounterVec(opts("checks_total", "Tickets that decode's daemon was asked for because decode had not begun behind prefill's answer, by what became of them there; remembered: nobody would have presented them."), []string{"verdict"}),
		aborts:       prometheus.NewCounterVec(opts("aborts_total", "Times that SGLang engines were told that a request is void, by what became of it."), []string{"result"}),
		inFlight:     prometheus.NewGaugeVec(prometheus.GaugeOpts{Namespace: "headrace", Subsystem: "router", Name: "requests_in_flight", Help: "Requests being served, by phase."}, []string{"phase"}),
		ttft:         prometheus.NewHistogramVec(histogram("time_to_first_token_seconds", "From the request's arrival to its first text, by endpoint.", 0.001, 2, 18), []string{"endpoint"}),
		e2e:          prometheus.NewHistogramVec(histogram("request_duration_seconds", "From the request's arrival to its end, by endpoint.", 0.001, 2, 19), []string{"endpoint"}),
		itl:          prometheus.NewHistogram(histogram("inter_token_latency_seconds", "Between tokens handed to the client, averaged over those that came together.", 0.0005, 2, 14)),
		queued:       prometheus.NewHistogram(histogram("queue_time_seconds", "Waiting for admission.", 0.0001, 4, 12)),
		overhead:     prometheus.NewHistogram(histogram("overhead_seconds", "The router's own time from a request's arrival to its first dispatch, queueing left out.", 0.00001, 2, 16)),
		tokens:       prometheus.NewCounter(opts("generated_tokens_total", "Tokens handed to clients.")),
	}
	reg.MustRegister(m.requests, m.redispatches, m.cancels, m.upstream, m.decisions, m.attempts, m.recalls, m.checks, m.aborts, m.inFlight, m.ttft, m.e2e, m.itl, m.queued, m.overhead, m.tokens)
	for s := state(0); s < stateDone; s++ {
		m.phases[s] = m.inFlight.WithLabelValues(s.String())
	}
	return m
}

func (m *metrics) request(endpoint string, code int, outcome string) {
	m.requests.WithLabelValues(endpoint, strconv.Itoa(code), outcome).Inc()
}

func seconds(d time.Duration) float64 { return d.Seconds() }
