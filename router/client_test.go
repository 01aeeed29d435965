package router

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/headrace/headrace/router/pairing"
	"github.com/headrace/headrace/router/routertest"
)

// dial opens a raw connection.
func (h *harness) dial() net.Conn {
	h.t.Helper()
	c, err := net.Dial("tcp", h.addr)
	if err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(func() { c.Close() })
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		h.t.Fatal(err)
	}
	return c
}

func post(body string, header ...string) string {
	return fmt.Sprintf("POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n%s\r\n%s", len(body), strings.Join(append(header, ""), "\r\n"), body)
}

// exchange sends raw bytes and reads n responses.
func (h *harness) exchange(raw string, n int) []*answer {
	h.t.Helper()
	c := h.dial()
	go func() { _, _ = io.WriteString(c, raw) }()
	var all []*answer
	br := bufio.NewReader(c)
	for range n {
		resp, err := http.ReadResponse(br, nil)
		if err != nil {
			h.t.Fatal(err)
		}
		all = append(all, read(h.t, resp))
	}
	return all
}

func TestPipelined(t *testing.T) {
	h := start(t, nil, pair("p1", "d1")...)
	health := "GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
	s3, s4, w5 := ask{n: 3, stream: true}, ask{n: 4, stream: true}, ask{n: 5}
	big := ask{n: 6, stream: true, prompt: strings.Repeat("long ", 5000)}
	all := h.exchange(health+post(s3.body())+post(s4.body())+health+post(w5.body())+post(big.body())+health, 7)
	for i, want := range map[int]ask{1: s3, 2: s4, 4: w5, 5: big} {
		all[i].wantWhole(t, want)
	}
	for _, i := range []int{0, 3, 6} {
		if !strings.Contains(all[i].raw, `"ok"`) {
			t.Errorf("answer %d is %s", i, all[i].raw)
		}
	}
}

func TestHTTP10(t *testing.T) {
	h := start(t, nil, pair("p1", "d1")...)
	q := ask{n: 4, stream: true}
	c := h.dial()
	fmt.Fprintf(c, "POST /v1/chat/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n%s", len(q.body()), q.body())
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		t.Fatal(err)
	}
	if resp.TransferEncoding != nil {
		t.Error("chunks for HTTP/1.0")
	}
	read(t, resp).wantWhole(t, q)
}

// TestHangUp has the client leave in each phase.
func TestHangUp(t *testing.T) {
	for _, tt := range []struct {
		phase, who, stage string
		n                 int
		sent              string // what the client has seen by then
	}{
		{phase: "prefilling", who: "prefill", stage: routertest.StageRequest},
		{phase: "transferring", who: "decode", stage: routertest.StageRequest}, // prefill goes ahead alone
		{phase: "prefilling", who: "prefill", stage: routertest.StageBegun},
		{phase: "prefilling", who: "prefill", stage: routertest.StageToken, sent: "data"},
		{phase: "transferring", who: "prefill", stage: routertest.StageTransfer, sent: "data"},
		{phase: "transferring", who: "decode", stage: routertest.StageSettled, sent: "data"},
		{phase: "decoding", who: "decode", stage: routertest.StageToken, n: 4, sent: "data"},
		{phase: "decoding", who: "whole", stage: routertest.StageToken, n: 4, sent: "data"},
	} {
		t.Run(fmt.Sprintf("%s-%s-%s", tt.phase, tt.who, tt.stage), func(t *testing.T) {
			both(t, func(t *testing.T, stream bool) {
				ws := pair("p1", "d1")
				if tt.who == "whole" {
					ws = ws[1:]
				}
				at := make(chan struct{}, 1)
				for _, w := range ws {
					w.Fault = func(c *routertest.Call, stage string, n int) routertest.Action {
						if c.KV.Role == tt.who && stage == tt.stage && n == tt.n {
							at <- struct{}{}
							return routertest.Wait
						}
						return routertest.Go
					}
				}
				h := start(t, nil, ws...)
				c := h.dial()
				if _, err := io.WriteString(c, post(ask{n: 9, stream: stream}.body())); err != nil {
					t.Fatal(err)
				}
				<-at
				h.until("the phase", func() bool {
					for i := state(0); i < stateDone; i++ {
						if i.String() == tt.phase {
							return value(h.r.metrics.phases[i]) == 1
						}
					}
					return false
				})
				if stream && tt.sent != "" {
					if _, err := io.ReadFull(c, make([]byte, 200)); err != nil {
						t.Fatal(err)
					}
				}
				c.Close()
				h.quiet()
				if m := h.r.metrics.cancels.WithLabelValues(tt.phase, "client_gone"); !h.counted(m, 1) {
					t.Errorf("counted %v cancels in %s", value(m), tt.phase)
				}
			})
		})
	}
}

