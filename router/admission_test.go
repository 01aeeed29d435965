package router

import (
	"bufio"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/headrace/headrace/router/admission"
	"github.com/headrace/headrace/router/routertest"
)

// jam is a router with one place, which a request holds until let go.
func jam(t *testing.T, change func(*Config)) (h *harness, free func()) {
	t.Helper()
	ws := pair("d1")
	at, goOn := make(chan struct{}, 1), make(chan struct{})
	var held atomic.Bool
	ws[0].Fault = func(_ *routertest.Call, stage string, _ int) routertest.Action {
		if stage == routertest.StageBegun && held.CompareAndSwap(false, true) {
			at <- struct{}{}
			<-goOn
		}
		return routertest.Go
	}
	h = start(t, func(c *Config) {
		c.MaxConcurrent, c.Upstream.SilenceTimeout, c.RecoveryTimeout = 1, patience, patience
		change(c)
	}, ws...)
	done := make(chan struct{})
	c := h.dial()
	_, _ = io.WriteString(c, post(ask{n: 2}.body()))
	go func() {
		defer close(done)
		if resp, err := http.ReadResponse(bufio.NewReader(c), nil); err != nil || resp.StatusCode != 200 {
			t.Errorf("the first: %v", err)
		}
	}()
	<-at
	return h, func() {
		close(goOn)
		<-done
	}
}

// wait sends a request that has to wait, and returns where its answer comes.
func (h *harness) wait(a ask, header ...string) <-chan *answer {
	h.t.Helper()
	before := h.r.Status().Queue.Waiting
	got := h.send(a, header...)
	h.until("it to wait", func() bool { return h.r.Status().Queue.Waiting > before || len(got) > 0 })
	return got
}

// send sends a request, and returns where its answer comes.
func (h *harness) send(a ask, header ...string) <-chan *answer {
	h.t.Helper()
	c := h.dial()
	_, _ = io.WriteString(c, post(a.body(), header...))
	got := make(chan *answer, 1)
	go func() {
		resp, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil {
			h.t.Error(err)
			got <- &answer{}
			return
		}
		got <- read(h.t, resp)
	}()
	return got
}

func TestPriorities(t *testing.T) {
	h, free := jam(t, func(c *Config) { c.PriorityHeader, c.MaxQueue, c.PriorityAging = "X-Priority", 3, -1 })
	low := h.wait(ask{n: 2, more: `,"priority":5`})
	usual := h.wait(ask{n: 2})
	lifted := h.wait(ask{n: 2, more: `,"priority":7`}, "X-Priority: -3")
	if a := h.do(ask{n: 2, more: `,"priority":6`}); a.status != 429 {
		t.Errorf("one of lower priority than all: %d", a.status)
	}
	urgent := h.send(ask{n: 2, stream: true}, "X-Priority: -3")
	a := <-low
	if n, err := strconv.Atoi(a.header.Get("Retry-After")); a.status != 429 || err != nil || n < 1 || n > 60 || !strings.Contains(a.failure, "No engine has seen it") {
		t.Errorf("the displaced: %+v", a)
	}
	if s := h.r.Status(); s.Queue.Waiting != 3 || s.Queue.Running != 1 || s.Queue.Bytes == 0 {
		t.Errorf("%+v", s.Queue)
	}
	for why, want := range map[admission.Why]float64{admission.Full: 1, admission.Displaced: 1, admission.Late: 0} {
		if got := value(h.r.refusals[why]); got != want {
			t.Errorf("counted %v %s", got, why)
		}
	}
	free()
	for _, c := range []<-chan *answer{lifted, urgent, usual} {
		if a := <-c; a.status != 200 {
			t.Errorf("%d: %s", a.status, a.raw)
		}
	}
	if a := h.exchange(post(ask{n: 2}.body(), "X-Priority: high"), 1)[0]; a.status != 400 || a.code != "invalid_value" {
		t.Errorf("a priority that is none: %+v", a)
	}
}

// TestPriorityUntrusted: nobody has said that the header may be believed.
func TestPriorityUntrusted(t *testing.T) {
	h, free := jam(t, func(c *Config) { c.MaxQueue = 1 })
	first := h.wait(ask{n: 2})
	if a := h.exchange(post(ask{n: 2}.body(), "X-Priority: -9", "X-Tenant: other"), 1)[0]; a.status != 429 {
		t.Errorf("got %d", a.status)
	}
	free()
	if a := <-first; a.status != 200 {
		t.Errorf("got %d", a.status)
	}
}

