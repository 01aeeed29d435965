package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/headrace/headrace/internal/config"
	"github.com/headrace/headrace/internal/registry"
	"github.com/headrace/headrace/internal/sidecar"
	"github.com/headrace/headrace/internal/supervise"
)

// socketWait is how long a node daemon that is started beside the engine may take to open its socket.
const socketWait = 30 * time.Second

// socketLooks is how often a socket is looked for before it is tried.
const socketLooks = 20

// engineFlags are the options of `headrace engine`, some of them `headrace up`'s too.
type engineFlags struct {
	p             partFlags
	engine        string
	command       string
	env           []string
	watch         string
	dialect       string
	kvAddress     string
	kvEngine      string
	role          string
	model         string
	modelName     string
	weight        *float64
	namespace     string
	socket        string
	node          string
	advertise     string
	python        string
	connectorPath string
	device        string
	gpus          []string
	shape         sidecar.Shape
	printCommand  bool
	start         time.Duration
	drain         time.Duration
	stop          time.Duration
}

func (a *app) engine() *cobra.Command {
	var o engineFlags
	cmd := &cobra.Command{
		Use:   "engine [flags] [-- ARGUMENTS OF THE ENGINE]",
		Short: "Run an engine that is not Headrace's own, as vLLM, and announce it",
		Long: `Engine starts an inference engine from a command template, or watches one that runs already (--watch), and keeps it in the
registry as what it says of itself: while it is well it is listed, when it stops answering it is taken out. It stops the engine
in order, and no process of the engine outlives it, however it ends.

Templates are named with --engine (vllm: with Headrace's connector, which is in this program; vllm-nixl: with vLLM's own
NixlConnector; vllm-plain: whole requests only) or given with --command. Placeholders in them, and in what stands behind --:
{model} {model-name} {host} {port} {role} {kv-role} {engine-id} {socket} {node} {gpus} {python}
{threads} {bind-host}, and {port:NAME} for further
free ports. --print-command prints what would be started.`,
		Example: `  headrace engine --engine vllm --model /models/llama --role prefill --etcd 10.0.0.1:2379 --socket /run/headrace/node.sock --listen 10.0.0.7:8001 -- --max-model-len 8192
  headrace engine --engine vllm-plain --model /models/llama --print-command
  headrace engine --command 'my-server --weights {model} --bind {host}:{port}' --model w.bin --etcd 10.0.0.1:2379
  headrace engine --command 'python -m sglang.launch_server --model-path {model} --host {host} --port {port} --disaggregation-mode {role}' --role prefill --model llama --etcd 10.0.0.1:2379 --listen 10.0.0.7:8001
  headrace engine --watch http://10.0.0.7:8001 --etcd 10.0.0.1:2379`,
		Args: afterDash,
	}
	fs := cmd.Flags()
	o.p.add(fs, "engine", "127.0.0.1:0")
	o.addTemplate(fs)
	fs.StringVar(&o.watch, "watch", "", "`URL` of an engine that runs already, which is announced and never started nor stopped")
	addPeer(fs, &o.kvAddress, "kv-address", "`HOST:PORT` at which other engines find this one's own KV connector (default: as its command line and the engine itself say)")
	fs.StringVar(&o.kvEngine, "kv-engine", "", "`id` by which other engines know this one's connector (default: engine_id of its --kv-transfer-config)")
	fs.StringVar(&o.role, "role", "both", "prefill, decode or both")
	fs.StringVar(&o.model, "model", "", "`folder` of the model in Hugging Face's form, or whatever {model} is in the template")
	fs.StringVar(&o.modelName, "model-name", "", "what clients call the model (default: the folder's name)")
	o.weight = addWeight(fs)
	addNamespace(fs, &o.namespace)
	fs.StringVar(&o.socket, "socket", "", "`path` of the node daemon's unix socket (default DATA-DIR/node.sock)")
	fs.StringVar(&o.node, "node", "", "`id` of the node daemon (default: the one of that socket on this host)")
	addPeer(fs, &o.advertise, "advertise", "`HOST:PORT` that routers connect to, when --listen is not it")
	fs.IntVar(&o.shape.Threads, "threads", 0, "threads on a CPU (default: the engine's choice)")
	fs.Var(&o.shape.KVMemory, "kv-memory", "KV cache, as 4GiB (default: the engine's choice)")
	fs.IntVar(&o.shape.BlockTokens, "block-tokens", 0, "tokens of a KV block (default: the engine's choice)")
	fs.IntVar(&o.shape.TensorParallel, "tensor-parallel", 0, "ranks that share the model (default: one a GPU of --gpus)")
	fs.BoolVar(&o.printCommand, "print-command", false, "print the command line that would be started, and end")
	addSpan(fs, &o.start, "start-timeout", sidecar.StartTimeout, "how long the engine may take until it answers")
	addSpan(fs, &o.drain, "drain-timeout", sidecar.DrainTimeout, "longest that requests may go on after SIGTERM")
	addSpan(fs, &o.stop, "stop-timeout", sidecar.StopTimeout, "longest that the engine may take to end on SIGTERM")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		o.shape.Args = args
		if err := errors.Join(o.validate(), checkWeight(*o.weight)); err != nil {
			return config.Misused(err)
		}
		return a.runEngine(cmd, &o)
	}
	return cmd
}

