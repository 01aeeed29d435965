// Package planbench measures the scheduler's placements: how many a second, how long each takes, what memory they take, and how
// that grows with the cluster, each beside a plain look at every host in the same run. It measures the index alone and the whole
// explained decision apart; nothing is started anywhere.
package planbench

import (
	"context"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"strconv"
	"time"

	"github.com/headrace/headrace/scheduler/cluster"
	"github.com/headrace/headrace/scheduler/place"
)

// Options say what Run measures. The zero value is the whole run.
type Options struct {
	Nodes     []int         // 210, 500, 1000, 2100, 5000, 10000 when nil
	GPUs      int           // a node; 8 when 0
	Instances int           // placed at once on the smallest cluster; 20,000 when 0
	Duration  time.Duration // of the steady state on each cluster; 2 s when 0
	Seed      uint64
	Progress  io.Writer
}

// Report is one JSON document.
type Report struct {
	Kind     string    `json:"kind"`
	Version  int       `json:"version"`
	Time     time.Time `json:"time"`
	Complete bool      `json:"complete"`
	CPUs     int       `json:"cpus"`
	Go       string    `json:"go"`
	GPUs     int       `json:"gpus_per_node"`
	Seed     uint64    `json:"seed"`
	Burst    *Burst    `json:"burst,omitempty"`
	Rows     []Row     `json:"rows"`
	// Growth is the exponent b of cost ~ nodes^b over the rows: 1 is as the number of nodes, 0 not at all.
	Growth   float64   `json:"growth_exponent"`
	Verdicts []Verdict `json:"verdicts"`
}

// Burst is many instances placed at once on an empty cluster.
type Burst struct {
	Nodes     int     `json:"nodes"`
	Instances int     `json:"instances"`
	Seconds   float64 `json:"seconds"`
	Rate      float64 `json:"placements_per_s"`
	// BuildSeconds is making the state and the index of the snapshot, before.
	BuildSeconds float64 `json:"build_s"`
}

// Row is the steady state on one cluster: filled, then an instance leaves at random for each that comes.
type Row struct {
	Nodes       int     `json:"nodes"`
	Filled      int     `json:"instances"` // that are there throughout
	Share       float64 `json:"vram_share"`
	Placements  int     `json:"placements"`
	Denied      int     `json:"denied"`
	Rate        float64 `json:"placements_per_s"` // of searches and bookings, by their own time
	FillRate    float64 `json:"fill_per_s"`       // while the empty cluster is filled, all time counted
	ChurnRate   float64 `json:"churn_per_s"`      // a removal, a placement and reading the clock, all time counted
	MeanMicros  float64 `json:"place_us_mean"`    // of a search and booking
	P50Micros   float64 `json:"place_us_p50"`
	P99Micros   float64 `json:"place_us_p99"`
	MaxMicros   float64 `json:"place_us_max"`
	Allocs      float64 `json:"allocs_per_placement"`
	HeapBytes   int64   `json:"heap_bytes"`
	NodeBytes   float64 `json:"heap_bytes_per_node"`
	ScanMicros  float64 `json:"scan_us"` // the same question by a look at every host
	ScanRatio   float64 `json:"scan_ratio"`
	ScanAgreed  int     `json:"scan_agreed"` // answers compared, all equal
	ExplainedUs float64 `json:"explained_us"`
}

// Verdict is a target and whether this run met it.
type Verdict struct {
	Target   string  `json:"target"`
	Measured float64 `json:"measured"`
	Met      bool    `json:"met"`
}

// Version counts changes of the document that a reader would notice.
const Version = 1

func (o Options) withDefaults() Options {
	if o.Nodes == nil {
		o.Nodes = []int{210, 500, 1000, 2100, 5000, 10000}
	}
	if o.GPUs == 0 {
		o.GPUs = 8
	}
	if o.Instances == 0 {
		o.Instances = 20_000
	}
	if o.Duration == 0 {
		o.Duration = 2 * time.Second
	}
	return o
}

