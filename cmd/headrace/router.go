package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/headrace/headrace/internal/config"
	"github.com/headrace/headrace/internal/registry"
	"github.com/headrace/headrace/internal/supervise"
	"github.com/headrace/headrace/internal/version"
	"github.com/headrace/headrace/router"
	"github.com/headrace/headrace/router/dialects"
	"github.com/headrace/headrace/router/pairing"
	"github.com/headrace/headrace/router/tokenize"
)

// drainTimeout is how long a router that was told to stop lets streams go on.
const drainTimeout = 10 * time.Second

func (a *app) router() *cobra.Command {
	var (
		p         partFlags
		cfg       router.Config
		keyFile   string
		admin     string
		advertise string
		drain     time.Duration
		maxBody   config.Size
		policy    string
		tokens    []string
	)
	cmd := &cobra.Command{
		Use:     "router",
		Short:   "Run the OpenAI front, which shares requests between prefill and decode workers",
		Example: `  headrace router --etcd 10.0.0.1:2379 --listen 0.0.0.0:8000 --cluster-key-file /etc/headrace/cluster.key --api-keys-file keys.txt`,
	}
	fs := cmd.Flags()
	p.add(fs, "router", "127.0.0.1:8000")
	fs.StringVar(&admin, "admin", "127.0.0.1:0", "`address` of /metrics, /status and /debug; it has no access control")
	fs.StringVar(&advertise, "advertise", "", "`HOST:PORT` that clients connect to, when --listen is not it")
	fs.StringVar(&cfg.APIKeysFile, "api-keys-file", "", "`file` with API keys, one a line (default: none are asked for)")
	fs.DurationVar(&cfg.RequestTimeout, "request-timeout", 5*time.Minute, "longest a request may take")
	fs.IntVar(&cfg.MaxConcurrent, "max-concurrent", 512, "answers made at once (a request for n counts n)")
	fs.IntVar(&cfg.MaxQueue, "max-queue", 512, "requests waiting; more are refused with 429")
	fs.Var(&maxBody, "max-body", "largest request body, as 32MiB; workers have the same limit (default 32MiB)")
	fs.DurationVar(&drain, "drain-timeout", drainTimeout, "longest that streams may go on after SIGTERM")
	fs.DurationVar(&cfg.NixlLease, "nixl-lease", dialects.DefaultNixlLease, "for how long a prefill vLLM with a NixlConnector keeps blocks (its kv_lease_duration)")
	addPolicy(fs, &policy)
	fs.StringArrayVar(&tokens, "tokenizer", nil, "`[MODEL=]PATH` of a model's folder or GGUF file, for policies that look at prefixes; may be repeated (default: they go by bytes)")
	fs.StringVar(&cfg.SessionHeader, "session-header", "X-Session-Id", "`header` by which clients say what belongs together: it stays with the same workers (-: none)")
	fs.DurationVar(&cfg.SessionTTL, "session-ttl", 10*time.Minute, "how long a session is remembered after its last request")
	addKeyFile(fs, &keyFile)
	cmd.RunE = func(cmd *cobra.Command, _ []string) (err error) {
		if len(p.etcd) == 0 {
			return config.Misused(errors.New("--etcd is needed: the router finds workers there"))
		}
		if cfg.Policy, err = pairing.New(policy, rand.Uint64()); err != nil {
			return config.Misused(err)
		}
		if cfg.Logger, err = a.logger(); err != nil {
			return err
		}
		cfg.Tokens = loadTokens(tokens, cfg.Logger)
		if cfg.ClusterKey, err = clusterKey(keyFile, p.dataDir); err != nil {
			return err
		}
		cfg.MaxBodyBytes = int(maxBody)
		cfg.Version = version.Get().Version
		ctx, stop := signalled(cmd, p.parentFD, true)
		defer stop()
		front, err := listenTCP(p.listen)
		if err != nil {
			return err
		}
		defer front.Close()
		back, err := net.Listen("tcp", admin)
		if err != nil {
			return fmt.Errorf("open admin address: %w", err)
		}
		defer back.Close()
		entry := registry.Router{
			ID: defaultID(p.id, "router", front.Addr().String()), Addr: advertise, Admin: back.Addr().String(),
			PID: os.Getpid(), Host: hostname(), Started: time.Now(),
		}
		if entry.Addr == "" {
			entry.Addr = front.Addr().String()
		}
		return listed(ctx, p.etcd, cfg.Logger, func(ctx context.Context, reg *registry.Registry) error {
			return serveRouter(ctx, reg, cfg, entry, front, back, drain, p.ready)
		})
	}
	return cmd
}

