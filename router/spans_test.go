package router

import (
	"context"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/headrace/headrace/internal/tracing"
	"github.com/headrace/headrace/internal/tracing/tracingtest"
	"github.com/headrace/headrace/router/pairing"
	"github.com/headrace/headrace/router/routertest"
)

// traced asks with trace headers.
func (h *harness) traced(a ask, parent, state string) *answer {
	h.t.Helper()
	req, err := http.NewRequest(http.MethodPost, "http://"+h.addr+"/v1/chat/completions", strings.NewReader(a.body()))
	if err != nil {
		h.t.Fatal(err)
	}
	if parent != "" {
		req.Header.Set("Traceparent", parent)
		req.Header.Set("Tracestate", state)
	}
	resp, err := h.client.Do(req)
	if err != nil {
		h.t.Fatal(err)
	}
	defer resp.Body.Close()
	return read(h.t, resp)
}

// A client's trace goes through the router: its spans are below the client's, with the decision's numbers, and each has its time.
func TestSpansOfARequest(t *testing.T) {
	const parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	at := tracingtest.Start(t)
	tracer, err := tracing.New(context.Background(), tracing.Config{Endpoint: at.Endpoint, Ratio: 0, Service: "r"})
	if err != nil {
		t.Fatal(err)
	}
	h := startParallel(t, func(c *Config) { c.Tracer = tracer }, pair("p0", "d0")...)
	h.traced(ask{n: 4, stream: true}, parent, "a=1").wantWhole(t, ask{n: 4, stream: true})
	h.traced(ask{n: 4}, "", "").wantWhole(t, ask{n: 4}) // is not sampled: the ratio is 0
	h.quiet()
	h.r.spans.close() // as Shutdown does, before the tracer's end
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := tracer.Close(ctx); err != nil {
		t.Fatal(err)
	}
	got, _ := at.Spans()
	names, ids := map[string]int{}, map[string]string{}
	for _, s := range got {
		names[s.Name]++
		ids[s.Name] = tracingtest.ID(s.SpanId)
		if tracingtest.ID(s.TraceId) != parent[3:35] || tracingtest.Took(s) < 0 || tracingtest.Took(s) > time.Minute {
			t.Errorf("%v", s)
		}
	}
	for _, name := range []string{"chat", "admission", "decision", "attempt", "prefill", "transfer", "decode"} {
		if names[name] != 1 {
			t.Errorf("%d spans %q", names[name], name)
		}
	}
	want := map[string]string{"chat": parent[36:52], "admission": ids["chat"], "decision": ids["chat"], "attempt": ids["chat"], "prefill": ids["attempt"], "transfer": ids["attempt"], "decode": ids["attempt"]}
	for _, s := range got {
		if tracingtest.ID(s.ParentSpanId) != want[s.Name] {
			t.Errorf("%s is below %x, want %s", s.Name, s.ParentSpanId, want[s.Name])
		}
		a := tracingtest.Attributes(s.Attributes)
		switch s.Name {
		case "decision":
			if a["headrace.policy"] != "least-loaded" || a["headrace.reason"] == "" || a["headrace.prompt_tokens"] == "" {
				t.Errorf("%v", a)
			}
		case "attempt":
			if a["headrace.worker.prefill"] != "p0" || a["headrace.worker.decode"] != "d0" || len(s.Events) != 1 {
				t.Errorf("%v, %v", a, s.Events)
			}
		}
	}
	if code, tr := h.requests(parent[3:35]); code != 200 || tr.Requests[0].TraceID != parent[3:35] {
		t.Errorf("by its trace: %d, %+v", code, tr)
	}
}

// Engines get the client's trace, below the attempt's span where one is made.
func TestTraceGoesOnToEngines(t *testing.T) {
	const parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	for _, on := range []bool{false, true} {
		e := &routertest.Engine{Worker: pairing.Worker{ID: "alone", Role: pairing.RoleBoth, Dialect: "openai"}}
		got := make(chan [2]string, 4)
		e.Fault = func(c *routertest.EngineCall, stage string, _ int) routertest.Action {
			if stage == routertest.StageRequest {
				got <- [2]string{c.Header("traceparent"), c.Header("tracestate")}
			}
			return routertest.Go
		}
		h := startMixed(t, func(c *Config) {
			if on {
				c.Tracer = newTracer(t, tracingtest.Start(t))
			}
		}, nil, []*routertest.Engine{e})
		h.traced(ask{n: 2, stream: true}, parent, "a=1")
		x := <-got
		if !on && x[0] != parent || x[1] != "a=1" || on && (x[0][:36] != parent[:36] || x[0][36:52] == parent[36:52] || x[0][52:] != "-01") {
			t.Errorf("traced %v: %q", on, x)
		}
		h.traced(ask{n: 2}, "not a trace", "a=1")
		if x := <-got; !on && x != [2]string{} || on && x[1] != "" {
			t.Errorf("traced %v: a trace that is none became %q", on, x)
		}
	}
}

// newTracer ends with the test, behind the router.
func newTracer(t *testing.T, at *tracingtest.Collector) *tracing.Tracer {
	t.Helper()
	tracer, err := tracing.New(context.Background(), tracing.Config{Endpoint: at.Endpoint, Ratio: 1, Service: "r"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := tracer.Close(ctx); err != nil {
			t.Error(err)
		}
	})
	return tracer
}
