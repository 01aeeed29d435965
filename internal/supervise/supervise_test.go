package supervise

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

func newTestGroup(t *testing.T, dir string, onExit func(Exit) bool) *Group {
	t.Helper()
	g, err := NewGroup(GroupConfig{Exe: os.Args[0], LogDir: dir, Logger: slog.New(slog.DiscardHandler), OnExit: onExit})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(g.Close)
	return g
}

func start(t *testing.T, g *Group, name string, args ...string) {
	t.Helper()
	err := g.Start(Spec{Name: name, Args: append(args, "--parent-fd", "3"), Grace: 10 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
}

func logHas(dir, name, text string) func() bool {
	return func() bool {
		data, _ := os.ReadFile(filepath.Join(dir, name+".log"))
		return strings.Contains(string(data), text)
	}
}

func TestKilledChildIsRestartedAtOnce(t *testing.T) {
	dir, exits := t.TempDir(), make(chan Exit, 10)
	g := newTestGroup(t, dir, func(e Exit) bool { exits <- e; return true })
	start(t, g, "a", "sleep")
	eventually(t, "the first life", logHas(dir, "a", "sleeping"))
	first := g.PIDs()["a"]
	killed := time.Now()
	if err := syscall.Kill(first, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	e := <-exits
	if e.PID != first || !e.Signalled || e.Restart != 0 || !strings.Contains(e.Reason(), "killed") {
		t.Errorf("exit is %+v: %s", e, e.Reason())
	}
	eventually(t, "the second life", func() bool { pid := g.PIDs()["a"]; return pid != 0 && pid != first })
	t.Logf("a process again after %s", time.Since(killed))
	second := g.PIDs()["a"]
	// The stand-in must handle SIGTERM before it is sent one, which its second line shows.
	eventually(t, "the second life's first word", func() bool {
		data, _ := os.ReadFile(filepath.Join(dir, "a.log"))
		return bytes.Count(data, []byte("sleeping")) == 2
	})
	g.Stop(nil, "a")
	if !gone(second) || len(g.PIDs()) != 0 {
		t.Errorf("after stop: %v", g.PIDs())
	}
	if !logHas(dir, "a", "woken")() {
		t.Error("stop did not end the child in order")
	}
}

func TestChildThatFailsIsDelayedMoreAndMore(t *testing.T) {
	exits := make(chan Exit, 10)
	g := newTestGroup(t, t.TempDir(), func(e Exit) bool { exits <- e; return true })
	start(t, g, "a", "fail")
	for i, want := range []time.Duration{0, backoffMin, 2 * backoffMin} {
		e := <-exits
		if e.Signalled || e.Restart != want || e.Reason() != "headrace fail: cannot go on" {
			t.Errorf("exit %d: restart in %s, want %s; reason %q", i, e.Restart, want, e.Reason())
		}
	}
}

func TestStubbornAndStoppedChildrenEnd(t *testing.T) {
	dir := t.TempDir()
	g := newTestGroup(t, dir, nil)
	start(t, g, "stubborn", "stubborn")
	start(t, g, "stopped", "sleep")
	eventually(t, "both", func() bool { return logHas(dir, "stubborn", "ignoring")() && logHas(dir, "stopped", "sleeping")() })
	pids := g.PIDs()
	if err := syscall.Kill(pids["stopped"], syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	g.Stop(nil, "stopped")
	if !logHas(dir, "stopped", "woken")() {
		t.Error("a stopped child did not end in order")
	}
	hard := make(chan struct{})
	close(hard)
	g.Stop(hard, "stubborn")
	for name, pid := range pids {
		if !gone(pid) {
			t.Errorf("%s lives on", name)
		}
	}
}

func TestLogRotatesAndCutsLongLines(t *testing.T) {
	dir := t.TempDir()
	var stream bytes.Buffer
	s, err := openLog(dir, "a", &stream)
	if err != nil {
		t.Fatal(err)
	}
	defer s.close()
	s.drain(strings.NewReader("one\n\ntwo\r\n" + strings.Repeat("x", lineBytesMax+10)))
	if want := "a          | one\na          | \na          | two\n"; !strings.HasPrefix(stream.String(), want) {
		t.Errorf("stream has %.80q", stream.String())
	}
	if got := s.lastLine(); got != strings.Repeat("x", 10) {
		t.Errorf("last line is %.80q", got)
	}
	s.bytes = logBytesMax + 1
	s.write([]byte("fresh"))
	if data, err := os.ReadFile(s.path); err != nil || string(data) != "fresh\n" {
		t.Errorf("after rotation the log has %q, %v", data, err)
	}
	if _, err := os.Stat(s.path + ".1"); err != nil {
		t.Error(err)
	}
}
