// Package sidecar runs an inference engine that knows nothing of Headrace, or watches one that runs already, and keeps
// its entry in the registry: it is listed, as what it says of itself, while it is well, and not otherwise. It must not
// know what a request is, and nothing of an engine beyond its command line, its HTTP pages and what its connector told
// the node daemon.
package sidecar

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"reflect"
	"slices"
	"time"

	"github.com/headrace/headrace/internal/registry"
)

const (
	probeEvery   = time.Second
	hangTimeout  = 2 * time.Minute
	probeTimeout = 2 * time.Second
	startEvery   = 250 * time.Millisecond
	saidEvery    = 5 * time.Second
	// missesMax is how many probes in a row may time out: an engine that computes can be late once.
	missesMax = 2
	// figuresEvery is in how many probes an engine's metrics are read, which takes it some milliseconds.
	figuresEvery = 5
	// stallMax is how long an engine with requests may make no step before it counts as hung.
	stallMax = time.Minute
	// nudgeMax is the longest pause between two nudges, which double it.
	nudgeMax = 30 * time.Second
	// drainEvery and drainQuiet: the router may have dispatched just before it saw that the entry is gone.
	drainEvery = 100 * time.Millisecond
	drainQuiet = 3

	// StartTimeout, DrainTimeout and StopTimeout are the defaults of Config's.
	StartTimeout = 30 * time.Minute
	DrainTimeout = 30 * time.Second
	StopTimeout  = 20 * time.Second
)

// Lister keeps one worker's entry in the registry.
type Lister interface {
	List(registry.Worker) error // puts it, or replaces it
	Unlist() error
}

// Config says what to run and where to announce it.
type Config struct {
	// Entry is what is known beforehand: id, role, dialect, address for routers, host, where its KV events are.
	Entry registry.Worker
	// Connector is what is known of how the engine exchanges KV cache: what it says itself counts where this says nothing. A
	// dialect in it is not changed.
	Connector Connector
	// Addr is where this host reaches the engine's HTTP server.
	Addr string
	// Command starts the engine; nil watches one that somebody else runs.
	Command *Command
	// Guard is the command line of a program that calls Guard.
	Guard []string
	// Daemon is the node daemon that the engine's connector speaks with; nil for none.
	Daemon interface {
		Look(ctx context.Context, engine string) (*Attachment, error)
		Incarnation() (epoch uint64, changed <-chan struct{})
	}
	Lister       Lister // nil for none
	StartTimeout time.Duration
	DrainTimeout time.Duration
	StopTimeout  time.Duration
	ProbeEvery   time.Duration
	// HangTimeout is how long an engine that raised an exception at its start may be silent: some of its processes end of
	// it, and the others wait for them for ever.
	HangTimeout time.Duration
	Output      io.Writer // the engine's lines go here
	Logger      *slog.Logger
	OnReady     func(registry.Worker) // called once, when it was listed first
	Hurry       <-chan struct{}       // closed when there is no time for an orderly end
}

func (c *Config) defaults() {
	set := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	set(&c.StartTimeout, StartTimeout)
	set(&c.DrainTimeout, DrainTimeout)
	set(&c.StopTimeout, StopTimeout)
	set(&c.ProbeEvery, probeEvery)
	set(&c.HangTimeout, hangTimeout)
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	if c.Output == nil {
		c.Output = io.Discard
	}
}

// sidecar is one run.
type sidecar struct {
	Config
	ask    *Asker
	proc   *process      // nil when somebody else runs the engine
	ended  chan struct{} // proc's, nil without one
	listed *registry.Worker

	misses  int       // probes that timed out, in a row
	probes  uint64    // since it was listed
	started float64   // the engine's start, as it says
	since   time.Time // when this life of the engine was first listed
	steps   float64
	stepped time.Time // when steps last grew, or nothing was to be done
	said    string    // the last complaint
	remarks []string  // those that were made
	told    Connector // what the engine said of its connector

	nudged     time.Time     // when the engine was last made to step
	nudgeAfter time.Duration // how long to wait until the next time
}

