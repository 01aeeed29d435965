package router

import (
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/headrace/headrace/internal/clusterauth"
	"github.com/headrace/headrace/router/routertest"
)

// TestAdminAccess: who comes from another host shows the cluster key, and only names that are allowed are answered.
func TestAdminAccess(t *testing.T) {
	const here, there = "127.0.0.1:4711", "10.1.2.3:4711"
	h := start(t, func(c *Config) {
		c.AdminHosts = []string{"Router-1.example"}
		c.APIKeys = []string{"sk-scraper"}
	}, pair("d1")...)
	h.until("the router to serve", func() bool {
		resp, err := h.client.Get("http://" + h.addr + "/health")
		return err == nil && resp.Body.Close() == nil
	})
	served := h.r.guarded(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "page") }))
	for name, c := range map[string]struct {
		from, host, path string
		key              string // "": none; "api": the API key in its place
		old              bool   // HTTP/1.0
		want             int
		says             string
	}{
		"here":                     {from: here, host: "127.0.0.1:9000", want: 200},
		"here, IPv6":               {from: "[::1]:4711", host: "[::1]:9000", want: 200},
		"localhost":                {from: here, host: "localhost:9000", want: 200},
		"below localhost":          {from: here, host: "a.localhost", want: 200},
		"an allowed name":          {from: here, host: "router-1.EXAMPLE.:9000", want: 200},
		"another name":             {from: here, host: "evil.example:9000", want: 421, says: `--admin-host evil.example`},
		"localhost in front":       {from: here, host: "localhost.evil.example", want: 421},
		"no name":                  {from: here, old: true, want: 200},
		"no name in HTTP/1.1":      {from: here, want: 421},
		"from there":               {from: there, host: "10.1.2.3:9000", want: 401, says: "--cluster-key-file"},
		"from there, with the key": {from: there, host: "10.1.2.3:9000", key: string(routertest.Key), want: 200},
		"with another key":         {from: there, host: "10.1.2.3:9000", key: "another", want: 401, says: "another cluster key"},
		"with a key, a wrong name": {from: there, host: "evil.example", key: string(routertest.Key), want: 421},
		"health from there":        {from: there, host: "10.1.2.3:9000", path: "/healthz", want: 200},
		"metrics from there":       {from: there, host: "10.1.2.3:9000", path: "/metrics", want: 401},
		"metrics, an API key":      {from: there, host: "10.1.2.3:9000", path: "/metrics", key: "api", want: 200},
		"status, an API key":       {from: there, host: "10.1.2.3:9000", key: "api", want: 401},
		"where from is unknown":    {from: "@", host: "10.1.2.3:9000", want: 401},
	} {
		t.Run(name, func(t *testing.T) {
			if c.path == "" {
				c.path = "/status"
			}
			req := httptest.NewRequest(http.MethodGet, c.path, nil)
			req.RemoteAddr, req.Host = c.from, c.host
			if c.old {
				req.Proto, req.ProtoMinor = "HTTP/1.0", 0
			}
			switch c.key {
			case "":
			case "api":
				req.Header.Set("Authorization", "Bearer sk-scraper")
			default:
				clusterauth.Sign(req, []byte(c.key), time.Now())
			}
			w := httptest.NewRecorder()
			served.ServeHTTP(w, req)
			if w.Code != c.want || (w.Body.String() == "page") != (c.want == 200) || !strings.Contains(w.Body.String(), c.says) {
				t.Errorf("%d %s", w.Code, w.Body)
			}
		})
	}
	if a, b := value(h.r.adminRefused.WithLabelValues("host")), value(h.r.adminRefused.WithLabelValues("key")); a != 4 || b != 5 {
		t.Errorf("%v and %v refusals are counted", a, b)
	}
}

// TestAdminOpen: as it was before there was a key to show.
func TestAdminOpen(t *testing.T) {
	h := start(t, func(c *Config) { c.AdminOpen = true }, pair("d1")...)
	q := ask{n: 1}
	h.do(q).wantWhole(t, q) // it runs
	req := httptest.NewRequest(http.MethodGet, "/status", nil)
	req.RemoteAddr, req.Host = "10.1.2.3:4711", "10.1.2.4:9000"
	w := httptest.NewRecorder()
	h.r.guarded(http.NotFoundHandler()).ServeHTTP(w, req)
	if w.Code != http.StatusNotFound {
		t.Errorf("%d %s", w.Code, w.Body)
	}
}

// TestAdminListens: the listener itself is guarded.
func TestAdminListens(t *testing.T) {
	h := start(t, nil, pair("d1")...)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go func() { _ = h.r.ServeAdmin(ln) }()
	for host, want := range map[string]int{"": 200, "evil.example": 421} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+ln.Addr().String()+"/status", nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Host = host
		resp, err := h.client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		_ = resp.Body.Close()
		if resp.StatusCode != want {
			t.Errorf("Host %q: %s", host, resp.Status)
		}
	}
}
