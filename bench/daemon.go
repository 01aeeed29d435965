package bench

import (
	"context"
	"log/slog"
	"os"
	"time"

	"github.com/headrace/headrace/bench/child"
	"github.com/headrace/headrace/rdma"
	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/node"
)

// daemonEnv makes a process that calls MaybeChild a node daemon of the benchmark.
const daemonEnv = "HEADRACE_BENCH_NODE"

type daemonConfig struct {
	NodeID, Socket, Listen, Transport string
	Key                               []byte
	Lanes                             int
	Devices                           []string      // of RDMA; empty: all
	Spin                              time.Duration // of RDMA
}

// MaybeChild turns this process into one of the benchmark's daemons, if it was started as one, and never returns then.
// Programs that offer Transfer call it first thing in main.
func MaybeChild() {
	child.Main(daemonEnv, "bench daemon", func(ctx context.Context, c *daemonConfig) error {
		return node.Run(ctx, c.config(func(r node.Ready) { _ = child.Ready(r) }))
	})
}

func (c *daemonConfig) config(ready func(node.Ready)) node.Config {
	return node.Config{NodeID: c.NodeID, Socket: c.Socket, Listen: c.Listen, Transport: c.Transport, ClusterKey: c.Key, Lanes: c.Lanes, OnReady: ready,
		RDMA:   func() transfer.Transport { return rdma.New(rdma.Config{Devices: c.Devices, Spin: c.Spin}) },
		Logger: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError}))}
}

// daemon is one running node daemon.
type daemon struct {
	node.Ready
	*child.Process
}

// stopTimeout is how long a daemon may take to end.
const stopTimeout = 10 * time.Second

// startDaemon runs a daemon in a process of its own. argv is the command line, this binary's when empty.
func startDaemon(ctx context.Context, argv []string, c *daemonConfig) (*daemon, error) {
	d := &daemon{}
	var err error
	d.Process, err = child.StartPart(ctx, daemonEnv, "daemon "+c.NodeID, argv, os.Stderr, c, &d.Ready)
	if err != nil {
		return nil, err
	}
	return d, nil
}
