package vllm

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/headrace/headrace/internal/registry"
	"github.com/headrace/headrace/test/vllm/stage"
)

// rounding is how far logprobs of equal tokens may be apart where engines compute with float32 in batches of other
// shapes. The aggregated engine beside itself shows 3e-5; wrong KV shows whole units.
const rounding = 2e-4

// prompts are requests of the lengths the checks are made with.
func prompts(model string, seed, n, tokens int) []stage.Request {
	var rs []stage.Request
	for i, length := range stage.Lengths(n) {
		rs = append(rs, stage.Request{Model: model, Prompt: stage.Prompt(seed+i, length), MaxTokens: tokens})
	}
	return rs
}

func (s *scene) wants(t *testing.T, rs []stage.Request) []*stage.Answer {
	t.Helper()
	out := make([]*stage.Answer, len(rs))
	for i, r := range rs {
		out[i] = s.want(t, r)
	}
	return out
}

// disaggregated counts how many leases settled meanwhile.
func (s *scene) disaggregated(t *testing.T, do func()) uint64 {
	t.Helper()
	// An engine that got no processor is taken out for a while, and nothing is moved to it then.
	if err := s.Whole(s.ctx, time.Minute); err != nil {
		t.Fatal(err)
	}
	before, err := s.Moved(s.ctx)
	if err != nil {
		t.Fatal(err)
	}
	do()
	after, err := s.Moved(s.ctx)
	if err != nil {
		t.Fatal(err)
	}
	return after - before
}

// oneByOne sends all requests one after the other. exact demands every bit of the logprobs.
func oneByOne(t *testing.T, s *scene, rs []stage.Request, exact bool) {
	wants := s.wants(t, rs)
	got := make([]*stage.Answer, len(rs))
	moved := s.disaggregated(t, func() {
		for i, r := range rs {
			r.Stream = i%2 == 1
			got[i] = s.ask(r)
		}
	})
	d := compare(t, "one by one", got, wants)
	if limit := map[bool]float64{true: 0, false: rounding}[exact]; d > limit {
		t.Errorf("logprobs differ by up to %.2g, want %.2g at most", d, limit)
	}
	t.Logf("%d prompts one by one: where tokens are equal, logprobs differ by %.2g at most; %d were disaggregated", len(rs), d, moved)
	if int(moved) < len(rs)*8/10 {
		t.Errorf("only %d of %d requests were disaggregated", moved, len(rs))
	}
	s.idle(t, 2*time.Second, "after answers one by one")
}

// eightAtOnce compares with answers one by one, and says how far the aggregated engine is from itself in the same way:
// what a batch is made of is a matter of timing, and changes the last bits. It tells whether most requests were disaggregated.
func eightAtOnce(t *testing.T, s *scene, rs []stage.Request, what string) bool {
	wants := s.wants(t, rs)
	salted := make([]stage.Request, len(rs))
	for i, r := range rs {
		r.Salt = "again"
		salted[i] = r
	}
	own := compare(t, what+", the aggregated engine beside itself", atOnce(s.ctx, s.whole.URL(), 8, salted), wants)
	var got []*stage.Answer
	moved := s.disaggregated(t, func() { got = atOnce(s.ctx, s.URL(), 8, rs) })
	pair := compare(t, what, got, wants)
	t.Logf("%d prompts %s: where tokens are equal, logprobs differ by %.2g at most, the aggregated engine's from its own by %.2g; %d were disaggregated",
		len(rs), what, pair, own, moved)
	if pair > rounding {
		t.Errorf("%s: logprobs differ by up to %.2g, want %.2g at most", what, pair, rounding)
	}
	s.idle(t, 2*time.Second, what)
	return int(moved) >= len(rs)*8/10
}

// pairAtOnce is eightAtOnce of requests that must be disaggregated.
func pairAtOnce(t *testing.T, s *scene, rs []stage.Request, what string) {
	if !eightAtOnce(t, s, rs, what) {
		t.Errorf("%s: too few of %d requests were disaggregated", what, len(rs))
	}
}

// behind is how long an engine's server may be behind its engine, for want of processors, and put all tokens into one event.
const behind = time.Minute

