package vllm

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/headrace/headrace/internal/registry"
	"github.com/headrace/headrace/test/vllm/stage"
	"github.com/headrace/headrace/transfer/transporttest"
)

// TestTiny runs the small model as it is used, in bfloat16: answers one by one are equal to the last bit.
func TestTiny(t *testing.T) {
	s := setUp(t, stage.UpConfig{Engine: "vllm", Config: stage.Config{Model: "tiny"}})
	t.Run("one by one", func(t *testing.T) { oneByOne(t, s, prompts("tiny", 500, count(30, 12), 24), true) })
	t.Run("shapes", func(t *testing.T) { shapes(t, s) })
	t.Run("benchmark client", func(t *testing.T) { benchmarkClient(t, s, count(100, 20)) })
	t.Run("aborts", func(t *testing.T) { aborts(t, s, count(200, 20)) })
	t.Run("client gone", func(t *testing.T) { clientGone(t, s, goneLimit) })
	t.Run("late", func(t *testing.T) { late(t, s, 35*time.Second) })
	t.Run("kill the daemon", func(t *testing.T) { kills(t, s, daemonVictim, count(5, 2), 2*time.Second) })
	t.Run("requests at the daemon's kill", func(t *testing.T) { hits(t, s, count(10, 3)) })
	t.Run("kill prefill", func(t *testing.T) { kills(t, s, prefillVictim, count(5, 1), 2*time.Second) })
	t.Run("kill decode", func(t *testing.T) { kills(t, s, decodeVictim, count(5, 1), 2*time.Second) })
}

// nixlLease is how long NixlConnector may keep what nobody fetched: its lease of 30 s, and a step.
const nixlLease = 35 * time.Second

// TestNixl is vLLM with its own connector behind the same router. What it pins is its own; what it answers must be right.
func TestNixl(t *testing.T) {
	s := setUp(t, stage.UpConfig{Engine: "vllm-nixl", NixlDelayUS: 200, Config: stage.Config{Model: "tiny"}})
	t.Run("one by one", func(t *testing.T) { oneByOne(t, s, prompts("tiny", 500, count(30, 6), 24), true) })
	t.Run("client gone", func(t *testing.T) { clientGone(t, s, nixlLease) })
	t.Run("late", func(t *testing.T) { late(t, s, 35*time.Second) })
	if full { // each takes a lease's time and an engine's start
		t.Run("kill decode", func(t *testing.T) { kills(t, s, decodeVictim, 1, nixlLease) })
		t.Run("kill prefill", func(t *testing.T) { kills(t, s, prefillVictim, 1, nixlLease) })
	}
}

// TestAltered puts a network that flips bits between the daemons: no altered byte reaches a token.
func TestAltered(t *testing.T) {
	environment(t)
	proxy := transporttest.NewProxy(t)
	config := filepath.Join(t.TempDir(), "headrace.yaml")
	if err := os.WriteFile(config, fmt.Appendf(nil, "node:\n  checksum: always\n  lanes: 4\n  advertise: %s\n", proxy.Addr), 0o600); err != nil {
		t.Fatal(err)
	}
	s := setUp(t, stage.UpConfig{Engine: "vllm", ConfigFile: config, Config: stage.Config{Model: "tiny"}})
	t.Cleanup(proxy.Close) // before the cluster ends
	node, err := s.Node(registry.RoleDecode)
	if err != nil {
		t.Fatal(err)
	}
	proxy.Target(dataListener(t, node))
	var rs []stage.Request
	for i := range count(30, 8) {
		rs = append(rs, stage.Request{Model: "tiny", Prompt: stage.Prompt(60000+i, 200+i*50), MaxTokens: 16, Stream: i%2 == 0})
	}
	wants := s.wants(t, rs)
	moved := s.disaggregated(t, func() {
		for i, r := range rs {
			for range i % 4 {
				proxy.Alter(transporttest.Payload)
			}
			if d, err := s.ask(r).Differs(wants[i]); err != nil || d > 0 {
				t.Errorf("with %d frames altered: %v (logprobs %.2g)", i%4, err, d)
			}
		}
	})
	var altered uint64
	for _, role := range []string{registry.RolePrefill, registry.RoleDecode} {
		n, err := s.Node(role)
		if err != nil {
			t.Fatal(err)
		}
		st, err := s.NodeStatus(s.ctx, n)
		if err != nil {
			t.Fatal(err)
		}
		altered += st.Totals.Altered
	}
	t.Logf("%d answers are right with %d frames altered, of which the daemons found %d; %d were disaggregated", len(rs), proxy.Altered(), altered, moved)
	if altered == 0 || moved == 0 {
		t.Errorf("%d frames were found altered and %d requests disaggregated: this proves nothing", altered, moved)
	}
	s.idle(t, 2*time.Second, "after altered transfers")
}

