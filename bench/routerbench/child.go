package routerbench

import (
	"context"
	"log/slog"
	"net"
	"os"
	"runtime/pprof"
	"time"

	"github.com/headrace/headrace/bench/child"
	"github.com/headrace/headrace/bench/front"
	"github.com/headrace/headrace/router"
	"github.com/headrace/headrace/router/pairing"
	"github.com/headrace/headrace/router/tokenize"
	"github.com/headrace/headrace/worker/standin"
)

// childEnv makes a process that calls MaybeChild a part of the benchmark.
const childEnv = "HEADRACE_BENCH_ROUTER"

const (
	childInstant = "instant"
	childRouter  = "router"
)

type childConfig struct {
	Kind    string           `json:"kind"`
	Count   int              `json:"count,omitempty"`   // of stand-ins
	Workers []pairing.Worker `json:"workers,omitempty"` // of a router
	Profile string           `json:"profile,omitempty"` // file for a CPU profile
	// Exact, when not empty, is the tokenizer of a router that pairs by what its workers have.
	Exact string `json:"exact,omitempty"`
}

// childReady is what a child says when it serves.
type childReady struct {
	Addrs []string `json:"addrs"`
}

// MaybeChild turns this process into a part of the benchmark, if it was started as one, and never returns then. Programs
// that offer Run call it first thing in main.
func MaybeChild() { child.Main(childEnv, "bench router", serveChild) }

func serveChild(ctx context.Context, c *childConfig) error {
	if c.Profile != "" {
		f, err := os.Create(c.Profile)
		if err != nil {
			return err
		}
		if err := pprof.StartCPUProfile(f); err != nil {
			return err
		}
		defer func() { pprof.StopCPUProfile(); _ = f.Close() }()
	}
	if c.Kind == childInstant {
		return serveInstant(ctx, c.Count)
	}
	return serveRouter(ctx, c)
}

func ready(addrs ...string) error { return child.Ready(childReady{addrs}) }

func serveInstant(ctx context.Context, n int) error {
	x := &standin.Instant{}
	ended := make(chan error, n)
	list, err := front.Listen(n)
	if err != nil {
		return err
	}
	var addrs []string
	for _, l := range list {
		addrs = append(addrs, l.Addr().String())
		go func(l net.Listener) { ended <- x.Serve(ctx, l) }(l)
	}
	if err := ready(addrs...); err != nil {
		return err
	}
	return <-ended
}

// serveRouter is `headrace router` without a registry. It logs warnings, as those beside it keep no access log.
func serveRouter(ctx context.Context, c *childConfig) error {
	cfg := router.Config{MaxConcurrent: concurrentMax, Logger: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))}
	if c.Exact != "" {
		tokens, err := tokenize.Load(c.Exact, tokenize.Options{})
		if err != nil {
			return err
		}
		cfg.Policy, cfg.Tokens = &pairing.Joint{}, map[string]router.Tokens{"": tokens}
	}
	router.ReserveHeap()
	return front.Serve(ctx, cfg, c.Workers, func(clients, admin string) error { return ready(clients, admin) })
}

// concurrentMax is more than are ever under way: those beside it have no such limit.
const concurrentMax = 1 << 15

const (
	startTimeout = 20 * time.Second // of a program of somebody else
	stopTimeout  = 3 * time.Second
)

// process is a program that serves until it is stopped.
type process interface {
	// Group is its process group.
	Group() int
	// Stop ends it, after patience by force.
	Stop(patience time.Duration) error
}

// startChild runs a part of ours in a process of its own, by another binary than this one unless that is "".
func (s *session) startChild(ctx context.Context, binary string, c *childConfig) (addrs []string, err error) {
	var r childReady
	var argv []string
	if binary != "" {
		argv = []string{binary}
	}
	p, err := child.StartPart(ctx, childEnv, c.Kind, argv, os.Stderr, c, &r)
	if err != nil {
		return nil, err
	}
	s.processes = append(s.processes, p)
	return r.Addrs, nil
}
