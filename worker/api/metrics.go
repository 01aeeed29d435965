package api

import (
	"net/http"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Buckets are vLLM's, so that its dashboards work.
var (
	ttftBuckets = []float64{0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560}
	itlBuckets  = []float64{0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80}
	e2eBuckets  = []float64{0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680}
	sizeBuckets = []float64{1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000}
)

// metrics are under vLLM's names. Each worker has a registry of its own, so that several live in one process.
type metrics struct {
	registry *prometheus.Registry
	engine   Engine
	stats    []stat

	success                           *prometheus.CounterVec
	ttft, itl, e2e                    prometheus.Histogram
	queue, prefill, decode, inference prometheus.Histogram
	perToken                          prometheus.Histogram
	promptTokens, generationTokens    prometheus.Histogram
}

// stat is a figure that the engine keeps.
type stat struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
	get  func(*Stats) float64
}

func newMetrics(e Engine, model ModelInfo) *metrics {
	labels := prometheus.Labels{"engine": "0", "model_name": model.ID}
	m := &metrics{registry: prometheus.NewRegistry(), engine: e}
	histogram := func(name, help string, buckets []float64) prometheus.Histogram {
		h := prometheus.NewHistogram(prometheus.HistogramOpts{Name: "vllm:" + name, Help: help, ConstLabels: labels, Buckets: buckets})
		m.registry.MustRegister(h)
		return h
	}
	m.ttft = histogram("time_to_first_token_seconds", "Histogram of time to first token in seconds.", ttftBuckets)
	m.itl = histogram("inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", itlBuckets)
	m.perToken = histogram("request_time_per_output_token_seconds", "Histogram of time_per_output_token_seconds per request.", itlBuckets)
	m.e2e = histogram("e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", e2eBuckets)
	m.queue = histogram("request_queue_time_seconds", "Histogram of time spent in WAITING phase for request.", e2eBuckets)
	m.prefill = histogram("request_prefill_time_seconds", "Histogram of time spent in PREFILL phase for request.", e2eBuckets)
	m.decode = histogram("request_decode_time_seconds", "Histogram of time spent in DECODE phase for request.", e2eBuckets)
	m.inference = histogram("request_inference_time_seconds", "Histogram of time spent in RUNNING phase for request.", e2eBuckets)
	m.promptTokens = histogram("request_prompt_tokens", "Number of prefill tokens processed.", sizeBuckets)
	m.generationTokens = histogram("request_generation_tokens", "Number of generation tokens processed.", sizeBuckets)
	m.success = prometheus.NewCounterVec(prometheus.CounterOpts{Name: "vllm:request_success_total",
		Help: "Count of successfully processed requests.", ConstLabels: labels}, []string{"finished_reason"})
	for _, reason := range []string{"stop", "length", "abort", "error"} {
		m.success.WithLabelValues(reason)
	}
	info := prometheus.NewGauge(prometheus.GaugeOpts{Name: "vllm:cache_config_info", Help: "Information of the LLMEngine CacheConfig",
		ConstLabels: prometheus.Labels{"engine": "0", "block_size": strconv.Itoa(model.BlockTokens), "num_gpu_blocks": strconv.Itoa(model.Blocks),
			"cache_dtype": "auto", "enable_prefix_caching": "True"}})
	info.Set(1)
	m.addStats(labels)
	m.registry.MustRegister(m.success, info, m, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

func (m *metrics) addStats(labels prometheus.Labels) {
	add := func(kind prometheus.ValueType, name, help string, get func(*Stats) float64) {
		m.stats = append(m.stats, stat{prometheus.NewDesc("vllm:"+name, help, nil, labels), kind, get})
	}
	gauge, counter := prometheus.GaugeValue, prometheus.CounterValue
	add(gauge, "num_requests_running", "Number of requests in model execution batches.", func(s *Stats) float64 { return float64(s.Running) })
	add(gauge, "num_requests_waiting", "Number of requests waiting to be processed.", func(s *Stats) float64 { return float64(s.Waiting) })
	add(gauge, "kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", func(s *Stats) float64 { return s.KVUsage })
	add(counter, "prefix_cache_queries_total", "Prefix cache queries, in terms of number of queried tokens.", func(s *Stats) float64 { return float64(s.PrefixQueries) })
	add(counter, "prefix_cache_hits_total", "Prefix cache hits, in terms of number of cached tokens.", func(s *Stats) float64 { return float64(s.PrefixHits) })
	add(counter, "external_prefix_cache_queries_total", "External prefix cache queries from KV connector cross-instance cache sharing, in terms of number of queried tokens.", func(s *Stats) float64 { return float64(s.ExternalQueries) })
	add(counter, "external_prefix_cache_hits_total", "External prefix cache hits from KV connector cross-instance cache sharing, in terms of number of cached tokens.", func(s *Stats) float64 { return float64(s.ExternalHits) })
	add(counter, "prompt_tokens_total", "Number of prefill tokens processed.", func(s *Stats) float64 { return float64(s.PromptTokens) })
	add(counter, "generation_tokens_total", "Number of generation tokens processed.", func(s *Stats) float64 { return float64(s.GenerationTokens) })
	add(counter, "num_preemptions_total", "Cumulative number of preemption from the engine.", func(s *Stats) float64 { return float64(s.Preemptions) })
}

// Describe implements prometheus.Collector.
func (m *metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, s := range m.stats {
		ch <- s.desc
	}
}

// Collect implements prometheus.Collector: one look at the engine a scrape.
func (m *metrics) Collect(ch chan<- prometheus.Metric) {
	now := m.engine.Stats()
	for _, s := range m.stats {
		ch <- prometheus.MustNewConstMetric(s.desc, s.kind, s.get(&now))
	}
}

func (m *metrics) handler() http.Handler {
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{Registry: m.registry})
}

// watch times one request.
type watch struct {
	m      *metrics
	began  time.Time
	decode bool // this leg did not begin the request: it knows no time to first token

	prefilling, first, last time.Time
	tokens                  int
}

func (w *watch) phase(name string) {
	if name == PhasePrefilling && w.prefilling.IsZero() {
		w.prefilling = time.Now()
		w.m.queue.Observe(w.prefilling.Sub(w.began).Seconds())
	}
}

func (w *watch) token() {
	now := time.Now()
	if w.tokens == 0 {
		w.first = now
		if !w.decode {
			w.m.ttft.Observe(now.Sub(w.began).Seconds())
			if !w.prefilling.IsZero() {
				w.m.prefill.Observe(now.Sub(w.prefilling).Seconds())
			}
		}
	} else {
		w.m.itl.Observe(now.Sub(w.last).Seconds())
	}
	w.tokens++
	w.last = now
}

// end counts the request. reason is empty for a leg that handed it on: whoever ends it counts it.
func (w *watch) end(reason string, promptTokens, completionTokens int) {
	now := time.Now()
	if w.tokens > 0 {
		w.m.decode.Observe(w.last.Sub(w.first).Seconds())
		if w.tokens > 1 {
			w.m.perToken.Observe(w.last.Sub(w.first).Seconds() / float64(w.tokens-1))
		}
	}
	if !w.prefilling.IsZero() {
		w.m.inference.Observe(now.Sub(w.prefilling).Seconds())
	}
	if reason == "" {
		return
	}
	w.m.success.WithLabelValues(reason).Inc()
	w.m.e2e.Observe(now.Sub(w.began).Seconds())
	w.m.promptTokens.Observe(float64(promptTokens))
	w.m.generationTokens.Observe(float64(completionTokens))
}