// Run returns nil when ctx ended and the engine was stopped in order, and otherwise what the engine died of. By the time
// that ctx ends the entry must be out of the registry already, or Lister be what takes it out.
func Run(ctx context.Context, cfg Config) error {
	cfg.defaults()
	s := &sidecar{Config: cfg, ask: &Asker{Base: "http://" + cfg.Addr, Client: &http.Client{
		Timeout: probeTimeout, Transport: &http.Transport{DisableKeepAlives: true},
	}}}
	if cfg.Command != nil {
		var err error
		s.Logger.Info("starting the engine", "command", cfg.Command.Line())
		if s.proc, err = startProcess(cfg.Guard, cfg.Command, cfg.Output); err != nil {
			return err
		}
		s.ended = s.proc.ended
		s.Entry.EnginePID = s.proc.cmd.Process.Pid
	}
	err := s.awaitWell(ctx)
	if err == nil {
		err = s.watch(ctx)
	}
	return errors.Join(err, s.unlist(""), s.stop(ctx))
}

// awaitWell returns when the engine is well for the first time.
func (s *sidecar) awaitWell(ctx context.Context) error {
	began, said := time.Now(), time.Now()
	var deadline <-chan time.Time
	if s.proc != nil {
		timer := time.NewTimer(s.StartTimeout)
		defer timer.Stop()
		deadline = timer.C
	}
	tick := time.NewTicker(startEvery)
	defer tick.Stop()
	for {
		err := s.ask.Health(ctx)
		if err == nil || ctx.Err() != nil {
			return nil
		}
		if time.Since(said) >= saidEvery {
			said = time.Now()
			s.Logger.Info("waiting for the engine", "at", s.ask.Base, "for", time.Since(began).Round(time.Second), "says", s.says(err))
		}
		if s.proc != nil && s.proc.out.silent() > s.HangTimeout {
			return fmt.Errorf("the engine hangs at its start: it said: %s; and nothing more for %s", s.proc.out.why(), s.HangTimeout)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		case <-s.ended:
			return s.died(" at its start")
		case <-deadline:
			return fmt.Errorf("the engine did not answer at %s/health within %s (--start-timeout): %w; its last line: %s", s.ask.Base, s.StartTimeout, err, s.proc.out.last())
		}
	}
}

// says is the engine's last line where there is one, and what a probe met otherwise.
func (s *sidecar) says(err error) string {
	if s.proc != nil {
		if line := s.proc.out.last(); line != "" {
			return line
		}
	}
	return err.Error()
}

func (s *sidecar) died(when string) error {
	why := s.proc.out.why()
	if why == "" {
		why = "it said nothing"
	}
	return fmt.Errorf("the engine died%s: %w; it said: %s", when, s.proc.err, why)
}

// watch keeps the entry true until ctx or the engine ends. A new node daemon is news that cannot wait for the next probe:
// what is sent by way of the old one is lost.
func (s *sidecar) watch(ctx context.Context) error {
	tick := time.NewTicker(s.ProbeEvery)
	defer tick.Stop()
	for {
		epoch, changed := s.incarnation()
		s.probe(ctx)
		for same := true; same; {
			select {
			case <-tick.C:
				same = false
			case <-changed:
				var now uint64
				now, changed = s.incarnation()
				same = now == epoch
			case <-ctx.Done():
				return nil
			case <-s.ended:
				return s.died("")
			}
		}
	}
}

func (s *sidecar) incarnation() (epoch uint64, changed <-chan struct{}) {
	if s.Daemon == nil {
		return 0, nil
	}
	return s.Daemon.Incarnation()
}

// probe looks at the engine once, and lists it or takes it out.
func (s *sidecar) probe(ctx context.Context) {
	err := s.ask.Health(ctx)
	if err == nil {
		if s.listed == nil || s.probes%figuresEvery == 0 {
			err = s.describe(ctx)
		} else {
			err = s.reattach(ctx)
		}
	}
	switch {
	case ctx.Err() != nil:
		return
	case err == nil:
		s.misses = 0
		s.probes++
		return
	case !gone(err): // it may be late because it computes; the next probe asks for the same
		if s.misses++; s.misses < missesMax {
			return
		}
	}
	if uerr := s.unlist(err.Error()); uerr != nil {
		s.Logger.Warn("the entry is taken out as soon as etcd answers", "err", uerr)
	}
}

// complain logs a line once, not once a second.
func (s *sidecar) complain(text string) {
	if text != s.said && text != "" {
		s.Logger.Warn(text)
	}
	s.said = text
}