// shapes asks in every form that clients use.
func shapes(t *testing.T, s *scene) {
	text := "The mill race brings water from the weir to the wheel. "
	for i, r := range []stage.Request{
		{Text: strings.Repeat(text, 3), MaxTokens: 20},
		{Text: strings.Repeat(text, 30), MaxTokens: 20},
		{Chat: "Go on: " + strings.Repeat(text, 5), MaxTokens: 20},
		{Chat: "And on: " + strings.Repeat(text, 25), MaxTokens: 20},
	} {
		r.Model = s.model
		want := s.want(t, r)
		for _, stream := range []bool{false, true} {
			r.Stream = stream
			a := s.ask(r)
			if d, err := a.Differs(want); err != nil || d > 0 {
				t.Errorf("form %d, stream %v: %v (logprobs %.2g)", i, stream, err, d)
			}
			for begun := time.Now(); stream && a.Err == nil && a.Chunks < 3; a = s.ask(r) {
				if time.Since(begun) > behind {
					t.Errorf("form %d: a stream of 20 tokens comes in %d pieces", i, a.Chunks)
					break
				}
			}
		}
	}
	sameBytes(t, s)
}

// sameBytes holds that the client sees nothing of what the router asks for on its own behalf.
func sameBytes(t *testing.T, s *scene) {
	for path, body := range map[string]string{
		"/completions":      `{"model":%q,"prompt":"The mill race","max_tokens":12,"temperature":0,"stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true}}`,
		"/chat/completions": `{"model":%q,"messages":[{"role":"user","content":"Go on: the mill race"}],"max_tokens":12,"temperature":0,"stream":true,"stream_options":{"include_usage":true}}`,
	} {
		var said, shape [2]string
		for begun := time.Now(); said[0] == "" || shape[0] != shape[1] && time.Since(begun) < behind; {
			for i, base := range []string{s.whole.URL(), s.URL()} {
				resp, err := http.Post(base+path, "application/json", strings.NewReader(fmt.Sprintf(body, s.model)))
				if err != nil {
					t.Fatal(err)
				}
				data, err := io.ReadAll(resp.Body)
				resp.Body.Close()
				if err != nil {
					t.Fatal(err)
				}
				said[i] = string(data)
				shape[i] = shapeOf(said[i])
			}
		}
		if shape[0] != shape[1] || !strings.Contains(shape[0], "[DONE]") {
			t.Errorf("%s: the engine says\n%s\nthe router\n%s", path, said[0], said[1])
		}
	}
}

var (
	perAnswer = regexp.MustCompile(`"(id|created)":("[^"]*"|[0-9]+),|,"system_fingerprint":"[^"]*"`)
	perPiece  = regexp.MustCompile(`"(text|content)":"((?:[^"\\]|\\.)*)"`)
	perCount  = regexp.MustCompile(`"(total|completion)_tokens":[0-9]+`)
)

// shapeOf is a stream without what is another's in each answer, and without where its text was cut: how many tokens an event
// brings is a matter of how far the engine's server is behind its engine. Events in the midst of a stream that are equal then, one
// behind the other, count as one; the whole text comes last.
func shapeOf(stream string) string {
	var lines, text []string
	for line := range strings.Lines(stream) {
		line = perAnswer.ReplaceAllString(line, "")
		for _, m := range perPiece.FindAllStringSubmatch(line, -1) {
			text = append(text, m[2])
		}
		line = perPiece.ReplaceAllString(line, `"$1":""`)
		if !strings.Contains(line, `"choices":[]`) { // the last one counts them all
			line = perCount.ReplaceAllString(line, `"${1}_tokens":0`)
		}
		midst := strings.Contains(line, `"finish_reason":null`) && !strings.Contains(line, `"role"`)
		if n := len(lines); strings.TrimSpace(line) != "" && !(midst && n > 0 && lines[n-1] == line) {
			lines = append(lines, line)
		}
	}
	return strings.Join(lines, "") + strings.Join(text, "")
}

