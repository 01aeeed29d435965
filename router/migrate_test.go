package router

import (
	"fmt"
	"net/http"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/headrace/headrace/router/dialects"
	"github.com/headrace/headrace/router/routertest"
)

// movers are fleets in which another engine can go on, by dialect.
var movers = map[string]func() []*routertest.Engine{
	"openai":         func() []*routertest.Engine { return engines("openai", "e1", "e2", "e3") },
	"vllm":           func() []*routertest.Engine { return engines("vllm", "p1", "p2", "d1", "d2", "d3") },
	"vllm-nixl":      func() []*routertest.Engine { return engines("vllm-nixl", "p1", "p2", "d1", "d2", "d3") },
	"vllm-nixl-push": func() []*routertest.Engine { return engines("vllm-nixl-push", "p1", "p2", "d1", "d2", "d3") },
	"vllm-mooncake":  func() []*routertest.Engine { return engines("vllm-mooncake", "p1", "p2", "d1", "d2", "d3") },
	"vllm-p2p-nccl":  func() []*routertest.Engine { return engines("vllm-p2p-nccl", "p1", "p2", "d1", "d2", "d3") },
	"sglang":         func() []*routertest.Engine { return engines("sglang", "p1", "p2", "d1", "d2", "d3") },
}

var idOf = regexp.MustCompile(`"id":"[^"]*"`)

// plain is a stream without what a part of a character leaves: events that say nothing, of which none may come, or one too many.
func plain(answer string) string { return saysNothing.ReplaceAllString(alike(answer), "") }

var saysNothing = regexp.MustCompile(`data: [^\n]*"(text|content)":""[^\n]*"finish_reason":null[^\n]*\n\n`)

// oneID holds that all events of a stream have the same id.
func oneID(t *testing.T, raw string) {
	t.Helper()
	ids := map[string]bool{}
	for _, id := range idOf.FindAllString(raw, -1) {
		ids[id] = true
	}
	if len(ids) != 1 {
		t.Errorf("a stream with the ids %v", ids)
	}
}

// deaths lets the engines that answer die at the tokens at, one after the other. It returns how many did.
func deaths(es []*routertest.Engine, stage string, at ...int) *atomic.Int64 {
	dead := &atomic.Int64{}
	for _, e := range es {
		e.Fault = func(c *routertest.EngineCall, s string, n int) routertest.Action {
			if i := dead.Load(); c.Role != "prefill" && s == stage && int(i) < len(at) && n == at[i] && dead.CompareAndSwap(i, i+1) {
				return routertest.Die
			}
			return routertest.Go
		}
	}
	return dead
}

// TestMigration has the engine that answers die in mid-stream, in all dialects: the client sees the undisturbed stream, byte for byte.
func TestMigration(t *testing.T) {
	for dialect, fleet := range movers {
		t.Run(dialect, func(t *testing.T) {
			for _, tt := range []struct {
				name  string
				stage string
				at    []int
				more  string
				how   string // where tokens are remembered
			}{
				{name: "first", stage: routertest.StageToken, at: []int{1}, how: dialects.Resumed},
				{name: "behind half a character", stage: routertest.StageToken, at: []int{3}, how: dialects.Resumed},
				{name: "later", stage: routertest.StageToken, at: []int{5}, how: dialects.Resumed},
				{name: "twice", stage: routertest.StageToken, at: []int{5, 9}, how: dialects.Resumed},
				{name: "at the end", stage: routertest.StageFinish, at: []int{0}, how: dialects.Ended},
				{name: "tools", stage: routertest.StageToken, at: []int{5}, more: `,"presence_penalty":0.5`, how: dialects.Retold},
			} {
				for _, path := range []string{"/v1/chat/completions", "/v1/completions"} {
					t.Run(tt.name+path, func(t *testing.T) {
						es := fleet()
						dead := deaths(es, tt.stage, tt.at...)
						h := startEngines(t, nil, es...)
						q := ask{path: path, n: 12, stream: true, usage: true, more: `,"temperature":0` + tt.more}
						status, got := raw(t, h.client, h.addr, path, q.body())
						if _, want := raw(t, h.client, loner(t).Addr, path, q.body()); status != 200 || plain(got) != plain(want) {
							t.Errorf("got %d\n%s\nwant\n%s", status, got, want)
						}
						oneID(t, got)
						if int(dead.Load()) != len(tt.at) {
							t.Errorf("%d engines died", dead.Load())
						}
						how := tt.how
						if mode := dialects.DefaultMigration()[dialect]; mode == dialects.Text {
							how = dialects.Retold
						}
						deaths := float64(len(tt.at))
						if m := h.r.metrics.migrations; !h.counted(m.WithLabelValues(dialect, how), deaths) || !h.counted(m.WithLabelValues(dialect, "finished"), 1) {
							t.Errorf("%v streams %s, want %v", value(m.WithLabelValues(dialect, how)), how, deaths)
						}
					})
				}
			}
		})
	}
}

