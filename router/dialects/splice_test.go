package dialects

import (
	"bytes"
	"slices"
	"testing"

	"github.com/headrace/headrace/internal/openai"
)

// tape is a Sink that keeps what it gets.
type tape struct {
	events [][]byte
	kinds  []Kind
	tokens int
}

func (s *tape) Event(k Kind, raw, _ []byte, n int) error {
	s.events = append(s.events, bytes.Clone(raw))
	s.kinds = append(s.kinds, k)
	s.tokens += n
	return nil
}
func (s *tape) Whole(string, []byte) error { return nil }
func (s *tape) Flush() error               { return nil }
func (s *tape) Phase(Phase)                {}

// run puts bytes through a splice.
func run(s *splice, b []byte) (last news, err error) {
	for {
		ev, n, err := openai.NextEvent(b)
		if err != nil || n == 0 {
			return last, err
		}
		b = b[n:]
		if last, err = s.take(ev); err != nil {
			return last, err
		}
	}
}

const (
	evRole   = `data: {"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}` + "\n\n"
	evA      = `data: {"choices":[{"delta":{"content":"a"},"finish_reason":null}]}` + "\n\n"
	evB      = `data: {"choices":[{"delta":{"content":"b \"finish_reason\":\"stop\" \"choices\":[]"},"finish_reason":null}]}` + "\n\n"
	evFinish = `data: {"choices":[{"delta":{"content":"z"},"finish_reason": "stop"}]}` + "\n\n"
	evUsage  = `data: {"choices":[],"usage":{"prompt_tokens":1}}` + "\n\n"
)

func TestSplice(t *testing.T) {
	for _, tt := range []struct {
		name, in string
		given    []int32 // before
		roleSent bool
		want     string // events handed on
		after    []int32
		last     news
		bad      bool
	}{
		{name: "token by token", in: evRole + ": t 1\n\n" + evA + ": hb\n\n: t 2\n\n" + evB, want: evRole + evA + evB, after: []int32{1, 2}},
		{name: "announced only", in: ": t 1\n\n" + evA + ": t 2\n\n", want: evA, after: []int32{1}},
		{name: "held back", in: ": t 1\n\n: hb\n\n: t 2,3\n\n" + evA + ": t 4\n\n: handoff\n\n", want: evA, after: []int32{1, 2, 3}, last: newsHandoff},
		{name: "role again", in: evRole + ": t 3\n\n" + evA, given: []int32{1, 2}, roleSent: true, want: evA, after: []int32{1, 2, 3}},
		{name: "head", in: ": head\n\n: hb\n\n" + evB + ": t 1\n\n" + evA, want: evB + evA, after: []int32{1}},
		{name: "head again", in: ": head\n\n" + evB + ": t 1\n\n" + evA, roleSent: true, want: evA, after: []int32{1}},
		{name: "finish without final", in: ": t 1\n\n" + evA + ": t 2\n\n" + evFinish + evUsage, want: evA, after: []int32{1}},
		{name: "final", in: ": t 1\n\n" + evA + ": t 2\n\n" + evFinish + evUsage + ": final\n\n", want: evA + evFinish + evUsage, after: []int32{1, 2}, last: newsFinal},
		{name: "final without finish", in: ": t 1\n\n" + evA + ": final\n\n", want: evA, after: []int32{1}, bad: true},
		{name: "prior", in: ": prior 1,2\n\n: t 3\n\n" + evA, given: []int32{1, 2}, want: evA, after: []int32{1, 2, 3}},
		{name: "other prior", in: ": prior 1,3\n\n", given: []int32{1, 2}, after: []int32{1, 2}, bad: true},
		{name: "shorter prior", in: ": prior 1\n\n", given: []int32{1, 2}, after: []int32{1, 2}, bad: true},
		{name: "prior with held-back text", in: ": t 2\n\n: handoff\n\n: prior 1,2\n\n: t 3\n\n" + evA, given: []int32{1}, want: evA, after: []int32{1, 2, 3}},
		{name: "error", in: `data: {"error":{"message":"x"}}` + "\n\n", bad: true},
		{name: "failed", in: ": failed no blocks\n\n", last: newsFailed},
		{name: "unknown comments and DONE", in: ": new thing\n\ndata: [DONE]\n\n: phase bound\n\n"},
		{name: "let go", in: ": settled\n\n", last: newsSettled},
		{name: "has everything", in: ": phase settled\n\n", last: newsLoaded},
		{name: "decoding", in: ": phase decoding\n\n", last: newsDecoding},
	} {
		t.Run(tt.name, func(t *testing.T) {
			sink := &tape{}
			s := &splice{sink: sink, progress: &Progress{Given: slices.Clone(tt.given), RoleSent: tt.roleSent}}
			last, err := run(s, []byte(tt.in))
			if got := string(bytes.Join(sink.events, nil)); got != tt.want {
				t.Errorf("handed on\n%s\nwant\n%s", got, tt.want)
			}
			if !slices.Equal(s.progress.Given, tt.after) || last != tt.last && !tt.bad || (err != nil) != tt.bad {
				t.Errorf("given %v, news %v, err %v", s.progress.Given, last, err)
			}
			if n := len(tt.after) - len(tt.given); sink.tokens != n {
				t.Errorf("%d tokens counted, want %d", sink.tokens, n)
			}
		})
	}
}

// FuzzSplice holds that whatever workers send, the client gets a subsequence of their data events, no finish before
// final, one role, and is given no token that was not announced.
func FuzzSplice(f *testing.F) {
	f.Add([]byte(evRole+": t 1\n\n"+evA+": t 2\n\n"+evFinish+evUsage+": final\n\n"), false)
	f.Add([]byte(": prior 1\n\n: t 3,4\n\n"+evB+": failed x\n\n"), true)
	f.Fuzz(func(t *testing.T, in []byte, roleSent bool) {
		sink := &tape{}
		s := &splice{sink: sink, progress: &Progress{RoleSent: roleSent}}
		last, _ := run(s, in)
		rest := in
		roles := 0
		for i, ev := range sink.events {
			at := bytes.Index(rest, ev)
			if at < 0 {
				t.Fatalf("handed on %q, which is not in what is left of %q", ev, in)
			}
			rest = rest[at+len(ev):]
			if sink.kinds[i] == KindRole {
				roles++
			}
			if (sink.kinds[i] == KindFinish || sink.kinds[i] == KindUsage) && !bytes.Contains(in, []byte("final")) {
				t.Fatalf("finished without final: %q", in)
			}
		}
		if roles > 1 || roleSent && roles > 0 {
			t.Fatalf("%d roles", roles)
		}
		if last == newsFinal && len(s.tail) > 0 {
			t.Fatal("something is kept back behind final")
		}
		if len(s.progress.Given) != sink.tokens {
			t.Fatalf("given %d tokens, counted %d", len(s.progress.Given), sink.tokens)
		}
	})
}
