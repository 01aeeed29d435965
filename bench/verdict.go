package bench

import (
	"fmt"
	"math"
	"strings"
)

// Verdict is a target and whether this run met it.
type Verdict struct {
	Target   string   `json:"target"`
	State    string   `json:"state"` // holds, does not hold or not measured
	Measured *float64 `json:"measured,omitempty"`
	Detail   string   `json:"detail"`
}

// States of a verdict.
const (
	Holds       = "holds"
	Fails       = "does not hold"
	NotMeasured = "not measured"
)

// Failed says whether a target that was measured was missed.
func (r *Report) Failed() bool {
	for _, v := range r.Verdicts {
		if v.State == Fails {
			return true
		}
	}
	return false
}

// verdict judges a measured value, NaN for none.
func verdict(target string, value float64, holds bool, detail string) Verdict {
	v := Verdict{Target: target, State: NotMeasured, Detail: detail}
	if math.IsNaN(value) {
		return v
	}
	v.Measured, v.State = &value, Fails
	if holds {
		v.State = Holds
	}
	return v
}

func (r *Report) judge() {
	r.Verdicts = []Verdict{
		r.atLeast("TCP, 64 KiB: at least 0.9 of the scattered loop", 0.9, 64*kib, loopTCP, (*Row).other),
		r.atLeast("TCP, 64 KiB: the same, both with our lanes' congestion control", 0.9, 64*kib, loopTCP, (*Row).alike),
		r.atLeast("TCP, 64 KiB: at least 0.75 of iperf3 -l 1M", 0.75, 64*kib, iperf1M, (*Row).other),
		r.atLeast("TCP, 64 KiB: the same, both with our lanes' congestion control", 0.75, 64*kib, iperf1M, (*Row).alike),
		r.bestPeer(),
		r.leastCPU("tcp"),
		r.oneCopier(),
		r.twoCopiers(),
		r.peerLatency("TCP, one 64 KiB block: p50 at most 2 of NIXL's", 2, func(l *LatencyRow) float64 { return l.P50 }),
		r.peerLatency("TCP, one 64 KiB block: p99 at most NIXL's", 1, func(l *LatencyRow) float64 { return l.P99 }),
		r.localLatency(),
		r.writeBandwidth("RDMA, 64 KiB and above: at least 0.9 of ib_write_bw (least)", 0.9, 64*kib, math.MaxInt, false),
		r.writeBandwidth("RDMA, 64 KiB and above: the same, with as many queue pairs as our lanes", 0.9, 64*kib, math.MaxInt, true),
		r.writeBandwidth("RDMA, 16 KiB: at least 0.8 of ib_write_bw", 0.8, 16*kib, 16*kib, false),
		r.writeBandwidth("RDMA, 16 KiB: the same, with as many queue pairs as our lanes", 0.8, 16*kib, 16*kib, true),
		r.postCost(),
	}
}

// atLeast compares with the host's own congestion control (other) or, where that is another, with that of our lanes (alike).
func (r *Report) atLeast(target string, least float64, block int, name string, find func(*Row, string) *Other) Verdict {
	for _, row := range r.rows(partSizes, "tcp") {
		if o := find(row, name); row.BlockBytes == block && o != nil {
			return verdict(target, o.Ratio, o.Ratio >= least, fmt.Sprintf("%.2f beside %.2f GB/s of %s, %.2f-%.2f", row.Ours.GBps, o.GBps, o.Name, o.RatioMin, o.RatioMax))
		}
	}
	return verdict(target, math.NaN(), false, "")
}

// bestPeer compares with the faster of the peers, by their medians.
func (r *Report) bestPeer() Verdict {
	const target = "TCP, 16 KiB: at least 2 of the better of Mooncake and NIXL"
	for _, row := range r.rows(partSizes, "tcp") {
		m, n := row.other(mooncake), row.other(nixl)
		if row.BlockBytes != 16*kib || m == nil || n == nil {
			continue
		}
		best := m
		if n.GBps > m.GBps {
			best = n
		}
		return verdict(target, best.Ratio, best.Ratio >= 2, fmt.Sprintf("%.2f beside %.2f GB/s of %s", row.Ours.GBps, best.GBps, best.Name))
	}
	return verdict(target, math.NaN(), false, "")
}