// TestHangUpQueued has a client leave that waits for its turn.
func TestHangUpQueued(t *testing.T) {
	ws := pair("d1")
	at := make(chan struct{}, 1)
	ws[0].Fault = func(_ *routertest.Call, stage string, _ int) routertest.Action {
		if stage == routertest.StageBegun {
			at <- struct{}{}
			return routertest.Wait
		}
		return routertest.Go
	}
	h := start(t, func(c *Config) { c.MaxConcurrent, c.MaxQueue = 1, 1 }, ws...)
	first, second := h.dial(), h.dial()
	_, _ = io.WriteString(first, post(ask{n: 9, stream: true}.body()))
	<-at
	_, _ = io.WriteString(second, post(ask{n: 9, stream: true}.body()))
	h.until("the second to wait", func() bool { return h.r.Status().Queued == 1 })
	a := h.do(ask{n: 1})
	if a.status != 429 || a.header.Get("Retry-After") == "" || a.code != "rate_limit_exceeded" {
		t.Errorf("over the queue: %+v", a)
	}
	second.Close()
	h.until("the second to be gone", func() bool { return h.r.Status().Queued == 0 })
	if m := h.r.metrics.cancels.WithLabelValues("queued", "client_gone"); !h.counted(m, 1) {
		t.Errorf("counted %v", value(m))
	}
	if ws[0].Calls() != 1 {
		t.Error("a queued request was dispatched")
	}
	first.Close()
	h.quiet()
}

func TestQueueGoesOn(t *testing.T) {
	h := start(t, func(c *Config) { c.MaxConcurrent = 1 }, pair("p1", "d1")...)
	t.Run("group", func(t *testing.T) {
		for range 16 {
			t.Run("", func(t *testing.T) {
				t.Parallel()
				q := ask{n: 5, stream: true}
				h.do(q).wantWhole(t, q)
			})
		}
	})
}

// TestSlowReader has a client that takes nothing.
func TestSlowReader(t *testing.T) {
	h := start(t, func(c *Config) { c.WriteTimeout = 100 * time.Millisecond }, pair("d1")...)
	c := h.dial()
	if err := c.(*net.TCPConn).SetReadBuffer(4096); err != nil {
		t.Fatal(err)
	}
	_, _ = io.WriteString(c, post(ask{n: 60000, stream: true}.body()))
	h.within(6*patience, "the router to give up", func() bool { // the kernel takes megabytes first, an event at a time
		return value(h.r.metrics.cancels.WithLabelValues("decoding", "client_slow")) == 1
	})
	h.quiet()
}

