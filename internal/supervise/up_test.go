package supervise

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/headrace/headrace/internal/config"
)

func TestUpServesRestartsAndLeavesNothing(t *testing.T) {
	dir := tempDir(t)
	cmd, state := startUp(t, dir)
	if len(state.PIDs) != 7 || state.PIDs["up"] != cmd.Process.Pid || len(state.Nodes) != 2 || state.Etcd == "" {
		t.Errorf("ready file has %+v", state)
	}
	if got, err := ReadState(filepath.Join(dir, "data")); err != nil || !reflect.DeepEqual(got, state) {
		t.Errorf("state file has %+v, %v", got, err)
	}
	second := testOptions(dir)
	second.ReadyFile = ""
	if err := Up(t.Context(), second); err == nil || !strings.Contains(err.Error(), "is in use by process") {
		t.Errorf("a second start: %v", err)
	}
	for _, name := range []string{"node-0", "decode-1", "router-0"} {
		old := readReady(dir).PIDs[name]
		if err := syscall.Kill(old, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		eventually(t, name+" to be back", func() bool { s := readReady(dir); return s != nil && s.PIDs[name] != 0 && s.PIDs[name] != old })
	}
	pids := readReady(dir).PIDs
	if err := cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("up ended with %v", err)
	}
	for name, pid := range pids {
		if !gone(pid) {
			t.Errorf("%s lives on", name)
		}
	}
	if left := leftovers(dir); left != "" {
		t.Errorf("left behind: %s", left)
	}
	if _, err := ReadState(filepath.Join(dir, "data")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("state after the end: %v", err)
	}
}

// stopped tells whether every thread of a process stands still.
func stopped(pid int) bool {
	threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	for _, f := range threads {
		b, err := os.ReadFile(f)
		if _, rest, ok := bytes.Cut(b, []byte(") ")); err != nil || !ok || rest[0] != 'T' {
			return false
		}
	}
	return len(threads) > 0
}

