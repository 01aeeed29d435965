package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"os/signal"
	"regexp"
	"strings"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/headrace/headrace/internal/config"
	"github.com/headrace/headrace/internal/registry"
	"github.com/headrace/headrace/internal/supervise"
	"github.com/headrace/headrace/internal/tracing"
	"github.com/headrace/headrace/internal/version"
	"github.com/headrace/headrace/router"
	"github.com/headrace/headrace/router/dialects"
	"github.com/headrace/headrace/router/pairing"
	"github.com/headrace/headrace/router/tokenize"
)

// drainTimeout is how long a router that was told to stop lets streams go on.
const drainTimeout = 10 * time.Second

// liveHeap is what tells a leak from garbage: the bytes that the last collection found in use.
var liveHeap = regexp.MustCompile(`^/gc/heap/live:bytes$`)

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
		queue     queueFlags
		access    string
		spans     tracing.Config
		migrate   string
		moves     int
	)
	cmd := &cobra.Command{
		Use:     "router",
		Short:   "Run the OpenAI front, which shares requests between prefill and decode workers",
		Example: `  headrace router --etcd 10.0.0.1:2379 --listen 0.0.0.0:8000 --cluster-key-file /etc/headrace/cluster.key --api-keys-file keys.txt`,
	}
	fs := cmd.Flags()
	p.add(fs, "router", "127.0.0.1:8000")
	addListen(fs, &admin, "admin", "127.0.0.1:0", "`address` of /metrics, /status and /debug; who comes from another host must show the cluster key")
	fs.StringSliceVar(&cfg.AdminHosts, "admin-host", nil, "`names` under which the admin address answers, beside addresses and localhost")
	fs.BoolVar(&cfg.AdminOpen, "admin-open", false, "answer at the admin address without the cluster key, too")
	addPeer(fs, &advertise, "advertise", "`HOST:PORT` that clients connect to, when --listen is not it")
	fs.StringVar(&cfg.APIKeysFile, "api-keys-file", "", "`file` with the lines that \"headrace key\" makes; it is read again when it changes and at SIGHUP (default: no keys are asked for)")
	fs.StringVar(&cfg.TLSCert, "tls-cert", "", "PEM `file` with the certificate, and its chain, that clients are shown: the router then speaks HTTPS; read again when it changes and at SIGHUP (default: no TLS)")
	fs.StringVar(&cfg.TLSKey, "tls-key", "", "PEM `file` with the certificate's key")
	addSpan(fs, &cfg.RequestTimeout, "request-timeout", 5*time.Minute, "longest a request may take")
	fs.IntVar(&cfg.MaxConcurrent, "max-concurrent", 512, "answers made at once (a request for n counts n)")
	fs.IntVar(&cfg.MaxQueue, "max-queue", 512, "requests waiting; more are refused with 429")
	queue.add(fs, &cfg)
	addBreaking(fs, &cfg.Breaking)
	fs.DurationVar(&cfg.HedgeAfter, "hedge-after", 0, "ask a second worker when a request's first one has answered nothing for so long, and take what comes first; it counts as a retry (0: off)")
	fs.Var(&maxBody, "max-body", "largest request body, as 32MiB; workers have the same limit (default 32MiB)")
	addSpan(fs, &drain, "drain-timeout", drainTimeout, "longest that streams may go on after SIGTERM")
	addSpan(fs, &cfg.NixlLease, "nixl-lease", dialects.DefaultNixlLease, "for how long a prefill vLLM with a NixlConnector keeps blocks (its kv_lease_duration)")
	addPolicy(fs, &policy)
	fs.StringArrayVar(&tokens, "tokenizer", nil, "`[MODEL=]PATH` of a model's folder or GGUF file, for policies that look at prefixes; may be repeated (default: they go by bytes)")
	fs.StringVar(&cfg.SessionHeader, "session-header", "X-Session-Id", "`header` by which clients say what belongs together: it stays with the same workers (-: none)")
	addSpan(fs, &cfg.SessionTTL, "session-ttl", 10*time.Minute, "how long a session is remembered after its last request")
	fs.StringVar(&migrate, "migrate", "default", "`dialects` whose streams are remembered, so that another engine can go on when theirs dies: a list as vllm,openai=tokens; default: all; none")
	fs.IntVar(&moves, "moves", 4, "streams that leave a draining worker at the same time, with their KV cache, for workers that go on with them (0: they end where they are)")
	fs.StringVar(&access, "access-log", "", "`FILE` that gets a line a request, as --log-format says; - for standard error, off for none (default: standard error, unless --log-level is above info)")
	fs.StringVar(&spans.Endpoint, "otlp-endpoint", "", "`http://HOST:4317` of an OpenTelemetry collector's gRPC receiver that gets the spans of requests (default: what OTEL_EXPORTER_OTLP_ENDPOINT says, else none)")
	fs.Float64Var(&spans.Ratio, "trace-ratio", -1, "`share` of requests traced where the client has not decided, 0 to 1 (default: what OTEL_TRACES_SAMPLER says, else all)")
	addKeyFile(fs, &keyFile)
	cmd.RunE = func(cmd *cobra.Command, _ []string) (err error) {
		if cfg.Migration, err = dialects.ParseMigration(migrate); err != nil {
			return config.Misused(err)
		}
		if cfg.Moves = moves; moves == 0 {
			cfg.Moves = -1
		}
		if cfg.Policy, err = pairing.New(policy, rand.Uint64()); err != nil {
			return config.Misused(err)
		}
		cfg.MaxBodyBytes = int(maxBody)
		if err := errors.Join(queue.apply(&cfg), cfg.Validate(), spans.Check(), checkTokenizers(tokens)); err != nil {
			return config.Misused(err)
		}
		switch {
		case admin == "":
			return config.Misused(errors.New("--admin cannot be empty: the router says there how it is (127.0.0.1:0 for any port)"))
		case len(p.etcd) == 0:
			return config.Misused(errors.New("--etcd is needed: the router finds workers there"))
		}
		if cfg.Logger, err = a.logger(); err != nil {
			return err
		}
		closeAccess, err := a.openAccess(&cfg, access)
		if err != nil {
			return err
		}
		defer closeAccess()
		cfg.Tokens = loadTokens(tokens, cfg.Logger)
		if cfg.ClusterKey, err = clusterKey(keyFile, p.dataDir); err != nil {
			return err
		}
		cfg.Version = version.Get().Version
		ctx, stop := signalled(cmd, p.parentFD, !rereads(&cfg) || terminal())
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
		entry.Admin = adminFound(entry.Admin, entry.Addr)
		spans.Service, spans.Instance, spans.Version = "headrace-router", entry.ID, cfg.Version
		if cfg.Tracer, err = tracing.New(ctx, spans); err != nil {
			return config.Misused(err)
		}
		defer closeTracer(cfg.Tracer, cfg.Logger)
		return listed(ctx, p.etcd, cfg.Logger, func(ctx context.Context, reg *registry.Registry) error {
			return serveRouter(ctx, reg, cfg, entry, front, back, drain, p.ready)
		})
	}
	return cmd
}

