package supervise

import (
	"fmt"
	"log/slog"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/headrace/headrace/internal/config"
)

// partsMax bounds a mistyped --decode 1000 before it starts a thousand processes.
const partsMax = 64

// drainTimeout is how long streams may go on after the first Ctrl-C: a person is waiting.
const drainTimeout = 5 * time.Second

// Common are the options that every child is started with as `headrace up` was.
type Common struct {
	Config    string // path of the configuration file, "" for none
	LogLevel  string
	LogFormat string
	Debug     bool
}

// Options are the user's wishes for `headrace up`.
type Options struct {
	Common
	Model      string // path of a GGUF file
	ModelName  string // what clients call it; "" for the file's own
	Prefill    int
	Decode     int
	Nodes      int
	Listen     string
	DataDir    string
	Etcd       []string // external; empty for the embedded one
	Transport  string
	NodeArgs   []string         // more flags for the node daemons
	RouterArgs []string         // flags of the router
	Threads    int              // of each worker; 0 shares the machine's cores between them
	KVMemory   config.Size      // of each worker; 0 for the worker's own choice
	Shapes     map[string]Shape // of workers' caches, by role
	Engine     *Engine          // runs these in place of workers; nil for Headrace's own
	Planner    *Planner         // decides how many workers there are; nil: as many as in the beginning
	Namespace  string           // of the workers
	CPUs       int              // the machine's
	Exe        string
	ReadyFile  string          // written once requests can be served, removed at the end
	LogStream  *os.File        // children's lines go here too, each with its part's name
	Ready      func(*State)    // called once requests can be served
	Progress   func(string)    // a step of the start
	Upgrade    <-chan struct{} // each receive replaces the node daemons by what is at Exe now
	Hard       <-chan struct{} // closed when there is no time left for an orderly end
	Logger     *slog.Logger
}

// Shape is how the workers of a role lay their KV cache out; 0 leaves it to them.
type Shape struct {
	TensorParallel int
	BlockTokens    int
}

// Engine says how engines of another kind are run, each by a `headrace engine`.
type Engine struct {
	Flags    []string      // of `headrace engine`, the same for all
	Args     []string      // of the engine itself
	Attaches bool          // it speaks with its node daemon, and is not ready before it does
	Whole    bool          // it serves whole requests only, so that there are no roles
	GPUs     []string      // shared out in order, as many to each as it has ranks; none for engines on the CPU
	Start    time.Duration // how long it may take until it serves
}

// Planner says how a planner is run beside the others, a `headrace planner` of its own.
type Planner struct {
	Args    []string // of it
	MaxGPUs int      // GPUs that all engines together may have; where engines have none, each of their ranks counts as one
}

// plannerGrace is how long a planner may take to end: it gives up leading and removes its state.
const plannerGrace = 5 * time.Second

// engineStop is how long an engine may take to end once its requests have.
const engineStop = 15 * time.Second

// Validate finds what cannot be meant.
func (o *Options) Validate() error {
	if err := o.validateEngine(); err != nil {
		return config.Misused(err)
	}
	switch {
	case o.Prefill < 0 || o.Decode < 1 || o.Nodes < 1:
		return config.Misused(fmt.Errorf("--prefill %d --decode %d --nodes %d: at least one of each is needed", o.Prefill, o.Decode, o.Nodes))
	case o.Prefill+o.Decode > partsMax:
		return config.Misused(fmt.Errorf("--prefill %d --decode %d: at most %d workers on one machine", o.Prefill, o.Decode, partsMax))
	case o.Nodes > o.Prefill+o.Decode:
		return config.Misused(fmt.Errorf("--nodes %d: more node daemons than the %d workers they would serve", o.Nodes, o.Prefill+o.Decode))
	case o.Transport != "auto" && o.Transport != "tcp" && o.Transport != "shm" && o.Transport != "rdma":
		return config.Misused(fmt.Errorf("--transport %q: use auto, tcp, shm or rdma", o.Transport))
	case o.Transport == "shm" && o.Nodes > 1:
		return config.Misused(fmt.Errorf("--transport shm with --nodes %d: shared memory joins workers of one node daemon; use --nodes 1 or --transport tcp", o.Nodes))
	case o.Threads < 0:
		return config.Misused(fmt.Errorf("--threads %d: cannot be negative", o.Threads))
	}
	if p := o.Planner; p != nil && (o.Ranks() > p.MaxGPUs || p.MaxGPUs > partsMax) {
		return config.Misused(fmt.Errorf("--max-gpus %d: the engines that are to be there in the beginning take %d GPUs, and at most %d are planned on one machine", p.MaxGPUs, o.Ranks(), partsMax))
	}
	for role, s := range o.Shapes {
		if s.TensorParallel < 0 || s.BlockTokens < 0 {
			return config.Misused(fmt.Errorf("--%s-tp %d --%s-block-tokens %d: cannot be negative", role, s.TensorParallel, role, s.BlockTokens))
		}
	}
	if _, _, err := net.SplitHostPort(o.Listen); err != nil {
		return config.Misused(fmt.Errorf("--listen %q: use HOST:PORT, as 127.0.0.1:8000: %w", o.Listen, err))
	}
	return nil
}