// Check says what cannot be measured.
func (o Options) Check() error {
	o = o.withDefaults()
	for _, n := range o.Nodes {
		if n < 1 || n > 100_000 {
			return fmt.Errorf("measure on %d nodes: give 1 to 100000", n)
		}
	}
	if o.GPUs < 1 || o.GPUs > 64 || o.Instances < 1 || o.Instances > 10_000_000 || o.Duration < 0 {
		return fmt.Errorf("measure with %d GPUs a node and %d instances for %v: give 1 to 64, 1 to 10000000, and a duration above 0", o.GPUs, o.Instances, o.Duration)
	}
	return nil
}

// mix is what is placed: engines of one to eight GPUs, whole ones and shares, with how often each comes.
var mix = []struct {
	claim cluster.Claim
	often int
}{
	{cluster.Claim{VRAM: 6 << 30, RAM: 2 << 30}, 30},
	{cluster.Claim{VRAM: 11 << 30, RAM: 3 << 30}, 20},
	{cluster.Claim{VRAM: 17 << 30, RAM: 4 << 30}, 15},
	{cluster.Claim{VRAM: 26 << 30, RAM: 6 << 30}, 10},
	{cluster.Claim{VRAM: 39 << 30, RAM: 8 << 30}, 10},
	{cluster.Claim{VRAM: 2 * 70 << 30, RAM: 20 << 30, GPUsEach: 2}, 8},
	{cluster.Claim{VRAM: 4 * 70 << 30, RAM: 40 << 30, GPUsEach: 4}, 5},
	{cluster.Claim{VRAM: 8 * 60 << 30, RAM: 80 << 30, GPUsEach: 8}, 2},
}

// gpuBytes and hostBytes are a node's.
const (
	gpuBytes  = 80 << 30
	hostBytes = 1 << 40
)

// snapshot is a cluster of equal nodes, and the models of the mix.
func snapshot(nodes, gpus int) *cluster.Snapshot {
	s := &cluster.Snapshot{Hosts: make([]cluster.Host, nodes)}
	for i := range s.Hosts {
		s.Hosts[i] = cluster.Host{Name: "node" + strconv.Itoa(i), Memory: hostBytes, GPUs: []cluster.GPU{{Model: "H100", Memory: gpuBytes, Count: gpus}}}
	}
	for i, m := range mix {
		claim := m.claim
		if claim.GPUsEach > gpus {
			claim.GPUsEach, claim.VRAM = 1, 60<<30
		}
		s.Models = append(s.Models, cluster.Model{Name: "m" + strconv.Itoa(i), Backend: "custom", Claim: claim})
	}
	s.Normalize()
	return s
}

// fleet is a cluster with its index and compiled models.
type fleet struct {
	fast   *place.Fast
	models []*place.Compiled
	drawn  []int // a model for each draw, as often as it should come
}

func newFleet(s *cluster.Snapshot) (*fleet, error) {
	st, err := place.NewState(s)
	if err != nil {
		return nil, err
	}
	f := &fleet{}
	if f.fast, err = place.NewFast(st); err != nil {
		return nil, err
	}
	for i := range s.Models {
		c, err := f.fast.Compile(&s.Models[i])
		if err != nil {
			return nil, err
		}
		f.models = append(f.models, c)
		for range mix[i].often {
			f.drawn = append(f.drawn, i)
		}
	}
	return f, nil
}

// Run measures. A canceled context ends it early: the report then says that it is not complete.
func Run(ctx context.Context, o Options) (*Report, error) {
	if err := o.Check(); err != nil {
		return nil, err
	}
	o = o.withDefaults()
	r := &Report{Kind: "plan", Version: Version, Time: time.Now().UTC(), CPUs: runtime.NumCPU(), Go: runtime.Version(), GPUs: o.GPUs, Seed: o.Seed}
	if o.Progress != nil {
		fmt.Fprintf(o.Progress, "%d instances on %d nodes\n", o.Instances, o.Nodes[0])
	}
	var err error
	if r.Burst, err = burst(o); err != nil {
		return nil, err
	}
	for _, nodes := range o.Nodes {
		if ctx.Err() != nil {
			break
		}
		if o.Progress != nil {
			fmt.Fprintf(o.Progress, "%d nodes\n", nodes)
		}
		row, err := steady(ctx, o, nodes)
		if err != nil {
			return nil, err
		}
		r.Rows = append(r.Rows, *row)
	}
	r.Complete = ctx.Err() == nil
	r.Growth = growth(r.Rows)
	r.judge()
	return r, nil
}

