package bench

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/headrace/headrace/rdma"
	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/node"
)

// childEnv makes a process that calls MaybeChild a node daemon of the benchmark.
const childEnv = "HEADRACE_BENCH_NODE"

type childConfig struct {
	NodeID, Socket, Listen, Transport string
	Key                               []byte
	Lanes                             int
	Devices                           []string      // of RDMA; empty: all
	Spin                              time.Duration // of RDMA
}

// MaybeChild turns this process into one of the benchmark's daemons, if it was started as one, and never returns then.
// Programs that offer Transfer call it first thing in main.
func MaybeChild() {
	doc := os.Getenv(childEnv)
	if doc == "" {
		return
	}
	if err := child(doc); err != nil {
		fmt.Fprintln(os.Stderr, "bench daemon:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

func child(doc string) error {
	var c childConfig
	if err := json.Unmarshal([]byte(doc), &c); err != nil {
		return fmt.Errorf("read %s: %w", childEnv, err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	go func() { // the parent's end of stdin closes however it ends
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	return node.Run(ctx, c.config(func(r node.Ready) { _ = json.NewEncoder(os.Stdout).Encode(r) }))
}

func (c childConfig) config(ready func(node.Ready)) node.Config {
	return node.Config{NodeID: c.NodeID, Socket: c.Socket, Listen: c.Listen, Transport: c.Transport, ClusterKey: c.Key, Lanes: c.Lanes, OnReady: ready,
		RDMA:   func() transfer.Transport { return rdma.New(rdma.Config{Devices: c.Devices, Spin: c.Spin}) },
		Logger: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError}))}
}

// daemon is one running node daemon.
type daemon struct {
	node.Ready
	stop func() error
}

const childTimeout = 10 * time.Second

// startDaemon runs a daemon in a process of its own. argv is the command line, this binary's when empty.
func startDaemon(ctx context.Context, argv []string, c childConfig) (*daemon, error) {
	if len(argv) == 0 {
		exe, err := os.Executable()
		if err != nil {
			return nil, err
		}
		argv = []string{exe}
	}
	doc, err := json.Marshal(c)
	if err != nil {
		return nil, err
	}
	cmd := ownGroup(exec.CommandContext(ctx, argv[0], argv[1:]...))
	cmd.Env = append(os.Environ(), childEnv+"="+string(doc))
	var stderr strings.Builder
	cmd.Stderr = io.MultiWriter(&stderr, os.Stderr)
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start daemon: %w", err)
	}
	d := &daemon{stop: func() error { return errors.Join(stdin.Close(), cmd.Wait()) }}
	kill := time.AfterFunc(childTimeout, func() { _ = cmd.Process.Kill() })
	line, err := bufio.NewReader(stdout).ReadBytes('\n')
	kill.Stop()
	if err == nil {
		err = json.Unmarshal(line, &d.Ready)
	}
	if err != nil {
		_ = cmd.Process.Kill()
		_ = d.stop()
		return nil, fmt.Errorf("start daemon %s: it said %q and %q: %w", c.NodeID, line, strings.TrimSpace(stderr.String()), err)
	}
	return d, nil
}
