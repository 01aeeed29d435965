package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/headrace/headrace/internal/config"
	"github.com/headrace/headrace/internal/registry"
	"github.com/headrace/headrace/internal/routers"
	"github.com/headrace/headrace/scheduler/connector"
	"github.com/headrace/headrace/scheduler/operate"
	"github.com/headrace/headrace/scheduler/planner"
	"github.com/headrace/headrace/scheduler/sim"
)

// planFlags say how it is planned; `headrace up` has them as well.
type planFlags struct {
	specs              []string
	interval           time.Duration
	limits             planner.Limits
	ttft, itl          time.Duration
	table, history     string
	startMax, drainMax time.Duration
}

// planFlagsHandedOn are those that `headrace up` gives to its planner.
var planFlagsHandedOn = []string{"planner", "planner-interval", "planner-table", "planner-start-timeout", "planner-drain-timeout", "planner-history", "min-gpus", "ttft", "itl"}

func (f *planFlags) add(fs *pflag.FlagSet) {
	fs.StringSliceVar(&f.specs, "planner", nil, "one of "+strings.Join(planner.Names(), ", ")+", as NAME:KEY=NUMBER:KEY=NUMBER")
	addSpan(fs, &f.interval, "planner-interval", time.Second, "between two looks at the cluster; planners decide at intervals of their own")
	fs.StringVar(&f.table, "planner-table", "", "how fast engines are, for planners that look into it: a `file` that headrace profile wrote, or one of "+strings.Join(sim.Tables(), ", "))
	addSpan(fs, &f.startMax, "planner-start-timeout", 15*time.Minute, "how long an engine may take until it serves, before it is given up")
	addSpan(fs, &f.drainMax, "planner-drain-timeout", 30*time.Minute, "longest that an engine may drain before it is stopped with what it has")
	fs.StringVar(&f.history, "planner-history", "", "`folder` for event files of what the planner sees and does, for TensorBoard (default: none are kept)")
	fs.IntVar(&f.limits.MinGPUs, "min-gpus", 0, "least that is planned: engines are added until there are as many")
	fs.IntVar(&f.limits.MaxGPUs, "max-gpus", 8, "the planner's budget; on a CPU each engine counts as one GPU, or as its --prefill-tp or --decode-tp")
	fs.DurationVar(&f.ttft, "ttft", 2*time.Second, "goal for the time to the first token")
	fs.DurationVar(&f.itl, "itl", 50*time.Millisecond, "goal for the mean time between tokens")
}

// make checks everything by making the planner.
func (f *planFlags) make() (planner.Planner, error) {
	if len(f.specs) != 1 {
		return nil, fmt.Errorf("--planner %s: give one of %s", strings.Join(f.specs, ","), strings.Join(planner.Names(), ", "))
	}
	switch {
	case f.interval <= 0 || f.startMax <= 0 || f.drainMax <= 0:
		return nil, errors.New("--planner-interval, --planner-start-timeout and --planner-drain-timeout must be above 0")
	case f.ttft <= 0 || f.itl <= 0:
		return nil, errors.New("--ttft and --itl must be above 0")
	}
	if err := f.limits.Check(); err != nil {
		return nil, fmt.Errorf("--max-gpus: %w", err)
	}
	c := planner.Config{Limits: f.limits, TTFT: f.ttft, ITL: f.itl}
	if f.table != "" {
		t, err := timingTable(f.table)
		if err != nil {
			return nil, fmt.Errorf("--planner-table: %w", err)
		}
		c.Profile = t.Profile(f.limits.Undivided)
	}
	return planner.New(f.specs[0], c)
}

// timingTable reads a table of the simulator by its name, or from a file.
func timingTable(name string) (*sim.Table, error) {
	if !strings.ContainsAny(name, "./") {
		return sim.TableNamed(name)
	}
	data, err := os.ReadFile(name)
	if err != nil {
		return nil, err
	}
	return sim.ParseTable(data)
}

// plannerPart is `headrace planner`.
type plannerPart struct {
	planFlags
	id, admin, dataDir, keyFile, supervisor, state, model, namespace string
	etcd                                                             []string
	prefillGPUs, decodeGPUs, parentFD                                int
	undivided, dry                                                   bool
}

