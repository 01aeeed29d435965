package e2e

import (
	"fmt"
	"io"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/headrace/headrace/internal/stall"
)

// pollEvery is how often a condition of another process is looked at. Nothing waits longer than it must.
const pollEvery = 10 * time.Millisecond

// poll looks until cond is content, and returns its last word if that takes too long.
func poll(limit time.Duration, cond func() error) error { return pollEach(pollEvery, limit, cond) }

func pollEach(every, limit time.Duration, cond func() error) error {
	late := limited(limit)
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		err := cond()
		if err == nil || late() {
			return err
		}
		<-tick.C
	}
}

// stalled is what limits are to be longer by, because the machine did other things.
var stalled, _ = stall.Begin()

// limited begins a time limit, and tells whether it is over.
func limited(limit time.Duration) (over func() bool) {
	begun, before := time.Now(), stalled()
	return func() bool { return time.Since(begun) > limit+stalled()-before }
}

// eventually fails the test if cond is not content within the limit. It returns how long it took.
func eventually(t testing.TB, limit time.Duration, what string, cond func() error) time.Duration {
	t.Helper()
	begun := time.Now()
	if err := poll(limit, cond); err != nil {
		t.Fatalf("%s: not within %s: %v", what, limit, err)
	}
	return time.Since(begun)
}

// bounds collects the times that have a limit, for the table at the end.
var bounds = &boundTable{rows: map[string]*boundRow{}}

type boundTable struct {
	mu    sync.Mutex
	names []string
	rows  map[string]*boundRow
}

type boundRow struct {
	took             []time.Duration
	answers, refused int
}

// add notes one time and whether the client got its answer or an error.
func (b *boundTable) add(name string, took time.Duration, a *answer) {
	b.mu.Lock()
	defer b.mu.Unlock()
	r := b.rows[name]
	if r == nil {
		r = &boundRow{}
		b.rows[name] = r
		b.names = append(b.names, name)
	}
	r.took = append(r.took, took)
	switch {
	case a == nil:
	case a.Error != nil:
		r.refused++
	default:
		r.answers++
	}
}

func (b *boundTable) print(w io.Writer) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.names) == 0 {
		return
	}
	fmt.Fprintf(w, "\n%-58s %5s %9s %9s %8s %7s\n", "from the signal to the client's last byte, and others", "times", "median", "max", "answers", "errors")
	for _, name := range b.names {
		r := b.rows[name]
		slices.Sort(r.took)
		n := len(r.took)
		fmt.Fprintf(w, "%-58s %5d %8.2fs %8.2fs %8d %7d\n", name, n, r.took[n/2].Seconds(), r.took[n-1].Seconds(), r.answers, r.refused)
	}
}
