package e2e

import (
	"bytes"
	"context"
	"errors"
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

// TestSmoke always runs: one command, one answer through both workers, one Ctrl-C.
func TestSmoke(t *testing.T) {
	c := start(t, options{nodes: 2})
	r := request{Prompt: seededPrompt(1, 50), MaxTokens: 12}
	want := oracleFor(t, tinyModel(t)).want(t, r)
	before, _ := c.moved()
	mustEqual(t, ask(c.url(), r), want, "not streamed")
	mustEqual(t, ask(c.url(), r.streamed()), want, "streamed")
	c.blocksBack(waitShort, "after two answers")
	if after, _ := c.moved(); after == before {
		t.Error("no KV moved")
	}
	c.interrupt(true)
	c.wantExit(0)
	c.leavesNothing(waitShort)
}

// wantExit checks up's exit status.
func (c *cluster) wantExit(want int) {
	c.t.Helper()
	if got := c.cmd.ProcessState.ExitCode(); got != want {
		c.t.Errorf("exit status %d, want %d", got, want)
	}
}

// TestUpInterrupt: one Ctrl-C ends everything, in the middle of work too.
func TestUpInterrupt(t *testing.T) {
	needAll(t)
	for name, group := range map[string]bool{"only up gets it": false, "the group gets it": true} {
		t.Run(name, func(t *testing.T) {
			c := start(t, options{nodes: 2})
			st := post(c.url(), request{Prompt: freshPrompt(200), MaxTokens: longAnswer, Stream: true})
			if err := st.until(5, waitHang); err != nil {
				t.Fatal(err)
			}
			begun := time.Now()
			c.interrupt(group)
			bounds.add("Ctrl-C to the end of up", time.Since(begun), nil)
			c.wantExit(0)
			c.leavesNothing(time.Second)
			if a := st.wait(); a.Error == nil && !a.Done {
				t.Logf("the client in the middle of a stream was given: %s", a.outcome())
			}
		})
	}
}

// TestUpInterruptHeld: a transfer that hangs does not keep up from ending, and a second Ctrl-C ends it at once.
func TestUpInterruptHeld(t *testing.T) {
	needAll(t)
	for name, twice := range map[string]bool{"once": false, "twice": true} {
		t.Run(name, func(t *testing.T) {
			c := start(t, options{nodes: 2})
			pn := c.nodeOf(c.prefill())
			pn.pause(t, "write.frame", 1)
			st := post(c.url(), request{Prompt: freshPrompt(200), MaxTokens: 10, Stream: true})
			pn.held(t, "write.frame")
			begun := time.Now()
			if twice {
				router := c.view().Routers[0]
				c.disconnect()
				pid := c.cmd.Process.Pid
				if err := signal(pid, syscall.SIGINT); err != nil {
					t.Fatal(err)
				}
				eventually(t, waitShort, "the router stops", func() error {
					var st struct {
						Stopping bool `json:"stopping"`
					}
					if err := getJSON("http://"+router.Admin+"/status", &st); err != nil {
						return err
					}
					if !st.Stopping {
						return errors.New("it does not")
					}
					return nil
				})
				begun = time.Now()
				if err := signal(pid, syscall.SIGINT); err != nil {
					t.Fatal(err)
				}
				c.awaitEnd(2 * time.Second)
			} else {
				c.interrupt(true)
				c.wantExit(0)
			}
			bounds.add("Ctrl-C "+name+" during a transfer that hangs", time.Since(begun), nil)
			c.leavesNothing(2 * time.Second)
			if a := st.wait(); a.Done {
				t.Errorf("the answer was finished though its transfer was held: %s", a.outcome())
			}
		})
	}
}

// TestRouterKilled: the one part whose death a client must see; nothing else may suffer.
func TestRouterKilled(t *testing.T) {
	needAll(t)
	c := start(t, options{nodes: 2})
	o := oracleFor(t, tinyModel(t))
	for round := range rounds() {
		var streams []*stream
		for range 4 {
			streams = append(streams, post(c.url(), request{Prompt: freshPrompt(150), MaxTokens: longAnswer, Stream: true}))
		}
		for _, st := range streams {
			if err := st.until(2, waitHang); err != nil {
				t.Fatal(err)
			}
		}
		old := c.view().Routers[0].PID
		if err := signal(old, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		for _, st := range streams {
			if a := st.wait(); a.Done || a.Broken == nil {
				t.Fatalf("the router died and the client was given: %s", a.outcome())
			}
		}
		// Connections wait in the listener that up keeps open.
		r := request{Prompt: freshPrompt(60), MaxTokens: 20}
		want := o.want(t, r)
		begun := time.Now()
		mustEqual(t, ask(c.url(), r), want, "the next request")
		bounds.add("kill -9 of the router to the next request's answer", time.Since(begun), nil)
		c.blocksBack(waitShort, fmt.Sprintf("after the router died, round %d", round))
		eventually(t, waitRestart, "the router is registered again", func() error {
			if v := c.view(); len(v.Routers) != 1 || v.Routers[0].PID == old {
				return fmt.Errorf("routers %+v", v.Routers)
			}
			return nil
		})
		c.split(waitRestart)
	}
}

// TestUpKilled: kill -9 of up takes the children along, and the next start on the same folder works.
func TestUpKilled(t *testing.T) {
	needAll(t)
	c := start(t, options{})
	c.view()
	c.disconnect()
	if err := signal(c.cmd.Process.Pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	begun := time.Now()
	c.awaitEnd(waitShort)
	eventually(t, waitShort, "the children are gone", func() error {
		if pids := marked(c.mark); len(pids) > 0 {
			return errors.New(describe(pids))
		}
		return nil
	})
	bounds.add("kill -9 of up to the end of its children", time.Since(begun), nil)
	c.over = true // sockets of the killed may lie about until the next start
	again := start(t, options{data: c.data})
	again.split(waitRestart)
	again.interrupt(false)
	again.wantExit(0)
	if err := leftFiles(c.data); err != nil {
		t.Errorf("left in the data folder: %v", err)
	}
}

// TestUpTwice: the second start on a data folder is refused and does not harm the first.
func TestUpTwice(t *testing.T) {
	needAll(t)
	c := start(t, options{})
	second := prepare(t, options{data: c.data})
	second.refused(t, 1, c.data)
	c.split(waitShort)
}

// refused runs a command that must end by itself with one line that says all of what.
func (c *cluster) refused(t *testing.T, status int, what ...string) {
	t.Helper()
	var out, errOut bytes.Buffer
	c.cmd.Stdout, c.cmd.Stderr = &out, &errOut
	timer := time.AfterFunc(waitRestart, func() { _ = c.cmd.Process.Signal(syscall.SIGKILL) })
	defer timer.Stop()
	err := c.cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	if got := c.cmd.ProcessState.ExitCode(); got != status {
		t.Errorf("exit status %d, want %d (stderr %q)", got, status, errOut.String())
	}
	text := strings.TrimSpace(errOut.String())
	if text == "" || strings.Count(text, "\n") > 0 {
		t.Errorf("want one line on standard error, got %q", errOut.String())
	}
	for _, w := range what {
		if !strings.Contains(text, w) {
			t.Errorf("the error does not name %q: %q", w, text)
		}
	}
	c.over = true
	if err := noLeftovers(c.mark, c.dir, nil); err != nil {
		t.Errorf("left behind: %v", err)
	}
}

// TestUpMisused: what a person may get wrong is said in one line.
func TestUpMisused(t *testing.T) {
	needAll(t)
	t.Run("port in use", func(t *testing.T) {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = l.Close() }()
		prepare(t, options{args: []string{"--listen", l.Addr().String()}}).refused(t, 1, l.Addr().String())
	})
	t.Run("no such model", func(t *testing.T) {
		path := filepath.Join(scratch, "missing.gguf")
		prepare(t, options{model: path}).refused(t, 1, path)
	})
	t.Run("not a model", func(t *testing.T) {
		path := filepath.Join(scratch, "not-a-model.gguf")
		if err := os.WriteFile(path, []byte("this is no model file at all"), 0o600); err != nil {
			t.Fatal(err)
		}
		prepare(t, options{model: path}).refused(t, 1, path)
	})
	t.Run("a typo in a flag", func(t *testing.T) {
		prepare(t, options{args: []string{"--modle", "x"}}).refused(t, 2, "--modle")
	})
	t.Run("a value that is none", func(t *testing.T) {
		prepare(t, options{args: []string{"--nodes", "many"}}).refused(t, 2, "many")
	})
	t.Run("an argument too many", func(t *testing.T) {
		prepare(t, options{args: []string{"surplus"}}).refused(t, 2, "surplus")
	})
}

// TestUpExternalEtcd: with an etcd of the user's, no key is left in it.
func TestUpExternalEtcd(t *testing.T) {
	needAll(t)
	em, err := registry.StartEmbedded(registry.EmbeddedConfig{Dir: filepath.Join(scratch, "etcd"), ClientAddr: "127.0.0.1:0"})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = em.Close() }()
	reg, err := registry.Open(t.Context(), registry.Config{Endpoints: []string{em.Addr()}})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = reg.Close() }()
	table, err := reg.Watch(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	keysGone := func(limit time.Duration, what string) {
		t.Helper()
		eventually(t, limit, "no key is left in etcd "+what, func() error {
			if v := table.Snapshot(); len(v.Nodes)+len(v.Workers)+len(v.Routers) > 0 {
				return errors.New("there are keys: " + viewIDs(v))
			}
			return nil
		})
	}
	c := start(t, options{etcd: em.Addr()})
	c.split(waitShort)
	eventually(t, waitShort, "the parts are in the user's etcd", func() error {
		if v := table.Snapshot(); len(v.Nodes) != 1 || len(v.Workers) != 2 || len(v.Routers) != 1 {
			return errors.New("there are only: " + viewIDs(v))
		}
		return nil
	})
	c.interrupt(true)
	keysGone(time.Second, "after Ctrl-C")
	c.leavesNothing(time.Second)

	c = start(t, options{etcd: em.Addr()})
	c.disconnect()
	if err := signal(c.cmd.Process.Pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	c.awaitEnd(waitShort)
	c.over = true
	keysGone(10*time.Second, "after kill -9 of up (they expire)")
}

func viewIDs(v *registry.View) string {
	var ids []string
	for _, n := range v.Nodes {
		ids = append(ids, "node "+n.ID)
	}
	for _, w := range v.Workers {
		ids = append(ids, "worker "+w.ID)
	}
	for _, r := range v.Routers {
		ids = append(ids, "router "+r.ID)
	}
	return strings.Join(ids, ", ")
}
