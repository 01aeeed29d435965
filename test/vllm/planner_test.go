package vllm

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/headrace/headrace/test/vllm/stage"
)

// startMost is how long a vLLM may take that is started beside others under load.
const startMost = 5 * time.Minute

// sleepy are the variables of engines that wait for work asleep: there are more of their processes than cores.
func sleepy(t *testing.T) []string {
	t.Helper()
	pause, err := filepath.Abs("env/pause")
	if err != nil {
		t.Fatal(err)
	}
	return []string{"PYTHONPATH=" + pause}
}

// plannedRig is a cluster of vLLMs of which a planner decides how many there are, and a load that can be set.
type plannedRig struct {
	*stage.Cluster
	t        *testing.T
	stage    *stage.Stage
	most     int // engines
	requests []stage.Request
	wants    []*stage.Answer // of a vLLM that is alone

	clients []context.CancelFunc
	asking  sync.WaitGroup
	answers atomic.Int64
	atOnce  atomic.Int64 // engines

	mu     sync.Mutex
	failed []string // the first few
}

// planned asks a vLLM alone what is right, ends it, and starts a cluster with a planner that has an engine for each three streams.
func planned(t *testing.T, engine string, most int, args ...string) *plannedRig {
	t.Helper()
	c := &plannedRig{t: t, most: most}
	var err error
	if c.stage, err = stage.New(environment(t)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() && c.Cluster != nil {
			t.Log(c.Said())
		}
		if c.Cluster != nil {
			c.Cluster.Close()
		}
		if err := c.stage.Close(); err != nil {
			t.Error(err)
		}
	})
	config := stage.Config{Model: "tiny", DType: "float32", Blocks: 512, Env: sleepy(t)}
	c.learn(config)
	begun := time.Now()
	args = append([]string{"--planner", "queue:interval=2:window=4:streams=3:requests=3:prompts=1000", "--planner-interval", "500ms", "--max-gpus", fmt.Sprint(most), "--threads", "1"}, args...)
	if c.Cluster, err = c.stage.Up(stage.UpConfig{Engine: engine, Nodes: 1, Config: config, UpArgs: args}); err != nil {
		t.Fatal(err)
	}
	if err := c.Ready(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Logf("the first engines are up after %.0f s", time.Since(begun).Seconds())
	c.watchBudget()
	t.Cleanup(c.quiet) // before the cluster ends
	return c
}

// learn asks one engine by itself, a request at a time.
func (c *plannedRig) learn(config stage.Config) {
	c.t.Helper()
	whole, err := c.stage.Plain(config)
	if err != nil {
		c.t.Fatal(err)
	}
	if err := whole.Ready(c.t.Context()); err != nil {
		c.t.Fatal(err)
	}
	for i := range 6 {
		r := stage.Request{Model: config.Model, Prompt: stage.Prompt(31000+i, 70+90*i), MaxTokens: 100}
		a := stage.Ask(c.t.Context(), whole.URL(), r)
		if a.Err != nil {
			c.t.Fatalf("ask a vLLM that is alone: %v", a.Err)
		}
		r.Stream = i%2 == 0
		c.requests, c.wants = append(c.requests, r), append(c.wants, a)
	}
	if err := whole.Process().Stop(syscall.SIGINT, time.Minute); err != nil {
		c.t.Error(err)
	}
}

// watchBudget counts engines until the test ends. One that has just been forked bears the name of its parent: twice in a row there must be too many.
func (c *plannedRig) watchBudget() {
	end, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(500 * time.Millisecond)
		defer tick.Stop()
		for before := 0; ; {
			n := 0
			for _, pid := range c.stage.Marked() {
				if words := strings.Fields(stage.CommandLine(pid)); len(words) > 1 && words[0] == c.stage.Env.Binary && words[1] == "engine" {
					n++
				}
			}
			c.atOnce.Store(max(c.atOnce.Load(), int64(min(n, before))))
			before = n
			select {
			case <-tick.C:
			case <-end:
				return
			}
		}
	}()
	c.t.Cleanup(func() {
		close(end)
		<-done
		if n := c.atOnce.Load(); int(n) != c.most {
			c.t.Errorf("%d engines at once, of a budget of %d that was to be used up", n, c.most)
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		for _, f := range c.failed {
			c.t.Error(f)
		}
	})
}

// load has so many clients ask on and on. Those that are too many end with their answers.
func (c *plannedRig) load(n int) {
	for len(c.clients) > n {
		c.clients[len(c.clients)-1]()
		c.clients = c.clients[:len(c.clients)-1]
	}
	for len(c.clients) < n {
		ctx, stop := context.WithCancel(context.Background())
		i := len(c.clients)
		c.clients = append(c.clients, stop)
		c.asking.Go(func() {
			for k := i; ctx.Err() == nil; k++ {
				a := stage.Ask(context.WithoutCancel(ctx), c.URL(), c.requests[k%len(c.requests)])
				_, err := a.Differs(c.wants[k%len(c.wants)])
				if err == nil {
					c.answers.Add(1)
					continue
				}
				c.mu.Lock()
				if len(c.failed) < 5 {
					c.failed = append(c.failed, fmt.Sprintf("client %d, request %d (%s): %v", i, k, a.ID, err))
				}
				c.mu.Unlock()
			}
		})
	}
}

func (c *plannedRig) quiet() {
	c.load(0)
	c.asking.Wait()
}

