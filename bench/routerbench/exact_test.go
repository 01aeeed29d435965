package routerbench

import (
	"bytes"
	"encoding/json"
	"os"
	"testing"
	"time"

	"github.com/headrace/headrace/bench"
	"github.com/headrace/headrace/router"
	"github.com/headrace/headrace/router/pairing"
	"github.com/headrace/headrace/router/tokenize"
	"github.com/headrace/headrace/worker/standin"
)

// Conversations are JSON of about the size asked for, and marks make each request of one another: at its end, or from its begin.
func TestTalks(t *testing.T) {
	for _, size := range []int{1024, 20 << 10, 220_000, 1 << 20} {
		s := shape{kind: kindJSON, body: size, talk: talkWarm}
		body := talkOf(s, 3)
		if d := len(body) - size; !json.Valid(body) || d < -size/10 || d > max(size/10, 300) {
			t.Errorf("%d bytes for %d, valid: %v", len(body), size, json.Valid(body))
		}
		if bytes.Equal(body[:200], talkOf(s, 4)[:200]) {
			t.Error("two conversations begin alike")
		}
		for kind, early := range map[string]bool{talkWarm: false, talkCold: true} {
			s.talk = kind
			c := &client{addr: "a:1"}
			c.converse(s, 3)
			before := bytes.Clone(c.sent[0])
			asked.Store(1233)
			c.mark()
			at := 0
			for at < len(before) && before[at] == c.sent[0][at] {
				at++
			}
			if !bytes.Contains(c.sent[0], []byte("00001234")) || early != (at < 250) || bytes.Count(c.sent[0], []byte("00001234")) != 1 {
				t.Errorf("%s of %d bytes differs at %d", kind, size, at)
			}
		}
	}
}

// TestExactIsMeasured runs the part exact for a moment, with the tokens of a stand-in.
func TestExactIsMeasured(t *testing.T) {
	dir := t.TempDir()
	if err := standin.WriteTokenizer(dir); err != nil {
		t.Fatal(err)
	}
	r, err := Run(t.Context(), Options{Parts: []string{partExact}, Kinds: []string{kindJSON}, Bodies: []int{20_000}, Conns: []int{2}, Rounds: 1, Run: 20 * time.Millisecond, Tokenizer: dir})
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Rows) != 3 || r.Rows[0].Rate != 0 || r.Rows[1].Rate != exactRateLeast || !(r.Rows[2].Rate > 0) {
		t.Fatalf("%+v", r.Rows)
	}
	for _, row := range r.Rows {
		for _, name := range []string{direct, ours, oursWarm, oursCold} {
			if x := row.Series(name); x == nil || x.Errors != 0 || !(x.RPS > 0) {
				t.Errorf("%s: %+v", name, x)
			}
		}
	}
}

// BenchmarkExact is a request of 220 KB that goes on with a conversation that one of two workers has: what of processor time and of
// the heap it takes. HEADRACE_MODEL names a model's folder or file to use in place of a tokenizer of bytes.
//
//	HEADRACE_MODEL=FILE go test ./bench/routerbench -run '^$' -bench Exact
func BenchmarkExact(b *testing.B) {
	model := os.Getenv("HEADRACE_MODEL")
	if model == "" {
		model = b.TempDir()
		if err := standin.WriteTokenizer(model); err != nil {
			b.Fatal(err)
		}
	}
	tokens, err := tokenize.Load(model, tokenize.Options{})
	if err != nil {
		b.Fatal(err)
	}
	s := &session{talks: &talks{tokens: tokens, next: 1}}
	b.Cleanup(func() {
		if err := s.talks.close(); err != nil {
			b.Error(err)
		}
	})
	conn, admin := benchRouter(b, router.Config{Policy: &pairing.Joint{}, Tokens: map[string]router.Tokens{"": tokens}}, func(w *pairing.Worker) {
		if err := s.talks.publish(w); err != nil {
			b.Fatal(err)
		}
	})
	s.talks.admins = []string{admin}
	shape := shape{kind: kindJSON, body: 220_000, conns: 2, talk: talkWarm}
	if err := s.warm(b.Context(), shape); err != nil {
		b.Fatal(err)
	}
	c := &client{addr: conn.LocalAddr().String()}
	c.converse(shape, 0)
	b.ReportAllocs()
	buf := make([]byte, 64<<10)
	for b.Loop() {
		c.mark()
		if _, err := conn.Write(c.sent[0]); err != nil {
			b.Fatal(err)
		}
		if err := takeAnswer(conn, buf, false); err != nil {
			b.Fatal(err)
		}
	}
}

func TestExactVerdicts(t *testing.T) {
	r := &Report{Rows: []Row{
		{Part: partExact, BodyBytes: 220_000, All: []Series{{Name: oursWarm, RPS: 1200}}},
		{Part: partExact, BodyBytes: 220_000, All: []Series{{Name: oursWarm, RPS: 999}}},
		{Part: partExact, BodyBytes: 1024, All: []Series{{Name: oursWarm, RPS: 1}}},
		{Part: partExact, BodyBytes: 220_000, Rate: 500, All: []Series{{Name: oursWarm, AddedP99: 4000}}},
		{Part: partExact, BodyBytes: 220_000, Rate: 500, All: []Series{{Name: oursWarm, AddedP99: 6000}}},
		{Part: partExact, BodyBytes: 220_000, Rate: exactRateLeast, All: []Series{{Name: oursWarm, AddedP99: 4500}}},
	}}
	if v := r.exactRate(); *v.Measured != 999 || v.State != bench.Fails {
		t.Errorf("%+v", v)
	}
	if v := r.exactP99("at half the peak", false); *v.Measured != 6000 || v.State != bench.Fails {
		t.Errorf("%+v", v)
	}
	if v := r.exactP99("at 1000 a second", true); *v.Measured != 4500 || v.State != bench.Holds {
		t.Errorf("%+v", v)
	}
}
