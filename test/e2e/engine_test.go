package e2e

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/headrace/headrace/internal/registry"
)

// TestEnginesOfAnotherKind always runs: up starts engines from a command line, here Headrace's own worker as a plain server,
// announces them as what they say of themselves, routes to them, brings them back and leaves none of their processes.
func TestEnginesOfAnotherKind(t *testing.T) {
	command := bin(t) + " worker --model {model} --listen {host}:{port} --id {engine-id} --threads {threads}"
	c := prepare(t, options{args: []string{"--command", command, "--decode", "2"}})
	c.launch()
	c.awaitUp()
	w := c.engines(2)[0]
	if w.Role != registry.RoleBoth || w.Dialect != "openai" || w.Blocks == 0 || w.ContextTokens == 0 || w.NodeData != "" {
		t.Errorf("an engine is listed as %+v", w)
	}
	r := request{Prompt: seededPrompt(1, 50), MaxTokens: 12}
	want := oracleFor(t, tinyModel(t)).want(t, r)
	mustEqual(t, ask(c.url(), r), want, "not streamed")
	mustEqual(t, ask(c.url(), r.streamed()), want, "streamed")

	for _, row := range []struct {
		name string
		pid  func(w registry.Worker) int
	}{
		{"the engine", func(w registry.Worker) int { return childOf(t, w.EnginePID) }},
		{"its guard", func(w registry.Worker) int { return w.EnginePID }},
		{"its sidecar", func(w registry.Worker) int { return w.PID }},
	} {
		w := c.engines(2)[0]
		engine := childOf(t, w.EnginePID)
		if err := signal(row.pid(w), syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		took := eventually(t, 5*time.Second, "the engine is gone with "+row.name, func() error {
			if alive(engine) || alive(w.EnginePID) {
				return fmt.Errorf("living: %s", describe([]int{engine, w.EnginePID}))
			}
			return nil
		})
		t.Logf("kill -9 of %s: its processes are gone after %s", row.name, took)
		eventually(t, 20*time.Second, "another engine is in its place", func() error {
			for _, e := range c.engines(2) {
				if e.EnginePID == w.EnginePID {
					return fmt.Errorf("the registry still has %+v", e)
				}
			}
			return nil
		})
		mustEqual(t, ask(c.url(), r), want, "after kill -9 of "+row.name)
	}
	c.interrupt(true)
	c.wantExit(0)
	c.leavesNothing(waitShort)
}

// engines waits until n engines are listed and known to the router.
func (c *cluster) engines(n int) []registry.Worker {
	c.t.Helper()
	var found []registry.Worker
	eventually(c.t, 20*time.Second, fmt.Sprint(n, " engines are listed"), func() error {
		v := c.view()
		if found = v.Workers; len(found) != n || len(v.Routers) == 0 {
			return fmt.Errorf("workers %+v", found)
		}
		var st struct {
			Workers []struct {
				ID string `json:"id"`
			} `json:"workers"`
		}
		if err := getJSON("http://"+v.Routers[0].Admin+"/status", &st); err != nil {
			return err
		}
		if len(st.Workers) != n {
			return fmt.Errorf("the router has %+v", st.Workers)
		}
		return nil
	})
	return found
}

// childOf is the engine below its guard.
func childOf(t *testing.T, guard int) (child int) {
	t.Helper()
	eventually(t, waitShort, "the guard has its engine", func() error {
		data, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", guard, guard))
		if err != nil {
			return err
		}
		if _, err := fmt.Sscan(string(data), &child); err == nil {
			return nil
		}
		// It is the child of whichever thread forked it.
		tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", guard))
		for _, task := range tasks {
			if data, err := os.ReadFile(task); err == nil {
				if _, err := fmt.Sscan(string(data), &child); err == nil {
					return nil
				}
			}
		}
		return fmt.Errorf("guard %d has no child", guard)
	})
	return child
}

// TestEngineThatCannotStart: what the engine said last is what up says.
func TestEngineThatCannotStart(t *testing.T) {
	for command, want := range map[string]string{
		"sh -c 'echo ValueError: no room for the KV cache; exit 3'": "the engine died at its start: it ended with exit status 3; it said: ValueError: no room for the KV cache",
		"/nonexistent/server {port}":                                "/nonexistent/server",
	} {
		c := prepare(t, options{})
		cmd := exec.Command(bin(t), "up", "--command", command, "--listen", "127.0.0.1:0", "--data-dir", c.data)
		cmd.Env = c.environ()
		out, err := cmd.CombinedOutput()
		if err == nil || !strings.Contains(string(out), want) || !strings.Contains(string(out), "headrace up: start engine-0: ") {
			t.Errorf("%s: %v, wrote %s, want %q", command, err, out, want)
		}
		if left := marked(c.mark); len(left) > 0 {
			t.Errorf("%s: left behind %s", command, describe(left))
		}
		_ = os.RemoveAll(c.dir)
	}
}

// TestHostScript: deploy/host.sh runs a host's parts against somebody's etcd, and stops all of them.
func TestHostScript(t *testing.T) {
	needAll(t)
	c := start(t, options{}) // for its etcd
	script, err := filepath.Abs("../../deploy/host.sh")
	if err != nil {
		t.Fatal(err)
	}
	port := freePorts(t, 14) // the script takes PORT, PORT+1 and from PORT+10 on
	cmd := exec.Command(script, tinyModel(t), "both", "both", "router")
	cmd.Env = append(c.environ(), "HEADRACE="+bin(t), "ETCD="+c.ready.Etcd, "PORT="+fmt.Sprint(port), "DATA="+filepath.Join(c.dir, "h"),
		"COMMAND="+bin(t)+" worker --model {model} --listen {host}:{port} --id {engine-id} --threads 1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	var out strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	url := fmt.Sprintf("http://127.0.0.1:%d", port)
	r := request{Prompt: seededPrompt(1, 50), MaxTokens: 12}
	want := oracleFor(t, tinyModel(t)).want(t, r)
	eventually(t, 20*time.Second, "the host's parts are listed", func() error {
		v := c.view()
		if len(v.Workers) != 4 || len(v.Nodes) != 2 || len(v.Routers) != 2 {
			return fmt.Errorf("%d workers, %d nodes, %d routers", len(v.Workers), len(v.Nodes), len(v.Routers))
		}
		return ask(url, r).equals(want)
	})
	if err := signal(cmd.Process.Pid, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("the script ended with %v: %s", err, out.String())
	}
	eventually(t, waitShort, "the host's parts are gone", func() error {
		if v := c.view(); len(v.Workers) != 2 || len(v.Nodes) != 1 || len(v.Routers) != 1 {
			return fmt.Errorf("%d workers, %d nodes, %d routers", len(v.Workers), len(v.Nodes), len(v.Routers))
		}
		return nil
	})
}

// freePorts finds n ports in a row that nobody listens on.
func freePorts(t *testing.T, n int) int {
	t.Helper()
	for first := 12000; first < 30000; first += n {
		var held []net.Listener
		for p := first; p < first+n; p++ {
			l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", p))
			if err != nil {
				break
			}
			held = append(held, l)
		}
		for _, l := range held {
			_ = l.Close()
		}
		if len(held) == n {
			return first
		}
	}
	t.Fatal("no free ports")
	return 0
}