// dataListener is where a daemon really listens for its peers: its one TCP listener that is not the admin page's.
func dataListener(t *testing.T, n registry.Node) string {
	t.Helper()
	sockets := map[string]bool{}
	fds, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", n.PID))
	for _, fd := range fds {
		if link, err := os.Readlink(fd); err == nil && strings.HasPrefix(link, "socket:[") {
			sockets[strings.Trim(link[len("socket:"):], "[]")] = true
		}
	}
	f, err := os.Open(fmt.Sprintf("/proc/%d/net/tcp", n.PID))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	const listening = "0A"
	for lines := bufio.NewScanner(f); lines.Scan(); {
		w := strings.Fields(lines.Text())
		if len(w) < 10 || w[3] != listening || !sockets[w[9]] {
			continue
		}
		_, hex, _ := strings.Cut(w[1], ":")
		port, err := strconv.ParseUint(hex, 16, 16)
		addr := net.JoinHostPort("127.0.0.1", strconv.FormatUint(port, 10))
		if err == nil && addr != n.Admin {
			return addr
		}
	}
	t.Fatalf("daemon %d listens nowhere but at %s", n.PID, n.Admin)
	return ""
}

// benchmarkClient runs guidellm against the router: a client that knows nothing of us.
func benchmarkClient(t *testing.T, s *scene, n int) {
	env := s.stage.Env
	dir := t.TempDir()
	report := filepath.Join(dir, "report.json")
	cmd := exec.CommandContext(s.ctx, env.Python(), "-m", "guidellm", "run",
		"--backend", fmt.Sprintf("kind=openai_http,target=%s,model=%s", strings.TrimSuffix(s.URL(), "/v1"), s.model),
		"--profile", "kind=concurrent,streams=4", "--constraint", fmt.Sprintf("kind=max_requests,count=%d", n),
		"--tokenizer", "kind=huggingface_auto,model="+env.Model(s.model),
		"--data", "kind=synthetic_text,prompt_tokens=300,output_tokens=32", "--output", "kind=json,path="+report, "--disable-console-interactive")
	cmd.Env = append(os.Environ(), "PYTHONPATH="+filepath.Join(env.Root, "tools"), "HF_HUB_OFFLINE=1", "HF_HOME="+filepath.Join(dir, "hf"))
	var moved uint64
	var said []byte
	var err error
	moved = s.disaggregated(t, func() { said, err = cmd.CombinedOutput() })
	if err != nil {
		t.Fatalf("guidellm: %v\n%s", err, said)
	}
	data, err := os.ReadFile(report)
	if err != nil {
		t.Fatal(err)
	}
	var r struct {
		Benchmarks []struct {
			Metrics struct {
				Totals struct{ Successful, Errored, Incomplete int } `json:"request_totals"`
			} `json:"metrics"`
		} `json:"benchmarks"`
	}
	if err := json.Unmarshal(data, &r); err != nil || len(r.Benchmarks) != 1 {
		t.Fatalf("guidellm's report: %v, %d benchmarks", err, len(r.Benchmarks))
	}
	totals := r.Benchmarks[0].Metrics.Totals
	t.Logf("guidellm: %+v, %d were disaggregated", totals, moved)
	if totals.Successful != n || totals.Errored != 0 || totals.Incomplete != 0 {
		t.Errorf("guidellm: %+v, want %d successful and nothing else\n%s", totals, n, said)
	}
}
