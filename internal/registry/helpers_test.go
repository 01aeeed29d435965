package registry

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/headrace/headrace/internal/leaktest"
)

// patience bounds every wait of these tests; none of them waits that long when things are right.
const patience = 30 * time.Second

const (
	envServeDir  = "REGISTRY_TEST_SERVE_DIR"
	envServeAddr = "REGISTRY_TEST_SERVE_ADDR"
)

// TestMain serves etcd when this binary was started as a child, so that a test can kill -9 it.
func TestMain(m *testing.M) {
	if dir := os.Getenv(envServeDir); dir != "" {
		serve(dir, os.Getenv(envServeAddr))
		return
	}
	leaktest.Main(m, []string{"headrace/internal/registry.", "etcd/client/v3.", "etcdserver."})
}

func serve(dir, addr string) {
	e, err := StartEmbedded(EmbeddedConfig{Dir: dir, ClientAddr: addr})
	if err != nil {
		fmt.Println("error", err)
		os.Exit(1)
	}
	fmt.Println("ready", e.Addr())
	_, _ = io.Copy(io.Discard, os.Stdin) // the test's end closes it
	_ = e.Close()
}

func startEtcd(t *testing.T, dir, addr string) *Embedded {
	t.Helper()
	e, err := StartEmbedded(EmbeddedConfig{Dir: dir, ClientAddr: addr})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	})
	return e
}

type etcdProcess struct {
	dir, addr string
	cmd       *exec.Cmd
	stdin     io.Closer
}

// startEtcdProcess runs etcd in a child process.
func startEtcdProcess(t *testing.T, dir string) *etcdProcess {
	t.Helper()
	p := &etcdProcess{dir: dir, addr: "127.0.0.1:0"}
	t.Cleanup(p.kill)
	p.start(t)
	return p
}

// start runs it, on the address it had before.
func (p *etcdProcess) start(t *testing.T) {
	t.Helper()
	p.cmd = exec.Command(os.Args[0])
	p.cmd.Env = append(os.Environ(), envServeDir+"="+p.dir, envServeAddr+"="+p.addr)
	p.cmd.Stderr = os.Stderr
	out, err := p.cmd.StdoutPipe()
	if err == nil {
		p.stdin, err = p.cmd.StdinPipe()
	}
	if err == nil {
		err = p.cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	word, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
	if err != nil || word != "ready" {
		t.Fatalf("etcd process said %q: %v", line, err)
	}
	p.addr = rest
}

func (p *etcdProcess) kill() {
	_ = p.stdin.Close()
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait()
}

func open(t *testing.T, addr string) *Registry {
	t.Helper()
	return openTTL(t, addr, 0)
}

func openTTL(t *testing.T, addr string, ttl time.Duration) *Registry {
	t.Helper()
	r, err := Open(t.Context(), Config{Endpoints: []string{addr}, TTL: ttl})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Close(); err != nil && !errors.Is(err, context.DeadlineExceeded) { // see closed
			t.Errorf("close registry: %v", err)
		}
	})
	return r
}

func announce(t *testing.T, r *Registry, kind Kind, id string, value any) *Announcement {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	a, err := r.Announce(ctx, kind, id, value)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// closed closes an announcement. An etcd that the machine stops may answer later than a call may take: what could not be
// deleted then is deleted later, or ends with its lease.
func closed(t *testing.T, c io.Closer) {
	t.Helper()
	if err := c.Close(); err != nil && !errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(err)
	}
}

func watch(t *testing.T, r *Registry) *Table {
	t.Helper()
	table, err := r.Watch(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return table
}

// await waits for the table to show what ok wants to see.
func await(t *testing.T, table *Table, what string, ok func(*View) bool) *View {
	t.Helper()
	deadline := time.NewTimer(patience)
	defer deadline.Stop()
	for {
		changed := table.Changed()
		if v := table.Snapshot(); ok(v) {
			return v
		}
		select {
		case <-changed:
		case <-deadline.C:
			t.Fatalf("waited %s for %s; the table has %+v, err %v", patience, what, table.Snapshot(), table.Err())
		}
	}
}

// abandon closes the registry as a kill of the process would: nothing is withdrawn.
func abandon(t *testing.T, r *Registry) {
	t.Helper()
	r.mu.Lock()
	r.abandons = true
	r.mu.Unlock()
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
}

func compact(t *testing.T, r *Registry) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	resp, err := r.cli.Get(ctx, prefix)
	if err == nil {
		_, err = r.cli.Compact(ctx, resp.Header.Revision)
	}
	if err != nil {
		t.Fatal(err)
	}
}

var errWanted = errors.New("an error was wanted")
