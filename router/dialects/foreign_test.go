package dialects

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/headrace/headrace/router/body"
	"github.com/headrace/headrace/router/routertest"
)

// TestRooms holds how many rooms a request gets, and that they are of 63 bits and spliced as digits.
func TestRooms(t *testing.T) {
	beyond := false
	for in, want := range map[string]int{
		`"prompt":"x"`: 0, `"prompt":[1,2]`: 0, `"prompt":["x"]`: 1, `"prompt":["x","y"]`: 2, `"prompt":[[1],[2],[3]]`: 3, `"messages":[]`: 0, `"n":1`: 0, `"n":3`: 3,
		`"prompt":["x","y"],"n":2`: 4, `"text":["x","y"]`: 2, `"input_ids":[[1]]`: 1, `"input_ids":[1]`: 0, `"text":"x","sampling_params":{"n":2}`: 2,
	} {
		b, refused := body.Parse([]byte(`{"model":"m",` + in + `}`))
		if refused != nil {
			t.Fatal(refused)
		}
		n := rooms(b)
		if n != want {
			t.Errorf("%s: %d rooms, want %d", in, n, want)
		}
		var got struct {
			Host, Port, Room json.RawMessage
		}
		members := "{" + strings.ReplaceAll(string(bootstrapMembers("p.example", 8998, n)), "bootstrap_", "") + "}"
		if err := json.Unmarshal([]byte(members), &got); err != nil {
			t.Fatalf("%s: %v", members, err)
		}
		var list []json.Number
		room := string(got.Room)
		if n == 0 {
			room = "[" + room + "]"
		}
		if err := json.Unmarshal([]byte(room), &list); err != nil || len(list) != max(n, 1) {
			t.Errorf("%s: %v", members, err)
		}
		seen := map[json.Number]bool{}
		for _, r := range list {
			v, err := r.Int64()
			if err != nil || v < 0 || seen[r] {
				t.Errorf("room %s of %s: %v", r, members, err)
			}
			seen[r], beyond = true, beyond || v > 1<<53
		}
	}
	if !beyond {
		t.Error("no room is beyond 2^53")
	}
}

// TestLogprobs holds the merging of log probabilities, byte for byte.
func TestLogprobs(t *testing.T) {
	for _, tt := range []struct{ name, prefill, decode, want string }{
		{"none of decode's", `{"meta_info":{"input_token_logprobs":[[-1,9007199254740993,null]]}}`, ` {"text":"a","meta_info":{"x":[1e400],"input_token_logprobs":[]}}`, ` {"text":"a","meta_info":{"x":[1e400],"input_token_logprobs":[[-1,9007199254740993,null]]}}`},
		{"in front of decode's", `{"meta_info":{"input_token_logprobs":[ [1],[2] ]}}`, `{"meta_info":{"input_token_logprobs":[[3]]}}`, `{"meta_info":{"input_token_logprobs":[[1],[2],[3]]}}`},
		{"a batch", `[{"meta_info":{"input_token_logprobs":[[1]]}}, {"meta_info":{"input_token_logprobs":[[2]]}}]`, `[{"meta_info":{"input_token_logprobs":[]}},  {"meta_info":{"input_token_logprobs":[]}}]`,
			`[{"meta_info":{"input_token_logprobs":[[1]]}},  {"meta_info":{"input_token_logprobs":[[2]]}}]`},
		{"by index", `{"index":1,"meta_info":{"input_token_logprobs":[[1]]}}`, `{"meta_info":{"input_token_logprobs":[]},"index":1}`, `{"meta_info":{"input_token_logprobs":[[1]]},"index":1}`},
		{"of another index", `{"index":1,"meta_info":{"input_token_logprobs":[[1]]}}`, `{"meta_info":{"input_token_logprobs":[]}}`, `{"meta_info":{"input_token_logprobs":[]}}`},
		{"nothing asked for", `{"meta_info":{}}`, `{"meta_info":{}}`, `{"meta_info":{}}`},
		{"no JSON", `{`, `[{]`, `[{]`},
	} {
		m := &logprobs{}
		m.prefill([]byte(tt.prefill))
		if got := string(m.decode([]byte(tt.decode))); got != tt.want {
			t.Errorf("%s: got\n%s\nwant\n%s", tt.name, got, tt.want)
		}
	}
}

func FuzzLogprobs(f *testing.F) {
	f.Add(`{"meta_info":{"input_token_logprobs":[[1]]}}`, `[{"meta_info":{"input_token_logprobs":[]}}]`)
	f.Fuzz(func(t *testing.T, p, d string) {
		m := &logprobs{}
		m.prefill([]byte(p))
		if got := m.decode([]byte(d)); json.Valid([]byte(p)) && json.Valid([]byte(d)) && !json.Valid(got) {
			t.Errorf("%q and %q make %q", p, d, got)
		}
	})
}

func TestParseRanks(t *testing.T) {
	list, err := parseRanks([]byte(`{"1":{"engine_id":"b","worker_addr":{}},"0":{"engine_id":"a"}}`))
	if err != nil || len(list) != 2 || list[0] != (rank{0, "a"}) || list[1] != (rank{1, "b"}) {
		t.Errorf("%v, %v", list, err)
	}
	for _, bad := range []string{``, `[]`, `{}`, `{"0":{}}`, `{"x":{"engine_id":"a"}}`, `{"-1":{"engine_id":"a"}}`} {
		if list, err := parseRanks([]byte(bad)); err == nil {
			t.Errorf("%s: %v", bad, list)
		}
	}
}

