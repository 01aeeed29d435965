package router

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/headrace/headrace/router/pairing"
	"github.com/headrace/headrace/transfer/recall"
)

// daemons are daemons that take their time to answer.
type daemons struct {
	mu     sync.Mutex
	told   map[string]int // tickets that were made void, by address
	asks   int
	living map[string]bool // tickets of which P's daemons have a lease
	idle   map[string]int  // how often tickets were asked for at D's
	stuck  string          // an address whose daemon does not answer
}

func (d *daemons) Ask(ctx context.Context, addr string, kind recall.Kind, _ string, tickets ...[]byte) ([]recall.Verdict, error) {
	wait := time.Second
	if kind != recall.KindVoid {
		wait = 10 * time.Millisecond
	}
	if addr == d.stuck {
		wait = time.Hour
	}
	select {
	case <-time.After(wait):
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.asks++
	if strings.HasPrefix(addr, "dead") {
		return nil, errors.New("nobody there")
	}
	verdicts := make([]recall.Verdict, len(tickets))
	for i, t := range tickets {
		switch kind {
		case recall.KindLook:
			verdicts[i] = recall.Absent
			if d.living[string(t)] {
				verdicts[i] = recall.Living
			}
		case recall.KindIdle:
			verdicts[i] = recall.Remembered
			d.idle[addr+"/"+string(t)]++
		default:
			verdicts[i] = recall.Revoked
			d.told[addr]++
		}
	}
	return verdicts, nil
}

func (d *daemons) Close() error { return nil }

// at is a worker whose daemon has this address.
func at(addr string) *pairing.Worker {
	return &pairing.Worker{ID: "w-" + addr, NodeID: "n-" + addr, NodeData: addr}
}

func recallerFor(d *daemons, source Source) (*recaller, *metrics) {
	m := newMetrics(prometheus.NewRegistry())
	return recallBy(d, dataAddr(source), slog.New(slog.DiscardHandler), m), m
}

// TestRecaller holds that nobody waits for a daemon, that tickets go together, and that the end is bounded.
func TestRecaller(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &daemons{told: map[string]int{}}
		r, m := recallerFor(d, nobody{})
		began := time.Now()
		r.Recall(at("a"), nil)
		r.Recall(at("dead"), nil)
		synctest.Wait()
		for range 100 {
			r.Recall(at("a"), nil)
		}
		if took := time.Since(began); took != 0 {
			t.Errorf("Recall waits: %s", took)
		}
		time.Sleep(2 * time.Second)
		synctest.Wait()
		if d.told["a"] != 101 || d.asks != 3 || value(m.recalls.WithLabelValues("revoked")) != 101 || value(m.recalls.WithLabelValues("failed")) != 1 {
			t.Errorf("told %v in %d", d.told, d.asks)
		}
		r.Recall(at("b"), nil)
		synctest.Wait() // the first is under way
		for range recallsWaitingMax + 10 {
			r.Recall(at("b"), nil)
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
		r.Recall(at("a"), nil)
		if d.told["a"] != 101 {
			t.Error("told behind close")
		}
	})
}

// moved is a source that knows where daemons are now.
type moved struct {
	nobody
	nodesOnly
}

// TestRecallerChecks: D's daemon is asked for what P's does not have, or does not answer for, where it is now.
func TestRecallerChecks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &daemons{living: map[string]bool{"lives": true}, idle: map[string]int{}, stuck: "stuck"}
		r, m := recallerFor(d, moved{nodesOnly: nodesOnly{{ID: "n-d", Data: "d2"}, {ID: "n-p"}}})
		p, dec := at("p"), at("d")
		r.Check(p, dec, []byte("lives"))
		r.Check(p, dec, []byte("gone"))
		r.Check(at("dead"), dec, []byte("dead"))
		time.Sleep(100 * time.Millisecond)
		if got := maps.Clone(d.idle); !maps.Equal(got, map[string]int{"d2/gone": 1, "d2/dead": 1}) {
			t.Errorf("D's daemon was asked for %v", got)
		}
		r.Check(at("stuck"), dec, []byte("stuck"))
		r.Check(p, at("dead"), []byte("gone"))
		time.Sleep(lookTimeout + 100*time.Millisecond)
		if got := maps.Clone(d.idle); !maps.Equal(got, map[string]int{"d2/gone": 1, "d2/dead": 1, "d2/stuck": 1}) {
			t.Errorf("D's daemon was asked for %v", got)
		}
		if n := value(m.checks.WithLabelValues("remembered")); n != 3 {
			t.Errorf("%v were remembered", n)
		}
		if n := value(m.checks.WithLabelValues("failed")); n != 3 { // two of P's daemons, one of D's
			t.Errorf("%v failed", n)
		}
		if err := r.close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}
