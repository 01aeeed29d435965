package supervise

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/headrace/headrace/internal/config"
	"github.com/headrace/headrace/internal/leaktest"
	"github.com/headrace/headrace/internal/registry"
)

// patience bounds every wait; none lasts that long when things are right.
const patience = 30 * time.Second

// envPart makes this binary a stand-in for headrace: its first argument says what to be.
const envPart = "SUPERVISE_TEST_PART"

func TestMain(m *testing.M) {
	if os.Getenv(envPart) != "" {
		if err := bePart(os.Args[1], os.Args[2:]); err != nil {
			fmt.Fprintf(os.Stderr, "headrace %s: %v\n", os.Args[1], err)
			os.Exit(1)
		}
		return
	}
	_ = os.Setenv(envPart, "1")
	leaktest.Main(m, []string{"internal/supervise."})
}

// option finds a flag's value in a command line.
func option(args []string, name string) string {
	for i := range len(args) - 1 {
		if args[i] == "--"+name {
			return args[i+1]
		}
	}
	return ""
}

func bePart(kind string, args []string) error {
	fd, _ := strconv.Atoi(option(args, "parent-fd"))
	if kind == "up" {
		fd = 0
	}
	ctx := WatchParent(context.Background(), fd)
	if kind == "stubborn" {
		signal.Ignore(syscall.SIGTERM)
		fmt.Println("ignoring")
		select {}
	}
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	defer stop()
	switch kind {
	case "sleep", "planner":
		fmt.Println("sleeping")
		<-ctx.Done()
		fmt.Println("woken")
		return nil
	case "fail":
		return errors.New("cannot go on")
	case "up":
		return Up(ctx, testOptions(args[0]))
	case "node", "worker", "engine", "router":
		return beListed(ctx, kind, args)
	}
	return fmt.Errorf("no part %q", kind)
}

// beListed announces a part that does nothing, and for the router serves what Up asks for.
func beListed(ctx context.Context, kind string, args []string) error {
	if option(args, "model-name") == "broken" && kind == "worker" {
		return errors.New("load model: it is broken")
	}
	reg, err := registry.Open(ctx, registry.Config{Endpoints: strings.Split(option(args, "etcd"), ",")})
	if err != nil {
		return err
	}
	defer reg.Close()
	id := option(args, "id")
	host, _ := os.Hostname()
	socket := option(args, "socket")
	switch kind {
	case "node":
		_ = os.Remove(socket) // as a killed predecessor leaves it
		l, err := net.Listen("unix", socket)
		if err != nil {
			return err
		}
		defer l.Close()
		_, err = reg.Announce(ctx, registry.KindNode, id, registry.Node{ID: id, PID: os.Getpid(), Host: host, Admin: "127.0.0.1:9", Socket: socket})
		if err != nil {
			return err
		}
	case "worker":
		_, err = reg.Announce(ctx, registry.KindWorker, id, registry.Worker{ID: id, PID: os.Getpid(), Host: host, NodeData: socket, Role: option(args, "role")})
		if err != nil {
			return err
		}
	case "engine": // one that has nothing to do with node daemons
		if option(args, "dialect") == "none" {
			return errors.New("the engine died at its start: it said nothing")
		}
		_, err = reg.Announce(ctx, registry.KindWorker, id, registry.Worker{ID: id, PID: os.Getpid(), Host: host, Role: option(args, "role"), Model: strings.Join(args, " ")})
		if err != nil {
			return err
		}
	case "router":
		l, err := net.FileListener(os.NewFile(ParentFD+1, "listener"))
		if err != nil {
			return err
		}
		table, err := reg.Watch(ctx)
		if err != nil {
			return err
		}
		srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/status" {
				_ = json.NewEncoder(w).Encode(map[string]any{"workers": seenBy(table)})
			}
		})}
		go func() { _ = srv.Serve(l) }()
		defer srv.Close()
		_, err = reg.Announce(ctx, registry.KindRouter, id, registry.Router{ID: id, PID: os.Getpid(), Host: host, Admin: l.Addr().String()})
		if err != nil {
			return err
		}
	}
	<-ctx.Done()
	return nil
}

// seenBy is the part of a router's status that up reads.
func seenBy(table *registry.Table) []map[string]string {
	var workers []map[string]string
	for _, w := range table.Snapshot().Workers {
		workers = append(workers, map[string]string{"id": w.ID, "node_data": w.NodeData})
	}
	return workers
}

// testOptions are those of an Up whose parts are stand-ins, in dir.
func testOptions(dir string) *Options {
	o := &Options{
		Common: Common{LogLevel: "info", LogFormat: "text"},
		Model:  filepath.Join(dir, "m.gguf"), Prefill: 1, Decode: 2, Nodes: 2,
		Listen: "127.0.0.1:0", DataDir: filepath.Join(dir, "data"), Transport: "auto", CPUs: 2, Exe: os.Args[0],
		ReadyFile: filepath.Join(dir, "ready.json"), Hard: make(chan struct{}),
	}
	if data, err := os.ReadFile(filepath.Join(dir, "engine.json")); err == nil {
		o.Prefill, o.Engine = 0, &Engine{}
		if err := json.Unmarshal(data, o.Engine); err != nil {
			panic(err)
		}
	}
	if data, err := os.ReadFile(filepath.Join(dir, "planned.json")); err == nil {
		o.Planner = &Planner{}
		if err := json.Unmarshal(data, o.Planner); err != nil {
			panic(err)
		}
	}
	o.Logger, _ = config.NewLogger(os.Stderr, "error", "text")
	return o
}

// tempDir is short enough for the paths of unix sockets.
func tempDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "sup")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.WriteFile(filepath.Join(dir, "m.gguf"), []byte("GGUF and more"), 0o600); err != nil {
		t.Fatal(err)
	}
	return dir
}

// eventually looks until ok; other processes give no channel to wait on.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("waited %s for %s", patience, what)
		}
	}
}

// gone tells whether a process has ended; one that nobody has reaped yet has.
func gone(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return true
	}
	_, rest, _ := bytes.Cut(stat, []byte(") "))
	return len(rest) > 0 && (rest[0] == 'Z' || rest[0] == 'X')
}

func readReady(dir string) *State {
	data, err := os.ReadFile(filepath.Join(dir, "ready.json"))
	if err != nil {
		return nil
	}
	var s State
	if json.Unmarshal(data, &s) != nil {
		return nil
	}
	return &s
}

// startUp runs Up in a process of its own and waits until it is ready.
func startUp(t *testing.T, dir string) (*exec.Cmd, *State) {
	t.Helper()
	cmd := exec.Command(os.Args[0], "up", dir)
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	eventually(t, "up", func() bool { return readReady(dir) != nil })
	return cmd, readReady(dir)
}

// leftovers lists what must be gone from a data folder once up has ended.
func leftovers(dir string) string {
	var left []string
	for _, name := range []string{"ready.json", "ready.json.tmp", "data/run", "data/lock"} {
		if _, err := os.Lstat(filepath.Join(dir, name)); err == nil {
			left = append(left, name)
		}
	}
	return strings.Join(left, " ")
}
