package router

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/headrace/headrace/router/routertest"
)

// several is what an answer of several choices has.
type several struct {
	texts, finish []string
	roles         []int
	usage         map[string]any
	dones         int
}

// byChoice takes an answer apart by the choices' indices.
func byChoice(t *testing.T, a *answer, n int) *several {
	t.Helper()
	s := &several{texts: make([]string, n), finish: make([]string, n), roles: make([]int, n), dones: a.dones, usage: a.usage}
	lines := []string{a.raw}
	if strings.HasPrefix(a.raw, "data: ") {
		lines = strings.Split(strings.ReplaceAll(a.raw, "data: ", ""), "\n\n")
	}
	for _, line := range lines {
		var c struct {
			Choices []struct {
				Index   int
				Text    string
				Delta   struct{ Role, Content string }
				Message struct{ Content string }
				Finish  string `json:"finish_reason"`
			}
		}
		if json.Unmarshal([]byte(line), &c) != nil {
			continue
		}
		for _, ch := range c.Choices {
			if ch.Index < 0 || ch.Index >= n {
				t.Fatalf("choice %d of %d in %s", ch.Index, n, line)
			}
			s.texts[ch.Index] += ch.Text + ch.Delta.Content + ch.Message.Content
			s.finish[ch.Index] += ch.Finish
			if ch.Delta.Role != "" {
				s.roles[ch.Index]++
			}
		}
	}
	return s
}

// wantChoices checks an answer of n choices against the fake model.
func wantChoices(t *testing.T, a *answer, q ask, n int) {
	t.Helper()
	if a.status != 200 || a.failure != "" || a.err != nil {
		t.Fatalf("got %d %q %v in %s", a.status, a.failure, a.err, a.raw)
	}
	s := byChoice(t, a, n)
	for i := range n {
		if want := routertest.Text("hello there", 7+uint64(i), q.n); s.texts[i] != want || s.finish[i] != "length" {
			t.Errorf("choice %d is %q (%s), want %q", i, s.texts[i], s.finish[i], want)
		}
		if roles := 1; q.stream && q.path != "/v1/completions" && s.roles[i] != roles {
			t.Errorf("choice %d has %d roles", i, s.roles[i])
		}
	}
	if q.stream && (s.dones != 1 || (s.usage != nil) != q.usage) {
		t.Errorf("%d times [DONE], usage %v", s.dones, s.usage)
	}
	if u := s.usage; (q.usage || !q.stream) && (u["prompt_tokens"] != 2.0 || u["completion_tokens"] != float64(n*q.n) || u["total_tokens"] != float64(2+n*q.n)) {
		t.Errorf("usage %v", u)
	}
}

func choices(q ask, n int) ask {
	q.more = fmt.Sprintf(`,"n":%d`, n)
	return q
}

// patient is for many legs at once on a slow machine.
func patient(c *Config) {
	c.Upstream.SilenceTimeout, c.ProbeTimeout, c.RecoveryTimeout = 5*time.Second, 5*time.Second, 2*patience
}

func TestChoices(t *testing.T) {
	for _, ids := range [][]string{{"p1", "d1"}, {"p1", "p2", "d1", "d2"}, {"d1"}} {
		t.Run(fmt.Sprint(len(ids), "workers"), func(t *testing.T) {
			h := start(t, patient, pair(ids...)...)
			for _, path := range []string{"/v1/chat/completions", "/v1/completions"} {
				for _, n := range []int{1, 2, 6} { // one token, and several
					both(t, func(t *testing.T, stream bool) {
						q := ask{path: path, n: n, stream: stream, usage: stream && n == 6}
						wantChoices(t, h.do(choices(q, 3)), q, 3)
					})
				}
			}
			q := ask{n: 4, stream: true}
			wantChoices(t, h.do(choices(q, 128)), q, 128)
		})
	}
}