// addTemplate adds what says how engines are started.
func (o *engineFlags) addTemplate(fs *pflag.FlagSet) {
	fs.StringVar(&o.engine, "engine", "", "`template` of the engine: "+strings.Join(sidecar.Names, ", "))
	fs.StringVar(&o.command, "command", "", "command `line` of an engine of another kind, with placeholders")
	fs.StringArrayVar(&o.env, "env", nil, "variable of the engine's environment, `NAME=VALUE`; may be repeated")
	fs.StringVar(&o.dialect, "dialect", "", "how routers talk to the engine: "+strings.Join(sidecar.Foreign, ", ")+" (default: as its command line and the engine itself say)")
	fs.StringVar(&o.python, "python", "", "Python `interpreter` that has vLLM (default: the one of the vllm on PATH)")
	fs.StringVar(&o.connectorPath, "connector-path", "", "`folder` with the connector's package headrace, or installed for the one that pip installed (default: the one in this program)")
	fs.StringVar(&o.device, "device", "auto", "auto, cpu or cuda: what vLLM runs on")
	fs.StringSliceVar(&o.gpus, "gpus", nil, "GPUs, as CUDA_VISIBLE_DEVICES has them: `0,1` (default: all)")
}

// afterDash takes arguments behind -- alone.
func afterDash(cmd *cobra.Command, args []string) error {
	if n := cmd.ArgsLenAtDash(); n > 0 || n < 0 && len(args) > 0 {
		return config.Misused(fmt.Errorf("unexpected argument %q; arguments of the engine stand behind --", args[0]))
	}
	return nil
}

func (o *engineFlags) validate() error {
	given := 0
	for _, s := range []string{o.engine, o.command, o.watch} {
		if s != "" {
			given++
		}
	}
	switch {
	case given != 1:
		return errors.New("one of --engine, --command and --watch is needed")
	case o.role != "prefill" && o.role != "decode" && o.role != "both":
		return fmt.Errorf("--role %q: use prefill, decode or both", o.role)
	case o.watch != "" && len(o.shape.Args) > 0:
		return errors.New("--watch starts nothing that arguments could be given to")
	case o.shape.Threads < 0 || o.shape.BlockTokens < 0 || o.shape.TensorParallel < 0:
		return errors.New("--threads, --block-tokens and --tensor-parallel cannot be negative")
	}
	return o.validateTemplate()
}