// leastCPU gives the worst ratio over all sizes and peers.
func (r *Report) leastCPU(transport string) Verdict {
	worst, detail := math.NaN(), []string{}
	for _, row := range r.rows(partSizes, transport) {
		if row.other(mooncake) != nil || row.other(nixl) != nil {
			detail = append(detail, size(row.BlockBytes))
		}
		for _, name := range []string{mooncake, nixl} {
			o := row.other(name)
			if o == nil {
				continue
			}
			if !(o.CPURatio <= worst) {
				worst = o.CPURatio
			}
			if o.CPURatio >= 1 {
				detail = append(detail, fmt.Sprintf("where %.2f s/GB beside %.2f of %s", row.Ours.CPUPerGB, o.CPUPerGB, name))
			}
		}
	}
	return verdict("TCP, every size: less CPU a GB than Mooncake and NIXL (worst ratio)", worst, worst < 1, strings.Join(detail, ", "))
}

// copiers gives the ratio to the one-thread loop at 64 KiB and above, with that many copiers.
func (r *Report) copiers(lanes int) map[int]*Other {
	found := map[int]*Other{}
	for _, row := range r.rows(partLanes, "shm") {
		if o := row.other(loopCopy1); o != nil && row.Lanes == lanes && row.BlockBytes >= 64*kib {
			found[row.BlockBytes] = o
		}
	}
	return found
}

func (r *Report) oneCopier() Verdict {
	worst := math.NaN()
	for _, o := range r.copiers(1) {
		if !(o.Ratio >= worst) {
			worst = o.Ratio
		}
	}
	return verdict("local copy with one copier, 64 KiB and above: at least 0.9 of one thread over the same block list (least)", worst, worst >= 0.9, "")
}

func (r *Report) twoCopiers() Verdict {
	worst, one := math.NaN(), r.copiers(1)
	least := math.NaN()
	for block, o := range r.copiers(2) {
		if one[block] == nil {
			continue
		}
		if gain := o.Ratio / one[block].Ratio; !(gain >= worst) {
			worst = gain
		}
		if !(o.Ratio >= least) {
			least = o.Ratio
		}
	}
	detail := ""
	if !math.IsNaN(least) {
		detail = fmt.Sprintf("%.2f of one thread and more", least)
	}
	return verdict("local copy with two copiers, 64 KiB and above: more than with one (least gain)", worst, worst > 1, detail)
}

func (r *Report) peerLatency(target string, most float64, of func(*LatencyRow) float64) Verdict {
	us, them := r.latency("tcp", 64*kib, ours), r.latency("tcp", 64*kib, nixl)
	if us == nil || them == nil {
		return verdict(target, math.NaN(), false, "")
	}
	ratio := of(us) / of(them)
	return verdict(target, ratio, ratio <= most, fmt.Sprintf("%.0f beside %.0f us, by %s", of(us), of(them), r.Submission))
}

func (r *Report) localLatency() Verdict {
	const target = "local copy, one 64 KiB block by ring: p50 under 20 us"
	us := r.latency("shm", 64*kib, ours)
	if us == nil {
		return verdict(target, math.NaN(), false, "")
	}
	return verdict(target, us.P50, us.P50 < 20 && r.Submission == "ring", "by "+r.Submission)
}

// writeBandwidth gives the worst ratio over a range of block sizes, to ib_write_bw with one queue pair or with many.
func (r *Report) writeBandwidth(target string, least float64, from, to int, many bool) Verdict {
	worst, detail := math.NaN(), ""
	for _, row := range r.rows(partSizes, "rdma") {
		o := row.other(writeBW)
		if many {
			o = row.otherLike(writeBW + " -q ")
		}
		if o == nil || row.BlockBytes < from || row.BlockBytes > to || o.Ratio >= worst {
			continue
		}
		worst, detail = o.Ratio, fmt.Sprintf("%.1f beside %.1f MB/s at %s, %.2f-%.2f", row.Ours.GBps*1e3, o.GBps*1e3, size(row.BlockBytes), o.RatioMin, o.RatioMax)
	}
	return verdict(target, worst, worst >= least, detail)
}

func (r *Report) postCost() Verdict {
	const target = "posting 1,000 blocks to a provider that does nothing: at most 2 of a plain C loop"
	for _, p := range r.Posts {
		if p.Blocks == 1000 {
			return verdict(target, p.Ratio, p.Ratio <= 2, fmt.Sprintf("%.1f beside %.1f us, %.2f-%.2f", p.Ours, min(p.Loop, p.Chain), p.RatioMin, p.RatioMax))
		}
	}
	return verdict(target, math.NaN(), false, "")
}
