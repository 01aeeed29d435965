package engine

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/headrace/headrace/transfer"
)

// TestProblemIsNotWrittenOver: what a status says of the node daemon stays as it was read, whatever goes wrong next.
func TestProblemIsNotWrittenOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEngine(t, 8, nil)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		dials := 0
		go func() {
			defer close(ended)
			e.Link().Run(ctx, func(context.Context, func(transfer.Event)) (Daemon, []transfer.RegionID, error) {
				dials++
				return nil, nil, fmt.Errorf("%w, dial %d", ErrVersion, dials)
			}, func(Daemon) {})
		}()
		synctest.Wait()
		read := e.link.problem.Load()
		if want := ErrVersion.Error() + ", dial 1"; read == nil || *read != want || e.Snapshot().NodeProblem != want {
			t.Fatalf("the status has %q", e.Snapshot().NodeProblem)
		}
		time.Sleep(redialSkewed)
		synctest.Wait()
		if want := ErrVersion.Error() + ", dial 2"; e.Snapshot().NodeProblem != want {
			t.Errorf("the status has %q, want %q", e.Snapshot().NodeProblem, want)
		}
		if want := ErrVersion.Error() + ", dial 1"; *read != want {
			t.Errorf("what was read has become %q", *read)
		}
		cancel()
		<-ended
	})
}
