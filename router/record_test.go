package router

import (
	"bytes"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/headrace/headrace/internal/trace"
	"github.com/headrace/headrace/router/routertest"
)

// lines is an access log's writer.
type lines struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

// all waits for n lines and returns them.
func (l *lines) all(h *harness, n int) []string {
	h.t.Helper()
	var out []string
	h.until("lines of the access log", func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		out = strings.SplitAfter(l.buf.String(), "\n")
		return len(out) > n
	})
	return out[:len(out)-1]
}

// admin asks the admin listener's handler, which has no state of its own.
func (h *harness) requests(id string) (int, RequestTrace) {
	h.t.Helper()
	req := httptest.NewRequest(http.MethodGet, "/debug/requests/"+id, nil)
	req.SetPathValue("id", id)
	w := httptest.NewRecorder()
	h.r.showRequest(w, req)
	var t RequestTrace
	if w.Code == http.StatusOK {
		if err := json.Unmarshal(w.Body.Bytes(), &t); err != nil {
			h.t.Fatal(err)
		}
	}
	return w.Code, t
}

func TestAccessLogAndTimes(t *testing.T) {
	log := &lines{}
	h := start(t, func(c *Config) { c.AccessLog, c.AccessJSON, c.APIKeys = log, true, []string{"a key"} }, pair("p0", "d0")...)
	ask := func(a ask, id, key string) *answer {
		t.Helper()
		req, err := http.NewRequest(http.MethodPost, "http://"+h.addr+"/v1/chat/completions", strings.NewReader(a.body()))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+key)
		if id != "" {
			req.Header.Set("X-Request-Id", id)
		}
		resp, err := h.client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		return read(t, resp)
	}
	q := ask(ask2(5, true), "mine", "a key")
	q.wantWhole(t, ask2(5, true))
	if got := q.header.Get("X-Request-Id"); got != "mine" {
		t.Errorf("X-Request-Id %q", got)
	}
	if r := ask(ask2(5, false), "", "another"); r.status != 401 || r.header.Get("X-Request-Id") == "" {
		t.Errorf("status %d, id %q", r.status, r.header.Get("X-Request-Id"))
	}
	bad := ask(ask2(5, false), "in\"sane", "a key")
	if id := bad.header.Get("X-Request-Id"); id == "" || strings.Contains(id, "sane") {
		t.Errorf("an id that is not fit became %q", id)
	}
	got := log.all(h, 3)
	var first struct {
		RequestID string   `json:"request_id"`
		Key       string   `json:"key"`
		Code      int      `json:"code"`
		Prompt    int      `json:"prompt_tokens"`
		Tokens    int      `json:"completion_tokens"`
		TTFT      *float64 `json:"ttft_ms"`
		Prefill   string   `json:"prefill"`
		Decode    string   `json:"decode"`
		Attempts  int      `json:"attempts"`
	}
	if err := json.Unmarshal([]byte(got[0]), &first); err != nil {
		t.Fatalf("%v in %s", err, got[0])
	}
	// echo -n 'a key' | sha256sum begins so.
	if first.RequestID != "mine" || first.Key != "sha256:8fa3aab2" || first.Code != 200 || first.Prompt != 2 || first.Tokens != 5 || first.TTFT == nil || first.Prefill != "p0" || first.Decode != "d0" || first.Attempts != 1 {
		t.Errorf("the line is %s", got[0])
	}
	if !strings.Contains(got[1], `"code":401`) || strings.Contains(got[1], "another") {
		t.Errorf("the line of the refused request is %s", got[1])
	}

	code, trace := h.requests("mine")
	if code != 200 || len(trace.Requests) != 1 || len(trace.Decisions) != 1 {
		t.Fatalf("status %d: %+v", code, trace)
	}
	r := trace.Requests[0]
	if len(r.Attempts) != 1 || *r.PromptTokens != 2 || r.Tokens != 5 || r.FirstMS <= 0 || r.TotalMS < r.LastMS || r.LastMS < r.FirstMS {
		t.Fatalf("%+v", r)
	}
	a := r.Attempts[0]
	if len(a.Ticket) != 32 || a.Prefill != "p0" || a.PrefillingMS < a.BeganMS || a.TransferMS < a.PrefillingMS || a.DecodingMS < a.TransferMS || a.EndedMS < a.DecodingMS || a.Result != "finished" || len(a.Places) != 2 {
		t.Errorf("%+v", a)
	}
	if code, _ := h.requests("nobody"); code != 404 {
		t.Errorf("an id that nobody has: status %d", code)
	}
}

func ask2(n int, stream bool) ask { return ask{n: n, stream: stream} }