// TestTenants: a queue that one key has filled has room for another.
func TestTenants(t *testing.T) {
	ks := []string{"Authorization: Bearer one", "Authorization: Bearer two"}
	for name, headers := range map[string][]string{"keys": ks, "headers": {"X-Tenant: one", "X-Tenant: two"}} {
		t.Run(name, func(t *testing.T) {
			h, free := jam(t, func(c *Config) { c.MaxQueue, c.TenantHeader = 2, "X-Tenant" })
			if name == "keys" {
				k, err := newKeys([]string{"one", "two"}, "", slog.New(slog.DiscardHandler))
				if err != nil {
					t.Fatal(err)
				}
				h.r.keys.ring.Store(k.ring.Load())
			}
			first := h.wait(ask{n: 2}, headers[0])
			second := h.wait(ask{n: 2}, headers[0])
			if a := h.exchange(post(ask{n: 2}.body(), headers[0]), 1)[0]; a.status != 429 {
				t.Errorf("a third of the first: %d", a.status)
			}
			other := h.send(ask{n: 2}, headers[1])
			if a := <-second; a.status != 429 {
				t.Errorf("the newest of the first: %d", a.status)
			}
			free()
			for _, c := range []<-chan *answer{first, other} {
				if a := <-c; a.status != 200 {
					t.Errorf("%d: %s", a.status, a.raw)
				}
			}
		})
	}
}

func TestDeadlineInQueue(t *testing.T) {
	h, free := jam(t, func(*Config) {})
	both(t, func(t *testing.T, stream bool) {
		c := h.wait(ask{n: 2, stream: stream}, "X-Request-Timeout: 50ms")
		if a := <-c; a.status != 504 || a.code != "timeout" || !strings.Contains(a.failure, "50ms") || !strings.Contains(a.failure, "No engine") {
			t.Errorf("got %+v", a)
		}
	})
	if a := h.exchange(post(ask{n: 2}.body(), "X-Request-Timeout: soon"), 1)[0]; a.status != 400 {
		t.Errorf("a timeout that is none: %+v", a)
	}
	if m := h.r.metrics.cancels.WithLabelValues("queued", "deadline"); !h.counted(m, 2) || h.r.Status().Queue.Waiting != 0 {
		t.Errorf("%v ended, %+v", value(m), h.r.Status().Queue)
	}
	free()
}

func TestQueueTimeout(t *testing.T) {
	h, free := jam(t, func(c *Config) { c.QueueTimeout = 50 * time.Millisecond })
	if a := <-h.wait(ask{n: 2}); a.status != 503 || a.header.Get("Retry-After") == "" || !strings.Contains(a.failure, "waited") {
		t.Errorf("got %+v", a)
	}
	free()
}

func TestAdmissionSettings(t *testing.T) {
	source := &fleetSource{changed: make(chan struct{})}
	for want, change := range map[string]func(*Config){
		"less than the 33554432 of one body": func(c *Config) { c.MaxQueueBytes = 1000 },
		"queue-timeout -1s":                  func(c *Config) { c.QueueTimeout = -time.Second },
		"has weight 0":                       func(c *Config) { c.TenantWeights = map[string]float64{"a": 0} },
		"a tenant has a name":                func(c *Config) { c.TenantWeights = map[string]float64{"": 1} },
	} {
		cfg := Config{Source: source, ClusterKey: routertest.Key}
		change(&cfg)
		if _, err := New(cfg); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want something of %q", err, want)
		}
	}
}

func TestParseTimeout(t *testing.T) {
	for in, want := range map[string]time.Duration{"30": 30 * time.Second, " 1.5 ": 1500 * time.Millisecond, "500ms": 500 * time.Millisecond, "2m": 2 * time.Minute, "1e99": 1<<31*time.Second - time.Second} {
		if got, err := parseTimeout(in); err != nil || got != want {
			t.Errorf("%q is %s, %v", in, got, err)
		}
	}
	for _, in := range []string{"", "0", "-1", "-5s", "NaN", "-Inf", "soon", "1e-12", "30 seconds"} {
		if got, err := parseTimeout(in); err == nil {
			t.Errorf("%q is %s", in, got)
		}
	}
}

func FuzzRank(f *testing.F) {
	for _, s := range []string{"0", "-5", "99999999999999999999", "1.5", "500ms", "x", " 3", "+7", "1e400", "0x10"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if d, err := parseTimeout(s); err == nil && d <= 0 {
			t.Errorf("%q is a time of %s", s, d)
		}
		n, err := parsePriority([]byte(s))
		if n < -admission.PriorityMax || n > admission.PriorityMax {
			t.Errorf("%q is priority %d", s, n)
		}
		if err != nil {
			return
		}
		if again, err := parsePriority([]byte(fmt.Sprint(n))); err != nil || again != n {
			t.Errorf("%q is priority %d, which is %d, %v", s, n, again, err)
		}
	})
}
