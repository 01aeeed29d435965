package collect

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/headrace/headrace/internal/promtext"
)

func TestFigures(t *testing.T) {
	for _, tt := range []struct {
		file string
		want Figures
	}{
		{"vllm-0.32.txt", Figures{Ranks: 1, Running: 2, Waiting: 1, KVUsage: 0.25, PrefixQueries: 4120, PrefixHits: 1312, ExternalQueries: 640, ExternalHits: 320, Preemptions: 3, Blocks: 2048, BlockTokens: 32}},
		{"vllm-0.6.txt", Figures{Ranks: 1, Running: 4, Waiting: 7, KVUsage: 0.5, Preemptions: 2, Blocks: 9000, BlockTokens: 16}},
		{"two-ranks.txt", Figures{Ranks: 2, Running: 5, Waiting: 1, KVUsage: 0.5, PrefixQueries: 300, PrefixHits: 30, Blocks: 200, BlockTokens: 64}},
	} {
		t.Run(tt.file, func(t *testing.T) {
			f, err := os.Open("testdata/metrics/" + tt.file)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			got, err := readFigures(f)
			if err != nil {
				t.Fatal(err)
			}
			if *got != tt.want {
				t.Errorf("got  %+v\nwant %+v", *got, tt.want)
			}
		})
	}
}

func TestWhatIsNoMetricsIsRefused(t *testing.T) {
	for name, text := range map[string]string{
		"another engine's": "foo 1\n",
		"nothing":          "",
		"no number":        "vllm:num_requests_running{} x\n",
		"a torn label":     "vllm:num_requests_running{engine=\"0 1\n",
		"a long line":      strings.Repeat("x", promtext.LineBytesMax+1),
		"too much":         strings.Repeat("# some comment that says nothing\n", promtext.BytesMax/32),
		"too many":         strings.Repeat("vllm:num_requests_running 1\n", promtext.SamplesMax+1),
		"NaN alone":        "vllm:num_requests_running NaN\nvllm:kv_cache_usage_perc +Inf\n",
	} {
		t.Run(name, func(t *testing.T) {
			if f, err := readFigures(strings.NewReader(text)); err == nil {
				t.Errorf("read %+v", f)
			}
		})
	}
}

func FuzzFigures(f *testing.F) {
	for _, name := range []string{"vllm-0.32.txt", "vllm-0.6.txt", "two-ranks.txt"} {
		b, err := os.ReadFile("testdata/metrics/" + name)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(string(b))
	}
	f.Fuzz(func(t *testing.T, text string) {
		x, err := readFigures(strings.NewReader(text))
		if err != nil {
			return
		}
		if x.Running < 0 || x.Waiting < 0 || x.KVUsage > 1 || x.KVUsage < 0 && x.KVUsage != -1 || x.Ranks < 1 || x.Foreign() < 0 || x.Blocks < 0 {
			t.Errorf("%+v of %q", x, text)
		}
	})
}

// metrics answers as a worker would.
func metrics(running int) (io.ReadCloser, error) {
	return io.NopCloser(strings.NewReader(fmt.Sprintf("vllm:num_requests_running %d\n", running))), nil
}

func TestLooking(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var looks, own atomic.Int64
		var broken, slow atomic.Bool
		c := New(Config{
			Own: func(string) int64 { return own.Load() },
			Fetch: func(ctx context.Context, addr string) (io.ReadCloser, error) {
				looks.Add(1)
				if addr != "a:1" {
					t.Errorf("asked %s", addr)
				}
				if slow.Load() {
					<-ctx.Done()
					return nil, ctx.Err()
				}
				if broken.Load() {
					return nil, errors.New("broken")
				}
				return metrics(3)
			},
		})
		defer c.Close()
		if _, ok := c.Figures("a"); ok || c.Status("a") != nil {
			t.Error("something is known of nobody")
		}
		own.Store(2)
		c.Follow([]Worker{{ID: "a", Addr: "a:1"}})
		if _, ok := c.Figures("a"); ok {
			t.Error("figures before the first look")
		}
		time.Sleep(time.Second)
		synctest.Wait()
		if f, ok := c.Figures("a"); !ok || f.Running != 3 || f.Own != 2 || f.Foreign() != 1 {
			t.Errorf("%+v %v", f, ok)
		}
		time.Sleep(time.Minute)
		if n := looks.Load(); n < 54 || n > 70 {
			t.Errorf("%d looks in a minute", n)
		}

		// A worker that does not answer is held to its deadline, its figures go stale, and it is asked less often.
		slow.Store(true)
		time.Sleep(10 * time.Second)
		if _, ok := c.Figures("a"); ok {
			t.Error("stale figures are used")
		}
		s := c.Status("a")
		if !s.Stale || s.Running != 3 || s.AgeMS < 5000 || s.Problem == "" || s.Failures == 0 {
			t.Errorf("%+v", s)
		}
		slow.Store(false)
		broken.Store(true)
		time.Sleep(time.Minute)
		before := looks.Load()
		time.Sleep(10 * time.Minute)
		if n := looks.Load() - before; n < 30 || n > 60 {
			t.Errorf("a broken worker was asked %d times in ten minutes", n)
		}
		broken.Store(false)
		time.Sleep(20 * time.Second)
		if _, ok := c.Figures("a"); !ok || c.Status("a").Problem != "" {
			t.Error("it is not followed any more")
		}

		// Another process under the same id is another.
		c.Follow([]Worker{{ID: "a", Addr: "a:1", Incarnation: "2"}})
		if _, ok := c.Figures("a"); ok {
			t.Error("the new process has the old one's figures")
		}
		c.Follow(nil)
		if c.Status("a") != nil {
			t.Error("it is still known")
		}
		synctest.Wait()
		at := looks.Load()
		time.Sleep(time.Minute)
		if looks.Load() != at {
			t.Error("a worker that has gone is asked")
		}
	})
}