// settled waits until the planner has so many engines, none of them starting or draining, and says how long that took.
func (c *plannedRig) settled(n int) time.Duration {
	c.t.Helper()
	begun := time.Now()
	if err := stage.Poll(c.t.Context(), startMost, func() error {
		var s struct {
			Engines []struct{ Name, Phase string }
		}
		data, err := os.ReadFile(filepath.Join(c.Dir, "planner.json"))
		if err == nil {
			err = json.Unmarshal(data, &s)
		}
		if err != nil {
			return err
		}
		if len(s.Engines) != n || slices.ContainsFunc(s.Engines, func(e struct{ Name, Phase string }) bool { return e.Phase != "ready" }) {
			return fmt.Errorf("there are %+v", s.Engines)
		}
		return nil
	}); err != nil {
		c.t.Fatalf("%d engines: %v", n, err)
	}
	return time.Since(begun)
}

// TestPlanner has `headrace up --planner` decide how many vLLMs there are, under a load that grows and shrinks twice: every request is answered as a vLLM
// alone answers it, and the budget is never passed.
func TestPlanner(t *testing.T) {
	environment(t)
	if !full {
		t.Skip("starts seven vLLMs: runs under HEADRACE_FULL=1 (make proof)")
	}
	t.Run("whole requests", func(t *testing.T) { growsAndShrinks(t, planned(t, "vllm-plain", 2, "--decode", "1"), 1) })
	t.Run("prefill and decode", func(t *testing.T) { growsAndShrinks(t, planned(t, "vllm", 3), 2) })
}

// growsAndShrinks lets the load be one that the first engines are enough for, and one that wants one engine more.
func growsAndShrinks(t *testing.T, c *plannedRig, first int) {
	for cycle := range 2 {
		c.load(2)
		c.settled(first)
		before := c.answers.Load()
		c.load(5)
		up := c.settled(first + 1)
		grown := c.answers.Load()
		c.load(2)
		down := c.settled(first)
		t.Logf("cycle %d: one more after %.1f s and %d answers, one less after %.1f s and %d answers", cycle+1, up.Seconds(), grown-before, down.Seconds(), c.answers.Load()-grown)
	}
	s, err := c.Planner(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if len(s.Decisions) < 4 {
		t.Errorf("%d decisions", len(s.Decisions))
	}
	for _, d := range s.Decisions {
		if d.Result != "done" || len(d.Start)+len(d.Stop) != 1 || !strings.Contains(d.Reason, " streams want ") {
			t.Errorf("a decision: %+v", d)
		}
		t.Logf("%s to %s: %s after %.1f s", d.Had, d.Want, d.Result, d.TookS)
	}
	c.quiet()
	if c.answers.Load() == 0 {
		t.Error("nobody was answered")
	}
	t.Logf("%d answers, all right; the planner was told of %+v", c.answers.Load(), s.Measured)
}

// TestProfile measures a vLLM into tables that a planner takes.
func TestProfile(t *testing.T) {
	env := environment(t)
	if !full {
		t.Skip("starts a vLLM of its own and times it: runs under HEADRACE_FULL=1 (make proof)")
	}
	s, err := stage.New(env)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	out := filepath.Join(s.Dir, "out")
	p, err := s.Headrace("profile", sleepy(t), "profile", "--engine", "vllm", "--model", env.Model("tiny"), "--python", env.Python(), "--device", "cpu", "--out", out, "--json",
		"--prompts", "64,256,1024", "--contexts", "128,512", "--kv-usage", "0.05,0.2", "--rounds", "3", "--isl", "256", "--osl", "64", "--env", "VLLM_CPU_KVCACHE_SPACE=1",
		"--", "--dtype", "float32", "--max-model-len", fmt.Sprint(stage.ContextTokens), "--block-size", fmt.Sprint(stage.BlockTokens), "--num-gpu-blocks-override", "512", "--enforce-eager")
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Wait(t.Context(), startMost); err != nil {
		t.Fatal(errors.Join(err, errors.New(stage.Tail(filepath.Join(out, "engines.log"), 4000))))
	}
	var profile struct {
		Engines []struct {
			KVTokens int64  `json:"kv_tokens"`
			Failed   string `json:"failed"`
			Reason   string `json:"reason"`
			Fit      *struct {
				PrefillOff float64 `json:"prefill_off"`
				DecodeOff  float64 `json:"decode_off"`
			} `json:"fit"`
		} `json:"engines"`
		Points []struct {
			Kind string  `json:"kind"`
			Ms   float64 `json:"ms"`
			Why  string  `json:"why"`
		} `json:"points"`
		Partial bool `json:"partial"`
	}
	data, err := os.ReadFile(filepath.Join(out, "profile.json"))
	if err == nil {
		err = json.Unmarshal(data, &profile)
	}
	if err != nil {
		t.Fatal(err)
	}
	if len(profile.Engines) != 1 || profile.Engines[0].Fit == nil || profile.Engines[0].KVTokens != 512*stage.BlockTokens || profile.Partial {
		t.Fatalf("profile.json has %s", data)
	}
	for _, x := range profile.Points {
		if x.Ms <= 0 || x.Why != "" {
			t.Errorf("a %s point: %+v", x.Kind, x)
		}
	}
	t.Logf("%d points, the fit is off by %.1f %% of prefill and %.1f %% of decode", len(profile.Points), 100*profile.Engines[0].Fit.PrefillOff, 100*profile.Engines[0].Fit.DecodeOff)
	// The table is one that planners look into.
	trace := filepath.Join(s.Dir, "trace.csv")
	if err := os.WriteFile(trace, []byte("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:10:00.5,500,20\n2023-11-16 18:10:09.5,700,30\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	replay, err := s.Headrace("replay", nil, "plan", "replay", "--trace", trace, "--table", filepath.Join(out, "table.json"), "--planner", "sla,predictive")
	if err != nil {
		t.Fatal(err)
	}
	if err := replay.Wait(t.Context(), time.Minute); err != nil {
		t.Error(err)
	}
}
