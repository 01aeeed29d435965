package supervise

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// planned starts an Up whose planner sleeps, so that the test has the socket to itself: 1 prefill worker, 2 decode workers, and two GPUs more.
func planned(t *testing.T) (dir string, cmd *exec.Cmd, c *Control) {
	t.Helper()
	dir = tempDir(t)
	if err := os.WriteFile(filepath.Join(dir, "planned.json"), []byte(`{"MaxGPUs":5}`), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd, _ = startUp(t, dir)
	c = NewControl(controlSocket(dir))
	t.Cleanup(c.Close)
	eventually(t, "the control socket", func() bool { _, err := c.Engines(t.Context()); return err == nil })
	return dir, cmd, c
}

func controlSocket(dir string) string { return filepath.Join(dir, "data", "run", "up.sock") }

// workers describes the workers that there are.
func workers(t *testing.T, c *Control) string {
	t.Helper()
	e, err := c.Engines(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var list []string
	for _, x := range e.Engines {
		list = append(list, fmt.Sprintf("%s@%s", x.Name, strings.Join(x.GPUs, ",")))
	}
	slices.Sort(list)
	return strings.Join(list, " ")
}

const plannedAtFirst = "decode-0@1 decode-1@2 prefill-0@0"

// stopUp ends it in order, and looks that nothing of it is left.
func stopUp(t *testing.T, dir string, cmd *exec.Cmd, pids []int) {
	t.Helper()
	if err := cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("up ended with %v", err)
	}
	for _, pid := range pids {
		if !gone(pid) {
			t.Errorf("process %d lives on", pid)
		}
	}
	if left := leftovers(dir); left != "" {
		t.Errorf("left behind: %s", left)
	}
}

// TestControlMisused: whatever is written to the control socket, what cannot be meant is refused with the reason, and no worker starts or stops by it.
func TestControlMisused(t *testing.T) {
	dir, cmd, c := planned(t)
	if info, err := os.Stat(controlSocket(dir)); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the socket is %v, %v", info, err)
	}
	before := workers(t, c)
	if before != plannedAtFirst {
		t.Fatalf("workers are %s", before)
	}
	client := &http.Client{Timeout: patience, Transport: &http.Transport{DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", controlSocket(dir))
		}}}
	for _, row := range []struct {
		method, path, body string
		status             int
		says               string
	}{
		{"POST", "/engines", ``, 400, "read the wish"},
		{"POST", "/engines", `{`, 400, "read the wish"},
		{"POST", "/engines", `[]`, 400, "read the wish"},
		{"POST", "/engines", `{"name":7}`, 400, "read the wish"},
		{"POST", "/engines", `{"name":"` + strings.Repeat("x", wishBytesMax) + `"}`, 400, "read the wish"},
		{"POST", "/engines", `{}`, 409, `role ""`},
		{"POST", "/engines", `{"name":"router-0","role":"router","gpus":["3"]}`, 409, `role "router"`},
		{"POST", "/engines", `{"name":"node-0","role":"decode","gpus":["3"]}`, 409, "one is called as decode-0"},
		{"POST", "/engines", `{"name":"decode-","role":"decode","gpus":["3"]}`, 409, "one is called as decode-0"},
		{"POST", "/engines", `{"name":"decode--2","role":"decode","gpus":["3"]}`, 409, "one is called as decode-0"},
		{"POST", "/engines", `{"name":"decode-02","role":"decode","gpus":["3"]}`, 409, "one is called as decode-0"},
		{"POST", "/engines", `{"name":"../decode-2","role":"decode","gpus":["3"]}`, 409, "one is called as decode-0"},
		{"POST", "/engines", `{"name":"decode-2/../../x","role":"decode","gpus":["3"]}`, 409, "one is called as decode-0"},
		{"POST", "/engines", `{"name":"decode-99999999999999999999","role":"decode","gpus":["3"]}`, 409, "one is called as decode-0"},
		{"POST", "/engines", `{"name":"decode-2","role":"decode"}`, 409, "it takes 1"},
		{"POST", "/engines", `{"name":"decode-2","role":"decode","gpus":["3","4"]}`, 409, "it takes 1"},
		{"POST", "/engines", `{"name":"decode-2","role":"decode","gpus":["5"]}`, 409, "there are 0, 1, 2, 3, 4"},
		{"POST", "/engines", `{"name":"decode-2","role":"decode","gpus":["--listen"]}`, 409, "there are 0, 1, 2, 3, 4"},
		{"POST", "/engines", `{"name":"decode-2","role":"decode","gpus":["3","3"]}`, 409, "each is given once"},
		{"POST", "/engines", `{"name":"decode-2","role":"decode","gpus":["0"]}`, 409, "prefill-0 has some of the GPUs"},
		{"POST", "/engines", `{"name":"decode-0","role":"decode","gpus":["3"]}`, 409, "there is another decode-0"},
		{"DELETE", "/engines/decode-9", ``, 404, errNoWorker.Error()},
		{"DELETE", "/engines/router-0", ``, 404, errNoWorker.Error()},
		{"DELETE", "/engines/planner-0", ``, 404, errNoWorker.Error()},
		{"DELETE", "/engines/..%2f..%2fdecode-0", ``, 404, errNoWorker.Error()},
		{"DELETE", "/engines/", ``, 404, ""},
		{"DELETE", "/engines", ``, 405, ""},
		{"PUT", "/engines", `{}`, 405, ""},
		{"GET", "/engines/decode-0", ``, 405, ""},
		{"GET", "/", ``, 404, ""},
	} {
		req, err := http.NewRequestWithContext(t.Context(), row.method, "http://up"+row.path, strings.NewReader(row.body))
		if err != nil {
			t.Fatal(err)
		}
		resp, err := client.Do(req)
		if err != nil {
			t.Errorf("%s %s %.80s: %v", row.method, row.path, row.body, err)
			continue
		}
		words, _ := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		if resp.StatusCode != row.status || !strings.Contains(string(words), row.says) {
			t.Errorf("%s %s %.80s: %d %s, want %d %q", row.method, row.path, row.body, resp.StatusCode, words, row.status, row.says)
		}
	}
	if err := c.Stop(t.Context(), "x/../decode-0?"); err == nil || !strings.Contains(err.Error(), errNoWorker.Error()) {
		t.Errorf("stop what is no name: %v", err)
	}
	notHTTP(t, controlSocket(dir))
	if after := workers(t, c); after != before {
		t.Errorf("workers are %s, were %s", after, before)
	}
	stopUp(t, dir, cmd, nil)
	if err := c.Start(t.Context(), EngineWish{Name: "decode-2", Role: "decode", GPUs: []string{"3"}}); err == nil || !strings.Contains(err.Error(), "ask headrace up") {
		t.Errorf("a start when all has ended: %v", err)
	}
}

