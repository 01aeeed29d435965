package node

import (
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/headrace/headrace/internal/metricstest"
	"github.com/headrace/headrace/transfer"
)

// onlyDescribed is a collector that is asked nothing: there is no daemon.
type onlyDescribed struct{ statusCollector }

func (onlyDescribed) Collect(chan<- prometheus.Metric) {}

// TestMetricsTable holds docs/metrics.md.
func TestMetricsTable(t *testing.T) {
	m := newMetrics()
	m.LeaseEnded("source", transfer.LeaseState(0), "tcp", 1, time.Second)
	m.Fenced("source", time.Second, false)
	r := prometheus.NewRegistry()
	r.MustRegister(m.fence, m.lease, m.ended, m.bytes, onlyDescribed{})
	metricstest.Table(t, r, "../../docs/metrics.md", "Node daemon")
}