func (a *app) planner() *cobra.Command {
	var p plannerPart
	cmd := &cobra.Command{
		Use:   "planner",
		Short: "Decide, at intervals, how many engines there should be",
		Long: `Planner looks at the routers and workers of one model and namespace, and decides how many engines there should be. Under "headrace up
--planner" it has them started and stopped; anywhere else it says what it would do (--dry-run). Of several with the same model and namespace
one leads, and the others stand by. "headrace status" shows what it sees and why it decided what.`,
		Example: `  headrace up --planner reactive --max-gpus 6
  headrace planner --etcd 10.0.0.1:2379 --model-name llama --planner reactive --max-gpus 16 --dry-run`,
	}
	fs := cmd.Flags()
	p.add(fs)
	fs.StringVar(&p.id, "id", "", "name in the cluster (default HOST-planner-PORT)")
	addListen(fs, &p.admin, "admin", "127.0.0.1:0", "`address` of /metrics and /status")
	addDataDir(fs, &p.dataDir)
	addEtcd(fs, &p.etcd, "etcd endpoints of the registry, `HOST:PORT,...`")
	addClusterKey(fs, &p.keyFile)
	fs.StringVar(&p.supervisor, "supervisor", "", "`socket` of the headrace up that starts and stops engines")
	fs.StringVar(&p.state, "state-file", "", "`file` for what must survive a restart (default: it is kept in the registry)")
	fs.StringVar(&p.model, "model-name", "", "what clients call the model")
	fs.StringVar(&p.namespace, "namespace", "", "that of the workers (default: none)")
	fs.IntVar(&p.prefillGPUs, "prefill-gpus", 1, "GPUs of a prefill engine")
	fs.IntVar(&p.decodeGPUs, "decode-gpus", 1, "GPUs of a decode engine, or of one that does both")
	fs.BoolVar(&p.undivided, "undivided", false, "engines that prefill and decode, in place of some for each")
	fs.BoolVar(&p.dry, "dry-run", false, "say what would be done, and do nothing")
	fs.IntVar(&p.parentFD, "parent-fd", 0, "descriptor of the supervisor's pipe")
	_ = fs.MarkHidden("parent-fd")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error { return a.runPlanner(cmd, &p) }
	return cmd
}

func (p *plannerPart) check() error {
	switch {
	case len(p.etcd) == 0:
		return errors.New("--etcd is needed: the planner finds routers and workers there")
	case p.model == "":
		return errors.New("--model-name is needed: a planner is for one model")
	case p.supervisor == "" && !p.dry:
		return errors.New("nothing starts engines here: run headrace up --planner, or use --dry-run")
	}
	p.limits.Undivided = p.undivided
	p.limits.EngineGPUs = planner.Pools{Prefill: p.prefillGPUs, Decode: p.decodeGPUs}
	if p.undivided {
		p.limits.EngineGPUs = planner.Pools{Whole: p.decodeGPUs}
	}
	return nil
}

func (a *app) runPlanner(cmd *cobra.Command, p *plannerPart) error {
	if err := p.check(); err != nil {
		return config.Misused(err)
	}
	made, err := p.make()
	if err != nil {
		return config.Misused(err)
	}
	log, err := a.logger()
	if err != nil {
		return err
	}
	ctx, stop := signalled(cmd, p.parentFD, true)
	defer stop()
	if ctx, err = withClusterKey(ctx, p.keyFile, p.dataDir); err != nil {
		return err
	}
	admin, err := net.Listen("tcp", p.admin)
	if err != nil {
		return fmt.Errorf("open admin address: %w", err)
	}
	defer admin.Close()
	reg, err := registry.Open(ctx, registry.Config{Endpoints: p.etcd, Logger: log})
	if err != nil {
		return err
	}
	defer reg.Close()
	table, err := reg.Watch(context.WithoutCancel(ctx))
	if err != nil {
		return err
	}
	prom := prometheus.NewRegistry()
	prom.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	w := &watcher{table: table, model: p.model, namespace: p.namespace}
	if name, _, _ := strings.Cut(p.specs[0], ":"); name == "sla" || name == "predictive" { // the others look at what is there alone
		w.feed = &feed{model: p.model}
	}
	defer w.asker.Close()
	cfg := operate.Config{Spec: p.specs[0], Planner: made, Limits: p.limits, Namespace: p.namespace, Model: p.model, Look: w.look, Drain: reg.Drain, DryRun: p.dry,
		Interval: p.interval, StartMax: p.startMax, DrainMax: p.drainMax, Logger: log, Metrics: operate.NewMetrics(prom)}
	if cfg.Connector = (&connector.Dry{List: w.list}); p.supervisor != "" {
		local := connector.NewLocal(p.supervisor)
		defer local.Close()
		if cfg.Connector = local; p.dry {
			cfg.Connector = &connector.Dry{List: local.Cluster}
		}
	}
	if p.history != "" {
		cfg.History = p.keep
	}
	op, err := operate.New(cfg)
	if err != nil {
		return config.Misused(err)
	}
	id := defaultID(p.id, "planner", admin.Addr().String())
	_, err = reg.Keep(registry.KindPlanner, id, registry.Planner{ID: id, Namespace: p.namespace, Model: p.model, Admin: adminFound(admin.Addr().String(), ""), PID: os.Getpid(), Host: hostname(), Started: time.Now()})
	if err != nil {
		return err
	}
	served := serveAdmin(admin, op, prom)
	defer served()
	return lead(ctx, reg, op, p, id, log)
}

