package router

import (
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/headrace/headrace/router/dialects"
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
	migrations   *prometheus.CounterVec
	inFlight     *prometheus.GaugeVec
	ttft         *prometheus.HistogramVec
	e2e          *prometheus.HistogramVec
	itl          prometheus.Histogram
	queued       prometheus.Histogram
	overhead     prometheus.Histogram
	tokens       prometheus.Counter
	prompt       prometheus.Counter
	cached       prometheus.Counter
	unlogged     prometheus.Counter
	untraced     prometheus.Counter
	phases       [stateCount]prometheus.Gauge // of inFlight

	// The same as above, as the path of every request finds them.
	answered *labelled[answered, prometheus.Counter]
	decided  *labelled[[2]string, prometheus.Counter] // by policy and kind
	ended    *labelled[attempted, prometheus.Counter]
	first    *labelled[string, prometheus.Observer] // ttft, by endpoint
	whole    *labelled[string, prometheus.Observer] // e2e, by endpoint
}

// answered has the labels of requests.
type answered struct {
	endpoint string
	code     int
	outcome  string
}

// attempted has the labels of attempts.
type attempted struct {
	dialect string
	result  dialects.Result
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
		migrations: prometheus.NewCounterVec(opts("migrations_total", "Streams of engines that are not ours that broke off, by what came of it: resumed (another engine went on from the tokens so far), retold (another was asked again, and what the client had was left out), ended (only the end was missing), "+
			"finished (one of these came to its end), failed (it broke off for good), impossible."), []string{"dialect", "result"}),
		inFlight: prometheus.NewGaugeVec(prometheus.GaugeOpts{Namespace: "headrace", Subsystem: "router", Name: "requests_in_flight", Help: "Requests being served, by phase."}, []string{"phase"}),
		ttft:     prometheus.NewHistogramVec(histogram("time_to_first_token_seconds", "From the request's arrival to its first text, by endpoint.", 0.001, 2, 18), []string{"endpoint"}),
		e2e:      prometheus.NewHistogramVec(histogram("request_duration_seconds", "From the request's arrival to its end, by endpoint.", 0.001, 2, 19), []string{"endpoint"}),
		itl:      prometheus.NewHistogram(histogram("inter_token_latency_seconds", "Between tokens handed to the client, averaged over those that came together.", 0.0005, 2, 14)),
		queued:   prometheus.NewHistogram(histogram("queue_time_seconds", "Waiting for admission.", 0.0001, 4, 12)),
		overhead: prometheus.NewHistogram(histogram("overhead_seconds", "The router's own time from a request's arrival to its first dispatch, queueing left out.", 0.00001, 2, 16)),
		tokens:   prometheus.NewCounter(opts("generated_tokens_total", "Tokens handed to clients.")),
		prompt:   prometheus.NewCounter(opts("prompt_tokens_total", "Tokens of prompts, of requests whose engine told its usage.")),
		cached:   prometheus.NewCounter(opts("cached_prompt_tokens_total", "Those of prompt_tokens_total that the engine had in its cache.")),
		untraced: prometheus.NewCounter(opts("traces_dropped_total", "Requests whose spans were not exported because too many waited.")),
		unlogged: prometheus.NewCounter(opts("access_log_dropped_total", "Lines that the access log lacks because they could not be written in time.")),
	}
	reg.MustRegister(m.requests, m.redispatches, m.cancels, m.upstream, m.decisions, m.attempts, m.recalls, m.checks, m.aborts, m.migrations, m.inFlight, m.ttft, m.e2e, m.itl, m.queued, m.overhead, m.tokens, m.prompt, m.cached, m.untraced, m.unlogged)
	for s := state(0); s < stateDone; s++ {
		m.phases[s] = m.inFlight.WithLabelValues(s.String())
	}
	m.answered = newLabelled(func(k answered) prometheus.Counter {
		return m.requests.WithLabelValues(k.endpoint, strconv.Itoa(k.code), k.outcome)
	})
	m.decided = newLabelled(func(k [2]string) prometheus.Counter { return m.decisions.WithLabelValues(k[0], k[1]) })
	m.ended = newLabelled(func(k attempted) prometheus.Counter {
		return m.attempts.WithLabelValues(k.dialect, resultNames[k.result])
	})
	m.first = newLabelled(func(endpoint string) prometheus.Observer { return m.ttft.WithLabelValues(endpoint) })
	m.whole = newLabelled(func(endpoint string) prometheus.Observer { return m.e2e.WithLabelValues(endpoint) })
	return m
}

func (m *metrics) request(endpoint string, code int, outcome string) {
	m.answered.of(answered{endpoint, code, outcome}).Inc()
}

func seconds(d time.Duration) float64 { return d.Seconds() }
