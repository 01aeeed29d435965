package pairsim

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/headrace/headrace/router/pairing"
)

// Row is what one policy came to.
type Row struct {
	Policy    string  `json:"policy"`
	TTFTMean  float64 `json:"ttft_mean_s"`
	TTFTP50   float64 `json:"ttft_p50_s"`
	TTFTP99   float64 `json:"ttft_p99_s"`
	ITLMean   float64 `json:"itl_mean_s"`
	HitRate   float64 `json:"hit_rate"`
	Pairs     float64 `json:"paired"` // share of the requests that two workers served
	RandomsBy float64 `json:"ttft_random_over_this,omitempty"`
	// EstimateP50 is what the policy took for the time to the first token, and EstimateOffP50 how far that was from the time that
	// came, up or down; both are medians. 0 for policies that do not estimate.
	EstimateP50    float64 `json:"estimate_p50_s,omitempty"`
	EstimateOffP50 float64 `json:"estimate_off_p50_s,omitempty"`
	// CPUs is how many were busy with clients, router and engines in the mean. 0 when simulated.
	CPUs float64 `json:"cpus,omitempty"`
	// LateP99 is how late requests were sent, 99 of 100 of them; times count from when they were due. 0 when simulated.
	LateP99 float64 `json:"sent_late_p99_s,omitempty"`
}

// Report is a comparison.
type Report struct {
	// Measured: with processes and in real time, else simulated.
	Measured bool    `json:"measured"`
	Requests int     `json:"requests"`
	Prefill  int     `json:"prefill_workers"`
	Decode   int     `json:"decode_workers"`
	Speedup  float64 `json:"speedup"`
	Offered  float64 `json:"offered_requests_per_s"`
	// Saturation is what random serves of this trace when all of it is there at once.
	Saturation float64 `json:"random_saturation_requests_per_s"`
	Load       float64 `json:"load"`
	Timing     Timing  `json:"timing"`
	// PooledHitRate is that of one cache as large as those of all workers that prefill, in the order of the trace.
	PooledHitRate float64 `json:"pooled_lru_hit_rate"`
	Seed          uint64  `json:"seed"`
	Rows          []Row   `json:"rows"`
}

func (o *Options) setDefaults() error {
	if o.Prefill == 0 && o.Decode == 0 {
		o.Decode = 8
	}
	if o.Timing == (Timing{}) {
		o.Timing = DefaultTiming()
	}
	if len(o.Policies) == 0 {
		o.Policies = pairing.Names
	}
	if o.Speedup == 0 {
		o.Speedup = 20
	}
	if o.Load == 0 {
		o.Load = 0.8
	}
	t := &o.Timing
	switch {
	case o.Prefill < 0 || o.Decode < 1:
		return fmt.Errorf("%d prefill and %d decode workers: at least one must decode", o.Prefill, o.Decode)
	case o.Speedup < 0 || o.Load < 0:
		return fmt.Errorf("speedup %v and load %v must be positive", o.Speedup, o.Load)
	case t.PrefillRate <= 0 || t.Step <= 0 || t.StepStream < 0 || t.ChunkTokens < 1 || t.Blocks < 1 || t.Streams < 1 || t.ChannelBps <= 0 || t.TokenBytes <= 0:
		return fmt.Errorf("timing %+v: each part must be positive", *t)
	}
	return nil
}

// offered is how many requests a second the trace has at a speed.
func offered(trace []Request, speedup float64) (float64, error) {
	if len(trace) == 0 || trace[len(trace)-1].At == trace[0].At {
		return 0, fmt.Errorf("a trace of %d requests without time between them cannot be offered at a rate", len(trace))
	}
	return float64(len(trace)) / ((trace[len(trace)-1].At - trace[0].At) / 1000 / speedup), nil
}

// calibrated finds how fast engines must be for the trace to be the part of random's saturation that the options say, and tells
// that saturation, in requests a second, at that speed.
func (o *Options) calibrated(trace []Request) (Timing, float64, error) {
	rate, err := offered(trace, o.Speedup)
	if err != nil {
		return Timing{}, 0, err
	}
	full, err := run(trace, o, o.Timing, &pairing.Random{Seed: o.Seed}, 0)
	if err != nil {
		return Timing{}, 0, fmt.Errorf("measure random's saturation: %w", err)
	}
	// All at once, everything takes so much longer as the engines are slower: their speed for the load follows.
	k := rate / (o.Load * full.rate())
	return o.Timing.Faster(k), full.rate() * k, nil
}

// Plan is the report of a comparison before it: the load and the engines' speed. It sets the options' defaults.
func Plan(trace []Request, o *Options) (*Report, error) {
	if err := o.setDefaults(); err != nil {
		return nil, err
	}
	r := &Report{Requests: len(trace), Prefill: o.Prefill, Decode: o.Decode, Speedup: o.Speedup, Load: o.Load, Seed: o.Seed}
	var err error
	if r.Offered, err = offered(trace, o.Speedup); err != nil {
		return nil, err
	}
	if r.Timing, r.Saturation, err = o.calibrated(trace); err != nil {
		return nil, err
	}
	caches := o.Prefill
	if caches == 0 {
		caches = o.Decode
	}
	r.PooledHitRate = PooledHits(trace, caches*r.Timing.Blocks)
	return r, nil
}

