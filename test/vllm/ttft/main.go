// Ttft measures the time to the first token of a streamed completion, at the client, in one run and by turns: of one
// aggregated vLLM, of a prefill and a decode vLLM behind Headrace's router, and of the same with vLLM's own NixlConnector
// behind that router.
//
//	make vllm-ttft ARGS="-rounds 12 -lengths 100,500,1000,1900"
//
// All engines are up for the whole run, one thread each, and one set-up is asked at a time: in a new order each time, and
// behind a pause, because each process of a vLLM's looks for work without rest for a second behind every step, which would
// be a load on whoever is asked next. For the same reason a pair's engines have a core each, as on two hosts (-pin). NIXL's
// progress thread runs with the pause that is printed: as NIXL ships it, an idle engine takes a core. Every request of our
// pair must have moved its KV, or the run fails.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"time"

	"github.com/headrace/headrace/test/vllm/stage"
)

// kind is a way to serve.
type kind struct {
	name    string
	ready   func(context.Context) error
	url     func() string
	engine  *stage.Engine  // alone, or
	cluster *stage.Cluster // a pair behind a router
	times   map[int][]time.Duration
	fails   map[int]int
	phases  map[int]*phases
	moved   uint64 // transfers before the first request that counts
}

type options struct {
	rounds  int
	lengths []int
	delayUS int
	stall   time.Duration
	pause   time.Duration
	kinds   string
	model   string
	phases  bool
	each    bool
	pin     bool
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	var o options
	var lengths string
	flag.IntVar(&o.rounds, "rounds", 15, "how often each length is asked for, of each kind")
	flag.StringVar(&lengths, "lengths", "5,32,100,300,600,1000,1400,1900", "prompt lengths in tokens")
	flag.IntVar(&o.delayUS, "nixl-delay-us", 200, "pause of NIXL's progress thread; 0 is NIXL's own choice, which takes a core in every engine")
	flag.DurationVar(&o.stall, "stall", 200*time.Millisecond, "an answer so much, or a quarter, above the lower quartile of its kind and length, whichever is more, is a stall")
	flag.DurationVar(&o.pause, "pause", 1300*time.Millisecond, "rest before each request, more than the second for which vLLM's processes look for work")
	flag.StringVar(&o.kinds, "kinds", "aggregated,headrace,nixl", "what to measure")
	flag.StringVar(&o.model, "model", "tiny", "tiny or smollm2")
	flag.BoolVar(&o.phases, "phases", false, "show where the time goes, by the engines' own metrics")
	flag.BoolVar(&o.pin, "pin", true, "give each engine of a pair a core of its own, as on two hosts")
	flag.BoolVar(&o.each, "each", false, "print every answer's time as it comes")
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
	if o.rounds < 1 {
		return fmt.Errorf("-rounds %d: use 1 or more", o.rounds)
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
		if err := k.pin(o.pin); err != nil {
			return err
		}
	}
	fmt.Printf("all engines are up after %.0f s: %s; model %s, one thread each, blocks of %d tokens\n", time.Since(begun).Seconds(), o.kinds, o.model, stage.BlockTokens)
	if err := measure(ctx, o, kinds); err != nil {
		return err
	}
	report(os.Stdout, o, kinds)
	return moved(ctx, o, kinds)
}

// start starts what is to be measured, all at once.
func start(s *stage.Stage, o *options) (kinds []*kind, closeAll func(), err error) {
	closeAll = func() {
		for _, k := range kinds {
			if k.cluster != nil {
				k.cluster.Close()
			}
		}
	}
	common := stage.Config{Model: o.model}
	for name := range strings.SplitSeq(o.kinds, ",") {
		k := &kind{name: name, times: map[int][]time.Duration{}, fails: map[int]int{}, phases: map[int]*phases{}}
		switch name {
		case "aggregated":
			e, err := s.Plain(common)
			if err != nil {
				return kinds, closeAll, err
			}
			k.engine, k.ready, k.url = e, e.Ready, e.URL
		case "headrace", "nixl":
			up := stage.UpConfig{Config: common, Engine: "vllm"}
			if name == "nixl" {
				up.Engine, up.NixlDelayUS = "vllm-nixl", o.delayUS
			}
			if k.cluster, err = s.Up(up); err != nil {
				return kinds, closeAll, err
			}
			k.ready, k.url = k.cluster.Ready, k.cluster.URL
		default:
			return kinds, closeAll, fmt.Errorf("-kinds %q: use aggregated, headrace, nixl", o.kinds)
		}
		kinds = append(kinds, k)
	}
	return kinds, closeAll, nil
}

// measure asks for every length of every kind; the first round warms up and is not counted.
func measure(ctx context.Context, o *options, kinds []*kind) error {
	order := rand.New(rand.NewPCG(1, 2))
	for round := range o.rounds + 1 {
		if round == 1 {
			if err := begin(ctx, kinds); err != nil {
				return err
			}
		}
		for i, n := range o.lengths {
			for _, j := range order.Perm(len(kinds)) {
				k := kinds[j]
				r := stage.Request{Model: o.model, Prompt: stage.Prompt(1000*round+i, n), MaxTokens: 4, Stream: true}
				select {
				case <-time.After(o.pause):
				case <-ctx.Done():
					return ctx.Err()
				}
				before, err := k.sums(ctx, o.phases)
				if err != nil {
					return err
				}
				a := stage.Ask(ctx, k.url(), r)
				switch {
				case ctx.Err() != nil:
					return ctx.Err()
				case a.Err != nil && round == 0:
					return fmt.Errorf("%s, %d tokens: %w", k.name, n, a.Err)
				case a.Err != nil:
					k.fails[n]++
					fmt.Printf("round %d, %s, %d tokens: %v\n", round, k.name, n, a.Err)
				case round > 0:
					k.times[n] = append(k.times[n], a.First)
					if o.each {
						fmt.Fprintf(os.Stderr, "%s %d %s %d %.1f\n", time.Now().Format("15:04:05.000"), round, k.name, n, ms(a.First))
					}
					if err := k.add(ctx, o.phases, n, before); err != nil {
						return err
					}
				}
			}
		}
	}
	return nil
}

// begin reads how many transfers the warming up took.
func begin(ctx context.Context, kinds []*kind) (err error) {
	for _, k := range kinds {
		if k.cluster != nil {
			if k.moved, err = k.cluster.Moved(ctx); err != nil {
				return err
			}
		}
	}
	return nil
}

// moved fails where a pair's answers came without KV having moved: that would be another measurement.
func moved(ctx context.Context, o *options, kinds []*kind) error {
	var errs []error
	for _, k := range kinds {
		if k.cluster == nil {
			continue
		}
		asked := uint64(o.rounds * len(o.lengths))
		var n uint64
		err := stage.Poll(ctx, 5*time.Second, func() (err error) { // an engine counts when it steps
			if n, err = k.cluster.Moved(ctx); err == nil && n-k.moved < asked {
				err = fmt.Errorf("%s: KV moved for %d of %d requests", k.name, n-k.moved, asked)
			}
			return err
		})
		fmt.Printf("%s: KV moved for %d of %d requests\n", k.name, n-k.moved, asked)
		if k.name != "nixl" { // what that one does not move is its own affair
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