// TestShapeOf holds what the comparison of streams sees and what it does not.
func TestShapeOf(t *testing.T) {
	event := func(text string, tokens int, more string) string {
		return fmt.Sprintf("data: {\"id\":\"%d\",\"choices\":[{\"text\":%q,\"finish_reason\":null%s}],\"usage\":{\"completion_tokens\":%d}}\n\n", len(text), text, more, tokens)
	}
	const end = "data: {\"choices\":[],\"usage\":{\"completion_tokens\":3}}\n\ndata: [DONE]\n\n"
	want := shapeOf(event("a \"b", 1, "") + event(" c", 2, "") + event("d", 3, "") + end)
	if got := shapeOf(event("a \"b c", 2, "") + event("d", 3, "") + end); got != want {
		t.Errorf("cut elsewhere, it is\n%s\nwant\n%s", got, want)
	}
	for what, other := range map[string]string{
		"another text":  event("a \"b", 1, "") + event(" d", 3, "") + end,
		"another field": event("a \"b", 1, `,"token_ids":[1]`) + event(" cd", 3, "") + end,
		"another count": event("a \"b cd", 3, "") + strings.Replace(end, "3", "4", 1),
		"no end":        event("a \"b cd", 3, ""),
		"two ends":      event("a \"b cd", 3, "") + end + "data: [DONE]\n\n",
	} {
		if shapeOf(other) == want {
			t.Errorf("a stream with %s looks the same", what)
		}
	}
}

// prefixes asks for what is known already at one side, at the other and at both.
func prefixes(t *testing.T, s *scene, n int) {
	decode, err := s.Engine(registry.RoleDecode)
	if err != nil {
		t.Fatal(err)
	}
	prefill, err := s.Engine(registry.RolePrefill)
	if err != nil {
		t.Fatal(err)
	}
	before, err := decode.Metrics(s.ctx)
	if err != nil {
		t.Fatal(err)
	}
	largest := 0.0
	for i := range n {
		head := stage.Prompt(7000+i, 100+i*170)
		warm := stage.Request{Model: s.model, Prompt: head, MaxTokens: 1}
		for at, e := range map[string]*stage.Engine{"decode": decode, "prefill": prefill} {
			if i%3 == 2 || (i%3 == 0) == (at == "decode") {
				if a := stage.Ask(s.ctx, e.URL(), warm); a.Err != nil {
					t.Fatal(a.Err)
				}
			}
		}
		for turn := range 2 { // the second one finds at both sides what the first one left
			r := stage.Request{Model: s.model, Prompt: append(append([]int(nil), head...), stage.Prompt(8000+10*i+turn, 45)...), MaxTokens: 12, Stream: turn == 1}
			d, err := s.ask(r).Differs(s.want(t, r))
			if err != nil {
				t.Errorf("%d tokens known, turn %d: %v", len(head), turn, err)
			}
			largest = max(largest, d)
		}
	}
	after, err := decode.Metrics(s.ctx)
	if err != nil {
		t.Fatal(err)
	}
	hits := after["vllm:prefix_cache_hits_total"] - before["vllm:prefix_cache_hits_total"]
	external := after["vllm:external_prefix_cache_hits_total"] - before["vllm:external_prefix_cache_hits_total"]
	t.Logf("%d prompts with known beginnings: where tokens are equal, logprobs within %.2g; decode had %.0f tokens itself and was given %.0f", 2*n, largest, hits, external)
	if largest > rounding {
		t.Errorf("logprobs differ by up to %.2g, want %.2g at most", largest, rounding)
	}
	if hits == 0 || external == 0 {
		t.Errorf("decode hit %.0f tokens of its own and %.0f that it was given, want some of both", hits, external)
	}
	s.idle(t, 2*time.Second, "after prefix hits")
}

// preempted lets requests grow beyond the blocks that there are.
func preempted(t *testing.T, s *scene, n int) {
	engines, err := s.Engines()
	if err != nil {
		t.Fatal(err)
	}
	times := func() (all [2]float64) {
		for i, e := range engines {
			m, err := e.Metrics(s.ctx)
			if err != nil {
				t.Fatal(err)
			}
			all[i] = m["vllm:num_preemptions_total"]
		}
		return all
	}
	// How many are really there at once is a matter of the machine: where it is busy, they may end before there are too many, or decode may have
	// computed by itself: once it did all of them, and what the router went by was not seen.
	for try := range 3 {
		before := times()
		var rs []stage.Request
		for i := range n {
			rs = append(rs, stage.Request{Model: s.model, Prompt: stage.Prompt(9000+100*try+i, 400+i%5*30), MaxTokens: 200})
		}
		most := eightAtOnce(t, s, rs, "8 at once with too few blocks")
		after := times()
		t.Logf("prefill preempted %.0f times, decode %.0f", after[0]-before[0], after[1]-before[1])
		if most && after[1] > before[1] {
			return
		}
	}
	t.Error("decode never preempted with KV that came from prefill, this proves nothing")
}