// lately is what became of the last n requests, of which the last may not have ended when it was answered.
func (h *harness) lately(n int) (list []trace.Request) {
	h.t.Helper()
	h.until("the requests to have ended", func() bool {
		list = h.r.recent.list(n, func(*record) bool { return true })
		return len(list) == n
	})
	return list
}

// Each dispatch is there, and what was wrong with it.
func TestTimesOfSeveralAttempts(t *testing.T) {
	ws := pair("p0", "d0", "d1")
	ws[1].Fault = func(_ *routertest.Call, stage string, _ int) routertest.Action {
		if stage == routertest.StageRequest {
			return routertest.Busy
		}
		return routertest.Go
	}
	h := start(t, nil, ws...)
	for range 8 {
		a := h.do(ask{n: 4, stream: true})
		a.wantWhole(t, ask{n: 4, stream: true})
	}
	most := 0
	for _, r := range h.lately(8) {
		most = max(most, len(r.Attempts))
		for i, a := range r.Attempts {
			if last := i == len(r.Attempts)-1; last != (a.Result == "finished") || a.Dispatch != i+1 || a.EndedMS < a.BeganMS {
				t.Errorf("attempt %d of %d: %+v", i, len(r.Attempts), a)
			}
		}
	}
	if most != 2 {
		t.Errorf("at most %d attempts, want 2", most)
	}
}

func TestTimesOfChoices(t *testing.T) {
	h := start(t, nil, pair("p0", "d0")...)
	h.do(ask{n: 3, stream: true, more: `,"n":3`})
	r := h.lately(1)[0]
	seen := map[int]bool{}
	for _, a := range r.Attempts {
		seen[a.Choice] = true
	}
	if len(r.Attempts) != 3 || len(seen) != 3 || r.Tokens != 9 || r.Choices != 3 {
		t.Errorf("%+v", r)
	}
}

func TestRecentKeepsTheLast(t *testing.T) {
	r := &recent{}
	for i := range requestsKept + 10 {
		r.add(&record{choices: i, took: time.Duration(i%7) * time.Second})
	}
	list := r.list(3, func(*record) bool { return true })
	if len(list) != 3 || list[0].Choices != requestsKept+9 || list[2].Choices != requestsKept+7 {
		t.Errorf("%+v", list)
	}
	if n := len(r.list(2*requestsKept, func(*record) bool { return true })); n != requestsKept {
		t.Errorf("%d are kept", n)
	}
	if s := r.slowest(2); s[0].TotalMS != 6000 || s[1].TotalMS != 6000 {
		t.Errorf("%+v", s)
	}
	if n := len(r.list(9, func(x *record) bool { return x.choices == 3 })); n != 0 {
		t.Error("what was overwritten is found")
	}
}

// slowWriter holds its first Write until it may go on.
type slowWriter struct {
	lines
	hold chan struct{}
}

func (w *slowWriter) Write(p []byte) (int, error) { <-w.hold; return w.lines.Write(p) }

// A log that cannot be written costs lines, not requests; close writes what is there.
func TestAccessLogThatStands(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dropped := prometheus.NewCounter(prometheus.CounterOpts{Name: "x"})
		w := &slowWriter{hold: make(chan struct{})}
		a := newAccessLog(w, false, dropped)
		rec := record{start: time.Now(), requestID: `a "quoted" id`, label: "chat", model: strings.Repeat("m", 10<<10), outcome: "ok", code: 200}
		for range 400 { // 4 MB
			a.request(&rec)
		}
		if value(dropped) == 0 {
			t.Error("the buffer has no end")
		}
		synctest.Wait()
		close(w.hold)
		a.close()
		a.close()
		text := w.buf.String()
		if n := strings.Count(text, "\n"); n+int(value(dropped)) != 400 {
			t.Errorf("%d lines and %v dropped of 400", n, value(dropped))
		}
		if line, _, _ := strings.Cut(text, "\n"); !strings.Contains(line, `msg=request request_id="a \"quoted\" id" `) || !strings.Contains(line, " code=200 outcome=ok ") {
			t.Errorf("the line is %.200s", line)
		}
		a.request(&rec) // behind the end
	})
}

// Nothing is allocated a request: neither in the ring, once it is full, nor in the log's buffer.
func TestRecordAllocatesNothing(t *testing.T) {
	r := &Router{}
	rec := record{start: time.Now(), requestID: "id", label: "chat", model: "m", outcome: "ok"}
	for range requestsKept {
		r.recent.add(&rec)
	}
	if n := testing.AllocsPerRun(100, func() { r.recent.add(&rec); r.access.request(&rec) }); n != 0 {
		t.Errorf("%v allocations a request", n)
	}
}
