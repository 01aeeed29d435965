package router

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/headrace/headrace/router/pairing"
	"github.com/headrace/headrace/router/routertest"
)

// fakesEnv names a group of fake engines: the test binary is then a process that serves those, of all foreign dialects.
const fakesEnv = "HEADRACE_TEST_FAKES"

// fakeDialects are those that are not ours. Each has a model of its own.
var fakeDialects = []string{"openai", "vllm", "vllm-nixl", "vllm-nixl-push", "vllm-mooncake", "vllm-p2p-nccl", "sglang"}

const (
	killedTokens  = 30 // of an answer
	killedGate    = 15 // the token before which engines wait until they are told to go on
	killedPrompts = 16 // that the engines of all processes know
)

func killedPrompt(i int) string { return fmt.Sprintf("prompt number %d of those", i%killedPrompts) }

// gate is where the engines of a process wait.
type gate struct{ way atomic.Pointer[chan struct{}] }

func (g *gate) shut() {
	way := make(chan struct{})
	g.way.Store(&way)
}

// groupOf makes a pair of each dialect. Pairs of two groups do not fit together, for no KV cache goes from process to process, but go on with
// each other's answers.
func groupOf(name string, ranks uint32, g *gate) []*routertest.Engine {
	c := routertest.NewCluster()
	for i := range killedPrompts {
		c.Teach(killedPrompt(i))
	}
	var all []*routertest.Engine
	for _, dialect := range fakeDialects {
		es := engines(dialect, "p-"+dialect+"-"+name, "d-"+dialect+"-"+name)
		for _, e := range ranked(es, 1) {
			e.Cluster, e.Model, e.Opaque, e.TensorParallel = c, "model-"+dialect, true, ranks
			e.Fingerprint = strings.Repeat("cd", 32)
			e.Fault = func(_ *routertest.EngineCall, stage string, n int) routertest.Action {
				if stage == routertest.StageToken && n == killedGate {
					<-*g.way.Load()
				}
				return routertest.Go
			}
		}
		all = append(all, es...)
	}
	return all
}

// serveFakes serves a group until standard input ends, of which each line opens the gate or shuts it, by turns, and is answered by one. It tells of
// its engines in a line first, and in the end of what the router did against the protocols.
func serveFakes(group string) error {
	g := &gate{}
	g.shut()
	es := groupOf(group, uint32(len(group)), g)
	var workers []pairing.Worker
	for _, e := range es {
		if err := e.Start(); err != nil {
			return err
		}
		e.Incarnation = fmt.Sprint(os.Getpid())
		workers = append(workers, e.Worker)
	}
	out := json.NewEncoder(os.Stdout)
	if err := out.Encode(workers); err != nil {
		return err
	}
	open := false
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		if open = !open; open {
			close(*g.way.Load())
		} else {
			g.shut()
		}
		if err := out.Encode(open); err != nil {
			return err
		}
	}
	if !open { // whoever waits may end
		close(*g.way.Load())
	}
	return out.Encode(append([]string{}, es[0].Cluster.Violations()...))
}

// fakes is a process with a group.
type fakes struct {
	cmd     *exec.Cmd
	in      io.WriteCloser
	out     *json.Decoder
	workers []pairing.Worker
}

func startFakes(t *testing.T, group string) *fakes {
	t.Helper()
	f := &fakes{cmd: exec.Command(os.Args[0])}
	f.cmd.Env = append(os.Environ(), fakesEnv+"="+group)
	f.cmd.Stderr = os.Stderr
	f.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	in, err := f.cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := f.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := f.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	f.in, f.out = in, json.NewDecoder(out)
	if err := f.out.Decode(&f.workers); err != nil {
		t.Fatalf("engines of group %s: %v", group, err)
	}
	return f
}

// turn opens the gate of the process, or shuts it.
func (f *fakes) turn(t *testing.T, open bool) {
	t.Helper()
	var is bool
	if _, err := io.WriteString(f.in, "\n"); err != nil {
		t.Fatal(err)
	}
	if err := f.out.Decode(&is); err != nil || is != open {
		t.Fatalf("the gate is open: %v, %v", is, err)
	}
}

// end ends the process and says what the router did against the protocols.
func (f *fakes) end(t *testing.T) {
	t.Helper()
	_ = f.in.Close()
	var violations []string
	if err := f.out.Decode(&violations); err != nil {
		t.Errorf("engines' last words: %v", err)
	}
	for _, v := range violations {
		t.Errorf("the router broke the protocol: %s", v)
	}
	if err := f.cmd.Wait(); err != nil {
		t.Errorf("engines: %v", err)
	}
}

// kill kills the process, kill -9.
func (f *fakes) kill() {
	_ = f.cmd.Process.Kill()
	_ = f.cmd.Wait()
}

