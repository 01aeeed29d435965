package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

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
	cmd.AddCommand(a.benchTransfer(), a.benchModel(), a.benchIndex(), a.benchEngine(), a.benchPairing(), a.benchPlan(), a.benchRouter())
	return cmd
}

// ownPeers is what --peers alone means.
const ownPeers = "mooncake,nixl"

// errInterrupted is what a measurement ends with that a signal cut short.
var errInterrupted = errors.New("interrupted: what was measured so far is above")

func (a *app) benchTransfer() *cobra.Command {
	var (
		o      bench.Options
		size   config.Size
		region config.Size
		asJSON bool
		check  bool
		peers  string
		svg    string
	)
	cmd := &cobra.Command{
		Use:   "transfer",
		Short: "Measure the movement of scattered blocks beside plain loops, iperf3 and other transfer engines",
		Example: `  headrace bench transfer                                  # everything but peers
  headrace bench transfer --quick                          # under a minute
  headrace bench transfer --peers --check                  # beside Mooncake and NIXL, installed once into the cache
  headrace bench transfer --transport tcp --json
  headrace bench transfer --transport rdma                 # beside ib_write_bw and ib_read_bw
  headrace bench transfer --part sizes --block 65536,262144 --rounds 3`,
		Args: noArgs,
	}
	fs := cmd.Flags()
	fs.StringVar(&o.Transport, "transport", "all", "tcp, shm, rdma or all")
	fs.StringSliceVar(&o.Parts, "part", nil, "what to measure: sizes, latency, batches, lanes, engines; of RDMA also posts, rails, completions (default all)")
	fs.BoolVar(&o.Quick, "quick", false, "fewer sizes, rounds and bytes")
	fs.IntSliceVar(&o.Blocks, "block", nil, "block sizes in bytes (default 4 KiB to 4 MiB)")
	fs.Var(&size, "size", "bytes moved by a run, as 2GiB (default 1GiB)")
	fs.Var(&region, "region", "lent memory on each side (default 512MiB)")
	fs.IntVar(&o.Lanes, "lanes", 0, "streams of a channel (default: the daemon's choice)")
	fs.IntVar(&o.Rounds, "rounds", 0, "runs of each contestant, in alternating order (default 7, quick 3)")
	fs.DurationVar(&o.Spin, "spin", 0, "how long daemons poll for RDMA completions before they park")
	fs.BoolVar(&asJSON, "json", false, "print one JSON document")
	fs.BoolVar(&check, "check", false, "fail when a target that was measured is missed")
	fs.StringVar(&svg, "svg", "", "draw rates by block size into a `file`")
	fs.StringVar(&peers, "peers", "", "measure other transfer engines too: those that come along, or --peers=FOLDER with drivers of yours")
	fs.Lookup("peers").NoOptDefVal = ownPeers
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		switch peers {
		case "":
		case ownPeers:
			o.Peers = bench.Drivers()
		default:
			o.Peers = os.DirFS(peers)
		}
		o.Bytes, o.Region = int64(size), int64(region)
		o.Progress = a.progress()
		if err := errors.Join(o.Check(), checkFolder("peers", peersFolder(peers)), checkFolderOf("svg", svg)); err != nil {
			return config.Misused(err)
		}
		report, err := measured(cmd.Context(), a.out, o, asJSON, bench.Transfer, bench.Print)
		if err != nil {
			return err
		}
		return errors.Join(draw(svg, report, bench.SVG), verdict(check, report))
	}
	return cmd
}

// measured runs a measurement until it is through or a signal comes, and prints the report, of what there is by then.
func measured[O, R any](ctx context.Context, out io.Writer, o O, asJSON bool, run func(context.Context, O) (R, error), print func(io.Writer, R, bool) error) (report R, err error) {
	ctx, stop := signal.NotifyContext(ctx, syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if report, err = run(ctx, o); err != nil {
		return report, err
	}
	if err = print(out, report, asJSON); err == nil && ctx.Err() != nil {
		err = errInterrupted
	}
	return report, err
}

// draw writes the chart of a report into a file, if one is named.
func draw[R any](path string, report R, svg func(io.Writer, R) error) error {
	if path == "" {
		return nil
	}
	f, err := os.Create(path)
	if err != nil {
		return fmt.Errorf("draw: %w", err)
	}
	return errors.Join(svg(f, report), f.Close())
}

// verdict is the error of a measurement that missed a target, where those are checked.
func verdict(check bool, report interface{ Failed() bool }) error {
	if check && report.Failed() {
		return fmt.Errorf("a target was missed: see the lines that say %q", bench.Fails)
	}
	return nil
}

// peersFolder is the folder of --peers, "" where it names none.
func peersFolder(peers string) string {
	if peers == ownPeers {
		return ""
	}
	return peers
}

// progress is where a measurement says how far it is: a terminal, or nowhere.
func (a *app) progress() io.Writer {
	if term.IsTerminal(int(os.Stderr.Fd())) {
		return a.err
	}
	return nil
}
