package main

import (
	"context"
	"time"

	"github.com/spf13/cobra"

	"github.com/headrace/headrace/internal/registry"
	"github.com/headrace/headrace/internal/status"
)

// statusTimeout bounds the whole command.
const statusTimeout = 5 * time.Second

func (a *app) status() *cobra.Command {
	var (
		etcd    []string
		dataDir string
		asJSON  bool
		keyFile string
	)
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show who is alive: routers, planners, workers, node daemons, channels and leases",
		Example: `  headrace status                          # of the "headrace up" on this machine
  headrace status --etcd 10.0.0.1:2379 --json`,
	}
	flags := cmd.Flags()
	addEtcd(flags, &etcd, "etcd endpoints, `HOST:PORT,...` (default: that of headrace up in --data-dir)")
	addDataDir(flags, &dataDir)
	addClusterKey(flags, &keyFile)
	flags.BoolVar(&asJSON, "json", false, "print one JSON document")
	cmd.RunE = func(cmd *cobra.Command, _ []string) (err error) {
		if etcd, err = endpointsOf(etcd, dataDir, "start it with headrace up, or say where with --data-dir or --etcd"); err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(cmd.Context(), statusTimeout)
		defer cancel()
		if ctx, err = withClusterKey(ctx, keyFile, dataDir); err != nil {
			return err
		}
		reg, err := registry.Open(ctx, registry.Config{Endpoints: etcd})
		if err != nil {
			return err
		}
		defer reg.Close()
		table, err := reg.Watch(ctx)
		if err != nil {
			return err
		}
		return status.Gather(ctx, etcd, table.Snapshot()).Print(a.out, asJSON)
	}
	return cmd
}
