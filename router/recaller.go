package router

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/headrace/headrace/router/dialects"
	"github.com/headrace/headrace/router/pairing"
	"github.com/headrace/headrace/transfer/recall"
)

const (
	// recallsWaitingMax bounds the tickets that wait for one daemon. What is over it runs out by itself.
	recallsWaitingMax = 4096
	// recallsDaemonsMax bounds the daemons that are spoken to at once.
	recallsDaemonsMax = 256
)

// lookTimeout bounds the question to P's daemon: whether it is stopped or slow, D's knows what was presented.
const lookTimeout = time.Second

// recaller tells daemons of tickets that are void, or may be. One goroutine a daemon takes whatever has come up to then.
type recaller struct {
	caller caller
	addr   func(*pairing.Worker) string // the data address of a worker's daemon, as it is now
	log    *slog.Logger
	count  *prometheus.CounterVec // recalls, by verdict
	checks *prometheus.CounterVec // tickets that decode might wait for in vain, by verdict
	ctx    context.Context
	cancel context.CancelFunc

	running sync.WaitGroup
	mu      sync.Mutex // guards what follows
	waiting map[string]*errands
	closed  bool
}

// errand is what a daemon is to hear of one ticket.
type errand struct {
	kind   recall.Kind
	ticket []byte
	decode *pairing.Worker // of a KindLook: who is asked next
}

// errands are those that wait for the daemon of one node.
type errands struct {
	worker *pairing.Worker // one that the daemon serves
	list   []errand
}

// caller is recall.Caller.
type caller interface {
	Ask(ctx context.Context, addr string, kind recall.Kind, reason string, tickets ...[]byte) ([]recall.Verdict, error)
	Close() error
}

var _ dialects.Recaller = (*recaller)(nil)

func newRecaller(key []byte, addr func(*pairing.Worker) string, log *slog.Logger, m *metrics) (*recaller, error) {
	c, err := recall.New(recall.Config{ClusterKey: key, Name: "router"})
	if err != nil {
		return nil, err
	}
	return recallBy(c, addr, log, m), nil
}

func recallBy(c caller, addr func(*pairing.Worker) string, log *slog.Logger, m *metrics) *recaller {
	r := &recaller{caller: c, addr: addr, log: log, count: m.recalls, checks: m.checks, waiting: map[string]*errands{}}
	r.ctx, r.cancel = context.WithCancel(context.Background())
	return r
}

// Recall makes d's daemon hear of the ticket soon.
func (r *recaller) Recall(d *pairing.Worker, ticket []byte) {
	r.send(d, errand{kind: recall.KindVoid, ticket: ticket})
}

// Check asks p's daemon for its lease, and where there is none lets d's daemon void what nobody has presented.
func (r *recaller) Check(p, d *pairing.Worker, ticket []byte) {
	r.send(p, errand{kind: recall.KindLook, ticket: ticket, decode: d})
}

// send puts an errand where w's daemon's goroutine takes it.
func (r *recaller) send(w *pairing.Worker, x errand) {
	r.mu.Lock()
	defer r.mu.Unlock()
	q := r.waiting[w.NodeID]
	if r.closed || q != nil && len(q.list) >= recallsWaitingMax || q == nil && len(r.waiting) >= recallsDaemonsMax {
		r.counter(x.kind).WithLabelValues("dropped").Inc()
		return
	}
	if q == nil {
		q = &errands{}
		r.waiting[w.NodeID] = q
		r.running.Go(func() { r.tell(w.NodeID) })
	}
	q.worker = w
	q.list = append(q.list, x)
}

func (r *recaller) counter(k recall.Kind) *prometheus.CounterVec {
	if k == recall.KindVoid {
		return r.count
	}
	return r.checks
}

// tell tells one daemon until nothing waits for it.
func (r *recaller) tell(node string) {
	for {
		r.mu.Lock()
		q := r.waiting[node]
		if len(q.list) == 0 {
			delete(r.waiting, node)
			r.mu.Unlock()
			return
		}
		list, w := q.list, q.worker
		q.list = nil
		r.mu.Unlock()
		addr := r.addr(w)
		for kind := range recallKinds {
			var some []errand
			for _, x := range list {
				if x.kind == kind {
					some = append(some, x)
				}
			}
			if len(some) > 0 {
				r.ask(addr, kind, some)
			}
		}
	}
}

// recallKinds is one more than the last kind.
const recallKinds = recall.KindLook + 1

var recallReasons = [recallKinds]string{recall.KindVoid: "the router gave the request up", recall.KindIdle: "the prefill has answered, and its KV cache was presented by nobody"}

// ask runs errands of one kind.
func (r *recaller) ask(addr string, kind recall.Kind, list []errand) {
	ctx := r.ctx
	if kind == recall.KindLook {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, lookTimeout)
		defer cancel()
	}
	tickets := make([][]byte, len(list))
	for i, x := range list {
		tickets[i] = x.ticket
	}
	verdicts, err := r.caller.Ask(ctx, addr, kind, recallReasons[kind], tickets...)
	for i, x := range list {
		if kind != recall.KindLook && i < len(verdicts) {
			r.counter(kind).WithLabelValues(verdicts[i].String()).Inc()
		}
		if kind == recall.KindLook && (i >= len(verdicts) || verdicts[i] != recall.Living) && r.ctx.Err() == nil {
			r.send(x.decode, errand{kind: recall.KindIdle, ticket: x.ticket})
		}
	}
	switch {
	case err == nil:
	case kind == recall.KindVoid: // a daemon that has ended holds nothing; one that lives lets go at the tickets' deadlines
		r.count.WithLabelValues("failed").Add(float64(len(list) - len(verdicts)))
		r.log.Warn("tickets could not be recalled", "daemon", addr, "tickets", len(list)-len(verdicts), "err", err)
	default: // who needs it asks again
		r.checks.WithLabelValues("failed").Add(float64(len(list) - len(verdicts)))
		r.log.Debug("tickets could not be checked", "daemon", addr, "tickets", len(list)-len(verdicts), "err", err)
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
