package main

import (
	"github.com/spf13/cobra"

	"github.com/headrace/headrace/bench"
	"github.com/headrace/headrace/internal/config"
)

func (a *app) benchIndex() *cobra.Command {
	var (
		o      bench.IndexOptions
		size   config.Size
		asJSON bool
		check  bool
	)
	cmd := &cobra.Command{
		Use:   "index",
		Short: "Measure the router's prefix index: events, lookups, and the heap at its limit",
		Example: `  headrace bench index
  headrace bench index --churn 10m --check
  headrace bench index --json`,
		Args: noArgs,
	}
	fs := cmd.Flags()
	fs.DurationVar(&o.Duration, "duration", 0, "of each row (default 5s)")
	fs.DurationVar(&o.Churn, "churn", 0, "how long to go on at the byte limit (default as --duration)")
	fs.Var(&size, "limit", "bytes the index may take under churn (default 256MiB)")
	fs.IntVar(&o.Workers, "workers", 0, "engines with full caches (default 8)")
	fs.BoolVar(&asJSON, "json", false, "print one JSON document")
	fs.BoolVar(&check, "check", false, "fail when a target is missed")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		o.Bytes, o.Progress = int64(size), a.progress()
		if err := o.Check(); err != nil {
			return config.Misused(err)
		}
		report, err := measured(cmd.Context(), a.out, o, asJSON, bench.Index, bench.PrintIndex)
		if err != nil {
			return err
		}
		return verdict(check, report)
	}
	return cmd
}
