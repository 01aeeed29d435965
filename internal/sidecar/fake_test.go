package sidecar

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/headrace/headrace/internal/leaktest"
	"github.com/headrace/headrace/internal/registry"
)

// patience bounds every wait; none lasts that long when things are right.
const patience = 30 * time.Second

// This binary is also the guard, the fake engine, the engine's own child and a sidecar to be killed: its first argument
// says which.
const (
	beGuard   = "be-guard"
	beEngine  = "be-engine"
	beChild   = "be-child"
	beSidecar = "be-sidecar"
)

func TestMain(m *testing.M) {
	if len(os.Args) > 1 {
		if act := map[string]func([]string) error{beGuard: actGuard, beEngine: actEngine, beChild: actChild, beSidecar: actSidecar}[os.Args[1]]; act != nil {
			if err := act(os.Args[2:]); err != nil {
				fmt.Fprintln(os.Stderr, os.Args[1]+":", err)
				os.Exit(1)
			}
			return
		}
	}
	leaktest.Main(m, []string{"internal/sidecar."}, func() string {
		if pids := descendants(os.Getpid()); len(pids) > 0 {
			return fmt.Sprint("processes ", pids)
		}
		return ""
	})
}

func self() string {
	exe, err := os.Executable()
	if err != nil {
		panic(err)
	}
	return exe
}

func actGuard(args []string) error {
	status, err := Guard(GuardFD, args)
	if err != nil {
		return err
	}
	os.Exit(status)
	return nil
}

// actChild is what EngineCore is to vLLM: in a session of its own, and deaf to SIGTERM.
func actChild([]string) error {
	_, _ = syscall.Setsid()
	signal.Ignore(syscall.SIGTERM, syscall.SIGHUP)
	fmt.Println("child runs")
	select {}
}

// actSidecar runs a sidecar as a process of its own, on the engine whose port is given.
func actSidecar(args []string) error {
	return Run(context.Background(), fakeConfig(args[0], args[1:]...))
}

// fakeConfig is for a fake engine at addr that gets args.
func fakeConfig(addr string, args ...string) Config {
	return Config{
		Entry: registry.Worker{ID: "e0", Role: "both", Dialect: DialectOpenAI, Addr: addr}, Addr: addr,
		Command: &Command{Words: append([]string{self(), beEngine, addr}, args...), Env: []string{"FAKE=1"}},
		Guard:   []string{self(), beGuard}, ProbeEvery: 20 * time.Millisecond, Logger: slog.New(slog.DiscardHandler),
	}
}

// fakeEngine serves vLLM's pages, and /set for what they say.
type fakeEngine struct {
	mu      sync.Mutex // guards what follows
	values  map[string]string
	child   int
	release chan struct{} // ends hanging answers
}

func (f *fakeEngine) get(name string) string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.values[name]
}

// actEngine is the fake. Its arguments after the address: "slow" waits for /set?up=1, "raises" writes a traceback and
// goes on, "dies" ends with a
// traceback, "stubborn" ignores SIGTERM, "orphans" leaves its child when it ends.
func actEngine(args []string) error {
	addr, args := args[0], args[1:]
	if slices.Contains(args, "dies") {
		fmt.Fprint(os.Stderr, "(EngineCore pid=12) Traceback (most recent call last):\n(EngineCore pid=12)   File \"core.py\", line 3\n"+
			"(EngineCore pid=12) ValueError: no room for the KV cache\nTraceback (most recent call last):\nRuntimeError: Engine core initialization failed.\n")
		os.Exit(3)
	}
	if slices.Contains(args, "raises") {
		fmt.Fprint(os.Stderr, "Traceback (most recent call last):\nzmq.error.ZMQError: Address already in use\n")
	}
	if os.Getenv("FAKE") != "1" || os.Getenv("HOME") == "" {
		return errors.New("the environment is not what it should be")
	}
	child := exec.Command(self(), beChild)
	if err := child.Start(); err != nil {
		return err
	}
	f := &fakeEngine{values: map[string]string{"up": "1", "health": "200", "model": "fake", "running": "0", "waiting": "0", "steps": "1"}, child: child.Process.Pid, release: make(chan struct{})}
	if slices.Contains(args, "slow") {
		f.values["up"] = ""
	}
	term := make(chan os.Signal, 1)
	signal.Notify(term, syscall.SIGTERM)
	if slices.Contains(args, "stubborn") {
		signal.Ignore(syscall.SIGTERM)
	}
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return err
	}
	go func() { _ = http.Serve(l, f) }()
	fmt.Println("engine runs")
	<-term
	fmt.Println("engine ends in order")
	if !slices.Contains(args, "orphans") {
		_ = child.Process.Kill()
		_ = child.Wait()
	}
	return nil
}

