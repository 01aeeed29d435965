package main

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/headrace/headrace/internal/config"
	"github.com/headrace/headrace/internal/modelfetch"
	"github.com/headrace/headrace/internal/registry"
	"github.com/headrace/headrace/internal/supervise"
	"github.com/headrace/headrace/transfer/node/nodeclient"
	"github.com/headrace/headrace/worker"
)

func (a *app) worker() *cobra.Command {
	var (
		p         partFlags
		cfg       worker.Config
		kvMemory  config.Size
		maxBody   config.Size
		advertise string
		events    [2]string
		namespace string
	)
	cmd := &cobra.Command{
		Use:   "worker",
		Short: "Run the reference engine on a GGUF file",
		Long: `Worker loads a model and serves it over HTTP in OpenAI's shape. Alone it is a plain server; with a node daemon
(--socket) and a registry (--etcd) a router shares requests between prefill and decode workers.`,
		Example: `  headrace worker --model llama.gguf --listen 127.0.0.1:8001
  headrace worker --model llama.gguf --role prefill --etcd 10.0.0.1:2379 --socket /run/headrace/node.sock --listen 10.0.0.7:8001`,
	}
	fs := cmd.Flags()
	p.add(fs, "worker", "127.0.0.1:0")
	fs.StringVar(&cfg.Role, "role", "both", "prefill, decode or both")
	fs.StringVar(&cfg.ModelPath, "model", "", "GGUF `file` (default: SmolLM2-135M-Instruct, fetched)")
	fs.StringVar(&cfg.ModelName, "model-name", "", "what clients call the model (default: the file's name)")
	fs.StringVar(&cfg.Socket, "socket", "", "`path` of the node daemon's unix socket; none: whole requests only")
	addPeer(fs, &advertise, "advertise", "`HOST:PORT` that routers connect to, when --listen is not it")
	fs.IntVar(&cfg.Threads, "threads", 0, "threads (default: all cores)")
	fs.Var(&kvMemory, "kv-memory", "KV cache, as 512MiB (default 512MiB)")
	fs.BoolVar(&cfg.HugePages, "kv-hugepages", false, "KV cache in huge pages, which must be free (sysctl vm.nr_hugepages)")
	fs.Var(&maxBody, "max-body", "largest request body, as 32MiB (default 32MiB)")
	fs.IntVar(&cfg.BlockTokens, "block-tokens", 0, "tokens of a KV block (default 16)")
	fs.IntVar(&cfg.TensorParallel, "tensor-parallel", 0, "ranks that share the KV heads, each with memory of its own (default 1)")
	addListen(fs, &events[0], "kv-events", "", "`address` on which what the KV cache holds is published, over ZeroMQ as vLLM does (default: nowhere)")
	addListen(fs, &events[1], "kv-events-replay", "", "`address` that replays the last 10,000 batches of it (default: any port of --kv-events' host)")
	fs.IntVar(&cfg.BatchTokens, "batch-tokens", 0, "tokens computed in a step (default 128)")
	weight := addWeight(fs)
	addNamespace(fs, &namespace)
	cmd.RunE = func(cmd *cobra.Command, _ []string) (err error) {
		if err := checkWeight(*weight); err != nil {
			return err
		}
		if cfg.Logger, err = a.logger(); err != nil {
			return err
		}
		if cfg.Threads < 0 || cfg.BlockTokens < 0 || cfg.BatchTokens < 0 || cfg.TensorParallel < 0 {
			return config.Misused(errors.New("--threads, --block-tokens, --tensor-parallel and --batch-tokens cannot be negative"))
		}
		if cfg.Role != "prefill" && cfg.Role != "decode" && cfg.Role != "both" {
			return config.Misused(fmt.Errorf("--role %q: use prefill, decode or both", cfg.Role))
		}
		if events[0] == "" && events[1] != "" {
			return config.Misused(errors.New("--kv-events-replay is of no use without --kv-events"))
		}
		ctx, stop := signalled(cmd, p.parentFD, true)
		defer stop()
		if cfg.ModelPath == "" {
			if cfg.ModelPath, err = modelfetch.Default.Ensure(ctx, modelfetch.Options{Progress: a.err}); err != nil {
				return err
			}
		}
		if cfg.Listener, err = listenTCP(p.listen); err != nil {
			return err
		}
		defer cfg.Listener.Close()
		if err := listenEvents(&cfg, events); err != nil {
			return err
		}
		cfg.ID = defaultID(p.id, "worker", cfg.Listener.Addr().String())
		cfg.KVBytes = uint64(kvMemory)
		if cfg.BodyMax = int64(maxBody); cfg.BodyMax > 0 {
			cfg.BodyMax += 64 << 10 // what the router adds to a body of that size
		}
		return listed(ctx, p.etcd, cfg.Logger, func(ctx context.Context, reg *registry.Registry) error {
			l := &workerListing{reg: reg, cfg: &cfg, entry: registry.Worker{ID: cfg.ID, Role: cfg.Role, Addr: advertise, Dialect: "native", Weight: weight, Namespace: namespace}, ready: p.ready}
			cfg.OnReady, cfg.OnNode = l.onReady, l.onNode
			return worker.Run(ctx, cfg)
		})
	}
	return cmd
}

