package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/headrace/headrace/internal/registry"
	"github.com/headrace/headrace/internal/status"
)

// plannedGPUs is the budget of these tests: a prefill worker and three for decode.
const plannedGPUs = 4

// planned starts a cluster whose planner gives each two streams a decode worker; in a folder of before, "" for a new one.
func planned(t *testing.T, data string) *plannedRig {
	t.Helper()
	history := filepath.Join(t.TempDir(), "history")
	c := &plannedRig{history: history, cluster: prepare(t, options{data: data, args: []string{"--planner-history", history, "--planner", "queue:interval=1:window=1:streams=2:prompts=1000",
		"--planner-interval", "100ms", "--max-gpus", fmt.Sprint(plannedGPUs), "--threads", "1", "--kv-memory", "64MiB"}})}
	c.watchBudget()
	c.launch()
	t.Cleanup(c.quiet) // before the cluster ends
	c.awaitReady()
	o := oracleFor(t, tinyModel(t))
	for i := range uint64(4) {
		r := request{Prompt: seededPrompt(700+i, 40), MaxTokens: 150}
		c.requests, c.wants = append(c.requests, r.streamed()), append(c.wants, o.want(t, r))
	}
	return c
}

// plannedRig is a cluster with a load that can be set.
type plannedRig struct {
	*cluster
	history  string // the folder
	requests []request
	wants    []*answer
	clients  []context.CancelFunc
	asking   sync.WaitGroup
	done     sync.WaitGroup
	answers  atomic.Int64
	most     atomic.Int64 // worker processes at once

	mu     sync.Mutex
	failed []string // the first few
	ending bool     // the cluster is about to be killed: who asks then gets no answer
}

// watchBudget counts worker processes until the test ends.
func (c *plannedRig) watchBudget() {
	end := make(chan struct{})
	c.done.Go(func() {
		for tick := time.NewTicker(50 * time.Millisecond); ; {
			n := int64(0)
			for _, pid := range marked(c.mark) {
				if strings.Contains(commandLine(pid), "headrace worker ") && alive(pid) {
					n++
				}
			}
			c.most.Store(max(c.most.Load(), n))
			select {
			case <-tick.C:
			case <-end:
				tick.Stop()
				return
			}
		}
	})
	c.t.Cleanup(func() {
		close(end)
		c.done.Wait()
		if n := c.most.Load(); n != plannedGPUs {
			c.t.Errorf("%d worker processes at once, of a budget of %d that was to be used up", n, plannedGPUs)
		}
		for _, f := range c.failed {
			c.t.Error(f)
		}
	})
}

// load has so many clients ask on and on, each for what is known beforehand. Those that are too many end with their answers.
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
				err := ask(c.url(), c.requests[k%len(c.requests)]).equals(c.wants[k%len(c.wants)])
				if err == nil {
					c.answers.Add(1)
					continue
				}
				c.mu.Lock()
				if len(c.failed) < 5 && !c.ending {
					c.failed = append(c.failed, fmt.Sprintf("client %d, request %d: %v", i, k, err))
				}
				c.mu.Unlock()
			}
		})
	}
}

// quiet ends the load.
func (c *plannedRig) quiet() {
	c.load(0)
	c.asking.Wait()
}

// status is what `headrace status` says.
func (c *plannedRig) status() (*status.Report, error) {
	cmd := exec.Command(bin(c.t), "status", "--data-dir", c.data, "--json")
	cmd.Env = c.environ()
	out, err := cmd.Output()
	if err != nil {
		return nil, err
	}
	r := new(status.Report)
	return r, json.Unmarshal(out, r)
}

// settled waits until the planner has so many decode workers, and nothing in progress.
func (c *plannedRig) settled(decode int) {
	c.t.Helper()
	eventually(c.t, waitHang, fmt.Sprintf("there are %d decode workers", decode), func() error {
		n := 0
		for _, w := range c.view().Workers {
			if w.Role == registry.RoleDecode && (w.Weight == nil || *w.Weight == 1) && w.NodeData != "" {
				n++
			}
		}
		if n != decode {
			return fmt.Errorf("%d are", n)
		}
		s, err := c.kept()
		if err != nil {
			return err
		}
		for _, e := range s.Engines {
			if e.Phase != "ready" {
				return fmt.Errorf("%s is %s", e.Name, e.Phase)
			}
		}
		if len(s.Engines) != decode+1 {
			return fmt.Errorf("the planner knows %v", s.Engines)
		}
		return nil
	})
}

// keptState is what is of use here of the planner's state file.
type keptState struct {
	Engines []struct {
		Name  string   `json:"name"`
		GPUs  []string `json:"gpus"`
		Phase string   `json:"phase"`
	} `json:"engines"`
}

func (c *plannedRig) kept() (s keptState, err error) {
	data, err := os.ReadFile(filepath.Join(c.data, "planner.json"))
	if err == nil {
		err = json.Unmarshal(data, &s)
	}
	return s, err
}