// burst places equal instances on an empty cluster, as many as are asked for.
func burst(o Options) (*Burst, error) {
	nodes := o.Nodes[0]
	each := (o.Instances + nodes*o.GPUs - 1) / (nodes * o.GPUs)
	begun := time.Now()
	s := snapshot(nodes, o.GPUs)
	s.Models[0].Claim = cluster.Claim{VRAM: cluster.Bytes(gpuBytes / each), RAM: cluster.Bytes(hostBytes / (each * o.GPUs))}
	f, err := newFleet(s)
	if err != nil {
		return nil, err
	}
	b := &Burst{Nodes: nodes, Instances: o.Instances, BuildSeconds: time.Since(begun).Seconds()}
	begun = time.Now()
	for i := range o.Instances {
		p, ok := f.fast.Place(f.models[0])
		if !ok {
			return nil, fmt.Errorf("place %d instances on %d nodes: there was room for %d", o.Instances, nodes, i)
		}
		f.fast.Take(p)
	}
	b.Seconds = time.Since(begun).Seconds()
	b.Rate = float64(o.Instances) / b.Seconds
	return b, nil
}

// fillShare is how full the steady state is, of VRAM.
const fillShare = .85

// run is the steady state while it is measured.
type run struct {
	*fleet
	r      *rand.Rand
	held   []place.Pick
	denied int
}

// one takes away a random instance and places a new one. It answers how long the placement took.
func (x *run) one() time.Duration {
	i := x.r.IntN(len(x.held))
	x.fast.Give(x.held[i])
	c := x.models[x.drawn[x.r.IntN(len(x.drawn))]]
	begun := time.Now()
	p, ok := x.fast.Place(c)
	if !ok { // a large one on a full cluster: what left comes back
		x.denied++
		p = x.held[i]
	}
	x.fast.Take(p)
	took := time.Since(begun)
	x.held[i] = p
	return took
}

// latencies bounds how many single times are kept.
const latencies = 1 << 18

// steady fills a cluster and measures it.
func steady(ctx context.Context, o Options, nodes int) (*Row, error) {
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	s := snapshot(nodes, o.GPUs)
	f, err := newFleet(s)
	if err != nil {
		return nil, err
	}
	x := &run{fleet: f, r: rand.New(rand.NewPCG(o.Seed, uint64(nodes)))}
	x.held = make([]place.Pick, 0, nodes*o.GPUs*8)
	begun := time.Now()
	row := &Row{Nodes: nodes, Share: x.fill(float64(nodes) * float64(o.GPUs) * gpuBytes)}
	row.Filled = len(x.held)
	row.FillRate = float64(row.Filled) / time.Since(begun).Seconds()
	if row.Filled == 0 {
		return nil, fmt.Errorf("fill %d nodes: nothing fits", nodes)
	}
	for range 1000 { // caches, and the allocator's
		x.one()
	}
	times := make([]time.Duration, 0, latencies)
	var sum time.Duration
	x.denied = 0
	runtime.ReadMemStats(&after)
	allocs := after.Mallocs
	begun = time.Now()
	for row.Placements == 0 || time.Since(begun) < o.Duration && ctx.Err() == nil {
		for range 256 {
			took := x.one()
			sum += took
			if len(times) < cap(times) {
				times = append(times, took)
			}
			row.Placements++
		}
	}
	row.ChurnRate = float64(row.Placements) / time.Since(begun).Seconds()
	runtime.ReadMemStats(&after)
	row.Allocs = float64(after.Mallocs-allocs) / float64(row.Placements)
	row.Denied = x.denied
	row.Rate = float64(row.Placements) / sum.Seconds()
	row.MeanMicros = micros(sum) / float64(row.Placements)
	slices.Sort(times)
	row.P50Micros, row.P99Micros, row.MaxMicros = micros(times[len(times)/2]), micros(times[len(times)*99/100]), micros(times[len(times)-1])
	runtime.GC()
	runtime.ReadMemStats(&after)
	row.HeapBytes = int64(after.HeapAlloc) - int64(before.HeapAlloc) - int64(cap(times))*8
	runtime.KeepAlive(times)
	row.NodeBytes = float64(row.HeapBytes) / float64(nodes)
	if err := x.beside(row); err != nil {
		return nil, err
	}
	return row, explained(row, s)
}

