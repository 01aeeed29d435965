package operate

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

// Metrics are a planner's. nil is none.
type Metrics struct {
	engines, waiting, running, usage *prometheus.GaugeVec
	gpus, gpusMin, gpusMax           prometheus.Gauge
	leader, changing                 prometheus.Gauge
	wanted                           *prometheus.GaugeVec
	decisions, failures              prometheus.Counter
	changes                          *prometheus.CounterVec
	starts, drains                   *prometheus.HistogramVec
	gaveUps                          *prometheus.CounterVec
}

// seconds are bounds from engines that start at once to those that load for minutes.
var seconds = prometheus.ExponentialBuckets(0.1, 2, 14)

// NewMetrics registers them.
func NewMetrics(reg prometheus.Registerer) *Metrics {
	const prefix = "headrace_planner_"
	auto := promauto.With(reg)
	gauge := func(name, help string) prometheus.Gauge {
		return auto.NewGauge(prometheus.GaugeOpts{Name: prefix + name, Help: help})
	}
	gauges := func(name, help string, labels ...string) *prometheus.GaugeVec {
		return auto.NewGaugeVec(prometheus.GaugeOpts{Name: prefix + name, Help: help}, labels)
	}
	counter := func(name, help string) prometheus.Counter {
		return auto.NewCounter(prometheus.CounterOpts{Name: prefix + name, Help: help})
	}
	counters := func(name, help string, labels ...string) *prometheus.CounterVec {
		return auto.NewCounterVec(prometheus.CounterOpts{Name: prefix + name, Help: help}, labels)
	}
	histograms := func(name, help string) *prometheus.HistogramVec {
		return auto.NewHistogramVec(prometheus.HistogramOpts{Name: prefix + name, Help: help, Buckets: seconds}, []string{"role"})
	}
	return &Metrics{
		engines: gauges("engines", "Engines, by role and state: ready, starting, draining (and those that end).", "role", "state"),
		wanted:  gauges("wanted_engines", "Engines that the last decision wanted, by role.", "role"),
		waiting: gauges("requests_waiting", "Requests that wait in engines, by role, as seen the last time.", "role"),
		running: gauges("requests_running", "Requests that engines have and that do not wait, by role, as seen the last time.", "role"),
		usage:   gauges("kv_cache_usage", "Part of the KV caches that requests hold, the mean over ready engines, by role.", "role"),
		gpus:    gauge("gpus", "GPUs that engines have, those that start and drain included."),
		gpusMin: gauge("gpus_min", "The budget's least."), gpusMax: gauge("gpus_max", "The budget: never more."),
		leader:    gauge("leader", "1 while this planner decides; others of the same namespace and model stand by."),
		changing:  gauge("changing", "1 while a change is in progress: nothing else is decided meanwhile."),
		decisions: counter("decisions_total", "Decisions that change something."),
		failures:  counter("failures_total", "Intervals in which nothing could be decided or done: routers, registry or connector did not answer."),
		changes:   counters("changes_total", "Changes that have ended, by result: done or failed.", "result"),
		starts:    histograms("start_seconds", "From the order to start an engine until requests reach it."),
		drains:    histograms("drain_seconds", "From the decision to stop an engine until it has no request."),
		gaveUps:   counters("starts_failed_total", "Engines that were given up because they did not serve in time, by role.", "role"),
	}
}

func (m *Metrics) failed() {
	if m != nil {
		m.failures.Inc()
	}
}

func (m *Metrics) decided() {
	if m != nil {
		m.decisions.Inc()
	}
}

func (m *Metrics) changed(d *Decided) {
	if m == nil {
		return
	}
	result := "done"
	if d.Result != result {
		result = "failed"
	}
	m.changes.WithLabelValues(result).Inc()
}

func (m *Metrics) started(role string, took time.Duration) {
	if m != nil {
		m.starts.WithLabelValues(role).Observe(took.Seconds())
	}
}

func (m *Metrics) drained(role string, took time.Duration) {
	if m != nil {
		m.drains.WithLabelValues(role).Observe(took.Seconds())
	}
}

func (m *Metrics) gaveUp(role string) {
	if m != nil {
		m.gaveUps.WithLabelValues(role).Inc()
	}
}

// show sets the gauges.
func (m *Metrics) show(s *Status) {
	if m == nil {
		return
	}
	is := func(g prometheus.Gauge, yes bool) {
		g.Set(0)
		if yes {
			g.Set(1)
		}
	}
	is(m.leader, s.Leader)
	m.gpus.Set(float64(s.GPUs))
	m.gpusMin.Set(float64(s.Limits.MinGPUs))
	m.gpusMax.Set(float64(s.Limits.MaxGPUs))
	is(m.changing, len(s.Decisions) > 0 && s.Decisions[0].Result == inProgress)
	for i := range s.Pools {
		p := &s.Pools[i]
		for state, n := range map[string]int{Ready: p.Ready, Starting: p.Starting, Draining: p.Draining} {
			m.engines.WithLabelValues(p.Role, state).Set(float64(n))
		}
		m.waiting.WithLabelValues(p.Role).Set(float64(p.Waiting))
		m.running.WithLabelValues(p.Role).Set(float64(p.Running))
		m.usage.WithLabelValues(p.Role).Set(p.KVUsage)
		if len(s.Decisions) > 0 {
			m.wanted.WithLabelValues(p.Role).Set(float64(*in(&s.Decisions[0].Want, p.Role)))
		}
	}
}
