package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/headrace/headrace/test/vllm/stage"
)

// watched are sums that vLLM and its connectors keep of a request's phases, in seconds.
var watched = []struct{ role, metric, name string }{
	{"prefill", "vllm:request_queue_time_seconds_sum", "P waits"},
	{"prefill", "vllm:request_prefill_time_seconds_sum", "P computes"},
	{"prefill", "vllm:time_to_first_token_seconds_sum", "P in all"},
	{"prefill", "vllm:headrace_send_seconds_sum", "P step to settled"},
	{"decode", "vllm:headrace_kv_wait_seconds_sum", "D waits for KV"},
	{"decode", "vllm:request_queue_time_seconds_sum", "D waits"},
	{"decode", "vllm:request_prefill_time_seconds_sum", "D computes"},
	{"decode", "vllm:time_to_first_token_seconds_sum", "D in all"},
}

// phases are sums over n requests.
type phases struct {
	n    int
	sums []float64
}

// sums reads the engines' metrics; nil where phases are not asked for.
func (k *kind) sums(ctx context.Context, want bool) ([]float64, error) {
	if !want || k.cluster == nil {
		return nil, nil
	}
	engines, err := k.cluster.Engines()
	if err != nil {
		return nil, err
	}
	of := map[string]stage.Metrics{}
	for _, e := range engines {
		if of[e.Name], err = e.Metrics(ctx); err != nil {
			return nil, err
		}
	}
	out := make([]float64, len(watched))
	for i, w := range watched {
		out[i] = of[w.role][w.metric]
	}
	return out, nil
}

// add counts a request, when both engines have booked it.
func (k *kind) add(ctx context.Context, want bool, n int, before []float64) error {
	if before == nil {
		return nil
	}
	const prefill, decode = 2, 7 // of watched
	var after []float64
	if err := stage.Poll(ctx, time.Second, func() (err error) {
		if after, err = k.sums(ctx, want); err == nil && (after[prefill] == before[prefill] || after[decode] == before[decode]) {
			err = errors.New("an engine has not booked the request")
		}
		return err
	}); err != nil {
		why, _ := k.cluster.Decisions(ctx)
		fmt.Fprintf(os.Stderr, "%s, %d tokens: its phases are not known: %v; the router says %.1500s\n", k.name, n, err, why)
		return ctx.Err()
	}
	p := k.phases[n]
	if p == nil {
		p = &phases{sums: make([]float64, len(watched))}
		k.phases[n] = p
	}
	p.n++
	for i := range after {
		p.sums[i] += after[i] - before[i]
	}
	return nil
}

func (k *kind) reportPhases(w io.Writer, o *options) {
	if len(k.phases) == 0 {
		return
	}
	fmt.Fprintf(w, "%s, mean ms of each phase by the engines' own metrics (stalls included):\n\n| tokens |", k.name)
	for _, x := range watched {
		fmt.Fprintf(w, " %s |", x.name)
	}
	fmt.Fprint(w, "\n|---|")
	for range watched {
		fmt.Fprint(w, "---|")
	}
	fmt.Fprintln(w)
	for _, n := range o.lengths {
		if p := k.phases[n]; p != nil {
			fmt.Fprintf(w, "| %d |", n)
			for _, sum := range p.sums {
				fmt.Fprintf(w, " %.1f |", sum/float64(p.n)*1000)
			}
			fmt.Fprintln(w)
		}
	}
	fmt.Fprintln(w)
}
