package dialects

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/headrace/headrace/router/body"
	"github.com/headrace/headrace/router/pairing"
	"github.com/headrace/headrace/router/upstream"
)

// wires is a network of pipes, which synctest's clock can wait for.
type wires struct {
	mu     sync.Mutex
	accept map[string]chan net.Conn
}

func (w *wires) dial(ctx context.Context, addr string) (net.Conn, error) {
	w.mu.Lock()
	ch := w.accept[addr]
	w.mu.Unlock()
	if ch == nil {
		return nil, net.ErrClosed
	}
	here, there := net.Pipe()
	select {
	case ch <- there:
		return here, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

type pipeListener struct {
	ch   chan net.Conn
	once sync.Once
	done chan struct{}
}

func (l *pipeListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.ch:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}
func (l *pipeListener) Close() error   { l.once.Do(func() { close(l.done) }); return nil }
func (l *pipeListener) Addr() net.Addr { return &net.TCPAddr{} }

// scene is two engines and a clock of its own.
type scene struct {
	began  time.Time
	client *upstream.Client
	probes *Prober
	a      *Attempt
	left   chan time.Duration // when decode's request was closed
}

// play runs f in a bubble. Engines answer /health with health, and requests with p and d; these wait by the request's context.
func play(t *testing.T, stream bool, health, p, d http.HandlerFunc, f func(t *testing.T, s *scene)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		s := &scene{began: time.Now(), left: make(chan time.Duration, 8)}
		net := &wires{accept: map[string]chan net.Conn{}}
		for addr, h := range map[string]http.HandlerFunc{"p:1": p, "d:1": d} {
			ln := &pipeListener{ch: make(chan netConn), done: make(chan struct{})}
			net.accept[addr] = ln.ch
			srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if r.URL.Path == "/health" {
					health(w, r)
					return
				}
				_, _ = io.Copy(io.Discard, r.Body)
				h(w, r)
				if addr == "d:1" && r.Context().Err() != nil {
					s.left <- time.Since(s.began)
				}
			})}
			go srv.Serve(ln)
			defer srv.Close()
		}
		s.client = upstream.New(upstream.Config{Dial: net.dial})
		s.probes = NewProber(s.client, 3*time.Second, 5*time.Second)
		b, refused := body.Parse(fmt.Appendf(nil, `{"model":"m","prompt":"x","stream":%v}`, stream))
		if refused != nil {
			t.Fatal(refused)
		}
		fingerprint := strings.Repeat("ab", 32)
		s.a = &Attempt{Number: 1, Progress: &Progress{}, Request: &Request{Path: "/v1/completions", RequestID: "r", Body: b, Deadline: time.Now().Add(time.Hour), Stream: stream},
			Decision: pairing.Decision{Prefill: &pairing.Worker{ID: "p", Addr: "p:1", NodeID: "np", Fingerprint: fingerprint},
				Decode: &pairing.Worker{ID: "d", Addr: "d:1", NodeID: "nd", NodeData: "nd:7", Fingerprint: fingerprint}}}
		f(t, s)
		s.client.Close()
		s.probes.Wait()
	})
}

type netConn = net.Conn

func well(http.ResponseWriter, *http.Request) {}

// after answers with JSON when some time has passed.
func after(wait time.Duration, answer string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		select {
		case <-time.After(wait):
			w.Header().Set("Content-Type", "application/json")
			fmt.Fprint(w, answer)
		case <-r.Context().Done():
		}
	}
}

// speaks streams: the header at once, a token when some time has passed, the end after as much again.
func speaks(wait time.Duration) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for _, say := range []string{"", "data: {\"a\":1}\n\n", "data: [DONE]\n\n"} {
			fmt.Fprint(w, say)
			if http.NewResponseController(w).Flush() != nil {
				return
			}
			select {
			case <-time.After(wait):
			case <-r.Context().Done():
				return
			}
		}
	}
}

