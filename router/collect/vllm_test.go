package collect

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/headrace/headrace/internal/leaktest"
	"github.com/headrace/headrace/internal/pythontest"
)

// realVLLM is a vLLM of scripts/vllm-env.sh on ports of loopback.
type realVLLM struct {
	t                  *testing.T
	env                string
	http, events, back int
	cmd                *exec.Cmd
}

func (v *realVLLM) start() {
	v.t.Helper()
	config := fmt.Sprintf(`{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:%d","replay_endpoint":"tcp://*:%d","buffer_steps":10000,"topic":"kv-events"}`, v.events, v.back)
	v.cmd = exec.Command(filepath.Join(v.env, "venv", "bin", "python"), "-m", "vllm.entrypoints.cli.main", "serve", filepath.Join(v.env, "tiny"), "--served-model-name", "tiny",
		"--host", "127.0.0.1", "--port", strconv.Itoa(v.http), "--enforce-eager", "--max-model-len", "2048", "--dtype", "bfloat16", "--enable-prefix-caching",
		"--block-size", "32", "--num-gpu-blocks-override", "256", "--kv-events-config", config)
	v.cmd.Env = append(os.Environ(), "VLLM_NO_USAGE_STATS=1", "DO_NOT_TRACK=1", "HF_HUB_OFFLINE=1", "TRANSFORMERS_OFFLINE=1", "VLLM_TARGET_DEVICE=cpu",
		"VLLM_CPU_KVCACHE_SPACE=1", "OMP_NUM_THREADS=1", "VLLM_CPU_OMP_THREADS_BIND=nobind", "PATH="+filepath.Join(v.env, "venv", "bin")+":"+os.Getenv("PATH"))
	v.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	v.cmd.Stdout, v.cmd.Stderr = v.t.Output(), v.t.Output()
	if err := v.cmd.Start(); err != nil {
		v.t.Fatal(err)
	}
	for end := time.Now().Add(2 * time.Minute); ; time.Sleep(100 * time.Millisecond) {
		resp, err := http.Get(fmt.Sprintf("http://127.0.0.1:%d/health", v.http))
		if err == nil {
			_ = resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return
			}
		}
		if time.Now().After(end) {
			v.t.Fatalf("vLLM does not start: %v", err)
		}
	}
}

// kill is kill -9 of all its processes.
func (v *realVLLM) kill() {
	if v.cmd != nil {
		_ = syscall.Kill(-v.cmd.Process.Pid, syscall.SIGKILL)
		_ = v.cmd.Wait()
	}
}

// ask has n prompts completed, some at once. A third of them begin like one before.
func (v *realVLLM) ask(r *rand.Rand, n int) {
	v.t.Helper()
	var prompts [][]int
	for i := range n {
		p := []int{}
		if i%3 == 2 {
			p = append(p, prompts[r.IntN(i)]...)
			p = p[:r.IntN(len(p))]
		}
		for size := 40 + r.IntN(700); len(p) < size; {
			p = append(p, 10+r.IntN(900))
		}
		prompts = append(prompts, p)
	}
	var wg sync.WaitGroup
	turn := make(chan struct{}, 4)
	for _, p := range prompts {
		turn <- struct{}{}
		wg.Go(func() {
			defer func() { <-turn }()
			body, _ := json.Marshal(map[string]any{"model": "tiny", "prompt": p, "max_tokens": 8, "temperature": 0, "ignore_eos": true})
			resp, err := http.Post(fmt.Sprintf("http://127.0.0.1:%d/v1/completions", v.http), "application/json", bytes.NewReader(body))
			if err != nil {
				v.t.Errorf("ask: %v", err)
				return
			}
			defer resp.Body.Close()
			if text, _ := io.ReadAll(resp.Body); resp.StatusCode != http.StatusOK {
				v.t.Errorf("ask: %s %s", resp.Status, text)
			}
		})
	}
	wg.Wait()
}