// TestPlanner lets the load grow and shrink under `headrace up --planner`: workers start and stop, every request is answered right, the budget
// is never passed, and log and status say why.
func TestPlanner(t *testing.T) {
	needAll(t)
	cycles := 2
	if full {
		cycles = 10
	}
	c := planned(t, "")
	c.load(2)
	for range cycles {
		c.load(8)
		c.settled(3)
		c.load(2)
		c.settled(1)
	}
	r, err := c.status()
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Planners) != 1 || r.Planners[0].Status == nil {
		t.Fatalf("planners in status: %+v", r.Planners)
	}
	s := r.Planners[0].Status
	if !s.Leader || s.GPUs != 2 || len(s.Decisions) < min(2*cycles, 20) {
		t.Errorf("status says %+v", s)
	}
	for _, d := range s.Decisions {
		if d.Result != "done" || !strings.Contains(d.Reason, " streams want ") || len(d.Start)+len(d.Stop) == 0 || len(d.Chosen) != len(d.Stop) {
			t.Errorf("a decision in status: %+v", d)
		}
	}
	log, err := os.ReadFile(filepath.Join(c.data, "logs", "planner-0.log"))
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(string(log), "msg=plan "); n < 2*cycles || n != strings.Count(string(log), " streams want ") {
		t.Errorf("%d decisions in the log", n)
	}
	c.quiet()
	c.interrupt(false)
	c.wantExit(0)
	if _, err := os.Stat(filepath.Join(c.data, "planner.json")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the planner's state behind an orderly end: %v", err)
	}
	files, err := filepath.Glob(filepath.Join(c.history, "events.out.tfevents.*"))
	if err != nil || len(files) != 1 {
		t.Fatalf("files of the history: %v, %v", files, err)
	}
	if events, err := os.ReadFile(files[0]); err != nil || bytes.Count(events, []byte(" streams want ")) != strings.Count(string(log), "msg=plan ") {
		t.Errorf("%d changes in the history, %d in the log, %v", bytes.Count(events, []byte(" streams want ")), strings.Count(string(log), "msg=plan "), err)
	}
	t.Logf("%d cycles, %d answers", cycles, c.answers.Load())
}

// TestPlannerKilled kills the planner while engines start, and while they drain: the next one goes on with just those.
func TestPlannerKilled(t *testing.T) {
	needAll(t)
	c := planned(t, "")
	kill := func(phase string) {
		t.Helper()
		eventually(t, waitHang, "a worker is "+phase, func() error {
			s, err := c.kept()
			if err != nil {
				return err
			}
			for _, e := range s.Engines {
				if e.Phase == phase {
					return nil
				}
			}
			return fmt.Errorf("there are %+v", s.Engines)
		})
		if err := signal(c.table.Snapshot().Planners[0].PID, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
	}
	c.load(8)
	kill("starting")
	c.settled(3)
	c.load(2)
	kill("draining")
	c.settled(1)
	s, err := c.kept()
	if err != nil {
		t.Fatal(err)
	}
	var kept, run []string
	for _, e := range s.Engines {
		kept = append(kept, e.Name)
	}
	for _, pid := range marked(c.mark) {
		if fields := strings.Fields(commandLine(pid)); len(fields) > 3 && fields[1] == "worker" && alive(pid) {
			run = append(run, fields[3])
		}
	}
	slices.Sort(kept)
	slices.Sort(run)
	if !slices.Equal(kept, run) {
		t.Errorf("the planner knows %v, and %v run", kept, run)
	}
}

// TestPlannedUpKilled kills `headrace up --planner` while its planner has started workers: all of them end, and the next one on the same folder has
// them again as they were, each with its GPU, though it begins with fewer itself.
func TestPlannedUpKilled(t *testing.T) {
	needAll(t)
	c := planned(t, "")
	c.load(8)
	c.settled(3)
	before := c.holders()
	c.mu.Lock()
	c.ending = true
	c.mu.Unlock()
	c.view()
	c.disconnect()
	if err := signal(c.cmd.Process.Pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	c.awaitEnd(waitHang)
	eventually(t, waitHang, "workers, planner and the others are gone", func() error {
		if pids := marked(c.mark); len(pids) > 0 {
			return errors.New(describe(pids))
		}
		return nil
	})
	c.quiet()
	c.over = true // its sockets lie about until the next start

	again := planned(t, c.data)
	again.load(8)
	again.settled(3)
	if after := again.holders(); after != before {
		t.Errorf("GPUs are those of %s, were those of %s", after, before)
	}
	log, err := os.ReadFile(filepath.Join(again.data, "logs", "planner-0.log"))
	if err != nil {
		t.Fatal(err)
	}
	_, log, _ = bytes.Cut(log, []byte("going on where the planner before ended"))
	for _, name := range []string{"decode-1", "decode-2"} {
		if n := bytes.Count(log, []byte("starting it again\" engine="+name)); n != 1 {
			t.Errorf("%s was started again %d times by what was kept", name, n)
		}
	}
	again.load(0)
	again.settled(1) // and they can go
	if n := again.answers.Load(); n == 0 {
		t.Error("nobody was answered")
	}
	again.quiet()
	again.interrupt(false)
	again.wantExit(0)
	if err := leftFiles(again.data); err != nil {
		t.Errorf("left in the data folder: %v", err)
	}
}

// holders says who has which GPU, by what the planner keeps.
func (c *plannedRig) holders() string {
	c.t.Helper()
	s, err := c.kept()
	if err != nil {
		c.t.Fatal(err)
	}
	var list []string
	for _, e := range s.Engines {
		list = append(list, fmt.Sprintf("%s@%s", e.Name, strings.Join(e.GPUs, ",")))
	}
	slices.Sort(list)
	return strings.Join(list, " ")
}
