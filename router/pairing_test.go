package router

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/headrace/headrace/router/body"
	"github.com/headrace/headrace/router/pairing"
	"github.com/headrace/headrace/router/prefix"
	"github.com/headrace/headrace/router/routertest"
	"github.com/headrace/headrace/router/tokens"
)

func joint(c *Config) { c.Policy = &pairing.Joint{} }

// whole are workers that serve alone.
func whole(ids ...string) []*routertest.Worker {
	var ws []*routertest.Worker
	for _, id := range ids {
		ws = append(ws, &routertest.Worker{Worker: pairing.Worker{ID: id, Role: pairing.RoleDecode}})
	}
	return ws
}

// where sends a request and tells which worker served it.
func (h *harness) where(q ask, header http.Header) string {
	h.t.Helper()
	req, err := http.NewRequest(http.MethodPost, "http://"+h.addr+"/v1/chat/completions", strings.NewReader(q.body()))
	if err != nil {
		h.t.Fatal(err)
	}
	for k, v := range header {
		req.Header[k] = v
	}
	resp, err := h.client.Do(req)
	if err != nil {
		h.t.Fatal(err)
	}
	defer resp.Body.Close()
	a := read(h.t, resp)
	a.wantWhole(h.t, q)
	list := h.r.decisions.list(resp.Header.Get("X-Request-Id"))
	if len(list) != 1 {
		h.t.Fatalf("%d decisions about %s", len(list), resp.Header.Get("X-Request-Id"))
	}
	return list[0].Whole
}

// Without any tokenizer and event a conversation stays where it was, by the bytes of its requests. Prompts and answers are too short to
// learn from how fast a worker is: on a busy host one may look so slow that its conversations are better off elsewhere.
func TestConversationsStayByTheirBytes(t *testing.T) {
	for _, name := range []string{pairing.NameJoint, pairing.NamePrefixOnly} {
		t.Run(name, func(t *testing.T) {
			policy, err := pairing.New(name, 1)
			if err != nil {
				t.Fatal(err)
			}
			h := start(t, func(c *Config) { c.Policy = policy }, whole("d1", "d2", "d3", "d4")...)
			used := map[string]bool{}
			for talk := range 8 {
				prompt := strings.Repeat(fmt.Sprint("talk ", talk, " "), 140)
				first := h.where(ask{prompt: prompt, n: 1}, nil)
				used[first] = true
				for turn := range 2 {
					prompt += strings.Repeat(fmt.Sprint("turn ", turn, " "), 50)
					if next := h.where(ask{prompt: prompt, n: 1}, nil); next != first {
						t.Errorf("talk %d went from %s to %s", talk, first, next)
					}
				}
			}
			if len(used) < 2 {
				t.Errorf("eight conversations all went to %v", used)
			}
			v := h.r.fleet.view()
			for i := range v.Workers {
				if c := &v.Workers[i]; c.Speeds != (pairing.Speeds{}) {
					t.Errorf("of %s was learned %+v: the choice depends on how busy this host is", c.ID, c.Speeds)
				}
			}
			h.r.fleet.viewed(v)
			last := h.r.decisions.list("")[0]
			if last.Cached < 200 || last.Exact || last.PromptTokens < 300 {
				t.Errorf("%+v", last)
			}
		})
	}
}

func TestSessionsStayWithTheirWorkers(t *testing.T) {
	h := start(t, func(c *Config) { c.Policy = &pairing.Random{} }, whole("d1", "d2", "d3", "d4")...)
	session := func(name string) http.Header { return http.Header{"X-Session-Id": {name}} }
	q := ask{n: 1}
	used := map[string]bool{}
	for i := range 8 {
		name := fmt.Sprint("s", i)
		first := h.where(q, session(name))
		used[first] = true
		for range 3 {
			if next := h.where(q, session(name)); next != first {
				t.Errorf("session %s went from %s to %s", name, first, next)
			}
		}
	}
	if len(used) < 2 {
		t.Errorf("eight sessions all went to %v", used)
	}
	// Its worker gone, it is at home elsewhere.
	first := h.where(q, session("moved"))
	var left []*routertest.Worker
	for _, w := range h.workers {
		if w.ID != first {
			left = append(left, w)
		}
	}
	h.source.set(left...)
	h.until("the worker to be gone", func() bool { return len(*h.r.fleet.order.Load()) == 3 })
	second := h.where(q, session("moved"))
	if third := h.where(q, session("moved")); second == first || third != second {
		t.Errorf("behind %s it went to %s and %s", first, second, third)
	}
	if n := h.r.Status().Sessions; n != 9 {
		t.Errorf("%d sessions", n)
	}
}