func TestKilledUpTakesItsChildrenAlong(t *testing.T) {
	dir := tempDir(t)
	cmd, state := startUp(t, dir)
	// One that is stopped must not stay either.
	if err := syscall.Kill(state.PIDs["decode-0"], syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	// The kernel wakes what stands still when its supervisor goes, and not what is about to.
	eventually(t, "decode-0 to stand still", func() bool { return stopped(state.PIDs["decode-0"]) })
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	killed := time.Now()
	for name, pid := range state.PIDs {
		eventually(t, name+" to end", func() bool { return gone(pid) })
	}
	t.Logf("all gone after %s", time.Since(killed))
	if socks, _ := filepath.Glob(filepath.Join(dir, "data/run/*.sock")); len(socks) != 0 {
		t.Errorf("left behind: %v", socks)
	}
	if _, err := ReadState(filepath.Join(dir, "data")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("state after the kill: %v", err)
	}
	// The next start finds nothing in its way.
	if err := os.Remove(filepath.Join(dir, "ready.json")); err != nil {
		t.Fatal(err)
	}
	next, _ := startUp(t, dir)
	_ = next.Process.Signal(os.Interrupt)
	if err := next.Wait(); err != nil {
		t.Errorf("the next up ended with %v", err)
	}
}

func TestUpSaysWhyItCannotStart(t *testing.T) {
	busy, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer busy.Close()
	for name, row := range map[string]struct {
		change func(*Options)
		want   string
		misuse bool
	}{
		"port in use":         {func(o *Options) { o.Listen = busy.Addr().String() }, "address already in use", false},
		"model missing":       {func(o *Options) { o.Model += "x" }, "no such file", false},
		"model of no use":     {func(o *Options) { o.Model = os.Args[0] }, "is no GGUF file", false},
		"a part that fails":   {func(o *Options) { o.ModelName = "broken" }, "load model: it is broken", false},
		"no etcd":             {func(o *Options) { o.Etcd = []string{"127.0.0.1:1"} }, "reach etcd", false},
		"no workers":          {func(o *Options) { o.Decode = 0 }, "at least one of each", true},
		"too many workers":    {func(o *Options) { o.Decode = 100 }, "at most 64", true},
		"too many nodes":      {func(o *Options) { o.Nodes = 9 }, "more node daemons", true},
		"unknown transport":   {func(o *Options) { o.Transport = "pigeon" }, "use auto, tcp, shm or rdma", true},
		"shm between nodes":   {func(o *Options) { o.Transport = "shm" }, "shared memory joins", true},
		"no address":          {func(o *Options) { o.Listen = "8000" }, "use HOST:PORT", true},
		"negative threads":    {func(o *Options) { o.Threads = -1 }, "negative", true},
		"a path far too long": {func(o *Options) { o.DataDir += strings.Repeat("x", 100) }, "shorter --data-dir", true},
	} {
		t.Run(name, func(t *testing.T) {
			dir := tempDir(t)
			o := testOptions(dir)
			row.change(o)
			err := Up(t.Context(), o)
			if err == nil || !strings.Contains(err.Error(), row.want) || strings.Contains(err.Error(), "\n") {
				t.Errorf("%v, want one line with %q", err, row.want)
			}
			if misuse := errors.As(err, new(*config.Misuse)); misuse != row.misuse {
				t.Errorf("misuse is %t: %v", misuse, err)
			}
			if left := leftovers(dir); left != "" {
				t.Errorf("left behind: %s", left)
			}
		})
	}
}

func TestUpCanBeInterruptedWhileStarting(t *testing.T) {
	dir := tempDir(t)
	o := testOptions(dir)
	ctx, cancel := context.WithCancel(t.Context())
	o.Progress = func(string) { cancel() }
	if err := Up(ctx, o); !errors.Is(err, ErrInterrupted) {
		t.Errorf("%v, want ErrInterrupted", err)
	}
	if left := leftovers(dir); left != "" {
		t.Errorf("left behind: %s", left)
	}
}

func TestPlanSpreadsWorkersOverNodes(t *testing.T) {
	for _, row := range []struct {
		prefill, decode, nodes int
		want                   string
	}{
		{1, 1, 1, "prefill-0@0 decode-0@0"},
		{1, 1, 2, "prefill-0@0 decode-0@1"},
		{2, 2, 2, "prefill-0@0 prefill-1@0 decode-0@1 decode-1@1"},
		{2, 3, 3, "prefill-0@0 prefill-1@1 decode-0@2 decode-1@2 decode-2@2"},
		{2, 3, 4, "prefill-0@0 prefill-1@1 decode-0@2 decode-1@3 decode-2@2"},
	} {
		o := &Options{Prefill: row.prefill, Decode: row.decode, Nodes: row.nodes, CPUs: 8, KVMemory: 1 << 20, Common: Common{Debug: true, Config: "c"}}
		var got []string
		for _, p := range newLayout(o, &DataDir{path: "/d"}, []string{"a", "b"}, "").plan(nil) {
			line := strings.Join(p.spec.Args, " ")
			if p.kind == "worker" {
				_, after, _ := strings.Cut(line, "/node-")
				got = append(got, p.spec.Name+"@"+after[:1])
			}
			if !strings.Contains(line, "--etcd a,b") || !strings.Contains(line, "--debug --config c") {
				t.Errorf("%s is started as %s", p.spec.Name, line)
			}
		}
		if strings.Join(got, " ") != row.want {
			t.Errorf("%+v gives %v", row, got)
		}
	}
}

func TestPlanShapesCaches(t *testing.T) {
	o := &Options{Prefill: 1, Decode: 1, Nodes: 1, CPUs: 2, Shapes: map[string]Shape{"prefill": {TensorParallel: 2}, "decode": {4, 64}}}
	lines := map[string]string{}
	for _, p := range newLayout(o, &DataDir{path: "/d"}, nil, "").plan(nil) {
		lines[p.spec.Name] = strings.Join(p.spec.Args, " ")
	}
	if l := lines["prefill-0"]; !strings.Contains(l, "--tensor-parallel 2") || strings.Contains(l, "--block-tokens") {
		t.Errorf("prefill is started as %s", l)
	}
	if l := lines["decode-0"]; !strings.Contains(l, "--tensor-parallel 4 --block-tokens 64") {
		t.Errorf("decode is started as %s", l)
	}
	o.Shapes["decode"] = Shape{TensorParallel: -1}
	o.Listen, o.Transport = "127.0.0.1:0", "auto"
	if err := o.Validate(); err == nil || !strings.Contains(err.Error(), "--decode-tp -1") {
		t.Errorf("negative ranks: %v", err)
	}
}
