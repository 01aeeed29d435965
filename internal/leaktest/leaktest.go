// Package leaktest finds what tests leave behind.
package leaktest

import (
	"fmt"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"
)

const (
	patience  = 30 * time.Second
	lookAgain = 5 * time.Millisecond
	// stacksBytes is room for the stacks of some thousand goroutines.
	stacksBytes = 4 << 20
)

// Main runs a package's tests and ends the process: with their status, or with 1 when they went well and something stayed
// that is of one of the parts, as "internal/sidecar." of a goroutine's stack, or that others name ("" for nothing).
func Main(m *testing.M, parts []string, others ...func() string) {
	code := m.Run()
	if left := Left(parts, others...); left != "" && code == 0 {
		fmt.Fprintln(os.Stderr, "left behind:\n"+left)
		code = 1
	}
	os.Exit(code)
}

// Left waits until nothing of the parts is left, and says what stays.
func Left(parts []string, others ...func() string) string {
	for deadline := time.Now().Add(patience); ; time.Sleep(lookAgain) {
		left := goroutines(parts)
		for _, other := range others {
			if text := other(); text != "" {
				left = append(left, text)
			}
		}
		if len(left) == 0 || time.Now().After(deadline) {
			return strings.Join(left, "\n\n")
		}
	}
}

// Check fails the test when there are more goroutines behind it than there were at the call, and they do not go away soon. It is
// to be called first, and by no parallel test.
func Check(t testing.TB) {
	t.Helper()
	before := runtime.NumGoroutine()
	t.Cleanup(func() {
		for deadline := time.Now().Add(patience); runtime.NumGoroutine() > before; time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				buf := make([]byte, stacksBytes)
				t.Errorf("%d goroutines are left that were %d:\n%s", runtime.NumGoroutine(), before, buf[:runtime.Stack(buf, true)])
				return
			}
		}
	})
}

// Descriptors is how many files this process has open, with those that the runtime opens when it first waits for one, and keeps.
func Descriptors(t testing.TB) int {
	t.Helper()
	pollerOpen()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatalf("list descriptors: %v", err)
	}
	return len(entries)
}

var pollerOpen = sync.OnceFunc(func() {
	if r, w, err := os.Pipe(); err == nil {
		_, _ = r.Close(), w.Close()
	}
})

// goroutines are the stacks, but for this one, that have a frame of one of the parts.
func goroutines(parts []string) (left []string) {
	buf := make([]byte, stacksBytes)
	for i, g := range strings.Split(string(buf[:runtime.Stack(buf, true)]), "\n\n") {
		for _, p := range parts {
			if i > 0 && strings.Contains(g, p) { // the first is the caller's own
				left = append(left, g)
				break
			}
		}
	}
	return left
}