// keep begins an event file, one for each time that a planner leads.
func (p *plannerPart) keep(epoch time.Time) (operate.Watch, func() error, error) {
	h, err := newHistory(p.history, fmt.Sprintf("%d.%d", time.Now().Unix(), os.Getpid()), epoch, planner.History{Limits: p.limits, TTFT: p.ttft, ITL: p.itl})
	if err != nil {
		return nil, nil, fmt.Errorf("--planner-history: %w", err)
	}
	return h.watch, h.close, nil
}

// lead has the operator plan whenever this process is the leader of its model and namespace.
func lead(ctx context.Context, reg *registry.Registry, op *operate.Operator, p *plannerPart, id string, log *slog.Logger) error {
	for {
		l, err := reg.Lead(ctx, registry.Scope(p.namespace, p.model), id)
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			log.Warn("stand for leader again", "err", err)
			select {
			case <-time.After(time.Second):
			case <-ctx.Done():
			}
			continue
		}
		log.Info("leads", "model", p.model, "namespace", p.namespace)
		var store operate.Store = &operate.Shared{Lead: l}
		if p.state != "" {
			store = &operate.File{Path: p.state, Lead: l}
		}
		leading, cancel := context.WithCancel(ctx)
		stop := make(chan struct{})
		go func() {
			defer close(stop)
			select {
			case <-l.Lost():
				cancel()
			case <-leading.Done():
			}
		}()
		err = op.Lead(leading, store)
		cancel()
		<-stop
		if ctx.Err() != nil && err == nil && p.state == "" {
			err = op.Retire(context.WithoutCancel(ctx)) // a file is removed by who started this process: it knows an end from a crash
		}
		err = errors.Join(err, l.Resign())
		if ctx.Err() != nil {
			return err
		}
		log.Warn("leads no longer", "err", err)
		select { // what is wrong may stay so
		case <-time.After(time.Second):
		case <-ctx.Done():
			return nil
		}
	}
}

// serveAdmin answers at the admin address until what it returns is called.
func serveAdmin(l net.Listener, op *operate.Operator, prom *prometheus.Registry) (stop func()) {
	mux := http.NewServeMux()
	mux.Handle("GET /status", op)
	mux.Handle("GET /metrics", promhttp.HandlerFor(prom, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("ok\n")) })
	srv := &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 10 * time.Second, WriteTimeout: 10 * time.Second, IdleTimeout: time.Minute}
	done := make(chan struct{})
	go func() { defer close(done); _ = srv.Serve(l) }()
	return func() { _ = srv.Close(); <-done }
}

// watcher looks at the registry and the routers.
type watcher struct {
	table            *registry.Table
	asker            routers.Asker
	model, namespace string
	feed             *feed // nil for planners that do not look at single requests
}

// workers are those of the model and namespace.
func (w *watcher) workers() []registry.Worker {
	var list []registry.Worker
	for _, x := range w.table.Snapshot().Workers {
		if x.Model == w.model && x.Namespace == w.namespace {
			list = append(list, x)
		}
	}
	return list
}

func (w *watcher) look(ctx context.Context, epoch time.Time) (*operate.Seen, error) {
	if err := w.table.Err(); err != nil {
		return nil, fmt.Errorf("the registry cannot be followed: %w", err)
	}
	listed := w.table.Snapshot().Routers
	if len(listed) == 0 {
		return nil, errors.New("no router is listed, so nobody knows the load")
	}
	seen := &operate.Seen{Workers: w.workers(), Routers: w.asker.Ask(ctx, listed)}
	for i := range seen.Routers {
		if s := &seen.Routers[i]; s.Err != nil {
			return nil, fmt.Errorf("router %s does not answer: %w", s.Router.ID, s.Err)
		}
	}
	if w.feed != nil {
		if err := w.feed.read(ctx, &w.asker, listed, epoch, seen); err != nil {
			return nil, fmt.Errorf("ask routers for their last requests: %w", err)
		}
	}
	return seen, nil
}

// list has the engines that the registry knows, where nobody starts any.
func (w *watcher) list(context.Context) (*connector.Cluster, error) {
	c := &connector.Cluster{}
	for _, x := range w.workers() {
		role := map[string]string{registry.RolePrefill: connector.Prefill, registry.RoleDecode: connector.Decode}[x.Role]
		if role == "" {
			role = connector.Whole
		}
		c.Engines = append(c.Engines, connector.Engine{Name: x.ID, ID: x.ID, Role: role})
	}
	return c, nil
}
