package transporttest

import (
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/headrace/headrace/internal/leaktest"
)

// CheckLeaks is called at the start of a test; what it returns, at the end: goroutines of this module and descriptors that
// were not there before fail the test, unless they go away soon.
func CheckLeaks(t testing.TB) func() {
	t.Helper()
	goroutines, fds := ours(), leaktest.Descriptors(t)
	return func() {
		t.Helper()
		deadline := time.Now().Add(patience)
		for {
			g, d := ours(), leaktest.Descriptors(t)
			if len(g) <= len(goroutines) && d <= fds {
				return
			}
			if time.Now().After(deadline) {
				t.Errorf("leaked: %d goroutines were %d, %d descriptors were %d\n%s", len(g), len(goroutines), d, fds, strings.Join(g, "\n\n"))
				return
			}
			runtime.Gosched()
			time.Sleep(time.Millisecond) // polling with a deadline: the kernel closes descriptors when it likes
		}
	}
}

// ours lists the goroutines that run code of the transfer packages, other than this one's caller.
func ours() []string {
	buf := make([]byte, 4<<20)
	buf = buf[:runtime.Stack(buf, true)]
	var out []string
	for i, g := range strings.Split(string(buf), "\n\n") {
		if i > 0 && strings.Contains(g, "headrace/transfer") && !strings.Contains(g, "testing.(*T).Run") && !strings.Contains(g, "testing.tRunner") {
			out = append(out, g)
		}
	}
	return out
}
