package router

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/headrace/headrace/transfer/recall"
)

// daemons are daemons that take their time to answer recalls.
type daemons struct {
	mu   sync.Mutex
	told map[string]int
	asks int
}

func (d *daemons) Recall(ctx context.Context, addr, _ string, tickets ...[]byte) ([]recall.Verdict, error) {
	select {
	case <-time.After(time.Second):
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.asks++
	if strings.HasPrefix(addr, "dead") {
		return nil, errors.New("nobody there")
	}
	d.told[addr] += len(tickets)
	verdicts := make([]recall.Verdict, len(tickets))
	for i := range verdicts {
		verdicts[i] = recall.Revoked
	}
	return verdicts, nil
}

func (d *daemons) Close() error { return nil }

// TestRecaller holds that nobody waits for a daemon, that tickets go together, and that the end is bounded.
func TestRecaller(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &daemons{told: map[string]int{}}
		m := newMetrics(prometheus.NewRegistry())
		r := recallBy(d, slog.New(slog.DiscardHandler), m.recalls)
		began := time.Now()
		r.Recall("a", nil)
		r.Recall("dead", nil)
		synctest.Wait()
		for range 100 {
			r.Recall("a", nil)
		}
		if took := time.Since(began); took != 0 {
			t.Errorf("Recall waits: %s", took)
		}
		time.Sleep(2 * time.Second)
		synctest.Wait()
		if d.told["a"] != 101 || d.asks != 3 || value(m.recalls.WithLabelValues("revoked")) != 101 || value(m.recalls.WithLabelValues("failed")) != 1 {
			t.Errorf("told %v in %d", d.told, d.asks)
		}
		r.Recall("b", nil)
		synctest.Wait() // the first is under way
		for range recallsWaitingMax + 10 {
			r.Recall("b", nil)
		}
		if n := value(m.recalls.WithLabelValues("dropped")); n != 10 {
			t.Errorf("%v dropped", n)
		}
		ctx, cancel := context.WithTimeout(context.Background(), 500*time.Millisecond)
		defer cancel()
		began = time.Now()
		if err := r.close(ctx); err != nil || time.Since(began) > 600*time.Millisecond {
			t.Errorf("close: %v behind %s", err, time.Since(began))
		}
		r.Recall("a", nil)
		if d.told["a"] != 101 {
			t.Error("told behind close")
		}
	})
}