// TestBootstraps: a server is asked once for all requests, again when it could not answer, and given up in time.
func TestBootstraps(t *testing.T) {
	onStage(t, MooncakeName, func(s *stage) {
		var status atomic.Int32
		s.p.BootstrapFault = func(ctx context.Context) int {
			if status.Load() == 0 {
				<-ctx.Done()
			}
			return int(status.Load())
		}
		run := func() (Outcome, time.Duration) {
			before := time.Now()
			out := s.dialect.Run(context.Background(), s.attempt(`{"model":"fake","prompt":"x","max_tokens":2}`, "/v1/completions"), &tape{})
			return out, time.Since(before)
		}
		if out, took := run(); out.Result != Failed || out.Reason != "prefill_bootstrap" || took != bootstrapWithin || out.Blame[0].Worker != "p" {
			s.Errorf("silent: %+v after %s", out, took)
		}
		status.Store(http.StatusServiceUnavailable)
		if out, _ := run(); out.Reason != "prefill_bootstrap" || !strings.Contains(fmt.Sprint(out.Err), "503") {
			s.Errorf("ill: %+v", out)
		}
		status.Store(http.StatusOK)
		for range 5 {
			if out, _ := run(); out.Result != Finished {
				s.Errorf("well: %+v", out)
			}
		}
		if n := s.p.Queries(); n != 3 {
			s.Errorf("asked %d times", n)
		}
		s.p.Incarnation = "another"
		run()
		if n := s.p.Queries(); n != 4 {
			s.Errorf("asked %d times, of another life of the engine too", n)
		}
		// A client that leaves while the server is asked.
		s.p.Incarnation = "a third"
		status.Store(0)
		gone := errors.New("gone")
		ctx, cancel := context.WithCancelCause(context.Background())
		time.AfterFunc(time.Second, func() { cancel(gone) })
		before := time.Now()
		out := s.dialect.Run(ctx, s.attempt(`{"model":"fake","prompt":"x"}`, "/v1/completions"), &tape{})
		if out.Result != Cancelled || !errors.Is(out.Err, gone) || time.Since(before) != time.Second {
			s.Errorf("got %+v after %s", out, time.Since(before))
		}
		s.quiet(3 * time.Second)
	})
}

// TestPrefillFails: what an engine does to SGLang's other half is made good by telling it, and another attempt has other rooms.
func TestPrefillFails(t *testing.T) {
	onStage(t, SGLangName, func(s *stage) {
		once := &routertest.Once{}
		s.p.Fault = func(_ *routertest.EngineCall, stage string, _ int) routertest.Action {
			if stage == routertest.StagePrefill && once.Take() {
				time.Sleep(time.Second) // decode waits by now
				return routertest.Die
			}
			return routertest.Go
		}
		a := s.attempt(`{"model":"fake","prompt":"x","max_tokens":2}`, "/v1/completions")
		if out := s.dialect.Run(context.Background(), a, &tape{}); out.Result != Failed || out.Reason != "prefill_lost" {
			s.Fatalf("got %+v", out)
		}
		a.Number++
		if out := s.dialect.Run(context.Background(), a, &tape{}); out.Result != Finished {
			s.Fatalf("got %+v", out)
		}
		s.quiet(3 * time.Second)
		if n := len(s.d.Aborts()); n != 1 {
			s.Errorf("%d requests aborted at decode", n)
		}
		s.aborts(false)
	})
}

// TestUnregistered: an entry that says too little is the worker's fault, and nothing is sent.
func TestUnregistered(t *testing.T) {
	for _, dialect := range []string{NixlPushName, MooncakeName, NCCLName, SGLangName} {
		onStage(t, dialect, func(s *stage) {
			s.p.KVAddr = "nowhere"
			out := s.dialect.Run(context.Background(), s.attempt(`{"model":"fake","prompt":"x"}`, "/v1/completions"), &tape{})
			if out.Result != Failed || !out.Undialled || out.Reason != "prefill_unregistered" || s.p.Calls()+s.d.Calls() > 0 {
				s.Errorf("%s: %+v", dialect, out)
			}
		})
	}
}

// TestErrandsAreBounded: what is too much is dropped and counted, and Close waits for nobody for long.
func TestErrandsAreBounded(t *testing.T) {
	onStage(t, SGLangName, func(s *stage) {
		var dropped atomic.Int32
		e := NewErrands(s.client, func(result string) {
			if result == "dropped" {
				dropped.Add(1)
			}
		})
		for range errandsMax {
			if !e.run(func(ctx context.Context) { <-ctx.Done() }) {
				s.Fatal("refused")
			}
		}
		e.abort(target(&s.p.Worker), uuid())
		if dropped.Load() != 1 || e.Pending() != errandsMax {
			s.Errorf("%d dropped, %d pending", dropped.Load(), e.Pending())
		}
		e.Close()
		if e.run(func(context.Context) {}) || e.Pending() != 0 {
			s.Error("errands behind the end")
		}
	})
}
