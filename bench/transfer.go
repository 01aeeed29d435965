package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"runtime"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Options say what Transfer measures. The zero value is the standard run.
type Options struct {
	Transport string   // tcp, shm or all; "" is all
	Blocks    []int    // block sizes in bytes; 64 KiB when empty
	Bytes     int64    // moved by each measurement; 2 GiB when 0
	Region    int64    // lent memory on each side; 512 MiB when 0
	Lanes     int      // of a channel; 0 leaves it to the daemon
	Rounds    int      // alternating pairs; 7 when 0
	Child     []string // command line of a process that calls MaybeChild; this binary when empty
	GoLimits  bool     // use the loops in Go even where a C compiler is found
	Progress  io.Writer
}

// Report is what Transfer found, one JSON document.
type Report struct {
	Kind    string    `json:"kind"`
	Version int       `json:"version"`
	Time    time.Time `json:"time"`
	Machine Machine   `json:"machine"`
	Limits  string    `json:"limits"` // which loops were the limits
	Rows    []Row     `json:"rows"`
}

// Machine is where it was measured.
type Machine struct {
	CPUs   int    `json:"cpus"`
	Load1  string `json:"load_1min"` // before: a busy machine flatters whoever runs more threads
	Arch   string `json:"arch"`
	Kernel string `json:"kernel"`
	Go     string `json:"go"`
}

// Row is one measurement: medians of the pairs, which are listed too.
type Row struct {
	Name           string  `json:"name"`
	Transport      string  `json:"transport"`
	Limit          string  `json:"limit"`
	Processes      int     `json:"daemon_processes"`
	BlockBytes     int     `json:"block_bytes"`
	BytesPerRun    int64   `json:"bytes_per_run"`
	RegionBytes    int64   `json:"region_bytes"`
	Lanes          int     `json:"lanes"`
	Rounds         int     `json:"rounds"`
	OursGBps       float64 `json:"ours_gb_per_s"`
	LimitGBps      float64 `json:"limit_gb_per_s"`
	Ratio          float64 `json:"ratio"` // median of the pairs' ratios
	RatioMin       float64 `json:"ratio_min"`
	RatioMax       float64 `json:"ratio_max"`
	OursCPUPerGB   float64 `json:"ours_cpu_s_per_gb"`
	LimitCPUPerGB  float64 `json:"limit_cpu_s_per_gb"`
	Pairs          []Pair  `json:"pairs"`
	VerifiedBytes  int64   `json:"verified_bytes"`   // compared with the source after the first round
	BlockP50Micros float64 `json:"one_block_p50_us"` // one block, from the engine's push to its event
	BlockP99Micros float64 `json:"one_block_p99_us"`
	SetupMicros    float64 `json:"setup_us"` // median of present and bind until P knows, a lease
	UnitsPerLease  int     `json:"units_per_lease"`
	LeasesAtATime  int     `json:"leases_at_a_time"`
}

// Pair is one of ours and one of the limit, run next to each other.
type Pair struct {
	Ours  Measure `json:"ours"`
	Limit Measure `json:"limit"`
}

// Measure is one run.
type Measure struct {
	Bytes      int64   `json:"bytes"`
	Seconds    float64 `json:"seconds"`
	CPUSeconds float64 `json:"cpu_seconds"`
}

// GBps is the rate in 10^9 bytes a second.
func (m Measure) GBps() float64 { return float64(m.Bytes) / m.Seconds / 1e9 }

func (m Measure) cpuPerGB() float64 { return m.CPUSeconds / (float64(m.Bytes) / 1e9) }

func (o Options) withDefaults() (Options, []string, error) {
	if len(o.Blocks) == 0 {
		o.Blocks = []int{64 << 10}
	}
	if o.Bytes == 0 {
		o.Bytes = 2 << 30
	}
	if o.Region == 0 {
		o.Region = 512 << 20
	}
	if o.Rounds == 0 {
		o.Rounds = 7
	}
	if o.Progress == nil {
		o.Progress = io.Discard
	}
	for _, b := range o.Blocks {
		if b < 64 || b%64 != 0 || int64(b) > o.Region || o.Region%int64(b) != 0 {
			return o, nil, fmt.Errorf("block size %d: need a multiple of 64 that divides the region's %d bytes", b, o.Region)
		}
	}
	if o.Bytes < o.Region {
		o.Bytes = o.Region
	}
	o.Bytes -= o.Bytes % o.Region
	switch o.Transport {
	case "", "all":
		return o, []string{"tcp", "shm"}, nil
	case "tcp", "shm":
		return o, []string{o.Transport}, nil
	}
	return o, nil, fmt.Errorf("transport %q: choose tcp, shm or all", o.Transport)
}

