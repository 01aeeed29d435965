package tracebench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/headrace/headrace/bench/pairsim"
	"github.com/headrace/headrace/internal/adminpage"
	"github.com/headrace/headrace/router"
	"github.com/headrace/headrace/router/pairing"
	"github.com/headrace/headrace/worker/standin"
)

const (
	calibrations = 2 // measurements of what can be served at the most
	idleConns    = 4096
)

// session is a benchmark under way.
type session struct {
	trace  []pairsim.Request
	bodies [][]byte // of the trace's requests, made before: clients have other things to do when a request is due
	o      pairsim.Options
	dir    string // of the tokenizer
	say    func(format string, a ...any)
}

// Run measures. Options mean what they mean to pairsim.Compare, but that all workers serve whole requests. progress is told
// what is being done.
func Run(ctx context.Context, trace []pairsim.Request, o pairsim.Options, progress io.Writer) (_ *pairsim.Report, err error) {
	if o.Prefill != 0 {
		return nil, errors.New("stand-ins of a trace serve whole requests: leave the prefill workers out")
	}
	r, err := pairsim.Plan(trace, &o)
	if err != nil {
		return nil, err
	}
	s := &session{trace: trace, bodies: bodies(trace), o: o, say: func(format string, a ...any) {
		if progress != nil {
			fmt.Fprintf(progress, format+"\n", a...)
		}
	}}
	if s.dir, err = os.MkdirTemp("", "headrace-bench-trace-"); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(s.dir)) }()
	if err := standin.WriteTokenizer(s.dir); err != nil {
		return nil, err
	}
	r.Measured = true
	if err := s.calibrate(ctx, r); err != nil {
		return nil, err
	}
	for _, name := range o.Policies {
		got, err := s.run(ctx, name, r.Timing, o.Speedup)
		if err != nil {
			return nil, fmt.Errorf("run %s: %w", name, err)
		}
		r.Rows = append(r.Rows, row(name, got))
		s.say("%s: mean time to the first token %.0f ms, hit rate %.1f %%; CPUs: %s", name, 1e3*r.Rows[len(r.Rows)-1].TTFTMean, 100*r.Rows[len(r.Rows)-1].HitRate, got.cpu.words())
	}
	r.Relate()
	return r, nil
}

// calibrate measures what a random policy serves when all of the trace is there at once, and makes the engines so fast
// that the trace is the part of it that is wanted. Which engine chance gives most to differs each time: hence the mean.
func (s *session) calibrate(ctx context.Context, r *pairsim.Report) error {
	sum := 0.0
	for range calibrations {
		got, err := s.run(ctx, pairing.NameRandom, r.Timing, 0)
		if err != nil {
			return fmt.Errorf("measure random's saturation: %w", err)
		}
		rate := saturation(got)
		sum += rate / calibrations
		s.say("random serves %.1f requests a second at %.0f prompt tokens a second an engine; CPUs: %s", rate, r.Timing.PrefillRate, got.cpu.words())
	}
	k := r.Offered / (s.o.Load * sum)
	r.Saturation, r.Timing = sum*k, r.Timing.Faster(k)
	s.say("so the engines are to be %.2f times as fast", k)
	return nil
}

// result is one policy's run.
type result struct {
	began   time.Time
	answers []answer
	decided map[string]decision // by the requests' places in the trace
	cpu     cpu                 // that were busy, in the mean
}

// saturation is what the engines served of requests that came all at once.
func saturation(x *result) float64 {
	of := map[string][]time.Duration{}
	for i := range x.answers {
		w := x.decided[strconv.Itoa(i)].Worker
		of[w] = append(of[w], x.answers[i].ended.Sub(x.began))
	}
	return pairsim.Saturation(slices.Collect(maps.Values(of)))
}

// run has the trace served with one policy by engines that have nothing cached: in its own time, faster by speedup, or
// all of it at once when that is 0.
func (s *session) run(ctx context.Context, policy string, timing pairsim.Timing, speedup float64) (_ *result, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var running []*process
	defer func() {
		for _, p := range slices.Backward(running) {
			err = errors.Join(err, p.Stop(stopTimeout))
		}
	}()
	var workers []pairing.Worker
	table := tableOf(timing)
	for i := range s.o.Decode {
		p, err := start(ctx, &childConfig{Engine: &table})
		if err != nil {
			return nil, err
		}
		running = append(running, p)
		workers = append(workers, pairing.Worker{ID: "w" + strconv.Itoa(i), Role: pairing.RoleBoth, Model: model, Addr: p.Addr, Dialect: pairing.DialectPlain, Incarnation: "1",
			BlockTokens: uint32(table.BlockTokens), Blocks: uint32(table.Blocks), ContextTokens: uint32(table.Context), TensorParallel: 1, Events: p.Events, EventsReplay: p.Replay})
	}
	front, err := start(ctx, &childConfig{Policy: policy, Seed: s.o.Seed, Tokenizer: s.dir, Workers: workers})
	if err != nil {
		return nil, err
	}
	all := append(running, front)
	before := used(all)
	x, err := s.serve(ctx, front, policy, speedup)
	if err == nil {
		x.cpu = used(all).since(&before)
	}
	made := decisions{}
	if err = errors.Join(err, front.Finish(stopTimeout, &made)); err != nil {
		return nil, err
	}
	x.decided = made.Of
	if len(x.decided) != len(s.trace) {
		return nil, fmt.Errorf("the router tells of decisions about %d requests, want %d", len(x.decided), len(s.trace))
	}
	return x, nil
}

