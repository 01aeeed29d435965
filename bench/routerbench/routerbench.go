package routerbench

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/headrace/headrace/bench"
	"github.com/headrace/headrace/router/pairing"
)

// Parts of the benchmark.
const (
	partWhole = "whole" // one worker a request
	partPairs = "pairs" // two legs a request
	partOpen  = "open"  // one worker, at half the peak, requests arriving at random
	partPaced = "paced" // one worker, streams whose events come apart, as an engine's do
	partExact = "exact" // one worker, by what workers have in their caches: conversations that go on, and new ones
)

// Options of Run. Zero values take the defaults named beside the fields.
type Options struct {
	Parts  []string      // all
	Bodies []int         // bytes of requests: 1024, 20480, 220000, 1048576 (quick: the first two)
	Kinds  []string      // json, stream
	Conns  []int         // 1, 32
	Rounds int           // 5 (quick 3)
	Run    time.Duration // of a run: 800 ms (quick 300 ms)
	// Pace is between the events of the part paced, and Streams how many connections there are for it at the most.
	Pace    time.Duration // 10 ms
	Streams int           // 2048 (quick 256)
	// Rate is what the parts open, paced and exact are asked a second at random (half of the lesser peak of ours and nginx's, which the part
	// whole tells, or a run of each; paced: an eighth of that of such streams; exact: 1000, and half of its own peak).
	Rate  float64
	Quick bool
	// Peers has sglang-router measured too, installed once into the user's cache. nginx and HAProxy always are, where installed.
	Peers bool
	// Tokenizer is a model's folder or file, with which the part exact tells prompts' tokens. Without it that part is left out.
	Tokenizer string
	Profiles  string // folder for CPU profiles of our routers
	// Before are the binaries of other headraces, whose routers are measured beside ours.
	Before   []string
	Progress io.Writer
}

// Check sets the defaults and says what cannot be.
func (o *Options) Check() error {
	pick := func(list *[]string, all ...string) error {
		if len(*list) == 0 {
			*list = all
		}
		for _, x := range *list {
			if !slices.Contains(all, x) {
				return fmt.Errorf("%q is none of %v", x, all)
			}
		}
		return nil
	}
	if err := errors.Join(pick(&o.Parts, partWhole, partOpen, partPairs, partPaced, partExact), pick(&o.Kinds, kindJSON, kindStream)); err != nil {
		return err
	}
	if len(o.Bodies) == 0 {
		if o.Bodies = []int{1 << 10, 20 << 10, 220_000, 1 << 20}; o.Quick {
			o.Bodies = o.Bodies[:2]
		}
	}
	if len(o.Conns) == 0 {
		o.Conns = []int{1, 32}
	}
	if o.Rounds == 0 {
		if o.Rounds = 5; o.Quick {
			o.Rounds = 3
		}
	}
	if o.Run == 0 {
		if o.Run = 800 * time.Millisecond; o.Quick {
			o.Run = 300 * time.Millisecond
		}
	}
	o.Pace = cmp.Or(o.Pace, 10*time.Millisecond)
	if o.Streams == 0 {
		if o.Streams = 2048; o.Quick {
			o.Streams = 256
		}
	}
	if o.Pace < time.Millisecond || o.Pace >= time.Second || o.Pace%time.Millisecond != 0 || o.Streams < 1 || o.Streams > 1<<14 {
		return errors.New("the pace of a stream is whole milliseconds, less than a second, and there are 1 to 16384 of them at once")
	}
	for _, n := range o.Bodies {
		if n < 200 || n > 32<<20 {
			return fmt.Errorf("a body of %d bytes: 200 to 32 MiB", n)
		}
	}
	for _, n := range o.Conns {
		if n < 1 || n > 4096 {
			return fmt.Errorf("%d connections: 1 to 4096", n)
		}
	}
	if o.Rounds < 1 || o.Run < 10*time.Millisecond || o.Rate < 0 {
		return errors.New("rounds, the time of a run and the rate must be over 0, a run at least 10 ms")
	}
	if o.Progress == nil {
		o.Progress = io.Discard
	}
	return nil
}

// session is one run of the benchmark.
type session struct {
	o           Options
	dir         string
	backends    []string
	contestants []contestant
	processes   []process
	talks       *talks // of the part exact
	report      *Report
}

// Run measures. Interrupted, it gives what it has.
func Run(ctx context.Context, o Options) (_ *Report, err error) {
	if err := o.Check(); err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "headrace-bench-router-")
	if err != nil {
		return nil, err
	}
	began := time.Now()
	s := &session{o: o, dir: dir, report: &Report{Kind: "headrace.bench.router", Version: ReportVersion, Time: began.UTC(), Rounds: o.Rounds, RunSeconds: o.Run.Seconds(), Machine: bench.ThisMachine()}}
	defer func() {
		err = errors.Join(err, s.talks.close())
		for _, p := range slices.Backward(s.processes) {
			_ = p.Stop(stopTimeout) // all was measured, and an interrupt has killed them
		}
		err = errors.Join(err, os.RemoveAll(dir))
	}()
	if err := s.startAll(ctx); err != nil {
		return nil, err
	}
	err = s.measure(ctx)
	if err != nil && ctx.Err() == nil {
		return nil, err
	}
	s.report.Complete = err == nil
	s.report.Seconds = time.Since(began).Seconds()
	s.report.judge()
	return s.report, nil
}

