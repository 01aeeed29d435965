package main

import (
	"errors"

	"github.com/spf13/cobra"

	"github.com/headrace/headrace/bench/routerbench"
	"github.com/headrace/headrace/internal/config"
	"github.com/headrace/headrace/internal/modelfetch"
)

func (a *app) benchRouter() *cobra.Command {
	var (
		o      routerbench.Options
		asJSON bool
		check  bool
		svg    string
	)
	cmd := &cobra.Command{
		Use:   "router",
		Short: "Measure the router beside the direct path, nginx, HAProxy and sglang-router",
		Example: `  headrace bench router                                    # beside nginx and HAProxy, where they are installed
  headrace bench router --sglang --check --svg router.svg  # beside sglang-router too, installed once into the cache
  headrace bench router --part whole --kind json --body 1024,20480 --connections 32 --json`,
		Args: noArgs,
	}
	fs := cmd.Flags()
	fs.StringSliceVar(&o.Parts, "part", nil, "what to measure: whole (one worker a request), pairs (two legs), open (arriving at random at half the peak), paced (the same with streams whose events come apart), exact (by the tokens of conversations) (default all)")
	fs.StringSliceVar(&o.Kinds, "kind", nil, "answers: json, stream (64 events) (default both)")
	fs.IntSliceVar(&o.Bodies, "body", nil, "bytes of requests (default 1024,20480,220000,1048576)")
	fs.IntSliceVar(&o.Conns, "connections", nil, "requests at a time (default 1,32)")
	fs.IntVar(&o.Rounds, "rounds", 0, "runs of each contestant, in alternating order (default 5, quick 3)")
	addSpan(fs, &o.Run, "run", 0, "time of a run (default 800ms, quick 300ms)")
	addSpan(fs, &o.Pace, "pace", 0, "time between a stream's events, of the part paced (default 10ms)")
	fs.IntVar(&o.Streams, "streams", 0, "streams at a time, of the part paced (default 2048, quick 256)")
	fs.Float64Var(&o.Rate, "arrivals", 0, "requests a second of the parts open, paced and exact (default: half of the lesser peak of ours and nginx's; paced: an eighth; exact: 1000, and half of its peak)")
	fs.BoolVar(&o.Quick, "quick", false, "fewer sizes and rounds")
	fs.BoolVar(&o.Peers, "sglang", false, "measure sglang-router too: pip installs it once into the cache")
	fs.StringVar(&o.Tokenizer, "model", "", "GGUF `file` or folder of the model whose tokens the part exact counts (default: the default model, if it was fetched)")
	fs.StringVar(&o.Profiles, "profiles", "", "`folder` for CPU profiles of our routers")
	fs.StringSliceVar(&o.Before, "before", nil, "`binaries` of other headraces, whose routers are measured beside this one's")
	fs.BoolVar(&asJSON, "json", false, "print one JSON document")
	fs.BoolVar(&check, "check", false, "fail when a target that was measured is missed")
	fs.StringVar(&svg, "svg", "", "draw rates and added latency by body size into a `file`")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		o.Progress = a.progress()
		if o.Tokenizer == "" {
			if path, err := modelfetch.Default.Path(modelfetch.Options{}); err == nil && modelfetch.Default.Present(path) {
				o.Tokenizer = path
			}
		}
		if err := errors.Join(o.Check(), checkFolder("profiles", o.Profiles), checkFolderOf("svg", svg), checkThere("model", o.Tokenizer)); err != nil {
			return config.Misused(err)
		}
		for _, path := range o.Before {
			if err := checkThere("before", path); err != nil {
				return config.Misused(err)
			}
		}
		report, err := measured(cmd.Context(), a.out, o, asJSON, routerbench.Run, routerbench.Print)
		if err != nil {
			return err
		}
		return errors.Join(draw(svg, report, routerbench.SVG), verdict(check, report))
	}
	return cmd
}
