package operate

import (
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/headrace/headrace/internal/metricstest"
	"github.com/headrace/headrace/scheduler/connector"
)

// TestMetricsTable holds the page about metrics against what there is.
func TestMetricsTable(t *testing.T) {
	reg := prometheus.NewRegistry()
	m := NewMetrics(reg)
	m.started(connector.Decode, 1)
	m.drained(connector.Decode, 1)
	metricstest.Table(t, reg, "../../docs/metrics.md", "Planner")
}
