package router

import (
	"context"
	"log/slog"
	"slices"
	"sync"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/headrace/headrace/router/dialects"
	"github.com/headrace/headrace/transfer/recall"
)

const (
	// recallsWaitingMax bounds the tickets that wait for one daemon. What is over it runs out by itself.
	recallsWaitingMax = 4096
	// recallsDaemonsMax bounds the daemons that are spoken to at once.
	recallsDaemonsMax = 256
)

// recaller tells daemons of tickets that are void. One goroutine a daemon takes whatever has come up to then.
type recaller struct {
	caller caller
	log    *slog.Logger
	count  *prometheus.CounterVec
	ctx    context.Context
	cancel context.CancelFunc

	running sync.WaitGroup
	mu      sync.Mutex // guards what follows
	waiting map[string][][]byte
	closed  bool
}

// caller is recall.Caller.
type caller interface {
	Recall(ctx context.Context, addr, reason string, tickets ...[]byte) ([]recall.Verdict, error)
	Close() error
}

var _ dialects.Recaller = (*recaller)(nil)

func newRecaller(key []byte, log *slog.Logger, count *prometheus.CounterVec) (*recaller, error) {
	c, err := recall.New(recall.Config{ClusterKey: key, Name: "router"})
	if err != nil {
		return nil, err
	}
	return recallBy(c, log, count), nil
}

func recallBy(c caller, log *slog.Logger, count *prometheus.CounterVec) *recaller {
	r := &recaller{caller: c, log: log, count: count, waiting: map[string][][]byte{}}
	r.ctx, r.cancel = context.WithCancel(context.Background())
	return r
}

// Recall makes the daemon at data hear of the ticket soon.
func (r *recaller) Recall(data string, ticket []byte) {
	r.mu.Lock()
	defer r.mu.Unlock()
	tickets, running := r.waiting[data]
	if r.closed || len(tickets) >= recallsWaitingMax || !running && len(r.waiting) >= recallsDaemonsMax {
		r.count.WithLabelValues("dropped").Inc()
		return
	}
	r.waiting[data] = append(tickets, ticket)
	if !running {
		r.running.Go(func() { r.tell(data) })
	}
}

// tell tells one daemon until nothing waits for it.
func (r *recaller) tell(data string) {
	for {
		r.mu.Lock()
		tickets := slices.Clone(r.waiting[data])
		if len(tickets) == 0 {
			delete(r.waiting, data)
			r.mu.Unlock()
			return
		}
		r.waiting[data] = r.waiting[data][:0]
		r.mu.Unlock()
		verdicts, err := r.caller.Recall(r.ctx, data, "the router gave the request up", tickets...)
		for _, v := range verdicts {
			r.count.WithLabelValues(v.String()).Inc()
		}
		if err != nil { // a daemon that has ended holds nothing; one that lives lets go at the tickets' deadlines
			r.count.WithLabelValues("failed").Add(float64(len(tickets) - len(verdicts)))
			r.log.Warn("tickets could not be recalled", "daemon", data, "tickets", len(tickets)-len(verdicts), "err", err)
		}
	}
}

// close lets recalls under way end while ctx lasts.
func (r *recaller) close(ctx context.Context) error {
	r.mu.Lock()
	r.closed = true
	r.mu.Unlock()
	stop := context.AfterFunc(ctx, r.cancel)
	defer stop()
	r.running.Wait()
	r.cancel()
	return r.caller.Close()
}