func (f *fakeEngine) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path == "/set" {
		f.mu.Lock()
		for k, v := range r.URL.Query() {
			f.values[k] = v[0]
		}
		f.mu.Unlock()
		return
	}
	if r.URL.Path == "/pids" {
		_ = json.NewEncoder(w).Encode([]int{os.Getpid(), f.child})
		return
	}
	if f.get("hang") == "1" {
		<-r.Context().Done()
		return
	}
	switch r.URL.Path {
	case "/health":
		code, _ := strconv.Atoi(f.get("health"))
		if f.get("up") == "" {
			code = http.StatusServiceUnavailable
		}
		w.WriteHeader(code)
	case "/v1/models":
		fmt.Fprintf(w, `{"object":"list","data":[{"id":%q,"max_model_len":2048,"parent":null},{"id":"poet","parent":"base"}]}`, f.get("model"))
	case "/v1/completions":
		body, _ := io.ReadAll(r.Body)
		f.mu.Lock()
		f.values["asked"] = string(body)
		f.mu.Unlock()
	case "/asked":
		fmt.Fprint(w, f.get("asked"))
	case "/version":
		fmt.Fprint(w, `{"version":"0.32.0"}`)
	case "/get_server_info":
		if f.get("info") == "" {
			http.NotFound(w, r)
		}
		fmt.Fprint(w, f.get("info"))
	case "/metrics":
		fmt.Fprintf(w, "# HELP x\nprocess_start_time_seconds 1.5e+09\nvllm:num_requests_running{engine=\"0\",model_name=\"fake\"} %s.0\nvllm:num_requests_waiting{engine=\"0\"} %s.0\n"+
			"vllm:iteration_tokens_total_count{engine=\"0\"} %s.0\n"+
			"vllm:cache_config_info{block_size=\"32\",cache_dtype=\"auto\",num_gpu_blocks=\"1024\"} 1.0\n", f.get("running"), f.get("waiting"), f.get("steps"))
	default:
		http.NotFound(w, r)
	}
}

// board is a registry of one entry, and tells of each change.
type board struct {
	changes chan *registry.Worker
}

func newBoard() *board { return &board{changes: make(chan *registry.Worker, 100)} }

func (b *board) List(w registry.Worker) error { b.changes <- &w; return nil }
func (b *board) Unlist() error                { b.changes <- nil; return nil }

// next is the next change: an entry, or nil for none any more.
func (b *board) next(t *testing.T) *registry.Worker {
	t.Helper()
	select {
	case w := <-b.changes:
		return w
	case <-time.After(patience):
		t.Fatal("the entry did not change")
		return nil
	}
}

// lines collects an engine's output.
type lines struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// runner is a sidecar under test, in this process.
type runner struct {
	t      *testing.T
	addr   string
	board  *board
	out    *lines
	cancel context.CancelFunc
	done   chan error
}

func start(t *testing.T, change func(*Config), args ...string) *runner {
	t.Helper()
	port, err := FreePort("127.0.0.1")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	r := &runner{t: t, addr: net.JoinHostPort("127.0.0.1", strconv.Itoa(port)), board: newBoard(), out: &lines{}, cancel: cancel, done: make(chan error, 1)}
	cfg := fakeConfig(r.addr, args...)
	cfg.Lister, cfg.Output = r.board, r.out
	cfg.Logger = slog.New(slog.NewTextHandler(r.out, nil))
	if change != nil {
		change(&cfg)
	}
	go func() { r.done <- Run(ctx, cfg) }()
	t.Cleanup(func() {
		cancel()
		if t.Failed() {
			t.Log(r.out.String())
		}
	})
	return r
}

// end is what Run returned.
func (r *runner) end() error {
	r.t.Helper()
	select {
	case err := <-r.done:
		return err
	case <-time.After(patience):
		r.t.Fatal("the sidecar does not end")
		return nil
	}
}

func (r *runner) set(query string) {
	r.t.Helper()
	eventually(r.t, "the engine to be told "+query, func() bool { _, err := fetch(r.addr, "/set?"+query); return err == nil })
}

// pids are the engine's and its child's.
func (r *runner) pids() []int {
	r.t.Helper()
	return enginePIDs(r.t, r.addr)
}

func enginePIDs(t *testing.T, addr string) (pids []int) {
	t.Helper()
	eventually(t, "the engine to answer", func() bool {
		body, err := fetch(addr, "/pids")
		return err == nil && json.Unmarshal(body, &pids) == nil
	})
	return pids
}

func fetch(addr, path string) ([]byte, error) {
	c := &http.Client{Timeout: 2 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := c.Get("http://" + addr + path)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	return io.ReadAll(resp.Body)
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("waited for ", what)
		}
	}
}

// dead tells that a process is gone. One whose parent was killed has come to this process, which must wait for it.
func dead(pid int) bool {
	if parent, _ := lineage(pid); parent == os.Getpid() {
		_, _ = syscall.Wait4(pid, nil, syscall.WNOHANG, nil)
	}
	return errors.Is(syscall.Kill(pid, 0), syscall.ESRCH)
}

// allDead waits until no process of the engine is left.
func allDead(t *testing.T, pids []int) {
	t.Helper()
	for _, pid := range pids {
		eventually(t, fmt.Sprint("process ", pid, " to be gone"), func() bool { return dead(pid) })
	}
}
