package dialects

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/headrace/headrace/internal/openai"
	"github.com/headrace/headrace/router/pairing"
	"github.com/headrace/headrace/router/upstream"
)

// MooncakeName is the dialect of vLLM with its MooncakeConnector.
const MooncakeName = pairing.DialectMooncake

const (
	// bootstrapWithin is how long a bootstrap server may take to answer.
	bootstrapWithin = 2 * time.Second
	// bootstrapFresh is how long its answer is believed. A restarted engine has another incarnation, and is asked anew.
	bootstrapFresh = time.Minute
	// ranksMax bounds the data-parallel ranks that a bootstrap server is believed to have.
	ranksMax = 1024
)

// Mooncake sends both legs at once, with one transfer id. Decode is told which engine prefills, of several data-parallel ranks
// which one, and where that engine's bootstrap server is, which the router asks for the engines' ids beforehand.
type Mooncake struct {
	Client     *upstream.Client
	Probes     *Prober
	Bootstraps *Bootstraps
}

var _ Dialect = (*Mooncake)(nil)

// Name is "vllm-mooncake".
func (*Mooncake) Name() string { return MooncakeName }

// Run serves the request by a pair or by one worker.
func (m *Mooncake) Run(ctx context.Context, a *Attempt, s Sink) Outcome {
	r := &relay{Attempt: a, client: m.Client, probes: m.Probes, sink: s, tongue: tongue{leased: true}}
	out := r.serve(ctx, m)
	if out.Result == Failed && r.prefill != nil { // what is known of the engine may be what was wrong
		m.Bootstraps.forget(a.Decision.Prefill)
	}
	return out
}

// pair sends both legs, once it is known which engines prefill there.
func (m *Mooncake) pair(ctx context.Context, r *relay) *Outcome {
	d := r.Decision
	if _, _, err := splitAddr(d.Prefill.KVAddr); err != nil {
		return r.unregistered(d.Prefill, err)
	}
	r.sink.Phase(Reserving)
	ranks, err := m.Bootstraps.ranks(ctx, d.Prefill)
	switch {
	case ctx.Err() != nil:
		return &Outcome{Result: Cancelled, Err: context.Cause(ctx)}
	case err != nil:
		return r.fail(&leg{worker: d.Prefill, role: rolePrefill}, "bootstrap", err)
	}
	rank := ranks[rand.IntN(len(ranks))]
	transfer := "xfer-" + uuid()
	params := openai.AppendString([]byte(`{"do_remote_decode":false,"do_remote_prefill":true,"remote_bootstrap_addr":`), "http://"+d.Prefill.KVAddr)
	params = openai.AppendString(append(params, `,"remote_engine_id":`...), rank.engine)
	params = append(openai.AppendString(append(params, `,"transfer_id":`...), transfer), '}')
	r.answer = r.send(call{worker: d.Decode, role: roleDecode, body: r.Request.Body.With(withParams("", params))})
	kv := append(openai.AppendString([]byte(`{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":`), transfer), '}')
	r.prefill = r.send(call{worker: d.Prefill, role: rolePrefill, body: prefillBody(r.Request, "", kv), headers: [][2]string{{"X-data-parallel-rank", strconv.Itoa(rank.number)}}})
	return nil
}

// rank is one data-parallel rank of an engine.
type rank struct {
	number int
	engine string // its id
}

// Bootstraps asks bootstrap servers which engines are behind them, and remembers it. Of the many requests that wait for an
// answer one asks. Safe for concurrent use.
type Bootstraps struct {
	client  *upstream.Client
	running sync.WaitGroup

	mu    sync.Mutex // guards what follows
	known map[string]*bootstrap
}

// bootstrap is one question to one server.
type bootstrap struct {
	incarnation string
	began       time.Time
	done        chan struct{} // closed when what follows stands
	list        []rank
	err         error
}

// NewBootstraps makes a Bootstraps. The client's Close ends its questions.
func NewBootstraps(c *upstream.Client) *Bootstraps {
	return &Bootstraps{client: c, known: map[string]*bootstrap{}}
}

// Wait waits for the questions under way.
func (b *Bootstraps) Wait() { b.running.Wait() }

func (b *Bootstraps) forget(w *pairing.Worker) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.known, w.KVAddr)
}

// ranks are those of w, at least one.
func (b *Bootstraps) ranks(ctx context.Context, w *pairing.Worker) ([]rank, error) {
	q := b.ask(w)
	select {
	case <-q.done:
		return q.list, q.err
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// ask returns the question that was asked last, a new one if that is old, was answered by an error or is about another life of w.
func (b *Bootstraps) ask(w *pairing.Worker) *bootstrap {
	now := time.Now()
	b.mu.Lock()
	defer b.mu.Unlock()
	if q := b.known[w.KVAddr]; q != nil && q.incarnation == w.Incarnation && now.Sub(q.began) < bootstrapFresh && !q.failed() {
		return q
	}
	for addr, q := range b.known { // workers come and go
		if now.Sub(q.began) >= bootstrapFresh {
			delete(b.known, addr)
		}
	}
	q := &bootstrap{incarnation: w.Incarnation, began: now, done: make(chan struct{})}
	b.known[w.KVAddr] = q
	leg := b.client.Open(upstream.Target{ID: w.ID, Addr: w.KVAddr}, upstream.Request{Get: true, Path: "/query", Accept: "application/json", Patient: true})
	b.running.Go(func() {
		defer close(q.done)
		defer leg.Close()
		ctx, cancel := context.WithTimeout(context.Background(), bootstrapWithin)
		defer cancel()
		status, body, err := whole(ctx, leg)
		if err == nil && status != 200 {
			err = fmt.Errorf("status %d", status)
		}
		if err == nil {
			q.list, err = parseRanks(body)
		}
		if err != nil {
			q.err = fmt.Errorf("ask bootstrap server %s: %w", w.KVAddr, err)
		}
	})
	return q
}

// failed tells that the question was answered by an error.
func (q *bootstrap) failed() bool {
	select {
	case <-q.done:
		return q.err != nil
	default:
		return false
	}
}

// parseRanks reads {"0":{"engine_id":"..."},...}.
func parseRanks(body []byte) ([]rank, error) {
	var answer map[string]struct {
		EngineID string `json:"engine_id"`
	}
	if err := json.Unmarshal(body, &answer); err != nil {
		return nil, fmt.Errorf("read its answer: %w", err)
	}
	if len(answer) == 0 || len(answer) > ranksMax {
		return nil, fmt.Errorf("it names %d engines, want 1 to %d: is the engine still starting?", len(answer), ranksMax)
	}
	list := make([]rank, 0, len(answer))
	for _, key := range slices.Sorted(maps.Keys(answer)) {
		n, err := strconv.Atoi(key)
		if err != nil || n < 0 || answer[key].EngineID == "" {
			return nil, fmt.Errorf("read its answer: rank %q with engine id %q", key, answer[key].EngineID)
		}
		list = append(list, rank{n, answer[key].EngineID})
	}
	return list, nil
}
