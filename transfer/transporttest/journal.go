package transporttest

import (
	"log/slog"
	"os"
	"strings"
	"sync"
	"testing"
)

// journal keeps the last lines that a daemon logged, for a test that fails: why a lease never came is said there, not in
// what was waited for.
type journal struct {
	mu    sync.Mutex
	lines []string // a ring once it is full
	next  int
}

// journalMax is how many lines are kept.
const journalMax = 100

// newJournal logs to what the test prints if it fails. It is told of before the daemon is made, so that it prints what the
// daemon says to the very end.
func newJournal(t testing.TB, node string) *slog.Logger {
	if os.Getenv("HEADRACE_LOG") != "" {
		return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug}))
	}
	j := &journal{}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the last that %s logged:\n%s", node, j)
		}
	})
	return slog.New(slog.NewTextHandler(j, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

// Write takes one record, as slog's handlers write them.
func (j *journal) Write(b []byte) (int, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if len(j.lines) < journalMax {
		j.lines = append(j.lines, string(b))
	} else {
		j.lines[j.next] = string(b)
		j.next = (j.next + 1) % journalMax
	}
	return len(b), nil
}

func (j *journal) String() string {
	j.mu.Lock()
	defer j.mu.Unlock()
	if len(j.lines) == 0 {
		return "nothing"
	}
	return strings.Join(j.lines[j.next:], "") + strings.Join(j.lines[:j.next], "")
}
