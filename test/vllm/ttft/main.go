// Ttft measures the time to the first token of a streamed completion, in one run and by turns: of one aggregated vLLM, of a
// prefill and a decode vLLM behind Headrace's router, and of the same with vLLM's own NixlConnector behind that router.
//
//	make vllm-ttft ARGS="-rounds 12 -lengths 100,500,1000,1900"
//
// All engines are up for the whole run, and those that are not asked are idle. Every engine has one thread. NIXL's progress
// thread runs with the pause that is printed: as NIXL ships it, an idle engine takes a core.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/headrace/headrace/test/vllm/stage"
)

// kind is a way to serve.
type kind struct {
	name  string
	ready func(context.Context) error
	url   func() string
	times map[int][]time.Duration
	fails map[int]int
}

type options struct {
	rounds  int
	lengths []int
	delayUS int
	stall   time.Duration
	kinds   string
	model   string
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	var o options
	var lengths string
	flag.IntVar(&o.rounds, "rounds", 10, "how often each length is asked for, of each kind by turns")
	flag.StringVar(&lengths, "lengths", "100,300,600,1000,1400,1900", "prompt lengths in tokens")
	flag.IntVar(&o.delayUS, "nixl-delay-us", 200, "pause of NIXL's progress thread; 0 is NIXL's own choice, which takes a core in every engine")
	flag.DurationVar(&o.stall, "stall", 500*time.Millisecond, "an answer so much above the median of its kind and length counts as a stall, apart")
	flag.StringVar(&o.kinds, "kinds", "aggregated,headrace,nixl", "what to measure")
	flag.StringVar(&o.model, "model", "tiny", "tiny or smollm2")
	flag.Parse()
	if err := run(ctx, &o, lengths); err != nil {
		fmt.Fprintln(os.Stderr, "ttft:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o *options, lengths string) (err error) {
	for word := range strings.SplitSeq(lengths, ",") {
		n, err := strconv.Atoi(word)
		if err != nil || n < 1 || n > stage.ContextTokens-16 {
			return fmt.Errorf("-lengths %q: use numbers from 1 to %d", lengths, stage.ContextTokens-16)
		}
		o.lengths = append(o.lengths, n)
	}
	env, err := stage.Find()
	if err != nil {
		return err
	}
	s, err := stage.New(env)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	kinds, closeAll, err := start(s, o)
	defer closeAll()
	if err != nil {
		return err
	}
	begun := time.Now()
	for _, k := range kinds {
		if err := k.ready(ctx); err != nil {
			return err
		}
	}
	fmt.Printf("all engines are up after %.0f s: %s; model %s, one thread each, blocks of %d tokens\n", time.Since(begun).Seconds(), o.kinds, o.model, stage.BlockTokens)
	if err := measure(ctx, o, kinds); err != nil {
		return err
	}
	report(o, kinds)
	return nil
}

// start starts what is to be measured, all at once.
func start(s *stage.Stage, o *options) (kinds []*kind, closeAll func(), err error) {
	var clusters []*stage.Cluster
	closeAll = func() {
		for _, c := range clusters {
			c.Close()
		}
	}
	common := stage.Config{Model: o.model}
	for name := range strings.SplitSeq(o.kinds, ",") {
		k := &kind{name: name, times: map[int][]time.Duration{}, fails: map[int]int{}}
		switch name {
		case "aggregated":
			e, err := s.Plain(common)
			if err != nil {
				return nil, closeAll, err
			}
			k.ready, k.url = e.Ready, e.URL
		case "headrace", "nixl":
			up := stage.UpConfig{Config: common, Engine: "vllm"}
			if name == "nixl" {
				up.Engine, up.NixlDelayUS = "vllm-nixl", o.delayUS
			}
			c, err := s.Up(up)
			if err != nil {
				return nil, closeAll, err
			}
			clusters = append(clusters, c)
			k.ready, k.url = c.Ready, c.URL
		default:
			return nil, closeAll, fmt.Errorf("-kinds %q: use aggregated, headrace, nixl", o.kinds)
		}
		kinds = append(kinds, k)
	}
	return kinds, closeAll, nil
}

// measure asks for every length of every kind by turns; the first round warms up and is not counted.
func measure(ctx context.Context, o *options, kinds []*kind) error {
	for round := range o.rounds + 1 {
		for i, n := range o.lengths {
			for j := range kinds {
				k := kinds[(j+round)%len(kinds)] // nobody is always behind the same one
				r := stage.Request{Model: o.model, Prompt: stage.Prompt(1000*round+i, n), MaxTokens: 4, Stream: true}
				a := stage.Ask(ctx, k.url(), r)
				if ctx.Err() != nil {
					return ctx.Err()
				}
				switch {
				case a.Err != nil && round == 0:
					return fmt.Errorf("%s, %d tokens: %w", k.name, n, a.Err)
				case a.Err != nil:
					k.fails[n]++
				case round > 0:
					k.times[n] = append(k.times[n], a.First)
				}
			}
		}
	}
	return nil
}

func report(o *options, kinds []*kind) {
	fmt.Printf("\ntime to the first token, %d rounds by turns; the rest of the engines idle; NIXL's progress thread pauses %d us\n", o.rounds, o.delayUS)
	fmt.Printf("stalls are answers more than %s above the median of their kind and length, and are left out of max\n\n", o.stall)
	fmt.Printf("%8s", "tokens")
	for _, k := range kinds {
		fmt.Printf("  %28s", k.name+" ms (max; stalls)")
	}
	fmt.Println()
	for _, n := range o.lengths {
		fmt.Printf("%8d", n)
		for _, k := range kinds {
			fmt.Printf("  %28s", k.cell(n, o.stall))
		}
		fmt.Println()
	}
}

func (k *kind) cell(n int, stall time.Duration) string {
	t := k.times[n]
	if len(t) == 0 {
		return fmt.Sprintf("no answer in %d", k.fails[n])
	}
	slices.Sort(t)
	median := t[len(t)/2]
	largest, stalls, worst := median, 0, time.Duration(0)
	for _, d := range t {
		if d > median+stall {
			stalls++
			worst = max(worst, d)
		} else {
			largest = max(largest, d)
		}
	}
	ms := func(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
	text := fmt.Sprintf("%.0f (%.0f; %d", ms(median), ms(largest), stalls)
	if stalls > 0 {
		text += fmt.Sprintf(" to %.0f", ms(worst))
	}
	if k.fails[n] > 0 {
		text += fmt.Sprintf("; %d failed", k.fails[n])
	}
	return text + ")"
}
