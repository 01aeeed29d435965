package router

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/valyala/fasthttp"

	"github.com/headrace/headrace/internal/leaktest"
	"github.com/headrace/headrace/router/pairing"
	"github.com/headrace/headrace/router/routertest"
	"github.com/headrace/headrace/router/upstream"
)

func TestMain(m *testing.M) {
	if group := os.Getenv(fakesEnv); group != "" { // a process of TestKilled's
		if err := serveFakes(group); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	// fasthttp's clock is a goroutine that never ends: it begins with the first response.
	var resp fasthttp.Response
	_, _ = resp.WriteTo(io.Discard)
	flag.Parse()
	if err := flag.Set("test.parallel", "16"); err != nil { // they wait more than they compute
		panic(err)
	}
	os.Exit(m.Run())
}

const patience = 10 * time.Second

// fleetSource is a Source that tests change.
type fleetSource struct {
	mu      sync.Mutex
	workers []pairing.Worker
	changed chan struct{}
}

func (s *fleetSource) Workers() []pairing.Worker {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.workers
}

func (s *fleetSource) Changed() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.changed
}

func (s *fleetSource) set(ws ...*routertest.Worker) { s.setAll(ws, nil) }

func (s *fleetSource) setAll(ws []*routertest.Worker, es []*routertest.Engine) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.workers = nil
	for _, w := range ws {
		s.workers = append(s.workers, w.Worker)
	}
	for _, e := range es {
		s.workers = append(s.workers, e.Worker)
	}
	close(s.changed)
	s.changed = make(chan struct{})
}

// harness is a router with fake workers, and a client.
type harness struct {
	t       *testing.T
	r       *Router
	cluster *routertest.Cluster
	source  *fleetSource
	addr    string
	client  *http.Client
	workers []*routertest.Worker
	engines []*routertest.Engine
	served  chan error
}

// leakCheck fails the test if goroutines are left behind it. It is to be called first, by no parallel test.
func leakCheck(t *testing.T) {
	t.Helper()
	leaktest.Check(t)
}

// start runs a router over workers, and checks in the end that nothing is left: no goroutine, no block, no load.
func start(t *testing.T, change func(*Config), workers ...*routertest.Worker) *harness {
	t.Helper()
	leakCheck(t)
	return startParallel(t, change, workers...)
}

// unless gives nobody up who is only slow, on a machine that does other things, unless a worker of the test is to stall.
func unless(stalls bool) func(*Config) {
	return func(c *Config) {
		c.Upstream.SilenceTimeout, c.ProbeTimeout, c.RecoveryTimeout = time.Second, 300*time.Millisecond, 2*patience
		if !stalls {
			c.Upstream.SilenceTimeout, c.ProbeTimeout = patience, patience
		}
	}
}

// startParallel is start without the check for goroutines.
func startParallel(t *testing.T, change func(*Config), workers ...*routertest.Worker) *harness {
	t.Helper()
	return startMixed(t, change, workers, nil)
}

// startMixed has workers of all sorts.
func startMixed(t *testing.T, change func(*Config), workers []*routertest.Worker, engines []*routertest.Engine) *harness {
	t.Helper()
	h := &harness{t: t, cluster: routertest.NewCluster(), source: &fleetSource{changed: make(chan struct{})}, served: make(chan error, 1)}
	for _, w := range workers {
		h.start(w)
	}
	for _, e := range engines {
		h.startEngine(e)
	}
	h.source.setAll(workers, engines)
	// A worker that is dead refuses to be asked for its health: who is slow has time to answer.
	cfg := Config{Source: h.source, ClusterKey: routertest.Key, Recaller: h.cluster, ProbeTimeout: patience, Upstream: upstream.Config{SilenceTimeout: time.Second, DialTimeout: patience}, RecoveryTimeout: 5 * time.Second}
	if testing.Verbose() {
		cfg.Logger = slog.New(slog.NewTextHandler(t.Output(), nil))
	}
	if change != nil {
		change(&cfg)
	}
	var err error
	if h.r, err = New(cfg); err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	h.addr = ln.Addr().String()
	go func() { h.served <- h.r.Serve(ln) }()
	tr := &http.Transport{}
	h.client = &http.Client{Transport: tr}
	t.Cleanup(func() {
		tr.CloseIdleConnections()
		h.quiet()
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := h.r.Shutdown(ctx); err != nil {
			t.Errorf("Shutdown: %v", err)
		}
		if err := <-h.served; err != nil {
			t.Errorf("Serve: %v", err)
		}
		h.until("the engines' connections to be closed", func() bool { return h.conns() == 0 })
		for _, w := range h.workers {
			w.Stop()
		}
		for _, e := range h.engines {
			e.Stop()
		}
		for _, v := range h.cluster.Violations() {
			t.Errorf("the router broke the protocol: %s", v)
		}
	})
	return h
}

