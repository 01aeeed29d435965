package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/headrace/headrace/internal/registry"
	"github.com/headrace/headrace/internal/status"
	"github.com/headrace/headrace/internal/supervise"
)

// statusTimeout bounds the whole command.
const statusTimeout = 5 * time.Second

func (a *app) status() *cobra.Command {
	var (
		etcd    []string
		dataDir string
		asJSON  bool
	)
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show who is alive: routers, workers, node daemons, channels and leases",
		Example: `  headrace status                          # of the "headrace up" on this machine
  headrace status --etcd 10.0.0.1:2379 --json`,
	}
	flags := cmd.Flags()
	flags.StringSliceVar(&etcd, "etcd", nil, "etcd endpoints, `HOST:PORT,...` (default: that of headrace up in --data-dir)")
	addDataDir(flags, &dataDir)
	flags.BoolVar(&asJSON, "json", false, "print one JSON document")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if len(etcd) == 0 {
			s, err := supervise.ReadState(dataDir)
			if errors.Is(err, fs.ErrNotExist) {
				return fmt.Errorf("nothing runs in %s; start it with headrace up, or say where with --data-dir or --etcd", dataDir)
			}
			if err != nil {
				return err
			}
			etcd = strings.Split(s.Etcd, ",")
		}
		ctx, cancel := context.WithTimeout(cmd.Context(), statusTimeout)
		defer cancel()
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