const kept = `{"kv_transfer_params":{"do_remote_prefill":true,"remote_blocks_expiry_time":null}}`

// TestNixlLease holds when decode must have begun.
func TestNixlLease(t *testing.T) {
	deaf := func(_ http.ResponseWriter, r *http.Request) {
		select {
		case <-time.After(4 * time.Second):
		case <-r.Context().Done():
		}
	}
	for _, tt := range []struct {
		name   string
		stream bool
		health http.HandlerFunc
		p, d   http.HandlerFunc
		result Result
		reason string
		from   time.Duration // when decode was given up, at the earliest
		to     time.Duration
	}{
		{name: "in time", stream: true, health: well, p: after(0, kept), d: speaks(26 * time.Second), result: Finished},
		{name: "late", stream: true, health: well, p: after(0, kept), d: speaks(28 * time.Second), result: Failed, reason: "decode_lease", from: 27 * time.Second, to: 27 * time.Second},
		{name: "whole in time", health: well, p: after(0, kept), d: after(26*time.Second, "{}"), result: Finished},
		{name: "whole and late", health: well, p: after(0, kept), d: after(28*time.Second, "{}"), result: Failed, reason: "decode_lease", from: 27 * time.Second, to: 27 * time.Second},
		// Prefill takes its time, and is known to live: the lease is counted from when it last said so.
		{name: "behind a long prefill", stream: true, health: well, p: after(60*time.Second, kept), d: speaks(20 * time.Second), result: Finished},
		{name: "late behind a long prefill", stream: true, health: well, p: after(60*time.Second, kept), d: speaks(28 * time.Second), result: Failed, reason: "decode_lease", from: 80 * time.Second, to: 87 * time.Second},
		// Prefill's server was away when it answered: its scheduler may have been done for as long.
		{name: "prefill was away", stream: true, health: deaf, p: after(6*time.Second, kept), d: speaks(25 * time.Second), result: Failed, reason: "decode_lease", from: 27 * time.Second, to: 27 * time.Second},
		{name: "no transfer parameters", stream: true, health: well, p: after(0, `{"kv_transfer_params":null}`), d: speaks(60 * time.Second), result: Finished},
	} {
		t.Run(tt.name, func(t *testing.T) {
			play(t, tt.stream, tt.health, tt.p, tt.d, func(t *testing.T, s *scene) {
				n := &Nixl{Client: s.client, Probes: s.probes, Lease: 30 * time.Second}
				out := n.Run(context.Background(), s.a, &tape{})
				if out.Result != tt.result || out.Reason != tt.reason || out.Whole != (tt.reason != "") {
					t.Fatalf("got %+v after %s", out, time.Since(s.began))
				}
				if tt.reason == "" {
					return
				}
				if at := <-s.left; at < tt.from || at > tt.to {
					t.Errorf("decode was given up after %s, want %s to %s", at, tt.from, tt.to)
				}
			})
		})
	}
}

// TestNixlExpiry: what an engine says of its lease counts when it is a date, and never lengthens the lease.
func TestNixlExpiry(t *testing.T) {
	n := &Nixl{Lease: 30 * time.Second}
	now := time.Unix(1_800_000_000, 0)
	for in, want := range map[string]time.Duration{
		`{}`: 27, `{"remote_blocks_expiry_time":null}`: 27, `{"remote_blocks_expiry_time":123456.5}`: 27, `{"remote_blocks_expiry_time":1800000010.0}`: 7,
		`{"remote_blocks_expiry_time":1800000600}`: 27, `{"remote_blocks_expiry_time":1799999999}`: -4, `{"remote_blocks_expiry_time":"soon"}`: 27, `{"remote_blocks_expiry_time":1e300}`: 27,
	} {
		if got := n.lease([]byte(in), now); got != want*time.Second {
			t.Errorf("%s: %s, want %d s", in, got, want)
		}
	}
}

