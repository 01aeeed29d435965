package telemetry

import (
	"math"
	"slices"
)

// Status says what is measured how, and why so.
type Status struct {
	Mode    Mode         `json:"mode"`
	Sources []Source     `json:"sources"`
	Rails   []RailStatus `json:"rails"`
	Posts   PostTimes    `json:"posts"`
}

// Source is where figures of a kind come from.
type Source struct {
	Of   string `json:"of"`     // sockets, packets or posts
	From string `json:"source"` // ebpf, kernel or none
	Why  string `json:"why"`
}

// PostTimes sum up times from posting to completion. Percentiles are upper bounds of slots that double.
type PostTimes struct {
	Count      uint64  `json:"count"`
	MeanMicros float64 `json:"mean_us"`
	P50Micros  float64 `json:"p50_us"`
	P99Micros  float64 `json:"p99_us"`
}

// Status is a snapshot.
func (t *Telemetry) Status() Status {
	if t == nil {
		return Status{Mode: Off, Sources: []Source{}, Rails: []RailStatus{}}
	}
	s := Status{Mode: t.cfg.Mode, Rails: t.Rails()}
	from := func(attached bool, other string) string {
		if attached {
			return sourceEBPF
		}
		if t.cfg.Mode == Off {
			return sourceNone
		}
		return other
	}
	s.Sources = []Source{
		{"sockets", from(t.sockets != nil, sourceKernel), t.why["sockets"]},
		{"packets", from(t.packets != nil, sourceKernel), t.why["packets"]},
		{"posts", from(t.posts != nil, sourceNone), t.why["posts"]},
	}
	if times, ok := t.Times(); ok {
		s.Posts = times.sum()
	}
	return s
}

// Times are those from posting to completion, of all RDMA lanes so far; ok says that they are measured.
func (t *Telemetry) Times() (times Times, ok bool) {
	if t == nil || t.posts == nil {
		return times, false
	}
	times, err := t.posts.times()
	return times, err == nil
}

func (t *Times) sum() PostTimes {
	p := PostTimes{Count: t.Count, P50Micros: t.quantile(0.5), P99Micros: t.quantile(0.99)}
	if t.Count > 0 {
		p.MeanMicros = float64(t.SumNS) / float64(t.Count) / 1e3
	}
	return p
}

// quantile is the upper bound of the slot in which that share of all is reached.
func (t *Times) quantile(share float64) float64 {
	want, sum := share*float64(t.Count), 0.0
	i := slices.IndexFunc(t.Slots[:], func(n uint64) bool {
		sum += float64(n)
		return n > 0 && sum >= want
	})
	if i < 0 {
		return 0
	}
	return math.Ldexp(1e-3, i)
}
