package vllm

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/headrace/headrace/router"
	"github.com/headrace/headrace/router/pairing"
	"github.com/headrace/headrace/router/tokenize"
	"github.com/headrace/headrace/test/vllm/stage"
)

const (
	// indexBlocks is a small cache: 8,192 tokens, so that conversations drive each other out.
	indexBlocks = 256
	// indexBuffer is how many batches the engine keeps for those that missed some.
	indexBuffer = 10000
	// indexPatience is for what another process has done already.
	indexPatience = 10 * time.Second
	// indexError is how far predicted hits may be from the engine's own where events and requests cross on the way.
	indexError = 0.01
	// indexErrorFew is the same for so few requests that a single turn that overtakes the events of the one before is 5 % of them.
	indexErrorFew = 0.2
)

// crossing is how far predictions may be off where events and requests cross.
func crossing() float64 {
	if full {
		return indexError
	}
	return indexErrorFew
}

// TestIndex holds what the router says of a real vLLM's cache, by its KV events, against what vLLM itself counts.
func TestIndex(t *testing.T) {
	s := indexScene(t)
	t.Run("one by one", func(t *testing.T) { s.oneByOne(t, count(400, 50)) })
	t.Run("at once", func(t *testing.T) { s.atOnce(t, count(300, 30)) })
	t.Run("a gap", func(t *testing.T) { s.acrossGaps(t, count(200, 25), count(4, 1)) })
	t.Run("cut off", func(t *testing.T) { s.cutOff(t, count(50, 5)) })
	if full { // an engine takes its time to start
		t.Run("a restart", func(t *testing.T) {
			s.restart(t)
			s.oneByOne(t, 100)
		})
	}
	s.says(t)
}

// indexed is an engine behind a router that follows its events through a proxy.
type indexed struct {
	ctx    context.Context
	engine *stage.Engine
	proxy  *eventProxy
	source *oneWorker
	api    string
	admin  string
	talks  *talks
	all    tally
}

func indexScene(t *testing.T) *indexed {
	t.Helper()
	s := &indexed{ctx: t.Context(), talks: &talks{rng: rand.New(rand.NewPCG(7, 11))}}
	st, err := stage.New(environment(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() && s.engine != nil {
			t.Log(s.engine.Said())
		}
		if err := st.Close(); err != nil {
			t.Error(err)
		}
	})
	if s.engine, err = st.Publishing(stage.Config{Model: "tiny", Blocks: indexBlocks}, indexBuffer); err != nil {
		t.Fatal(err)
	}
	s.proxy = newEventProxy(t, s.engine.Events)
	tokens, err := tokenize.Load(st.Env.Model("tiny"), tokenize.Options{})
	if err != nil {
		t.Fatal(err)
	}
	begun := time.Now()
	if err := s.engine.Ready(s.ctx); err != nil {
		t.Fatal(err)
	}
	t.Logf("the engine is up after %.0f s", time.Since(begun).Seconds())
	s.source = &oneWorker{changed: make(chan struct{})}
	s.source.set(s.worker("1"))
	r, err := router.New(router.Config{Source: s.source, ClusterKey: make([]byte, 32), Policy: &pairing.Joint{}, Tokens: map[string]router.Tokens{"tiny": tokens}})
	if err != nil {
		t.Fatal(err)
	}
	var served sync.WaitGroup
	for serve, at := range map[*string]func(net.Listener) error{&s.api: r.Serve, &s.admin: r.ServeAdmin} {
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		*serve = "http://" + ln.Addr().String()
		served.Go(func() { _ = at(ln) })
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), indexPatience)
		defer cancel()
		if err := r.Shutdown(ctx); err != nil {
			t.Error(err)
		}
		served.Wait()
	})
	s.following(t)
	return s
}

func (s *indexed) worker(incarnation string) pairing.Worker {
	return pairing.Worker{ID: "vllm", Role: pairing.RoleBoth, Model: "tiny", Addr: s.engine.Addr, Dialect: pairing.DialectPlain, Incarnation: incarnation,
		BlockTokens: stage.BlockTokens, Blocks: indexBlocks, ContextTokens: stage.ContextTokens, Events: s.proxy.addr, EventsReplay: s.engine.EventsReplay}
}

// oneWorker is a fleet of one.
type oneWorker struct {
	mu      sync.Mutex
	workers []pairing.Worker
	changed chan struct{}
}

func (o *oneWorker) Workers() []pairing.Worker {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.workers
}

func (o *oneWorker) Changed() <-chan struct{} {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.changed
}

