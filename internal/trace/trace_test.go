package trace

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

const ticket = "000102030405060708090a0b0c0d0e0f"

// answers serves documents by path; other paths are not found.
func answers(t *testing.T, pages map[string]string) string {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		page, ok := pages[r.URL.RequestURI()]
		if !ok {
			http.Error(w, "nothing here", http.StatusNotFound)
			return
		}
		_, _ = io.WriteString(w, page)
	}))
	t.Cleanup(s.Close)
	return strings.TrimPrefix(s.URL, "http://")
}

func requestJSON(id, at, nodeB string, total float64, daemon string) string {
	return fmt.Sprintf(`{"time":%q,"id":"chatcmpl-1","request_id":%q,"endpoint":"chat","model":"m","choices":1,"code":200,"outcome":"ok","queued_ms":1,"first_token_ms":40,"last_token_ms":90,"total_ms":%v,
"prompt_tokens":7,"cached_tokens":3,"completion_tokens":5,"attempts":[{"dispatch":1,"dialect":"native","prefill":"p0","decode":"d0","began_ms":2,"prefilling_ms":3,"transferring_ms":40,"decoding_ms":50,"ended_ms":95,"result":"finished",
"ticket":"%s","places":[{"worker":"p0","role":"prefill","node":"a","node_admin":%q},{"worker":"d0","role":"decode","node":"b","node_admin":%q}]}]}`, at, id, total, ticket, daemon, nodeB)
}

func TestTimeline(t *testing.T) {
	lease := `[{"ticket":"` + ticket + `","side":"source","engine":"p0","peer_node":"b","transport":"tcp","state":"settled","tokens":7,"presented":"2026-11-22T10:00:00.010Z","bound":"2026-11-22T10:00:00.015Z",
"first_piece":"2026-11-22T10:00:00.020Z","last_piece":"2026-11-22T10:00:00.045Z","ended":"2026-11-22T10:00:00.050Z","bytes":4096,"pieces":4,"pieces_again":1,"lanes":2}]`
	daemon := answers(t, map[string]string{"/debug/leases/" + ticket: lease})
	gone := answers(t, nil)
	one := requestJSON("mine", "2026-11-22T10:00:00Z", gone, 100, daemon)
	older := requestJSON("mine", "2026-11-22T09:00:00Z", gone, 300, daemon)
	r1 := answers(t, map[string]string{"/debug/requests/mine": `{"requests":[` + one + `],"decisions":[]}`, "/debug/requests?n=5": `[` + one + `]`})
	r2 := answers(t, map[string]string{"/debug/requests/mine": `{"requests":[` + older + `],"decisions":[]}`, "/debug/requests?n=5&slowest=1": `[` + older + `]`})
	routers := []Router{{"r2", r2}, {"r1", r1}}
	got, err := Gather(context.Background(), routers, "mine")
	if err != nil {
		t.Fatal(err)
	}
	var text strings.Builder
	if err := got.Print(&text, false); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"request mine (chatcmpl-1) by router r1 at 2026-11-22T10:00:00Z", "200 ok after 100.0 ms, chat m, 7 prompt tokens (3 cached), 5 tokens",
		"p0 + d0", "3.000    40.000", "p0 -> d0", "10.000   50.000", "settled", "4096 bytes in 4 pieces over 2 lanes of tcp, 1 sent again", "remembers no lease of this ticket",
	} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("%q is not in\n%s", want, text.String())
		}
	}
	if _, err := Gather(context.Background(), routers, "nobody"); !errors.Is(err, ErrUnknown) {
		t.Errorf("an id that nobody has: %v", err)
	}
	slow, err := List(context.Background(), []Router{{"r2", r2}}, 5, true)
	if err != nil || len(slow) != 1 || slow[0].TotalMS != 300 {
		t.Errorf("%v, %v", slow, err)
	}
	// One router that does not answer spoils nothing but itself.
	list, err := List(context.Background(), []Router{{"r1", r1}, {"r0", "127.0.0.1:1"}}, 5, false)
	if err == nil || !strings.Contains(err.Error(), "router r0") || len(list) != 1 {
		t.Errorf("%v, %v", list, err)
	}
	if _, err := Gather(context.Background(), []Router{{"r1", r1}, {"r0", "127.0.0.1:1"}}, "nobody"); err == nil || errors.Is(err, ErrUnknown) {
		t.Errorf("a router did not answer, and the error is %v", err)
	}
}

func TestDaemonOutOfReachIsARow(t *testing.T) {
	one := requestJSON("mine", "2026-11-22T10:00:00Z", "", 100, "127.0.0.1:1")
	r := answers(t, map[string]string{"/debug/requests/mine": `{"requests":[` + one + `],"decisions":[]}`})
	got, err := Gather(context.Background(), []Router{{"r", r}}, "mine")
	if err != nil {
		t.Fatal(err)
	}
	errs := 0
	for _, row := range got.Rows {
		if row.Error != "" {
			errs++
			if !strings.Contains(row.Error, "cannot be asked") {
				t.Errorf("%+v", row)
			}
		}
	}
	if errs != 2 || len(got.Rows) < 6 {
		t.Errorf("%d rows say that there is nothing, of %d", errs, len(got.Rows))
	}
}

func TestBar(t *testing.T) {
	for _, c := range []struct {
		from, to, lo, hi float64
		want             string
	}{
		{0, 100, 0, 100, strings.Repeat("#", barWidth)},
		{0, 0, 0, 100, "#" + strings.Repeat(".", barWidth-1)},
		{100, 100, 0, 100, strings.Repeat(".", barWidth-1) + "#"},
		{0, 0, 0, 0, "#" + strings.Repeat(".", barWidth-1)},
		{-50, 0, -50, 50, strings.Repeat("#", barWidth/2+1) + strings.Repeat(".", barWidth/2-1)},
	} {
		if got := bar(c.from, c.to, c.lo, c.hi); got != c.want {
			t.Errorf("%v to %v of %v to %v: %s", c.from, c.to, c.lo, c.hi, got)
		}
	}
}
