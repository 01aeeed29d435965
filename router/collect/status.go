package collect

import (
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Status is what is known of a worker, for people to read.
type Status struct {
	// AgeMS is how old the figures are; they are shown however old.
	AgeMS   int64     `json:"age_ms"`
	ReadAt  time.Time `json:"read_at,omitzero"` // when they were read, by this router's clock
	Stale   bool      `json:"stale,omitempty"`  // too old to be used
	Running int64     `json:"running"`
	Waiting int64     `json:"waiting"`
	Foreign int64     `json:"foreign"`  // requests that this router did not give it
	KVUsage float64   `json:"kv_usage"` // -1: not said
	Ranks   int       `json:"ranks,omitempty"`

	PrefixQueries   int64 `json:"prefix_queries"`
	PrefixHits      int64 `json:"prefix_hits"`
	ExternalQueries int64 `json:"external_queries"`
	ExternalHits    int64 `json:"external_hits"`
	Preemptions     int64 `json:"preemptions"`
	Blocks          int64 `json:"blocks,omitempty"`
	BlockTokens     int64 `json:"block_tokens,omitempty"`
	// Timing is nil where nothing was timed yet, or the worker does not say it.
	Timing *Timing `json:"timing,omitempty"`

	Looks    uint64 `json:"looks"`
	Failures uint64 `json:"failures"`
	Problem  string `json:"problem,omitempty"` // of the last look

	Events []EventStatus `json:"events,omitempty"` // of its publishers of KV events, by rank
}

// Status tells what is known of a worker; nil before anything was tried.
func (c *Collector) Status(worker string) *Status {
	f := (*c.followers.Load())[worker]
	if f == nil {
		return nil
	}
	return f.status()
}

func (f *follower) status() *Status {
	s := &Status{Looks: f.looks.Load(), Failures: f.failures.Load(), KVUsage: -1, AgeMS: -1, Stale: true}
	if p := f.problem.Load(); p != nil {
		s.Problem = *p
	}
	if fig := f.figures.Load(); fig != nil {
		age := time.Since(fig.At)
		s.AgeMS, s.ReadAt, s.Stale = age.Milliseconds(), fig.At, age > f.c.cfg.Stale
		s.Running, s.Waiting, s.Foreign, s.KVUsage, s.Ranks = fig.Running, fig.Waiting, fig.Foreign(), fig.KVUsage, fig.Ranks
		s.PrefixQueries, s.PrefixHits, s.ExternalQueries, s.ExternalHits = fig.PrefixQueries, fig.PrefixHits, fig.ExternalQueries, fig.ExternalHits
		s.Preemptions, s.Blocks, s.BlockTokens = fig.Preemptions, fig.Blocks, fig.BlockTokens
		if t := fig.Timing; t != (Timing{}) {
			s.Timing = &t
		}
	}
	if streams := f.streams.Load(); streams != nil {
		for _, x := range *streams {
			s.Events = append(s.Events, x.status())
		}
	}
	return s
}

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("headrace_router_worker_"+name, help, append([]string{"worker"}, labels...), nil)
}

var (
	descAge      = desc("scrape_age_seconds", "Since a worker's metrics were last read.")
	descLooks    = desc("scrapes_total", "Looks at a worker's metrics.")
	descFailures = desc("scrape_failures_total", "Looks at a worker's metrics that failed.")
	descRunning  = desc("requests_running", "Requests that a worker says it computes; absent when that is stale.")
	descWaiting  = desc("requests_waiting", "Requests that a worker says wait in it; absent when that is stale.")
	descUsage    = desc("kv_cache_usage", "Part of its KV cache that a worker says requests hold; absent when that is stale.")

	descConnected  = desc("kv_events_connected", "1 while a worker's publisher of KV events is followed.", "rank")
	descBlocks     = desc("kv_blocks", "KV blocks with findable content that a worker has, by its events.", "rank")
	descTokens     = desc("kv_tokens", "Tokens of the KV blocks that a worker has, by its events.", "rank")
	descBatches    = desc("kv_event_batches_total", "Batches of KV events taken in.", "rank")
	descEvents     = desc("kv_events_total", "KV events taken in; stored and removed count blocks.", "rank", "type")
	descGaps       = desc("kv_event_gaps_total", "Gaps in the sequence numbers of KV events.", "rank")
	descReplays    = desc("kv_event_replays_total", "Replays of KV events asked for, at connecting, for gaps and in silence.", "rank")
	descLost       = desc("kv_event_lost_batches_total", "Batches of KV events that nobody has any more.", "rank")
	descResets     = desc("kv_event_resets_total", "How often all that was known of a worker's blocks was void.", "rank")
	descUnreadable = desc("kv_event_unreadable_batches_total", "Batches of KV events that could not be read.", "rank")
)

var descsAll = []*prometheus.Desc{descAge, descLooks, descFailures, descRunning, descWaiting, descUsage, descConnected, descBlocks, descTokens,
	descBatches, descEvents, descGaps, descReplays, descLost, descResets, descUnreadable}

// Describe implements prometheus.Collector.
func (c *Collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range descsAll {
		ch <- d
	}
}

// Collect implements prometheus.Collector. A worker that has gone leaves nothing behind.
func (c *Collector) Collect(ch chan<- prometheus.Metric) {
	c.each(func(f *follower) {
		s := f.status()
		put := func(d *prometheus.Desc, kind prometheus.ValueType, v float64) {
			ch <- prometheus.MustNewConstMetric(d, kind, v, f.w.ID)
		}
		put(descLooks, prometheus.CounterValue, float64(s.Looks))
		put(descFailures, prometheus.CounterValue, float64(s.Failures))
		if s.AgeMS >= 0 {
			put(descAge, prometheus.GaugeValue, float64(s.AgeMS)/1000)
		}
		for i := range s.Events {
			s.Events[i].collect(ch, f.w.ID)
		}
		if s.Stale {
			return
		}
		put(descRunning, prometheus.GaugeValue, float64(s.Running))
		put(descWaiting, prometheus.GaugeValue, float64(s.Waiting))
		if s.KVUsage >= 0 {
			put(descUsage, prometheus.GaugeValue, s.KVUsage)
		}
	})
}

func (e *EventStatus) collect(ch chan<- prometheus.Metric, worker string) {
	rank := strconv.Itoa(e.Rank)
	gauge := func(d *prometheus.Desc, v int64) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, float64(v), worker, rank)
	}
	counter := func(d *prometheus.Desc, v uint64, more ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), append([]string{worker, rank}, more...)...)
	}
	connected := int64(0)
	if e.connected {
		connected = 1
	}
	gauge(descConnected, connected)
	gauge(descBlocks, e.Blocks)
	gauge(descTokens, e.Tokens)
	counter(descBatches, e.Batches)
	counter(descEvents, e.Stored, "stored")
	counter(descEvents, e.Removed, "removed")
	counter(descEvents, e.Cleared, "cleared")
	counter(descEvents, e.Ignored, "unknown")
	counter(descGaps, e.Gaps)
	counter(descReplays, e.Replays)
	counter(descLost, e.Lost)
	counter(descResets, e.Resets)
	counter(descUnreadable, e.Unreadable)
}