// notHTTP writes what is no request, and leaves connections that say nothing behind: others are served all the same.
func notHTTP(t *testing.T, path string) {
	t.Helper()
	for _, text := range []string{"\x00\x01\x02\xff\r\n\r\n", "GET /engines HTTP/9.9\r\n\r\n", "POST /engines HTTP/1.1\r\nHost: up\r\nContent-Length: -5\r\n\r\n", strings.Repeat("A", 2<<20)} {
		conn, err := net.Dial("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		_ = conn.SetDeadline(time.Now().Add(patience))
		_, err = io.WriteString(conn, text) // it may hang up before it has read all
		if err == nil || errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ECONNRESET) {
			status, err := bufio.NewReader(conn).ReadString('\n')
			if err == nil && !strings.HasPrefix(status, "HTTP/1.1 4") && !strings.HasPrefix(status, "HTTP/1.1 505") {
				t.Errorf("%.40q is answered with %s", text, status)
			}
		}
		_ = conn.Close()
	}
	for range 50 {
		conn, err := net.Dial("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() })
	}
}

// TestControlAskedAgain: who asks may have died in between, or be two: what is asked for twice is done once.
func TestControlAskedAgain(t *testing.T) {
	dir, cmd, c := planned(t)
	ctx := t.Context()
	third := EngineWish{Name: "decode-2", Role: "decode", GPUs: []string{"3"}}
	var asking sync.WaitGroup
	for range 16 {
		asking.Go(func() {
			if err := c.Start(ctx, third); err != nil {
				t.Errorf("start it again: %v", err)
			}
		})
	}
	asking.Wait()
	if got := workers(t, c); got != "decode-0@1 decode-1@2 decode-2@3 prefill-0@0" {
		t.Errorf("workers are %s", got)
	}
	// Two that want the same GPU: one gets it.
	var refused sync.Map
	for i := 3; i < 7; i++ {
		asking.Go(func() {
			if err := c.Start(ctx, EngineWish{Name: fmt.Sprintf("decode-%d", i), Role: "decode", GPUs: []string{"4"}}); err != nil {
				refused.Store(i, err.Error())
			}
		})
	}
	asking.Wait()
	n := 0
	refused.Range(func(_, why any) bool {
		if n++; !strings.Contains(why.(string), "has some of the GPUs 4") {
			t.Errorf("refused with %s", why)
		}
		return true
	})
	if n != 3 {
		t.Errorf("%d of 4 were refused", n)
	}
	// One that is killed comes again, and can be stopped meanwhile, twice.
	pid := func(name string) int {
		e, err := c.Engines(ctx)
		if err != nil {
			t.Fatal(err)
		}
		for _, x := range e.Engines {
			if x.Name == name {
				return x.PID
			}
		}
		return -1
	}
	eventually(t, "decode-2 runs", func() bool { return pid("decode-2") > 0 })
	old := pid("decode-2")
	if err := syscall.Kill(old, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually(t, "decode-2 runs again", func() bool { p := pid("decode-2"); return p > 0 && p != old })
	last := pid("decode-2")
	for range 8 {
		asking.Go(func() {
			if err := c.Stop(ctx, "decode-2"); err != nil && !strings.Contains(err.Error(), errNoWorker.Error()) {
				t.Errorf("stop it again: %v", err)
			}
		})
	}
	asking.Wait()
	eventually(t, "decode-2 has ended", func() bool { return pid("decode-2") == -1 })
	if !gone(last) {
		t.Error("decode-2 is not listed and lives on")
	}
	if err := c.Start(ctx, third); err != nil {
		t.Errorf("start one that was stopped: %v", err)
	}
	eventually(t, "decode-2 runs once more", func() bool { return pid("decode-2") > 0 })
	e, err := c.Engines(ctx)
	if err != nil {
		t.Fatal(err)
	}
	pids := []int{old, last}
	for _, x := range e.Engines {
		pids = append(pids, x.PID)
	}
	stopUp(t, dir, cmd, pids)
}