// killedStream is one client.
type killedStream struct {
	dialect string
	prompt  string
	status  int
	raw     strings.Builder
	err     error
	token   chan struct{} // closed when the first tokens are here, or the stream has ended without
}

func (s *killedStream) run(c *http.Client, addr string) {
	told := sync.OnceFunc(func() { close(s.token) })
	defer told()
	body := fmt.Sprintf(`{"model":"model-%s","prompt":%q,"max_tokens":%d,"seed":7,"temperature":0,"stream":true}`, s.dialect, s.prompt, killedTokens)
	resp, err := c.Post("http://"+addr+"/v1/completions", "application/json", strings.NewReader(body))
	if s.err = err; err != nil {
		return
	}
	defer resp.Body.Close()
	s.status = resp.StatusCode
	in := bufio.NewReader(resp.Body)
	for n := 0; ; n++ {
		line, err := in.ReadString('\n')
		if s.raw.WriteString(line); err != nil {
			if err != io.EOF {
				s.err = err
			}
			return
		}
		if n == 8 {
			told()
		}
	}
}

// moved holds that the stream is whole, or was never begun and says why.
func (s *killedStream) moved(t *testing.T) (whole bool) {
	t.Helper()
	raw := s.raw.String()
	if s.status == http.StatusServiceUnavailable && strings.Contains(raw, `"error"`) && s.err == nil {
		return false // no token was seen
	}
	a := &answer{spoken: map[int]bool{}}
	done := false
	for line := range strings.SplitSeq(raw, "\n") {
		if data, ok := strings.CutPrefix(line, "data: "); ok && data == "[DONE]" {
			done = true
		} else if ok {
			a.add(t, []byte(data))
		}
	}
	if want := routertest.Text(s.prompt, 7, killedTokens); s.err != nil || s.status != http.StatusOK || !done || a.text != want || a.finish != "length" {
		t.Errorf("%s: status %d, done %v, finish %q, failure %q, err %v, text\n%q, want\n%q", s.dialect, s.status, done, a.finish, a.failure, s.err, a.text, want)
	}
	return true
}

// TestKilled kills processes with engines of all foreign dialects in mid-stream, by turns, behind a router: streams go on elsewhere, token for
// token, and those that had none yet are served or get an error that says so. 20 times with HEADRACE_FULL, else twice.
func TestKilled(t *testing.T) {
	rounds, each := 2, 2
	if os.Getenv("HEADRACE_FULL") != "" {
		rounds, each = 20, 4
	}
	groups := []string{"a", "bb"} // as many ranks as letters
	h := startMixed(t, func(c *Config) {
		c.RecoveryTimeout, c.Upstream.SilenceTimeout, c.ProbeTimeout = patience, patience, patience
		c.Recaller = routertest.NewCluster()
	}, nil, nil)
	running := map[string]*fakes{}
	list := func() {
		h.source.mu.Lock()
		defer h.source.mu.Unlock()
		h.source.workers = nil
		for _, g := range groups {
			h.source.workers = append(h.source.workers, running[g].workers...)
		}
		close(h.source.changed)
		h.source.changed = make(chan struct{})
	}
	for _, g := range groups {
		running[g] = startFakes(t, g)
	}
	defer func() {
		for _, f := range running {
			f.end(t)
		}
	}()
	whole, refused := 0, 0
	for round := range rounds {
		list()
		h.until("the router to know the engines", func() bool {
			st := h.r.Status()
			return len(st.Workers) == 2*2*len(fakeDialects) && !slices.ContainsFunc(st.Workers, func(w WorkerStatus) bool { return w.Cooling != "" })
		})
		var streams []*killedStream
		var clients sync.WaitGroup
		begin := func(n int) (some []*killedStream) {
			for _, dialect := range fakeDialects {
				for range n {
					s := &killedStream{dialect: dialect, prompt: killedPrompt(len(streams)), token: make(chan struct{})}
					streams, some = append(streams, s), append(some, s)
					clients.Go(func() { s.run(h.client, h.addr) })
				}
			}
			return some
		}
		for _, s := range begin(each) {
			<-s.token
		}
		begin(1) // these have no token yet
		victim, other := groups[round%len(groups)], groups[(round+1)%len(groups)]
		running[victim].kill()
		running[other].turn(t, true)
		clients.Wait()
		running[other].turn(t, false)
		for _, s := range streams {
			if s.moved(t) {
				whole++
			} else {
				refused++
			}
		}
		if delete(running, victim); round < rounds-1 {
			running[victim] = startFakes(t, victim)
		}
	}
	h.quiet()
	t.Logf("%d kills: %d streams whole, %d refused before their first token", rounds, whole, refused)
	if moved := value(h.r.metrics.migrations.WithLabelValues("vllm-nixl", "resumed")); moved == 0 {
		t.Error("no stream went on elsewhere from its tokens: too little is shown")
	}
	if refused > whole/10 {
		t.Errorf("%d of %d were refused", refused, whole+refused)
	}
}
