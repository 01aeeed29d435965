package tracebench

import (
	"context"
	"log/slog"
	"os"
	"runtime"
	"sync"
	"time"

	"github.com/headrace/headrace/bench/child"
	"github.com/headrace/headrace/bench/front"
	"github.com/headrace/headrace/router"
	"github.com/headrace/headrace/router/pairing"
	"github.com/headrace/headrace/router/tokenize"
	"github.com/headrace/headrace/worker/standin"
)

// childEnv makes a process that calls MaybeChild a part of the benchmark.
const childEnv = "HEADRACE_BENCH_TRACE"

const (
	model = "stand-in"
	// concurrentMax is more than ever wait: all of a trace at once, to find what can be served at the most.
	concurrentMax = 1 << 16
	bodyMax       = 4 << 20
	followTimeout = 20 * time.Second
	stopTimeout   = 10 * time.Second
)

type childConfig struct {
	// Engine is the table of a stand-in, nil for a router.
	Engine *standin.Table `json:"engine,omitempty"`
	ID     string         `json:"id,omitempty"`

	Policy    string           `json:"policy,omitempty"`
	Seed      uint64           `json:"seed,omitempty"`
	Tokenizer string           `json:"tokenizer,omitempty"`
	Workers   []pairing.Worker `json:"workers,omitempty"`
}

// childReady is what a child says when it serves.
type childReady struct {
	Addr   string `json:"addr"`
	Events string `json:"events,omitempty"`
	Replay string `json:"replay,omitempty"`
	Admin  string `json:"admin,omitempty"`
}

// MaybeChild turns this process into a part of the benchmark, if it was started as one, and never returns then. Programs
// that offer Run call it first thing in main.
func MaybeChild() { child.Main(childEnv, "bench trace", serveChild) }

func serveChild(ctx context.Context, c *childConfig) error {
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError}))
	if c.Engine != nil {
		return serveEngine(ctx, c, log)
	}
	return serveRouter(ctx, c, log)
}

func serveEngine(ctx context.Context, c *childConfig, log *slog.Logger) error {
	runtime.GOMAXPROCS(1) // it computes nothing, and shares the machine with the others
	l, err := front.Listen(3)
	if err != nil {
		return err
	}
	s := &standin.Server{BodyMax: bodyMax, Listener: l[0], Events: l[1], EventsReplay: l[2], Config: standin.Config{Model: model, Role: string(pairing.RoleBoth), Table: *c.Engine, Logger: log}}
	if err := child.Ready(childReady{Addr: l[0].Addr().String(), Events: l[1].Addr().String(), Replay: l[2].Addr().String()}); err != nil {
		return err
	}
	return s.Run(ctx)
}

func serveRouter(ctx context.Context, c *childConfig, log *slog.Logger) error {
	made := &decisions{Of: map[string]decision{}}
	policy, err := pairing.New(c.Policy, c.Seed)
	if err != nil {
		return err
	}
	tokens, err := tokenize.Load(c.Tokenizer, tokenize.Options{})
	if err != nil {
		return err
	}
	cfg := router.Config{Policy: policy, Tokens: map[string]router.Tokens{model: tokens}, Logger: log, MaxConcurrent: concurrentMax, MaxConns: concurrentMax, Decided: made.note}
	if err := front.Serve(ctx, cfg, c.Workers, func(clients, admin string) error { return child.Ready(childReady{Addr: clients, Admin: admin}) }); err != nil {
		return err
	}
	made.mu.Lock()
	defer made.mu.Unlock()
	return child.Ready(made)
}

// decisions are what a router says at its end, by the requests' ids.
type decisions struct {
	mu sync.Mutex
	Of map[string]decision `json:"decisions"`
}

// decision is the last one about a request.
type decision struct {
	Worker   string  `json:"worker"`
	Estimate float64 `json:"estimate,omitempty"` // of the time to the first token, in seconds; 0: none
}

func (x *decisions) note(_ context.Context, id string, _ int, d *pairing.Decision) {
	if d.Whole == nil {
		return
	}
	seconds, _ := d.Estimate()
	x.mu.Lock()
	defer x.mu.Unlock()
	x.Of[id] = decision{Worker: d.Whole.ID, Estimate: seconds}
}

// process is a child that serves until it is stopped.
type process struct {
	*child.Process
	childReady
}

// start runs this program as a part of the benchmark.
func start(ctx context.Context, c *childConfig) (*process, error) {
	p := &process{}
	var err error
	if p.Process, err = child.StartPart(ctx, childEnv, "a part of the benchmark", nil, nil, c, &p.childReady); err != nil {
		return nil, err
	}
	return p, nil
}