// startAll starts the stand-ins and everybody in front of them.
func (s *session) startAll(ctx context.Context) error {
	addrs, err := s.startChild(ctx, "", &childConfig{Kind: childInstant, Count: 2})
	if err != nil {
		return err
	}
	s.backends = addrs
	has := func(part string) bool { return slices.Contains(s.o.Parts, part) }
	whole, pairs := has(partWhole) || has(partOpen) || has(partPaced), has(partPairs)
	s.add(contestant{name: direct, what: "one stand-in, nothing in front", addr: addrs[0]})
	if has(partExact) {
		if err := s.startExact(ctx); err != nil {
			return err
		}
	}
	if whole || has(partExact) {
		if err := s.startOurs(ctx, ours, "least-loaded, dialect openai", pairing.DialectPlain); err != nil {
			return err
		}
	}
	if whole {
		for _, binary := range s.o.Before {
			if err := s.startOf(ctx, binary, before+filepath.Base(binary), "the same, by that binary", pairing.DialectPlain); err != nil {
				return err
			}
		}
		for _, peer := range []struct {
			name, what string
			start      func(context.Context, string) error
		}{{nginx, "least_conn, no buffering", s.startNginx}, {haproxy, "leastconn", s.startHAProxy}} {
			if err := s.addPeer(ctx, peer.name, peer.what, false, peer.start); err != nil {
				return err
			}
		}
	}
	if whole && s.o.Peers {
		for name, policy := range map[string]string{sglang: "cache_aware", sglangBare: "random"} {
			start := func(ctx context.Context, addr string) error { return s.startSGLang(ctx, addr, policy, false) }
			if err := s.addPeer(ctx, name, policy, false, start); err != nil {
				return err
			}
		}
	}
	if pairs {
		if err := s.startOurs(ctx, oursPairs, "least-loaded, dialect sglang: both legs at once", pairing.DialectSGLang); err != nil {
			return err
		}
		if err := s.startOurs(ctx, oursNixl, "least-loaded, dialect vllm-nixl: prefill, then decode", pairing.DialectNixl); err != nil {
			return err
		}
		start := func(ctx context.Context, addr string) error { return s.startSGLang(ctx, addr, "cache_aware", true) }
		if s.o.Peers {
			if err := s.addPeer(ctx, sglangPair, "cache_aware, --pd-disaggregation: both legs at once", true, start); err != nil {
				return err
			}
		}
	}
	if !s.o.Peers {
		s.note("%s: not measured (--peers)", sglang)
	}
	return nil
}

func (s *session) add(c contestant) {
	s.contestants = append(s.contestants, c)
	s.report.Contestants = append(s.report.Contestants, bench.Contestant{Name: c.name, Transport: "tcp", What: c.what})
}

func (s *session) note(format string, args ...any) {
	s.report.NotMeasured = append(s.report.NotMeasured, fmt.Sprintf(format, args...))
}

func (s *session) addPeer(ctx context.Context, name, what string, pairs bool, start func(context.Context, string) error) error {
	port, err := freePort()
	if err != nil {
		return err
	}
	addr := "127.0.0.1:" + port
	if err := start(ctx, addr); err != nil {
		if ctx.Err() != nil {
			return err
		}
		s.note("%s: not measured, %v", name, err)
		return nil
	}
	s.add(contestant{name: name, what: what, addr: addr, pairs: pairs, group: s.lastGroup()})
	return nil
}

// lastGroup is the process group of what was started last.
func (s *session) lastGroup() int { return s.processes[len(s.processes)-1].Group() }

func (s *session) startOurs(ctx context.Context, name, what, dialect string) error {
	return s.startOf(ctx, "", name, what, dialect)
}

// startOf is startOurs by another binary than this one, unless that is "".
func (s *session) startOf(ctx context.Context, binary, name, what, dialect string) error {
	workers := s.workers(dialect)
	c := &childConfig{Kind: childRouter, Workers: workers}
	if binary == "" && s.o.Profiles != "" {
		c.Profile = filepath.Join(s.o.Profiles, dialect+".pprof")
	}
	addrs, err := s.startChild(ctx, binary, c)
	if err != nil {
		return err
	}
	s.add(contestant{name: name, what: what, addr: addrs[0], pairs: dialect != pairing.DialectPlain, group: s.lastGroup()})
	return nil
}