// TestMigrationFromBursts has events of several tokens, with and without stop strings, and the engine die at each of them.
func TestMigrationFromBursts(t *testing.T) {
	text := routertest.Text("hello there", 7, 12)
	middle := text[len(text)/2+1:][:4]
	for _, burst := range []int{1, 2, 3} {
		for _, more := range []string{``, `,"stop":["never seen"]`, fmt.Sprintf(`,"stop":["never",%q]`, middle)} {
			for at := range 12 {
				t.Run(fmt.Sprintf("%d%s-%d", burst, more, at), func(t *testing.T) {
					es := movers["vllm"]()
					dead := deaths(es, routertest.StageToken, at)
					alone := loner(t)
					for _, e := range append(es, alone) {
						e.Burst = burst
					}
					h := startEngines(t, nil, es...)
					q := ask{n: 12, stream: true, usage: true, more: `,"temperature":0` + more}
					got := h.do(q)
					req, _ := http.NewRequest("POST", "http://"+alone.Addr+"/v1/chat/completions", strings.NewReader(q.body()))
					req.Header.Set("X-Request-Id", "x")
					resp, err := h.client.Do(req)
					if err != nil {
						t.Fatal(err)
					}
					want := read(t, resp)
					resp.Body.Close()
					if got.text != want.text || got.finish != want.finish || fmt.Sprint(got.usage) != fmt.Sprint(want.usage) || got.failure != "" || got.dones != 1 || got.roles != 1 {
						t.Errorf("got %+v\nwant %+v", got, want)
					}
					if dead.Load() == 0 && want.finish == "length" {
						t.Error("nobody died")
					}
				})
			}
		}
	}
}

// TestKills kills engines as a process is killed, in each phase of each dialect: all connections break and nobody listens any more. The
// client gets what an undisturbed request gets.
func TestKills(t *testing.T) {
	phases := []struct {
		role, stage string
		n           int
	}{
		{role: "prefill", stage: routertest.StageRequest}, {role: "prefill", stage: routertest.StagePrefill}, {role: "prefill", stage: routertest.StageAnswer}, {role: "prefill", stage: routertest.StageAnswered},
		{role: "decode", stage: routertest.StageRequest}, {role: "decode", stage: routertest.StageLoad}, {role: "decode", stage: routertest.StageLoaded},
		{role: "decode", stage: routertest.StageToken}, {role: "decode", stage: routertest.StageToken, n: 4}, {role: "decode", stage: routertest.StageFinish},
	}
	for dialect, fleet := range movers {
		if dialect == dialects.PlainName {
			continue // has no pairs
		}
		for _, phase := range phases {
			for _, victims := range []string{"p", "d", "pd"} {
				t.Run(fmt.Sprintf("%s/%s-%s-%d/%s", dialect, phase.role, phase.stage, phase.n, victims), func(t *testing.T) {
					es := fleet()
					var once routertest.Once
					for _, e := range es {
						e.Fault = func(c *routertest.EngineCall, stage string, n int) routertest.Action {
							if c.Role != phase.role || stage != phase.stage || n != phase.n || !once.Take() {
								return routertest.Go
							}
							mates := []*routertest.Engine{c.Engine} // and who it is with: nobody else has been asked
							for _, other := range es {
								if other != c.Engine && other.Calls() > 0 {
									mates = append(mates, other)
								}
							}
							for _, v := range mates {
								if strings.Contains(victims, v.ID[:1]) {
									go v.Stop() // it is waited for below
								}
							}
							if strings.Contains(victims, c.Engine.ID[:1]) {
								return routertest.Wait
							}
							return routertest.Go
						}
					}
					h := startEngines(t, nil, es...)
					q := ask{n: 9, stream: true, usage: true, more: `,"temperature":0`}
					h.do(q).wantWhole(t, q)
					if !once.Within(patience) {
						t.Error("nobody was killed")
					}
					for _, e := range es { // what leases hold for the dead is not the matter here
						e.Stop()
					}
				})
			}
		}
	}
}