func TestRefusals(t *testing.T) {
	h := start(t, func(c *Config) { c.MaxBodyBytes = 1 << 20; c.APIKeys = []string{"one", "two"} }, pair("p1", "d1")...)
	key := "Authorization: Bearer two"
	for _, tt := range []struct {
		name, raw string
		status    int
		code      string
		header    string
	}{
		{name: "path", raw: "GET /nowhere HTTP/1.1\r\nHost: x\r\n\r\n", status: 404, code: "not_found"},
		{name: "method", raw: "GET /v1/completions HTTP/1.1\r\nHost: x\r\n" + key + "\r\n\r\n", status: 405, code: "method_not_allowed", header: "Allow"},
		{name: "method of health", raw: "DELETE /health HTTP/1.1\r\nHost: x\r\n\r\n", status: 405, code: "method_not_allowed", header: "Allow"},
		{name: "no key", raw: post("{}"), status: 401, code: "invalid_api_key"},
		{name: "wrong key", raw: post("{}", "Authorization: Bearer three"), status: 401, code: "invalid_api_key"},
		{name: "no scheme", raw: post("{}", "Authorization: one"), status: 401, code: "invalid_api_key"},
		{name: "JSON", raw: post(`{"model":`, key), status: 400, code: "invalid_json"},
		{name: "no body", raw: post(``, key), status: 400, code: "invalid_json"},
		{name: "model", raw: post(`{"model":"other","stream":true}`, key), status: 404, code: "model_not_found"},
		{name: "own transfer parameters", raw: post(`{"model":"fake","kv_transfer_params":{}}`, key), status: 400, code: "unsupported_parameter"},
		{name: "body", raw: post(strings.Repeat(" ", 2<<20), key), status: 413, code: "request_too_large"},
		{name: "header", raw: "GET /health HTTP/1.1\r\nHost: x\r\nX: " + strings.Repeat("x", 20000) + "\r\n\r\n", status: 431},
		{name: "no HTTP", raw: "hello\r\n\r\n", status: 400},
		{name: "two lengths", raw: "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}x", status: 400},
		{name: "model card", raw: "GET /v1/models/other HTTP/1.1\r\nHost: x\r\n" + key + "\r\n\r\n", status: 404, code: "model_not_found"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			a := h.exchange(tt.raw, 1)[0]
			if a.status != tt.status || a.code != tt.code || a.failure == "" {
				t.Errorf("got %d, %+v", a.status, a)
			}
			if tt.header != "" && a.header.Get(tt.header) == "" {
				t.Errorf("no header %s", tt.header)
			}
		})
	}
	for _, k := range []string{"Bearer one", "bearer two"} {
		a := h.exchange(post(ask{n: 2}.body(), "Authorization: "+k), 1)[0]
		a.wantWhole(t, ask{n: 2})
	}
	if got := h.exchange("GET /v1/models/fake HTTP/1.1\r\nHost: x\r\n"+key+"\r\n\r\n", 1)[0]; got.status != 200 || !strings.Contains(got.raw, `"max_model_len":4096`) {
		t.Errorf("model card: %+v", got)
	}
	if got := h.exchange("GET /v1/models HTTP/1.1\r\nHost: x\r\n"+key+"\r\n\r\n", 1)[0]; got.status != 200 || strings.Count(got.raw, `"fake"`) != 2 {
		t.Errorf("models: %+v", got)
	}
}

func TestBigBody(t *testing.T) {
	h := start(t, func(c *Config) { c.Upstream.SilenceTimeout = 4 * patience }, pair("p1", "d1")...) // the fake is slow at reading
	both(t, func(t *testing.T, stream bool) {
		q := ask{n: 3, stream: stream, prompt: strings.Repeat("много ", 1<<20)}
		h.do(q).wantWhole(t, q)
	})
}

func TestWorkersErrors(t *testing.T) {
	ws := pair("p1", "p2", "d1")
	var action atomic.Int64 // a cancelled leg may still be on its way to a worker
	action.Store(int64(routertest.Bad))
	for _, w := range ws {
		w.Fault = func(_ *routertest.Call, stage string, _ int) routertest.Action {
			if stage == routertest.StageRequest {
				return routertest.Action(action.Load())
			}
			return routertest.Go
		}
	}
	h := start(t, nil, ws...)
	both(t, func(t *testing.T, stream bool) {
		if a := h.do(ask{n: 3, stream: stream}); a.status != 400 || !strings.HasPrefix(a.failure, "bad, says") || a.code != "fake" {
			t.Errorf("got %+v", a)
		}
	})
	action.Store(int64(routertest.Busy))
	both(t, func(t *testing.T, stream bool) {
		if a := h.do(ask{n: 3, stream: stream}); a.status != 503 || a.code != "service_unavailable" || a.header.Get("Retry-After") == "" {
			t.Errorf("got %+v", a)
		}
	})
}