// control shows that the comparison would see wrong KV: it overwrites what decode has cached.
func control(t *testing.T, s *scene) {
	head := stage.Prompt(12345, 330) // no multiple of a block: see "Models with windows" in docs/vllm.md
	r := stage.Request{Model: s.model, Prompt: head, MaxTokens: 12}
	if _, err := s.ask(r).Differs(s.want(t, r)); err != nil {
		t.Fatal(err)
	}
	if err := s.corrupt(registry.RoleDecode); err != nil {
		t.Fatal(err)
	}
	decode, err := s.Engine(registry.RoleDecode)
	if err != nil {
		t.Fatal(err)
	}
	r.Prompt = append(append([]int(nil), head...), stage.Prompt(54321, 5)...)
	d, err := stage.Ask(s.ctx, decode.URL(), r).Differs(s.want(t, r))
	if err == nil && d <= rounding {
		t.Error("decode answered right with its KV overwritten: this comparison sees nothing")
	}
	t.Logf("with decode's KV overwritten: %v", err)
}

// corrupt overwrites the KV cache of an engine, which lies in memory that it lends by descriptor.
func (s *scene) corrupt(role string) error {
	pids, err := s.EnginePIDs(role)
	if err != nil {
		return err
	}
	done := 0
	for _, pid := range pids {
		fds, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
		for _, fd := range fds {
			link, err := os.Readlink(fd)
			if err != nil || !strings.HasPrefix(link, "/memfd:") {
				continue
			}
			f, err := os.OpenFile(fd, os.O_WRONLY, 0)
			if err != nil {
				return fmt.Errorf("open %s: %w", link, err)
			}
			info, err := f.Stat()
			if err == nil && info.Size() >= 1<<20 { // smaller ones are rings
				junk := make([]byte, info.Size())
				for i := range junk {
					junk[i] = byte(i*7+i>>8) & 0x3f // small numbers, whatever the type
				}
				_, err = f.WriteAt(junk, 0)
				done++
			}
			_ = f.Close()
			if err != nil {
				return fmt.Errorf("overwrite %s: %w", link, err)
			}
		}
	}
	if done == 0 {
		return fmt.Errorf("no memory of %s's is lent by descriptor (processes %v)", role, pids)
	}
	return nil
}

// TestTinyFloat32 compares where batches are made of several requests and prompts of several chunks.
func TestTinyFloat32(t *testing.T) {
	s := setUp(t, stage.UpConfig{Engine: "vllm", Config: stage.Config{Model: "tiny", DType: "float32", BatchTokens: 256, Blocks: 80}})
	n := count(30, 12)
	t.Run("one by one", func(t *testing.T) { oneByOne(t, s, prompts("tiny", 100, n, 24), false) })
	t.Run("8 at once", func(t *testing.T) { pairAtOnce(t, s, prompts("tiny", 200, n, 24), "8 at once, in chunks of 256") })
	t.Run("prefix hits", func(t *testing.T) { prefixes(t, s, count(9, 3)) })
	t.Run("preemption", func(t *testing.T) { preempted(t, s, count(24, 8)) })
	t.Run("control", func(t *testing.T) { control(t, s) })
}

// TestSmolLM2 is the same with the default model, whose logits are those of language.
func TestSmolLM2(t *testing.T) {
	s := setUp(t, stage.UpConfig{Engine: "vllm", Config: stage.Config{Model: "smollm2", DType: "float32", Blocks: 512}})
	n := count(30, 6)
	t.Run("one by one", func(t *testing.T) { oneByOne(t, s, prompts("smollm2", 300, n, 8), false) })
	t.Run("8 at once", func(t *testing.T) { pairAtOnce(t, s, prompts("smollm2", 400, n, 8), "8 at once") })
}

// TestRanks has two ranks share the KV heads on both sides: each lends its own half.
func TestRanks(t *testing.T) {
	environment(t)
	if !full {
		t.Skip("nine processes on two cores: runs under HEADRACE_FULL=1 (make proof)")
	}
	pause, err := filepath.Abs("env/pause")
	if err != nil {
		t.Fatal(err)
	}
	s := setUp(t, stage.UpConfig{Engine: "vllm", Config: stage.Config{
		Model: "tiny", Args: []string{"--tensor-parallel-size", "2"}, Env: []string{"PYTHONPATH=" + pause},
	}})
	t.Run("one by one", func(t *testing.T) { oneByOne(t, s, prompts("tiny", 600, 10, 16), true) })
	t.Run("aborts", func(t *testing.T) { aborts(t, s, 20) })
}
