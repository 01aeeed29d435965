package main

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strconv"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/headrace/headrace/internal/config"
	"github.com/headrace/headrace/internal/registry"
	"github.com/headrace/headrace/internal/supervise"
	"github.com/headrace/headrace/worker/standin"
)

// standinsMax bounds the engines of one process.
const standinsMax = 1024

// standinFlags are what the subcommand was told.
type standinFlags struct {
	p         partFlags
	role      string
	modelName string
	table     string
	advertise string
	seed      uint64
	count     int
	instant   bool
	events    bool
	maxBody   config.Size
	tokenizer string
}

func (a *app) standin() *cobra.Command {
	var o standinFlags
	cmd := &cobra.Command{
		Use:   "standin",
		Short: "Run engines that compute nothing and take the time that a table says",
		Long: `Standin serves what a worker serves, with its metrics, KV events and native dialect, and computes nothing: a timing table says
how long prefill and decoding take, how many KV blocks there are and how fast they move (docs/standin.md). One process holds
many engines (--count) and thousands of streams; the same seed and requests give the same answers. It needs no node daemon.

With --instant it is a plain OpenAI server that answers at once with the same bytes, for benchmarks of what is in front of it.`,
		Example: `  headrace standin --listen 127.0.0.1:9101                      # one engine like a mid-size GPU
  headrace standin --count 4 --role prefill --etcd 127.0.0.1:2379 --table gpu.yaml
  headrace standin --instant --count 2 --listen 127.0.0.1:9101`,
	}
	fs := cmd.Flags()
	o.p.add(fs, "standin", "127.0.0.1:0")
	fs.StringVar(&o.role, "role", "both", "prefill, decode or both")
	fs.StringVar(&o.modelName, "model-name", "", "what clients call the model (default: stand-in)")
	fs.StringVar(&o.table, "table", "", "`file` with timings, YAML or JSON (default: a mid-size GPU)")
	fs.Uint64Var(&o.seed, "seed", 0, "what answers depend on beside the request; engines that share requests need the same")
	fs.IntVar(&o.count, "count", 1, "engines, on as many ports from --listen's on")
	fs.BoolVar(&o.instant, "instant", false, "answer at once with bytes made beforehand, without any account of time")
	fs.BoolVar(&o.events, "publish-events", false, "publish KV events, on any ports of --listen's host")
	fs.StringVar(&o.tokenizer, "write-tokenizer", "", "write what the router's --tokenizer needs for a token a byte into a `folder`, and end")
	addPeer(fs, &o.advertise, "advertise", "`HOST:PORT` that routers connect to, when --listen is not it")
	fs.Var(&o.maxBody, "max-body", "largest request body, as 32MiB (default 32MiB)")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		switch {
		case o.count < 1 || o.count > standinsMax:
			return config.Misused(fmt.Errorf("--count %d: it must be 1 to %d", o.count, standinsMax))
		case o.role != "prefill" && o.role != "decode" && o.role != "both":
			return config.Misused(fmt.Errorf("--role %q: use prefill, decode or both", o.role))
		case o.advertise != "" && o.count > 1:
			return config.Misused(errors.New("--advertise names one engine, --count asks for several"))
		case o.instant && (o.table != "" || o.events || len(o.p.etcd) > 0):
			return config.Misused(errors.New("--instant goes without --table, --publish-events and --etcd"))
		}
		if o.tokenizer != "" {
			return standin.WriteTokenizer(o.tokenizer)
		}
		log, err := a.logger()
		if err != nil {
			return err
		}
		table := standin.DefaultTable()
		if o.table != "" {
			if table, err = standin.LoadTable(o.table); err != nil {
				return config.Misused(err)
			}
		}
		ctx, stop := signalled(cmd, o.p.parentFD, true)
		defer stop()
		listeners, err := listenRow(o.p.listen, o.count)
		if err != nil {
			return err
		}
		if o.instant {
			return o.runInstant(ctx, listeners, log)
		}
		return listed(ctx, o.p.etcd, log, func(ctx context.Context, reg *registry.Registry) error {
			return o.run(ctx, reg, table, listeners, log)
		})
	}
	return cmd
}