// serve has the trace served by a router that knows of nothing yet.
func (s *session) serve(ctx context.Context, front *process, policy string, speedup float64) (*result, error) {
	if err := follows(ctx, front, s.o.Decode); err != nil {
		return nil, err
	}
	x, err := s.replay(ctx, "http://"+front.Addr+"/v1/completions", speedup)
	if err != nil {
		return nil, err
	}
	return x, s.exact(ctx, front, policy)
}

// tableOf is the timing for a stand-in.
func tableOf(t pairsim.Timing) standin.Table {
	table := standin.DefaultTable()
	step, perStream := t.Step.Seconds(), t.StepStream.Seconds()
	table.BlockTokens, table.Blocks, table.Context = pairsim.BlockTokens, t.Blocks, t.Blocks*pairsim.BlockTokens
	table.BatchTokens, table.StreamsMax, table.WaitingMax, table.AnswerTokens = t.ChunkTokens, t.Streams, concurrentMax, 0
	table.Prefill = []standin.PrefillRow{{Tokens: 0}, {Tokens: 1, Seconds: step + 1/t.PrefillRate}, {Tokens: t.ChunkTokens, Seconds: step + float64(t.ChunkTokens)/t.PrefillRate}}
	table.PrefillContextSeconds = 0
	table.Decode = []standin.DecodeRow{{Streams: 1, Seconds: step + perStream}, {Streams: t.Streams, Seconds: step + float64(t.Streams)*perStream}}
	return table
}

// replay sends the trace.
func (s *session) replay(ctx context.Context, url string, speedup float64) (*result, error) {
	transport := &http.Transport{MaxIdleConns: idleConns, MaxIdleConnsPerHost: idleConns, DisableCompression: true}
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	x := &result{began: time.Now(), answers: make([]answer, len(s.trace))}
	var asking sync.WaitGroup
	timer := time.NewTimer(0)
	defer timer.Stop()
	for i := range s.trace {
		at := x.began
		if speedup > 0 {
			at = at.Add(time.Duration((s.trace[i].At - s.trace[0].At) / speedup * float64(time.Millisecond)))
		}
		timer.Reset(time.Until(at))
		select {
		case <-timer.C:
		case <-ctx.Done():
		}
		if ctx.Err() != nil {
			break
		}
		asking.Go(func() {
			a := ask(ctx, client, url, strconv.Itoa(i), &s.trace[i], s.bodies[i], at)
			if x.answers[i] = a; a.err != nil {
				cancel(fmt.Errorf("request %d: %w", i, a.err))
			}
		})
	}
	asking.Wait()
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	return x, nil
}

// status asks the router.
func status(ctx context.Context, front *process) (*router.Status, error) {
	st := &router.Status{}
	return st, adminpage.Get(ctx, http.DefaultClient, front.Admin, "/status", st)
}

// follows waits until the router follows all engines' events.
func follows(ctx context.Context, front *process, engines int) error {
	for end := time.Now().Add(followTimeout); ; time.Sleep(20 * time.Millisecond) {
		st, err := status(ctx, front)
		if err != nil {
			return err
		}
		n := 0
		for _, w := range st.Workers {
			if w.Engine != nil && len(w.Engine.Events) == 1 && w.Engine.Events[0].State == "following" {
				n++
			}
		}
		switch {
		case n == engines:
			return nil
		case time.Now().After(end):
			return fmt.Errorf("the router follows the events of %d engines, want %d", n, engines)
		}
	}
}

// exact holds that a router that looks at prefixes knew them by events, all of them. The last answer may have come before its events.
func (s *session) exact(ctx context.Context, front *process, policy string) error {
	for end := time.Now().Add(followTimeout); ; time.Sleep(20 * time.Millisecond) {
		if err := s.heard(ctx, front, policy); err == nil || ctx.Err() != nil || time.Now().After(end) {
			return err
		}
	}
}

func (s *session) heard(ctx context.Context, front *process, policy string) error {
	st, err := status(ctx, front)
	if err != nil || st.Prefixes == nil {
		return err
	}
	for _, w := range st.Prefixes.Sources {
		if w.Approximate || w.Lost > 0 || w.Resets > 0 {
			return fmt.Errorf("the router did not know what %s had by its events alone: %+v", w.Worker, w)
		}
	}
	if n := len(st.Prefixes.Sources); n == 0 || n > s.o.Decode {
		return fmt.Errorf("%s knows %d engines' caches, want %d", policy, n, s.o.Decode)
	}
	return nil
}

// row sums a run up.
func row(policy string, x *result) pairsim.Row {
	n := len(x.answers)
	first, late := make([]time.Duration, n), make([]time.Duration, n)
	var sum, itl time.Duration
	var gaps, cached, asked int
	var estimates pairsim.Estimates
	for i := range x.answers {
		a := &x.answers[i]
		if e := x.decided[strconv.Itoa(i)].Estimate; e > 0 {
			estimates.Add(e, a.first.Seconds())
		}
		first[i], late[i] = a.first, a.late
		sum += a.first
		cached += a.cached
		asked += a.prompt
		if a.tokens > 1 {
			itl += a.last - a.first
			gaps += a.tokens - 1
		}
	}
	slices.Sort(first)
	slices.Sort(late)
	out := pairsim.Row{Policy: policy, TTFTMean: sum.Seconds() / float64(n), TTFTP50: first[n/2].Seconds(), TTFTP99: first[n*99/100].Seconds(), CPUs: x.cpu.clients + x.cpu.router + x.cpu.engines,
		ITLMean: itl.Seconds() / float64(max(gaps, 1)), HitRate: float64(cached) / float64(asked), LateP99: late[n*99/100].Seconds()}
	estimates.Into(&out)
	return out
}