// Compare runs each policy over the trace.
func Compare(trace []Request, o Options) (*Report, error) {
	r, err := Plan(trace, &o)
	if err != nil {
		return nil, err
	}
	for _, name := range o.Policies {
		policy, err := pairing.New(name, o.Seed)
		if err != nil {
			return nil, err
		}
		s, err := run(trace, &o, r.Timing, policy, o.Speedup)
		if err != nil {
			return nil, fmt.Errorf("run %s: %w", name, err)
		}
		r.Rows = append(r.Rows, s.row(len(trace)))
	}
	r.Relate()
	return r, nil
}

// Relate sets what rows are beside random's.
func (r *Report) Relate() {
	i := slices.IndexFunc(r.Rows, func(x Row) bool { return x.Policy == pairing.NameRandom })
	for k := range r.Rows {
		if i >= 0 {
			r.Rows[k].RandomsBy = r.Rows[i].TTFTMean / r.Rows[k].TTFTMean
		}
	}
}

// Estimates are those of a run beside what came. The zero value has none.
type Estimates struct{ all, off []float64 }

// Add takes one request's, in seconds.
func (e *Estimates) Add(estimate, came float64) {
	e.all = append(e.all, estimate)
	e.off = append(e.off, math.Abs(estimate-came))
}

// Into sets what a row says of them, and sorts them.
func (e *Estimates) Into(x *Row) {
	if n := len(e.all); n > 0 {
		slices.Sort(e.all)
		slices.Sort(e.off)
		x.EstimateP50, x.EstimateOffP50 = e.all[n/2], e.off[n/2]
	}
}

func (s *sim) row(requests int) Row {
	slices.Sort(s.ttft)
	var sum time.Duration
	for _, t := range s.ttft {
		sum += t
	}
	n := len(s.ttft)
	x := Row{Policy: s.policy.Name(), TTFTMean: sum.Seconds() / float64(n), TTFTP50: s.ttft[n/2].Seconds(), TTFTP99: s.ttft[n*99/100].Seconds(),
		HitRate: float64(s.hit) / float64(s.all), Pairs: float64(s.pairs) / float64(requests)}
	s.estimates.Into(&x)
	if s.itlTokens > 0 {
		x.ITLMean = s.itl.Seconds() / float64(s.itlTokens)
	}
	return x
}

// Missed says which of joint's targets the report misses, "" for none: half of random's mean time to the first token, less than
// that of each other policy, and a hit rate within 3 points of that of one cache as large as all.
func (r *Report) Missed() string {
	i := slices.IndexFunc(r.Rows, func(x Row) bool { return x.Policy == pairing.NameJoint })
	if i < 0 {
		return "joint was not measured"
	}
	joint := &r.Rows[i]
	var missed []string
	for _, x := range r.Rows {
		if x.Policy != joint.Policy && x.TTFTMean <= joint.TTFTMean {
			missed = append(missed, fmt.Sprintf("%s is faster than joint", x.Policy))
		}
		if x.Policy == pairing.NameRandom && x.TTFTMean < 2*joint.TTFTMean {
			missed = append(missed, fmt.Sprintf("joint is %.2f times as fast as random, not 2", x.TTFTMean/joint.TTFTMean))
		}
	}
	if short := r.PooledHitRate - joint.HitRate; short > 0.03 {
		missed = append(missed, fmt.Sprintf("joint's hit rate is %.1f points below that of one cache", 100*short))
	}
	return strings.Join(missed, "; ")
}

// Print writes a report, as a table or as one JSON document.
func Print(w io.Writer, r *Report, asJSON bool) error {
	if asJSON {
		e := json.NewEncoder(w)
		e.SetIndent("", "  ")
		return e.Encode(r)
	}
	workers := fmt.Sprintf("%d workers that serve whole requests", r.Decode)
	if r.Prefill > 0 {
		workers = fmt.Sprintf("%d prefill and %d decode workers", r.Prefill, r.Decode)
	}
	how := "Simulated"
	if r.Measured {
		how = "Measured with stand-ins"
	}
	fmt.Fprintf(w, "%d requests at %gx time (%.1f a second, %.0f %% of random's saturation) to %s,\n%.0f prompt tokens a second each, KV cache of %d tokens each. %s, seed %d.\n\n",
		r.Requests, r.Speedup, r.Offered, 100*r.Load, workers, r.Timing.PrefillRate, r.Timing.Blocks*BlockTokens, how, r.Seed)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(t, "policy\tTTFT mean\tp50\tp99\trandom's / this\tITL mean\thit rate\tpaired\tguessed p50\toff by\tCPUs\t\n")
	for _, x := range r.Rows {
		by := "-"
		if x.RandomsBy > 0 {
			by = fmt.Sprintf("%.2f", x.RandomsBy)
		}
		estimated, off, cpus := "-", "-", "-"
		if x.EstimateP50 > 0 {
			estimated, off = fmt.Sprintf("%.0f ms", 1e3*x.EstimateP50), fmt.Sprintf("%.0f ms", 1e3*x.EstimateOffP50)
		}
		if x.CPUs > 0 {
			cpus = fmt.Sprintf("%.1f", x.CPUs)
		}
		fmt.Fprintf(t, "%s\t%.0f ms\t%.0f ms\t%.0f ms\t%s\t%.2f ms\t%.1f %%\t%.0f %%\t%s\t%s\t%s\t\n", x.Policy, 1e3*x.TTFTMean, 1e3*x.TTFTP50, 1e3*x.TTFTP99, by, 1e3*x.ITLMean, 100*x.HitRate, 100*x.Pairs, estimated, off, cpus)
	}
	fmt.Fprintf(t, "one LRU of all\t\t\t\t\t\t%.1f %%\t\t\t\t\t\n", 100*r.PooledHitRate)
	return t.Flush()
}