func TestSessionMap(t *testing.T) {
	s := newSessions(time.Minute)
	at := time.Unix(1_790_000_000, 0)
	a, b := s.id([]byte("k1"), []byte("m"), []byte("x")), s.id([]byte("k2"), []byte("m"), []byte("x"))
	if a == b || a == 0 || s.id(nil, nil, nil) != 0 || s.id(nil, nil, make([]byte, sessionBytesMax+1)) != 0 {
		t.Errorf("ids %d and %d", a, b)
	}
	s.stay(a, []string{"w"}, at)
	if got := s.workers(a, at.Add(time.Minute)); len(got) != 1 || s.workers(b, at) != nil {
		t.Errorf("%v", got)
	}
	if got := s.workers(a, at.Add(time.Minute+1)); got != nil || s.count() != 0 {
		t.Errorf("behind its time: %v", got)
	}
	for i := range uint64(sessionsMax + 10) {
		s.stay(i+1, []string{"w"}, at)
	}
	if s.count() != sessionsMax || s.workers(10, at) != nil || s.workers(11, at) == nil {
		t.Errorf("%d are kept", s.count())
	}
}

// fakeTokens makes a token of each word of the prompt.
type fakeTokens struct{}

func (fakeTokens) Prompt(p *tokens.Prompt, _ string, b []byte) error {
	var r struct{ Messages []struct{ Content string } }
	if err := json.Unmarshal(b, &r); err != nil || len(r.Messages) == 0 {
		return errors.New("no messages")
	}
	p.Reset()
	for _, m := range r.Messages {
		for _, w := range strings.Fields(m.Content) {
			p.Own = append(p.Own, uint32(len(w)))
		}
	}
	p.Parts = append(p.Parts, tokens.Part{IDs: p.Own})
	return nil
}

// What a decision was made by is there for people and for spans.
func TestDecisionsAreExplained(t *testing.T) {
	var mu sync.Mutex
	var told []pairing.Decision
	h := start(t, func(c *Config) {
		joint(c)
		c.Tokens = map[string]Tokens{"fake": fakeTokens{}}
		c.Decided = func(_ context.Context, id string, dispatch int, d *pairing.Decision) {
			mu.Lock()
			defer mu.Unlock()
			if id != "" && dispatch == 1 {
				told = append(told, *d)
			}
		}
	}, pair("p1", "p2", "d1", "d2")...)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go func() { _ = h.r.ServeAdmin(ln) }()
	for range 2 {
		h.do(ask{prompt: strings.Repeat("so many words ", 400), n: 2})
	}
	mu.Lock()
	defer mu.Unlock()
	if len(told) != 2 || told[0].CachedTokens != 0 || told[1].CachedTokens < 1000 {
		t.Fatalf("told %+v", told)
	}
	id := h.r.decisions.list("")[0].ID
	resp, err := h.client.Get("http://" + ln.Addr().String() + "/debug/decisions/" + id)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var list []struct {
		Tokens  int64 `json:"prompt_tokens_estimated"`
		Exact   bool  `json:"prompt_tokens_exact"`
		Cached  int64 `json:"cached_tokens"`
		Options []struct {
			Prefill, Decode, Whole string
			Cached                 int64   `json:"cached_prefill"`
			Prefills               float64 `json:"prefill_s"`
			Total                  float64 `json:"total_s"`
			Chosen                 bool
		}
	}
	if err := json.NewDecoder(resp.Body).Decode(&list); err != nil || len(list) != 1 {
		t.Fatalf("%+v, %v", list, err)
	}
	d := list[0]
	if !d.Exact || d.Tokens != 1200 || d.Cached < 1000 || len(d.Options) < 2 || !d.Options[0].Chosen || d.Options[0].Cached != d.Cached || d.Options[0].Total <= 0 {
		t.Errorf("%+v", d)
	}
}

