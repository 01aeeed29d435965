package routers

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/headrace/headrace/internal/registry"
)

// TestUndrained: a worker is drained when every router has heard of it and has nothing there.
func TestUndrained(t *testing.T) {
	router := func(id, workers string) registry.Router {
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte(`{"workers":[` + workers + `]}`)) }))
		t.Cleanup(s.Close)
		return registry.Router{ID: id, Admin: strings.TrimPrefix(s.URL, "http://")}
	}
	var asker Asker
	defer asker.Close()
	done := router("done", `{"id":"x","decodes":4},{"id":"w","weight":0}`)
	for want, r := range map[string]registry.Router{
		"":                           router("gone", `{"id":"x"}`),
		"has 3 requests there":       router("busy", `{"id":"w","weight":0,"prefills":1,"decodes":2}`),
		"has not heard of it":        router("late", `{"id":"w"}`),
		"has not heard":              router("canary", `{"id":"w","weight":0.5}`),
		"does not say what it has":   {ID: "dead", Admin: "127.0.0.1:1"},
		"router odd does not say wh": router("odd", `{`),
	} {
		if got := Undrained(asker.Ask(t.Context(), []registry.Router{done, r}), "w"); (got == "") != (want == "") || !strings.Contains(got, want) {
			t.Errorf("%s: got %q, want %q", r.ID, got, want)
		}
	}
}
