package main

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/headrace/headrace/bench/pairsim"
	"github.com/headrace/headrace/bench/tracebench"
	"github.com/headrace/headrace/internal/config"
	"github.com/headrace/headrace/router/pairing"
)

func (a *app) benchPairing() *cobra.Command {
	var (
		o      pairsim.Options
		path   string
		asJSON bool
		check  bool
		real   bool
		from   time.Duration
		to     time.Duration
	)
	o.Timing = pairsim.DefaultTiming()
	cmd := &cobra.Command{
		Use:   "pairing",
		Short: "Compare the router's pairing policies on a trace, with simulated engines or stand-ins",
		Long: `Pairing replays a trace of requests against simulated engines, once for each policy, and prints times to the first token and
hit rates in one table. The policies are the router's own. The engines are made so fast that the trace is --load of what a random
policy can serve.
A trace is a JSON object a line, in order of time: timestamp (ms), input_length, output_length, and hash_ids, a number for each
512 tokens of the prompt, equal for equal prompts up to there; so are those that Mooncake's authors publish.

With --standins nothing is simulated but the engines' computing: stand-ins and the router are processes, prompts and streams go over
HTTP and KV events over ZeroMQ, in real time. Random's saturation is measured first. A minute of the trace takes three seconds a
policy at 20x; --from and --to take a part of it.`,
		Example: `  headrace bench pairing --trace mooncake_conversation.jsonl
  headrace bench pairing --trace mooncake_conversation.jsonl --prefill 4 --decode 4 --json
  headrace bench pairing --trace mooncake_conversation.jsonl --standins --to 10m --check
  headrace bench pairing                              # on a trace of made-up conversations`,
		Args: noArgs,
	}
	fs := cmd.Flags()
	fs.StringVar(&path, "trace", "", "`file` with the trace (default: 10,000 requests in made-up conversations)")
	fs.IntVar(&o.Prefill, "prefill", 0, "prefill workers (default: none, all serve whole requests)")
	fs.IntVar(&o.Decode, "decode", 8, "decode workers")
	fs.StringSliceVar(&o.Policies, "policies", nil, strings.Join(pairing.Names, ", ")+" (default all)")
	fs.Float64Var(&o.Speedup, "speedup", 20, "the trace's time is divided by that")
	fs.Float64Var(&o.Load, "load", 0.8, "what is offered, as a part of what a random policy can serve")
	fs.IntVar(&o.Timing.Blocks, "blocks", o.Timing.Blocks, "blocks of each worker's KV cache, 512 tokens each")
	fs.Uint64Var(&o.Seed, "seed", 1, "of everything that is drawn")
	fs.BoolVar(&real, "standins", false, "with a router, stand-ins and clients in real time, in place of a simulation")
	addSpan(fs, &from, "from", 0, "leave out what comes before, in the trace's time")
	addSpan(fs, &to, "to", 0, "leave out what comes from then on, in the trace's time (default: nothing)")
	fs.BoolVar(&asJSON, "json", false, "print one JSON document")
	fs.BoolVar(&check, "check", false, "fail unless joint has half of random's mean time, less than each other's, and a hit rate within 3 points of one cache's")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if from < 0 || to < 0 || to != 0 && to <= from {
			return config.Misused(fmt.Errorf("--from %s --to %s: nothing is left", from, to))
		}
		if o.Decode < 1 || o.Prefill < 0 || !(o.Speedup > 0) || !(o.Load > 0) || o.Timing.Blocks < 1 {
			return config.Misused(errors.New("--decode, --speedup, --load and --blocks must be over 0, and --prefill not below"))
		}
		if err := checkThere("trace", path); err != nil {
			return config.Misused(err)
		}
		if real && o.Prefill > 0 {
			return config.Misused(errors.New("--standins serve whole requests: leave --prefill out"))
		}
		for _, name := range o.Policies {
			if _, err := pairing.New(name, 0); err != nil {
				return config.Misused(err)
			}
		}
		trace, err := loadTrace(path, o.Seed)
		if err != nil {
			return err
		}
		trace = pairsim.Part(trace, from, to)
		ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGINT, syscall.SIGTERM)
		defer stop()
		var r *pairsim.Report
		if real {
			r, err = tracebench.Run(ctx, trace, o, a.progress())
		} else {
			r, err = pairsim.Compare(trace, o)
		}
		if err != nil {
			return err
		}
		if err := pairsim.Print(a.out, r, asJSON); err != nil {
			return err
		}
		if missed := r.Missed(); check && missed != "" {
			return errors.New("a target was missed: " + missed)
		}
		return nil
	}
	return cmd
}

// madeUp is the trace that is used when none is given: about as many requests a second as the published one at its own pace.
const (
	madeUpRequests = 10000
	madeUpGap      = 300
)

func loadTrace(path string, seed uint64) ([]pairsim.Request, error) {
	if path == "" {
		return pairsim.Generate(madeUpRequests, madeUpGap, seed), nil
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("open trace: %w", err)
	}
	defer f.Close()
	return pairsim.ReadTrace(bufio.NewReader(f))
}
