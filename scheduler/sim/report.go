package sim

import (
	"math"
	"slices"
	"time"

	"github.com/headrace/headrace/scheduler/planner"
)

// Spread tells of times, in milliseconds.
type Spread struct {
	Mean float64 `json:"mean"`
	P50  float64 `json:"p50"`
	P90  float64 `json:"p90"`
	P99  float64 `json:"p99"`
}

// Point is what there was at a moment, for plots.
type Point struct {
	At                     time.Duration
	Prefill, Decode, Whole int // engines that are ready
	GPUs                   int // with those that start and drain
	Waiting                int
	KVUsage                float64 // of engines that decode
	Arrived                int     // requests since the point before
	Good                   int     // of those that ended since the point before
	Ended                  int
}

// Report is what came of a run. Requests and GPU time are those between Options.From and To.
type Report struct {
	Planner  string `json:"planner"`
	Runs     int    `json:"runs,omitempty"` // that Merge took as one
	Requests int    `json:"requests"`
	Done     int    `json:"done"`
	// Refused needed more KV cache than an engine has. Unfinished had not ended when the run was.
	Refused    int `json:"refused"`
	Unfinished int `json:"unfinished"`
	// Good requests kept to both goals. GoodShare is their share of Requests.
	Good      int     `json:"good"`
	GoodShare float64 `json:"good_share"`
	// GoodPerGPUSecond is Good over GPUSeconds, those of engines that start and drain included.
	GoodPerGPUSecond float64 `json:"good_per_gpu_s"`
	GPUSeconds       float64 `json:"gpu_s"`
	GPUHours         float64 `json:"gpu_h"`
	GPUsMean         float64 `json:"gpus_mean"`
	GPUsMost         int     `json:"gpus_most"` // in the whole run
	// LateFirst and LateTokens are how many of Done missed which goal.
	LateFirst  int     `json:"late_first"`
	LateTokens int     `json:"late_tokens"`
	TTFT       Spread  `json:"ttft_ms"`
	ITL        Spread  `json:"itl_ms"` // of requests' means
	GapP99     float64 `json:"gap_p99_ms"`
	HitShare   float64 `json:"hit_share"` // of prompts' tokens that were cached
	Acts       int     `json:"acts"`      // in the whole run
	Moved      int     `json:"moved"`     // streams that went on elsewhere because their engine drained

	Points []Point `json:"-"`

	ttft, itl   []float64
	gap         [400]int64 // tokens by the step's time, a bucket each 5 %
	all, cached int64
	gpuFrom     int64 // GPU time until the window's begin and end
	gpuTo       int64
	from, to    int64
	begun       bool
	point       Point
}

const (
	gapLeast = 1e4 // ns
	gapRatio = 1.05
	pointGap = 10 * time.Second
)

func (r *Report) begin(name string) { *r = Report{Planner: name} }

// arrived is a request that comes, before anything is done about it.
func (r *Report) arrived(s *sim) {
	r.point.Arrived++
	if !s.counts() {
		return
	}
	s.account(0)
	if !r.begun {
		r.begun, r.gpuFrom, r.from = true, s.gpuNs, s.now
	}
	r.gpuTo, r.to = s.gpuNs, s.now
	r.Requests++
}

func (r *Report) refused(q *request) {
	if q.counted {
		r.Refused++
	}
}

func (r *Report) finished(s *sim, q *request, d *planner.Done) {
	early, steady := d.TTFT <= s.o.TTFT, d.ITL <= s.o.ITL
	r.point.Ended++
	if early && steady {
		r.point.Good++
	}
	if !q.counted {
		return
	}
	r.Done++
	r.ttft = append(r.ttft, d.TTFT.Seconds()*1e3)
	if q.Output > 1 {
		r.itl = append(r.itl, d.ITL.Seconds()*1e3)
	}
	r.all += int64(q.Prompt)
	r.cached += int64(q.cached)
	if !early {
		r.LateFirst++
	}
	if !steady {
		r.LateTokens++
	}
	if early && steady {
		r.Good++
	}
}

