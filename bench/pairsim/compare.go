package pairsim

import (
	"encoding/json"
	"fmt"
	"io"
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
}

// Report is a comparison.
type Report struct {
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

// Compare runs each policy over the trace.
func Compare(trace []Request, o Options) (*Report, error) {
	if err := o.setDefaults(); err != nil {
		return nil, err
	}
	if len(trace) == 0 || trace[len(trace)-1].At == 0 {
		return nil, fmt.Errorf("a trace of %d requests without time between them cannot be offered at a rate", len(trace))
	}
	r := &Report{Requests: len(trace), Prefill: o.Prefill, Decode: o.Decode, Speedup: o.Speedup, Load: o.Load, Seed: o.Seed}
	r.Offered = float64(len(trace)) / (trace[len(trace)-1].At / 1000 / o.Speedup)
	full, err := run(trace, &o, o.Timing, &pairing.Random{Seed: o.Seed}, 0)
	if err != nil {
		return nil, fmt.Errorf("measure random's saturation: %w", err)
	}
	// All at once, everything takes so much longer as the engines are slower: their speed for the load follows.
	k := r.Offered / (o.Load * full.rate())
	r.Timing = o.Timing.faster(k)
	r.Saturation = full.rate() * k
	caches := o.Prefill
	if caches == 0 {
		caches = o.Decode
	}
	r.PooledHitRate = pooledHits(trace, caches*r.Timing.Blocks)
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
	if i := slices.IndexFunc(r.Rows, func(x Row) bool { return x.Policy == pairing.NameRandom }); i >= 0 {
		for k := range r.Rows {
			r.Rows[k].RandomsBy = r.Rows[i].TTFTMean / r.Rows[k].TTFTMean
		}
	}
	return r, nil
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
	fmt.Fprintf(w, "%d requests at %gx time (%.1f a second, %.0f %% of random's saturation) to %s,\n%.0f prompt tokens a second each, KV cache of %d tokens each. Simulated, seed %d.\n\n",
		r.Requests, r.Speedup, r.Offered, 100*r.Load, workers, r.Timing.PrefillRate, r.Timing.Blocks*BlockTokens, r.Seed)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(t, "policy\tTTFT mean\tp50\tp99\trandom's / this\tITL mean\thit rate\tpaired\t\n")
	for _, x := range r.Rows {
		by := "-"
		if x.RandomsBy > 0 {
			by = fmt.Sprintf("%.2f", x.RandomsBy)
		}
		fmt.Fprintf(t, "%s\t%.0f ms\t%.0f ms\t%.0f ms\t%s\t%.2f ms\t%.1f %%\t%.0f %%\t\n", x.Policy, 1e3*x.TTFTMean, 1e3*x.TTFTP50, 1e3*x.TTFTP99, by, 1e3*x.ITLMean, 100*x.HitRate, 100*x.Pairs)
	}
	fmt.Fprintf(t, "one LRU of all\t\t\t\t\t\t%.1f %%\t\t\n", 100*r.PooledHitRate)
	return t.Flush()
}
