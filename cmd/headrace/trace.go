package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/headrace/headrace/internal/config"
	"github.com/headrace/headrace/internal/registry"
	"github.com/headrace/headrace/internal/trace"
)

// traceTimeout bounds the whole command.
const traceTimeout = 8 * time.Second

// traceListMax is what routers keep.
const traceListMax = 1024

func (a *app) trace() *cobra.Command {
	var (
		etcd    []string
		dataDir string
		asJSON  bool
		slowest bool
		admin   string
		n       int
		keyFile string
	)
	cmd := &cobra.Command{
		Use:   "trace [ID]",
		Short: "Show what happened to a request, and when: over router, workers and node daemons",
		Long: `Shows one request's timeline as the router and the node daemons remember it. ID is what the client got back in X-Request-Id, the answer's
id, or the trace id. Without ID it lists the requests that ended last.`,
		Example: `  headrace trace chatcmpl-8f14e45f
  headrace trace --slowest -n 10
  headrace trace --router 127.0.0.1:41231 --json my-request-17`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 1 {
				return config.Misused(fmt.Errorf("unexpected argument %q: one request is shown at a time", args[1]))
			}
			return nil
		},
	}
	flags := cmd.Flags()
	addEtcd(flags, &etcd, "etcd endpoints, `HOST:PORT,...` (default: that of headrace up in --data-dir)")
	addPeer(flags, &admin, "router", "`HOST:PORT` of one router's admin listener, instead of those that etcd lists")
	addDataDir(flags, &dataDir)
	addClusterKey(flags, &keyFile)
	flags.BoolVar(&slowest, "slowest", false, "list the slowest requests instead of the last ones")
	flags.IntVarP(&n, "number", "n", 20, "how many requests to list")
	flags.BoolVar(&asJSON, "json", false, "print one JSON document")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if n < 1 || n > traceListMax {
			return config.Misused(fmt.Errorf("--number %d: routers keep %d requests", n, traceListMax))
		}
		ctx, cancel := context.WithTimeout(cmd.Context(), traceTimeout)
		defer cancel()
		ctx, err := withClusterKey(ctx, keyFile, dataDir)
		if err != nil {
			return err
		}
		routers := []trace.Router{{ID: admin, Admin: admin}}
		if admin == "" {
			if routers, err = listedRouters(ctx, etcd, dataDir); err != nil {
				return err
			}
		}
		if len(args) == 1 {
			t, err := trace.Gather(ctx, routers, args[0])
			if err != nil {
				return err
			}
			return t.Print(a.out, asJSON)
		}
		list, err := trace.List(ctx, routers, n, slowest)
		if err != nil && len(list) == 0 {
			return err
		}
		if err != nil {
			fmt.Fprintf(a.err, "not everything is here: %s\n", strings.ReplaceAll(err.Error(), "\n", "; "))
		}
		return trace.PrintList(a.out, list, asJSON)
	}
	return cmd
}

// listedRouters finds the cluster's routers.
func listedRouters(ctx context.Context, etcd []string, dataDir string) ([]trace.Router, error) {
	etcd, err := endpointsOf(etcd, dataDir, "say where with --data-dir, --etcd or --router")
	if err != nil {
		return nil, err
	}
	reg, err := registry.Open(ctx, registry.Config{Endpoints: etcd})
	if err != nil {
		return nil, err
	}
	defer reg.Close()
	table, err := reg.Watch(ctx)
	if err != nil {
		return nil, err
	}
	var routers []trace.Router
	for _, r := range table.Snapshot().Routers {
		routers = append(routers, trace.Router{ID: r.ID, Admin: r.Admin})
	}
	if len(routers) == 0 {
		return nil, errors.New("no router is listed; headrace status shows what is")
	}
	return routers, nil
}
