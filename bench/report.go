package bench

import (
	"os"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// ReportVersion counts changes of the document that a reader would notice. docs/bench.md describes it.
const ReportVersion = 2

// Report is what Transfer found, one JSON document.
type Report struct {
	Kind        string       `json:"kind"`
	Version     int          `json:"version"`
	Time        time.Time    `json:"time"`
	Seconds     float64      `json:"seconds"`
	Profile     string       `json:"profile"`  // whole or quick
	Complete    bool         `json:"complete"` // false: interrupted, the rest is missing
	Rounds      int          `json:"rounds"`
	RegionBytes int64        `json:"region_bytes"` // lent on each side
	Machine     Machine      `json:"machine"`
	Submission  string       `json:"submission"` // how the engines talk to their daemons: message or ring
	Contestants []Contestant `json:"contestants"`
	Rows        []Row        `json:"rows"`
	Latency     []LatencyRow `json:"latency"`
	Posts       []PostRow    `json:"posts,omitempty"`
	Verdicts    []Verdict    `json:"verdicts"`
	NotMeasured []string     `json:"not_measured"` // what, why, and how to have it
}

// Machine is where it was measured.
type Machine struct {
	CPUs         int     `json:"cpus"`
	Load1        string  `json:"load_1min"`     // before: a busy machine flatters whoever runs more threads
	ForeignCores float64 `json:"foreign_cores"` // used by others while ours ran, the worst row's median
	Arch         string  `json:"arch"`
	Kernel       string  `json:"kernel"`
	Go           string  `json:"go"`
}

// Contestant says what stands behind a name.
type Contestant struct {
	Name      string `json:"name"`
	Transport string `json:"transport"`
	What      string `json:"what"`
}

// Row is one setting, measured with everybody who can do it.
type Row struct {
	Part         string      `json:"part"` // sizes, batches, lanes or engines
	Transport    string      `json:"transport"`
	BlockBytes   int         `json:"block_bytes"`
	BatchBlocks  int         `json:"batch_blocks"`    // a request, one request at a time; 0: as many as a lease holds, several leases at a time
	Lanes        int         `json:"lanes"`           // of a channel; 0: the daemon's choice
	Engines      int         `json:"engines"`         // pairs of engines at a time
	Rails        int         `json:"rails,omitempty"` // of RDMA, in the part of that name
	RailShares   []RailShare `json:"rail_shares,omitempty"`
	Verified     int64       `json:"verified_bytes"`
	SetupMicros  float64     `json:"setup_us"`      // median of present and bind until P knows, a lease
	ForeignCores float64     `json:"foreign_cores"` // used by others while ours ran, median
	Ours         Series      `json:"ours"`
	Others       []Other     `json:"others"`
	Fairness     *Fairness   `json:"fairness,omitempty"`
}

// RailShare is what a rail has carried of all that its channel sent.
type RailShare struct {
	Name  string  `json:"name"`
	Share float64 `json:"share"`
}

// Series is what one contestant did: medians of its runs.
type Series struct {
	GBps     float64   `json:"gb_per_s"`
	GBpsMin  float64   `json:"gb_per_s_min"`
	GBpsMax  float64   `json:"gb_per_s_max"`
	CPUPerGB float64   `json:"cpu_s_per_gb"` // of all processes that take part
	Runs     []Measure `json:"runs"`
}

// Other is a contestant beside ours. Ratios are ours over theirs, of the runs next to each other.
type Other struct {
	Name string `json:"name"`
	Series
	Ratio    float64 `json:"ratio"`
	RatioMin float64 `json:"ratio_min"`
	RatioMax float64 `json:"ratio_max"`
	CPURatio float64 `json:"cpu_ratio"`
}

// Fairness is how evenly engines on one daemon are served, the medians of the rounds.
type Fairness struct {
	Jain       float64   `json:"jain"` // (sum x)^2 / (n sum x^2): 1 is even, 1/n is one engine only
	MinOverMax float64   `json:"min_over_max"`
	GBps       []float64 `json:"gb_per_s"` // of each engine
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

// over is a ratio that JSON can hold: 0 where there is none.
func over(a, b float64) float64 {
	if b == 0 {
		return 0
	}
	return a / b
}

// LatencyRow is one block at a time, each written when the one before has landed.
type LatencyRow struct {
	Transport  string         `json:"transport"`
	BlockBytes int            `json:"block_bytes"`
	Name       string         `json:"name"`
	Samples    int            `json:"samples"`
	P50        float64        `json:"p50_us"`
	P90        float64        `json:"p90_us"`
	P99        float64        `json:"p99_us"`
	P999       float64        `json:"p99_9_us"`
	Max        float64        `json:"max_us"`
	Rounds     []LatencyRound `json:"rounds"`
}

// PostRow is what posting scattered blocks to a provider that does nothing takes: medians of the rounds.
type PostRow struct {
	Blocks   int     `json:"blocks"`
	Ours     float64 `json:"ours_us"`
	Loop     float64 `json:"c_loop_us"`  // plain C, one request a call
	Chain    float64 `json:"c_chain_us"` // plain C, chains of 64
	Ratio    float64 `json:"ratio"`      // ours to the faster of the two, median of the rounds
	PerSec   float64 `json:"posts_per_s"`
	RatioMin float64 `json:"ratio_min"`
	RatioMax float64 `json:"ratio_max"`
}

// LatencyRound is one round of it.
type LatencyRound struct {
	P50 float64 `json:"p50_us"`
	P99 float64 `json:"p99_us"`
}

// ThisMachine describes the machine that this runs on.
func ThisMachine() Machine {
	var u unix.Utsname
	_ = unix.Uname(&u)
	load, _ := os.ReadFile("/proc/loadavg")
	one, _, _ := strings.Cut(string(load), " ")
	return Machine{Load1: one, CPUs: runtime.NumCPU(), Arch: runtime.GOARCH, Kernel: unix.ByteSliceToString(u.Release[:]), Go: runtime.Version()}
}

// rows of a part.
func (r *Report) rows(part, transport string) []*Row {
	var list []*Row
	for i := range r.Rows {
		if w := &r.Rows[i]; w.Part == part && w.Transport == transport {
			list = append(list, w)
		}
	}
	return list
}

func (r *Report) latency(transport string, block int, name string) *LatencyRow {
	for i := range r.Latency {
		if l := &r.Latency[i]; l.Transport == transport && l.BlockBytes == block && l.Name == name {
			return l
		}
	}
	return nil
}

func (r *Row) other(name string) *Other {
	for i := range r.Others {
		if r.Others[i].Name == name {
			return &r.Others[i]
		}
	}
	return nil
}

// otherLike is the contestant whose name begins so.
func (r *Row) otherLike(prefix string) *Other {
	for i := range r.Others {
		if strings.HasPrefix(r.Others[i].Name, prefix) {
			return &r.Others[i]
		}
	}
	return nil
}

// alike is the contestant of that name with the congestion control of our lanes, where it was measured.
func (r *Row) alike(name string) *Other {
	for _, with := range []string{" ", " -C "} {
		if o := r.other(name + with + lanesControl()); o != nil {
			return o
		}
	}
	return r.other(name)
}