func (h *harness) start(w *routertest.Worker) {
	w.Cluster = h.cluster
	if err := w.Start(); err != nil {
		h.t.Fatal(err)
	}
	h.workers = append(h.workers, w)
}

func (h *harness) startEngine(e *routertest.Engine) {
	e.Cluster = h.cluster
	if err := e.Start(); err != nil {
		h.t.Fatal(err)
	}
	h.engines = append(h.engines, e)
}

// conns is how many connections the engines have.
func (h *harness) conns() int {
	n := 0
	for _, w := range h.workers {
		n += w.Conns()
	}
	for _, e := range h.engines {
		n += e.Conns()
	}
	return n
}

// quiet waits until nothing of any request is left anywhere.
func (h *harness) quiet() {
	h.t.Helper()
	h.until("workers to be free", func() bool {
		for _, w := range h.workers {
			if w.Active() > 0 {
				return false
			}
		}
		for _, e := range h.engines {
			if e.Active() > 0 {
				return false
			}
		}
		return h.cluster.Held() == 0
	})
	h.until("the router to be free", func() bool {
		s := h.r.Status()
		for _, w := range s.Workers {
			if w.PrefillTokens != 0 || w.Prefills != 0 || w.Decodes != 0 {
				return false
			}
		}
		for i := state(0); i < stateDone; i++ {
			if value(h.r.metrics.phases[i]) != 0 {
				return false
			}
		}
		return s.Active == 0 && s.Legs == 0
	})
}

// value is a gauge's or a counter's.
func value(m prometheus.Metric) float64 {
	var d dto.Metric
	if err := m.Write(&d); err != nil {
		panic(err)
	}
	return d.GetGauge().GetValue() + d.GetCounter().GetValue()
}

// counted waits until a counter has come to want, which may be behind the answer's last byte, and says whether it did.
func (h *harness) counted(m prometheus.Metric, want float64) bool {
	h.t.Helper()
	for end := time.Now().Add(patience); value(m) != want; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			return false
		}
	}
	return value(m) == want
}

// until polls: what it waits for happens in goroutines of real sockets.
func (h *harness) until(what string, ok func() bool) {
	h.t.Helper()
	h.within(patience, what, ok)
}

// within is for what takes long without anybody waiting.
func (h *harness) within(d time.Duration, what string, ok func() bool) {
	h.t.Helper()
	for end := time.Now().Add(d); !ok(); {
		if time.Now().After(end) {
			h.t.Errorf("waited in vain for %s", what)
			return
		}
		time.Sleep(time.Millisecond)
	}
}

func pair(ids ...string) []*routertest.Worker {
	var ws []*routertest.Worker
	for _, id := range ids {
		role := pairing.RoleDecode
		if id[0] == 'p' {
			role = pairing.RolePrefill
		}
		ws = append(ws, &routertest.Worker{Worker: pairing.Worker{ID: id, Role: role}})
	}
	return ws
}

// ask is a request body.
type ask struct {
	path   string // default chat
	prompt string
	n      int
	stream bool
	usage  bool
	more   string // further members, with a comma in front
}

func (a ask) body() string {
	if a.prompt == "" {
		a.prompt = "hello there"
	}
	prompt, _ := json.Marshal(a.prompt)
	b := fmt.Sprintf(`{"model":"fake","seed":7,"max_tokens":%d,"messages":[{"role":"user","content":%s}]`, a.n, prompt)
	if a.path == "/v1/completions" {
		b = fmt.Sprintf(`{"model":"fake","seed":7,"max_tokens":%d,"prompt":%s`, a.n, prompt)
	}
	if a.stream {
		b += `,"stream":true`
	}
	if a.usage {
		b += `,"stream_options":{"include_usage":true}`
	}
	return b + a.more + "}"
}