// addWeight is for who is listed as a worker.
func addWeight(fs *pflag.FlagSet) *float64 {
	return fs.Float64("weight", 1, "part of the traffic that the worker is to get of what another would, 0 to 1 (0: it drains)")
}

func checkWeight(w float64) error {
	if !(w >= 0 && w <= 1) {
		return config.Misused(fmt.Errorf("--weight %v: give a number from 0 to 1", w))
	}
	return nil
}

// listenEvents opens where KV events are published and replayed.
func listenEvents(cfg *worker.Config, addrs [2]string) error {
	if addrs[0] == "" {
		return nil
	}
	var err error
	if cfg.Events, err = listenTCP(addrs[0]); err != nil {
		return err
	}
	if addrs[1] == "" {
		host, _, _ := net.SplitHostPort(cfg.Events.Addr().String())
		addrs[1] = net.JoinHostPort(host, "0")
	}
	if cfg.EventsReplay, err = listenTCP(addrs[1]); err != nil {
		return errors.Join(err, cfg.Events.Close())
	}
	return nil
}

// reachable is an address that we listen on as others reach it: at the host of another one of ours, if it is on all.
func reachable(a net.Addr, ours string) string {
	host, port, err := net.SplitHostPort(a.String())
	if ip := net.ParseIP(host); err != nil || ip != nil && !ip.IsUnspecified() {
		return a.String()
	}
	host, _, _ = net.SplitHostPort(ours)
	return net.JoinHostPort(host, port)
}

// workerListing keeps a worker's entry: what it is is known once the model is loaded, its daemon comes and goes.
type workerListing struct {
	reg   *registry.Registry // nil for none
	cfg   *worker.Config
	ready string

	mu    sync.Mutex // guards what follows: both callbacks come from goroutines of their own
	entry registry.Worker
	kept  *registry.Announcement
}

func (l *workerListing) onReady(i worker.Info) {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := &l.entry
	if e.Addr == "" {
		e.Addr = i.Addr
	}
	if l.cfg.Events != nil {
		e.Events, e.EventsReplay = reachable(l.cfg.Events.Addr(), e.Addr), reachable(l.cfg.EventsReplay.Addr(), e.Addr)
	}
	e.Model, e.Fingerprint = i.Model, hex.EncodeToString(i.Fingerprint[:])
	e.BlockTokens, e.Blocks, e.ContextTokens = uint32(i.BlockTokens), uint32(i.Blocks), uint32(i.Context)
	e.TensorParallel = uint32(i.Ranks)
	e.PID, e.Host, e.Started = os.Getpid(), hostname(), time.Now()
	if l.reg != nil {
		var err error
		if l.kept, err = l.reg.Keep(registry.KindWorker, e.ID, *e); err != nil {
			l.cfg.Logger.Error("worker is not listed", "err", err)
		}
	}
	if err := supervise.WriteReady(l.ready, os.Getpid(), i.Addr); err != nil {
		l.cfg.Logger.Error("no ready file", "err", err)
	}
}

func (l *workerListing) onNode(n *nodeclient.Info) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.entry.NodeID, l.entry.NodeData = "", ""
	if n != nil {
		l.entry.NodeID, l.entry.NodeData = n.NodeID, n.DataAddr
	}
	if l.kept == nil {
		return
	}
	if err := l.kept.Update(l.entry); err != nil && !errors.Is(err, registry.ErrClosed) {
		l.cfg.Logger.Warn("listing is out of date", "err", err)
	}
}
