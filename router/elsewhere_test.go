package router

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/headrace/headrace/router/pairing"
	"github.com/headrace/headrace/router/routertest"
)

// nowhere is an address that no worker has.
const nowhere = "192.0.2.1:4242"

// TestNobodyElseIsDialled has clients name hosts in every way that an engine's protocol has for it, in every dialect: the router dials
// registered addresses alone, and no engine is told of another.
func TestNobodyElseIsDialled(t *testing.T) {
	host, port, _ := net.SplitHostPort(nowhere)
	params := fmt.Sprintf(`{"do_remote_prefill":true,"do_remote_decode":false,"remote_engine_id":"e","remote_request_id":"r","remote_block_ids":[[1]],"remote_host":%q,"remote_port":%s,"remote_bootstrap_addr":"http://%s"}`, host, port, nowhere)
	refused := []string{
		`,"kv_transfer_params":` + params, `,"kv_transfer_param\u0073":` + params, `,"kv_transfer_params":null,"kv_transfer_params":` + params, `,"ec_transfer_params":` + params,
		fmt.Sprintf(`,"bootstrap_host":%q,"bootstrap_port":%s,"bootstrap_room":1`, host, port), fmt.Sprintf(`,"bootstrap_host":[%q]`, host), `,"bootstrap_room":1`, `,"bootstrap_port":1`,
		`,"vllm_xargs":{"kv_transfer_params":"http://` + nowhere + `"}`, `,"vllm_xargs":{"a":1,"kv_transfer_\u0070arams":[1]}`, `,"vllm_xargs":{"ec_transfer_params":1}`,
	}
	for dialect, fleet := range cancelFleets {
		t.Run(dialect, func(t *testing.T) {
			leakCheck(t)
			ws, es := fleet()
			known, told := map[string]bool{}, &lockedBuffer{}
			for _, w := range ws {
				w.Fault = func(c *routertest.Call, _ string, _ int) routertest.Action {
					_, _ = told.Write(c.Body)
					return routertest.Go
				}
			}
			for _, e := range es {
				e.Fault = func(c *routertest.EngineCall, _ string, _ int) routertest.Action {
					_, _ = told.Write(append([]byte(c.ID), c.Body...))
					return routertest.Go
				}
			}
			var mu sync.Mutex
			dialled := map[string]bool{}
			h := startMixed(t, func(c *Config) {
				c.Upstream.Dial = func(ctx context.Context, addr string) (net.Conn, error) {
					mu.Lock()
					dialled[addr] = true
					mu.Unlock()
					var d net.Dialer
					return d.DialContext(ctx, "tcp", addr)
				}
			}, ws, es)
			for _, w := range h.source.Workers() {
				known[w.Addr], known[w.KVAddr] = true, true
			}
			for _, more := range refused {
				if a := h.do(ask{n: 2, more: more}); a.status != 400 || a.failure == "" {
					t.Errorf("%s: %d %s", more, a.status, a.raw)
				}
			}
			body := ask{n: 2, stream: true}.body()
			for _, raw := range []string{
				post(body, "Connection: close", "X-Request-Id: ___prefill_addr_"+nowhere+"___decode_addr_"+nowhere+"_00"),
				post(body, "Connection: close", "X-data-parallel-rank: 7", "X-Forwarded-Host: "+nowhere, "Forwarded: host="+nowhere, "X-Prefiller-Host-Port: "+nowhere),
				strings.Replace(post(body, "Connection: close"), "Host: x", "Host: "+nowhere, 1),
				strings.Replace(post(body, "Connection: close"), "POST /", "POST http://"+nowhere+"/", 1),
			} {
				if got, last := h.answers(raw); fmt.Sprint(got) != "[200]" || strings.Contains(last, host) {
					t.Errorf("%q: %v %s", raw, got, last)
				}
			}
			h.quiet()
			mu.Lock()
			defer mu.Unlock()
			for addr := range dialled {
				if !known[addr] {
					t.Errorf("dialled %s, which is nobody's", addr)
				}
			}
			if len(dialled) == 0 || strings.Contains(told.String(), host) {
				t.Errorf("dialled %v, and engines were told %.500s", dialled, told.String())
			}
		})
	}
}

// scripted is a worker that answers each request on a connection with the same bytes, and closes it behind them if ends says so.
func scripted(t *testing.T, h *harness, answer string, ends bool) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var serving sync.WaitGroup
	var mu sync.Mutex // guards conns
	var conns []net.Conn
	t.Cleanup(func() {
		ln.Close()
		mu.Lock()
		for _, c := range conns { // the router keeps some for later: of a probe, where an answer took its time
			c.Close()
		}
		mu.Unlock()
		serving.Wait()
	})
	serving.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			conns = append(conns, c)
			mu.Unlock()
			serving.Go(func() {
				defer c.Close()
				for br := bufio.NewReader(c); ; {
					req, err := http.ReadRequest(br)
					if err != nil {
						return
					}
					_, _ = io.Copy(io.Discard, req.Body)
					if req.URL.Path == "/health" || req.URL.Path == "/metrics" {
						_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
						continue
					}
					if _, err := io.WriteString(c, answer); err != nil || ends {
						return
					}
				}
			})
		}
	})
	h.source.mu.Lock()
	defer h.source.mu.Unlock()
	h.source.workers = []pairing.Worker{{ID: "w", Role: pairing.RoleBoth, Dialect: "openai", Model: "fake", Addr: ln.Addr().String()}}
	close(h.source.changed)
	h.source.changed = make(chan struct{})
}