// TestChoicesStayTogether: the others go where the first one's prompt is known.
func TestChoicesStayTogether(t *testing.T) {
	h := start(t, nil, pair("p1", "p2", "d1", "d2")...)
	q := ask{n: 5, prompt: strings.Repeat("a long prompt ", 200)}
	if a := h.do(choices(q, 4)); a.status != 200 {
		t.Fatal(a.raw)
	}
	for _, w := range h.workers {
		if n := w.Calls(); n != 0 && n != 4 {
			t.Errorf("%s had %d of the 4 choices", w.ID, n)
		}
	}
}

// TestChoiceFaults breaks one choice at every point: it alone is dispatched again, and the answer is the undisturbed one.
func TestChoiceFaults(t *testing.T) {
	leakCheck(t)
	for _, f := range faults() {
		if f.action != routertest.Die {
			continue
		}
		for _, broken := range []int{0, 1} {
			both(t, func(t *testing.T, stream bool) {
				t.Run(fmt.Sprintf("%s-choice-%d", f, broken), func(t *testing.T) {
					t.Parallel()
					once := &routertest.Once{}
					ws := pair("p1", "p2", "d1", "d2")
					for _, w := range ws {
						w.Fault = func(c *routertest.Call, stage string, n int) routertest.Action {
							if c.KV.Choice == broken && c.KV.Role == f.who && stage == f.stage && (n == f.n || stage == routertest.StageFinish) && once.Take() {
								return f.action
							}
							return routertest.Go
						}
					}
					h := startParallel(t, patient, ws...)
					q := ask{n: 9, stream: stream, usage: stream}
					wantChoices(t, h.do(choices(q, 3)), q, 3)
					calls := map[int]int{}
					for _, w := range ws {
						for _, c := range w.Last() {
							if c.KV.Role == "prefill" {
								calls[c.KV.Choice]++
							}
						}
					}
					for i := range 3 {
						if i != broken && calls[i] != 1 {
							t.Errorf("choice %d was dispatched %d times", i, calls[i])
						}
					}
					if !once.Within(patience) {
						t.Error("the fault did not happen")
					}
				})
			})
		}
	}
}

// TestChoiceRefused: what is the client's fault ends all choices.
func TestChoiceRefused(t *testing.T) {
	ws := pair("p1", "d1")
	for _, w := range ws {
		w.Fault = func(c *routertest.Call, stage string, _ int) routertest.Action {
			if c.KV.Choice == 2 && stage == routertest.StageRequest {
				return routertest.Bad
			}
			return routertest.Go
		}
	}
	h := start(t, nil, ws...)
	if a := h.do(choices(ask{n: 50}, 4)); a.status != 400 || a.code != "fake" {
		t.Errorf("got %d %s", a.status, a.raw)
	}
	if a := h.do(choices(ask{n: 50, stream: true}, 4)); a.failure == "" || a.dones != 0 {
		t.Errorf("got %s", a.raw)
	}
}

// TestChoicesHangUp: a client that leaves ends all choices, and nothing of them is left.
func TestChoicesHangUp(t *testing.T) {
	for _, stage := range []struct {
		name   string
		choice int
	}{{routertest.StageTransfer, 0}, {routertest.StageToken, 0}, {routertest.StageToken, 2}} {
		t.Run(fmt.Sprintf("%s-%d", stage.name, stage.choice), func(t *testing.T) {
			there := make(chan struct{}, 8)
			ws := pair("p1", "d1")
			for _, w := range ws {
				w.Fault = func(c *routertest.Call, name string, n int) routertest.Action {
					if c.KV.Choice != stage.choice || name != stage.name || name == routertest.StageToken && n != 3 {
						return routertest.Go
					}
					there <- struct{}{}
					return routertest.Wait
				}
			}
			h := start(t, patient, ws...)
			c := h.dial()
			if _, err := c.Write([]byte(post(choices(ask{n: 500, stream: true}, 3).body()))); err != nil {
				t.Fatal(err)
			}
			<-there
			c.Close()
			h.quiet()
			if s := h.r.Status(); s.Queued != 0 || s.Active != 0 {
				t.Errorf("%+v", s)
			}
		})
	}
}
