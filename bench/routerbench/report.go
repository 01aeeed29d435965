package routerbench

import (
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/headrace/headrace/bench"
)

// ReportVersion counts changes of the document that a reader would notice. docs/bench.md describes it.
const ReportVersion = 2

// Report is what Run found, one JSON document.
type Report struct {
	Kind        string             `json:"kind"`
	Version     int                `json:"version"`
	Time        time.Time          `json:"time"`
	Seconds     float64            `json:"seconds"`
	Complete    bool               `json:"complete"` // false: interrupted, the rest is missing
	Rounds      int                `json:"rounds"`
	RunSeconds  float64            `json:"run_seconds"`
	Machine     bench.Machine      `json:"machine"`
	Contestants []bench.Contestant `json:"contestants"`
	Rows        []Row              `json:"rows"`
	Verdicts    []bench.Verdict    `json:"verdicts"`
	NotMeasured []string           `json:"not_measured"`
}

// Row is one shape of requests, measured with everybody in turn.
type Row struct {
	Part        string   `json:"part"` // whole, pairs, open, paced or exact
	Kind        string   `json:"kind"` // json or stream
	BodyBytes   int      `json:"body_bytes"`
	Connections int      `json:"connections"`
	Rate        float64  `json:"rate,omitempty"` // requests offered a second, arriving at random; 0: as many as can be
	All         []Series `json:"series"`
}

// Series is what one contestant did: medians of its runs. Times are in microseconds.
type Series struct {
	Name     string  `json:"name"`
	RPS      float64 `json:"requests_per_s"`
	RPSMin   float64 `json:"requests_per_s_min"`
	RPSMax   float64 `json:"requests_per_s_max"`
	P50      float64 `json:"p50_us"`
	P99      float64 `json:"p99_us"`
	FirstP50 float64 `json:"first_p50_us"` // until the first byte behind the header
	FirstP99 float64 `json:"first_p99_us"`
	// Added is what is left without the direct path's of the same round.
	AddedP50 float64 `json:"added_p50_us"`
	AddedP99 float64 `json:"added_p99_us"`
	// AddedFirst is the same of the time until the first byte behind the header.
	AddedFirstP50 float64 `json:"added_first_p50_us"`
	AddedFirstP99 float64 `json:"added_first_p99_us"`
	// Stall is a stream's longest time between events, of the part paced.
	StallP50 float64 `json:"stall_p50_us,omitempty"`
	StallP99 float64 `json:"stall_p99_us,omitempty"`
	// Ratio is our rate over this one's, of the runs of the same round.
	Ratio    float64 `json:"ratio"`
	RatioMin float64 `json:"ratio_min"`
	RatioMax float64 `json:"ratio_max"`
	// Of the contestant's own processes, a request: processor time in microseconds, and how often a thread waited.
	CPU      float64 `json:"cpu_us"`
	Switches float64 `json:"switches"`
	Errors   int     `json:"errors"`
	Error    string  `json:"error,omitempty"` // one of them
}

// Series finds a contestant's.
func (r *Row) Series(name string) *Series {
	for i := range r.All {
		if r.All[i].Name == name {
			return &r.All[i]
		}
	}
	return nil
}

func (r *Report) row(part, kind string, body, conns int) *Row {
	for i := range r.Rows {
		if w := &r.Rows[i]; w.Part == part && w.Kind == kind && w.BodyBytes == body && w.Connections == conns {
			return w
		}
	}
	return nil
}

func median(v []float64) float64 {
	if len(v) == 0 {
		return 0
	}
	v = slices.Sorted(slices.Values(v))
	return (v[(len(v)-1)/2] + v[len(v)/2]) / 2
}

func each(n int, f func(i int) float64) []float64 {
	v := make([]float64, n)
	for i := range v {
		v[i] = f(i)
	}
	return v
}

// makeRow has the samples of a shape, by contestant and round.
func makeRow(part string, s shape, who []contestant, samples [][]*sample) Row {
	row := Row{Part: part, Kind: s.kind, BodyBytes: s.body, Connections: s.conns, Rate: math.Round(s.rate)}
	at := func(name string) []*sample {
		for i, c := range who {
			if c.name == name {
				return samples[i]
			}
		}
		return nil
	}
	base, us := at(direct), at(ours)
	switch part {
	case partPairs:
		us = at(oursPairs)
	case partExact:
		us = at(oursWarm)
	}
	for i, c := range who {
		x := samples[i]
		over := func(f func(*sample) float64) []float64 { return each(len(x), func(i int) float64 { return f(x[i]) }) }
		took := func(s *sample) []time.Duration { return s.took }
		first := func(s *sample) []time.Duration { return s.first }
		stalls := func(s *sample) []time.Duration { return s.stalls }
		q := func(of func(*sample) []time.Duration, p float64) float64 {
			return median(over(func(s *sample) float64 { return quantile(of(s), p) }))
		}
		added := func(of func(*sample) []time.Duration, p float64) float64 {
			return median(each(len(x), func(i int) float64 { return quantile(of(x[i]), p) - quantile(of(base[i]), p) }))
		}
		rates := over((*sample).rps)
		w := Series{Name: c.name, RPS: median(rates), RPSMin: slices.Min(rates), RPSMax: slices.Max(rates),
			P50: q(took, .5), P99: q(took, .99), FirstP50: q(first, .5), FirstP99: q(first, .99), StallP50: q(stalls, .5), StallP99: q(stalls, .99),
			AddedP50: added(took, .5), AddedP99: added(took, .99), AddedFirstP50: added(first, .5), AddedFirstP99: added(first, .99),
			CPU: 1e6 * median(over(func(s *sample) float64 { return s.cpu })), Switches: median(over(func(s *sample) float64 { return s.switches }))}
		if us != nil {
			ratios := each(len(x), func(i int) float64 { return us[i].rps() / x[i].rps() })
			w.Ratio, w.RatioMin, w.RatioMax = median(ratios), slices.Min(ratios), slices.Max(ratios)
		}
		for _, s := range x {
			if w.Errors += s.errors; s.err != nil {
				w.Error = s.err.Error()
			}
		}
		row.All = append(row.All, w)
	}
	return row
}