// gaps are so many tokens that came took after those before.
func (r *Report) gaps(s *sim, took int64, streams int) {
	if !s.counts() {
		return
	}
	i := 0
	if took > gapLeast {
		i = min(int(math.Log(float64(took)/gapLeast)/math.Log(gapRatio)), len(r.gap)-1)
	}
	r.gap[i] += int64(streams)
}

// looked adds a point each while.
func (r *Report) looked(s *sim, o *planner.Observation) {
	if n := len(r.Points); n > 0 && o.At-r.Points[n-1].At < pointGap {
		return
	}
	p := r.point
	p.At, p.GPUs = o.At, s.gpus
	p.Prefill, p.Decode, p.Whole = o.Prefill.Ready, o.Decode.Ready, o.Whole.Ready
	p.Waiting = o.Prefill.Waiting + o.Decode.Waiting + o.Whole.Waiting
	p.KVUsage = o.Decode.KVUsage + o.Whole.KVUsage
	r.Points = append(r.Points, p)
	r.point = Point{}
}

// end computes what follows from the rest.
func (r *Report) end(s *sim) {
	r.Unfinished = r.Requests - r.Done - r.Refused
	r.GPUSeconds = float64(r.gpuTo-r.gpuFrom) / 1e9
	r.GPUHours = r.GPUSeconds / 3600
	r.shares()
	if r.GPUSeconds > 0 {
		r.GPUsMean = r.GPUSeconds / (float64(r.to-r.from) / 1e9)
	}
	if r.all > 0 {
		r.HitShare = float64(r.cached) / float64(r.all)
	}
	r.TTFT, r.ITL = spread(r.ttft), spread(r.itl)
	r.GapP99 = r.gapAt(0.99)
	r.ttft, r.itl = nil, nil
}

func (r *Report) gapAt(part float64) float64 {
	var all, n int64
	for _, k := range r.gap {
		all += k
	}
	if all == 0 {
		return 0
	}
	for i, k := range r.gap {
		if n += k; float64(n) >= part*float64(all) {
			return gapLeast * math.Pow(gapRatio, float64(i)+0.5) / 1e6
		}
	}
	return 0
}

func spread(ms []float64) Spread {
	if len(ms) == 0 {
		return Spread{}
	}
	slices.Sort(ms)
	sum := 0.0
	for _, v := range ms {
		sum += v
	}
	at := func(part float64) float64 { return ms[min(int(part*float64(len(ms))), len(ms)-1)] }
	return Spread{Mean: sum / float64(len(ms)), P50: at(0.5), P90: at(0.9), P99: at(0.99)}
}

// Merge takes several runs of one planner as one: counts and GPU time are summed, what is a mean or a percentile is the runs' mean. Points are the
// first one's.
func Merge(runs []*Report) *Report {
	if len(runs) == 1 {
		runs[0].Runs = 1
		return runs[0]
	}
	all := &Report{Planner: runs[0].Planner, Runs: len(runs), Points: runs[0].Points}
	part := 1 / float64(len(runs))
	add := func(to *Spread, s Spread) {
		to.Mean += s.Mean * part
		to.P50 += s.P50 * part
		to.P90 += s.P90 * part
		to.P99 += s.P99 * part
	}
	for _, r := range runs {
		all.Requests += r.Requests
		all.Done += r.Done
		all.Refused += r.Refused
		all.Unfinished += r.Unfinished
		all.Good += r.Good
		all.GPUSeconds += r.GPUSeconds
		all.GPUHours += r.GPUHours
		all.LateFirst += r.LateFirst
		all.LateTokens += r.LateTokens
		all.Acts += r.Acts
		all.Moved += r.Moved
		all.GPUsMost = max(all.GPUsMost, r.GPUsMost)
		all.GPUsMean += r.GPUsMean * part
		all.GapP99 += r.GapP99 * part
		all.HitShare += r.HitShare * part
		add(&all.TTFT, r.TTFT)
		add(&all.ITL, r.ITL)
	}
	all.shares()
	return all
}

// shares are what follows from counts.
func (r *Report) shares() {
	if r.Requests > 0 {
		r.GoodShare = float64(r.Good) / float64(r.Requests)
	}
	if r.GPUSeconds > 0 {
		r.GoodPerGPUSecond = float64(r.Good) / r.GPUSeconds
	}
}