// adminFound is an admin address as others find it: where it listens on all of the host's addresses, at the host of the public one.
func adminFound(admin, public string) string {
	host, port, _ := net.SplitHostPort(admin)
	if ip := net.ParseIP(host); ip == nil || !ip.IsUnspecified() {
		return admin
	}
	at, _, err := net.SplitHostPort(public)
	if ip := net.ParseIP(at); err != nil || at == "" || ip != nil && (ip.IsUnspecified() || ip.IsLoopback()) {
		return admin
	}
	return net.JoinHostPort(at, port)
}

// spansTimeout is how long a router that stops tries to get rid of its last spans.
const spansTimeout = 2 * time.Second

func closeTracer(t *tracing.Tracer, log *slog.Logger) {
	ctx, cancel := context.WithTimeout(context.Background(), spansTimeout)
	defer cancel()
	if err := t.Close(ctx); err != nil {
		log.Warn("the last spans could not be exported", "err", err)
	}
}

// openAccess opens where the access log goes.
func (a *app) openAccess(cfg *router.Config, path string) (closeIt func(), err error) {
	cfg.AccessJSON = a.logFormat == "json"
	switch {
	case path == "off", path == "" && !cfg.Logger.Enabled(context.Background(), slog.LevelInfo):
	case path == "-", path == "":
		cfg.AccessLog = os.Stderr
	default:
		f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o640)
		if err != nil {
			return nil, config.Misused(fmt.Errorf("open access log: %w; give --access-log a file that can be written, - or off", err))
		}
		cfg.AccessLog = f
		return func() { _ = f.Close() }, nil
	}
	return func() {}, nil
}