// TestSilence: an engine is given up when it does not answer questions either, and only then.
func TestSilence(t *testing.T) {
	never := func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }
	sick := func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusServiceUnavailable) }
	prefill := func(h http.HandlerFunc) http.HandlerFunc { // decode is well
		return func(w http.ResponseWriter, r *http.Request) {
			if r.Host == "p:1" {
				h(w, r)
			}
		}
	}
	for _, tt := range []struct {
		name      string
		health, p http.HandlerFunc
		d         http.HandlerFunc
		result    Result
		reason    string
		within    time.Duration
	}{
		{name: "slow", health: well, p: after(5*time.Minute, "{}"), d: speaks(10 * time.Minute), result: Finished, within: time.Hour},
		{name: "stopped", health: prefill(never), p: never, d: speaks(time.Minute), result: Failed, reason: "prefill_silent", within: 11 * time.Second},
		{name: "dead within", health: prefill(sick), p: never, d: speaks(time.Minute), result: Failed, reason: "prefill_silent", within: 6 * time.Second},
		{name: "stopped between tokens", health: never, p: after(0, "{}"), d: speaks(2900 * time.Millisecond), result: Finished, within: time.Minute},
	} {
		t.Run(tt.name, func(t *testing.T) {
			play(t, true, tt.health, tt.p, tt.d, func(t *testing.T, s *scene) {
				v := &VLLM{Client: s.client, Probes: s.probes, Key: []byte("0123456789abcdef0123456789abcdef")}
				out := v.Run(context.Background(), s.a, &tape{})
				if took := time.Since(s.began); out.Result != tt.result || out.Reason != tt.reason || took > tt.within {
					t.Fatalf("got %+v after %s", out, took)
				}
			})
		})
	}
}

// recalls notes what is recalled, and when tickets are checked.
type recalls struct {
	began  time.Time
	mu     sync.Mutex
	n      int
	checks []time.Duration
}

func (r *recalls) Recall(*pairing.Worker, []byte) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.n++
}

func (r *recalls) Check(p, d *pairing.Worker, _ []byte) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if p.ID == "p" && d.ID == "d" {
		r.checks = append(r.checks, time.Since(r.began))
	}
}

// TestPrefilledInVain: decode is not left waiting for KV cache that prefill knows will not come, nor for what nobody knows of
// any more, and may go on without. Decode's first content comes after 2.9 s, prefill's answer
// after one.
func TestPrefilledInVain(t *testing.T) {
	ms := time.Millisecond
	for _, tt := range []struct {
		state  string
		n      int
		checks []time.Duration
	}{
		{"failed", 1, []time.Duration{1500 * ms, 2000 * ms, 2500 * ms}},
		{"settled", 0, nil},
		{"handed", 0, []time.Duration{1250 * ms, 1750 * ms, 2250 * ms, 2750 * ms}},
		{"asked", 0, []time.Duration{1250 * ms, 1750 * ms, 2250 * ms, 2750 * ms}},
		{"", 0, []time.Duration{1250 * ms, 1750 * ms, 2250 * ms, 2750 * ms}},
	} {
		t.Run(tt.state, func(t *testing.T) {
			answer := fmt.Sprintf(`{"kv_transfer_params":{"headrace":{"v":1,"state":%q,"reason":"x"}}}`, tt.state)
			play(t, true, well, after(time.Second, answer), speaks(2900*ms), func(t *testing.T, s *scene) {
				told := &recalls{began: s.began}
				v := &VLLM{Client: s.client, Probes: s.probes, Key: []byte("0123456789abcdef0123456789abcdef"), Recaller: told}
				out := v.Run(context.Background(), s.a, &tape{})
				if out.Result != Finished || told.n != tt.n || !slices.Equal(told.checks, tt.checks) {
					t.Errorf("got %+v, %d recalled, checked at %s; want %d and %s", out, told.n, told.checks, tt.n, tt.checks)
				}
			})
		})
	}
}