func (v *realVLLM) tally() pythontest.Tally {
	v.t.Helper()
	return pythontest.TallyOf(v.t, filepath.Join(v.env, "venv", "bin", "python"), v.back)
}

// equal holds that the collector has, block for block, what the engine's events come to.
func (v *realVLLM) equal(c *Collector) (pythontest.Tally, EventStatus) {
	v.t.Helper()
	p := &publisher{t: v.t}
	var x pythontest.Tally
	for end := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
		if x = v.tally(); x.Next == c.Status("w").Events[0].Next {
			break
		}
		if time.Now().After(end) {
			v.t.Fatalf("%d batches published; %+v", x.Next, c.Status("w"))
		}
	}
	h := (*(*c.followers.Load())["w"].streams.Load())[0].held
	h.mu.Lock()
	for id, b := range h.set {
		if b.tokens != 32 || id.group != 0 || id.medium != 0 {
			v.t.Errorf("%+v: %+v", id, b)
		}
	}
	h.mu.Unlock()
	p.have = map[uint64]int{}
	for k, n := range x.Have {
		id, err := strconv.ParseUint(k, 10, 64)
		if err != nil {
			v.t.Fatal(err)
		}
		p.have[id] = n
	}
	p.tokens = 32
	if why := p.differs(h); why != "" {
		v.t.Fatal(why)
	}
	return x, c.Status("w").Events[0]
}

// TestVLLM follows a real vLLM through evictions and a restart.
func TestVLLM(t *testing.T) {
	env := os.Getenv("HEADRACE_VLLM")
	if env == "" {
		t.Skip("set HEADRACE_VLLM to the folder that scripts/vllm-env.sh prints")
	}
	leaktest.Check(t)
	defer http.DefaultClient.CloseIdleConnections()
	ports := freePorts(t, 3)
	v := &realVLLM{t: t, env: env, http: ports, events: ports + 1, back: ports + 2}
	defer v.kill()
	w := Worker{ID: "w", Addr: fmt.Sprintf("127.0.0.1:%d", v.http), Events: fmt.Sprintf("127.0.0.1:%d", v.events), EventsReplay: fmt.Sprintf("127.0.0.1:%d", v.back)}
	c := New(Config{})
	defer c.Close()
	c.Follow([]Worker{w})
	v.start()
	r := rand.New(rand.NewPCG(7, 7))
	v.ask(r, 50)
	x, s := v.equal(c)
	t.Logf("%d batches, %d blocks removed, %d contents in %d blocks held; %+v", x.Next, x.Removed, s.Contents, s.Blocks, s)
	if x.Removed == 0 || s.Blocks == 0 || s.Blocks > 255 || s.Lost != 0 || s.Resets != 0 || s.Unreadable != 0 || s.Ignored != 0 || s.Unheld != 0 {
		t.Errorf("%+v", s)
	}
	for end := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) { // of the next look
		f, ok := c.Figures("w")
		if ok && f.Blocks == 256 && f.BlockTokens == 32 && f.PrefixHits > 0 && f.PrefixQueries > f.PrefixHits && f.Running == 0 && f.KVUsage == 0 && f.Ranks == 1 {
			t.Logf("%+v", f)
			break
		}
		if time.Now().After(end) {
			t.Fatalf("%+v, %v", f, ok)
		}
	}

	v.kill()
	v.start()
	v.ask(r, 20)
	x, s = v.equal(c)
	t.Logf("behind a restart: %d batches, %d blocks removed, %d contents in %d blocks held; %+v", x.Next, x.Removed, s.Contents, s.Blocks, s)
	if s.Resets != 1 || s.Lost != 0 {
		t.Errorf("%+v", s)
	}

	late := New(Config{})
	defer late.Close()
	late.Follow([]Worker{w})
	for end := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
		if st := late.Status("w"); len(st.Events) > 0 && st.Events[0].Next == x.Next {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("a late one: %+v", late.Status("w"))
		}
	}
	v.equal(late)
}