func TestNoWorkers(t *testing.T) {
	h := start(t, nil)
	if a := h.do(ask{n: 1}); a.status != 503 || a.header.Get("Retry-After") == "" {
		t.Errorf("got %+v", a)
	}
	ws := pair("d1")
	h.start(ws[0])
	h.source.set(ws...)
	h.until("the worker to be known", func() bool { return len(h.r.Status().Workers) == 1 })
	h.do(ask{n: 1}).wantWhole(t, ask{n: 1})
	h.source.set()
	h.until("the worker to be forgotten", func() bool { return len(h.r.Status().Workers) == 0 })
	if a := h.do(ask{n: 1, stream: true}); a.status != 503 {
		t.Errorf("a model that was there lately: %+v", a)
	}
}

// TestWorkerComesBack kills the only worker in mid-stream; another process takes its place.
func TestWorkerComesBack(t *testing.T) {
	both(t, func(t *testing.T, stream bool) {
		ws := pair("d1")
		dead := make(chan struct{})
		ws[0].Fault = func(_ *routertest.Call, stage string, n int) routertest.Action {
			if stage == routertest.StageToken && n == 3 {
				close(dead)
				return routertest.Die
			}
			return routertest.Go
		}
		h := start(t, nil, ws...)
		go func() {
			<-dead
			h.until("the first to be gone", func() bool { return ws[0].Active() == 0 })
			h.source.set()
			next := &routertest.Worker{Worker: pairing.Worker{ID: "d1", Role: pairing.RoleDecode, Incarnation: "2"}, Cluster: h.cluster}
			if err := next.Start(); err != nil {
				t.Error(err)
			}
			t.Cleanup(next.Stop)
			h.source.set(next)
		}()
		q := ask{n: 9, stream: stream}
		h.do(q).wantWhole(t, q)
	})
}

// TestNobodyListens has workers in the registry that are gone.
func TestNobodyListens(t *testing.T) {
	ws := pair("p1", "d1", "d2", "d3", "d4", "d5")
	h := start(t, nil, ws...)
	for _, w := range ws[2:] {
		w.Stop()
	}
	for range 4 {
		q := ask{n: 4, stream: true}
		h.do(q).wantWhole(t, q)
	}
	ws[0].Stop()
	ws[1].Stop()
	began := time.Now()
	if a := h.do(ask{n: 4, stream: true}); a.status != 503 {
		t.Errorf("got %+v", a)
	}
	if took := time.Since(began); took > patience { // the workers are waited for, for RecoveryTimeout
		t.Errorf("the error took %s", took)
	}
}

func TestDeadline(t *testing.T) {
	ws := pair("p1", "d1")
	var late atomic.Int64
	for _, w := range ws {
		w.Fault = func(c *routertest.Call, stage string, n int) routertest.Action {
			if at := int(late.Load()); at == 0 && stage == routertest.StageBegun || stage == routertest.StageToken && n == at && at > 0 {
				return routertest.Wait
			}
			return routertest.Go
		}
	}
	h := start(t, func(c *Config) { c.RequestTimeout = time.Second }, ws...)
	both(t, func(t *testing.T, stream bool) {
		if a := h.do(ask{n: 9, stream: stream}); a.status != 504 || a.code != "timeout" {
			t.Errorf("got %+v", a)
		}
	})
	h.quiet()
	late.Store(4)
	if a := h.do(ask{n: 9, stream: true}); a.status != 200 || a.code != "timeout" || a.text == "" || a.dones != 0 || a.err == nil {
		t.Errorf("got %+v", a)
	}
}