func (o *engineFlags) validateTemplate() error {
	switch {
	case o.engine != "" && !slices.Contains(sidecar.Names, o.engine):
		return fmt.Errorf("--engine %q: use %s, or --command for another", o.engine, strings.Join(sidecar.Names, ", "))
	case o.dialect != "" && !slices.Contains(sidecar.Foreign, o.dialect):
		return fmt.Errorf("--dialect %q: use one of %s", o.dialect, strings.Join(sidecar.Foreign, ", "))
	case o.device != "auto" && o.device != sidecar.DeviceCPU && o.device != sidecar.DeviceCUDA:
		return fmt.Errorf("--device %q: use auto, cpu or cuda", o.device)
	}
	if o.kvAddress != "" {
		if host, port, err := net.SplitHostPort(o.kvAddress); err != nil || host == "" || port == "" {
			return fmt.Errorf("--kv-address %q: use HOST:PORT", o.kvAddress)
		}
	}
	for _, e := range o.env {
		if name, _, ok := strings.Cut(e, "="); !ok || name == "" {
			return fmt.Errorf("--env %q: use NAME=VALUE", e)
		}
	}
	if o.command != "" {
		if _, err := sidecar.ParseTemplate(o.command); err != nil {
			return fmt.Errorf("--command: %w", err)
		}
	}
	return nil
}

func (a *app) runEngine(cmd *cobra.Command, o *engineFlags) error {
	log, err := a.logger()
	if err != nil {
		return err
	}
	ctx, hurry, stop := supervise.Signals(supervise.WatchParent(cmd.Context(), o.p.parentFD), true)
	defer stop()
	cfg, err := o.prepare(ctx)
	if err != nil {
		return err
	}
	if o.printCommand {
		_, err := fmt.Fprintln(a.out, cfg.Command.Line())
		return err
	}
	cfg.Logger, cfg.Output, cfg.Hurry = log, os.Stderr, hurry
	if o.p.parentFD > 0 {
		cfg.Hurry = nil // a dying supervisor's threads each send the parent-death signal
	}
	cfg.OnReady = func(w registry.Worker) {
		if err := supervise.WriteReady(o.p.ready, os.Getpid(), w.Addr); err != nil {
			log.Error("no ready file", "err", err)
		}
		if err := supervise.NotifySystemd(os.Getpid()); err != nil {
			log.Warn("systemd does not know that this serves", "err", err)
		}
	}
	if cfg.Entry.Dialect == sidecar.DialectVLLM && cfg.Command != nil {
		if err := awaitSocket(ctx, o.socket, log); err != nil {
			return err
		}
	}
	return listed(ctx, o.p.etcd, log, func(ctx context.Context, reg *registry.Registry) error {
		if reg != nil {
			cfg.Lister = &sidecar.Listing{Registry: reg}
			if cfg.Entry.Dialect == sidecar.DialectVLLM {
				table, err := watchPatiently(ctx, reg)
				if err != nil {
					return err
				}
				cfg.Daemon = &sidecar.Daemon{Socket: o.socket, Host: hostname(), Node: o.node, View: table.Snapshot, Changed: table.Changed, Client: &http.Client{Timeout: 2 * time.Second}}
			}
		}
		return sidecar.Run(ctx, *cfg)
	})
}

// awaitSocket waits for a daemon that is started at the same time: an engine that found none would serve without one.
func awaitSocket(ctx context.Context, path string, log *slog.Logger) error {
	deadline := time.NewTimer(socketWait)
	defer deadline.Stop()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for looks := 0; ; looks++ {
		served, known := sidecar.Listens(path)
		if served {
			return nil
		}
		if !known && looks > socketLooks { // a daemon in another network namespace, or a socket that a killed one left
			if c, err := net.Dial("unix", path); err == nil {
				return c.Close()
			}
		}
		if looks == 0 {
			log.Info("waiting for the node daemon", "socket", path)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		case <-deadline.C:
			return fmt.Errorf("no node daemon answers at %s; start `headrace node --socket %s`, or name its socket with --socket", path, path)
		}
	}
}

