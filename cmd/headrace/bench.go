package main

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/headrace/headrace/bench"
	"github.com/headrace/headrace/internal/config"
)

func (a *app) bench() *cobra.Command {
	cmd := &cobra.Command{
		Use:     "bench",
		Short:   "Measure, beside a limit or a peer in the same run",
		Example: `  headrace bench transfer --transport tcp --json`,
		Args:    cobra.ArbitraryArgs,
		RunE:    group,
	}
	cmd.AddCommand(a.benchTransfer())
	return cmd
}

func (a *app) benchTransfer() *cobra.Command {
	var (
		o      bench.Options
		size   config.Size
		region config.Size
		asJSON bool
	)
	cmd := &cobra.Command{
		Use:   "transfer",
		Short: "Measure the movement of scattered blocks beside plain loops over the same blocks",
		Example: `  headrace bench transfer --transport tcp --json
  headrace bench transfer --block 65536,262144 --rounds 3`,
		Args: noArgs,
	}
	fs := cmd.Flags()
	fs.StringVar(&o.Transport, "transport", "all", "tcp, shm or all")
	fs.IntSliceVar(&o.Blocks, "block", nil, "block sizes in bytes (default 65536)")
	fs.Var(&size, "size", "bytes moved by a measurement, as 2GiB (default 2GiB)")
	fs.Var(&region, "region", "lent memory on each side (default 512MiB)")
	fs.IntVar(&o.Lanes, "lanes", 0, "streams of a channel (default: the daemon's choice)")
	fs.IntVar(&o.Rounds, "rounds", 0, "alternating pairs of a measurement (default 7)")
	fs.BoolVar(&asJSON, "json", false, "print one JSON document")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		switch o.Transport {
		case "tcp", "shm", "all":
		default:
			return config.Misused(fmt.Errorf("--transport %q: use tcp, shm or all", o.Transport))
		}
		o.Bytes, o.Region = int64(size), int64(region)
		if term.IsTerminal(int(os.Stderr.Fd())) {
			o.Progress = a.err
		}
		report, err := bench.Transfer(cmd.Context(), o)
		if err != nil {
			return err
		}
		return bench.Print(a.out, report, asJSON)
	}
	return cmd
}