// ofModel splits MODEL=PATH; a path alone is for all models.
func ofModel(item string) (model, path string) {
	model, path, ok := strings.Cut(item, "=")
	if !ok {
		return "", item
	}
	return model, path
}

// checkTokenizers finds what is not there, and what is there twice.
func checkTokenizers(list []string) error {
	seen := map[string]bool{}
	for _, item := range list {
		model, path := ofModel(item)
		if _, err := os.Stat(path); err != nil {
			return fmt.Errorf("--tokenizer %q: %w; give a model's folder or GGUF file", item, err)
		}
		if seen[model] {
			return fmt.Errorf("--tokenizer %q: model %q has one already", item, model)
		}
		seen[model] = true
	}
	return nil
}

// loadTokens loads tokenizers. A model whose tokens cannot be told is routed by the bytes of its requests.
func loadTokens(list []string, log *slog.Logger) map[string]router.Tokens {
	out := map[string]router.Tokens{}
	for _, item := range list {
		model, path := ofModel(item)
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
	cfg.Registry = prometheus.NewRegistry()
	cfg.Registry.MustRegister(collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
		collectors.NewGoCollector(collectors.WithGoCollectorRuntimeMetrics(collectors.GoRuntimeMetricsRule{Matcher: liveHeap})))
	cfg.Warm = func(ctx context.Context, of string) (io.ReadCloser, error) {
		return warmFrom(ctx, table.Snapshot().Routers, entry, of, cfg.ClusterKey)
	}
	router.ReserveHeap()
	r, err := router.New(cfg)
	if err != nil {
		return err
	}
	if rereads(&cfg) && !terminal() { // there it means that the terminal is gone
		defer reloadAtHangup(r)()
	}
	warnOfAdmin(cfg.Logger, back.Addr(), cfg.AdminOpen)
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

// warmFrom gets the prefix index of the first of the other routers that gives it. Admin addresses on loopback are those of
// this host's routers alone.
func warmFrom(ctx context.Context, others []registry.Router, own registry.Router, of string, key []byte) (io.ReadCloser, error) {
	err := errors.New("there is no other router")
	for _, o := range others {
		host, _, _ := net.SplitHostPort(o.Admin)
		if ip := net.ParseIP(host); o.ID == own.ID || o.Admin == "" || ip != nil && ip.IsLoopback() && o.Host != own.Host {
			continue
		}
		var body io.ReadCloser
		if body, err = router.FetchPrefixes(ctx, o.Admin, of, key); err == nil {
			return body, nil
		}
	}
	return nil, err
}

// rereads tells whether there are files that SIGHUP has read again.
func rereads(cfg *router.Config) bool { return cfg.APIKeysFile != "" || cfg.TLSCert != "" }

// reloadAtHangup has SIGHUP read the files of API keys and of the certificate again, until stop is called.
func reloadAtHangup(r *router.Router) (stop func()) {
	c, done := make(chan os.Signal, 1), make(chan struct{})
	signal.Notify(c, syscall.SIGHUP)
	go func() {
		for {
			select {
			case <-c:
				_ = errors.Join(r.ReloadKeys(), r.ReloadTLS()) // they log what came of it
			case <-done:
				return
			}
		}
	}()
	return func() { signal.Stop(c); close(done) }
}

// warnOfAdmin says that others may reach an admin address, if so.
func warnOfAdmin(log *slog.Logger, addr net.Addr, open bool) {
	if tcp, ok := addr.(*net.TCPAddr); ok && open && !tcp.IP.IsLoopback() {
		log.Warn("the admin address can be reached from other hosts and asks for nothing (--admin-open): put it on loopback (--admin 127.0.0.1:PORT), or behind something that asks who is there", "admin", addr.String())
	}
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