// fill places until the share of VRAM is reached or many do not fit, and answers the share.
func (x *run) fill(total float64) float64 {
	used, misses := 0., 0
	for used < fillShare*total && misses < 1000 {
		p, ok := x.fast.Place(x.models[x.drawn[x.r.IntN(len(x.drawn))]])
		if !ok {
			misses++
			continue
		}
		x.fast.Take(p)
		x.held = append(x.held, p)
		used += float64(p.Ask.VRAM) * float64(p.Ask.GPUs)
	}
	return used / total
}

// beside asks the same questions of the index and of a plain scan, and refuses other answers.
func (x *run) beside(row *Row) error {
	var scan, index time.Duration
	for row.ScanAgreed < 200 {
		i := x.r.IntN(len(x.held))
		x.fast.Give(x.held[i])
		c := x.models[x.drawn[x.r.IntN(len(x.drawn))]]
		begun := time.Now()
		want, wantOK := x.fast.Scan(c)
		scan += time.Since(begun)
		begun = time.Now()
		got, ok := x.fast.Place(c)
		index += time.Since(begun)
		if ok != wantOK || got != want {
			return fmt.Errorf("the index says %+v %v and the scan %+v %v on %d nodes", got, ok, want, wantOK, row.Nodes)
		}
		x.fast.Take(x.held[i])
		row.ScanAgreed++
	}
	row.ScanMicros = micros(scan) / float64(row.ScanAgreed)
	row.ScanRatio = float64(scan) / float64(max(index, 1))
	return nil
}

// explained measures the decision with all of its reasons, which looks at every host by design.
func explained(row *Row, s *cluster.Snapshot) error {
	st, err := place.NewState(s)
	if err != nil {
		return err
	}
	const times = 3
	begun := time.Now()
	for range times {
		if _, denied := st.Place(&s.Models[0], "i"); denied != nil {
			return fmt.Errorf("place with reasons on %d nodes: %s", row.Nodes, denied.Reason)
		}
	}
	row.ExplainedUs = micros(time.Since(begun)) / times
	return nil
}

func micros(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 }

// growth fits cost ~ nodes^b by least squares over the logarithms; 0 with fewer than two rows.
func growth(rows []Row) float64 {
	var n, sx, sy, sxx, sxy float64
	for _, r := range rows {
		x, y := math.Log(float64(r.Nodes)), math.Log(r.MeanMicros)
		n, sx, sy, sxx, sxy = n+1, sx+x, sy+y, sxx+x*x, sxy+x*y
	}
	if d := n*sxx - sx*sx; n > 1 && d > 0 {
		return (n*sxy - sx*sy) / d
	}
	return 0
}

// judge holds the run against the targets that it measured.
func (r *Report) judge() {
	if b := r.Burst; b != nil && b.Nodes == 210 && b.Instances == 20_000 {
		r.Verdicts = append(r.Verdicts, Verdict{"20,000 instances on 210 nodes in less than a second", b.Seconds, b.Seconds < 1})
	}
	for _, row := range r.Rows {
		if row.Nodes == 10_000 && r.GPUs == 8 {
			r.Verdicts = append(r.Verdicts, Verdict{"100,000 placements a second on 10,000 nodes of 8 GPUs", row.Rate, row.Rate >= 100_000})
		}
	}
	if len(r.Rows) > 1 {
		r.Verdicts = append(r.Verdicts, Verdict{"cost a placement grows slower than the number of nodes (exponent below 1)", r.Growth, r.Growth < 1})
		worst := 0.
		for _, row := range r.Rows {
			worst = max(worst, row.Allocs)
		}
		r.Verdicts = append(r.Verdicts, Verdict{"no allocation a placement (below 0.01)", worst, worst < .01})
	}
}

// Failed says whether a target that was measured was missed.
func (r *Report) Failed() bool {
	return slices.ContainsFunc(r.Verdicts, func(v Verdict) bool { return !v.Met })
}
