package router

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/headrace/headrace/internal/metricstest"
	"github.com/headrace/headrace/router/routertest"
)

// TestMetricsTable holds docs/metrics.md.
func TestMetricsTable(t *testing.T) {
	reg := prometheus.NewRegistry()
	h, _ := secured(t, func(c *Config) { joint(c); c.Registry = reg }, pair("p1", "d1")...)
	h.do(ask{n: 2, stream: true})
	metricstest.Table(t, reg, "../docs/metrics.md", "Router")
}

// TestLabelsAreOurs holds that nothing a client sends becomes a label: what it makes up would be a series each, for ever.
func TestLabelsAreOurs(t *testing.T) {
	const made, perRound = "madeup", 24
	reg := prometheus.NewRegistry()
	es := append(engines("vllm", "p1", "d1"), engines("openai", "e1")...)
	for _, e := range es {
		e.Fault = func(c *routertest.EngineCall, stage string, _ int) routertest.Action {
			if stage == routertest.StageRequest && strings.Contains(string(c.Body), "refuse me") {
				return routertest.Bad
			}
			return routertest.Go
		}
	}
	leakCheck(t)
	h := startMixed(t, func(c *Config) {
		joint(c)
		c.Registry, c.TenantHeader, c.PriorityHeader = reg, "X-Tenant", "X-Priority"
	}, pair("p9", "d9"), es)
	before := 0
	for round := range 3 {
		for i := range perRound {
			h.oddRequest(fmt.Sprint(made, round, "-", i), i, round*perRound+i)
		}
		h.until("the requests to be counted", func() bool { return h.r.Status().Active == 0 })
		series := 0
		families, err := reg.Gather()
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range families {
			series += len(f.GetMetric())
			for _, m := range f.GetMetric() {
				for _, l := range m.GetLabel() {
					if strings.Contains(strings.ToLower(l.GetValue()), made) {
						t.Errorf("%s has %s=%q", f.GetName(), l.GetName(), l.GetValue())
					}
				}
			}
		}
		if round > 0 && series >= before+perRound { // a label that is new with each request would make as many
			t.Errorf("%d series after %d more requests, %d before", series, perRound, before)
		}
		before = series
	}
}

// oddRequest sends a request with a word in every place where a client may put one of its own.
func (h *harness) oddRequest(word string, i, number int) {
	h.t.Helper()
	model := "fake"
	if i%4 == 0 {
		model = word
	}
	content := word
	if i%5 == 1 {
		content = "refuse me, " + word
	}
	body := fmt.Sprintf(`{"model":%q,"max_tokens":2,"messages":[{"role":%q,"content":%q}],"user":%q,"session_id":%q,"cache_salt":%q,"service_tier":%q,"stream":%v,"priority":%d,"tools":[{"type":%q}]}`,
		model, word, content, word, word, word, word, i%2 == 0, number, word)
	method, path := http.MethodPost, "/v1/chat/completions"
	switch i % 6 {
	case 2:
		path = "/v1/completions?" + word + "=" + word
	case 3:
		path = "/v1/" + word
	case 4:
		method = strings.ToUpper(word[:6])
	case 5:
		path = "/v1/models/" + word
	}
	req, err := http.NewRequestWithContext(context.Background(), method, "http://"+h.addr+path, strings.NewReader(body))
	if err != nil {
		h.t.Fatal(err)
	}
	for _, name := range []string{"X-Request-Id", "X-Session-Id", "X-Tenant", "User-Agent", "Authorization", "Traceparent", "X-" + word} {
		req.Header.Set(name, word)
	}
	switch {
	case i >= 20: // refused for it
		req.Header.Set("X-Priority", word)
	case i >= 16:
		req.Header.Set("X-Request-Timeout", word)
	default:
		req.Header.Set("X-Priority", fmt.Sprint(number))
		req.Header.Set("X-Request-Timeout", fmt.Sprint(100+number))
	}
	req.Host = word + ".example"
	resp, err := h.client.Do(req)
	if err != nil {
		h.t.Fatal(err)
	}
	read(h.t, resp)
	_ = resp.Body.Close()
}
