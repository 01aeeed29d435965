package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"time"

	"github.com/headrace/headrace/transfer"
)

// Options say what Transfer measures. The zero value is the whole run.
type Options struct {
	Transport string        // tcp, shm, rdma or all; "" is all
	Parts     []string      // of Parts; all when empty
	Blocks    []int         // block sizes in bytes; the profile's when empty
	Quick     bool          // fewer sizes, rounds and bytes: under a minute
	Bytes     int64         // moved by each run; 1 GiB when 0, half of that when quick
	Region    int64         // lent memory on each side; 512 MiB when 0
	Lanes     int           // of a channel; 0 leaves it to the daemon
	Spin      time.Duration // how long daemons poll for RDMA completions before they park
	Rounds    int           // runs of each contestant; 7 when 0, 3 when quick
	Peers     fs.FS         // drivers of other transfer engines, Drivers for ours; nil: none
	Child     []string      // command line of a process that calls MaybeChild; this binary when empty
	GoLimits  bool          // use the loops in Go even where a C compiler is found
	Progress  io.Writer

	fixedBytes bool // Bytes was given
}

// Parts of a run.
var Parts = []string{partPosts, partSizes, partLatency, partBatches, partLanes, partEngines, partRails, partCompletions}

const (
	partSizes   = "sizes"
	partLatency = "latency"
	partBatches = "batches"
	partLanes   = "lanes"
	partEngines = "engines"
	// Those of RDMA alone.
	partPosts       = "posts"
	partRails       = "rails"
	partCompletions = "completions"
)

// profile is what the parts measure beside the options.
type profile struct {
	blocks, laneBlocks, batches, engines []int
	latencyBlocks                        []int
	samples                              int // one-block writes a round
}

const (
	kib = 1 << 10
	mib = 1 << 20
)

var (
	wholeProfile = profile{blocks: []int{4 * kib, 16 * kib, 64 * kib, 256 * kib, mib, 4 * mib}, laneBlocks: []int{64 * kib, 256 * kib, mib}, batches: []int{1, 16, 64, 256, 1024},
		engines: []int{1, 2, 4}, latencyBlocks: []int{4 * kib, 64 * kib, mib}, samples: 1000}
	quickProfile = profile{blocks: []int{16 * kib, 64 * kib, mib}, laneBlocks: []int{64 * kib}, batches: []int{1, 16, 256}, engines: []int{2}, latencyBlocks: []int{64 * kib}, samples: 500}
)

// peerBytes is what peers move in a run: some are slow, and a rate is a rate.
const peerBytes = 256 * mib

func (o Options) withDefaults() (Options, profile, error) {
	p := wholeProfile
	def := func(v *int64, whole, quick int64) {
		if *v == 0 && o.Quick {
			*v = quick
		} else if *v == 0 {
			*v = whole
		}
	}
	rounds := int64(o.Rounds)
	o.fixedBytes = o.Bytes != 0
	def(&o.Bytes, 1<<30, 512*mib)
	def(&o.Region, 512*mib, 512*mib)
	def(&rounds, 7, 3)
	o.Rounds = int(rounds)
	if o.Quick {
		p = quickProfile
	}
	if len(o.Blocks) > 0 {
		p.blocks, p.laneBlocks = o.Blocks, o.Blocks
	}
	if len(o.Parts) == 0 {
		o.Parts = Parts
	}
	if o.Progress == nil {
		o.Progress = io.Discard
	}
	for _, part := range o.Parts {
		if !slices.Contains(Parts, part) {
			return o, p, fmt.Errorf("part %q: choose of %v", part, Parts)
		}
	}
	for _, b := range slices.Concat(p.blocks, p.laneBlocks, p.latencyBlocks) {
		if b < 64 || b%64 != 0 || int64(b) > o.Region/8 || o.Region%int64(b) != 0 {
			return o, p, fmt.Errorf("block size %d: need a multiple of 64 that divides the region's %d bytes at least 8 times", b, o.Region)
		}
	}
	if o.Rounds < 1 {
		return o, p, fmt.Errorf("%d rounds: need at least 1", o.Rounds)
	}
	o.Bytes = max(o.Bytes, o.Region)
	o.Bytes -= o.Bytes % o.Region
	if o.Transport == "" {
		o.Transport = "all"
	}
	if !slices.Contains([]string{"all", "tcp", "shm", "rdma"}, o.Transport) {
		return o, p, fmt.Errorf("transport %q: choose tcp, shm, rdma or all", o.Transport)
	}
	return o, p, nil
}

// Check says what is wrong with o, before anything is started.
func (o Options) Check() error {
	_, _, err := o.withDefaults()
	return err
}

// session is one run of Transfer.
type session struct {
	o     Options
	p     profile
	dir   string
	lim   *limits
	iperf *iperfServer
	peers []*peer // of the transport at hand
	ports []transfer.PortStatus
	perf  *perftest
	rig   *rig // one pair, Options.Lanes lanes, of the transport at hand
	r     *Report
}

