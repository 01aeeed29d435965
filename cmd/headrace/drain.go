package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/headrace/headrace/internal/config"
	"github.com/headrace/headrace/internal/registry"
	"github.com/headrace/headrace/internal/routers"
)

// drainLook is the time between two looks at the routers.
const drainLook = 200 * time.Millisecond

func (a *app) drain() *cobra.Command {
	var (
		etcd    []string
		dataDir string
		timeout time.Duration
		undo    bool
		noWait  bool
		keyFile string
	)
	cmd := &cobra.Command{
		Use:   "drain WORKER",
		Short: "Give a worker no new requests, and wait until it has none",
		Long: `Drain makes all routers send a worker nothing more, and waits until it has no requests. Streams of Headrace's own workers go on at others that have
room, with their KV cache (unless routers run with --moves 0, or a stream ends sooner); what else it has is answered first. Then the worker can be ended
without anybody noticing. It goes for the process that runs now: one that is started later under the same name gets requests.`,
		Example: `  headrace drain decode-3 && systemctl stop headrace-engine@3
  headrace drain decode-3 --undo`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return config.Misused(errors.New("drain takes the id of one worker; headrace status lists them"))
			}
			return nil
		},
	}
	flags := cmd.Flags()
	addEtcd(flags, &etcd, "etcd endpoints, `HOST:PORT,...` (default: that of headrace up in --data-dir)")
	addDataDir(flags, &dataDir)
	addClusterKey(flags, &keyFile)
	addSpan(flags, &timeout, "timeout", 5*time.Minute, "longest to wait; the worker goes on draining behind it")
	flags.BoolVar(&undo, "undo", false, "let it have requests again")
	flags.BoolVar(&noWait, "no-wait", false, "do not wait for its requests to end")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		etcd, err := endpointsOf(etcd, dataDir, "say where with --data-dir or --etcd")
		if err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(cmd.Context(), timeout)
		defer cancel()
		if ctx, err = withClusterKey(ctx, keyFile, dataDir); err != nil {
			return err
		}
		reg, err := registry.Open(ctx, registry.Config{Endpoints: etcd})
		if err != nil {
			return err
		}
		defer reg.Close()
		if undo {
			return reg.Undrain(ctx, args[0])
		}
		table, err := reg.Watch(ctx)
		if err != nil {
			return err
		}
		w, ok := table.Snapshot().Worker(args[0])
		if !ok {
			return fmt.Errorf("no worker %q is listed; headrace status shows those that are", args[0])
		}
		if err := reg.Drain(ctx, w); err != nil || noWait {
			return err
		}
		return awaitDrained(ctx, table, w.ID)
	}
	return cmd
}

// awaitDrained waits until no router has a request at the worker.
func awaitDrained(ctx context.Context, table *registry.Table, id string) error {
	var asker routers.Asker
	defer asker.Close()
	for quiet := 0; ; {
		why := routers.Undrained(asker.Ask(ctx, table.Snapshot().Routers), id)
		if why != "" {
			quiet = 0
		} else if quiet++; quiet == routers.Quiet {
			return nil
		}
		select {
		case <-time.After(drainLook):
		case <-ctx.Done():
			return fmt.Errorf("wait for %s: %s. It goes on draining; headrace drain %s --undo takes that back", id, why, id)
		}
	}
}