// validateEngine finds what cannot be meant of engines of another kind.
func (o *Options) validateEngine() error {
	e := o.Engine
	if e == nil {
		return nil
	}
	if e.Whole && o.Prefill > 0 {
		return fmt.Errorf("--prefill %d: this engine serves whole requests only; use --prefill 0 --decode %d", o.Prefill, o.Prefill+o.Decode)
	}
	need := o.Ranks()
	if p := o.Planner; p != nil && len(e.GPUs) > 0 {
		if p.MaxGPUs > len(e.GPUs) {
			return fmt.Errorf("--max-gpus %d: there are %d GPUs; name more with --gpus, or allow fewer", p.MaxGPUs, len(e.GPUs))
		}
		return nil
	}
	if len(e.GPUs) > 0 && need != len(e.GPUs) {
		return fmt.Errorf("--gpus names %d GPUs for %d engines that need %d: name as many, or change --prefill, --decode, --prefill-tp or --decode-tp", len(e.GPUs), o.Prefill+o.Decode, need)
	}
	return nil
}

// Ranks is how many GPUs the engines need.
func (o *Options) Ranks() int { return o.Prefill*o.ranks("prefill") + o.Decode*o.ranks("decode") }

// ranks is how many GPUs an engine of a role has.
func (o *Options) ranks(role string) int { return max(1, o.Shapes[role].TensorParallel) }

// part is one child of the plan.
type part struct {
	spec Spec
	id   string
	kind string // node, worker, router or planner
	role string // of a worker, as --prefill and --decode mean it: also "decode" where all serve whole requests
	gpus []string
	// stopping: it was asked to end, and is listed until it has.
	stopping bool
}

// layout makes the parts of one run.
type layout struct {
	o        *Options
	d        *DataDir
	idPrefix string
	common   []string
	threads  int
}

func newLayout(o *Options, d *DataDir, etcd []string, idPrefix string) *layout {
	l := &layout{o: o, d: d, idPrefix: idPrefix, threads: o.Threads}
	l.common = []string{"--etcd", strings.Join(etcd, ","), "--log-level", o.LogLevel, "--log-format", o.LogFormat, "--parent-fd", strconv.Itoa(ParentFD)}
	if l.threads == 0 {
		most := o.Prefill + o.Decode
		if o.Planner != nil {
			most = max(most, o.Planner.MaxGPUs/min(o.ranks("prefill"), o.ranks("decode")))
		}
		l.threads = max(1, o.CPUs/most)
	}
	return l
}

func (l *layout) part(kind, name string, grace time.Duration, args ...string) part {
	id := l.idPrefix + name
	argv := append(append([]string{kind, "--id", id}, args...), l.common...)
	if l.o.Debug && kind != "planner" {
		argv = append(argv, "--debug")
	}
	if l.o.Config != "" {
		argv = append(argv, "--config", l.o.Config)
	}
	return part{spec: Spec{Name: name, Args: argv, Grace: grace}, id: id, kind: kind}
}

// worker is the i-th of a role: prefill workers on the first half of the node daemons, decode workers on the second, so that with two of them
// every transfer crosses between daemons as it does between machines.
func (l *layout) worker(role string, i int, gpus []string) part {
	first := (l.o.Nodes + 1) / 2 // node daemons for prefill
	node := i % first
	if role == "decode" {
		node = (first + i%max(1, l.o.Nodes-first)) % l.o.Nodes
	}
	args := l.o.workerArgs(role, l.d.Socket(fmt.Sprintf("node-%d", node)), l.threads)
	if l.o.Namespace != "" {
		args = append(args, "--namespace", l.o.Namespace)
	}
	name := l.o.workerName(role, i)
	if l.o.Engine == nil {
		p := l.part("worker", name, 5*time.Second, args...)
		p.role, p.gpus = role, gpus
		return p
	}
	if len(l.o.Engine.GPUs) > 0 {
		args = append(args, "--gpus", strings.Join(gpus, ","))
	}
	p := l.part("engine", name, drainTimeout+engineStop+5*time.Second, args...)
	p.kind, p.role, p.gpus = "worker", role, gpus
	p.spec.Args = append(append(p.spec.Args, "--"), l.o.Engine.Args...)
	return p
}