// Transfer measures. When ctx ends, the report holds what was measured until then and is not complete. It needs about six
// times the region in memory, ten times with peers.
func Transfer(ctx context.Context, o Options) (*Report, error) {
	o, p, err := o.withDefaults()
	if err != nil {
		return nil, fmt.Errorf("bench transfer: %w", err)
	}
	dir, err := os.MkdirTemp("", "headrace-bench-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	start := time.Now()
	s := &session{o: o, p: p, dir: dir, r: &Report{Kind: "headrace.bench.transfer", Version: ReportVersion, Time: start.UTC(), Profile: "whole", Rounds: o.Rounds, RegionBytes: o.Region,
		Machine: ThisMachine(), Submission: "message", Contestants: []Contestant{}, Rows: []Row{}, Latency: []LatencyRow{}, NotMeasured: []string{}}}
	if o.Quick {
		s.r.Profile = "quick"
	}
	err = errors.Join(s.all(ctx), s.close())
	s.r.Seconds = time.Since(start).Seconds()
	s.r.judge()
	if ctx.Err() != nil {
		return s.r, nil // what ends then fails in many ways, none of them news
	}
	s.r.Complete = err == nil
	return s.r, err
}

func (s *session) close() error { return errors.Join(s.iperf.close(), s.lim.close()) }

func (s *session) all(ctx context.Context) error {
	if s.o.Transport != "rdma" {
		if err := s.startLimits(ctx); err != nil {
			return err
		}
	}
	for _, t := range []string{"tcp", "shm", "rdma"} {
		if s.o.Transport != "all" && s.o.Transport != t {
			continue
		}
		if t == "rdma" {
			if there, err := s.findRDMA(); err != nil || !there {
				return err
			}
		}
		if err := s.transport(ctx, t); err != nil {
			return fmt.Errorf("bench transfer over %s: %w", t, err)
		}
	}
	return nil
}

// startLimits starts what TCP and the local copy are held against.
func (s *session) startLimits(ctx context.Context) (err error) {
	if s.lim, err = newLimits(ctx, s.dir, s.o.Region, s.o.GoLimits); err != nil {
		return err
	}
	if s.iperf, err = startIperf(ctx); err != nil {
		s.note("%v", err)
	}
	if s.o.Peers == nil {
		s.note("mooncake, nixl: not measured, run with --peers to have them installed and measured")
	}
	return nil
}

func (s *session) note(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	s.r.NotMeasured = append(s.r.NotMeasured, text)
	fmt.Fprintln(s.o.Progress, text)
}

func (s *session) transport(ctx context.Context, t string) (err error) {
	s.contestant(t, ours, "engines in this process, their daemons in processes of their own")
	defer func() { s.stopPeers() }()
	if err := s.startPeers(ctx, t); err != nil {
		return err
	}
	if s.rig, err = s.newRig(ctx, t, s.o.Lanes, 1); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.rig.close()) }()
	for _, part := range Parts {
		if !slices.Contains(s.o.Parts, part) {
			continue
		}
		measure := map[string]func(context.Context, string) error{partSizes: s.sizes, partLatency: s.latency, partBatches: s.batches, partLanes: s.lanes, partEngines: s.engines}[part]
		if t == "rdma" && measure == nil {
			measure = map[string]func(context.Context, string) error{partRails: s.rails, partCompletions: s.completions}[part]
		}
		if measure == nil { // a part of RDMA alone
			continue
		}
		if err := measure(ctx, t); err != nil {
			return fmt.Errorf("%s: %w", part, err)
		}
	}
	return nil
}

func (s *session) newRig(ctx context.Context, t string, lanes, engines int) (*rig, error) {
	return newRig(ctx, s.rigOptions(t, lanes, engines))
}

// rigOptions are those of every part. Over RDMA one port takes part, as with perftest.
func (s *session) rigOptions(t string, lanes, engines int) rigOptions {
	o := rigOptions{child: s.o.Child, dir: s.dir, transport: t, lanes: lanes, engines: engines, memory: s.o.Region, spin: s.o.Spin}
	if t == "rdma" {
		o.devices = devicesOf(s.ports[:1])
	}
	return o
}

// contestant says once who a name is.
func (s *session) contestant(transport, name, what string) {
	c := Contestant{Name: name, Transport: transport, What: what}
	if !slices.Contains(s.r.Contestants, c) {
		s.r.Contestants = append(s.r.Contestants, c)
	}
}

// race measures a row's contestants, ours first and on a rig, and keeps the row, also when it was cut short.
func (s *session) race(ctx context.Context, r *rig, row *Row, list []contestant) error {
	what := fmt.Sprintf("%s %s %d KiB", row.Part, row.Transport, row.BlockBytes/kib)
	switch row.Part {
	case partBatches:
		what += fmt.Sprintf(" x %d", row.BatchBlocks)
	case partLanes:
		what += fmt.Sprintf(", %d lanes", row.Lanes)
	case partEngines:
		what += fmt.Sprintf(", %d engines", row.Engines)
	}
	var foreign []float64
	list[0].run = withForeign(list[0].run, r.cpu, &foreign)
	runs, notes, err := race(ctx, s.o.Rounds, list, s.o.Progress, what)
	s.r.NotMeasured = append(s.r.NotMeasured, notes...)
	if len(runs[list[0].name]) == 0 {
		return err
	}
	if r.whole && err == nil {
		if _, err = r.shares(ctx); err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
	}
	for _, c := range list {
		if c.what != "" {
			s.contestant(row.Transport, c.name, c.what)
		}
	}
	row.fill(list, runs)
	row.ForeignCores = median(foreign)
	s.r.Machine.ForeignCores = max(s.r.Machine.ForeignCores, row.ForeignCores)
	s.r.Rows = append(s.r.Rows, *row)
	return err
}

// withForeign also notes how many cores others used while it ran: what the machine used less what is known.
func withForeign(run func(context.Context) (Measure, error), known func() float64, cores *[]float64) func(context.Context) (Measure, error) {
	return func(ctx context.Context) (Measure, error) {
		busy, cpu, start := busyCPU(), known(), time.Now()
		m, err := run(ctx)
		*cores = append(*cores, max(busyCPU()-busy-(known()-cpu), 0)/time.Since(start).Seconds())
		return m, err
	}
}