// prepare makes the sidecar's configuration: what to start, and what is known of it beforehand.
func (o *engineFlags) prepare(ctx context.Context) (*sidecar.Config, error) {
	if o.socket == "" {
		o.socket = filepath.Join(o.p.dataDir, "node.sock")
	}
	var err error
	if o.socket, err = filepath.Abs(o.socket); err != nil {
		return nil, err
	}
	cfg := &sidecar.Config{StartTimeout: o.start, DrainTimeout: o.drain, StopTimeout: o.stop}
	if o.watch != "" {
		err = o.prepareWatch(cfg)
	} else {
		err = o.prepareCommand(ctx, cfg)
	}
	if err != nil {
		return nil, err
	}
	e := &cfg.Entry
	e.Weight, e.Namespace = o.weight, o.namespace
	e.ID, e.Role, e.Host = defaultID(o.p.id, "engine", cfg.Addr), o.role, hostname()
	if e.Addr = o.advertise; e.Addr == "" {
		e.Addr = cfg.Addr
	}
	o.connect(cfg)
	return cfg, nil
}

// connect says how the engine is spoken with, as far as that is known before it runs: what the user says counts most, then
// its command line.
func (o *engineFlags) connect(cfg *sidecar.Config) {
	said := sidecar.Connector{Dialect: o.dialect, Engine: o.kvEngine}
	if host, port, err := net.SplitHostPort(o.kvAddress); err == nil {
		said.Host = host
		said.Port, _ = strconv.Atoi(port)
	}
	if cfg.Command != nil {
		said = said.Over(sidecar.ConnectorOf(cfg.Command))
	}
	if said.Dialect == "" && cfg.Entry.Dialect != sidecar.DialectOpenAI { // the template's
		said.Dialect = cfg.Entry.Dialect
	}
	if cfg.Connector = said; said.Dialect != "" {
		cfg.Entry.Dialect = said.Dialect
	}
}

func (o *engineFlags) prepareWatch(cfg *sidecar.Config) error {
	u, err := url.Parse(o.watch)
	if err != nil || u.Scheme != "http" || u.Host == "" || strings.Trim(u.Path, "/") != "" {
		return config.Misused(fmt.Errorf("--watch %q: use http://HOST:PORT", o.watch))
	}
	if cfg.Addr = u.Host; u.Port() == "" {
		cfg.Addr = net.JoinHostPort(u.Hostname(), "80")
	}
	cfg.Entry.Dialect = sidecar.DialectOpenAI
	return nil
}

func (o *engineFlags) prepareCommand(ctx context.Context, cfg *sidecar.Config) error {
	host, portText, err := net.SplitHostPort(o.p.listen)
	if err != nil {
		return config.Misused(fmt.Errorf("--listen %q: use HOST:PORT", o.p.listen))
	}
	port, err := strconv.Atoi(portText)
	if err != nil || port < 0 || port > 65535 {
		return config.Misused(fmt.Errorf("--listen %q: use HOST:PORT", o.p.listen))
	}
	if port == 0 {
		if port, err = sidecar.FreePort(host); err != nil {
			return err
		}
	}
	cfg.Addr = net.JoinHostPort(host, strconv.Itoa(port))
	if ip := net.ParseIP(host); ip != nil && ip.IsUnspecified() {
		cfg.Addr = net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
		if o.advertise == "" {
			return config.Misused(fmt.Errorf("--listen %s: say with --advertise HOST:PORT where routers reach it", o.p.listen))
		}
	}
	v := &sidecar.Values{
		Model: o.model, ModelName: o.modelName, Host: host, Port: port, Role: o.role, Socket: o.socket, Node: o.node,
		GPUs: strings.Join(o.gpus, ","), EngineID: defaultID(o.p.id, "engine", cfg.Addr), Threads: o.shape.Threads,
	}
	t, err := o.template(ctx, v)
	if err != nil {
		return err
	}
	if cfg.Command, err = t.Expand(v); err != nil {
		return config.Misused(err)
	}
	cfg.Command.Env = append(cfg.Command.Env, "HEADRACE_ENGINE_ID="+v.EngineID, "HEADRACE_ROLE="+o.role, "HEADRACE_SOCKET="+o.socket)
	if len(o.gpus) > 0 {
		cfg.Command.Env = append(cfg.Command.Env, "CUDA_VISIBLE_DEVICES="+v.GPUs)
	}
	cfg.Command.Env = append(cfg.Command.Env, o.env...)
	cfg.Entry.Dialect = t.Dialect
	eventsHost := host
	if h, _, err := net.SplitHostPort(o.advertise); err == nil {
		eventsHost = h
	}
	for name, at := range map[string]*string{"events": &cfg.Entry.Events, "replay": &cfg.Entry.EventsReplay} {
		if p := v.Ports[name]; p != 0 {
			*at = net.JoinHostPort(eventsHost, strconv.Itoa(p))
		}
	}
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find this binary: %w", err)
	}
	cfg.Guard = []string{self, "engine-guard", "--"}
	return nil
}