// TestPoisonedAnswers has a worker send answers whose end is a matter of opinion, with another answer behind them: no client gets
// that one.
func TestPoisonedAnswers(t *testing.T) {
	poison := "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 15\r\n\r\n{\"poisoned\":[]}"
	head := func(lines ...string) string {
		return "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n" + strings.Join(lines, "\r\n") + "\r\n\r\n"
	}
	const te = "Transfer-Encoding: chunked"
	for name, answer := range map[string]string{
		"nothing wrong but what follows": head("Content-Length: 2") + "{}",
		"CL and TE":                      head("Content-Length: 2", te) + "2\r\n{}\r\n0\r\n\r\n",
		"two lengths":                    head("Content-Length: 2", "Content-Length: 0") + "{}",
		"signed length":                  head("Content-Length: +2") + "{}",
		"list of lengths":                head("Content-Length: 2, 2") + "{}",
		"folded TE":                      head("Transfer-Encoding:", " chunked") + "2\r\n{}\r\n0\r\n\r\n",
		"space before the colon":         head("Content-Length : 0", "Content-Length: 2") + "{}",
		"TE twice":                       head(te, te) + "2\r\n{}\r\n0\r\n\r\n",
		"TE identity":                    head("Transfer-Encoding: identity", "Content-Length: 2") + "{}",
		"bare LF":                        "HTTP/1.1 200 OK\nContent-Length: 0\n\n",
		"bare LF in a header":            head("X: a\nContent-Length: 0", "Content-Length: 2") + "{}",
		"bare LF in the status line":     "HTTP/1.1 200 OK\nContent-Length: 0\r\nContent-Length: 2\r\n\r\n{}",
		"bare CR":                        head("X: a\rContent-Length: 0", "Content-Length: 2") + "{}",
		"chunk with a bare LF":           head(te) + "2\n{}\r\n0\r\n\r\n",
		"chunk size with a sign":         head(te) + "+2\r\n{}\r\n0\r\n\r\n",
		"chunk longer than it says":      head(te) + "1\r\n{}\r\n0\r\n\r\n",
		"TE in HTTP/1.0":                 "HTTP/1.0 200 OK\r\nConnection: keep-alive\r\n" + te + "\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
		"204 with a body":                "HTTP/1.1 204 No Content\r\nContent-Length: 2\r\n\r\n{}",
		"another protocol":               "HTTP/2 200\r\nContent-Length: 0\r\n\r\n",
		"redirect":                       "HTTP/1.1 307 Temporary Redirect\r\nLocation: http://" + nowhere + "/\r\nContent-Length: 0\r\n\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			h := start(t, func(c *Config) { c.RecoveryTimeout = time.Millisecond }) // nobody else comes
			scripted(t, h, answer+poison, false)
			h.until("the worker to be known", func() bool { return len(h.r.Status().Workers) == 1 })
			for range 3 {
				resp, err := h.client.Post("http://"+h.addr+"/v1/chat/completions", "application/json", strings.NewReader(ask{n: 1}.body()))
				if err != nil {
					t.Fatal(err)
				}
				b, _ := io.ReadAll(resp.Body)
				resp.Body.Close()
				if bytes.Contains(b, []byte("poisoned")) || resp.Header.Get("Location") != "" {
					t.Errorf("%q has got to a client: %d %s", answer, resp.StatusCode, b)
				}
			}
		})
	}
}

// TestNothingIsInjected has clients put line breaks and the like where they might get into headers, logs and metrics.
func TestNothingIsInjected(t *testing.T) {
	var seen http.Header
	var mu sync.Mutex
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPost {
			mu.Lock()
			seen = r.Header.Clone()
			mu.Unlock()
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, "{}")
	})}
	go func() { _ = srv.Serve(ln) }()
	t.Cleanup(func() { srv.Close() })
	log := &lockedBuffer{}
	h := startMixed(t, func(c *Config) { c.Logger = slog.New(slog.NewTextHandler(log, nil)) }, nil, nil)
	bad := "fa\r\nX-Injected: 1\nke\u2028\x00"
	h.source.mu.Lock()
	h.source.workers = []pairing.Worker{{ID: "w\r\nX-Injected: 1", Role: pairing.RoleBoth, Dialect: "openai", Model: bad, Addr: ln.Addr().String()}}
	close(h.source.changed)
	h.source.changed = make(chan struct{})
	h.source.mu.Unlock()
	h.until("the worker to be known", func() bool { return len(h.r.Status().Workers) == 1 })
	model, _ := json.Marshal(bad)
	body := fmt.Sprintf(`{"model":%s,"messages":[]}`, model)
	for _, id := range []string{"a b", "a%0d%0ab", "<script>", "\"a\"", strings.Repeat("a", 200), "a\tb", "a\xffb", "${x}"} {
		if got, last := h.answers(post(body, "Connection: close", "X-Request-Id: "+id)); fmt.Sprint(got) != "[200]" {
			t.Fatalf("%q: %v %s", id, got, last)
		}
		mu.Lock()
		if got := seen.Get("X-Request-Id"); got == id || seen.Get("X-Injected") != "" || len(got) > requestIDMax {
			t.Errorf("id %q: the engine got %q", id, seen)
		}
		mu.Unlock()
	}
	if got, last := h.answers(post(`{"model":"no\r\nX-Injected: 1"}`, "Connection: close")); fmt.Sprint(got) != "[404]" {
		t.Errorf("%v %s", got, last)
	}
	for _, line := range strings.Split(log.String(), "\n") {
		if line != "" && !strings.HasPrefix(line, "time=") {
			t.Errorf("a line of the log is somebody else's: %q", line)
		}
	}
	_, metrics := h.answers("GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
	for _, line := range strings.Split(metrics, "\n") {
		if strings.HasPrefix(line, "X-Injected") {
			t.Errorf("a line of the metrics is somebody else's: %q", line)
		}
	}
}