// Transfer measures. It needs about three times the region in memory.
func Transfer(ctx context.Context, o Options) (*Report, error) {
	o, transports, err := o.withDefaults()
	if err != nil {
		return nil, fmt.Errorf("bench transfer: %w", err)
	}
	dir, err := os.MkdirTemp("", "headrace-bench-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	lim := newLimits(ctx, dir, o.GoLimits)
	r := &Report{Kind: "headrace.bench.transfer", Version: 1, Time: time.Now().UTC(), Machine: machine(), Limits: lim.what}
	for _, t := range transports {
		for _, b := range o.Blocks {
			row, err := measure(ctx, o, dir, t, b, lim)
			if err != nil {
				return nil, fmt.Errorf("bench transfer over %s, blocks of %d bytes: %w", t, b, err)
			}
			r.Rows = append(r.Rows, row)
		}
	}
	return r, nil
}

func machine() Machine {
	var u unix.Utsname
	_ = unix.Uname(&u)
	load, _ := os.ReadFile("/proc/loadavg")
	one, _, _ := strings.Cut(string(load), " ")
	return Machine{Load1: one, CPUs: runtime.NumCPU(), Arch: runtime.GOARCH, Kernel: unix.ByteSliceToString(u.Release[:]), Go: runtime.Version()}
}

func measure(ctx context.Context, o Options, dir, transport string, block int, lim *limits) (row Row, err error) {
	rig, err := newRig(ctx, o, dir, transport, block)
	if err != nil {
		return row, err
	}
	defer func() { err = errors.Join(err, rig.close()) }()
	limit := "tcp"
	if transport == "shm" {
		limit = "copy"
	}
	row = Row{Name: fmt.Sprintf("transfer/%s/%d", transport, block), Transport: transport, Limit: lim.name(limit), BlockBytes: block,
		BytesPerRun: o.Bytes, RegionBytes: o.Region, Lanes: o.Lanes, Rounds: o.Rounds, Processes: len(rig.daemons), UnitsPerLease: int(o.Region) / block / groups, LeasesAtATime: groups}
	if _, err := rig.move(ctx, o.Region); err != nil { // warm: channel up, pages mapped
		return row, err
	}
	if row.VerifiedBytes, err = rig.verify(); err != nil {
		return row, err
	}
	for i := range o.Rounds {
		var p Pair
		steps := []func() error{
			func() (err error) { p.Ours, err = rig.move(ctx, o.Bytes); return err },
			func() (err error) { p.Limit, err = lim.run(ctx, limit, block, o.Bytes, o.Region); return err },
		}
		if i%2 == 1 {
			slices.Reverse(steps)
		}
		for _, step := range steps {
			if err := step(); err != nil {
				return row, err
			}
		}
		row.Pairs = append(row.Pairs, p)
		fmt.Fprintf(o.Progress, "%s %d KiB, round %d of %d: %.2f GB/s, limit %.2f GB/s\n", transport, block>>10, i+1, o.Rounds, p.Ours.GBps(), p.Limit.GBps())
	}
	took, err := rig.latency(ctx)
	if err != nil {
		return row, fmt.Errorf("measure one block: %w", err)
	}
	row.BlockP50Micros, row.BlockP99Micros = median(took), quantile(took, 0.99)
	row.SetupMicros = median(rig.setup)
	row.summarize()
	return row, nil
}

func (r *Row) summarize() {
	of := func(f func(Pair) float64) []float64 {
		v := make([]float64, len(r.Pairs))
		for i, p := range r.Pairs {
			v[i] = f(p)
		}
		return v
	}
	ratios := of(func(p Pair) float64 { return p.Ours.GBps() / p.Limit.GBps() })
	r.Ratio, r.RatioMin, r.RatioMax = median(ratios), slices.Min(ratios), slices.Max(ratios)
	r.OursGBps = median(of(func(p Pair) float64 { return p.Ours.GBps() }))
	r.LimitGBps = median(of(func(p Pair) float64 { return p.Limit.GBps() }))
	r.OursCPUPerGB = median(of(func(p Pair) float64 { return p.Ours.cpuPerGB() }))
	r.LimitCPUPerGB = median(of(func(p Pair) float64 { return p.Limit.cpuPerGB() }))
}

func median(v []float64) float64 {
	if len(v) == 0 {
		return math.NaN()
	}
	v = slices.Sorted(slices.Values(v))
	if n := len(v); n%2 == 0 {
		return (v[n/2-1] + v[n/2]) / 2
	}
	return v[len(v)/2]
}

func quantile(v []float64, q float64) float64 {
	v = slices.Sorted(slices.Values(v))
	return v[int(q*float64(len(v)-1))]
}