func TestAdaptersAreModelsOfTheRouter(t *testing.T) {
	ws := whole("d1", "d2")
	ws[1].LoRAs = []string{"poet"}
	h := start(t, joint, ws...)
	req := strings.Replace(ask{n: 1}.body(), `"fake"`, `"poet"`, 1)
	resp, err := h.client.Post("http://"+h.addr+"/v1/chat/completions", "application/json", strings.NewReader(req))
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	if list := h.r.decisions.list(""); len(list) == 0 || list[0].Whole != "d2" || list[0].Model != "poet" {
		t.Errorf("%+v", list)
	}
	resp, err = h.client.Get("http://" + h.addr + "/v1/models/poet")
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		t.Errorf("the adapter is listed with %d", resp.StatusCode)
	}
}

// What the workers' answers show of their speed is in the view of the next decision.
func TestSpeedsAreLearnedFromAnswers(t *testing.T) {
	p := pairing.Worker{ID: "p", Role: pairing.RolePrefill, Model: "m", Addr: "p:1", Dialect: "native"}
	d := pairing.Worker{ID: "d", Role: pairing.RoleDecode, Model: "m", Addr: "d:1", Dialect: "native"}
	f, now := newTestFleet(t, p, d)
	c := chargeOf(f, pairing.Decision{Prefill: &p, Decode: &d}, 2000, 3000)
	next := chargeOf(f, pairing.Decision{Prefill: &p, Decode: &d}, 1000, 1000) // waits behind it
	*now = now.Add(200 * time.Millisecond)
	v := f.view()
	if l := v.Workers[0].Load; l.PrefillTokens != 3000 || l.Prefills != 2 || l.HeadFor != 200*time.Millisecond || v.Workers[1].Load.HeldTokens != 4000 {
		t.Errorf("%+v, %+v", l, v.Workers[1].Load)
	}
	c.prefilled(f.now())
	c.prefilled(f.now())
	*now = now.Add(100 * time.Millisecond)
	next.prefilled(f.now())
	for i := range 21 {
		c.text(1, now.Add(time.Duration(i)*20*time.Millisecond))
	}
	c.release()
	next.release()
	next.release()
	v = f.view()
	if s := v.Workers[0].Speeds; s.PrefillRate < 9999 || s.PrefillRate > 10001 || s.ITL != 0 {
		t.Errorf("of prefill: %+v", s)
	}
	if s := v.Workers[1].Speeds; s.ITL < 0.0199 || s.ITL > 0.0201 || s.PrefillRate != 0 {
		t.Errorf("of decode: %+v", s)
	}
	for _, w := range v.Workers {
		w.Load.HeadFor = 0
		if w.Load != (pairing.Load{}) {
			t.Errorf("%s is left with %+v", w.ID, w.Load)
		}
	}
	// One that failed teaches nothing, and another process under the same name begins anew.
	*now = now.Add(time.Second)
	chargeOf(f, pairing.Decision{Prefill: &p, Decode: &d}, 100000, 1).release()
	if s := f.view().Workers[0].Speeds; s.PrefillRate > 10001 {
		t.Errorf("%+v", s)
	}
	p.Incarnation = "2"
	f.take([]pairing.Worker{p, d})
	if s := f.view().Workers[0].Speeds; s != (pairing.Speeds{}) {
		t.Errorf("%+v", s)
	}
}