func TestShutdownDrains(t *testing.T) {
	ws := pair("p1", "d1")
	at, goOn := make(chan struct{}), make(chan struct{})
	ws[1].Fault = func(_ *routertest.Call, stage string, n int) routertest.Action {
		if stage == routertest.StageToken && n == 3 {
			close(at)
			<-goOn
		}
		return routertest.Go
	}
	h := start(t, nil, ws...)
	idle := h.dial() // a connection without a request must not hold the router up
	got := make(chan *answer, 1)
	go func() { got <- h.do(ask{n: 9, stream: true}) }()
	<-at
	other := h.dial()
	fmt.Fprint(other, "GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
	br := bufio.NewReader(other)
	if resp, err := http.ReadResponse(br, nil); err != nil || read(t, resp).status != 200 {
		t.Fatal(err)
	}
	down := make(chan error, 1)
	go func() { down <- h.r.Shutdown(context.Background()) }()
	h.until("the router to stop", h.r.draining)
	fmt.Fprint(other, post(ask{n: 1}.body()))
	if resp, err := http.ReadResponse(br, nil); err != nil || resp.StatusCode != 503 || !resp.Close {
		t.Errorf("while stopping: %v, %v", resp, err)
	}
	close(goOn)
	(<-got).wantWhole(t, ask{n: 9, stream: true})
	if err := <-down; err != nil {
		t.Error(err)
	}
	if _, err := idle.Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("idle connection: %v", err)
	}
}

func TestShutdownCutsOff(t *testing.T) {
	ws := pair("p1", "d1")
	at := make(chan struct{})
	ws[1].Fault = func(_ *routertest.Call, stage string, n int) routertest.Action {
		if stage == routertest.StageToken && n == 3 {
			close(at)
			return routertest.Wait
		}
		return routertest.Go
	}
	h := start(t, nil, ws...)
	got := make(chan *answer, 1)
	go func() { got <- h.do(ask{n: 9, stream: true}) }()
	<-at
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	if err := h.r.Shutdown(ctx); err == nil {
		t.Error("Shutdown does not say that it cut requests off")
	}
	if a := <-got; a.failure == "" || a.dones != 0 {
		t.Errorf("got %+v", a)
	}
}

func TestAdmin(t *testing.T) {
	h := start(t, nil, pair("p1", "d1")...)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go func() { _ = h.r.ServeAdmin(ln) }()
	q := ask{n: 3, stream: true}
	h.do(q).wantWhole(t, q)
	get := func(base, path string) string {
		t.Helper()
		resp, err := h.client.Get("http://" + base + path)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		b, _ := io.ReadAll(resp.Body)
		return fmt.Sprint(resp.StatusCode, " ", string(b))
	}
	h.quiet()
	for path, want := range map[string]string{"/status": `"id": "p1"`, "/debug/decisions": `"decode": "d1"`, "/debug/decisions/none": "404", "/healthz": "ok", "/metrics": "headrace_router_requests_total"} {
		if got := get(ln.Addr().String(), path); !strings.Contains(got, want) {
			t.Errorf("%s: no %q in %s", path, want, got)
		}
	}
	metrics := get(h.addr, "/metrics")
	for _, want := range []string{
		`headrace_router_requests_total{code="200",endpoint="chat",outcome="ok"} 1`, `headrace_router_time_to_first_token_seconds_count{endpoint="chat"} 1`,
		`headrace_router_generated_tokens_total 3`, `headrace_router_requests_in_flight{phase="decoding"} 0`, "headrace_router_overhead_seconds_count 1",
	} {
		if !strings.Contains(metrics, want) {
			t.Errorf("no %s in\n%s", want, metrics)
		}
	}
	if got := get(h.addr, "/status"); !strings.HasPrefix(got, "404") {
		t.Errorf("status on the public listener: %s", got)
	}
}

func TestConfigRefuses(t *testing.T) {
	src := &fleetSource{changed: make(chan struct{})}
	for name, cfg := range map[string]Config{
		"no source": {ClusterKey: []byte("k")}, "no key": {Source: src}, "negative limit": {Source: src, ClusterKey: []byte("k"), MaxQueue: -1},
		"negative timeout": {Source: src, ClusterKey: []byte("k"), RequestTimeout: -1}, "empty key": {Source: src, ClusterKey: []byte("k"), APIKeys: []string{" "}},
	} {
		if _, err := New(cfg); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}
