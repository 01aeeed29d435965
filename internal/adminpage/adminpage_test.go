package adminpage

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

func TestGet(t *testing.T) {
	mux := http.NewServeMux()
	mux.HandleFunc("/page", func(w http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(w, `{"n": 7}`) })
	mux.HandleFunc("/odd", func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "<html>") })
	mux.HandleFunc("/large", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, `{"s": "`+strings.Repeat("x", bytesMax)+`"}`)
	})
	mux.HandleFunc("/busy", func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, strings.Repeat("later ", wordsMax), http.StatusServiceUnavailable)
	})
	mux.HandleFunc("/mute", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusTeapot) })
	s := httptest.NewServer(mux)
	defer s.Close()
	addr := strings.TrimPrefix(s.URL, "http://")
	for _, c := range []struct {
		addr, path string
		says       string // of the error, "" for none
		missing    bool
	}{
		{addr, "/page", "", false},
		{addr, "/odd", "read /odd: invalid character", false},
		{addr, "/large", "read /large: unexpected EOF", false},
		{addr, "/busy", "GET /busy: 503 Service Unavailable: later later", false},
		{addr, "/mute", "GET /mute: 418 I'm a teapot", false},
		{addr, "/none", "GET /none: 404 Not Found: 404 page not found", true},
		{addr, "/%zz", "invalid URL escape", false},
		{"", "/page", "it has no admin address", false},
		{"127.0.0.1:1", "/page", "connection refused", false},
	} {
		var page struct{ N int }
		err := Get(t.Context(), s.Client(), c.addr, c.path, &page)
		switch {
		case err == nil && (c.says != "" || page.N != 7):
			t.Errorf("%s %s: %+v, want %q", c.addr, c.path, page, c.says)
		case err != nil && (c.says == "" || !strings.Contains(err.Error(), c.says) || len(err.Error()) > 2*wordsMax || Missing(err) != c.missing):
			t.Errorf("%s %s: %v, want %q", c.addr, c.path, err, c.says)
		case c.path == "/mute" && strings.HasSuffix(err.Error(), ": "):
			t.Errorf("%q", err)
		}
	}
}