// TestMigrationOfSamples: what was drawn cannot be made again, but gone on with, in the middle of a character too. (The fake draws by position.)
func TestMigrationOfSamples(t *testing.T) {
	for _, burst := range []int{1, 2, 3} {
		for at := 1; at < 30; at++ {
			t.Run(fmt.Sprintf("%d-%d", burst, at), func(t *testing.T) {
				es := movers["vllm"]()
				dead := deaths(es, routertest.StageToken, at)
				for _, e := range es {
					e.Burst = burst
				}
				h := startEngines(t, nil, es...)
				q := ask{n: 30, stream: true, usage: true}
				resp, err := h.client.Post("http://"+h.addr+"/v1/chat/completions", "application/json", strings.NewReader(strings.Replace(q.body(), `"seed":7,`, "", 1)))
				if err != nil {
					t.Fatal(err)
				}
				defer resp.Body.Close()
				a, want := read(t, resp), routertest.Text("hello there", 0, 30)
				if a.text == want && a.dones == 1 && a.usage["completion_tokens"] == 30.0 {
					return
				}
				if burst == 1 || at > 18 || !strings.Contains(a.failure, "came together") && !strings.Contains(a.failure, "no point") || !strings.HasPrefix(want, a.text) || dead.Load() != 1 {
					t.Errorf("got %+v, want %q", a, want)
				}
			})
		}
	}
}

// TestNoMigration holds that what cannot be moved ends with an error that says why.
func TestNoMigration(t *testing.T) {
	for _, tt := range []struct {
		dialect, more, why string
		noIDs              bool
	}{
		{dialect: "openai", why: "drawn at random"},
		{dialect: "vllm", more: `,"n":2`, why: "several answers"},
		{dialect: "vllm", more: `,"tools":[{"type":"function"}]`, why: "tools, and it is drawn at random"},
		{dialect: "vllm", more: `,"presence_penalty":1`, why: "presence_penalty, and it is drawn at random"},
		{dialect: "vllm", more: `,"seed":null,"use_beam_search":true`, why: "beam search"},
		{dialect: "vllm", noIDs: true, why: "does not say its tokens, and it is drawn at random"},
		{dialect: "sglang", why: "drawn at random"},
	} {
		t.Run(tt.dialect+tt.more, func(t *testing.T) {
			es := movers[tt.dialect]()
			for _, e := range es {
				e.NoIDs = tt.noIDs
			}
			deaths(es, routertest.StageToken, 5)
			h := startEngines(t, nil, es...)
			body := strings.Replace(ask{n: 12, stream: true, more: tt.more}.body(), `"seed":7,`, "", 1)
			resp, err := h.client.Post("http://"+h.addr+"/v1/chat/completions", "application/json", strings.NewReader(body))
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			a := read(t, resp)
			if a.status != 200 || a.dones != 0 || a.text == "" || !strings.Contains(a.failure, tt.why) || !strings.Contains(a.failure, "broke off") {
				t.Errorf("got %+v", a)
			}
			if m := h.r.metrics.migrations.WithLabelValues(tt.dialect, "impossible"); !h.counted(m, 1) {
				t.Errorf("%v streams could not be moved", value(m))
			}
		})
	}
}