func (o *Options) workerName(role string, i int) string {
	if o.Prefill == 0 {
		role = "engine"
	}
	return fmt.Sprintf("%s-%d", role, i)
}

// plan lays out the children of the beginning.
func (l *layout) plan(listener *os.File) []part {
	var parts []part
	for i := range l.o.Nodes {
		name := fmt.Sprintf("node-%d", i)
		args := []string{"--socket", l.d.Socket(name), "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--transport", l.o.Transport, "--cluster-key-file", l.d.Key()}
		parts = append(parts, l.part("node", name, 3*time.Second, append(args, l.o.NodeArgs...)...))
	}
	slots := l.o.slots()
	add := func(role string, n int) {
		for i := range n {
			k := l.o.ranks(role)
			parts = append(parts, l.worker(role, i, slots[:k:k]))
			slots = slots[k:]
		}
	}
	add("prefill", l.o.Prefill)
	add("decode", l.o.Decode)
	router := l.part("router", "router-0", drainTimeout+5*time.Second, "--drain-timeout", drainTimeout.String(), "--listen", "fd:"+strconv.Itoa(ParentFD+1), "--admin", "127.0.0.1:0", "--cluster-key-file", l.d.Key())
	router.spec.Args = append(router.spec.Args, l.o.RouterArgs...)
	router.spec.Files = []*os.File{listener}
	return append(parts, router)
}

// planner is the part that decides how many workers there are, of a model as clients call it.
func (l *layout) planner(model string) part {
	args := []string{"--admin", "127.0.0.1:0", "--cluster-key-file", l.d.Key(), "--data-dir", l.d.path, "--supervisor", l.d.Socket("up"), "--state-file", l.d.Planner(), "--model-name", model,
		"--namespace=" + l.o.Namespace, "--max-gpus", strconv.Itoa(l.o.Planner.MaxGPUs), "--prefill-gpus", strconv.Itoa(l.o.ranks("prefill")),
		"--decode-gpus", strconv.Itoa(l.o.ranks("decode")), "--undivided=" + strconv.FormatBool(l.o.Prefill == 0)}
	return l.part("planner", "planner-0", plannerGrace, append(args, l.o.Planner.Args...)...)
}

// slots are the GPUs to be shared out, by name; numbers where engines run on the CPU.
func (o *Options) slots() []string {
	if o.Engine != nil && len(o.Engine.GPUs) > 0 {
		if o.Planner != nil {
			return o.Engine.GPUs[:o.Planner.MaxGPUs]
		}
		return o.Engine.GPUs
	}
	n := o.Ranks()
	if o.Planner != nil {
		n = o.Planner.MaxGPUs
	}
	list := make([]string, n)
	for i := range list {
		list[i] = strconv.Itoa(i)
	}
	return list
}

// workerArgs are the flags of a worker, or of an engine in its place.
func (o *Options) workerArgs(role, socket string, threads int) []string {
	listed := role
	if o.Prefill == 0 {
		listed = "both"
	}
	args := []string{"--role", listed, "--model", o.Model, "--listen", "127.0.0.1:0", "--socket", socket, "--threads", strconv.Itoa(threads)}
	if o.KVMemory > 0 {
		args = append(args, "--kv-memory", o.KVMemory.String())
	}
	if s := o.Shapes[role]; s.TensorParallel > 0 {
		args = append(args, "--tensor-parallel", strconv.Itoa(s.TensorParallel))
	}
	if s := o.Shapes[role]; s.BlockTokens > 0 {
		args = append(args, "--block-tokens", strconv.Itoa(s.BlockTokens))
	}
	if o.ModelName != "" {
		args = append(args, "--model-name", o.ModelName)
	}
	if o.Engine != nil {
		args = append(args, "--drain-timeout", drainTimeout.String(), "--stop-timeout", engineStop.String())
		args = append(args, o.Engine.Flags...)
	}
	return args
}