// describe asks the engine for all that it says of itself, and lists it as that.
func (s *sidecar) describe(ctx context.Context) error {
	self, err := s.ask.Self(ctx)
	if err != nil {
		return err
	}
	if s.stalled(&self.Figures) {
		return fmt.Errorf("%w: it has %g requests and has made no step for %s", errStalled, self.Running, stallMax)
	}
	if s.listed == nil || self.Started != s.started {
		s.since, s.started = time.Now(), self.Started
	}
	e := s.Entry
	e.LoRAs = self.LoRAs
	e.Model, e.ContextTokens, e.BlockTokens, e.Blocks = self.Model, self.ContextTokens, self.BlockTokens, self.Blocks
	e.PID, e.Started = os.Getpid(), s.since
	e.Engine = self.Engine
	s.told = self.Connector
	s.connect(&e, s.Connector.Over(s.told))
	if byItself(e.Dialect) {
		e.Fingerprint = likeness(self)
	}
	s.attach(ctx, &e)
	return s.list(e)
}

var errStalled = errors.New("the engine hangs")

// stalled tells that the engine has work and makes no steps.
func (s *sidecar) stalled(f *Figures) bool {
	if f.Steps != s.steps || f.Running <= 0 || f.Steps < 0 {
		s.steps, s.stepped = f.Steps, time.Now()
	}
	return time.Since(s.stepped) > stallMax
}

// connect adds how the engine is spoken with.
func (s *sidecar) connect(e *registry.Worker, c Connector) {
	if c.Dialect == DialectVLLM && e.Dialect != DialectVLLM { // found out too late: there is no daemon to look at
		c.Dialect = DialectOpenAI
		s.remark("the engine has Headrace's connector, and is served whole requests: start this with --dialect vllm and --socket PATH of its node daemon")
	}
	e.Dialect = cmp.Or(c.Dialect, e.Dialect)
	if c.Role != "" && c.Role != e.Role {
		if e.Role != registry.RoleBoth {
			s.remark("the engine can only " + c.Role + ", and is listed so, whatever --role says")
		}
		e.Role = c.Role
	}
	e.KVAddr, e.KVEngine = c.address(e.Addr), c.Engine
	e.TensorParallel, e.PipelineParallel = cmp.Or(e.TensorParallel, c.TensorParallel), cmp.Or(e.PipelineParallel, c.PipelineParallel)
	if what := c.missing(e.Role); what != "" {
		s.remark("routers do not pair the engine before they know " + what)
	}
}

// remark logs what does not change, once.
func (s *sidecar) remark(text string) {
	if !slices.Contains(s.remarks, text) {
		s.remarks = append(s.remarks, text)
		s.Logger.Warn(text)
	}
}

// likeness is a fingerprint for engines that exchange KV by means of their own: equals may be paired.
func likeness(self *Self) string {
	sum := sha256.Sum256(fmt.Appendf(nil, "%q %q %q", self.Model, cmp.Or(self.Version, self.Engine), self.CacheDType))
	return hex.EncodeToString(sum[:])
}

// reattach updates the entry by what the node daemon says, between descriptions.
func (s *sidecar) reattach(ctx context.Context) error {
	e := *s.listed
	s.attach(ctx, &e)
	return s.list(e)
}

// attach adds what the node daemon knows. Without it, or before the engine told it, the entry has no daemon: routers
// then give the engine whole requests.
func (s *sidecar) attach(ctx context.Context, e *registry.Worker) {
	e.NodeID, e.NodeData = "", ""
	if s.Daemon == nil || e.Dialect != DialectVLLM {
		return
	}
	a, err := s.look(ctx, e.ID)
	if errors.Is(err, errNotAttached) && s.nudge(ctx, e) {
		a, err = s.look(ctx, e.ID)
	}
	if err != nil {
		if ctx.Err() == nil {
			s.complain("the engine serves whole requests only: " + err.Error())
		}
		return
	}
	s.complain("")
	s.nudgeAfter = 0
	about := a.About
	e.NodeID, e.NodeData = a.NodeID, a.NodeData
	e.Fingerprint, e.Opaque, e.Layout, e.TensorParallel = about.Fingerprint, about.Opaque, about.Layout, about.TensorParallel
	for _, f := range []struct{ to, from *uint32 }{
		{&e.BlockTokens, &about.BlockTokens}, {&e.Blocks, &about.Blocks}, {&e.ContextTokens, &about.ContextTokens},
	} {
		if *f.from != 0 {
			*f.to = *f.from
		}
	}
}

