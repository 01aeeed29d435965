package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/headrace/headrace/bench/replay"
	"github.com/headrace/headrace/internal/config"
	"github.com/headrace/headrace/scheduler/planner"
	"github.com/headrace/headrace/scheduler/sim"
	"github.com/headrace/headrace/scheduler/trace"
)

func (a *app) plan() *cobra.Command {
	cmd := &cobra.Command{
		Use:     "plan",
		Short:   "Try planners of engine pools",
		Example: "  headrace plan replay --trace azure_conv.csv --planner static",
		Args:    cobra.ArbitraryArgs,
		RunE:    group,
	}
	cmd.AddCommand(a.planReplay())
	return cmd
}

// replayFlags are what `headrace plan replay` is told.
type replayFlags struct {
	o         replay.Options
	trace     string
	table     string
	first     planner.Pools
	log, plot string
	history   string
	asJSON    bool
	fit       bool
}

func (a *app) planReplay() *cobra.Command {
	var f replayFlags
	cmd := &cobra.Command{
		Use:   "replay",
		Short: "Compare planners on a trace of requests, with simulated engines",
		Long: `Replay runs a trace of requests through simulated engines, once for each planner, which starts and drains engines as it
would real ones. It prints, in one table, good requests (those with the first token within --ttft and the others --itl apart on average) per
second of a GPU, and their share: either alone can be had by neglecting the other.

A trace is a JSON object a line as Mooncake's authors publish theirs (timestamp in ms, input_length, output_length, hash_ids), or
comma-separated values with TIMESTAMP, ContextTokens and GeneratedTokens as Azure's. How fast engines are says a timing table:
` + strings.Join(sim.Tables(), ", ") + `, or a file of the same form. Same trace, options and seed: same figures and same log, to the byte.

Planners are ` + strings.Join(planner.Names(), ", ") + `, with parameters as NAME:KEY=NUMBER:KEY=NUMBER.`,
		Example: `  headrace plan replay --trace azure_conv.csv --planner static:prefill=4:decode=4,static:prefill=6:decode=6
  headrace plan replay --trace mooncake_conversation.jsonl --table small --speedup 4 --planner static --from 442s --plot planners.svg --log decisions.jsonl`,
		Args: noArgs,
	}
	fs := cmd.Flags()
	o := &f.o
	fs.StringVar(&f.trace, "trace", "", "`file` with the trace")
	fs.StringSliceVar(&o.Planners, "planner", nil, strings.Join(planner.Names(), ", ")+"; several are compared (default all)")
	fs.StringVar(&f.table, "table", "large", "timing of the engines: "+strings.Join(sim.Tables(), ", ")+", or a file")
	fs.Float64Var(&o.Rate, "speedup", 1, "requests come so many times as fast as in the trace")
	fs.IntVar(&o.Sim.Limits.MaxGPUs, "max-gpus", 40, "the planner's budget")
	fs.IntVar(&o.Sim.Limits.MinGPUs, "min-gpus", 0, "least that is planned: engines are added until there are as many")
	fs.BoolVar(&o.Sim.Limits.Undivided, "undivided", false, "engines that prefill and decode, in place of some for each")
	fs.IntVar(&f.first.Prefill, "prefill", 4, "prefill engines in the beginning")
	fs.IntVar(&f.first.Decode, "decode", 4, "decode engines in the beginning")
	fs.IntVar(&f.first.Whole, "engines", 8, "engines in the beginning, with --undivided")
	fs.DurationVar(&o.Sim.TTFT, "ttft", 2*time.Second, "goal for the time to the first token")
	fs.DurationVar(&o.Sim.ITL, "itl", 50*time.Millisecond, "goal for the mean time between tokens")
	fs.DurationVar(&o.Sim.From, "from", 0, "count no requests and no GPU time before that; what comes before is replayed")
	fs.DurationVar(&o.Sim.To, "to", 0, "count none from then on (default: all)")
	fs.BoolVar(&o.Sim.StayDrained, "stay", false, "streams end on an engine that drains, in place of moving to others")
	fs.Uint64Var(&o.Sim.Seed, "seed", 1, "of everything that is drawn")
	fs.IntVar(&o.Runs, "runs", 1, "how many times each planner is run, each with a seed of its own: --seed and those after it; figures are of all together")
	fs.StringVar(&f.log, "log", "", "`file` for the planners' decisions, a JSON object a line (-: standard output, after the table)")
	fs.StringVar(&f.plot, "plot", "", "SVG `file` to draw")
	fs.StringVar(&f.history, "history", "", "`directory` for what planners saw and did, as event files of TensorBoard's, a run each")
	fs.BoolVar(&f.asJSON, "json", false, "print one JSON document")
	fs.BoolVar(&f.fit, "fit", false, "choose the parameters of planners that are given none, and the pools in the beginning, on what comes before --from")
	addSpan(fs, &o.Hindsight, "hindsight", 0, "look also for the best pools that somebody could have had who knew the trace: the same always, and others for each stretch of so long (takes hundreds of runs)")
	cmd.RunE = func(*cobra.Command, []string) error { return a.replay(&f) }
	return cmd
}

