package routertest

import (
	"io"
	"net/http"
)

// serveMetrics answers /metrics with text, or as an engine that has nothing to do.
func serveMetrics(w http.ResponseWriter, text *string) {
	if text == nil {
		idle := "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0\n"
		text = &idle
	}
	_, _ = io.WriteString(w, *text)
}
