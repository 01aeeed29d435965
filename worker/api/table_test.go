package api

import (
	"testing"

	"github.com/headrace/headrace/internal/metricstest"
)

// still is an engine that does nothing.
type still struct{ Engine }

func (still) Stats() Stats { return Stats{} }

// TestMetricsTable holds docs/metrics.md.
func TestMetricsTable(t *testing.T) {
	metricstest.Table(t, newMetrics(still{}, ModelInfo{ID: "m"}).registry, "../../docs/metrics.md", "Worker")
}