func (o *oneWorker) set(w pairing.Worker) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.workers = []pairing.Worker{w}
	close(o.changed)
	o.changed = make(chan struct{})
}

// tally adds up what was predicted and what the engine counted.
type tally struct{ requests, asked, predicted, hits int }

func (a *tally) add(b tally) {
	a.requests += b.requests
	a.asked += b.asked
	a.predicted += b.predicted
	a.hits += b.hits
}

func (a tally) String() string {
	return fmt.Sprintf("%d requests of %d tokens: %d predicted to be cached, %d were", a.requests, a.asked, a.predicted, a.hits)
}

// off is the error of the prediction, as a part of the hits.
func (a tally) off() float64 {
	return math.Abs(float64(a.predicted-a.hits)) / float64(max(a.hits, 1))
}

// counted is what the engine says of its prefix cache.
func (s *indexed) counted(t *testing.T) (queries, hits int) {
	t.Helper()
	m, err := s.engine.Metrics(s.ctx)
	if err != nil {
		t.Fatal(err)
	}
	return int(m["vllm:prefix_cache_queries_total"]), int(m["vllm:prefix_cache_hits_total"])
}

// since waits until the engine has counted so many tokens more than before, and returns how many of them were hits.
func (s *indexed) since(t *testing.T, queries, hits, tokens int) int {
	t.Helper()
	var q, h int
	if err := stage.Poll(s.ctx, indexPatience, func() error {
		if q, h = s.counted(t); q-queries < tokens {
			return fmt.Errorf("the engine has counted %d tokens of %d", q-queries, tokens)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if q-queries != tokens {
		t.Errorf("the engine has counted %d tokens for prompts of %d: others ask it, or the router counts otherwise", q-queries, tokens)
	}
	return h - hits
}

// ask sends a request and returns what the router had decided on.
func (s *indexed) ask(r stage.Request) (*stage.Answer, tally, error) {
	a := stage.Ask(s.ctx, s.api+"/v1", r)
	if a.Err != nil {
		return a, tally{}, a.Err
	}
	var list []struct {
		Tokens int  `json:"prompt_tokens_estimated"`
		Exact  bool `json:"prompt_tokens_exact"`
		Cached int  `json:"cached_tokens"`
	}
	if err := s.page(http.MethodGet, "/debug/decisions/"+a.ID, nil, &list); err != nil {
		return a, tally{}, err
	}
	if len(list) != 1 || !list[0].Exact || list[0].Tokens != len(a.Prompt) || len(a.Prompt) == 0 {
		return a, tally{}, fmt.Errorf("the engine saw %d tokens, the router's decisions are %+v", len(a.Prompt), list)
	}
	return a, tally{requests: 1, asked: len(a.Prompt), predicted: list[0].Cached}, nil
}

// page reads one of the router's admin pages.
func (s *indexed) page(method, path string, body []byte, into any) error {
	req, err := http.NewRequestWithContext(s.ctx, method, s.admin+path, bytes.NewReader(body))
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	said, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s %s: %s: %.200s", method, path, resp.Status, said)
	}
	if err != nil {
		return err
	}
	return json.Unmarshal(said, into)
}

// known says what the router lacks of the blocks that the engine has filled for a request and its answer.
func (s *indexed) known(r stage.Request, a *stage.Answer) error {
	whole := append(append([]int{}, a.Prompt...), a.Tokens...)
	body, err := json.Marshal(map[string]any{"model": "tiny", "prompt": whole, "cache_salt": r.Salt})
	if err != nil {
		return err
	}
	var page router.PrefixAnswer
	if err := s.page(http.MethodPost, "/debug/prefixes", body, &page); err != nil {
		return err
	}
	// The last token was given and not computed.
	want := (len(whole) - 1) / stage.BlockTokens * stage.BlockTokens
	if len(page.Workers) != 1 || !page.Exact || page.Workers[0].Approximate || page.Workers[0].Cached < want {
		return fmt.Errorf("%+v, want %d tokens", page, want)
	}
	return nil
}

// settle waits until the router knows what a request has left behind, or cannot know it for what was lost.
func (s *indexed) settle(r stage.Request, a *stage.Answer) error {
	return stage.Poll(s.ctx, indexPatience, func() error {
		err := s.known(r, a)
		if err != nil && s.proxy.gap() {
			return nil
		}
		return err
	})
}

// following waits until the router follows the engine's events.
func (s *indexed) following(t *testing.T) {
	t.Helper()
	if err := stage.Poll(s.ctx, indexPatience, func() error {
		st, err := s.status()
		if err != nil {
			return err
		}
		if e := st.Workers[0].Engine; e == nil || len(e.Events) != 1 || e.Events[0].State != "following" {
			return fmt.Errorf("%+v", e)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
}

func (s *indexed) status() (router.Status, error) {
	var st router.Status
	err := s.page(http.MethodGet, "/status", nil, &st)
	if err == nil && (len(st.Workers) != 1 || st.Prefixes == nil) {
		err = fmt.Errorf("%+v", st)
	}
	return st, err
}

// one sends a request when nothing else runs. strict: the prediction must be right.
func (s *indexed) one(t *testing.T, i int, strict bool) tally {
	t.Helper()
	k := s.talks.take()
	r := k.next()
	queries, hits := s.counted(t)
	a, sum, err := s.ask(r)
	if err != nil {
		t.Fatalf("request %d (%s): %v", i, k, err)
	}
	sum.hits = s.since(t, queries, hits, sum.asked)
	if strict && sum.predicted != sum.hits {
		t.Errorf("request %d (%s): %s", i, k, sum)
	}
	k.answered(a)
	s.talks.put(k)
	if err := s.settle(r, a); err != nil {
		t.Errorf("behind request %d (%s): %v", i, k, err)
	}
	return sum
}

func (s *indexed) oneByOne(t *testing.T, n int) {
	var sum tally
	for i := range n {
		sum.add(s.one(t, i, true))
	}
	s.judge(t, sum, 0)
}

// judge demands that predictions were right but for a part, and that there was something to predict.
func (s *indexed) judge(t *testing.T, sum tally, part float64) {
	t.Helper()
	t.Logf("%s (%.2f %% off)", sum, 100*sum.off())
	s.all.add(sum)
	if sum.off() > part || sum.hits == 0 || sum.hits == sum.asked {
		t.Errorf("%s: %.2f %% off, want at most %.2f %%", sum, 100*sum.off(), 100*part)
	}
}

// atOnce has several conversations go on side by side, each turn when the one before is answered.
func (s *indexed) atOnce(t *testing.T, n int) {
	const width = 6
	queries, hits := s.counted(t)
	var mu sync.Mutex
	var sum tally
	var wg sync.WaitGroup
	left := make(chan int, n)
	for i := range n {
		left <- i
	}
	close(left)
	for range width {
		wg.Go(func() {
			for i := range left {
				k := s.talks.take()
				a, one, err := s.ask(k.next())
				if err != nil {
					t.Errorf("request %d (%s): %v", i, k, err)
					return
				}
				k.answered(a)
				s.talks.put(k)
				mu.Lock()
				sum.add(one)
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	if t.Failed() {
		return
	}
	sum.hits = s.since(t, queries, hits, sum.asked)
	s.judge(t, sum, crossing())
}

// acrossGaps loses batches on the way: the router sees by the next one's number that they are missing, and asks for them.
func (s *indexed) acrossGaps(t *testing.T, n, gaps int) {
	before, err := s.status()
	if err != nil {
		t.Fatal(err)
	}
	var sum tally
	for i := range n {
		if i%(n/gaps) == n/gaps/2 {
			s.proxy.lose(2)
		}
		sum.add(s.one(t, i, false))
	}
	after, err := s.status()
	if err != nil {
		t.Fatal(err)
	}
	was, is := before.Workers[0].Engine.Events[0], after.Workers[0].Engine.Events[0]
	if is.Gaps-was.Gaps < uint64(gaps) || is.Lost != was.Lost || is.Resets != was.Resets {
		t.Errorf("%d gaps were made, and the router says %+v behind %+v", gaps, is, was)
	}
	s.judge(t, sum, crossing())
	s.oneByOne(t, count(20, 5))
}

// cutOff takes the connection away while requests go on: what was missed is asked for behind it.
func (s *indexed) cutOff(t *testing.T, n int) {
	s.proxy.cut()
	var r stage.Request
	var a *stage.Answer
	// A short turn may fill no block: then nothing of it is news, and another one is asked.
	const more = 100
	hidden := false
	for i := 0; i < n || !hidden && i < n+more; i++ {
		k := s.talks.take()
		r = k.next()
		if a = stage.Ask(s.ctx, s.api+"/v1", r); a.Err != nil {
			t.Fatalf("request %d (%s): %v", i, k, a.Err)
		}
		k.answered(a)
		s.talks.put(k)
		hidden = s.known(r, a) != nil
	}
	if !hidden {
		t.Error("the router knows what the last request left behind: this proves nothing")
	}
	s.proxy.mend()
	s.following(t)
	if err := s.settle(r, a); err != nil {
		t.Error(err)
	}
	s.oneByOne(t, count(30, 10))
}

// restart kills the engine. The new one has nothing, and the router must not think otherwise.
func (s *indexed) restart(t *testing.T) {
	if err := s.engine.KillAndRestart(); err != nil {
		t.Fatal(err)
	}
	if err := s.engine.Ready(s.ctx); err != nil {
		t.Fatal(err)
	}
	s.source.set(s.worker("2"))
	s.following(t)
}

// says holds the books at the end: blocks were evicted, and nothing was beyond reading.
func (s *indexed) says(t *testing.T) {
	st, err := s.status()
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("altogether %s (%.2f %% off); events %+v; index %+v", s.all, 100*s.all.off(), st.Workers[0].Engine.Events, st.Prefixes)
	if len(st.Prefixes.Sources) != 1 || st.Prefixes.Sources[0].Removed == 0 || st.Workers[0].Engine.Events[0].Unreadable != 0 {
		t.Errorf("%+v", st.Prefixes)
	}
}

// talk is a conversation.
type talk struct {
	kind     int // tokens, text, messages
	tokens   []int
	text     string
	messages []map[string]string
	salt     string
	length   int
	answers  int
}

const (
	byTokens = iota
	byText
	byMessages
	kindsOfTalk
)

func (k *talk) String() string { return [...]string{"tokens", "text", "messages"}[k.kind] }

// next is the request for the next turn.
func (k *talk) next() stage.Request {
	r := stage.Request{Model: "tiny", MaxTokens: k.answers, Salt: k.salt}
	switch k.kind {
	case byTokens:
		r.Prompt = k.tokens
	case byText:
		r.Text = k.text
	default:
		r.Chat = "turns"
		r.More = map[string]any{"messages": k.messages}
	}
	return r
}

func (k *talk) answered(a *stage.Answer) {
	k.length = len(a.Prompt) + len(a.Tokens)
	switch k.kind {
	case byTokens:
		k.tokens = append(k.tokens, a.Tokens...)
	case byText:
		k.text += a.Text
	default:
		k.messages = append(k.messages, map[string]string{"role": "assistant", "content": a.Text})
	}
}

// talks hands out conversations, each to one at a time. The same calls in the same order give the same requests.
type talks struct {
	mu   sync.Mutex
	rng  *rand.Rand
	open []*talk
}

const (
	openTalksMax   = 14 // more than the cache holds
	talkTokensMax  = 800
	talkAnswersMin = 8
	talkAnswersMax = 32
)

var talkWords = strings.Fields("water mill race wheel stone river gate flow sluice head tail weir pond turn grind grain sack cart")

func (s *talks) words(n int) string {
	var b strings.Builder
	for range n {
		b.WriteByte(' ')
		b.WriteString(talkWords[s.rng.IntN(len(talkWords))])
	}
	return b.String()
}

// take is a conversation with its next turn said: a new one, or one of those that wait for theirs.
func (s *talks) take() *talk {
	s.mu.Lock()
	defer s.mu.Unlock()
	k := &talk{kind: s.rng.IntN(kindsOfTalk)}
	if n := len(s.open); n > 0 && (n >= openTalksMax || s.rng.IntN(3) > 0) {
		i := s.rng.IntN(n)
		k, s.open = s.open[i], append(s.open[:i], s.open[i+1:]...)
	} else {
		s.begin(k)
	}
	k.answers = talkAnswersMin + s.rng.IntN(talkAnswersMax-talkAnswersMin)
	n := 5 + s.rng.IntN(40)
	switch k.kind {
	case byTokens:
		for range n {
			k.tokens = append(k.tokens, 20+s.rng.IntN(900))
		}
	case byText:
		k.text += s.words(n)
	default:
		k.messages = append(k.messages, map[string]string{"role": "user", "content": s.words(n)})
	}
	return k
}

// begin gives a new conversation what many begin with. Some are a tenant's own.
func (s *talks) begin(k *talk) {
	const tenants = 3
	if tenant := s.rng.IntN(2 * tenants); tenant < tenants {
		k.salt = fmt.Sprint("tenant ", tenant)
	}
	const system = "You keep the mill. Say when the water is high and when the gate must be shut. Answer with what the wheel does, and no more than that. "
	switch k.kind {
	case byTokens:
		k.tokens = stage.Prompt(90000, 70)
	case byText:
		k.text = system
	default:
		k.messages = []map[string]string{{"role": "system", "content": system}}
	}
}

// put takes a conversation back, unless it has become too long.
func (s *talks) put(k *talk) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if k.length < talkTokensMax {
		s.open = append(s.open, k)
	}
}