// answer is what came of it.
type answer struct {
	status  int
	header  http.Header
	text    string
	finish  string
	usage   map[string]any
	roles   int
	dones   int
	events  int
	failure string // of an error event or body
	code    string
	raw     string
	err     error
	spoken  map[int]bool // by choice
}

func (h *harness) do(a ask) *answer {
	h.t.Helper()
	if a.path == "" {
		a.path = "/v1/chat/completions"
	}
	resp, err := h.client.Post("http://"+h.addr+a.path, "application/json", strings.NewReader(a.body()))
	if err != nil {
		h.t.Fatal(err)
	}
	defer resp.Body.Close()
	return read(h.t, resp)
}

type chunk struct {
	ID      string
	Object  string
	Choices []struct {
		Index   int
		Text    string
		Delta   struct{ Role, Content string }
		Message struct{ Role, Content string }
		Finish  string `json:"finish_reason"`
	}
	Usage map[string]any
	Error *struct {
		Message string
		Code    any // ours are words, engines' numbers
	}
}

func read(t *testing.T, resp *http.Response) *answer {
	t.Helper()
	a := &answer{status: resp.StatusCode, header: resp.Header, spoken: map[int]bool{}}
	raw, err := io.ReadAll(resp.Body)
	a.raw, a.err = string(raw), err
	if !strings.HasPrefix(resp.Header.Get("Content-Type"), "text/event-stream") {
		a.add(t, raw)
		return a
	}
	for s := bufio.NewScanner(bytes.NewReader(raw)); s.Scan(); {
		line := s.Text()
		switch data, ok := strings.CutPrefix(line, "data: "); {
		case line == "":
		case !ok:
			t.Errorf("the stream has a line %q", line)
		case data == "[DONE]":
			a.dones++
		default:
			if a.dones > 0 {
				t.Errorf("behind [DONE]: %s", line)
			}
			a.add(t, []byte(data))
		}
	}
	return a
}

func (a *answer) add(t *testing.T, data []byte) {
	var c chunk
	if err := json.Unmarshal(data, &c); err != nil {
		t.Errorf("%v in %.200q", err, data)
		return
	}
	a.events++
	if c.Error != nil {
		a.failure = c.Error.Message
		if c.Error.Code != nil {
			a.code = fmt.Sprint(c.Error.Code)
		}
	}
	if c.Usage != nil {
		a.usage = c.Usage
	}
	for _, ch := range c.Choices {
		text := ch.Text + ch.Delta.Content + ch.Message.Content
		a.text += text
		if ch.Delta.Role != "" {
			a.roles++
			if a.spoken[ch.Index] {
				t.Error("the role comes behind text")
			}
		}
		a.spoken[ch.Index] = a.spoken[ch.Index] || text != ""
		if ch.Finish != "" {
			a.finish += ch.Finish
		}
	}
}

// wantWhole checks an answer against the fake model.
func (a *answer) wantWhole(t *testing.T, q ask) {
	t.Helper()
	if q.prompt == "" {
		q.prompt = "hello there"
	}
	want := routertest.Text(q.prompt, 7, q.n)
	if a.err != nil || a.status != 200 || a.text != want || a.finish != "length" || a.failure != "" {
		t.Fatalf("got status %d, finish %q, text\n%q, want\n%q\nfailure %q, err %v", a.status, a.finish, a.text, want, a.failure, a.err)
	}
	if q.stream {
		roles := 1
		if q.path == "/v1/completions" {
			roles = 0
		}
		if a.dones != 1 || a.roles != roles || (a.usage != nil) != q.usage {
			t.Errorf("%d times [DONE], %d roles, usage %v in\n%s", a.dones, a.roles, a.usage, a.raw)
		}
	}
	if a.usage != nil || !q.stream {
		if a.usage["prompt_tokens"] != float64(len(strings.Fields(q.prompt))) || a.usage["completion_tokens"] != float64(q.n) {
			t.Errorf("usage %v", a.usage)
		}
	}
}