// What a worker has computed of the prompt at work is not ahead of the next one.
func TestSpeedsCountWhatIsLeftAhead(t *testing.T) {
	w := pairing.Worker{ID: "w", Role: pairing.RoleBoth, Model: "m", Addr: "w:1", Dialect: "openai"}
	f, now := newTestFleet(t, w)
	d := pairing.Decision{Whole: &w}
	serve := func(tokens int64, took time.Duration) {
		c := chargeOf(f, d, tokens, tokens)
		*now = now.Add(took)
		c.prefilled(f.now())
		c.release()
	}
	serve(5000, 500*time.Millisecond) // 10,000 a second
	first := chargeOf(f, d, 4000, 4000)
	*now = now.Add(300 * time.Millisecond) // 3,000 are computed
	second := chargeOf(f, d, 1000, 1000)
	if second.ahead != 2000 {
		t.Errorf("%d tokens are ahead of the second, its own included, want 2000", second.ahead)
	}
	*now = now.Add(100 * time.Millisecond)
	first.prefilled(f.now())
	*now = now.Add(100 * time.Millisecond)
	second.prefilled(f.now())
	if rate := f.view().Workers[0].Speeds.PrefillRate; rate < 9990 || rate > 10010 {
		t.Errorf("%.0f tokens a second, want 10000", rate)
	}
	// However long the one at work takes: no more than all of it.
	slow := chargeOf(f, d, 3000, 3000)
	*now = now.Add(time.Hour)
	next := chargeOf(f, d, 500, 500)
	if next.ahead != 500 {
		t.Errorf("%d tokens are ahead, want 500", next.ahead)
	}
	for _, c := range []*charge{first, second, slow, next} {
		c.release()
	}
}

func TestPackedPromptsShareTheirBeginning(t *testing.T) {
	parse := func(s string) *body.Body {
		b, err := body.Parse([]byte(s))
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	long := strings.Repeat("abcdefgh", 100)
	a := parse(`{"model":"m","seed":1,"messages":[{"role":"user","content":"` + long + `x"}]}`)
	b := parse(`{"messages":[{"role":"user","content":"` + long + `y"},{"role":"user"}],"model":"m"}`)
	c := parse(`{"model":"m","messages":[{"role":"user","content":"z` + long + `"}]}`)
	x, y, z := pack(nil, "m", a), pack(nil, "m", b), pack(nil, "m", c)
	same := func(x, y []uint32) int {
		n := 0
		for n < len(x) && n < len(y) && x[n] == y[n] {
			n++
		}
		return n
	}
	if n := same(x, y); n < 200 || n >= len(x) {
		t.Errorf("%d of %d words are the same", n, len(x))
	}
	if n := same(x, z); n > 10 {
		t.Errorf("%d words of another prompt are the same", n)
	}
	if n := same(pack(nil, "m2", a), x); n != 0 {
		t.Errorf("%d words of another model's prompt are the same", n)
	}
	if got := pack(nil, "m", parse(`{"model":"m"}`)); len(got) != 0 {
		t.Errorf("no prompt is %v", got)
	}
}

func BenchmarkPromptBytes(b *testing.B) {
	raw := []byte(`{"model":"m","messages":[{"role":"user","content":"` + strings.Repeat("some words ", 20000) + `"}]}`)
	parsed, refused := body.Parse(raw)
	if refused != nil {
		b.Fatal(refused)
	}
	p, err := newPrompts(&Config{})
	if err != nil {
		b.Fatal(err)
	}
	v := &pairing.View{}
	for i := range 8 {
		v.Workers = append(v.Workers, pairing.Candidate{Worker: &pairing.Worker{ID: fmt.Sprint("w", i), Model: "m"}})
	}
	p.guesses.Keep([]prefix.Worker{{ID: "w1"}})
	b.SetBytes(int64(len(raw)))
	b.ReportAllocs()
	for b.Loop() {
		q := p.of("/v1/chat/completions", "m", parsed)
		q.fill(v, "m")
		q.routed(pairing.Decision{Whole: v.Workers[1].Worker}, "m")
		q.done()
	}
}

// chargeOf books an attempt's work now.
func chargeOf(f *fleet, d pairing.Decision, tokens, held int64) *charge {
	c := &charge{}
	f.charge(c, &d, nil, tokens, held, f.now())
	return c
}