// template is the one that was named, or the one that was given.
func (o *engineFlags) template(ctx context.Context, v *sidecar.Values) (*sidecar.Template, error) {
	if o.command != "" {
		t, err := sidecar.ParseTemplate(o.command)
		if err != nil {
			return nil, config.Misused(err)
		}
		t.Words = append(t.Words, o.shape.Args...)
		v.Python = o.python
		return t, nil
	}
	if err := o.checkModel(v); err != nil {
		return nil, err
	}
	python, err := sidecar.FindPython(ctx, o.python)
	if err != nil {
		return nil, err
	}
	if err := python.Check(o.engine); err != nil {
		return nil, err
	}
	v.Python = python.Executable
	s := o.shape
	if s.Device = o.device; s.Device == "auto" {
		s.Device = sidecar.DetectDevice(len(o.gpus) > 0)
	}
	if s.TensorParallel == 0 {
		s.TensorParallel = len(o.gpus)
	}
	if o.engine == "vllm" {
		if s.ConnectorPath, err = o.connector(python); err != nil {
			return nil, err
		}
		s.PythonPath = os.Getenv("PYTHONPATH")
	}
	return sidecar.Named(o.engine, s)
}

// checkModel looks at the model before an engine spends half a minute on finding out.
func (o *engineFlags) checkModel(v *sidecar.Values) error {
	if o.model == "" {
		return config.Misused(errors.New("--model is needed: a folder with config.json and the weights"))
	}
	if err := sidecar.CheckModel(o.model); err != nil {
		return err
	}
	if v.ModelName == "" {
		v.ModelName = filepath.Base(filepath.Clean(o.model))
		if sidecar.IsHub(o.model) {
			v.ModelName = o.model
		}
	}
	return nil
}

// connector finds the folder to put in front of PYTHONPATH; "" for a connector that is installed.
func (o *engineFlags) connector(p *sidecar.Python) (string, error) {
	switch o.connectorPath {
	case "": // the one that was built with this program, whatever else is installed
		return unpackConnector()
	case "installed":
		if p.Headrace == "" {
			return "", fmt.Errorf("%s has no package headrace: install it (headrace connector wheel . && pip install headrace-*.whl), or leave --connector-path out", p.Executable)
		}
		return "", nil
	}
	dir, err := filepath.Abs(o.connectorPath)
	if err != nil {
		return "", err
	}
	if _, err := os.Stat(filepath.Join(dir, "headrace", "vllm")); err != nil {
		if _, err := os.Stat(filepath.Join(dir, "headrace", "vllm.py")); err != nil {
			return "", fmt.Errorf("--connector-path %s: there is no package headrace with the connector in it: %w", dir, err)
		}
	}
	return dir, nil
}

// engineGuard is the process between `headrace engine` and its engine.
func (a *app) engineGuard() *cobra.Command {
	cmd := &cobra.Command{
		Use:     "engine-guard -- COMMAND...",
		Short:   "Run an engine and leave none of its processes behind",
		Example: `  headrace engine-guard -- sleep 1`,
		Hidden:  true,
		Args:    cobra.MinimumNArgs(1),
	}
	cmd.RunE = func(_ *cobra.Command, args []string) error {
		status, err := sidecar.Guard(sidecar.GuardFD, args)
		if err != nil {
			return err
		}
		os.Exit(status)
		return nil
	}
	return cmd
}
