package main

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/headrace/headrace/internal/registry"
	"github.com/headrace/headrace/internal/routers"
	"github.com/headrace/headrace/scheduler/operate"
)

// TestFeed: each request is told once, in order, and none of before the first look.
func TestFeed(t *testing.T) {
	epoch := time.Date(2026, 11, 1, 0, 0, 0, 0, time.UTC)
	request := func(id, model, outcome string, second int) string {
		return fmt.Sprintf(`{"id":%q,"model":%q,"outcome":%q,"time":%q,"first_token_ms":100,"last_token_ms":1000,"total_ms":1100,"prompt_tokens":20,"cached_tokens":16,"completion_tokens":10}`,
			id, model, outcome, epoch.Add(time.Duration(second)*time.Second).Format(time.RFC3339))
	}
	list := []string{request("old", "m", "ok", 1)}
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintf(w, "[%s]", strings.Join(list, ",")) }))
	defer s.Close()
	r := []registry.Router{{ID: "r", Admin: strings.TrimPrefix(s.URL, "http://")}}
	var asker routers.Asker
	defer asker.Close()
	f := &feed{model: "m"}
	look := func() *operate.Seen {
		seen := new(operate.Seen)
		if err := f.read(t.Context(), &asker, r, epoch, seen); err != nil {
			t.Fatal(err)
		}
		return seen
	}
	if n := len(look().Done); n != 0 {
		t.Errorf("%d of before", n)
	}
	list = append([]string{request("b", "m", "ok", 9), request("a", "m", "ok", 5), request("x", "other", "ok", 6), request("y", "m", "error", 7)}, list...)
	got := look()
	if len(got.Arrived) != 2 || got.Arrived[0].At != 5*time.Second || got.Arrived[1].At != 9*time.Second || got.Arrived[0].Cached != 16 {
		t.Errorf("arrived %+v", got.Arrived)
	}
	if d := got.Done[0]; d.Prompt != 20 || d.Output != 10 || d.TTFT != 100*time.Millisecond || d.ITL != 100*time.Millisecond || d.Lasted != 1100*time.Millisecond {
		t.Errorf("done %+v", d)
	}
	list = append([]string{request("c", "m", "ok", 2)}, list...)
	if got := look(); len(got.Arrived) != 1 || got.Arrived[0].At != 9*time.Second {
		t.Errorf("one that took long: %+v", got.Arrived)
	}
}