// ready checks what was given and completes it.
func (f *replayFlags) ready() error {
	o := &f.o
	switch {
	case f.trace == "":
		return errors.New("--trace is missing: name a file with a trace")
	case o.Rate <= 0 || o.Rate > 1e6:
		return fmt.Errorf("--speedup %v must be above 0, and at most a million", o.Rate)
	case f.fit && o.Sim.From <= 0:
		return errors.New("--fit needs --from: parameters are chosen on what comes before")
	case o.Hindsight != 0 && o.Hindsight < time.Second:
		return fmt.Errorf("--hindsight %s must be a second at least", o.Hindsight)
	case o.Runs < 1 || o.Runs > 1000:
		return fmt.Errorf("--runs %d must be 1 to 1000", o.Runs)
	case o.Sim.TTFT <= 0 || o.Sim.ITL <= 0:
		return errors.New("--ttft and --itl must be above 0")
	case o.Sim.From < 0 || o.Sim.To < 0 || o.Sim.To != 0 && o.Sim.To <= o.Sim.From:
		return fmt.Errorf("--from %s --to %s: nothing is left", o.Sim.From, o.Sim.To)
	}
	var err error
	o.Sim.Table, err = timingTable(f.table)
	if err != nil {
		return fmt.Errorf("--table: %w", err)
	}
	o.Sim.Limits.EngineGPUs = o.Sim.Table.EngineGPUs()
	if err := o.Sim.Limits.Check(); err != nil {
		return fmt.Errorf("--max-gpus: %w", err)
	}
	o.Sim.First = o.Sim.Limits.Cut(f.first)
	if len(o.Planners) == 0 {
		o.Planners = planner.Names()
	}
	for _, spec := range o.Planners {
		if _, err := planner.New(spec, planner.Config{Limits: o.Sim.Limits, TTFT: o.Sim.TTFT, ITL: o.Sim.ITL, Profile: o.Sim.Table.Profile(o.Sim.Limits.Undivided)}); err != nil {
			return err
		}
	}
	return nil
}

func (a *app) replay(f *replayFlags) error {
	if err := f.ready(); err != nil {
		return config.Misused(err)
	}
	f.o.Open = func() (trace.Reader, io.Closer, error) {
		file, err := os.Open(f.trace)
		if err != nil {
			return nil, nil, fmt.Errorf("open trace: %w", err)
		}
		r, err := trace.NewReader(file)
		if err != nil {
			file.Close()
			return nil, nil, err
		}
		return r, file, nil
	}
	f.o.Progress = a.fitted()
	if f.fit {
		if err := replay.Fit(&f.o, f.o.Progress); err != nil {
			return err
		}
	}
	var logged strings.Builder
	var logFile *os.File
	var buffered *bufio.Writer
	switch f.log {
	case "":
	case "-":
		f.o.Log = &logged
	default:
		var err error
		if logFile, err = os.Create(f.log); err != nil {
			return fmt.Errorf("--log: %w", err)
		}
		defer logFile.Close()
		buffered = bufio.NewWriter(logFile)
		f.o.Log = buffered
	}
	if f.history != "" {
		f.o.Watch = f.watch
	}
	r, err := replay.Compare(filepath.Base(f.trace), f.o)
	if err != nil {
		return err
	}
	if buffered != nil {
		if err := errors.Join(buffered.Flush(), logFile.Close()); err != nil {
			return fmt.Errorf("write decision log: %w", err)
		}
	}
	if err := replay.Print(a.out, r, f.asJSON); err != nil {
		return err
	}
	fmt.Fprint(a.out, logged.String())
	return draw(f.plot, r, replay.SVG)
}

// watch keeps the history of a planner's run. Its times are those of the trace, whose beginning is 1970's.
func (f *replayFlags) watch(spec string, limits planner.Limits) (func(*planner.Observation, *planner.Decision, *planner.Act), func() error, error) {
	run := strings.NewReplacer(":", ",", "/", "_").Replace(spec)
	h, err := newHistory(filepath.Join(f.history, run), "0.replay", time.Unix(0, 0), planner.History{Limits: limits, TTFT: f.o.Sim.TTFT, ITL: f.o.Sim.ITL})
	if err != nil {
		return nil, nil, fmt.Errorf("--history: %w", err)
	}
	return h.watch, h.close, nil
}

// fitted shows, on a terminal, what is tried.
func (a *app) fitted() func(string, *sim.Report) {
	say := a.progress()
	if say == nil {
		return nil
	}
	return func(spec string, r *sim.Report) {
		fmt.Fprintf(say, "%s: %.4f good/GPU-s, %.2f %% good\n", spec, r.GoodPerGPUSecond, 100*r.GoodShare)
	}
}