// An answer that comes when nobody follows the worker any more is no answer.
func TestAnswersThatComeTooLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c *Collector
		c = New(Config{Fetch: func(context.Context, string) (io.ReadCloser, error) {
			c.Follow(nil)
			return metrics(1)
		}})
		defer c.Close()
		c.Follow([]Worker{{ID: "a"}})
		time.Sleep(time.Minute)
		if c.Status("a") != nil {
			t.Error("it is still known")
		}
	})
}

func TestLargeFleetsAreAskedLessOften(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var looks atomic.Int64
		c := New(Config{Fetch: func(context.Context, string) (io.ReadCloser, error) { looks.Add(1); return metrics(0) }})
		defer c.Close()
		workers := make([]Worker, 1000)
		for i := range workers {
			workers[i] = Worker{ID: fmt.Sprint(i)}
		}
		c.Follow(workers)
		time.Sleep(10 * time.Second)
		before := looks.Load()
		time.Sleep(100 * time.Second)
		if n := looks.Load() - before; n < 8500 || n > 12500 {
			t.Errorf("%d looks in 100 s", n)
		}
	})
}

func TestOverHTTP(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.Host == "other":
			t.Error("it followed a redirect")
		case r.URL.Path == "/metrics":
			http.Redirect(w, r, "http://other/metrics", http.StatusFound)
		}
	}))
	defer s.Close()
	fetch, closeIdle := overHTTP()
	defer closeIdle()
	if b, err := fetch(t.Context(), strings.TrimPrefix(s.URL, "http://")); err == nil || !strings.Contains(err.Error(), "302") {
		t.Errorf("%v, %v", b, err)
	}
}

func TestOwnMetrics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := New(Config{Fetch: func(_ context.Context, addr string) (io.ReadCloser, error) {
			if addr == "" {
				return nil, errors.New("broken")
			}
			return metrics(3)
		}})
		defer c.Close()
		c.Follow([]Worker{{ID: "a", Addr: "x"}, {ID: "b"}})
		time.Sleep(300 * time.Millisecond)
		synctest.Wait()
		reg := prometheus.NewPedanticRegistry()
		reg.MustRegister(c)
		wantMetrics(t, reg, map[string]float64{
			`headrace_router_worker_requests_running{worker="a"}`:      3,
			`headrace_router_worker_scrape_failures_total{worker="a"}`: 0,
			`headrace_router_worker_scrape_failures_total{worker="b"}`: 1,
			`headrace_router_worker_scrapes_total{worker="b"}`:         1,
		})
		if n := len(gathered(t, reg)); n != 2+2+3 { // the one of b has no figures, the one of a says nothing of its cache
			t.Errorf("%d series: %v", n, gathered(t, reg))
		}
	})
}

// gathered are the values of a registry's counters and gauges.
func gathered(t *testing.T, reg *prometheus.Registry) map[string]float64 {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	values := map[string]float64{}
	for _, f := range families {
		for _, m := range f.Metric {
			var labels []string
			for _, l := range m.Label {
				labels = append(labels, fmt.Sprintf("%s=%q", l.GetName(), l.GetValue()))
			}
			values[f.GetName()+"{"+strings.Join(labels, ",")+"}"] = m.GetCounter().GetValue() + m.GetGauge().GetValue()
		}
	}
	return values
}

func wantMetrics(t *testing.T, reg *prometheus.Registry, want map[string]float64) {
	t.Helper()
	got := gathered(t, reg)
	for name, v := range want {
		if g, ok := got[name]; !ok || g != v {
			t.Errorf("%s is %v (%v), want %v", name, g, ok, v)
		}
	}
}
