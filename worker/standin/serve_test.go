package standin

import (
	"bytes"
	"context"
	"encoding/hex"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/headrace/headrace/router"
	"github.com/headrace/headrace/router/collect"
	"github.com/headrace/headrace/router/pairing"
)

const patience = 10 * time.Second

func listen(t *testing.T) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// background runs f until the test ends.
func background(t *testing.T, f func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- f(ctx) }()
	t.Cleanup(func() {
		cancel()
		select {
		case err := <-ended:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(patience):
			t.Error("it does not end")
		}
	})
}

// quick is a table without times worth waiting for.
func quick() Table {
	table := DefaultTable()
	table.Prefill, table.PrefillContextSeconds = []PrefillRow{{0, 0}, {1000, 0.001}}, 0
	table.Decode = []DecodeRow{{1, 0, 0.0002}}
	table.TransferSetupSeconds = 0
	return table
}

type fleet []pairing.Worker

func (f fleet) Workers() []pairing.Worker { return f }
func (fleet) Changed() <-chan struct{}    { return nil }

// serveFleet starts stand-ins of the roles and a router in front of them, and gives its URL.
func serveFleet(t *testing.T, roles ...pairing.Role) string {
	t.Helper()
	var workers fleet
	for _, role := range roles {
		s := &Server{Listener: listen(t), Events: listen(t), EventsReplay: listen(t), Config: Config{Model: "m", Role: string(role), Table: quick(), Peers: listen(t)}}
		fingerprint := s.Config.Fingerprint()
		id := string(role) + s.Listener.Addr().String()
		workers = append(workers, pairing.Worker{
			ID: id, Role: role, Model: "m", Addr: s.Listener.Addr().String(), NodeID: "at-" + id, NodeData: s.Config.Peers.Addr().String(), Dialect: "native",
			Fingerprint: hex.EncodeToString(fingerprint[:]), BlockTokens: 16, Blocks: 12288, ContextTokens: 131072, TensorParallel: 1,
		})
		background(t, s.Run)
	}
	r, err := router.New(router.Config{Source: workers, ClusterKey: []byte("a cluster key for tests only")})
	if err != nil {
		t.Fatal(err)
	}
	front := listen(t)
	background(t, func(ctx context.Context) error {
		ended := make(chan error, 1)
		go func() { ended <- r.Serve(front) }()
		<-ctx.Done()
		stop, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		return firstError(r.Shutdown(stop), <-ended)
	})
	return "http://" + front.Addr().String()
}

func firstError(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

func post(t *testing.T, url, body string) string {
	t.Helper()
	c := http.Client{Timeout: patience, Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := c.Post(url, "application/json", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("status %d, %v: %s", resp.StatusCode, err, b)
	}
	return string(b)
}

func TestRouterPairsStandIns(t *testing.T) {
	whole, pair := serveFleet(t, pairing.RoleBoth), serveFleet(t, pairing.RolePrefill, pairing.RoleDecode)
	const body = `{"model":"m","max_tokens":40,"temperature":0,"messages":[{"role":"user","content":"how are you?"}]`
	content := func(answer string) string {
		var a struct {
			Choices []struct{ Message struct{ Content string } }
			Usage   struct {
				PromptTokens     int `json:"prompt_tokens"`
				CompletionTokens int `json:"completion_tokens"`
			}
		}
		if err := json.Unmarshal([]byte(answer), &a); err != nil || len(a.Choices) != 1 || a.Usage.CompletionTokens != 40 || a.Usage.PromptTokens < 20 {
			t.Fatalf("%v: %s", err, answer)
		}
		return a.Choices[0].Message.Content
	}
	want := content(post(t, whole+"/v1/chat/completions", body+"}"))
	if got := content(post(t, pair+"/v1/chat/completions", body+"}")); got != want || want == "" {
		t.Errorf("a pair says %q, one worker %q", got, want)
	}
	stream := post(t, pair+"/v1/chat/completions", body+`,"stream":true}`)
	if n := strings.Count(stream, "data: {"); n < 40 || !strings.HasSuffix(stream, "data: [DONE]\n\n") {
		t.Errorf("%d events: %s", n, stream)
	}
}

// told counts the tokens of blocks that an engine says it has.
type told struct {
	tokens int
	enough chan struct{} // closed at 96
}

func (s *told) Stored(_ collect.Source, b *collect.Stored) {
	before := s.tokens
	if s.tokens += len(b.Tokens); before < 96 && s.tokens >= 96 {
		close(s.enough)
	}
}
func (*told) Removed(collect.Source, *collect.Removed) {}
func (*told) Cleared(collect.Source)                   {}
func (*told) Reset(collect.Source, string)             {}
func (*told) Lost(collect.Source, uint64)              {}

func TestMetricsAndEventsAreThoseOfAnEngine(t *testing.T) {
	s := &Server{Listener: listen(t), Events: listen(t), EventsReplay: listen(t), Config: Config{Model: "m", Table: quick()}}
	background(t, s.Run)
	sink := &told{enough: make(chan struct{})}
	c := collect.New(collect.Config{Interval: 10 * time.Millisecond, Sink: sink})
	t.Cleanup(c.Close)
	c.Follow([]collect.Worker{{ID: "w", Addr: s.Listener.Addr().String(), Events: s.Events.Addr().String(), EventsReplay: s.EventsReplay.Addr().String()}})
	post(t, "http://"+s.Listener.Addr().String()+"/v1/completions", `{"model":"m","max_tokens":2,"prompt":"`+strings.Repeat("0123456789", 10)+`"}`)
	select {
	case <-sink.enough:
	case <-time.After(patience):
		t.Error("no event of the blocks of 100 tokens")
	}
	for deadline := time.Now().Add(patience); ; {
		if f, ok := c.Figures("w"); ok && f.KVUsage == 0 && f.Running == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal("no metrics are heard of it")
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func TestInstantAnswersWholeAndInChunks(t *testing.T) {
	l := listen(t)
	x := &Instant{}
	background(t, func(ctx context.Context) error { return x.Serve(ctx, l) })
	url := "http://" + l.Addr().String()
	if got := post(t, url+"/v1/chat/completions", `{"model":"m","messages":[]}`); len(got) < 900 || !json.Valid([]byte(got)) {
		t.Errorf("%s", got)
	}
	if got := post(t, url+"/v1/chat/completions", `{"model":"m","kv_transfer_params":{"do_remote_decode":true}}`); !strings.Contains(got, "remote_block_ids") {
		t.Errorf("%s", got)
	}
	for _, body := range []string{`{"stream":true,"model":"m"}`, `{"model":"m","messages":"` + strings.Repeat("x", 100_000) + `","stream":true}`} {
		if got := post(t, url+"/v1/chat/completions", body); strings.Count(got, "data: {") != 64 || !strings.HasSuffix(got, "data: [DONE]\n\n") {
			t.Errorf("%s", got)
		}
	}
	if x.Hits() != 4 {
		t.Errorf("%d hits", x.Hits())
	}
	if got := post(t, url+"/anything", "{}"); got != "{}" {
		t.Errorf("%s", got)
	}
	// Requests that come in one piece are answered one by one.
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	one := "GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
	if _, err := io.WriteString(c, one+one); err != nil {
		t.Fatal(err)
	}
	_ = c.SetReadDeadline(time.Now().Add(patience))
	b := make([]byte, 2*len(x.small["/health"]))
	if _, err := io.ReadFull(c, b); err != nil || bytes.Count(b, []byte("200 OK")) != 2 {
		t.Errorf("%v: %s", err, b)
	}
}