// look asks the daemon for the engine, which must have told what it is.
func (s *sidecar) look(ctx context.Context, id string) (*Attachment, error) {
	a, err := s.Daemon.Look(ctx, id)
	if err == nil && a.About == nil {
		err = errors.New("the engine's connector has not said what its memory is")
	}
	return a, err
}

// nudge makes an engine step whose daemon is there and does not know it, as after the daemon's restart: the connector has no
// thread of its own, and an engine without requests runs none of its code, so that it would not come back before one.
// Meanwhile it is listed without a daemon. It tells whether the engine made its step.
func (s *sidecar) nudge(ctx context.Context, e *registry.Worker) bool {
	if time.Since(s.nudged) < s.nudgeAfter {
		return false
	}
	s.nudged, s.nudgeAfter = time.Now(), min(max(2*s.nudgeAfter, s.ProbeEvery), nudgeMax)
	err := s.list(*e)
	if err == nil {
		err = s.ask.Nudge(ctx, e.Model)
	}
	if err != nil && ctx.Err() == nil {
		s.Logger.Info("the engine does not compute a token, which would have it look for its node daemon", "err", err)
	}
	return err == nil
}

func (s *sidecar) list(e registry.Worker) error {
	if s.listed != nil && reflect.DeepEqual(*s.listed, e) {
		return nil
	}
	if s.Lister != nil {
		if err := s.Lister.List(e); err != nil {
			return err
		}
	}
	first := s.since.IsZero() || s.listed == nil
	if first {
		s.Logger.Info("engine is listed", "id", e.ID, "model", e.Model, "dialect", e.Dialect, "role", e.Role, "engine", e.Engine,
			"blocks", e.Blocks, "block_tokens", e.BlockTokens, "context_tokens", e.ContextTokens, "node", e.NodeID)
	}
	s.listed = &e
	if s.OnReady != nil {
		s.OnReady(e)
		s.OnReady = nil
	}
	return nil
}

// unlist takes the entry out; why is "" when the engine is to stop.
func (s *sidecar) unlist(why string) error {
	if s.listed == nil {
		if why != "" {
			s.complain("engine is not well: " + why)
		}
		return nil
	}
	s.listed, s.probes = nil, 0
	if why != "" {
		s.Logger.Warn("engine is not well, its entry is taken out", "why", why)
		s.said = "engine is not well: " + why
	}
	if s.Lister == nil {
		return nil
	}
	return s.Lister.Unlist()
}

// stop ends the engine once it has no requests left, or time is up.
func (s *sidecar) stop(ctx context.Context) error {
	if s.proc == nil {
		return nil
	}
	select {
	case <-s.ended:
		return nil
	default:
	}
	if ctx.Err() != nil { // asked to stop; otherwise something is wrong with it
		s.drain(context.WithoutCancel(ctx))
	}
	return s.proc.stop(s.StopTimeout, s.Hurry)
}

// drain waits for the requests in flight.
func (s *sidecar) drain(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, s.DrainTimeout)
	defer cancel()
	tick := time.NewTicker(drainEvery)
	defer tick.Stop()
	quiet, said := 0, ""
	for {
		busy, err := s.busy(ctx)
		switch {
		case gone(err):
			return // there is nothing to wait for
		case err != nil:
			quiet = 0
		case busy == "":
			quiet++
		default:
			quiet = 0
			if busy != said {
				s.Logger.Info("draining", "left", busy)
				said = busy
			}
		}
		if quiet == drainQuiet {
			return
		}
		select {
		case <-tick.C:
		case <-s.ended:
			return
		case <-s.Hurry:
			return
		case <-ctx.Done():
			s.Logger.Warn("requests are cut off", "left", busy, "after", s.DrainTimeout)
			return
		}
	}
}

// busy says what an engine still has to do, "" for nothing.
func (s *sidecar) busy(ctx context.Context) (string, error) {
	f, err := s.ask.Figures(ctx)
	if err != nil {
		return "", err
	}
	if n := max(f.Running, 0) + max(f.Waiting, 0); n > 0 {
		return fmt.Sprintf("%g requests", n), nil
	}
	if s.Daemon != nil && s.Entry.Dialect == DialectVLLM {
		if a, err := s.Daemon.Look(ctx, s.Entry.ID); err == nil && a.Leases > 0 {
			return fmt.Sprintf("%d leases", a.Leases), nil
		}
	}
	if leases(s.Connector.Over(s.told).Dialect) && f.CacheUsage > 0 { // a decode engine is yet to fetch it
		return "KV blocks", nil
	}
	return "", nil
}
