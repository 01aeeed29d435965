package main

import (
	"os"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/headrace/headrace/bench/enginebench"
	"github.com/headrace/headrace/internal/config"
	"github.com/headrace/headrace/internal/modelfetch"
)

func (a *app) benchEngine() *cobra.Command {
	var (
		o       enginebench.Options
		startup bool
		asJSON  bool
	)
	cmd := &cobra.Command{
		Use:   "engine",
		Short: "Measure the reference engine's prefill and decode rates, its start and its memory",
		Example: `  headrace bench engine --model llama.gguf --threads 2
  headrace bench engine --context 16,1000,4000 --batch 1,8 --generate 32 --json`,
		Args: noArgs,
	}
	fs := cmd.Flags()
	fs.StringVar(&o.Model, "model", "", "GGUF `file` (default: SmolLM2-135M-Instruct, fetched)")
	fs.IntVar(&o.Threads, "threads", 0, "threads (default: all cores)")
	fs.IntVar(&o.Prompt, "prompt", 0, "tokens of the prompt that is read (default 512)")
	fs.IntVar(&o.Generate, "generate", 0, "tokens generated in a measurement (default 64)")
	fs.IntSliceVar(&o.Contexts, "context", nil, "tokens before the generated ones (default 16,1000)")
	fs.IntSliceVar(&o.Batches, "batch", nil, "sequences generated at once (default 1,8)")
	fs.IntVar(&o.Chunk, "batch-tokens", 0, "tokens of the prompt computed in a step (default 128)")
	fs.IntVar(&o.BlockTokens, "block-tokens", 0, "tokens of a KV block (default 16)")
	fs.IntVar(&o.Rounds, "rounds", 0, "measurements of each kind (default 3)")
	fs.BoolVar(&startup, "startup", true, "start worker processes too, to see how long that takes")
	fs.BoolVar(&asJSON, "json", false, "print one JSON document")
	cmd.RunE = func(cmd *cobra.Command, _ []string) (err error) {
		if err := o.Check(); err != nil {
			return config.Misused(err)
		}
		if o.Model == "" {
			if o.Model, err = modelfetch.Default.Ensure(cmd.Context(), modelfetch.Options{Progress: a.err}); err != nil {
				return err
			}
		}
		if startup {
			if o.Worker, err = os.Executable(); err != nil {
				return err
			}
		}
		if term.IsTerminal(int(os.Stderr.Fd())) {
			o.Progress = a.err
		}
		report, err := enginebench.Run(cmd.Context(), o)
		if err != nil {
			return err
		}
		return enginebench.Print(a.out, report, asJSON)
	}
	return cmd
}