// Failed says whether a target that was measured was missed.
func (r *Report) Failed() bool {
	return slices.ContainsFunc(r.Verdicts, func(v bench.Verdict) bool { return v.State == bench.Fails })
}

func (r *Report) judge() {
	streams := func(w *Row) bool { return w.Kind == kindStream }
	large := func(w *Row) bool { return w.Kind == kindJSON && w.BodyBytes >= 20_000 }
	small := func(w *Row) bool { return w.Kind == kindJSON && w.BodyBytes < 20_000 }
	any := func(*Row) bool { return true }
	r.Verdicts = []bench.Verdict{
		r.rate("streams of 64 events: at least nginx's rate (worst ratio)", partWhole, 1, streams, nginx),
		r.rate("JSON of 20 KB and more: at least nginx's rate (worst ratio)", partWhole, 1, large, nginx),
		r.rate("JSON of 1 KB: at least 0.9 of nginx's rate (worst ratio)", partWhole, 0.9, small, nginx),
		r.rate("everywhere: at least 2 of sglang-router's rate (worst ratio)", partWhole, 2, any, sglang, sglangBare),
		r.addedP50(),
		r.addedP99(),
		r.rate("two legs: at least 2 of sglang-router's PD mode (worst ratio)", partPairs, 2, any, sglangPair),
		r.exactRate(),
		r.exactP99("at 1000 a second", true),
		r.exactP99("at half the peak", false),
		r.clean(),
	}
}

func verdict(target string, value float64, holds bool, detail string) bench.Verdict {
	v := bench.Verdict{Target: target, State: bench.NotMeasured, Detail: detail}
	if math.IsNaN(value) {
		return v
	}
	v.Measured, v.State = &value, bench.Fails
	if holds {
		v.State = bench.Holds
	}
	return v
}

// rate gives the worst ratio of our rate to that of the contestants named.
func (r *Report) rate(target, part string, least float64, which func(*Row) bool, names ...string) bench.Verdict {
	worst, detail := math.NaN(), ""
	for i := range r.Rows {
		w := &r.Rows[i]
		if w.Part != part || !which(w) {
			continue
		}
		for _, name := range names {
			if x := w.Series(name); x != nil && !(x.Ratio >= worst) {
				worst = x.Ratio
				detail = fmt.Sprintf("%s, %d bytes, %d connections: %.2f-%.2f of %s", w.Kind, w.BodyBytes, w.Connections, x.RatioMin, x.RatioMax, name)
			}
		}
	}
	return verdict(target, worst, worst >= least, detail)
}

const (
	addedP50Most = 150  // us
	addedP99Over = 1000 // us over nginx's
)

func (r *Report) addedP50() bench.Verdict {
	worst, detail := math.NaN(), ""
	for i := range r.Rows {
		w := &r.Rows[i]
		if x := w.Series(ours); w.Part == partOpen && x != nil && !(x.AddedP50 <= worst) {
			worst, detail = x.AddedP50, fmt.Sprintf("us: %s, %d bytes at %.0f/s", w.Kind, w.BodyBytes, w.Rate)
		}
	}
	return verdict("at half the peak: added p50 under 150 us (most)", worst, worst < addedP50Most, detail)
}

func (r *Report) addedP99() bench.Verdict {
	worst, detail := math.NaN(), ""
	for i := range r.Rows {
		w := &r.Rows[i]
		x, y := w.Series(ours), w.Series(nginx)
		if w.Part != partOpen || x == nil || y == nil {
			continue
		}
		if over := x.AddedP99 - y.AddedP99; !(over <= worst) {
			worst, detail = over, fmt.Sprintf("us: %.0f beside %.0f, %s, %d bytes at %.0f/s", x.AddedP99, y.AddedP99, w.Kind, w.BodyBytes, w.Rate)
		}
	}
	return verdict("at half the peak: added p99 at most nginx's and 1 ms (most over)", worst, worst <= addedP99Over, detail)
}

// clean wants every one of our requests answered.
func (r *Report) clean() bench.Verdict {
	errors, detail := math.NaN(), ""
	for i := range r.Rows {
		for _, name := range []string{ours, oursPairs, oursNixl, oursWarm, oursCold} {
			x := r.Rows[i].Series(name)
			if x == nil {
				continue
			}
			if math.IsNaN(errors) {
				errors = 0
			}
			if errors += float64(x.Errors); x.Error != "" {
				detail = x.Error
			}
		}
	}
	return verdict("every request of ours was answered whole (errors)", errors, errors == 0, detail)
}