// loadTokens loads tokenizers. A model whose tokens cannot be told is routed by the bytes of its requests.
func loadTokens(list []string, log *slog.Logger) map[string]router.Tokens {
	out := map[string]router.Tokens{}
	for _, item := range list {
		model, path, ok := strings.Cut(item, "=")
		if !ok {
			model, path = "", item
		}
		t, err := tokenize.Load(path, tokenize.Options{})
		if err != nil {
			log.Warn("no tokenizer: prefixes are told by the bytes of requests", "model", model, "err", err)
			continue
		}
		out[model] = t
	}
	return out
}

// addPolicy is for who runs a router.
func addPolicy(fs *pflag.FlagSet, policy *string) {
	fs.StringVar(policy, "policy", pairing.NameLeastLoaded, "how workers are chosen: "+strings.Join(pairing.Names, ", "))
}

func serveRouter(ctx context.Context, reg *registry.Registry, cfg router.Config, entry registry.Router, front, back net.Listener, drain time.Duration, ready string) error {
	table, err := watchPatiently(ctx, reg)
	if err != nil {
		return err
	}
	cfg.Source = fleet{table}
	r, err := router.New(cfg)
	if err != nil {
		return err
	}
	ended := make(chan error, 2)
	go func() { ended <- r.ServeAdmin(back) }()
	go func() { ended <- r.Serve(front) }()
	_, err = reg.Keep(registry.KindRouter, entry.ID, entry)
	if err == nil {
		err = supervise.WriteReady(ready, os.Getpid(), entry.Addr)
	}
	if err == nil {
		select {
		case <-ctx.Done():
		case err = <-ended:
		}
	}
	sctx, cancel := context.WithTimeout(context.Background(), drain)
	defer cancel()
	return errors.Join(err, r.Shutdown(sctx))
}

// watchPatiently waits for an etcd that is not there yet: parts may be started in any order.
func watchPatiently(ctx context.Context, reg *registry.Registry) (*registry.Table, error) {
	for {
		table, err := reg.Watch(ctx)
		if err == nil || ctx.Err() != nil {
			return table, err
		}
		select {
		case <-time.After(200 * time.Millisecond):
		case <-ctx.Done():
		}
	}
}

// fleet shows the router the registry's workers.
type fleet struct{ *registry.Table }

// Nodes lists the daemons, for what they measure and where they are.
func (f fleet) Nodes() []router.Node {
	view := f.Snapshot()
	nodes := make([]router.Node, 0, len(view.Nodes))
	for _, n := range view.Nodes {
		nodes = append(nodes, router.Node{ID: n.ID, Admin: n.Admin, Data: n.DataAddr})
	}
	return nodes
}

func (f fleet) Workers() []pairing.Worker {
	view := f.Snapshot()
	workers := make([]pairing.Worker, 0, len(view.Workers))
	for _, w := range view.Workers {
		workers = append(workers, pairing.Worker{
			ID: w.ID, Role: pairing.Role(w.Role), Model: w.Model, Addr: w.Addr, NodeID: w.NodeID, NodeData: w.NodeData,
			Dialect: w.Dialect, Incarnation: fmt.Sprint(w.Host, w.PID, w.Started.UnixNano()), Fingerprint: w.Fingerprint,
			BlockTokens: w.BlockTokens, Blocks: w.Blocks, ContextTokens: w.ContextTokens, TensorParallel: max(w.TensorParallel, 1), Opaque: w.Opaque,
			KVAddr: w.KVAddr, KVEngine: w.KVEngine, PipelineParallel: max(w.PipelineParallel, 1), Events: w.Events, EventsReplay: w.EventsReplay,
			LoRAs: w.LoRAs, Weight: w.Weight,
		})
	}
	return workers
}
