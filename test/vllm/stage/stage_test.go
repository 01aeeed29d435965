package stage

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

const (
	patience = 10 * time.Second
	dyingEnv = "HEADRACE_TEST_DYING_STAGE"
)

// TestMain also is a test that is killed: one whose stage has a process that survives its parents.
func TestMain(m *testing.M) {
	if os.Getenv(dyingEnv) == "" {
		os.Exit(m.Run())
	}
	s, err := New(Env{})
	if err == nil {
		_, err = s.start("survivor", nil, "sh", "-c", "setsid sleep 600 &")
	}
	fmt.Println(s.Dir, err)
	select {}
}

// What a killed test has left is ended by the next one, and nobody else's.
func TestOrphansAreEnded(t *testing.T) {
	own, err := New(Env{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := own.Close(); err != nil {
			t.Error(err)
		}
	})
	if _, err := own.start("own", nil, "sleep", "600"); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), dyingEnv+"=1")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	kill := func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }
	t.Cleanup(kill)
	line, err := bufio.NewReader(out).ReadString('\n')
	dir, said, _ := strings.Cut(strings.TrimSpace(line), " ")
	if err != nil || said != "<nil>" {
		t.Fatalf("the stage that is to die says %q: %v", line, err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	theirs := func() []int {
		return marked(func(mark string) bool { return strings.HasPrefix(mark, strconv.Itoa(cmd.Process.Pid)+"-") })
	}
	var survivor int
	until(t, func() error { // alone, and itself: its shell ends, setsid becomes it, and nobody has a mark during an exec
		left := theirs()
		if len(left) != 1 {
			return fmt.Errorf("it has %s", describe(left))
		}
		survivor = left[0]
		if argv, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", survivor)); string(argv) != "sleep\x00600\x00" {
			return fmt.Errorf("it is %s", describe(left))
		}
		return nil
	})
	t.Cleanup(func() { _ = syscall.Kill(survivor, syscall.SIGKILL) })
	if left := Orphans(); slices.Contains(left, survivor) {
		t.Fatalf("%s is an orphan of a stage that lives", describe([]int{survivor}))
	}
	kill()
	if left := Orphans(); !slices.Contains(left, survivor) && state(survivor) != 0 { // another test's stage may have ended it
		t.Fatalf("orphans: %s", describe(left))
	}
	next, err := New(Env{})
	if err != nil {
		t.Fatal(err)
	}
	until(t, func() error {
		if left := theirs(); len(left) > 0 {
			return errors.New(describe(left))
		}
		return nil
	})
	until(t, func() error { // one that has just begun has no mark yet
		if n := len(own.Marked()); n != 1 {
			return fmt.Errorf("%d processes of another stage are left, want 1", n)
		}
		return nil
	})
	if err := next.Close(); err != nil {
		t.Error(err)
	}
}

func until(t *testing.T, cond func() error) {
	t.Helper()
	if err := Poll(context.Background(), patience, cond); err != nil {
		t.Fatal(err)
	}
}