// workers are the stand-ins as a router is to know them.
func (s *session) workers(dialect string) []pairing.Worker {
	var list []pairing.Worker
	for i, addr := range s.backends {
		w := pairing.Worker{ID: fmt.Sprint("w", i), Role: pairing.RoleBoth, Model: "m", Addr: addr, Dialect: dialect, BlockTokens: talkBlock, Blocks: 1 << 16, ContextTokens: 1 << 20, TensorParallel: 1}
		if dialect != pairing.DialectPlain {
			w.Role, w.KVAddr = []pairing.Role{pairing.RolePrefill, pairing.RoleDecode}[i], "127.0.0.1:9190" // nobody goes there
		}
		list = append(list, w)
	}
	return list
}

// measure runs every shape with everybody in turn, in an order that is reversed every other round.
func (s *session) measure(ctx context.Context) error {
	for _, kind := range s.o.Kinds {
		for _, body := range s.o.Bodies {
			for _, conns := range s.o.Conns {
				shape := shape{kind: kind, body: body, conns: conns}
				for _, part := range []string{partWhole, partPairs} {
					if err := s.row(ctx, part, shape); err != nil {
						return err
					}
				}
				if conns == slices.Max(s.o.Conns) {
					if err := errors.Join(s.open(ctx, shape), s.exact(ctx, shape)); err != nil {
						return err
					}
				}
			}
		}
	}
	return s.paced(ctx)
}

// pacedShare is the part of half the peak that paced streams are asked at. Those that tell the peak go in step, so that one wake-up serves
// many of them; at half of it streams that arrive at random left two processors no time.
const pacedShare = 0.25

// paced measures streams of the shortest bodies, each of which lasts as long as its events' pace has it.
func (s *session) paced(ctx context.Context) error {
	if !slices.Contains(s.o.Parts, partPaced) || !slices.Contains(s.o.Kinds, kindStream) {
		return nil
	}
	shape := shape{kind: kindStream, body: slices.Min(s.o.Bodies), conns: s.o.Streams, pace: s.o.Pace, rate: s.o.Rate}
	if shape.rate == 0 {
		half, err := s.halfPeak(ctx, shape)
		if err != nil {
			return err
		}
		shape.rate = pacedShare * half
	}
	return s.row(ctx, partPaced, shape)
}

// streamsARun is how many streams with a pace a run lasts for at the least, one behind the other.
const streamsARun = 4

// lasting is how long a run of a shape takes.
func (s *session) lasting(shape shape) time.Duration {
	return max(s.o.Run, streamsARun*chunksWanted*shape.pace)
}

// open measures a shape at half of what ours and nginx can do at the most.
func (s *session) open(ctx context.Context, shape shape) error {
	shape.rate = s.o.Rate
	if row := s.report.row(partWhole, shape.kind, shape.body, shape.conns); row != nil && shape.rate == 0 {
		for _, name := range []string{ours, nginx} {
			if x := row.Series(name); x != nil && (shape.rate == 0 || x.RPS/2 < shape.rate) {
				shape.rate = x.RPS / 2
			}
		}
	}
	if shape.rate == 0 && slices.Contains(s.o.Parts, partOpen) {
		var err error
		if shape.rate, err = s.halfPeak(ctx, shape); err != nil {
			return err
		}
	}
	return s.row(ctx, partOpen, shape)
}

// halfPeak finds out what the rate is where the part whole does not tell it: by one run of ours and one of nginx.
func (s *session) halfPeak(ctx context.Context, shape shape) (float64, error) {
	peak := math.Inf(1)
	for _, c := range s.contestants {
		if c.name != ours && c.name != nginx {
			continue
		}
		x, err := load(ctx, c.addr, shape, s.lasting(shape))
		if err != nil {
			return 0, fmt.Errorf("%s, the most of %s of %d bytes: %w", c.name, shape.kind, shape.body, err)
		}
		peak = min(peak, x.rps())
	}
	return peak / 2, nil
}

func (s *session) row(ctx context.Context, part string, shape shape) error {
	if !slices.Contains(s.o.Parts, part) {
		return nil
	}
	var who []contestant
	for _, c := range s.contestants {
		if c.in(part) {
			who = append(who, c)
		}
	}
	samples := make([][]*sample, len(who))
	for round := range s.o.Rounds {
		for k := range who {
			i := k
			if round%2 == 1 {
				i = len(who) - 1 - k
			}
			fmt.Fprintf(s.o.Progress, "\r\033[K%s: %s of %d bytes, %d connections: round %d, %s", part, shape.kind, shape.body, shape.conns, round+1, who[i].name)
			before := usageOf(who[i].group)
			shape := shape
			if part == partExact {
				shape.talk = who[i].talk()
			}
			x, err := load(ctx, who[i].addr, shape, s.lasting(shape))
			if err != nil {
				return fmt.Errorf("%s, %s of %d bytes: %w", who[i].name, shape.kind, shape.body, err)
			}
			if g := who[i].group; g != 0 {
				after, n := usageOf(g), float64(x.asked)
				x.cpu, x.switches = (after.seconds-before.seconds)/n, float64(after.switches-before.switches)/n
			}
			samples[i] = append(samples[i], x)
		}
	}
	fmt.Fprint(s.o.Progress, "\r\033[K")
	s.report.Rows = append(s.report.Rows, makeRow(part, shape, who, samples))
	return nil
}