// listenRow opens n ports from addr's on.
func listenRow(addr string, n int) ([]net.Listener, error) {
	first, err := listenTCP(addr)
	if err != nil {
		return nil, err
	}
	list := []net.Listener{first}
	host, portText, _ := net.SplitHostPort(addr)
	port, _ := strconv.Atoi(portText)
	for i := 1; i < n; i++ {
		next := 0
		if port != 0 {
			next = port + i
		}
		l, err := net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(next)))
		if err != nil {
			for _, open := range list {
				_ = open.Close()
			}
			return nil, err
		}
		list = append(list, l)
	}
	return list, nil
}

// together runs f for each listener until ctx ends or one of them breaks.
func together(ctx context.Context, listeners []net.Listener, f func(ctx context.Context, i int, l net.Listener) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var running sync.WaitGroup
	errs := make([]error, len(listeners))
	for i, l := range listeners {
		running.Go(func() {
			defer cancel()
			errs[i] = f(ctx, i, l)
		})
	}
	running.Wait()
	return errors.Join(errs...)
}

func (o *standinFlags) runInstant(ctx context.Context, listeners []net.Listener, log *slog.Logger) error {
	x := &standin.Instant{Model: o.modelName}
	log.Info("stand-in serves at once", "url", "http://"+listeners[0].Addr().String()+"/v1", "count", len(listeners))
	if err := supervise.WriteReady(o.p.ready, os.Getpid(), listeners[0].Addr().String()); err != nil {
		return err
	}
	return together(ctx, listeners, func(ctx context.Context, _ int, l net.Listener) error { return x.Serve(ctx, l) })
}

func (o *standinFlags) run(ctx context.Context, reg *registry.Registry, table standin.Table, listeners []net.Listener, log *slog.Logger) error {
	if o.modelName == "" {
		o.modelName = "stand-in"
	}
	if err := supervise.WriteReady(o.p.ready, os.Getpid(), listeners[0].Addr().String()); err != nil {
		return err
	}
	return together(ctx, listeners, func(ctx context.Context, i int, l net.Listener) error {
		s := &standin.Server{Listener: l, Config: standin.Config{Model: o.modelName, Role: o.role, Table: table, Seed: o.seed, Logger: log}}
		if o.maxBody > 0 {
			s.BodyMax = int64(o.maxBody) + 64<<10
		}
		entry, err := o.open(s, i, reg != nil)
		if err != nil {
			return errors.Join(err, l.Close())
		}
		log.Info("stand-in serves", "id", entry.ID, "url", "http://"+l.Addr().String()+"/v1", "role", o.role, "model", o.modelName)
		if reg != nil {
			if _, err := reg.Keep(registry.KindWorker, entry.ID, entry); err != nil {
				log.Error("stand-in is not listed", "err", err)
			}
		}
		return s.Run(ctx)
	})
}

// open opens what else an engine listens on, and describes it.
func (o *standinFlags) open(s *standin.Server, i int, peers bool) (registry.Worker, error) {
	addr := s.Listener.Addr().String()
	host, _, _ := net.SplitHostPort(addr)
	fingerprint := s.Config.Fingerprint()
	w := registry.Worker{
		Role: o.role, Model: o.modelName, Addr: addr, Dialect: "native", Fingerprint: hex.EncodeToString(fingerprint[:]), Engine: "stand-in",
		BlockTokens: uint32(s.Config.Table.BlockTokens), Blocks: uint32(s.Config.Table.Blocks), ContextTokens: uint32(s.Config.Table.Context),
		TensorParallel: 1, PID: os.Getpid(), Host: hostname(), Started: time.Now(),
	}
	if w.ID = defaultID("", "standin", addr); o.p.id != "" {
		if w.ID = o.p.id; o.count > 1 {
			w.ID += "-" + strconv.Itoa(i)
		}
	}
	if o.advertise != "" {
		w.Addr = o.advertise
	}
	var err error
	listen := func(at *net.Listener, shown *string) {
		if err != nil {
			return
		}
		if *at, err = net.Listen("tcp", net.JoinHostPort(host, "0")); err == nil {
			*shown = reachable((*at).Addr(), w.Addr)
		}
	}
	if peers {
		listen(&s.Config.Peers, &w.NodeData)
		w.NodeID = "at-" + w.ID // KV moves between the stand-ins themselves
	}
	if o.events {
		listen(&s.Events, &w.Events)
		listen(&s.EventsReplay, &w.EventsReplay)
	}
	return w, err
}
