package main

import (
	"github.com/spf13/cobra"

	"github.com/headrace/headrace/bench/planbench"
	"github.com/headrace/headrace/internal/config"
)

func (a *app) benchPlan() *cobra.Command {
	var (
		o      planbench.Options
		asJSON bool
		check  bool
	)
	cmd := &cobra.Command{
		Use:   "plan",
		Short: "Measure the scheduler: placements a second and their latency by size of the cluster, beside a plain scan",
		Example: `  headrace bench plan
  headrace bench plan --sizes 210,10000 --duration 5s --check
  headrace bench plan --json`,
		Args: noArgs,
	}
	fs := cmd.Flags()
	fs.IntSliceVar(&o.Nodes, "sizes", nil, "nodes of the cluster (default 210,500,1000,2100,5000,10000)")
	fs.IntVar(&o.GPUs, "node-gpus", 8, "GPUs of a node")
	fs.IntVar(&o.Instances, "instances", 20000, "placed at once on the first size")
	fs.DurationVar(&o.Duration, "duration", 0, "of the steady state on each size (default 2s)")
	fs.Uint64Var(&o.Seed, "seed", 1, "of what comes and leaves")
	fs.BoolVar(&asJSON, "json", false, "print one JSON document")
	fs.BoolVar(&check, "check", false, "fail when a target is missed")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		o.Progress = a.progress()
		if err := o.Check(); err != nil {
			return config.Misused(err)
		}
		report, err := measured(cmd.Context(), a.out, o, asJSON, planbench.Run, planbench.Print)
		if err != nil {
			return err
		}
		return verdict(check, report)
	}
	return cmd
}
